"""Runs that lose all their ranks, or one, at any moment, and go on as if nothing had happened."""

import os

import pytest
import torch

from fault_run import Run
from kill_run import MODEL, campaign, losses, run
from minitron.checkpoint.reader import Reader


@pytest.mark.slow
def test_a_killed_run_goes_on_in_another_layout(tmp_path):
    figures = campaign(tmp_path, kills=3, seed=2, steps=10)
    assert sum(figures["landed"].values()) == sum(figures["killed"].values()) == 3


@pytest.mark.slow
def test_a_run_survives_many_kills(tmp_path):
    """A quarter: three of six kills wait for a save, and some of those come too late."""
    kills, seed = int(os.environ.get("MINITRON_KILLS", 100)), int(os.environ.get("MINITRON_KILL_SEED", 1))
    assert campaign(tmp_path, kills, seed, steps=2 * kills)["inside_saves"] > kills / 4


@pytest.mark.parametrize(
    "world, layout",
    [
        pytest.param(2, ["parallel.tp=2", "model.attention_dropout=0.1"], id="tensor"),
        pytest.param(4, ["parallel.tp=2", "parallel.pp=2"], id="pipeline", marks=pytest.mark.slow),
        pytest.param(2, ["parallel.cp=2", "train.recompute=full"], id="context", marks=pytest.mark.slow),
    ],
)
def test_deterministic_runs_are_bit_equal_however_often_they_end(tmp_path, world, layout):
    """Two runs, and one that ends and goes on at every save."""
    argv = [*layout, "train.deterministic=true", "checkpoint.every=2", "optimizer.decay_steps=4"]
    for name, ends in ("once", [4]), ("again", [4]), ("in parts", [2, 4]):
        for steps in ends:
            run(tmp_path / name, world, *argv, f"checkpoint.dir={tmp_path / name / 'saves'}", f"train.steps={steps}")
    once = Reader(tmp_path / "once" / "saves")
    for name in "again", "in parts":
        assert losses(tmp_path / name) == losses(tmp_path / "once")
        other = Reader(tmp_path / name / "saves")
        assert (other.iteration, other.state, other.names()) == (4, once.state, once.names())
        for tensor in once.names():
            box = [0] * len(once.shape(tensor)), once.shape(tensor)
            for kind in once.kinds(tensor):
                assert torch.equal(other.read(tensor, kind, *box), once.read(tensor, kind, *box)), (name, tensor, kind)


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_lost_a_rank(tmp_path):
    """Twice, as often as --max-restarts allows; in the same layout the losses have the same bits."""
    argv = ["parallel.pp=2", "train.steps=60"]
    run(tmp_path / "whole", 2, *argv)
    with Run(
        tmp_path,
        "none",
        *MODEL,
        *argv,
        f"checkpoint.dir={tmp_path / 'saves'}",
        "checkpoint.every=5",
        ranks=2,
        restarts=2,
    ) as torchrun:
        for rank, step in (1, 7), (0, 30):
            torchrun.wait_for("checkpoint of step 5 saved")  # beside the steps: a busy machine may take longer than two
            torchrun.wait_for(f'"step": {step}', torchrun.folder / "metrics.jsonl")
            os.kill(torchrun.workers()[rank], 9)
        status, _, output = torchrun.end()
    assert status == 0 and output.count("resumed from") == 2, output
    found = losses(torchrun.folder)
    assert dict(found) == dict(losses(tmp_path / "whole")) and set(found) == set(dict(found).items())
    assert len(found) > 60  # some steps were made twice
