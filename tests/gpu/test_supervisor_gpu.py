"""Ranks that are forks of an agent use their GPUs, and after a fault they use them again."""

import os
import signal
import time

import pytest
import torch

from soak_run import Job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_killed_and_a_stopped_rank_cost_a_restart(tmp_path, graph):
    job = Job(tmp_path / "run", nodes=1, ranks=2, steps=400, port=27000, on_gpus=True)
    job.more = ["precision.dtype=bf16", f"train.cuda_graph={graph}", "train.global_batch_size=16"]
    job.more += ["train.hang_seconds=40"]  # a first start compiles kernels
    try:
        job.until(lambda: job.step() > 10, "step 10")
        for kind, number in (("was killed by SIGKILL", signal.SIGKILL), ("made no progress", signal.SIGSTOP)):
            starts = len(job.rows("start"))
            os.kill(job.ranks_of(0)[1], number)
            assert job.until(lambda: len(job.rows("start")) > starts, "recovery")
            assert job.report()[-1]["cause"] == f"rank 1 on node0 {kind}"
            assert job.until(lambda: job.step() > 10, "another step")
        while not job.tend():
            time.sleep(0.1)
    finally:
        job.end()
    assert [row["first_step"] for row in job.rows("run")][1] > 5
    print(*job.rows("start"), sep="\n")
