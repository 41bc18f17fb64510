"""Proof that a schedule is complete, in order and free of deadlock, before any GPU waits for it.

A wrong schedule rarely crashes: it hangs, or it trains on the wrong tensor.  Both can be read off the data:
1. One rank alone: each microbatch goes once through each chunk, forward before backward; every input is received
   once, before its use; every output is sent once, after it was made.
2. Two ranks: the n-th message that one sends is the n-th that the other receives.  NCCL matches by order, so a swap
   would hand over another microbatch's tensor without an error.
3. All ranks: let every Exchange block until each partner stands at the matching one, and run to the end.  The
   executor only posts Exchanges and waits later, so what never stops here never hangs there.

Two ranks that each send their output together with receiving their next input:

    rank 0   F0   [send activation 0, receive gradient 0]   B0          rank 0 can leave its Exchange only when rank 1
    rank 1   [receive activation 0]   F0   B0   [send gradient 0]       stands at its second one, and rank 1 leaves
                                                                        its first at once: fine.  In a ring of ranks
                                                                        each may wait for the next: a deadlock.

Left out: whether the values are right.  The executor's tests compare them with a single process.
"""

from collections import Counter, defaultdict

from minitron.pipeline.schedule import Backward, Exchange, Forward, Schedule, Transfer, input_of, output_of


def check(schedule: Schedule) -> None:
    """Raises ValueError naming rank and action if the schedule is incomplete, out of order, or can deadlock."""
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
    meets: list[dict] = [defaultdict(tuple) for _ in schedule.ranks]
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


def _message(messages: list[tuple], n: int) -> str:
    if n >= len(messages):
        return "nothing"
    index, kind, mb, stage = messages[n]
    return f"{kind} of mb {mb} for stage {stage} (action {index})"


def _check_rank(schedule: Schedule, rank: int) -> None:
    """Walk one rank's actions, keeping what it has run, received and not yet sent."""
    pp, vp, m = schedule.pp, schedule.vp, schedule.num_microbatches
    actions = schedule.ranks[rank]
    ran: set[tuple[type, int, int]] = set()  # (Forward or Backward, mb, chunk)
    received: set[Transfer] = set()
    unsent: set[Transfer] = set()
    backwards_left = Counter(action.chunk for action in actions if type(action) is Backward)
    for index, action in enumerate(actions):
        where = f"rank {rank}, action {index} {action}"
        if type(action) is Exchange:
            _check_exchange(action, where, received, unsent)
            continue
        if not (0 <= action.mb < m and 0 <= action.chunk < vp):
            raise ValueError(f"{where}: there are {m} microbatches and {vp} chunks")
        if (type(action), action.mb, action.chunk) in ran:
            raise ValueError(f"{where}: runs a second time")
        if type(action) is Backward:
            if (Forward, action.mb, action.chunk) not in ran:
                raise ValueError(f"{where}: its forward has not run")
            backwards_left[action.chunk] -= 1
            if action.last != (backwards_left[action.chunk] == 0):
                raise ValueError(f"{where}: `last` belongs on the chunk's last backward and only there")
        needed = input_of(action, rank, pp, vp)
        if needed is not None:
            if needed not in received:
                raise ValueError(f"{where}: its input {needed} has not been received")
            received.remove(needed)
        ran.add((type(action), action.mb, action.chunk))
        output = output_of(action, rank, pp, vp)
        if output is not None:
            unsent.add(output)
    expected = m * vp * (2 if schedule.training else 1)
    if len(ran) != expected:
        raise ValueError(f"rank {rank} runs {len(ran)} operations instead of {expected}")
    if unsent:
        raise ValueError(f"rank {rank} never sends {unsent.pop()}")
    if received:
        raise ValueError(f"rank {rank} never uses {received.pop()}, which it receives")


def _check_exchange(exchange: Exchange, where: str, received: set[Transfer], unsent: set[Transfer]) -> None:
    for transfer in exchange.sends:
        if transfer not in unsent:
            raise ValueError(f"{where}: sends {transfer}, which is not there to be sent")
        unsent.remove(transfer)
    for transfer in exchange.recvs:
        if transfer in received:
            raise ValueError(f"{where}: receives {transfer} a second time")
        received.add(transfer)


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
