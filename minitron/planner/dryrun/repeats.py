"""Walk repeated microbatches only once: a step of 1,024 follows from its first and last ones.

Problem: most microbatches of a dry run repeat the one before. The idea: the schedule of fewer microbatches begins and
ends like the whole one, and repeats a period in between. Walk the short one, and map each action of the whole schedule
to a walked one that does the same for another microbatch:

    walked, 5 of 8      F F B F B | F B | F B | B B
    whole               F F B F B | F B | F B | F B | F B | F B | B B
                        as walked         as the last period    as walked

This is checked: the orders are compared action by action, and two walked periods must have reached the same bytes and
communicated the same. If not, all microbatches are walked.

Left out: interleaved schedules whose microbatches are not a multiple of pp: their groups differ in length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from minitron.pipeline.schedule import Action, Exchange, Forward, Schedule


def microbatches_to_walk(pp: int, vp: int, num_microbatches: int) -> int:
    """Return how many microbatches of a walk contain two periods; at most all."""
    if vp == 1:
        return min(num_microbatches, 2 * pp + 6)
    return num_microbatches if num_microbatches % pp else min(num_microbatches, 4 * pp)


def periods(few: Schedule, whole: Schedule) -> int:
    """Count the periods that `whole` has in addition. A period is one microbatch, or interleaved one for each rank."""
    return (whole.num_microbatches - few.num_microbatches) // (few.pp if few.vp > 1 else 1)


def expand(
    walked: Sequence[Action], whole: Sequence[Action], more_periods: int, same: Callable[[int, int], bool]
) -> list[int] | None:
    """Map each action of `whole` to the index of an equivalent action in `walked`; None if they do not match.

    more_periods: the periods that `whole` has in addition. same(i, j): whether these two walked actions did the same.
    """
    few, many = list(_alike(walked)), list(_alike(whole))
    more = len(many) - len(few)
    length = more // more_periods
    end = _common(few, many)  # the end of the last walked period
    period = range(end - length, end)
    if length * more_periods != more or period.start < length or end + _common(few[::-1], many[::-1]) < len(few):
        return None
    if few[period.start - length : period.start] != few[period.start : end]:
        return None
    if many[end : end + more] != few[period.start : end] * more_periods or not all(same(i - length, i) for i in period):
        return None
    return [*range(end), *[*period] * more_periods, *range(end, len(few))]


def _common(a: list, b: list) -> int:
    """Count the elements with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _alike(actions: Sequence[Action]) -> Iterator[tuple]:
    """Yield each action without its microbatch; the Exchange that it waits for is counted relative to it.

    A forward's `last` is left out, too: it records an event, and neither allocates nor communicates.
    """
    exchanges = 0
    for action in actions:
        late = exchanges - action.after if action.after else None
        if isinstance(action, Exchange):
            exchanges += 1
            messages = (tuple((t.kind, t.stage, t.peer) for t in side) for side in (action.sends, action.recvs))
            yield Exchange, late, *messages
        else:
            last = not isinstance(action, Forward) and action.last
            yield type(action), late, action.chunk, last, action.input is None, action.output is None
