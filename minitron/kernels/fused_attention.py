"""Attention with dropout in Triton, forward and backward: a backend of kernels/attention.py.

Problem: torch's kernels draw dropout from the state of a generator, which no two layouts share, and the plain formulas
write every score to memory, several times over: [b, n, s, s] in float32. The idea is that of FlashAttention-2 (Dao
2023): blocks of queries meet blocks of keys in registers, and nothing of size s x s is written. Whether a probability
is kept is a hash of its name (kernels/rng.py), so a kernel computes it where it has the score, in ten integer
instructions:

    word [query, key] = mix(query word ^ key word)       kept if word >= threshold

    kernel                    a program has    and loops over                       products   makes
    _attention_forward        M queries        blocks of N keys                     2          out, lse
    _attention_backward_q     M queries        blocks of N keys                     3          dq, delta = dout . out
    _attention_backward_kv    N keys           blocks of M queries, of all heads    4          dk, dv
                                               that share these keys

Under a causal mask a program skips the blocks above the diagonal and masks those that it crosses. Every sum has one
order: no atomic additions. Exponentials are of base 2, as the hardware has them. Left out: Hopper's TMA and warp
specialization, which Triton does not offer in all versions that torch brings.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitron.kernels.fused_activations import _index_word, _mix, as_int32
from minitron.kernels.rng import AttentionDropout

_LOG2E = tl.constexpr(1.4426950408889634)
# Their values must not make variants of a kernel, each of which would be compiled at its first call.
_NUMBERS = ["samples", "n", "sq", "sk", "query_layer", "key_layer", "first_head"]


# ---- parts -----------------------------------------------------------------------------------------------------------
# Tensors are [s, b, n, d] in memory, tokens evenly apart: x_token elements from one token to the next.


@triton.jit
def _tile(x, first, count, row_stride, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to [ROWS, WIDTH] elements of x [count, D], from row `first` on, and which of them there are."""
    i, j = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (first + i < count)[:, None]
    if D < WIDTH:
        inside = inside & (j < D)[None, :]
    return x + tl.cast(first, tl.int64) * row_stride + i[:, None] * row_stride + j[None, :], inside


@triton.jit
def _load(x, first, count, row_stride, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    pointers, inside = _tile(x, first, count, row_stride, ROWS, D, WIDTH)
    return tl.load(pointers, inside, other=0.0)


@triton.jit
def _store(x, value, first, count, row_stride, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    pointers, inside = _tile(x, first, count, row_stride, ROWS, D, WIDTH)
    tl.store(pointers, value.to(x.dtype.element_ty), inside)


@triton.jit
def _token_words(counters, tokens, count, samples, sample, layer):
    """Mix the counters [count, samples] of one sample's tokens with a word of the layer."""
    counter = tl.load(counters + tokens.to(tl.int64) * samples + sample, tokens < count, other=0)
    return _mix(counter.to(tl.uint32) ^ layer.to(tl.uint32))


@triton.jit
def _kept(query_words, key_words, THRESHOLD: tl.constexpr):
    return _mix(query_words ^ key_words).to(tl.int64) >= THRESHOLD


@triton.jit
def _products(q_tile, k_tile, queries, keys, sk, EDGE: tl.constexpr, CAUSAL: tl.constexpr):
    """Compute q k^T [M, N]. EDGE: some keys are behind the last one, or unseen by some queries; these get -inf."""
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if EDGE:
        seen = (keys < sk)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= queries[:, None])
        products = tl.where(seen, products, float("-inf"))
    return products


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
    q_tile = _load(q, first, sq, samples * q_token, M, D, WIDTH)
    if THRESHOLD >= 0:
        query_words = _token_words(query_counters, queries, sq, samples, sample, query_layer)
        query_words = _mix(query_words ^ _index_word(first_head + head))
    total, norm = tl.zeros([M, WIDTH], tl.float32), tl.zeros([M], tl.float32)
    top, log2_scale = tl.full([M], float("-inf"), tl.float32), scale * _LOG2E
    whole = first if CAUSAL else sk // N * N  # keys that all of these queries see, in whole blocks
    stop = tl.minimum(first + M, sk) if CAUSAL else sk
    for EDGE in tl.static_range(2):
        for at in range(whole if EDGE else 0, stop if EDGE else whole, N):
            keys = at + tl.arange(0, N)
            if THRESHOLD >= 0:
                key_words = _token_words(key_counters, keys, sk, samples, sample, key_layer)
            k_tile = _load(k, at, sk, samples * k_token, N, D, WIDTH)
            v_tile = _load(v, at, sk, samples * v_token, N, D, WIDTH)
            products = _products(q_tile, k_tile, queries, keys, sk, EDGE, CAUSAL)
            higher = tl.maximum(top, tl.max(products, 1) * log2_scale)
            p, shrink = tl.exp2(products * log2_scale - higher[:, None]), tl.exp2(top - higher)
            norm, top = norm * shrink + tl.sum(p, 1), higher  # the norm counts what is dropped, too
            if THRESHOLD >= 0:
                p = tl.where(_kept(query_words[:, None], key_words[None, :], THRESHOLD), p, 0.0)
            total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None], input_precision="ieee")
    _store(out + (sample * n + head) * D, total * (FACTOR / norm)[:, None], first, sq, samples * n * D, M, D, WIDTH)
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
    q_tile = _load(q + sample * q_token + head * D, first, sq, samples * q_token, M, D, WIDTH)
    out_tile = _load(out + sample * out_token + head * D, first, sq, samples * out_token, M, D, WIDTH)
    dout_tile = _load(dout + sample * dout_token + head * D, first, sq, samples * dout_token, M, D, WIDTH)
    place = (sample * n + head) * sq + queries
    log2_sum = tl.load(lse + place, queries < sq, other=float("inf")) * _LOG2E  # where there is no query, p is 0
    dot = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta + place, dot, queries < sq)
    if THRESHOLD >= 0:
        query_words = _token_words(query_counters, queries, sq, samples, sample, query_layer)
        query_words = _mix(query_words ^ _index_word(first_head + head))
    total, log2_scale = tl.zeros([M, WIDTH], tl.float32), scale * _LOG2E
    whole = first if CAUSAL else sk // N * N
    stop = tl.minimum(first + M, sk) if CAUSAL else sk
    for EDGE in tl.static_range(2):
        for at in range(whole if EDGE else 0, stop if EDGE else whole, N):
            keys = at + tl.arange(0, N)
            if THRESHOLD >= 0:
                key_words = _token_words(key_counters, keys, sk, samples, sample, key_layer)
            k_tile = _load(k, at, sk, samples * k_token, N, D, WIDTH)
            v_tile = _load(v, at, sk, samples * v_token, N, D, WIDTH)
            products = _products(q_tile, k_tile, queries, keys, sk, EDGE, CAUSAL)
            p = tl.exp2(products * log2_scale - log2_sum[:, None])
            dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
            if THRESHOLD >= 0:
                dp = tl.where(_kept(query_words[:, None], key_words[None, :], THRESHOLD), dp * FACTOR, 0.0)
            ds = p * (dp - dot[:, None])
            total = tl.dot(ds.to(k_tile.dtype), k_tile, total, input_precision="ieee")
    _store(dq + (sample * n + head) * D, total * scale, first, sq, samples * n * D, M, D, WIDTH)


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
    k_tile = _load(k + sample * k_token + key_head * D, first, sk, samples * k_token, N, D, WIDTH)
    v_tile = _load(v + sample * v_token + key_head * D, first, sk, samples * v_token, N, D, WIDTH)
    if THRESHOLD >= 0:
        key_words = _token_words(key_counters, keys, sk, samples, sample, key_layer)
    dk_total, dv_total = tl.zeros([N, WIDTH], tl.float32), tl.zeros([N, WIDTH], tl.float32)
    start, log2_scale = first if CAUSAL else 0, scale * _LOG2E
    below = tl.minimum(first + N, sq) if CAUSAL else 0  # from this query on all see all of these keys
    for member in range(GROUP):
        head = key_head * GROUP + member
        q_of_head, dout_of_head = q + sample * q_token + head * D, dout + sample * dout_token + head * D
        for EDGE in tl.static_range(2):
            for at in range(start if EDGE else below, below if EDGE else sq, M):
                queries = at + tl.arange(0, M)
                place = (sample * n + head) * sq + queries
                log2_sum = tl.load(lse + place, queries < sq, other=float("inf")) * _LOG2E
                dot = tl.load(delta + place, queries < sq, other=0.0)
                if THRESHOLD >= 0:
                    query_words = _token_words(query_counters, queries, sq, samples, sample, query_layer)
                    query_words = _mix(query_words ^ _index_word(first_head + head))
                q_tile = _load(q_of_head, at, sq, samples * q_token, M, D, WIDTH)
                dout_tile = _load(dout_of_head, at, sq, samples * dout_token, M, D, WIDTH)
                products = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
                if EDGE:
                    products = tl.where(keys[:, None] <= queries[None, :], products, float("-inf"))
                p = tl.exp2(products * log2_scale - log2_sum[None, :])
                dp, dropped = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee"), p
                if THRESHOLD >= 0:
                    kept = _kept(query_words[None, :], key_words[:, None], THRESHOLD)
                    dp, dropped = tl.where(kept, dp * FACTOR, 0.0), tl.where(kept, p, 0.0)
                dv_total = tl.dot(dropped.to(dout_tile.dtype), dout_tile, dv_total, input_precision="ieee")
                ds = p * (dp - dot[None, :])
                dk_total = tl.dot(ds.to(q_tile.dtype), q_tile, dk_total, input_precision="ieee")
    place = (sample * g + key_head) * D
    _store(dk + place, dk_total * scale, first, sk, samples * g * D, N, D, WIDTH)
    _store(dv + place, dv_total * FACTOR, first, sk, samples * g * D, N, D, WIDTH)


# ---- the backend -----------------------------------------------------------------------------------------------------

# M queries, N keys, warps and stages by the width of a head. What a program loops over divides what it has: so under a
# causal mask the blocks of both begin at the same places.
_BLOCKS = {
    _attention_forward: {64: (128, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 32, 8, 2)},
    _attention_backward_q: {64: (128, 64, 8, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)},
    _attention_backward_kv: {64: (64, 128, 8, 2), 128: (32, 128, 8, 3), 256: (32, 32, 4, 2)},
}
_IN_FLOAT32 = {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)}  # products outside of the tensor cores


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: AttentionDropout | None = None
) -> tuple[Tensor, Tensor, None]:
    """Compute out and lse: see kernels/attention.py. out is [s, b, n, d] in memory."""
    q, k, v = map(_evenly, (q, k, v))
    out, lse = _empty(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _launch(_attention_forward, (q, k, v, out, lse), (q, k, v), q, k, causal, scale, dropout)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk, dv from out and lse, maybe merged over many blocks of keys: see kernels/attention.py."""
    dout, q, k, v, out = map(_evenly, (dout, q, k, v, out))
    (dq, dk, dv), lse = map(_empty, (q, k, v)), lse.contiguous()
    delta = torch.empty_like(lse)
    options = (q, k, causal, scale, dropout)
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
) -> None:
    (b, n, sq, d), (g, sk) = q.shape, k.shape[1:3]
    width = max(16, triton.next_power_of_2(d))
    table = _IN_FLOAT32 if q.dtype == torch.float32 else _BLOCKS[kernel]
    m_rows, n_rows, warps, stages = table[max(64, width)]
    by_keys = kernel is _attention_backward_kv
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
        *(x.stride(2) // b for x in strided),
        b,
        n,
        sq,
        sk,
        scale,
        *names,
        CAUSAL=causal,
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
