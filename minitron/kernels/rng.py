"""Dropout from a counter: the mask is a hash of seed, step, sample, layer and position.

Problem: a random generator returns numbers in the order of the calls. If a model is split over ranks, or a layer is
recomputed in the backward, the order changes and so do the masks. Then no two layouts train the same model. The usual
remedy saves and restores generator states. The idea here: keep no state, and hash a name. Every element of every
activation has a global name, and a good hash of the name is as random as dropout needs:

    counter [s, b]  = mix(hash(seed, step, sample) ^ hash(position))         once per microbatch
    word [s, b, h]  = mix(mix(counter ^ hash(layer, site)) ^ hash(channel))      a uniform 32-bit integer
    keep [s, b, h]  = word >= threshold                                      a fraction p of all words is below it

A rank passes the samples and positions that it holds, and gets its slice of the one global mask. The backward computes
the mask again from the counters, so dropout keeps 8 bytes per token and none per element.

Dropout needs bits that are uncorrelated between neighbours in every coordinate, but neither secrecy nor a long period.
So a 32-bit word and two multiplications suffice, and Philox with its ten rounds is left out. The mixer is a bijection;
tests/kernels/test_rng.py measures how often an input bit flips an output bit, and the correlations. Two tokens get the
same counter with probability 2^-32, too rarely to bias gradients. Channels are hashed first; otherwise
neighbouring counters would give shifted copies of one mask.

Words are int64 tensors with values below 2^32, and no product reaches 2^63. int32 products would need half the memory,
but their overflow is undefined in the C++ that torch.compile writes for CPUs. So eager and compiled code, on CPU and
CUDA, agree in every bit. No operation branches on data or waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

Drop = Callable[[Tensor, Tensor, int, int, int, float], Tensor]  # `drop_elements`, or a kernel that equals it
_WORD = 0xFFFFFFFF

# An arbitrary first word (digits of pi) per kind of name, so that position 3 and channel 3 have different hashes.
_SAMPLE, _POSITION, _PLACE = 0x243F6A88, 0x05A308D3, 0x13198A2E
CHANNEL, _QUERY, _KEY = 0x03707344, 0x24093822, 0x299F31D0


def token_counters(seed: int, step: int | Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Make the counters of a microbatch's tokens: samples [b] and positions [s], int64 and global -> [s, b] int64.

    step: a number, or a 0-d int64 tensor, which a CUDA graph reads at each replay. Positions count within the sample,
    across packed documents. A rank with a slice of the sequence passes its slice of the positions, or slices the
    counters.
    """
    sample_words = _hash(_SAMPLE, seed, step, samples)
    position_words = _hash(_POSITION, positions)
    return _mix(sample_words[None, :] ^ position_words[:, None])


def dropout(x: Tensor, p: float, counters: Tensor | None, layer: int, site: int, drop: Drop | None = None) -> Tensor:
    """Zero each element of x with probability p, multiply the others by 1/(1-p). x: [s, b, h], counters: [s, b].

    site: the number of this dropout in its layer. Returns x itself if p = 0 or counters = None (evaluation). Dim 2 of x
    must hold all channels: a slice would get the mask of the first channels.
    """
    if p == 0 or counters is None:
        return x
    assert counters.shape == x.shape[:2], f"counters {tuple(counters.shape)} do not fit x {tuple(x.shape)}"
    return _Dropout.apply(x, p, counters, layer, site, drop or drop_elements)


class AttentionDropout(NamedTuple):
    """Which probabilities of self-attention are dropped, by the names of their queries and keys; p in [0, 1).

    counters [s, b]: results of `token_counters`, of any positions. first_head: the global index of this rank's first
    head. A kernel computes its mask from these values; `mask` is its plain twin.
    """

    p: float
    counters: Tensor
    layer: int
    first_head: int

    def select(self, samples: slice, positions: slice) -> AttentionDropout:
        """Return the dropout of some samples and positions."""
        return self._replace(counters=self.counters[positions, samples])

    def mask(self, num_heads: int) -> Tensor:
        """Make factors for probabilities, 0 or 1 / (1 - p): [b, num_heads, s, s] float32."""
        for_queries, for_keys = self.layer_words
        heads = torch.arange(self.first_head, self.first_head + num_heads, device=self.counters.device)
        query_words = _mix(self.counters ^ for_queries).T[:, None, :]  # [b, 1, s]
        query_words = _mix(query_words ^ _hash(CHANNEL, heads)[:, None])  # [b, num_heads, s]
        key_words = _mix(self.counters ^ for_keys).T  # [b, s]
        keep = _mix(query_words[:, :, :, None] ^ key_words[:, None, None, :]) >= self.threshold
        return keep.to(torch.float32) / (1 - self.p)

    @property
    def layer_words(self) -> tuple[int, int]:
        """Return the words that are mixed into the counters of queries and of keys."""
        return _hash(_QUERY, self.layer), _hash(_KEY, self.layer)

    @property
    def threshold(self) -> int:
        """Return the lowest word that is kept."""
        return _threshold(self.p)


class _Dropout(torch.autograd.Function):
    """Dropout, y = x * mask / (1 - p), is linear in x, so the backward is the forward applied to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, counters: Tensor, layer: int, site: int, drop: Drop) -> Any:
        ctx.save_for_backward(counters)
        ctx.name, ctx.drop = (layer, site), partial(drop_by_name, p=p, drop=drop)
        return ctx.drop(x, counters=counters, name=ctx.name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return ctx.drop(grad, counters=ctx.saved_tensors[0], name=ctx.name), None, None, None, None, None


def drop_by_name(x: Tensor, p: float, counters: Tensor, name: tuple[int, int], drop: Drop, first: int = 0) -> Tensor:
    """Apply `dropout` without autograd; the first channel of x is channel `first`. name: layer and site."""
    return drop(x, counters, _hash(_PLACE, *name), first, _threshold(p), 1 / (1 - p))


def drop_elements(x: Tensor, counters: Tensor, place: int, first: int, threshold: int, factor: float) -> Tensor:
    """Return x [s, b, h] * factor where the random word is at least `threshold`, 0 elsewhere.

    counters [s, b]; place: the word of layer and site; first: the number of the first channel.
    """
    channels = torch.arange(first, first + x.shape[2], device=counters.device)
    keep = _mix(_mix(counters ^ place)[:, :, None] ^ _hash(CHANNEL, channels)) >= threshold
    return (x * factor).masked_fill(~keep, 0.0)  # torch.where would copy its 0.0 to the device, and wait


def _threshold(p: float) -> int:
    """Return the threshold: a uniform word is below it with probability p."""
    assert 0 <= p < 1, f"a dropout probability of {p}"
    return round(p * 2**32)


def _hash(first_word: int, *values: int | Tensor) -> Any:
    """Hash a name of 64-bit integers to a word. Tensors broadcast. Integers alone give an integer without a kernel."""
    word = first_word
    for value in values:
        for half in (value & _WORD, value >> 32 & _WORD):
            word = _mix(word ^ half)
    return word


def _mix(x: Any) -> Any:
    """Map words to words, one to one and without visible structure: twice xorshift and multiply, then xorshift.

    x: a tensor or an integer. Both constants are below 2^31, so the products of words stay below 2^63.
    Source: the search for the least avalanche bias at github.com/skeeto/hash-prospector.
    """
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _WORD
    x = (x ^ (x >> 15)) * 0x735A2D97 & _WORD
    return x ^ (x >> 15)
