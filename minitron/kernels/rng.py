"""Dropout from a counter: an element's fate depends on what the element is, not on who computes it, or when.

Problem: a random generator hands out numbers in the order of asking. Split a model over ranks, or recompute a layer
in the backward, and the order changes: other masks, another model, and no two layouts can be proven equal. The usual
remedy juggles generator states, region by region. The idea here: keep no state, hash a name. Every element of every
activation has a global name, and a good hash of the name is as random as dropout needs:

    key  [s, b]     = mix(hash(seed, step, sample) ^ hash(position))         once per microbatch
    word [s, b, h]  = mix(mix(key ^ hash(layer, site)) ^ hash(channel))      a uniform 32-bit integer
    keep [s, b, h]  = word >= the threshold that a fraction p of all words is below

A rank passes the samples and positions that it holds, and gets its slice of the one global mask: with sequence or
context parallelism some of the positions, with data parallelism some of the samples. Rank 1 of cp 2 with 8 tokens in
zigzag order holds positions 2 3 4 5, so it has rows 2 3 4 5 of the mask that one process has. The backward makes the
mask again from the keys: 8 bytes a token are kept, nothing an element.

Why a 32-bit word and two multiplications are enough: dropout needs fair coins that are uncorrelated between neighbours
in every coordinate, neither secrecy nor a long period. The mixer is a bijection in which each input bit flips each
output bit with a probability close to 1/2; tests/kernels/test_rng.py measures that and the correlations. Two tokens
have the same key with probability 2^-32 and then share their masks, which no gradient over millions of tokens notices.
Channels are hashed before they meet the key, or neighbouring keys would give shifted copies of one mask.

Words are int64 tensors with values below 2^32, and no product reaches 2^63. Wrapping int32 products would need half
the memory, but signed overflow is undefined in the C++ that torch.compile writes for CPUs, and there it did change the
masks. So eager and compiled, CPU and CUDA agree in every bit. There is no branch on data and no wait for the device;
compiled, all of this fuses into its neighbours. Left out: Philox, ten rounds an element where two do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF

# One arbitrary first word (digits of pi) per kind of name, so that position 3 and channel 3 have different hashes.
_SAMPLE, _POSITION, _PLACE = 0x243F6A88, 0x05A308D3, 0x13198A2E
_CHANNEL, _QUERY, _KEY = 0x03707344, 0x24093822, 0x299F31D0


def token_keys(seed: int, step: int | Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """The keys of a microbatch: samples [b] and positions [s], int64 and global -> [s, b] int64.

    step: a number or a 0-d int64 tensor, which a captured step reads anew each time.
    Positions count within the sample, across packed documents. A rank that holds a slice of the sequence passes its
    slice of the positions, or slices the keys.
    """
    sample_words = _hash(_SAMPLE, seed, step, samples, device=samples.device)
    position_words = _hash(_POSITION, positions, device=positions.device)
    return _mix(sample_words[None, :] ^ position_words[:, None])


def dropout(x: Tensor, p: float, keys: Tensor | None, layer: int, site: int, drop: Callable | None = None) -> Tensor:
    """x with each element zeroed with probability p and multiplied by 1/(1-p) otherwise. x: [s, b, h], keys: [s, b].

    `site` tells the uses within a layer apart. p = 0 or keys = None (evaluation) returns x itself. Dim 2 of x holds all
    channels: a slice of channels would get the mask of the first ones. drop: `drop_elements`, or a kernel that equals
    it. Raises ValueError unless 0 <= p < 1.
    """
    if p == 0 or keys is None:
        return x
    assert keys.shape == x.shape[:2], f"keys {tuple(keys.shape)} do not fit x {tuple(x.shape)}"
    return _Dropout.apply(x, p, keys, layer, site, drop or drop_elements)


def attention_mask(
    p: float,
    keys: Tensor,
    layer: int,
    first_head: int,
    num_heads: int,
    samples: slice = slice(None),
    queries: slice = slice(None),
    seen: slice = slice(None),
) -> Tensor:
    """Factors for attention probabilities, 0 or 1/(1-p): [b, num_heads, s (query), s (key)] float32. keys: [s, b].

    A tensor-parallel rank asks for its own heads; `first_head` is the global index of their first. samples, queries,
    seen: only of these samples, and of these positions' queries and keys. Raises ValueError unless 0 <= p < 1.
    """
    heads = _hash(_CHANNEL, torch.arange(first_head, first_head + num_heads, device=keys.device), device=keys.device)
    query_words = _mix(keys[queries, samples] ^ _hash(_QUERY, layer, device=keys.device)).T[:, None, :]  # [b, 1, s]
    query_words = _mix(query_words ^ heads[:, None])  # [b, num_heads, s]
    key_words = _mix(keys[seen, samples] ^ _hash(_KEY, layer, device=keys.device)).T  # [b, s]
    keep = _mix(query_words[:, :, :, None] ^ key_words[:, None, None, :]) >= _threshold(p)
    return keep.to(torch.float32) / (1 - p)


class _Dropout(torch.autograd.Function):
    """y = x * mask / (1 - p) is linear in x, so the backward is the forward applied to the gradient."""

    @staticmethod
    def forward(ctx, x, p, keys, layer, site, drop):
        ctx.save_for_backward(keys)
        ctx.name, ctx.drop = (layer, site), partial(drop_by_name, p=p, drop=drop)
        return ctx.drop(x, keys=keys, name=ctx.name)

    @staticmethod
    def backward(ctx, grad):
        return ctx.drop(grad, keys=ctx.saved_tensors[0], name=ctx.name), None, None, None, None, None


def drop_by_name(x: Tensor, p: float, keys: Tensor, name: tuple[int, int], drop: Callable, first: int = 0) -> Tensor:
    """`dropout` without autograd, of channels `first` and up. name: layer and site."""
    token_words = _mix(keys ^ _hash(_PLACE, *name, device=keys.device))
    channels = torch.arange(first, first + x.shape[2], device=keys.device)
    return drop(x, token_words, _hash(_CHANNEL, channels, device=keys.device), _threshold(p), 1 / (1 - p))


def drop_elements(x: Tensor, token_words: Tensor, channel_words: Tensor, threshold: int, factor: float) -> Tensor:
    """x [s, b, h] * factor where mix(token word [s, b] ^ channel word [h]) >= threshold, 0 elsewhere."""
    keep = _mix(token_words[:, :, None] ^ channel_words) >= threshold
    return (x * factor).masked_fill(~keep, 0.0)  # torch.where would copy its 0.0 to the device, and wait


def _threshold(p: float) -> int:
    """A uniform word is below this with probability p."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p} is not in [0, 1); use 0 for no dropout")
    return round(p * 2**32)


def _hash(first_word: int, *values: int | Tensor, device: torch.device) -> Tensor:
    """The word of a name of 64-bit integers. Tensors broadcast; integers alone give [1].

    Integers become tensors by a fill: no copy from the host to wait for, and torch.compile can keep a layer's number
    a variable instead of compiling once per layer.
    """
    word = torch.full((1,), first_word, dtype=torch.int64, device=device)
    for value in values:
        if not isinstance(value, Tensor):
            value = torch.full((1,), value, dtype=torch.int64, device=device)
        for half in (value & _WORD, value >> 32 & _WORD):
            word = _mix(word ^ half)
    return word


def _mix(x: Tensor) -> Tensor:
    """A bijection of words without visible structure: two rounds of xorshift and multiplication, and a last xorshift.

    The constants come from the search for the least avalanche bias at github.com/skeeto/hash-prospector. Both are
    below 2^31, so the products of words stay below 2^63.
    """
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _WORD
    x = (x ^ (x >> 15)) * 0x735A2D97 & _WORD
    return x ^ (x >> 15)
