"""Profilers on a GPU: what a run leaves behind, and that it goes on."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "kind, left", [("torch", "profile-rank-0.json"), ("memory", "profile-rank-0.pickle"), ("nsys", None)]
)
def test_a_profiled_run(tmp_path, kind, left):
    """Also without nsys around it: then nobody listens to the range."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "minitron.pretrain",
            "data.source=mock",
            "train.steps=6",
            "log.format=nemo",
            f"log.dir={tmp_path}",
            f"profile.kind={kind}",
            "profile.start_step=3",
            "profile.end_step=4",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "profiled iterations 3 to 4: " in done.stdout and "6/6 [" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert len(steps) == 6 and all(step["memory_gib"] > 0 for step in steps)
    if left is not None:
        assert (tmp_path / left).stat().st_size > 1000
    if kind == "torch":
        events = json.loads((tmp_path / left).read_text())["traceEvents"]
        assert any(event.get("cat") == "kernel" for event in events)
