"""The pointwise parts of a transformer block: norms, rotary positions, activations.

The plain versions are a few lines of torch each, in the notation of their papers. On CUDA the same functions run the fused
kernels of minitron/kernels.py, which have to equal them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.config import RopeScaling
from minitron.parallel.tensor import Layout, parameter
from minitron.precision import use


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019), or LayerNorm with `bias`. The same on every tensor-parallel rank."""

    def __init__(self, size: int, eps: float, layout: Layout, *, bias: bool):
        super().__init__()
        make = dict(shard=None, std=None, dtype=layout.dtype, device=layout.device)
        self.weight = parameter((size,), fill=1.0, **make)
        self.bias = parameter((size,), **make) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., h]"""
        return self._apply_to(x, use(self.weight), None if self.bias is None else use(self.bias))

    def again(self, x: Tensor) -> Tensor:
        """The same values without autograd: what selective recomputation calls in the backward pass."""
        return self._apply_to(x.detach(), self.weight.detach(), None if self.bias is None else self.bias.detach())

    def _apply_to(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each pair of channels: [d/2], float32 (Su et al. 2021).

    scaling: Llama 3.1's. Wavelengths longer than the old context are stretched by `factor`, those much shorter are left alone, those
    between are blended.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # rotations within the old context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * ((1 - blend) / scaling.factor + blend)


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle: positions [s, b] (or [s, 1]) -> two of [s, b, 1, d/2], float32."""
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i together with channel i + d/2 (the convention of Hugging Face's Llama). x [s, b, n, d]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def split_heads(qkv: Tensor, sizes: tuple[int, int, int], rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """Heads side by side -> q, k, v, with q and k rotated: qkv [s, b, n + 2g, d], sizes (n, g, g).

    qkv is used up: on CUDA it is rotated in place.
    """
    if rope is None:
        return qkv.split(sizes, 2)
    if qkv.is_cuda and qkv.shape[-1] & (qkv.shape[-1] - 1) == 0:
        return _SplitHeads.apply(qkv, sizes, rope)
    q, k, v = qkv.split(sizes, 2)
    return rotate(q, *rope), rotate(k, *rope), v


class _SplitHeads(torch.autograd.Function):
    """split_heads in one pass over memory each way."""

    @staticmethod
    def forward(ctx, qkv, sizes, rope):
        from minitron import kernels
        ctx.rope, heads = rope, qkv.detach()
        kernels.rotate_forward(heads[:, :, :sizes[0] + sizes[1]], rope)
        return heads.split(sizes, 2)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        from minitron import kernels
        return kernels.rotate_backward((dq, dk, dv), ctx.rope), None, None


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone: autograd's own version of the two operations would keep silu(gate) as well."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return swiglu_forward(x)

    @staticmethod
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        if x.is_cuda:
            from minitron import kernels
            return kernels.swiglu_backward(dy, x)
        gate, up = x.chunk(2, -1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        return torch.cat([dy * up * (sigmoid + silu * (1 - sigmoid)), dy * silu], -1)


def swiglu_forward(x: Tensor) -> Tensor:
    """As swiglu, without autograd: what selective recomputation calls in the backward pass."""
    if x.is_cuda:
        from minitron import kernels
        return kernels.swiglu_forward(x)
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, gate and up side by side: [..., 2f] -> [..., f] (Shazeer 2020)."""
    return _SwiGLU.apply(x)


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form that GPT-2 and GPT-3 use."""
    return F.gelu(x, approximate="tanh")
