"""Move slices of the flat buffers between data ranks, in two levels: within a node, and between nodes.

Problem: NCCL adds gradients in the format in which they travel, so a ring in bf16 rounds at each of its steps. NCCL's
kernels also hold SMs that products need. The idea: ranks of a node sum their parts in float32. Between nodes slices
travel in bf16, rounded once, and are added in float32. A bucket of four slices on two nodes of two ranks:

    in_node        parts are summed in each node           ranks 0, 2   slices 0, 1      ranks 1, 3   slices 2, 3
    across_nodes   ranks with the same position exchange   rank 0       slice 0          rank 1       slice 2
                   slices, and add them to their own sum   rank 2       slice 1          rank 3       slice 3

Each of N nodes sends (N - 1) / N of a bucket, which is less than in a ring. Updated parameters take the same two levels
in reverse. On one node, or with float32 between nodes, `in_node` has all ranks (comm/mesh.py).

GPUs of a node read each other's buffers ("symmetric memory"). Copy engines fetch pieces into two staging buffers in
turn. While one is filled, a short kernel adds the other. No barrier follows a read, because the optimizer's all-reduce
over the world serves as a barrier. Peers read a rank's gradients before this all-reduce, and the rank overwrites them
after it. Peers read its parameters before the all-reduce of the next step, and the rank updates them after that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minitron.comm.collectives import all_gather_into, all_to_all_into, reduce_scatter_into
from minitron.comm.handle import Handle
from minitron.comm.mesh import Mesh
from minitron.comm.shared_memory import SymmetricBuffer, can_access_peers
from minitron.config.sizes import PIECE_BYTES

SumParts = Callable[..., Tensor]  # of kernels/plain.py
PARTS_AT_ONCE = 8  # other nodes' parts in one call of a kernel, which is compiled for their number


def add_rounded(total: Tensor, parts: Tensor, sum_parts: SumParts) -> None:
    """Add the ranks' parts [p, n] to total [n], float32, in rank order."""
    for some in parts.split(PARTS_AT_ONCE):
        sum_parts(some, total)


class ProcessGroupSliceComm:
    """Reduces and gathers slices by the collectives of the process group, on any device.

    dtype: of gradients. largest: elements of the largest bucket. stream: on a GPU with overlap, runs the operations
    after a collective beside the current stream. Exchanges run there in order, so they share staging buffers.
    `received` and `rounded` hold the part of a bucket in bf16. `wide` holds a bf16 bucket in float32 for the process
    group.
    """

    nbytes = 0
    casts = True  # the process group adds in the format of its input, so bf16 is cast to float32 first

    def __init__(self, mesh: Mesh, dtype: torch.dtype, largest: int, overlap: bool, sum_parts: SumParts):
        self.axis, self.in_node, self.across_nodes = mesh.dp_cp, mesh.in_node, mesh.across_nodes
        self.device, overlapped = mesh.device, overlap and mesh.device.type == "cuda"
        self.stream = torch.cuda.Stream(mesh.device) if overlapped else None
        self.name = "collectives" if self.axis.size > 1 else "one rank"  # for the log
        self._sum_parts, empty, narrow = sum_parts, partial(torch.empty, device=mesh.device), dtype != torch.float32
        part = largest // self.in_node.size * (self.across_nodes.size > 1)
        self.received = empty(part, dtype=torch.bfloat16)
        self.rounded = empty(0 if narrow else part, dtype=torch.bfloat16)
        self.wide = empty(largest * (narrow and self.casts and self.in_node.size > 1), dtype=torch.float32)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make a buffer of zeros to reduce or gather. numel: a multiple of the axis size."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def reduce(self, buffer: Tensor, out: Tensor) -> Handle[Tensor]:
        """Begin to write this rank's slice of the sum over the ranks to out. All ranks call it in the same order.

        out: float32, or `buffer` if there is one rank. It may be this rank's slice of the buffer. The content of the
        buffer is lost.
        """
        if self.across_nodes.size == 1 and not len(self.wide):
            return reduce_scatter_into(out, buffer, self.in_node, wait=False)
        return self._later(out, partial(self._reduce, buffer, out))

    def gather(self, buffer: Tensor, own: Tensor) -> Handle[Tensor]:
        """Begin to fetch the other slices from their owners. own: this rank's slice. Same order on all ranks."""
        if self.across_nodes.size == 1:
            return self._gather_local(buffer)
        part = all_gather_into(self._part(buffer), own, self.across_nodes, wait=False)
        return self._later(buffer, part.wait, lambda: self._gather_local(buffer).wait())

    def unsummed(self, buffer: Tensor) -> list[Tensor]:
        """Return the parts of a reduced buffer that still hold this rank's gradients, not sums."""
        axis = self.in_node if self.in_node.size > 1 else self.across_nodes
        parts = list(buffer.chunk(axis.size))
        return parts[: axis.rank] + parts[axis.rank + 1 :]

    def of_other_nodes(self, buffer: Tensor) -> list[Tensor]:
        """Return the parts of a reduced buffer that hold this node's sums for other nodes."""
        parts = list(self._part(buffer).chunk(self.across_nodes.size)) if self.in_node.size > 1 else []
        return [part for node, part in enumerate(parts) if node != self.across_nodes.rank]

    def reduced(self) -> None:
        """End a step. The caller has waited for all its reductions on the current stream, or has dropped them."""

    def _part(self, buffer: Tensor) -> Tensor:
        """Return the part of a buffer that this rank sums in its node: a slice for each node."""
        return buffer.chunk(self.in_node.size)[self.in_node.rank]

    def _later(self, result: Tensor, *steps: Callable[[], object]) -> Handle[Tensor]:
        """Launch these steps in order on `stream`. Without a stream the handle's wait() runs them."""
        if self.stream is None:
            return Handle(result, steps)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for step in steps:
                step()
            return Handle(result, [self.stream.record_event().wait])

    def _reduce(self, buffer: Tensor, out: Tensor) -> None:
        whole = self.wide[: len(buffer)].copy_(buffer) if len(self.wide) else buffer
        total = self._part(whole)
        reduce_scatter_into(total, whole, self.in_node)
        own, part = total.chunk(self.across_nodes.size)[self.across_nodes.rank], self._part(buffer)
        if own.data_ptr() != out.data_ptr():
            out.copy_(own)
        if self.across_nodes.size > 1:
            if len(self.wide):
                part.copy_(total)  # rounded once
            self._exchange(part, out)

    def _gather_local(self, buffer: Tensor) -> Handle[Tensor]:
        return all_gather_into(buffer, self._part(buffer), self.in_node, wait=False)

    def _exchange(self, part: Tensor, out: Tensor) -> None:
        """Send this node's sums to the other nodes, rounded once. Add theirs to out, its unrounded sum."""
        if len(self.rounded):
            part = self.rounded[: len(part)].copy_(part)
        part.chunk(self.across_nodes.size)[self.across_nodes.rank].zero_()  # it is in `out`
        received = self.received[: len(part)]
        all_to_all_into(received, part, self.across_nodes)
        add_rounded(out, received.view(self.across_nodes.size, -1), self._sum_parts)


class SymmetricMemorySliceComm(ProcessGroupSliceComm):
    """Copies slices within a node by copy engines. The constructor is collective over mesh.in_node.

    nbytes: of all buffers together.
    """

    casts = False

    def __init__(self, nbytes: int, mesh: Mesh, dtype: torch.dtype, largest: int, overlap: bool, sum_parts: SumParts):
        super().__init__(mesh, dtype, largest, overlap, sum_parts)
        self._used, self.nbytes, self.name = 0, nbytes, "copies between GPUs"
        self._memory = SymmetricBuffer(self.in_node, nbytes, self.device)
        self._memory.own.zero_()
        self._copies, self._adds = torch.cuda.Stream(), torch.cuda.Stream()
        self._signals = torch.cuda.Stream(priority=-1)  # so a barrier does not wait for a product's end
        piece = min(PIECE_BYTES, nbytes // self.in_node.size) // 4 * 4  # bytes
        stage = self.in_node.size - 1, piece
        self._stages = [torch.empty(stage, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._added: list[torch.cuda.Event | None] = [None, None]  # the end of each stage's most recent addition

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        start, self._used = self._used, self._used + numel * dtype.itemsize
        return self._memory.own[start : self._used].view(dtype)

    def reduce(self, buffer: Tensor, out: Tensor) -> Handle[Tensor]:
        self._announce()
        part, size = self._part(buffer), self._stages[0].shape[1] // buffer.itemsize
        for node, own in enumerate(part.chunk(self.across_nodes.size)):
            total = out if node == self.across_nodes.rank else own
            for piece, to in zip(own.split(size), total.split(size)):
                added = self._add(piece, to)
        if self.across_nodes.size == 1:
            return Handle(out, [added.wait])
        return self._later(out, added.wait, partial(self._exchange, part, out))

    def reduced(self) -> None:
        self._added = [None, None]

    def _gather_local(self, buffer: Tensor) -> Handle[Tensor]:
        parts = buffer.chunk(self.in_node.size)
        self._announce()
        with torch.cuda.stream(self._copies):
            for owner in self._others():
                parts[owner].copy_(self._theirs(owner, parts[owner]))
            return Handle(buffer, [self._copies.record_event().wait])

    def _announce(self) -> None:
        """Order later copies after all work on the current streams of all ranks so far."""
        self._signals.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._signals):
            self._memory.barrier()
        self._copies.wait_stream(self._signals)

    def _add(self, piece: Tensor, out: Tensor) -> torch.cuda.Event:
        """Write piece + the other ranks' copies of it, at the same offset of their buffers, to out; return the end."""
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
            self._sum_parts(stage, piece, out)
        added = self._added[0] = self._adds.record_event()
        return added

    def _others(self) -> list[int]:
        """List the other ranks. Each rank begins with a different one."""
        return [(self.in_node.rank + i) % self.in_node.size for i in range(1, self.in_node.size)]

    def _theirs(self, rank: int, mine: Tensor) -> Tensor:
        """Return rank's view of the memory at the offset of `mine`."""
        return self._memory.view(rank, mine.shape, mine.dtype, int(mine.storage_offset()))


def choose_slice_comm(
    nbytes: int, mesh: Mesh, dtype: torch.dtype, largest: int, overlap: bool, sum_parts: SumParts
) -> ProcessGroupSliceComm:
    """Choose SymmetricMemorySliceComm if GPUs of a node read each other's memory. Collective over mesh.in_node.

    nbytes: of all buffers together. See ProcessGroupSliceComm for the others.
    """
    if overlap and nbytes and can_access_peers(mesh.in_node, mesh.device):  # a stage may train nothing
        return SymmetricMemorySliceComm(nbytes, mesh, dtype, largest, overlap, sum_parts)
    return ProcessGroupSliceComm(mesh, dtype, largest, overlap, sum_parts)
