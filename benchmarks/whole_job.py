"""A job itself: `torchrun --nproc-per-node N benchmarks/whole_job.py CONFIG.yaml [section.key=value ...] [--corpus]`.

benchmarks/step.py measures steps. This runs minitron.pretrain or minitron.finetune, as a user does, to the last step,
and reports what the run has logged: median seconds of a step after the graphs are recorded, TFLOP/s and MFU as the log
counts them, the highest rank's memory, the first loss and the mean of the last ten. On a GPU with graphs memory is all
that is taken of the device, NCCL's included.

Fine-tuning that names no base begins with initial weights: its losses say nothing, its steps take as long.

`--corpus` trains on the built-in corpus instead of the configuration's data: cut into the corpus's own 4,096 tokens,
with the model as it is. `--results FILE` appends a record.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, median
from unittest import mock

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder
    from minitron.runtime.environment import set_defaults

    set_defaults(os.environ)  # before torch loads

from benchmarks import measure, record
from minitron import pretrain
from minitron.checkpoint.load import ResumePoint
from minitron.config import cli
from minitron.data.cache import Cache
from minitron.data.corpus import build_corpus
from minitron.pipeline.replay import WARM_UP

TOKENS = 4096  # of the corpus
LAST = 10  # steps whose loss is the last one


def main(argv: list[str] | None = None) -> dict | None:
    """Run the job on this rank. Return the figures on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", nargs="*", metavar="CONFIG.yaml | section.key=value", help="as for minitron.pretrain")
    parser.add_argument("--corpus", action="store_true", help="train on the built-in corpus")
    record.add_options(parser, results=None)
    args = parser.parse_intermixed_args(argv)
    folder = Path(tempfile.gettempdir()) / f"job-{os.getppid()}-{os.environ.get('MASTER_PORT', 0)}"  # of all ranks
    with cli.user_errors():
        cfg, data = cli.load(args.config), []
        if args.corpus:
            prefix = build_corpus(Cache(os.path.expanduser(cfg.data.cache_dir)), TOKENS).prefix
            data = ["data.source=indexed", f"data.paths=[{prefix}]", "data.document_length=null"]
    no_base = cfg.finetune.kind is not None and cfg.finetune.base is None and cfg.checkpoint.load is None
    begin = {"agree_on_start": lambda *_, **__: ResumePoint()} if no_base else {}
    try:
        with mock.patch.multiple(pretrain, **begin) if begin else nullcontext():
            pretrain.main([*args.config, *data, f"log.dir={folder}"], finetune=cfg.finetune.kind is not None)
        if int(os.environ.get("RANK", 0)) > 0:
            return None
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    finally:
        if int(os.environ.get("RANK", 0)) == 0:
            shutil.rmtree(folder, ignore_errors=True)
    world = int(os.environ.get("WORLD_SIZE", 1))
    result = identity(args.config, world, args.corpus) | figures_of_steps(
        [row for row in rows if row["kind"] == "step"]
    )
    print(summary(result))
    if args.results:
        record.append(args, "job", result)
    measure.report(result)
    return result


def identity(config: list[str], world: int, corpus: bool) -> dict:
    """Return what two records of one job have in common."""
    gradients = cli.load(config).optimizer.accumulates_in
    return {"kind": "job", "config": list(config), "world": world, "corpus": corpus, "gradients": gradients}


def figures_of_steps(rows: list[dict]) -> dict:
    """Return the figures of a run's steps. Those that compile, warm up or record count for the loss alone."""
    timed = rows[min(WARM_UP + 2, len(rows) // 2) :]
    memory = [row["memory_gib"] for row in rows if row["memory_gib"] is not None]
    return {
        "steps": len(rows),
        "step_seconds": median(row["step_seconds"] for row in timed),
        "tflops": median(row["tflops"]["full"] for row in timed),
        "mfu": median(row["mfu"] for row in timed) if timed[0]["mfu"] is not None else None,
        "memory_gib": max(memory, default=None),
        "first_loss": rows[0]["loss"],
        "last_loss": fmean(row["loss"] for row in rows[-LAST:]),
    }


def summary(result: dict) -> str:
    memory = "" if result["memory_gib"] is None else f"   {result['memory_gib']:.1f} GiB"
    return (
        f"step {result['step_seconds']:.4f} s   {result['tflops']:.1f} TFLOP/s per GPU{memory}   "
        f"loss {result['first_loss']:.4f} -> {result['last_loss']:.4f} in {result['steps']} steps"
    )


if __name__ == "__main__":
    main()
