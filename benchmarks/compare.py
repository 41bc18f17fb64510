"""minitron and a peer in turn, on the same GPUs in the same run: `python benchmarks/compare.py [CASE ...]`.

Machines of one kind differ by some percent and a GPU by its temperature, so only the ratio of two measurements of one
run counts; and what drifts while it lasts must not favour whoever comes first. So each side runs twice: ours, peer,
peer, ours. The first two give a ratio, the last two another one; their mean counts, and half of their difference is
its spread. A program runs in processes of its own (workers.py), from the same configuration, timed by the same code
(measure.py). The floor is measured with the first of our runs.
Per case and precision it prints, and appends to the results,

    case=<name>-<bf16|fp8> ours_mfu=.. peer_mfu=.. ratio=.. spread=.. ours_gib=.. peer_gib=..

The peer is Megatron-core, or `--peer torchtitan` or `huggingface`. Where it has not the schedule or the number format
of a case, it runs the fastest that it has.
Figures are means of a side's runs, memory the larger one, of the highest rank, as torch's allocator counts it. MFU by
the `full` counting, in percent; for fine-tuning also by that of NVIDIA's recipe, `weights`, and in FP8 against a peer
in bf16 where it has nothing else. A case that cannot run here is skipped with a reason. Exits with status 1 if one
failed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from statistics import mean

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder
    from minitron.runtime.environment import set_defaults

    set_defaults(os.environ)  # before torch loads, here and so in all that is forked: of the peer, too

from benchmarks import record
from benchmarks.cases import CASES, FP8_RECIPES, Case
from benchmarks.programs import Failed, Skipped
from benchmarks.workers import Workers

OURS = "benchmarks/step.py"
TURNS = "ours", "peer", "peer", "ours"
# What each needs in its environment. Megatron-core relies on one work queue, which keeps kernels in the order of their
# launch; minitron's pipelined products, and the others' FSDP, need several.
PEERS = {"megatron": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "torchtitan": {}, "huggingface": {}}
BF16_TUNERS = {"huggingface"}


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
    failed, wanted = False, [(name, precision) for name in args.cases or CASES for precision in args.precision]
    with Workers() as workers:
        gpus = len(workers.free) if workers.free[0] is not None else 0
        for name, precision in wanted:
            label = f"{name}-{precision}"
            try:
                if CASES[name].gpus > gpus:
                    raise Skipped(f"needs {CASES[name].gpus} GPUs, there are {gpus}")
                if CASES[name].needs_fp8 and precision != "fp8":
                    raise Skipped("its head is in FP8; use --precision fp8")
                result = compare(CASES[name], args.fp8 if precision == "fp8" else "none", args, workers)
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


def compare(case: Case, fp8: str, args: argparse.Namespace, workers: Workers) -> dict:
    """Both sides' figures, their ratio and its spread. Raises Skipped or Failed."""
    programs = {"ours": (OURS, {}), "peer": (f"benchmarks/peers/{args.peer}.py", PEERS[args.peer])}
    runs: dict[str, list[dict]] = {side: [] for side in programs}
    for side in TURNS:
        program, environment = programs[side]
        of_side = CASES[case.peer] if side == "peer" and case.peer else case
        has = "none" if side == "peer" and args.peer in BF16_TUNERS and case.tunes else fp8
        options = ["--steps", str(args.steps)] + ["--no-floor"] * (side == "ours" and bool(runs["ours"]))
        run = program, [*of_side.arguments(has), *options], case.gpus, args.timeout, environment
        workers.start(" ".join((program, *run[1])), *run)
        _, figures = workers.next()
        if isinstance(figures, Exception):
            raise figures
        runs[side].append(figures)
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
    floats = [key for key, value in runs[0].items() if isinstance(value, float)]
    numbers = {key: [run[key] for run in runs if key in run] for key in floats}
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


if __name__ == "__main__":
    sys.exit(main())
