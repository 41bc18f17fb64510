"""A step that is replayed trains as a step that is run: nothing that changes from step to step is baked into it."""

from __future__ import annotations

import pytest
import torch

from layouts import GPT3, LLAMA, config, dataset_of, mesh_of
from minitron.data.loader import Loader
from minitron.runtime import graph
from minitron.train import build
from replay import replayed
from test_invariance import axes
from test_lora import ALL, lora

STEPS = {"train": {"steps": 5, "global_batch_size": 4}}
DROPOUT = {"model": {"hidden_dropout": 0.2}}
FP16 = {"precision": {"dtype": "fp16", "loss_scale": 2.0**16, "loss_scale_window": 2, "loss_scale_hysteresis": 1}}


def fp8(how: str) -> dict:
    return {
        "precision": {"dtype": "bf16", "fp8": how, "fp8_backend": "torch"},
        "model": {"hidden_size": 128, "ffn_hidden_size": 128, "num_kv_heads": 8, "max_positions": 128},
        "train": {"seq_len": 128},  # blocks have 128 values
    }


def run(cfg, again: bool, most_nodes: int = graph.MOST_NODES):
    """Each step's figures, and the weights at the end."""
    torch.set_num_threads(1)
    trainer, figures = build(cfg, mesh_of(cfg)), []
    graph.WARM_UP, graph.MOST_NODES = 2, most_nodes
    if again:
        replayed(trainer)
    loader, batch = Loader(dataset_of(cfg), cfg, trainer.mesh), cfg.train.global_batch_size
    for step in range(cfg.train.steps):
        batches = loader.step(step * batch, step)
        if step == 2:  # before the one that is recorded: what an evaluation leaves behind must not matter
            trainer.evaluate(batches)
        stats = trainer.step(batches, cfg.optimizer.lr * (1 + step))
        figures.append(stats.read() | {"loss_scale": float(trainer.loss_scale())})
    loader.close()
    assert not again or trainer.graph.replaying and trainer.graph.settled
    trainer.gradients.wait_parameters()
    weights = {p.spec.name: p.detach().clone() for chunk in trainer.chunks for p in chunk.parameters()}
    return figures, weights, 0 if trainer.graph is None else trainer.graph.graphs


@pytest.mark.parametrize(
    "world, base, change, layout",
    [
        (1, LLAMA, {}, ""),
        (1, GPT3, DROPOUT, ""),
        (1, GPT3, {"model": {"attention_dropout": 0.2}}, ""),
        (1, LLAMA, FP16, ""),
        (1, LLAMA, lora(*ALL, dropout=0.1), ""),
        (1, LLAMA, fp8("delayed"), ""),
        (1, LLAMA, fp8("current"), ""),
        (1, LLAMA, fp8("block"), ""),
        (1, LLAMA, {"train": {"recompute": "selective"}}, ""),
        (1, GPT3, DROPOUT | {"train": {"recompute": "full"}}, ""),
        (2, LLAMA, {}, ""),
        (2, LLAMA, {}, "overlap_grads=off"),
        (2, GPT3, DROPOUT, "tp=2"),
        (2, LLAMA, {}, "tp=2 sequence_parallel=off"),
        (2, LLAMA, fp8("delayed"), "tp=2"),
        (2, LLAMA, {}, "cp=2"),
        (2, LLAMA, {}, "cp=2 cp_style=allgather"),
        (2, LLAMA, {}, "cp=2 cp_style=ulysses"),
        (2, GPT3, DROPOUT, "pp=2"),
        (2, LLAMA, FP16, "pp=2 vp=2"),
        (2, LLAMA, {"model": {"num_layers": 6}, "parallel": {"layers_per_stage": (1, 2, 2, 1)}}, "pp=2 vp=2"),
        (4, LLAMA, {}, "tp=2 pp=2"),
        (4, GPT3, {}, "pp=2 vp=2"),
    ],
)
def test_a_replayed_step_is_a_step(ranks, world, base, change, layout):
    steps = {section: values | change.get(section, {}) for section, values in STEPS.items()}
    same(ranks, world, config(base, {"model": {"num_layers": 4}}, change, axes(layout), steps), graph.MOST_NODES)


@pytest.mark.parametrize(
    "world, batch, layout, most_nodes, graphs",
    [
        (1, 1, "", 1, 1),
        (1, 2, "", 1, 2),
        (1, 3, "", 1, 3),
        (1, 7, "", 1, 3),  # the second one runs for five microbatches
        (2, 7, "tp=2", 1, 3),
        (2, 4, "pp=2 vp=2", 1e9, 1),
        (2, 4, "pp=2 vp=2", 800, 3),  # 4 * 150 * 4 kernels in some 30 actions: 10 of these in a graph
    ],
)
def test_a_step_in_several_graphs_is_a_step(ranks, world, batch, layout, most_nodes, graphs):
    batches = {"train": {"micro_batch_size": 1, "global_batch_size": batch, "steps": 5}}
    cfg = config(GPT3, DROPOUT, {"model": {"num_layers": 4}}, axes(layout), batches)
    assert same(ranks, world, cfg, most_nodes) == [graphs] * world


def same(ranks, world, cfg, most_nodes) -> list[int]:
    """Assert that eager and replayed steps are the same; return how many graphs each rank has recorded."""
    rerun = ranks(world, run, cfg, True, most_nodes)
    for eager, again in zip(ranks(world, run, cfg, False), rerun, strict=True):
        assert again[0] == eager[0]
        assert eager[1].keys() == again[1].keys()
        assert all(torch.equal(again[1][name], weight) for name, weight in eager[1].items())
        losses = [figures["loss"] for figures in eager[0]]
        assert len(set(losses)) == len(losses), "every step has a batch of its own"
    return [graphs for *_, graphs in rerun]
