"""Attention with dropout, or within documents, in Triton, forward and backward: a backend of kernels/attention.py.

Problem: torch's kernels draw dropout from the state of a generator, which no two layouts share, and the plain formulas
write every score to memory, several times over: [b, n, s, s] in float32. And of documents packed into one sample they
want a list, of which they take each for as long as the longest. The idea is that of FlashAttention-2 (Dao 2023): blocks
of queries meet blocks of keys in registers, and nothing of size s x s is written. Whether a probability is kept is a
hash of its name (kernels/rng.py), so a kernel computes it where it has the score, in ten integer instructions:

    word [query, key] = mix(query word ^ key word)       kept if word >= threshold

    kernel                    a program has    and loops over                       products   makes
    _attention_forward        M queries        blocks of N keys                     2          out, lse
    _attention_backward_q     M queries        blocks of N keys                     3          dq, delta = dout . out
    _attention_backward_kv    N keys           blocks of M queries, of all heads    4          dk, dv
                                               that share these keys

Under a causal mask a program skips the blocks above the diagonal and masks those that it crosses. Documents that must
not see each other are a lower end to that: every token knows where its document begins and ends (`spans`), and a
program starts at the block where its first query's document begins.

    documents of 6 and 10 tokens,       keys  0-3  4-7  8-11  12-15       % masked, # whole, . skipped
    blocks of 4               queries   0-3    %    .    .      .
                                        4-7    %    %    .      .
                                        8-11   .    %    %      .
                                       12-15   .    %    #      %

So the work follows the lengths of the documents, and one call, or one recording of it, serves any. Every sum has one
order: no atomic additions. Exponentials are of base 2, as the hardware has them. Left out: Hopper's TMA and warp
specialization, which Triton does not offer in all versions that torch brings.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitron.kernels.fused import _index_word, _mix, as_int32
from minitron.kernels.rng import AttentionDropout

_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # below any score, and finite: a query may see no key of a block
# Their values must not make variants of a kernel, each of which would be compiled at its first call.
_NUMBERS = ["samples", "n", "sq", "sk", "query_layer", "key_layer", "first_head"]


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_NUMBERS)
def _attention_forward(
    q,
    k,
    v,
    out,
    lse,
    query_counters,
    key_counters,
    spans,
    q_token,
    k_token,
    v_token,
    samples,
    n,
    sq,
    sk,
    scale,
    query_layer,
    key_layer,
    first_head,
    CAUSAL: tl.constexpr,
    APART: tl.constexpr,
    THRESHOLD: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest loops begin first
    sample, head = (tl.program_id(1) // n).to(tl.int64), (tl.program_id(1) % n).to(tl.int64)
    q += sample * q_token + head * D
    k += sample * k_token + head // GROUP * D
    v += sample * v_token + head // GROUP * D
    queries = first + tl.arange(0, M)
    q_tile = load_rows(q, first, sq, samples * q_token, M, D, WIDTH)
    if THRESHOLD >= 0:
        query_words = token_words(query_counters, queries, sq, samples, sample, query_layer)
        query_words = _mix(query_words ^ _index_word(first_head + head))
    total, norm = tl.zeros([M, WIDTH], tl.float32), tl.zeros([M], tl.float32)
    top, log2_scale = tl.full([M], _LOWEST, tl.float32), scale * _LOG2E
    begins = spans + sample * sq
    begin = tl.load(begins + queries, queries < sq, other=0) if APART else queries
    start, below, above, stop = seen_keys(begins, first, sq, sk, M, N, CAUSAL, APART)
    for EDGE in tl.static_range(2):
        for i in range(num_blocks(start, below, above, stop, N, EDGE)):
            at = block_at(i, start, below, above, N, EDGE)
            keys = at + tl.arange(0, N)
            if THRESHOLD >= 0:
                key_words = token_words(key_counters, keys, sk, samples, sample, key_layer)
            k_tile = load_rows(k, at, sk, samples * k_token, N, D, WIDTH)
            v_tile = load_rows(v, at, sk, samples * v_token, N, D, WIDTH)
            products = masked_scores(q_tile, k_tile, queries, keys, begin, sk, EDGE, CAUSAL, APART)
            higher = tl.maximum(top, tl.max(products, 1) * log2_scale)
            p, shrink = tl.exp2(products * log2_scale - higher[:, None]), tl.exp2(top - higher)
            norm, top = norm * shrink + tl.sum(p, 1), higher  # the norm counts what is dropped, too
            if THRESHOLD >= 0:
                p = tl.where(is_kept(query_words[:, None], key_words[None, :], THRESHOLD), p, 0.0)
            total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None], input_precision="ieee")
    store_rows(out + (sample * n + head) * D, total * (FACTOR / norm)[:, None], first, sq, samples * n * D, M, D, WIDTH)
    tl.store(lse + (sample * n + head) * sq + queries, (top + tl.log2(norm)) / _LOG2E, queries < sq)


@triton.jit(do_not_specialize=_NUMBERS)
def _attention_backward_q(
    q,
    k,
    v,
    out,
    dout,
    lse,
    delta,
    dq,
    query_counters,
    key_counters,
    spans,
    q_token,
    k_token,
    v_token,
    out_token,
    dout_token,
    samples,
    n,
    sq,
    sk,
    scale,
    query_layer,
    key_layer,
    first_head,
    CAUSAL: tl.constexpr,
    APART: tl.constexpr,
    THRESHOLD: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    sample, head = (tl.program_id(1) // n).to(tl.int64), (tl.program_id(1) % n).to(tl.int64)
    k += sample * k_token + head // GROUP * D
    v += sample * v_token + head // GROUP * D
    queries = first + tl.arange(0, M)
    q_tile = load_rows(q + sample * q_token + head * D, first, sq, samples * q_token, M, D, WIDTH)
    out_tile = load_rows(out + sample * out_token + head * D, first, sq, samples * out_token, M, D, WIDTH)
    dout_tile = load_rows(dout + sample * dout_token + head * D, first, sq, samples * dout_token, M, D, WIDTH)
    place = (sample * n + head) * sq + queries
    log2_sum = tl.load(lse + place, queries < sq, other=float("inf")) * _LOG2E  # where there is no query, p is 0
    dot = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta + place, dot, queries < sq)
    if THRESHOLD >= 0:
        query_words = token_words(query_counters, queries, sq, samples, sample, query_layer)
        query_words = _mix(query_words ^ _index_word(first_head + head))
    total, log2_scale = tl.zeros([M, WIDTH], tl.float32), scale * _LOG2E
    begins = spans + sample * sq
    begin = tl.load(begins + queries, queries < sq, other=0) if APART else queries
    start, below, above, stop = seen_keys(begins, first, sq, sk, M, N, CAUSAL, APART)
    for EDGE in tl.static_range(2):
        for i in range(num_blocks(start, below, above, stop, N, EDGE)):
            at = block_at(i, start, below, above, N, EDGE)
            keys = at + tl.arange(0, N)
            if THRESHOLD >= 0:
                key_words = token_words(key_counters, keys, sk, samples, sample, key_layer)
            k_tile = load_rows(k, at, sk, samples * k_token, N, D, WIDTH)
            v_tile = load_rows(v, at, sk, samples * v_token, N, D, WIDTH)
            products = masked_scores(q_tile, k_tile, queries, keys, begin, sk, EDGE, CAUSAL, APART)
            p = tl.exp2(products * log2_scale - log2_sum[:, None])
            dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
            if THRESHOLD >= 0:
                dp = tl.where(is_kept(query_words[:, None], key_words[None, :], THRESHOLD), dp * FACTOR, 0.0)
            ds = p * (dp - dot[:, None])
            total = tl.dot(ds.to(k_tile.dtype), k_tile, total, input_precision="ieee")
    store_rows(dq + (sample * n + head) * D, total * scale, first, sq, samples * n * D, M, D, WIDTH)


@triton.jit(do_not_specialize=_NUMBERS)
def _attention_backward_kv(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk,
    dv,
    query_counters,
    key_counters,
    spans,
    q_token,
    k_token,
    v_token,
    dout_token,
    samples,
    n,
    sq,
    sk,
    scale,
    query_layer,
    key_layer,
    first_head,
    CAUSAL: tl.constexpr,
    APART: tl.constexpr,
    THRESHOLD: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Sum dk and dv. Scores are [keys, queries] here: so both are products of what is in registers."""
    first, g = tl.program_id(0) * N, n // GROUP
    sample, key_head = (tl.program_id(1) // g).to(tl.int64), (tl.program_id(1) % g).to(tl.int64)
    keys = first + tl.arange(0, N)
    k_tile = load_rows(k + sample * k_token + key_head * D, first, sk, samples * k_token, N, D, WIDTH)
    v_tile = load_rows(v + sample * v_token + key_head * D, first, sk, samples * v_token, N, D, WIDTH)
    if THRESHOLD >= 0:
        key_words = token_words(key_counters, keys, sk, samples, sample, key_layer)
    dk_total, dv_total = tl.zeros([N, WIDTH], tl.float32), tl.zeros([N, WIDTH], tl.float32)
    log2_scale = scale * _LOG2E
    ends = spans + (samples + sample) * sq
    end = tl.load(ends + keys, keys < sk, other=0) if APART else keys
    # Queries from `start` to `edge` see some of these keys. Those behind it see all of them, or of documents none.
    start, edge = first if CAUSAL else 0, tl.minimum(first + N, sq) if CAUSAL else 0
    if APART:  # one loop, all of it masked, took less time on an H200 than two, for short documents and for long ones
        edge = tl.load(ends + tl.minimum(first + N, sk) - 1)
    for EDGE in tl.static_range(1 if APART else 0, 2):
        first_query = start if EDGE else edge
        blocks = tl.cdiv((edge if EDGE else sq) - first_query, M)
        for i in range(GROUP * blocks):  # one loop for all heads: it takes a while until one runs at full speed
            at, head = first_query + i % blocks * M, key_head * GROUP + i // blocks
            queries = at + tl.arange(0, M)
            place = (sample * n + head) * sq + queries
            log2_sum = tl.load(lse + place, queries < sq, other=float("inf")) * _LOG2E
            dot = tl.load(delta + place, queries < sq, other=0.0)
            if THRESHOLD >= 0:
                query_words = token_words(query_counters, queries, sq, samples, sample, query_layer)
                query_words = _mix(query_words ^ _index_word(first_head + head))
            q_tile = load_rows(q + sample * q_token + head * D, at, sq, samples * q_token, M, D, WIDTH)
            dout_tile = load_rows(dout + sample * dout_token + head * D, at, sq, samples * dout_token, M, D, WIDTH)
            products = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
            if EDGE:
                seen = keys[:, None] <= queries[None, :]
                if APART:
                    seen = seen & (queries[None, :] < end[:, None])
                products = tl.where(seen, products, float("-inf"))
            p = tl.exp2(products * log2_scale - log2_sum[None, :])
            dp, dropped = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee"), p
            if THRESHOLD >= 0:
                kept = is_kept(query_words[None, :], key_words[:, None], THRESHOLD)
                dp, dropped = tl.where(kept, dp * FACTOR, 0.0), tl.where(kept, p, 0.0)
            dv_total = tl.dot(dropped.to(dout_tile.dtype), dout_tile, dv_total, input_precision="ieee")
            ds = p * (dp - dot[None, :])
            dk_total = tl.dot(ds.to(q_tile.dtype), q_tile, dk_total, input_precision="ieee")
    place = (sample * g + key_head) * D
    store_rows(dk + place, dk_total * scale, first, sk, samples * g * D, N, D, WIDTH)
    store_rows(dv + place, dv_total * FACTOR, first, sk, samples * g * D, N, D, WIDTH)


# ---- the backend -----------------------------------------------------------------------------------------------------

# M queries, N keys, warps and stages by the width of a head, and of one of 128 for documents. What a program loops over
# divides what it has: so under a causal mask the blocks of both begin at the same places.
_BLOCKS = {
    _attention_forward: {64: (128, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 32, 8, 2)},
    _attention_backward_q: {64: (128, 64, 8, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)},
    _attention_backward_kv: {64: (64, 128, 8, 2), 128: (32, 128, 8, 3), 256: (32, 32, 4, 2)},
}
_APART = {
    _attention_forward: (64, 32, 4, 3),
    _attention_backward_q: (64, 64, 4, 2),
    _attention_backward_kv: (32, 64, 4, 2),
}
_IN_FLOAT32 = {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)}  # products outside of the tensor cores


def tiles(kernel: Any, dtype: torch.dtype, width: int, *, apart: bool) -> tuple[int, int, int, int]:
    """Return M, N, warps and stages of a kernel. width: of a head, a power of two; apart: documents."""
    if dtype == torch.float32:
        return _IN_FLOAT32[max(64, width)]
    return _APART[kernel] if apart and width == 128 else _BLOCKS[kernel][max(64, width)]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout: AttentionDropout | None = None,
    spans: Tensor | None = None,
) -> tuple[Tensor, Tensor, None]:
    """Compute out and lse: see kernels/attention.py. out is [s, b, n, d] in memory."""
    q, k, v = map(_evenly, (q, k, v))
    out, lse = _empty(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _launch(_attention_forward, (q, k, v, out, lse), (q, k, v), q, k, causal, scale, dropout, spans)
    return out, lse, None


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: None,
    *,
    causal: bool,
    scale: float,
    dropout: AttentionDropout | None = None,
    spans: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk, dv from out and lse, maybe merged over many blocks of keys: see kernels/attention.py."""
    dout, q, k, v, out = map(_evenly, (dout, q, k, v, out))
    (dq, dk, dv), lse = map(_empty, (q, k, v)), lse.contiguous()
    delta = torch.empty_like(lse)
    options = (q, k, causal, scale, dropout, spans)
    _launch(_attention_backward_q, (q, k, v, out, dout, lse, delta, dq), (q, k, v, out, dout), *options)
    _launch(_attention_backward_kv, (q, k, v, dout, lse, delta, dk, dv), (q, k, v, dout), *options)
    return dq, dk, dv


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    strided: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float,
    dropout: AttentionDropout | None,
    spans: Tensor | None,
) -> None:
    (b, n, sq, d), (g, sk) = q.shape, k.shape[1:3]
    width = max(16, triton.next_power_of_2(d))
    m_rows, n_rows, warps, stages = tiles(kernel, q.dtype, width, apart=spans is not None)
    by_keys = kernel is _attention_backward_kv
    assert all(128 * x.stride(2) < 1 << 31 for x in strided), "offsets within a block are int32: see config/rules.py"
    blocks, heads = (triton.cdiv(sk, n_rows), g) if by_keys else (triton.cdiv(sq, m_rows), n)
    names: tuple[int, ...] = (0, 0, 0)
    counters, threshold, factor = (tensors[-1], tensors[-1]), -1, 1.0
    if dropout is not None:
        counters = dropout.query_counters.contiguous(), dropout.key_counters.contiguous()
        names = *map(as_int32, dropout.layer_words), dropout.first_head
        threshold, factor = dropout.threshold, 1 / (1 - dropout.p)
    kernel[(blocks, b * heads)](
        *tensors,
        *counters,
        tensors[-1] if spans is None else spans,
        *(x.stride(2) // b for x in strided),
        b,
        n,
        sq,
        sk,
        scale,
        *names,
        CAUSAL=causal,
        APART=spans is not None,
        THRESHOLD=threshold,
        FACTOR=factor,
        GROUP=n // g,
        D=d,
        WIDTH=width,
        M=m_rows,
        N=n_rows,
        num_warps=warps,
        num_stages=stages,
    )


def _evenly(x: Tensor) -> Tensor:
    """Return x [b, n, s, d], copied unless it is [s, b, n, d] in memory with its tokens evenly apart."""
    b, _, _, d = x.shape
    if x.stride(3) == 1 and x.stride(1) == d and (b == 1 or x.stride(2) == b * x.stride(0)):
        return x
    return _empty(x).copy_(x)


def _empty(like: Tensor) -> Tensor:
    """Allocate [b, n, s, d], in memory [s, b, n, d]."""
    b, n, s, d = like.shape
    return like.new_empty(s, b, n, d).permute(1, 2, 0, 3)


# ---- blocks of operands: how they are loaded, and which of them see each other ---------------------------------------
# Tensors are [s, b, n, d] in memory, tokens evenly apart: x_token elements from one token to the next. A program with
# some queries walks over blocks of keys. The upper edge is the causal mask's; the lower one is where documents end, and
# there is none without them.
#
#         start      below            above      stop
#           |  edge    |    whole       |  edge    |        edge: some see each other, a mask says which


@triton.jit
def _rows(x, first, count, row_stride, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to [ROWS, WIDTH] elements of x [count, D], from row `first` on, and which of them there are."""
    i, j = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (first + i < count)[:, None]
    if D < WIDTH:
        inside = inside & (j < D)[None, :]
    return x + tl.cast(first, tl.int64) * row_stride + i[:, None] * row_stride + j[None, :], inside


@triton.jit
def load_rows(x, first, count, row_stride, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    pointers, inside = _rows(x, first, count, row_stride, ROWS, D, WIDTH)
    return tl.load(pointers, inside, other=0.0)


@triton.jit
def store_rows(x, value, first, count, row_stride, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    pointers, inside = _rows(x, first, count, row_stride, ROWS, D, WIDTH)
    tl.store(pointers, value.to(x.dtype.element_ty), inside)


@triton.jit
def token_words(counters, tokens, count, samples, sample, layer):
    """Mix the counters [count, samples] of one sample's tokens with a word of the layer."""
    counter = tl.load(counters + tokens.to(tl.int64) * samples + sample, tokens < count, other=0)
    return _mix(counter.to(tl.uint32) ^ layer.to(tl.uint32))


@triton.jit
def is_kept(query_words, key_words, THRESHOLD: tl.constexpr):
    return _mix(query_words ^ key_words).to(tl.int64) >= THRESHOLD


@triton.jit
def masked_scores(
    q_tile, k_tile, queries, keys, begin, sk, EDGE: tl.constexpr, CAUSAL: tl.constexpr, APART: tl.constexpr
):
    """Compute q k^T [M, N]. EDGE: some keys are behind the last one, or unseen by some queries; these get -inf."""
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if EDGE:
        seen = (keys < sk)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= queries[:, None])
        if APART:
            seen = seen & (keys[None, :] >= begin[:, None])
        products = tl.where(seen, products, float("-inf"))
    return products


@triton.jit
def seen_keys(begins, first, sq, sk, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, APART: tl.constexpr):
    """Return (start, below, above, stop) of the keys that M queries from `first` on see: blocks from `start` to `stop`.

    Of the blocks from `below` to `above` every query sees every key.
    """
    start, below, above, stop = 0, 0, sk // N * N, sk
    if CAUSAL:
        above, stop = first, tl.minimum(first + M, sk)
    if APART:
        start = tl.load(begins + first) // N * N
        below = tl.minimum(tl.cdiv(tl.load(begins + tl.minimum(first + M, sq) - 1), N) * N, first)
    return start, below, above, stop


@triton.jit
def num_blocks(start, below, above, stop, STEP: tl.constexpr, EDGE: tl.constexpr):
    """Count the blocks at the edges: from `start` to `below` and from `above` to `stop`; or the whole ones between."""
    if EDGE:
        return tl.cdiv(below - start, STEP) + tl.cdiv(stop - above, STEP)
    return tl.cdiv(above - below, STEP)


@triton.jit
def block_at(i, start, below, above, STEP: tl.constexpr, EDGE: tl.constexpr):
    """Return where the i-th of these blocks begins."""
    if EDGE:
        before = tl.cdiv(below - start, STEP)
        return tl.where(i < before, start + i * STEP, above + (i - before) * STEP)
    return below + i * STEP
