"""Pipeline schedules as plain data: what every rank computes, sends and receives, in order.

Problem: a model cut into pp parts keeps one rank busy and pp - 1 idle. So the batch is cut, too: rank 1 works on
microbatch 0 while rank 0 is on microbatch 1. The order of the work decides how long ranks idle (the bubble), how many
activations they hold, and whether their messages can deadlock. So the order is data here: made, checked, timed and
drawn without torch, then run by the executor. The idea:

1. Every rank runs the same list of forwards and the same list of backwards. It starts with some forwards (the
   warm-up), alternates one forward with one backward (1F1B), and ends with the remaining backwards.
2. Interleaving (vp > 1) gives a rank vp chunks of the model, stage = chunk * pp + rank. A microbatch passes the ranks
   vp times in steps vp times shorter, which shrinks the bubble to (pp - 1) / (vp * m) of the compute.
3. A clock gives every operation the tick at which it finishes. A backward takes twice as many ticks as a forward. If
   ranks have several chunks, the receiver may use a value one tick after it is made.
4. A value made at tick t for another rank is posted by both ranks at tick t: sent by one, received by the other. All
   that one rank posts at one tick is one Exchange. It does not wait; the operation that uses the value waits. An
   action holds its input, its output, and how many of its rank's Exchanges it waits for. The executor decides nothing.
5. Each rank's list is sorted by tick, and partners meet in Exchanges of the same tick. So the rank at the lowest tick
   can always go on: no deadlock, even if every Exchange blocked. If a rank fused each send with its next receive,
   interleaved ranks could deadlock, because the two have different ticks.

pp = 2, three microbatches. F0 is the forward of microbatch 0, >0 its activation and <0 its gradient on the way, which
takes no time here:

    rank 0    F0 F1       B0--- F2 B1---    B2---
                >0 >1    <0        >2       <2
                                   <1
    rank 1       F0 B0--- F1 B1--- F2 B2---

ZB-H1 (Qi et al. 2024) splits backwards. Other ranks wait for the gradient of the input (b) alone, and the gradients of
weights (w) fill the bubble. The order is that of 1F1B, but rank r runs the w of a microbatch r microbatches later; rank
0 defers none. The bubble shrinks from (pp - 1) (f + b + w) seconds to (pp - 1) (f + b - w), about a third of it:

    rank 0    F0 F1    B0--- F2 B1--- B2---
    rank 1       F0 b0 F1 b1 w0 F2 b2 w1 w2

Messages of interleaved ranks take a tick. Without this tick each Exchange is posted just before its value is used, so
no work overlaps it. More ticks are not better: NCCL runs a rank's Exchanges in order, so an early one delays the next.
With one chunk a rank, or fewer microbatches than ranks, a tick does not help on average, so messages take none there.

A backward takes twice the ticks of a forward because its products take twice the time. Ranks wait if the clock differs
from the real times. b and w have different tick counts. With equal counts, a rank could make one value and receive
another at the same tick by chance. They would share an Exchange, and the one that is ready first would wait.

Left out: schedules that split with vp > 1, or that hold more activations and have no bubble (ZB-H2); and weights that
change in the middle of a batch (PipeDream).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Literal

Value = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor on its way to the global stage `stage` that consumes it; `peer` is the pp rank at the other end."""

    kind: Value
    mb: int
    stage: int
    peer: int


@dataclass(frozen=True, slots=True)
class _Operation:
    """What this rank computes for microbatch `mb` in its model chunk `chunk`.

    input: the value that it needs from another rank. output: the value that it makes for another rank. after: the
    number of the rank's Exchanges that must be complete before it starts.
    """

    mb: int
    chunk: int
    input: Transfer | None = field(default=None, repr=False, kw_only=True)
    output: Transfer | None = field(default=None, repr=False, kw_only=True)
    after: int = field(default=0, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Forward(_Operation):
    """The forward. The first stage has no input. The last stage has no output: it makes the loss.

    last: the rank's last forward in a training step.
    """

    last: bool = field(default=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Backward(_Operation):
    """The backward. The last stage has no input, the first stage no output.

    last: whether it is the chunk's last backward in a step. During that one, each gradient may be reduced as soon as it
    is ready.
    """

    last: bool


@dataclass(frozen=True, slots=True)
class BackwardInput(Backward):
    """A backward that defers the gradients of the weights that products read."""


@dataclass(frozen=True, slots=True)
class BackwardWeight(_Operation):
    """The weight gradients that a BackwardInput has deferred. It has no input and no output. last: see Backward."""

    last: bool


@dataclass(frozen=True, slots=True)
class Exchange:
    """All sends and receives of one rank at one tick, posted together without waiting.

    A rank finishes at most one operation a tick. An Exchange therefore has at most one send, and at most one receive
    from each of the two neighbours. So a pair of ranks receives messages in the order in which they are sent. NCCL
    needs that: it has no tags. after: the number of the rank's Exchanges that must be complete before this one is
    posted, so that their buffers can be freed.
    """

    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]
    after: int = field(default=0, repr=False)


Operation = Forward | Backward | BackwardWeight
Action = Operation | Exchange
Kind = Literal["1f1b", "zb-h1"]
TICKS = {Forward: 6, Backward: 12, BackwardInput: 8, BackwardWeight: 4}
# Exchanges by which a rank that only sends (the first one, in an evaluation) may be ahead of its receiver.
IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class Schedule:
    """`ranks[r]`: the actions of pp rank r, in order. `training` is False for a forward-only schedule."""

    pp: int
    vp: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    training: bool = True
    kind: Kind = "1f1b"


def make(pp: int, vp: int, num_microbatches: int, kind: Kind = "1f1b") -> Schedule:
    """Make the training schedule: 1F1B, interleaved when vp > 1, or ZB-H1; for any number m of microbatches.

    vp = 1: rank r starts with pp - r - 1 forwards. So it holds the activations of at most pp - r microbatches, not of
    all m, and at most 2 received tensors wait for their use.
    vp > 1: microbatches advance in groups: all of a group through chunk 0, then all of it through chunk 1, and so on.
    Rank r starts with (vp - 1) * group + 2 * (pp - r - 1) forwards and holds the activations of at most one chunk more.
    Megatron's groups have pp microbatches, and m has to be a multiple of pp. (A shorter last group stalls the ranks,
    and deadlocks for pp = 4, vp = 3, m = 5.) Here m // pp groups are as equal as possible, so none has less than pp:
    - m a multiple of pp: Megatron's order. At most 4 received tensors wait for their use.
    - m > pp otherwise: the bubble is hardly longer than (pp - 1) / (vp * m). The largest group has g = ceil(m / (m //
      pp)) microbatches. A rank then holds (vp - 1) * (g - pp) more chunk activations and some g - pp more received
      tensors.
    - m < pp: one group. Rank 0 has run all of it before its first microbatch comes back for the next chunk. So every
      rank idles for (vp - 1) * (pp - m) more forwards and backwards.
    zb-h1 (vp = 1): rank r holds the activations of at most pp - r microbatches, as in 1F1B. For r more microbatches it
    holds only the matrices of weight gradients. Together that is about as much as pp microbatches, rank 0's in 1F1B.
    Source: Narayanan et al. 2021, PipeDream-Flush; and "Efficient large-scale language model training on GPU clusters".
    """
    ranks = [operations(pp, vp, num_microbatches, rank, kind) for rank in range(pp)]
    return Schedule(pp, vp, num_microbatches, _with_exchanges(pp, vp, num_microbatches, ranks), kind=kind)


def operations(pp: int, vp: int, num_microbatches: int, rank: int, kind: Kind = "1f1b") -> list[Operation]:
    """List the operations of a rank of `make`, without their routes.

    Some forwards to warm up, then forward and backward in turn, then the remaining backwards.
    """
    order = _order(pp, vp, num_microbatches)
    group = max(_groups(pp, num_microbatches))
    warmup = pp - rank - 1 if vp == 1 else (vp - 1) * group + 2 * (pp - rank - 1)
    warmup = min(warmup, len(order))
    forwards = [Forward(mb, chunk, last=(mb, chunk) == order[-1]) for mb, chunk in order]
    num_deferred = rank if kind == "zb-h1" else 0  # rank 0 sends no gradients, so it defers nothing
    backward = BackwardInput if num_deferred else Backward
    backwards: list[list[Operation]] = [
        [backward(mb, vp - 1 - chunk, last=mb == num_microbatches - 1)] for mb, chunk in order
    ]
    if num_deferred:
        for mb in range(num_microbatches):
            after = backwards[min(mb + num_deferred, num_microbatches - 1)]
            after.append(BackwardWeight(mb, 0, last=mb == num_microbatches - 1))
    steady = [op for forward, others in zip(forwards[warmup:], backwards) for op in (forward, *others)]
    return forwards[:warmup] + steady + [op for others in backwards[len(order) - warmup :] for op in others]


def forward_only(pp: int, vp: int, num_microbatches: int) -> Schedule:
    """Make a schedule of the forwards alone, in the order of training, for evaluation."""
    forwards = [Forward(mb, chunk) for mb, chunk in _order(pp, vp, num_microbatches)]
    ranks = _with_exchanges(pp, vp, num_microbatches, [forwards] * pp)
    return Schedule(pp, vp, num_microbatches, ranks, training=False)


def _groups(pp: int, m: int) -> list[int]:
    """Divide m microbatches into groups of at least pp (one group if m < pp), as equal as possible."""
    count = max(1, m // pp)
    size, larger = divmod(m, count)
    return [size + 1] * larger + [size] * (count - larger)


def _order(pp: int, vp: int, m: int) -> list[tuple[int, int]]:
    """List the (mb, chunk) of a rank's forwards, in order. All ranks have the same list."""
    order, first = [], 0
    for size in _groups(pp, m):
        order += [(mb, chunk) for chunk in range(vp) for mb in range(first, first + size)]
        first += size
    return order


def _with_exchanges(
    pp: int, vp: int, m: int, operations: Sequence[Sequence[Operation]]
) -> tuple[tuple[Action, ...], ...]:
    """Merge each rank's operations and Exchanges by the tick at which they finish, operations first."""
    ticks = _finish_ticks(pp, vp, operations, travel=1 if vp > 1 and m >= pp else 0)
    sends: list[dict[int, tuple[Transfer, ...]]] = [{} for _ in operations]  # of a rank: tick -> Transfers
    recvs: list[dict[int, tuple[Transfer, ...]]] = [{} for _ in operations]
    for rank, order in enumerate(operations):
        for op, tick in zip(order, ticks[rank]):
            _, value = route(op, rank, pp, vp)
            if value is not None:
                sends[rank][tick] = (value,)
                arriving = Transfer(value.kind, value.mb, value.stage, rank)
                recvs[value.peer][tick] = recvs[value.peer].get(tick, ()) + (arriving,)
    ranks = []
    for order, done, sent, received in zip(operations, ticks, sends, recvs):
        exchanges = [(tick, Exchange(sent.get(tick, ()), received.get(tick, ()))) for tick in sent.keys() | received]
        # A stable sort: at equal ticks the operation that makes a value comes before the Exchange that sends it.
        actions = sorted([*zip(done, order), *exchanges], key=itemgetter(0))
        ranks.append([action for _, action in actions])
    return tuple(tuple(routed(actions, rank, pp, vp)) for rank, actions in enumerate(ranks))


def routed(actions: list[Action], rank: int, pp: int, vp: int) -> Iterator[Action]:
    """Fill in the inputs and outputs of a rank's actions, and the Exchanges that they wait for.

    An operation waits for the Exchange that brings its input, and for all before it: NCCL runs a rank's Exchanges in
    order, so these are complete, too.
    """
    exchanges = 0
    arrived: dict[Transfer, int] = {}  # -> number of Exchanges that must be complete before it is used
    for action in actions:
        if isinstance(action, Exchange):
            yield replace(action, after=max(0, exchanges - IN_FLIGHT))
            exchanges += 1
            arrived |= dict.fromkeys(action.recvs, exchanges)
        else:
            needed, made = route(action, rank, pp, vp)
            yield replace(action, input=needed, output=made, after=0 if needed is None else arrived[needed])


def _finish_ticks(pp: int, vp: int, operations: Sequence[Sequence[Operation]], travel: int) -> list[list[int]]:
    """Compute the tick at which each operation finishes, if it starts as soon as its rank and its input are ready.

    travel: ticks from the end of the operation that makes a value until its receiver has it.
    """
    made: dict[Transfer, int] = {}  # the receiver's input -> the tick at which it has it
    ticks: list[list[int]] = [[] for _ in operations]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(operations):
            done = ticks[rank]
            while len(done) < len(order):
                op = order[len(done)]
                needed, output = route(op, rank, pp, vp)
                if needed is not None and needed not in made:
                    break
                arrived = 0 if needed is None else made[needed]
                tick = max(arrived, done[-1] if done else 0) + TICKS[type(op)]
                if output is not None:
                    made[Transfer(output.kind, output.mb, output.stage, rank)] = tick + travel
                done.append(tick)
                moved = True
    assert sum(map(len, ticks)) == sum(map(len, operations)), "the order of the operations alone deadlocks"
    return ticks


def route(op: Operation, rank: int, pp: int, vp: int) -> tuple[Transfer | None, Transfer | None]:
    """Return what `op` on `rank` needs from another rank, and what it makes for another rank.

    Activations travel to the next stage, gradients to the stage before. The ends of the pipeline have no neighbour.
    """
    if isinstance(op, BackwardWeight):
        return None, None
    kind: Value = "activation" if isinstance(op, Forward) else "gradient"
    step = 1 if kind == "activation" else -1
    stage, stages = op.chunk * pp + rank, range(pp * vp)
    needed = Transfer(kind, op.mb, stage, (rank - step) % pp) if stage - step in stages else None
    made = Transfer(kind, op.mb, stage + step, (rank + step) % pp) if stage + step in stages else None
    return needed, made
