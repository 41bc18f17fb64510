#!/usr/bin/env bash
# Is the planner right about your GPUs? In some twenty minutes, on 1 to 128 of them, jobs of every kind of parallelism are
# measured and held against their plans: a table, and a file of rows that you can send back (benchmarks/README.md).
#   bash benchmarks/validate.sh --device h100 --output mycluster.jsonl                               on one node
#   srun -N 4 --ntasks-per-node=1 bash benchmarks/validate.sh --device h100 --output mycluster.jsonl  on four, with Slurm
# On other schedulers start it once on every node, with NODES, NODE_RANK and MASTER_ADDR set.
#
#   PYTHON       a Python that has minitron's packages (default: python)
#   GPUS         of a node (default: all that torch sees)
#   MASTER_PORT  the first of some free ports (default: 29400); each job takes the next one
# `--help` lists the options; `--toy` tries all of it on CPUs, with a model of no size.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export NODES=${NODES:-${SLURM_NNODES:-1}} NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}} MASTER_PORT=${MASTER_PORT:-29400}
if [ -z "${MASTER_ADDR:-}" ]; then
    MASTER_ADDR=127.0.0.1
    [ "$NODES" = 1 ] || MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
export MASTER_ADDR
exec "${PYTHON:-python}" "$root/benchmarks/validate.py" "$@"
