"""Check a Megatron dataset in full and describe it.

    python tools/check_data.py data/web_text_document --vocab-size 50304 --samples 2 --tokenizer gpt2:tokenizers/gpt2

Opening a dataset reads only its headers; this reads everything, by blocks: every length, pointer and document index,
and every token id.  Exit status 1, with one line, at the first defect; otherwise one paragraph per dataset, and with
--samples the beginning of that many documents as text.
"""

import argparse
import sys

import numpy as np

from minitron.data.gpt import check_ids
from minitron.data.indexed import IndexedDataset, is_contiguous, read_sidecar
from minitron.data.tokenizers import Tokenizer, load_tokenizer

BLOCK_TOKENS = 1 << 24
SHOWN_TOKENS = 64
QUANTILES = (0, 0.25, 0.5, 0.75, 0.99, 1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", nargs="+", help="dataset, without .bin or .idx")
    parser.add_argument("--vocab-size", type=int, help="ids must lie below it (by default as PREFIX.json says)")
    parser.add_argument("--samples", type=int, default=0, metavar="K", help="show the beginning of K documents")
    parser.add_argument("--tokenizer", help="to show them as text: bytes, gpt2:DIR, llama3:FILE or llama2:FILE")
    options = parser.parse_args(arguments)
    try:
        tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
        for prefix in options.prefix:
            dataset = IndexedDataset(prefix)
            largest = check_dataset(dataset, options.vocab_size, tokenizer)
            print(describe(dataset, largest))
            show(dataset, options.samples, tokenizer)
    except ValueError as error:
        sys.exit(f"error: {error}")


def check_dataset(dataset: IndexedDataset, vocab_size: int | None, tokenizer: Tokenizer | None) -> int:
    """Read everything; returns the largest token id (-1 without tokens).  Raises ValueError at the first defect."""
    prefix, indices = dataset.prefix, dataset.document_indices
    again = "the index is damaged: copy or preprocess it again"
    if dataset.lengths.min(initial=0) < 0:
        shortest = int(dataset.lengths.argmin())
        raise ValueError(f"{prefix}.idx: sequence {shortest} has {dataset.lengths[shortest]} tokens; {again}")
    if not is_contiguous(dataset):
        raise ValueError(f"{prefix}.idx: its pointers are not the running sum of its lengths; {again}")
    if not len(indices) or indices[0] != 0 or indices[-1] != len(dataset) or (np.diff(indices) < 0).any():
        raise ValueError(f"{prefix}.idx: its document indices do not rise from 0 to {len(dataset)}; {again}")
    if dataset.num_bin_bytes != dataset.num_tokens * dataset.dtype.itemsize:
        raise ValueError(f"{prefix}.bin: {dataset.num_bin_bytes} bytes, but the index needs "
                         f"{dataset.num_tokens * dataset.dtype.itemsize}; it belongs to another index: copy both again")
    sidecar = read_sidecar(prefix)
    if sidecar and tokenizer and sidecar["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(f"{prefix}.json says tokenizer {sidecar['tokenizer']} with fingerprint "
                         f"{sidecar['fingerprint']}, but --tokenizer has {tokenizer.fingerprint}; give the one that "
                         "made the data")
    if vocab_size is None:
        vocab_size = sidecar["vocab_size"] if sidecar else np.iinfo(np.int64).max
    largest = -1
    for begin in range(0, dataset.num_tokens, BLOCK_TOKENS):
        tokens = dataset.tokens(begin, min(begin + BLOCK_TOKENS, dataset.num_tokens))
        check_ids(tokens, vocab_size, f"{prefix}.bin: tokens {begin} to {begin + len(tokens)}")
        largest = max(largest, int(tokens.max()))
    return largest


def describe(dataset: IndexedDataset, largest: int) -> str:
    quantiles = np.quantile(dataset.lengths, QUANTILES).astype(int) if len(dataset) else [0] * len(QUANTILES)
    lengths = [f"{share:.0%} {length:,}" for share, length in zip(QUANTILES, quantiles, strict=True)]
    sidecar, documents = read_sidecar(dataset.prefix), len(dataset.document_indices) - 1
    made_by = f"{sidecar['tokenizer']} of {sidecar['vocab_size']} ids" if sidecar else "unknown (no .json)"
    return "\n".join([
        dataset.prefix,
        f"  documents {documents:,}   sequences {len(dataset):,}   tokens {dataset.num_tokens:,}",
        f"  dtype {dataset.dtype}   largest id {largest}   fingerprint {dataset.fingerprint}",
        "  sequence lengths   " + "   ".join(lengths),
        f"  tokenizer {made_by}"])


def show(dataset: IndexedDataset, count: int, tokenizer: Tokenizer | None) -> None:
    """Print the beginnings of `count` sequences, spread evenly over the file."""
    for sequence in np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int):
        tokens = dataset.get(sequence, length=min(SHOWN_TOKENS, int(dataset.lengths[sequence]))).tolist()
        shown = tokenizer.decode(tokens) if tokenizer else tokens
        print(f"  sequence {sequence}: {shown!r}")


if __name__ == "__main__":
    main()
