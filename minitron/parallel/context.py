"""Context parallelism: causal attention over a sequence that is split across the ranks of the cp axis.

Problem: everything in a transformer but attention treats positions one by one, so a long sequence can be split over
ranks, until query i needs the keys 0 ... i of other ranks. Three ways to get there:

    ring       keys and values travel around the ring of ranks while each rank attends to those at hand; their
               gradients travel along in the backward pass (Liu et al. 2023, Ring Attention)
    allgather  keys and values are gathered first, their gradients reduce-scattered (Llama 3, section 3.3.2)
    ulysses    an all-to-all turns a slice of the sequence with all heads into the whole sequence with a
               slice of the heads, and back (Jacobs et al. 2023, DeepSpeed Ulysses)

Split evenly, the first rank would have hardly any keys to attend to and the last one all. So for ring and allgather the
sequence is cut into 2 cp chunks and rank r holds chunks r and 2 cp - 1 - r: the zigzag, equal work for all.

    cp = 2: rank 0 holds the chunks 0 and 3, rank 1 holds 1 and 2.   % causal, # every pair, . none

                keys  0 1 2 3        step of the ring         rank 0                     rank 1
      rank 0  query 0 % . . .        0: the own keys          0 3 see 0 3, causally      1 2 see 1 2, causally
      rank 1  query 1 # % . .        1: of the rank before    3 sees 1 2                 1 2 see 0
      rank 1  query 2 # # % .
      rank 0  query 3 # # # %

Seen from a rank, its two chunks in a row are one run of queries or keys. With the own keys the causal rule of the
run is the rule of the sequence; of a lower rank's keys the first chunk is seen by all queries, the second by none;
a higher rank's keys are seen, all, by the second chunk of queries. So a step is one dense block, with half of all
pairs. With documents that may not attend to each other the same holds for each document's part of the run: one block
per document. Blocks are made on the host, from the boundaries, and a kernel sees no mask but the triangle.

Each step's out and lse are merged as `minitron.kernels.attention` explains, and gradients added, in float32. Left out:
overlapping the all-to-all with compute, and a ring step's documents in one call, as packed.py has it on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from minitron.comm.collectives import all_to_all, exchange, gather_start, reduce_scatter_start
from minitron.comm.mesh import Axis
from minitron.config.sizes import ROUNDED_ONCE
from minitron.kernels import plain
from minitron.kernels.attention import Backend
from minitron.parallel.packed import Documents, packed_attention


def local_positions(seq_len: int, size: int, rank: int, style: str) -> np.ndarray:
    """The global positions that `rank` of `size` holds, in local order: int64 [s/cp].

    Zigzag for ring and allgather, one contiguous slice for ulysses. Raises ValueError if the sequence does not divide.
    """
    parts = 2 * size if style != "ulysses" and size > 1 else size
    if seq_len % parts:
        raise ValueError(
            f"train.seq_len={seq_len} cannot be cut into {parts} equal chunks, which parallel.cp={size} "
            f"with parallel.cp_style={style} needs; use a multiple of {parts}"
        )
    chunks = np.arange(seq_len, dtype=np.int64).reshape(parts, -1)
    return chunks[rank] if parts == size else np.concatenate([chunks[rank], chunks[parts - 1 - rank]])


def as_documents(boundaries: Iterable[Iterable[int]]) -> Documents:
    """Boundaries in any sequences or arrays, as this file works with them."""
    return tuple(tuple(int(position) for position in sample) for sample in boundaries)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    axis: Axis,
    style: str,
    backend: Backend,
    documents: Documents | None = None,
    dropout_mask: Callable[..., Tensor] | None = None,
    ops: ModuleType = plain,
) -> Tensor:
    """Causal softmax(q k^T / sqrt(d)) v over the whole sequence: q [s/cp, b, n, d]; k, v [s/cp, b, g, d] -> like q.

    The rank holds the positions that `local_positions` says. `documents` (made by `as_documents`) are the boundaries of
    every sample over the whole sequence, the same on every rank: queries see keys of their own document only.
    dropout_mask(samples, queries, keys) makes the part [b, n, sq, sk] of what multiplies the probabilities (cp = 1 and
    the reference backend only); it is called in both passes, so that nothing of that size is kept. ops: the pointwise
    kernels. Communicates along `axis`, in the forward and in the backward pass.
    """
    _check(q, k, axis, style, documents, dropout_mask)
    kernel = _Kernel(backend, ops, dropout_mask)
    if axis.size == 1:
        return _on_one_rank(q, k, v, kernel, documents)
    if style != "ulysses":
        return (_Ring if style == "ring" else _AllGather).apply(q, k, v, axis, kernel, documents)
    q, k, v = (all_to_all(x, axis, 2, 0) for x in (q, k, v))  # [s/cp, b, n, d] -> [s, b, n/cp, d]
    return all_to_all(_on_one_rank(q, k, v, kernel, documents), axis, 0, 2)


def _on_one_rank(q: Tensor, k: Tensor, v: Tensor, kernel: _Kernel, documents: Documents | None) -> Tensor:
    if documents is not None and kernel.backend.packed is not None:
        return packed_attention(q, k, v, kernel.backend, documents)
    return _Ring.apply(q, k, v, Axis.single(), kernel, documents)


def _check(q, k, axis, style, documents, dropout_mask) -> None:
    """What config/rules.py and the loader have seen to."""
    (s, b, n, _), g, cp = q.shape, k.shape[2], axis.size
    assert style in ("ring", "allgather", "ulysses"), style
    assert n % g == 0, f"{g} key heads for {n} query heads"
    assert cp == 1 or dropout_mask is None, "attention dropout across ranks"
    divides = g % cp == 0 if style == "ulysses" else cp == 1 or s % 2 == 0
    assert divides, f"{style}: {s} positions, {g} key heads, {cp} ranks"
    assert documents is None or _covers(documents, b, s * cp), f"{documents} of {b} samples with {s * cp} positions"


@lru_cache(256)
def _covers(documents: Documents, num_samples: int, seq_len: int) -> bool:
    """Whether boundaries rise from 0 to the sequence length in every sample."""
    return len(documents) == num_samples and all(
        (sample[0], sample[-1]) == (0, seq_len) and all(a < b for a, b in pairwise(sample)) for sample in documents
    )


# ---- the work of a rank as dense blocks: host code ------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One call of a backend: these local queries of these samples against these of the keys at hand."""

    samples: slice
    queries: slice
    keys: slice
    causal: bool


@lru_cache(256)
def ring_blocks(seq_len: int, size: int, rank: int, source: int, documents: Documents | None) -> list[Block]:
    """The blocks of `rank`'s queries with the keys of rank `source`, both in their local order.

    With source == rank the blocks have every local query in exactly one of them, and every local key.
    """
    half = seq_len // size // 2
    blocks = []
    for samples, start, stop in _each_document(seq_len, documents):
        queries, keys = (_local_run(seq_len, size, r, start, stop) for r in (rank, source))
        if source < rank:
            keys = (keys[0], min(keys[1], half))
        elif source > rank:
            queries = (max(queries[0], half), queries[1])
        _append(blocks, samples, queries, keys, causal=source == rank)
    return blocks


@lru_cache(256)
def gathered_blocks(seq_len: int, size: int, rank: int, documents: Documents | None) -> list[Block]:
    """The blocks of `rank`'s queries with the keys of all other ranks, the keys in global order."""
    chunk = seq_len // size // 2
    blocks = []
    for samples, start, stop in _each_document(seq_len, documents):
        first, last = _local_run(seq_len, size, rank, start, stop)
        _append(blocks, samples, (first, last), (start, min(stop, rank * chunk)), causal=False)
        between = (max(start, (rank + 1) * chunk), min(stop, seq_len - (rank + 1) * chunk))
        _append(blocks, samples, (max(first, chunk), last), between, causal=False)
    return blocks


def _append(blocks: list[Block], samples: slice, queries: tuple[int, int], keys: tuple[int, int], causal: bool) -> None:
    if queries[0] < queries[1] and keys[0] < keys[1]:
        blocks.append(Block(samples, slice(*queries), slice(*keys), causal))


def _each_document(seq_len: int, documents: Documents | None):
    """(samples, first position, end): all samples at once where a sample is one document."""
    if documents is None:
        yield slice(None), 0, seq_len
        return
    for sample, boundaries in enumerate(documents):
        for start, stop in pairwise(boundaries):
            yield slice(sample, sample + 1), start, stop


def _local_run(seq_len: int, size: int, rank: int, start: int, stop: int) -> tuple[int, int]:
    """The part [start, stop) of the sequence in the rank's local order.

    It is one run even if it touches both chunks: then it covers all that lies between them.
    """
    if size == 1:
        return start, stop
    chunk = seq_len // size // 2

    def num_held_before(position: int) -> int:
        starts = (rank * chunk, seq_len - (rank + 1) * chunk)
        return sum(min(max(position - first, 0), chunk) for first in starts)

    return num_held_before(start), num_held_before(stop)


# ---- blocks: one call of the backend each, and sums over them -------------------------------------------------------


@dataclass(frozen=True)
class _Kernel:
    """The backend, applied to a block of q, dout, out [s/cp, b, n, d], lse [b, n, s/cp] and k, v [any, b, g, d]."""

    backend: Backend
    ops: ModuleType
    dropout_mask: Callable[..., Tensor] | None = None

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor):
        q, k, v = _run(q, block, block.queries), _run(k, block, block.keys), _run(v, block, block.keys)
        return self.backend.forward(q, k, v, **self._options(block, q))

    def backward(self, block: Block, dout, q, k, v, out, lse, saved):
        dout, q, out = (_run(x, block, block.queries) for x in (dout, q, out))
        k, v = (_run(x, block, block.keys) for x in (k, v))
        lse = lse[block.samples, :, block.queries]
        return self.backend.backward(dout, q, k, v, out, lse, saved, **self._options(block, q))

    def _options(self, block: Block, q: Tensor) -> dict:
        options = dict(causal=block.causal, scale=q.shape[-1] ** -0.5)
        if self.dropout_mask is not None:
            options["dropout_mask"] = self.dropout_mask(block.samples, block.queries, block.keys)
        return options


def _run(x: Tensor, block: Block, positions: slice) -> Tensor:
    """x [s, b, n, d] -> [b, n, s, d] of the block's samples and some positions; a view."""
    return x[positions, block.samples].permute(1, 2, 0, 3)


def _dtype_of_sum(like: Tensor, terms: int) -> torch.dtype:
    """Choose the dtype of a sum over key blocks: float32; like's own for up to two terms, rounded once either way."""
    return like.dtype if terms <= ROUNDED_ONCE else torch.promote_types(like.dtype, torch.float32)


def _sum_of(parts: list[Tensor], blocks: list[Block], of: str, like: Tensor, terms: int) -> Tensor:
    """The first term of a sum [s, b, n, d]: each block's part [b, n, s, d] at its `of`, "queries" or "keys"."""
    dtype = _dtype_of_sum(like, terms)
    if len(blocks) == 1 and parts[0].shape[2] == like.shape[0]:
        return parts[0].permute(2, 0, 1, 3).to(dtype)
    total = torch.empty(like.shape, dtype=dtype, device=like.device)
    for block, part in zip(blocks, parts):
        _run(total, block, getattr(block, of)).copy_(part)
    return total


def _attend_first(kernel: _Kernel, blocks: list[Block], q, k, v, terms: int) -> tuple[Tensor, Tensor, list]:
    """out [s, b, n, d] and lse [b, n, s] of blocks that cover all queries; and what kernels saved."""
    outs, lses, saved = zip(*(kernel.forward(block, q, k, v) for block in blocks))
    out = _sum_of(outs, blocks, "queries", q, terms)
    if len(blocks) == 1:
        return out, lses[0], list(saved)
    s, b, n, _ = q.shape
    lse = q.new_empty(b, n, s, dtype=lses[0].dtype)
    for block, part in zip(blocks, lses):
        lse[block.samples, :, block.queries].copy_(part)
    return out, lse, list(saved)


def _attend(kernel: _Kernel, blocks: list[Block], q, k, v, out, lse) -> list:
    """Merge the blocks into out [s, b, n, d] and lse [b, n, s]. Returns what kernels saved."""
    kernel_saved = []
    for block in blocks:
        block_out, block_lse, saved = kernel.forward(block, q, k, v)
        kernel.ops.merge_(_run(out, block, block.queries), lse[block.samples, :, block.queries], block_out, block_lse)
        kernel_saved.append(saved)
    return kernel_saved


def _add(blocks: list[Block], grads: Iterable, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add each block's three gradients [b, n, s, d] to its part of dq, dk, dv [s, b, n, d]."""
    for block, parts in zip(blocks, grads):
        for total, part, positions in zip((dq, dk, dv), parts, (block.queries, block.keys, block.keys)):
            _run(total, block, positions).add_(part)


# ---- ring -----------------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """At step t a rank has the keys of rank - t. They leave for the next rank before their use, to travel meanwhile.

    The blocks of step 0 cover every local query and key once, so they write what later steps add to.
    """

    @staticmethod
    def forward(ctx, q, k, v, axis, kernel, documents):
        keys_values, kernel_saved = [k, v], []
        steps = [
            ring_blocks(q.shape[0] * axis.size, axis.size, axis.rank, (axis.rank - step) % axis.size, documents)
            for step in range(axis.size)
        ]
        for step, blocks in enumerate(steps):
            if step + 1 < axis.size:
                arriving = _pass_on(keys_values, axis)
            if step == 0:
                out, lse, saved = _attend_first(kernel, blocks, q, k, v, axis.size)
            else:
                saved = _attend(kernel, blocks, q, *keys_values, out, lse)
            kernel_saved.append(saved)
            if step + 1 < axis.size:
                keys_values = arriving()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.kernel, ctx.steps, ctx.kernel_saved = axis, kernel, steps, kernel_saved
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        axis, dout = ctx.axis, dout.contiguous()
        keys_values = [k, v]
        arriving_sums: Callable[[], list[Tensor]] = list  # nothing before the first step
        for step, blocks in enumerate(ctx.steps):
            if step + 1 < axis.size:
                arriving = _pass_on(keys_values, axis)
            grads = [
                ctx.kernel.backward(block, dout, q, *keys_values, out, lse, saved)
                for block, saved in zip(blocks, ctx.kernel_saved[step])
            ]
            if step == 0:
                dq, *sums = (
                    _sum_of(parts, blocks, of, like, axis.size)
                    for parts, of, like in zip(zip(*grads), ("queries", "keys", "keys"), (q, k, v))
                )
            else:
                sums = arriving_sums()  # what earlier ranks added for these keys: it travelled during the kernels
                _add(blocks, grads, dq, *sums)
            if axis.size > 1:
                arriving_sums = _pass_on(sums, axis)
            if step + 1 < axis.size:
                keys_values = arriving()
        if axis.size > 1:
            sums = arriving_sums()  # the last hop brings them home
        dk, dv = sums
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _pass_on(tensors: list[Tensor], axis: Axis) -> Callable[[], list[Tensor]]:
    """Start sending to the next rank and receiving from the one before. Call the result to get what arrived."""
    before, after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    tensors = [x.contiguous() for x in tensors]
    arrivals = [torch.empty_like(x) for x in tensors]
    flight = exchange(axis, [(after, x) for x in tensors], [(before, x) for x in arrivals])

    def arrived() -> list[Tensor]:
        flight.wait()
        return arrivals

    return arrived


# ---- all-gather -----------------------------------------------------------------------------------------------------


_MANY = 3  # or more terms: own keys, those before, those between


class _AllGather(torch.autograd.Function):
    """The own keys' blocks run while others' keys arrive (forward) and while their gradients leave (backward)."""

    @staticmethod
    def forward(ctx, q, k, v, axis, kernel, documents):
        gathers, seq_len = [gather_start(x, axis) for x in (k, v)], q.shape[0] * axis.size
        own = ring_blocks(seq_len, axis.size, axis.rank, axis.rank, documents)
        others = gathered_blocks(seq_len, axis.size, axis.rank, documents)
        out, lse, saved_own = _attend_first(kernel, own, q, k, v, _MANY)
        keys, values = (_finish_gather(x, handle, axis) for x, handle in gathers)
        saved_others = _attend(kernel, others, q, keys, values, out, lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.kernel, ctx.blocks, ctx.kernel_saved = axis, kernel, (own, others), (saved_own, saved_others)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        axis, dout = ctx.axis, dout.contiguous()
        own, others = ctx.blocks
        saved_own, saved_others = ctx.kernel_saved
        gathers = [gather_start(x, axis) for x in (k, v)]
        keys, values = (_finish_gather(x, handle, axis) for x, handle in gathers)
        dq, *sums = (torch.zeros_like(x, dtype=_dtype_of_sum(x, _MANY)) for x in (q, keys, values))
        _add(
            others,
            (
                ctx.kernel.backward(block, dout, q, keys, values, out, lse, saved)
                for block, saved in zip(others, saved_others)
            ),
            dq,
            *sums,
        )
        scatters = [reduce_scatter_start(_to_rank_order(x, axis), axis) for x in sums]
        grads = [ctx.kernel.backward(block, dout, q, k, v, out, lse, saved) for block, saved in zip(own, saved_own)]
        for _, handle in scatters:
            handle.wait()
        dk, dv = (x for x, _ in scatters)
        _add(own, grads, dq, dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _finish_gather(gathered: Tensor, handle, axis: Axis) -> Tensor:
    """Chunks 0, 2 cp - 1, 1, 2 cp - 2, ... as the ranks hold them -> 0, 1, 2, ..."""
    handle.wait()
    chunks = gathered.chunk(2 * axis.size)
    return torch.cat(chunks[0::2] + chunks[::-2])


def _to_rank_order(x: Tensor, axis: Axis) -> Tensor:
    chunks = x.chunk(2 * axis.size)
    return torch.cat([chunk for pair in zip(chunks[: axis.size], reversed(chunks)) for chunk in pair])
