"""Matrix products and tensor-parallel communication: one after the other, or at the same time.

Problem: under sequence parallelism a linear layer gathers its input, or scatters its output. The GPU's matrix units are
idle meanwhile. A collective could run beside a product, but it needs SMs, which a product does not release before its
end. The idea: cut the product by rows, and move one piece while another is computed. Over NVLink ranks read each
other's memory with copy engines (comm/shared_memory.py), without SMs:

    gather, then product, 4 ranks                     product, then reduce-scatter, on rank 0
    rank 0's GEMM   [x0 W][x1 W][ x2 W, x3 W ]        GEMM    [for ranks 2 and 3][for 1][own]
    copies          [ x1 ][ x2 ][ x3 ]                copies                     [from 2][from 3][from 1]  then a sum

The rank's own piece needs no copy, so it is first in a gather and last in a scatter. The other pieces have the rows of
1, 2, 4, ... ranks: few large products take less host time and run faster than many small ones. In the backward pass
each collective has a product that does not depend on it. There the products stay whole and the copies run beside them.
Left out: copies between nodes, which share no memory, and among 3 or 6 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.collectives import all_reduce_, gather_start, reduce_scatter_start
from minitron.comm.handle import Handle
from minitron.comm.mesh import Axis
from minitron.comm.shared_memory import OnStream, SymmetricBuffer
from minitron.kernels.gemm import Payload, Product

T = TypeVar("T")


class ProcessGroupComm:
    """Products with their communication by the process group: any device, any number of nodes, or one rank.

    f is the communication before a column-parallel product: an all-gather under sequence parallelism, else nothing. g
    follows a row-parallel product: a reduce-scatter, or else an all-reduce. overlap: collectives run beside the product
    that is independent of them. gather_axis: the ranks whose inputs f gathers. nbytes: of symmetric memory. name: for
    the log.
    """

    nbytes = 0

    def __init__(self, axis: Axis, sequence_parallel: bool = True, overlap: bool = True):
        self.axis, self.overlap, self.sequence_parallel = axis, overlap, sequence_parallel and axis.size > 1
        self.gather_axis = axis if self.sequence_parallel else Axis.single()
        self.name = "collectives" if axis.size > 1 else "one rank"

    def begin_pass(self) -> None:
        """Prepare a pass. The process group has no state to reset."""

    def reset(self) -> None:
        """Drop the state of an unfinished recording. Ranks may have stopped at different places in it."""

    def gather_matmul(self, x: Payload, product: Product, n: int, keep: bool = False) -> tuple[Tensor, Payload | None]:
        """Return product(f(x)), and f(x) if `keep`, else None.

        x [m, k] -> [tp m, n] and [tp m, k] under sequence parallelism, else [m, n] and [m, k].
        """
        whole = self.start_gather(x).wait()
        return product(whole), whole if keep else None

    def matmul_scatter(self, x: Payload, product: Product, n: int) -> Tensor:
        """Return g(product(x)): x [m, k] -> [m/tp, n]; [m, n] without sequence parallelism."""
        return self.start_scatter(product(x)).wait()

    def start_gather(self, x: Payload) -> Handle[Payload]:
        """Start f of x."""
        if self.gather_axis.size == 1:
            return Handle(x)
        parts = [gather_start(part, self.axis) for part in x.parts()]
        return self._wait_unless_overlapped(Handle(parts, finish=lambda parts: x.of([part.wait() for part in parts])))

    def start_matmul_scatter(self, x: Payload, product: Product, n: int) -> Handle[Tensor]:
        """Launch the product and start g of it."""
        return self.start_scatter(product(x))

    def start_scatter(self, y: Tensor) -> Handle[Tensor]:
        """Start g of y. It may overwrite y with the result."""
        if self.sequence_parallel:
            return self._wait_unless_overlapped(reduce_scatter_start(y, self.axis))
        return self._wait_unless_overlapped(all_reduce_(y, self.axis, wait=False))

    def _wait_unless_overlapped(self, handle: Handle[T]) -> Handle[T]:
        if not self.overlap:
            handle.wait()
        return handle


class SymmetricMemoryComm(ProcessGroupComm):
    """Sequence parallelism by copies between the GPUs of one node. All ranks of the axis must call each method.

    Two streams run beside the current one. `second_stream` runs every second piece of a product, so that the end of one
    piece and the beginning of the next share the GPU. `copy_stream` runs the copies.

    A rank writes to symmetric memory; then all ranks pass a barrier. A barrier is a kernel. Behind a product that fills
    the GPU it would start only when the product ends. So `copy_stream` has priority: it gets the first SM that becomes
    free. Only copies wait for barriers, so a rank that is ahead can run the products whose operands it has.

    Gathers use two buffers A and B in turn, and so do scatters. One barrier for each use is enough:

        write A, barrier, read A      write B, barrier, read B      write A, ...
                                               |  all ranks are here, so all have read A: it may be written

    The host must launch all of this while the GPU runs the layer's products. So events and views are made once, and
    the stream changes rarely. dtype: that of a product's result.
    """

    def __init__(self, axis: Axis, device: torch.device, dtype: torch.dtype, sum_parts: Callable[[Tensor], Tensor]):
        super().__init__(axis)
        self.name = "copies beside products"
        self.device, self.dtype, self._sum_parts = device, dtype, sum_parts
        self.second_stream, self.copy_stream = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        self._pieces = _pieces(axis.size, axis.rank)
        self._event = torch.cuda.Event()  # recorded and waited for at once, so one is enough
        self._fetched = [torch.cuda.Event() for _ in self._pieces[1:]]
        self._copied = {use: torch.cuda.Event() for use in ("gather", "scatter")}
        self._buffers: dict[str, list[SymmetricBuffer]] = {}
        self._pending: set[str] = set()
        self._turns: dict[str, int] = {}  # the index of the most recently used buffer

    def begin_pass(self) -> None:
        """Begin with buffer A, as every replay of a recorded pass does.

        If the previous pass ended with A, other ranks may still read A. A barrier waits until they have finished; any
        buffer's barrier does.
        """
        if 0 in self._turns.values():
            self._buffers[next(iter(self._buffers))][0].barrier()
        self.reset()

    def reset(self) -> None:
        self._turns.clear()
        self._pending.clear()

    def gather_matmul(self, x: Payload, product: Product, n: int, keep: bool = False) -> tuple[Tensor, Payload | None]:
        m = x.rowwise.shape[0]
        y = x.rowwise.new_empty(self.axis.size * m, n, dtype=self.dtype)
        self.axis.activity.pause()
        parts, whole, memory = self._begin_gather(x)
        main, operands = self._main(), [parts]  # this rank's own piece is first: it needs no copy
        self._after(self.second_stream, main)
        with OnStream(self.copy_stream, main):
            self._publish(memory, parts)
            for piece, fetched in zip(self._pieces[1:], self._fetched):
                operands.append(self._fetch(memory, piece, whole))
                fetched.record(self.copy_stream)
            if keep:
                self._fetch(memory, self._pieces[0], whole)
        for first, stream in enumerate((main, self.second_stream)):
            with OnStream(stream, main):
                for i in range(first, len(operands), 2):
                    if i > 0:
                        stream.wait_event(self._fetched[i - 1])
                    product(x.of(operands[i]), y[self._pieces[i].rows(m)])
        self._after(main, self.second_stream)
        self._after(main, self.copy_stream)
        self.axis.activity.resume()
        return y, x.of(whole) if keep else None

    def matmul_scatter(self, x: Payload, product: Product, n: int) -> Tensor:
        main, m = self._main(), x.rowwise.shape[0] // self.axis.size
        self.axis.activity.pause()
        computed, received, memory = self._begin_scatter(x.rowwise, n)
        self._after(self.second_stream, main)
        for i, piece in enumerate(reversed(self._pieces)):  # this rank's own piece is last: no other rank waits for it
            stream, own = (main, self.second_stream)[i % 2], i + 1 == len(self._pieces)
            with OnStream(stream, main):
                rows = piece.rows(m)
                product(x.cut(rows), received[self.axis.rank] if own else computed[rows])
            if not own:
                self._after(self.copy_stream, stream)
                with OnStream(self.copy_stream, main):
                    memory.barrier()  # all ranks have produced this piece
                    self._receive(memory, piece, received)
        self._after(main, self.second_stream)
        self._after(main, self.copy_stream)
        self.axis.activity.resume()
        return self._sum_parts(received)

    def start_gather(self, x: Payload) -> Handle[Payload]:
        parts, whole, memory = self._begin_gather(x)
        with OnStream(self.copy_stream, self._main()):
            self._publish(memory, parts)
            for piece in reversed(self._pieces):
                self._fetch(memory, piece, whole)
        return self._handle("gather", whole, x.of, held=parts)

    def start_matmul_scatter(self, x: Payload, product: Product, n: int) -> Handle[Tensor]:
        computed, received, memory = self._begin_scatter(x.rowwise, n)
        main = self._main()
        product(x, computed)
        self._after(self.copy_stream, main)
        with OnStream(self.copy_stream, main):
            memory.barrier()
            for piece in reversed(self._pieces):
                self._receive(memory, piece, received)
        return self._handle("scatter", received, self._sum_parts)

    def _handle(self, use: str, result: Any, finish: Callable[[Any], T], held: object = None) -> Handle[T]:
        """Return the handle of what has been launched on copy_stream so far. held: what the copies read."""
        self._copied[use].record(self.copy_stream)
        self._pending.add(use)
        return Handle(result, [partial(self._wait_for_copies, use)], finish, held)

    def _wait_for_copies(self, use: str) -> None:
        self.axis.activity.pause()
        self._main().wait_event(self._copied[use])
        self.axis.activity.resume()
        self._pending.remove(use)

    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)  # without an index torch looks for the device first

    def _after(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """Let `later` wait for what has been launched on `earlier` so far."""
        self._event.record(earlier)
        later.wait_event(self._event)

    def _begin_gather(self, x: Payload) -> tuple[list[Tensor], list[Tensor], SymmetricBuffer]:
        """Return the parts of x, space for the parts of all ranks, and symmetric memory."""
        parts = [part.contiguous() for part in x.parts()]
        whole = [part.new_empty(self.axis.size * part.shape[0], *part.shape[1:]) for part in parts]
        memory = self._memory("gather", sum(map(_aligned_bytes, parts)))
        self._after(self.copy_stream, self._main())
        return parts, whole, memory

    def _publish(self, memory: SymmetricBuffer, parts: list[Tensor]) -> None:
        """Write this rank's parts to symmetric memory, and pass a barrier."""
        for part, place in zip(parts, _places(memory, self.axis.rank, parts)):
            place.copy_(part)
        memory.barrier()

    def _fetch(self, memory: SymmetricBuffer, piece: _Piece, whole: list[Tensor]) -> list[Tensor]:
        """Copy the rows of the piece's ranks into `whole`; return them."""
        rows = [out.shape[0] // self.axis.size for out in whole]
        for source in piece.ranks:
            mine = [out[source * m : (source + 1) * m] for out, m in zip(whole, rows)]
            for part, theirs in zip(mine, _places(memory, source, mine)):
                part.copy_(theirs)
        return [out[piece.rows(m)] for out, m in zip(whole, rows)]

    def _begin_scatter(self, x: Tensor, n: int) -> tuple[Tensor, Tensor, SymmetricBuffer]:
        """Return symmetric memory [m, n], space [tp, m/tp, n] for this rank's parts of the sum, and the buffer."""
        m = x.shape[0]
        memory = self._memory("scatter", m * n * self.dtype.itemsize)
        received = x.new_empty(self.axis.size, m // self.axis.size, n, dtype=self.dtype)
        return memory.view(self.axis.rank, torch.Size((m, n)), self.dtype, 0), received, memory

    def _receive(self, memory: SymmetricBuffer, piece: _Piece, received: Tensor) -> None:
        """Copy the rows that these ranks have computed for this one."""
        for source in piece.ranks:
            part = received[source]
            part.copy_(memory.view(source, part.shape, part.dtype, self.axis.rank * part.numel()))

    def _memory(self, use: str, need: int) -> SymmetricBuffer:
        """Return the buffer whose turn it is, of `need` bytes or more. It grows in a run's first microbatches only."""
        assert use not in self._pending, f"a {use} begins before the previous one has ended"
        buffers = self._buffers.setdefault(use, [])
        if not buffers or buffers[0].nbytes < need:
            self.axis.activity.enter("rendezvous", self.axis, need)
            torch.cuda.synchronize()
            dist.barrier(self.axis.group)  # another rank may still read the previous memory
            self.axis.activity.leave()
            buffers[:] = [SymmetricBuffer(self.axis, need, self.device) for _ in range(2)]
            self.nbytes = sum(buffer.nbytes for pair in self._buffers.values() for buffer in pair)
        turn = self._turns[use] = 1 - self._turns.get(use, 1)
        return buffers[turn]


class _Piece(NamedTuple):
    """Consecutive ranks from `first` on. ranks: their list, in the order in which this rank reads from them."""

    first: int
    ranks: list[int]

    def rows(self, m: int) -> slice:
        """Return the rows of these ranks in a tensor that has m rows of each rank."""
        return slice(self.first * m, (self.first + len(self.ranks)) * m)


def _pieces(size: int, rank: int) -> list[_Piece]:
    """Group the ranks by the product that has their rows. Rank 5 of 8: [5], [4], [7, 6], [1, 0, 3, 2].

    If rank a is in the i-th piece of rank b, then b is in the i-th piece of a. So each computes the other's rows before
    the same barrier. No two ranks read from the same rank at the same time.
    """
    blocks = [range(1)] + [range(2**i, 2 ** (i + 1)) for i in range(size.bit_length() - 1)]
    return [_Piece(rank // len(block) * len(block) ^ block.start, [rank ^ i for i in block]) for block in blocks]


def _places(memory: SymmetricBuffer, rank: int, parts: list[Tensor]) -> list[Tensor]:
    """Return views like `parts`, one after another, in the buffer of `rank`."""
    starts = accumulate(map(_aligned_bytes, parts), initial=0)
    return [memory.view(rank, part.shape, part.dtype, start // part.itemsize) for part, start in zip(parts, starts)]


def _aligned_bytes(part: Tensor) -> int:
    """Return the bytes of a part, rounded up to a place in the buffer where the next part may start."""
    return -(-part.nbytes // 256) * 256
