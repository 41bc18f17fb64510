"""The collectives of autograd, each beside its adjoint.

A linear map's backward pass is its transpose. So each collective has a partner that runs in the backward pass. Papers
on tensor parallelism call two of them f, before a column-parallel product, and g, after a row-parallel one. The
backward pass of f runs g, and that of g runs f:

    Shoeybi et al. 2019                                 f = copy          g = all-reduce
    sequence parallelism (Korthikanti et al. 2022)      f = all-gather    g = reduce-scatter

Along an axis of P ranks the pairs are

    forward                                       backward
    copy            x on every rank               all-reduce
    all_reduce      sum of x over the ranks       copy
    all_gather      concatenate along a dim       reduce-scatter
    reduce_scatter  sum, keep this rank's slice   all-gather
    split           keep this rank's slice        all-gather
    all_to_all      exchange slices               exchange them back

Along an axis of size 1 each of them is the identity and launches nothing. The functions that end in `_`, `_into`,
`_start` or `_along` are the plain operations underneath, for code with a hand-written backward. Those that can run
beside a product return a `Handle` (handle.py). In this file ranks wait for each other in `_start` and `_wait_for`
only, which write the wait to the rank's `Activity`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.handle import Handle
from minitron.comm.mesh import Axis

# torch 2.13 renamed both and warns about the names that 2.11 has.
_gather_op = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_op = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _start(
    kind: str, call: Callable[..., dist.Work], axis: Axis, *tensors: Tensor, wait: bool = True, **options: Any
) -> Handle[Tensor]:
    """Call `call(*tensors)` over `axis`. The first tensor is the result, the last one this rank's input."""
    num_bytes = tensors[-1].nbytes
    axis.activity.record(kind, axis, tensors[-1], axis.ranks)
    axis.activity.enter(kind, axis, num_bytes, wait)
    work = call(*tensors, group=axis.group, async_op=not wait, **options)
    axis.activity.leave()
    waits = () if wait else [partial(_wait_for, [work], kind, axis, num_bytes)]
    return Handle(tensors[0], waits, held=tensors)


def _wait_for(works: Sequence[dist.Work], kind: str, axis: Axis, num_bytes: int) -> None:
    axis.activity.enter(kind, axis, num_bytes)
    for work in works:
        work.wait()
    axis.activity.leave()


# ---- plain operations: no autograd, in place or into a given tensor -------------------------------------------------


def all_reduce_(
    x: Tensor, axis: Axis, *, wait: bool = True, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Handle[Tensor]:
    """Replace x by its sum (or `op`) over `axis`. Returns a handle of x, which is done if `wait`."""
    if axis.size == 1:
        return Handle(x)
    return _start("all-reduce", dist.all_reduce, axis, x, wait=wait, op=op)


def all_gather_into(out: Tensor, x: Tensor, axis: Axis, *, wait: bool = True) -> Handle[Tensor]:
    """Gather the ranks' x [m, ...] into out [P m, ...], in axis order. Contiguous; x may be out's own slice."""
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Handle(out)
    return _start("all-gather", _gather_op, axis, out, x, wait=wait)


def reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis, *, wait: bool = True) -> Handle[Tensor]:
    """Write this rank's slice (dim 0) of the sum of x over `axis` to out. Contiguous; out may be x's own slice."""
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Handle(out)
    return _start("reduce-scatter", _reduce_scatter_op, axis, out, x, wait=wait)


def all_to_all_into(out: Tensor, x: Tensor, axis: Axis) -> None:
    """Send the i-th of P equal parts of x (dim 0) to rank i; write what arrives to out, in axis order. Contiguous."""
    _start("all-to-all", dist.all_to_all_single, axis, out, x)


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Return the values of all ranks of an axis, in order. They travel as JSON, so no rank runs received code."""
    data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    sizes = gather_along(torch.tensor([len(data)], device=device), axis)
    padded = data.new_zeros(int(sizes.max()))
    padded[: len(data)] = data
    texts = gather_along(padded.unsqueeze(0), axis).tolist()
    return [json.loads(bytes(text[:size])) for text, size in zip(texts, sizes.tolist())]


def exchange(
    axis: Axis, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
) -> Handle[list[Tensor]]:
    """Post messages together without waiting; each is (rank along the axis, contiguous tensor).

    Returns a handle of the received tensors.
    """
    ops = []
    for kind, direction, messages in (("send", dist.isend, sends), ("recv", dist.irecv, recvs)):
        for peer, x in messages:
            axis.activity.record(kind, axis, x, (axis.ranks[peer],))
            ops.append(dist.P2POp(direction, x, axis.ranks[peer], group=axis.group))
    num_bytes = sum(op.tensor.nbytes for op in ops)
    axis.activity.enter("exchange", axis, num_bytes, False)  # posting does not wait, but fails if a peer has died
    works = dist.batch_isend_irecv(ops)
    axis.activity.leave()
    return Handle([x for _, x in recvs], [partial(_wait_for, works, "exchange", axis, num_bytes)], held=ops)


def gather_start(x: Tensor, axis: Axis) -> Handle[Tensor]:
    """Begin an all-gather along dim 0."""
    if axis.size == 1:
        return Handle(x)
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    return all_gather_into(out, x.contiguous(), axis, wait=False)


def reduce_scatter_start(x: Tensor, axis: Axis) -> Handle[Tensor]:
    """Begin a reduce-scatter along dim 0. Raises ValueError if dim 0 is not divisible."""
    if axis.size == 1:
        return Handle(x)
    _check_divisible(x, 0, axis)
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    return reduce_scatter_into(out, x.contiguous(), axis, wait=False)


def gather_along(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate the ranks' x along `dim`; no autograd."""
    return gather_start(x.movedim(dim, 0), axis).wait().movedim(0, dim)


def reduce_scatter_along(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum over the ranks, keep this rank's slice of `dim`; no autograd."""
    _check_divisible(x, dim, axis)
    return reduce_scatter_start(x.movedim(dim, 0), axis).wait().movedim(0, dim)


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
    all_to_all_into(out, parts, axis)
    return torch.cat(out.unbind(0), concat_dim)


def _check_divisible(x: Tensor, dim: int, axis: Axis) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dimension {dim} of {tuple(x.shape)} is not divisible by the {axis.size} ranks of axis "
            f"{axis.name!r}; pad it or choose a smaller axis"
        )


# ---- collectives with autograd, each beside its adjoint -------------------------------------------------------------


class _WithAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Callable[[Tensor], Any], adjoint: Callable[..., Tensor | None]) -> Any:
        ctx.adjoint = adjoint
        return apply(x)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.adjoint(*dys), None, None


def with_adjoint(x: Tensor, apply: Callable[[Tensor], Any], adjoint: Callable[..., Tensor | None]) -> Any:
    """Return apply(x), one tensor or several; the backward computes adjoint(*dys), None if it stores the gradient."""
    return _WithAdjoint.apply(x, apply, adjoint)


def _over(x: Tensor, axis: Axis, apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    return x if axis.size == 1 else with_adjoint(x, apply, adjoint)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # x may have other readers
    all_reduce_(total, axis)
    return total


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Return x, which each rank of `axis` uses for its part of the work. Adjoint: the all-reduce of their gradients."""
    return _over(x, axis, _same, lambda dy: _sum(dy, axis))


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum x over `axis`, on every rank. Adjoint: copy."""
    return _over(x, axis, lambda x: _sum(x, axis), _same)


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate the ranks' x along `dim`, on every rank. Adjoint: reduce_scatter."""
    return _over(x, axis, lambda x: gather_along(x, axis, dim), lambda dy: reduce_scatter_along(dy, axis, dim))


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum x over `axis`, keep this rank's slice of `dim`. Adjoint: all_gather. ValueError if `dim` does not divide."""
    return _over(x, axis, lambda x: reduce_scatter_along(x, axis, dim), lambda dy: gather_along(dy, axis, dim))


def split(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Keep this rank's slice of an x that every rank holds. Adjoint: the all-gather of the slices' gradients."""
    return _over(x, axis, lambda x: slice_along(x, axis, dim).contiguous(), lambda dy: gather_along(dy, axis, dim))


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Send each rank its slice of `split_dim`, concatenate theirs along `concat_dim`. Adjoint: with dims exchanged."""
    return _over(
        x, axis, lambda x: _trade(x, axis, split_dim, concat_dim), lambda dy: _trade(dy, axis, concat_dim, split_dim)
    )
