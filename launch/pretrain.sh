# Pretraining as a Slurm job: to be sourced by the .sbatch files of this folder, which set `size`, `recipe`, `dataset`
# and `min_nodes`. 50 steps with a global batch of 16 samples a node and NeMo's log lines, unless EXTRA_ARGS says
# otherwise. Taken from the environment of sbatch, beside what launch/job.sh lists:
#
#   STAGE_PATH, CONTAINER, CONTAINER_MOUNTS, VENV, TOKENIZER    see launch/stage.sh
#   MODEL_SIZE        if set, it has to be that of the file
#   DATASET           folder of *_text_document.idx (default: launch/generate_dataset.sh's), or mock: random tokens
#   GSW_VERSION       names the results' folder (default: minitron's version)
#
# Everything goes to $STAGE_PATH/results/$GSW_VERSION/$DTYPE/$size/$JOB_TOTAL_GPUS: the job's output to JOBID.out, logs,
# metrics and checkpoint to JOBID/.
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"
set -euo pipefail
cd "$(dirname "${this%" $*"}")/.."
source launch/stage.sh
source launch/job.sh

[ "${MODEL_SIZE:-$size}" = "$size" ] ||
    fail "MODEL_SIZE=$MODEL_SIZE, but this is the job of $size; leave it unset, or submit another .sbatch file of launch/"
check_job "$size" "$min_nodes"

version=$(sed -n 's/^version = "\(.*\)"/minitron-\1/p' pyproject.toml)
run=$STAGE_PATH/results/${GSW_VERSION:-$version}/$DTYPE/$size/$JOB_TOTAL_GPUS/$SLURM_JOB_ID
arguments=("$recipe" "train.global_batch_size=$((16 * nodes))")

if [ "${DATASET:-}" != mock ]; then
    use_dataset "$dataset"
    folder=${DATASET:-$folder} paths=
    for index in "$folder"/*_text_document.idx; do
        if [ ! -e "$index" ]; then
            lacks data "$folder has no *_text_document.idx; run launch/generate_dataset.sh $dataset, or set DATASET"
            break
        fi
        paths+="${paths:+,}1,'${index%.idx}'"
    done
    arguments+=("data.tokenizer=$tokenizer" "data.cache_dir=$STAGE_PATH/cache")
    [ -z "$paths" ] || arguments+=(data.source=indexed "data.paths=[$paths]")
fi

checkpoint_every=null # a state of 12 bytes a parameter, 2.1 TB of 175B: only if the job is stopped before its end
run_job "$size" minitron.pretrain "$run" "$run.out" "${arguments[@]}"
