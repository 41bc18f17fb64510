"""A stuck NCCL kernel, a dead rank and a signal, on two GPUs. What a host sees of them is not what gloo shows."""

import os
import re
import signal
import time

import pytest
import torch

from fault_run import Run
from minitron.checkpoint.directory import checkpoints

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def test_a_stuck_kernel_is_found(tmp_path):
    with Run(tmp_path, "sleep@1", "parallel.tp=2", "train.hang_seconds=15", ranks=2, on_gpus=True) as run:
        run.wait_for("activity of all ranks:")
        status, _, output = run.end()
    assert status == 1 and re.search(r"exitcode *: 124", output)
    asleep, waiting = (output.split(f"rank {rank} (pp 0")[1].split("the main thread:")[0] for rank in (1, 0))
    assert "host: step 3, Forward(mb=1, chunk=0)\n" in asleep and "time.sleep(1000)" in output
    assert "device: through with all actions" in asleep, output
    assert "device: not through with step 3, Forward(mb=1, chunk=0)" in waiting, output
    assert "not finished: nccl:" in waiting, output


def test_a_replay_that_stands_still_is_found(tmp_path):
    keys = "parallel.tp=2", "train.cuda_graph=on", "train.hang_seconds=15"
    with Run(tmp_path, "halt@1", *keys, ranks=2, on_gpus=True) as run:
        run.wait_for("activity of all ranks:")
        status, _, output = run.end()
    assert status == 1 and re.search(r"exitcode *: 124", output) and "kernels and copies of a step" in output
    asleep, waiting = (output.split(f"rank {rank} (pp 0")[1].split("the main thread:")[0] for rank in (1, 0))
    assert "host: step 9, data\n" in asleep and "device: through with all actions" in asleep, output
    assert "device: not through with step 9, Forward(mb=0, chunk=0)" in waiting, output


@pytest.mark.parametrize("graph", ["on", "off"])
def test_whoever_waits_for_a_dead_rank_ends_before_torchrun_loses_patience(tmp_path, graph):
    with Run(tmp_path, "none", "parallel.tp=2", f"train.cuda_graph={graph}", ranks=2, on_gpus=True) as run:
        run.wait_for('"step": 9', run.folder / "metrics.jsonl")
        os.kill(run.workers()[1], signal.SIGKILL)
        status, _, output = run.end()
    assert status == 1 and "forcefully" not in output, output  # torchrun kills whoever lives on for 30 s


# 0.1 billion parameters and many microbatches of 8,192 tokens: seconds a step, and its last backward 1 % of that.
LONG_STEPS = (
    "model.num_layers=8",
    "model.hidden_size=1024",
    "model.ffn_hidden_size=2816",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.max_positions=4096",
    "train.seq_len=4096",
    "precision.dtype=bf16",
    "train.micro_batch_size=2",
    "train.hang_seconds=60",
)
SAVE_SECONDS = 1.5  # the gigabyte of the checkpoint


@pytest.mark.parametrize(
    "layout,number",
    [
        (("parallel.tp=2", "train.global_batch_size=128"), signal.SIGTERM),
        (("parallel.pp=2", "parallel.vp=2", "train.global_batch_size=512"), signal.SIGUSR1),
    ],
    ids=["tp2", "pp2vp2"],
)
def test_a_signal_is_answered_within_a_step(tmp_path, layout, number):
    saved = tmp_path / "saved"
    with Run(tmp_path, "none", *LONG_STEPS, *layout, f"checkpoint.dir={saved}", ranks=2, on_gpus=True) as run:
        run.training()
        last = run.rows("step")[-1]
        time.sleep(0.4 * last["step_seconds"])
        begin = time.monotonic()
        os.kill(run.workers()[1], number)
        output = run.wait_for(f"{number.name}: stopped after iteration")
        seconds = time.monotonic() - begin
        status, _, _ = run.end()
    step = run.last_step()
    print(f"\na step takes {last['step_seconds']:.2f} s; saved {seconds:.2f} s after the signal, with iteration {step}")
    assert status == 0 and f"stopped after iteration {step}, which was saved\n" in output, output
    assert list(checkpoints(saved)) == [step]
    assert last["step_seconds"] > SAVE_SECONDS  # else two steps, one too many, would pass as well
    assert seconds < 1.05 * last["step_seconds"] + SAVE_SECONDS
