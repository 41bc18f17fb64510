#!/usr/bin/env bash
# All tests that this machine can run, from nothing: an environment, the pinned installs, pytest.
#   bash tests/run.sh [PYTEST ARGUMENTS]     e.g. -k mesh, -m '' for the slow tests too, or -n 0 for one after another
# launch/venv.sh says where the environment lives and how it comes about. The tests of launch/*.sbatch need a Slurm, which
# you install: apt install slurm-wlm munge.
set -euo pipefail
this=${BASH_SOURCE[0]}
# Under sbatch that is a copy; Slurm knows where it came from, and writes the arguments behind it.
[ "${this##*/}" != slurm_script ] || this=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
cd "$(dirname "${this%" $*"}")/.."
source launch/venv.sh
use_venv plot,test
[ -x "$VENV/bin/helm" ] || PYTHON=$(find_python) bash tests/get_helm.sh "$VENV/bin" ||
    echo "No helm to be had; tests/launch/test_helm.py will be skipped"
export OMP_NUM_THREADS=1 # the tests' ranks are processes: with more threads they would fight for the cores
# Tests write and sync thousands of files, which takes long on a slow disk: they are in memory if it has 4 GB for them.
memory=/dev/shm
if [ -z "${PYTEST_DEBUG_TEMPROOT:-}" ] && [ -w $memory ] && ! grep -q " $memory .*noexec" /proc/mounts &&
    [ "$(df -Pk $memory | awk 'NR == 2 { print $4 }')" -ge 4000000 ]; then
    export PYTEST_DEBUG_TEMPROOT=$memory
fi
"$python" -m ruff check --quiet
"$python" -m ruff format --check --quiet
"$python" -m mypy --no-error-summary
exec "$python" -m pytest -n auto "$@"
