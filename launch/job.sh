# What the training jobs of this folder have in common: to be sourced after launch/stage.sh by the files that know what to
# train. They call `check_job`, then `run_job`. Taken from the environment of sbatch:
#
#   DTYPE             fp8 or bf16
#   RUN_CONF_GPUS_PER_NODE     ranks on each node (default: SLURM_GPUS_PER_NODE, or 8 where that is null or unset)
#   MIN_NODES         what counts as too few, for trials
#   CHECKPOINT_DIR    (default: the job's own folder) or none: what a stopped job has learned is lost
#   EXTRA_ARGS        more overrides, as in "train.steps=500 parallel.cp=2", also one a line: they win
#   RESTARTS          how often the ranks may be started again without leaving the queue (default: 20; 0: plain torchrun)
#   SPARE_NODES       how many of the job's nodes wait until another one dies (default: 0)
#   MINITRON_SECRET   what the ranks sign their messages with (default: a random one; never printed)
#   MASTER_ADDR, MASTER_PORT   where the ranks meet (default: the job's first node, a port from the job's id)
#
# Before the time is up (--signal), or when `scancel --signal=USR1 JOBID` asks for it, all ranks save and end, and the job
# goes back to the queue, which holds it for two minutes; under the same id it goes on from there. A job that Slurm
# itself pre-empts or requeues gets SIGTERM: it saves as well, if Slurm leaves it the time (KillWait, GraceTime). A job
# that has lost more nodes than it has spares goes back to the queue without them: FOLDER/excluded_nodes lists them.
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"
[ $# = 0 ] || fail "'$*' would not be read; give overrides as EXTRA_ARGS='train.steps=500' sbatch ..."
unset HF_TOKEN # for launch/setup.sh alone: what a job does not know, it cannot log
source launch/keys.sh ""

# check_job NAME MIN_NODES: sets `precision`, the overrides of DTYPE, `nodes`, `gpus` of each, and `JOB_TOTAL_GPUS`.
check_job() {
    case ${DTYPE:-} in
    bf16) precision=() ;;
    fp8) precision=(precision.fp8=delayed) ;;
    *) precision=() && fail "DTYPE=${DTYPE:-} is neither fp8 nor bf16; submit with DTYPE=fp8 sbatch ..." ;;
    esac
    : "${SPARE_NODES:=0}" "${RESTARTS:=20}" "${DTYPE:=}"
    is_number "$SPARE_NODES" 0 ||
        { fail "SPARE_NODES=$SPARE_NODES is not a number of nodes; set SPARE_NODES=1, or 0"; SPARE_NODES=0; }
    is_number "${SLURM_RESTART_COUNT:-0}" 0 ||
        fail "SLURM_RESTART_COUNT=$SLURM_RESTART_COUNT is not a number of starts; leave it to Slurm"
    is_number "$RESTARTS" 0 || fail "RESTARTS=$RESTARTS is not a number of starts; set RESTARTS=20, or 0"
    is_number "${MASTER_PORT:-1}" 1 65535 || fail "MASTER_PORT=$MASTER_PORT is not a port; use 1 to 65535, or unset it"
    [ "$SPARE_NODES" = 0 ] || [ "$RESTARTS" != 0 ] ||
        fail "SPARE_NODES=$SPARE_NODES would wait for nothing with RESTARTS=0; set RESTARTS=20, or no SPARE_NODES"
    export SPARE_NODES RESTARTS
    nodes=$((SLURM_JOB_NUM_NODES - SPARE_NODES))
    local least=${MIN_NODES:-$2} count
    is_number "$least" 1 || { fail "MIN_NODES=$least is not a number of nodes; use 1 or more, or unset it"; least=$2; }
    [ "$nodes" -ge "$least" ] ||
        { fail "$nodes node(s) are too few for $1; submit with -N $least or more, or set MIN_NODES=1 for a trial"; nodes=$least; }
    gpus=${RUN_CONF_GPUS_PER_NODE:-${SLURM_GPUS_PER_NODE:-8}}
    for count in "$gpus" "${SLURM_GPUS_PER_NODE:-8}"; do
        is_number "$count" 1 && continue
        fail "$count is not a number of GPUs; set RUN_CONF_GPUS_PER_NODE to one, SLURM_GPUS_PER_NODE to one or null"
        gpus=8 SLURM_GPUS_PER_NODE=0
        break
    done
    if [ "${SLURM_GPUS_ON_NODE:-0}" -lt "${SLURM_GPUS_PER_NODE:-0}" ]; then
        fail "SLURM_GPUS_PER_NODE=$SLURM_GPUS_PER_NODE, but Slurm gave the job ${SLURM_GPUS_ON_NODE:-no} GPUs a node;" \
            "submit with --gres=gpu:$SLURM_GPUS_PER_NODE, or set it to null"
    fi
    local total=$((nodes * gpus))
    [ "${JOB_TOTAL_GPUS:-$total}" = "$total" ] ||
        fail "JOB_TOTAL_GPUS=$JOB_TOTAL_GPUS, but $nodes node(s) of $gpus GPUs are $total; submit with another -N"
    JOB_TOTAL_GPUS=$total
    [ -n "$STAGE_PATH" ] || exit 1 # of launch/check.sh: all else lies there
    need_python
}

# run_job NAME MODULE FOLDER OUTPUT ARGUMENT...: trains, with logs and checkpoint in FOLDER; the job's output to OUTPUT.
# It reads `checkpoint_every`: 0 saves when the job is stopped and at its end, null only when it is stopped.
run_job() {
    local name=$1 module=$2 run=$3 output=$4 extra srun status last before said line ended round folder kind unread
    local arguments=("${@:5}" "${precision[@]}" "log.dir=$run" log.format=nemo)
    [[ $output != *[[:cntrl:]]* ]] || # it would span lines of what the job prints
        fail "the job's output $output holds a character that cannot be printed; correct GSW_VERSION"
    if [ "${CHECKPOINT_DIR:-}" != none ]; then
        arguments+=("checkpoint.dir=${CHECKPOINT_DIR:-$run/checkpoint}" "checkpoint.every=$checkpoint_every" checkpoint.keep=1)
    fi
    read -rd '' -a extra <<<"${EXTRA_ARGS:-}" || true # to the end of the text, at which `read` returns 1
    arguments+=("${extra[@]}")
    read_keys "${arguments[@]}" ||
        fail "$unread in EXTRA_ARGS, and a job reads these keys, too; write log.dir=FOLDER or profile.kind=KIND, without quotes"
    run=$folder # there the ranks say how they ended
    [ "${run,,}" != null ] || # none
        fail "log.dir=$run in EXTRA_ARGS, and a job reads there how its ranks have ended; name a folder, or leave it out"
    round=$run/rounds/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}/round.json
    if [ -n "${CHECK_ONLY:-}" ]; then
        [ -n "$failed" ] ||
            printf '%-6s %-10s %s\n' ok variables "$name in $DTYPE on $nodes x $gpus GPUs; output: $(dirname "$output")"
        if [ ${#container[@]} != 0 ] || [ ! -x "$python" ]; then
            python=${PYTHON:-python3}
            if ! "$python" -c 'import minitron.data.build' 2>/dev/null; then
                printf '%-6s %-10s %s\n' '?' others "$python here cannot check them; name one that has minitron's packages: PYTHON=..."
                return 1
            fi
        fi
        "$python" tools/check_job.py "${arguments[@]}" "${lacking[@]}" --world "$JOB_TOTAL_GPUS" --device "${DEVICE:-h100}"
        [ ${#lacking[@]} = 0 ] && [ -z "$failed" ]
        return
    fi
    mkdir -p "$3" "$(dirname "$output")" # a log.dir of its user's may lie in the container alone: the ranks make it
    set_environment

    # Slurm signals this shell, and it the ranks. When Slurm ends the job it also decides what becomes of it.
    ended_by_slurm=
    trap 'scancel --signal=USR1 "$SLURM_JOB_ID" || true' USR1
    trap 'ended_by_slurm=yes' TERM

    local gres=(${SLURM_GPUS_PER_NODE:+--gres=gpu:$SLURM_GPUS_PER_NODE})
    unset SLURM_GPUS_PER_NODE
    echo "$name in $DTYPE on $nodes x $gpus GPUs, start number $((${SLURM_RESTART_COUNT:-0} + 1)); output: $output"
    before=$(stat -c %s "$output" 2>/dev/null || echo 0) # bytes that an earlier start wrote
    said=$(stat -c %s "$run/rank-0.log" 2>/dev/null || echo 0)
    # The whole node for one task, which starts the ranks: no binding to a core. With restarts a node may die alone.
    local alone=(--kill-on-bad-exit=1)
    [ "$RESTARTS" = 0 ] || alone=(--kill-on-bad-exit=0 --no-kill --wait=0)
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none "${alone[@]}" \
        --output="$output" --open-mode=append "${gres[@]}" "${container[@]}" \
        bash launch/node.sh "$python" "$gpus" -m "$module" "${arguments[@]}" &
    srun=$!

    status=0
    while :; do
        wait "$srun" && status=0 || status=$? # a signal ends the wait, too
        kill -0 "$srun" 2>/dev/null || break
    done
    wait "$srun" && status=0 || status=$? # srun may have ended while a trap ran: then the status above is a signal's

    # srun's is the highest status of a node; the run's is what the nodes have agreed upon.
    status=$(grep -o '"status": [0-9]*' "$round" 2>/dev/null | grep -o '[0-9]*$' || echo "$status")

    # A summary and the goodput may follow the line that says why the run ended. A line of an earlier start says nothing.
    last=$({ tail -c +$((said + 1)) "$run/rank-0.log" | tail -n 3 | grep "stopped after iteration" ||
        tail -n 1 "$run/rank-0.log"; } 2>/dev/null || true)
    if [ -n "$ended_by_slurm" ]; then
        fail "Slurm ended the job; $last"
    elif [ "$status" = 75 ]; then
        line=$(grep -oE 'round [0-9]+ ended .*' "$output" | tail -n 1) || true
        requeue "$line" "$run/excluded_nodes"
    elif [ "$status" != 0 ]; then
        # The line that says why comes last: torchrun adds a page of its own.
        line=$(tail -c +$((before + 1)) "$output" 2>/dev/null | grep -oE '(^|:)error: .*' | tail -n 1) || true
        ended="the training ended with status $status; the whole output: $output"
        if [ -n "$line" ]; then
            echo "$ended" >&2
            fail "${line#*error: }"
        fi
        [ ! -e "$output" ] || tail -n 20 "$output" >&2
        fail "$ended"
    elif [[ $last == *"stopped after iteration"*"which was saved" ]]; then
        requeue "$last" "$run/excluded_nodes"
    elif [[ $last == *"stopped after iteration"* ]]; then
        fail "$last"
    fi
}

# requeue WHY FILE: sends the job back to the queue, without the nodes that FILE lists.
requeue() {
    local excluded
    excluded=$({ scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *ExcNodeList=\([^ (].*\)/\1/p'
        cat "$2" || true; } 2>/dev/null | sort -u | paste -sd ,)
    echo "$1; back to the queue${excluded:+ without $excluded}"
    # Only a job that waits takes other nodes. To requeue it ends this shell, too, but by a SIGTERM first (KillWait).
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID"
    until [ -z "$excluded" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$excluded"; do sleep 1; done
}

# NVLink multicast takes memory that these models need; larger chunks suit the pipeline's messages. What else torch and
# NCCL need, minitron sets (minitron/runtime/environment.py). Without CUDA_DEVICE_MAX_CONNECTIONS=1, on purpose: the products of tensor parallelism are
# pipelined with their communication over several streams, and with a single hardware queue would wait for each other.
# Without NVTE_*_LAYERNORM_SM_MARGIN: no norm here is Transformer Engine's. Without TORCH_NCCL_AVOID_RECORD_STREAMS: the
# default of torch 2.11, which warns of it.
set_environment() {
    export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
    export NCCL_P2P_NET_CHUNKSIZE=${NCCL_P2P_NET_CHUNKSIZE:-2097152}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export PYTHONUNBUFFERED=1
    # The ranks sign their messages with it (launch/README.md, Ports).
    MINITRON_SECRET=${MINITRON_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
    export MINITRON_SECRET
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300} # from SIGTERM to SIGKILL (torch 2.12)
    export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
    export MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
}
