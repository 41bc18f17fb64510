"""Every layout that this machine's GPUs allow has the losses and gradients of one GPU, in each number format."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_layouts(gpus):
    if gpus > torch.cuda.device_count():
        pytest.skip(f"needs {gpus} GPUs")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(gpus),
        str(Path(__file__).with_name("run_layouts.py")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
