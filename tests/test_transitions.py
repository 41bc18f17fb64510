"""What happens between steps, or instead of one, leaves no trace: the steps behind it are those of a run without it."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from layouts import GPT3, LLAMA, config, dataset_of, lowered, mesh_of
from minitron.checkpoint import destination
from minitron.checkpoint.format import CheckpointError
from minitron.config.schema import Config
from minitron.data.loader import Loader
from minitron.pipeline.executor import Pass
from minitron.train import Trainer, build
from test_checkpoint import FP8, LONG, assert_same, contents, leg, saving
from test_invariance import axes
from test_lora import ALL, lora
from test_replay import APART, DROPOUT, FP16, fp8

SMALL = {"model": {"num_layers": 2}, "train": {"steps": 4, "global_batch_size": 4}}
BOTH = {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.2}}


def small(base: dict, change: dict, layout: str = "") -> Config:
    sections = {name: values | SMALL.get(name, {}) for name, values in change.items()}
    return config(base, SMALL, sections, axes(layout))


# ---- between steps --------------------------------------------------------------------------------------------------


def evaluated(trainer: Trainer, loader: Loader, batches: list, step: int) -> None:
    """Evaluate twice, before the first step and behind each other one: the second result is the first."""
    others = loader.step(0, 0)
    first, second = (trainer.evaluate(others).tolist() for _ in range(2))
    assert first == second


def given_up(trainer: Trainer, loader: Loader, batches: list, step: int) -> None:
    """Run a part of the step, another one each time, and give it up as a recording that fails is given up.

    The whole of it only on one rank: others would have begun to sum its gradients.
    """
    actions, left_out = trainer.executor.actions(len(batches), True), step % 3 + (trainer.mesh.world.size > 1)
    run = Pass(trainer.executor, batches, trainer.scaler.loss_grad(len(batches)))
    run.run_actions(actions[: len(actions) - left_out])
    trainer.runner.reset()


def steps(cfg: Config, between=None) -> tuple[list[dict], dict]:
    """Each step's figures, and the weights at the end."""
    torch.set_num_threads(1)
    trainer, figures = build(cfg, mesh_of(cfg)), []
    loader, other = (Loader(dataset_of(cfg), cfg, trainer.mesh) for _ in range(2))
    for step in range(cfg.train.steps):
        batches = loader.step(step * cfg.train.global_batch_size, step)
        if between is not None:
            between(trainer, other, batches, step)
        figures.append(trainer.step(batches, cfg.optimizer.lr).read() | {"scale": float(trainer.scaler.scale)})
    loader.close(), other.close()
    return figures, weights(trainer)


def weights(trainer: Trainer) -> dict:
    trainer.gradients.wait_parameters()
    params = [p for chunk in trainer.chunks for p in chunk.parameters()]
    return {p.spec.name: (p if p.itemsize > 1 else p.view(torch.uint8)).detach().clone() for p in params}


def assert_same_run(mine: tuple, other: tuple) -> None:
    assert repr(mine[0]) == repr(other[0])  # as text: a NaN norm equals itself
    assert mine[1].keys() == other[1].keys()
    assert [name for name, weight in mine[1].items() if not torch.equal(weight, other[1][name])] == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world, base, change, layout",
    [
        (1, GPT3, BOTH | APART, ""),
        (1, LLAMA, fp8("delayed", fp8_params=True, fp8_head=True), ""),
        (1, LLAMA, FP16, ""),
        (1, LLAMA, lora(*ALL, dropout=0.1), ""),
        (2, LLAMA, fp8("current"), "tp=2"),
        (2, LLAMA, fp8("delayed"), ""),
        (2, GPT3, DROPOUT, "pp=2 schedule=zb-h1"),
    ],
)
def test_nothing_between_steps_changes_them(ranks, world, base, change, layout):
    cfg = small(base, change, layout)
    plain = ranks(world, lowered, steps, cfg)
    for between in (evaluated,) if "pp" in layout else (evaluated, given_up):  # a message would wait for its receiver
        for mine, other in zip(ranks(world, lowered, steps, cfg, between), plain, strict=True):
            assert_same_run(mine, other)


# ---- instead of a step ----------------------------------------------------------------------------------------------


def behind(cfg: Config, skipped: int, poison: float | None) -> tuple[list[dict], dict]:
    """The figures of all steps but the first `skipped`, and the weights at the end.

    poison: run those too, with it in a gradient of the last rank; None: leave them out.
    """
    torch.set_num_threads(1)
    trainer, figures = build(cfg, mesh_of(cfg)), []
    loader, finish = Loader(dataset_of(cfg), cfg, trainer.mesh), trainer.runner.finish

    def finish_wrongly():
        finish()
        if trainer.mesh.rank + 1 == trainer.mesh.world.size:
            trainer.gradients.buckets[0].grad_slice[0] = poison

    for step in range(0 if poison is not None else skipped, cfg.train.steps):
        trainer.runner.finish = finish_wrongly if step < skipped else finish
        stats = trainer.step(loader.step(step * cfg.train.global_batch_size, step), cfg.optimizer.lr).read()
        assert stats["skipped"] == (step < skipped)
        figures.append(stats | {"scale": float(trainer.scaler.scale)})
    loader.close()
    return figures[-(cfg.train.steps - skipped) :], weights(trainer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world, base, change, layout, poison, skipped",
    [
        (1, GPT3, BOTH, "", math.nan, 2),
        (1, LLAMA, {"precision": {"dtype": "bf16"}} | lora(*ALL, dropout=0.1), "", math.inf, 1),
        (2, LLAMA, {}, "tp=2", math.inf, 2),
        (2, GPT3, {}, "pp=2", math.nan, 1),
    ],
)
def test_after_first_steps_that_are_skipped_a_run_is_one_without_them(
    ranks, world, base, change, layout, poison, skipped
):
    cfg = small(base, change, layout)
    with_them, without = (ranks(world, lowered, behind, cfg, skipped, value) for value in (poison, None))
    for mine, other in zip(with_them, without, strict=True):
        assert_same_run(mine, other)


@pytest.mark.parametrize("world, base, change, layout", [(1, GPT3, BOTH, "")])
def test_after_overflows_of_the_first_steps_a_run_is_one_that_began_with_the_lower_scale(
    ranks, world, base, change, layout
):
    precision = {"dtype": "fp16", "loss_scale": 2.0**30, "loss_scale_hysteresis": 1, "loss_scale_window": 2}
    many = {"train": {"steps": 12}}
    cfg = config(small(base, change, layout), many, {"precision": precision})
    (figures, _), *_ = results = ranks(world, lowered, steps, cfg)
    first = [step["skipped"] for step in figures].index(0)
    assert first > 1
    lower = config(cfg, {"precision": {"loss_scale": figures[first - 1]["scale"]}})
    for mine, other in zip(results, ranks(world, lowered, behind, lower, first, None), strict=True):
        assert_same_run((mine[0][first:], mine[1]), other)


# ---- instead of a save ----------------------------------------------------------------------------------------------


def fails(*_, **__):
    raise CheckpointError("no space left on device")


def leg_without_a_save(cfg: Config, until: int) -> list[dict]:
    """A leg whose save is given up in the middle, on its last rank."""
    last = dist.get_rank() + 1 == dist.get_world_size()
    with mock.patch.object(destination, "write_shard", fails if last else destination.write_shard):
        return leg(cfg, until)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world, parallel, change, second",
    [(2, dict(tp=2), FP8, leg_without_a_save), (1, {}, FP16, leg_without_a_save), (2, {}, BOTH, leg)],
    ids=["fp8", "fp16", "dropout"],
)
def test_a_third_start_goes_on_from_the_second_or_if_that_saved_nothing_from_the_first(
    ranks, tmp_path, world, parallel, change, second
):
    cfg = config(LLAMA, LONG, change, {"parallel": parallel})
    expected = ranks(world, lowered, leg, saving(cfg, tmp_path / "at once"), 6)
    parts = saving(cfg, tmp_path / "in parts")
    for job, until, begin in (leg, 2, 0), (second, 4, 2), (leg, 6, 4 if second is leg else 2):
        for figures, others in zip(ranks(world, lowered, job, parts, until), expected, strict=True):
            assert repr(figures) == repr(others[begin:until])
    assert_same(contents(tmp_path / "in parts"), contents(tmp_path / "at once"))
