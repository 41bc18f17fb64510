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
unset PYTHONDONTWRITEBYTECODE # images set it; some hundred processes would compile the package, each for itself
export OMP_NUM_THREADS=1 # the tests' ranks are processes: with more threads they would fight for the cores
"$python" -m ruff check --quiet
"$python" -m ruff format --check --quiet
"$python" -m mypy --no-error-summary
exec "$python" -m pytest -n auto "$@"
