#!/usr/bin/env bash
# What can fail before a job waits in the queue: the step `build` of nlp_benchmark.yaml.
#   build.sh PYTHON RANKS CONFIG [section.key=value ...]
#
#   DATASET    JSON lines to make PREFIX_text_document.bin and .idx from, if they are not there yet; empty: no data.
#              PREFIX_text_document.source keeps which; then another one is refused
#   PREFIX     where they go
#   TOKENIZER  as data.tokenizer
# Nothing of minitron itself is compiled ahead of time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$1 source=${PREFIX:-}_text_document.source
shift
if [ -n "${DATASET:-}" ] && [ ! -e "${PREFIX}_text_document.idx" ]; then
    mkdir -p "$(dirname "$PREFIX")"
    echo "$DATASET" >"$source"
    "$python" tools/preprocess_data.py --input "$DATASET" --output-prefix "$PREFIX" --tokenizer "$TOKENIZER" --append-eod
elif [ -n "${DATASET:-}" ] && [ -e "$source" ] && [ "$(cat "$source")" != "$DATASET" ]; then
    echo "error: ${PREFIX}_text_document was made of $(cat "$source"), and dataset is $DATASET;" \
        "set another dataset_prefix, or delete ${PREFIX}_text_document.*" >&2
    exit 1
fi
"$python" -c 'import sys
from minitron.config import cli, rules
from minitron.interop.base import load
with cli.user_errors():
    rules.check(load(sys.argv[2:]), int(sys.argv[1]))' "$@"
