"""LoRA on a GPU: in FP8 it follows bf16, casts frozen weights once, and keeps less than training all weights does."""

import gc
from importlib.util import find_spec

import pytest
import torch

from layouts import LLAMA, adapters_that_do_something, config, dataset_of, first_gradients
from minitron.comm.mesh import Mesh
from minitron.config import rules
from minitron.data.loader import Loader
from minitron.testing import assert_close_rel
from minitron.train import build

INSTALLED = torch.cuda.is_available() and find_spec("transformer_engine") is not None
if INSTALLED:  # now, before another test file has torch load its cuDNN: see minitron.kernels.kernels.choose_fp8
    import transformer_engine.pytorch  # noqa: F401

    from minitron.kernels import fp8_te

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
te = pytest.mark.skipif(not INSTALLED, reason="needs Transformer Engine")
MODEL = dict(
    num_layers=4,
    hidden_size=512,
    ffn_hidden_size=1024,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=250,
    vocab_multiple=16,
    max_positions=256,
    init_std=0.05,
)
TRAIN = dict(seq_len=256, micro_batch_size=4, global_batch_size=8, steps=8)
TARGETS = [("qkv",), ("q", "v"), ("qkv", "o", "gate", "up", "down")]


def run(targets, steps=6, *, lr=1e-2, recompute="none", dropout=0.0, **precision):
    """(losses, first gradients, peak bytes above what the trainer itself takes) of LoRA, or of all weights."""
    lora = dict(finetune=dict(kind="lora"), lora=dict(targets=targets, dropout=dropout)) if targets else {}
    cfg = config(
        LLAMA,
        lora,
        dict(model=MODEL, train=TRAIN | dict(recompute=recompute), precision=dict(dtype="bf16") | precision),
    )
    rules.check(cfg, 1, torch.cuda.get_device_capability())
    with adapters_that_do_something():
        trainer = build(cfg, Mesh.offline(device=torch.device("cuda")))
    gradients, loader = first_gradients(trainer), Loader(dataset_of(cfg), cfg, trainer.mesh)
    losses = []
    for step in range(steps):
        losses.append(trainer.step(loader.step(step * 8, step), lr).read()["loss"])
        if step == 1:  # after compilers and workspaces
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
    loader.close()
    return torch.tensor(losses), gradients, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("targets", TARGETS, ids="-".join)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bf16_has_the_gradients_of_float32(targets, dropout):
    _, exact, _ = run(targets, 2, dtype="fp32", dropout=dropout)
    for recompute in "none", "selective", "full":
        _, ours, _ = run(targets, 2, recompute=recompute, dropout=dropout)
        for name, (gradient, _) in ours.items():  # a few roundings of 2^-8 on the way through four blocks
            assert_close_rel(gradient, exact[name][0], 6e-2, f"{name} {recompute}")


@te
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("targets", TARGETS, ids="-".join)
def test_fp8_follows_bf16(recipe, targets, monkeypatch):
    casts, scaling = [], fp8_te.TeBlockFp8 if recipe == "block" else fp8_te.TeFp8
    original = scaling.cast
    monkeypatch.setattr(
        scaling, "cast", lambda self, x, role, *rest: (casts.append(role), original(self, x, role, *rest))[1]
    )
    # A rate at which bf16 itself stays within 1e-4 of float32. Each product rounds by 4 %, over 2048 tokens.
    reference, ours = run(targets, lr=1e-3)[0], run(targets, lr=1e-3, fp8=recipe)[0]
    assert casts.count("weight") == 4 * 4
    assert ((ours - reference).abs() < 0.01 * reference).all()
    if recipe != "block":
        others = run(targets, lr=1e-3, fp8=recipe, fp8_backend="torch")[0]
        assert ((others - reference).abs() < 0.01 * reference).all()


def test_it_keeps_less_than_training_everything():
    """Adapters on q, k, v keep the norms' outputs and no other input of a product: less than all layers keep, and no
    copy of an activation in float32."""
    everything, adapters = run(None, 4)[2], run(("qkv",), 4)[2]
    assert adapters < everything
