"""A microbatch as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minitron.parallel.packed import Documents


@dataclass
class Batch:
    """One microbatch as this rank sees it: its part of the sequence of every sample, on its device.

    `order` are the places of the s/cp tokens in the full sequence; `positions` count from the start of each document
    when documents are kept apart, else they equal `order`. `documents` are each sample's boundaries [0, ..., s], on
    the host.
    """

    tokens: Tensor  # [s/cp, b]
    labels: Tensor  # [s/cp, b]
    mask: Tensor  # [s/cp, b] float32, 0 where the label does not count
    positions: Tensor  # [s/cp, b] or [s/cp, 1]
    order: Tensor  # [s/cp]
    samples: Tensor  # [b] index in the run's sample order
    count: float  # sum of mask, known to the host
    step: int = 0
    documents: Documents | None = None
    squared_lengths: float = 0.0  # summed over documents, where they are kept apart, without padding
    padding: int = 0  # positions at the ends of samples that only fill them and are no work
