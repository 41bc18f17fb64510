"""What casts lose, counted in replayed steps: by recordings of their own, with the figures of eager steps."""

import re
from importlib.util import find_spec

import pytest
import torch

from layouts import GPT3, LLAMA, config
from minitron.comm.mesh import Mesh
from minitron.data.loader import Loader
from minitron.data.mock import MockDataset
from minitron.pipeline.replay import WARM_UP
from minitron.train import build

INSTALLED = torch.cuda.is_available() and find_spec("transformer_engine") is not None
if INSTALLED:  # before torch's cuDNN
    import transformer_engine.pytorch  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
te = pytest.mark.skipif(not INSTALLED, reason="needs Transformer Engine")
MODEL = dict(
    num_layers=2,
    hidden_size=512,
    ffn_hidden_size=1024,
    vocab_size=1000,
    vocab_multiple=128,
    max_positions=512,
    init_std=512**-0.5,
)
TRAIN = dict(seq_len=512, steps=WARM_UP + 6, global_batch_size=4, deterministic=True)


class Lines:
    """Stands in for a Log."""

    def __init__(self):
        self.lines, self.records = [], []
        self.info = self.lines.append
        self.alarm = lambda text, traceback: self.lines.append(text + traceback)
        self.record = lambda kind, **values: self.records.append(values)


def run(base, every, replay, backend, **precision):
    """Figures of each step, the records, the lines, and the kernels of the recorded steps: (ordinary, counting)."""
    precision = dict(dtype="bf16", fp8="delayed", fp8_backend=backend) | precision
    log = {"numerics_every": every, "dir": "unused"}
    train = TRAIN | dict(cuda_graph="on" if replay else "off")
    cfg = config(base, {"model": MODEL, "train": train, "precision": precision, "log": log})
    trainer = build(cfg, Mesh.offline(device="cuda"), log=(log := Lines()))
    loader, figures = Loader(MockDataset(1000, 512, 4 * TRAIN["steps"], 1), cfg, trainer.mesh), []
    for step in range(1, TRAIN["steps"] + 1):
        batches = loader.step(4 * (step - 1), step)
        trainer.mesh.activity.begin_step(step)
        torch.cuda.set_sync_debug_mode("default" if step <= WARM_UP + 1 else "error")
        try:
            stats = trainer.step(batches, 1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        figures.append(stats.read())
    if trainer.numerics is not None:
        trainer.numerics.close()
    loader.close()
    nodes = None
    if replay:
        assert trainer.runner.replaying, log.lines
        counting = trainer.runner.counting
        nodes = trainer.runner.training.nodes, None if counting is None else counting.nodes
    trainer.runner.close()
    return figures, log.records, log.lines, nodes


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
@pytest.mark.parametrize("backend", [pytest.param("te", marks=te), "torch"])
@pytest.mark.parametrize("precision", [{}, {"fp8_params": True}, {"fp8": "current"}], ids=str)
def test_replayed_steps_count_what_eager_steps_count(base, backend, precision):
    torch.use_deterministic_algorithms(True)
    try:
        eager, expected, *_ = run(base, 2, False, backend, **precision)
        replayed, records, lines, (nodes, counting) = run(base, 2, True, backend, **precision)
        plain, _, _, (ordinary, none) = run(base, 0, True, backend, **precision)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [row["step"] for row in records] == list(range(2, TRAIN["steps"] + 1, 2))
    assert records == expected and replayed == eager
    assert nodes == ordinary and none is None and counting > nodes
    assert re.search(r"recorded [\d,]+ kernels and copies of a step that counts casts .* GiB more", "\n".join(lines))
    last = records[-1]
    assert all(value is not None for value in last.values()) and last["fp8/blocks.1.mlp.up/gradient/cur_amax"] > 0
    for mine, other in zip(replayed, plain, strict=True):  # a kernel of its own may cast another last bit
        assert mine["loss"] == pytest.approx(other["loss"], rel=2e-3)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
