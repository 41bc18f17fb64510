"""checkpoint.every=auto: the interval against a calculation by hand, and no trace of it in losses."""

import itertools
import json
import math
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest

from fault_run import TINY
from minitron import pretrain
from minitron.checkpoint import interval
from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.interval import FIRST_STEPS, SaveInterval
from minitron.checkpoint.load import ResumePoint
from minitron.checkpoint.save import Saves
from minitron.config import cli, rules
from minitron.config.save_interval import best_interval, duration


def figures(step, seconds):
    return SimpleNamespace(step=step, seconds=seconds, stall_seconds=0.0)


def alone(own, rule):
    """In place of the agreement of all ranks."""
    return rule([own()])


def save(cadence, step, seconds):
    cadence.begin(step)
    why = cadence.choose(alone)
    cadence.end(seconds)
    return why


def test_the_interval_is_youngs_and_dalys():
    """Steps of 2 s, 0.5 s more behind a save, a failure an hour: Young has sqrt(2 * 0.5 * 3600) = 60 s."""
    cadence, saved = SaveInterval("auto", 1.0, done=100), []
    for step in range(101, 400):
        cadence.observe(figures(step, 2.5 if saved and step == saved[-1] + 1 else 2.0))
        if cadence.due(step):
            why = save(cadence, step, 5.0)
            assert ("every 30 steps (60.0 s)" in why) == (len(saved) == 1), why  # said once, when the first is measured
            saved.append(step)
    daly = 60.0 * (1 + math.sqrt(0.5 / 7200) / 3 + 0.5 / 7200 / 9) - 0.5
    assert best_interval(0.5, 5.0, 3600.0) == pytest.approx(daly, rel=1e-12) and round(daly / 2.0) == 30
    assert saved == [110, 120, *range(150, 400, 30)]


def test_steps_beside_the_writing_count_too():
    """Four steps of 2.25 s while a save is written, the first of which waits 0.4 s: 4 * 0.25 + 0.4 = 1.4 s."""
    cadence = SaveInterval("auto", 1.0, done=0)
    for step in range(1, 11):
        cadence.observe(figures(step, 2.0))
    cadence.begin(10)
    for step, seconds in zip(range(11, 15), (2.65, 2.25, 2.25, 2.25)):
        cadence.observe(figures(step, seconds))
    cadence.end(9.0)
    cadence.observe(figures(15, 2.0))
    assert medians(cadence) == [2.0, pytest.approx(1.4), 9.0]


def medians(cadence):
    """Its seconds of a step, of training lost per save, and per save."""
    seen = []
    cadence.choose(lambda own, rule: seen.append(own()) or rule(seen))
    return seen[0]


def test_a_step_that_ends_as_its_save_begins_is_no_cost_of_the_save():
    """Its figures come when the save is already under way."""
    cadence = SaveInterval("auto", 1.0, done=0)
    for step in range(1, 10):
        cadence.observe(figures(step, 2.0))
    cadence.begin(10)
    for step, seconds in (10, 5.0), (11, 2.5):
        cadence.observe(figures(step, seconds))
    cadence.end(9.0)
    cadence.observe(figures(12, 2.0))
    assert medians(cadence) == [2.0, 0.5, 9.0]


def test_no_save_costs_less_than_nothing():
    """Neither its first step nor the later ones count below 0, and a first save that fails is not measured."""
    cadence, step = SaveInterval("auto", 1.0, done=0), 10
    for earlier in range(1, 11):
        cadence.observe(figures(earlier, 2.0))
    for first, later, taken in (5.0, [], None), (1.5, [], 9.0), (1.5, [2.25, 2.5], 9.0), (2.75, [1.0, 1.5], 9.0):
        cadence.begin(step)
        if taken is None:
            cadence.end(taken)
        for seconds in first, *later:
            cadence.observe(figures(step := step + 1, seconds))
        cadence.end(taken)
        cadence.observe(figures(step := step + 1, 2.0))
    assert list(cadence.stall_seconds) == [0.0, 2 * 0.375, 0.75]


def test_saves_of_either_kind_with_no_step_between_them_cost_each_its_own():
    cadence = SaveInterval("auto", 1.0, done=0)
    for step in range(1, 11):
        cadence.observe(figures(step, 2.0))
    for step, own, seconds in (10, True, 2.5), (11, True, 2.7), (12, False, 62.0), (13, True, 2.9):
        cadence.begin(step, own)
        cadence.observe(figures(step + 1, seconds))
        cadence.end(9.0 if own else None)
    cadence.observe(figures(15, 2.0))
    assert list(cadence.stall_seconds) == pytest.approx([0.5, 0.7, 0.9])


def test_medians_are_of_the_newest_steps_and_saves():
    """Five steps lie between two saves. Up to the twelfth save all take ten times as long."""
    cadence, step = SaveInterval("auto", 1.0, done=0), 0
    for number in range(20):
        slow = 10.0 if number < 12 else 1.0
        cadence.begin(step)
        cadence.observe(figures(step + 1, 2.5 * slow))
        cadence.end(3.0 * slow)
        for later in range(step + 2, step + 7):
            cadence.observe(figures(later, 2.0 * slow))
        step += 6
    assert medians(cadence) == [2.0, pytest.approx(0.5), 3.0]


def test_a_save_that_costs_nothing_still_takes_its_time():
    """No save begins before the one before it could be whole twice."""
    assert best_interval(0.0, 30.0, 3600.0) == 60.0
    assert best_interval(7200.0, 1.0, 3600.0) == 3600.0  # Daly: from a cost of 2 mtbf on


def test_the_largest_measurement_of_all_ranks_counts_and_small_changes_do_not():
    cadence = SaveInterval("auto", 1.0, done=0)
    ranks = [[1.0, 0.5, 3.0], [2.0, 0.1, 5.0], [1.5, None, None]]
    assert cadence.choose(lambda own, rule: rule(ranks)).startswith("every 30 steps (60.0 s), since a save costs 0.5 s")
    for lost, steps in (0.7, 30), (0.4, 30), (0.9, 40):  # 35 and 27 are within a quarter of 30
        cadence.choose(lambda own, rule, lost=lost: rule([[2.0, lost, 5.0]]))
        assert cadence.steps == steps


@pytest.mark.parametrize("best, steps", [(16, 20), (15, 15), (25, 20), (26, 26), (0.2, 1)])
def test_an_interval_is_kept_up_to_a_quarter_and_has_a_step(best, steps):
    cadence, said = SaveInterval("auto", 1.0, done=0), []
    for seconds in 20, best:
        with mock.patch.object(interval, "best_interval", return_value=seconds):
            said.append(cadence.choose(lambda own, rule: rule([[1.0, 0.5, 3.0]])))
    assert cadence.steps == steps and [bool(why) for why in said] == [True, steps != 20]


def test_nothing_is_chosen_without_measurements():
    cadence = SaveInterval("auto", 1.0, done=0)
    assert cadence.choose(lambda own, rule: rule([[2.0, None, None], [1.0, None, 3.0]])) == ""
    assert cadence.steps == FIRST_STEPS
    assert not SaveInterval(None, None, 0).due(5) and not SaveInterval(0, None, 0).due(5)
    assert [step for step in range(1, 10) if SaveInterval(3, None, 7).due(step)] == [3, 6, 9]


def saves_of(agreed, due, local_due, saved=0):
    """Return the Saves of a run that begins after step 4, and the list of what they save. All they call is mocked."""
    checkpointer, stop, made = mock.Mock(), mock.Mock(agreed=agreed), []
    checkpointer.due.return_value, checkpointer.local_due.return_value = due, local_due
    checkpointer.save = lambda step, consumed, local: made.append((step, consumed, local))
    checkpointer.shared.saved = saved
    return Saves(checkpointer, stop, mock.MagicMock(), ResumePoint(step=4, consumed_samples=16)), made


@pytest.mark.parametrize("agreed, due, local_due", [*itertools.product([0, 15], *[[False, True]] * 2)])
def test_a_step_is_saved_once_and_in_the_shared_directory_if_either_asks_for_it(agreed, due, local_due):
    saves, made = saves_of(agreed, due, local_due)
    saves.after(mock.Mock(step=5, consumed_samples=20))
    shared = agreed or due
    assert made == ([(5, 20, not shared)] if shared or local_due else [])
    assert saves.replicas.require_equal.call_args_list == [mock.call(5)] * len(made)


@pytest.mark.parametrize("agreed, due", [*itertools.product([0, 15], [False, True])])
@pytest.mark.parametrize("step", [4, 5])
@pytest.mark.parametrize("saved", [4, 5, 0])
def test_a_run_ends_with_its_last_step_saved_or_an_error(agreed, due, step, saved):
    """A run without steps saves at its end. The last line after a signal says whether there is a save."""
    saves, made = saves_of(agreed, due, False, saved)
    saves.step, saves.consumed = step, 4 * step
    with pytest.raises(CheckpointError) if (agreed or due) and saved != step else nullcontext():
        saves.close()
    assert made == ([(4, 16, False)] if step == 4 and (agreed or due) else [])
    assert saves.checkpointer.close.call_args_list == [mock.call(agreed)]
    assert saves.stop.report.call_args_list == [mock.call(step, saved == step)] * bool(agreed)


def test_a_run_that_cannot_save_says_so_if_it_is_stopped():
    for agreed in 0, 15:
        saves = Saves(None, mock.Mock(agreed=agreed), mock.MagicMock(), ResumePoint(step=4))
        saves.after(mock.Mock(step=5, consumed_samples=20))
        saves.close()
        assert saves.stop.report.call_args_list == [mock.call(5, False)] * bool(agreed) and not saves.stalls()


@pytest.mark.parametrize(
    "words, line",
    [
        (["checkpoint.every=auto"], "checkpoint.every=auto needs checkpoint.mtbf_hours, the mean time between f"),
        (["checkpoint.mtbf_hours=3"], "checkpoint.mtbf_hours=3.0 has no effect without checkpoint.every=auto or "),
        (["checkpoint.every=often"], "checkpoint.every=often is not an integer, or auto, or null"),
        (["checkpoint.local_dir=d", "checkpoint.dir=null"], "checkpoint.local_dir=d does not go with"),
        (["checkpoint.local_every=5"], "checkpoint.local_every=5 does not go with checkpoint.local_dir=null"),
        (["checkpoint.local_dir=d"], "checkpoint.local_dir=d is checkpoint.dir, which all nodes share"),
    ],
)
def test_mistakes_are_one_line(words, line, capsys):
    with pytest.raises(SystemExit):
        pretrain.main([*TINY, "checkpoint.dir=d", *words])
    assert line in capsys.readouterr().err


def test_another_name_of_checkpoint_dir_is_no_local_dir(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    (tmp_path / "link").symlink_to("shared")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for local_dir in ("link", "~/shared", "~/link", "shared/../shared", str(tmp_path / "shared")):
        with pytest.raises(ValueError, match="all nodes share"):
            rules.check(cli.load([*TINY, "checkpoint.dir=shared", f"checkpoint.local_dir={local_dir}"]), 1)
    rules.check(cli.load([*TINY, "checkpoint.dir=shared", "checkpoint.local_dir=shared/local"]), 1)


def steps_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}, [
        row["step"] for row in rows if row["kind"] == "save"
    ]


def test_losses_do_not_know_of_saves(tmp_path):
    """Bit for bit: no saves, saves by number, and saves as they come."""
    found = {}
    for name, words in {
        "none": [],
        "number": ["checkpoint.every=7"],
        "auto": ["checkpoint.every=auto", "checkpoint.mtbf_hours=0.001"],
    }.items():
        place = [f"checkpoint.dir={tmp_path / name / 'saves'}"] if words else []
        pretrain.main([*TINY, "train.steps=24", f"log.dir={tmp_path / name}", *place, *words])
        found[name] = steps_of(tmp_path / name)
    assert found["none"][0] == found["number"][0] == found["auto"][0] and found["none"][1] == []
    assert found["auto"][1][:2] == [FIRST_STEPS, 2 * FIRST_STEPS] and found["auto"][1][-1] == 24
    assert "checkpoint.every=auto: every " in (tmp_path / "auto" / "rank-0.log").read_text()


def test_a_printed_configuration_loads_again(tmp_path):
    cfg = cli.load(["checkpoint.every=auto", "checkpoint.mtbf_hours=2", "checkpoint.dir=x"])
    (tmp_path / "a.yaml").write_text("checkpoint: {every: auto, local_every: 'auto', mtbf_hours: 2, dir: x}")
    assert cfg.checkpoint.every == "auto" == cli.load([str(tmp_path / "a.yaml")]).checkpoint.local_every


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.04, "0.0 s"),
        (119.9, "119.9 s"),
        (120, "2.0 min"),
        (7199, "120.0 min"),
        (7200, "2.0 h"),
        (172799, "48.0 h"),
        (172800, "2.0 days"),
        (1e6, "11.6 days"),
    ],
)
def test_a_duration_has_two_of_its_unit(seconds, text):
    assert duration(seconds) == text
