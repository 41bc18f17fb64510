"""Phases of a run: warm-up, ramp of the batch size, skipped samples, stable rate, decay; and evaluation alone.

A run through all of them equals a loop in which sizes, samples and rates are written out, also if it goes on in another
layout in the middle of each phase.
"""

from __future__ import annotations

import json
import math
import signal
from dataclasses import asdict, fields
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from unittest import mock

import pytest
import torch

from layouts import config, lowered, mesh_of
from minitron import pretrain
from minitron.checkpoint.load import ResumePoint, agree_on_start, restore
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.schema import Config
from minitron.data.evaluation import Evaluation, evaluation_only
from minitron.data.loader import Loader
from minitron.runtime.log import Log
from minitron.runtime.observer import Observer
from minitron.runtime.startup import Startup
from minitron.testing import assert_close_rel
from minitron.train import build, train
from test_loop import RUN, masters_in, masters_of, records_in

SIZES = [2, 2, 4, 6, 8, 8, 8]  # of [2, 2, 12] up to 8: 2, 4, 6 and 8 from 0, 4, 8 and 12 samples on
TRAINED = list(accumulate(SIZES))
SKIPPED = (5, 9), (19, 22)  # within the third step, and around the start of the fifth
PHASES = [
    *(word for word in RUN if not word.startswith(("train.eval", "model.hidden_dropout", "optimizer"))),
    f"train.steps={len(SIZES)}",
    "train.eval_every=7",
    "train.eval_steps=2",
    "train.micro_batch_size=1",
    "train.global_batch_size=8",
    "optimizer.lr=0.01",
    "optimizer.min_lr=0.001",
    "optimizer.warmup_steps=2",
    "optimizer.lr_schedule=wsd",
    "optimizer.wsd_decay_steps=3",
]
RAMP, SCHEDULE = "train.batch_ramp=[2,2,12]", "train.batch_schedule=[[0,2],[4,4],[8,6],[12,8]]"
SKIP = "data.skip_samples=[[5,9],[19,22]]"


class Kept:
    """The samples that are not skipped."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.kept = [i for i in range(len(dataset)) if not any(first <= i < end for first, end in SKIPPED)]

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, i: int):
        return self.dataset[self.kept[i]]


def rate_of(trained: int) -> float:
    """Two steps of warm-up, two stable ones, three of decay."""
    if trained <= TRAINED[1]:
        return 0.01 * trained / TRAINED[1]
    done = max(0, trained - TRAINED[3]) / (TRAINED[6] - TRAINED[3])
    return 0.01 - (0.01 - 0.001) * math.sqrt(done)


@pytest.fixture(scope="module")
def loop() -> tuple[list[dict], dict]:
    """What each step must log, and the weights at the end, by a plain loop in one process."""
    cfg = cli.load([*PHASES, SKIP])  # so that there are as many samples
    cfg = config(cfg, {"data": {"skip_samples": ()}})
    data = pretrain.build_data(config(cfg, {"train": {"steps": 9}})).train
    trainer, kept, expected = build(cfg, Mesh.offline(1)), Kept(data), []
    for size, trained in zip(SIZES, TRAINED):
        loader = Loader(kept, config(cfg, {"train": {"global_batch_size": size}}), trainer.mesh)
        figures = trainer.step(loader.step(trained - size, 1), rate_of(trained)).read()
        loader.close()
        logged = {name: figures[name] for name in ("loss", "grad_norm")}
        logged |= {"learning_rate": rate_of(trained), "batch_size": size, "consumed_samples": kept.kept[trained]}
        expected.append(logged)
    return expected, {name: master.clone() for name, master in masters_of(trainer).items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of one run's records and, in it, of its saves."""
    folder = tmp_path_factory.mktemp("run")
    saves = [f"checkpoint.dir={folder / 'saves'}", "checkpoint.every=4", "checkpoint.keep=0"]
    pretrain.main([*PHASES, RAMP, SKIP, f"log.dir={folder}", *saves])
    return folder


def assert_logged(step: dict, expected: dict, rel: float) -> None:
    for name, value in expected.items():
        assert step[name] == pytest.approx(value, rel=rel), name


def test_a_run_through_all_phases_is_a_plain_loop(run, loop):
    expected, weights = loop
    steps = records_in(run)["step"]
    assert len(steps) == len(expected)
    for step, wanted in zip(steps, expected):
        assert_logged(step, wanted, 1e-6)
        rate = step["batch_size"] / step["step_seconds"]
        assert step["samples_per_second"] == pytest.approx(rate)
        assert step["tokens_per_second"] == pytest.approx(rate * 32)
    for name, master in masters_in(run / "saves" / "step_00000007").items():
        assert_close_rel(master, weights[name], 1e-6, name)


def leg(cfg: Config, until: int) -> list[dict]:
    """Go on from what is in checkpoint.dir up to a step, and save: what each step logs."""
    torch.set_num_threads(1)
    mesh, logged = mesh_of(cfg), []
    start = agree_on_start(cfg, mesh, pretrain.open_weights)
    data, trainer = pretrain.build_data(cfg, start), build(cfg, mesh)
    restore(start, trainer.state)

    class StopAt(Observer):
        agreed = 0

        def after(self, done):
            self.agreed = signal.SIGTERM if done.step == until else 0

        def should_stop(self):
            return False

        def report(self, *_): ...

    def keep(_, it):
        names = {"learning_rate": "lr", **{n: n for n in ("loss", "grad_norm", "batch_size", "consumed_samples")}}
        logged.append({name: getattr(it, ours) for name, ours in names.items()})

    with Log(cfg, mesh.rank, mesh.world.size) as log, mock.patch.object(Log, "iteration", keep):
        train(trainer, data, log, StopAt(), start, Startup({}, log, 0.0, 1.0))
    return logged


LEGS = [  # the last step of each, in which phase it ends, and its layout
    (1, dict(tp=2)),  # warm-up and ramp
    (3, dict(pp=2)),  # stable and ramp, within the first range
    (4, {}),  # before the second range
    (5, dict(cp=2)),  # decay, behind it
    (7, dict(pp=2)),
]


def test_a_run_goes_on_in_any_phase_and_layout(ranks, tmp_path, loop):
    """The ramp and the schedule in turn, which are the same."""
    expected, weights = loop
    done = 0
    for i, (until, axes) in enumerate(LEGS):
        cfg = cli.load([*PHASES, (RAMP, SCHEDULE)[i % 2], SKIP, f"checkpoint.dir={tmp_path}", "checkpoint.every=null"])
        cfg = config(cfg, {"parallel": axes, "train": {"eval_every": 0}})
        for steps in ranks(2, lowered, leg, cfg, until):
            assert len(steps) == until - done
            for step, wanted in zip(steps, expected[done:until]):
                assert_logged(step, wanted, 1e-5)
        done = until
    for name, master in masters_in(tmp_path / "step_00000007").items():
        assert_close_rel(master, weights[name], 1e-5, name)


def test_a_finished_run_says_until_which_step_it_has_samples():
    cfg, log, samples = cli.load([*PHASES, RAMP, SKIP, "train.steps=2"]), mock.Mock(world=1), 44
    start = ResumePoint(mock.Mock(note=""), True, 2, TRAINED[1], {"train_samples": samples})
    startup, data = mock.Mock(begun=0.0, parts={"load_seconds": 0.0}), mock.Mock(train=range(samples), info={}, note="")
    pretrain.describe_run(log, build(cfg, Mesh.offline(1)), data, start, "cpu", startup)
    kept = Kept(range(samples + 10)).kept
    most = max(step for step, trained in enumerate(TRAINED, 1) if kept[trained - 1] < samples)
    assert f"(to {most} at most" in "".join(call.args[0] for call in log.info.call_args_list)


def test_a_range_that_is_added_at_a_resume_begins_where_the_run_is(tmp_path, loop):
    """As after a spike: the first steps had read on, and the run goes back to before it with the range added."""
    words = [*PHASES, "train.eval_every=0", RAMP, f"checkpoint.dir={tmp_path / 'saves'}", "checkpoint.keep=0"]
    pretrain.main([*words, "checkpoint.every=2"])
    pretrain.main([*words, SKIP, "checkpoint.every=null", "checkpoint.resume_step=2", f"log.dir={tmp_path}"])
    steps = records_in(tmp_path)["step"]
    assert [step["step"] for step in steps] == [3, 4, 5, 6, 7]
    for step, wanted in zip(steps, loop[0][2:]):
        assert_logged(step, wanted, 1e-6)


@pytest.mark.parametrize("steps, world, fits", [(0, 4, False), (2, 4, True), (0, 2, True)])
def test_only_steps_to_come_must_divide_among_the_ranks(steps, world, fits):
    """The first two have 2 samples, the others 4 and more. 6 of them do not divide among 4 ranks, so here is no 6."""
    cfg = cli.load([*PHASES, "train.batch_schedule=[[0,2],[4,4],[8,8]]"])
    if fits:
        rules.check_batch_sizes(cfg, world, TRAINED[steps - 1] if steps else 0)
    else:
        with pytest.raises(ValueError, match="train.batch_schedule: the size=2 is not a multiple"):
            rules.check_batch_sizes(cfg, world)


def test_a_resumed_command_checks_the_sizes_after_its_trained_samples(run, capsys):
    """14 samples are trained of 18 that are consumed: the next step still has 2, and only later ones have 8."""
    words = [SKIP, "train.batch_schedule=[[0,2],[16,8]]", "train.micro_batch_size=4", "checkpoint.every=null"]
    with pytest.raises(SystemExit) as ended:
        pretrain.main([*PHASES, *words, f"checkpoint.dir={run / 'saves'}", "checkpoint.resume_step=4"])
    assert ended.value.code == 1 and "train.batch_schedule: the size=2 " in capsys.readouterr().err


# ---- evaluation alone ------------------------------------------------------------------------------------------------


def evaluated(words: list[str], axes: dict) -> float:
    """The validation loss of the newest checkpoint."""
    torch.set_num_threads(1)
    cfg = evaluation_only(config(cli.load(words), {"parallel": axes}))
    mesh = mesh_of(cfg)
    start = agree_on_start(cfg, mesh, pretrain.open_weights)
    trainer = build(cfg, mesh)
    restore(start, trainer.state)
    log, never = mock.Mock(), mock.Mock(should_stop=lambda: False)
    Evaluation(trainer.evaluate, cfg, mesh, pretrain.build_data(cfg).valid, log, never).run(start.step)
    step, loss, _ = log.evaluation.call_args.args
    assert step == 7
    return loss


@pytest.mark.parametrize(
    "agreed, every, step, runs", [(0, 3, 6, True), (0, 3, 7, False), (15, 3, 6, False), (0, 0, 6, False)]
)
def test_a_run_evaluates_every_so_many_steps_until_it_is_stopped(agreed, every, step, runs):
    """The line of the training comes before that of the evaluation, which is no time of the training."""
    cfg, calls = cli.load([f"train.eval_every={every}"]), mock.Mock()
    evaluation = Evaluation(calls.evaluate, cfg, mock.Mock(), None, calls.log, mock.Mock(agreed=agreed), calls.meter)
    evaluation.run = calls.run
    evaluation.after(mock.Mock(step=step))
    assert calls.mock_calls == [mock.call.meter.close(), mock.call.run(step), mock.call.meter.restart()] * runs


@pytest.mark.parametrize("axes", [{}, dict(tp=2), dict(pp=2), dict(cp=2)], ids=str)
def test_an_evaluation_alone_is_that_of_the_run_in_any_layout(ranks, run, axes):
    words = [*PHASES, RAMP, SKIP, f"checkpoint.dir={run / 'saves'}"]
    (expected,) = records_in(run)["eval"]
    for loss in ranks(2, lowered, evaluated, words, axes):
        assert loss == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize("stops, batches", [([False, False], 2), ([True], 1), ([False, True], 2)], ids=str)
def test_a_signal_ends_an_evaluation_without_a_result(stops, batches):
    cfg, log, evaluated = cli.load(PHASES), mock.Mock(), []
    evaluate = lambda given: evaluated.append(given) or torch.tensor([4.0 * len(evaluated), 3.0], dtype=torch.float64)
    stop, mesh, data = mock.Mock(should_stop=iter(stops).__next__), Mesh.offline(), pretrain.build_data(cfg).valid
    Evaluation(evaluate, cfg, mesh, data, log, stop).run(7)
    assert len(evaluated) == batches
    results = [call.args[:2] for call in log.evaluation.call_args_list]
    assert results == ([] if any(stops) else [(7, (4.0 + 8.0) / (3.0 + 3.0))])


def files_in(folder: Path) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("form", ["megatron", "megatron-core", "nemo"])
def test_the_command_prints_the_loss_and_writes_nothing(run, capsys, form):
    before, (expected,) = files_in(run), records_in(run)["eval"]
    more = [f"log.dir={run}", "log.tensorboard=true", "checkpoint.every=1", f"log.format={form}"]
    pretrain.main([*PHASES, RAMP, f"checkpoint.dir={run / 'saves'}", "--evaluate", *more])
    out = capsys.readouterr().out
    assert f" validation loss at iteration 7 | lm loss value: {expected['loss']:.6E} |" in out
    assert "iteration        " not in out and files_in(run) == before


def test_an_evaluation_of_adapters_is_that_of_their_run(run, tmp_path, capsys):
    base = f"finetune.base={run / 'saves' / 'step_00000007'}"
    words = [*PHASES, "finetune.kind=lora", base, f"checkpoint.dir={tmp_path / 'saves'}"]
    pretrain.main([*words, f"log.dir={tmp_path}"], finetune=True)
    capsys.readouterr()
    pretrain.main([*words, "--evaluate"], finetune=True)
    (expected,) = records_in(tmp_path)["eval"]
    assert f" iteration 7 | lm loss value: {expected['loss']:.6E} |" in capsys.readouterr().out
    assert json.dumps(expected["loss"]) != json.dumps(records_in(run)["eval"][0]["loss"])


def test_an_evaluation_of_a_base_or_of_an_earlier_checkpoint(run, tmp_path, capsys):
    """Of weights alone the iteration is 0; of the run's fourth step the loss is another one."""
    (last,) = records_in(run)["eval"]
    pretrain.main([*PHASES, f"checkpoint.load={run / 'saves'}", "--evaluate"])
    assert f" iteration 0 | lm loss value: {last['loss']:.6E} |" in capsys.readouterr().out
    pretrain.main([*PHASES, f"checkpoint.dir={run / 'saves'}", "checkpoint.resume_step=4", "--evaluate"])
    out = capsys.readouterr().out
    assert " validation loss at iteration 4 |" in out and f"{last['loss']:.6E}" not in out


def test_an_evaluation_may_be_of_other_data_than_the_runs(run, capsys):
    pretrain.main([*PHASES, RAMP, f"checkpoint.dir={run / 'saves'}", "train.seed=5", "--evaluate"])
    out = capsys.readouterr().out
    assert " validation loss at iteration 7 |" in out
    assert f"{records_in(run)['eval'][0]['loss']:.6E}" not in out


def test_an_evaluation_may_be_on_other_data_than_the_run(run, capsys):
    """The seed is that of the samples; a run that goes on must keep it."""
    (own,), words = records_in(run)["eval"], [*PHASES, f"checkpoint.dir={run / 'saves'}", "train.seed=99"]
    pretrain.main([*words, "--evaluate"])
    out = capsys.readouterr().out
    assert " validation loss at iteration 7 | lm loss value: " in out and f"{own['loss']:.6E}" not in out
    with pytest.raises(SystemExit):
        pretrain.main([*words, "train.steps=8", "checkpoint.every=null"])
    assert "was saved with other data" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["null", "nowhere"])
def test_an_evaluation_without_weights_is_refused(tmp_path, capsys, where):
    place = where if where == "null" else tmp_path / where
    with pytest.raises(SystemExit) as ended:
        pretrain.main([*PHASES, f"checkpoint.dir={place}", "--evaluate"])
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.count("\n") == 1 and error.startswith("error: --evaluate")
    assert f"checkpoint.dir={place}" in error and not list(tmp_path.iterdir())


def test_an_evaluation_is_no_dry_run(capsys):
    with pytest.raises(SystemExit):
        pretrain.main(["--evaluate", "--dry-run", "--world", "2"])
    assert "--evaluate does not go with --dry-run" in capsys.readouterr().err


def test_an_evaluation_keeps_of_its_run_what_a_loss_depends_on():
    """Its configuration records, saves and exports nothing, and passes the rules where a run of epochs does."""
    run = cli.load([*PHASES, RAMP, SKIP, *RECORDS])
    run = config(run, {"train": {"epochs": 2.0}, "checkpoint": {"every": 5, "dir": "saves"}})
    only, changes = evaluation_only(run), {}
    for section in map(attrgetter("name"), fields(run)):
        before, after = (asdict(getattr(cfg, section)) for cfg in (run, only))
        changes |= {f"{section}.{key}": after[key] for key in after if after[key] != before[key]}
    assert changes == {
        "train.steps": 1,
        "train.epochs": None,
        "train.eval_every": 1,
        "train.batch_ramp": None,
        "train.rerun": "off",
        "train.cuda_graph": "off",
        "data.skip_samples": (),
        "checkpoint.every": None,
        "checkpoint.local_dir": None,
        "checkpoint.export": "none",
        "log.dir": None,
        "log.tensorboard": False,
        "log.wandb": None,
        "log.prometheus": None,
        "log.numerics_every": 0,
        "profile.kind": "none",
    }
    scheduled = config(run, {"train": {"batch_ramp": None, "batch_schedule": ((0, 2), (4, 8))}})
    assert evaluation_only(scheduled) == only


RECORDS = [
    "train.rerun=on",
    "train.cuda_graph=on",
    "checkpoint.local_dir=near",
    "checkpoint.export=hf",
    "log.dir=logs",
    "log.tensorboard=true",
    "log.wandb=project",
    "log.prometheus=9000",
    "log.numerics_every=2",
    "profile.kind=torch",
]
