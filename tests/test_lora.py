"""Adapters beside frozen weights: against plain matrices, in every layout, through checkpoints, and to PEFT and back.

Layouts agree with one process to 1e-5 of each gradient's norm: summation order alone moves float32 by about 1e-7.
"""

from __future__ import annotations

import pytest
import torch
from layouts import GPT3, LLAMA, config, dataset_of, mesh_of, train_steps
from test_invariance import assert_equals_one_process, axes

from minitron.data.loader import Loader
from minitron.fp8 import Fp8Gemm
from minitron.model.lora import Adapter
from minitron.testing import assert_close_rel
from minitron.train import Trainer, build


def lora(*targets: str, **keys) -> dict:
    return {"finetune": {"kind": "lora"}, "lora": {"rank": 4, "alpha": 4.0, "targets": targets or ("qkv",), **keys}}


ALL = ("q", "k", "v", "o", "gate", "up", "down")


# ---- layouts ------------------------------------------------------------------------------------------------------


def train_adapters(cfg):
    """train_steps from adapters that do something: a B of zeros would leave A without a gradient."""
    original = Adapter.__init__

    def started(self, *args):
        original(self, *args)
        for factor in self.b.values():
            factor.std = 0.1

    Adapter.__init__ = started
    try:
        return train_steps(cfg)
    finally:
        Adapter.__init__ = original


def assert_layout(ranks, world, base, change, layout, **more):
    original = assert_equals_one_process.__globals__["train_steps"]
    assert_equals_one_process.__globals__["train_steps"] = train_adapters  # of the twin
    try:
        assert_equals_one_process(ranks, world, base, change, axes(layout), more, run=train_adapters)
    finally:
        assert_equals_one_process.__globals__["train_steps"] = original


@pytest.mark.parametrize("world, layout", [
    (2, "tp=2"), (4, "tp=4 sequence_parallel=off"), (2, "pp=2"), (2, "pp=2 vp=2"), (2, "cp=2"), (2, ""),
    (4, "cp=2 cp_style=ulysses tp=2"), (4, "tp=2 overlap_tp=off overlap_grads=off"), (8, "tp=2 pp=2 vp=2 cp=2")])
@pytest.mark.parametrize("targets", [("qkv",), ALL], ids="-".join)
def test_every_layout_equals_one_process(ranks, targets, world, layout):
    assert_layout(ranks, world, LLAMA, lora(*targets), layout)


@pytest.mark.parametrize("world, layout", [(2, "tp=2"), (2, "tp=2 sequence_parallel=off"), (8, "tp=2 pp=2 cp=2")])
@pytest.mark.parametrize("base, targets", [(LLAMA, ("qkv", "o", "up", "down")), (GPT3, ("q", "v", "o", "up", "down"))],
                         ids=["llama", "tied gpt"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_dropout_and_recomputation(ranks, base, targets, world, layout, recompute):
    change = {**lora(*targets, dropout=0.2), "model": {"hidden_dropout": 0.1}}
    assert_layout(ranks, world, base, change, layout, train={"recompute": recompute})
