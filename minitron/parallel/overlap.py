"""Matrix products beside tensor-parallel communication: one after the other, or hidden in each other.

Problem: under sequence parallelism a linear layer gathers its input, or scatters its output, and the GPU's matrix
units are idle meanwhile: a fifth of the step of a 70B block at tp 4. A collective on a stream of its own can run
beside an independent product, but it needs streaming multiprocessors, which a product does not give up before its end.
The idea: cut the product by rows and move one piece while another is computed. Over NVLink ranks read each other's
memory directly ("symmetric memory"), with copy engines, which take no multiprocessor:

    gather, then product, 4 ranks                     product, then reduce-scatter, seen by rank 0
    rank 0's GEMM   [x0 W][x1 W][x2 and x3 W]         GEMM    [for ranks 2 and 3][for 1][own]
    copies          [ x1 ][ x2 ][ x3 ]                copies                     [from 2][from 3][from 1]  then a sum

The own piece is first, or last, since nobody waits for it; the others double, so that few are needed: a product of
8 ranks has 4 pieces, which takes the host half as long as one for each rank, and large ones are more efficient.

In the backward pass there are two products, and each collective has one that does not depend on it; there the products
stay whole, which is more efficient, and the copies run beside them.

`Separate` is the plain twin, with collectives of the process group. It runs anywhere; with overlap=True collectives are
asynchronous where a product is independent of them. Both have the same four methods, in which

    parts     tensors that travel together (a payload's values and scales), each cut along dim 0 over the ranks
    consume   consume(rows, parts): a product of parts that belong to these rows of the gathered matrix
    produce   produce(rows, out): writes these rows of the partial sums to `out`

Left out: communication between nodes, which share no memory, and among 3 or 6 ranks: there `choose` takes Separate.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from minitron.comm.collectives import gather_start, reduce_scatter_start
from minitron.comm.mesh import Axis

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

    Two streams beside the current one: `side` for every second piece of a product, so that the end of one piece and the
    beginning of the next share the GPU, and `copies` for what travels.

    What is to be read by others is written to memory that they see, then a barrier says that it is there. Barriers are
    kernels, which a product that fills the GPU would hold up to its end: `copies` has the priority to get the first
    multiprocessor that a tile sets free. Only copies wait for barriers, so a rank that is ahead goes on with the
    products that it has the operands for.

    The memory has two halves, used in turn: whoever has passed the barrier of one use knows that the use before it is
    over on all ranks, so none has to end with a barrier too.

    The products of a layer take the GPU some milliseconds, and the host has no more than that to launch all of this:
    hence events that are used again, few changes of the stream, and views that are made once.
    """

    overlap = True

    def __init__(self, axis: Axis, device: torch.device, sum_parts: Callable[[Tensor], Tensor]):
        self.axis, self.device, self._sum_parts = axis, device, sum_parts
        self.side, self.copies = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        self._groups = _groups(axis.size, axis.rank)
        self._event = torch.cuda.Event()  # of what a stream waits for at once
        self._there = [torch.cuda.Event() for _ in self._groups[1:]]
        self._arrival = {use: torch.cuda.Event() for use in ("gather", "scatter")}
        self._halves: dict[str, list[_Half]] = {}
        self._pending: set[str] = set()

    def gather(self, parts: Parts) -> Callable[[], Parts]:
        parts, whole, memory = self._begin_gather(parts)
        with _On(self.copies, self._main()):
            self._publish(memory, parts)
            for group in reversed(self._groups):
                self._fetch(memory, group, whole)
        finish = self._finish("gather")

        def gathered() -> Parts:
            nonlocal parts  # until here they are read
            finish()
            parts = None
            return whole

        return gathered

    def gather_then(self, parts: Parts, consume: Consume, keep: bool) -> Parts | None:
        parts, whole, memory = self._begin_gather(parts)
        main, m, pieces = self._main(), parts[0].shape[0], [parts]  # the own piece first: it needs no copy
        self._after(self.side, main)
        with _On(self.copies, main):
            self._publish(memory, parts)
            for group, there in zip(self._groups[1:], self._there):
                pieces.append(self._fetch(memory, group, whole))
                there.record(self.copies)
            if keep:
                self._fetch(memory, self._groups[0], whole)
        for first, stream in enumerate((main, self.side)):
            with _On(stream, main):
                for i in range(first, len(pieces), 2):
                    if i > 0:
                        stream.wait_event(self._there[i - 1])
                    consume(self._groups[i].rows(m), pieces[i])
        self._after(main, self.side)
        self._after(main, self.copies)
        return whole if keep else None

    def then_scatter(self, produce: Produce, shape: tuple[int, int], like: Tensor) -> Tensor:
        main, m = self._main(), shape[0] // self.axis.size
        partial, received, memory = self._begin_scatter(shape, like)
        self._after(self.side, main)
        for i, group in enumerate(reversed(self._groups)):  # the own piece last: nobody waits for it
            stream, own = (main, self.side)[i % 2], i + 1 == len(self._groups)
            with _On(stream, main):
                rows = group.rows(m)
                produce(rows, received[self.axis.rank] if own else partial[rows])
            if not own:
                self._after(self.copies, stream)
                with _On(self.copies, main):
                    memory.barrier()  # everyone has produced as many pieces
                    self._receive(memory, group, received)
        self._after(main, self.side)
        self._after(main, self.copies)
        return self._sum_parts(received)

    def scatter(self, produce: Produce, shape: tuple[int, int], like: Tensor) -> Callable[[], Tensor]:
        """The product stays whole; its parts travel beside what the current stream does next."""
        partial, received, memory = self._begin_scatter(shape, like)
        main = self._main()
        produce(slice(None), partial)
        self._after(self.copies, main)
        with _On(self.copies, main):
            memory.barrier()
            for group in reversed(self._groups):
                self._receive(memory, group, received)
        finish = self._finish("scatter")

        def scattered() -> Tensor:
            finish()
            return self._sum_parts(received)

        return scattered

    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)  # without an index torch looks for the device first

    def _after(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """What is launched on `later` from here on comes after what `earlier` has."""
        self._event.record(earlier)
        later.wait_event(self._event)

    def _finish(self, use: str) -> Callable[[], None]:
        """Waits for the copies so far, not for those of another use that begins meanwhile."""
        there = self._arrival[use]
        there.record(self.copies)
        self._pending.add(use)

        def finish() -> None:
            self._main().wait_event(there)
            self._pending.remove(use)

        return finish

    def _begin_gather(self, parts: Parts) -> tuple[Parts, Parts, _Half]:
        """(the parts, space for everyone's, memory that all see)."""
        parts = [part.contiguous() for part in parts]
        whole = [part.new_empty(self.axis.size * part.shape[0], *part.shape[1:]) for part in parts]
        memory = self._half("gather", sum(map(_room, parts)))
        self._after(self.copies, self._main())
        return parts, whole, memory

    def _publish(self, memory: _Half, parts: Parts) -> None:
        for part, there in zip(parts, memory.views(self.axis.rank, parts)):
            there.copy_(part)
        memory.barrier()

    def _fetch(self, memory: _Half, group: _Group, whole: Parts) -> Parts:
        """These ranks' pieces of the whole."""
        rows = [out.shape[0] // self.axis.size for out in whole]
        for source in group.sources:
            mine = [out[source * m:(source + 1) * m] for out, m in zip(whole, rows)]
            for piece, theirs in zip(mine, memory.views(source, mine)):
                piece.copy_(theirs)
        return [out[group.rows(m)] for out, m in zip(whole, rows)]

    def _begin_scatter(self, shape: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor, _Half]:
        """(space [m, n] that others see, space [tp, m/tp, n] for what they have for this rank, memory that all see)."""
        memory = self._half("scatter", shape[0] * shape[1] * like.itemsize)
        received = like.new_empty(self.axis.size, shape[0] // self.axis.size, shape[1])
        return memory.view(self.axis.rank, shape, like.dtype, 0), received, memory

    def _receive(self, memory: _Half, group: _Group, received: Tensor) -> None:
        """What these ranks have for this one."""
        for source in group.sources:
            piece = received[source]
            piece.copy_(memory.view(source, piece.shape, piece.dtype, self.axis.rank * piece.numel()))

    def _half(self, use: str, need: int) -> _Half:
        """`need` bytes or more. Grows in the first microbatches of a run only."""
        assert use not in self._pending, f"a {use} begins before the one before it was finished"
        halves = self._halves.setdefault(use, [])
        if not halves or halves[0].nbytes < need:
            self.axis.activity.enter("rendezvous", self.axis, need)
            torch.cuda.synchronize()
            dist.barrier(self.axis.group)  # someone may still read the old memory
            buffers = [symmetric_memory.empty(need, dtype=torch.uint8, device=self.device) for _ in range(2)]
            halves[:] = [_Half(buffer, self.axis.group.group_name) for buffer in buffers]
            self.axis.activity.leave()
        halves.reverse()
        return halves[0]

    @property
    def nbytes(self) -> int:
        """Of shared memory on this rank, which is none of the caching allocator's."""
        return sum(half.nbytes for halves in self._halves.values() for half in halves)


class _On:
    """What is launched within is launched on `stream`. As torch.cuda.stream, which looks for the device each time."""

    def __init__(self, stream: torch.cuda.Stream, main: torch.cuda.Stream):
        self.stream, self.main = stream, main

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self.main)


class _Group(NamedTuple):
    """Ranks [first, first + len(sources)), in the order in which this rank reads from them."""

    first: int
    sources: list[int]

    def rows(self, m: int) -> slice:
        """Where their pieces of m rows are."""
        return slice(self.first * m, (self.first + len(self.sources)) * m)


def _groups(size: int, rank: int) -> list[_Group]:
    """Whose pieces are one product: the rank itself, its neighbour, the other two of four, the other four of eight ...

    Those in a rank's i-th group have the rank in their own i-th one, so they produce its piece before the same barrier
    as it does theirs. At any time everyone reads from another one.
    """
    blocks = [range(1)] + [range(2**i, 2 ** (i + 1)) for i in range(size.bit_length() - 1)]
    return [_Group(rank // len(block) * len(block) ^ block.start, [rank ^ i for i in block]) for block in blocks]


class _Half:
    """A buffer of every rank that all ranks see. Making it is collective."""

    def __init__(self, buffer: Tensor, group_name: str):
        self.nbytes, self._buffer = buffer.nbytes, buffer
        self._memory = symmetric_memory.rendezvous(buffer, group_name)
        self._views: dict[tuple, Tensor] = {}

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> Tensor:
        """Elements of the dtype from `start` on, in the buffer of `rank`."""
        key = rank, shape, dtype, start
        if key not in self._views:
            self._views[key] = self._memory.get_buffer(rank, shape, dtype, start)
        return self._views[key]

    def views(self, rank: int, parts: Parts) -> Parts:
        """Tensors like `parts`, one after another, in the buffer of `rank`."""
        starts = accumulate(map(_room, parts), initial=0)
        return [self.view(rank, part.shape, part.dtype, start // part.itemsize) for part, start in zip(parts, starts)]

    def barrier(self) -> None:
        """On the current stream: what it comes after has been done by all ranks."""
        self._memory.barrier(channel=0)


def _room(part: Tensor) -> int:
    """Bytes from the start of this part to that of the next."""
    return -(-part.nbytes // 256) * 256


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
    halves = axis.size & (axis.size - 1) == 0
    if overlap and halves and see_each_other(axis, device):
        return Pipelined(axis, device, ops.sum_parts)
    return Separate(axis, overlap)
