"""What would make a job lighter: each key of the trainer that saves memory, by how much, and at what cost.

The layout stays, and with it the number of GPUs; other layouts are search.py's. A job that fits
without its CUDA graphs only stays eager; then the keys that make room for the graphs are listed. Each key is tried
alone, then several together, each added to those before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from minitron.config import rules
from minitron.config.schema import Config
from minitron.planner.plan import Plan, plan

# In the order in which they are added: what changes no result first, then what changes rounding, last what costs most.
KEYS: tuple[tuple[str, str, Any], ...] = (
    ("parallel", "sequence_parallel", True),
    ("train", "recompute", "selective"),
    ("train", "micro_batch_size", 1),
    ("parallel", "overlap_grads", False),
    ("optimizer", "grad_dtype", "bf16"),
    ("precision", "fp8_params", True),
    ("train", "recompute", "full"),
)


def lighter(job: Plan) -> list[tuple[list[str], Plan]]:
    """Return (keys, plan) of each key alone that saves memory, fastest first; then of more and more, until they fit."""
    alone = sorted(_each(job), key=lambda found: found[1].step_seconds)
    if any(_reached(job, other) for _, other in alone):
        return alone
    together, keys = job, []
    for section, key, value in KEYS:
        more = _planned(together, section, key, value)
        if more is not None and more.memory_gib < together.memory_gib:
            keys = [*(one for one in keys if not one.startswith(f"{section}.{key}=")), _written(section, key, value)]
            together = more
            if _reached(job, together):
                break
    return [*alone, (keys, together)] if len(keys) > 1 else alone


def _reached(job: Plan, other: Plan) -> bool:
    """Tell whether a lighter job fits or, where this one fits without its CUDA graphs alone, has room for them."""
    return other.fits and not (job.fits and other.stays_eager)


def _each(job: Plan) -> Iterator[tuple[list[str], Plan]]:
    for section, key, value in KEYS:
        other = _planned(job, section, key, value)
        if other is not None and other.memory_gib < job.memory_gib:
            yield [_written(section, key, value)], other


def _planned(job: Plan, section: str, key: str, value: Any) -> Plan | None:
    """Return the plan with another value; None where that is the value already, or breaks a rule."""
    before = getattr(job.cfg, section)
    if getattr(before, key) == value:
        return None
    try:
        cfg: Config = replace(job.cfg, **{section: replace(before, **{key: value})})
        rules.check(cfg, job.world)
    except ValueError:
        return None
    return plan(cfg, job.world, job.machine)


def _written(section: str, key: str, value: Any) -> str:
    return f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
