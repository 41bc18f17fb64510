"""Measure minitron's own step: `torchrun --nproc-per-node N benchmarks/step.py CONFIG.yaml [section.key=value ...]`.

The step is the trainer's, with its loader, on the data that the configuration names. Prints the median step time,
TFLOP/s, MFU by four countings, the highest rank's memory, and the share of the floor: how much of the step the
matrix products and attention would take alone (floor.py). `--profile` adds the kernels that take longest, `--results
FILE` appends a record. Runs on CPUs too, where there are no MFU, memory and kernels.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch.distributed as dist

from benchmarks import floor, measure, record, shares
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.schema import Config
from minitron.data.build import Datasets
from minitron.data.loader import Loader
from minitron.kernels.kernels import choose
from minitron.pipeline.replay import WARM_UP, Replay
from minitron.pretrain import build_data, make_mesh
from minitron.runtime.signals import Listener
from minitron.runtime.status import RunError
from minitron.train import build, keep_collector_out

PROFILED_STEPS = 2


def main(argv: list[str] | None = None) -> dict:
    """Runs the measurement on this rank and returns its figures."""
    cfg, args = measure.arguments(__doc__, argv, add_options)
    world = int(os.environ.get("WORLD_SIZE", 1))
    device, capability = measure.choose_device()
    with cli.user_errors(quiet=int(os.environ.get("LOCAL_RANK", 0)) > 0):
        rules.check(cfg, world, capability)
        shares.check_profile(args)
        choose(cfg, device)  # raises ValueError for what this device lacks
        data = build_data(cfg)
    with cli.user_errors(RunError):
        mesh = make_mesh(cfg, world, device, Listener(os.environ))
    result, work, kernels, description = run(cfg, args, mesh, data)
    if args.floor:
        alone = floor.floor_seconds(work, cfg, device)
        result |= {f"floor_{name}_seconds": measure.highest(value, device) for name, value in alone.items()}
        result["floor_share"] = measure.highest(alone["gemm"] + alone["attention"], device) / result["step_seconds"]
    of_ranks = gathered(shares.shares(kernels) if kernels else {}, mesh)
    if mesh.rank == 0:
        print(description, summary(result), sep="\n")
        if kernels:
            result["shares"] = of_ranks[0]
            # A rank whose GPU is faster than the others' waits for them: what the slowest does not hide is exposed.
            result["nccl_exposed"] = [share["nccl exposed"] for share in of_ranks]
            print(shares.table(kernels, PROFILED_STEPS))
            print("nccl exposed by rank: " + "  ".join(f"{100 * x:.1f} %" for x in result["nccl_exposed"]))
        if args.results:
            record.append(args, "step", result)
    measure.report(result)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def run(cfg: Config, args: argparse.Namespace, mesh: Mesh, data: Datasets) -> tuple:
    """Train: (figures, what the floor consists of, kernels of the profile, one line about the run)."""
    trainer, loader, batch = build(cfg, mesh), Loader(data.train, cfg, mesh), cfg.train.global_batch_size
    keep_collector_out()

    def step(i: int) -> None:
        trainer.step(loader.step(i % cfg.train.steps * batch, i), cfg.optimizer.lr)

    for i in range(WARM_UP + 1 if isinstance(trainer.runner, Replay) else 0):  # the last of these is recorded
        step(i)
    seconds = measure.median_seconds(step, args.steps, mesh.device)
    squares = measure.squared_lengths(cfg, data.train)
    result = measure.figures(cfg, seconds, mesh.world.size, mesh.device, squares, trainer.shared_bytes)
    if isinstance(trainer.runner, Replay):
        recorded = trainer.runner.training
        result |= {"graph": recorded is not None, "nodes": recorded.nodes if recorded else 0}
        result["capture_seconds"] = recorded.seconds if recorded else 0.0
    kernels = shares.record(lambda i: step(args.steps + i), PROFILED_STEPS) if args.profile else []
    loader.close()
    trainer.runner.close()
    return result, floor.step_work(trainer), kernels, trainer.describe()


def gathered(value: object, mesh: Mesh) -> list:
    """The ranks' values, in order."""
    values = [value] * mesh.world.size
    if mesh.world.size > 1:
        dist.all_gather_object(values, value)
    return values


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-floor", dest="floor", action="store_false", help="do not time products and attention alone"
    )
    shares.add_options(parser)
    record.add_options(parser, results=None)


def summary(result: dict) -> str:
    """The figures in two lines."""
    mfu = "  ".join(
        f"{k} {result[f'mfu_{k}']:.2f} %"
        for k in ("full", "causal", "weights", "hardware")
        if result[f"mfu_{k}"] is not None
    )
    floor_line = (
        f"\nfloor: GEMM {result['floor_gemm_seconds']:.4f} s + attention {result['floor_attention_seconds']:.4f} s = "
        f"{100 * result['floor_share']:.1f} % of the step"
        if "floor_share" in result
        else ""
    )
    return (
        f"step {result['step_seconds']:.4f} s   {result['tflops']:.1f} TFLOP/s per GPU   MFU {mfu or 'unknown'}   "
        f"{result['tokens_per_second_per_gpu']:.0f} tokens/s per GPU   {result['peak_gib']:.1f} GiB, "
        f"{result['outside_gib']:.1f} more outside of torch" + floor_line
    )


if __name__ == "__main__":
    main()
