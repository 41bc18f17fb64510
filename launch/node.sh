#!/usr/bin/env bash
# What srun starts once on every node, inside the container if there is one: the node's ranks, by our supervisor, which
# starts them again after a failure (RESTARTS times at most), or by torchrun, if RESTARTS is 0 or unset, or under nsys
# if an argument is profile.kind=nsys (its report: noderank-N.nsys-rep in log.dir).
#   node.sh PYTHON RANKS -m MODULE ARGUMENTS...
set -euo pipefail
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"
python=$1 ranks=$2
shift 2
source launch/number.sh ""
source launch/keys.sh ""
for count in "$ranks" "${SPARE_NODES:-0}" "${RESTARTS:-0}"; do
    is_number "$count" 0 || { echo "error: $count is not a number; correct RANKS, SPARE_NODES or RESTARTS" >&2; exit 1; }
done
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Slurm sends SIGUSR1 to every process here. torchrun would die of it and leave its ranks behind; it inherits that the
# signal is ignored. So do the ranks, until they listen to it.
trap '' USR1
# torchrun on the first node has connections to all nodes before any rank can raise its limit.
ulimit -Sn "$(ulimit -Hn)"

nodes=$((SLURM_JOB_NUM_NODES - ${SPARE_NODES:-0}))

# A mistake in an override is one line here, from the first node; torchrun would add a page of its own on every node.
check() {
    "$python" -c 'import sys
from minitron.config import cli, rules
from minitron.interop.base import load
with cli.user_errors():
    rules.check(load(sys.argv[2:]), int(sys.argv[1]), None)' $((ranks * nodes)) "${@:3}"
}
if [ "$SLURM_PROCID" = 0 ]; then
    check "$@"
elif [ "${RESTARTS:-0}" != 0 ]; then # where srun does not end the others when the first one ends
    check "$@" 2>/dev/null
fi

profiler=()
read_keys "$@" || { echo "error: $unread is not read here; write log.dir=FOLDER, profile.kind=KIND, without quotes" >&2; exit 1; }
[ "$kind" != nsys ] || profiler=(nsys profile -s none -t "nvtx,cuda" --capture-range=cudaProfilerApi
    --capture-range-end=stop -o "$folder/noderank-$SLURM_PROCID")
if [ "${RESTARTS:-0}" != 0 ] && [ "$kind" != nsys ]; then
    address=$(hostname)
    [ "$SLURM_PROCID" != 0 ] || address=$MASTER_ADDR
    exec "$python" -m minitron.supervise --node "$SLURM_PROCID" --nodes "$nodes" --spares "${SPARE_NODES:-0}" \
        --ranks "$ranks" --dir "$folder" --id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --max-restarts "$RESTARTS" \
        --host "${SLURMD_NODENAME:-$(hostname)}" --address "$address" --port "$MASTER_PORT" -- "$@"
fi

# torchrun adds a page of its own to the line of the rank that failed: the line is said again, last. SIGTERM is torchrun's
# to obey, and this shell waits for it.
logs=$(mktemp -d) status=0
trap : TERM
PET_LOG_DIR=$logs "${profiler[@]}" "$python" -m torch.distributed.run --nproc_per_node "$ranks" --nnodes "$nodes" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv_backend c10d --max_restarts 0 --tee 3 \
    "$@" || status=$?
[ "$status" = 0 ] || grep -rh '^error: ' "$logs" | tail -n 1 >&2 || true
rm -rf "$logs"
exit "$status"
