"""Gradients in flat buckets: reduced while the backward still runs, parameters gathered while the forward runs.

Problem: a model has thousands of parameters. One collective, one norm and one update for each of them would cost
more in launches than in work, and a reduction that starts after the backward leaves the network idle until then.

The idea:
  1. Parameters of one kind (dtype, weight decay, replicated over tp, tied) lie one after another in a flat buffer,
     their gradients in a second one with the same layout. Both `param.data` and `param.slot.main_grad` are views.
  2. Layers add weight gradients to `main_grad` themselves and call `param.slot.notify()`.
  3. When in the chunk's last backward the whole bucket is ready, its reduce-scatter over dp_cp starts: rank r keeps
     the sum of slice r.
  4. The optimizer updates slice r of the parameters (ZeRO-1), and an all-gather brings the other slices back.
     Every unit of the model waits, just before its next forward, for the buckets that hold its parameters.
Buckets fill in reverse forward order, because that is the order in which a backward pass finishes them.

    Forward order a [9], b [6]; two ranks, alignment 4 (`.` is padding, always zero):

        b b b b b b . . a a a a | a a a a a . . . . . . .        reduce-scatter ->  rank 0 owns b and a[0:4]
        rank 0's slice          | rank 1's slice                                   rank 1 owns a[4:9]

Who adds what over which axis: every bucket is summed over dp_cp. A replicated parameter that saw only this rank's
tokens or heads (a norm under sequence parallelism) says so (`sum_over_tp`), and its slice is summed over tp too. A tied
weight has a copy on the first and on the last pipeline stage, and its slice is summed over `embedding`. These two sums
come after the reduce-scatter, when there is only a slice to send.

Gradients are float32, or bf16 (optimizer.grad_dtype): half of the memory and of the traffic, and every sum that is
written to the buffer is rounded to 8 bits, 2^-9 of its value at most. Sums are made in float32 and rounded once each:
a product with the microbatches before it, a slice with its copies on the GPUs of a node. Process groups add in bf16.

Weights that are kept in FP8 (precision.fp8_params) have buckets of their own, of one byte each, which are gathered as
they are; their first values go to the masters at once (optim/fp8_weights.py writes the bytes).

Left out: ZeRO-2 and ZeRO-3. The gradient buffer is kept whole because microbatches accumulate into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.collectives import Done, Handle, all_reduce_, gather_json
from minitron.comm.mesh import Axis, Mesh
from minitron.config.sizes import bucket_limit
from minitron.kernels.fp8_scales import FP8_DTYPES
from minitron.kernels.kernels import Kernels
from minitron.kernels.param import GradSlot, Param, params_of
from minitron.optim.slices import Arrival, ProcessGroupSlices, choose_slices

# Elements. Every parameter and every rank's slice starts on 256 bytes in bf16, on 128 in FP8, which GEMMs and NCCL's
# wide loads want.
ALIGNMENT = 128


# ---- where parameters lie: pure data --------------------------------------------------------------------------------


class BucketKey(NamedTuple):
    """What the parameters of one bucket have in common; nothing in the step needs to ask a single parameter."""

    dtype: torch.dtype
    decay: bool
    replicated: bool
    sum_over_tp: bool
    tied: bool


def bucket_key(param: Param) -> BucketKey:
    """Return the key of the bucket that a parameter goes into."""
    spec, dtype = param.spec, param.dtype if param.spec.fp8_scale is None else FP8_DTYPES["weight"]
    return BucketKey(dtype, spec.decay, spec.shard is None, spec.sum_over_tp, spec.tied)


class Span(NamedTuple):
    """The place of one parameter: elements [start, start + numel) of the flat buffer."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """Spans in reverse forward order; `size` elements in all, a multiple of the ranks times ALIGNMENT."""

    key: BucketKey
    spans: tuple[Span, ...]
    size: int

    def owned(self, rank: int, ranks: int) -> Iterator[tuple[Span, int, int]]:
        """Yield (span, first, last): elements [first, last) of the buffer are in the span and in `rank`'s slice."""
        length = self.size // ranks
        for span in self.spans:
            first = max(span.start, rank * length)
            last = min(span.start + span.numel, (rank + 1) * length)
            if first < last:
                yield span, first, last


def plan_buckets(
    params: Iterable[tuple[str, int, BucketKey]], bucket_bytes: int, ranks: int, itemsize: int = 4
) -> list[BucketPlan]:
    """Lay (name, numel, key), given in forward order, into buckets, in the order in which a backward closes them.

    The parameter that brings a bucket to `bucket_bytes` of gradients, of `itemsize` bytes each, closes it; a tied
    weight has a bucket of its own.
    """
    plans: list[BucketPlan] = []
    filling: dict[BucketKey, list[Span]] = {}

    def end(spans: list[Span]) -> int:
        return spans[-1].start + spans[-1].numel if spans else 0

    def close(key: BucketKey) -> None:
        spans = filling.pop(key)
        plans.append(BucketPlan(key, tuple(spans), _round_up(end(spans), ranks * ALIGNMENT)))

    for name, numel, key in reversed(list(params)):
        spans = filling.setdefault(key, [])
        spans.append(Span(name, _round_up(end(spans), ALIGNMENT), numel))
        if key.tied or end(spans) * itemsize >= bucket_bytes:
            close(key)
    for key in list(filling):
        close(key)
    return plans


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---- one bucket -----------------------------------------------------------------------------------------------------


class Bucket:
    """Flat parameters and gradients of one plan, this rank's slices of both, and the collectives in flight.

    data [size] in the parameters' dtype (FP8 as bytes), grad [size] in grad_dtype; data_slice, grad_slice
    [size / dp_cp] are views. A slice of `grad` is the sum over data ranks only between `Gradients.finish` and the next
    step's first backward.
    square: 0-d float64, the squared norm of grad_slice, if it is taken as soon as the slice is reduced (norm_stream).
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: dict[str, Param],
        slices: ProcessGroupSlices,
        overlap: bool,
        grad_dtype: torch.dtype,
        square_sum: Callable[[Tensor], Tensor],
    ):
        self.square_sum = square_sum
        self.plan, self.key, self.slices, self.overlap = plan, plan.key, slices, overlap
        self.params = {span.name: params[span.name] for span in plan.spans}
        in_fp8 = plan.key.dtype == FP8_DTYPES["weight"]
        self.data = slices.zeros(plan.size, torch.uint8 if in_fp8 else plan.key.dtype)  # no collective knows FP8
        self.grad = slices.zeros(plan.size, grad_dtype)
        self.data_slice, self.grad_slice = slices.own(self.data), slices.own(self.grad)
        self.first = self._first_values() if in_fp8 else None
        self.pending: dict[str, int] | None = None  # name -> reports still to come; None before the last backward
        self.counting = False
        self.reduction: Handle = Done()
        self.gather: Handle = Done()
        self.norm_stream: torch.cuda.Stream | None = None
        self.arrived: Arrival | None = None  # its event, on gather_stream, is what a recorded forward waits for
        self.gather_stream: torch.cuda.Stream | None = None
        self.square = torch.zeros((), dtype=torch.float64, device=self.grad.device)
        for span in plan.spans:
            self._adopt(span, self.params[span.name])

    def _adopt(self, span: Span, param: Param) -> None:
        place = slice(span.start, span.start + span.numel)
        view = self.data[place].view(self.key.dtype).view(param.shape)
        if self.first is None:
            view.copy_(param.detach())
        param.data = view
        param.slot = GradSlot(self.grad[place].view(param.shape), partial(self.report, span.name))

    def _first_values(self) -> Tensor:
        """Return the own slice of the first values, float32."""
        axis = self.slices.axis
        values = torch.zeros_like(self.data_slice, dtype=torch.float32)
        for span, first, last in self.plan.owned(axis.rank, axis.size):
            own = self.params[span.name].detach().view(-1)[first - span.start : last - span.start]
            values.narrow(0, first - axis.rank * len(values), last - first).copy_(own)
        return values

    def take_masters(self) -> Tensor:
        """Return the masters of the own slice, float32: of float32 parameters the slice itself. To be called once."""
        if self.first is None:
            return self.data_slice.float()
        masters, self.first = self.first, None
        return masters

    def begin_backward(self, first: bool, last: bool) -> None:
        """Overwrite the last step's gradients in the first backward; count reports in the last, of both its halves."""
        if first:
            for param in self.params.values():
                assert param.slot is not None
                param.slot.overwrite = True
        self.counting = last
        if last and self.pending is None:
            self.pending = {name: param.spec.uses for name, param in self.params.items()}

    def report(self, name: str) -> None:
        """Note that one of the parameter's gradients of this backward pass is in its main_grad."""
        if self.pending is None or not self.counting:
            return
        left = self.pending.pop(name, 0) - 1
        uses = self.params[name].spec.uses
        assert left >= 0, f"{name} reported more gradients than its uses={uses} in one backward pass"
        if left:
            self.pending[name] = left
        elif not self.pending and self.overlap:
            self.reduce()

    def reduce(self) -> None:
        """Start the reduce-scatter, in place, and what follows it."""
        self.reduction = self.slices.reduce(self.grad)
        if self.norm_stream is not None:
            self.norm_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.norm_stream):
                self.reduction.wait()
                self.square.copy_(self.square_sum(self.grad_slice))

    def start_gather(self) -> None:
        self.gather = self.slices.gather(self.data)
        if self.arrived is not None:
            with torch.cuda.stream(self.gather_stream):
                self.gather.wait()
                self.arrived.event.record()
            self.gather = self.arrived

    def wait_gather(self) -> None:
        if not isinstance(self.gather, Done):
            self.slices.axis.activity.pause()
            self.gather.wait()
            self.slices.axis.activity.resume()
            self.gather = Done()


# ---- all buckets of this rank ---------------------------------------------------------------------------------------


class OwnedPart(NamedTuple):
    """Elements [offset, offset + numel) of the flattened local `param`: [start, start + numel) of a bucket's slice."""

    name: str
    param: Param
    bucket: int
    start: int
    offset: int
    numel: int

    def of(self, slices: Sequence[Tensor]) -> Tensor:
        """Return this part of a tensor that is kept as one flat slice per bucket; a view [numel]."""
        return slices[self.bucket].narrow(0, self.start, self.numel)


class Gradients:
    """Owner of the flat buffers of all model chunks of this rank.

    A training step: begin_backward(chunk, first, last) before every backward; finish(); the optimizer writes each
    bucket's data_slice and starts its gather; after_gathers(). Frozen parameters have no bucket, so neither gradient
    nor optimizer state. Parameters bring a `spec` whose name is unique on this rank. Collectives run over mesh.dp_cp,
    tp and embedding. dtype: of the gradients. bucket_bytes: see `plan_buckets`; None: by the number of data ranks.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        kernels: Kernels,
        *,
        overlap: bool,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int | None = None,
    ):
        self.eps = torch.finfo(dtype).eps
        self.copies_compared = mesh.tp.size == 1 or mesh.device.type == "meta"
        self.mesh, self.overlap, limit = mesh, overlap, bucket_bytes or bucket_limit(mesh.dp_cp.size)
        self.chunks: list[list[Bucket]] = []
        self.buckets: list[Bucket] = []  # chunk by chunk, each in the order in which a forward pass needs them
        planned: list[tuple[dict[str, Param], list[BucketPlan]]] = []
        for chunk in chunks:
            named = {param.spec.name: param for param in params_of(chunk) if param.requires_grad}
            assert not any(named.keys() & other.keys() for other, _ in planned), "names repeat over chunks"
            keyed = [(name, p.numel(), bucket_key(p)) for name, p in named.items()]
            plans = plan_buckets(keyed, limit, mesh.dp_cp.size, dtype.itemsize)
            position = {name: i for i, name in enumerate(named)}
            plans.sort(key=lambda plan: position[plan.spans[-1].name])  # a plan's last span is needed first
            planned.append((named, plans))
        nbytes = sum(plan.size * (dtype.itemsize + plan.key.dtype.itemsize) for _, plans in planned for plan in plans)
        self.slices = choose_slices(mesh.dp_cp, mesh.device, nbytes, overlap, kernels.ops.sum_parts)
        for chunk, (named, plans) in zip(chunks, planned):
            buckets = [Bucket(plan, named, self.slices, overlap, dtype, kernels.ops.square_sum) for plan in plans]
            self.chunks.append(buckets)
            self.buckets += buckets
            if overlap and mesh.dp_cp.size > 1:
                _wait_before_forward(chunk, buckets)
        self.norm_stream = torch.cuda.Stream(mesh.device) if overlap and mesh.device.type == "cuda" else None
        for bucket in self.buckets:
            if not (bucket.key.tied or bucket.key.sum_over_tp):  # a sum is still to come
                bucket.norm_stream = self.norm_stream
            if self.norm_stream is not None and mesh.dp_cp.size > 1:
                bucket.arrived, bucket.gather_stream = Arrival(torch.cuda.Event(external=True)), self.norm_stream
                bucket.arrived.event.record()  # else there is nothing to wait for, and a recording would leave it out

    # ---- gradients

    def begin_backward(self, chunk: int, first: bool, last: bool) -> None:
        """Prepare for a backward of this chunk, `first` or `last` of the step's (both, if there is one).

        The first gradient of a parameter overwrites the last step's. To zero the buffers instead would write all of
        them once more, and the first microbatch would read the zeros back. In the last backward `slot.notify()` counts:
        a bucket is reduced as soon as it is complete. Where backwards are split, the last one is announced for each
        half, and between the two earlier microbatches may add theirs.
        """
        for bucket in self.chunks[chunk]:
            bucket.begin_backward(first, last)

    def finish(self) -> None:
        """Complete all sums: afterwards every bucket's grad_slice is this rank's share of the step's gradient.

        The first call with finite gradients also raises ValueError if a sum over tp would add equal copies.
        """
        self.mesh.activity.begin("update")
        for bucket in self.buckets:
            owner = next(iter(bucket.params))
            assert bucket.pending is not None, f"no last backward was announced for the chunk of {owner}"
            assert not bucket.pending, f"no gradient came for {', '.join(sorted(bucket.pending))}"
            if not self.overlap:
                bucket.reduce()
        for bucket in self.buckets:
            bucket.reduction.wait()
            bucket.reduction, bucket.pending = Done(), None
        self.slices.reduced()
        if self.norm_stream is not None:
            torch.cuda.current_stream().wait_stream(self.norm_stream)
        # A comparison reads its result on the host, which a recording cannot.
        if not self.copies_compared and not (
            self.mesh.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):
            self._refuse_equal_copies()
        _sum_all((b.grad_slice for b in self.buckets if b.key.sum_over_tp), self.mesh.tp)
        _sum_all((b.grad_slice for b in self.buckets if b.key.tied), self.mesh.embedding)

    def _refuse_equal_copies(self) -> None:
        """Raise ValueError, on all ranks, if tp ranks have equal copies of a gradient that the step sums over tp.

        The sum would be tp times the gradient. Equal copies prove nothing in two cases. The parameter nearest to the
        loss has nearly equal copies, too, since every token is the same. Or the copies have so few bits that they may
        be equal by chance. Collective over the world.
        """
        mesh, slices = self.mesh, [bucket.grad_slice for bucket in self.buckets]
        names = [span.name for bucket in self.buckets if bucket.key.sum_over_tp for span in bucket.plan.spans]
        own = torch.zeros(len(names) + 1, 3, dtype=torch.float64, device=mesh.device)  # never empty
        for part in self.owned():
            if part.param.spec.sum_over_tp:
                grad, row = part.of(slices), own[names.index(part.name)]
                row[0], row[1], row[2] = grad.double().sum(), grad.double().norm(), grad.count_nonzero()
        highest = torch.stack([own, -own])
        all_reduce_(highest, mesh.tp, op=dist.ReduceOp.MAX)
        spread = highest[0] + highest[1]  # between the largest and the smallest
        found = torch.stack([spread.any(1), own[:, 2], spread[:, 1] > 1e-3 * highest[0, :, 1]])
        all_reduce_(found, mesh.dp_cp)
        equal = (found[0] == 0) & (self.eps ** found[1] < 1e-6)
        last = self.chunks[-1] if mesh.pp.rank == mesh.pp.size - 1 else []
        nearest = {b.key: names.index(b.plan.spans[0].name) for b in last if b.key.sum_over_tp}
        differ = found[2, list(nearest.values())]
        known = torch.stack([equal.any(), differ.any(), ~own.isfinite().all()]).int()
        all_reduce_(known, mesh.world, op=dist.ReduceOp.MAX)
        some_equal, some_differ, overflow = known.tolist()
        self.copies_compared = not overflow  # fp16's first loss scales are too large
        if some_equal and some_differ and not overflow:
            mine = [name for name, same in zip(names, equal.tolist()) if same]
            wrong = sorted({name for theirs in gather_json(mine, mesh.world, mesh.device) for name in theirs})
            raise ValueError(
                f"{', '.join(wrong)}: all {mesh.tp.size} tensor-parallel ranks have the same gradient, and it is to be "
                "summed over them, as for a rank's own tokens or heads; a parameter that every rank uses on the whole "
                "sequence is made by layout.parameter(..., whole_sequence=True), without per_head"
            )

    def reset(self) -> None:
        """Forget a pass that was begun, and let the next one wait for the gathers as if it were the first after them.

        A pass that is recorded must contain these waits, and one that was not recorded to its end has not waited.
        """
        self.slices.reduced()
        for bucket in self.buckets:
            bucket.reduction, bucket.pending = Done(), None
            if bucket.arrived is not None:
                bucket.gather = bucket.arrived

    def counts(self, bucket: Bucket) -> bool:
        """Tell whether this rank holds the first copy over tp and stages, which norms and saves count."""
        return (self.mesh.tp.rank == 0 or not bucket.key.replicated) and (self.mesh.pp.rank == 0 or not bucket.key.tied)

    def square_sum(self) -> Tensor:
        """Return this rank's part of the squared global norm, 0-d float64. The world's sum counts each element once."""
        squares = [
            bucket.square_sum(bucket.grad_slice) if bucket.norm_stream is None else bucket.square
            for bucket in filter(self.counts, self.buckets)
        ]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.mesh.device)

    # ---- parameters

    def after_gathers(self) -> None:
        """Wait for the gathers, unless units do; call it when all have been started."""
        if not self.overlap:
            self.wait_parameters()

    def wait_parameters(self) -> None:
        """Wait until every parameter is whole: before anything but a unit's forward reads them."""
        for bucket in self.buckets:
            bucket.wait_gather()

    # ---- names

    def owned(self) -> Iterator[OwnedPart]:
        """List what this rank's slices hold, by parameter; the parts of all dp_cp ranks cover every element once."""
        axis = self.mesh.dp_cp
        for index, bucket in enumerate(self.buckets):
            base = axis.rank * bucket.grad_slice.numel()
            for span, first, last in bucket.plan.owned(axis.rank, axis.size):
                yield OwnedPart(
                    span.name,
                    bucket.params[span.name],
                    index,
                    start=first - base,
                    offset=first - span.start,
                    numel=last - first,
                )


def _sum_all(tensors: Iterable[Tensor], axis: Axis) -> None:
    for handle in [all_reduce_(tensor, axis, wait=False) for tensor in tensors]:
        handle.wait()


def _wait_before_forward(chunk: nn.Module, buckets: list[Bucket]) -> None:
    """Make each unit, when called (`unit(...)` runs hooks), first wait for the buckets of its parameters."""
    for unit in cast(Any, chunk).units():  # a GPT has them
        names = {param.spec.name for param in params_of(unit)}
        needed = [bucket for bucket in buckets if names & bucket.params.keys()]
        unit.register_forward_pre_hook(partial(_wait_for, needed))


def _wait_for(buckets: list[Bucket], unit: nn.Module, args: tuple[Any, ...]) -> None:
    for bucket in buckets:
        bucket.wait_gather()
