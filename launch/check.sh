#!/usr/bin/env bash
# Before the queue: would this job run? In seconds, on a login node without GPUs, a line for each part: variables, layout,
# memory, data, tokenizer, base weights, the disk's room, and what Slurm says of partition and nodes.
#   DTYPE=fp8 bash launch/check.sh 175b -A ACCOUNT -p PARTITION -N 16      the variables and the options that sbatch would get
#   DTYPE=fp8 FT_TYPE=lora bash launch/check.sh finetune -N 2
#   bash launch/check.sh helm -f launch/helm/a3mega.yaml ... NAME launch/helm           what `helm install` would get
# A line begins with ok, wrong, or `?` for what cannot be seen from here. Status 1 if anything is wrong.
#
#   DEVICE   the nodes' GPUs, one of minitron/planner/devices.json (default: h100)
#   PYTHON   with CONTAINER and for helm: a Python that has minitron's packages, torch aside (default: python3)
#   and all that the job itself reads, see `bash launch/pretrain.sh --help`
set -euo pipefail
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/number.sh" ""

wrong() {
    printf '%-6s %-10s %s\n' wrong "${@//[[:cntrl:]]/ }"
    exit 1
}

job=${1:-none} job=${job##*/} job=${job%.sbatch}
file=$root/launch/$job.sbatch options=("${@:2}")
if [ "$job" = helm ] || [ -n "${CONTAINER:-}" ]; then # a login node starts no container
    (cd "$root" && "${PYTHON:-python3}" -c 'import minitron.data.build') 2>/dev/null ||
        wrong variables "${PYTHON:-python3} here lacks minitron's packages; name a Python that has them: PYTHON=..."
fi
if [ "$job" = helm ]; then
    command -v helm >/dev/null || wrong values "there is no helm here; install it, or give its folder in PATH"
    manifests=$(helm template "${options[@]}" 2>&1) || wrong values "$(sed '/^Use --debug/d;s/^Error: //' <<<"$manifests" | tr -s '\n' ' ')"
    echo "ok     values     helm takes them"
    "${PYTHON:-python3}" "$root/tools/check_job.py" --manifests --device "${DEVICE:-h100}" <<<"$manifests"
    exit
fi
[ -e "$file" ] || wrong job "'$job' is not one of $(cd "$root/launch" && echo *.sbatch | sed 's/\.sbatch//g'), helm; name one"

nodes=$(sed -n 's/^#SBATCH --nodes=//p' "$file") gpus=0
set -- "${options[@]}"
while [ $# -gt 0 ]; do
    case $1 in
    -N | --nodes) nodes=${2:-none} ;;
    -N*) nodes=${1#-N} ;;
    --nodes=*) nodes=${1#*=} ;;
    [a-z]*.[a-z]*=*) wrong variables "'$1' would not be read; give overrides as EXTRA_ARGS='$1' before bash" ;;
    --gres=*gpu:* | --gpus-per-node=*) # [TYPE:]COUNT; a type alone is one GPU
        gpus=1
        [[ ! $1 =~ gpu(:|s-per-node=)([^:,]+:)?([0-9]+)(,|$) ]] || gpus=${BASH_REMATCH[3]}
        is_number "$gpus" 0 || wrong variables "$1 has no number of GPUs; use --gres=gpu:8"
        ;;
    esac
    shift
done
is_number "$nodes" 1 || wrong variables "-N $nodes is not a number of nodes; use -N 16"

status=0
SLURM_JOB_ID=0 SLURM_JOB_NUM_NODES=$nodes SLURM_GPUS_ON_NODE=$gpus CHECK_ONLY=$file bash "$file" || status=1
if ! command -v sbatch >/dev/null; then
    echo "?      partition  there is no sbatch here; on a login node of the cluster it is asked"
elif said=$(sbatch --test-only "${options[@]}" "$file" 2>&1); then
    said=${said##*$'\n'}
    echo "ok     partition  ${said#sbatch: }"
elif [[ $said == *"configuration source"* || $said == *"Unable to contact"* ]]; then
    echo "?      partition  sbatch finds no cluster from here; on a login node it is asked"
else
    said=$(grep -v '^$' <<<"$said" | tail -n 1)
    wrong partition "Slurm would not take it: ${said#sbatch: }; correct -A, -p, -N or --gres"
fi
[ "$status" = 0 ] && echo "submit it, with the same variables: sbatch ${options[*]} ${file#"$PWD/"}"
exit "$status"
