"""A run that is hurt again and again heals by itself (tests/soak_run.py)."""

import random

import pytest

from soak_run import DEAD_SECONDS, EXPECTED, GOODPUT_OFF, soak


@pytest.mark.slow
@pytest.mark.parametrize(
    "nodes, faults, apart, off",
    [
        pytest.param(2, ["term", "nan", "node"], 6.0, 0.2, id="small"),
        pytest.param(
            4, [*EXPECTED] * 6 + ["rank", "agent", "stop", "term", "nan", "spike"], 40.0, GOODPUT_OFF, id="60 faults"
        ),
    ],
)
def test_every_fault_is_named_and_the_run_ends_as_if_there_had_been_none(tmp_path, nodes, faults, apart, off):
    if nodes == 4:
        random.Random(1).shuffle(faults)
    said = []
    figures = soak(tmp_path, faults, seed=1, nodes=nodes, ranks=2, say=said.append, apart=apart)
    assert figures["faults"] == figures["named"] == len(faults), "\n".join(said)
    calm, hurt = figures["losses"]
    assert hurt == pytest.approx(calm, rel=1e-6)  # float32, the same layout: only the order of arrival can differ
    # From a fault to the first new step, beside what the ranks did of it: no other time limit than that for lost nodes
    # is waited for. A rank that stands still is found later.
    for (kind, seconds), own in zip(figures["seconds"], figures["own_seconds"], strict=True):
        assert kind == "stop" or seconds < DEAD_SECONDS + 3 * own, (own, *said)
    # With three faults chance decides much: how soon they come, and how many steps each costs.
    assert figures["predicted"] == pytest.approx(figures["goodput"], abs=off), figures
    assert figures["restarts"] >= len(faults) - faults.count("disk")
