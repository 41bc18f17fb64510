"""Gradients in flat buckets: reduced while the backward still runs, parameters gathered while the forward runs.

Problem: a model has thousands of parameters. A collective, a norm and an update for each would be mostly launches, and
a reduction after the backward would leave the network idle until then. The idea:
  1. Parameters of one kind (dtype, weight decay, replicated over tp, tied) are laid out in a flat buffer. Their
     gradients have a second buffer with the same layout. `param.data` and `param.slot.main_grad` are views.
  2. A layer's backward adds its weight gradient to `main_grad` and calls `param.slot.report`, which is `Bucket.report`.
  3. In the chunk's last backward `report` starts the bucket's reduce-scatter over dp_cp when all its gradients are
     in main_grad (`Bucket.reduce`). Each rank keeps the sum of one slice.
  4. The optimizer updates this slice of the parameters (ZeRO-1). `Bucket.start_gather` gathers the other slices.
  5. Each unit of the model (embedding, block, head) waits for the buckets of its parameters, in a forward pre-hook
     that `_wait_before_forward` registers. Code that reads parameters elsewhere calls `wait_parameters` first.

A backward finishes the gradients of the last layer first, so buckets are filled in reverse forward order. Forward order
a [9], b [6]; two ranks, alignment 4 (`.` is padding, always zero):

    b b b b b b . . a a a a | a a a a a . . . . . . .        reduce-scatter ->  rank 0 owns b and a[0:4]
    rank 0's slice          | rank 1's slice                                   rank 1 owns a[4:9]

Every bucket is summed over dp_cp. The slice of a replicated parameter is also summed over tp if each tp rank has the
gradient of its own tokens or heads only (`sum_over_tp`: a norm under sequence parallelism). A tied weight has a copy on
the first and on the last pipeline stage, so its slice is summed over `tied_stages`.

Microbatches are added in float32, or in bf16 (optimizer.accumulate_dtype) with half of the memory: each sum is made in
float32 and rounded once when it is stored. Sums over ranks are float32 (slices.py), so `grad_slice` is float32, too.

FP8 weights (precision.fp8_params) have buckets of one byte an element. Their initial values become masters at once, and
optim/fp8_weights.py writes the bytes. Left out: ZeRO-2 and ZeRO-3, since microbatches accumulate into whole gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.collectives import all_reduce_, gather_json
from minitron.comm.handle import Handle
from minitron.comm.mesh import Axis, Mesh
from minitron.config.sizes import bucket_limit
from minitron.kernels.fp8_scales import FP8_DTYPES
from minitron.kernels.kernels import Kernels
from minitron.kernels.param import GradSlot, Param, params_of
from minitron.optim.slices import ProcessGroupSliceComm, choose_slice_comm

# Elements. GEMMs and NCCL use wide loads: parameters and slices start on 256 bytes in bf16, on 128 in FP8.
ALIGNMENT = 128


# ---- the layout of buckets: pure data -------------------------------------------------------------------------------


class BucketKey(NamedTuple):
    """What the parameters of one bucket have in common, so that the step works on whole buckets."""

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
    """One parameter's elements of the flat buffer: [start, start + numel)."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """Spans in reverse forward order; `size` elements in all, a multiple of the ranks times ALIGNMENT.

    ranks: data ranks, each of which owns a slice. nodes: of these ranks, if gradients travel in two levels.
    """

    key: BucketKey
    spans: tuple[Span, ...]
    size: int
    ranks: int
    nodes: int = 1

    def slice_of(self, rank: int) -> slice:
        """Return the elements that a data rank owns. Slices are ordered by position in the node, then by node."""
        length, local = self.size // self.ranks, self.ranks // self.nodes
        start = (rank % local * self.nodes + rank // local) * length
        return slice(start, start + length)

    def owned(self, rank: int) -> Iterator[tuple[Span, int, int]]:
        """Yield (span, first, last): elements [first, last) of the buffer are in the span and in `rank`'s slice."""
        mine = self.slice_of(rank)
        for span in self.spans:
            first = max(span.start, mine.start)
            last = min(span.start + span.numel, mine.stop)
            if first < last:
                yield span, first, last


def plan_buckets(
    params: Iterable[tuple[str, int, BucketKey]], bucket_bytes: int, ranks: int, itemsize: int = 4, nodes: int = 1
) -> list[BucketPlan]:
    """Lay (name, numel, key), given in forward order, into buckets. List these in the order in which they close.

    A bucket closes when its gradients, `itemsize` bytes each, take `bucket_bytes`. A tied weight has a separate bucket.
    ranks, nodes: see BucketPlan.
    """
    plans: list[BucketPlan] = []
    filling: dict[BucketKey, list[Span]] = {}

    def end(spans: list[Span]) -> int:
        return spans[-1].start + spans[-1].numel if spans else 0

    def close(key: BucketKey) -> None:
        spans = filling.pop(key)
        plans.append(BucketPlan(key, tuple(spans), _round_up(end(spans), ranks * ALIGNMENT), ranks, nodes))

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
    """Flat parameters and gradients of one plan, this rank's slices of both, and the collectives under way.

    data [size] in the parameters' dtype (FP8 as bytes), grad [size] in grad_dtype. data_slice [size / dp_cp] is a view
    of data. grad_slice [size / dp_cp] holds the sum over data ranks from `Gradients.finish` to the next step's first
    gradient. It is float32 if it is summed over ranks, and a view of grad if the dtypes are equal.
    norm_squared: 0-d float64, that of grad_slice, which slice_comm.stream computes right after the reduction if
    early_norm is set.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: dict[str, Param],
        slice_comm: ProcessGroupSliceComm,
        overlap: bool,
        grad_dtype: torch.dtype,
        square_sum: Callable[[Tensor], Tensor],
        mesh: Mesh,
    ):
        self.plan, self.key, self.slice_comm, self.overlap = plan, plan.key, slice_comm, overlap
        self.square_sum, self.stream = square_sum, slice_comm.stream
        # Over tp or `tied_stages` the slice is summed later, so its norm is not known yet.
        self.early_norm = self.stream is not None and not (plan.key.tied or plan.key.sum_over_tp)
        self.params = {span.name: params[span.name] for span in plan.spans}
        in_fp8 = plan.key.dtype == FP8_DTYPES["weight"]
        self.data = slice_comm.zeros(plan.size, torch.uint8 if in_fp8 else plan.key.dtype)  # no collective supports FP8
        self.grad = slice_comm.zeros(plan.size, grad_dtype)
        mine = plan.slice_of(mesh.dp_cp.rank)
        self.data_slice, self.grad_slice = self.data[mine], self.grad[mine]
        if mesh.dp_cp.size > 1 or plan.key.sum_over_tp or (plan.key.tied and mesh.tied_stages.size > 1):
            self.grad_slice = self.grad_slice.float()
        self.initial_masters = self._initial_masters() if in_fp8 else None
        self.pending: dict[str, int] | None = None  # name -> reports still to come; None before the last backward
        self.counting = False
        self.reduction: Handle[Tensor] = Handle(self.grad_slice)
        self.gather: Handle[Tensor] = Handle(self.data)
        self.gathered: torch.cuda.Event | None = None  # what a recorded forward waits for
        if self.stream is not None and mesh.dp_cp.size > 1:
            self.gathered = torch.cuda.Event(external=True)
            self.gathered.record()  # graph capture silently omits the wait for an event that was never recorded
        self.norm_squared = torch.zeros((), dtype=torch.float64, device=self.grad.device)
        for span in plan.spans:
            self._adopt(span, self.params[span.name])

    def _adopt(self, span: Span, param: Param) -> None:
        place = slice(span.start, span.start + span.numel)
        view = self.data[place].view(self.key.dtype).view(param.shape)
        if self.initial_masters is None:
            view.copy_(param.detach())
        param.data = view
        param.slot = GradSlot(self.grad[place].view(param.shape), partial(self.report, span.name))

    def _initial_masters(self) -> Tensor:
        """Return this rank's slice of the initial masters, float32."""
        values, rank = torch.zeros_like(self.data_slice, dtype=torch.float32), self.slice_comm.axis.rank
        base = self.plan.slice_of(rank).start
        for span, first, last in self.plan.owned(rank):
            part = self.params[span.name].detach().view(-1)[first - span.start : last - span.start]
            values[first - base : last - base].copy_(part)
        return values

    def begin_backward(self, last: bool) -> None:
        """Count reports only in the last backward; under ZB-H1 in its BackwardInput and its BackwardWeight."""
        self.counting = last
        if last and self.pending is None:
            self.pending = {name: param.spec.uses for name, param in self.params.items()}

    def report(self, name: str) -> None:
        """Count a gradient that was added to its main_grad. The bucket's last one starts the reduction."""
        if self.pending is None or not self.counting:
            return
        left = self.pending.pop(name, 0) - 1
        uses = self.params[name].spec.uses
        assert left >= 0, f"{name} reported more gradients than its uses={uses} in one backward pass"
        if left:
            self.pending[name] = left
        elif not self.pending and self.overlap:
            self.reduce()

    def end_step(self) -> None:
        """Let the next gradient of each parameter replace what main_grad holds."""
        self.pending = None
        for param in self.params.values():
            assert param.slot is not None
            param.slot.overwrite = True

    def reduce(self) -> None:
        """Start the reduce-scatter, and the squared norm of its result."""
        self.reduction = self.slice_comm.reduce(self.grad, self.grad_slice)
        if self.early_norm and self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.reduction.wait()
                self.norm_squared.copy_(self.square_sum(self.grad_slice))

    def start_gather(self) -> None:
        """Start the all-gather of the parameters."""
        self.gather = self.slice_comm.gather(self.data, self.data_slice)
        if self.gathered is not None:
            with torch.cuda.stream(self.stream):
                self.gather.wait()
                self.gathered.record()
            self.expect_gather()

    def expect_gather(self) -> None:
        """Make the next forward wait for the most recent gather again: a recorded forward must contain this wait."""
        if self.gathered is not None:
            self.gather = Handle(self.data, [self.gathered.wait])

    def wait_gather(self) -> None:
        """Wait for the parameters, if a gather is under way."""
        if not self.gather.done:
            self.slice_comm.axis.activity.pause()
            self.gather.wait()
            self.slice_comm.axis.activity.resume()


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
        """Return the view [numel] of this part in `slices`, one flat tensor per bucket."""
        return slices[self.bucket].narrow(0, self.start, self.numel)


class Gradients:
    """Owner of the flat parameters and gradients of all model chunks of this rank.

    A training step: begin_backward(chunk, last) before every backward; finish(); the optimizer writes each bucket's
    data_slice and starts its gather. Without overlap it waits for the gathers. Frozen parameters have no bucket, so
    they have neither gradient nor optimizer state. The names of parameters are unique on this rank. Collectives run
    over mesh.dp_cp or its levels, tp and tied_stages. dtype: that of sums over microbatches. bucket_bytes: see
    `plan_buckets`; None: chosen by the number of data ranks.
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
            plans = plan_buckets(keyed, limit, mesh.dp_cp.size, dtype.itemsize, mesh.across_nodes.size)
            position = {name: i for i, name in enumerate(named)}
            plans.sort(key=lambda plan: position[plan.spans[-1].name])  # a plan's last span is needed first
            planned.append((named, plans))
        every = [plan for _, plans in planned for plan in plans]
        nbytes = sum(plan.size * (dtype.itemsize + plan.key.dtype.itemsize) for plan in every)
        largest = max((plan.size for plan in every), default=0)
        self.slice_comm = comm = choose_slice_comm(nbytes, mesh, dtype, largest, overlap, kernels.ops.sum_parts)
        for chunk, (named, plans) in zip(chunks, planned):
            buckets = [Bucket(plan, named, comm, overlap, dtype, kernels.ops.square_sum, mesh) for plan in plans]
            self.chunks.append(buckets)
            self.buckets += buckets
            if overlap and mesh.dp_cp.size > 1:
                _wait_before_forward(chunk, buckets)

    # ---- gradients

    def begin_backward(self, chunk: int, last: bool) -> None:
        """Prepare for a backward of this chunk. last: whether it is the chunk's last in the step, whose reports count.

        Under ZB-H1 the reports of the last microbatch's BackwardInput and BackwardWeight count. BackwardWeights of
        earlier microbatches may run between the two; their reports do not count.
        """
        for bucket in self.chunks[chunk]:
            bucket.begin_backward(last)

    def finish(self) -> None:
        """Complete all sums, so that every bucket's grad_slice is this rank's slice of the step's gradient.

        The next gradient of a parameter overwrites main_grad, so nothing zeroes the buffers or reads zeros back.

        The first call with finite gradients raises ValueError if a sum over tp would add equal copies.
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
            bucket.end_step()
        self.slice_comm.reduced()
        if self.slice_comm.stream is not None:
            torch.cuda.current_stream().wait_stream(self.slice_comm.stream)
        recording = self.mesh.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not (self.copies_compared or recording):  # a comparison reads its result on the host
            self._refuse_equal_copies()
        _sum_all((b.grad_slice for b in self.buckets if b.key.sum_over_tp), self.mesh.tp)
        _sum_all((b.grad_slice for b in self.buckets if b.key.tied), self.mesh.tied_stages)

    def _refuse_equal_copies(self) -> None:
        """Raise ValueError, on all ranks, if tp ranks have equal copies of a gradient that the step sums over tp.

        The sum would be tp times the gradient. Equal copies are allowed in two cases. If all tokens of the batch are
        the same, the parameter nearest to the loss also has equal copies. And a gradient with few nonzero elements may
        have equal copies by chance: with n such elements the chance is about eps ** n. Collective over the world.
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
        # By parameter: whether copies differ at all, nonzero elements, whether norms differ by more than rounding.
        found = torch.stack([spread.any(1), own[:, 2], spread[:, 1] > 1e-3 * highest[0, :, 1]])
        any_differ, nonzeros, norms_differ = all_reduce_(found, mesh.dp_cp).wait()
        equal = (any_differ == 0) & (self.eps**nonzeros < 1e-6)
        last = self.chunks[-1] if mesh.pp.rank == mesh.pp.size - 1 else []
        nearest = {b.key: names.index(b.plan.spans[0].name) for b in last if b.key.sum_over_tp}
        differ = norms_differ[list(nearest.values())]
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
                "sequence is made by context.parameter(..., whole_sequence=True), without per_head"
            )

    def reset(self) -> None:
        """Drop a pass that was begun, with its gradients, and make the next one wait for the gathers again.

        A recorded pass must contain these waits. A pass whose recording failed has not waited.
        """
        self.slice_comm.reduced()
        for bucket in self.buckets:
            bucket.reduction = Handle(bucket.grad_slice)
            bucket.end_step()
            bucket.expect_gather()

    def has_first_copy(self, bucket: Bucket) -> bool:
        """Return whether this rank holds the first copy over tp and stages, which norms and saves count."""
        return (self.mesh.tp.rank == 0 or not bucket.key.replicated) and (self.mesh.pp.rank == 0 or not bucket.key.tied)

    def square_sum(self) -> Tensor:
        """Return this rank's part of the squared global norm, 0-d float64. The world's sum counts each element once."""
        squares = [
            bucket.norm_squared if bucket.early_norm else bucket.square_sum(bucket.grad_slice)
            for bucket in filter(self.has_first_copy, self.buckets)
        ]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.mesh.device)

    # ---- parameters

    def wait_parameters(self) -> None:
        """Wait for the gathers of all parameters. Call it before code other than a unit's forward reads them."""
        for bucket in self.buckets:
            bucket.wait_gather()

    # ---- names

    def owned(self) -> Iterator[OwnedPart]:
        """Yield the contents of this rank's slices by parameter. All dp_cp ranks together cover each element once."""
        axis = self.mesh.dp_cp
        for index, bucket in enumerate(self.buckets):
            base = bucket.plan.slice_of(axis.rank).start
            for span, first, last in bucket.plan.owned(axis.rank):
                param, start, offset = bucket.params[span.name], first - base, first - span.start
                yield OwnedPart(span.name, param, index, start, offset, numel=last - first)


def _sum_all(tensors: Iterable[Tensor], axis: Axis) -> None:
    for handle in [all_reduce_(tensor, axis, wait=False) for tensor in tensors]:
        handle.wait()


def _wait_before_forward(chunk: nn.Module, buckets: list[Bucket]) -> None:
    """Let each unit wait for the buckets of its parameters before its forward; only `unit(...)` runs the hooks."""
    for unit in cast(Any, chunk).units():  # a GPT has them
        names = {param.spec.name for param in params_of(unit)}
        needed = [bucket for bucket in buckets if names & bucket.params.keys()]
        unit.register_forward_pre_hook(partial(_wait_for, needed))


def _wait_for(buckets: list[Bucket], unit: nn.Module, args: tuple[Any, ...]) -> None:
    for bucket in buckets:
        bucket.wait_gather()
