"""Every collective that autograd sees, beside its adjoint.

A linear map's backward pass is its transpose. For collectives along an axis of P ranks the pairs are

    forward                                       backward
    copy            x on every rank               all-reduce       f of Megatron-LM (Shoeybi et al. 2019)
    all_reduce      sum of x over the ranks       copy             g
    all_gather      concatenate along a dim       reduce-scatter   g of Korthikanti et al. 2022
    reduce_scatter  sum, keep this rank's slice   all-gather       g-bar
    split           keep this rank's slice        all-gather
    all_to_all      trade slices                  trade them back

so each autograd function below is one line. Along an axis of size 1 each of them is the identity and launches nothing,
so layers need not ask how large an axis is. The functions that end in `_` or `_into` are the plain operations
underneath: layers with a hand-written backward, the pipeline and the optimizer call those; with `wait=False` they
return a handle, so that a GEMM can run while data travel. The host waits for other ranks in `_start` and `Pending.wait`
alone. Both note it in the rank's `Activity`, so that `minitron.runtime.watch` can tell who waits for whom.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.mesh import Axis

# torch 2.13 renamed both and warns about the names that 2.11 has.
_gather_op = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_op = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle(Protocol):
    """Something under way."""

    def wait(self) -> None:
        """Wait until it is done: the host, or on a GPU the current stream."""


class Done:
    """The handle of a collective that had nothing to do."""

    def wait(self) -> None:
        """Return at once."""


class Pending:
    """The handle of operations under way. It keeps their tensors alive until wait() has returned."""

    __slots__ = ("kind", "axis", "num_bytes", "works", "tensors")

    def __init__(self, kind: str, axis: Axis, num_bytes: int, works: Sequence[dist.Work], tensors: Sequence[Tensor]):
        self.kind, self.axis, self.num_bytes = kind, axis, num_bytes
        self.works, self.tensors = works, tensors

    def wait(self) -> None:
        """Wait for all of them, once: a second wait for a gloo work would take the next message for its own."""
        self.axis.activity.enter(self.kind, self.axis, self.num_bytes)
        for work in self.works:
            work.wait()
        self.axis.activity.leave()
        self.works, self.tensors = (), ()


def _start(
    kind: str, call: Callable[..., dist.Work], axis: Axis, *tensors: Tensor, wait: bool = True, **options: Any
) -> Handle:
    """Call `call(*tensors)` over `axis`, and wait for it or not. The last tensor is this rank's input."""
    num_bytes = tensors[-1].nbytes
    axis.activity.record(kind, axis, tensors[-1], axis.ranks)
    axis.activity.enter(kind, axis, num_bytes, wait)
    work = call(*tensors, group=axis.group, async_op=not wait, **options)
    axis.activity.leave()
    return Done() if wait else Pending(kind, axis, num_bytes, [work], tensors)


# ---- plain operations: no autograd, in place or into a given tensor -------------------------------------------------


def all_reduce_(x: Tensor, axis: Axis, *, wait: bool = True, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Handle:
    """Replace x by its sum (or `op`) over `axis`. Returns a handle, which wait=True has waited for."""
    if axis.size == 1:
        return Done()
    return _start("all-reduce", dist.all_reduce, axis, x, wait=wait, op=op)


def all_gather_into(out: Tensor, x: Tensor, axis: Axis, *, wait: bool = True) -> Handle:
    """Gather the ranks' x [m, ...] into out [P m, ...], in axis order. Contiguous; x may be out's own slice."""
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Done()
    return _start("all-gather", _gather_op, axis, out, x, wait=wait)


def reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis, *, wait: bool = True) -> Handle:
    """Write this rank's slice (dim 0) of the sum of x over `axis` to out. Contiguous; out may be x's own slice."""
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Done()
    return _start("reduce-scatter", _reduce_scatter_op, axis, out, x, wait=wait)


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Return the values of all ranks of an axis, in order. They travel as JSON: no rank runs what it receives."""
    data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    sizes = torch.empty(axis.size, dtype=torch.int64, device=device)
    all_gather_into(sizes, torch.tensor([len(data)], device=device), axis)
    padded = data.new_zeros(int(sizes.max()))
    padded[: len(data)] = data
    rows = padded.new_empty(axis.size * len(padded))
    all_gather_into(rows, padded, axis)
    texts = rows.view(axis.size, -1).tolist()
    return [json.loads(bytes(text[:size])) for text, size in zip(texts, sizes.tolist())]


def exchange(axis: Axis, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]) -> Pending:
    """Post messages together without waiting; each is (rank along the axis, contiguous tensor)."""
    ops = []
    for kind, direction, messages in (("send", dist.isend, sends), ("recv", dist.irecv, recvs)):
        for peer, x in messages:
            axis.activity.record(kind, axis, x, (axis.ranks[peer],))
            ops.append(dist.P2POp(direction, x, axis.ranks[peer], group=axis.group))
    tensors = [op.tensor for op in ops]
    num_bytes = sum(x.nbytes for x in tensors)
    axis.activity.enter("exchange", axis, num_bytes, False)  # posting waits for nobody, but fails if a peer has died
    works = dist.batch_isend_irecv(ops)
    axis.activity.leave()
    return Pending("exchange", axis, num_bytes, works, tensors)


def gather_start(x: Tensor, axis: Axis) -> tuple[Tensor, Handle]:
    """Begin an all-gather along dim 0. Returns (result, handle); the result is valid after handle.wait()."""
    if axis.size == 1:
        return x, Done()
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    return out, all_gather_into(out, x.contiguous(), axis, wait=False)


def reduce_scatter_start(x: Tensor, axis: Axis) -> tuple[Tensor, Handle]:
    """Begin a reduce-scatter along dim 0, as `gather_start`. Raises ValueError if dim 0 is not divisible."""
    if axis.size == 1:
        return x, Done()
    _check_divisible(x, 0, axis)
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    return out, reduce_scatter_into(out, x.contiguous(), axis, wait=False)


def gather_along(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate the ranks' x along `dim`; no autograd."""
    out, handle = gather_start(x.movedim(dim, 0), axis)
    handle.wait()
    return out.movedim(0, dim)


def reduce_scatter_along(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum over the ranks, keep this rank's slice of `dim`; no autograd."""
    _check_divisible(x, dim, axis)
    out, handle = reduce_scatter_start(x.movedim(dim, 0), axis)
    handle.wait()
    return out.movedim(0, dim)


def slice_along(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return this rank's slice of `dim`; a view."""
    _check_divisible(x, dim, axis)
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * size, size)


def _trade(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Cut `split_dim` into P parts, send part i to rank i, concatenate along `concat_dim` what arrives; no autograd."""
    _check_divisible(x, split_dim, axis)
    parts = torch.stack(x.chunk(axis.size, split_dim)).contiguous()
    out = torch.empty_like(parts)
    _start("all-to-all", dist.all_to_all_single, axis, out, parts)
    return torch.cat(out.unbind(0), concat_dim)


def _check_divisible(x: Tensor, dim: int, axis: Axis) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dimension {dim} of {tuple(x.shape)} is not divisible by the {axis.size} ranks of axis "
            f"{axis.name!r}; pad it or choose a smaller axis"
        )


# ---- collectives with autograd, each beside its adjoint -------------------------------------------------------------


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Callable[[Tensor], Any], adjoint: Callable[..., Tensor | None]) -> Any:
        ctx.adjoint = adjoint
        return apply(x)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.adjoint(*dys), None, None


def linear_map(x: Tensor, apply: Callable[[Tensor], Any], adjoint: Callable[..., Tensor | None]) -> Any:
    """Return apply(x), one tensor or several; the backward computes adjoint(*dys), None if it stores the gradient."""
    return _Pair.apply(x, apply, adjoint)


def _pair(x: Tensor, axis: Axis, apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    return x if axis.size == 1 else linear_map(x, apply, adjoint)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # x may have other readers
    all_reduce_(total, axis)
    return total


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Return x, for each rank of `axis` to do its part of the work with. Adjoint: all-reduce."""
    return _pair(x, axis, _same, lambda dy: _sum(dy, axis))


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum x over `axis`, for every rank. Adjoint: copy."""
    return _pair(x, axis, lambda x: _sum(x, axis), _same)


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate the ranks' x along `dim`, for each rank to do its part with. Adjoint: reduce_scatter."""
    return _pair(x, axis, lambda x: gather_along(x, axis, dim), lambda dy: reduce_scatter_along(dy, axis, dim))


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum x over `axis`, keep this rank's slice of `dim`. Adjoint: all_gather. ValueError if `dim` does not divide."""
    return _pair(x, axis, lambda x: reduce_scatter_along(x, axis, dim), lambda dy: gather_along(dy, axis, dim))


def split(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Keep this rank's slice of an x that every rank holds. Adjoint: the all-gather of the slices' gradients."""
    return _pair(x, axis, lambda x: slice_along(x, axis, dim).contiguous(), lambda dy: gather_along(dy, axis, dim))


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Send each rank its slice of `split_dim`, concatenate theirs along `concat_dim`. Adjoint: with dims exchanged."""
    return _pair(
        x, axis, lambda x: _trade(x, axis, split_dim, concat_dim), lambda dy: _trade(dy, axis, concat_dim, split_dim)
    )
