"""minitron and a peer in turn, on the same GPUs in the same run: `python benchmarks/compare.py [CASE ...]`.

Machines of one kind differ by some percent and a GPU by its temperature, so only the ratio of two measurements of one
run counts; and what drifts while it lasts must not favour whoever comes first. So each side runs twice: ours, peer,
peer, ours. The first two give a ratio, the last two another one; their mean counts, and half of their difference is
its spread. A program runs in processes of its own (workers.py), from the same configuration, timed by the same code
(measure.py). The floor is measured with the first of our runs.
Per case and precision it prints, and appends to the results,

    case=<name>-<bf16|fp8> ours_mfu=.. peer_mfu=.. ratio=.. spread=.. ours_gib=.. peer_gib=..

The peer is Megatron-core, or `--peer torchtitan` or `huggingface`. Where it has not the schedule or the number format
of a case, it runs the fastest that it has. Megatron-core first runs once in each of its modes (peers/modes.py), then
twice in the fastest; a mode that is out of memory is tried with Megatron's own loss, too. The record has
the seconds or the error of each mode. `graph` of a side is whether it replays. `ratio_without_head` leaves out what the
products with the vocabulary take alone, which both sides do alike. If the peer fits in no mode, the record has its
memory and no ratio.
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
from collections.abc import Callable
from pathlib import Path
from statistics import mean

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder
    from minitron.runtime.environment import set_defaults

    set_defaults(os.environ)  # before torch loads, here and so in all that is forked: of the peer, too

from benchmarks import record
from benchmarks.cases import CASES, FP8_RECIPES, Case
from benchmarks.measure import WARMUP
from benchmarks.peers.modes import modes_of
from benchmarks.programs import Failed, OutOfMemory, Skipped
from benchmarks.workers import Workers

OURS = "benchmarks/step.py"
TURNS = "ours", "peer", "peer", "ours"
# What each needs in its environment. Megatron-core relies on one work queue, which keeps kernels in the order of their
# launch; minitron's pipelined products, and the others' FSDP, need several.
# UB_SKIPMC: its user buffers without NVLink multicast, which not every machine has.
PEERS = {"megatron": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "UB_SKIPMC": "1"}, "torchtitan": {}, "huggingface": {}}
BF16_TUNERS = {"huggingface"}
THOUSANDTHS = "ratio", "spread", "ratio_without_head"
REPLAYS = 50  # timed, at least, of a peer's graph in its two runs together


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
    """Both sides' figures, their ratio and its spread; without these if the peer is out of memory in every mode. Raises
    Skipped or Failed."""
    peers_case = CASES[case.peer] if case.peer else case
    runs: dict[str, list[dict]] = {"ours": [], "peer": []}

    def run(side: str, steps: int, mode: str | None) -> dict:
        if side == "ours":
            program, environment = OURS, {}
            arguments = case.arguments(fp8) + ["--no-floor"] * bool(runs["ours"])
        else:
            program, environment = f"benchmarks/peers/{args.peer}.py", PEERS[args.peer]
            arguments = peers_case.arguments("none" if args.peer in BF16_TUNERS and case.tunes else fp8)
            arguments += ["--mode", mode] if mode else []
        arguments += ["--steps", str(steps)]
        workers.start(" ".join((program, *arguments)), program, arguments, case.gpus, args.timeout, environment)
        _, figures = workers.next()
        if isinstance(figures, Exception):
            raise figures
        return figures

    tried = try_modes(peers_case, run, args.steps) if args.peer == "megatron" else {}
    seconds = {mode: found for mode, found in tried.items() if isinstance(found, float)}
    mode = min(seconds, key=lambda name: seconds[name], default=None)
    steps = max(args.steps, WARMUP + REPLAYS // TURNS.count("peer")) if mode and "graph" in mode else args.steps
    result: dict = {"fp8": fp8, "mode": mode, "modes": tried, "ratio": None}
    for side in TURNS:
        try:
            runs[side].append(run(side, steps, mode))
        except OutOfMemory as error:
            if side == "ours":
                raise
            result |= {"peer_mfu": None, "peer_gib": error.gib, "peer_figures": None}
            return result | side_of(case, "ours", runs)
    ratios = [ours["tflops"] / peer["tflops"] for ours, peer in zip(runs["ours"], runs["peer"])]
    result |= side_of(case, "ours", runs) | side_of(case, "peer", runs)
    return result | {
        "ratio": mean(ratios),
        "ratio_without_head": without_head(case, result["ours"], result["peer_figures"]),
        "spread": (max(ratios) - min(ratios)) / 2,
        "step_seconds": {side: [run["step_seconds"] for run in figures] for side, figures in runs.items()},
    }


def side_of(case: Case, side: str, runs: dict[str, list[dict]]) -> dict:
    """A side's part of the record."""
    figures = mean_of(runs[side])
    part = {f"{side}_mfu": figures["mfu_full"], f"{side}_gib": figures["peak_gib"]}
    part |= {f"{side}_mfu_weights": figures["mfu_weights"]} if case.tunes else {}
    return part | {"ours" if side == "ours" else "peer_figures": figures}


def try_modes(case: Case, run: Callable[..., dict], steps: int) -> dict[str, float | str]:
    """Seconds of a step in each of the peer's modes, or the last line of its error; without memory also with the other
    loss. Raises Skipped."""
    tried: dict[str, float | str] = {}
    for name in modes_of(case.size("tp"), case.size("cp")):
        for mode in (name, f"{name}+native-loss"):
            try:
                tried[mode] = run("peer", steps, mode)["step_seconds"]
            except Failed as error:
                tried[mode] = "out of memory" if isinstance(error, OutOfMemory) else str(error).splitlines()[-1][:200]
            if tried[mode] != "out of memory":
                break
    return tried


def without_head(case: Case, ours: dict, peer: dict) -> float | None:
    """The ratio of the sides' times without what the products of the head take alone; None in pipelines, where one rank
    has them, and where the peer runs another case."""
    head = ours.get("floor_head_seconds")
    if head is None or case.peer or case.size("pp") > 1:
        return None
    return (peer["step_seconds"] - head) / (ours["step_seconds"] - head)


def mean_of(runs: list[dict]) -> dict:
    """Average the numbers of a side's runs; memory is that of the run that took most."""
    floats = [key for key, value in runs[0].items() if isinstance(value, float)]
    numbers = {key: [run[key] for run in runs if key in run] for key in floats}
    peaks = {key: max(values) for key, values in numbers.items() if key in ("peak_gib", "outside_gib")}
    return runs[0] | {key: mean(values) for key, values in numbers.items()} | peaks


def line(result: dict) -> str:
    """The one line of a case; a figure is nan where it is not known, as MFU is on a device of unknown peak."""
    names = ["ours_mfu", "peer_mfu", "ratio", "spread", "ours_gib", "peer_gib"]
    names += [name for name in ("ratio_without_head", "ours_mfu_weights", "peer_mfu_weights") if result.get(name)]
    figures = [
        f"{name}={math.nan if (value := result.get(name)) is None else value:.{3 if name in THOUSANDTHS else 2}f}"
        for name in names
    ]
    mode = [f"mode={result['mode']}"] if result.get("mode") else []
    lacking = [] if result["peer_figures"] else ["peer is out of memory"]
    return " ".join([f"case={result['case']}", *figures, *mode, *lacking])


if __name__ == "__main__":
    sys.exit(main())
