"""Simulate a schedule: how long it takes, its bubble, the idle time of each rank.

The model of the machine is that of `walk`. pp = 2, two microbatches, forward and backward 1 s each:

    rank 0    F0 F1    B0    B1       6 s, of which each rank works 4:
    rank 1       F0 B0 F1 B1          a bubble of 2 / 4 = (pp - 1) / m

With equal stages and m >= pp the bubble is (pp - 1) / (vp * m) if a backward takes 1 to 2 times as long as a forward.
The schedule's clock (TICKS) orders the Exchanges well for these; beyond them the bubble can be a little larger. That of
ZB-H1 is (pp - 1) (f + b - w) / (m (f + b + w)): f, b and w are the seconds of a forward and of the two parts of a
backward.

Left out: links that several transfers share, and kernels that run slower beside a transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minitron.pipeline.schedule import Backward, BackwardInput, BackwardWeight, Forward, Schedule
from minitron.planner.walk import Event, Meetings, walk

Seconds = float | Sequence[float]  # one for all stages, or per global stage


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated step: its events by rank and start, its length and the idle time of each rank in seconds."""

    schedule: Schedule
    events: tuple[Event, ...]
    makespan: float
    idle: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle time over compute time, all ranks together: 1F1B's is (pp - 1) / (vp * m) for equal stages, m >= pp."""
        idle = sum(self.idle)
        return idle / (self.makespan * len(self.idle) - idle)


def simulate(
    schedule: Schedule,
    forward_seconds: Seconds,
    backward_seconds: Seconds,
    transfer_seconds: float = 0.0,
    weight_seconds: Seconds | None = None,
    meets: Meetings | None = None,
) -> Timeline:
    """Time a schedule that `check` passes, given the seconds of one microbatch in each stage and between two ranks.

    weight_seconds: the part of a split backward that a BackwardWeight takes; None: half of it. meets: the result of
    `check`, if known. Raises ValueError if a duration is not positive, or if there is not one for each stage.
    """
    if not 0 <= transfer_seconds < float("inf"):
        raise ValueError(f"transfer_seconds={transfer_seconds} must not be negative or infinite; use 0 or more")
    stages = schedule.pp * schedule.vp
    forward = _per_stage("forward_seconds", forward_seconds, stages)
    backward = _per_stage("backward_seconds", backward_seconds, stages)
    halves = [x / 2 for x in backward]
    weight = _per_stage("weight_seconds", halves if weight_seconds is None else weight_seconds, stages)
    rest = _per_stage("backward_seconds less weight_seconds", [b - w for b, w in zip(backward, weight)], stages)
    seconds = {Forward: forward, Backward: backward, BackwardInput: rest, BackwardWeight: weight}
    ranks = walk(schedule, seconds, transfer_seconds, meets)
    assert all(rank.ended for rank in ranks), "a schedule that deadlocks: check() names the action"
    makespan = max(rank.events[-1].end for rank in ranks)
    idle = tuple(makespan - sum(event.end - event.start for event in rank.events) for rank in ranks)
    return Timeline(schedule, tuple(event for rank in ranks for event in rank.events), makespan, idle)


def _per_stage(name: str, seconds: Seconds, stages: int) -> list[float]:
    values = list(seconds) if isinstance(seconds, Sequence) else [seconds] * stages
    if len(values) != stages:
        raise ValueError(f"{name} has {len(values)} values; give one for each of the {stages} stages")
    for value in values:
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}={value} must be positive and finite; use more than 0 seconds")
    return values
