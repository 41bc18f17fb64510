"""Predicted against measured on your GPUs: `bash benchmarks/validate.sh --device h100 --output mycluster.jsonl`.

Problem: the planner's constants come from one or two GPUs and from what others published; your network, your clocks and
your scale nobody here has seen. The idea: small jobs of every kind of parallelism, each planned and then measured by
`benchmarks/step.py`, first inside of a node, then over all nodes. Each is a row of the file, written when it exists:

    case, GPUs, keys, software and commit; predicted and measured seconds of a step and GiB, and the errors in percent

Every node starts this program once; the one of rank 0 plans, writes and prints. A job that does not fit by its plan, or
that fails, is a line with the reason. No job is begun that may end after --minutes.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch

from benchmarks import record
from minitron.config import cli, rules
from minitron.planner.machine import DEVICES, Machine, choose_machine
from minitron.planner.plan import Plan, plan

LEAST_SECONDS = 60  # of a job, until one has been longer; with less left none is begun
MOST_SECONDS = 300  # after which one counts as hanging
TOY = (
    "model.num_layers=8",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.vocab_size=256",
    "model.max_positions=64",
    "train.seq_len=64",
)


@dataclass(frozen=True)
class Job:
    name: str
    gpus: int
    keys: tuple[str, ...]


def jobs(gpus: int, per_node: int, fp8: bool, toy: bool) -> Iterator[Job]:
    """List jobs of so many GPUs, the most telling ones first: on one, in a node, over all nodes."""
    near = min(gpus, per_node)
    layouts = [("one", 1, {}), ("tp", near, {"tp": near}), ("dp", near, {}), ("pp", near, {"pp": near, "vp": 2})]
    if near % 4 == 0:
        layouts += [("tp2-pp2", near, {"tp": 2, "pp": 2}), ("tp-cp2", near, {"tp": near // 2, "cp": 2})]
    if (nodes := gpus // per_node) > 1:
        layouts += [
            ("tp-dp", gpus, {"tp": near}),
            ("dp", gpus, {}),
            ("tp-pp", gpus, {"tp": near, "pp": nodes}),
            ("tp-cp2-dp", gpus, {"tp": near // 2, "cp": 2}),
            ("tp2-pp", gpus, {"tp": 2, "pp": near // 2}),
        ]
    for name, world, layout in layouts:
        if world == 1 and name != "one":
            continue
        pp, wide = layout.get("pp", 1), layout.get("tp", 1) > 2
        recipe, layers = ("llama31_70b", 4) if wide else ("llama3_8b", 8)
        layers = max(layers, 2 * pp)
        dp = world // (pp * layout.get("tp", 1) * layout.get("cp", 1))
        keys = {"tp": 1, "pp": 1, "vp": 1, "cp": 1, "layers_per_stage": "null"} | layout
        common = [f"configs/{recipe}.yaml", *(f"parallel.{key}={value}" for key, value in keys.items())]
        common += ["data.source=mock", "train.micro_batch_size=1", f"train.global_batch_size={4 * pp * dp}"]
        common += [f"model.num_layers={layers}", "train.recompute=none", *(TOY if toy else ())]
        for precision in ("none", "delayed") if fp8 else ("none",):
            text = "bf16" if precision == "none" else "fp8"
            yield Job(f"{name}-{world}gpu-{text}", world, (*common, f"precision.fp8={precision}"))


def planned(job: Job, machine: Machine) -> Plan:
    """Plan a job. Raises ValueError, with the reason, for one that cannot be or does not fit."""
    root = Path(__file__).resolve().parents[1]
    cfg = cli.load([str(root / job.keys[0]), *job.keys[1:]])
    rules.check(cfg, job.gpus)
    made = plan(cfg, job.gpus, machine)
    if not made.fits:
        raise ValueError(f"needs {made.memory_gib:.1f} GiB of {made.room_gib:.1f}")
    return made


def measured(job: Job, number: int, seconds: float) -> dict | None:
    """Run a job on this node's part of its GPUs; the record of its step on node 0, elsewhere None.

    Raises ValueError, with its last line, if it fails.
    """
    nodes, rank, port = (int(os.environ.get(key, default)) for key, default in LAUNCH.items())
    per_node = min(job.gpus, _gpus(job.gpus))
    nodes = min(nodes, job.gpus // per_node)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={rank}"]
        command += [f"--nproc-per-node={per_node}", f"--master-port={port + number}"]
        command += [f"--master-addr={os.environ.get('MASTER_ADDR', '127.0.0.1')}", "benchmarks/step.py", *job.keys]
        command += ["--results", str(path)]
        with subprocess.Popen(
            command,
            cwd=record.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                text, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                process.communicate()
                raise ValueError(f"hung: ended after {seconds:.0f} s") from None
        if process.returncode:
            lines = [line for line in text.splitlines() if "rror" in line] or text.splitlines() or ["nothing said"]
            raise ValueError(f"failed: {lines[0].strip()[:200]}")
        rows = record.rows(path)
        return rows[-1] if rows else None


LAUNCH = {"NODES": "1", "NODE_RANK": "0", "MASTER_PORT": "29400"}


def _gpus(otherwise: int) -> int:
    """Count the GPUs of this node; on CPUs as many as are asked for."""
    return int(os.environ.get("GPUS") or torch.cuda.device_count() or otherwise)


def row(job: Job, made: Plan, found: dict) -> dict:
    """Hold a plan against its measurement. Memory is None on a CPU."""
    gib = found["peak_gib"] or None
    return {
        "kind": "validate",
        "case": job.name,
        "gpus": job.gpus,
        "nodes": int(os.environ.get("NODES", 1)),
        "keys": job.keys,
        "device": made.machine.device.gpu,
        "predicted_seconds": made.step_seconds,
        "measured_seconds": found["step_seconds"],
        "seconds_error_percent": 100 * (made.step_seconds / found["step_seconds"] - 1),
        "predicted_gib": made.memory_gib,
        "measured_gib": gib,
        "gib_error_percent": gib and 100 * (made.memory_gib / gib - 1),
        "predicted_parts": dict(made.seconds),
        "graph": found.get("graph"),
        **{key: found[key] for key in ("time", "gpu", "power_limit_watts", "versions", "commit", "floor_share")},
    }


def line(entry: dict) -> str:
    text = f"{entry['case']:22} {entry['predicted_seconds']:8.3f} s {entry['measured_seconds']:8.3f} s "
    text += f"{entry['seconds_error_percent']:+7.1f} %"
    if entry["measured_gib"]:
        text += f"   {entry['predicted_gib']:6.1f} GiB {entry['measured_gib']:6.1f} GiB"
        text += f" {entry['gib_error_percent']:+6.1f} %"
    return text


def summary(rows: list[dict]) -> str:
    """Say in one line how far the planner is off."""
    errors = [entry["seconds_error_percent"] for entry in rows]
    mean, bias = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
    largest = max(errors, key=abs)
    jobs = f"{len(rows)} job{'s' * (len(rows) > 1)}"
    return f"{jobs}: step times off by {mean:.1f} % on average, bias {bias:+.1f} %, largest {largest:+.1f} %"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--device", required=True, help="of the table of devices: h100, h200, a100, ...")
    add("--fabric", help="of the same table (default: the device's usual one)")
    add("--devices", type=Path, default=DEVICES, metavar="FILE", help="the table (default: planner/devices.json)")
    add("--output", type=Path, default=Path("validate.jsonl"), metavar="FILE", help="where rows go (validate.jsonl)")
    add("--minutes", type=float, default=20, help="no job is begun that may end later (default: 20)")
    add("--bf16-only", action="store_true", help="leave FP8 out, as without Transformer Engine")
    add("--toy", action="store_true", help="a model of no size, to try this on CPUs: errors mean nothing there")
    args = parser.parse_args(argv)
    with cli.user_errors():
        machine = choose_machine(args.device, args.fabric, path=args.devices)
        if not args.toy and not torch.cuda.is_available():
            raise ValueError("there is no GPU here; start this on a node with GPUs, or add --toy to try it on CPUs")
    return validate(args, machine)


def validate(args: argparse.Namespace, machine: Machine) -> int:
    """Plan, measure and write all jobs that the time allows; 1 if none was measured."""
    start, longest, rows = time.monotonic(), LEAST_SECONDS, []
    nodes, rank, _ = (int(os.environ.get(key, default)) for key, default in LAUNCH.items())
    per_node = _gpus(2)
    fp8 = "fp8" in machine.device.gemm_tflops and not (args.bf16_only or args.toy)
    for number, job in enumerate(jobs(nodes * per_node, per_node, fp8, args.toy)):
        if job.gpus <= per_node and rank > 0:  # of one node alone
            continue
        left = 60 * args.minutes - (time.monotonic() - start)
        if left < longest:
            print(f"{job.name:22} not begun: {max(left, 0):.0f} s are left", flush=True)
            continue
        begun = time.monotonic()
        try:
            made = planned(job, machine)
            found = measured(job, number, MOST_SECONDS)
        except ValueError as error:
            print(f"{job.name:22} {error}", flush=True)
            continue
        longest = max(longest, time.monotonic() - begun)
        if rank == 0:
            rows.append(record.write(args.output, row(job, made, found)))
            print(line(rows[-1]), flush=True)
    if rank > 0:
        return 0
    print(f"{summary(rows)}\nrows: {args.output}" if rows else "no job was measured")
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
