#!/usr/bin/env bash
# From nothing to a loss curve: an environment, the pinned installs, a small Llama trained on real text (the sources of
# Python's standard library) on whatever this machine has, its loss as a picture, and a tour of what its ranks did.
#   bash launch/quickstart.sh [section.key=value ...]     e.g. train.steps=50 parallel.tp=2
#
#   RANKS    processes to train with (default: one a GPU, or 2 on a machine without)
# launch/venv.sh says where the environment lives and how it comes about.
set -euo pipefail
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"
this=${BASH_SOURCE[0]}
# Under sbatch that is a copy; Slurm knows where it came from, and writes the arguments behind it.
[ "${this##*/}" != slurm_script ] || this=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
cd "$(dirname "${this%" $*"}")/.."
source launch/venv.sh
source launch/number.sh ""
source launch/keys.sh ""

is_number "${RANKS:-1}" 1 || fail "RANKS=$RANKS is not a number of processes; use 1 or more, or unset it"
for override in "$@"; do
    case $override in
    [a-z]*.[a-z]*=*) ;;
    *) fail "'$override' is not an override; use section.key=value, e.g. train.steps=50" ;;
    esac
done
read_keys log.dir=runs/quickstart "$@" || fail "$unread is not read here; write log.dir=FOLDER, without quotes"
run_dir=$folder
[ "${run_dir,,}" != null ] || fail "log.dir=$run_dir leaves no curve to draw; name a folder, or leave it out"

use_venv plot
# As many ranks as GPUs, rounded down to a power of two and at most 8, so that they share the batch of 16 evenly.
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
ranks=2
if [ "$gpus" -gt 0 ]; then
    ranks=1
    while [ $((2 * ranks)) -le "$gpus" ] && [ "$ranks" -lt 8 ]; do ranks=$((2 * ranks)); done
fi
ranks=${RANKS:-$ranks}
[ "$ranks" -le 4 ] || set -- train.micro_batch_size=2 "$@"

# A mistake in an override is one line here; torchrun would add a page of its own.
"$python" -c 'import sys
from minitron.config import cli, rules
from minitron.interop.base import load
with cli.user_errors():
    rules.check(load(sys.argv[2:]), int(sys.argv[1]), None)' "$ranks" configs/quickstart.yaml "$@"

[ "$gpus" -gt 0 ] && kind=GPU || kind=CPU
echo "Training on $ranks $kind rank(s); logs, configuration and curve go to $run_dir"
export OMP_NUM_THREADS=1 # one core a rank; more threads than cores would fight
export TORCH_CPP_LOG_LEVEL=ERROR
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
{ "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m minitron.pretrain \
    configs/quickstart.yaml log.every=10 log.dir="$run_dir" "$@" 2>&1 >&3 | tee -i "$errors" >&2; } 3>&1 || {
    line=$(grep '^error: ' "$errors" | tail -n 1) || true # said again, last: torchrun adds a page of its own
    [ -n "$line" ] || fail "the training failed, see above and $run_dir"
    echo "the training failed, see above and $run_dir" >&2
    fail "${line#error: }"
}
"$python" tools/plot_run.py "$run_dir"
"$python" tools/tour.py configs/quickstart.yaml "$@" --world "$ranks" --output "$run_dir/tour.html" ||
    echo "The training is complete; only the tour of it failed, see above" >&2
