"""Which change makes a job fit, in the words of the command line.

The idea: all layouts with plain stages are sorted by how many keys they change, and the first that keep the rules and
fit are compared by their steps; where none fits, with twice the GPUs, and so on. `plan_search.py` finds the best layout
of all; here the nearest one counts, since the user has written a layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from minitron.config import rules
from minitron.config.schema import Config, changed
from minitron.planner.machine import Machine
from minitron.planner.memory import Memory
from minitron.planner.plan import Plan, Step, made_eager, no_room_for_graphs, room_gib
from minitron.planner.search import MICRO_BATCHES, RECOMPUTE


def remedy(job: Plan, given: Config) -> str:
    """Say in one line of a plan that does not fit what does not, and the nearest change of `given` that would."""
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
    """Return the layout that fits after the fewest changes, the fastest of several; None if none fits."""
    every = (
        changed(layout, train=dict(recompute=recompute))
        for layout in plain_layouts(cfg, world, machine)
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
            timed = made_eager(layout) if no_room_for_graphs(memory, machine) else layout
            fitting.append((Step(timed, world, machine).at_least(), len(fitting), layout))
            distance = len(changes(cfg, layout))
    return min(fitting)[2] if fitting else None


def plain_layouts(cfg: Config, world: int, machine: Machine) -> Iterator[Config]:
    """List layouts with plain stages, the configuration's own first; most break a rule or do not fit."""
    m, given = cfg.model, cfg.parallel
    yield cfg
    for tp in _powers(2 * machine.fabric.gpus_per_node):
        for cp in _powers(16):
            for pp in (n for n in range(1, m.num_layers + 1) if world % (n * tp * cp) == 0):
                even = [vp for vp in range(1, m.num_layers // pp + 1) if m.num_layers % (pp * vp) == 0 or vp == 1]
                for vp in even if pp > 1 else (1,):
                    kind = given.schedule if pp > 1 and vp == 1 else "1f1b"
                    for size in MICRO_BATCHES:
                        parallel = dict(tp=tp, cp=cp, pp=pp, vp=vp, schedule=kind, layers_per_stage=None)
                        layout = changed(cfg, parallel=parallel, train=dict(micro_batch_size=size))
                        if layout != cfg:
                            yield layout


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]


def changes(before: Config, after: Config) -> dict[str, object]:
    """Return the keys, `section.key`, in which a layout differs."""
    return {
        f"{section}.{key}": new
        for section, keys in (
            ("parallel", ("tp", "pp", "vp", "cp", "cp_style", "sequence_parallel", "schedule", "layers_per_stage")),
            ("train", ("micro_batch_size", "recompute")),
        )
        for key in keys
        if (new := getattr(getattr(after, section), key)) != getattr(getattr(before, section), key)
    }


def written(changed: dict[str, object]) -> list[str]:
    """Write keys as the command line takes them."""
    words = {None: "null", True: "true", False: "false"}
    texts = {
        key: f"[{','.join(map(str, x))}]" if isinstance(x, (tuple, list)) else str(x) for key, x in changed.items()
    }
    return [f"{key}={words[x] if x is None or isinstance(x, bool) else texts[key]}" for key, x in changed.items()]
