"""Scales of FP8 tensors that outlive one cast: those of delayed scaling, and those of weights kept as FP8 bytes.

A scale is the number that brings a tensor's largest magnitude (amax) to the largest value of its format.
`DelayedScaling` computes it from the amax of the last 16 steps, so that it is known before the tensor. If weights are
kept as FP8 bytes (precision.fp8_params), the optimizer casts them. It holds only slices of a weight: `WeightScales` has
the scales, and collects the amax of the slices.

                 scale of the updated weights                       amax of the updated weights
    delayed      from the histories, which all ranks share          enters the histories after the next step
    current      from this amax                                     data ranks all-reduce it before the cast

A cast of the whole weight would use the same scales, so the bytes are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Axis

FP8_DTYPES = {"x": torch.float8_e4m3fn, "weight": torch.float8_e4m3fn, "dy": torch.float8_e5m2}  # by role
ROLES = tuple(FP8_DTYPES)
HISTORY = 16  # steps whose amax a scale is computed from
LARGEST_SCALE = 2.0**63  # a product of two reciprocals of it is still a normal float32


def fp8_max(fp8_dtype: torch.dtype) -> float:
    """Return the largest value of a format."""
    return torch.finfo(fp8_dtype).max


def scale_of(amax: Tensor, limits: Tensor | float) -> Tensor:
    """Return the scales that bring `amax` to `limits`, which are the largest finite values of the formats.

    A scale is at most LARGEST_SCALE. It is 1 if amax is zero or not finite.
    """
    ordinary = (amax > 0) & (amax < math.inf)
    return (limits / amax).clamp(1 / LARGEST_SCALE, LARGEST_SCALE).masked_fill(~ordinary, 1.0)


class DelayedScaling:
    """Scales of tensors, each from the largest amax of its tensor in the last HISTORY steps.

    roles: of the tensors. axes: all ranks along them have the same scales, because tp ranks gather each other's casts,
    and data ranks share one history in a checkpoint. history [HISTORY, tensors], newest first, is the whole state
    between steps.
    """

    def __init__(self, roles: Sequence[str], axes: Sequence[Axis], device: torch.device):
        self.limits = torch.tensor([fp8_max(FP8_DTYPES[role]) for role in roles], device=device)
        self.amax, self.scale = torch.zeros_like(self.limits), torch.ones_like(self.limits)
        self.history = self.limits.new_zeros(HISTORY, len(roles))
        self.axes, self.has_history = axes, False
        self._views = list(zip(self.scale.split(1), self.amax.split(1)))  # made once: every cast reads two

    def scale_and_amax(self, i: int, update_history: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return views [1] of tensor i: scale, None without a history, and amax, None unless `update_history`."""
        scale, amax = self._views[i]
        return scale if self.has_history else None, amax if update_history else None

    def follow_history(self) -> None:
        """Compute the scales from the history. Call it after loading a checkpoint into the history."""
        _follow([self], self.history)


def roll_histories(scalings: Sequence[DelayedScaling]) -> None:
    """Move the amax since the previous call to the histories. Once per step; collective over the scalings' axes.

    One call serves all chunks: a pipeline rank has many chunks of few tensors each, and twenty launches per chunk would
    be bound by the host.
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
    """Compute the scales from the concatenated histories [HISTORY, tensors of all scalings]."""
    scale = scale_of(history.amax(0), torch.cat([s.limits for s in scalings]))
    torch._foreach_copy_([s.scale for s in scalings], scale.split([len(s.scale) for s in scalings]))
    for scaling in scalings:
        scaling.has_history = True


class WeightScales:
    """Scales of a chunk's weights that are kept as FP8 bytes. A scale changes only when its weight's bytes change.

    scale, scale_inv (1 / scale) and amax (of this rank's slices) are float32 [weights]. They stay the same tensors,
    because a recorded step reads them. delayed: the chunk's DelayedScaling, which has these weights in the same order.

    The optimizer calls these in one of two orders:

        begin() is True     cast, which computes amax; end()
        begin() is False    compute amax, all-reduce it over data ranks; follow(); cast; end()
    """

    def __init__(self, num_weights: int, delayed: DelayedScaling | None, device: torch.device):
        self.scale = torch.ones(num_weights, device=device)
        # cuBLAS reads factors at multiples of 16 bytes.
        self.scale_inv = torch.ones(num_weights, 4, device=device)[:, 0]
        self.amax, self.delayed = torch.zeros_like(self.scale), delayed

    def begin(self) -> bool:
        """Begin with new weights. Return whether their scales are known, from a history."""
        self.amax.zero_()
        if self.delayed is None or not self.delayed.has_history:
            return False
        self._set(self._of_delayed(self.delayed.scale))
        return True

    def follow(self) -> None:
        """Compute the scales from `amax`, which must be that of the whole weights."""
        self._set(scale_of(self.amax, fp8_max(FP8_DTYPES["weight"])))

    def end(self) -> None:
        """Pass amax to delayed scaling. It enters the histories after the next step, which uses these weights."""
        if self.delayed is not None:
            self._of_delayed(self.delayed.amax).copy_(self.amax)

    def of(self, i: int) -> Fp8WeightScale:
        """Return the views of weight i."""
        return Fp8WeightScale(self, *(x[i : i + 1] for x in (self.scale, self.scale_inv, self.amax)))

    def _of_delayed(self, x: Tensor) -> Tensor:
        """Return the view of these weights in x [tensors], which has an entry per layer and role."""
        return x[ROLES.index("weight") :: len(ROLES)][: len(self.amax)]  # without the head's weight, if it is in FP8

    def _set(self, scale: Tensor) -> None:
        self.scale.copy_(scale)
        self.scale_inv.copy_(self.scale.reciprocal())


class Fp8WeightScale(NamedTuple):
    """The scale of one weight that is kept as FP8 bytes: views [1] of `scales`, which has all weights of the chunk."""

    scales: WeightScales
    scale: Tensor
    scale_inv: Tensor
    amax: Tensor
