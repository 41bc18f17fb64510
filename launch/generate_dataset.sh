#!/usr/bin/env bash
# JSONL shards to the dataset that the Slurm jobs read, a pair of files for each shard:
#   bash launch/generate_dataset.sh gpt3 /data/pile              # a folder: The Pile's train/*.jsonl.zst, or any shards
#   bash launch/generate_dataset.sh llama3.1 a.jsonl.gz b.jsonl  # or the shards by name; also .xz and .zst
# -> $STAGE_PATH/gpt3-dataset/my-gpt3_00_text_document.bin, .idx to my-gpt3_03_...; llama3.1-dataset/my-llama_00_..., 01
#
#   FILES, TOKENIZER, VENV, CONTAINER   see launch/stage.sh
#   WORKERS           processes for a shard (default: all cores)
#   SLURM_PARTITION   submit a job for each shard there (SLURM_ACCOUNT: whose); unset: here, one after another
# Logs go to $STAGE_PATH/results.data_preparation. Finished pairs are kept, so the same command goes on after a failure.
# Before the first pair, or job, the tokenizer and the beginning of each shard are tried (for a container: looked for).
set -euo pipefail
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"
this=${BASH_SOURCE[0]}
# Under sbatch that is a copy; Slurm knows where it came from, and writes the arguments behind it.
[ "${this##*/}" != slurm_script ] || this=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
cd "$(dirname "${this%" $*"}")/.." # shards are named from where the user stands
source launch/stage.sh
[ $# -ge 2 ] || fail "give a dataset and its text: bash launch/generate_dataset.sh gpt3|llama3.1 FOLDER|SHARD..."
use_dataset "$1"
need_python
need_tokenizer
is_number "${WORKERS:-1}" 1 || fail "WORKERS=$WORKERS is not a number of processes; use 1 or more, or unset it"
cd "$OLDPWD"
shift

if [ $# = 1 ] && [ -d "$1" ]; then
    from=$1
    [ ! -d "$1/train" ] || from=$1/train
    shopt -s nullglob
    set -- "$from"/*.jsonl "$from"/*.jsonl.gz "$from"/*.jsonl.xz "$from"/*.jsonl.zst
    shopt -u nullglob
    [ $# -gt 0 ] || fail "$from holds no *.jsonl, *.jsonl.gz, *.jsonl.xz or *.jsonl.zst; name the folder of the shards"
    mapfile -t shards < <(printf '%s\n' "$@" | LC_ALL=C sort)
else
    shards=("$@")
fi
[ ${#shards[@]} -ge "$files" ] ||
    fail "${#shards[@]} shard(s) make no $files pairs of files; give more, or set FILES=${#shards[@]}"
for i in $(seq 0 $((files - 1))); do
    [ -s "${shards[i]}" ] || fail "${shards[i]}: no such shard, or an empty one; correct its name, or leave it out"
    shards[i]=$(realpath "${shards[i]}")
done
[ ${#shards[@]} = "$files" ] || echo "Taking the first $files of ${#shards[@]} shards; FILES=${#shards[@]} would take all"
cd - >/dev/null

logs=$STAGE_PATH/results.data_preparation
mkdir -p "$logs" "$folder"

# encode I ...: sets `command`, which makes pair I.
encode() {
    command=("$python" tools/preprocess_data.py --input "${shards[$1]}" --output-prefix "$(prefix_of "$1" "")"
        --tokenizer "$tokenizer" --append-eod ${WORKERS:+--workers "$WORKERS"} "${@:2}")
}

todo=()
for i in $(seq 0 $((files - 1))); do
    if [ -e "$(prefix_of "$i").idx" ]; then
        echo "$(prefix_of "$i") is there already"
        continue
    fi
    todo+=("$i")
    encode "$i" --check
    [ ${#container[@]} != 0 ] || "${command[@]}" || exit 1
done

for i in "${todo[@]}"; do
    prefix=$(prefix_of "$i") from=$(dirname "${shards[i]}")
    log=$logs/$(basename "$prefix").out
    encode "$i"
    inside=("${container[@]}")
    [ ${#container[@]} = 0 ] || inside[-1]+=",$from:$from" # of the mounts
    if [ -n "${SLURM_PARTITION:-}" ]; then
        [ ${#container[@]} = 0 ] || command=(srun "${inside[@]}" "${command[@]}")
        job=$(sbatch --parsable --job-name="data-$i" --nodes=1 --exclusive --output="$log" --chdir="$PWD" \
            --partition="$SLURM_PARTITION" ${SLURM_ACCOUNT:+--account="$SLURM_ACCOUNT"} \
            --wrap "$(printf '%q ' "${command[@]}")") ||
            fail "Slurm does not take the job, see above; correct SLURM_PARTITION=$SLURM_PARTITION or SLURM_ACCOUNT"
        echo "$prefix: job $job, $log"
    else
        echo "$prefix from ${shards[i]} ..."
        [ ${#container[@]} = 0 ] || command=(srun --nodes=1 --ntasks=1 "${inside[@]}" "${command[@]}")
        "${command[@]}" 2>&1 | tee "$log" || fail "$prefix: see above or $log"
    fi
done
