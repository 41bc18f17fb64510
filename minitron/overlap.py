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
from types import ModuleType

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

    nbytes = 0

    def __init__(self, axis: Axis, overlap: bool = True):
        self.axis, self.overlap = axis, overlap

    def gather(self, parts: Parts) -> Callable[[], Parts]:
        """Begin to gather; the function returned waits for the result. Call it before the next gather."""
        return self._finish([gather_start(part, self.axis) for part in parts])

    def gather_then(self, parts: Parts, consume: Consume, keep: bool) -> Parts | None:
        """Gather and consume; returns what was gathered if it is to be kept."""
        whole = self.gather(parts)()
        consume(slice(None), whole)
        return whole if keep else None

    def then_scatter(self, produce: Produce, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Produce partial sums [m, n] in like's dtype and add them up: this rank's rows of the sum [m/tp, n]."""
        return self.scatter(produce, shape, like)()

    def scatter(self, produce: Produce, shape: tuple[int, int], like: Tensor) -> Callable[[], Tensor]:
        """Produce, and begin to add up; the function returned waits for the result. Call it before the next one."""
        partial = like.new_empty(shape)
        produce(slice(None), partial)
        finish = self._finish([reduce_scatter_start(partial, self.axis)])
        return lambda: finish()[0]

    def _finish(self, started: list) -> Callable[[], Parts]:
        def finish() -> Parts:
            for _, handle in handles:
                handle.wait()
            return [result for result, _ in started]

        handles = started
        if not self.overlap:
            finish()
            handles = []
        return finish


class Pipelined:
    """Symmetric memory between the GPUs of one node. Collective over the axis, as every method is.

    Three streams beside the current one: `copies` for what travels, `side` for every second piece of a product, so that
    the end of one piece and the beginning of the next share the GPU, and `signals`.

    What is to be read by others is written to memory that they see, then a barrier says that it is there. Barriers are
    kernels, which a product that fills the GPU would hold up to its end: `signals` has the priority to get the first
    multiprocessor that a tile sets free. Only copies wait for barriers, so a rank that is ahead goes on with the
    products that it has the operands for.

    The memory has two halves, used in turn: whoever has passed the barrier of one use knows that the use before it is
    over on all ranks, so none has to end with a barrier too.
    """

    overlap = True

    def __init__(self, axis: Axis, sum_parts: Callable[[Tensor], Tensor]):
        self.axis, self._sum_parts = axis, sum_parts
        self.side, self.copies, self.signals = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        self._halves: dict[str, list] = {}
        self._pending: set[str] = set()

    def gather(self, parts: Parts) -> Callable[[], Parts]:
        parts, whole, memory = self._publish(parts)
        self._pending.add("gather")
        with torch.cuda.stream(self.copies):
            for source in self._ring(1):
                self._fetch(memory, source, whole)
        there = self.copies.record_event()

        def finish() -> Parts:
            nonlocal parts  # until here they are read
            torch.cuda.current_stream().wait_event(there)  # not for a scatter that has begun meanwhile
            self._pending.remove("gather")
            parts = None
            return whole

        return finish

    def gather_then(self, parts: Parts, consume: Consume, keep: bool) -> Parts | None:
        parts, whole, memory = self._publish(parts)
        main, m = torch.cuda.current_stream(), parts[0].shape[0]
        self.side.wait_stream(main)
        for i, source in enumerate(self._ring(0)):  # the own piece first: it needs no copy
            stream, pieces = (main, self.side)[i % 2], parts
            if i > 0:
                with torch.cuda.stream(self.copies):
                    pieces = self._fetch(memory, source, whole)
                stream.wait_event(self.copies.record_event())
            with torch.cuda.stream(stream):
                consume(slice(source * m, (source + 1) * m), pieces)
        if keep:
            with torch.cuda.stream(self.copies):
                self._fetch(memory, self.axis.rank, whole)
        main.wait_stream(self.side)
        main.wait_stream(self.copies)
        return whole if keep else None

    def then_scatter(self, produce: Produce, shape: tuple[int, int], like: Tensor) -> Tensor:
        main, m = torch.cuda.current_stream(), shape[0] // self.axis.size
        partial, received, memory = self._partial_sums(shape, like)
        self.side.wait_stream(main)
        for i, target in enumerate(self._ring(1)):  # the own piece last: nobody waits for it
            stream, own = (main, self.side)[i % 2], target == self.axis.rank
            with torch.cuda.stream(stream):
                produce(slice(target * m, (target + 1) * m), received[target] if own else partial[target])
            if not own:
                self._announce(memory, stream)  # everyone has produced as many pieces
                with torch.cuda.stream(self.copies):
                    self._receive(memory, (2 * self.axis.rank - target) % self.axis.size, received)
        main.wait_stream(self.side)
        main.wait_stream(self.copies)
        return self._sum_parts(received)

    def scatter(self, produce: Produce, shape: tuple[int, int], like: Tensor) -> Callable[[], Tensor]:
        """The product stays whole; its parts travel beside what the current stream does next."""
        partial, received, memory = self._partial_sums(shape, like)
        self._pending.add("scatter")
        produce(slice(None), partial.flatten(0, 1))
        self._announce(memory, torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for source in self._ring(1):
                self._receive(memory, source, received)
        there = self.copies.record_event()

        def finish() -> Tensor:
            torch.cuda.current_stream().wait_event(there)
            self._pending.remove("scatter")
            return self._sum_parts(received)

        return finish

    def _ring(self, first: int) -> list[int]:
        """All ranks from the `first` after this one on: at any time everyone reads from another one."""
        return [(self.axis.rank + step) % self.axis.size for step in range(first, first + self.axis.size)]

    def _announce(self, memory, stream: torch.cuda.Stream) -> None:
        """Copies from here on find what all ranks have written on `stream` so far."""
        self.signals.wait_stream(stream)
        with torch.cuda.stream(self.signals):
            memory.barrier(channel=0)
        self.copies.wait_stream(self.signals)

    def _publish(self, parts: Parts):
        """Parts where others see them: (the parts, space for everyone's, the handle to everyone's)."""
        parts = [part.contiguous() for part in parts]
        whole = [part.new_empty(self.axis.size * part.shape[0], *part.shape[1:]) for part in parts]
        _, memory = self._half("gather", sum(map(_room, parts)), parts[0].device)
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for mine, part in zip(_views(memory, self.axis.rank, parts), parts):
                mine.copy_(part)
        self._announce(memory, self.copies)
        return parts, whole, memory

    def _fetch(self, memory, source: int, whole: Parts) -> Parts:
        pieces = [out.chunk(self.axis.size)[source] for out in whole]
        for piece, theirs in zip(pieces, _views(memory, source, pieces)):
            piece.copy_(theirs)
        return pieces

    def _partial_sums(self, shape: tuple[int, int], like: Tensor):
        """(space that others see, space for what they have for this rank, both [tp, m/tp, n]; handle to everyone's)."""
        shape, size = (self.axis.size, shape[0] // self.axis.size, shape[1]), shape[0] * shape[1] * like.itemsize
        buffer, memory = self._half("scatter", size, like.device)
        return buffer[:size].view(like.dtype).view(shape), like.new_empty(shape), memory

    def _receive(self, memory, source: int, received: Tensor) -> None:
        """What `source` has for this rank."""
        piece = received[source]
        piece.copy_(memory.get_buffer(source, piece.shape, piece.dtype, self.axis.rank * piece.numel()))

    def _half(self, use: str, need: int, device: torch.device):
        """(buffer, handle to everyone's) of `need` bytes or more. Grows in the first microbatches of a run only."""
        assert use not in self._pending, f"a {use} begins before the one before it was finished"
        halves = self._halves.setdefault(use, [])
        if not halves or halves[0][0].nbytes < need:
            self.axis.activity.enter("rendezvous", self.axis, need)
            torch.cuda.synchronize()
            dist.barrier(self.axis.group)  # someone may still read the old memory
            buffers = [symmetric_memory.empty(need, dtype=torch.uint8, device=device) for _ in range(2)]
            halves[:] = [(buffer, symmetric_memory.rendezvous(buffer, self.axis.group.group_name))
                         for buffer in buffers]
            self.axis.activity.leave()
        halves.reverse()
        return halves[0]

    @property
    def nbytes(self) -> int:
        """Of shared memory on this rank, which is none of the caching allocator's."""
        return sum(buffer.nbytes for halves in self._halves.values() for buffer, _ in halves)


def _room(part: Tensor) -> int:
    """Bytes from the start of this part to that of the next."""
    return -(-part.nbytes // 256) * 256


def _views(memory, rank: int, parts: Parts) -> Parts:
    """Tensors like `parts`, one after another, in the memory of `rank`."""
    views, start = [], 0
    for part in parts:
        views.append(memory.get_buffer(rank, part.shape, part.dtype, start // part.itemsize))
        start += _room(part)
    return views


def see_each_other(axis: Axis, device: torch.device) -> bool:
    """Whether these are GPUs of one node that can read each other's memory. Collective over the axis."""
    if axis.size == 1 or axis.group is None or device.type != "cuda":
        return False
    places: list = [None] * axis.size
    dist.all_gather_object(places, (socket.gethostname(), device.index), group=axis.group)
    here = places[axis.rank]
    near = len(set(places)) == axis.size and all(
        host == here[0] and (gpu == here[1] or torch.cuda.can_device_access_peer(here[1], gpu)) for host, gpu in places)
    every = torch.tensor(near, dtype=torch.int32, device=device)
    dist.all_reduce(every, op=dist.ReduceOp.MIN, group=axis.group)
    return bool(every)


def choose(axis: Axis, device: torch.device, overlap: bool, ops: ModuleType) -> Separate | Pipelined:
    """Pipelined where it can be, if communication is to be hidden. Collective over the axis.

    ops: what has the `sum_parts` to use.
    """
    if overlap and see_each_other(axis, device):
        return Pipelined(axis, ops.sum_parts)
    return Separate(axis, overlap)
