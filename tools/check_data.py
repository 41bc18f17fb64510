"""Check a Megatron dataset in full and describe it.

    python tools/check_data.py data/web_text_document --vocab-size 50304 --samples 2 --tokenizer gpt2:tokenizers/gpt2

Opening a dataset reads only its headers; this reads everything, by blocks: every length, pointer and document index,
and every token id.  Exit status 1, with one line, at the first defect; otherwise one paragraph per dataset, and with
--samples the beginning of that many documents as text.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.config.command import Parser, positive, run
from minitron.config.text import printable
from minitron.data.gpt import scan_ids
from minitron.data.indexed import DataError, IndexedDataset, check_index, read_sidecar
from minitron.data.tokenizers import Tokenizer
from minitron.interop.tokenizers import load_tokenizer

SHOWN_TOKENS = 64
QUANTILES = (0, 0.25, 0.5, 0.75, 0.99, 1)


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prefix", nargs="+", help="dataset, without .bin or .idx")
    add("--vocab-size", type=positive(int), help="ids must lie below it (by default as PREFIX.json says)")
    add("--samples", type=positive(int), default=0, metavar="K", help="show the beginning of K documents")
    add("--tokenizer", help="to show them as text: bytes, gpt2:DIR, llama3:FILE, llama2:FILE or hf:DIR")
    options = parser.parse_args(argv)
    tokenizer = load_tokenizer(options.tokenizer, "--tokenizer") if options.tokenizer else None
    for prefix in options.prefix:
        dataset = IndexedDataset(prefix)
        largest = check_dataset(dataset, options.vocab_size, tokenizer)
        print(describe(dataset, largest))
        show(dataset, options.samples, tokenizer)


def check_dataset(dataset: IndexedDataset, vocab_size: int | None, tokenizer: Tokenizer | None) -> int:
    """Read everything; returns the largest token id.  Raises DataError at the first defect."""
    prefix = dataset.prefix
    check_index(dataset)
    sidecar = read_sidecar(prefix)
    if sidecar and tokenizer and sidecar["fingerprint"] != tokenizer.fingerprint:
        raise DataError(
            f"{prefix}.json says tokenizer {sidecar['tokenizer']} with fingerprint "
            f"{sidecar['fingerprint']}, but --tokenizer has {tokenizer.fingerprint}; give the one that "
            "made the data"
        )
    if vocab_size is not None:
        return scan_ids(dataset, vocab_size, "--vocab-size")
    if sidecar is not None:
        return scan_ids(dataset, sidecar["vocab_size"], f"{prefix}.json's vocab_size")
    return scan_ids(dataset, np.iinfo(np.int64).max)


def describe(dataset: IndexedDataset, largest: int) -> str:
    quantiles = np.quantile(dataset.lengths, QUANTILES).astype(int)
    lengths = [f"{share:.0%} {length:,}" for share, length in zip(QUANTILES, quantiles, strict=True)]
    sidecar, documents = read_sidecar(dataset.prefix), len(dataset.document_indices) - 1
    made_by = f"{printable(sidecar['tokenizer'])} of {sidecar['vocab_size']} ids" if sidecar else "unknown (no .json)"
    return "\n".join(
        [
            printable(dataset.prefix),
            f"  documents {documents:,}   sequences {len(dataset):,}   tokens {dataset.num_tokens:,}",
            f"  dtype {dataset.dtype}   largest id {largest}   fingerprint {dataset.fingerprint}",
            "  sequence lengths   " + "   ".join(lengths),
            f"  tokenizer {made_by}",
        ]
    )


def show(dataset: IndexedDataset, count: int, tokenizer: Tokenizer | None) -> None:
    """Print the beginnings of `count` sequences, spread evenly over the file."""
    for sequence in np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int):
        tokens = dataset.get(sequence, length=min(SHOWN_TOKENS, int(dataset.lengths[sequence]))).tolist()
        shown = tokenizer.decode(tokens) if tokenizer else tokens
        print(f"  sequence {sequence}: {shown!r}")


if __name__ == "__main__":
    run(main)
