"""Dropout from a counter: the mask is a hash of seed, step, sample, layer and position.

Problem: a random generator hands out numbers in the order of asking. Split a model over ranks, or recompute a layer
in the backward, and the order changes: other masks, another model, and no two layouts can be proven equal. The usual
remedy saves and restores generator states, region by region. The idea here: keep no state, hash a name. Every element
of every activation has a global name, and a good hash of the name is as random as dropout needs:

    key  [s, b]     = mix(hash(seed, step, sample) ^ hash(position))         once per microbatch
    word [s, b, h]  = mix(mix(key ^ hash(layer, site)) ^ hash(channel))      a uniform 32-bit integer
    keep [s, b, h]  = word >= the threshold that a fraction p of all words is below

A rank passes the samples and positions that it holds, and gets its slice of the one global mask: with sequence or
context parallelism some of the positions, with data parallelism some of the samples. Rank 1 of cp 2 with 8 tokens in
zigzag order holds positions 2 3 4 5, so it has rows 2 3 4 5 of the mask that one process has. The backward makes
the mask anew from the keys: 8 bytes are kept for a token, and nothing for an element.

Why a 32-bit word and two multiplications are enough: dropout needs bits that are uncorrelated between neighbours in
every coordinate, but neither secrecy nor a long period. The mixer is a bijection in which each input bit flips each
output bit with a probability close to 1/2; tests/kernels/test_rng.py measures that and the correlations. Two tokens
have the same key with probability 2^-32; such collisions are too rare to bias gradients.
Channels are hashed before they meet the key, or neighbouring keys would give shifted copies of one mask.

Words are int64 tensors with values below 2^32, and no product reaches 2^63. Wrapping int32 products would need half
the memory, but signed overflow is undefined in the C++ that torch.compile writes for CPUs, and there it did change the
masks. So eager and compiled, CPU and CUDA agree in every bit. There is no branch on data and no wait for the device;
compiled, all of this fuses into its neighbours. Left out: Philox, which takes ten rounds an element where two suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

Drop = Callable[[Tensor, Tensor, int, int, int, float], Tensor]  # `drop_elements`, or a kernel that equals it
_WORD = 0xFFFFFFFF

# One arbitrary first word (digits of pi) per kind of name, so that position 3 and channel 3 have different hashes.
_SAMPLE, _POSITION, _PLACE = 0x243F6A88, 0x05A308D3, 0x13198A2E
CHANNEL, _QUERY, _KEY = 0x03707344, 0x24093822, 0x299F31D0


def token_keys(seed: int, step: int | Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Make the keys of a microbatch: samples [b] and positions [s], int64 and global -> [s, b] int64.

    step: a number, or a 0-d int64 tensor, which a captured step reads anew each time. Positions count within the
    sample, across packed documents. A rank that holds a slice of the sequence passes its slice of the positions, or
    slices the keys.
    """
    sample_words = _hash(_SAMPLE, seed, step, samples)
    position_words = _hash(_POSITION, positions)
    return _mix(sample_words[None, :] ^ position_words[:, None])


def dropout(x: Tensor, p: float, keys: Tensor | None, layer: int, site: int, drop: Drop | None = None) -> Tensor:
    """Zero each element of x with probability p, multiply the others by 1/(1-p). x: [s, b, h], keys: [s, b].

    `site` tells the dropouts of a layer apart. p = 0 or keys = None (evaluation) returns x itself. Dim 2 of x must hold
    all channels: a slice of channels would get the mask of the first ones. Raises ValueError unless 0 <= p < 1.
    """
    if p == 0 or keys is None:
        return x
    assert keys.shape == x.shape[:2], f"keys {tuple(keys.shape)} do not fit x {tuple(x.shape)}"
    return _Dropout.apply(x, p, keys, layer, site, drop or drop_elements)


class AttentionDropout(NamedTuple):
    """Which attention probabilities are dropped, by the names of their queries and keys; p in [0, 1).

    query_counters [sq, b], key_counters [sk, b]: results of `token_keys`, of any positions. A tensor-parallel rank
    names its own heads, from the global index `first_head` on. A kernel makes its mask from this; `mask` is the twin.
    """

    p: float
    query_counters: Tensor
    key_counters: Tensor
    layer: int
    first_head: int

    def of(self, samples: slice, queries: slice, keys: slice) -> AttentionDropout:
        """Return the dropout of some samples, queries and keys."""
        return self._replace(
            query_counters=self.query_counters[queries, samples], key_counters=self.key_counters[keys, samples]
        )

    def mask(self, num_heads: int) -> Tensor:
        """Make factors for probabilities, 0 or 1 / (1 - p): [b, num_heads, sq, sk] float32.

        Raises ValueError unless 0 <= p < 1.
        """
        for_queries, for_keys = self.layer_words
        heads = torch.arange(self.first_head, self.first_head + num_heads, device=self.query_counters.device)
        query_words = _mix(self.query_counters ^ for_queries).T[:, None, :]  # [b, 1, sq]
        query_words = _mix(query_words ^ _hash(CHANNEL, heads)[:, None])  # [b, num_heads, sq]
        key_words = _mix(self.key_counters ^ for_keys).T  # [b, sk]
        keep = _mix(query_words[:, :, :, None] ^ key_words[:, None, None, :]) >= self.threshold
        return keep.to(torch.float32) / (1 - self.p)

    @property
    def layer_words(self) -> tuple[int, int]:
        """Return what the counters of queries and of keys are mixed with."""
        return _hash(_QUERY, self.layer), _hash(_KEY, self.layer)

    @property
    def threshold(self) -> int:
        return _threshold(self.p)


class _Dropout(torch.autograd.Function):
    """Dropout, y = x * mask / (1 - p), is linear in x, so the backward is the forward applied to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, keys: Tensor, layer: int, site: int, drop: Drop) -> Any:
        ctx.save_for_backward(keys)
        ctx.name, ctx.drop = (layer, site), partial(drop_by_name, p=p, drop=drop)
        return ctx.drop(x, keys=keys, name=ctx.name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return ctx.drop(grad, keys=ctx.saved_tensors[0], name=ctx.name), None, None, None, None, None


def drop_by_name(x: Tensor, p: float, keys: Tensor, name: tuple[int, int], drop: Drop, first: int = 0) -> Tensor:
    """Apply `dropout` without autograd; the first channel of x is channel `first`. name: layer and site."""
    return drop(x, keys, _hash(_PLACE, *name), first, _threshold(p), 1 / (1 - p))


def drop_elements(x: Tensor, keys: Tensor, place: int, first: int, threshold: int, factor: float) -> Tensor:
    """Return x [s, b, h] * factor where the random word is at least `threshold`, 0 elsewhere.

    keys [s, b]; place: the word of layer and site; first: the number of the first channel.
    """
    channels = torch.arange(first, first + x.shape[2], device=keys.device)
    keep = _mix(_mix(keys ^ place)[:, :, None] ^ _hash(CHANNEL, channels)) >= threshold
    return (x * factor).masked_fill(~keep, 0.0)  # torch.where would copy its 0.0 to the device, and wait


def _threshold(p: float) -> int:
    """Return the number that a uniform word is below with probability p."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p} is not in [0, 1); use 0 for no dropout")
    return round(p * 2**32)


def _hash(first_word: int, *values: int | Tensor) -> Any:
    """Hash a name of 64-bit integers to a word. Tensors broadcast; integers alone give an integer, at no kernel."""
    word = first_word
    for value in values:
        for half in (value & _WORD, value >> 32 & _WORD):
            word = _mix(word ^ half)
    return word


def _mix(x: Any) -> Any:
    """Map words to words, one to one and without visible structure: twice xorshift and multiply, then xorshift.

    x: a tensor or an integer. The constants come from the search for the least avalanche bias at
    github.com/skeeto/hash-prospector. Both are below 2^31, so the products of words stay below 2^63.
    """
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _WORD
    x = (x ^ (x >> 15)) * 0x735A2D97 & _WORD
    return x ^ (x >> 15)
