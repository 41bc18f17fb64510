"""Attention with dropout, or within documents, in Triton, forward and backward: a backend of kernels/attention.py.

Problem: torch's kernels draw dropout from a generator state, so their masks depend on the layout. The plain formulas
write all scores to memory: [b, n, s, s] in float32, several times. torch's kernels for packed documents take as long
for each document as for the longest. The idea is FlashAttention-2 (Dao 2023): blocks of queries meet blocks of keys in
registers, and no s x s tensor is written. Dropout hashes a probability's name (kernels/rng.py), so a kernel computes it
where it has the score, in ten integer instructions:

    word [query, key] = mix(query word ^ key word)       kept if word >= threshold

    kernel                    a program has    and loops over                       products   makes
    _attention_forward        M queries        blocks of N keys                     2          out, lse
    _attention_backward_q     M queries        blocks of N keys                     3          dq, delta = dout . out
    _attention_backward_kv    N keys           blocks of M queries, of all heads    4          dk, dv
                                               that share these keys

Under the causal mask a program skips the blocks above the diagonal and masks the blocks that cross it. Documents add a
lower end: a program starts at the block where the document of its first query begins (`document_bounds`).

    documents of 6 and 10 tokens,       keys  0-3  4-7  8-11  12-15       % masked, # whole, . skipped
    blocks of 4               queries   0-3    %    .    .      .
                                        4-7    %    %    .      .
                                        8-11   .    %    %      .
                                       12-15   .    %    #      %

So the work follows the lengths of the documents. One call, or one recorded call, serves all documents of a batch. Each
sum has a fixed order, without atomic additions. Exponentials are of base 2, as in hardware. Left out: Hopper's TMA and
warp specialization, which some Triton versions of torch lack.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitron.kernels.fused import _index_word, _mix, as_int32

_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # below any score, and finite: a block may have no key for a query
# Triton must not specialise kernels for values of these: it would compile a variant for each kind of value.
_NUMBERS = ["samples", "n", "sq", "sk", "query_layer", "key_layer", "first_head"]


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_NUMBERS)
def _attention_forward(
    tensors,
    strides,
    samples,
    n,
    sq,
    sk,
    scale,
    query_layer,
    key_layer,
    first_head,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    q, k, v, out, lse, counters, document_bounds = tensors
    q_token, k_token, v_token = strides
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest loops begin first
    sample, head = (tl.program_id(1) // n).to(tl.int64), (tl.program_id(1) % n).to(tl.int64)
    q += sample * q_token + head * D
    k += sample * k_token + head // GROUP * D
    v += sample * v_token + head // GROUP * D
    queries = first + tl.arange(0, M)
    q_tile = load_rows(q, first, sq, samples * q_token, M, D, WIDTH)
    if THRESHOLD >= 0:
        query_words = token_words(counters, queries, sq, samples, sample, query_layer)
        query_words = _mix(query_words ^ _index_word(first_head + head))
    total, norm = tl.zeros([M, WIDTH], tl.float32), tl.zeros([M], tl.float32)
    top, log2_scale = tl.full([M], _LOWEST, tl.float32), scale * _LOG2E
    begins = document_bounds + sample * sq
    begin = tl.load(begins + queries, queries < sq, other=0) if DOCUMENTS else queries
    start, below, above, stop = key_blocks(begins, first, sq, sk, M, N, CAUSAL, DOCUMENTS)
    for MASKED in tl.static_range(2):
        for i in range(num_blocks(start, below, above, stop, N, MASKED)):
            at = block_at(i, start, below, above, N, MASKED)
            keys = at + tl.arange(0, N)
            if THRESHOLD >= 0:
                key_words = token_words(counters, keys, sk, samples, sample, key_layer)
            k_tile = load_rows(k, at, sk, samples * k_token, N, D, WIDTH)
            v_tile = load_rows(v, at, sk, samples * v_token, N, D, WIDTH)
            products = masked_scores(q_tile, k_tile, queries, keys, begin, sk, MASKED, CAUSAL, DOCUMENTS)
            higher = tl.maximum(top, tl.max(products, 1) * log2_scale)
            p, shrink = tl.exp2(products * log2_scale - higher[:, None]), tl.exp2(top - higher)
            norm, top = norm * shrink + tl.sum(p, 1), higher  # the norm includes dropped probabilities
            if THRESHOLD >= 0:
                p = tl.where(is_kept(query_words[:, None], key_words[None, :], THRESHOLD), p, 0.0)
            total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None], input_precision="ieee")
    store_rows(out + (sample * n + head) * D, total * (FACTOR / norm)[:, None], first, sq, samples * n * D, M, D, WIDTH)
    tl.store(lse + (sample * n + head) * sq + queries, (top + tl.log2(norm)) / _LOG2E, queries < sq)


@triton.jit(do_not_specialize=_NUMBERS)
def _attention_backward_q(
    tensors,
    strides,
    samples,
    n,
    sq,
    sk,
    scale,
    query_layer,
    key_layer,
    first_head,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    q, k, v, out, dout, lse, delta, dq, counters, document_bounds = tensors
    q_token, k_token, v_token, out_token, dout_token = strides
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    sample, head = (tl.program_id(1) // n).to(tl.int64), (tl.program_id(1) % n).to(tl.int64)
    k += sample * k_token + head // GROUP * D
    v += sample * v_token + head // GROUP * D
    queries = first + tl.arange(0, M)
    q_tile = load_rows(q + sample * q_token + head * D, first, sq, samples * q_token, M, D, WIDTH)
    out_tile = load_rows(out + sample * out_token + head * D, first, sq, samples * out_token, M, D, WIDTH)
    dout_tile = load_rows(dout + sample * dout_token + head * D, first, sq, samples * dout_token, M, D, WIDTH)
    place = (sample * n + head) * sq + queries
    log2_sum = tl.load(lse + place, queries < sq, other=float("inf")) * _LOG2E  # p is 0 behind the last query
    dot = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta + place, dot, queries < sq)
    if THRESHOLD >= 0:
        query_words = token_words(counters, queries, sq, samples, sample, query_layer)
        query_words = _mix(query_words ^ _index_word(first_head + head))
    total, log2_scale = tl.zeros([M, WIDTH], tl.float32), scale * _LOG2E
    begins = document_bounds + sample * sq
    begin = tl.load(begins + queries, queries < sq, other=0) if DOCUMENTS else queries
    start, below, above, stop = key_blocks(begins, first, sq, sk, M, N, CAUSAL, DOCUMENTS)
    for MASKED in tl.static_range(2):
        for i in range(num_blocks(start, below, above, stop, N, MASKED)):
            at = block_at(i, start, below, above, N, MASKED)
            keys = at + tl.arange(0, N)
            if THRESHOLD >= 0:
                key_words = token_words(counters, keys, sk, samples, sample, key_layer)
            k_tile = load_rows(k, at, sk, samples * k_token, N, D, WIDTH)
            v_tile = load_rows(v, at, sk, samples * v_token, N, D, WIDTH)
            products = masked_scores(q_tile, k_tile, queries, keys, begin, sk, MASKED, CAUSAL, DOCUMENTS)
            p = tl.exp2(products * log2_scale - log2_sum[:, None])
            dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
            if THRESHOLD >= 0:
                dp = tl.where(is_kept(query_words[:, None], key_words[None, :], THRESHOLD), dp * FACTOR, 0.0)
            ds = p * (dp - dot[:, None])
            total = tl.dot(ds.to(k_tile.dtype), k_tile, total, input_precision="ieee")
    store_rows(dq + (sample * n + head) * D, total * scale, first, sq, samples * n * D, M, D, WIDTH)


@triton.jit(do_not_specialize=_NUMBERS)
def _attention_backward_kv(
    tensors,
    strides,
    samples,
    n,
    sq,
    sk,
    scale,
    query_layer,
    key_layer,
    first_head,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Sum dk and dv. Scores are [keys, queries] here, so that both products have their operands in registers."""
    q, k, v, dout, lse, delta, dk, dv, counters, document_bounds = tensors
    q_token, k_token, v_token, dout_token = strides
    first, g = tl.program_id(0) * N, n // GROUP
    sample, key_head = (tl.program_id(1) // g).to(tl.int64), (tl.program_id(1) % g).to(tl.int64)
    keys = first + tl.arange(0, N)
    k_tile = load_rows(k + sample * k_token + key_head * D, first, sk, samples * k_token, N, D, WIDTH)
    v_tile = load_rows(v + sample * v_token + key_head * D, first, sk, samples * v_token, N, D, WIDTH)
    if THRESHOLD >= 0:
        key_words = token_words(counters, keys, sk, samples, sample, key_layer)
    dk_total, dv_total = tl.zeros([N, WIDTH], tl.float32), tl.zeros([N, WIDTH], tl.float32)
    log2_scale = scale * _LOG2E
    ends = document_bounds + (samples + sample) * sq
    end = tl.load(ends + keys, keys < sk, other=0) if DOCUMENTS else keys
    # Queries from `start` to `edge` attend to some of these keys. Later ones attend to all, or with documents to none.
    start, edge = first if CAUSAL else 0, tl.minimum(first + N, sq) if CAUSAL else 0
    if DOCUMENTS:  # one loop that masks all blocks is faster than two, for short documents and for long ones
        edge = tl.load(ends + tl.minimum(first + N, sk) - 1)
    for MASKED in tl.static_range(1 if DOCUMENTS else 0, 2):
        first_query = start if MASKED else edge
        blocks = tl.cdiv((edge if MASKED else sq) - first_query, M)
        for i in range(GROUP * blocks):  # one loop for all heads, because a loop starts slowly
            at, head = first_query + i % blocks * M, key_head * GROUP + i // blocks
            queries = at + tl.arange(0, M)
            place = (sample * n + head) * sq + queries
            log2_sum = tl.load(lse + place, queries < sq, other=float("inf")) * _LOG2E
            dot = tl.load(delta + place, queries < sq, other=0.0)
            if THRESHOLD >= 0:
                query_words = token_words(counters, queries, sq, samples, sample, query_layer)
                query_words = _mix(query_words ^ _index_word(first_head + head))
            q_tile = load_rows(q + sample * q_token + head * D, at, sq, samples * q_token, M, D, WIDTH)
            dout_tile = load_rows(dout + sample * dout_token + head * D, at, sq, samples * dout_token, M, D, WIDTH)
            products = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
            if MASKED:
                allowed = keys[:, None] <= queries[None, :]
                if DOCUMENTS:
                    allowed = allowed & (queries[None, :] < end[:, None])
                products = tl.where(allowed, products, float("-inf"))
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
# `options` are the Options of kernels/attention.py, which imports this file.

# M queries, N keys, warps and stages by head dim; one more set for head dim 128 with documents. A program's own block
# is a multiple of the blocks in its loop, so under a causal mask both begin at the same positions.
_BLOCKS = {
    _attention_forward: {64: (128, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 32, 8, 2)},
    _attention_backward_q: {64: (128, 64, 8, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)},
    _attention_backward_kv: {64: (64, 128, 8, 2), 128: (32, 128, 8, 3), 256: (32, 32, 4, 2)},
}
_DOCUMENT_BLOCKS = {
    _attention_forward: (64, 32, 4, 3),
    _attention_backward_q: (64, 64, 4, 2),
    _attention_backward_kv: (32, 64, 4, 2),
}
_IN_FLOAT32 = {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)}  # without tensor cores


def tiles(kernel: Any, dtype: torch.dtype, width: int, *, documents: bool) -> tuple[int, int, int, int]:
    """Return M, N, warps and stages of a kernel. width: of a head, a power of two; documents: whether it masks them."""
    if dtype == torch.float32:
        return _IN_FLOAT32[max(64, width)]
    return _DOCUMENT_BLOCKS[kernel] if documents and width == 128 else _BLOCKS[kernel][max(64, width)]


def forward(q: Tensor, k: Tensor, v: Tensor, options: Any) -> tuple[Tensor, Tensor, None]:
    """Compute out and lse: see kernels/attention.py. out is [s, b, n, d] in memory."""
    q, k, v = map(_evenly, (q, k, v))
    out, lse = _empty(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _launch(_attention_forward, (q, k, v), (out, lse), options)
    return out, lse, None


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: None, options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk, dv from out and lse, maybe merged over many blocks of keys: see kernels/attention.py."""
    dout, q, k, v, out = map(_evenly, (dout, q, k, v, out))
    (dq, dk, dv), lse = map(_empty, (q, k, v)), lse.contiguous()
    delta = torch.empty_like(lse)
    _launch(_attention_backward_q, (q, k, v, out, dout), (lse, delta, dq), options)
    _launch(_attention_backward_kv, (q, k, v, dout), (lse, delta, dk, dv), options)
    return dq, dk, dv


def _launch(kernel: Any, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...], options: Any) -> None:
    """Launch a kernel. inputs: q, k, v and others [b, n, s, d], of any token stride; others: contiguous tensors."""
    q, k = inputs[:2]
    (b, n, sq, d), (g, sk) = q.shape, k.shape[1:3]
    dropout, bounds, absent = options.dropout, options.document_bounds, others[-1]  # a pointer that no kernel reads
    width = max(16, triton.next_power_of_2(d))
    m_rows, n_rows, warps, stages = tiles(kernel, q.dtype, width, documents=bounds is not None)
    by_keys = kernel is _attention_backward_kv
    assert all(128 * x.stride(2) < 1 << 31 for x in inputs), "offsets within a block are int32: see config/rules.py"
    blocks, heads = (triton.cdiv(sk, n_rows), g) if by_keys else (triton.cdiv(sq, m_rows), n)
    words: tuple[int, ...] = (0, 0, 0)
    counters, threshold, factor = absent, -1, 1.0
    if dropout is not None:
        assert sq == sk, f"dropout of {sq} queries and {sk} keys"
        words = *map(as_int32, dropout.layer_words), dropout.first_head
        counters, threshold, factor = dropout.counters.contiguous(), dropout.threshold, 1 / (1 - dropout.p)
    tensors = *inputs, *others, counters, absent if bounds is None else bounds
    numbers = tuple(x.stride(2) // b for x in inputs), b, n, sq, sk, options.scale, *words
    mask = dict(CAUSAL=options.causal, DOCUMENTS=bounds is not None, THRESHOLD=threshold, FACTOR=factor)
    tile = dict(GROUP=n // g, D=d, WIDTH=width, M=m_rows, N=n_rows, num_warps=warps, num_stages=stages)
    kernel[(blocks, b * heads)](tensors, *numbers, **mask, **tile)


def _evenly(x: Tensor) -> Tensor:
    """Return x [b, n, s, d], copied unless it is [s, b, n, d] in memory with one distance between tokens."""
    b, _, _, d = x.shape
    if x.stride(3) == 1 and x.stride(1) == d and (b == 1 or x.stride(2) == b * x.stride(0)):
        return x
    return _empty(x).copy_(x)


def _empty(like: Tensor) -> Tensor:
    """Allocate [b, n, s, d] that is [s, b, n, d] in memory."""
    b, n, s, d = like.shape
    return like.new_empty(s, b, n, d).permute(1, 2, 0, 3)


# ---- blocks of operands: how they are loaded and masked --------------------------------------------------------------
# Tensors are [s, b, n, d] in memory, and x_token is the distance of tokens in elements. A program of queries loops over
# blocks of keys. Blocks at the upper edge cross the causal mask; blocks at the lower edge cross a document begin.
#
#         start      below            above      stop
#           |  edge    |    whole       |  edge    |        MASKED: at the edges some pairs are masked


@triton.jit
def _rows(x, first, count, row_stride, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to [ROWS, WIDTH] elements of x [count, D], from row `first` on, and which are inside of x."""
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
    q_tile, k_tile, queries, keys, begin, sk, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Compute q k^T [M, N]. MASKED: set it to -inf behind the last key, and where a query must not attend to a key."""
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if MASKED:
        allowed = (keys < sk)[None, :]
        if CAUSAL:
            allowed = allowed & (keys[None, :] <= queries[:, None])
        if DOCUMENTS:
            allowed = allowed & (keys[None, :] >= begin[:, None])
        products = tl.where(allowed, products, float("-inf"))
    return products


@triton.jit
def key_blocks(begins, first, sq, sk, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Return (start, below, above, stop): M queries from `first` on attend to blocks of keys from `start` to `stop`.

    In the blocks from `below` to `above` every query attends to every key.
    """
    start, below, above, stop = 0, 0, sk // N * N, sk
    if CAUSAL:
        above, stop = first, tl.minimum(first + M, sk)
    if DOCUMENTS:
        start = tl.load(begins + first) // N * N
        below = tl.minimum(tl.cdiv(tl.load(begins + tl.minimum(first + M, sq) - 1), N) * N, first)
    return start, below, above, stop


@triton.jit
def num_blocks(start, below, above, stop, STEP: tl.constexpr, MASKED: tl.constexpr):
    """Count the blocks at the edges, from `start` to `below` and from `above` to `stop`; or the whole ones between."""
    if MASKED:
        return tl.cdiv(below - start, STEP) + tl.cdiv(stop - above, STEP)
    return tl.cdiv(above - below, STEP)


@triton.jit
def block_at(i, start, below, above, STEP: tl.constexpr, MASKED: tl.constexpr):
    """Return the first key of the i-th of these blocks."""
    if MASKED:
        before = tl.cdiv(below - start, STEP)
        return tl.where(i < before, start + i * STEP, above + (i - before) * STEP)
    return below + i * STEP
