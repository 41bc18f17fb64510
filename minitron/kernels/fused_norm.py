"""The residual stream's sum and its norm, forward and backward, in Triton: see kernels/fused.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitron.kernels.plain import Cast, CastInto


@triton.jit
def _add_norm(
    x, delta, delta_bias, weight, bias, total, y, statistics, scale, inverse, amax, rows, h, eps, BLOCK: tl.constexpr
):
    """Compute one row. With a scale y is FP8, cast from what it would be in the format of x."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at = columns < h, row * h + columns
    t = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if delta is not None:
        t += tl.load(delta + at, inside, other=0.0).to(tl.float32)
        if delta_bias is not None:
            t += tl.load(delta_bias + columns, inside, other=0.0).to(tl.float32)
        rounded = t.to(total.dtype.element_ty)
        tl.store(total + at, rounded, inside)
        t = rounded.to(tl.float32)
    if bias is not None:
        mean = tl.sum(t) / h
        tl.store(statistics + rows + row, mean)
        t = tl.where(inside, t - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(t * t) / h + eps)
    tl.store(statistics + row, rstd)
    t *= rstd * tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    if bias is not None:
        t += tl.load(bias + columns, inside, other=0.0).to(tl.float32)
    if scale is not None:
        factor, t = tl.load(scale), t.to(x.dtype.element_ty).to(tl.float32)
        if amax is not None:
            tl.atomic_max(amax, tl.max(tl.where(inside, tl.abs(t), 0.0)), sem="relaxed")
        t *= factor
        if row == 0:
            tl.store(inverse, tl.div_rn(1.0, factor))
    tl.store(y + at, t.to(y.dtype.element_ty), inside)


@triton.jit
def _add_norm_backward(
    dy, dtotal, total, rstd, mean, weight, dx, sums, rows, h, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Walk over every n-th row, n programs; with sums keep this program's part of RMSNorm's dweight in registers."""
    program, programs, columns = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    inside, stride, dweight = columns < h, tl.cast(h, tl.int64), tl.zeros([BLOCK], tl.float32)
    w = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    for row in tl.range(program, rows, programs, num_stages=STAGES):
        at = row * stride + columns
        normal = tl.load(total + at, inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        if mean is not None:
            normal -= tl.load(mean + row)
        normal *= scale
        if sums is not None:
            dweight += grad * normal
        grad *= w
        out = grad - normal * (tl.sum(tl.where(inside, grad * normal, 0.0)) / h)
        if mean is not None:
            out -= tl.sum(grad) / h
        out *= scale
        if dtotal is not None:
            out += tl.load(dtotal + at, inside, other=0.0).to(tl.float32)
        tl.store(dx + at, out, inside)
    if sums is not None:
        tl.store(sums + program * h + columns, dweight, inside)


@triton.jit
def _norm_sums(dy, total, rstd, mean, dx, sums, rows, h, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over rows: one program has a slice of the columns and every n-th tile of rows."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros([ROWS, BLOCK], tl.float32)
    dweight, dbias, ddelta_bias = zeros, zeros, zeros
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        here, inside = row < rows, (row < rows)[:, None] & (columns < h)[None, :]
        at = row.to(tl.int64)[:, None] * h + columns[None, :]
        normal = tl.load(total + at, inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        if mean is not None:
            normal -= tl.load(mean + row, here, other=0.0)[:, None]
            dbias += grad
        dweight += grad * normal * tl.load(rstd + row, here, other=0.0)[:, None]
        if dx is not None:
            ddelta_bias += tl.load(dx + at, inside, other=0.0).to(tl.float32)
    mine, size = sums + tl.program_id(1) * h + columns, tl.num_programs(1) * h
    tl.store(mine, tl.sum(dweight, 0), columns < h)
    if mean is not None:
        mine += size
        tl.store(mine, tl.sum(dbias, 0), columns < h)
    if dx is not None:
        tl.store(mine + size, tl.sum(ddelta_bias, 0), columns < h)


def _row_in_registers(h: int) -> dict[str, int]:
    block = triton.next_power_of_2(h)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 32)}  # 16 numbers a thread


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    delta_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    into: CastInto | None = None,
) -> tuple[Tensor, Tensor | Cast, Tensor]:
    """Compute total = x + delta + delta_bias, its norm and the statistics of each row; see kernels/plain.py."""
    assert delta is not None or delta_bias is None
    x, h = x.contiguous(), x.shape[-1]
    total = x if delta is None else torch.empty_like(x)
    rows, delta = x.numel() // h, None if delta is None else delta.contiguous()
    statistics = x.new_empty(1 if bias is None else 2, *x.shape[:-1], dtype=torch.float32)
    tensors = x, delta, delta_bias, weight, bias, total
    if into is None:
        y = torch.empty_like(x)
        _add_norm[(rows,)](*tensors, y, statistics, None, None, None, rows, h, eps, **_row_in_registers(h))
        return total, y, statistics
    cast = Cast(x.new_empty(rows, h, dtype=into.kind), torch.empty_like(into.scale), None)
    scales = into.scale, cast.inverse, into.amax
    _add_norm[(rows,)](*tensors, cast.rows, statistics, *scales, rows, h, eps, **_row_in_registers(h))
    return total, cast, statistics


def add_norm_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, statistics: Tensor, weight: Tensor, delta_bias: bool, frozen: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dweight, dbias, ddelta_bias; see kernels/plain.py."""
    dy, total, h = dy.contiguous(), total.contiguous(), total.shape[-1]
    dtotal, dx = None if dtotal is None else dtotal.contiguous(), torch.empty_like(total)
    rstd, *means = statistics.unbind()
    mean = means[0] if means else None
    rows, layer_norm, shape = total.numel() // h, bool(means), _row_in_registers(h)
    # A short row and a single sum fit into registers: one pass. Otherwise the sums are a second pass, by columns.
    one_pass = shape["BLOCK"] <= 8192 and not layer_norm and not delta_bias
    programs, stages, parts = rows, 1, 8
    if one_pass:
        gpu = torch.cuda.get_device_properties(total.device)
        each = 1 if shape["BLOCK"] > 4096 else 3 if frozen else 2  # of a multiprocessor
        programs = parts = min(triton.cdiv(rows, 4), gpu.multi_processor_count * each)
        shared = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in torch's stubs
        stages = 2 if 6 * shape["BLOCK"] * total.itemsize < shared - 4096 else 1
    sums = None if frozen else total.new_empty(1 + layer_norm + delta_bias, parts, h, dtype=torch.float32)
    tensors = dy, dtotal, total, rstd, mean, weight, dx, sums if one_pass else None
    _add_norm_backward[(programs,)](*tensors, rows, h, STAGES=stages, **shape)
    if sums is None:
        return dx, None, None, None
    if not one_pass:
        added, grid = dx if delta_bias else None, (triton.cdiv(h, 128), parts)
        _norm_sums[grid](dy, total, rstd, mean, added, sums, rows, h, ROWS=32, BLOCK=128, num_warps=4)
    dweight, *others = sums.sum(1)
    return dx, dweight, others[0] if layer_norm else None, others[-1] if delta_bias else None
