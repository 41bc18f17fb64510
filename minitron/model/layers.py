"""The pointwise parts of a transformer block: the residual stream with its norms, and rotary positions.

This file has their autograd: what each saves for its backward pass. kernels/plain.py has the computation in torch, and
kernels/fused.py has it as one Triton kernel each. `ops` is the module that the run chose.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitron.comm.collectives import with_adjoint
from minitron.config.schema import RopeScaling
from minitron.kernels import plain
from minitron.kernels.gemm import CastInto, Gemm, Payload, Quantized
from minitron.kernels.param import Param, accumulate, with_main_grad
from minitron.kernels.plain import Rope
from minitron.parallel.layer_context import LayerContext


class Residual(NamedTuple):
    """The residual stream x + delta + bias, as a pending sum: the next norm computes it inside its own kernel."""

    x: Tensor  # [..., h]
    delta: Tensor | None = None  # [..., h]
    bias: Param | None = None  # [h]

    def materialize(self) -> Tensor:
        """Compute the sum as one tensor. Pipeline stages call it, because no norm follows there."""
        if self.delta is None:
            return self.x
        if self.bias is None:
            return self.x + self.delta
        total = self.x.float() + self.delta + with_main_grad(self.bias)
        return total.to(self.x.dtype)  # rounded once, as the norm's sum is


class _AddNorm(torch.autograd.Function):
    """Saves the sum and one or two numbers per row. One backward pass also adds the gradient of the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        delta_bias: Param | None,
        weight: Param,
        bias: Param | None,
        eps: float,
        ops: ModuleType,
        into: CastInto | None,
    ) -> tuple[Tensor, Tensor, Payload | None]:
        total, y, statistics = ops.add_norm((x, delta, delta_bias), weight, bias, eps, into)
        cast = None
        if into is not None:
            cast, y = y, x.new_empty(()).expand_as(x)
        ctx.save_for_backward(total, statistics)
        ctx.params, ctx.summed, ctx.ops = (weight, bias, delta_bias), delta is not None, ops
        ctx.set_materialize_grads(False)  # dtotal is None for the last norm: only the head reads its output
        return total, y, cast

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        weight, _, delta_bias = ctx.params
        dx, *grads = ctx.ops.add_norm_backward(
            dy, dtotal, *ctx.saved_tensors, weight, delta_bias is not None, frozen=not weight.requires_grad
        )
        dweight, dbias, ddelta_bias = (None if g is None else accumulate(p, g) for p, g in zip(ctx.params, grads))
        return dx, dx if ctx.summed else None, ddelta_bias, dweight, dbias, None, None, None


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019), or LayerNorm with `bias`. The same on every tensor-parallel rank."""

    def __init__(self, size: int, eps: float, context: LayerContext, *, bias: bool, per_head: bool = False):
        super().__init__()
        self.weight = context.parameter((size,), fill=1.0, per_head=per_head)
        self.bias = context.parameter((size,)) if bias else None
        self.eps, self.ops = eps, context.kernels.ops

    def forward(self, stream: Residual, input_format: Gemm | None = None) -> tuple[Tensor, Tensor | Quantized]:
        """Return the stream's sum and its norm, both [..., h]. The same kernel casts the norm if the scale is known.

        input_format: the number format of the only layer that reads the norm; None: do not cast it.
        """
        into = None if input_format is None else input_format.producer_cast(torch.is_grad_enabled())
        total, y, cast = _AddNorm.apply(*stream, self.weight, self.bias, self.eps, self.ops, into)
        return total, y if cast is None else Quantized(y, cast)

    @torch.no_grad()
    def recompute(self, total: Tensor, input_format: Gemm | None = None) -> Tensor | Quantized:
        """Compute the norm of `total` again. Selective recomputation calls it in the backward pass."""
        into = None if input_format is None else input_format.producer_cast(True)
        norm = _AddNorm.apply(total, None, None, self.weight, self.bias, self.eps, self.ops, into)
        return norm[1] if norm[2] is None else Quantized(*norm[1:])


def norm_heads(qkv: Tensor, sizes: tuple[int, int, int], q_norm: Norm, k_norm: Norm) -> Tensor:
    """Norm each head of q and k over its channels: qkv [s, b, n + 2g, d], sizes (n, g, g) -> a new tensor of its shape.

    The backward needs the original q and k. They are copied, so that qkv can be freed.
    """
    *parts, v = qkv.split(sizes, 2)
    pairs = zip(parts, (q_norm, k_norm))
    normed = [_AddNorm.apply(x.contiguous(), None, None, n.weight, None, n.eps, n.ops, None)[1] for x, n in pairs]
    return torch.cat([*normed, v], 2)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Compute the angle per position of each pair of channels: [d/2], float32 (Su et al. 2021).

    scaling: the rule of Llama 3.1. It stretches wavelengths longer than the old context by `factor`, keeps much shorter
    ones, and blends the wavelengths between.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # rotations within the old context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * ((1 - blend) / scaling.factor + blend)


def rope_tables(positions: Tensor, frequencies: Tensor) -> Rope:
    """Compute cos and sin of every angle: positions [s, b] (or [s, 1]) -> two of [s, b, 1, d/2], float32."""
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def split_heads(qkv: Tensor, sizes: tuple[int, int, int], rope: Rope | None, ops: ModuleType) -> tuple[Tensor, ...]:
    """Split heads side by side into q, k, v, and rotate q and k: qkv [s, b, n + 2g, d], sizes (n, g, g).

    Overwrites qkv, so its producer must not save it for its backward.
    """
    if rope is None:
        return qkv.split(sizes, 2)
    if qkv.shape[-1] & (qkv.shape[-1] - 1):  # the fused kernel needs a power of 2
        ops = plain
    apply, adjoint = ops.split_heads, ops.split_heads_backward
    return with_adjoint(qkv, lambda qkv: apply(qkv.detach(), sizes, rope), lambda *grads: adjoint(grads, rope))
