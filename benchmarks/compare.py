"""minitron and a peer in turn, on the same GPUs in the same run: `python benchmarks/compare.py [CASE ...]`.

Machines of one kind differ by some percent and a GPU by its temperature, so only the ratio of two measurements of one
run counts; and what drifts while it lasts must not favour whoever comes first. So each side runs twice: ours, peer,
peer, ours. The first two give a ratio, the last two another one; their mean counts, and half of their difference is
its spread. A program runs in processes of its own, from the same configuration, timed by the same code (measure.py).
Per case and precision it prints, and appends to the results,

    case=<name>-<bf16|fp8> ours_mfu=.. peer_mfu=.. ratio=.. spread=.. ours_gib=.. peer_gib=..

The peer is Megatron-core, or `--peer torchtitan` or `huggingface`. Where it has not the schedule of a case, it runs
the fastest layout that it has.
Figures are means of a side's runs, memory the larger one, of the highest rank, as torch's allocator counts it. MFU by
the `full` counting, in percent; for fine-tuning also by that of NVIDIA's recipe, `weights`, and in FP8 against a peer
in bf16 where it has nothing else. A case that cannot run here is skipped with a reason. Exits with status 1 if one
failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import mean

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch

from benchmarks import record
from benchmarks.cases import CASES, FP8_RECIPES, Case
from minitron.runtime.environment import DEFAULTS

OURS = "benchmarks/step.py"
TURNS = "ours", "peer", "peer", "ours"
# What each needs in its environment. Megatron-core relies on one work queue, which keeps kernels in the order of their
# launch; minitron's pipelined products, and the others' FSDP, need several.
PEERS = {"megatron": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "torchtitan": {}, "huggingface": {}}
ENVIRONMENT = DEFAULTS  # of the peer, too
BF16_TUNERS = {"huggingface"}
GRACE_SECONDS = 45  # torchrun itself gives its processes 30 to end


class Skipped(Exception):
    """A side cannot run here."""


class Failed(Exception):
    """A side broke, or took too long."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--peer", choices=PEERS, default="megatron", help="the other trainer (default megatron)")
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp8"), default=["bf16"])
    parser.add_argument("--fp8", choices=FP8_RECIPES, default="delayed", help="scaling on both sides (default delayed)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds for each of the four runs of a case (default 300)"
    )
    record.add_options(parser)
    args = parser.parse_intermixed_args(argv)
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]}; use one of {', '.join(CASES)}")
    failed = False
    for name in args.cases or CASES:
        for precision in args.precision:
            label = f"{name}-{precision}"
            try:
                if CASES[name].gpus > torch.cuda.device_count():
                    raise Skipped(f"needs {CASES[name].gpus} GPUs, there are {torch.cuda.device_count()}")
                result = compare(CASES[name], args.fp8 if precision == "fp8" else "none", args)
            except Skipped as reason:
                print(f"case={label} skipped: {reason}", flush=True)
            except Failed as reason:
                print(f"case={label} failed: {reason}", flush=True)
                failed = True
            else:
                result = {"case": label, "peer": args.peer, **result}
                record.append(args, "compare", result)
                print(line(result), flush=True)
    return int(failed)


def compare(case: Case, fp8: str, args: argparse.Namespace) -> dict:
    """Both sides' figures, their ratio and its spread. Raises Skipped or Failed."""
    programs = {"ours": (OURS, {}), "peer": (f"benchmarks/peers/{args.peer}.py", PEERS[args.peer])}
    runs: dict[str, list[dict]] = {side: [] for side in programs}
    for side in TURNS:
        program, environment = programs[side]
        of_side = CASES[case.peer] if side == "peer" and case.peer else case
        has = "none" if side == "peer" and args.peer in BF16_TUNERS and case.tunes else fp8
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(case.gpus),
            program,
            *of_side.arguments(has),
            "--steps",
            str(args.steps),
        ]
        runs[side].append(launch(command, args.timeout, ENVIRONMENT | environment))
    ratios = [ours["tflops"] / peer["tflops"] for ours, peer in zip(runs["ours"], runs["peer"])]
    both = {side: mean_of(figures) for side, figures in runs.items()}
    ours, peer = both["ours"], both["peer"]
    weights = {f"{side}_mfu_weights": figures["mfu_weights"] for side, figures in both.items()} if case.tunes else {}
    return {
        **weights,
        "ours_mfu": ours["mfu_full"],
        "peer_mfu": peer["mfu_full"],
        "ratio": mean(ratios),
        "spread": (max(ratios) - min(ratios)) / 2,
        "ours_gib": ours["peak_gib"],
        "peer_gib": peer["peak_gib"],
        "fp8": fp8,
        "ours": ours,
        "peer_figures": peer,
        "step_seconds": {side: [run["step_seconds"] for run in figures] for side, figures in runs.items()},
    }


def mean_of(runs: list[dict]) -> dict:
    """Average the numbers of a side's runs; memory is that of the run that took most."""
    numbers = {key: [run[key] for run in runs] for key, value in runs[0].items() if isinstance(value, float)}
    peaks = {key: max(values) for key, values in numbers.items() if key == "peak_gib"}
    return runs[0] | {key: mean(values) for key, values in numbers.items()} | peaks


def line(result: dict) -> str:
    """The one line of a case; MFU is nan where the device's peak is not known."""
    mfu = {side: math.nan if result[side] is None else result[side] for side in ("ours_mfu", "peer_mfu")}
    more = [
        f" {key}={result[key]:.2f}" for key in ("ours_mfu_weights", "peer_mfu_weights") if result.get(key) is not None
    ]
    return "".join(
        [
            f"case={result['case']} ours_mfu={mfu['ours_mfu']:.2f} peer_mfu={mfu['peer_mfu']:.2f} "
            f"ratio={result['ratio']:.3f} spread={result['spread']:.3f} "
            f"ours_gib={result['ours_gib']:.2f} peer_gib={result['peer_gib']:.2f}",
            *more,
        ]
    )


def launch(command: list[str], timeout: float, environment: dict[str, str]) -> dict:
    """What a measured program reported. Raises Skipped, or Failed with the end of its output."""
    process = subprocess.Popen(
        command,
        cwd=record.ROOT,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun ends its processes; killed, it would leave them on the GPUs
        try:
            process.communicate(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise Failed(f"took longer than {timeout:g} s: {' '.join(command)}") from None
    return reported(output, " ".join(command), process.returncode)


def reported(output: str, what: str, status: int) -> dict:
    """The figures that a measured program wrote. Raises Skipped, or Failed with the end of its output."""
    for text in output.splitlines():
        if text.startswith("RESULT "):
            return json.loads(text.removeprefix("RESULT "))
        if text.startswith("SKIP "):
            raise Skipped(text.removeprefix("SKIP "))
    raise Failed(f"exit status {status}: {what}\n{output[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
