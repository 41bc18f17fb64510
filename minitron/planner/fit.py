"""What makes a job fit: keys that save memory, and the nearest layout that fits.

`memory_options` keeps the layout, and with it the number of GPUs. It tries each key alone, then several together, each
added to those before. A job that fits only without its CUDA graphs stays eager; the keys then make room for the graphs.

`nearest_fit` names the fastest of these that fits, and another layout. It sorts all layouts with plain stages by how
many keys they change. It takes those with the fewest changes that keep the rules and fit, and of them the fastest. If
none fits, it doubles the GPUs. `search.py` finds the best layout of all; here the nearest one counts, since the user
has chosen a layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from minitron.config import rules
from minitron.config.schema import Config, changed
from minitron.planner.machine import Machine
from minitron.planner.memory import Memory
from minitron.planner.plan import Plan, Step, available_gib, no_room_for_graphs, plan
from minitron.planner.search import MICRO_BATCHES, RECOMPUTE

Options = Sequence[tuple[list[str], Plan]]  # keys as the command line takes them, and the plan with them
# In the order in which they are added: first what changes only the order of sums, then rounding, last what costs most.
KEYS: tuple[tuple[str, Any], ...] = (
    ("parallel.sequence_parallel", True),
    ("model.head_piece", 2048),  # large enough for products at full speed
    ("train.recompute", "selective"),
    ("train.micro_batch_size", 1),
    ("parallel.overlap_grads", False),
    ("optimizer.grad_dtype", "bf16"),
    ("precision.fp8_params", True),
    ("train.recompute", "full"),
)


# ---- keys that save memory -------------------------------------------------------------------------------------------


def memory_options(job: Plan) -> Options:
    """Return (keys, plan) of each key alone that saves memory, fastest first; then of more and more, until they fit."""
    found = [(written({key: value}), option) for key, value in KEYS if (option := _smaller(job, key, value))]
    alone = sorted(found, key=lambda pair: pair[1].step_seconds)
    if any(reached(job, option) for _, option in alone):
        return alone
    together, values = job, {}
    for key, value in KEYS:
        if more := _smaller(together, key, value):
            values.pop(key, None)  # so that the new value is the last one
            together, values[key] = more, value
            if reached(job, together):
                break
    return [*alone, (written(values), together)] if len(values) > 1 else alone


def reached(job: Plan, option: Plan) -> bool:
    """Return whether the option fits or, if the job fits without its CUDA graphs, has room for them."""
    return option.fits and not (job.fits and option.stays_eager)


def _smaller(job: Plan, key: str, value: Any) -> Plan | None:
    """Plan the job with another value of a key; None if that breaks a rule or saves no memory."""
    section, name = key.split(".")
    cfg = changed(job.cfg, **{section: {name: value}})
    if cfg == job.cfg or not keeps_rules(cfg, job.world):
        return None
    option = plan(cfg, job.world, job.machine)
    return option if option.memory_gib < job.memory_gib else None


def keeps_rules(cfg: Config, world: int) -> bool:
    try:
        rules.check(cfg, world)
    except ValueError:
        return False
    return True


# ---- the nearest layout ----------------------------------------------------------------------------------------------


def nearest_fit(job: Plan, given: Config, options: Options = ()) -> str:
    """Describe in one line what does not fit in a plan, and what would: the fastest option, and the nearest layout.

    given: the configuration that the line changes. options: those of `memory_options`, which keep the layout. More GPUs
    are named only if nothing fits on as many.
    """
    machine = job.machine
    part, size = max(job.memory.items(), key=lambda pair: pair[1])
    problem = (
        f"{job.memory_gib:.1f} GiB do not fit into the {job.room_gib:.1f} GiB that {machine.device.gpu} leaves on "
        f"pipeline rank {job.fullest}; the largest part is {part}, {size / 2**30:.1f} GiB"
    )
    remedies = [" and ".join(keys) for keys, option in options if option.fits][:1]
    for world in (job.world << i for i in range(1 if remedies else 8)):
        if nearest := _nearest(job.cfg, world, machine):
            more = [f"{world} GPUs"] if world > job.world else []
            remedies.append(" and ".join(more + written(changes(given, nearest))))
            break
    if remedies:
        return f"{problem}; use {', or '.join(dict.fromkeys(remedies))}"
    return f"{problem}; no layout of {world} GPUs fits either: use a smaller model, or another device"


def _nearest(cfg: Config, world: int, machine: Machine) -> Config | None:
    """Return the layout that fits after the fewest changes, the fastest of several; None if none fits."""
    pairs = product(plain_layouts(cfg, world, machine), RECOMPUTE)
    every = (changed(layout, train=dict(recompute=recompute)) for layout, recompute in pairs)
    distance, fitting = None, []
    for layout in sorted(every, key=lambda layout: len(changes(cfg, layout))):
        if fitting and len(changes(cfg, layout)) > distance:
            break
        if not keeps_rules(layout, world):
            continue
        memory = Memory(layout, world, gpus_per_node=machine.fabric.gpus_per_node)
        available = available_gib(machine, memory) * 2**30
        if sum(memory.lasting()) <= available and memory.peak()[1].total() <= available:
            eager = no_room_for_graphs(memory, machine)
            timed = changed(layout, train=dict(cuda_graph="off")) if eager else layout
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
                    parallel = dict(tp=tp, cp=cp, pp=pp, vp=vp, schedule=kind, layers_per_stage=None)
                    for size in MICRO_BATCHES:
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


def written(values: dict[str, object]) -> list[str]:
    """Write keys as the command line takes them."""
    texts = (x if isinstance(x, str) else json.dumps(x, separators=(",", ":")) for x in values.values())
    return [f"{key}={text}" for key, text in zip(values, texts)]
