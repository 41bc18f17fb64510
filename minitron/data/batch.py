"""A microbatch as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from minitron.parallel.packed import Documents


@dataclass
class Batch:
    """One microbatch as this rank sees it: its part of the sequence of every sample, on its device.

    `order` are the places of the s/cp tokens in the full sequence; `positions` count from the start of each document
    when documents are kept apart, else they equal `order`. `documents` are each sample's boundaries [0, ..., s], on
    the host. All that differs from step to step on the device is in the tensors, and those of a loader are views of
    `packed`, so that one copy brings them.
    """

    tokens: Tensor  # [s/cp, b]
    labels: Tensor  # [s/cp, b]
    mask: Tensor  # [s/cp, b] float32, 0 where the label does not count
    positions: Tensor  # [s/cp, b] or [s/cp, 1]
    order: Tensor  # [s/cp]
    samples: Tensor  # [b] index in the run's sample order
    count: float  # sum of mask, known to the host
    step: Tensor | int = 0  # 0-d int64, for dropout
    documents: Documents | None = None
    padding: tuple[int, ...] = ()  # of each sample: the last positions, which fill it and are no work
    packed: Tensor | None = None  # bytes

    def to(self, device: torch.device) -> Batch:
        """Copy to the device, without waiting where the host's memory is pinned. Only for a batch that is packed."""
        packed = self.packed.to(device, non_blocking=True)
        moved = {}
        for name in TENSORS:
            host = getattr(self, name)
            start = host.storage_offset() * host.itemsize
            moved[name] = packed[start : start + host.nbytes].view(host.dtype).view(host.shape)
        return replace(self, packed=packed, **moved)


TENSORS = ("tokens", "labels", "mask", "positions", "order", "samples", "step")
ALIGNMENT = 128  # bytes, of each tensor in `packed`: kernels read wide


def pack(arrays: dict[str, np.ndarray], pinned: bool) -> dict[str, Tensor]:
    """Copy the arrays, named TENSORS, into one buffer: {"packed": the buffer, name: its view}."""
    starts, size = {}, 0
    for name in TENSORS:
        starts[name], size = size, size + -(-arrays[name].nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    tensors = {"packed": packed}
    for name, start in starts.items():
        source = torch.from_numpy(np.ascontiguousarray(arrays[name]))
        view = packed[start : start + source.nbytes].view(source.dtype).view(arrays[name].shape)
        tensors[name] = view.copy_(source.view(arrays[name].shape))
    return tensors
