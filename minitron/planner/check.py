"""Proof that a schedule is complete, in order and free of deadlock, before any GPU waits for it.

A wrong schedule rarely crashes: it hangs, or it trains on the wrong tensor. Both can be read off the data:
1. One rank alone: each microbatch runs once through each chunk, the forward before the backward, and weight gradients
   after the backward that defers them. Every input is received before its use, and the use waits for it, and for no
   later Exchange. An output is sent once at most, after it was made.
2. Two ranks: the n-th message that one sends is the n-th that the other receives. NCCL matches by order, so a swap
   would deliver another microbatch's tensor without an error. With 1, every message is sent, received and used.
3. All ranks: a walk completes in which every Exchange blocks until each partner has reached the matching one.
   The executor only posts Exchanges and waits later, so it cannot hang where this walk does not.

The deadlock of "send my output and receive my next input", with pp = 2, vp = 2 and four microbatches:

    rank 0    [send gradient 0]    F3    [send activation 3, receive gradient 1]
    rank 1    [send gradient 1]    F2    [send activation 2, receive gradient 0]

Each rank's first Exchange is met by the other's second.

Left out: whether the values are right. The executor's tests compare them with a single process.
"""

from collections import Counter

from minitron.pipeline.schedule import (
    TICKS,
    Backward,
    BackwardInput,
    Exchange,
    Forward,
    Operation,
    Schedule,
    Transfer,
    route,
)
from minitron.planner.walk import Meetings, meetings, walk


def check(schedule: Schedule) -> Meetings:
    """Return which Exchanges meet.

    Raises ValueError, naming rank and action, if the schedule is incomplete, out of order, or can deadlock.
    """
    if len(schedule.ranks) != schedule.pp:
        raise ValueError(f"the schedule has actions for {len(schedule.ranks)} ranks, but pp={schedule.pp}")
    for rank in range(schedule.pp):
        _CheckedRank(schedule, rank).run()
    meets = meetings(schedule)
    ranks = walk(schedule, dict.fromkeys(TICKS, [0.0] * (schedule.pp * schedule.vp)), meets=meets, blocking=True)
    stuck = []
    for one in (one for one in ranks if not one.ended):  # in the Exchange before its position
        peers = [peer for peer, number in one.meets[len(one.over)] if number >= len(ranks[peer].started)]
        index = one.position - 1
        stuck.append(f"rank {one.rank} at action {index} {one.actions[index]} waits for rank {peers[0]}")
    if stuck:
        raise ValueError("deadlock: " + "; ".join(stuck))
    return meets


class _CheckedRank:
    """The state of one rank in its list of actions: what it has run, has received and can send."""

    def __init__(self, schedule: Schedule, rank: int):
        self.schedule, self.rank, self.actions = schedule, rank, schedule.ranks[rank]
        self.ran: set[tuple[type[Operation], int, int]] = set()  # type, mb, chunk
        self.done: Counter[tuple[type[Operation], int]] = Counter()  # operations that have run, by type and chunk
        self.counts = Counter((type(op), op.chunk) for op in self.actions if not isinstance(op, Exchange))  # all
        self.received: dict[Transfer, int] = {}  # -> number of Exchanges that must be complete before it is used
        self.unsent: set[Transfer] = set()
        self.exchanges = 0

    def run(self) -> None:
        """Raise ValueError for the first action that is wrong, and for what is missing at the end."""
        for index, action in enumerate(self.actions):
            if problem := self._post(action) if isinstance(action, Exchange) else self._compute(action):
                raise ValueError(f"rank {self.rank}, action {index} {action}: {problem}")
        split = any(kind is BackwardInput for kind, _ in self.counts)
        passes = (3 if split else 2) if self.schedule.training else 1
        expected = self.schedule.num_microbatches * self.schedule.vp * passes
        if len(self.ran) != expected:
            raise ValueError(f"rank {self.rank} runs {len(self.ran)} operations instead of {expected}")

    def _compute(self, op: Operation) -> str:
        """Run an operation. Return why it cannot run now; '' if it can."""
        if problem := self._order_problem(op) or self._route_problem(op):
            return problem
        self.ran.add((type(op), op.mb, op.chunk))
        self.done[type(op), op.chunk] += 1
        if op.output is not None:
            self.unsent.add(op.output)
        return ""

    def _order_problem(self, op: Operation) -> str:
        m, vp, counts = self.schedule.num_microbatches, self.schedule.vp, self.counts
        if not (0 <= op.mb < m and 0 <= op.chunk < vp):
            return f"there are {m} microbatches and {vp} chunks"
        if (type(op), op.mb, op.chunk) in self.ran:
            return "runs a second time"
        if isinstance(op, Forward):
            return ""
        before = self.done[type(op), op.chunk]
        if isinstance(op, Backward):
            if (Forward, op.mb, op.chunk) not in self.ran:
                return "its forward has not run"
            if counts[Backward, op.chunk] and counts[BackwardInput, op.chunk]:
                return "a chunk's backwards are all whole or all split"
        elif (BackwardInput, op.mb, op.chunk) not in self.ran:
            return "no backward has deferred these weight gradients"
        if op.last != (before == counts[type(op), op.chunk] - 1):
            return "`last` belongs on the chunk's last backward and only there"
        return ""

    def _route_problem(self, op: Operation) -> str:
        """Return why input and output are not those of the stage, or why its wait is too short or has no end."""
        needed, made = route(op, self.rank, self.schedule.pp, self.schedule.vp)
        if op.input != needed or op.output != made:
            return f"takes {op.input} and makes {op.output} instead of {needed} and {made}"
        if needed is not None and needed not in self.received:
            return f"its input {needed} has not been received"
        if needed is not None and op.after < self.received[needed]:
            return f"waits for {op.after} Exchanges, but its input comes with number {self.received[needed]}"
        if op.after > self.exchanges:
            return f"waits for {op.after} Exchanges, and only {self.exchanges} come before it"
        return ""

    def _post(self, exchange: Exchange) -> str:
        """Post an Exchange. Return why it cannot be posted now; '' if it can."""
        self.exchanges += 1
        if exchange.after >= self.exchanges:
            return f"waits for {exchange.after} Exchanges and is number {self.exchanges} itself"
        for transfer in exchange.sends:
            if transfer not in self.unsent:
                return f"sends {transfer}, which has not been made or is sent already"
            self.unsent.remove(transfer)
        self.received |= dict.fromkeys(exchange.recvs, self.exchanges)
        return ""
