"""Blocks of attention's operands in Triton: how they are loaded, and which of them see each other.

The parts that the kernels of fused_attention.py share. Tensors are [s, b, n, d] in memory, tokens evenly apart:
x_token elements from one token to the next. A program with some queries walks over blocks of keys:

        start      below            above      stop
          |  edge    |    whole       |  edge    |        edge: some see each other, a mask says which

The upper edge is the causal mask's; the lower one is where documents end, and there is none without them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minitron.kernels.fused_activations import _mix


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
