"""Slices of the flat buffers between data ranks: by the process group, or by the copy engines of one node's GPUs.

Problem: NCCL's reduce-scatter and all-gather are kernels. While they run, beside the last backward pass and the first
forward pass, they hold multiprocessors that products need. The idea: over NVLink a rank can read what the others have
in their buffers ("symmetric memory"). Copy engines bring the slices, and a short kernel adds gradients:

    reduce   backward of the bucket, barrier  ->  slice 0 of ranks 1, 2, 3   ->  own slice 0 += the three of them
    gather   update of slice 0, barrier       ->  slices 1, 2, 3 of the ranks that own them

Traffic is that of a ring, (P - 1) / P of a bucket in and as much out. Gradients come in pieces, which land in one of
two stages, while what is in the other one is being added up. Only barriers and additions take multiprocessors.

Peers read a rank's gradients until their own sums finish. The optimizer's all-reduce comes later than these sums, and
the next step writes gradients after it. Peers read a rank's parameters until their forward pass, which comes before
that all-reduce of the next step, and so before its next update.

`ProcessGroupSlices` is the plain twin; it runs anywhere. Left out: several nodes, which share no memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minitron.comm.collectives import Done, Handle, all_gather_into, reduce_scatter_into
from minitron.comm.mesh import Axis
from minitron.comm.shared_memory import SharedBuffer, see_each_other
from minitron.config.sizes import PIECE_BYTES


class ProcessGroupSlices:
    """By the process group, whatever it is."""

    nbytes = 0

    def __init__(self, axis: Axis, device: torch.device):
        self.axis, self.device = axis, device

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make a buffer whose slices are reduced or gathered, a multiple of the ranks long."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def own(self, buffer: Tensor) -> Tensor:
        """Return this rank's slice."""
        return buffer.chunk(self.axis.size)[self.axis.rank]

    def reduce(self, buffer: Tensor) -> Handle:
        """Begin to make own(buffer) the sum of everyone's, in its dtype. In the same order on all ranks."""
        return reduce_scatter_into(self.own(buffer), buffer, self.axis, wait=False)

    def gather(self, buffer: Tensor) -> Handle:
        """Begin to bring the other slices from their owners. In the same order on all ranks."""
        return all_gather_into(buffer, self.own(buffer), self.axis, wait=False)

    def reduced(self) -> None:
        """Note that the current stream has waited for all reductions: nothing of one step is left for the next."""


class SymmetricMemorySlices(ProcessGroupSlices):
    """By copy engines. nbytes: of all buffers together. Making it is collective over the axis."""

    def __init__(self, axis: Axis, device: torch.device, nbytes: int, sum_parts: Callable[[Tensor, Tensor], Tensor]):
        super().__init__(axis, device)
        self._sum_parts, self._used, self.nbytes = sum_parts, 0, nbytes
        self._memory = SharedBuffer(axis, nbytes, device)
        self._memory.own.zero_()
        self._copies, self._adds = torch.cuda.Stream(), torch.cuda.Stream()
        self._signals = torch.cuda.Stream(priority=-1)  # barriers are not to wait for a product's end
        piece = min(PIECE_BYTES, nbytes // axis.size) // 4 * 4  # bytes
        self._stages = [torch.empty(axis.size - 1, piece, dtype=torch.uint8, device=device) for _ in range(2)]
        self._free: list[Handle] = [Done(), Done()]  # when what was in a stage has been added

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        start, self._used = self._used, self._used + numel * dtype.itemsize
        return self._memory.own[start : self._used].view(dtype)

    def reduce(self, buffer: Tensor) -> Handle:
        self._announce()
        for piece in self.own(buffer).split(self._stages[0].shape[1] // buffer.itemsize):
            self._add(piece)
        return self._free[0]

    def gather(self, buffer: Tensor) -> Handle:
        slices = buffer.chunk(self.axis.size)
        self._announce()
        with torch.cuda.stream(self._copies):
            for owner in self._others():
                slices[owner].copy_(self._theirs(owner, slices[owner]))
            return Arrival(self._copies.record_event())

    def reduced(self) -> None:
        self._free = [Done(), Done()]

    def _announce(self) -> None:
        """Let copies from here on find what all ranks have written on their current stream so far."""
        self._signals.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._signals):
            self._memory.barrier()
        self._copies.wait_stream(self._signals)

    def _add(self, piece: Tensor) -> None:
        """Add the other ranks' copies of `piece`, read from the same offset of their buffers."""
        self._stages.reverse()
        self._free.reverse()
        stage = self._stages[0].view(piece.dtype)[:, : piece.numel()]
        with torch.cuda.stream(self._copies):
            self._free[0].wait()
            for part, source in zip(stage, self._others()):
                part.copy_(self._theirs(source, piece))
        self._adds.wait_stream(self._copies)
        with torch.cuda.stream(self._adds):
            self._sum_parts(stage, piece)
            self._free[0] = Arrival(self._adds.record_event())

    def _others(self) -> list[int]:
        """List the other ranks; each rank begins with another one."""
        return [(self.axis.rank + i) % self.axis.size for i in range(1, self.axis.size)]

    def _theirs(self, rank: int, mine: Tensor) -> Tensor:
        """Return rank's view of the memory at the offset of `mine`."""
        return self._memory.view(rank, mine.shape, mine.dtype, int(mine.storage_offset()))


class Arrival:
    """The handle of slices under way."""

    def __init__(self, event: torch.cuda.Event):
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def choose_slices(
    axis: Axis, device: torch.device, nbytes: int, overlapped: bool, sum_parts: Callable[[Tensor, Tensor], Tensor]
) -> ProcessGroupSlices:
    """Choose SymmetricMemorySlices between GPUs of one node that read each other's memory. Collective over the axis.

    nbytes: of all buffers together.
    """
    if overlapped and nbytes and see_each_other(axis, device):  # a stage may train nothing
        return SymmetricMemorySlices(axis, device, nbytes, sum_parts)
    return ProcessGroupSlices(axis, device)
