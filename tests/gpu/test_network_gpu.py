"""Two GPUs that play two nodes: by NCCL's sockets, layouts and graphs equal one GPU's, and a killed rank is named."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fault_run import Run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
KEYS = "tp|pp|vp|cp|sequence_parallel|cp_style|schedule|overlap_grads|node_ranks"
LAYOUTS = rf"^llama (fp32|bf16|bf16 wire|bf16 gradients|fp8 delayed) {{('({KEYS})': [\w'-]+(, )?)*}}$"
GRAPHS = r"^llama (bf16 ({}|{'cp': 2}|{'pp': 2, 'schedule': 'zb-h1'})|fp8 delayed ({'tp': 2}|{'pp': 2}))$"


@pytest.mark.parametrize(
    "program, options",
    [("run_layouts.py", [LAYOUTS]), ("run_graphs.py", [GRAPHS, "--replays", "100"])],
    ids=["layouts", "graphs"],
)
def test_over_a_network_steps_are_the_same(program, options):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(Path(__file__).with_name(program)), "--nodes", "2", *options]
    environment = os.environ | {"NCCL_DEBUG": "INFO"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, env=environment)
    print("\n", *(line + "\n" for line in done.stdout.splitlines() if re.match("ok |FAIL|[0-9]+ rows", line)))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " via NET/Socket" in done.stdout and " via P2P" not in done.stdout


@pytest.mark.parametrize("graph", ["on", "off"])
@pytest.mark.parametrize("layout", [("parallel.tp=2",), ("parallel.pp=2",), ()], ids=["tp2", "pp2", "dp2"])
def test_over_a_network_a_killed_rank_is_named(tmp_path, graph, layout):
    with Run(tmp_path, "nodes@2", *layout, f"train.cuda_graph={graph}", ranks=2, on_gpus=True) as run:
        run.wait_for('"step": 9', run.folder / "metrics.jsonl")
        os.kill(run.workers()[1], signal.SIGKILL)
        status, _, output = run.end()
    assert status == 1 and "forcefully" not in output, output  # torchrun kills what lives on for 30 s
    assert re.search(r"rank *: 1 \(local_rank: 1\)\s+exitcode *: -9", output), output
