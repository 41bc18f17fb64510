"""Context parallelism: causal attention over a sequence that is split over the ranks of the cp axis.

Problem: a transformer processes positions independently, except in attention. So ranks can split a long sequence, but
query i needs the keys 0 ... i, and other ranks hold most of them. There are three ways to get them:

    ring       keys and values travel around the ring of ranks, while each rank attends to those that it holds. In the
               backward pass their gradients travel with them (Liu et al. 2023, Ring Attention).
    allgather  keys and values are gathered first, and their gradients reduce-scattered (Llama 3, section 3.3.2).
    ulysses    an all-to-all gives each rank the whole sequence of some heads: [s/cp, n] -> [s, n/cp]. Another one
               exchanges the result back (Jacobs et al. 2023, DeepSpeed Ulysses).

In ring and allgather a rank attends to the keys tile by tile (parallel/tiles.py). Each tile gives `out` and `lse`, the
logarithm of its sum of exponentials. They are merged as kernels/attention.py explains; gradients are added. Both are
in float32. Left out: overlapping the all-to-all with compute, and the documents of a ring step in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minitron.comm.collectives import all_to_all, exchange, gather_start, reduce_scatter_start
from minitron.comm.handle import Handle
from minitron.comm.mesh import Axis
from minitron.config.sizes import MAX_BF16_TERMS
from minitron.kernels import plain
from minitron.kernels.attention import Backend, ForwardResult, Grads, Options
from minitron.kernels.rng import AttentionDropout
from minitron.parallel.tiles import CuSeqlens, Documents, Tile, gathered_tiles, ring_tiles


@dataclass(frozen=True)
class ContextAttention:
    """Causal attention over a sequence that is split over `axis` in the order of `local_positions`.

    style: ring, allgather or ulysses. ops: the pointwise kernels.
    """

    axis: Axis
    style: str
    backend: Backend
    ops: ModuleType = plain

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, dropout: AttentionDropout | None = None
    ) -> Tensor:
        """Compute softmax(q k^T / sqrt(d)) v: q [s/cp, b, n, d]; k, v [s/cp, b, g, d] -> out, shaped like q.

        documents: those of all samples over the whole sequence, the same on every rank. Queries attend only to keys of
        their document. dropout: of the probabilities; cp must be 1. Communicates along `axis`, also in the backward.
        """
        (s, b, _, d), cp = q.shape, self.axis.size
        assert dropout is None or cp == 1 and self.backend.has_dropout, "attention dropout across ranks"
        assert documents is None or documents.spans.shape[1:] == (b, s * cp), f"documents of {documents.spans.shape}"
        options = Options(causal=True, scale=d**-0.5, dropout=dropout)
        if cp == 1:
            return self._whole_sequence(q, k, v, documents, options)
        if self.style == "ulysses":
            q, k, v = (all_to_all(x, self.axis, 2, 0) for x in (q, k, v))  # [s/cp, b, n, d] -> [s, b, n/cp, d]
            return all_to_all(self._whole_sequence(q, k, v, documents, options), self.axis, 0, 2)
        attention = TiledAttention if self.style == "ring" else GatheredAttention
        cu_seqlens = None if documents is None else documents.cu_seqlens
        return attention.apply(q, k, v, self.axis, TileAttention(self.backend, self.ops, options), cu_seqlens)

    def _whole_sequence(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, options: Options) -> Tensor:
        """Attend on a rank that has all positions: in one call, or in one per document if the backend needs that."""
        if documents is not None and not self.backend.masks_documents:
            attend = TileAttention(self.backend, self.ops, options)
            return TiledAttention.apply(q, k, v, Axis.single(), attend, documents.cu_seqlens)
        if documents is not None:
            options = options._replace(document_bounds=documents.spans)
        return WholeAttention.apply(q, k, v, self.backend, options)


class WholeAttention(torch.autograd.Function):
    """One call of a backend each way: q [s, b, n, d] and k, v [s, b, g, d] -> out [s, b, n, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, backend: Backend, options: Options) -> Tensor:
        out, lse, ctx.kernel_saved = backend.forward(_heads_first(q), _heads_first(k), _heads_first(v), options)
        out = out.permute(2, 0, 1, 3)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.backend, ctx.options = backend, options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout, q, k, v, out = map(_heads_first, (dout.contiguous(), q, k, v, out))
        grads = ctx.backend.backward(dout, q, k, v, out, lse, ctx.kernel_saved, ctx.options)
        return *(grad.permute(2, 0, 1, 3) for grad in grads), None, None


def _heads_first(x: Tensor) -> Tensor:
    """View x [s, b, n, d] as [b, n, s, d]."""
    return x.permute(1, 2, 0, 3)


# ---- tiles: one call of the backend each, and sums over them -------------------------------------------------------


@dataclass(frozen=True)
class TileAttention:
    """The backend, applied to tiles of q, dout, out [s/cp, b, n, d], lse [b, n, s/cp] and k, v [any, b, g, d]."""

    backend: Backend
    ops: ModuleType
    options: Options  # of a tile that has all tokens

    def first(self, tiles: list[Tile], q: Tensor, k: Tensor, v: Tensor, terms: int) -> tuple[Tensor, Tensor, list[Any]]:
        """Attend to the first tiles, which cover all queries. Return out, lse and what the kernels saved.

        terms: how many tiles a row of out is merged from, later ones included.
        """
        outs, lses, saved = zip(*(self._forward(tile, q, k, v) for tile in tiles))
        out = _first_term(outs, tiles, "queries", q, terms)
        if len(tiles) == 1:
            return out, lses[0], list(saved)
        s, b, n, _ = q.shape
        lse = q.new_empty(b, n, s, dtype=lses[0].dtype)
        for tile, part in zip(tiles, lses):
            _lse_view(lse, tile).copy_(part)
        return out, lse, list(saved)

    def merge(self, tiles: list[Tile], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Any]:
        """Merge the results of more tiles into out and lse. Return what the kernels saved."""
        kernel_saved = []
        for tile in tiles:
            tile_out, tile_lse, saved = self._forward(tile, q, k, v)
            self.ops.merge_(tile_view(out, tile, tile.queries), _lse_view(lse, tile), tile_out, tile_lse)
            kernel_saved.append(saved)
        return kernel_saved

    def backward(self, tiles: list[Tile], kernel_saved: list[Any], *tensors: Tensor) -> Iterator[Grads]:
        """Yield each tile's dq, dk, dv [b, n, s, d]. tensors: dout, q, k, v, out, lse."""
        dout, q, k, v, out, lse = tensors
        for tile, saved in zip(tiles, kernel_saved):
            sides = (tile.queries, tile.queries, tile.keys, tile.keys, tile.queries)
            views = [tile_view(x, tile, side) for x, side in zip((dout, q, k, v, out), sides)]
            yield self.backend.backward(*views, _lse_view(lse, tile), saved, self._options(tile))

    def _forward(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> ForwardResult:
        q, k, v = tile_view(q, tile, tile.queries), tile_view(k, tile, tile.keys), tile_view(v, tile, tile.keys)
        return self.backend.forward(q, k, v, self._options(tile))

    def _options(self, tile: Tile) -> Options:
        dropout = self.options.dropout
        if dropout is not None:
            dropout = dropout.select(tile.samples, tile.queries)
        return self.options._replace(causal=tile.causal, dropout=dropout)


def tile_view(x: Tensor, tile: Tile, positions: slice) -> Tensor:
    """View the tile's samples and some positions of x [s, b, n, d] as [b, n, s, d]."""
    return _heads_first(x[positions, tile.samples])


def _lse_view(lse: Tensor, tile: Tile) -> Tensor:
    return lse[tile.samples, :, tile.queries]


def _dtype_of_sum(like: Tensor, terms: int) -> torch.dtype:
    """Choose the dtype of a sum over tiles: float32, or like's own if the sum is rounded only once."""
    return like.dtype if terms <= MAX_BF16_TERMS else torch.promote_types(like.dtype, torch.float32)


def _first_term(parts: Sequence[Tensor], tiles: list[Tile], side: str, like: Tensor, terms: int) -> Tensor:
    """Begin a sum [s, b, n, d] of `terms` terms, shaped like `like`: return its first term.

    Each tile's part [b, n, s, d] is written to the positions of the tile's "queries" or "keys", as `side` names.
    """
    dtype = _dtype_of_sum(like, terms)
    if len(tiles) == 1 and parts[0].shape[2] == like.shape[0]:
        return parts[0].permute(2, 0, 1, 3).to(dtype)
    total = torch.empty(like.shape, dtype=dtype, device=like.device)
    for tile, part in zip(tiles, parts):
        tile_view(total, tile, getattr(tile, side)).copy_(part)
    return total


def _add(tiles: list[Tile], grads: Iterable[Grads], dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add each tile's three gradients [b, n, s, d] to its part of dq, dk, dv [s, b, n, d]."""
    for tile, parts in zip(tiles, grads):
        for total, part, positions in zip((dq, dk, dv), parts, (tile.queries, tile.keys, tile.keys)):
            tile_view(total, tile, positions).add_(part)


# ---- ring -----------------------------------------------------------------------------------------------------------


class TiledAttention(torch.autograd.Function):
    """Attention in as many steps as the ring has ranks. At step t a rank attends to the keys of rank - t, by tiles.

    A step first starts to send its keys on, so that they travel while the kernels run. The tiles of step 0 cover every
    local query and key once, so step 0 writes the sums to which later steps add. A ring of one rank has only step 0.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: TileAttention, cu_seqlens: CuSeqlens | None
    ) -> Tensor:
        keys, values, kernel_saved = k, v, []
        steps = [
            ring_tiles(q.shape[0] * axis.size, axis.size, axis.rank, (axis.rank - step) % axis.size, cu_seqlens)
            for step in range(axis.size)
        ]
        for step, tiles in enumerate(steps):
            if step + 1 < axis.size:
                arriving = _pass_on([keys, values], axis)
            if step == 0:
                out, lse, saved = attend.first(tiles, q, k, v, axis.size)
            else:
                saved = attend.merge(tiles, q, keys, values, out, lse)
            kernel_saved.append(saved)
            if step + 1 < axis.size:
                keys, values = arriving.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.attend, ctx.steps, ctx.kernel_saved = axis, attend, steps, kernel_saved
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        axis, dout = ctx.axis, dout.contiguous()
        keys, values = k, v
        arriving_sums: Handle[list[Tensor]] = Handle()  # nothing before the first step
        for step, (tiles, saved) in enumerate(zip(ctx.steps, ctx.kernel_saved)):
            if step + 1 < axis.size:
                arriving = _pass_on([keys, values], axis)
            grads = list(ctx.attend.backward(tiles, saved, dout, q, keys, values, out, lse))
            if step == 0:
                dq, *sums = (
                    _first_term(parts, tiles, side, like, axis.size)
                    for parts, side, like in zip(zip(*grads), ("queries", "keys", "keys"), (q, k, v))
                )
            else:
                sums = arriving_sums.wait()  # gradients of these keys from earlier ranks, sent while the kernels ran
                _add(tiles, grads, dq, *sums)
            if axis.size > 1:
                arriving_sums = _pass_on(sums, axis)
            if step + 1 < axis.size:
                keys, values = arriving.wait()
        if axis.size > 1:
            sums = arriving_sums.wait()  # after the last step they return to the rank of the keys
        dk, dv = sums
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _pass_on(tensors: list[Tensor], axis: Axis) -> Handle[list[Tensor]]:
    """Start to send to the next rank and to receive from the previous one."""
    before, after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    tensors = [x.contiguous() for x in tensors]
    return exchange(axis, [(after, x) for x in tensors], [(before, torch.empty_like(x)) for x in tensors])


# ---- all-gather -----------------------------------------------------------------------------------------------------


# A sum has at least three terms: a rank's own keys, those before its first piece, those between its two pieces.
_MANY = 3


class GatheredAttention(torch.autograd.Function):
    """Attention to own keys and to gathered keys. Work on own keys overlaps the all-gather and the reduce-scatter."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: TileAttention, cu_seqlens: CuSeqlens | None
    ) -> Tensor:
        gathers, seq_len = [_begin_gather(x, axis) for x in (k, v)], q.shape[0] * axis.size
        own = ring_tiles(seq_len, axis.size, axis.rank, axis.rank, cu_seqlens)
        others = gathered_tiles(seq_len, axis.size, axis.rank, cu_seqlens)
        out, lse, saved_own = attend.first(own, q, k, v, _MANY)
        keys, values = (gather.wait() for gather in gathers)
        saved_others = attend.merge(others, q, keys, values, out, lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.attend, ctx.tiles, ctx.kernel_saved = axis, attend, (own, others), (saved_own, saved_others)
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
        _add(others, ctx.attend.backward(others, saved_others, dout, q, keys, values, out, lse), dq, *sums)
        scatters = [reduce_scatter_start(_to_rank_order(x, axis), axis) for x in sums]
        grads = list(ctx.attend.backward(own, saved_own, dout, q, k, v, out, lse))
        dk, dv = (scatter.wait() for scatter in scatters)
        _add(own, grads, dq, dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _begin_gather(x: Tensor, axis: Axis) -> Handle[Tensor]:
    """Begin to gather zigzag pieces. The handle puts them in order: 0, 2 cp - 1, 1, 2 cp - 2, ... -> 0, 1, 2, ..."""

    def in_order(gathered: Tensor) -> Tensor:
        pieces = gathered.chunk(2 * axis.size)
        return torch.cat(pieces[0::2] + pieces[::-2])

    return gather_start(x, axis).then(in_order)


def _to_rank_order(x: Tensor, axis: Axis) -> Tensor:
    """Undo the order of `_begin_gather`."""
    pieces = x.chunk(2 * axis.size)
    return torch.cat([piece for pair in zip(pieces[: axis.size], reversed(pieces)) for piece in pair])
