"""Positions, documents and attention tiles of a context-parallel rank: host code without kernels.

Problem: if each rank held one slice of the sequence, the first rank's queries would attend to few keys and the last
rank's to nearly all. The idea: cut the sequence into 2 cp pieces. Rank r holds pieces r and 2 cp - 1 - r, one after
another (its local order), so all ranks have equal work. This is the zigzag order of the styles ring and allgather.

    cp = 2: rank 0 holds pieces 0 and 3, rank 1 holds 1 and 2.    % causal, # every pair, . none

                keys  0 1 2 3        step of the ring         rank 0                     rank 1
      rank 0  query 0 % . . .        0: own keys              0 3 x 0 3, causal          1 2 x 1 2, causal
      rank 1  query 1 # % . .        1: the rank before       3 x 1 2                    1 2 x 0
      rank 1  query 2 # # % .
      rank 0  query 3 # # # %

So each step is one dense tile, and the only mask that a kernel needs is the causal one. Packed documents must not
attend to each other: then each step has one tile per document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def local_positions(seq_len: int, size: int, rank: int, style: str) -> np.ndarray:
    """List the global positions that `rank` of `size` holds, in local order: int64 [s/cp].

    Zigzag for ring and allgather, one contiguous slice for ulysses.
    """
    parts = 2 * size if style != "ulysses" and size > 1 else size
    assert seq_len % parts == 0, f"{seq_len} positions in {parts} equal pieces"
    pieces = np.arange(seq_len, dtype=np.int64).reshape(parts, -1)
    return pieces[rank] if parts == size else np.concatenate([pieces[rank], pieces[parts - 1 - rank]])


# ---- documents ------------------------------------------------------------------------------------------------------

# The boundaries 0 = b_0 < b_1 < ... < b_m = s of each sample's documents. They are tuples, because caches use them as
# keys: all layers of a step use the tiles that were made for the first layer.
CuSeqlens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Documents:
    """Where the documents of a microbatch begin and end in the whole sequence. cu_seqlens: for host code.

    spans: int32 [2, b, s] for kernels, the begin and the end of each token's document. A kernel that masks by spans
    takes all documents in one call. The call has the same shapes for any batch, so a CUDA graph can record it. A
    recorded step keeps the cu_seqlens of the batch with which it was recorded.

        cu_seqlens 0 3 8      begins 0 0 0 3 3 3 3 3      ends 3 3 3 8 8 8 8 8
    """

    cu_seqlens: CuSeqlens
    spans: Tensor


def as_documents(cu_seqlens: Iterable[Iterable[int]]) -> Documents:
    """Make documents of the boundaries of each sample, which may be sequences or arrays; spans on the host."""
    samples = tuple(tuple(int(position) for position in sample) for sample in cu_seqlens)
    for sample in samples:
        assert (sample[0], sample[-1]) == (0, samples[0][-1]) and min(np.diff(sample)) > 0, f"boundaries {sample}"
    spans = [
        [np.repeat(sample[side : len(sample) - 1 + side], np.diff(sample)) for sample in samples] for side in (0, 1)
    ]
    return Documents(samples, torch.from_numpy(np.array(spans, np.int32)))


# ---- tiles ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """One call of an attention backend: which samples, which local queries, and which of the keys at hand."""

    samples: slice
    queries: slice
    keys: slice
    causal: bool


@lru_cache(256)
def ring_tiles(seq_len: int, size: int, rank: int, source: int, cu_seqlens: CuSeqlens | None) -> list[Tile]:
    """List the tiles of `rank`'s queries with the keys of rank `source`, both in their local order.

    If source == rank, every local query and every local key is in exactly one tile.
    """
    half = seq_len // size // 2
    tiles: list[Tile] = []
    for samples, start, stop in _each_document(seq_len, cu_seqlens):
        queries, keys = (_local_run(seq_len, size, r, start, stop) for r in (rank, source))
        if source < rank:
            keys = (keys[0], min(keys[1], half))
        elif source > rank:
            queries = (max(queries[0], half), queries[1])
        _append(tiles, samples, queries, keys, causal=source == rank)
    return tiles


@lru_cache(256)
def gathered_tiles(seq_len: int, size: int, rank: int, cu_seqlens: CuSeqlens | None) -> list[Tile]:
    """List the tiles of `rank`'s queries with the keys of all other ranks, the keys in global order."""
    piece = seq_len // size // 2
    tiles: list[Tile] = []
    for samples, start, stop in _each_document(seq_len, cu_seqlens):
        first, last = _local_run(seq_len, size, rank, start, stop)
        _append(tiles, samples, (first, last), (start, min(stop, rank * piece)), causal=False)
        between = (max(start, (rank + 1) * piece), min(stop, seq_len - (rank + 1) * piece))
        _append(tiles, samples, (max(first, piece), last), between, causal=False)
    return tiles


def _append(tiles: list[Tile], samples: slice, queries: tuple[int, int], keys: tuple[int, int], causal: bool) -> None:
    """Append a tile, unless it is empty."""
    if queries[0] < queries[1] and keys[0] < keys[1]:
        tiles.append(Tile(samples, slice(*queries), slice(*keys), causal))


def _each_document(seq_len: int, cu_seqlens: CuSeqlens | None) -> Iterator[tuple[slice, int, int]]:
    """Yield (samples, first position, end) of each document; without documents all samples at once."""
    if cu_seqlens is None:
        yield slice(None), 0, seq_len
        return
    for sample, boundaries in enumerate(cu_seqlens):
        for start, stop in pairwise(boundaries):
            yield slice(sample, sample + 1), start, stop


def _local_run(seq_len: int, size: int, rank: int, start: int, stop: int) -> tuple[int, int]:
    """Return the rank's part of positions start ... stop - 1, as (first, end) in its local order.

    If they reach into both of the rank's pieces, the part is still one run, because the pieces are neighbours locally.
    """
    if size == 1:
        return start, stop
    piece = seq_len // size // 2

    def num_held_before(position: int) -> int:
        starts = (rank * piece, seq_len - (rank + 1) * piece)
        return sum(min(max(position - first, 0), piece) for first in starts)

    return num_held_before(start), num_held_before(stop)
