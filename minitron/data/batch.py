"""A microbatch as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitron.parallel.tiles import Documents


@dataclass
class Batch:
    """One microbatch as this rank sees it: its part of the sequence of every sample, on its device.

    `order`: the places of the s/cp tokens in the full sequence. `positions` count from the start of each document
    when documents are kept apart, else they equal `order`. `documents`: where those begin, over the whole sequence.
    In a batch of a Loader all tensors are views of `packed`, so that one copy moves them all.
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
    squared_lengths: float = 0.0  # summed over documents, where they are kept apart, without padding
    padding: int = 0  # how many positions, at the ends of samples, only fill them and are no work
    packed: Tensor | None = None  # int64

    def to(self, device: torch.device) -> Batch:
        """Copy to the device, without waiting if the host's memory is pinned. Only for a batch that has `packed`."""
        assert self.packed is not None
        return self._with(self.packed.to(device, non_blocking=True))

    def for_any(self) -> Batch:
        """Copy to other memory of the device, into which the `packed` of any batch of the run can be copied."""
        assert self.packed is not None
        return self._with(self.packed.clone())

    def _with(self, packed: Tensor) -> Batch:
        mine: dict[str, Tensor] = {name: getattr(self, name) for name in TENSORS}
        documents = self.documents
        if documents is not None:
            mine["spans"] = documents.spans
        views: dict[str, Any] = _views(packed, mine)
        if documents is not None:
            documents = replace(documents, spans=views.pop("spans"))
        return replace(self, packed=packed, documents=documents, **views)


TENSORS = ("tokens", "labels", "mask", "positions", "order", "samples", "step")  # and then the documents' spans


def pack(arrays: dict[str, np.ndarray], pinned: bool) -> dict[str, Tensor]:
    """Copy arrays into one buffer; return it as "packed", and each tensor, a view of it, by its name.

    arrays: those of TENSORS, in this order, and "spans" if documents are kept apart.
    """
    sources = {name: torch.from_numpy(np.ascontiguousarray(x)).view(x.shape) for name, x in arrays.items()}
    packed = torch.empty(sum(-(-x.nbytes // 8) for x in sources.values()), dtype=torch.int64, pin_memory=pinned)
    views = _views(packed, sources)
    for name, view in views.items():
        view.copy_(sources[name])
    return {"packed": packed, **views}


def _views(packed: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the shapes and dtypes of `like` that lie one after another in `packed`.

    In few operations: the host makes them between two steps.
    """
    kinds = [(x.shape, x.dtype) for x in like.values()]
    numels = [shape.numel() for shape, _ in kinds]
    parts = packed.split([-(-numel * dtype.itemsize // 8) for numel, (_, dtype) in zip(numels, kinds)])
    views = {}
    for name, part, numel, (shape, dtype) in zip(like, parts, numels, kinds):
        if dtype != packed.dtype:
            part = part.view(dtype)[:numel]
        views[name] = part.view(shape)
    return views
