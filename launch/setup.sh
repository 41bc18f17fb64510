#!/usr/bin/env bash
# Prepare $STAGE_PATH for the Slurm jobs: the environment or the container image, and the tokenizers.
#   export STAGE_PATH=/lustre/me/minitron; bash launch/setup.sh          or sbatch -A ... -p ... -N 1 launch/setup.sh
#
#   IMAGE     container image to import as $STAGE_PATH/minitron.sqsh, as in docker://registry#name:tag (needs enroot); then
#             export CONTAINER=$STAGE_PATH/minitron.sqsh. Unset: an environment in $STAGE_PATH/venv, see launch/venv.sh
#   HF_TOKEN  of a Hugging Face account that may read meta-llama/Meta-Llama-3-8B; unset: no Llama tokenizer, no weights
#   FINETUNE  8b: also the weights of Meta-Llama-3-8B (16 GB) and SQuAD, for launch/finetune.sbatch
# With SLURM_PARTITION (and SLURM_ACCOUNT) set, the image is imported in a job, unless this is one. What is there is left
# alone. Without a network, copy the files yourself; the last lines say which are missing.
set -euo pipefail
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"
this=${BASH_SOURCE[0]}
# Under sbatch that is a copy; Slurm knows where it came from, and writes the arguments behind it.
[ "${this##*/}" != slurm_script ] || this=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
cd "$(dirname "${this%" $*"}")/.."
source launch/stage.sh

# fetch URL FILE SHA256 [HEADER]: complete and as published, or not there. No SHA256: as the server sends it.
fetch() {
    [ ! -e "$2" ] || return 0
    mkdir -p "$(dirname "$2")"
    echo "Fetching $2 ..."
    # The header, which holds a token, comes on stdin: arguments are everybody's to read.
    if ! printf '%s\n' "${4:-}" | curl --fail --silent --show-error --location --header @- --output "$2.partial" "$1" ||
        { [ -n "$3" ] && ! echo "$3  $2.partial" | sha256sum --check --status; }; then
        rm -f "$2.partial"
        echo "$1 did not arrive, or not as it was published" >&2
        return 1
    fi
    mv "$2.partial" "$2"
}

image=$STAGE_PATH/minitron.sqsh
if [ -n "${IMAGE:-}" ]; then
    if [ ! -e "$image" ]; then
        import=(enroot import --output "$image" "$IMAGE")
        [ -z "${SLURM_PARTITION:-}" ] || [ -n "${SLURM_JOB_ID:-}" ] ||
            import=(srun --nodes=1 --ntasks=1 --partition="$SLURM_PARTITION"
                ${SLURM_ACCOUNT:+--account="$SLURM_ACCOUNT"} "${import[@]}")
        "${import[@]}" || fail "IMAGE=$IMAGE could not be imported, see above"
    fi
    echo "Image: export CONTAINER=$image"
elif [ ! -x "$python" ]; then
    VENV=${VENV:-$STAGE_PATH/venv}
    source launch/venv.sh
    use_venv plot,data
fi

missing=0
gpt2=https://openaipublic.blob.core.windows.net/gpt-2/encodings/main
use_dataset gpt3
fetch $gpt2/encoder.json "$folder/bpe/encoder.json" \
    196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783 || missing=1
fetch $gpt2/vocab.bpe "$folder/bpe/vocab.bpe" \
    1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5 || missing=1
use_dataset llama3.1
llama=$folder/llama/tokenizer.model
hub=https://huggingface.co/meta-llama/Meta-Llama-3-8B/resolve/main
token=${HF_TOKEN:+Authorization: Bearer $HF_TOKEN}
if [ -n "$token" ]; then
    fetch $hub/original/tokenizer.model "$llama" "" "$token" || missing=1
elif [ ! -e "$llama" ]; then
    echo "No HF_TOKEN: for Llama jobs on text set it and come again, or copy tokenizer.model to $llama"
fi
case ${FINETUNE:-} in
'') ;;
8b)
    for file in "${llama_files[@]}"; do
        fetch "$hub/$file" "$llama_weights/$file" "" "$token" || missing=1
    done
    fetch https://rajpurkar.github.io/SQuAD-explorer/dataset/train-v1.1.json "$squad.source" "" || missing=1
    if [ -e "$squad.source" ] && [ ! -e "$squad" ]; then
        python3 launch/squad.py "$squad.source" "$squad"
    fi
    ;;
*) fail "FINETUNE=$FINETUNE is no model that can be fetched; use 8b" ;;
esac
[ $missing = 0 ] || fail "files are missing, see above; copy them there from elsewhere"
echo "Ready: $STAGE_PATH"
