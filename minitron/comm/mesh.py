"""The mesh: which ranks work together along each parallel axis.

Problem: a rank of a 4-axis job is a member of many groups, such as its tensor-parallel neighbours and its pipeline.
Every layer needs a few of them. The idea: ranks are the elements of an array [pp, dp, cp, tp]. tp is innermost, so that
the axis with the most traffic stays inside a node. An `Axis` is the line through this rank along one dimension of the
array. Code that communicates takes it as an argument; nothing here is global. An axis of size 1 has no group, and every
collective over it is the identity, so the model needs no `if tp > 1`.

    8 ranks, pp 2, dp 1, cp 2, tp 2:     rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp
        pp 0: cp 0: ranks 0 1            rank 5: tp axis (4, 5), cp axis (5, 7), pp axis (1, 5),
              cp 1: ranks 2 3                    dp_cp axis (5, 7), tied_stages axis (1, 5)
        pp 1: cp 0: ranks 4 5
              cp 1: ranks 6 7

More axes serve one purpose each. Gradients are summed over `dp_cp`, and optimizer state is sharded over it. dp_cp has
two levels if gradients travel in bf16 between nodes (optim/slices.py). `in_node` has the dp_cp ranks of this node.
`across_nodes` has the ranks with the same position in every node. Without levels `in_node` is all of dp_cp, and
`across_nodes` one rank. The two ranks of `tied_stages`, the first and the last of a pipeline, hold the two copies of a
tied weight. Statistics of a step are summed over `world`.

NCCL's buffers for a process group are large, so axes with the same ranks have one group. Operations of a group run in
order. So cp has its own: messages of a ring must not wait for sums of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from minitron.comm.activity import Activity, Stopwatch
from minitron.comm.agree import Agreement
from minitron.comm.layout import axes_of_groups, spans

AXES = ("pp", "dp", "cp", "tp")
UNWATCHED = Activity()  # of an axis that was made without a mesh: written, but never read


@dataclass(frozen=True)
class Axis:
    """Ranks that communicate with each other. ranks: global, in order. rank: the index of this rank among them."""

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    activity: Activity = field(default=UNWATCHED, compare=False, repr=False)  # one for all axes of a rank

    @staticmethod
    def single() -> Axis:
        """Make an axis of one rank."""
        return Axis("single", 0, 1, (0,))


@dataclass(frozen=True)
class Mesh:
    """This rank's axes. Made by `create` (with process groups) or `offline` (coordinates only)."""

    rank: int
    device: torch.device
    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    dp_cp: Axis
    in_node: Axis
    across_nodes: Axis
    tied_stages: Axis
    world: Axis
    agreement: Agreement
    uneven: bool  # nodes have different or unknown numbers of dp_cp ranks, so dp_cp has one level

    @property
    def activity(self) -> Activity:
        """The one Activity of all axes: what this rank is doing."""
        return self.world.activity

    def coordinates(self) -> str:
        """Write the rank and its coordinates: "rank 5 (pp 1, dp 0, cp 0, tp 1)"."""
        return f"rank {self.rank} ({', '.join(f'{name} {getattr(self, name).rank}' for name in AXES)})"

    def close(self) -> None:
        """End all process groups and their threads.

        A thread of gloo lets go of a tensor after its collective. If Python is ending by then, the process aborts.
        """
        for part in vars(self).values():
            if isinstance(part, Axis):
                object.__setattr__(part, "group", None)  # the last reference to a group ends its threads
        self.agreement.levels = ()
        if dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def create(
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        tied: bool = True,
        device: torch.device | str = "cpu",
        timeout: timedelta | None = None,
        stopwatch: Stopwatch | None = None,
        node_ranks: int | None = None,
    ) -> Mesh:
        """Make the mesh of the initialised default process group; dp is its world divided by tp, pp and cp.

        tied: the model ties its embeddings and so needs the tied_stages axis. timeout: a collective of any axis fails
        after it; None: torch's own. stopwatch: times this rank's own work. node_ranks: the number of ranks on this
        node, whose numbers are consecutive; 0 if it is unknown. It makes the levels of dp_cp; None: make one level.
        Collective.
        """
        device = torch.device(device)
        rank, world = dist.get_rank(), dist.get_world_size()
        shape = _shape(world, tp, pp, cp)
        agreement, local = Agreement.create(rank, world, timeout), None
        if node_ranks is not None:
            local = agreement.decide(lambda: node_ranks, lambda counts: _data_ranks_of_a_node(shape, counts))
        axes = offline_axes(rank, shape, tied, Activity(device, stopwatch), local)
        groups: dict[str, dist.ProcessGroup | None] = dict.fromkeys(axes)
        for (size, stride, own), names in axes_of_groups(shape, local).items():
            group = dist.group.WORLD
            if size < world or own:
                firsts = (first for first in range(world) if first // stride % size == 0)
                lines = [list(range(first, first + size * stride, stride)) for first in firsts]
                group = _make_groups(" ".join(names), lines)
            groups |= dict.fromkeys(names, group)
        groups["tied_stages"] = groups["pp"]
        if tied and pp > 2:
            stage_size = world // pp  # pp is outermost: a stage is that many ranks in a row
            pairs = [[i, i + world - stage_size] for i in range(stage_size)]
            groups["tied_stages"] = _make_groups("tied_stages", pairs)
        if timeout is not None:  # new groups do not inherit the default group's
            for group in filter(None, groups.values()):
                dist.distributed_c10d._set_pg_timeout(timeout, group)
        axes = {name: replace(a, group=groups[name]) if a.size > 1 else a for name, a in axes.items()}
        return Mesh(rank, device, **axes, agreement=agreement, uneven=local == 0)

    @staticmethod
    def offline(
        world: int = 1, rank: int = 0, *, tp: int = 1, pp: int = 1, cp: int = 1, device: torch.device | str = "cpu"
    ) -> Mesh:
        """Make the mesh of `rank` in a world that need not exist: without process groups or communication."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        axes = offline_axes(rank, _shape(world, tp, pp, cp), True, Activity(device))
        return Mesh(rank, device, **axes, agreement=Agreement(), uneven=False)


def _shape(world: int, tp: int, pp: int, cp: int) -> tuple[int, int, int, int]:
    assert world % (tp * pp * cp) == 0, f"tp*pp*cp={tp}*{pp}*{cp} does not divide the world of {world} ranks"
    return pp, world // (tp * pp * cp), cp, tp


def _make_groups(name: str, lines: list[list[int]]) -> dist.ProcessGroup | None:
    """Make a process group of each list of ranks; return this rank's, if it is in one. Collective over the world."""
    world = dist.group.WORLD
    if world is not None and world.bound_device_id is not None:  # NCCL splits the world's communicator
        return dist.split_group(split_ranks=lines, group_desc=name)
    return dist.new_subgroups_by_enumeration(lines, group_desc=name)[0]


def _data_ranks_of_a_node(shape: tuple[int, int, int, int], node_ranks: list[int]) -> int | None:
    """Return how many dp_cp ranks a node has: 0 if nodes differ or are unknown, None if one node has all of dp_cp.

    node_ranks: the number that each rank passed to `Mesh.create`.
    """
    _, dp, cp, tp = shape
    stage, (node, *others) = dp * cp * tp, set(node_ranks)
    if dp * cp == 1 or all(n and n % stage == 0 for n in node_ranks):
        return None
    if others or not node or stage % node:
        return 0
    return 1 if tp % node == 0 else node // tp * (node % tp == 0)


def offline_axes(
    rank: int, shape: tuple[int, int, int, int], tied: bool, activity: Activity, local: int | None = None
) -> dict[str, Axis]:
    """Make every axis of one rank of a [pp, dp, cp, tp] array, by name and without groups.

    tied: see `Mesh.create`. local: the ranks of dp_cp that a node has; None: dp_cp has one level.
    """
    lines = {}
    for name, (size, stride) in spans(shape, local).items():
        first = rank - rank // stride % size * stride
        lines[name] = tuple(range(first, first + size * stride, stride))
    ends = (lines["pp"][0], lines["pp"][-1]) if shape[0] > 1 and tied else ()
    lines["tied_stages"] = ends if rank in ends else (rank,)
    axes = {name: Axis(name, ranks.index(rank), len(ranks), ranks, activity=activity) for name, ranks in lines.items()}
    return axes if local else axes | {"in_node": axes["dp_cp"]}
