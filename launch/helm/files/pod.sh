#!/usr/bin/env bash
# What every pod of the Indexed Job runs: bash pod.sh [section.key=value ...]
#
#   MODULE CONFIG ARTIFACTS MASTER_ADDR MASTER_PORT NNODES GPUS_PER_NODE RESTARTS SPARE_NODES ROUNDS   from the chart
#   JOB_COMPLETION_INDEX                                            from Kubernetes: which node of the job this is
#
# With RESTARTS our supervisor starts the ranks, and starts them again after a failure; a pod that is made anew rejoins.
# Else torchrun, by the static rendezvous, because it takes the node's rank from us: with c10d the order of arrival decides, and rank 0,
# its logs and the pipeline's neighbours would be on another node in every run.
set -euo pipefail
NODE_RANK=$JOB_COMPLETION_INDEX
echo "Node $NODE_RANK of $NNODES on $(hostname), rank 0 at $MASTER_ADDR:$MASTER_PORT, artifacts in $ARTIFACTS"

# torchrun in the first pod has connections to all pods before any rank can raise its limit.
ulimit -Sn "$(ulimit -Hn)"

# The driver's and the NCCL plugin's libraries come from the node, not from the image.
for folder in /usr/local/nvidia/lib64 /usr/local/nccl-plugin/lib64; do
    [ ! -d "$folder" ] || export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
done

# A mistake in the configuration is one line here; torchrun would add a page of its own for each rank.
hparams=$(python -c 'import sys
from minitron.config import cli, rules
from minitron.interop.base import load
with cli.user_errors():
    cfg = load(sys.argv[2:])
    rules.check(cfg, int(sys.argv[1]))
    print(cli.to_yaml(cfg), end="")' $((NNODES * GPUS_PER_NODE)) "$CONFIG" "$@")
mkdir -p "$ARTIFACTS"
[ "$NODE_RANK" -ne 0 ] || printf '%s\n' "$hparams" >"$ARTIFACTS/hparams.yaml"

profiler=()
if grep -qx '  kind: nsys' <<<"$hparams"; then # profile.kind is the only key of that name
    profiler=(nsys profile -s none -t "nvtx,cuda" --capture-range=cudaProfilerApi --capture-range-end=stop
        -o "$ARTIFACTS/noderank-$NODE_RANK")
fi

# In the background, with Kubernetes' SIGTERM handed on: ranks save and end, see "When something goes wrong" in
# launch/README.md.
# Pods start minutes apart where images are pulled: half an hour for all of them to meet.
# Of 143 the run goes on without this node. torchrun adds a page of its own to the line of the rank that failed: its copy of the line is said again, last.
logs=$(mktemp -d)
if [ "$RESTARTS" != 0 ] && [ ${#profiler[@]} = 0 ]; then
    start=(python -m minitron.supervise --node "$NODE_RANK" --nodes "$NNODES" --spares "$SPARE_NODES"
        --ranks "$GPUS_PER_NODE" --dir "$ARTIFACTS" --rounds "${ROUNDS:-$ARTIFACTS/rounds}"
        --id "$(basename "$ARTIFACTS")" --host "$(hostname)" --address "${MASTER_ADDR/-0./-$NODE_RANK.}"
        --port "$MASTER_PORT" --max-restarts "$RESTARTS" --rejoin-seconds 3600 --)
else
    start=("${profiler[@]}" torchrun --tee 3 --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-conf timeout=1800 --max-restarts 0)
fi
PET_LOG_DIR=$logs "${start[@]}" -m "$MODULE" "$CONFIG" "$@" log.dir="$ARTIFACTS" &
trainer=$!
trap 'kill -TERM "$trainer"' TERM
status=0
wait "$trainer" || status=$?
while kill -0 "$trainer" 2>/dev/null; do # a signal ends `wait`, not the training
    status=0
    wait "$trainer" || status=$?
done

if [ "$NODE_RANK" -eq 0 ] && [ "$status" != 143 ] && [ -f "$ARTIFACTS/dllogger.json" ]; then
    mkdir -p "$ARTIFACTS/dllogger/rank-0"
    cat "$ARTIFACTS/dllogger.json" >> "$ARTIFACTS/dllogger/rank-0/dllogger.json" # behind those of an earlier pod
    rm "$ARTIFACTS/dllogger.json"
fi
echo "Node $NODE_RANK ends with status $status"
[ "$status" = 0 ] || grep -rh '^error: ' "$logs" | tail -n 1 >&2 || true
rm -rf "$logs"
exit "$status"
