"""A split backward gives the same bits as a whole one, in every format, and leaves in memory what it promises."""

from __future__ import annotations

import pytest
import torch

from layouts import (
    GPT3,
    LLAMA,
    adapters_that_do_something,
    config,
    dataset_of,
    first_gradients,
    mesh_of,
    split_backwards,
    train_steps,
)
from minitron.config import rules
from minitron.data.loader import Loader
from minitron.pipeline.weight_queue import WeightQueue, run_queue
from minitron.testing import assert_close_rel
from minitron.train import build
from test_invariance import axes

SIZES = dict(hidden_size=128, ffn_hidden_size=128, num_heads=4, num_kv_heads=2, num_layers=4, init_std=0.05)
SMALL = {"model": SIZES, "train": dict(seq_len=32, micro_batch_size=4, global_batch_size=16, steps=2)}
LORA = {"finetune": {"kind": "lora"}, "lora": {"rank": 4, "targets": ("qkv", "o", "gate", "down"), "dropout": 0.2}}

WIDE = {
    "model": dict(hidden_size=256, ffn_hidden_size=256, num_heads=8, num_kv_heads=4, max_positions=64),
    "train": {"seq_len": 64},
}


def fp8(recipe: str) -> dict:
    return {"precision": {"dtype": "bf16", "fp8": recipe, "fp8_backend": "torch"}}


def train(cfg) -> tuple[list, dict, int]:
    """Figures of some steps, the first one's gradients, and how many products were put off in all."""
    count, put = [], WeightQueue.put

    def counted(self, *product):
        count.append(product)
        put(self, *product)

    with adapters_that_do_something(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightQueue, "put", counted)
        figures, gradients = train_steps(cfg)
    return figures, {name: grad for name, (grad, _) in gradients.items()}, len(count)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world, base, layout, change",
    [
        (2, LLAMA, "pp=2", {"precision": {"dtype": "fp16"}}),
        (2, LLAMA, "pp=2", fp8("block") | {"train": {"recompute": "selective"}}),
        (4, LLAMA, "tp=2 pp=2", fp8("delayed")),
        (4, LLAMA, "tp=2 pp=2", fp8("block") | WIDE),
        (4, GPT3, "tp=2 pp=2", fp8("current") | {"train": {"recompute": "selective"}}),
        (4, GPT3, "pp=4", {"precision": {"dtype": "bf16"}, "optimizer": {"grad_dtype": "bf16"}}),
        (4, GPT3, "tp=2 pp=2 sequence_parallel=off", fp8("delayed") | {"train": {"recompute": "full"}}),
        (4, LLAMA, "tp=2 pp=2", LORA | {"train": {"recompute": "selective"}}),
        (4, LLAMA, "tp=2 pp=2 sequence_parallel=off", LORA | fp8("delayed")),
        (4, LLAMA, "pp=2", {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.2}}),
    ],
)
def test_the_same_bits_as_1f1b(ranks, world, base, layout, change):
    """Weight gradients are the same products, added in the same order."""
    whole, split = (config(base, SMALL, change, axes(f"{layout} schedule={kind}")) for kind in ("1f1b", "zb-h1"))
    rules.check(split, world)
    pp = split.parallel.pp
    for rank, (expected, actual) in enumerate(zip(ranks(world, train, whole), ranks(world, train, split))):
        assert actual[0] == expected[0]
        assert actual[1].keys() == expected[1].keys()
        for name, grad in expected[1].items():
            assert torch.equal(actual[1][name], grad), name
        assert expected[2] == 0 and (actual[2] > 0) == (rank >= world // pp), "rank 0 has nothing to put off"
        if "lora" not in change and rank >= world - world // pp:
            layers, microbatches = SIZES["num_layers"] // pp, 16 // 4 // split.dp(world)
            assert actual[2] == split.train.steps * microbatches * (4 * layers + 1), "all products and the head's"


def train_one_stage(cfg, split: bool) -> tuple[list, dict]:
    """Figures of two steps and the first one's gradients, of one stage, with the last stage's operations or not."""
    torch.set_num_threads(1)
    with adapters_that_do_something():
        trainer, figures = build(cfg, mesh_of(cfg), schedule=split_backwards if split else None), []
    gradients, loader = first_gradients(trainer), Loader(dataset_of(cfg), cfg, trainer.mesh)
    for step in range(2):
        figures.append(trainer.step(loader.step(step * cfg.train.global_batch_size, step), 1e-3).read())
    loader.close()
    return figures, gradients


@pytest.mark.parametrize("world, layout", [(1, ""), (2, "tp=2"), (2, "")])
def test_one_stage_that_splits_its_backwards(ranks, world, layout):
    """As tests/gpu/run_layouts.py has it, to meet copies between GPUs on two of them; also with tied embeddings."""
    cfg = config(GPT3, SMALL, axes(layout))
    for whole, split in zip(ranks(world, train_one_stage, cfg, False), ranks(world, train_one_stage, cfg, True)):
        assert [pytest.approx(figures, rel=1e-5) for figures in whole[0]] == split[0]
        assert whole[1].keys() == split[1].keys()
        for name, (grad, _) in whole[1].items():
            assert_close_rel(
                split[1][name][0], grad, 1e-5, name
            )  # a tied weight has its two gradients in another order


class Trace:
    """A matrix that arrives, and a product, both of which say so."""

    def __init__(self, name: str, said: list[str]):
        self.name, self.said = name, said

    def begin(self) -> Trace:
        self.said.append(f"begin {self.name}")
        return self

    def wait(self) -> str:
        self.said.append(f"wait {self.name}")
        return self.name

    def add(self, matrix: str) -> None:
        self.said.append(f"add {matrix}")


def test_one_gather_is_under_way_beside_the_product_before():
    """More would be refused by SymmetricMemoryComm, which has one place for those under way."""
    queue, said = WeightQueue(), []
    with queue.collect() as products:
        assert queue.deferring
        for name in "ab":
            trace = Trace(name, said)
            queue.put(trace.begin, trace.add)
    assert not queue.deferring and said == []
    run_queue(products)
    assert said == ["begin a", "wait a", "begin b", "add a", "wait b", "add b"] and not products
    run_queue(products)  # a stage whose weights are all frozen


def test_a_backward_that_fails_leaves_nothing_on():
    queue = WeightQueue()
    with pytest.raises(RuntimeError, match="broken"), queue.collect():
        raise RuntimeError("broken")
    assert not queue.deferring
