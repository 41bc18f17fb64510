"""Every collective against its plain twin on whole tensors, and every backward against the transpose."""

from dataclasses import replace

import pytest
import torch

from minitron.comm import collectives
from minitron.comm.activity import Activity
from minitron.comm.mesh import Axis, Mesh
from minitron.testing import assert_close_rel

SIZES = (2, 4)


def _data(rank: int, shape=(8, 4, 12)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def run_collective(name, kwargs, shape):
    """Forward of rank-dependent x, backward of rank-dependent dy: (x, y, dy, dx) of this rank."""
    mesh = Mesh.create(tp=torch.distributed.get_world_size())
    x = _data(mesh.rank, shape).requires_grad_()
    y = getattr(collectives, name)(x, mesh.tp, **kwargs)
    dy = _data(100 + mesh.rank, y.shape)
    y.backward(dy)
    return x.detach(), y.detach(), dy, x.grad


FORWARD = {
    "copy": lambda xs, r, **k: xs[r],
    "all_reduce": lambda xs, r, **k: sum(xs),
    "all_gather": lambda xs, r, dim=0: torch.cat(xs, dim),
    "reduce_scatter": lambda xs, r, dim=0: sum(xs).chunk(len(xs), dim)[r],
    "split": lambda xs, r, dim=0: xs[r].chunk(len(xs), dim)[r],
    "all_to_all": lambda xs, r, split_dim, concat_dim: torch.cat(
        [x.chunk(len(xs), split_dim)[r] for x in xs], concat_dim
    ),
}
CASES = [("copy", {}), ("all_reduce", {})]
CASES += [(name, {"dim": dim}) for name in ("all_gather", "reduce_scatter", "split") for dim in (0, 2)]
CASES += [("all_to_all", {"split_dim": 2, "concat_dim": 0}), ("all_to_all", {"split_dim": 0, "concat_dim": 1})]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "name,kwargs", CASES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_forward_and_adjoint(ranks, size, name, kwargs):
    results = ranks(size, run_collective, name, kwargs, (8, 4, 12))
    xs, ys, dys, dxs = zip(*results)
    for r, y in enumerate(ys):
        assert_close_rel(y, FORWARD[name](list(xs), r, **kwargs), 1e-14, f"{name} of rank {r}")
    if name in ("copy", "split"):
        # x stands for one tensor that every rank holds, so its gradient is the sum over ranks, on every rank.
        twin = [x.clone() for x in xs]
        expected = sum(dys) if name == "copy" else torch.cat(dys, kwargs["dim"])
        for r in range(len(twin)):
            assert_close_rel(dxs[r], expected, 1e-14, f"d{name} of rank {r}")
    elif name == "all_reduce":
        # the sum is used once, by ranks that all hold the same copy of it and of its gradient
        for r in range(size):
            assert_close_rel(dxs[r], dys[r], 1e-14, f"d{name} of rank {r}")
    else:
        # a map on the ranks' tensors taken together: autograd of the twin gives the transpose
        leaves = [x.clone().requires_grad_() for x in xs]
        outputs = [FORWARD[name](leaves, r, **kwargs) for r in range(size)]
        torch.autograd.backward(outputs, list(dys))
        for r in range(size):
            assert_close_rel(dxs[r], leaves[r].grad, 1e-14, f"d{name} of rank {r}")


def gather_and_reduce_in_place():
    mesh = Mesh.create(tp=torch.distributed.get_world_size())
    rank, size = mesh.tp.rank, mesh.tp.size
    whole = torch.arange(4.0 * size) * (rank + 1)
    collectives.reduce_scatter_into(whole.chunk(size)[rank], whole, mesh.tp)
    mine = whole.chunk(size)[rank].clone()
    collectives.all_gather_into(whole, whole.chunk(size)[rank], mesh.tp)
    return mine, whole


@pytest.mark.parametrize("size", SIZES)
def test_slices_of_a_buffer_in_place(ranks, size):
    """The optimizer reduces and gathers flat buffers into and out of their own slices."""
    expected = torch.arange(4.0 * size) * sum(range(1, size + 1))
    for rank, (mine, whole) in enumerate(ranks(size, gather_and_reduce_in_place)):
        assert torch.equal(mine, expected.chunk(size)[rank])
        assert torch.equal(whole, expected)


def exchange_with_neighbours(cp):
    axis = Mesh.create(cp=cp).cp
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    sends = [(after, torch.tensor([axis.ranks[axis.rank], 1])), (before, torch.tensor([axis.ranks[axis.rank], 2]))]
    recvs = [(before, torch.zeros(2, dtype=torch.long)), (after, torch.zeros(2, dtype=torch.long))]
    arrived = collectives.exchange(axis, sends, recvs).wait()
    return [x.tolist() for x in arrived], [[axis.ranks[before], 1], [axis.ranks[after], 2]]


@pytest.mark.parametrize("cp", SIZES)
def test_messages_come_from_the_neighbours_along_the_axis(ranks, cp):
    for arrived, expected in ranks(4, exchange_with_neighbours, cp, timeout=120.0):  # a lost message is waited for
        assert arrived == expected


def test_an_axis_of_one_is_the_identity():
    x = torch.randn(3, 4)
    axis = Axis.single()
    for name, kwargs in CASES:
        if name != "all_to_all":
            assert getattr(collectives, name)(x, axis, **kwargs) is x


@pytest.mark.parametrize("name", ["all_gather_into", "reduce_scatter_into"])
def test_an_axis_of_one_fills_a_given_result(name):
    """In its format: a bucket that sums in bf16 has a float32 slice. A tensor that is its own result stays."""
    x, out = torch.randn(12, dtype=torch.bfloat16), torch.full((12,), torch.nan)
    for result in out, x:
        before = x.clone()
        assert getattr(collectives, name)(result, x, Axis.single(), wait=False).wait() is result
        assert torch.equal(result, before.to(result.dtype))


def test_indivisible_dimension_is_named():
    axis = Axis("tp", 0, 4, (0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"dimension 0 of \(6, 2\) is not divisible by the 4 ranks of axis 'tp'"):
        collectives.split(torch.zeros(6, 2), axis)


class Noted(Activity):
    """Keeps what it is told."""

    __slots__ = ("told",)

    def __init__(self):
        super().__init__()
        self.told = []

    def record(self, kind, axis, x, ranks):
        self.told.append(("record", kind, tuple(x.shape), ranks))

    def enter(self, kind, axis, num_bytes, waits=True):
        self.told.append((kind, axis.name, num_bytes, waits))


def noted():
    """Run each collective; return what the activity recorded, the gathered JSON and a minimum."""
    mesh = Mesh.create(tp=2)
    axis, told = replace(mesh.dp, activity=(activity := Noted())), {}
    x, wide, received, peer = torch.zeros(3), torch.zeros(6), [torch.empty(3), torch.empty(6)], 1 - axis.rank
    for name, run in {
        "all_reduce": lambda: collectives.all_reduce_(wide, axis),
        "later": lambda: collectives.all_reduce_(wide, axis, wait=False).wait(),
        "gather": lambda: collectives.all_gather_into(wide, x, axis),
        "scatter": lambda: collectives.reduce_scatter_into(x, wide, axis),
        "all_to_all": lambda: collectives.all_to_all_into(torch.empty(6), wide, axis),
        "exchange": lambda: collectives.exchange(axis, [(peer, x), (peer, wide)], [(peer, y) for y in received]).wait(),
    }.items():
        run()
        told[name] = activity.told[:]
        activity.told.clear()
    values = [None, {"é": mesh.rank}] if axis.rank else "x" * 300
    least = collectives.all_reduce_(torch.tensor([mesh.rank]), axis, op=torch.distributed.ReduceOp.MIN).wait()
    return axis.ranks, told, collectives.gather_json(values, axis, torch.device("cpu")), least.tolist()


def test_a_collective_is_noted_with_its_input_its_ranks_and_whether_it_waits(ranks):
    """A dry run counts these figures, and the log has them for a rank that hangs."""
    for rank, (members, told, gathered, least) in enumerate(ranks(4, noted)):
        assert members == (rank % 2, rank % 2 + 2)
        peer = (members[rank // 2 - 1],)
        assert told == {
            "all_reduce": [("record", "all-reduce", (6,), members), ("all-reduce", "dp", 24, True)],
            "later": [
                ("record", "all-reduce", (6,), members),
                ("all-reduce", "dp", 24, False),
                ("all-reduce", "dp", 24, True),
            ],
            "gather": [("record", "all-gather", (3,), members), ("all-gather", "dp", 12, True)],
            "scatter": [("record", "reduce-scatter", (6,), members), ("reduce-scatter", "dp", 24, True)],
            "all_to_all": [("record", "all-to-all", (6,), members), ("all-to-all", "dp", 24, True)],
            "exchange": [
                *(("record", kind, (n,), peer) for kind in ("send", "recv") for n in (3, 6)),
                ("exchange", "dp", 72, False),
                ("exchange", "dp", 72, True),
            ],
        }
        assert gathered == ["x" * 300, [None, {"é": members[1]}]] and least == [members[0]]
