"""Goodput: the share of the time since a run's first start that became training steps which counted.

Problem: step times do not show what restarts cost: the time between steps, and steps that run twice. The idea: every
row of metrics.jsonl has the time it was written, the row of a start also the time its process began, and all starts
append to one file. So the time since the first start can be divided:

    start 1       |start|load|step 1|step 2|save|step 3|step 4|    killed      step 4 runs again: it was lost
    start 2                                                   waiting |start|load|step 4|step 5| ...

    training      steps that did not run again in a later start
    lost          steps that did
    start         imports, model, memory; and the extra time of the first steps (compilers, recordings)
    load          reading the checkpoint
    saves         time that steps, and the end of the run, waited for saves
    evaluation    losses on validation data
    waiting       from the last row of a start to the next start: the interrupted step, detection, the queue
    other         time of which no row has a record

planner/failures.py predicts these shares.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple

from minitron.config.save_interval import duration
from minitron.supervise.metrics import rows

PARTS = ("training", "start", "load", "lost", "saves", "evaluation", "waiting", "other")
FIRST_STEPS = 11  # a start's first steps, in which kernels are compiled and steps are recorded (pipeline/replay.py)
FIRST_TIMES = 2.0  # times the median: the time beyond the median of a first step that takes longer counts as start
NEEDED = {"run": ("first_step",), "step": ("step", "step_seconds")}  # numbers in rows of these kinds
OPTIONAL = "time", "started", "load_seconds", "stall_seconds", "seconds"  # numbers, where a row has them
LARGEST = 1e15  # the limit of these numbers


class Goodput(NamedTuple):
    """The division of a run's time: seconds of each of PARTS. lost_steps: steps that ran again. skipped_rows: rows that
    are torn, or not a run's."""

    seconds: dict[str, float]
    starts: int
    lost_steps: int
    skipped_rows: int = 0

    @property
    def total(self) -> float:
        """Seconds since the first start."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part; together 1."""
        total = self.total or 1.0
        return {part: seconds / total for part, seconds in self.seconds.items()}

    def __str__(self) -> str:
        shares, starts = self.shares, f"{self.starts} start{'s' * (self.starts > 1)}"
        rest = ", ".join(f"{part} {100 * shares[part]:.1f} %" for part in PARTS[1:] if shares[part] >= 5e-4)
        steps = f", {self.lost_steps} steps made again" if self.lost_steps else ""
        steps += f", {self.skipped_rows} rows skipped" if self.skipped_rows else ""
        head = f"goodput {100 * shares['training']:.1f} % of {duration(self.total)} since the first start"
        return f"{head} ({starts}{steps}); {rest or 'nothing else'}"


@dataclass
class Attempt:
    """One start of a run. seconds: by part. steps: (number, seconds without stalls). begun: when its first step began.
    end: the time of its last row."""

    first_step: int
    started: float
    end: float
    seconds: Counter
    begun: float | None = None
    steps: list[tuple[int, float]] = field(default_factory=list)


def of_run(path: Path, last: dict) -> Goodput | None:
    """Measure a run from its metrics.jsonl and the row `last`, which is not written yet; None if the disk fails."""
    with suppress(OSError, ValueError):  # the disk has failed, or the file is not of a run
        return measure(chain(rows(path), [last]))
    return None


def measure(rows: Iterable[dict]) -> Goodput | None:
    """Divide the time of a run by the rows of its metrics.jsonl, in their order.

    Returns None if no row has the time of a start.
    """
    attempts: list[Attempt] = []
    skipped = 0
    for row in rows:
        kind, now = row.get("kind"), row.get("time")
        if not is_ours(row):
            skipped += 1
        elif kind == "run" and now is not None:
            started = row.get("started", now)
            if attempts:
                started = max(attempts[-1].end, started)
                attempts[-1].seconds["waiting"] = started - attempts[-1].end
            load = Counter(load=row.get("load_seconds", 0.0))
            attempts.append(Attempt(row["first_step"], started, max(started, now), load))
        elif now is not None and attempts:
            attempt, stall = attempts[-1], row.get("stall_seconds", 0.0)
            attempt.end = max(attempt.end, now)
            attempt.seconds["saves"] += stall
            if kind == "step":
                if attempt.begun is None:
                    attempt.begun = now - row["step_seconds"]
                attempt.steps.append((row["step"], max(0.0, row["step_seconds"] - stall)))
            elif kind == "eval":
                attempt.seconds["evaluation"] += row.get("seconds", 0.0)
    return _account(attempts, skipped) if attempts else None


def is_ours(row: dict) -> bool:
    """Return whether a run can have written this row: all values that `measure` reads are numbers."""
    kind = row.get("kind")
    if not isinstance(kind, str):
        return False
    values = [row.get(name) for name in NEEDED.get(kind, ())] + [row[name] for name in OPTIONAL if name in row]
    return all(isinstance(value, int | float) and abs(value) < LARGEST for value in values)


def _account(attempts: list[Attempt], skipped: int) -> Goodput:
    """Divide the time of each start, the last one first, since a later start shows which steps were lost."""
    lost_steps, redone_from = 0, math.inf
    typical = median([s for attempt in attempts for _, s in attempt.steps] or [0.0])
    for attempt in reversed(attempts):
        parts, begun = attempt.seconds, attempt.end if attempt.begun is None else attempt.begun
        parts["start"] = max(0.0, begun - attempt.started - parts["load"])
        own = median([s for _, s in attempt.steps]) if len(attempt.steps) > 2 else typical
        for i, (step, taken) in enumerate(attempt.steps):
            if i < FIRST_STEPS and taken > FIRST_TIMES * own:
                parts["start"] += taken - own
                taken = own
            parts["training" if step < redone_from else "lost"] += taken
            lost_steps += step >= redone_from
        known = parts.total() - parts["waiting"]
        parts["other"] = max(0.0, attempt.end - attempt.started - known)
        redone_from = min(redone_from, attempt.first_step)
    seconds = {part: sum(attempt.seconds[part] for attempt in attempts) for part in PARTS}
    return Goodput(seconds, len(attempts), lost_steps, skipped)
