"""A stuck NCCL kernel and a dead rank, on two GPUs. What a host sees of them is not what gloo shows."""

import os
import re
import signal

import pytest
import torch
from fault_run import Run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def test_a_stuck_kernel_is_found(tmp_path):
    with Run(tmp_path, "sleep@1", "parallel.tp=2", "train.hang_seconds=15", ranks=2, on_gpus=True) as run:
        run.wait_for("where all ranks stand:")
        status, _, output = run.end()
    assert status == 1 and re.search(r"exitcode *: 124", output)
    asleep, waiting = (output.split(f"rank {rank} (pp 0")[1].split("the main thread:")[0] for rank in (1, 0))
    assert "host: step 3, Forward(mb=1, chunk=0)\n" in asleep and "time.sleep(1000)" in output
    assert "device: through with all actions" in asleep, output
    assert "device: not through with step 3, Forward(mb=1, chunk=0)" in waiting, output
    assert "not finished: nccl:" in waiting, output


def test_whoever_waits_for_a_dead_rank_ends_before_torchrun_loses_patience(tmp_path):
    with Run(tmp_path, "none", "parallel.tp=2", ranks=2, on_gpus=True) as run:
        os.kill(run.training().workers()[1], signal.SIGKILL)
        status, seconds, output = run.end()
    assert status == 1 and seconds < 25, output  # stop.PATIENCE_SECONDS, and torchrun's own
