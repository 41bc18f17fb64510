"""Products in pieces on CPUs: the memory that GPUs see of each other is files here, streams run in order of launch."""

import contextlib
import dataclasses
import itertools
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

from layouts import config
from minitron.comm import shared_memory
from minitron.comm.activity import Activity
from minitron.comm.mesh import Axis, Mesh
from minitron.kernels import plain
from minitron.kernels.gemm import Payload
from minitron.kernels.kernels import PLAIN
from minitron.optim import slices
from minitron.optim.buckets import BucketPlan
from minitron.parallel import layer_context, overlap
from minitron.parallel.layer_context import make_layer_context
from minitron.parallel.overlap import ProcessGroupComm, SymmetricMemoryComm
from minitron.testing import assert_close_rel
from test_tensor_parallel import _plain_two_layers, check_two_layers, two_layers_in_order

M, K, N = 3, 4, 5  # rows of one rank, inputs, outputs
CPU = torch.device("cpu")


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
        everyone = [
            torch.from_numpy(numpy.memmap(self._path(self.met, rank), numpy.uint8, "r+"))
            for rank in range(self.axis.size)
        ]

        def get_buffer(rank, shape, dtype, offset):
            count = int(numpy.prod(shape))
            return everyone[rank].view(dtype)[offset : offset + count].view(shape)

        return SimpleNamespace(get_buffer=get_buffer, barrier=lambda channel: dist.barrier(self.axis.group))

    def _path(self, number, rank):
        return f"{self.folder}/{self.axis.name}-{number}-{self.axis.ranks[rank]}"


@contextlib.contextmanager
def on_files(folder, axis):
    event = SimpleNamespace(wait=lambda: None)
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event, wait_event=lambda event: None)
    fake = SimpleNamespace(
        is_available=lambda: False,
        synchronize=lambda: None,
        Stream=lambda priority=0: stream,
        Event=lambda: SimpleNamespace(record=lambda stream: None),
        current_stream=lambda device=None: stream,
        set_stream=lambda stream: None,
        stream=lambda _: contextlib.nullcontext(),
    )
    with (
        mock.patch.object(shared_memory, "symmetric_memory", Memory(folder, axis)),
        mock.patch.object(torch, "cuda", fake),
    ):
        yield


def product(weight, x, out=None):
    """y = x W of a payload with two scales a row, one for each half of it."""
    values = (x.rowwise.float().unflatten(1, (2, -1)) * x.rowwise_scale.t().unsqueeze(-1)).flatten(1)
    y = (values @ weight.float()).to(weight.dtype)
    return y if out is None else out.copy_(y)


@pytest.mark.parametrize("onto", [False, True])
def test_parts_are_rounded_once_however_many_there_are(onto):
    """Half a step of bf16, 2^-8, off the float64 sum: added up in bf16 they would be rounded with every part."""
    parts = torch.randn(16, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    base = torch.ones(64, 32)
    exact = parts.double().sum(0) + onto
    total = plain.sum_parts(parts.float(), base) if onto else plain.sum_parts(parts)
    assert (total is base) == onto and total.dtype == (torch.float32 if onto else torch.bfloat16)
    assert ((total.double() - exact).abs() <= (1e-5 if onto else 2.0**-8 * exact.abs() + 1e-5)).all()


class Waits(Activity):
    """Counts how often the current stream begins to wait for others, and whether it still does."""

    def __init__(self):
        super().__init__()
        self.times, self.waiting = 0, False

    def pause(self):
        self.times, self.waiting = self.times + (not self.waiting), True

    def resume(self):
        self.waiting = False

    def around(self, run):
        """Return run(), in which this rank has waited, and after which it waits no more."""
        before, result = self.times, run()
        assert self.times > before and not self.waiting
        return result


def methods(folder, size):
    """Call every method several times, with operands that grow: [(by symmetric memory, by the process group), ...].

    float32 results are exact: small numbers in float8, scales that are powers of two.
    """
    axis, pairs = dataclasses.replace(Mesh.create(tp=size).tp, activity=(activity := Waits())), []
    draw = torch.Generator().manual_seed(axis.rank)

    def payload(m):
        return Payload(
            torch.randint(-8, 9, (m, K), generator=draw).to(torch.float8_e4m3fn),
            torch.exp2(torch.randint(-3, 4, (2, m), generator=draw)),
        )

    with on_files(folder, axis):
        by_copies = [SymmetricMemoryComm(axis, CPU, of, plain.sum_parts) for of in (torch.float32, torch.bfloat16)]
        comms = by_copies, [ProcessGroupComm(axis)] * 2
        for scale in (1, 1, 2, 1, 3):
            x, whole = payload(M * scale), payload(size * M * scale)
            columns = Payload(None, None, torch.randn(K, M * scale, generator=draw), torch.randn(2, K, generator=draw))
            weight = torch.randint(-8, 9, (K, N), generator=draw).float()
            summands = torch.randn(K, N, generator=draw).bfloat16()
            exact, rounded = partial(product, weight), partial(product, summands)
            results = []
            for comm, rounding in comms:  # a run's products are of one dtype
                y, kept = activity.around(lambda: comm.gather_matmul(x, exact, N, keep=True))
                results.append(
                    [
                        *activity.around(comm.start_gather(x).wait)[:2],
                        *comm.start_gather(columns).wait()[2:],
                        *kept[:2],
                        y,
                        activity.around(lambda: rounding.matmul_scatter(whole, rounded, N)),
                        activity.around(rounding.start_matmul_scatter(whole, rounded, N).wait),
                    ]
                )
                assert comm.gather_matmul(x, exact, N)[1] is None
            pairs += zip(*results, strict=True)
        given_up = by_copies[1]
        given_up.begin_pass(), given_up.start_gather(x), given_up.reset()
        assert torch.equal(given_up.start_gather(x).wait().rowwise.float(), results[0][0].float())
        # Two buffers for a gather, whose two parts begin at multiples of 256 bytes, and two for a scatter in bf16.
        assert given_up.nbytes == 2 * (2 * 256 + size * M * scale * N * 2)
    return [(mine.float(), other.float(), mine.dtype == torch.bfloat16) for mine, other in pairs]


@pytest.mark.parametrize("size", [2, 4])
def test_methods_equal_those_by_the_process_group(ranks, tmp_path, size):
    for pairs in ranks(size, methods, str(tmp_path), size):
        assert len(pairs) == 5 * (2 + 2 + 3 + 1 + 1)
        for mine, other, rounded in pairs:  # sums of bf16 partial sums: one rounding here, one for each rank there
            assert_close_rel(mine, other, 1e-2 if rounded else 0.0)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_pieces_double_and_each_stage_has_the_same_ranks_on_both_sides(size):
    pieces = [overlap._pieces(size, rank) for rank in range(size)]
    for rank, mine in enumerate(pieces):
        assert [len(piece.ranks) for piece in mine] == [1, *(2**i for i in range(size.bit_length() - 1))]
        assert sorted(source for piece in mine for source in piece.ranks) == list(range(size))
        for i, piece in enumerate(mine):
            assert sorted(piece.ranks) == list(range(size))[piece.rows(1)]
            assert all(rank in pieces[source][i].ranks for source in piece.ranks)
    for reads in zip(*([source for piece in mine for source in piece.ranks] for mine in pieces)):
        assert len(set(reads)) == size  # at any time from another one


def test_each_view_of_a_buffer_is_made_once_and_is_its_own():
    """A layer's pieces and formats share a buffer, so views may differ in one thing alone."""
    made = []
    buffer = object.__new__(shared_memory.SymmetricBuffer)
    buffer._views, buffer._memory = {}, SimpleNamespace(get_buffer=lambda *place: made.append(place) or place)
    places = list(
        itertools.product((0, 1), (torch.Size((4, 2)), torch.Size((2, 4))), (torch.uint8, torch.float8_e4m3fn), (0, 8))
    )
    assert [buffer.view(*place) for place in places * 2] == places * 2 and made == places


def test_after_a_block_launches_are_on_the_main_stream_again():
    with mock.patch.object(torch.cuda, "set_stream", create=True) as set_stream:
        with pytest.raises(RuntimeError, match="broken"), shared_memory.OnStream("copies", "main"):
            assert set_stream.mock_calls == [mock.call("copies")]
            raise RuntimeError("broken")
    assert set_stream.mock_calls == [mock.call("copies"), mock.call("main")]


def layers(folder, tp, recompute):
    axis = Mesh.create(tp=tp).tp
    with on_files(folder, axis):
        return two_layers_in_order(
            tp,
            True,
            lambda axis: SymmetricMemoryComm(axis, CPU, torch.float32, plain.sum_parts),
            "fp32",
            True,
            recompute,
        )


@pytest.mark.parametrize("tp, recompute", [(2, False), (4, True)])
def test_column_then_row(ranks, tmp_path, tp, recompute):
    check_two_layers(ranks(tp, layers, str(tmp_path), tp, recompute), _plain_two_layers(torch.float32), True, "fp32")


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
    fake = SimpleNamespace(
        Stream=Stream, Event=Event, current_stream=lambda device: Stream.current, set_stream=Stream.set
    )
    with mock.patch.object(torch, "cuda", fake):
        comm = SymmetricMemoryComm(Axis("tp", 0, 4, (0, 1, 2, 3)), CPU, torch.float32, plain.sum_parts)
        memory = SimpleNamespace(
            barrier=lambda: Stream.current.run(0.1),
            view=lambda rank, shape, dtype, start: torch.zeros(shape, dtype=dtype),
        )
        comm._memory = lambda use, need: memory
        comm._fetch = comm._receive = lambda memory, piece, where: comm.copy_stream.run(len(piece.ranks))
        gathering = comm.start_gather(Payload(torch.zeros(4, 8)))
        scattering = comm.start_matmul_scatter(Payload(torch.zeros(16, 8)), lambda *operands: main.run(10.0), 8)
        gathering.wait()
        started = main.run(10.0)  # the weight gradient: beside the scatter
        scattering.wait()
    assert started == pytest.approx(10.0) and main.now == pytest.approx(20.0)


def test_buffers_take_turns_and_grow_once_no_rank_reads_them(monkeypatch):
    """A pass begins with the first one, as each replay of a recorded pass does."""
    happened, note = [], lambda what: lambda *_: happened.append(what)

    def buffer(axis, nbytes, device):
        made = SimpleNamespace(nbytes=nbytes, barrier=note("its barrier"))
        happened.append(made)
        return made

    stand_in = SimpleNamespace(Stream=Stream, Event=Event, synchronize=note("synchronize"))
    monkeypatch.setattr(torch, "cuda", stand_in)
    monkeypatch.setattr(overlap, "SymmetricBuffer", buffer)
    monkeypatch.setattr(dist, "barrier", note("barrier"))
    comm = SymmetricMemoryComm(Axis("tp", 0, 2, (0, 1)), CPU, torch.float32, plain.sum_parts)
    first = comm._memory("gather", 100)
    second = comm._memory("gather", 70)
    assert happened == ["synchronize", "barrier", first, second] and comm._memory("gather", 100) is first
    larger = comm._memory("scatter", 101)
    assert happened[4:6] == ["synchronize", "barrier"] and [larger.nbytes, comm.nbytes] == [101, 402]
    happened.clear()
    comm.begin_pass()
    assert happened == ["its barrier"], "other ranks may read a first buffer"
    assert comm._memory("gather", 1) is first and comm._memory("gather", 1) is second
    comm.begin_pass()
    assert happened == ["its barrier"] and comm._memory("gather", 1) is first


def chosen(size, device="cpu", overlap_tp=True, sequence_parallel=True):
    keys = {"tp": size, "overlap_tp": overlap_tp, "sequence_parallel": sequence_parallel}
    cfg = config({"parallel": keys, "precision": {"dtype": "fp16"}})
    mesh = dataclasses.replace(Mesh.offline(size, tp=size), device=torch.device(device))  # of a GPU that is absent
    return make_layer_context(cfg, mesh, PLAIN).comm


def test_one_rank_and_cpus_have_no_shared_memory():
    for size, comm in (1, chosen(1)), (2, chosen(2)):
        assert type(comm) is ProcessGroupComm and comm.overlap and comm.sequence_parallel == (size > 1)
    for size in 1, 2:
        assert not chosen(size, "cuda:0", overlap_tp=False).overlap


HERE, NEXT = ("a", 4), ("a", 5)  # hosts and their GPUs


@pytest.mark.parametrize(
    "places, unreachable, others, expected",
    [
        ([HERE, NEXT], [], True, True),
        ([HERE, NEXT], [(5, 4), (4, 4), (5, 5)], True, True),  # each rank tests its own direction
        ([HERE, NEXT], [(4, 5)], True, False),
        ([HERE, NEXT], [], False, False),
        ([HERE, HERE], [], True, False),
        ([HERE, ("b", 5)], [], True, False),
        ([HERE, NEXT, ("a", 6), ("a", 7)], [], True, True),
        ([HERE, NEXT, ("a", 6), ("a", 7)], [(4, 7)], True, False),
        ([HERE, NEXT, ("b", 4), ("b", 5)], [], True, False),
    ],
)
def test_peers_are_gpus_of_one_host_that_reach_each_other_from_every_rank(
    monkeypatch, places, unreachable, others, expected
):
    axis = Axis("tp", 0, len(places), tuple(range(len(places))), group=object())
    make, asked = torch.tensor, []

    def gathered(mine, axis, device):
        asked.append(mine)
        return [list(place) for place in places]

    def reduced(x, op, group):
        assert op == dist.ReduceOp.MIN and group is axis.group
        x.mul_(int(others))

    monkeypatch.setattr(shared_memory, "gather_json", gathered)
    monkeypatch.setattr(shared_memory.socket, "gethostname", lambda: "a")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in unreachable)
    monkeypatch.setattr(torch, "tensor", lambda x, dtype, device: make(x, dtype=dtype))
    monkeypatch.setattr(dist, "all_reduce", reduced)
    assert shared_memory.can_access_peers(axis, torch.device("cuda", 4)) is expected
    assert asked == [HERE]
    for alone in (dataclasses.replace(axis, group=None), Axis.single()):
        assert not shared_memory.can_access_peers(alone, torch.device("cuda", 4))
    assert not shared_memory.can_access_peers(axis, CPU) and asked == [HERE]


def test_only_a_power_of_two_of_ranks_takes_shared_memory():
    shared, device = ProcessGroupComm(Axis.single()), torch.device("cuda:0")
    with (
        mock.patch.object(layer_context, "can_access_peers", lambda axis, on: (axis.name, on) == ("tp", device)),
        mock.patch.object(layer_context, "SymmetricMemoryComm", return_value=shared) as made,
    ):
        assert chosen(2, "cuda:0") == chosen(4, "cuda:0") == shared
        axis = Axis("tp", 0, 4, (0, 1, 2, 3))
        assert made.call_args == mock.call(axis, device, torch.float16, PLAIN.ops.sum_parts)
        assert shared not in (chosen(3, "cuda:0"), chosen(4, "cuda:0", overlap_tp=False))
        assert type(chosen(4, "cuda:0", sequence_parallel=False)) is ProcessGroupComm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world, node_ranks", [(3, None), (4, 2)])
def test_slices_by_copies_equal_those_of_the_process_group(ranks, tmp_path, world, node_ranks, dtype):
    """Of three ranks but for the order of float32 sums; of two nodes, which round sums of two terms, bit for bit."""
    for pairs in ranks(world, both_slices, str(tmp_path), dtype, node_ranks):
        assert len(pairs) == 2 * 2 * 3
        for mine, other in pairs:
            assert mine.dtype == other.dtype == torch.float32
            assert_close_rel(mine, other, 0 if node_ranks else 1e-6)


def both_slices(folder, dtype, node_ranks):
    """Two steps of three buffers, whose slices have some pieces and a bit: what comes of them here."""
    mesh, draw = Mesh.create(node_ranks=node_ranks), torch.Generator().manual_seed(dist.get_rank())
    rank, ranks, sizes, results = mesh.dp_cp.rank, mesh.dp_cp.size, [300, 600, 456], []
    plans = [BucketPlan(None, (), n - n % ranks, ranks, mesh.across_nodes.size) for n in sizes]
    same = mesh, dtype, plans[1].size, True, plain.sum_parts
    with on_files(folder, mesh.in_node), mock.patch.object(slices, "PIECE_BYTES", 4 * 70):
        for maker in (
            slices.SymmetricMemorySliceComm((dtype.itemsize + 2) * sum(sizes), *same),
            slices.ProcessGroupSliceComm(*same),
        ):
            grads, params = ([maker.zeros(plan.size, of) for plan in plans] for of in (dtype, torch.bfloat16))
            assert not any(buffer.any() for buffer in grads + params)
            sums = [grad[plan.slice_of(rank)].float() for grad, plan in zip(grads, plans)]
            for _ in range(2):
                for grad in grads:
                    grad.copy_(torch.randn(len(grad), generator=draw))
                for handle in [maker.reduce(grad, total) for grad, total in zip(grads, sums)]:
                    handle.wait()
                dist.barrier()  # the optimizer's all-reduce
                owned = [param[plan.slice_of(rank)] for param, plan in zip(params, plans)]
                for own, total in zip(owned, sums):
                    own.copy_(total)
                for handle in [maker.gather(param, own) for param, own in zip(params, owned)]:
                    handle.wait()
                results.append([x.clone() for x in sums] + [param.float() for param in params])
            draw.manual_seed(dist.get_rank())
    return [(mine, other) for a, b in zip(results[:2], results[2:]) for mine, other in zip(a, b)]
