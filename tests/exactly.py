"""Train any configuration in any layout so exactly that it can be held against one process to 1e-5.

Formats that round hide what layouts do wrong, and scales of FP8 follow the magnitudes of shards, so that every layout
rounds to other numbers. Here nothing is rounded that need not be:

  - The model is in float32, also beside FP8 and gradients in bf16, for which the rules demand bf16.
  - A cast to FP8 is scaled but keeps float32's bits. What remains of FP8 is which tensor is cast when, with which
    scale, and who gathers it.
  - Weights that are kept in FP8 are rounded. Their magnitudes are raised to powers of two, so that all shards of a
    weight are rounded alike. After an update some weights fall to another side: from then on figures agree to 1e-3.

The twin is one process that recomputes, records and splits nothing, and keeps its gradients in float32. Some models
amplify float32's own rounding. So the twin is trained again from weights that are moved by one rounding step, or with
gradients in bf16 if the layout has these, and a layout may be ten times as far off as that.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from attention_twin import PACKS, PLAIN_PACKS
from layouts import adapters_that_do_something, dataset_of, first_gradients, mesh_of, part_of
from minitron.config import rules
from minitron.config.schema import Config, ParallelConfig
from minitron.data.loader import Loader
from minitron.kernels import attention, fp8_scales, plain
from minitron.pipeline import replay as graph
from minitron.testing import assert_close_rel, without_group
from minitron.train import Trainer, build
from replay import replayed

TOLERANCE = 1e-5  # summation order moves float32 by about 1e-7
ROUNDING_STEP, CHANCE = 2.0**-23, 10
ROUNDED = 1e-3  # figures after an update that bf16 or FP8 has rounded
WIDE = SimpleNamespace(max=448.0)
GRAD_DTYPES = ("grad_dtype", "accumulate_dtype", "reduce_dtype")
SUM = 2.0**-8  # of a gradient in bf16: 2^-9 of a sum that may be somewhat larger than the last one


def replaced(cfg: Config, **sections: dict[str, object]) -> Config:
    new = {name: dataclasses.replace(getattr(cfg, name), **keys) for name, keys in sections.items()}
    return dataclasses.replace(cfg, **new)


def alone(cfg: Config, rounded: bool = False) -> Config:
    """The same model, data and casts on one process, computed in the plainest way. rounded: gradients as they are."""
    how = {"recompute": "none", "cuda_graph": "off", "deterministic": False}
    whole = dataclasses.replace(cfg, parallel=ParallelConfig())
    optimizer = {} if rounded else dict.fromkeys(GRAD_DTYPES, "fp32")
    return replaced(whole, train=how, model={"head_piece": None}, optimizer=optimizer)


def refused(cfg: Config, world: int) -> str | None:
    """Why a model in bf16 cannot train like this; None if it can."""
    cfg = replaced(cfg, precision={"dtype": "bf16"})
    try:
        rules.check(cfg, world)
    except ValueError as error:
        return str(error)
    return graph.why_eager(cfg, torch.device("cuda"), masks_documents=True) if cfg.train.cuda_graph == "on" else None


def assert_equals_one_process(ranks, world: int, cfg: Config) -> None:
    """Losses, gradient norms, each parameter's first gradient and what three steps make of the weights are the same."""
    cfg = replaced(cfg, precision={"dtype": "fp32"})
    twin = figures, gradients, updates = train(alone(cfg))
    rounds = "bf16" in (cfg.optimizer.accumulates_in, cfg.optimizer.reduces_in)
    other = train(alone(cfg, rounded=rounds), moved=not rounds)
    noise = {what: CHANCE * far for what, far in distances(other, twin).items()}
    sums = cfg.train.global_batch_size // cfg.train.micro_batch_size + 2  # and those of nodes
    least = min(sums * SUM, 0.5) if rounds else TOLERANCE
    first = max(least, noise["gradient"])
    later = ROUNDED if rounds or cfg.precision.fp8_params else TOLERANCE
    results = ranks(world, train, cfg, timeout=600)
    assert {name for _, parts, _ in results for name in parts} == gradients.keys()
    for rank, (mine, parts, updated) in enumerate(results):
        for name, (grad, how) in parts.items():
            whole = part_of(gradients[name][0], how)
            assert_close_rel(grad.float(), whole, first, f"gradient of {name} on rank {rank}")
        for step, (one, expected) in enumerate(zip(mine, figures, strict=True)):
            for key in expected:
                tolerance = max(later if step or rounds else TOLERANCE, noise.get(key, 0))
                if rounds and key == "grad_norm":  # no further off than the gradients are
                    tolerance = max(tolerance, first)
                assert one[key] == pytest.approx(expected[key], rel=tolerance), f"{key} of step {step} on rank {rank}"
        for name, (update, how) in updated.items() if later == TOLERANCE else ():
            whole = part_of(updates[name][0], how)
            assert_close_rel(update, whole, max(ROUNDED, noise["update"]), f"update of {name} on rank {rank}")


def distances(mine: tuple, twin: tuple) -> dict[str, float]:
    """How far two trainings on one process are from each other at most, by what is compared."""
    far = {}
    for what, i in ("gradient", 1), ("update", 2):
        pairs = [(mine[i][name][0], whole) for name, (whole, _) in twin[i].items()]
        far[what] = max((float((a - b).norm() / b.norm()) for a, b in pairs if b.any()), default=0.0)
    for key in "loss", "grad_norm":
        figures = [(a[key], b[key]) for a, b in zip(mine[0], twin[0]) if key in b]
        far[key] = max(abs(a / b - 1) for a, b in figures)
    return far | {"grad_norm": max(far["grad_norm"], far["gradient"])}


def train(cfg: Config, moved: bool = False) -> tuple[list[dict], dict, dict]:
    """Figures of the steps and of an evaluation, the first gradients as in layouts.py, and what steps add to weights.

    With train.cuda_graph=on the second step is recorded; the later ones and the evaluation are replayed.
    moved: begin with weights that are other ones by float32's rounding step.
    """
    torch.set_num_threads(1)
    replays = cfg.train.cuda_graph == "on"
    with without_rounding(cfg.precision.fp8_params) as patches:
        patches.enter_context(adapters_that_do_something())
        if replays:
            patches.enter_context(mock.patch.object(graph, "WARM_UP", 1))
            patches.enter_context(mock.patch.multiple(attention, FLASH_CPU=PACKS, REFERENCE=PLAIN_PACKS))
        patches.callback(torch.set_deterministic_debug_mode, "default")
        torch.set_deterministic_debug_mode("error" if cfg.train.deterministic else "default")  # as minitron.pretrain
        trainer, figures, batch = build(cfg, mesh_of(cfg)), [], cfg.train.global_batch_size
        if moved:
            move(trainer)
        before, gradients = weights(trainer), first_gradients(trainer)
        if replays:
            trainer = replayed(trainer)
        loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
        for step in range(cfg.train.steps):
            figures.append(trainer.step(loader.step(step * batch, step), cfg.optimizer.lr).read())
        loss, count = trainer.evaluate(loader.step(cfg.train.steps * batch, 0)).tolist()
        loader.close()
        assert not replays or trainer.runner.training and trainer.runner.evaluation
        updates = {name: (new - before[name][0], how) for name, (new, how) in weights(trainer).items()}
    return [*figures, {"loss": loss / count}], gradients, updates


def move(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in trainer.chunks[0].parameters():
            if p.itemsize > 1:
                p.mul_(1 + ROUNDING_STEP * torch.randint(-1, 2, p.shape, generator=generator))


def weights(trainer: Trainer) -> dict:
    """{name: (this rank's part of a trained weight, how)}; those that are kept in FP8 are left out."""
    trainer.gradients.wait_parameters()
    trained = [p for chunk in trainer.chunks for p in chunk.parameters() if p.requires_grad and p.itemsize > 1]
    return {p.spec.name: (p.detach().clone(), without_group(p.spec.shard)) for p in trained}


def without_rounding(weights_in_fp8: bool) -> ExitStack:
    """Let casts to FP8 keep their bits inside, but for those of weights if these are kept as FP8 bytes.

    float64, which nothing else has, stands for a format that ends at 448.
    """
    wide = {role: torch.float64 for role in fp8_scales.FP8_DTYPES if not (weights_in_fp8 and role == "weight")}
    transpose, finfo = plain.transpose, torch.finfo
    patches = [
        mock.patch.dict(fp8_scales.FP8_DTYPES, wide),
        mock.patch.object(torch, "finfo", lambda kind: WIDE if kind is torch.float64 else finfo(kind)),
        mock.patch.object(plain, "transpose", lambda x: transpose(x) if x.itemsize == 1 else x.t().contiguous()),
        mock.patch.object(plain, "largest", to_power_of_two)
        if weights_in_fp8
        else mock.patch.object(torch, "float8_e4m3fn", torch.float64),  # of blocks
    ]
    stack = ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax().float().view(1).log2().ceil().exp2()
