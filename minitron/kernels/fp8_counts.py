"""Count what casts to FP8 lose: small values that become zero, and large ones that are clipped.

Problem: a scale that does not fit its tensor raises no error. The loss shows the damage late, and does not show the
layer. The idea: some steps (log.numerics_every) compare each tensor with its cast, and count:

    underflows   values that are zero only after the cast
    overflows    values that the cast clips, because times the scale they exceed the format. A scale that is computed
                 from the tensor itself clips nothing: only delayed scaling has overflows

    x = [3.0, 1.0, 1e-6, 0.0] as e4m3 with scale 448 / 2.0:   [448, 224, 0, 0]   1 underflow, 1 overflow, 4 elements

Kernels of norms and activations do not write the values that they cast. So in these steps a separate kernel casts. On a
GPU that may change the last bits of these steps. The counts are added in place to device tensors, so that a recorded
step counts at each replay.

A recomputed tensor is counted twice, which does not change percentages. A transpose has the same values and is not
counted. With block scaling only rowwise casts are counted. Sources: the names and definitions of Transformer Engine's
LogFp8TensorStats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minitron.config.sizes import COUNTED_AT_ONCE
from minitron.kernels.fp8_scales import ROLES, fp8_max

ROUNDING = 1 + 2.0**-20  # the largest value times its own scale equals the limit only up to float32's rounding


class CastCounts:
    """The counts of a rank's casts, by layer and role.

    layers: the names of all layers in FP8, on all ranks. If it is empty, nothing is counted. on: whether casts are
    counted now. sums [layers, roles, 3] float64: underflows, overflows, elements. tops [layers, roles, 3] float32: the
    largest amax, -1 / scale and 1 / scale.
    """

    def __init__(self, layers: Sequence[str] = (), device: torch.device | str = "cpu"):
        self.layers, self.on = layers, False
        self.sums = torch.zeros(len(layers), len(ROLES), 3, dtype=torch.float64, device=device)
        self.tops = torch.zeros_like(self.sums, dtype=torch.float32)

    def count(self, on: bool) -> None:
        """Begin to count from zero, or stop counting."""
        self.on = on and len(self.layers) > 0
        if self.on:
            self.sums.zero_()
            self.tops.fill_(-math.inf)

    def add(self, layer: str, role: str, x: Tensor, values: Tensor, scale_inv: Tensor) -> None:
        """Count what the cast of x to `values` lost. scale_inv: float32, of the cast, of any shape."""
        sums, tops = (table[self.layers.index(layer), ROLES.index(role)] for table in (self.sums, self.tops))
        limit = scale_inv.amax().view(1) * (ROUNDING * fp8_max(values.dtype))  # 0-d it would be rounded to x's dtype
        size = max(1, COUNTED_AT_ONCE * len(x) // x.numel())
        for part, cast in zip(x.split(size), values.split(size)):  # a comparison takes 4 bytes an element
            underflows = ((part != 0) & (cast.to(x.dtype) == 0)).sum()
            sums[:2] += torch.stack([underflows, (part.abs() > limit).sum()])
        sums[2] += x.numel()
        amax = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
        torch.maximum(tops, torch.stack([amax, -scale_inv.amin(), scale_inv.amax()]), out=tops)
