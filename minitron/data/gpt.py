"""Samples of s + 1 tokens from a token file, in the order of Megatron's GPTDataset.

Documents are shuffled, laid end to end, and cut every s tokens; the cuts are shuffled again. Three arrays store this:

    document index   int32 [epochs * documents]   a shuffled list of sequences, every epoch's copy in it
    sample index     [samples + 1, 2]             where each cut falls: (position in the document index, token offset)
    shuffle index    uint32 [samples]             sample i is cut number shuffle[i]

Sample k spans tokens k*s .. k*s + s of the stream: s inputs and, shifted by one, s labels, so neighbours share a token.
Example, s = 4, documents A (5 tokens), B (3), C (6), shuffled to B C A:

    stream   B0 B1 B2 C0 C1 C2 C3 C4 C5 A0 A1 A2 A3 A4
    cuts     0           4           8           12        rows (0, 0) (1, 1) (1, 5) (2, 3): three samples

As many epochs are laid out as the requested samples need. If less than 80 % of the last one would be used, it is
shuffled apart from the others, so that its documents come last. All shuffles come from one
`numpy.random.RandomState(seed)`, which makes the order equal to Megatron's.

The arrays are a pure function of their key (data, sequences, samples, s, seed); they are built once, cached as .npy and
memory-mapped. A cut is in the document whose cumulative length first exceeds k*s. NumPy finds it fast, by a cumsum and
a searchsorted.

Left out: padding of a last partial sample (Megatron can keep one for validation), s3 paths.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minitron.config.files import write_json
from minitron.data.cache import Cache, fingerprint_of, load_arrays, save_arrays
from minitron.data.indexed import DataError, IndexedDataset

BLOCK_TOKENS = 1 << 20  # a scan reads a block twice, for its least and its largest id
MAX_SEQUENCES = 1 << 31  # in a file: an id is an int32, as in Megatron


class Sample(NamedTuple):
    """One sample of s inputs and their labels.

    tokens: int64 [s + 1].
    starts: int32, ascending offsets in `tokens` at which a new document begins, without 0; from the index, not from
        end-of-document tokens. s itself is possible: then only the last label is of the new document.
    mask: float32 [s] loss weights of the labels, or None for all ones.
    padding: the number of inputs, at the end, that only fill the sample.
    """

    tokens: np.ndarray
    starts: np.ndarray
    mask: np.ndarray | None = None
    padding: int = 0


class EpochPlan(NamedTuple):
    """How many epochs the document index holds, and how many samples they give.

    first_samples: those before a last epoch that is shuffled apart; `samples` if it is not.
    """

    epochs: int
    samples: int
    first_samples: int


class GPTDataset:
    """Samples 0 .. len - 1 of the given range of sequences, at least `num_samples` of them.

    sequences: the range of sequences (a split) to draw from. cache: where the index arrays are kept.
    vocab_size: drawing a sample with an id outside 0 .. vocab_size - 1 raises DataError.
    Raises ValueError when the range holds fewer than seq_len + 1 tokens (Megatron would repeat them inside a sample,
    and loop for ever on none).
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        num_samples: int,
        seq_len: int,
        seed: int,
        cache: Cache,
        vocab_size: int,
    ):
        if sequences.stop > MAX_SEQUENCES:
            why = f"sequence {sequences.stop - 1} is beyond {MAX_SEQUENCES - 1}, the largest id in int32"
            raise DataError(f"{indexed.prefix}: {why}; split it into several files and blend them in data.paths")
        self.indexed, self.vocab_size = indexed, vocab_size
        key = {"data": indexed.fingerprint, "sequences": [sequences.start, sequences.stop], "samples": num_samples}
        key |= {"seq_len": seq_len, "seed": seed}
        self.fingerprint = fingerprint_of(json.dumps(key).encode())
        name = f"gpt-{self.fingerprint}"
        folder = cache.build_once(name, lambda partial: _save_index(partial, key, indexed, sequences))
        self._documents, self._cuts, self._shuffle = load_arrays(folder, "document", "sample", "shuffle")

    def __len__(self) -> int:
        return len(self._shuffle)

    def __getitem__(self, i: int) -> Sample:
        cut = int(self._shuffle[i])
        (first, begin), (last, end) = self._cuts[cut : cut + 2].tolist()
        parts = []
        for position in range(first, last + 1):
            offset = begin if position == first else 0
            length = end + 1 - offset if position == last else None
            part = self.indexed.get(int(self._documents[position]), offset, length)
            if len(part):
                parts.append(part)
        tokens = np.concatenate(parts, dtype=np.int64)
        check_ids(tokens, self.vocab_size, f"{self.indexed.prefix}.bin: sample {i}")
        return Sample(tokens, np.cumsum([len(part) for part in parts[:-1]], dtype=np.int32))


def check_ids(tokens: np.ndarray, vocab_size: int, where: str, key: str = "model.vocab_size") -> None:
    """Raise DataError for an id outside 0 .. vocab_size - 1: naming the place, the id and the key of vocab_size."""
    low, high = tokens.min(initial=0), tokens.max(initial=0)
    allowed = f"{key}={vocab_size} allows 0 to {vocab_size - 1}"
    if low < 0:
        raise DataError(f"{where} holds token id {low}, but {allowed}; copy or preprocess the data again")
    if high >= vocab_size:
        raise DataError(
            f"{where} holds token id {high}, but {allowed}; set it to the vocabulary the data were made with"
        )


def scan_ids(file: IndexedDataset, vocab_size: int, key: str = "model.vocab_size", count: int | None = None) -> int:
    """Return the largest id among the first `count` tokens of a file, by default all.

    Raises DataError, naming the position, for an id outside 0 .. vocab_size - 1, and for a file without token ids.
    """
    end = file.num_bin_bytes // file.dtype.itemsize
    if file.dtype.kind not in "iu":
        raise DataError(f"{file.prefix}.idx: {file.dtype} values are not token ids; give a dataset of an integer dtype")
    if not end:
        fix = "leave this dataset out, or preprocess text that is not empty"
        raise DataError(f"{file.prefix}.bin: no tokens in {len(file.document_indices) - 1} documents; {fix}")
    end, largest = min(end, end if count is None else count), 0
    for begin in range(0, end, BLOCK_TOKENS):
        tokens = file.tokens(begin, min(begin + BLOCK_TOKENS, end))
        low, high = tokens.min(), tokens.max()
        if low < 0 or high >= vocab_size:
            bad = int(((tokens < 0) | (tokens >= vocab_size)).argmax())
            check_ids(tokens[bad : bad + 1], vocab_size, f"{file.prefix}.bin: position {begin + bad}", key)
        largest = max(largest, int(high))
    return largest


def plan_epochs(tokens_per_epoch: int, num_samples: int, seq_len: int) -> EpochPlan:
    """Plan the epochs for `num_samples` samples, and whether the last is shuffled apart (Megatron's rule)."""
    epochs = max(1, -(-(num_samples * seq_len + 1) // tokens_per_epoch))
    samples = (epochs * tokens_per_epoch - 1) // seq_len
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_len
    one_epoch = (tokens_per_epoch - 1) // seq_len
    apart = epochs > 1 and num_samples - before_last < int(0.80 * one_epoch)
    return EpochPlan(epochs, samples, before_last if apart else samples)


def build_sample_index(lengths: np.ndarray, document_index: np.ndarray, num_samples: int, seq_len: int) -> np.ndarray:
    """Find where sample k begins, stream token k * seq_len: rows (position in document_index, offset in tokens).

    lengths: int32 [sequences] -> [num_samples + 1, 2], int32 while positions fit, as in Megatron.
    """
    fits = len(document_index) <= np.iinfo(np.int32).max
    length = lengths[document_index]
    ends = np.cumsum(length, dtype=np.int64)
    cuts = np.arange(num_samples + 1, dtype=np.int64) * seq_len
    document = np.searchsorted(ends, cuts, side="right")  # first document that ends beyond the cut: never empty
    rows = np.stack([document, cuts - (ends[document] - length[document])], 1)
    rows[0] = 0  # even if the first document is empty
    return rows.astype(np.int32 if fits else np.int64)


def count_tokens(indexed: IndexedDataset, sequences: range, seq_len: int) -> int:
    """Count the tokens of the range of sequences. Raises ValueError if they make no sample."""
    tokens = int(indexed.lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
    if tokens < seq_len + 1:
        have = f"sequences {sequences.start} to {sequences.stop} hold {tokens} tokens"
        need = f"fewer than one sample of train.seq_len={seq_len} + 1"
        raise ValueError(f"{indexed.prefix}: {have}, {need}; shorten it, add data or change data.split")
    return tokens


def _save_index(folder: Path, key: dict[str, Any], indexed: IndexedDataset, sequences: range) -> None:
    """Build the three arrays of `key` and write them into `folder`, and the key as key.json, for people to read."""
    tokens = count_tokens(indexed, sequences, key["seq_len"])
    plan, rng = plan_epochs(tokens, key["samples"], key["seq_len"]), np.random.RandomState(key["seed"])
    documents = np.tile(np.arange(sequences.start, sequences.stop, dtype=np.int32), plan.epochs)
    fits = plan.samples < np.iinfo(np.uint32).max - 1
    shuffle = np.arange(plan.samples, dtype=np.uint32 if fits else np.int64)
    last = 0 if plan.first_samples == plan.samples else len(sequences)
    for index, first in (documents, len(documents) - last), (shuffle, plan.first_samples):
        for part in index[:first], index[first:]:  # of two ranges, if the last epoch is apart
            rng.shuffle(part)
    cuts = build_sample_index(indexed.lengths, documents, plan.samples, key["seq_len"])
    save_arrays(folder, document=documents, sample=cuts, shuffle=shuffle)
    write_json(folder / "key.json", key | plan._asdict())
