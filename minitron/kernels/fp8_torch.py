"""FP8 casts and products in plain torch, for any device: the contract of kernels/fp8_te.py.

A cast scales a matrix into the range of an 8-bit format and rounds it. A product multiplies two such matrices and
divides by the scales. FP8 tensor cores sum along rows of both operands, so a product is always a b^T. A matrix that is
summed over either dim therefore has two casts: rowwise [m, k] and columnwise [k, m].

    e4m3   3 bits after the point, up to 448: activations and weights
    e5m2   2 bits, up to 57344: gradients, whose magnitudes spread wider

`TorchFp8` has one scale per tensor, which is an argument or computed from the tensor. `TorchBlockFp8` has a power of
two for each 128 values of a row, or for each 128 x 128 tile of a weight. So small values survive beside a large one,
and e4m3 has enough range for gradients. A run uses one of the two classes.

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
from minitron.kernels.fp8_scales import FP8_DTYPES, fp8_max, scale_of
from minitron.kernels.gemm import CastInto, Payload

BLOCK = 128
ScaleAndAmax = tuple[Tensor | None, Tensor | None]  # of one tensor: see TorchFp8.cast


class Operand(NamedTuple):
    """One side of a product: values [m, k], summed along rows, and scales. block_2d: a scale belongs to a 2-D tile."""

    values: Tensor
    scale: Tensor
    block_2d: bool = False


class TorchFp8:
    """One scale per tensor. ops: the module that has the casts."""

    def __init__(self, ops: ModuleType = plain):
        self.ops = ops

    def cast(self, x: Tensor, role: str, shared: Axis, known: ScaleAndAmax, columnwise: bool) -> Payload:
        """Cast x [m, k], times a scale, to the format of its role.

        known: (scale, amax) of delayed scaling. scale [1] float32; None: compute it from the largest magnitude of x
        over the ranks of `shared`. amax [1]: raised to the largest magnitude of x on this rank. columnwise: cast the
        transpose too, unless `shared` ranks gather x first.
        """
        scale, amax = known
        fp8_dtype, both = FP8_DTYPES[role], columnwise and shared.size == 1
        if scale is None:
            own_amax = self.ops.largest(x)
            if amax is not None:
                torch.maximum(amax, own_amax, out=amax)
            all_reduce_(own_amax, shared, op=torch.distributed.ReduceOp.MAX)
            scale, amax = scale_of(own_amax, fp8_max(fp8_dtype)), None
        return self.ops.cast(x, CastInto(scale, amax, fp8_dtype, both))

    def transpose(self, values: Tensor) -> Tensor:
        """Return a contiguous transpose of cast values."""
        return self.ops.transpose(values)

    def multiply(
        self, a: Operand, b: Operand, dtype: torch.dtype, out: Tensor | None, bias: Tensor | None, fast: bool
    ) -> Tensor:
        """Return a b^T + bias in `dtype`, in `out` if it is given. fast: tensor cores may sum in less than float32.

        A CPU multiplies in float32, which holds FP8 values exactly: most CPUs have only oneDNN's slow reference for
        `torch._scaled_mm`.
        """
        if a.values.device.type != "cpu":
            operands = a.values, b.values.t(), a.scale, b.scale
            return torch._scaled_mm(*operands, bias=bias, out_dtype=dtype, use_fast_accum=fast, out=out)
        product = (a.values.float() @ b.values.float().t()).mul_(a.scale * b.scale)
        if bias is not None:
            product += bias
        return product.to(dtype) if out is None else out.copy_(product)

    def multiply_into(self, out: Tensor, a: Operand, b: Operand, *, add: bool) -> None:
        """Write a b^T to `out`, float32 or bf16, or add it. It is summed in float32 and rounded once."""
        product = self.multiply(a, b, torch.float32, out=None, bias=None, fast=False)
        out.add_(product) if add else out.copy_(product)


class TorchBlockFp8(TorchFp8):
    """A scale for each 128 values along the summed dim: rowwise [k/128, m], columnwise [m/128, k].

    The casts are a GPU's, but the product is a slow one in float32. It is for CPUs, and the reference of tests.
    """

    def cast(self, x: Tensor, role: str, shared: Axis, known: ScaleAndAmax, columnwise: bool) -> Payload:
        """Cast x [m, k] in blocks; m and k are multiples of 128. Each rank computes its own scales."""
        other = self._blocks(x.t().contiguous(), role) if columnwise else (None, None)
        return Payload(*self._blocks(x, role), *other)

    def multiply(
        self, a: Operand, b: Operand, dtype: torch.dtype, out: Tensor | None, bias: Tensor | None, fast: bool
    ) -> Tensor:
        """Multiply the dequantized values in float32."""
        product = dequantize(a) @ dequantize(b).t()
        product = (product if bias is None else product + bias).to(dtype)
        return product if out is None else out.copy_(product)

    def _blocks(self, x: Tensor, role: str) -> tuple[Tensor, Tensor]:
        x = x.float().unflatten(1, (-1, BLOCK))
        amax = x.abs().amax(-1)  # [m, k/128]
        if role == "weight":
            amax = amax.unflatten(0, (-1, BLOCK)).amax(1).repeat_interleave(BLOCK, 0)
        # the power of two at or below the scale: (mantissa in [0.5, 1)) * 2^exponent
        exponent = torch.frexp(scale_of(amax, fp8_max(torch.float8_e4m3fn))).exponent - 1
        scale = torch.ldexp(torch.ones_like(amax), exponent)
        values = (x * scale.unsqueeze(-1)).flatten(1).to(torch.float8_e4m3fn)
        return values, scale.reciprocal().t().contiguous()


def dequantize(x: Operand) -> Tensor:
    """Return the float32 values [m, k] of a cast with a scale per 1 x 128 block."""
    return (x.values.float().unflatten(1, (-1, BLOCK)) * x.scale.t().unsqueeze(-1)).flatten(1)
