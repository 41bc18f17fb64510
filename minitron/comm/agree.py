"""Let all ranks agree on facts that each process learns by itself, such as a disk error.

Problem: each rank learns by itself whether a disk failed, which checkpoint is whole, or what a save wrote. All ranks
must then do the same. One group of the whole world would need a connection from each rank to every other. The idea: a
tree of small gloo groups. Neighbours agree first, then the first ranks of these groups, and so on up to rank 0.

    level 0    0 1 2 3 4 5 6 7    8 9 ... 15    ...    56 ... 63       8 groups of 8 ranks
    level 1    0                  8             ...    56              1 group of their first ranks

Values go up the tree, rank 0 applies a rule, the answer goes down. Each rank has at most FAN_OUT - 1 connections a
level. Values travel as JSON, so a foreign process that joins cannot make a rank run code. Values are text, numbers,
lists and dictionaries; tuples arrive as lists. Two threads of a rank must not agree at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from minitron.comm.activity import PeerLost

FAN_OUT = 8  # ranks of a group
PATIENCE = timedelta(days=1)  # a disk may be slow; a rank that dies ends the wait for it at once
Errors = Sequence[type[ValueError]]


class Level(NamedTuple):
    """A group of the tree: its ranks in order, and the index of this rank among them."""

    ranks: tuple[int, ...]
    rank: int
    group: Any  # a ProcessGroupGloo, whose collectives torch's stubs do not list


class Agreement:
    """Collective over the world: every rank calls the same method. One process alone has no levels.

    levels: the groups of this rank, from the ranks upwards. The first rank of a group is also in one above.
    """

    def __init__(self, levels: Sequence[Level] = ()):
        self.levels = levels

    @staticmethod
    def create(rank: int, size: int, timeout: timedelta | None) -> Agreement:
        """Make this rank's groups of the tree, over the store of the default process group.

        timeout: making a group fails after it; None: torch's own. In torch's fake world there are no groups.
        """
        if "fake" in dist.get_backend():
            return Agreement()
        # Not by dist.new_group: it names a group by how many this rank has, and here ranks have different numbers.
        store, levels = dist.distributed_c10d._get_default_store(), []
        number = store.add(f"agreements-{rank}", 1)  # the same on all ranks: a process group may have several meshes
        for ranks in tree(rank, size):
            of_group = dist.distributed_c10d.PrefixStore(f"agreement-{number}-{ranks[0]}-{ranks[1]}", store)
            place = ranks.index(rank)
            group = dist.ProcessGroupGloo(of_group, place, len(ranks), timeout or default_pg_timeout)
            levels.append(Level(ranks, place, group))
        agreement = Agreement(levels)
        agreement.decide(lambda: None, lambda _: None)  # all ranks are connected, or some have not come in time
        for level in levels:
            level.group._set_default_timeout(PATIENCE)
        return agreement

    def decide(
        self,
        own: Callable[[], Any],
        rule: Callable[[list[Any]], Any],
        errors: Errors = (ValueError,),
        each: bool = False,
    ) -> Any:
        """Return rule([own() of every rank, in order]), computed on rank 0, on every rank.

        each: the rule returns a list with an answer for each rank, and each rank gets its own.
        An error of these classes (subclasses first) in any rank's own() or in the rule is raised on every rank, so that
        no rank waits for another in a collective. Raises PeerLost if another rank has died.
        """

        def outcome(call: Callable[[], Any]) -> dict[str, Any]:
            try:
                return {"value": call()}
            except tuple(errors) as error:
                number = next(i for i, kind in enumerate(errors) if isinstance(error, kind))
                return {"error": number, "text": str(error)}

        outcomes, answer = [outcome(own)], b""
        for level in self.levels:
            outcomes = list(chain.from_iterable(map(json.loads, _to_first(level, json.dumps(outcomes).encode()))))
        if outcomes:  # only rank 0 has them, those of all ranks
            failed = next((x for x in outcomes if "error" in x), None)
            answer = json.dumps(failed or outcome(lambda: rule([x["value"] for x in outcomes]))).encode()
        for level in reversed(self.levels):
            answer = _from_first(level, answer)
            if each and "value" in (agreed := json.loads(answer)):  # of the ranks of this group and those below them
                begins = [rank - level.ranks[0] for rank in level.ranks] + [len(agreed["value"])]
                mine = agreed["value"][begins[level.rank] : begins[level.rank + 1]]
                answer = json.dumps({"value": mine}).encode()
        agreed = json.loads(answer)
        if "error" in agreed:
            raise errors[agreed["error"]](agreed["text"])
        return agreed["value"][0] if each else agreed["value"]


def tree(rank: int, size: int) -> list[tuple[int, ...]]:
    """List the groups of a rank in the tree over `size` ranks, from the ranks upwards."""
    groups, stride = [], 1
    while stride < size and rank % stride == 0:
        first = rank - rank % (stride * FAN_OUT)
        ranks = tuple(range(first, min(first + stride * FAN_OUT, size), stride))
        if len(ranks) > 1:
            groups.append(ranks)
        stride *= FAN_OUT
    return groups


def _to_first(level: Level, data: bytes) -> list[bytes]:
    """Send bytes to the first rank of a group, which returns those of all its ranks; the others return none."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in level.ranks]
    _communicate(level.group.allgather, sizes, torch.tensor([len(data)]))
    padded = torch.frombuffer(bytearray(data.ljust(int(max(sizes)))), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in level.ranks] if level.rank == 0 else []
    _communicate(level.group.gather, rows, padded, 0)
    return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes)]


def _from_first(level: Level, data: bytes) -> bytes:
    """Return the bytes of the first rank of a group on all its ranks."""
    size = torch.tensor([len(data)])
    _communicate(level.group.broadcast, size, 0)
    buffer = bytearray(data) if level.rank == 0 else bytearray(int(size))
    _communicate(level.group.broadcast, torch.frombuffer(buffer, dtype=torch.uint8), 0)
    return bytes(buffer)


def _communicate(collective: Callable[..., dist.Work], *arguments: Any) -> None:
    try:
        collective(*arguments).wait()
    except RuntimeError as error:
        raise PeerLost(str(error)) from error
