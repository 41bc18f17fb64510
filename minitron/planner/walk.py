"""Walk a schedule: run the actions of all ranks side by side, each as early as it can start.

As in the executor on a GPU, a rank has a compute stream and a communication stream:
1. an operation starts when the previous one on its rank has ended and its input has arrived;
2. an Exchange starts when the operations before it in the list have ended and the rank's previous Exchange is over;
3. a tensor moves when both ends have started their Exchange, and takes `transfer_seconds`;
4. an Exchange is over, and all its tensors have arrived, when the last of them has moved.
Rules 2 and 4 are NCCL's: one kernel a batch, and the kernels of one communicator in order. So a late partner delays
a tensor that could already move, and the times also judge where the Exchanges are placed.

A walk that blocks lets a rank run nothing after an Exchange until that is over. `check` proves with it that a schedule
cannot deadlock; `simulate` times one without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from minitron.pipeline.schedule import Action, Exchange, Operation, Schedule

Meetings = Sequence[Sequence[Sequence[tuple[int, int]]]]  # by rank and Exchange: (peer, number of the peer's Exchange)


class Event(NamedTuple):
    """One operation in time; `start` and `end` in seconds from the start of the step."""

    rank: int
    action: Operation
    start: float
    end: float


def walk(
    schedule: Schedule,
    seconds: Mapping[type[Operation], Sequence[float]],
    transfer_seconds: float = 0.0,
    meets: Meetings | None = None,
    *,
    blocking: bool = False,
) -> list[Streams]:
    """Run every rank until it has finished or waits forever. The time is linear in the number of actions.

    seconds: those of each kind of operation, by global stage. meets: the result of `meetings`, if known. blocking: a
    rank waits at each Exchange until that is over.
    """
    pp = schedule.pp
    meets = meetings(schedule) if meets is None else meets
    ranks = [
        Streams(rank, actions, {kind: of[rank::pp] for kind, of in seconds.items()}, meets[rank], blocking)
        for rank, actions in enumerate(schedule.ranks)
    ]
    waiting = dict.fromkeys(range(pp))  # ranks that may be able to continue, in order, each once
    while waiting:
        rank = next(iter(waiting))
        del waiting[rank]
        if ranks[rank].advance(ranks, transfer_seconds):
            waiting |= dict.fromkeys(((rank - 1) % pp, (rank + 1) % pp))  # only these meet its Exchanges
    return ranks


def meetings(schedule: Schedule) -> Meetings:
    """Pair sends with receives, first in, first out: find which Exchanges meet.

    Raises ValueError where the order of a pair's sends is not that of its receives.
    """
    sends, recvs = defaultdict(list), defaultdict(list)  # (source, target) -> [(number of the Exchange, what)]
    meets: list[list[list[tuple[int, int]]]] = []
    for rank, actions in enumerate(schedule.ranks):
        exchanges = [action for action in actions if type(action) is Exchange]
        for number, exchange in enumerate(exchanges):
            for t in exchange.sends:
                sends[rank, t.peer].append((number, (t.kind, t.mb, t.stage)))
            for t in exchange.recvs:
                recvs[t.peer, rank].append((number, (t.kind, t.mb, t.stage)))
        meets.append([[] for _ in exchanges])
    for source, target in sorted(sends.keys() | recvs.keys()):
        pairs = zip_longest(sends[source, target], recvs[source, target], fillvalue=(0, None))
        for n, ((there, sent), (here, received)) in enumerate(pairs):
            if sent != received:
                ends = f"sent as {_message(there, sent)}, received as {_message(here, received)}"
                raise ValueError(f"message {n} from rank {source} to rank {target} differs at its ends: {ends}")
            meets[source][there].append((target, here))
            meets[target][here].append((source, there))
    return meets


def _message(number: int, what: tuple[str, int, int] | None) -> str:
    return "nothing" if what is None else "{} of mb {} for stage {}".format(*what) + f" (Exchange {number})"


@dataclass(eq=False, slots=True)
class Streams:
    """A rank's two streams. `posted`, `started` and `over` have the seconds of its Exchanges, by their number."""

    rank: int
    actions: Sequence[Action]
    seconds: Mapping[type[Operation], Sequence[float]]  # by chunk
    meets: Sequence[Sequence[tuple[int, int]]]
    blocking: bool
    position: int = 0  # the next action
    events: list[Event] = field(default_factory=list)
    posted: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    over: list[float] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.position == len(self.actions) and len(self.over) == len(self.posted)

    def advance(self, ranks: Sequence[Streams], transfer_seconds: float) -> bool:
        """Run until this rank waits for another. Return whether an Exchange has started: peers may wait for it."""
        before = len(self.started)
        self._compute()
        while self._communicate(ranks, transfer_seconds):
            self._compute()
        return len(self.started) > before

    def _compute(self) -> None:
        """Run actions up to the first that waits for an Exchange."""
        actions, over, now = self.actions, self.over, self.events[-1].end if self.events else 0.0
        while self.position < len(actions):
            action = actions[self.position]
            exchange = type(action) is Exchange
            needed = len(self.posted) if self.blocking else 0 if exchange else action.after
            if needed > len(over):
                break
            start = max(now, over[needed - 1]) if needed else now
            if exchange:
                self.posted.append(start)
            else:
                now = start + self.seconds[type(action)][action.chunk]
                self.events.append(Event(self.rank, action, start, now))
            self.position += 1

    def _communicate(self, ranks: Sequence[Streams], transfer_seconds: float) -> bool:
        """Finish the next Exchange; return False if it is not posted, or if a partner has not started its own."""
        number = len(self.over)
        if number == len(self.posted):
            return False
        if number == len(self.started):
            self.started.append(max(self.posted[number], self.over[-1] if self.over else 0.0))
        both = self.started[number]
        for peer, there in self.meets[number]:
            if there >= len(ranks[peer].started):
                return False
            both = max(both, ranks[peer].started[there])
        self.over.append(both + transfer_seconds)
        return True
