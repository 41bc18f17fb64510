"""Triton kernels for what lies between the GEMMs: the functions of kernels/plain.py, by the same names and contracts.

Problem: on a GPU these operations cost nothing but memory traffic, and written as several torch operations each
intermediate makes a round trip to memory. At Llama-3 8B sizes that took a fifth of the step. The idea: one pass per
operation, everything in registers, arithmetic in float32 whatever the format in memory.

    kernel          of numbers as large as its result, it reads and writes
    add_norm        2 and 2, backward 3 and 1
    swiglu          2 and 1, backward 3 and 2; with casts the results are bytes, written twice: rows and columns
    rotate          1 and 1, in place; the backward also puts the gradients of q, k and v side by side
    merge           2 and 1
    sum_parts       one for each part, and 1
    add_rows        3 and 2, of those rows that a token has
    cross-entropy   1 and 0, backward 1 and 1 over the logits
    dropout         1 and 1
    adamw           4 and 3, and the bf16 parameter

Imported where the device is CUDA and torch brings Triton. But for the embedding's gradient no kernel adds atomically.
Left out: GELU, where torch's kernels are one pass already.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitron.kernels import plain
from minitron.kernels.plain import AdamHyper, AdamState, Cast, Rope

# ---- residual and norm -----------------------------------------------------------------------------------------------


@triton.jit
def _add_norm(x, delta, delta_bias, weight, bias, total, y, statistics, rows, h, eps, BLOCK: tl.constexpr):
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
    tl.store(y + at, t, inside)


@triton.jit
def _add_norm_backward(
    dy,
    dtotal,
    total,
    statistics,
    weight,
    dx,
    sums,
    rows,
    h,
    LAYER_NORM: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program walks over every n-th row; with SUMS it keeps its part of RMSNorm's dweight in registers."""
    program, programs, columns = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    inside, stride, dweight = columns < h, tl.cast(h, tl.int64), tl.zeros([BLOCK], tl.float32)
    w = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    for row in tl.range(program, rows, programs, num_stages=STAGES):
        at = row * stride + columns
        normal = tl.load(total + at, inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        rstd = tl.load(statistics + row)
        if LAYER_NORM:
            normal -= tl.load(statistics + rows + row)
        normal *= rstd
        if SUMS:
            dweight += grad * normal
        grad *= w
        out = grad - normal * (tl.sum(tl.where(inside, grad * normal, 0.0)) / h)
        if LAYER_NORM:
            out -= tl.sum(grad) / h
        out *= rstd
        if dtotal is not None:
            out += tl.load(dtotal + at, inside, other=0.0).to(tl.float32)
        tl.store(dx + at, out, inside)
    if SUMS:
        tl.store(sums + program * h + columns, dweight, inside)


@triton.jit
def _norm_sums(
    dy,
    total,
    statistics,
    dx,
    sums,
    rows,
    h,
    LAYER_NORM: tl.constexpr,
    DELTA_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over rows, for a slice of the columns and every n-th tile of rows."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros([ROWS, BLOCK], tl.float32)
    dweight, dbias, ddelta_bias = zeros, zeros, zeros
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        here, inside = row < rows, (row < rows)[:, None] & (columns < h)[None, :]
        at = row.to(tl.int64)[:, None] * h + columns[None, :]
        normal = tl.load(total + at, inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        if LAYER_NORM:
            normal -= tl.load(statistics + rows + row, here, other=0.0)[:, None]
            dbias += grad
        dweight += grad * normal * tl.load(statistics + row, here, other=0.0)[:, None]
        if DELTA_BIAS:
            ddelta_bias += tl.load(dx + at, inside, other=0.0).to(tl.float32)
    mine, size = sums + tl.program_id(1) * h + columns, tl.num_programs(1) * h
    tl.store(mine, tl.sum(dweight, 0), columns < h)
    if LAYER_NORM:
        tl.store(mine + size, tl.sum(dbias, 0), columns < h)
    if DELTA_BIAS:
        tl.store(mine + (1 + LAYER_NORM) * size, tl.sum(ddelta_bias, 0), columns < h)


def _row_in_registers(h: int) -> dict[str, int]:
    block = triton.next_power_of_2(h)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 32)}  # 16 numbers a thread


def add_norm(
    x: Tensor, delta: Tensor | None, delta_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """total = x + delta + delta_bias, its norm and the statistics of each row; see kernels/plain.py."""
    assert delta is not None or delta_bias is None
    x, h = x.contiguous(), x.shape[-1]
    total, y = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    statistics = x.new_empty(1 if bias is None else 2, *x.shape[:-1], dtype=torch.float32)
    rows = x.numel() // h
    _add_norm[(rows,)](
        x,
        None if delta is None else delta.contiguous(),
        delta_bias,
        weight,
        bias,
        total,
        y,
        statistics,
        rows,
        h,
        eps,
        **_row_in_registers(h),
    )
    return total, y, statistics


def add_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    statistics: Tensor,
    weight: Tensor,
    delta_bias: bool,
    frozen: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweight, dbias, ddelta_bias; see kernels/plain.py."""
    dy, total, h = dy.contiguous(), total.contiguous(), total.shape[-1]
    rows, layer_norm, shape = total.numel() // h, len(statistics) == 2, _row_in_registers(h)
    gpu, dx = torch.cuda.get_device_properties(total.device), torch.empty_like(total)
    # A short row and one sum fit into registers, and all is one pass; else the sums read once more, by columns.
    one_pass = shape["BLOCK"] <= 8192 and not layer_norm and not delta_bias
    programs, stages, parts = rows, 1, 8
    if one_pass:
        programs = parts = min(triton.cdiv(rows, 4), gpu.multi_processor_count * (2 if shape["BLOCK"] <= 4096 else 1))
        stages = 2 if 6 * shape["BLOCK"] * total.itemsize < gpu.shared_memory_per_block_optin - 4096 else 1
    sums = None if frozen else total.new_empty(1 + layer_norm + delta_bias, parts, h, dtype=torch.float32)
    _add_norm_backward[(programs,)](
        dy,
        None if dtotal is None else dtotal.contiguous(),
        total,
        statistics,
        weight,
        dx,
        sums,
        rows,
        h,
        LAYER_NORM=layer_norm,
        SUMS=one_pass and not frozen,
        **shape,
        STAGES=stages,
    )
    if frozen:
        return dx, None, None, None
    if not one_pass:
        _norm_sums[(triton.cdiv(h, 128), parts)](
            dy,
            total,
            statistics,
            dx,
            sums,
            rows,
            h,
            LAYER_NORM=layer_norm,
            DELTA_BIAS=delta_bias,
            ROWS=32,
            BLOCK=128,
            num_warps=4,
        )
    sums = sums.sum(1)
    return dx, sums[0], sums[1] if layer_norm else None, sums[-1] if delta_bias else None


# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_forward(x, y, f, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < f
    gate = tl.load(x + row * 2 * f + columns, inside).to(tl.float32)
    up = tl.load(x + row * 2 * f + f + columns, inside).to(tl.float32)
    tl.store(y + row * f + columns, gate * tl.sigmoid(gate) * up, inside)


@triton.jit
def _swiglu_backward(dy, x, dx, f, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < f
    gate = tl.load(x + row * 2 * f + columns, inside).to(tl.float32)
    up = tl.load(x + row * 2 * f + f + columns, inside).to(tl.float32)
    grad = tl.load(dy + row * f + columns, inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(dx + row * 2 * f + columns, grad * up * (sigmoid + silu * (1 - sigmoid)), inside)
    tl.store(dx + row * 2 * f + f + columns, grad * silu, inside)


def swiglu_forward(x: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2f] -> [..., f]."""
    x, f = x.contiguous(), x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], f)
    _swiglu_forward[(y.numel() // f, triton.cdiv(f, 2048))](x, y, f, BLOCK=2048, num_warps=8)
    return y


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """dx [..., 2f] from dy [..., f] and the input x."""
    dy, x, f = dy.contiguous(), x.contiguous(), dy.shape[-1]
    dx = torch.empty_like(x)
    _swiglu_backward[(dy.numel() // f, triton.cdiv(f, 2048))](dy, x, dx, f, BLOCK=2048, num_warps=8)
    return dx


@triton.jit
def _as_bf16(value):
    """The cast of a bf16 result, which nobody writes, is to be that of the plain path."""
    return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _note(amax, magnitude, inside):
    tl.atomic_max(amax, tl.max(tl.where(inside, magnitude, 0.0)), sem="relaxed")


@triton.jit
def _cast_tile(value, scale, rows, columns, i, j, inside, m, n, COLUMNS: tl.constexpr):
    """Store a tile of the [m, n] result, and its transpose."""
    small = (value * scale).to(rows.dtype.element_ty)  # saturates
    tl.store(rows + i.to(tl.int64)[:, None] * n + j[None, :], small, inside)
    if COLUMNS:
        tl.store(columns + j.to(tl.int64)[:, None] * m + i[None, :], tl.trans(small), tl.trans(inside))


@triton.jit
def _swiglu_cast(
    x,
    scale,
    rows,
    inverse,
    columns,
    amax,
    m,
    f,
    COLUMNS: tl.constexpr,
    NOTE: tl.constexpr,
    M: tl.constexpr,
    F: tl.constexpr,
):
    i, j = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * F + tl.arange(0, F)
    source, inside = x + i.to(tl.int64)[:, None] * (2 * f) + j[None, :], (i < m)[:, None] & (j < f)[None, :]
    gate, up = tl.load(source, inside).to(tl.float32), tl.load(source + f, inside).to(tl.float32)
    value, factor = _as_bf16(gate * tl.sigmoid(gate) * up), tl.load(scale)
    if NOTE:
        _note(amax, tl.abs(value), inside)
    _cast_tile(value, factor, rows, columns, i, j, inside, m, f, COLUMNS)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse, tl.div_rn(1.0, factor))


@triton.jit
def _swiglu_backward_cast(
    dy,
    x,
    scale,
    rows,
    inverse,
    columns,
    amax,
    m,
    f,
    COLUMNS: tl.constexpr,
    NOTE: tl.constexpr,
    M: tl.constexpr,
    F: tl.constexpr,
):
    i, j = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * F + tl.arange(0, F)
    source, inside = x + i.to(tl.int64)[:, None] * (2 * f) + j[None, :], (i < m)[:, None] & (j < f)[None, :]
    gate, up = tl.load(source, inside).to(tl.float32), tl.load(source + f, inside).to(tl.float32)
    grad = tl.load(dy + i.to(tl.int64)[:, None] * f + j[None, :], inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu, factor = gate * sigmoid, tl.load(scale)
    of_gate, of_up = _as_bf16(grad * up * (sigmoid + silu * (1 - sigmoid))), _as_bf16(grad * silu)
    if NOTE:
        _note(amax, tl.maximum(tl.abs(of_gate), tl.abs(of_up)), inside)
    _cast_tile(of_gate, factor, rows, columns, i, j, inside, m, 2 * f, COLUMNS)
    _cast_tile(of_up, factor, rows, columns, i, j + f, inside, m, 2 * f, COLUMNS)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse, tl.div_rn(1.0, factor))


def swiglu_cast(x: Tensor, scale: Tensor, amax: Tensor | None, kind: torch.dtype, columns: bool) -> Cast:
    """See kernels/plain.py."""
    m, f = x.shape[0], x.shape[1] // 2
    tile = dict(M=64, F=64, num_warps=8)
    return _run_cast(_swiglu_cast, tile, (x.contiguous(),), (m, f), f, scale, amax, kind, columns)


def swiglu_backward_cast(
    dy: Tensor, x: Tensor, scale: Tensor, amax: Tensor | None, kind: torch.dtype, columns: bool
) -> Cast:
    """See kernels/plain.py."""
    tile = dict(M=32, F=64, num_warps=4)
    return _run_cast(
        _swiglu_backward_cast, tile, (dy.contiguous(), x.contiguous()), dy.shape, x.shape[1], scale, amax, kind, columns
    )


def _run_cast(
    kernel,
    tile: dict[str, int],
    inputs: tuple[Tensor, ...],
    grid: tuple[int, int],
    n: int,
    scale: Tensor,
    amax: Tensor | None,
    kind: torch.dtype,
    columns: bool,
) -> Cast:
    """A kernel over tiles of `grid` [m, f] whose result is cast to [m, n]. Tiles are those that measured best."""
    m, f = grid
    rows, inverse = scale.new_empty(m, n, dtype=kind), torch.empty_like(scale)
    transposed = scale.new_empty(n, m, dtype=kind) if columns else None
    kernel[(triton.cdiv(m, tile["M"]), triton.cdiv(f, tile["F"]))](
        *inputs,
        scale,
        rows,
        inverse,
        rows if transposed is None else transposed,
        scale if amax is None else amax,
        m,
        f,
        COLUMNS=columns,
        NOTE=amax is not None,
        **tile,
    )
    return rows, inverse, transposed


# ---- rotary positions ------------------------------------------------------------------------------------------------


@triton.jit
def _rotate(
    x,
    y,
    cos,
    sin,
    batch,
    heads,
    x_row,
    x_sample,
    x_head,
    y_row,
    y_sample,
    y_head,
    rope_batch,
    SIGN: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Channels i and i + HALF of every head of one token turned by SIGN * angle; SIGN 0 copies."""
    token = tl.program_id(0)
    row, sample = (token // batch).to(tl.int64), token % batch
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = head < heads
    source = x + row * x_row + sample * x_sample + head * x_head + channel
    target = y + row * y_row + sample * y_sample + head * y_head + channel
    first, second = tl.load(source, inside), tl.load(source + HALF, inside)
    if SIGN != 0:
        angle = (row * rope_batch + sample % rope_batch) * HALF + channel
        c, s = tl.load(cos + angle), tl.load(sin + angle) * SIGN
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * c - b * s).to(first.dtype), (b * c + a * s).to(second.dtype)
    tl.store(target, first, inside)
    tl.store(target + HALF, second, inside)


def _turn(x: Tensor, y: Tensor, rope: Rope | None, sign: int) -> None:
    """x, y [s, b, n, d] with unit last stride; rope: cos and sin [s, b or 1, 1, d/2]."""
    s, b, n, d = x.shape
    assert x.stride(-1) == y.stride(-1) == 1 and d & (d - 1) == 0
    cos, sin = rope if rope is not None else (x, x)
    _rotate[(s * b,)](
        x,
        y,
        cos,
        sin,
        b,
        n,
        *x.stride()[:3],
        *y.stride()[:3],
        cos.shape[1],
        SIGN=sign,
        HALF=d // 2,
        HEADS=triton.next_power_of_2(n),
        num_warps=4,
    )


def split_heads(qkv: Tensor, sizes: tuple[int, int, int], rope: Rope) -> tuple[Tensor, ...]:
    """qkv [s, b, n + 2g, d] -> views q, k, v of it, q and k turned in place. d is a power of 2."""
    turned = qkv[:, :, : sizes[0] + sizes[1]]
    _turn(turned, turned, rope, 1)
    return qkv.split(sizes, 2)


def split_heads_backward(grads: tuple[Tensor, Tensor, Tensor], rope: Rope) -> Tensor:
    """dq, dk, dv [s, b, n or g, d] -> dqkv [s, b, n + 2g, d]."""
    s, b, _, d = grads[0].shape
    sizes = [g.shape[2] for g in grads]
    out = grads[0].new_empty(s, b, sum(sizes), d)
    for grad, part, sign in zip(grads, out.split(sizes, 2), (-1, -1, 0)):
        _turn(grad if grad.stride(-1) == 1 else grad.contiguous(), part, rope if sign else None, sign)
    return out


# ---- attention, merged from two sets of keys -------------------------------------------------------------------------


@triton.jit
def _merge(
    out,
    lse,
    block_out,
    block_lse,
    n,
    s,
    d,
    out_b,
    out_n,
    out_s,
    lse_b,
    lse_n,
    lse_s,
    from_b,
    from_n,
    from_s,
    with_b,
    with_n,
    with_s,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    sample, head = (tl.program_id(1) // n).to(tl.int64), tl.program_id(1) % n
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    here, inside = row < s, (row < s)[:, None] & (channel < d)[None, :]
    lse += sample * lse_b + head * lse_n + row * lse_s
    a = tl.load(lse, here, other=0.0)
    b = tl.load(block_lse + sample * with_b + head * with_n + row * with_s, here, other=0.0)
    row = row.to(tl.int64)[:, None]
    out += sample * out_b + head * out_n + row * out_s + channel[None, :]
    x = tl.load(out, inside).to(tl.float32)
    y = tl.load(block_out + sample * from_b + head * from_n + row * from_s + channel[None, :], inside).to(tl.float32)
    tl.store(out, x + tl.sigmoid(b - a)[:, None] * (y - x), inside)
    top = tl.maximum(a, b)
    tl.store(lse, top + tl.log(tl.exp(a - top) + tl.exp(b - top)), here)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """See kernels/plain.py."""
    b, n, s, d = out.shape
    assert out.stride(-1) == block_out.stride(-1) == 1
    _merge[(triton.cdiv(s, 32), b * n)](
        out,
        lse,
        block_out,
        block_lse,
        n,
        s,
        d,
        *out.stride()[:3],
        *lse.stride(),
        *block_out.stride()[:3],
        *block_lse.stride(),
        ROWS=32,
        D=triton.next_power_of_2(d),
        num_warps=4,
    )


# ---- partial sums ----------------------------------------------------------------------------------------------------


@triton.jit
def _sum_parts(parts, out, n, stride, ADD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, step = at < n, tl.cast(stride, tl.int64)
    total = tl.load(parts + at, inside).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        total += tl.load(parts + i * step + at, inside).to(tl.float32)
    if ADD:
        total += tl.load(out + at, inside).to(tl.float32)
    tl.store(out + at, total, inside)


def sum_parts(parts: Tensor, onto: Tensor | None = None) -> Tensor:
    """See kernels/plain.py. torch's sum over a first dimension runs at half the speed."""
    out = torch.empty_like(parts[0]) if onto is None else onto
    assert parts[0].is_contiguous() and out.is_contiguous()
    n = out.numel()
    _sum_parts[(triton.cdiv(n, 2048),)](
        parts, out, n, parts.stride(0), ADD=onto is not None, PARTS=len(parts), BLOCK=2048, num_warps=8
    )
    return out


# ---- gradients of weights --------------------------------------------------------------------------------------------


def add_product(out: Tensor, dy: Tensor, x: Tensor, *, add: bool) -> None:
    if dy.dtype == torch.float32:
        plain.add_product(out, dy, x, add=add)
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


def add_rows_(table: Tensor, ids: Tensor, first: int, rows: Tensor, in_order: bool = False) -> Tensor:
    """See kernels/plain.py. Tokens that share a row add in any order, so a deterministic run takes the plain one."""
    if in_order or torch.are_deterministic_algorithms_enabled():
        return plain.add_rows_(table, ids, first, rows, in_order=True)
    h = table.shape[1]
    _add_rows[(ids.numel(), triton.cdiv(h, 2048))](
        table, ids.contiguous(), rows.contiguous(), first, table.shape[0], h, BLOCK=2048, num_warps=8
    )
    return table


# ---- cross-entropy ---------------------------------------------------------------------------------------------------


@triton.jit
def _softmax_sums(logits, labels, top, total, picked, vocab, num_ids, first, BLOCK: tl.constexpr):
    # Loads are masked by the row's end, not by num_ids: a bound that is no multiple of 16 would keep them from being
    # vectorized.
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row) - first
    best, summed = float("-inf"), 0.0
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + columns, columns < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(columns < num_ids, x, float("-inf"))
        higher = tl.maximum(best, tl.max(x))
        summed = summed * tl.exp(best - higher) + tl.sum(tl.exp(x - higher))
        best = higher
    inside = (label >= 0) & (label < num_ids)
    tl.store(top + row, best)
    tl.store(total + row, summed)
    tl.store(picked + row, tl.load(logits + row * vocab + label, inside, other=0.0).to(tl.float32))


@triton.jit
def _softmax_gradient(logits, labels, lse, dloss, vocab, num_ids, first, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    label = tl.load(labels + row) - first
    x = tl.load(logits + row * vocab + columns, inside).to(tl.float32)
    p = tl.exp(x - tl.load(lse + row)) - tl.where(columns == label, 1.0, 0.0)
    grad = tl.where(columns < num_ids, p * tl.load(dloss + row), 0.0)
    tl.store(logits + row * vocab + columns, grad, inside)


def softmax_sums(
    logits: Tensor, labels: Tensor, first: int, num_ids: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Reduce each row of logits [..., v] to its maximum, its sum of exp(x - maximum) and the label's logit.

    See kernels/plain.py.
    """
    assert logits.is_contiguous() and labels.is_contiguous()
    vocab = logits.shape[-1]
    top, total, picked = (torch.empty(labels.shape, dtype=torch.float32, device=logits.device) for _ in range(3))
    _softmax_sums[(labels.numel(),)](
        logits, labels, top, total, picked, vocab, vocab if num_ids is None else num_ids, first, BLOCK=8192, num_warps=4
    )
    return top, total, picked


def softmax_gradient_(
    logits: Tensor, labels: Tensor, first: int, lse: Tensor, dloss: Tensor, num_ids: int | None = None
) -> Tensor:
    """Turn the logits into their gradient, (softmax - onehot(label)) * dloss; see kernels/plain.py."""
    assert logits.is_contiguous() and labels.is_contiguous() and lse.is_contiguous()
    vocab = logits.shape[-1]
    grid = labels.numel(), triton.cdiv(vocab, 4096)
    _softmax_gradient[grid](
        logits,
        labels,
        lse,
        dloss.contiguous(),
        vocab,
        vocab if num_ids is None else num_ids,
        first,
        BLOCK=4096,
        num_warps=8,
    )
    return logits


# ---- dropout ---------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    """minitron.kernels.rng's mixer: in uint32 its products wrap by themselves."""
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
    """See kernels/rng.py."""
    x, h = x.contiguous(), x.shape[2]
    y = torch.empty_like(x)
    grid = x.numel() // h, triton.cdiv(h, 2048)
    _drop_elements[grid](x, y, token_words.contiguous(), channel_words, threshold, factor, h, BLOCK=2048, num_warps=8)
    return y


# ---- AdamW -----------------------------------------------------------------------------------------------------------


@triton.jit
def _adamw(
    master,
    grad,
    average,
    square,
    param,
    corrections,
    divisor,
    found_inf,
    lr,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    decay,
    n,
    CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(found_inf) == 0.0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        g = tl.load(grad + i, inside) / tl.load(divisor)
        p = tl.load(master + i, inside) * (1 - lr * decay)
        m = tl.load(average + i, inside) * beta1 + g * rest1
        v = tl.load(square + i, inside) * beta2 + g * g * rest2
        p -= lr / tl.load(corrections) * m / (tl.sqrt(v / tl.load(corrections + 1)) + eps)
        tl.store(master + i, p, inside)
        tl.store(average + i, m, inside)
        tl.store(square + i, v, inside)
        if CAST:
            tl.store(param + i, p, inside)


def adamw_(
    states: list[AdamState],
    steps: Tensor,
    divisor: Tensor,
    found_inf: Tensor,
    hyper: AdamHyper,
    updated: Callable[[int], None],
) -> None:
    """One pass over memory for each state; see kernels/plain.py."""
    corrections = torch.stack([1 - beta ** steps.double() for beta in hyper.betas]).float()
    rests = [1 - beta for beta in hyper.betas]  # here in float64: in the kernel's float32, 1 - 0.999 is 1e-5 off
    for i, s in enumerate(states):
        n = s.master.numel()
        _adamw[(triton.cdiv(n, 4096),)](
            s.master,
            s.grad,
            s.average,
            s.square,
            s.param,
            corrections,
            divisor,
            found_inf,
            hyper.lr,
            *hyper.betas,
            *rests,
            hyper.eps,
            s.decay,
            n,
            CAST=s.param.dtype != torch.float32,
            BLOCK=4096,
            num_warps=8,
        )
        updated(i)
