"""Simulate a schedule: how long it takes, its bubble, the idle time of each rank.

The model of the machine is the executor on GPUs.  Every rank has a compute stream and a communication stream:
1. an operation starts when the previous one on its rank has ended and its input has arrived;
2. an Exchange starts when the operations before it in the list have ended and the rank's previous Exchange is over;
3. a tensor moves when both ends have started their Exchange, and takes `transfer_seconds`;
4. an Exchange is over, and all its tensors have arrived, when the last of them has moved.
Rules 2 and 4 are NCCL's: one kernel a batch, and the kernels of one communicator in order.  So a late partner holds
up a value that is there already, and the simulated time also judges where the Exchanges stand.

pp = 2, two microbatches, forward and backward 1 s each:

    rank 0    F0 F1    B0    B1       6 s, of which each rank works 4:
    rank 1       F0 B0 F1 B1          a bubble of 2 / 4 = (pp - 1) / m

With equal stages and m >= pp the bubble is (pp - 1) / (vp * m) if a backward takes 1 to 2 times as long as a forward,
which is where the schedule's clock (TICKS) orders the Exchanges well; beyond that it can be a little more. Of ZB-H1 it
is (pp - 1) (f + b - w) / (m (f + b + w)), f, b and w being the seconds of a forward and of the two parts of a backward.

Left out: links that several transfers share, and kernels that run slower beside a transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from minitron.pipeline.schedule import Backward, BackwardInput, BackwardWeight, Exchange, Forward, Operation, Schedule
from minitron.planner.check import match_exchanges

Seconds = float | Sequence[float]  # one for all stages, or per global stage
Meetings = Sequence[Sequence[Sequence[tuple[int, int]]]]  # of each rank's Exchanges


class Event(NamedTuple):
    """One operation in time; `start` and `end` in seconds from the start of the step."""

    rank: int
    action: Operation
    start: float
    end: float


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

    weight_seconds: how much of the backward a BackwardWeight takes, where it is split; None: half of it. meets: of
    `meetings`, if known. Raises ValueError if a duration is not positive, or if their number is not that of the stages.
    """
    if not 0 <= transfer_seconds < float("inf"):
        raise ValueError(f"transfer_seconds={transfer_seconds} must not be negative or infinite; use 0 or more")
    stages = schedule.pp * schedule.vp
    backward = _per_stage("backward_seconds", backward_seconds, stages)
    weight = _per_stage(
        "weight_seconds", [x / 2 for x in backward] if weight_seconds is None else weight_seconds, stages
    )
    seconds = {
        Forward: _per_stage("forward_seconds", forward_seconds, stages),
        Backward: backward,
        BackwardInput: _per_stage(
            "backward_seconds less weight_seconds", [b - w for b, w in zip(backward, weight)], stages
        ),
        BackwardWeight: weight,
    }
    meets = meetings(schedule) if meets is None else meets
    ranks = [_Rank(schedule, rank, meets[rank], seconds) for rank in range(schedule.pp)]
    waiting = dict.fromkeys(ranks)  # those that may go on, in order, each once
    while waiting:
        rank = next(iter(waiting))
        del waiting[rank]
        if rank.advance(ranks, transfer_seconds):
            waiting |= dict.fromkeys((ranks[rank.rank - 1], ranks[(rank.rank + 1) % len(ranks)]))  # only they meet it
    assert all(rank.position == len(rank.actions) for rank in ranks), "a schedule that deadlocks: check() says where"
    makespan = max(rank.events[-1].end for rank in ranks)
    idle = tuple(makespan - sum(event.end - event.start for event in rank.events) for rank in ranks)
    return Timeline(schedule, tuple(event for rank in ranks for event in rank.events), makespan, idle)


def meetings(schedule: Schedule) -> Meetings:
    """List for each rank and each of its Exchanges the (peer, number of the peer's Exchange) that it meets."""
    number = [
        {index: n for n, index in enumerate(i for i, action in enumerate(actions) if type(action) is Exchange)}
        for actions in schedule.ranks
    ]
    return [
        [[(peer, number[peer][there]) for peer, there in meets[index]] for index in number[rank]]
        for rank, meets in enumerate(match_exchanges(schedule))
    ]


def _per_stage(name: str, seconds: Seconds, stages: int) -> list[float]:
    values = list(seconds) if isinstance(seconds, Sequence) else [seconds] * stages
    if len(values) != stages:
        raise ValueError(f"{name} has {len(values)} values; give one for each of the {stages} stages")
    for value in values:
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}={value} must be positive and finite; use more than 0 seconds")
    return values


class _Rank:
    """One rank's two streams, each advanced as far as the other ranks allow; Exchanges by their number on the rank."""

    def __init__(self, schedule: Schedule, rank: int, meets: dict, seconds: dict):
        self.rank, self.actions = rank, schedule.ranks[rank]
        self.seconds = {kind: of[rank :: schedule.pp] for kind, of in seconds.items()}  # by chunk
        self.meets = meets  # (peer, number of the peer's Exchange) of each Exchange
        self.position, self.now = 0, 0.0  # compute stream: next action, end of the last operation
        # communication stream: when each Exchange was posted, when it started, when it was over
        self.posted: list[float] = []
        self.started: list[float] = []
        self.over: list[float] = []
        self.events: list[Event] = []

    def advance(self, ranks: list["_Rank"], transfer_seconds: float) -> bool:
        before = self.position, len(self.over), len(self.started)
        self._compute()
        while self._communicate(ranks, transfer_seconds):
            self._compute()
        return before != (self.position, len(self.over), len(self.started))

    def _compute(self) -> None:
        """Run actions up to one whose input has not arrived: the Exchanges that it waits for are not over."""
        now, over = self.now, self.over
        for action in islice(self.actions, self.position, None):
            if type(action) is Exchange:
                self.posted.append(now)
            else:
                if action.after > len(over):
                    break
                start = max(now, over[action.after - 1]) if action.after else now
                now = start + self.seconds[type(action)][action.chunk]
                self.events.append(Event(self.rank, action, start, now))
            self.position += 1
        self.now = now

    def _communicate(self, ranks: list["_Rank"], transfer_seconds: float) -> bool:
        """Finish the next Exchange; return False if it is not posted, or if a partner has not started its own."""
        number = len(self.over)
        if number == len(self.posted):
            return False
        if number == len(self.started):
            self.started.append(max(self.posted[number], self.over[-1] if self.over else 0.0))
        both = self.started[number]
        for peer, there in self.meets[number]:
            starts = ranks[peer].started
            if there >= len(starts):
                return False
            both = max(both, starts[there])
        self.over.append(both + transfer_seconds)
        return True
