"""A run whose steps are replayed goes through what runs go through: evaluations, saves, a signal, a death."""

import os
import re
import signal

import pytest
import torch

from fault_run import Run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KEYS = (
    "model.hidden_size=512",
    "model.ffn_hidden_size=1024",
    "model.num_layers=8",
    "model.num_heads=8",
    "model.max_positions=256",
    "train.seq_len=256",
    "train.global_batch_size=32",
    "train.deterministic=true",
    "train.eval_every=7",
    "train.eval_steps=1",
    "checkpoint.every=25",
    "checkpoint.keep=2",
    "precision.dtype=bf16",
)


def steps_of(run) -> dict[int, dict]:
    return {row["step"]: row for row in run.rows("step")}


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (1, ()),
        (1, ("data.separate_documents=true",)),
        (2, ("parallel.tp=2",)),
        (2, ("parallel.pp=2", "parallel.vp=2")),
        (2, ()),
    ],
)
def test_replayed_runs_that_are_interrupted_equal_an_eager_one(tmp_path, ranks, layout):
    """Stopped by SIGTERM, resumed, killed and resumed; losses bit by bit those of the run that nothing has stopped."""
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    last, folders = 120, {name: tmp_path / name for name in ("eager", "on")}
    for folder in folders.values():
        folder.mkdir()
    keys = (*KEYS, *layout, f"train.steps={last}", "optimizer.decay_steps=120")
    with Run(folders["eager"], "none", *keys, "train.cuda_graph=off", ranks=ranks, on_gpus=True) as run:
        assert run.end()[0] == 0, run.output.read_text()
        expected = steps_of(run)
    seen = {}
    keys = (*keys, "train.cuda_graph=on", f"checkpoint.dir={tmp_path / 'saved'}")
    for number, at in ((signal.SIGTERM, 30), (signal.SIGKILL, 70), (None, last)):
        with Run(folders["on"], "none", *keys, ranks=ranks, on_gpus=True) as run:
            if number is not None:
                run.wait_for(f'"step": {at}', run.folder / "metrics.jsonl")
                os.kill(run.workers()[-1], number)
            status, _, output = run.end()
            assert (status == 0) == (number != signal.SIGKILL), output
            assert re.search(r"recorded [\d,]+ kernels", output), output
            seen |= steps_of(run)
    assert {step: row["loss"] for step, row in seen.items()} == {step: row["loss"] for step, row in expected.items()}
    memory = [row["memory_gib"] for step, row in seen.items() if step > 80]
    assert max(memory) - min(memory) < 0.05, "device memory stays as it is"
