"""FP8 casts and products in plain torch, for any device: the contract of kernels/fp8_te.py.

A cast scales a matrix into the range of an 8-bit format and rounds it there; a product multiplies two such matrices
and takes the scales out again. FP8 tensor cores sum along rows of both operands, so a product is always a b^T, and a
matrix that is summed over either dim has two casts: its rows [m, k] and its columns [k, m].

    e4m3   3 bits after the point, up to 448: activations and weights
    e5m2   2 bits, up to 57344: gradients, whose magnitudes spread wider

`TensorScaling` has one scale a tensor, given or found from its values. `BlockScaling` has a power of two for each 128
values of a row, for a weight one for each 128 x 128 tile, so that small values survive beside a large one; then e4m3
has range enough for gradients too. One of them is made for a run.

Sources: Micikevicius et al. 2022, "FP8 formats for deep learning"; DeepSeek-AI 2024, "DeepSeek-V3" (blocks).
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Axis
from minitron.kernels import plain
from minitron.kernels.fp8_scales import KINDS, limit, scale_of
from minitron.kernels.gemm import CastInto, Payload

BLOCK = 128


class Operand(NamedTuple):
    """One side of a product: values [m, k], summed along rows, and scales. tiled: these are of a weight's tiles."""

    values: Tensor
    scale: Tensor
    tiled: bool = False


class TensorScaling:
    """One scale for a whole tensor. ops: the module that has the casts."""

    def __init__(self, ops: ModuleType = plain):
        self.ops = ops

    def cast(
        self, x: Tensor, role: str, shared: Axis, scale: Tensor | None, amax: Tensor | None, columns: bool
    ) -> Payload:
        """Cast x [m, k], times a scale, to the format of its role.

        scale: [1] float32; None: the one that brings the largest magnitude of x, over the ranks of `shared`, to the
        format's limit. amax: [1], raised to the largest magnitude of x on this rank. columns: cast the transpose too,
        unless `shared` ranks gather x first.
        """
        kind, both = KINDS[role], columns and shared.size == 1
        if scale is None:
            top = self.ops.largest(x)
            if amax is not None:
                torch.maximum(amax, top, out=amax)
            all_reduce_(top, shared, op=torch.distributed.ReduceOp.MAX)
            scale, amax = scale_of(top, limit(kind)), None
        return self.ops.cast(x, CastInto(scale, amax, kind, both))

    def transpose(self, values: Tensor) -> Tensor:
        """Transpose cast values, contiguously."""
        return self.ops.transpose(values)

    def multiply(
        self, a: Operand, b: Operand, dtype: torch.dtype, out: Tensor | None, bias: Tensor | None, fast: bool
    ) -> Tensor:
        """Return a b^T + bias in `dtype`; in `out` if it is given. fast: tensor cores may sum in less than float32.

        Most CPUs have only oneDNN's slow reference for `torch._scaled_mm`. So a CPU multiplies in float32, which holds
        FP8 values exactly.
        """
        if a.values.device.type != "cpu":
            operands = a.values, b.values.t(), a.scale, b.scale
            return torch._scaled_mm(*operands, bias=bias, out_dtype=dtype, use_fast_accum=fast, out=out)
        product = (a.values.float() @ b.values.float().t()).mul_(a.scale * b.scale)
        if bias is not None:
            product += bias
        return product.to(dtype) if out is None else out.copy_(product)

    def multiply_into(self, out: Tensor, a: Operand, b: Operand, *, add: bool) -> None:
        """Write a b^T to out, float32 or bf16, or `add` it: summed in float32, rounded once."""
        product = self.multiply(a, b, torch.float32, out=None, bias=None, fast=False)
        out.add_(product) if add else out.copy_(product)


class BlockScaling(TensorScaling):
    """A scale for each 128 values along the summed dim; scales of rows are [k/128, m], of columns [m/128, k].

    The casts are those of a GPU, but the product is a slow float32 one: for CPUs, and as the reference of tests.
    """

    def cast(
        self, x: Tensor, role: str, shared: Axis, scale: Tensor | None, amax: Tensor | None, columns: bool
    ) -> Payload:
        """Cast x [m, k], m and k multiples of 128, in blocks, whose scales every rank finds by itself."""
        other = self._blocks(x.t().contiguous(), role) if columns else (None, None)
        return Payload(*self._blocks(x, role), *other)

    def multiply(
        self, a: Operand, b: Operand, dtype: torch.dtype, out: Tensor | None, bias: Tensor | None, fast: bool
    ) -> Tensor:
        """Multiply the float32 values that the casts stand for."""
        product = dequantize(a) @ dequantize(b).t()
        product = (product if bias is None else product + bias).to(dtype)
        return product if out is None else out.copy_(product)

    def _blocks(self, x: Tensor, role: str) -> tuple[Tensor, Tensor]:
        x = x.float().unflatten(1, (-1, BLOCK))
        top = x.abs().amax(-1)  # [m, k/128]
        if role == "weight":
            top = top.unflatten(0, (-1, BLOCK)).amax(1).repeat_interleave(BLOCK, 0)
        # the power of two at or below the scale: (mantissa in [0.5, 1)) * 2^exponent
        exponent = torch.frexp(scale_of(top, limit(torch.float8_e4m3fn))).exponent - 1
        scale = torch.ldexp(torch.ones_like(top), exponent)
        values = (x * scale.unsqueeze(-1)).flatten(1).to(torch.float8_e4m3fn)
        return values, scale.reciprocal().t().contiguous()


def dequantize(x: Operand) -> Tensor:
    """Return the float32 values [m, k] that a cast with scales for 1 x 128 blocks stands for."""
    return (x.values.float().unflatten(1, (-1, BLOCK)) * x.scale.t().unsqueeze(-1)).flatten(1)
