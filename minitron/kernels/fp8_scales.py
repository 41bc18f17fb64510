"""Scales of FP8 tensors that outlive one cast: from the magnitudes of past steps, and of weights kept as FP8 bytes.

A scale is the number that brings a tensor's largest magnitude to the limit of its format. `DelayedScaling` makes it
from the largest magnitudes of the last steps, so that it is known before the tensor is. If weights are kept as FP8
bytes (precision.fp8_params), the optimizer casts them. It holds only slices of a weight: `WeightScales` has the scales,
and collects the largest magnitudes of the slices.

                 scale of the new weights                           their largest magnitude
    delayed      from the histories, as every rank has them         joins those of the step, when they enter histories
    current      from the new weights themselves: data ranks agree on their magnitudes before the cast

Both are what a cast of the whole weight would have taken, so the bytes are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Axis

KINDS = {"x": torch.float8_e4m3fn, "weight": torch.float8_e4m3fn, "dy": torch.float8_e5m2}  # by role
ROLES = tuple(KINDS)
HISTORY = 16  # steps whose magnitudes a scale is made from
LARGEST_SCALE = 2.0**63  # its reciprocal is the smallest: a product of two reciprocals is still a normal float32


def limit(kind: torch.dtype) -> float:
    """Return the largest value of a format."""
    return torch.finfo(kind).max


def scale_of(top: Tensor, limits: Tensor | float) -> Tensor:
    """Return the scales that bring magnitudes `top` to the limits of their formats, at most LARGEST_SCALE.

    A tensor of zeros, and one whose magnitude is not finite, has scale 1.
    """
    ordinary = (top > 0) & (top < math.inf)
    return (limits / top).clamp(1 / LARGEST_SCALE, LARGEST_SCALE).masked_fill(~ordinary, 1.0)


class DelayedScaling:
    """Scales of tensors, each from the largest magnitude that its tensor had in the last HISTORY steps.

    roles: those of the tensors. axes: ranks along them have the same scales, because they gather each other's casts
    (tp) or because a checkpoint keeps one history for all of them (data ranks). history [HISTORY, tensors], newest
    first, is the whole state between steps.
    """

    def __init__(self, roles: Sequence[str], axes: Sequence[Axis], device: torch.device):
        self.limits = torch.tensor([limit(KINDS[role]) for role in roles], device=device)
        self.amax, self.scale = torch.zeros_like(self.limits), torch.ones_like(self.limits)
        self.history = self.limits.new_zeros(HISTORY, len(roles))
        self.axes, self.cold = axes, True  # cold: there is no history yet
        self._views = list(zip(self.scale.split(1), self.amax.split(1)))  # made once: every cast asks for two

    def of(self, i: int, record: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return (scale, amax) of tensor i, views [1]: no scale before there is a history, no amax unless `record`."""
        scale, amax = self._views[i]
        return None if self.cold else scale, amax if record else None

    def follow_history(self) -> None:
        """Make the scales from the history: to be called when a checkpoint has been read into it."""
        _follow([self], self.history)


def advance(scalings: Sequence[DelayedScaling]) -> None:
    """Put the magnitudes since the last call in the histories. Once per step; collective over the scalings' axes.

    All in one go: a pipeline rank has many chunks of few tensors each, and twenty launches for each take the host
    longer than the device.
    """
    amax, history = torch.cat([s.amax for s in scalings]), torch.cat([s.history for s in scalings], 1)
    for axis in scalings[0].axes:
        all_reduce_(amax, axis, op=torch.distributed.ReduceOp.MAX)
    newest = torch.where(amax.isfinite(), amax, history[0])
    history = torch.cat([newest.unsqueeze(0), history[:-1]])
    torch._foreach_copy_([s.history for s in scalings], history.split([len(s.amax) for s in scalings], 1))
    torch._foreach_zero_([s.amax for s in scalings])
    _follow(scalings, history)


def _follow(scalings: Sequence[DelayedScaling], history: Tensor) -> None:
    """Make scales from histories that lie side by side: [HISTORY, tensors of all scalings]."""
    scale = scale_of(history.amax(0), torch.cat([s.limits for s in scalings]))
    torch._foreach_copy_([s.scale for s in scalings], scale.split([len(s.scale) for s in scalings]))
    for scaling in scalings:
        scaling.cold = False


class WeightScales:
    """Scales of a chunk's weights that are kept as FP8 bytes; they change when the bytes do, and only then.

    scale, inverse (1 / scale), top (the largest magnitude in this rank's slices) [weights], float32, are the same
    tensors as long as they live: a recorded step reads them. delayed: scaling whose weights they are, in its order.

    The optimizer calls begin(). If that returns False, it writes magnitudes to `top`, all-reduces them over data ranks
    and calls follow(). Then it casts, and calls end(). If begin() returns True, the cast writes the magnitudes.
    """

    def __init__(self, num_weights: int, delayed: DelayedScaling | None, device: torch.device):
        self.scale = torch.ones(num_weights, device=device)
        self.inverse = torch.ones(num_weights, 4, device=device)[:, 0]  # cuBLAS reads factors at multiples of 16 bytes
        self.top, self.delayed = torch.zeros_like(self.scale), delayed

    def begin(self) -> bool:
        """Begin with new weights. Return whether their scales are known, which a history gives."""
        self.top.zero_()
        if self.delayed is None or self.delayed.cold:
            return False
        self._set(self._of_delayed(self.delayed.scale))
        return True

    def follow(self) -> None:
        """Make the scales from `top`, the magnitudes of whole weights."""
        self._set(scale_of(self.top, limit(KINDS["weight"])))

    def end(self) -> None:
        """Hand the magnitudes on, to enter histories with the step's others."""
        if self.delayed is not None:
            self._of_delayed(self.delayed.amax).copy_(self.top)

    def of(self, i: int) -> KeptInFp8:
        """Return views for weight i."""
        return KeptInFp8(self, *(x[i : i + 1] for x in (self.scale, self.inverse, self.top)))

    def _of_delayed(self, x: Tensor) -> Tensor:
        """Return what x [tensors] has for these weights, a view: a layer's tensors follow one another by role."""
        return x[ROLES.index("weight") :: len(ROLES)][: len(self.top)]  # behind them may be the head's

    def _set(self, scale: Tensor) -> None:
        self.scale.copy_(scale)
        self.inverse.copy_(self.scale.reciprocal())


class KeptInFp8(NamedTuple):
    """The scale of a weight that is kept as FP8 bytes, [1] each; of `scales`, those of its chunk."""

    scales: WeightScales
    scale: Tensor
    inverse: Tensor
    top: Tensor
