#!/usr/bin/env bash
# Whether a dataset is complete: every pair of files, every byte of the indices, every token id.
#   bash launch/check_dataset.sh [gpt3|llama3.1]       (default: gpt3; FILES, VENV, CONTAINER: see launch/stage.sh)
# The last line is then `Dataset generation completed successfully at: FOLDER`; else the status is 1.
set -euo pipefail
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"
this=${BASH_SOURCE[0]}
# Under sbatch that is a copy; Slurm knows where it came from, and writes the arguments behind it.
[ "${this##*/}" != slurm_script ] || this=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
cd "$(dirname "${this%" $*"}")/.."
source launch/stage.sh
use_dataset "${1:-gpt3}"
need_python
prefixes=()
for i in $(seq 0 $((files - 1))); do
    prefix=$(prefix_of "$i")
    for file in "$prefix.bin" "$prefix.idx"; do
        [ -f "$file" ] ||
            fail "$file is missing; see $STAGE_PATH/results.data_preparation, then run launch/generate_dataset.sh again"
    done
    prefixes+=("$prefix")
done
command=("$python" tools/check_data.py "${prefixes[@]}")
[ ${#container[@]} = 0 ] || command=(srun --nodes=1 --ntasks=1 "${container[@]}" "${command[@]}")
"${command[@]}" || fail "the dataset in $folder is damaged, see above; delete that pair and generate it again"
echo "Dataset generation completed successfully at: $folder"
