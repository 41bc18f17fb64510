"""Goodput: rows counted by hand, a run that is killed twice, and the prediction against a drawn life of a job."""

import json
import random

import pytest

from fault_run import Run
from kill_run import MODEL
from minitron.config import files
from minitron.config.save_interval import best_interval
from minitron.planner.failures import predict
from minitron.supervise.goodput import FIRST_STEPS, PARTS, measure, of_run
from minitron.supervise.metrics import rows


def run_row(first_step, started, load, now):
    return {"kind": "run", "time": now, "started": started, "load_seconds": load, "first_step": first_step}


def steps(numbers, now, seconds=1.0, stall=0.0):
    """Rows of steps that follow each other, the first from `now` on."""
    for i, step in enumerate(numbers, start=1):
        yield {"kind": "step", "step": step, "time": now + i * seconds, "step_seconds": seconds, "stall_seconds": stall}


def test_rows_counted_by_hand():
    """Three starts. Second by second:

    1000-1007 start, of which 2 load; 1007-1017 steps 1 to 10; 1017-1020 an evaluation; 1020-1024 steps 11 and 12 of
    2 s, with 0.5 s of each for a save. 1024-1050 nothing. From step 11 again: 1050-1056 start, 1056-1059 steps 11 to
    13, and one second of something else. 1060-1070 nothing. From step 13 again: 1070-1074 start, 1074-1084 steps 13 to
    22; the end waits 1.5 of 2 seconds for a save.
    """
    rows = [
        run_row(1, 1000.0, 2.0, 1006.0),
        *steps(range(1, 11), 1007.0),
        {"kind": "eval", "step": 10, "time": 1020.0, "seconds": 3.0, "loss": 1.0},
        *steps([11, 12], 1020.0, 2.0, 0.5),
        run_row(11, 1050.0, 1.0, 1055.0),
        *steps([11, 12, 13], 1056.0),
        {"kind": "save", "step": 12, "time": 1060.0, "seconds": 2.0, "local": False},
        run_row(13, 1070.0, 0.0, 1074.0),
        *steps(range(13, 23), 1074.0),
        {"kind": "end", "step": 22, "time": 1086.0, "stall_seconds": 1.5},
    ]
    found = measure(rows)
    assert found.seconds == {
        "training": 10 + 2 + 10,  # steps 1 to 10, 11 and 12 of the second start, all of the third
        "start": (7 - 2) + (6 - 1) + 4,
        "load": 3.0,
        "lost": 2 * 1.5 + 1,  # 11 and 12 of the first start, 13 of the second
        "saves": 2 * 0.5 + 1.5,
        "evaluation": 3.0,
        "waiting": 26.0 + 10.0,
        "other": 1 + 0.5,
    }
    assert found.total == 1086.0 - 1000.0 and (found.starts, found.lost_steps) == (3, 3)
    assert list(found.shares) == list(PARTS) and sum(found.shares.values()) == pytest.approx(1.0)
    text = "goodput 25.6 % of 86.0 s since the first start (3 starts, 3 steps made again); start 16.3 %, load 3.5 %, "
    assert str(found) == text + "lost 4.7 %, saves 2.9 %, evaluation 3.5 %, waiting 41.9 %, other 1.7 %"


def test_steps_that_a_later_start_went_back_behind_are_lost_in_all_starts_before():
    """The third start begins before the second: steps 5 to 7 of the first one are made again, too."""
    rows = [run_row(1, 0.0, 0.0, 1.0), *steps(range(1, 11), 1.0)]
    rows += [run_row(8, 20.0, 0.0, 21.0), *steps([8, 9], 21.0)]
    rows += [run_row(5, 30.0, 0.0, 31.0), *steps(range(5, 13), 31.0)]
    found = measure(rows)
    assert (found.seconds["training"], found.seconds["lost"], found.lost_steps) == (4 + 8, 6 + 2, 8)
    rows += [run_row(11, 50.0, 0.0, 51.0), *steps([11, 12, 13], 51.0)]  # and the fourth a later one
    found = measure(rows)
    assert (found.seconds["training"], found.seconds["lost"], found.lost_steps) == (4 + 6 + 3, 8 + 2, 10)


@pytest.mark.parametrize("before", [0, 100])
def test_what_first_steps_take_beyond_others_is_start(before):
    """A compiler in a start's first step, a recording in the last that counts; a later slow step is a slow step."""
    rows = [run_row(before + 1, 0.0, 0.0, 1.0)]
    now = 1.0
    for step in range(1, 31):
        seconds = {1: 9.0, FIRST_STEPS: 5.0, FIRST_STEPS + 1: 4.0}.get(step, 1.0)
        rows += steps([before + step], now, seconds)
        now += seconds
    found = measure(rows)
    assert found.seconds["start"] == 1 + 8 + 4 and found.seconds["training"] == 29 + 4


def test_a_start_s_only_step_or_two_are_compared_with_those_of_all():
    for few, beyond in (1, 8), (2, 8), (3, 0):
        rows = [run_row(1, 0.0, 0.0, 1.0), *steps(range(1, 11), 1.0)]
        rows += [run_row(11, 20.0, 0.0, 21.0), *steps(range(11, 11 + few), 21.0, 9.0)]
        found = measure(rows).seconds
        assert (found["start"], found["training"]) == (1 + 1 + few * beyond, 10 + few * (9 - beyond))


def test_a_start_that_died_before_its_first_step():
    rows = [run_row(1, 0.0, 1.0, 4.0), run_row(1, 10.0, 2.0, 15.0), *steps([1, 2], 16.0)]
    found = measure(rows).seconds
    assert (found["start"], found["load"], found["waiting"], found["training"]) == (3 + 4, 3.0, 6.0, 2.0)


def test_rows_of_before_have_no_account(tmp_path):
    old = [{"kind": "run", "first_step": 1}, {"kind": "step", "step": 1, "step_seconds": 2.0, "loss": 1.0}]
    assert measure(old) is None and measure([]) is None
    found = measure([*old, run_row(2, 5.0, 0.0, 6.0), *steps([2, 3], 6.0)])  # goes on with a newer minitron
    assert found.total == 3.0 and found.starts == 1
    torn = tmp_path / "metrics.jsonl"
    torn.write_text('{"kind": "run"}\n{"kind": "st\n7\n{"kind": "step", "step": 1}\n{"kin')
    assert [row.get("kind") for row in rows(torn)] == ["run", None, None, "step"]


def test_a_line_without_end_is_not_read(tmp_path, monkeypatch):
    """All of it would not fit into memory."""
    monkeypatch.setattr(files, "RECORD_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"kind": "step"}}\n{{"a": "{"x" * 350}"}}\n')
    with pytest.raises(ValueError, match="line 2"):
        list(rows(path))
    assert of_run(path, {}) is None


FOREIGN = [
    '{"kind": "step"}',
    '{"kind": "run", "time": 1.0}',
    '{"kind": ["step"], "time": 1.0}',
    '{"kind": {}, "time": 1.0}',
    '{"time": 1.0}',
    '{"kind": "step", "time": "now", "step": 3, "step_seconds": 1.0}',
    '{"kind": "step", "time": Infinity, "step": 3, "step_seconds": 1.0}',
    '{"kind": "step", "time": 1e400, "step": 3, "step_seconds": 1.0}',
    f'{{"kind": "step", "time": {"9" * 400}, "step": 3, "step_seconds": 1.0}}',
    f'{{"kind": "step", "time": 1010.0, "step": 3, "step_seconds": {"9" * 400}}}',
    '{"kind": "step", "time": 1010.0, "step": 3, "step_seconds": [1.0]}',
    '{"kind": "eval", "time": 1010.0, "seconds": "long"}',
    '{"kind": "end", "time": 1010.0, "stall_seconds": null}',
    '{"kind": "run", "time": 1010.0, "first_step": 1, "load_seconds": {}}',
    "[" * 100000,
    "7",
    "not JSON",
    "9" * 5000,
]


def test_rows_of_others_are_skipped_and_counted(tmp_path):
    """They change nothing else."""
    ours = [run_row(1, 1000.0, 2.0, 1006.0), *steps(range(1, len(FOREIGN)), 1007.0)]
    path, foreign = tmp_path / "metrics.jsonl", len(FOREIGN)
    path.write_text("".join(f"{json.dumps(row)}\n{text}\n" for row, text in zip(ours, FOREIGN, strict=True)))
    found = measure(rows(path))
    assert found == measure(ours)._replace(skipped_rows=foreign)
    assert f"{foreign} rows skipped" in str(found)


def test_a_clock_that_goes_back_takes_no_time():
    rows = [run_row(1, 100.0, 0.0, 101.0), *steps([1], 101.0), run_row(2, 50.0, 0.0, 51.0), *steps([2], 51.0)]
    found = measure(rows)
    assert min(found.seconds.values()) >= 0 and sum(found.shares.values()) == pytest.approx(1.0)
    again = measure([*rows, run_row(3, 120.0, 0.0, 121.0), *steps([3], 121.0)]).seconds  # it waited since 102
    assert (again["waiting"], again["start"], again["training"]) == (18.0, 2.0, 3.0)


def life(interval, stall, save, recovery, mtbf, failures, rng) -> float:
    """Draw a job's life: the share of its time that became training which counted."""
    total = counted = 0.0
    for _ in range(failures):
        alive = rng.expovariate(1 / mtbf)
        total += alive
        counted += interval * max(0, int((alive - recovery - save) // (interval + stall)))
    return counted / total


@pytest.mark.parametrize(
    "interval, stall, save, recovery, mtbf",
    [(600.0, 5.0, 40.0, 120.0, 14400.0), (60.0, 0.1, 20.0, 300.0, 1800.0), (900.0, 60.0, 60.0, 200.0, 2700.0)],
)
def test_the_prediction_is_what_a_drawn_life_gives(interval, stall, save, recovery, mtbf):
    drawn = life(interval, stall, save, recovery, mtbf, 40_000, random.Random(1))
    assert predict(interval, stall, save, recovery, mtbf) == pytest.approx(drawn, abs=0.01)


def test_the_best_interval_is_best():
    """No other interval predicts more than a thousandth more; without failures everything counts."""
    for stall, mtbf in (0.5, 3600.0), (10.0, 14400.0), (60.0, 7200.0):
        best = best_interval(stall, 0.0, mtbf)
        shares = [predict(factor * best, stall, 0.0, 100.0, mtbf) for factor in (0.3, 0.5, 0.8, 1.0, 1.25, 2, 4)]
        assert max(shares) - shares[3] < 1e-3 and shares == sorted(shares[:4]) + sorted(shares[4:], reverse=True)
    assert predict(3600.0, 1e-9, 0.0, 1.0, 1e12) == pytest.approx(1.0, abs=1e-6)
    assert predict(3600.0, 0.0, 0.0, 0.0, 1.0) == 0.0


@pytest.mark.slow
def test_a_run_that_is_killed_twice(tmp_path):
    """Its shares sum to 1 over all starts, and the steps that were made again are those of the log."""
    words = [*MODEL, "train.steps=40", f"checkpoint.dir={tmp_path / 'saves'}", "checkpoint.every=5"]
    words += ["train.eval_every=20", "train.eval_steps=1", "parallel.tp=2"]
    for stop in 13, 27, None:
        with Run(tmp_path, "none", *words, ranks=2) as torchrun:
            if stop is not None:
                torchrun.wait_for(f'"step": {stop}', torchrun.folder / "metrics.jsonl")
                continue  # which kills it
            status, _, output = torchrun.end()
            assert status == 0, output
    rows = [json.loads(line) for line in (torchrun.folder / "metrics.jsonl").read_text().splitlines()]
    made = [row["step"] for row in rows if row["kind"] == "step"]
    again = len(made) - len(set(made))
    assert set(made) == set(range(1, 41)) and again > 0
    found = measure(rows)
    assert (found.starts, found.lost_steps) == (3, again)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    starts = [row for row in rows if row["kind"] == "run"]
    assert found.total == pytest.approx(rows[-1]["time"] - starts[0]["started"], rel=0.02)
    assert rows[-1]["kind"] == "end" and rows[-1]["shares"] == pytest.approx(found.shares, abs=1e-3)
    shares = found.shares
    assert all(shares[part] > 0 for part in ("training", "start", "load", "lost", "waiting", "evaluation"))
    assert shares["other"] < 0.1
    said = [line for line in output.splitlines() if line.startswith("goodput ")]
    assert len(said) == 1 and f"(3 starts, {again} steps made again); start " in said[0]
