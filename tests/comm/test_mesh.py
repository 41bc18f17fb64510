"""The mesh: coordinates against a numpy array of ranks, and process groups against the coordinates."""

import math
import time
from collections import Counter
from datetime import timedelta
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minitron.comm.activity import Activity, Progress
from minitron.comm.agree import Agreement
from minitron.comm.mesh import AXES, Mesh, _data_ranks_of_a_node, offline_axes
from minitron.planner.dryrun.dryrun import fake_world

NAMES = (*AXES, "dp_cp", "tied_stages", "world")
sizes = st.integers(1, 3)


def lines_through(ranks, place):
    """Per axis name the ranks of the line through `place`: the twin, which only slices an array [pp, dp, cp, tp]."""
    pp, dp, cp, tp = place
    column = ranks[:, dp, cp, tp]
    ends = list(dict.fromkeys([column[0], column[-1]]))
    return {
        "pp": column,
        "dp": ranks[pp, :, cp, tp],
        "cp": ranks[pp, dp, :, tp],
        "tp": ranks[pp, dp, cp, :],
        "dp_cp": ranks[pp, :, :, tp].ravel(),
        "world": ranks.ravel(),
        "tied_stages": ends if ranks[place] in ends else [ranks[place]],
    }


def coordinates(mesh):
    return {
        name: (axis.name, axis.rank, axis.size, axis.ranks)
        for name, axis in ((name, getattr(mesh, name)) for name in NAMES)
    }


@given(pp=sizes, dp=sizes, cp=sizes, tp=sizes)
def test_offline_coordinates_are_lines_of_an_array_of_ranks(pp, dp, cp, tp):
    ranks = np.arange(pp * dp * cp * tp).reshape(pp, dp, cp, tp)
    for place in np.ndindex(*ranks.shape):
        rank = int(ranks[place])
        mesh = Mesh.offline(ranks.size, rank, tp=tp, pp=pp, cp=cp)
        assert mesh.rank == rank
        assert coordinates(mesh) == {
            name: (name, list(line).index(rank), len(line), tuple(int(r) for r in line))
            for name, line in lines_through(ranks, place).items()
        }
        assert all(getattr(mesh, name).group is None for name in NAMES)
        assert mesh.in_node is mesh.dp_cp and mesh.across_nodes.ranks == (rank,)


@given(pp=sizes, dp=sizes, cp=sizes, tp=sizes)
def test_all_ranks_agree_on_who_is_in_a_line(pp, dp, cp, tp):
    """Collectives need it: the members of an axis name the same ranks in the same order, and rank i is the i-th."""
    world = pp * dp * cp * tp
    meshes = [Mesh.offline(world, rank, tp=tp, pp=pp, cp=cp) for rank in range(world)]
    for mesh in meshes:
        for name in NAMES:
            axis = getattr(mesh, name)
            assert axis.ranks[axis.rank] == mesh.rank
            assert all(getattr(meshes[other], name).ranks == axis.ranks for other in axis.ranks)


def sums_over_axes(sizes):
    """This rank's coordinates, and what an all-reduce of 2^rank over each axis gives: a bit for every participant."""
    mesh = Mesh.create(**sizes)
    sums = {}
    for name in NAMES:
        axis, x = getattr(mesh, name), torch.tensor([1 << mesh.rank])
        if axis.size > 1:
            dist.all_reduce(x, group=axis.group)
            assert dist.get_group_rank(axis.group, mesh.rank) == axis.rank
        else:
            assert axis.group is None
        sums[name] = int(x)
    return coordinates(mesh), sums


@pytest.mark.parametrize(
    "sizes",
    [{"pp": 2, "cp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 4, "cp": 2}, {"cp": 2, "tp": 2}, {"tp": 8}, {}],
    ids=str,
)
def test_groups_communicate_over_exactly_the_ranks_of_their_axis(ranks, sizes):
    """Jobs share worker processes, so this also shows that nothing of an earlier mesh is left behind."""
    for rank, (coords, sums) in enumerate(ranks(8, sums_over_axes, sizes)):
        assert coords == coordinates(Mesh.offline(8, rank, **sizes))
        assert sums == {name: sum(1 << r for r in line) for name, (_, _, _, line) in coords.items()}


def sums_over_levels(sizes, node_ranks):
    """Of dp_cp and its levels the ranks, and what an all-reduce of 2^rank gives."""
    mesh = Mesh.create(**sizes, node_ranks=node_ranks)
    found = [mesh.uneven]
    for axis in (mesh.dp_cp, mesh.in_node, mesh.across_nodes):
        x = torch.tensor([1 << mesh.rank])
        if axis.size > 1:
            dist.all_reduce(x, group=axis.group)
        found.append((axis.ranks, axis.ranks[axis.rank], int(x)))
    return found


@pytest.mark.parametrize(
    "sizes, node_ranks, local",
    [
        ({}, 2, 2),
        ({"tp": 2}, 4, 2),
        ({"tp": 2}, 2, 1),
        ({"tp": 4}, 2, 1),
        ({"pp": 2, "cp": 2}, 2, 2),
        ({"cp": 4}, 2, 2),
        ({}, 8, None),
        ({"pp": 2}, 4, None),
        ({"tp": 8}, 4, None),
        ({}, 3, 0),
        ({"pp": 2}, 3, 0),
        ({}, 0, 0),
    ],
    ids=str,
)
def test_levels_are_the_data_ranks_of_a_node_and_those_of_equal_place(ranks, sizes, node_ranks, local):
    """local: data ranks of a node; 0: nodes differ; None: one node has all of them. Then there is one level."""
    for rank, (uneven, (members, *_), mine, far) in enumerate(ranks(8, sums_over_levels, sizes, node_ranks)):
        assert uneven == (local == 0)
        here = [r for r in members if r // node_ranks == rank // node_ranks] if local else members  # 0: not known
        there = members[here.index(rank) :: local] if local else (rank,)
        assert mine == (tuple(here), rank, sum(1 << r for r in here)) and len(here) == (local or len(members))
        assert far == (tuple(there), rank, sum(1 << r for r in there))


def test_nodes_of_different_sizes_have_no_levels(ranks):
    assert all(uneven for uneven, *_ in ranks(4, levels_of_a_node_more, 0))


def levels_of_a_node_more(_):
    return sums_over_levels({}, 2 if dist.get_rank() < 2 else 1)


def test_a_mesh_of_16384_ranks_is_made_at_once():
    """It took 80 s while every rank listed the whole world for each of its ranks. Bound: 10 times of what it takes."""
    sizes, start = {"tp": 8, "pp": 16, "cp": 2}, time.process_time()
    with fake_world(16384, 9000):
        assert coordinates(Mesh.create(**sizes, device="meta")) == coordinates(Mesh.offline(16384, 9000, **sizes))
    assert time.process_time() - start < 5


def test_a_world_of_one_needs_no_groups(ranks):
    ((coords, sums),) = ranks(1, sums_over_axes, {})
    assert coords == coordinates(Mesh.offline()) and set(sums.values()) == {1}


def test_device(monkeypatch):
    assert Mesh.offline(device="meta").device == torch.device("meta")
    assert Mesh.offline().device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(Progress, "of", lambda device: None)
    assert Mesh.offline(device="cuda").device == torch.device("cuda", 3)
    assert Mesh.offline(device="cuda:1").device == torch.device("cuda", 1)


def test_a_world_that_the_axes_do_not_divide_is_refused(ranks):
    message = r"tp\*pp\*cp=2\*3\*1 does not divide the world of 8 ranks"
    with pytest.raises(AssertionError, match=message):
        Mesh.offline(8, tp=2, pp=3)
    with pytest.raises(RuntimeError, match=message):
        ranks(8, sums_over_axes, {"tp": 2, "pp": 3})


def untied():
    mesh = Mesh.create(pp=2, tied=False)
    return mesh.tied_stages.ranks, mesh.tied_stages.group


def test_without_tied_embeddings_nobody_makes_their_group(ranks):
    assert ranks(4, untied) == [((rank,), None) for rank in range(4)]


@pytest.mark.parametrize(
    "rank, sizes, node_ranks",
    [
        (0, {"tp": 2, "pp": 4}, 8),
        (3, {"tp": 2, "pp": 4}, 2),  # in the middle of a pipeline: in no pair of tied stages
        (0, {"pp": 2, "cp": 2}, 8),
        (7, {"pp": 8}, 8),
        (0, {"cp": 8}, 8),
        (0, {"cp": 4}, 2),
        (5, {"cp": 2}, 2),
        (0, {}, 8),
        (6, {}, 2),
        (1, {"tp": 2}, 2),
    ],
    ids=str,
)
def test_over_nccl_each_group_is_one_split_of_the_world(rank, sizes, node_ranks):
    """All ranks name the same lists. Axes of the same lists have one group, named by them; only cp has its own."""
    made = {}  # the name and the lists of each group

    def split(split_ranks, group_desc):
        made[group := object()] = group_desc, tuple(map(tuple, split_ranks))
        return group if any(rank in ranks for ranks in split_ranks) else None

    alone = mock.patch.object(Agreement, "create", lambda *_: Agreement())
    with fake_world(8, rank), mock.patch.object(dist, "split_group", split), alone:
        world = dist.group.WORLD
        world.bound_device_id = torch.device("cpu", 0)
        mesh = Mesh.create(**sizes, device="meta", node_ranks=node_ranks)
    shape = (mesh.pp.size, mesh.dp.size, mesh.cp.size, mesh.tp.size)
    local = _data_ranks_of_a_node(shape, [node_ranks])
    axes = [offline_axes(other, shape, True, Activity(), local) for other in range(8)]
    sharing = {(((*range(8),),), False): ["world"]}
    for name in axes[0]:
        if lists := tuple(sorted({each[name].ranks for each in axes if each[name].size > 1})):
            sharing.setdefault((lists, name == "cp"), []).append(name)
    for (lists, _), names in sharing.items():
        (group,) = {getattr(mesh, name).group for name in names}
        if "world" in names:
            assert group is world
        else:
            name = " ".join(sorted({*names} - ({"tied_stages"} if len(names) > 1 else set())))
            (found,) = [
                one for one, (desc, of) in made.items() if (" ".join(sorted(desc.split())), of) == (name, lists)
            ]
            assert group is (found if any(rank in ranks for ranks in lists) else None)
    assert len(made) == len(sharing) - 1


def limits():
    """Return the time limit of each of this rank's process groups."""
    mesh = Mesh.create(pp=2, tp=2, timeout=timedelta(seconds=77), node_ranks=2)
    groups = {name: axis.group for name, axis in vars(mesh).items() if getattr(axis, "group", None) is not None}
    return {name: group._get_backend(torch.device("cpu")).options._timeout for name, group in groups.items()}


def test_every_group_has_the_time_limit_of_collectives(ranks):
    for found in ranks(8, limits):
        assert found.keys() >= {"pp", "dp", "tp", "dp_cp", "tied_stages", "world", "across_nodes"}
        assert set(found.values()) == {timedelta(seconds=77)}


def test_levels_are_made_where_each_node_has_as_many_data_ranks():
    """Counted rank by rank, for nodes of any size, of which the last may be smaller."""
    found = Counter()
    for shape, node in product(product((1, 2), (1, 2, 3, 4), (1, 2), (1, 2, 3, 4)), range(1, 13)):
        world = math.prod(shape)
        node_of = [rank // node for rank in range(world)]
        lines = {offline_axes(rank, shape, False, Activity())["dp_cp"].ranks for rank in range(world)}
        counts = {n for ranks in lines for n in Counter(node_of[rank] for rank in ranks).values()}
        expected = counts.pop() if len(counts) == 1 else 0
        if all(len({node_of[rank] for rank in ranks}) == 1 for ranks in lines):
            expected = None
        mine = _data_ranks_of_a_node(shape, [node_of.count(n) for n in node_of])
        # Where the end of a node cuts a tensor-parallel group unevenly, there could be more levels of one rank.
        cut = shape[3] % node and node % shape[3]
        assert mine == expected or (cut and (mine, expected) == (0, 1)), (shape, node)
        found[mine] += 1
    assert {None, 0, 1, 2, 3, 4} <= found.keys()
