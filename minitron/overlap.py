"""Matrix products beside tensor-parallel communication: one after the other, or hidden in each other.

Problem: under sequence parallelism a linear layer gathers its input, or scatters its output, and the GPU's matrix
units are idle meanwhile: a fifth of the step of a 70B block at tp 4. A collective on a stream of its own can run
beside an independent product, but it needs streaming multiprocessors, which a product does not give up before its end.
The idea: cut the product by rows, one piece for each rank, and move one piece while another is computed. Over NVLink
ranks read each other's memory directly ("symmetric memory"), with copy engines, which take no multiprocessor:

    gather, then product, 4 ranks                     product, then reduce-scatter, seen by rank 0
    rank 0's GEMM   [x0 W][x1 W][x2 W][x3 W]          GEMM    [for rank 1][for 2][for 3][own]
    copies          [ x1 ][ x2 ][ x3 ]                copies              [from 3][from 2][from 1]  then a sum of four

In the backward pass there are two products, and each collective has one that does not depend on it; there the products
stay whole, which is more efficient, and the copies run beside them.

`Separate` is the plain twin, with collectives of the process group. It runs anywhere; with overlap=True collectives are
asynchronous where a product is independent of them. Both have the same four methods, in which

    parts     tensors that travel together (a payload's values and scales), each cut along dim 0 over the ranks
    consume   consume(rows, parts): a product of parts that belong to these rows of the gathered matrix
    produce   produce(rows, out): writes these rows of the partial sums to `out`

Left out: communication between nodes, which share no memory: there `choose` takes Separate.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from minitron.collectives import gather_start, reduce_scatter_start
from minitron.mesh import Axis

Parts = list[Tensor]
Consume = Callable[[slice, Parts], None]
Produce = Callable[[slice, Tensor], None]


class Separate:
    """Collectives by the process group; any device, any number of nodes."""

    def __init__(self, axis: Axis, overlap: bool = True):
        self.axis, self.overlap = axis, overlap

    def gather(self, parts: Parts) -> Callable[[], Parts]:
        """Begin to gather; the function returned waits for the result."""
        started = [gather_start(part, self.axis) for part in parts]

        def finish() -> Parts:
            for _, handle in started:
                handle.wait()
            return [whole for whole, _ in started]

        if self.overlap:
            return finish
        whole = finish()
        return lambda: whole

    def gather_then(self, parts: Parts, consume: Consume) -> Parts:
        """Gather and consume; returns what was gathered."""
        whole = self.gather(parts)()
        consume(slice(None), whole)
        return whole

    def then_scatter(self, produce: Produce, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Produce partial sums [m, n] in like's dtype and add them up: this rank's rows of the sum [m/tp, n]."""
        return self.scatter(produce, shape, like)()

    def scatter(self, produce: Produce, shape: tuple[int, int], like: Tensor) -> Callable[[], Tensor]:
        """Produce partial sums and begin to add them up; the function returned waits for the result."""
        partial = like.new_empty(shape)
        produce(slice(None), partial)
        y, handle = reduce_scatter_start(partial, self.axis)

        def finish() -> Tensor:
            handle.wait()
            return y

        if not self.overlap:
            handle.wait()
            return lambda: y
        return finish


class Pipelined:
    """Symmetric memory between the GPUs of one node. Collective over the axis, as every method is."""

    def __init__(self, axis: Axis):
        self.axis, self.name = axis, axis.group.group_name
        self.stream = torch.cuda.Stream()
        self._memory = {}  # of each method: (this rank's buffer, the handle to everyone's)

    def gather(self, parts: Parts) -> Callable[[], Parts]:
        """By copy engines, beside what the current stream does next. Keep `parts` until the result is there."""
        parts, whole = self._prepare(parts)
        _, memory = self._room("gather", sum(part.nbytes for part in parts), parts[0].device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for mine, part in zip(_views(memory, self.axis.rank, parts), parts):
                mine.copy_(part)
            memory.barrier(channel=0)
            for source in self._others_first():
                for out, theirs in zip(whole, _views(memory, source, parts)):
                    out.chunk(self.axis.size)[source].copy_(theirs)
            memory.barrier(channel=1)  # the next gather overwrites what others read in this one

        def finish() -> Parts:
            torch.cuda.current_stream().wait_stream(self.stream)
            return whole

        return finish

    def gather_then(self, parts: Parts, consume: Consume) -> Parts:
        parts, whole = self._prepare(parts)
        m = parts[0].shape[0]
        symmetric_memory._pipelined_multi_all_gather_and_consume(
            parts, lambda shards, rank: consume(slice(rank * m, (rank + 1) * m), shards), whole, self.name)
        return whole

    def then_scatter(self, produce: Produce, shape: tuple[int, int], like: Tensor) -> Tensor:
        partial, m = like.new_empty(shape), shape[0] // self.axis.size
        symmetric_memory._pipelined_produce_and_all2all(
            lambda rank, out: produce(slice(rank * m, (rank + 1) * m), out), partial, self.name)
        return partial.unflatten(0, (self.axis.size, m)).sum(0)

    def scatter(self, produce: Produce, shape: tuple[int, int], like: Tensor) -> Callable[[], Tensor]:
        """The partial sums are produced in one piece, and travel beside what the current stream does next."""
        count, m = self.axis.size, shape[0] // self.axis.size
        buffer, memory = self._room("scatter", shape[0] * shape[1] * like.itemsize, like.device)
        partial = buffer[:shape[0] * shape[1] * like.itemsize].view(like.dtype).view(shape)
        produce(slice(None), partial)
        received = like.new_empty(count, m, shape[1])
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            memory.barrier(channel=0)
            for source in self._others_first():
                mine = self.axis.rank * m * shape[1]
                received[source].copy_(memory.get_buffer(source, received.shape[1:], like.dtype, mine))
            memory.barrier(channel=1)  # the next product overwrites what others read

        def finish() -> Tensor:
            torch.cuda.current_stream().wait_stream(self.stream)
            return received.sum(0)

        return finish

    def _others_first(self) -> list[int]:
        """Ranks in an order in which at any time everyone reads from another one."""
        return [(self.axis.rank + step) % self.axis.size for step in range(1, self.axis.size + 1)]

    def _prepare(self, parts: Parts) -> tuple[Parts, Parts]:
        parts = [part.contiguous() for part in parts]
        return parts, [part.new_empty(self.axis.size * part.shape[0], *part.shape[1:]) for part in parts]

    def _room(self, method: str, need: int, device: torch.device):
        """The method's memory on all ranks, of `need` bytes or more; it grows in a run's first microbatch only."""
        if method not in self._memory or self._memory[method][0].nbytes < need:
            torch.cuda.synchronize()
            dist.barrier(self.axis.group)  # someone may still read the old memory
            buffer = symmetric_memory.empty(need, dtype=torch.uint8, device=device)
            self._memory[method] = buffer, symmetric_memory.rendezvous(buffer, self.name)
        return self._memory[method]


def _views(memory, rank: int, parts: Parts) -> Parts:
    """Tensors like `parts`, one after another, in the memory of `rank`."""
    views, start = [], 0
    for part in parts:
        assert start % part.itemsize == 0
        views.append(memory.get_buffer(rank, part.shape, part.dtype, start // part.itemsize))
        start += part.nbytes
    return views


def choose(axis: Axis, device: torch.device, overlap: bool) -> Separate | Pipelined:
    """Pipelined between GPUs of one node that can read each other's memory. Collective over the axis."""
    if not overlap or axis.size == 1 or axis.group is None or device.type != "cuda":
        return Separate(axis, overlap)
    places: list = [None] * axis.size
    dist.all_gather_object(places, (socket.gethostname(), device.index), group=axis.group)
    here = places[axis.rank]
    near = all(host == here[0] and (gpu == here[1] or torch.cuda.can_device_access_peer(here[1], gpu))
               for host, gpu in places)
    every = torch.tensor(near, dtype=torch.int32, device=device)
    dist.all_reduce(every, op=dist.ReduceOp.MIN, group=axis.group)
    return Pipelined(axis) if every.item() else Separate(axis)
