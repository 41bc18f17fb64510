"""Every layout that this machine's GPUs allow has the losses and gradients of one GPU, in each number format."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


PARTS = {1: 1, 2: 3, 4: 2}  # of some minutes each


@pytest.mark.parametrize("gpus, part", [(n, f"{i + 1}/{parts}") for n, parts in PARTS.items() for i in range(parts)])
def test_layouts(gpus, part):
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
        "--part",
        part,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
