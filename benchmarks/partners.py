"""The partners of one rank, made up: what they would bring is a finite value of this rank, on its device.

Problem: torch's fake process group lets a collective end at once, but leaves what others would bring as it was: memory
of any content. NaN and zeros draw less power than numbers do, and a step with them updates nothing. The idea: within
`partners(...)` the few functions through which a step meets other ranks are replaced.

    collectives between ranks    a copy of this rank's part, for each of the others
    FP8 weights of data ranks    copies of this rank's slice, made in every step, and the smallest known amax
    messages between stages      copies of one random tensor, as large as real ones
    memory that GPUs share       a local buffer; a partner's part of a sum is the one made for that partner
    counts of tokens             this rank's own, also where another stage counts them: so updates are real ones
    rows of the embedding        this rank's: its part of the vocabulary is the first one, and tokens are of that

All of it is launched where the real thing would be, so that a CUDA graph takes it, and a barrier stays a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from minitron import train
from minitron.comm import collectives
from minitron.comm.handle import Handle
from minitron.comm.mesh import Axis, Mesh
from minitron.data.batch import Batch
from minitron.kernels.fp8_scales import WeightScales
from minitron.optim import slices
from minitron.parallel import context_parallel as context
from minitron.parallel import layer_context, overlap, vocab
from minitron.pipeline import executor
from minitron.pipeline.schedule import Exchange

# Standard deviations of what arrives from other stages: a residual stream, and a gradient of a sum over tokens. In fp16
# a gradient of 0.01 is far from both ends.
MAGNITUDES = {"activation": 1.0, "gradient": 0.01}


@contextmanager
def partners(gpus_per_node: int) -> Iterator[None]:
    """Replace what a rank's partners would bring by finite values of this rank, made on its device."""

    def can_access_peers(axis: Axis, device: torch.device) -> bool:
        """The answer in a job whose nodes are filled in order."""
        one_node = axis.ranks[0] // gpus_per_node == axis.ranks[-1] // gpus_per_node
        return device.type == "cuda" and axis.size > 1 and one_node

    with ExitStack() as replaced:
        for owner, name, ours in (
            (collectives, "_start", start),
            *((module, "exchange", exchange) for module in (collectives, executor, context)),
            *((module, "can_access_peers", can_access_peers) for module in (layer_context, slices)),
            *((module, "SymmetricBuffer", LocalBuffer) for module in (overlap, slices)),
            (slices.ProcessGroupSliceComm, "gather", gather),
            *((WeightScales, name, with_every_amax(getattr(WeightScales, name))) for name in ("follow", "end")),
            (overlap.SymmetricMemoryComm, "_receive", receive),
            (vocab, "lookup", look_up),
            (train, "local_totals", totals),
        ):
            replaced.enter_context(mock.patch.object(owner, name, ours))
        yield


def start(kind: str, call: Callable, axis: Axis, *tensors: Tensor, wait: bool = True, **options: Any) -> Handle:
    """A collective of ranks that all hold what this one holds; sums are this rank's part of them.

    In place nothing is written: the parameters of other data ranks stay what they were at the start.
    """
    out, x = tensors[0], tensors[-1]
    axis.activity.record(kind, axis, x, axis.ranks)
    if out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        if kind == "all-gather":
            for part in out.chunk(axis.size):
                part.copy_(x)
        else:
            out.copy_(x.chunk(axis.size)[axis.rank] if kind == "reduce-scatter" else x)
    return Handle(out, () if wait else [partial(collectives._wait_for, (), kind, axis, x.nbytes)], held=tensors)


def gather(
    self: slices.ProcessGroupSliceComm,
    buffer: Tensor,
    own: Tensor,
    original: Callable = slices.ProcessGroupSliceComm.gather,
) -> Handle[Tensor]:
    """Fill the other ranks' slices of FP8 weights with the bytes of this rank's slice. Then gather."""
    if buffer.dtype == torch.uint8:
        for part in buffer.split(len(own)):
            if part.data_ptr() != own.data_ptr():
                part.copy_(own)
    return original(self, buffer, own)


def with_every_amax(method: Callable[[WeightScales], None]) -> Callable[[WeightScales], None]:
    """Wrap follow or end. A weight without a slice on this rank first gets the smallest amax of the others."""

    def run(self: WeightScales) -> None:
        known = self.amax > 0
        self.amax.copy_(self.amax.where(known, self.amax.where(known, self.amax.max()).min()))
        method(self)

    return run


def exchange(axis: Axis, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]) -> Handle:
    """Messages that arrive at once: between stages random values, around a ring what this rank sends."""
    action = axis.activity.action
    if isinstance(action, Exchange):
        sources = [noise(x.shape, x.dtype, x.device, t.kind) for t, (_, x) in zip(action.recvs, recvs, strict=True)]
    else:
        sources = [x for _, x in sends]
    for (_, there), here in zip(recvs, sources):
        there.copy_(here)
    num_bytes = sum(x.nbytes for _, x in (*sends, *recvs))
    return Handle([x for _, x in recvs], [partial(collectives._wait_for, (), "exchange", axis, num_bytes)])


@lru_cache(None)
def noise(shape: torch.Size, dtype: torch.dtype, device: torch.device, kind: str) -> Tensor:
    """Normal values of the magnitude of `kind`, the same ones in every message."""
    draw = torch.Generator(device).manual_seed(list(MAGNITUDES).index(kind))
    return (torch.randn(shape, device=device, generator=draw) * MAGNITUDES[kind]).to(dtype)


class LocalBuffer:
    """A SymmetricBuffer of a rank alone: every rank's memory is its own, and a barrier a short kernel."""

    def __init__(self, axis: Axis, nbytes: int, device: torch.device):
        self.nbytes, self.own = nbytes, torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._views: dict[tuple, Tensor] = {}
        self._signal = torch.zeros(1, dtype=torch.int32, device=device)

    def view(self, rank: int, shape: torch.Size, dtype: torch.dtype, start: int) -> Tensor:
        if (key := (shape, dtype, start)) not in self._views:
            flat = self.own[start * dtype.itemsize : (start + shape.numel()) * dtype.itemsize]
            self._views[key] = flat.view(dtype).view(shape)
        return self._views[key]

    def barrier(self) -> None:
        self._signal.add_(1)


def receive(self: overlap.SymmetricMemoryComm, memory: LocalBuffer, piece: Any, received: Tensor) -> None:
    """SymmetricMemoryComm._receive: the rows made for each source stand for those that it has made for this rank.

    Those are written by then, have the right magnitude, and differ from each other, as the parts of a sum do.
    """
    for source in piece.ranks:
        part = received[source]
        part.copy_(memory.view(self.axis.rank, part.shape, part.dtype, source * part.numel()))


def look_up(ids: Tensor, table: Tensor, first: int, *others: Any, lookup: Callable = vocab.lookup) -> Tensor:
    """vocab.lookup in a table that begins with the first token: of others' tokens there would be zeros alone.

    A norm of nearly nothing divides by nearly nothing, backward in each layer again, and fp16 ends at 65504.
    """
    return lookup(ids, table, 0, *others)


def totals(mesh: Mesh, loss_sum: Tensor, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """executor.local_totals as if this rank were the one that counts losses and tokens."""
    return loss_sum, torch.full((), sum(b.count for b in batches), dtype=torch.float64, device=mesh.device)
