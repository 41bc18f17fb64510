"""How the host's work grows with the size of a job, on a CPU: `python benchmarks/host.py`.

Measured, each on what a single rank does: building its part of GPT-3 175B (on torch's meta device: shapes without
memory), a pipeline schedule of 10,000 microbatches, and a loader's step in a job of 2,048 ranks. Prints a line each
and appends records of kind "host" to the results. Memory is what Python and numpy hold at the peak, by tracemalloc,
in a second run that is not timed. Left out: kernel launches, which `step.py --profile` shows as idle time.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

from benchmarks import record
from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.config.sizes import stage_layers
from minitron.data.loader import Loader
from minitron.data.mock import MockDataset
from minitron.model.gpt import GPT
from minitron.parallel.layer_context import make_layer_context
from minitron.pipeline.schedule import make
from minitron.planner.dryrun import kernels

RECIPE = str(record.ROOT / "configs" / "gpt3_175b.yaml")
RANKS, MICROBATCHES = 2048, 10_000


def build_rank(recipe: str) -> list[GPT]:
    """The chunks of the first rank of the recipe's layout."""
    cfg = cli.load([recipe])
    p = cfg.parallel
    mesh = Mesh.offline(p.tp * p.pp * p.cp, 0, tp=p.tp, pp=p.pp, cp=p.cp, device="meta")
    context = make_layer_context(cfg, mesh, kernels.choose(cfg))
    stages = stage_layers(cfg.model.num_layers, p.pp, p.vp, p.layers_per_stage)
    mine, last = range(0, len(stages), p.pp), len(stages) - 1
    return [GPT(cfg, mesh, context, stages[i], first=i == 0, last=i == last) for i in mine]


def loader_step(recipe: str, ranks: int) -> Callable[[], list]:
    """A function that reads one step's microbatches (4 a rank) of the last rank of `ranks`; nothing is read ahead."""
    cfg = cli.load([recipe])
    p = cfg.parallel
    batch = 4 * cfg.train.micro_batch_size * cfg.dp(ranks)
    cfg = cli.load([recipe, f"train.global_batch_size={batch}"])
    mesh = Mesh.offline(ranks, ranks - 1, tp=p.tp, pp=p.pp, cp=p.cp)
    loader = Loader(MockDataset(cfg.model.vocab_size, cfg.train.seq_len, batch, cfg.train.seed), cfg, mesh)
    return lambda: loader.step(0, 0)


def cost(work: Callable[[], object]) -> dict[str, float]:
    """Seconds of one call, and MiB at its peak."""
    start = time.perf_counter()
    work()
    took = time.perf_counter() - start
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"seconds": took, "peak_mib": peak / 2**20}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    record.add_options(parser)
    args = parser.parse_args(argv)
    for what, work in {
        "build one rank of GPT-3 175B, tp 4, pp 8, vp 12": lambda: build_rank(RECIPE),
        f"schedule of {MICROBATCHES} microbatches, pp 8": lambda: make(8, 1, MICROBATCHES),
        f"schedule of {MICROBATCHES} microbatches, pp 8, vp 12": lambda: make(8, 12, MICROBATCHES),
        f"loader step of one of {RANKS} ranks, GPT-3 175B, 4 microbatches of 2048 tokens": loader_step(RECIPE, RANKS),
    }.items():
        entry = record.append(args, "host", {"what": what, **cost(work)})
        print(f"{what}: {entry['seconds']:.3f} s, {entry['peak_mib']:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
