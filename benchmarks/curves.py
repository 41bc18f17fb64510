"""Does minitron learn as Megatron-core does? `python benchmarks/curves.py CONFIG.yaml [section.key=value ...]`.

Both trainers start from the same weights and see the same batches in the same order, in bf16 and in FP8; minitron does
so once more from another seed, since two runs of one trainer differ, too. Each run is a row of kind "curve", and what
has no row is run, `--each N` on each GPU at a time; then the rows are compared, and `--plot FILE` draws them.

    minitron bf16    minitron fp8    minitron bf16, next seed    megatron bf16    megatron fp8

Megatron-core gets minitron's weights, batches, learning rate and weight decay (peers/megatron.py); loss, gradients,
clipping and update are its own. `--trainer` makes one of these runs in this process, under torchrun or not, and prints
its losses. How the text is made: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder
    from minitron.runtime.environment import set_defaults

    set_defaults(os.environ)  # before torch loads, here and so in all that is forked

import torch

from benchmarks import measure, record
from benchmarks.fp8_curves import losses
from benchmarks.workers import Workers
from minitron.config import cli, rules
from minitron.config.schema import Config
from tools import pictures

POINTS = 100  # of a recorded curve, each a mean
MOST_SECONDS = 1800  # after which a run counts as hanging


@dataclass(frozen=True)
class Run:
    """One curve to be."""

    config: tuple[str, ...]
    trainer: str
    fp8: str
    seed: int

    def __str__(self) -> str:
        return f"{self.trainer} {'bf16' if self.fp8 == 'none' else 'fp8'} seed {self.seed}"

    @property
    def identity(self) -> dict:
        return {"kind": "curve", **asdict(self), "config": list(self.config)}

    @property
    def keys(self) -> list[str]:
        backend = "te" if torch.cuda.device_count() else "torch"  # the same numbers, on a CPU
        return [
            *self.config,
            f"train.seed={self.seed}",
            f"precision.fp8={self.fp8}",
            *[f"precision.fp8_backend={backend}"] * (self.fp8 != "none"),
        ]


def main(argv: list[str] | None = None) -> dict | None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", nargs="+", metavar="CONFIG.yaml | section.key=value")
    parser.add_argument("--trainer", choices=("minitron", "megatron"), help="make one run in this process")
    parser.add_argument("--fp8", default="delayed", help="the FP8 recipe (default delayed)")
    parser.add_argument("--each", type=int, default=1, help="runs that share a GPU: small ones leave room (default 1)")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no run after these (default 3600)")
    parser.add_argument("--plot", help="draw the curves and their differences to this file")
    record.add_options(parser)
    args = parser.parse_intermixed_args(argv)
    with cli.user_errors():
        cfg = cli.load(args.config)
        rules.check(cfg, 1, measure.choose_device()[1] if args.trainer else None)
    if args.trainer:
        return train(cfg, args.trainer)
    runs = wanted(tuple(args.config), cfg.train.seed, args.fp8)
    make_missing(args, runs)
    found = {run: row for run in runs if (row := newest(run, record.rows(args.results)))}
    print(table(found))
    if args.plot and found:
        pictures.save(draw(found, cfg), Path(args.plot))
    return {str(run): row for run, row in found.items()}


def wanted(config: tuple[str, ...], seed: int, fp8: str) -> list[Run]:
    """The runs of a comparison; the first two are compared with all others."""
    trainers = "minitron", "megatron"
    runs = [Run(config, trainer, precision, seed) for trainer in trainers for precision in ("none", fp8)]
    return [*runs, Run(config, "minitron", "none", seed + 1)]


def newest(run: Run, rows: list[dict]) -> dict | None:
    return next((row for row in reversed(rows) if run.identity.items() <= row.items()), None)


def make_missing(args: argparse.Namespace, runs: list[Run]) -> None:
    """Make the runs that have no row, and append a row for each that ends."""
    missing = [run for run in runs if newest(run, record.rows(args.results)) is None]
    if not missing:
        return
    missing.sort(key=lambda run: run.trainer)  # Megatron-core's first, which take longest
    ends = time.monotonic() + args.seconds
    with Workers(each=args.each) as workers:
        while missing or workers.children:
            while missing and workers.free and time.monotonic() < ends:
                run = missing.pop(0)
                arguments = [*run.keys, "--trainer", run.trainer]
                workers.start(run, "benchmarks/curves.py", arguments, 1, MOST_SECONDS)
            if not workers.children:
                print(f"{args.seconds:.0f} s are over; call it again for {', '.join(map(str, missing))}")
                return
            child, result = workers.next()
            if isinstance(result, Exception):
                print(f"{child.task}: {result}", flush=True)
                continue
            print(f"{child.task}: last loss {result['last']:.4f}, {child.seconds:.0f} s", flush=True)
            record.append(args, "curve", child.task.identity | result)


def train(cfg: Config, trainer: str) -> dict:
    """Make one run in this process; report the means of its losses."""
    device, _ = measure.choose_device()
    if trainer == "megatron":
        from benchmarks.peers import megatron

        curve = megatron.losses(cfg, device)
    else:
        curve = losses(replace(cfg, train=replace(cfg.train, eval_every=0)), device)
    size = max(1, len(curve) // POINTS)
    result = {"steps": len(curve), "curve": [sum(part) / len(part) for part in parts(curve, size)]}
    result["last"] = sum(curve[-size:]) / len(curve[-size:])
    measure.report(result)
    return result


def parts(curve: list[float], size: int) -> list[list[float]]:
    return [curve[i : i + size] for i in range(0, len(curve), size)]


def table(found: dict[Run, dict]) -> str:
    """A line per run: the mean loss of the last hundredth, and its distance from minitron's own in bf16."""
    base = next((row for run, row in found.items() if (run.trainer, run.fp8) == ("minitron", "none")), None)
    lines = ["run                         steps  last loss   from minitron bf16: last, widest of a hundredth"]
    for run, row in found.items():
        line = f"{run!s:26s} {row['steps']:6d} {row['last']:10.4f}"
        if base is not None and row is not base:
            apart = [abs(a - b) for a, b in zip(row["curve"], base["curve"])]
            line += f"   {row['last'] - base['last']:+9.4f} {max(apart):9.4f}"
        lines.append(line)
    return "\n".join(lines)


def draw(found: dict[Run, dict], cfg: Config):
    """Losses over each other above, and below their distance from minitron's in bf16."""
    figure, (above, below) = pictures.new(5.0, 2, sharex=True, height_ratios=(2, 1))
    base = next(iter(found.values()))["curve"]
    for run, row in found.items():
        steps = [row["steps"] * (i + 0.5) / len(row["curve"]) for i in range(len(row["curve"]))]
        above.plot(steps, row["curve"], label=str(run))
        below.plot(steps, [a - b for a, b in zip(row["curve"], base)])
    batch = f"{cfg.train.global_batch_size * cfg.train.seq_len:,} tokens a step"
    title = f"{cfg.model.family}, {cfg.model.num_layers} layers of {cfg.model.hidden_size}, {batch}"
    above.set(ylabel="training loss, means of 1 % of the run", title=title)
    above.legend()
    below.set(xlabel="step", ylabel=f"minus {next(iter(found))}")
    return figure


if __name__ == "__main__":
    main()
