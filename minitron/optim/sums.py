"""Gradients summed over data ranks: by the process group, or by the copy engines of one node's GPUs.

Problem: NCCL's reduce-scatter is a kernel. While it runs, which is most of the last backward pass, it holds a sixth of
the GPU's multiprocessors. The idea: over NVLink a rank can read what the others have in their gradient buffers
("symmetric memory"). Copy engines bring the slices, and a short kernel adds them up:

    rank 0's stream                       copy engines                        kernel
    backward of the bucket, barrier  ->   slice 0 of ranks 1, 2, 3   ->       own slice 0 += the three of them

Traffic is that of a ring, (P - 1) / P of a bucket in and as much out. Slices come in pieces, which land in one of two
stages, while what is in the other one is being added up. Only the barrier and the additions take multiprocessors.

Others read a rank's buffer until their own sums are done. That is so when a collective that follows `Gradients.finish`
has ended here, and the optimizer begins with one: so whatever the next step writes comes later.

`Sums` is the plain twin; it runs anywhere. Left out: several nodes, which share no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from minitron import overlap
from minitron.collectives import Done, Pending, reduce_scatter_into
from minitron.mesh import Axis

PIECE_BYTES = 64 << 20  # of one rank's slice: a stage has room for one from each of the others


class Sums:
    """By the process group, whatever it is."""

    nbytes = 0

    def __init__(self, axis: Axis, device: torch.device):
        self.axis, self.device = axis, device

    def zeros(self, numel: int) -> Tensor:
        """A buffer of float32 gradients, a multiple of the ranks long."""
        return torch.zeros(numel, dtype=torch.float32, device=self.device)

    def own(self, buffer: Tensor) -> Tensor:
        """This rank's slice."""
        return buffer.chunk(self.axis.size)[self.axis.rank]

    def reduce(self, buffer: Tensor) -> Done | Pending:
        """Begin: own(buffer) becomes the sum of everyone's. All ranks do the same ones in the same order."""
        return reduce_scatter_into(self.own(buffer), buffer, self.axis, wait=False)


class CopiedSums(Sums):
    """By copy engines. numel: of all buffers together. Making it is collective over the axis."""

    def __init__(self, axis: Axis, device: torch.device, numel: int, sum_parts: Callable[[Tensor, Tensor], Tensor]):
        super().__init__(axis, device)
        self._sum_parts, self._used = sum_parts, 0
        axis.activity.enter("rendezvous", axis, 4 * numel)
        self._shared = symmetric_memory.empty(numel, dtype=torch.float32, device=device).zero_()
        self._memory = symmetric_memory.rendezvous(self._shared, axis.group.group_name)
        axis.activity.leave()
        self._copies, self._adds = torch.cuda.Stream(), torch.cuda.Stream()
        self._signals = torch.cuda.Stream(priority=-1)  # as minitron/overlap.py's
        self._piece = min(PIECE_BYTES // 4, numel // axis.size)
        self._stages = [torch.empty(axis.size - 1, self._piece, dtype=torch.float32, device=device) for _ in range(2)]
        self._free: list = [Done(), Done()]  # when what was in a stage has been added

    @property
    def nbytes(self) -> int:
        """Of shared memory on this rank, which is none of the caching allocator's."""
        return self._shared.nbytes

    def zeros(self, numel: int) -> Tensor:
        self._used += numel
        return self._shared[self._used - numel:self._used]

    def reduce(self, buffer: Tensor) -> Arrival:
        own = self.own(buffer)
        self._signals.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._signals):
            self._memory.barrier(channel=0)
        self._copies.wait_stream(self._signals)
        for piece in own.split(self._piece):
            self._add(piece, piece.storage_offset())
        return self._free[0]

    def _add(self, piece: Tensor, offset: int) -> None:
        """To this piece of the own slice what the others have for it, at the same place of their buffers."""
        self._stages.reverse()
        self._free.reverse()
        stage, size = self._stages[0][:, :piece.numel()], self.axis.size
        with torch.cuda.stream(self._copies):
            self._free[0].wait()
            for i, part in enumerate(stage):  # each rank begins with another one
                part.copy_(self._memory.get_buffer((self.axis.rank + 1 + i) % size, piece.shape, piece.dtype, offset))
        self._adds.wait_stream(self._copies)
        with torch.cuda.stream(self._adds):
            self._sum_parts(stage, piece)
            self._free[0] = Arrival(self._adds.record_event())


class Arrival:
    """The handle of sums under way."""

    def __init__(self, event: torch.cuda.Event):
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def choose_sums(axis: Axis, device: torch.device, numel: int, overlapped: bool, ops: ModuleType) -> Sums:
    """CopiedSums between GPUs of one node that can read each other's memory. Collective over the axis.

    numel: of all buffers together; ops: what has the `sum_parts` to use.
    """
    if overlapped and numel and overlap.see_each_other(axis, device):  # a stage may train nothing
        return CopiedSums(axis, device, numel, ops.sum_parts)
    return Sums(axis, device)
