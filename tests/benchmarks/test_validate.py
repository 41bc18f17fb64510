"""benchmarks/validate.sh: jobs of every kind of parallelism, planned and measured, in a file to send back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import validate
from minitron.config import cli
from minitron.planner.machine import Machine, read_machines
from minitron.planner.plan import plan
from ports import free_port

ROOT = Path(__file__).parents[2]
DEVICES, FABRICS = read_machines(validate.DEVICES)


def machine(name):
    return Machine(DEVICES[name], FABRICS[DEVICES[name].fabric])


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16, 32, 128])
def test_every_job_can_be_and_fits(gpus):
    """On the cards with least memory of those that have FP8, and each axis is there where there are GPUs for it."""
    listed = list(validate.jobs(gpus, 8, True, False))
    for job in listed:
        assert validate.planned(job, machine("h100")).fits and job.gpus <= gpus
    assert len({job.name for job in listed}) == len(listed)
    for axis in ("tp", "pp", "cp") if gpus >= 4 else ("tp", "pp") if gpus > 1 else ():
        assert any(f"parallel.{axis}=1" not in job.keys for job in listed)
    if gpus > 8:
        assert sum(job.gpus == gpus for job in listed) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_toy_is_measured_on_cpus_and_held_against_its_plan(tmp_path, gpus):
    path = tmp_path / "rows.jsonl"
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "GPUS": str(gpus),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = ["bash", str(ROOT / "benchmarks/validate.sh"), "--toy", "--device", "h100", "--output", str(path)]
    environment["MASTER_PORT"] = str(free_port())
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cases = ["one-1gpu-bf16", "tp-2gpu-bf16", "dp-2gpu-bf16", "pp-2gpu-bf16"][: 4 if gpus == 2 else 1]
    assert [row["case"] for row in rows] == cases
    for row in rows:
        cfg = cli.load([str(ROOT / row["keys"][0]), *row["keys"][1:]])
        assert row["predicted_seconds"] == plan(cfg, row["gpus"], machine("h100")).step_seconds
        assert row["measured_seconds"] > 0 and row["measured_gib"] is None and row["versions"]["torch"]
        ratio = row["predicted_seconds"] / row["measured_seconds"]
        assert row["seconds_error_percent"] == pytest.approx(100 * (ratio - 1))
        assert any(line.startswith(row["case"]) for line in done.stdout.splitlines())
    assert (
        done.stdout.splitlines()[-1] == f"rows: {path}"
        and f"{len(cases)} job{'s' * (gpus > 1)}: step times off by" in done.stdout
    )


def test_what_is_not_measured_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GPUS", "1")
    argv = ["--toy", "--device", "h100", "--output", str(tmp_path / "rows.jsonl")]
    assert validate.main([*argv, "--minutes", "0.01"]) == 1
    assert "one-1gpu-bf16          not begun: " in capsys.readouterr().out

    def fails(job, number, seconds):
        raise ValueError("failed: no port")

    monkeypatch.setattr(validate, "measured", fails)
    assert validate.main(argv) == 1
    assert "one-1gpu-bf16          failed: no port\nno job was measured" in capsys.readouterr().out
    alone = [f"parallel.{axis}=1" for axis in ("tp", "pp", "vp", "cp")]
    with pytest.raises(ValueError, match="needs .* GiB of"):
        validate.planned(validate.Job("x", 1, ("configs/llama31_70b.yaml", *alone)), machine("h100"))


def test_mistakes_are_one_line(capsys):
    for argv, message in (
        (["--device", "v100", "--toy"], "--device v100 is not in "),
        (["--device", "h100", "--fabric", "x", "--toy"], "--fabric x is not in "),
        (["--device", "h100"], "there is no GPU here; start this on a node with GPUs, or add --toy"),
    ):
        with pytest.raises(SystemExit):
            validate.main(argv)
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
