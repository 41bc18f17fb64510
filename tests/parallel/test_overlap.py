"""Pipelined products on CPUs: the memory that GPUs see of each other is files here, streams run in order of launch."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from test_tensor_parallel import _plain_two_layers, check_two_layers, two_layers_in_order

from minitron.comm.mesh import Axis, Mesh
from minitron.kernels import plain
from minitron.optim import slices
from minitron.parallel import overlap
from minitron.parallel.overlap import Pipelined, Separate
from minitron.testing import assert_close_rel

M, N = 3, 5  # rows of one rank, columns


class Memory:
    """Stands in for torch.distributed._symmetric_memory: every `empty` is a file, which `rendezvous` shows to all."""

    def __init__(self, folder, axis):
        self.folder, self.axis, self.made, self.met = folder, axis, 0, 0

    def empty(self, size, dtype, device):
        self.made += 1
        file = numpy.memmap(self._path(self.made, self.axis.rank), numpy.uint8, "w+", shape=(size * dtype.itemsize,))
        return torch.from_numpy(file).view(dtype)

    def rendezvous(self, buffer, group_name):
        self.met += 1  # in the order in which they were made
        dist.barrier(self.axis.group)
        everyone = [torch.from_numpy(numpy.memmap(self._path(self.met, rank), numpy.uint8, "r+"))
                    for rank in range(self.axis.size)]

        def get_buffer(rank, shape, dtype, offset):
            count = int(numpy.prod(shape))
            return everyone[rank].view(dtype)[offset:offset + count].view(shape)

        return SimpleNamespace(get_buffer=get_buffer, barrier=lambda channel: dist.barrier(self.axis.group))

    def _path(self, number, rank):
        return f"{self.folder}/{self.axis.name}-{number}-{rank}"


@contextlib.contextmanager
def on_files(folder, axis):
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: None, wait_event=lambda event: None)
    fake = SimpleNamespace(
        is_available=lambda: False, synchronize=lambda: None, Stream=lambda priority=0: stream,
        Event=lambda: SimpleNamespace(record=lambda stream: None), current_stream=lambda device=None: stream,
        set_stream=lambda stream: None, stream=lambda _: contextlib.nullcontext())
    with mock.patch.object(overlap, "symmetric_memory", Memory(folder, axis)), mock.patch.object(torch, "cuda", fake):
        yield


@pytest.mark.parametrize("onto", [False, True])
def test_parts_are_rounded_once_however_many_there_are(onto):
    """Half a step of bf16, 2^-8, off the float64 sum: added up in bf16 they would be rounded with every part."""
    parts = torch.randn(16, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    base = torch.ones(64, 32)
    exact = parts.double().sum(0) + onto
    total = plain.sum_parts(parts.float(), base) if onto else plain.sum_parts(parts)
    assert (total is base) == onto and total.dtype == (torch.float32 if onto else torch.bfloat16)
    assert ((total.double() - exact).abs() <= (1e-5 if onto else 2.0**-8 * exact.abs() + 1e-5)).all()


def methods(folder, size):
    """Every method, several times with growing operands: [(Pipelined's result, Separate's, whether bf16), ...]."""
    axis, pairs = Mesh.create(tp=size).tp, []
    draw = torch.Generator().manual_seed(axis.rank)
    with on_files(folder, axis):
        both = Pipelined(axis, torch.device("cpu"), plain.sum_parts), Separate(axis)
        for scale in (1, 1, 2, 1, 3):
            parts = [torch.randn(M * scale, N, generator=draw), torch.randint(99, (2, M * scale), generator=draw)]
            partial = torch.randn(size * M * scale, N, generator=draw).bfloat16()

            def produce(rows, out):
                out.copy_(partial[rows])

            for method in ("gather", "gather_then", "then_scatter", "scatter"):
                results = []
                for by in both:
                    if method == "gather":
                        results += by.gather(parts)()
                    elif method == "gather_then":
                        y = torch.zeros(size * M * scale, N)
                        results += by.gather_then(parts, lambda rows, p: y[rows].copy_(2 * p[0]), keep=True)
                        results.append(y)
                    elif method == "then_scatter":
                        results.append(by.then_scatter(produce, tuple(partial.shape), partial))
                    else:
                        results.append(by.scatter(produce, tuple(partial.shape), partial)())
                half = len(results) // 2
                pairs += zip(results[:half], results[half:])
    return [(mine.clone(), other.clone(), mine.dtype == torch.bfloat16) for mine, other in pairs]


@pytest.mark.parametrize("size", [2, 4])
def test_methods_equal_those_of_separate(ranks, tmp_path, size):
    for pairs in ranks(size, methods, str(tmp_path), size):
        assert len(pairs) == 5 * (2 + 3 + 1 + 1)
        for mine, other, rounded in pairs:  # sums of bf16 partial sums: one rounding here, one for each rank there
            assert_close_rel(mine.float(), other.float(), 1e-2 if rounded else 0.0)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_pieces_double_and_each_stage_has_the_same_ranks_on_both_sides(size):
    groups = [overlap._groups(size, rank) for rank in range(size)]
    for rank, mine in enumerate(groups):
        assert [len(group.sources) for group in mine] == [1, *(2**i for i in range(size.bit_length() - 1))]
        assert sorted(source for group in mine for source in group.sources) == list(range(size))
        for i, group in enumerate(mine):
            assert sorted(group.sources) == list(range(size))[group.rows(1)]
            assert all(rank in groups[source][i].sources for source in group.sources)
    for reads in zip(*([source for group in mine for source in group.sources] for mine in groups)):
        assert len(set(reads)) == size  # at any time from another one


def layers(folder, tp, remake):
    axis = Mesh.create(tp=tp).tp
    with on_files(folder, axis):
        return two_layers_in_order(
            tp, True, lambda axis: Pipelined(axis, torch.device("cpu"), plain.sum_parts), "fp32", True, remake)


@pytest.mark.parametrize("tp, remake", [(2, False), (4, True)])
def test_column_then_row(ranks, tmp_path, tp, remake):
    check_two_layers(ranks(tp, layers, str(tmp_path), tp, remake), _plain_two_layers(torch.float32), True, "fp32")


class Stream:
    """A stream that only tells the time: `now` is when all that was launched on it has ended."""

    current = None

    def __init__(self, priority=0):
        self.now = 0.0

    def run(self, seconds):
        self.now += seconds
        return self.now - seconds

    def wait_event(self, event):
        self.now = max(self.now, event.time)

    @staticmethod
    def set(stream):
        Stream.current = stream


class Event:
    def record(self, stream):
        self.time = stream.now


def test_both_collectives_of_a_column_parallel_backward_hide_behind_its_products():
    Stream.current = main = Stream()
    fake = SimpleNamespace(Stream=Stream, Event=Event, current_stream=lambda device: Stream.current,
                           set_stream=Stream.set)
    with mock.patch.object(torch, "cuda", fake):
        by = Pipelined(Axis("tp", 0, 4, (0, 1, 2, 3)), torch.device("cpu"), plain.sum_parts)
        memory = SimpleNamespace(barrier=lambda: Stream.current.run(0.1),
                                 view=lambda rank, shape, dtype, start: torch.zeros(shape, dtype=dtype),
                                 views=lambda rank, parts: map(torch.zeros_like, parts))
        by._half = lambda use, need: memory
        by._fetch = by._receive = lambda memory, group, where: by.copies.run(len(group.sources))
        gathered = by.gather([torch.zeros(4, 8)])
        finish = by.scatter(lambda rows, out: main.run(10.0), (16, 8), torch.zeros(1))
        gathered()
        started = main.run(10.0)  # the weight gradient: beside the scatter
        finish()
    assert started == pytest.approx(10.0) and main.now == pytest.approx(20.0)


def test_one_rank_and_cpus_have_nothing_to_pipeline():
    by = overlap.choose(Axis.single(), torch.device("cpu"), True, plain)
    assert type(by) is Separate and by.overlap
    assert not overlap.choose(Axis.single(), torch.device("cuda"), False, plain).overlap


def test_three_ranks_have_no_halves():
    with mock.patch.object(overlap, "see_each_other", lambda axis, device: True):
        assert type(overlap.choose(Axis("tp", 0, 3, (0, 1, 2)), torch.device("cuda", 0), True, plain)) is Separate


def test_slices_by_copies_equal_those_of_the_process_group(ranks, tmp_path):
    for pairs in ranks(3, both_slices, str(tmp_path)):
        assert len(pairs) == 2 * 2 * 3
        for mine, other in pairs:
            assert_close_rel(mine, other, 1e-6)


def both_slices(folder):
    """Two steps of three buffers, whose slices have one, three and two pieces and a bit: what comes of them here."""
    axis, draw = Mesh.create().dp_cp, torch.Generator().manual_seed(dist.get_rank())
    sizes, device, results = [300, 600, 450], torch.device("cpu"), []
    with on_files(folder, axis), mock.patch.object(slices, "symmetric_memory", overlap.symmetric_memory), \
            mock.patch.object(slices, "PIECE_BYTES", 4 * 70):
        for maker in (slices.CopiedSlices(axis, device, 6 * sum(sizes), plain.sum_parts), slices.Slices(axis, device)):
            grads, params = ([maker.zeros(n, dtype) for n in sizes] for dtype in (torch.float32, torch.bfloat16))
            assert not any(buffer.any() for buffer in grads + params)
            for _ in range(2):
                for grad in grads:
                    grad.copy_(torch.randn(len(grad), generator=draw))
                for handle in [maker.reduce(grad) for grad in grads]:
                    handle.wait()
                dist.barrier()  # the optimizer's all-reduce
                sums = [maker.own(grad).clone() for grad in grads]
                for param, total in zip(params, sums):
                    maker.own(param).copy_(total)
                for handle in [maker.gather(param) for param in params]:
                    handle.wait()
                results.append(sums + [param.float() for param in params])
            draw.manual_seed(dist.get_rank())
    return [(mine, other) for a, b in zip(results[:2], results[2:]) for mine, other in zip(a, b)]
