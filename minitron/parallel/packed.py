"""Documents packed into one sequence and attended to apart: where they are, for the host and for a kernel.

Problem: a sample of 4096 tokens may hold thirty documents, none of which may see another. One call
per document and layer is bound by the host; and a CUDA graph repeats its recorded calls, although the next batch has
other documents. The idea: every token carries the begin and the end of its document, in a tensor
that travels with the batch. A kernel that masks by it does all documents in one call, of one shape for any of them.

    boundaries 0 3 8 of a sample of 8 tokens      begins 0 0 0 3 3 3 3 3      ends 3 3 3 8 8 8 8 8

The other kernels get a tile for each document (parallel/context.py), from the boundaries that the host knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# For each sample its boundaries 0 = b_0 < b_1 < ... < b_m = s. Tuples, since they are keys of caches: every layer has
# the same boundaries, and gets what was made for the first layer.
Boundaries = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Documents:
    """The documents of a microbatch, as the host knows them, and as a kernel does: spans int32 [2, b, s].

    In a recorded step `boundaries` are those of the batch with which it was recorded.
    """

    boundaries: Boundaries
    spans: Tensor


def as_documents(boundaries: Iterable[Iterable[int]]) -> Documents:
    """Make documents of each sample's boundaries, which come in sequences or arrays of any kind; spans on the host."""
    samples = tuple(tuple(int(position) for position in sample) for sample in boundaries)
    for sample in samples:
        assert (sample[0], sample[-1]) == (0, samples[0][-1]) and min(np.diff(sample)) > 0, f"boundaries {sample}"
    spans = [
        [np.repeat(sample[side : len(sample) - 1 + side], np.diff(sample)) for sample in samples] for side in (0, 1)
    ]
    return Documents(samples, torch.from_numpy(np.array(spans, np.int32)))
