"""Agreement: the tree of groups, rules over all ranks, errors of any rank, and a rank that dies."""

import os
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from minitron import testing
from minitron.comm import agree
from minitron.comm.activity import PeerLost
from minitron.comm.agree import FAN_OUT, Agreement, tree
from minitron.comm.mesh import Mesh
from minitron.planner.dryrun.dryrun import fake_world


class Broken(ValueError):
    pass


class VeryBroken(Broken):
    pass


ERRORS = (VeryBroken, Broken)


@pytest.mark.parametrize("size", [1, 2, 8, 9, 63, 64, 65, 600])
def test_every_rank_is_reached_and_connections_stay_few(size):
    groups = {rank: tree(rank, size) for rank in range(size)}
    for rank, own in groups.items():
        assert all(rank in ranks and all(ranks in groups[other] for other in ranks) for ranks in own)
        assert all(1 < len(ranks) <= FAN_OUT for ranks in own)
        # From the ranks upwards: a rank is first in each of its groups but the last one.
        assert [ranks[0] == rank for ranks in own[:-1]] == [True] * (len(own) - 1)
    reached = {0}
    for rank in range(size):  # the first rank of a group is lower than the others
        reached |= {other for ranks in groups[rank] if rank in reached for other in ranks}
    assert reached == set(range(size))
    everyone = {ranks for own in groups.values() for ranks in own}
    assert sum(len(ranks) - 1 for ranks in everyone) == size - 1, "each rank but the first sends to one other rank"


def agreed(fan_out):
    """What all ranks get, and what is for this rank alone, in a tree of small groups."""
    agree.FAN_OUT = fan_out
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        agreement = Agreement.create(rank, size, None)
        listed = agreement.decide(lambda: {"rank": rank, "text": "é" * rank}, lambda values: values)
        rule = lambda values: [[number, *value] for number, value in enumerate(values)]
        return listed, agreement.decide(lambda: [rank, rank * 1.5], rule, each=True)
    finally:
        agree.FAN_OUT = FAN_OUT


@pytest.mark.parametrize("world, fan_out", [(1, 8), (2, 8), (5, 2), (8, 3), (8, 8), (7, 2)])
def test_all_ranks_get_the_answer_of_rank_0(ranks, world, fan_out):
    for rank, (listed, own) in enumerate(ranks(world, agreed, fan_out)):
        assert listed == [{"rank": r, "text": "é" * r} for r in range(world)]
        assert own == [rank, rank, rank * 1.5]


@mock.patch.object(agree, "FAN_OUT", 2)
def agreed_by_two():
    """Return what each of two agreements of a process group gives this rank, and the time limits of their groups."""
    rank, size, limit = dist.get_rank(), dist.get_world_size(), agree.PATIENCE / 2
    agreements = [Agreement.create(rank, size, limit) for _ in range(2)]
    waits = {level.group.options._timeout for agreement in agreements for level in agreement.levels}
    return [agreement.decide(lambda: rank, list) for agreement in agreements[::-1]], waits


def test_a_process_group_may_have_several_agreements_which_wait_for_a_slow_disk(ranks):
    assert ranks(3, agreed_by_two) == [([[0, 1, 2]] * 2, {agree.PATIENCE})] * 3


@mock.patch.object(agree, "FAN_OUT", 2)
def failed(which, kind):
    """The class and text of the error that this rank sees, in a tree of pairs, and that agreeing goes on afterwards."""
    rank, agreement, seen = dist.get_rank(), Mesh.create().agreement, []

    def own():
        if rank in which:
            raise kind(f"disk of rank {rank}")
        return rank

    def rule(values):
        raise kind(f"rule over {values}")

    for each in False, True:
        try:
            agreement.decide(own, rule, ERRORS, each)
        except ValueError as error:
            seen.append((type(error), str(error)))
    return seen, agreement.decide(lambda: rank, sum)


@pytest.mark.parametrize("which, text", [((4, 3), "disk of rank 3"), ((), "rule over [0, 1, 2, 3, 4]")])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_one_rank_or_of_the_rule_is_raised_on_every_rank(ranks, which, text, kind):
    assert ranks(5, failed, which, kind) == [([(kind, text)] * 2, 10)] * 5


def loses_a_peer(seen):
    rank, agreement = dist.get_rank(), Mesh.create().agreement
    if rank == 1:
        os._exit(0)
    with pytest.raises(PeerLost):
        agreement.decide(lambda: None, lambda _: None)
    seen.write_text("lost")


def test_a_rank_that_died_ends_the_wait_of_the_others(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(testing, "GRACE_SECONDS", 600.0)  # until the other rank has found it
    with pytest.raises(RuntimeError):
        ranks(2, loses_a_peer, seen := tmp_path / "seen", timeout=600)
    assert seen.exists()


def slow_answer():
    """A rank comes later than the time limit of the mesh's collectives."""
    rank = dist.get_rank()
    agreement = Mesh.create(timeout=timedelta(seconds=5)).agreement
    return agreement.decide(lambda: time.sleep(7 * (rank == 1)) or rank, sum)


@pytest.mark.slow
def test_a_slow_rank_is_waited_for_beyond_the_limit_of_collectives(ranks):
    assert ranks(2, slow_answer) == [1, 1]


def test_of_16384_ranks_each_is_in_few_groups():
    """Descriptors and store operations of a rank grow with the depth of the tree, not with the world."""
    for rank in 0, 1, 8, 512, 4096, 16383:
        groups = tree(rank, 16384)
        assert len(groups) <= 5 and sum(len(ranks) - 1 for ranks in groups) <= 5 * (FAN_OUT - 1)


def test_in_a_fake_world_a_rank_is_alone():
    with fake_world(2048, 9):
        assert Mesh.create(tp=8, pp=16, device="meta").agreement.decide(lambda: 9, lambda values: values) == [9]
