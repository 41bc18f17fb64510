"""Mix several datasets by weight, deterministically: Megatron's greedy rule.

At step k the dataset that is furthest behind its share is drawn: the largest w_i * max(k, 1) - count_i, ties to the
lowest i. After any number of steps every dataset is within about one sample of its share.

    weights .5 .3 .2      step 0 1 2 3 4 5 6 7 8 9
                          draw 0 1 2 0 1 0 2 0 1 0

The rule is a loop, which is slow in Python. But slightly wrong counts converge to the right ones, because the rule
draws what is missing. So the steps are cut into chunks that NumPy computes together, each from guessed counts (its
shares, rounded). A chunk whose first counts differ from the last counts of the chunk before is computed again from
these, until all chunks agree. The first chunk is exact, so each round makes at least one more chunk exact; in practice
a few rounds are enough. The order is the loop's, bit for bit.

Left out: blending by dataset size without weights.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minitron.data.cache import Cache, fingerprint_of, load_arrays, save_arrays
from minitron.data.gpt import GPTDataset, Sample
from minitron.data.sft import SFTDataset

SURPLUS = 1.005  # Megatron asks every part for this much more than its share
MAX_CHUNKS = 4096


class BlendedDataset:
    """`num_samples` samples drawn from `parts` by the greedy rule; part i holds `part_samples(num_samples, w_i)`.

    A longer blend begins with the same order. SFTDatasets also keep the same samples, so their blend's fingerprint does
    not depend on num_samples, and a resumed run may be longer. A blend of GPTDatasets holds up to SURPLUS times
    num_samples if its parts are long enough: with data.skip_samples a run reads more samples than it trains.
    """

    def __init__(
        self, parts: Sequence[GPTDataset | SFTDataset], weights: Sequence[float], num_samples: int, cache: Cache
    ):
        shares = normalize(weights)
        assert all(len(part) >= part_samples(num_samples, share) for part, share in zip(parts, shares, strict=True))
        self.parts = list(parts)
        key = f"{shares.tolist()} {num_samples}"
        order, length = str(shares.tolist()), num_samples
        if isinstance(parts[0], GPTDataset):  # after k samples the rule has drawn at most w_i k + 1 of part i
            order, held = key, min(int((len(part) - 1) / share) for part, share in zip(parts, shares))
            length = max(num_samples, min(held, int(num_samples * SURPLUS)))
        self.fingerprint = fingerprint_of(" ".join([order, *(part.fingerprint for part in parts)]).encode())

        def build(folder: Path) -> None:
            part, sample = greedy_order(shares, length)
            save_arrays(folder, part=part, sample=sample)

        # Only the shares decide the order, so runs over other data with the same blend share the arrays.
        folder = cache.build_once(f"blend-{fingerprint_of(f'{shares.tolist()} {length}'.encode())}", build)
        self._part, self._sample = load_arrays(folder, "part", "sample")

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, i: int) -> Sample:
        return self.parts[self._part[i]][int(self._sample[i])]


def normalize(weights: Sequence[float]) -> np.ndarray:
    """Return float64 shares that sum to one. Raises ValueError unless every weight is finite and positive."""
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            fix = "leave that dataset out or give it a weight above 0"
            raise ValueError(f"data.paths: blend weight {weight} is not a positive number; {fix}")
    if len(weights) > (most := np.iinfo(np.int16).max):
        raise ValueError(f"data.paths: {len(weights)} datasets, at most {most} can be blended; merge some")
    shares = np.array(weights, np.float64)
    return shares / np.sum(shares)


def part_samples(num_samples: int, share: float) -> int:
    """Count the samples that a part of this normalized weight must hold."""
    return math.ceil(math.ceil(num_samples * share) * SURPLUS)


def greedy_order(shares: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the greedy rule exactly: part int16 [num_samples], sample within that part int64 [num_samples]."""
    # Megatron normalizes here once more; it can move the last bit of a share, and with it a tie.
    shares = shares / np.sum(shares)
    chunks = max(1, min(MAX_CHUNKS, math.isqrt(num_samples)))
    steps = -(-num_samples // chunks)
    first = np.arange(chunks, dtype=np.int64) * steps
    begin = _rounded_shares(shares, first)
    end = np.empty_like(begin)
    part, sample = np.empty((steps, chunks), np.int16), np.empty((steps, chunks), np.int64)
    pending = np.arange(chunks)
    while len(pending):
        result = _run_chunks(shares, first[pending], begin[:, pending], steps)
        part[:, pending], sample[:, pending], end[:, pending] = result
        pending = 1 + np.flatnonzero((begin[:, 1:] != end[:, :-1]).any(axis=0))
        begin[:, pending] = end[:, pending - 1]
    return part.T.reshape(-1)[:num_samples], sample.T.reshape(-1)[:num_samples]


def _run_chunks(shares: np.ndarray, first: np.ndarray, counts: np.ndarray, steps: int) -> tuple[np.ndarray, ...]:
    """Run the greedy loop in every chunk at once.

    first [chunks], counts [parts, chunks] -> part, sample [steps, chunks], final counts [parts, chunks].
    """
    part, sample = np.empty((steps, len(first)), np.int16), np.empty((steps, len(first)), np.int64)
    counts, column = counts.copy(), np.arange(len(first))
    for step in range(steps):
        behind = shares[:, None] * np.maximum(first + step, 1.0) - counts
        part[step] = draw = behind.argmax(axis=0)
        sample[step] = counts[draw, column]
        counts[draw, column] += 1.0
    return part, sample, counts


def _rounded_shares(shares: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Estimate the counts before each step, float64 [parts, steps]: rounded down, one more for those cut most."""
    exact = shares[:, None] * step
    counts = np.floor(exact)
    rank = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0)
    return counts + (rank < step - counts.sum(axis=0))
