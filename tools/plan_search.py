"""Which layout is the fastest that fits, and why not another one.

The idea: all layouts of a world are some thousands, and most fall at a cheap test. In order of cost:

    1. the rules of `rules.check`             tp divides the heads, the batch divides over dp, ...
    2. memory; a layout takes the least recomputation with which it fits, since more is only slower
    3. a bound on the step from below: the slowest rank's work and the way to it and back
    4. the schedule, simulated, in the order of the bounds, until none that is left can be among the best

Each layout that falls has a reason, and reasons are counted. Varied are tp, cp, pp, vp, micro batch, recomputation; the
global batch, and with it the result of training, stays. Left out: uneven stages, other cp styles.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from minitron.config import rules
from minitron.config.schema import Config
from minitron.planning.machine import Machine
from minitron.planning.memory import Memory
from minitron.planning.plan import Plan, Step, plan, room_gib

RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Found:
    """`best`: plans, fastest first. `others`: (configuration, seconds that its step takes at least) of all that fit
    too, in this order. `reasons`: how many layouts fell, by why.
    """

    best: list[Plan]
    others: list[tuple[Config, float]]
    reasons: Counter


def search(cfg: Config, world: int, machine: Machine, count: int = 5) -> Found:
    """The `count` fastest layouts of `world` GPUs, and what became of all others."""
    reasons, fitting = Counter(), []
    for layout in layouts(cfg, world, machine):
        try:
            rules.check(layout, world)
        except ValueError as error:
            reasons[f"breaks a rule of {str(error).partition('=')[0]}"] += 1  # the key, with which its line begins
            continue
        lighter = _that_fits(layout, world, machine)
        if isinstance(lighter, str):
            reasons[lighter] += 1
        else:
            fitting.append((Step(lighter, world, machine).at_least(), len(fitting), lighter))
    heapq.heapify(fitting)
    plans: list[Plan] = []
    while fitting and (len(plans) < count or fitting[0][0] < plans[count - 1].step_seconds):
        plans.append(plan(heapq.heappop(fitting)[2], world, machine))
        plans.sort(key=lambda p: p.step_seconds)
    others = [(p.cfg, p.step_seconds) for p in plans[count:]] + [(layout, bound) for bound, _, layout in fitting]
    return Found(plans[:count], sorted(others, key=lambda pair: pair[1]), reasons)


def layouts(cfg: Config, world: int, machine: Machine) -> Iterator[Config]:
    """All layouts, most of which break a rule or do not fit; the configuration's own is among them."""
    m, given = cfg.model, cfg.parallel
    yield cfg
    for tp in _powers(2 * machine.fabric.gpus_per_node):
        for cp in _powers(16):
            for pp in (n for n in range(1, m.num_layers + 1) if world % (n * tp * cp) == 0):
                even = [vp for vp in range(1, m.num_layers // pp + 1) if m.num_layers % (pp * vp) == 0 or vp == 1]
                for vp in even if pp > 1 else (1,):
                    kind = given.schedule if pp > 1 and vp == 1 else "1f1b"
                    for size in MICRO_BATCHES:
                        parallel = replace(given, tp=tp, cp=cp, pp=pp, vp=vp, schedule=kind, layers_per_stage=None)
                        layout = replace(cfg, parallel=parallel, train=replace(cfg.train, micro_batch_size=size))
                        if layout != cfg:
                            yield layout


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]


def _that_fits(layout: Config, world: int, machine: Machine) -> Config | str:
    """The layout with the least recomputation that fits, or why none does."""
    room = room_gib(machine) * 2**30
    for recompute in RECOMPUTE:
        layout = replace(layout, train=replace(layout.train, recompute=recompute))
        memory = Memory(layout, world, gpus_per_node=machine.fabric.gpus_per_node)
        if sum(memory.lasting()) > room:
            return "too large: parameters, gradients and optimizer alone"
        if memory.peak()[1].total() <= room:
            return layout
    return "too large: with activations, even recomputed"


# ---- a job that does not fit -----------------------------------------------------------------------------------------


def changes(before: Config, after: Config) -> dict[str, object]:
    """The keys, `section.key`, in which a layout differs."""
    return {
        f"{section}.{key}": new
        for section, keys in (
            ("parallel", ("tp", "pp", "vp", "cp", "schedule", "layers_per_stage")),
            ("train", ("micro_batch_size", "recompute")),
        )
        for key in keys
        if (new := getattr(getattr(after, section), key)) != getattr(getattr(before, section), key)
    }


def written(changed: dict[str, object]) -> list[str]:
    """As the command line takes them."""
    return [f"{key}={'null' if value is None else value}" for key, value in changed.items()]


def remedy(job: Plan, given: Config) -> str:
    """One line for a plan that does not fit: what does not, and the nearest change that would, of `given`."""
    machine, room = job.machine, room_gib(job.machine)
    part, size = max(job.memory.items(), key=lambda pair: pair[1])
    problem = (
        f"{job.memory_gib:.1f} GiB do not fit into the {room:.1f} GiB that {machine.device.gpu} leaves on "
        f"pipeline rank {job.fullest}; the largest part is {part}, {size / 2**30:.1f} GiB"
    )
    for world in (job.world << i for i in range(8)):
        if nearest := _nearest(job.cfg, world, machine):
            more = [f"{world} GPUs"] if world > job.world else []
            return f"{problem}; use {' '.join(more + written(changes(given, nearest)))}"
    return f"{problem}; no layout of {world} GPUs fits either: use a smaller model, or another device"


def _nearest(cfg: Config, world: int, machine: Machine) -> Config | None:
    """The layout that fits after the fewest changes; the fastest of several."""
    every = (
        replace(layout, train=replace(layout.train, recompute=recompute))
        for layout in layouts(cfg, world, machine)
        for recompute in RECOMPUTE
    )
    distance, fitting, room = None, [], room_gib(machine) * 2**30
    for layout in sorted(every, key=lambda layout: len(changes(cfg, layout))):
        if fitting and len(changes(cfg, layout)) > distance:
            break
        try:
            rules.check(layout, world)
        except ValueError:
            continue
        memory = Memory(layout, world, gpus_per_node=machine.fabric.gpus_per_node)
        if sum(memory.lasting()) <= room and memory.peak()[1].total() <= room:
            fitting.append((Step(layout, world, machine).at_least(), len(fitting), layout))
            distance = len(changes(cfg, layout))
    return min(fitting)[2] if fitting else None
