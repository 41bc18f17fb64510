"""Observers of a training loop: one protocol, one order.

    for step in steps:
        ... the step is queued on the device ...
        for observer in observers: observer.after(done)
    for observer in observers: observer.close()

The first observer is the meter. Its `after` calls `on_figures` of all: on a GPU with the figures of the step before, on
a CPU with those of this step. All ranks have the same observers in the same order, since most of them communicate. See
`train.train` for the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minitron.runtime.log_formats import Iteration


class StepDone(NamedTuple):
    """A step that the host has queued, and that the device may still run.

    consumed_samples: includes this step's. batches: this rank's. figures: loss, grad_norm, skipped, nan and the loss
    scale that the step used, [5] float64 on the device, equal on all ranks.
    """

    step: int
    consumed_samples: int
    lr: float
    batches: Sequence[Any]
    figures: Tensor


class Observer:
    """Observes every step. The default of each method does nothing."""

    def after(self, done: StepDone) -> None:
        """Observe a step that has been queued. Must not wait for the device."""

    def on_figures(self, it: Iteration) -> None:
        """Read the figures of a step; on a GPU they come one step late. Equal on all ranks."""

    def close(self) -> None:
        """Finish what is under way after the last step."""


class LateCopy:
    """A copy of a device tensor to the host. It begins now, and `read` waits for it. A dry run copies nothing."""

    def __init__(self, x: Tensor):
        self.host = x if x.is_meta else x.to("cpu", non_blocking=True)
        self.arrival = torch.cuda.current_stream().record_event() if x.is_cuda else None

    def read(self) -> Tensor:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.host
