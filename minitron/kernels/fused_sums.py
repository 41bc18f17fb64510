"""Sums in Triton: attention over two sets of keys, partial products, gradients of weights. See kernels/fused.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitron.kernels import plain

# ---- attention, merged from two sets of keys -------------------------------------------------------------------------


@triton.jit
def _at(strides, sample, head, row):
    return sample * strides[0] + head * strides[1] + row * strides[2]


@triton.jit
def _merge(
    out, lse, block_out, block_lse, of_out, of_lse, of_block, of_block_lse, n, s, d, ROWS: tl.constexpr, D: tl.constexpr
):
    """Merge some rows of a head. of_out and the like: strides over samples, heads and rows."""
    sample, head = (tl.program_id(1) // n).to(tl.int64), (tl.program_id(1) % n).to(tl.int64)
    row, channel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    here, inside = row < s, (row < s)[:, None] & (channel < d)[None, :]
    lse += _at(of_lse, sample, head, row)
    a = tl.load(lse, here, other=0.0)
    b = tl.load(block_lse + _at(of_block_lse, sample, head, row), here, other=0.0)
    row, channel = row[:, None], channel[None, :]
    out += _at(of_out, sample, head, row) + channel
    x = tl.load(out, inside).to(tl.float32)
    y = tl.load(block_out + _at(of_block, sample, head, row) + channel, inside).to(tl.float32)
    tl.store(out, x + tl.sigmoid(b - a)[:, None] * (y - x), inside)
    top = tl.maximum(a, b)
    tl.store(lse, top + tl.log(tl.exp(a - top) + tl.exp(b - top)), here)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge attention over a second set of keys into out and lse; see kernels/plain.py."""
    b, n, s, d = out.shape
    assert out.stride(-1) == block_out.stride(-1) == 1
    tensors = out, lse, block_out, block_lse
    strides, grid = (x.stride()[:3] for x in tensors), (triton.cdiv(s, 32), b * n)
    _merge[grid](*tensors, *strides, n, s, d, ROWS=32, D=triton.next_power_of_2(d), num_warps=4)


# ---- partial sums ----------------------------------------------------------------------------------------------------


@triton.jit
def _sum_parts(parts, onto, out, n, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, step = at < n, tl.cast(stride, tl.int64)
    total = tl.load(parts + at, inside).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        total += tl.load(parts + i * step + at, inside).to(tl.float32)
    if onto is not None:
        total += tl.load(onto + at, inside).to(tl.float32)
    tl.store(out + at, total, inside)


def sum_parts(parts: Tensor, onto: Tensor | None = None) -> Tensor:
    """Sum over dim 0; see kernels/plain.py. torch's own sum over a first dimension runs at half the speed."""
    out = torch.empty_like(parts[0]) if onto is None else onto
    assert parts[0].is_contiguous() and out.is_contiguous()
    n, stride, grid = out.numel(), parts.stride(0), (triton.cdiv(out.numel(), 2048),)
    _sum_parts[grid](parts, onto, out, n, stride, PARTS=len(parts), BLOCK=2048, num_warps=8)
    return out


@triton.jit
def _square_sums(x, sums, n, BLOCK: tl.constexpr):
    """Sum every n-th block, n programs."""
    program, total = tl.program_id(0), tl.zeros([BLOCK], tl.float64)
    for block in range(program, (n - 1) // BLOCK + 1, tl.num_programs(0)):  # n + BLOCK may not fit into int32
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, at < n, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + program, tl.sum(total))


def square_sum(x: Tensor) -> Tensor:
    """Sum the squares; see kernels/plain.py. torch's own reads 3.3 TB/s on an H200, this one 4.4."""
    assert x.is_contiguous()
    programs = min(triton.cdiv(x.numel(), 4096), 4 * torch.cuda.get_device_properties(x.device).multi_processor_count)
    sums = x.new_empty(programs, dtype=torch.float64)
    _square_sums[(programs,)](x, sums, x.numel(), BLOCK=4096, num_warps=8)
    return sums.sum()


# ---- gradients of weights --------------------------------------------------------------------------------------------


def add_product(out: Tensor, dy: Tensor, x: Tensor, *, add: bool) -> None:
    """Write or add dy^T x; see kernels/plain.py."""
    if dy.dtype == torch.float32:
        plain.add_product(out, dy, x, add=add)
    elif out.dtype == dy.dtype:  # the GEMM adds in float32 and rounds as it stores, parts too where it splits the sum
        out.addmm_(dy.t(), x, beta=int(add))
    elif add:
        torch.ops.aten.addmm.dtype_out(out, dy.t(), x, torch.float32, out=out)
    else:
        torch.ops.aten.mm.dtype_out(dy.t(), x, torch.float32, out=out)


# ---- embedding -------------------------------------------------------------------------------------------------------


@triton.jit
def _add_rows(table, ids, rows, first, size, h, BLOCK: tl.constexpr):
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    local, inside = tl.load(ids + token) - first, columns < h
    if (local >= 0) & (local < size):
        value = tl.load(rows + token * h + columns, inside).to(table.dtype.element_ty)
        tl.atomic_add(table + local * h + columns, value, inside, sem="relaxed")


@triton.jit
def _add_sorted(table, ids, ends, order, rows, first, size, h, BLOCK: tl.constexpr):
    i, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, local = columns < h, tl.load(ids + i).to(tl.int64) - first
    before = tl.load(ids + i - 1, i > 0, other=-1)
    if (local >= 0) & (local < size) & (before != local + first):  # the first of the tokens with this id
        total = tl.zeros([BLOCK], tl.float32)
        for j in range(i, tl.load(ends + i)):
            total += tl.load(rows + tl.load(order + j) * h + columns, inside, other=0.0).to(tl.float32)
        place = table + local * h + columns
        tl.store(place, tl.load(place, inside).to(tl.float32) + total, inside)


def add_rows_(table: Tensor, ids: Tensor, first: int, rows: Tensor, in_order: bool = False) -> Tensor:
    """Add rows to those of a table; see kernels/plain.py.

    To a float32 table tokens that share a row are added in any order, so a deterministic run takes the plain one. For
    a table of 16 bits tokens are sorted, and a program adds up all rows of an id, in order.
    """
    if table.itemsize < 4:
        h, (known, order) = table.shape[1], ids.flatten().sort(stable=True)
        ends = torch.searchsorted(known, known, right=True, out_int32=True)
        _add_sorted[(known.numel(), triton.cdiv(h, 1024))](
            table, known, ends, order, rows.contiguous(), first, table.shape[0], h, BLOCK=1024, num_warps=4
        )
        return table
    if in_order or torch.are_deterministic_algorithms_enabled():
        return plain.add_rows_(table, ids, first, rows, in_order=True)
    size, h = table.shape
    grid = ids.numel(), triton.cdiv(h, 2048)
    _add_rows[grid](table, ids.contiguous(), rows.contiguous(), first, size, h, BLOCK=2048, num_warps=8)
    return table
