"""SwiGLU without an FP8 cast, rotary positions and dropout in Triton: see kernels/fused.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitron.kernels.fused_casts import gate_and_up, swiglu_gradients
from minitron.kernels.plain import Rope, sum_rows

# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_forward(x, y, f, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < f
    gate, up = gate_and_up(x + row * 2 * f + columns, f, inside)
    tl.store(y + row * f + columns, gate * tl.sigmoid(gate) * up, inside)


@triton.jit
def _swiglu_backward(dy, x, dx, f, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < f
    gate, up = gate_and_up(x + row * 2 * f + columns, f, inside)
    of_gate, of_up = swiglu_gradients(gate, up, tl.load(dy + row * f + columns, inside).to(tl.float32))
    tl.store(dx + row * 2 * f + columns, of_gate, inside)
    tl.store(dx + row * 2 * f + f + columns, of_up, inside)


def swiglu_forward(x: Tensor) -> Tensor:
    """Compute silu(gate) * up: [..., 2f] -> [..., f]."""
    x, f = x.contiguous(), x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], f)
    _swiglu_forward[(y.numel() // f, triton.cdiv(f, 2048))](x, y, f, BLOCK=2048, num_warps=8)
    return y


def swiglu_backward(dy: Tensor, x: Tensor, sums: bool = False) -> tuple[Tensor, Tensor | None]:
    """Compute dx [..., 2f] from dy [..., f] and the input x, and with `sums` its sum."""
    dy, x, f = dy.contiguous(), x.contiguous(), dy.shape[-1]
    dx = torch.empty_like(x)
    _swiglu_backward[(dy.numel() // f, triton.cdiv(f, 2048))](dy, x, dx, f, BLOCK=2048, num_warps=8)
    return dx, sum_rows(dx) if sums else None


# ---- rotary positions ------------------------------------------------------------------------------------------------


@triton.jit
def _rotate(
    x, y, cos, sin, x_strides, y_strides, b, n, rope_b, SIGN: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr
):
    """Turn channels i and i + HALF of every head of one token by SIGN * angle; SIGN 0 copies."""
    row, sample = (tl.program_id(0) // b).to(tl.int64), tl.program_id(0) % b
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = head < n
    source = x + row * x_strides[0] + sample * x_strides[1] + head * x_strides[2] + channel
    target = y + row * y_strides[0] + sample * y_strides[1] + head * y_strides[2] + channel
    first, second = tl.load(source, inside), tl.load(source + HALF, inside)
    if SIGN != 0:
        angle = (row * rope_b + sample % rope_b) * HALF + channel
        c, s = tl.load(cos + angle), tl.load(sin + angle) * SIGN
        x1, x2 = first.to(tl.float32), second.to(tl.float32)
        first, second = (x1 * c - x2 * s).to(first.dtype), (x2 * c + x1 * s).to(second.dtype)
    tl.store(target, first, inside)
    tl.store(target + HALF, second, inside)


def _turn(x: Tensor, y: Tensor, rope: Rope | None, sign: int) -> None:
    """Write x turned by sign * angle to y. x, y [s, b, n, d], last stride 1; rope: cos and sin [s, b or 1, 1, d/2]."""
    s, b, n, d = x.shape
    assert x.stride(-1) == y.stride(-1) == 1 and d & (d - 1) == 0
    cos, sin = rope if rope is not None else (x, x)
    tensors, strides = (x, y, cos, sin), (x.stride()[:3], y.stride()[:3])
    heads = triton.next_power_of_2(n)
    _rotate[(s * b,)](*tensors, *strides, b, n, cos.shape[1], SIGN=sign, HALF=d // 2, HEADS=heads, num_warps=4)


def split_heads(qkv: Tensor, sizes: tuple[int, int, int], rope: Rope) -> tuple[Tensor, ...]:
    """Turn q and k in place: qkv [s, b, n + 2g, d] -> views q, k, v of it. d is a power of 2."""
    turned = qkv[:, :, : sizes[0] + sizes[1]]
    _turn(turned, turned, rope, 1)
    return qkv.split(sizes, 2)


def split_heads_backward(grads: tuple[Tensor, Tensor, Tensor], rope: Rope) -> Tensor:
    """Turn dq and dk back and join: dq, dk, dv [s, b, n or g, d] -> dqkv [s, b, n + 2g, d]."""
    s, b, _, d = grads[0].shape
    sizes = [g.shape[2] for g in grads]
    out = grads[0].new_empty(s, b, sum(sizes), d)
    for grad, part, sign in zip(grads, out.split(sizes, 2), (-1, -1, 0)):
        _turn(grad if grad.stride(-1) == 1 else grad.contiguous(), part, rope if sign else None, sign)
    return out


# ---- dropout ---------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    """Mix as minitron.kernels.rng does: in uint32, where products wrap by themselves."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _drop_elements(x, y, token_words, channel_words, threshold, factor, h, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < h
    words = tl.load(token_words + row).to(tl.uint32) ^ tl.load(channel_words + columns, inside).to(tl.uint32)
    value = tl.load(x + row * h + columns, inside).to(tl.float32) * factor
    tl.store(y + row * h + columns, tl.where(_mix(words).to(tl.int64) >= threshold, value, 0.0), inside)


def drop_elements(x: Tensor, token_words: Tensor, channel_words: Tensor, threshold: int, factor: float) -> Tensor:
    """Zero what its random word is too small for, scale the rest; see kernels/rng.py."""
    x, h = x.contiguous(), x.shape[2]
    y = torch.empty_like(x)
    grid = x.numel() // h, triton.cdiv(h, 2048)
    _drop_elements[grid](x, y, token_words.contiguous(), channel_words, threshold, factor, h, BLOCK=2048, num_warps=8)
    return y
