"""Slices of the flat buffers between data ranks: by the process group, or by the copy engines of one node's GPUs.

Problem: NCCL's reduce-scatter and all-gather are kernels. While they run, beside the last backward pass and the first
forward pass, they hold SMs that products need. The idea: over NVLink a rank reads the other ranks' buffers ("symmetric
memory"). Copy engines fetch the slices, and a short kernel adds gradients:

    reduce   backward of the bucket, barrier  ->  slice 0 of ranks 1, 2, 3   ->  own slice 0 += the three of them
    gather   update of slice 0, barrier       ->  slices 1, 2, 3 of the ranks that own them

The traffic is that of a ring: (P - 1) / P of a bucket in and as much out. Gradients arrive in pieces. A piece lands in
one of two stages while the other one is added. Only barriers and additions take SMs.

No barrier follows a read, because the optimizer's all-reduce over the world serves as a barrier. Peers read a rank's
gradients before this all-reduce, and the rank overwrites them after it. Peers read its parameters before the all-reduce
of the next step, and the rank updates them after that. Left out: several nodes, which share no memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minitron.comm.collectives import all_gather_into, reduce_scatter_into
from minitron.comm.handle import Handle
from minitron.comm.mesh import Axis
from minitron.comm.shared_memory import SymmetricBuffer, can_access_peers
from minitron.config.sizes import PIECE_BYTES


class ProcessGroupSlices:
    """By the collectives of the process group, on any device."""

    nbytes = 0

    def __init__(self, axis: Axis, device: torch.device):
        self.axis, self.device = axis, device

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make a buffer of zeros to reduce or gather. numel: a multiple of the axis size."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def own(self, buffer: Tensor) -> Tensor:
        """Return this rank's slice."""
        return buffer.chunk(self.axis.size)[self.axis.rank]

    def reduce(self, buffer: Tensor) -> Handle[Tensor]:
        """Begin to make own(buffer) the sum over the ranks, in its dtype. In the same order on all ranks."""
        return reduce_scatter_into(self.own(buffer), buffer, self.axis, wait=False)

    def gather(self, buffer: Tensor) -> Handle[Tensor]:
        """Begin to fetch the other slices from their owners. In the same order on all ranks."""
        return all_gather_into(buffer, self.own(buffer), self.axis, wait=False)

    def reduced(self) -> None:
        """End a step: the current stream has waited for all its reductions, or will never run them."""


class SymmetricMemorySlices(ProcessGroupSlices):
    """By copy engines. nbytes: of all buffers together. The constructor is collective over the axis."""

    def __init__(self, axis: Axis, device: torch.device, nbytes: int, sum_parts: Callable[[Tensor, Tensor], Tensor]):
        super().__init__(axis, device)
        self._sum_parts, self._used, self.nbytes = sum_parts, 0, nbytes
        self._memory = SymmetricBuffer(axis, nbytes, device)
        self._memory.own.zero_()
        self._copies, self._adds = torch.cuda.Stream(), torch.cuda.Stream()
        self._signals = torch.cuda.Stream(priority=-1)  # a barrier need not wait for a product's end
        piece = min(PIECE_BYTES, nbytes // axis.size) // 4 * 4  # bytes
        self._stages = [torch.empty(axis.size - 1, piece, dtype=torch.uint8, device=device) for _ in range(2)]
        self._added: list[torch.cuda.Event | None] = [None, None]  # the end of each stage's last addition

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        start, self._used = self._used, self._used + numel * dtype.itemsize
        return self._memory.own[start : self._used].view(dtype)

    def reduce(self, buffer: Tensor) -> Handle[Tensor]:
        self._announce()
        own = self.own(buffer)
        for piece in own.split(self._stages[0].shape[1] // buffer.itemsize):
            added = self._add(piece)
        return Handle(own, [added.wait])

    def gather(self, buffer: Tensor) -> Handle[Tensor]:
        slices = buffer.chunk(self.axis.size)
        self._announce()
        with torch.cuda.stream(self._copies):
            for owner in self._others():
                slices[owner].copy_(self._theirs(owner, slices[owner]))
            return Handle(buffer, [self._copies.record_event().wait])

    def reduced(self) -> None:
        self._added = [None, None]

    def _announce(self) -> None:
        """Order later copies after all work on the current streams of all ranks so far."""
        self._signals.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._signals):
            self._memory.barrier()
        self._copies.wait_stream(self._signals)

    def _add(self, piece: Tensor) -> torch.cuda.Event:
        """Add the other ranks' copies of `piece`, read from the same offset of their buffers; return the end of it."""
        self._stages.reverse()
        self._added.reverse()
        stage, free = self._stages[0].view(piece.dtype)[:, : piece.numel()], self._added[0]
        if free is not None:
            self._copies.wait_event(free)
        with torch.cuda.stream(self._copies):
            for part, source in zip(stage, self._others()):
                part.copy_(self._theirs(source, piece))
        self._adds.wait_stream(self._copies)
        with torch.cuda.stream(self._adds):
            self._sum_parts(stage, piece)
        added = self._added[0] = self._adds.record_event()
        return added

    def _others(self) -> list[int]:
        """List the other ranks. Each rank begins with a different one."""
        return [(self.axis.rank + i) % self.axis.size for i in range(1, self.axis.size)]

    def _theirs(self, rank: int, mine: Tensor) -> Tensor:
        """Return rank's view of the memory at the offset of `mine`."""
        return self._memory.view(rank, mine.shape, mine.dtype, int(mine.storage_offset()))


def choose_slices(
    axis: Axis, device: torch.device, nbytes: int, overlapped: bool, sum_parts: Callable[[Tensor, Tensor], Tensor]
) -> ProcessGroupSlices:
    """Choose SymmetricMemorySlices between GPUs of one node that read each other's memory. Collective over the axis.

    nbytes: of all buffers together.
    """
    if overlapped and nbytes and can_access_peers(axis, device):  # a stage may train nothing
        return SymmetricMemorySlices(axis, device, nbytes, sum_parts)
    return ProcessGroupSlices(axis, device)
