"""Proof that a schedule is complete, in order and free of deadlock, before any GPU waits for it.

A wrong schedule rarely crashes: it hangs, or it trains on the wrong tensor.  Both can be read off the data:
1. One rank alone: each microbatch goes once through each chunk, forward before backward, and weight gradients that a
   backward puts off after it; every input is received once, before its use, which waits for it; every output is sent
   once, after it was made.
2. Two ranks: the n-th message that one sends is the n-th that the other receives.  NCCL matches by order, so a swap
   would hand over another microbatch's tensor without an error.
3. All ranks: let every Exchange block until each partner stands at the matching one, and run to the end.  The
   executor only posts Exchanges and waits later, so what never stops here never hangs there.

The deadlock that "send my output and receive my next input" runs into, with pp = 2, vp = 2 and four microbatches:

    rank 0    [send gradient 0]    F3    [send activation 3, receive gradient 1]
    rank 1    [send gradient 1]    F2    [send activation 2, receive gradient 0]

Each rank's first Exchange is met by the other's second.

Left out: whether the values are right.  The executor's tests compare them with a single process.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from minitron.pipeline.schedule import Backward, BackwardInput, Exchange, Forward, Operation, Schedule, Transfer, route

Ran = tuple[type[Operation], int, int]  # its type, mb, chunk


def check(schedule: Schedule) -> None:
    """Raise ValueError, naming rank and action, if the schedule is incomplete, out of order, or can deadlock."""
    if len(schedule.ranks) != schedule.pp:
        raise ValueError(f"the schedule has actions for {len(schedule.ranks)} ranks, but pp={schedule.pp}")
    for rank in range(schedule.pp):
        _check_rank(schedule, rank)
    _check_rendezvous(schedule, match_exchanges(schedule))


def match_exchanges(schedule: Schedule) -> list[dict[int, tuple[tuple[int, int], ...]]]:
    """Pair sends with receives, first in, first out.

    Returns for each rank: index of an Exchange -> the (peer, index of the peer's Exchange) that it meets.
    Raises ValueError where the order of a pair's sends is not that of its receives.
    """
    sends, recvs = defaultdict(list), defaultdict(list)  # (source, target) -> [(action index, kind, mb, stage)]
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            if type(action) is Exchange:
                for t in action.sends:
                    sends[rank, t.peer].append((index, t.kind, t.mb, t.stage))
                for t in action.recvs:
                    recvs[t.peer, rank].append((index, t.kind, t.mb, t.stage))
    meets: list[dict[int, tuple[tuple[int, int], ...]]] = [defaultdict(tuple) for _ in schedule.ranks]
    for source, target in sorted(sends.keys() | recvs.keys()):
        sent, received = sends[source, target], recvs[source, target]
        for n in range(max(len(sent), len(received))):
            if n >= len(sent) or n >= len(received) or sent[n][1:] != received[n][1:]:
                raise ValueError(
                    f"message {n} from rank {source} to rank {target} differs at its ends: "
                    f"sent as {_message(sent, n)}, received as {_message(received, n)}"
                )
            meets[source][sent[n][0]] += ((target, received[n][0]),)
            meets[target][received[n][0]] += ((source, sent[n][0]),)
    return meets


def _message(messages: Sequence[tuple[int, str, int, int]], n: int) -> str:
    if n >= len(messages):
        return "nothing"
    index, kind, mb, stage = messages[n]
    return f"{kind} of mb {mb} for stage {stage} (action {index})"


def _check_rank(schedule: Schedule, rank: int) -> None:
    """Walk one rank's actions, keeping what it has run, received and not yet sent."""
    pp, vp, m = schedule.pp, schedule.vp, schedule.num_microbatches
    ran: set[Ran] = set()
    done: Counter[tuple[type[Operation], int]] = Counter()
    received: dict[Transfer, int] = {}  # -> number of Exchanges that must be complete before it is used
    exchanges = 0
    unsent: set[Transfer] = set()
    counts = Counter(
        (type(action), action.chunk) for action in schedule.ranks[rank] if not isinstance(action, Exchange)
    )
    for index, action in enumerate(schedule.ranks[rank]):
        if isinstance(action, Exchange):
            exchanges += 1
            problem = _exchange_problem(action, received, unsent, exchanges)
        else:
            problem = _operation_problem(action, ran, (m, vp), counts, done) or _route_problem(
                action, received, *route(action, rank, pp, vp)
            )
            if action.input is not None:
                received.pop(action.input, None)
            ran.add((type(action), action.mb, action.chunk))
            done[type(action), action.chunk] += 1
            if action.output is not None:
                unsent.add(action.output)
        if problem:
            raise ValueError(f"rank {rank}, action {index} {action}: {problem}")
    split = any(kind is BackwardInput for kind, _ in counts)
    expected = m * vp * ((3 if split else 2) if schedule.training else 1)
    if len(ran) != expected:
        raise ValueError(f"rank {rank} runs {len(ran)} operations instead of {expected}")
    if unsent:
        raise ValueError(f"rank {rank} never sends {unsent.pop()}")
    if received:
        raise ValueError(f"rank {rank} never uses {next(iter(received))}, which it receives")


def _operation_problem(
    op: Operation,
    ran: set[Ran],
    sizes: tuple[int, int],
    counts: Counter[tuple[type[Operation], int]],
    done: Counter[tuple[type[Operation], int]],
) -> str:
    """Say why `op` cannot run now; '' if it can. counts, done: of all and of those run, by type and chunk."""
    if not (0 <= op.mb < sizes[0] and 0 <= op.chunk < sizes[1]):
        return f"there are {sizes[0]} microbatches and {sizes[1]} chunks"
    if (type(op), op.mb, op.chunk) in ran:
        return "runs a second time"
    if isinstance(op, Forward):
        return ""
    before = done[type(op), op.chunk]
    if isinstance(op, Backward):
        if (Forward, op.mb, op.chunk) not in ran:
            return "its forward has not run"
        if counts[Backward, op.chunk] and counts[BackwardInput, op.chunk]:
            return "a chunk's backwards are all whole or all split"
        if op.first != (before == 0):
            return "`first` belongs on the chunk's first backward and only there"
    elif (BackwardInput, op.mb, op.chunk) not in ran:
        return "no backward has put off what it computes"
    if op.last != (before == counts[type(op), op.chunk] - 1):
        return "`last` belongs on the chunk's last backward and only there"
    return ""


def _route_problem(op: Operation, received: dict[Transfer, int], needed: Transfer | None, made: Transfer | None) -> str:
    """Say why the input and output of `op` are not those of its stage, or not there; '' if they are."""
    if op.input != needed or op.output != made:
        return f"takes {op.input} and makes {op.output} instead of {needed} and {made}"
    if needed is not None and needed not in received:
        return f"its input {needed} has not been received"
    if needed is not None and op.after < received[needed]:
        return f"waits for {op.after} Exchanges, but its input comes with number {received[needed]}"
    return ""


def _exchange_problem(exchange: Exchange, received: dict[Transfer, int], unsent: set[Transfer], number: int) -> str:
    """Say why the Exchange, the rank's `number`-th, cannot be posted now; '' if it can.

    Moves its Transfers out of `unsent` and into `received`.
    """
    if exchange.after >= number:
        return f"waits for {exchange.after} Exchanges and is number {number} itself"
    for transfer in exchange.sends:
        if transfer not in unsent:
            return f"sends {transfer}, which is not there to be sent"
        unsent.remove(transfer)
    for transfer in exchange.recvs:
        if transfer in received:
            return f"receives {transfer} a second time"
        received[transfer] = number
    return ""


def _check_rendezvous(schedule: Schedule, meets: list[dict[int, tuple[tuple[int, int], ...]]]) -> None:
    """Run all ranks; a rank leaves an Exchange when every partner has reached the matching one."""
    position = [0] * schedule.pp  # the action at which each rank stands
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions) and all(
                position[peer] >= index for peer, index in meets[rank].get(position[rank], ())
            ):
                position[rank] += 1
                moved = True
    stuck = []
    for rank, actions in enumerate(schedule.ranks):
        if position[rank] < len(actions):
            waits = [peer for peer, index in meets[rank][position[rank]] if position[peer] < index]
            stuck.append(f"rank {rank} at action {position[rank]} {actions[position[rank]]} waits for rank {waits[0]}")
    if stuck:
        raise ValueError("deadlock: " + "; ".join(stuck))
