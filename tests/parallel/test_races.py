"""Copies between GPUs: nobody reads what may not be written yet, or writes what may still be read, on 2, 4 and 8 ranks.

What each rank launches is noted, with the memory that it touches, and replayed with a vector clock for every stream.
"""

import random
import weakref
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from functools import partial, reduce
from operator import or_
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

from minitron.comm import shared_memory
from minitron.comm.handle import Handle
from minitron.comm.mesh import Axis
from minitron.kernels import gemm
from minitron.kernels.gemm import Payload
from minitron.optim import slices
from minitron.parallel import overlap
from minitron.pipeline import weight_queue

CPU = torch.device("cpu")
JOIN, CUT = gemm._join, Payload.cut


class Lent(numpy.ndarray):
    """Memory of a tensor; it dies when torch's allocator would have it back."""


class Rank:
    """A rank's streams and memory, whose use is noted. shared: (number, rank) -> buffer; kept: memory that stays."""

    def __init__(self, rank, size, shared, kept):
        self.axis = Axis("axis", rank, size, tuple(range(size)), SimpleNamespace(group_name="axis"))
        self.shared, self.kept, self.made, self.met, self.launches, self.streams = shared, kept, 0, 0, [], 0
        self.current = self.stream()

    def note(self, kind, stream, what):
        self.launches.append((kind, stream.name, what))

    def touch(self, *tensors, write=False):
        for x in tensors:
            self.note("access", self.current, (x.data_ptr(), x.data_ptr() + x.nbytes, write))

    def stream(self, priority=0):
        stream, self.streams = SimpleNamespace(name=(self.axis.rank, self.streams)), self.streams + 1
        stream.wait_event = lambda event: self.note("wait", stream, event.version)
        stream.wait_stream = lambda other: stream.wait_event(other.record_event())
        stream.record_event = lambda: self.event().record(stream)
        return stream

    def event(self):
        def record(stream):
            event.version = self.axis.rank, len(self.launches)
            self.note("record", stream, event.version)
            return event

        event = SimpleNamespace(record=record, wait=lambda: self.current.wait_event(event))
        return event

    def set_stream(self, stream):
        self.current = stream

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy_(self, there, here):
        self.touch(here)
        self.touch(there, write=True)
        return there

    def join(self, stacked, like, dim):
        return self.copied(JOIN(stacked, like, dim), stacked)

    def cut(self, x, rows):
        piece = CUT(x, rows)
        return piece._replace(rowwise_scale=self.copied(piece.rowwise_scale, x.rowwise_scale))

    def copied(self, new, old):
        """Scales are copied to lie as products read them; a copy is its stream's own, so it may stay."""
        if new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
            self.touch(old)
            self.kept.append(new)
        return new

    def new_empty(self, like, *shape, dtype=None):
        dtype = dtype or like.dtype
        memory, stream = numpy.zeros(int(numpy.prod(shape)) * dtype.itemsize, numpy.uint8), self.current
        lent, place = memory.view(Lent), (memory.ctypes.data, memory.ctypes.data + memory.nbytes, True)
        self.kept.append(memory)  # no other tensor gets its address
        weakref.finalize(lent, self.note, "access", stream, place)  # what its stream launches next may write there
        return torch.from_numpy(lent).view(dtype).view(shape)

    def empty(self, numel, dtype, device):
        self.made += 1
        for rank in range(self.axis.size):
            self.shared.setdefault((self.made, rank), torch.zeros(numel, dtype=dtype))
        return self.shared[self.made, self.axis.rank]

    def rendezvous(self, buffer, group_name):
        self.met = number = self.met + 1  # in the order in which they were made

        def get_buffer(rank, shape, dtype, start):
            return self.shared[number, rank].view(dtype)[start : start + int(numpy.prod(shape))].view(shape)

        return SimpleNamespace(
            get_buffer=get_buffer, barrier=lambda channel: self.note("barrier", self.current, number)
        )


def launches(size, program, seed):
    """What each rank launches: [(kind, stream, what), ...]."""
    shared, kept = {}, []
    return [noted(Rank(rank, size, shared, kept), program, seed) for rank in range(size)]


def noted(rank, program, seed):
    cuda = SimpleNamespace(
        Stream=rank.stream,
        Event=rank.event,
        current_stream=lambda device=None: rank.current,
        set_stream=rank.set_stream,
        stream=rank.on,
        synchronize=lambda: None,
    )
    with (
        mock.patch.multiple(shared_memory, symmetric_memory=rank),
        mock.patch.multiple(torch, cuda=cuda),
        mock.patch.multiple(slices, PIECE_BYTES=48),
        mock.patch.multiple(gemm, _join=rank.join),
        mock.patch.multiple(Payload, cut=lambda x, rows: rank.cut(x, rows)),
        mock.patch.multiple(dist, barrier=lambda group: None),
        mock.patch.multiple(
            torch.Tensor,
            copy_=lambda there, here: rank.copy_(there, here),
            new_empty=lambda like, *shape, dtype=None: rank.new_empty(like, *shape, dtype=dtype),
        ),
    ):
        program(rank, random.Random(seed))
    return list(rank.launches)


def replay(launches):
    """Raises AssertionError where two accesses to a byte, one of them a write, may come in either order.

    A rank stands at a barrier until all others do: the worst that streams on one hardware queue can do.
    """
    left, clocks, versions, seen = [deque(x) for x in launches], defaultdict(Counter), {}, []
    while any(left):
        for rank in left:
            while rank and rank[0][0] != "barrier":
                kind, stream, what = rank.popleft()
                clock = clocks[stream]
                if kind == "record":
                    versions[what] = clock.copy()
                elif kind == "wait":
                    clock |= versions[what]  # the later of both, stream by stream
                else:
                    first, last, write = what
                    clock[stream] += 1
                    still = [(stream, clock[stream], first, last, write)]
                    for at, time, begin, end, written in seen:
                        before = time <= clock[at]
                        assert before or end <= first or last <= begin or not (write or written), "a race"
                        if not (before and first <= begin and end <= last and write >= written):  # else this one counts
                            still.append((at, time, begin, end, written))
                    seen = still
        if any(left):
            assert len({rank[0][2] if rank else None for rank in left}) == 1, "ranks stand at different barriers"
            here = [rank.popleft()[1] for rank in left]
            met = reduce(or_, (clocks[stream] for stream in here))
            clocks.update((stream, met.copy()) for stream in here)


def products(rank, draw):
    """What layers do, in any order, with operands that grow."""
    comm = overlap.SymmetricMemoryComm(rank.axis, CPU, torch.float32, rank.touch)
    kinds = ["start_gather", "gather_matmul", "matmul_scatter", "backward", "later"]
    for _ in range(8):
        call(rank, comm, draw.choice(kinds), draw.choice([1, 1, 2]), keep=draw.random() < 0.5)


def passes(rank, draw):
    """Passes of one or two products each. As in a recorded step, each pass begins with the first buffer."""
    comm = overlap.SymmetricMemoryComm(rank.axis, CPU, torch.float32, rank.touch)
    for _ in range(4):
        comm.begin_pass()
        for _ in range(draw.choice([1, 1, 2])):
            call(rank, comm, draw.choice(["gather_matmul", "matmul_scatter", "backward"]), 1, keep=False)


def call(rank, comm, kind, m, keep):
    """backward: as a column-parallel layer does, which gathers its input again while it scatters its gradient.

    later: gathers for weight gradients that were put off.
    """
    weight = torch.zeros(0)

    def payload(rows):  # rows, and two scales for each
        x = Payload(weight.new_empty(rows, 64), weight.new_empty(2, rows))
        rank.touch(*x.parts(), write=True)
        return x

    def product(x, out):
        rank.touch(*x.parts())
        rank.touch(out, write=True)

    if kind == "gather_matmul":
        y, whole = comm.gather_matmul(payload(m), product, 64, keep=keep)
        assert (whole is not None) == keep
        rank.touch(y, *whole.parts() if keep else ())
    elif kind == "matmul_scatter":
        comm.matmul_scatter(payload(rank.axis.size * m), product, 64)
    elif kind == "later":
        queue = weight_queue.WeightQueue()
        with queue.collect() as handed_in:
            for _ in range(3):
                queue.put(partial(comm.start_gather, payload(m)), lambda whole: rank.touch(*whole.parts()))
        weight_queue.run_queue(handed_in)
    else:
        gathering = comm.start_gather(payload(m))
        scattering = None
        if kind == "backward":
            scattering = comm.start_matmul_scatter(payload(rank.axis.size * m), product, 64)
        rank.touch(*gathering.wait().parts())
        if scattering is not None:
            scattering.wait()


def steps(rank, draw):
    """Steps of three buckets, the first one from weights that were read, or not; of one node, or of one of two."""
    size, nodes, gathers = rank.axis.size, draw.choice([1, 2]), []
    across = Axis("across_nodes", 0, nodes, tuple(range(nodes)))
    dtype = draw.choice([torch.float32, torch.bfloat16])  # of gradients

    def sum_parts(parts, onto, out=None):
        rank.touch(parts, onto)
        rank.touch(onto if out is None else out, write=True)

    def exchange(out, x, axis, wait=True):
        rank.touch(x, out, write=True)
        return Handle(out)

    def own(buffer):
        return buffer.chunk(size)[rank.axis.rank].chunk(nodes)[0]

    mesh = SimpleNamespace(dp_cp=rank.axis, in_node=rank.axis, across_nodes=across, device=CPU)
    by = slices.SymmetricMemorySliceComm(6 * 96 * size, mesh, dtype, 32 * size, True, sum_parts)
    by.stream = rank.stream()  # as on a GPU
    data, grads = ([by.zeros(32 * size, of) for _ in range(3)] for of in (torch.bfloat16, dtype))
    totals = {id(grad): own(grad).float() for grad in grads}
    rank.kept += [by, totals]
    rank.touch(*data, write=True)
    with mock.patch.multiple(slices, all_to_all_into=exchange, all_gather_into=exchange):
        if draw.random() < 0.5:
            rank.touch(*map(own, data), write=True)
            gathers = [by.gather(param, own(param)) for param in data]
        for _ in range(3):
            for gather in gathers:
                gather.wait()
            rank.touch(*data)
            sums = []
            for grad in draw.sample(grads, 3):
                rank.touch(grad, write=True)
                sums.append(by.reduce(grad, totals[id(grad)]))
            for total in sums:
                total.wait()
            gathers = []
            for param, grad in zip(data, grads):
                rank.touch(totals[id(grad)])
                rank.touch(own(param), write=True)
                gathers.append(by.gather(param, own(param)))


def nothing(*_):
    pass


def do_not_wait(comm, use):
    comm._pending.remove(use)


def finish_before_the_wait(handle, wait=Handle.wait):
    waits, handle.waits = handle.waits, ()
    result = wait(handle)
    for wait_for in waits:
        wait_for()
    return result


@pytest.mark.parametrize("program", [products, passes, steps])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_accesses_have_an_order(size, program):
    for seed in range(16 // size):
        replay(launches(size, program, seed))


@pytest.mark.parametrize(
    "program, owner, name, mistake",
    [
        (products, shared_memory.SymmetricBuffer, "barrier", nothing),
        (products, overlap.SymmetricMemoryComm, "_after", nothing),
        (products, overlap.SymmetricMemoryComm, "_wait_for_copies", do_not_wait),
        (products, Handle, "wait", finish_before_the_wait),
        (
            products,
            overlap,
            "_pieces",
            lambda size, rank: [  # a ring: who reads from a rank is not whom it reads from
                overlap._Piece(i % size, [i % size]) for i in range(rank, rank + size)
            ],
        ),
        (passes, overlap.SymmetricMemoryComm, "begin_pass", overlap.SymmetricMemoryComm.reset),
        (steps, shared_memory.SymmetricBuffer, "barrier", nothing),
        (steps, slices.SymmetricMemorySliceComm, "_announce", nothing),
        (steps, Handle, "wait", nothing),
    ],
)
def test_a_mistake_is_a_race(program, owner, name, mistake):
    with mock.patch.object(owner, name, mistake), pytest.raises(AssertionError, match="a race"):
        for seed in range(4):
            replay(launches(4, program, seed))
