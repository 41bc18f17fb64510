"""SwiGLU without an FP8 cast, rotary positions and dropout in Triton: see kernels/fused.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitron.kernels import rng
from minitron.kernels.fused_casts import gate_and_up, swiglu_gradients
from minitron.kernels.plain import Rope, sum_rows

_CHANNEL = tl.constexpr(rng.CHANNEL)

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
    row, sample = (tl.program_id(0) // b).to(tl.int64), (tl.program_id(0) % b).to(tl.int64)
    head, channel = tl.arange(0, HEADS).to(tl.int64)[:, None], tl.arange(0, HALF)[None, :]
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
def _index_word(index):
    """Hash a channel's or a head's number: its lower 32 bits, then its upper ones, which are 0."""
    return _mix(_mix(index.to(tl.uint32) ^ _CHANNEL))


def as_int32(word: int) -> int:
    """Return the signed number with the bits of a word: one type of argument for all words, so one compilation."""
    return word - (word >> 31 << 32)


@triton.jit(do_not_specialize=["place", "first", "tokens"])
def _drop_elements(
    x, y, keys, place, first, tokens, h, factor, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < tokens)[:, None] & (columns < h)[None, :]
    token_words = _mix(tl.load(keys + rows, rows < tokens, other=0).to(tl.uint32) ^ place.to(tl.uint32))
    words = _mix(token_words[:, None] ^ _index_word(first + columns)[None, :])
    at = rows.to(tl.int64)[:, None] * h + columns[None, :]
    value = tl.load(x + at, inside, other=0.0).to(tl.float32) * factor
    tl.store(y + at, tl.where(words.to(tl.int64) >= THRESHOLD, value, 0.0), inside)


def drop_elements(x: Tensor, keys: Tensor, place: int, first: int, threshold: int, factor: float) -> Tensor:
    """Zero what its random word is too small for, scale the rest; see kernels/rng.py. All words are made in place."""
    x, h, tokens = x.contiguous(), x.shape[2], keys.numel()
    y, tile = torch.empty_like(x), dict(ROWS=4, BLOCK=1024, num_warps=8)  # a channel's word serves four rows
    grid = triton.cdiv(tokens, tile["ROWS"]), triton.cdiv(h, tile["BLOCK"])
    _drop_elements[grid](
        x, y, keys.contiguous(), as_int32(place), first, tokens, h, factor, THRESHOLD=threshold, **tile
    )
    return y
