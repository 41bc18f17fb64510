#!/usr/bin/env bash
# A training run on this machine's CPUs that is hurt again and again, and heals by itself: four nodes of two ranks on
# loopback, faults in random order. It prints each fault, how the report named it, and how long the run was away.
# At the end it holds the goodput that it measured against what the planner predicts from the same run.
#   bash launch/soak.sh --faults 20 [--seed 1] [--nodes 4] [--ranks 2] [--apart 60]
# launch/venv.sh says where the environment lives and how it comes about; tests/soak_run.py lists the faults.
set -euo pipefail
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"
this=${BASH_SOURCE[0]}
cd "$(dirname "$this")/.."
source launch/venv.sh
use_venv plot
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
exec "$python" tests/soak_run.py "$@"
