"""One rank's part of a microbatch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minitron.parallel.tiles import Documents


@dataclass
class Batch:
    """This rank's part of a microbatch, on its device: its part of the sequence of every sample.

    `order`: the places of the s/cp tokens in the full sequence. `positions` count from the start of each document
    when documents are kept apart, else they equal `order`. `documents`: where the documents begin and end in the whole
    sequence. In a batch of a Loader all tensors are views of `packed`, so that one copy moves them all.
    """

    tokens: Tensor  # [s/cp, b]
    labels: Tensor  # [s/cp, b]
    mask: Tensor  # [s/cp, b] float32, 0 where the label does not count
    positions: Tensor  # [s/cp, b] or [s/cp, 1]
    order: Tensor  # [s/cp]
    samples: Tensor  # [b] index in the run's sample order
    count: float  # sum of mask, on the host
    step: Tensor | int = 0  # 0-d int64, for dropout
    documents: Documents | None = None
    squared_lengths: float = 0.0  # summed over documents, where they are kept apart, without padding
    padding: int = 0  # positions that only fill the ends of samples, which are not counted as work
    packed: Tensor | None = None  # int64

    def pack(self, pinned: bool) -> Batch:
        """Copy all tensors into one buffer on the host, `packed`. The new batch's tensors are views of it."""
        sources = self._tensors().values()
        words = sum(-(-x.nbytes // 8) for x in sources)
        batch = self._with(torch.empty(words, dtype=torch.int64, pin_memory=pinned))
        for view, x in zip(batch._tensors().values(), sources):
            view.copy_(x)
        return batch

    def to(self, device: torch.device) -> Batch:
        """Copy to the device, without waiting if the host's memory is pinned. Only for a batch that has `packed`."""
        assert self.packed is not None
        return self._with(self.packed.to(device, non_blocking=True))

    def static_copy(self) -> Batch:
        """Copy to other memory of the device, into which the `packed` of any batch of the run can be copied."""
        assert self.packed is not None
        return self._with(self.packed.clone())

    def _tensors(self) -> dict[str, Any]:
        """Return the tensors by name, in their order in `packed`."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        return tensors if self.documents is None else tensors | {"spans": self.documents.spans}

    def _with(self, packed: Tensor) -> Batch:
        """Return this batch with views of `packed` as its tensors.

        It uses few operations, because the host runs them between two steps.
        """
        views = self._tensors()
        parts = packed.split([-(-x.nbytes // 8) for x in views.values()])
        for (name, x), part in zip(views.items(), parts):
            if x.dtype != packed.dtype:
                part = part.view(x.dtype)[: x.numel()]
            views[name] = part.view(x.shape)
        documents = self.documents and replace(self.documents, spans=views.pop("spans"))
        return replace(self, packed=packed, documents=documents, **views)


TENSORS = ("tokens", "labels", "mask", "positions", "order", "samples", "step")  # the documents' spans follow
