"""Print rows of a fine-tuning file as the model reads them, with the trained tokens between \u27e6 and \u27e7.

    python tools/preview_chat.py my.jsonl --tokenizer hf:Qwen3-8B --line 1 2

A row, of JSONL a line, is made into tokens as data.source=sft makes it, by the chat template of the tokenizer if it has
messages. The tokens are then decoded. Exit status 1, with one line, at the first row that training would refuse.
"""

import argparse
import sys
from collections import Counter
from itertools import accumulate, pairwise, takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.config.command import Parser, positive, run
from minitron.config.files import errors_as
from minitron.data.sft import encode_row
from minitron.data.tokenizers import Tokenizer
from minitron.interop.rows import read_rows
from minitron.interop.tokenizers import load_tokenizer

CONTEXT = 16  # tokens before a part that are decoded with it


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", help="as data.paths names it")
    add("--tokenizer", required=True, metavar="SPEC", help="as data.tokenizer: hf:DIR, llama3:FILE, ...")
    add("--line", type=positive(int), nargs="+", default=[1], metavar="N", help="numbers of lines or rows (1)")
    add("--special-tokens-in-text", action="store_true", help="as data.special_tokens_in_text")
    o = parser.parse_args(argv)
    sys.stdout.reconfigure(errors="backslashreplace")  # texts of any language, on any terminal
    tokenizer = load_tokenizer(o.tokenizer, "--tokenizer")
    with errors_as(ValueError, lambda error: f"{o.file} cannot be read ({error.strerror}); name a file", OSError):
        first = takewhile(lambda row: row[0] <= max(o.line), read_rows(o.file))
        rows = {number: row for number, row in first if number in o.line}
    for number in o.line:
        if number not in rows:
            raise ValueError(f"{o.file}: row {number} is empty or missing; name another with --line")
        counts = Counter[str]()
        with errors_as(ValueError, lambda error: f"{o.file}: row {number} {error}", ValueError):
            parts = encode_row(rows[number], tokenizer, o.special_tokens_in_text, counts)
        trained = sum(map(len, parts[1::2]))
        print(f"row {number}: {sum(map(len, parts))} tokens, {trained} trained")
        print(marked(parts, tokenizer))
        if counts["special"] and not o.special_tokens_in_text:
            print("a special token in its text is read as text; see data.special_tokens_in_text")


def marked(parts: list[list[int]], tokenizer: Tokenizer) -> str:
    """Return the text of context and answer in turn, with marks around answers."""
    ids = [i for part in parts for i in part]
    text, cuts = tokenizer.decode(ids), [0]
    for begin, end in pairwise(accumulate(map(len, parts), initial=0)):
        # A part alone may decode otherwise: SentencePiece drops a text's first space, a character may have four tokens.
        before = ids[max(0, begin - CONTEXT) : begin]
        cuts.append(cuts[-1] + len(tokenizer.decode(before + ids[begin:end])) - len(tokenizer.decode(before)))
    pieces = [text[begin:end] for begin, end in zip(cuts, cuts[1:])]
    return "".join(f"\u27e6{piece}\u27e7" if i % 2 else piece for i, piece in enumerate(pieces))


if __name__ == "__main__":
    run(main)
