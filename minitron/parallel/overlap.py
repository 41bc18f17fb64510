"""Matrix products and tensor-parallel communication: one after the other, or at the same time.

Problem: under sequence parallelism a linear layer gathers its input, or scatters its output, and the GPU's matrix
units are idle meanwhile: a fifth of the step of a 70B block at tp 4. A collective on a stream of its own can run
beside an independent product, but it needs streaming multiprocessors, which a product does not release before its end.
The idea: cut the product by rows and move one piece while another is computed. Over NVLink ranks read each other's
memory with copy engines (comm/shared_memory.py), which take no multiprocessor:

    gather, then product, 4 ranks                     product, then reduce-scatter, seen by rank 0
    rank 0's GEMM   [x0 W][x1 W][x2 and x3 W]         GEMM    [for ranks 2 and 3][for 1][own]
    copies          [ x1 ][ x2 ][ x3 ]                copies                     [from 2][from 3][from 1]  then a sum

The rank's own piece needs no copy, so it is first in a gather and last in a scatter. The others have the rows of 1, 2,
4, ... ranks, so that there are few: 4 pieces for 8 ranks take the host half as long as 8 would, and large products are
more efficient.

In the backward pass there are two products, and each collective has one that does not depend on it. There the products
stay whole, which is more efficient, and the copies run beside them.

Three classes do it, with the same methods. In Megatron's words f comes before a column-parallel product, g after a
row-parallel one, and in the backward pass each takes the other's place:

    AllReduceComm           f: nothing, g: all-reduce                without sequence parallelism, and for one rank
    ProcessGroupComm        f: all-gather, g: reduce-scatter         by the process group, on any device
    SymmetricMemoryComm     the same, in pieces                      between GPUs that see each other's memory

    gather_matmul(x, product, weight, n)          f, then product(x, weight) [m, n]
    matmul_scatter(x, product, weight, n)         product(x, weight), then g
    start_gather(x), start_matmul_scatter(...)    begin f alone, or the second: .wait() returns the result

`product` is one of the two that a format has (kernels/gemm.py): product(x, weight, out) writes x W^T, or x W, to `out`.
Left out: copies between nodes, which share no memory, and among 3 or 6 ranks: there `choose` takes the process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.collectives import Handle, all_reduce_, gather_start, reduce_scatter_start
from minitron.comm.mesh import Axis
from minitron.comm.shared_memory import OnStream, SharedBuffer, see_each_other
from minitron.config.sizes import in_pieces
from minitron.kernels.gemm import Payload

T = TypeVar("T")
Product = Callable[..., Tensor]


class Arriving(Generic[T]):
    """A result under way: wait() waits for its handles and returns it."""

    __slots__ = ("result", "handles")

    def __init__(self, result: T, handles: Sequence[Handle] = ()):
        self.result, self.handles = result, handles

    def wait(self) -> T:
        """Wait for the result and return it; on a GPU the current stream waits, not the host."""
        for handle in self.handles:
            handle.wait()
        return self.result


class _Gathering(Arriving[Payload]):
    """The payloads of all ranks under way. wait() joins them, since a join reads the parts."""

    __slots__ = ("like", "parts")

    def __init__(self, like: Payload, parts: Arriving[Sequence[Tensor]]):
        self.like, self.parts = like, parts

    def wait(self) -> Payload:
        return self.like.of(self.parts.wait())


class AllReduceComm:
    """Without sequence parallelism, or for one rank: f changes nothing, g is an all-reduce over `axis`.

    overlap: all-reduces run beside what is independent of them. gathered: the ranks whose inputs f joins. nbytes: of
    memory that ranks share.
    """

    nbytes, sequence_parallel, gathered = 0, False, Axis.single()

    def __init__(self, axis: Axis, overlap: bool = True):
        self.axis, self.overlap = axis, overlap

    def begin_pass(self) -> None:
        """Begin as every pass does: nothing is left from the one before."""

    reset = begin_pass

    def gather_matmul(
        self, x: Payload, product: Product, weight: Tensor, n: int, *, keep: bool = False
    ) -> tuple[Tensor, Payload | None]:
        """Return product(x, weight) [m, n], and x if `keep`."""
        return product(x, weight), x if keep else None

    def matmul_scatter(self, x: Payload, product: Product, weight: Tensor, n: int) -> Tensor:
        """Return the sum over the ranks of product(x, weight) [m, n]."""
        y = product(x, weight)
        all_reduce_(y, self.axis)
        return y

    def start_gather(self, x: Payload) -> Arriving[Payload]:
        """Return x: there is nothing to gather."""
        return Arriving(x)

    def start_matmul_scatter(self, x: Payload, product: Product, weight: Tensor, n: int) -> Arriving[Tensor]:
        """Begin `matmul_scatter`."""
        y = product(x, weight)
        return Arriving(y, [all_reduce_(y, self.axis, wait=not self.overlap)])


class ProcessGroupComm:
    """Sequence parallelism by the process group's collectives; any device, any number of nodes.

    overlap: collectives run beside the product that is independent of them.
    """

    nbytes, sequence_parallel = 0, True

    def __init__(self, axis: Axis, overlap: bool = True):
        self.axis = self.gathered = axis
        self.overlap = overlap

    def begin_pass(self) -> None:
        """Begin as every pass does: nothing is left from the one before."""

    reset = begin_pass

    def gather_matmul(
        self, x: Payload, product: Product, weight: Tensor, n: int, *, keep: bool = False
    ) -> tuple[Tensor, Payload | None]:
        """Return product(x of all ranks, weight) [tp m, n], and x of all ranks if it is to be kept."""
        whole = self.start_gather(x).wait()
        return product(whole, weight), whole if keep else None

    def matmul_scatter(self, x: Payload, product: Product, weight: Tensor, n: int) -> Tensor:
        """Return this rank's rows [m/tp, n] of the sum over the ranks of product(x, weight)."""
        result, handle = reduce_scatter_start(product(x, weight), self.axis)
        handle.wait()
        return result

    def start_gather(self, x: Payload) -> Arriving[Payload]:
        """Begin to gather the payloads of all ranks."""
        parts, handles = zip(*(gather_start(part, self.axis) for part in x.parts()))
        return _Gathering(x, self._started(parts, handles))

    def start_matmul_scatter(self, x: Payload, product: Product, weight: Tensor, n: int) -> Arriving[Tensor]:
        """Begin `matmul_scatter`."""
        result, handle = reduce_scatter_start(product(x, weight), self.axis)
        return self._started(result, [handle])

    def _started(self, result: T, handles: Sequence[Handle]) -> Arriving[T]:
        arriving = Arriving(result, handles)
        if not self.overlap:
            arriving.wait()
            arriving.handles = ()
        return arriving


class SymmetricMemoryComm:
    """Sequence parallelism by copies between the GPUs of one node. Collective over the axis, as every method is.

    There are two streams beside the current one: `side` for every second piece of a product, so that the end of one
    piece and the beginning of the next share the GPU, and `copies` for what travels.

    A rank writes to symmetric memory; then all ranks pass a barrier. A barrier
    is a kernel, and a product that fills the GPU would delay it to the product's end: so `copies` has priority, and
    gets the first multiprocessor that becomes free. Only copies wait for barriers, so a rank that is ahead of others
    can go on with the products whose operands it has.

    There are two buffers for gathers and two for scatters, taken in turn. A rank that has passed the barrier of one
    knows that all ranks have finished with the other buffer, so that no second barrier is needed at the end.

    The products of a layer take the GPU some milliseconds, and the host must launch all of this in that time: hence
    events and views that are made once, and few changes of the stream. dtype: of what products return.
    """

    sequence_parallel = True

    def __init__(self, axis: Axis, device: torch.device, dtype: torch.dtype, sum_parts: Callable[[Tensor], Tensor]):
        self.axis = self.gathered = axis
        self.device, self.dtype, self._sum_parts = device, dtype, sum_parts
        self.side, self.copies = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        self._groups = _groups(axis.size, axis.rank)
        self._event = torch.cuda.Event()  # recorded and waited for in one go, so that one is enough
        self._fetched = [torch.cuda.Event() for _ in self._groups[1:]]
        self._arrival = {use: torch.cuda.Event() for use in ("gather", "scatter")}
        self._buffers: dict[str, list[SharedBuffer]] = {}
        self._pending: set[str] = set()
        self._turns: dict[str, int] = {}  # which of the two buffers was the last

    def begin_pass(self) -> None:
        """Begin with the first of two buffers, as a recorded pass does each time it is replayed."""
        if 0 in self._turns.values():  # the pass before used it last: others may still read it
            self._buffers[next(iter(self._buffers))][0].barrier()
        self.reset()

    def reset(self) -> None:
        """Drop the state of an unfinished graph capture: ranks may have come to different places in it."""
        self._turns.clear()
        self._pending.clear()

    def gather_matmul(
        self, x: Payload, product: Product, weight: Tensor, n: int, *, keep: bool = False
    ) -> tuple[Tensor, Payload | None]:
        """Return product(x of all ranks, weight) [tp m, n], and x of all ranks if it is to be kept."""
        m = x.rowwise.shape[0]
        y = weight.new_empty(self.axis.size * m, n, dtype=self.dtype)
        self.axis.activity.pause()
        parts, whole, memory = self._begin_gather(x)
        main, pieces = self._main(), [parts]  # the own piece is first: it needs no copy
        self._after(self.side, main)
        with OnStream(self.copies, main):
            self._publish(memory, parts)
            for group, fetched in zip(self._groups[1:], self._fetched):
                pieces.append(self._fetch(memory, group, whole))
                fetched.record(self.copies)
            if keep:
                self._fetch(memory, self._groups[0], whole)
        for first, stream in enumerate((main, self.side)):
            with OnStream(stream, main):
                for i in range(first, len(pieces), 2):
                    if i > 0:
                        stream.wait_event(self._fetched[i - 1])
                    product(x.of(pieces[i]), weight, y[self._groups[i].rows(m)])
        self._after(main, self.side)
        self._after(main, self.copies)
        self.axis.activity.resume()
        return y, x.of(whole) if keep else None

    def matmul_scatter(self, x: Payload, product: Product, weight: Tensor, n: int) -> Tensor:
        """Return this rank's rows [m/tp, n] of the sum over the ranks of product(x, weight)."""
        main, m = self._main(), x.rowwise.shape[0] // self.axis.size
        self.axis.activity.pause()
        partial, received, memory = self._begin_scatter(x.rowwise, n)
        self._after(self.side, main)
        for i, group in enumerate(reversed(self._groups)):  # the own piece is last: no rank waits for it
            stream, own = (main, self.side)[i % 2], i + 1 == len(self._groups)
            with OnStream(stream, main):
                rows = group.rows(m)
                product(x.cut(rows), weight, received[self.axis.rank] if own else partial[rows])
            if not own:
                self._after(self.copies, stream)
                with OnStream(self.copies, main):
                    memory.barrier()  # all ranks have produced this piece
                    self._receive(memory, group, received)
        self._after(main, self.side)
        self._after(main, self.copies)
        self.axis.activity.resume()
        return self._sum_parts(received)

    def start_gather(self, x: Payload) -> Arriving[Payload]:
        """Begin to gather the payloads of all ranks."""
        parts, whole, memory = self._begin_gather(x)
        with OnStream(self.copies, self._main()):
            self._publish(memory, parts)
            for group in reversed(self._groups):
                self._fetch(memory, group, whole)
        return _Gathering(x, _Copied(self, "gather", whole, parts))

    def start_matmul_scatter(self, x: Payload, product: Product, weight: Tensor, n: int) -> Arriving[Tensor]:
        """Launch the whole product; its parts travel beside what the current stream does next."""
        partial, received, memory = self._begin_scatter(x.rowwise, n)
        main = self._main()
        product(x, weight, partial)
        self._after(self.copies, main)
        with OnStream(self.copies, main):
            memory.barrier()
            for group in reversed(self._groups):
                self._receive(memory, group, received)
        return _Scattered(self, "scatter", received)

    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)  # without an index torch looks for the device first

    def _after(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """Let `later` wait for what has been launched on `earlier` so far."""
        self._event.record(earlier)
        later.wait_event(self._event)

    def _begin_gather(self, x: Payload) -> tuple[list[Tensor], list[Tensor], SharedBuffer]:
        """Return the parts of x, space for the parts of all ranks, and memory that all see."""
        parts = [part.contiguous() for part in x.parts()]
        whole = [part.new_empty(self.axis.size * part.shape[0], *part.shape[1:]) for part in parts]
        memory = self._memory("gather", sum(map(_room, parts)))
        self._after(self.copies, self._main())
        return parts, whole, memory

    def _publish(self, memory: SharedBuffer, parts: list[Tensor]) -> None:
        """Write this rank's parts to memory that all see, and tell the others."""
        for part, place in zip(parts, _places(memory, self.axis.rank, parts)):
            place.copy_(part)
        memory.barrier()

    def _fetch(self, memory: SharedBuffer, group: _Group, whole: list[Tensor]) -> list[Tensor]:
        """Copy these ranks' pieces into `whole`; return them."""
        rows = [out.shape[0] // self.axis.size for out in whole]
        for source in group.sources:
            mine = [out[source * m : (source + 1) * m] for out, m in zip(whole, rows)]
            for piece, theirs in zip(mine, _places(memory, source, mine)):
                piece.copy_(theirs)
        return [out[group.rows(m)] for out, m in zip(whole, rows)]

    def _begin_scatter(self, x: Tensor, n: int) -> tuple[Tensor, Tensor, SharedBuffer]:
        """Return space [m, n] that all see, space [tp, m/tp, n] for what they have for this rank, and the memory."""
        m = x.shape[0]
        memory = self._memory("scatter", m * n * self.dtype.itemsize)
        received = x.new_empty(self.axis.size, m // self.axis.size, n, dtype=self.dtype)
        return memory.view(self.axis.rank, torch.Size((m, n)), self.dtype, 0), received, memory

    def _receive(self, memory: SharedBuffer, group: _Group, received: Tensor) -> None:
        """Copy the rows that these ranks have computed for this one."""
        for source in group.sources:
            piece = received[source]
            piece.copy_(memory.view(source, piece.shape, piece.dtype, self.axis.rank * piece.numel()))

    def _memory(self, use: str, need: int) -> SharedBuffer:
        """Return the buffer whose turn it is, of `need` bytes or more. It grows in a run's first microbatches only."""
        assert use not in self._pending, f"a {use} begins before the one before it was finished"
        buffers = self._buffers.setdefault(use, [])
        if not buffers or buffers[0].nbytes < need:
            self.axis.activity.enter("rendezvous", self.axis, need)
            torch.cuda.synchronize()
            dist.barrier(self.axis.group)  # another rank may still read the old memory
            self.axis.activity.leave()
            buffers[:] = [SharedBuffer(self.axis, need, self.device) for _ in range(2)]
        turn = self._turns[use] = 1 - self._turns.get(use, 1)
        return buffers[turn]

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory on this rank, which the caching allocator does not count."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)


class _Copied(Arriving[T]):
    """A result that arrives with the copies launched so far. parts: what they read, kept alive until then."""

    __slots__ = ("comm", "use", "parts")

    def __init__(self, comm: SymmetricMemoryComm, use: str, result: T, parts: Sequence[Tensor] = ()):
        self.comm, self.use, self.result, self.parts = comm, use, result, parts
        comm._arrival[use].record(comm.copies)
        comm._pending.add(use)

    def wait(self) -> T:
        self.comm.axis.activity.pause()
        self.comm._main().wait_event(self.comm._arrival[self.use])
        self.comm.axis.activity.resume()
        self.comm._pending.remove(self.use)
        self.parts = ()
        return self.result


class _Scattered(_Copied[Tensor]):
    """The other ranks' partial sums under way; wait() adds them up."""

    __slots__ = ()

    def wait(self) -> Tensor:
        return self.comm._sum_parts(super().wait())


class _Group(NamedTuple):
    """Ranks first ... first + len(sources) - 1; sources: the same, in the order in which this rank reads from them."""

    first: int
    sources: list[int]

    def rows(self, m: int) -> slice:
        """Return the rows that these ranks have, m each."""
        return slice(self.first * m, (self.first + len(self.sources)) * m)


def _groups(size: int, rank: int) -> list[_Group]:
    """Group the ranks whose rows one product has: the rank itself, its neighbour, the other 2 of 4, the other 4 of 8.

    If rank a is in the i-th group of rank b, then b is in the i-th group of a: so each produces the other's piece
    before the same barrier. At any time all ranks read from different ones.
    """
    blocks = [range(1)] + [range(2**i, 2 ** (i + 1)) for i in range(size.bit_length() - 1)]
    return [_Group(rank // len(block) * len(block) ^ block.start, [rank ^ i for i in block]) for block in blocks]


def _places(memory: SharedBuffer, rank: int, parts: list[Tensor]) -> list[Tensor]:
    """Return views like `parts`, one after another, in the buffer of `rank`."""
    starts = accumulate(map(_room, parts), initial=0)
    return [memory.view(rank, part.shape, part.dtype, start // part.itemsize) for part, start in zip(parts, starts)]


def _room(part: Tensor) -> int:
    """Return the bytes that a part takes in a buffer, rounded up to where the next may start."""
    return -(-part.nbytes // 256) * 256


LinearComm = AllReduceComm | ProcessGroupComm | SymmetricMemoryComm


def choose(
    axis: Axis,
    device: torch.device,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool,
    overlap: bool,
    sum_parts: Callable[[Tensor], Tensor],
) -> LinearComm:
    """Choose how linear layers communicate over `axis`: the fastest way that can run. Collective over the axis.

    dtype: of what products return.
    """
    if axis.size == 1 or not sequence_parallel:
        return AllReduceComm(axis, overlap)
    if in_pieces(axis.size, sequence_parallel, overlap) and see_each_other(axis, device):
        return SymmetricMemoryComm(axis, device, dtype, sum_parts)
    return ProcessGroupComm(axis, overlap)
