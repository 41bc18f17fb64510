"""Context parallelism: causal attention over a sequence that is split across the ranks of the cp axis.

Problem: everything in a transformer but attention treats positions one by one, so a long sequence can be split over
ranks. In attention, however, query i needs the keys 0 ... i, most of which other ranks have. Three ways to get them:

    ring       keys and values travel around the ring of ranks while each rank attends to those at hand; their
               gradients travel along in the backward pass (Liu et al. 2023, Ring Attention)
    allgather  keys and values are gathered first, their gradients reduce-scattered (Llama 3, section 3.3.2)
    ulysses    an all-to-all turns a slice of the sequence with all heads into the whole sequence with a
               slice of the heads, and back (Jacobs et al. 2023, DeepSpeed Ulysses)

If each rank had one slice of the sequence, the first rank's queries would see few keys, and the last one's nearly all.
So for ring and allgather the sequence is cut into 2 cp chunks and rank r holds chunks r and 2 cp - 1 - r: the zigzag,
with equal work for all.

    cp = 2: rank 0 holds the chunks 0 and 3, rank 1 holds 1 and 2.   % causal, # every pair, . none

                keys  0 1 2 3        step of the ring         rank 0                     rank 1
      rank 0  query 0 % . . .        0: the own keys          0 3 see 0 3, causally      1 2 see 1 2, causally
      rank 1  query 1 # % . .        1: of the rank before    3 sees 1 2                 1 2 see 0
      rank 1  query 2 # # % .
      rank 0  query 3 # # # %

A rank lays its two chunks one after another: that is its local order. Between its own queries and keys the mask is
causal in local order too. All queries attend to the first chunk of a lower rank's keys only. Only the second
chunk of queries attends to a higher rank's keys. So each step is one dense tile, with
half of all pairs. Documents may not attend to each other: then there is one such tile for each document. Tiles are
made on the host, from the boundaries, and a kernel needs no mask but the causal one. Where a rank has the sequence
whole, a kernel that masks documents by itself gets them all in one tile (packed.py).

Each step's out and lse are merged as `minitron.kernels.attention` explains, and gradients are added, in float32. Left
out: overlapping the all-to-all with compute, and a ring step's documents in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitron.comm.collectives import all_to_all, exchange, gather_start, reduce_scatter_start
from minitron.comm.handle import Handle
from minitron.comm.mesh import Axis
from minitron.config.sizes import ROUNDED_ONCE
from minitron.kernels import plain
from minitron.kernels.attention import Backend, Forward, Grads, Options
from minitron.kernels.rng import AttentionDropout
from minitron.parallel.packed import Boundaries, Documents


def local_positions(seq_len: int, size: int, rank: int, style: str) -> np.ndarray:
    """List the global positions that `rank` of `size` holds, in local order: int64 [s/cp].

    Zigzag for ring and allgather, one contiguous slice for ulysses.
    """
    parts = 2 * size if style != "ulysses" and size > 1 else size
    assert seq_len % parts == 0, f"{seq_len} positions in {parts} equal chunks"
    chunks = np.arange(seq_len, dtype=np.int64).reshape(parts, -1)
    return chunks[rank] if parts == size else np.concatenate([chunks[rank], chunks[parts - 1 - rank]])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    axis: Axis,
    style: str,
    backend: Backend,
    documents: Documents | None = None,
    dropout: AttentionDropout | None = None,
    ops: ModuleType = plain,
) -> Tensor:
    """Attend causally over the whole sequence, softmax(q k^T / sqrt(d)) v: q [s/cp, b, n, d]; k, v [s/cp, b, g, d].

    Returns out, shaped like q. The rank holds the positions of `local_positions`. documents: of every sample over the
    whole sequence, the same on every rank; queries see keys of their own document only. dropout: of the probabilities
    (cp = 1 only, and a backend that has it). ops: the pointwise kernels.
    Communicates along `axis`, in the forward and in the backward pass.
    """
    _check(q, k, axis, style, documents, dropout)
    kernel = _Kernel(backend, ops, dropout)
    if axis.size == 1:
        return _on_one_rank(q, k, v, kernel, documents)
    if style != "ulysses":
        return (_Ring if style == "ring" else _AllGather).apply(q, k, v, axis, kernel, _boundaries(documents))
    q, k, v = (all_to_all(x, axis, 2, 0) for x in (q, k, v))  # [s/cp, b, n, d] -> [s, b, n/cp, d]
    return all_to_all(_on_one_rank(q, k, v, kernel, documents), axis, 0, 2)


def _on_one_rank(q: Tensor, k: Tensor, v: Tensor, kernel: _Kernel, documents: Documents | None) -> Tensor:
    if documents is not None and kernel.backend.packs:
        kernel, documents = replace(kernel, spans=documents.spans), None
    return _Ring.apply(q, k, v, Axis.single(), kernel, _boundaries(documents))


def _boundaries(documents: Documents | None) -> Boundaries | None:
    return None if documents is None else documents.boundaries


def _check(q: Tensor, k: Tensor, axis: Axis, style: str, documents: Documents | None, dropout: object | None) -> None:
    """Assert what config/rules.py and the loader have checked before."""
    (s, b, n, _), g, cp = q.shape, k.shape[2], axis.size
    assert style in ("ring", "allgather", "ulysses"), style
    assert n % g == 0, f"{g} key heads for {n} query heads"
    assert cp == 1 or dropout is None, "attention dropout across ranks"
    divides = g % cp == 0 if style == "ulysses" else cp == 1 or s % 2 == 0
    assert divides, f"{style}: {s} positions, {g} key heads, {cp} ranks"
    if documents is not None:
        assert documents.spans.shape[1:] == (b, s * cp), f"documents of {tuple(documents.spans.shape[1:])} tokens"


# ---- the work of a rank as dense tiles: host code ------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """One call of a backend: which samples, which local queries, and which of the keys that are at hand."""

    samples: slice
    queries: slice
    keys: slice
    causal: bool


@lru_cache(256)
def ring_tiles(seq_len: int, size: int, rank: int, source: int, documents: Boundaries | None) -> list[Tile]:
    """List the tiles of `rank`'s queries with the keys of rank `source`, both in their local order.

    With source == rank every local query is in exactly one tile, and so is every local key.
    """
    half = seq_len // size // 2
    tiles: list[Tile] = []
    for samples, start, stop in _each_document(seq_len, documents):
        queries, keys = (_local_run(seq_len, size, r, start, stop) for r in (rank, source))
        if source < rank:
            keys = (keys[0], min(keys[1], half))
        elif source > rank:
            queries = (max(queries[0], half), queries[1])
        _append(tiles, samples, queries, keys, causal=source == rank)
    return tiles


@lru_cache(256)
def gathered_tiles(seq_len: int, size: int, rank: int, documents: Boundaries | None) -> list[Tile]:
    """List the tiles of `rank`'s queries with the keys of all other ranks, the keys in global order."""
    chunk = seq_len // size // 2
    tiles: list[Tile] = []
    for samples, start, stop in _each_document(seq_len, documents):
        first, last = _local_run(seq_len, size, rank, start, stop)
        _append(tiles, samples, (first, last), (start, min(stop, rank * chunk)), causal=False)
        between = (max(start, (rank + 1) * chunk), min(stop, seq_len - (rank + 1) * chunk))
        _append(tiles, samples, (max(first, chunk), last), between, causal=False)
    return tiles


def _append(tiles: list[Tile], samples: slice, queries: tuple[int, int], keys: tuple[int, int], causal: bool) -> None:
    """Append a tile, unless it is empty."""
    if queries[0] < queries[1] and keys[0] < keys[1]:
        tiles.append(Tile(samples, slice(*queries), slice(*keys), causal))


def _each_document(seq_len: int, documents: Boundaries | None) -> Iterator[tuple[slice, int, int]]:
    """Yield (samples, first position, end) of each document; without documents all samples at once."""
    if documents is None:
        yield slice(None), 0, seq_len
        return
    for sample, boundaries in enumerate(documents):
        for start, stop in pairwise(boundaries):
            yield slice(sample, sample + 1), start, stop


def _local_run(seq_len: int, size: int, rank: int, start: int, stop: int) -> tuple[int, int]:
    """Return where the rank has positions start ... stop - 1, as (first, end) in its local order.

    That is one run of local positions even if it is in both chunks: then all that lies between them is in it.
    """
    if size == 1:
        return start, stop
    chunk = seq_len // size // 2

    def num_held_before(position: int) -> int:
        starts = (rank * chunk, seq_len - (rank + 1) * chunk)
        return sum(min(max(position - first, 0), chunk) for first in starts)

    return num_held_before(start), num_held_before(stop)


# ---- tiles: one call of the backend each, and sums over them -------------------------------------------------------


@dataclass(frozen=True)
class _Kernel:
    """The backend, applied to tiles of q, dout, out [s/cp, b, n, d], lse [b, n, s/cp] and k, v [any, b, g, d]."""

    backend: Backend
    ops: ModuleType
    dropout: AttentionDropout | None = None
    spans: Tensor | None = None  # of all tokens, for a tile that has all

    def forward(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> Forward:
        q, k, v = _run(q, tile, tile.queries), _run(k, tile, tile.keys), _run(v, tile, tile.keys)
        return self.backend.forward(q, k, v, **self._options(tile, q))

    def backward(
        self, tile: Tile, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any
    ) -> Grads:
        dout, q, out = (_run(x, tile, tile.queries) for x in (dout, q, out))
        k, v = (_run(x, tile, tile.keys) for x in (k, v))
        lse = lse[tile.samples, :, tile.queries]
        return self.backend.backward(dout, q, k, v, out, lse, saved, **self._options(tile, q))

    def _options(self, tile: Tile, q: Tensor) -> Options:
        options = Options(causal=tile.causal, scale=q.shape[-1] ** -0.5)
        if self.dropout is not None:
            options["dropout"] = self.dropout.of(tile.samples, tile.queries, tile.keys)
        if self.spans is not None:
            options["spans"] = self.spans
        return options


def _run(x: Tensor, tile: Tile, positions: slice) -> Tensor:
    """View the tile's samples and some positions of x [s, b, n, d] as [b, n, s, d]."""
    return x[positions, tile.samples].permute(1, 2, 0, 3)


def _dtype_of_sum(like: Tensor, terms: int) -> torch.dtype:
    """Choose the dtype of a sum over key blocks: float32; like's own for up to two terms, rounded once either way."""
    return like.dtype if terms <= ROUNDED_ONCE else torch.promote_types(like.dtype, torch.float32)


def _first_term(parts: Sequence[Tensor], tiles: list[Tile], place: str, like: Tensor, terms: int) -> Tensor:
    """Make the first of `terms` terms of a sum [s, b, n, d], shaped like `like`.

    Each tile's part [b, n, s, d] is put at the tile's `place`: "queries" or "keys".
    """
    dtype = _dtype_of_sum(like, terms)
    if len(tiles) == 1 and parts[0].shape[2] == like.shape[0]:
        return parts[0].permute(2, 0, 1, 3).to(dtype)
    total = torch.empty(like.shape, dtype=dtype, device=like.device)
    for tile, part in zip(tiles, parts):
        _run(total, tile, getattr(tile, place)).copy_(part)
    return total


def _attend_first(
    kernel: _Kernel, tiles: list[Tile], q: Tensor, k: Tensor, v: Tensor, terms: int
) -> tuple[Tensor, Tensor, list[Any]]:
    """Return out [s, b, n, d] and lse [b, n, s] of tiles that cover all queries; and what kernels saved.

    terms: how many tiles' results a row of out will be the sum of.
    """
    outs, lses, saved = zip(*(kernel.forward(tile, q, k, v) for tile in tiles))
    out = _first_term(outs, tiles, "queries", q, terms)
    if len(tiles) == 1:
        return out, lses[0], list(saved)
    s, b, n, _ = q.shape
    lse = q.new_empty(b, n, s, dtype=lses[0].dtype)
    for tile, part in zip(tiles, lses):
        lse[tile.samples, :, tile.queries].copy_(part)
    return out, lse, list(saved)


def _attend(kernel: _Kernel, tiles: list[Tile], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Any]:
    """Merge the tiles into out [s, b, n, d] and lse [b, n, s]. Returns what kernels saved."""
    kernel_saved = []
    for tile in tiles:
        tile_out, tile_lse, saved = kernel.forward(tile, q, k, v)
        kernel.ops.merge_(_run(out, tile, tile.queries), lse[tile.samples, :, tile.queries], tile_out, tile_lse)
        kernel_saved.append(saved)
    return kernel_saved


def _add(tiles: list[Tile], grads: Iterable[Grads], dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add each tile's three gradients [b, n, s, d] to its part of dq, dk, dv [s, b, n, d]."""
    for tile, parts in zip(tiles, grads):
        for total, part, positions in zip((dq, dk, dv), parts, (tile.queries, tile.keys, tile.keys)):
            _run(total, tile, positions).add_(part)


# ---- ring -----------------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """At step t a rank has the keys of rank - t. It sends them on before it uses them, so that they travel meanwhile.

    The tiles of step 0 cover every local query and key once, so step 0 writes what later steps add to.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, kernel: _Kernel, documents: Boundaries | None
    ) -> Tensor:
        keys, values, kernel_saved = k, v, []
        steps = [
            ring_tiles(q.shape[0] * axis.size, axis.size, axis.rank, (axis.rank - step) % axis.size, documents)
            for step in range(axis.size)
        ]
        for step, tiles in enumerate(steps):
            if step + 1 < axis.size:
                arriving = _pass_on([keys, values], axis)
            if step == 0:
                out, lse, saved = _attend_first(kernel, tiles, q, k, v, axis.size)
            else:
                saved = _attend(kernel, tiles, q, keys, values, out, lse)
            kernel_saved.append(saved)
            if step + 1 < axis.size:
                keys, values = arriving.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.kernel, ctx.steps, ctx.kernel_saved = axis, kernel, steps, kernel_saved
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        axis, dout = ctx.axis, dout.contiguous()
        keys, values = k, v
        arriving_sums: Handle[list[Tensor]] = Handle()  # nothing before the first step
        for step, tiles in enumerate(ctx.steps):
            if step + 1 < axis.size:
                arriving = _pass_on([keys, values], axis)
            grads = [
                ctx.kernel.backward(tile, dout, q, keys, values, out, lse, saved)
                for tile, saved in zip(tiles, ctx.kernel_saved[step])
            ]
            if step == 0:
                dq, *sums = (
                    _first_term(parts, tiles, place, like, axis.size)
                    for parts, place, like in zip(zip(*grads), ("queries", "keys", "keys"), (q, k, v))
                )
            else:
                sums = arriving_sums.wait()  # what earlier ranks added for these keys: it travelled during the kernels
                _add(tiles, grads, dq, *sums)
            if axis.size > 1:
                arriving_sums = _pass_on(sums, axis)
            if step + 1 < axis.size:
                keys, values = arriving.wait()
        if axis.size > 1:
            sums = arriving_sums.wait()  # after the last step they are back where the keys are
        dk, dv = sums
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _pass_on(tensors: list[Tensor], axis: Axis) -> Handle[list[Tensor]]:
    """Begin to send to the next rank and to receive from the one before."""
    before, after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    tensors = [x.contiguous() for x in tensors]
    return exchange(axis, [(after, x) for x in tensors], [(before, torch.empty_like(x)) for x in tensors])


# ---- all-gather -----------------------------------------------------------------------------------------------------


_MANY = 3  # terms, or more: own keys, those before them, those between them


class _AllGather(torch.autograd.Function):
    """The rank attends to its own keys while others' keys arrive (forward) or their gradients leave (backward)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, kernel: _Kernel, documents: Boundaries | None
    ) -> Tensor:
        gathers, seq_len = [_begin_gather(x, axis) for x in (k, v)], q.shape[0] * axis.size
        own = ring_tiles(seq_len, axis.size, axis.rank, axis.rank, documents)
        others = gathered_tiles(seq_len, axis.size, axis.rank, documents)
        out, lse, saved_own = _attend_first(kernel, own, q, k, v, _MANY)
        keys, values = (gather.wait() for gather in gathers)
        saved_others = _attend(kernel, others, q, keys, values, out, lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.kernel, ctx.tiles, ctx.kernel_saved = axis, kernel, (own, others), (saved_own, saved_others)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        axis, dout = ctx.axis, dout.contiguous()
        own, others = ctx.tiles
        saved_own, saved_others = ctx.kernel_saved
        gathers = [_begin_gather(x, axis) for x in (k, v)]
        keys, values = (gather.wait() for gather in gathers)
        dq, *sums = (torch.zeros_like(x, dtype=_dtype_of_sum(x, _MANY)) for x in (q, keys, values))
        _add(
            others,
            (
                ctx.kernel.backward(tile, dout, q, keys, values, out, lse, saved)
                for tile, saved in zip(others, saved_others)
            ),
            dq,
            *sums,
        )
        scatters = [reduce_scatter_start(_to_rank_order(x, axis), axis) for x in sums]
        grads = [ctx.kernel.backward(tile, dout, q, k, v, out, lse, saved) for tile, saved in zip(own, saved_own)]
        dk, dv = (scatter.wait() for scatter in scatters)
        _add(own, grads, dq, dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _begin_gather(x: Tensor, axis: Axis) -> Handle[Tensor]:
    """Begin to gather chunks and to put them in order: 0, 2 cp - 1, 1, 2 cp - 2, ... on the ranks -> 0, 1, 2, ..."""

    def in_order(gathered: Tensor) -> Tensor:
        chunks = gathered.chunk(2 * axis.size)
        return torch.cat(chunks[0::2] + chunks[::-2])

    return gather_start(x, axis).then(in_order)


def _to_rank_order(x: Tensor, axis: Axis) -> Tensor:
    """Undo the order of `_begin_gather`."""
    chunks = x.chunk(2 * axis.size)
    return torch.cat([chunk for pair in zip(chunks[: axis.size], reversed(chunks)) for chunk in pair])
