"""Schedules are complete, deadlock-free and as fast as the theory says; `check` sees every planted defect."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitron.config.sizes import stage_layers
from minitron.pipeline import schedule as schedule_module
from minitron.pipeline.schedule import (
    IN_FLIGHT,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Schedule,
    Transfer,
    forward_only,
    make,
    route,
    routed,
)
from minitron.planner import style
from minitron.planner.check import check
from minitron.planner.draw import (
    LEFT,
    MOST,
    NAMES,
    PLOT,
    _colour,
    caption,
    describe,
    draw_svg,
    draw_text,
    main,
    notation,
    peak_activations,
    windows,
)
from minitron.planner.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 15)).map(
    lambda layout: (layout[0], layout[1] if layout[0] > 1 else 1, layout[2])
)  # pp, vp, microbatches


def operations(schedule, rank):
    return [action for action in schedule.ranks[rank] if type(action) is not Exchange]


def peak_received(schedule):
    """For each rank, the most received tensors that wait at once for the operation that uses them."""
    peaks = []
    for rank, actions in enumerate(schedule.ranks):
        waiting = peak = 0
        for action in actions:
            if type(action) is Exchange:
                waiting += len(action.recvs)
                peak = max(peak, waiting)
            elif route(action, rank, schedule.pp, schedule.vp)[0] is not None:
                waiting -= 1
        peaks.append(peak)
    return peaks


def largest_group(pp, m):
    return -(-m // max(1, m // pp))


def theory(pp, vp, m):
    """Step time in units of one chunk's forward and backward: the bubble of the literature, and m < pp's extra wait."""
    return vp * m + pp - 1 + (vp - 1) * max(0, pp - m)


def dependencies_only(schedule, forward, backward, weight=0):
    """Plain twin of `simulate`: the step time if every value arrived as soon as it is made."""
    pp, end, now = schedule.pp, {}, [0] * schedule.pp
    seconds = {Forward: forward, Backward: backward, BackwardInput: backward - weight, BackwardWeight: weight}
    todo = [operations(schedule, rank)[::-1] for rank in range(pp)]
    while any(todo):
        for rank in range(pp):
            while todo[rank]:
                op = todo[rank][-1]
                kind, stage = type(op).__name__[:8], op.chunk * pp + rank  # "Backward" of both halves
                source = stage + (1 if kind == "Backward" else -1)
                source = -1 if type(op) is BackwardWeight else source
                inside = 0 <= source < pp * schedule.vp
                if inside and (kind, op.mb, source) not in end:
                    break
                start = max(now[rank], end[kind, op.mb, source] if inside else 0)
                now[rank] = start + seconds[type(op)]
                end.setdefault((kind, op.mb, stage), now[rank])
                todo[rank].pop()
    return max(now)


# What a schedule promises


@settings(max_examples=400, deadline=None)
@given(LAYOUTS, st.integers(2, 4), st.integers(0, 40))
def test_training_schedules_keep_their_promises(layout, backward, more_layers):
    """No deadlock, nothing lost (check), the bubble of the theory, bounded memory, every layer once."""
    pp, vp, m = layout
    schedule = make(pp, vp, m)
    check(schedule)
    timeline = simulate(schedule, 2, backward)
    assert timeline.makespan == theory(pp, vp, m) * (2 + backward)  # small integers: exact in floats
    if m >= pp:
        assert timeline.bubble == pytest.approx((pp - 1) / (vp * m), rel=1e-12)  # a handful of roundings
    group = largest_group(pp, m)
    warmup = [pp - rank - 1 if vp == 1 else (vp - 1) * group + 2 * (pp - rank - 1) for rank in range(pp)]
    assert peak_activations(schedule) == tuple(min(vp * m, forwards + 1) for forwards in warmup)
    assert max(peak_received(schedule)) <= (2 if vp == 1 else 4 if m % pp == 0 else max(0, group - pp) + 5)
    for rank, actions in enumerate(schedule.ranks):
        assert [op.last for op in actions if type(op) is Forward] == [False] * (vp * m - 1) + [True]
        for action in actions:
            if type(action) is Exchange:  # at most one message each way with each neighbour
                receive_peers = [transfer.peer for transfer in action.recvs]
                assert len(action.sends) <= 1 and len(receive_peers) == len(set(receive_peers))
                assert rank not in receive_peers + [transfer.peer for transfer in action.sends]
    check_layers(stage_layers(pp * vp + more_layers, pp, vp), pp * vp + more_layers, pp)


@pytest.mark.parametrize("pp, vp, kind", [(2, 2, "1f1b"), (3, 2, "1f1b"), (2, 3, "1f1b"), (3, 1, "zb-h1")])
def test_a_chunk_s_activations_count_once_for_each_layer_of_its_stage(pp, vp, kind):
    """They live from a forward to the end of its whole backward. No two sets of stages have as many layers."""
    schedule, layers = make(pp, vp, 2 * pp, kind), [2**stage for stage in range(pp * vp)]
    found = peak_activations(schedule, layers)
    for rank, actions in enumerate(schedule.ranks):
        alive, most = [], 0
        for op in actions:
            if type(op) is Forward:
                alive.append((op.mb, op.chunk))
                most = max(most, sum(layers[chunk * pp + rank] for _, chunk in alive))
            elif type(op) in (Backward, BackwardWeight):
                alive.remove((op.mb, op.chunk))
        assert found[rank] == most and not alive


def check_layers(ranges, num_layers, pp):
    """Every layer once; stages and ranks differ by one layer at most; the last stage has no more than any other."""
    assert [layer for layers in ranges for layer in layers] == list(range(num_layers))
    counts = [len(layers) for layers in ranges]
    by_rank = [sum(counts[rank::pp]) for rank in range(pp)]
    assert max(counts) - min(counts) <= 1 and max(by_rank) - min(by_rank) <= 1
    assert counts[-1] == min(counts)
    assert counts[0] == min(counts) or min(counts[:-1]) == max(counts)  # the first joins in when all others have


@settings(max_examples=200, deadline=None)
@given(LAYOUTS, st.integers(1, 9), st.integers(1, 9))
def test_any_ratio_of_forward_and_backward(layout, forward, backward):
    """The order of the operations reaches the theory for every ratio; messages can only add to it."""
    schedule = make(*layout)
    fastest = dependencies_only(schedule, forward, backward)
    assert fastest == theory(*layout) * (forward + backward)
    assert simulate(schedule, forward, backward).makespan >= fastest


PIPELINES = st.tuples(st.integers(1, 8), st.integers(1, 20))  # pp, microbatches


@settings(max_examples=200, deadline=None)
@given(PIPELINES)
def test_zb_h1_keeps_its_promises(layout):
    """A third of 1F1B's bubble if the three parts of the work are equal, no more memory, gradients in 1F1B's order."""
    pp, m = layout
    schedule, whole = make(pp, 1, m, "zb-h1"), make(pp, 1, m)
    check(schedule)
    if m >= pp:
        timeline = simulate(schedule, 1, 2)
        assert timeline.makespan == 3 * m + pp - 1
        assert timeline.bubble == pytest.approx(simulate(whole, 1, 2).bubble / 3, rel=1e-12)
    assert max(peak_activations(schedule)) == max(peak_activations(whole))
    assert max(peak_received(schedule)) <= 2
    for rank, actions in enumerate(schedule.ranks):
        weights = [op for op in actions if type(op) is (BackwardWeight if rank else Backward)]
        assert [op.mb for op in weights] == list(range(m)) and [op.last for op in weights] == [False] * (m - 1) + [True]
        without = [op for op in operations(schedule, rank) if type(op) is not BackwardWeight]
        assert [(type(op) is Forward, op.mb) for op in without] == [
            (type(op) is Forward, op.mb) for op in operations(whole, rank)
        ]


@settings(max_examples=200, deadline=None)
@given(PIPELINES, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_any_ratio_of_the_three_parts(layout, forward, inputs, weights):
    """Never slower than 1F1B; where an input's gradient takes longer than a forward, messages cost nothing."""
    pp, m = layout
    schedule, backward = make(pp, 1, m, "zb-h1"), inputs + weights
    fastest = dependencies_only(schedule, forward, backward, weights)
    timeline = simulate(schedule, forward, backward, weight_seconds=weights)
    assert fastest <= timeline.makespan
    if forward <= inputs and m >= pp:
        assert timeline.makespan == fastest
    if inputs >= weights and forward >= weights and m >= pp:
        assert fastest == m * (forward + backward) + (pp - 1) * (forward + inputs - weights)


@settings(max_examples=150, deadline=None)
@given(LAYOUTS)
def test_forward_only_schedules(layout):
    pp, vp, m = layout
    schedule = forward_only(pp, vp, m)
    check(schedule)
    timeline = simulate(schedule, 1, 1)
    assert timeline.makespan == vp * m + pp - 1 + (vp - 1) * max(0, pp - m)
    training = make(pp, vp, m)
    for rank in range(pp):
        forwards = [op for op in operations(training, rank) if type(op) is Forward]
        assert [replace(op, after=0) for op in operations(schedule, rank)] == [replace(op, after=0) for op in forwards]


@given(LAYOUTS, st.booleans())
def test_few_messages_are_under_way(layout, training):
    """A rank that only sends, as the first one in an evaluation, would else keep all that it ever sent.

    No Exchange waits for more than that: work would stop that messages could run beside.
    """
    for actions in (make if training else forward_only)(*layout).ranks:
        posted = complete = 0
        for action in actions:
            assert type(action) is not Exchange or action.after == max(0, posted - IN_FLIGHT)
            complete = max(complete, action.after)
            posted += type(action) is Exchange
            assert complete <= posted <= complete + IN_FLIGHT + 1


@pytest.mark.parametrize("pp, vp, groups", [(2, 2, 1), (2, 3, 4), (4, 2, 2), (4, 5, 3), (8, 3, 2)])
def test_interleaved_order_is_megatrons(pp, vp, groups):
    """The n-th operation by Megatron's arithmetic on virtual microbatch ids, for m a multiple of pp."""
    m = pp * groups
    schedule = make(pp, vp, m)
    for rank in range(pp):

        def place(n):
            return n // (pp * vp) * pp + n % pp, n % (pp * vp) // pp

        warmup = min(vp * m, 2 * (pp - rank - 1) + (vp - 1) * pp)
        expected = [("F", *place(n)) for n in range(warmup)]
        for n in range(vp * m):
            if warmup + n < vp * m:
                expected.append(("F", *place(warmup + n)))
            mb, chunk = place(n)
            expected.append(("B", mb, vp - 1 - chunk))
        assert [(type(op).__name__[0], op.mb, op.chunk) for op in operations(schedule, rank)] == expected


def test_thousands_of_microbatches():
    """Making, checking and timing are linear; anything quadratic would run for minutes here."""
    timeline = simulate(make(4, 2, 601), 1, 2)
    assert timeline.makespan == theory(4, 2, 601) * 3


def test_short_last_group_deadlocks(monkeypatch):
    """Why the groups are made equal: the simple rule for m = 5, pp = 4 cannot even be ordered."""
    monkeypatch.setattr(schedule_module, "_groups", lambda pp, m: [pp] * (m // pp) + [m % pp])
    with pytest.raises(AssertionError, match="the order of the operations alone deadlocks"):
        make(4, 3, 5)


# What check() sees


def edit(schedule, rank, change):
    """The schedule with `change` applied to the list of that rank's actions."""
    actions = list(schedule.ranks[rank])
    change(actions)
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))


def find(actions, kind, nth=0):
    return [i for i, action in enumerate(actions) if type(action) is kind][nth]


def swap(actions, i, j):
    actions[i], actions[j] = actions[j], actions[i]


def without(actions, field, nth=0):
    """Drop the nth Transfer in `field` ("sends" or "recvs")."""
    i = [i for i, action in enumerate(actions) if type(action) is Exchange and getattr(action, field)][nth]
    actions[i] = replace(actions[i], **{field: getattr(actions[i], field)[1:]})


def duplicate_receive(actions):
    i = [i for i, action in enumerate(actions) if type(action) is Exchange and action.recvs][0]
    actions.insert(i, Exchange((), actions[i].recvs))


def redirect_send(actions):
    i = find(actions, Exchange)
    actions[i] = replace(actions[i], sends=(replace(actions[i].sends[0], peer=2),))


def backward_before_its_forward(actions):
    actions.insert(0, actions.pop(find(actions, Backward)))


def mark_last(actions, nth, last, kind=Backward):
    i = find(actions, kind, nth)
    actions[i] = replace(actions[i], last=last)


def wait_for(actions, kind, nth, change):
    i = find(actions, kind, nth)
    actions[i] = replace(actions[i], after=change(actions[i].after))


def reroute(actions, nth, **route):
    i = find(actions, Forward, nth)
    actions[i] = replace(actions[i], **route)


def unused_receive(actions):
    actions.append(Exchange((), (Transfer("activation", 0, 1, 0),)))


DEFECTS = {
    "forward dropped": (3, lambda a: a.pop(find(a, Forward, -1)), r"rank 3, .*Backward\(mb=7, chunk=1.*has not run"),
    "backward dropped": (0, lambda a: a.pop(find(a, Backward, -2)), "rank 0 runs 31 operations instead of 32"),
    "forward twice": (0, lambda a: a.insert(0, a[0]), r"rank 0, action 1 Forward\(mb=0, chunk=0\): runs a second time"),
    "microbatch out of range": (0, lambda a: a.insert(0, Forward(8, 0)), "there are 8 microbatches and 2 chunks"),
    "chunk out of range": (0, lambda a: a.insert(0, Forward(0, 2)), "there are 8 microbatches and 2 chunks"),
    "backward too early": (3, backward_before_its_forward, "rank 3, action 0 Backward.*its forward has not run"),
    "last missing": (1, lambda a: mark_last(a, -1, False), "`last` belongs on the chunk's last backward"),
    "last too early": (1, lambda a: mark_last(a, 0, True), "`last` belongs on the chunk's last backward"),
    "input of another": (
        1,
        lambda a: reroute(a, 2, input=a[find(a, Forward)].input),
        "takes .*mb=0.* instead of .*mb=2",
    ),
    "output forgotten": (1, lambda a: reroute(a, 2, output=None), "and makes None instead of .*mb=2"),
    "wait too short": (
        1,
        lambda a: wait_for(a, Forward, 2, lambda n: n - 1),
        "waits for 3 .*its input comes with number 4",
    ),
    "wait for itself": (1, lambda a: wait_for(a, Exchange, 2, lambda n: 3), "waits for 3 Exchanges and is number 3"),
    "wait too long": (1, lambda a: wait_for(a, Forward, 2, lambda n: 7), r"Forward.*waits for 7 .*only 6 come before"),
    "last wait too long": (3, lambda a: wait_for(a, Backward, -1, lambda n: 99), r"Backward.*waits for 99 Exchanges"),
    "receive dropped": (1, lambda a: without(a, "recvs"), r"rank 1, action \d Forward.*has not been received"),
    "send dropped": (
        0,
        lambda a: without(a, "sends"),
        "from rank 0 to rank 1 .*sent as .* mb 1 .*received as .* mb 0 ",
    ),
    "receive after use": (1, lambda a: swap(a, 0, find(a, Forward)), "rank 1, action 0 Forward.*has not been received"),
    "send before making": (0, lambda a: swap(a, 0, 1), "rank 0, action 0 Exchange.*which has not been made"),
    "send twice": (0, lambda a: a.append(Exchange(a[1].sends, ())), "rank 0, action .* or is sent already"),
    "send to another rank": (0, redirect_send, "rank 0, action 1 Exchange.*which has not been made"),
    "receive twice": (1, duplicate_receive, r"rank 1, action \d Forward.*its input comes with number 2"),
    "receive unused": (1, unused_receive, "from rank 0 to rank 1 .*sent as nothing, received as activation of mb 0 "),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_check_sees(defect):
    rank, change, message = DEFECTS[defect]
    schedule = make(4, 2, 8)
    check(schedule)
    with pytest.raises(ValueError, match=message):
        check(edit(schedule, rank, change))


def test_no_time_is_given_for_a_step_that_does_not_end():
    """Also if all Exchanges are over, and only rank 0's last backward waits for another."""
    with pytest.raises(AssertionError, match="deadlocks"):
        simulate(edit(make(4, 1, 4), 0, lambda a: wait_for(a, Backward, -1, lambda n: 99)), 1, 2)


def test_check_sees_reordered_messages():
    """Both receives of rank 1 come before their use, but the other way round than rank 0 sends them."""

    def change(actions):
        first, second = [i for i, action in enumerate(actions) if type(action) is Exchange and action.recvs][:2]
        a, b = actions[first], actions[second]
        actions[first], actions[second] = replace(a, recvs=b.recvs), replace(b, recvs=a.recvs)
        swap(actions, first + 1, second)
        actions[:] = routed(actions, 1, 2, 1)

    schedule = make(2, 1, 4)
    message = "message 0 from rank 0 to rank 1 .* sent as activation of mb 0 .*, received as activation of mb 1 "
    with pytest.raises(ValueError, match=message):
        check(edit(schedule, 1, change))


def test_check_sees_a_receive_without_a_send():
    schedule = Schedule(2, 1, 1, ((), (Exchange((), (Transfer("activation", 0, 1, 0),)), Forward(0, 0))), False)
    with pytest.raises(ValueError, match="rank 0 runs 0 operations instead of 1"):
        check(schedule)
    with pytest.raises(ValueError, match="the schedule has actions for 2 ranks, but pp=3"):
        check(replace(schedule, pp=3))


def fused(schedule):
    """The same operations with the obvious placement: send this operation's output and receive the next one's input."""
    pp, vp, ranks = schedule.pp, schedule.vp, []
    for rank in range(pp):
        order = operations(schedule, rank)
        actions = []
        for op, following in zip([None, *order], [*order, None]):
            sent = route(op, rank, pp, vp)[1] if op else None
            needed = route(following, rank, pp, vp)[0] if following else None
            actions += [op] if op else []
            actions += [Exchange((sent,) if sent else (), (needed,) if needed else ())] if sent or needed else []
        ranks.append(tuple(routed(actions, rank, pp, vp)))
    return replace(schedule, ranks=tuple(ranks))


@pytest.mark.parametrize("pp, vp, m", [(2, 2, 4), (3, 2, 6), (4, 2, 8), (4, 3, 16)])
def test_check_sees_that_fused_messages_deadlock(pp, vp, m):
    """Interleaved with m > pp hangs; without interleaving, and for m = pp, the same placement runs."""
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at action \d+ Exchange.* waits for rank \d; rank 1 at"):
        check(fused(make(pp, vp, m)))
    check(fused(make(pp, vp, pp)))
    check(fused(make(pp, 1, m)))


WEIGHTS_LAST = r"rank 2, action \d+ BackwardWeight.*`last` belongs on the chunk's last backward"
SPLIT_DEFECTS = {
    "weights dropped": (2, lambda a: a.pop(find(a, BackwardWeight)), "rank 2 runs 23 operations instead of 24"),
    "weights twice": (
        2,
        lambda a: a.insert(find(a, BackwardWeight) + 1, a[find(a, BackwardWeight)]),
        "runs a second time",
    ),
    "weights too early": (
        2,
        lambda a: a.insert(find(a, BackwardInput), a.pop(find(a, BackwardWeight))),
        "no backward has deferred these weight gradients",
    ),
    "weights of a whole backward": (0, lambda a: a.append(BackwardWeight(0, 0, last=True)), "no backward has deferred"),
    "last weights missing": (2, lambda a: mark_last(a, -1, False, BackwardWeight), WEIGHTS_LAST),
    "last weights too early": (2, lambda a: mark_last(a, 0, True, BackwardWeight), WEIGHTS_LAST),
    "last input missing": (
        2,
        lambda a: mark_last(a, -1, False, BackwardInput),
        "BackwardInput.*`last` belongs on the chunk's last backward",
    ),
    "whole and split": (2, lambda a: whole(a, 3), "a chunk's backwards are all whole or all split"),
}


def whole(actions, nth):
    """Make one backward whole; its weight gradients stay where they are."""
    i = find(actions, BackwardInput, nth)
    fields = ("mb", "chunk", "last", "input", "output", "after")
    actions[i] = Backward(**{name: getattr(actions[i], name) for name in fields})


@pytest.mark.parametrize("defect", SPLIT_DEFECTS)
def test_check_sees_in_split_backwards(defect):
    rank, change, message = SPLIT_DEFECTS[defect]
    schedule = make(4, 1, 8, "zb-h1")
    check(schedule)
    with pytest.raises(ValueError, match=message):
        check(edit(schedule, rank, change))


def test_actions_say_what_they_are():
    """As reports of runs that hang, dry runs and profiles print them."""
    names = [str(op) for op in operations(make(2, 1, 2, "zb-h1"), 1)]
    assert names[1] == "BackwardInput(mb=0, chunk=0, last=False)"
    assert names[-2:] == [f"BackwardWeight(mb={mb}, chunk=0, last={mb == 1})" for mb in (0, 1)]


# Time


def test_transfers_take_time():
    """One microbatch crosses pp - 1 links forward and as many back."""
    assert simulate(make(4, 1, 1), 1, 2, 0.5).makespan == 4 * (1 + 2) + 2 * 3 * 0.5


def test_slowest_stage_sets_the_pace():
    """m microbatches through unequal stages: the slowest works without a break between filling and draining."""
    forward, backward, m = [1, 2, 5], [2, 4, 10], 9
    timeline = simulate(make(3, 1, m), forward, backward)
    assert timeline.makespan == sum(forward[:2]) + sum(backward[:2]) + m * (5 + 10)
    assert timeline.idle == tuple(timeline.makespan - m * (f + b) for f, b in zip(forward, backward))
    for rank in range(3):
        events = [event for event in timeline.events if event.rank == rank]
        assert [event.action for event in events] == operations(timeline.schedule, rank)
        assert all(a.end <= b.start for a, b in zip(events, events[1:]))


def let_messages_take(ticks, monkeypatch, clock=schedule_module._finish_ticks):
    monkeypatch.setattr(schedule_module, "_finish_ticks", lambda *sizes, travel: clock(*sizes, travel=ticks))


def test_messages_hide_behind_other_work(monkeypatch):
    """Those of a tenth of a forward show by 0.8 %; 3.7 % on a clock on which they take no time, as schedule.py says."""

    def seconds(transfer):
        return simulate(make(8, 12, 64), 1, 2, transfer).makespan

    ideal = theory(8, 12, 64) * (1 + 2)
    assert seconds(0) == ideal and 1.008 * ideal < seconds(0.1) < 1.009 * ideal
    let_messages_take(0, monkeypatch)
    assert seconds(0) == ideal and 1.037 * ideal < seconds(0.1) < 1.038 * ideal


def test_messages_that_travel_long_on_the_clock_hold_up_uneven_groups(monkeypatch):
    """The bounds are schedule.py's "3 %", "a thousandth" and "2 %"."""
    ideal = theory(8, 2, 20) * (1 + 2)
    assert simulate(make(8, 2, 20), 1, 2).makespan == ideal
    assert 1 < simulate(make(16, 4, 63), 1, 2).makespan / (theory(16, 4, 63) * (1 + 2)) < 1.0013
    long = simulate(make(12, 6, 23), 1, 2, 0.2).makespan
    let_messages_take(0, monkeypatch)
    assert 1.02 < long / simulate(make(12, 6, 23), 1, 2, 0.2).makespan < 1.025
    let_messages_take(schedule_module.TICKS[Forward], monkeypatch)
    assert 1.03 * ideal < simulate(make(8, 2, 20), 1, 2).makespan < 1.04 * ideal


def test_a_slow_stage_waits_for_messages_that_travel_with_one_chunk_a_rank(monkeypatch):
    """The bounds are schedule.py's "1 to 4 %"."""

    def seconds(transfer):
        stages = [1.1] + [1.0] * 11
        return simulate(make(12, 1, 96), stages, [2 * stage for stage in stages], transfer).makespan

    before = seconds(0.1), seconds(0.2)
    let_messages_take(1, monkeypatch)
    assert 1.01 * before[0] < seconds(0.1) and 1.035 * before[1] < seconds(0.2) < 1.045 * before[1]


def test_clock_with_short_backwards_costs_time(monkeypatch):
    """Exchanges placed for backwards as short as forwards hold each other up; the bound is schedule.py's "4 %"."""
    ideal = theory(6, 2, 16) * (1 + 2)
    assert simulate(make(6, 2, 16), 1, 2).makespan == ideal
    monkeypatch.setattr(schedule_module, "TICKS", schedule_module.TICKS | {Backward: schedule_module.TICKS[Forward]})
    assert 1.04 * ideal < simulate(make(6, 2, 16), 1, 2).makespan < 1.05 * ideal


def test_a_clock_with_equal_halves_costs_time(monkeypatch):
    """Exchanges that are shared by chance hold up what is ready; the bound is schedule.py's "4 %"."""

    def seconds():
        return simulate(make(8, 1, 28, "zb-h1"), 1, 2, weight_seconds=0.8).makespan

    ideal = 28 * 3 + 7 * (1 + 1.2 - 0.8)
    assert seconds() == pytest.approx(ideal, rel=1e-12)
    monkeypatch.setattr(schedule_module, "TICKS", schedule_module.TICKS | {BackwardInput: 6, BackwardWeight: 6})
    assert 1.04 * ideal < seconds() < 1.05 * ideal


@pytest.mark.parametrize(
    "seconds, message",
    [
        ((0, 1), "forward_seconds=0 must be positive and finite"),
        ((1, float("nan")), "backward_seconds=nan must be positive"),
        (([1, 1, 1], 1), "forward_seconds has 3 values; give one for each of the 4 stages"),
        ((1, 1, -1), "transfer_seconds=-1 must not be negative"),
        ((1, 1, float("nan")), "transfer_seconds=nan must not be negative"),
        ((1, 2, 0, 2), "backward_seconds less weight_seconds=0 must be positive"),
        ((1, 2, 0, 0), "weight_seconds=0 must be positive"),
    ],
)
def test_impossible_seconds(seconds, message):
    with pytest.raises(ValueError, match=message):
        simulate(make(2, 2, 4), *seconds)


# Layers


@given(st.lists(st.integers(1, 9), min_size=8, max_size=8))
def test_explicit_layers(counts):
    ranges = stage_layers(sum(counts), 4, 2, counts)
    assert [len(layers) for layers in ranges] == counts
    assert [layer for layers in ranges for layer in layers] == list(range(sum(counts)))


@pytest.mark.parametrize(
    "args, message",
    [
        ((7, 4, 2), "^model.num_layers=7 leaves stages empty: parallel.pp=4 x parallel.vp=2 are 8 stages"),
        ((8, 2, 1, [3, 3, 2]), r"=\[3, 3, 2\] has 3 entries; give one for each of the parallel.pp=2 x parallel.vp=1"),
        ((8, 2, 1, [8, 0]), r"^parallel.layers_per_stage=\[8, 0\] leaves a stage empty"),
        ((8, 2, 1, [4, 5]), r"^parallel.layers_per_stage=\[4, 5\] sums to 9, but model.num_layers=8; make them equal"),
    ],
)
def test_impossible_layers(args, message):
    with pytest.raises(ValueError, match=message):
        stage_layers(*args)


# Drawings


def label_of(event):
    letter = "abcd"[event.action.chunk]
    letters = {Forward: letter, BackwardWeight: "w"}
    return f"{event.action.mb}{letters.get(type(event.action), letter.upper())}"


@settings(max_examples=50, deadline=None)
@given(LAYOUTS, st.integers(1, 3), st.integers(1, 3))
def test_text_shows_every_operation_at_its_time(layout, forward, backward):
    timeline = simulate(make(*layout), forward, backward)
    rows = draw_text(timeline, 10_000).splitlines()
    columns = (len(str(layout[2] - 1)) + 1) / min(forward, backward)  # per second
    for rank, row in enumerate(rows):
        shown = [(cell.start(), *cell.groups()) for cell in re.finditer(r"(\d+)([a-z]|[A-Z])-*", row[2:])]
        events = [event for event in timeline.events if event.rank == rank]
        expected = []
        for event in events:
            label = label_of(event)
            expected.append((int(event.start * columns + 0.5), label[:-1], label[-1]))
        assert shown == expected
    assert len({len(row) for row in rows}) == 1


SVG = "{http://www.w3.org/2000/svg}"


def drawn(timeline):
    """(tooltip, number or None, left, width, top) of every box, and all other texts.

    A box has the row of its rank, and chunks are the darker the later they are.
    """
    root = ElementTree.fromstring(draw_svg(timeline))
    rows, tints = {}, {}
    for text in root.findall(f"{SVG}text"):
        if text.text.startswith("rank "):
            rows.setdefault(text.text, []).append(float(text.get("y")))
    boxes = []
    for group in root.findall(f"{SVG}g"):
        box, number = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        place = [float(box.get(key)) for key in ("x", "width", "y")]
        rank, what, chunk = re.match(r"(rank \d+): (.*) of .* chunk (\d+),", group.find(f"{SVG}title").text).groups()
        assert any(place[2] < y < place[2] + float(box.get("height")) for y in rows[rank])
        tints.setdefault(what, {})[int(chunk)] = sum(bytes.fromhex(box.get("fill")[1:]))
        boxes.append((group.find(f"{SVG}title").text, None if number is None else number.text, *place))
    for by_chunk in tints.values():
        light = [by_chunk[chunk] for chunk in sorted(by_chunk)]
        assert light == sorted(set(light), reverse=True)
    return boxes, [text.text for text in root.findall(f"{SVG}text")]


@pytest.mark.parametrize("layout", [(3, 2, 5), (2, 1, 8, "zb-h1")])
def test_the_svg_of_a_short_step_has_a_numbered_box_for_every_operation(layout):
    timeline = simulate(make(*layout), 1, 2.5)
    boxes, texts = drawn(timeline)
    assert [name for name, *_ in windows(timeline)] == ["whole step"] and "whole step" in texts
    assert [number for _, number, *_ in boxes] == [str(event.action.mb) for event in timeline.events]
    scale = PLOT / timeline.makespan
    for (tooltip, _, left, width, top), event in zip(boxes, timeline.events):
        assert tooltip.startswith(f"rank {event.rank}: {NAMES[type(event.action)]} of microbatch {event.action.mb} ")
        assert left == pytest.approx(boxes[0][2] + event.start * scale, abs=0.02)
        assert width == pytest.approx((event.end - event.start) * scale, abs=0.02)
    title, bubble = describe(timeline).split(", bubble ")
    assert {title, f"bubble {bubble}"} <= set(texts) and bubble.endswith(" % of the compute time")
    kinds = {NAMES[type(event.action)] for event in timeline.events}
    assert {f"rank {rank}" for rank in range(layout[0])} | kinds | {"idle"} <= set(texts)
    assert set(NAMES.values()) & set(texts) == kinds  # the legend has what is drawn
    rects = ElementTree.fromstring(draw_svg(timeline)).findall(f"{SVG}rect")
    tints = [_colour(kind, chunk, layout[1]) for kind in NAMES if NAMES[kind] in kinds for chunk in range(layout[1])]
    assert [rect.get("fill") for rect in rects if rect.get("y") == "33"] == [*tints, "url(#idle)"]
    assert max(left + width for _, _, left, width, _ in boxes) < 72 * style.WIDTH


@pytest.mark.parametrize("layout", [(8, 1, 64), (4, 1, 128, "zb-h1"), (8, 12, 64), (4, 2, 2048)])
def test_the_svg_of_a_long_step_has_its_warm_up_and_a_steady_window_with_numbers(layout):
    """The picture of a 175B's step was 6,088 pixels wide, its boxes too narrow for numbers."""
    timeline = simulate(make(*layout), 1, 2)
    (first, start, end), (second, steady, steady_end) = windows(timeline)
    assert (first, second, start) == ("warm-up", "steady", 0.0) and steady_end - steady == pytest.approx(end)
    assert end <= steady < steady_end <= timeline.makespan
    shown = [e for low, high in ((start, end), (steady, steady_end)) for e in timeline.events
             if e.start < high and low < e.end]  # fmt: skip
    boxes, texts = drawn(timeline)
    assert len(boxes) == len(shown)
    for (_, number, left, width, _), event in zip(boxes, shown):
        assert left + width <= 72 * style.WIDTH
        whole = start <= event.start and event.end <= end or steady <= event.start and event.end <= steady_end
        assert number == str(event.action.mb) or not whole and number is None
    # Steady is what it is called: nobody waits in it, and each rank does as many forwards as backwards.
    for rank in range(layout[0]):
        busy = sum(min(e.end, steady_end) - max(e.start, steady) for e in shown if e.rank == rank and e.end > steady)
        assert busy == pytest.approx(steady_end - steady)
    assert any(text.startswith("steady, ") and text.endswith(f" s of {timeline.makespan:.4g}") for text in texts)


@pytest.mark.parametrize("layout, seconds", [((4, 1, 40), (1, 2)), ((3, 1, 5), (0.25, 0.75)), ((4, 1, 20), (1, 2))])
def test_the_svg_has_a_time_axis_and_tooltips_with_seconds(layout, seconds):
    """In each window a box begins where the axis has its start, and is as wide as its seconds there."""
    timeline = simulate(make(*layout), *seconds)
    root = ElementTree.fromstring(draw_svg(timeline))
    axes = {}  # height -> [(second, where)]
    for text in root.findall(f"{SVG}text"):
        if text.get("text-anchor") == "middle":
            axes.setdefault(float(text.get("y")), []).append((float(text.text), float(text.get("x"))))
    boxes = iter(root.findall(f"{SVG}g"))
    for (_, start, end), (_, ticks) in zip(windows(timeline), sorted(axes.items()), strict=True):
        first, last = ticks[0][0], ticks[-1][0]
        scale = PLOT / (end - start)
        steps = [b - a for (a, _), (b, _) in zip(ticks, ticks[1:])]
        assert 4 <= len(steps) <= 12 and steps == pytest.approx([steps[0]] * len(steps))
        assert start <= first < start + steps[0] * 1.001 and end - steps[0] * 1.001 < last <= end * (1 + 1e-9)
        assert [x for _, x in ticks] == pytest.approx(
            [LEFT + (second - start) * scale for second, _ in ticks], abs=0.01
        )
        for event in timeline.events:
            if event.start < end and start < event.end:
                box = next(boxes)
                assert box.find(f"{SVG}title").text.endswith(f", {event.start:g} to {event.end:g} s")
                x, width = (float(box.find(f"{SVG}rect").get(key)) for key in ("x", "width"))
                begin, stop = max(event.start, start), min(event.end, end)
                assert (x, width) == pytest.approx((LEFT + (begin - start) * scale, (stop - begin) * scale), abs=0.01)
    assert next(boxes, None) is None


@settings(max_examples=100, deadline=None)
@given(LAYOUTS, st.booleans(), st.sampled_from([(1, 2), (3, 1), (1, 9)]), st.integers(20, 60))
def test_the_windows_of_a_step_do_not_overlap(layout, training, durations, width):
    """Whole, in halves, or a warm-up and as much of the later step."""
    timeline = simulate((make if training else forward_only)(*layout), *durations)
    shown, end = windows(timeline, width, digit=1, beside=1), timeline.makespan
    places = [x for _, *place in shown for x in place]
    assert places == sorted(places) and places[0] == 0 and places[-1] <= end
    if len(shown) == 1 or shown[0][0] == "first half":
        assert places[1:] == ([end] if len(shown) == 1 else [end / 2, end / 2, end])
    else:
        assert places[3] - places[2] == pytest.approx(places[1])


def test_a_step_of_two_windows_is_drawn_in_halves_and_unlike_durations_without_some_numbers():
    timeline = simulate(make(4, 1, 20), 1, 2)
    assert windows(timeline) == [
        ("first half", 0.0, timeline.makespan / 2),
        ("second half", timeline.makespan / 2, 69.0),
    ]
    timeline = simulate(make(2, 1, 8, "zb-h1"), 1, 2, weight_seconds=0.01)
    boxes, _ = drawn(timeline)
    assert {number is None for tooltip, number, *_ in boxes if "weight gradients" in tooltip} == {True}
    assert (
        sum(number is None for tooltip, number, *_ in boxes if " forward" in tooltip) <= 2
    )  # cut by the window's edge


def test_drawings_name_the_schedule():
    schedules = make(2, 1, 2), make(2, 2, 2), make(2, 1, 2, "zb-h1"), forward_only(2, 2, 2)
    titles = [describe(simulate(s, 1, 1)) for s in schedules]
    assert [title.split(":")[0] for title in titles] == ["1F1B", "Interleaved 1F1B", "ZB-H1", "Forward only"]


@pytest.mark.parametrize(
    "layout, seconds, message",
    [
        ((2, 27, 2), (1, 1), "vp=27 has more chunks"),
        ((2, 1, 2), (1 / MOST, 1), "operations of 1e-06 s in a step of 3 s"),
    ],
)
def test_impossible_drawings(layout, seconds, message):
    with pytest.raises(ValueError, match=message):
        draw_text(simulate(make(*layout), *seconds))


def draw_pipeline(*args):
    tool = [sys.executable, ROOT / "tools" / "draw_pipeline.py", *args]
    return subprocess.run(tool, capture_output=True, text=True, timeout=600, env=os.environ | {"COLUMNS": "120"})


def test_tool_draws(tmp_path):
    svg = tmp_path / "schedule.svg"
    result = draw_pipeline("--pp", "4", "--vp", "2", "--microbatches", "8", "--svg", svg)
    timeline = simulate(make(4, 2, 8), 1, 2)
    assert result.returncode == 0 and result.stderr == ""
    assert describe(timeline) in result.stdout and draw_text(timeline) in result.stdout
    assert result.stdout.rstrip().endswith(
        f"{', '.join(map(str, peak_activations(timeline.schedule)))}\nPicture: {svg}"
    )
    assert " ".join(notation(timeline).split()) in " ".join(result.stdout.split())  # its lines are broken
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert svg.read_text(encoding="utf-8") == draw_svg(timeline)


def test_tool_draws_split_backwards():
    result = draw_pipeline("--pp", "4", "--microbatches", "6", "--schedule", "zb-h1", "--weight", "0.5")
    timeline = simulate(make(4, 1, 6, "zb-h1"), 1, 2, weight_seconds=0.5)
    rows = draw_text(timeline).splitlines()
    assert result.stdout.splitlines()[1:5] == rows and "ZB-H1" in result.stdout
    assert all(f"{mb}w" in rows[3] and f"{mb}A--" in rows[3] for mb in range(6)) and "w" not in rows[0]
    waiting = draw_pipeline("--pp", "4", "--microbatches", "6", "--transfer", "0.25")
    assert waiting.stdout.startswith(describe(simulate(make(4, 1, 6), 1, 2, 0.25)))
    assert "weight gradients" in draw_svg(timeline) and "weight gradients" not in draw_svg(
        simulate(make(4, 1, 8), 1, 2)
    )


@settings(max_examples=25, deadline=None)
@given(LAYOUTS, st.integers(40, 90), st.sampled_from([(1, 2, None), (1, 2, 0.01), (3, 1, None), (0.1, 50, None)]))
def test_every_line_of_text_fits_and_labels_are_those_of_operations(layout, width, durations):
    """64 microbatches were lines of 500 columns."""
    forward, backward, weight = durations
    pp, vp, mbs = layout
    split = {} if weight is None or vp > 1 else {"weight_seconds": weight}
    timeline = simulate(make(pp, vp, mbs, "zb-h1" if split else "1f1b"), forward, backward, **split)
    lines = draw_text(timeline, width).splitlines()
    assert max(map(len, lines)) <= width
    shown = windows(timeline, width - 2, digit=1, beside=1)
    titles = [caption(timeline, *window) for window in shown] if len(shown) > 1 else []
    assert [line for line in lines if not line[0].isdigit()] == titles and len(lines) == len(titles) + pp * len(shown)
    for rank in range(pp):
        for (_, start, end), row in zip(shown, [line[2:] for line in lines if line.startswith(f"{rank} ")]):
            columns = len(row) / (end - start)  # per second
            begun = [(label_of(e), (e.start - start) * columns) for e in timeline.events if e.rank == rank]
            for found in re.finditer(r"\d+[a-zA-Z]", row):
                assert any(label == found.group() and abs(found.start() - at) <= 1 for label, at in begun)


@pytest.mark.parametrize("layout", [(8, 1, 64), (4, 2, 256), (2, 1, 40, "zb-h1")])
def test_the_text_of_a_long_step_has_the_windows_of_the_svg(layout):
    text = draw_text(timeline := simulate(make(*layout), 1, 2))
    titles = [line for line in text.splitlines() if not line[0].isdigit()]
    assert [title.split(",")[0] for title in titles] == ["warm-up", "steady"]
    assert "0a" in text.splitlines()[1] and titles[1].endswith(f" s of {timeline.makespan:.4g}")
    steady = text.split(titles[1] + "\n")[1]
    assert "." not in steady and re.search(r"\d+a", steady) and re.search(r"\d+A", steady)


@pytest.mark.parametrize("columns, widest", [("60", 60), ("7", 40), ("130", 130)])
def test_the_tool_is_as_wide_as_the_terminal(columns, widest, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    main(["--pp", "8", "--microbatches", "64"])
    assert widest - 5 <= max(map(len, capsys.readouterr().out.splitlines())) <= max(widest, 70)


def test_the_notation_explains_the_signs_that_are_drawn():
    layouts = {(2, 1, 4): "aA", (2, 3, 4): "abcABC", (2, 1, 4, "zb-h1"): "aAw"}
    for layout, letters in layouts.items():
        timeline = simulate(make(*layout), 1, 2)
        assert set(re.findall("[a-zA-Z]", draw_text(timeline))) == set(letters)
        said = notation(timeline)
        assert "0a: forward" in said and "0A:" in said and "--:" in said and "..:" in said
        assert ("0w:" in said) == ("w" in letters) and ("a to c:" in said) == ("c" in letters) == (" to " in said)
    assert "0A" not in notation(simulate(forward_only(2, 1, 4), 1, 1))


@pytest.mark.parametrize(
    "args, message",
    [
        (["--pp", "2"], "required: --microbatches"),
        (["--pp", "x", "--microbatches", "2"], "--pp: x is not a whole number"),
        (["--pp", "0", "--microbatches", "2"], "--pp: 0 is not a whole number of 1 or more"),
        (["--pp", "2", "--vp", "0", "--microbatches", "2"], "--vp: 0 is not a whole number of 1 or more"),
        (["--pp", "2", "--microbatches", "0"], "--microbatches: 0 is not a whole number of 1 or more"),
        (["--pp", "1", "--vp", "2", "--microbatches", "2"], "--vp 2 interleaves"),
        (["--pp", "2", "--vp", "2", "--microbatches", "2", "--schedule", "zb-h1"], "zb-h1 has one chunk a rank"),
        (["--pp", "2", "--microbatches", "2", "--forward", "0"], "forward_seconds=0.0 must be positive"),
        (["--pp", "2", "--microbatches", "2", "--transfer", "1e300"], "no drawing shows operations of 0 s"),
        (["--pp", "2", "--microbatches", "2", "--backward", "1e308"], "no drawing shows operations of "),
        (["--pp", "2", "--microbatches", "2", "--svg", "missing/schedule.svg"], "No such file or directory"),
    ],
)
def test_tool_refuses_with_one_line(args, message):
    result = draw_pipeline(*args)
    assert result.returncode == 1 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_schedules_need_no_torch():
    code = "import sys, minitron.planner.draw; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=600).returncode == 0
