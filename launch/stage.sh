# To be sourced from the root of the checkout by everything that works in $STAGE_PATH. Sets `python`, and `container`, the
# options with which srun starts it.
#
#   STAGE_PATH        a folder that all nodes share: environment, datasets, results
#   CONTAINER         image to run in, a .sqsh file or a name that enroot imports (needs pyxis); unset: the environment
#   CONTAINER_MOUNTS  what it sees beside this checkout and STAGE_PATH, as in /data:/data,/scratch:/scratch
#   VENV              the environment otherwise (default: $STAGE_PATH/venv, made by launch/setup.sh)
#   TOKENIZER         bytes, gpt2:DIR, llama3:FILE, llama2:FILE or hf:DIR (default: what launch/setup.sh puts there)
#   FILES             how many pairs of files a dataset has (default: 4 for gpt3, 2 for llama3.1)
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"

# fail MESSAGE...: ends a job. To launch/check.sh it says so, in the form of tools/check_job.py, and the other variables
# follow: callers put a value that works in the place of the wrong one first.
failed=
fail() {
    local line="${*//[[:cntrl:]]/ }" # a variable may hold newlines
    if [ -z "${CHECK_ONLY:-}" ]; then
        echo "error: $line" >&2
        exit 1
    fi
    printf '%-6s %-10s %s\n' wrong variables "$line"
    failed=yes
}

# lacks PART MESSAGE...: ends a job that cannot run for want of it. To launch/check.sh it says so, and the other parts follow.
lacking=()
lacks() {
    [ -n "${CHECK_ONLY:-}" ] || fail "${@:2}"
    printf '%-6s %-10s %s\n' wrong "$1" "${*:2}"
    lacking+=(--skip "$1")
}

source launch/number.sh ""
if [ -z "${STAGE_PATH:-}" ]; then
    STAGE_PATH=
    fail "STAGE_PATH is not set; export STAGE_PATH=<a folder that all nodes share>"
elif [[ $STAGE_PATH != /* || ! -d $STAGE_PATH || $STAGE_PATH == *[[:cntrl:]]* ]]; then
    fail "STAGE_PATH=$STAGE_PATH is no folder with an absolute path of printable characters; make it, or correct it"
fi
# "null" says that Slurm does not manage the GPUs. srun would take it for a count.
[ "${SLURM_GPUS_PER_NODE:-}" != null ] || unset SLURM_GPUS_PER_NODE

container=()
if [ -n "${CONTAINER:-}" ]; then
    container=(--container-image="$CONTAINER" --container-workdir="$PWD" --no-container-mount-home
        --container-mounts="$PWD:$PWD,$STAGE_PATH:$STAGE_PATH${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
    python=python
else
    python=${VENV:-$STAGE_PATH/venv}/bin/python
fi

# Of fine-tuning: what launch/setup.sh fetches with FINETUNE=8b.
llama_weights=$STAGE_PATH/HF_ckpt/models/meta-llama/Meta-Llama-3-8B
llama_files=(config.json model.safetensors.index.json model-0000{1..4}-of-00004.safetensors)
squad=$STAGE_PATH/squad/train.jsonl

need_python() {
    if [[ ${CONTAINER:-} == /* && ! -e $CONTAINER ]]; then
        fail "there is no CONTAINER=$CONTAINER; run IMAGE=docker://... launch/setup.sh, or correct it"
    fi
    [ -n "${CONTAINER:-}" ] || [ -x "$python" ] ||
        fail "there is no $python; run launch/setup.sh, or set VENV or CONTAINER"
}

# use_dataset gpt3|llama3.1: sets `folder`, `name` and `files` (how many pairs) of a dataset and its `tokenizer`.
use_dataset() {
    case $1 in
    gpt3)
        folder=$STAGE_PATH/gpt3-dataset name=my-gpt3 files=${FILES:-4}
        tokenizer=${TOKENIZER:-gpt2:$folder/bpe}
        ;;
    llama3.1)
        folder=$STAGE_PATH/llama3.1-dataset name=my-llama files=${FILES:-2}
        tokenizer=${TOKENIZER:-llama3:$folder/llama/tokenizer.model}
        ;;
    *) fail "'$1' is not a dataset; use gpt3 or llama3.1" ;;
    esac
    is_number "$files" 1 99 || fail "FILES=$files is not a number of files; use 1 to 99"
}

need_tokenizer() {
    local file=${tokenizer#*:}
    file=${file/#"~/"/"$HOME/"}
    case $tokenizer in
    bytes) return ;;
    gpt2:?*) [ -e "$file/vocab.json" ] && file+=/vocab.json || file+=/encoder.json ;; # either will do
    llama[23]:?*) ;;
    hf:?*) file+=/tokenizer.json ;;
    *) fail "TOKENIZER=$tokenizer is not one of bytes, gpt2:DIR, llama3:FILE, llama2:FILE and hf:DIR" ;;
    esac
    [ -e "$file" ] || fail "there is no $file; run launch/setup.sh (for Llama's with HF_TOKEN), or set TOKENIZER"
}

# The prefix of the dataset's file pair number $1.
prefix_of() {
    printf '%s/%s_%02d%s' "$folder" "$name" "$1" "${2-_text_document}"
}
