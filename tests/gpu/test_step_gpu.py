"""A training step never waits for the device: one whole step under CUDA's sync detector, everything switched on."""

import math

import pytest
import torch

from layouts import GPT3, LLAMA, config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("separate", [False, True])
def test_a_step_does_not_wait_for_the_device(base, dtype, separate):
    from minitron.comm.mesh import Mesh
    from minitron.data.loader import Loader
    from minitron.data.mock import MockDataset
    from minitron.train import build

    model = dict(hidden_size=512, hidden_dropout=0.1, max_positions=64, init_std=0.02)
    cfg = config(
        base,
        {
            "model": model,
            "train": {"seq_len": 64},
            "precision": {"dtype": dtype},
            "data": {"separate_documents": separate},
        },
    )
    mesh = Mesh.offline(device="cuda")
    trainer, loader = build(cfg, mesh), Loader(MockDataset(90, 64, 64, 0, document_length=20.0), cfg, mesh)
    for step in range(2):
        trainer.step(loader.step(8 * step, step), 1e-3)  # compiles kernels, allocates
    batches = loader.step(16, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = trainer.step(batches, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loader.close()
    figures = stats.read()
    assert figures["loss"] == pytest.approx(math.log(90), rel=0.1) and not figures["skipped"]  # of an untrained model
