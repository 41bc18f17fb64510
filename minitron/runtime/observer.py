"""What looks at a training loop: one protocol, in one order.

    for step in steps:
        ... the step is queued on the device ...
        for observer in observers: observer.after(done)
    for observer in observers: observer.close()

All ranks have the same observers in the same order, since most of them communicate. Their order is in `train.train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class StepDone(NamedTuple):
    """A step that the host has queued, and the device may still run.

    consumed_samples: by this step and all before. batches: of this rank. figures: loss, grad_norm, skipped, nan and the
    loss scale that the step used, [5] float64 on the device, equal on all ranks.
    """

    step: int
    consumed_samples: int
    lr: float
    batches: Sequence[Any]
    figures: Tensor


class Observer:
    """Looks at every step. A method that an observer does not need does nothing."""

    def after(self, done: StepDone) -> None:
        """Look at a step that has been queued. No GPU may wait here."""

    def close(self) -> None:
        """Finish what is under way after the last step."""
