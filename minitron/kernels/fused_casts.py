"""FP8 casts of what a kernel has just computed, in Triton: see kernels/fused.py.

A program has a tile of the result. From registers it writes its values by rows, the same by columns, where the weight
gradient's product will sum along them, its largest magnitude, and its sum over rows, of which a bias's gradient is
made. So what is cast is neither written in bf16 nor read again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitron.kernels.plain import Cast
from minitron.kernels.plain import gelu_forward as gelu_forward  # torch's kernel is one pass


class Tile(NamedTuple):
    """Rows and columns of a program's tile, and its warps."""

    rows: int
    columns: int
    warps: int


# By operation, where a transpose or sums are made too; benchmarks/casts.py times others.
TILES = {
    "cast": Tile(64, 64, 8),
    "gelu": Tile(64, 64, 8),
    "gelu backward": Tile(64, 64, 8),
    "swiglu": Tile(64, 64, 8),
    "swiglu backward": Tile(32, 64, 4),
}
ROWS_ALONE = Tile(2, 2048, 8)  # of every operation; chosen by SwiGLU's times

# ---- values and gradients --------------------------------------------------------------------------------------------


@triton.jit
def gate_and_up(source, f, inside):
    return tl.load(source, inside).to(tl.float32), tl.load(source + f, inside).to(tl.float32)


@triton.jit
def swiglu_gradients(gate, up, grad):
    """Return the gradients of gate and up."""
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


@triton.jit
def _gelu(x):
    """Return GELU's factor of x, (1 + tanh(u)) / 2, which is sigmoid(2 u), and the derivative of 2 u."""
    a, b = 1.5957691216057308, 0.044715  # 2 sqrt(2 / pi)
    return tl.sigmoid(a * (x + b * x * x * x)), a * (1 + 3 * b * x * x)


# ---- the kernel ------------------------------------------------------------------------------------------------------


@triton.jit
def _put(value, factor, rows, columns, sums, i, j, here, there, m, n):
    """Write a tile of the [m, n] result, its transpose and its sum; return its largest magnitude.

    here, there: which of the rows i and of the columns j are in the result. value is rounded to its own dtype before.
    """
    inside = here[:, None] & there[None, :]
    value = value.to(tl.float32)
    scaled = value if factor is None else value * factor
    small = scaled.to(rows.dtype.element_ty)  # saturates
    tl.store(rows + i.to(tl.int64)[:, None] * n + j[None, :], small, inside)
    if columns is not None:
        tl.store(columns + j.to(tl.int64)[:, None] * m + i[None, :], tl.trans(small), tl.trans(inside))
    if sums is not None:
        tl.store(sums + tl.program_id(0).to(tl.int64) * n + j, tl.sum(tl.where(inside, value, 0.0), 0), there)
    return tl.max(tl.where(inside, tl.abs(value), 0.0))


@triton.jit
def _cast(dy, x, scale, rows, inverse, columns, amax, sums, m, f, OF: tl.constexpr, M: tl.constexpr, F: tl.constexpr):
    """Cast x, its activation, or with dy the gradient of x. SwiGLU's has the gradients of gate and up side by side.

    Without a scale the result is written in the format of `rows`.
    """
    i, j = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * F + tl.arange(0, F)
    here, there = i < m, j < f
    inside, row, factor = here[:, None] & there[None, :], i.to(tl.int64)[:, None], None
    if scale is not None:
        factor = tl.load(scale)
    grad = 0.0
    if dy is not None:
        grad = tl.load(dy + row * f + j[None, :], inside).to(tl.float32)
    if OF == "swiglu":
        gate, up = gate_and_up(x + row * (2 * f) + j[None, :], f, inside)
        if dy is None:
            value = (gate * tl.sigmoid(gate) * up).to(x.dtype.element_ty)
            top = _put(value, factor, rows, columns, sums, i, j, here, there, m, f)
        else:
            of_gate, of_up = swiglu_gradients(gate, up, grad)
            of_gate, of_up = of_gate.to(x.dtype.element_ty), of_up.to(x.dtype.element_ty)
            top = _put(of_gate, factor, rows, columns, sums, i, j, here, there, m, 2 * f)
            other = _put(of_up, factor, rows, columns, sums, i, j + f, here, there, m, 2 * f)
            top = tl.maximum(top, other)
    else:
        value = tl.load(x + row * f + j[None, :], inside)
        if OF == "gelu":
            wide = value.to(tl.float32)
            half, slope = _gelu(wide)
            if dy is None:
                value = (wide * half).to(x.dtype.element_ty)
            else:
                value = (grad * (half + wide * half * (1 - half) * slope)).to(x.dtype.element_ty)
        top = _put(value, factor, rows, columns, sums, i, j, here, there, m, f)
    if amax is not None:
        tl.atomic_max(amax, top, sem="relaxed")
    if inverse is not None:
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(inverse, tl.div_rn(1.0, factor))


def _run(
    of: str,
    dy: Tensor | None,
    x: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    kind: torch.dtype,
    columns: bool = False,
    sums: bool = False,
) -> Cast:
    """Run the kernel for x [m, f], or [m, 2f] for SwiGLU. scale None: no cast, the result has the dtype `kind`."""
    tile = TILES[of if dy is None else f"{of} backward"] if columns or sums else ROWS_ALONE
    x, m, f = x.contiguous(), x.shape[0], x.shape[1] // (2 if of == "swiglu" else 1)
    n, dy = (f, None) if dy is None else (x.shape[1], dy.contiguous())
    grid = triton.cdiv(m, tile.rows), triton.cdiv(f, tile.columns)
    rows, transposed = x.new_empty(m, n, dtype=kind), x.new_empty(n, m, dtype=kind) if columns else None
    inverse: Any = None if scale is None else torch.empty_like(scale)
    parts = x.new_empty(grid[0], n, dtype=torch.float32) if sums else None
    tensors = dy, x, scale, rows, inverse, transposed, amax, parts
    _cast[grid](*tensors, m, f, OF=of, M=tile.rows, F=tile.columns, num_warps=tile.warps)
    return Cast(rows, inverse, transposed, None if parts is None else parts.sum(0))


# ---- its uses: see kernels/plain.py ----------------------------------------------------------------------------------

cast, gelu_cast, swiglu_cast = (partial(_run, of, None) for of in ("cast", "gelu", "swiglu"))
gelu_backward_cast, swiglu_backward_cast = (partial(_run, of) for of in ("gelu", "swiglu"))


def gelu_backward(dy: Tensor, x: Tensor, sums: bool = False) -> tuple[Tensor, Tensor | None]:
    """Compute dx from dy and the input x, all [..., f], and with `sums` its sum."""
    dx = _run("gelu", dy.flatten(0, -2), x.flatten(0, -2), None, None, x.dtype, sums=sums)
    return dx.rows.view_as(x), dx.sums
