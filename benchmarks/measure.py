"""What every measured program shares: its arguments, its clock and the figures it reports.

minitron and its peers read the same configuration, are timed by the same function and count the same operations, so a
ratio of two of them compares trainers and not benchmarks. A program prints one line for other programs,

    RESULT {"step_seconds": .., "tflops": .., "mfu_full": .., "peak_gib": .., ...}

or, where it cannot run, `SKIP reason`. Times are of whole optimizer steps, each begun by a barrier and ended when the
device has finished; the first ones warm up and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

import numpy as np
import torch
import torch.distributed as dist

from minitron.config import cli, flops
from minitron.config.schema import Config, changed
from minitron.data.gpt import Sample

WARMUP = 3
SAMPLES = 64  # whose documents are counted
# What no peer's runner translates.
UNTRANSLATED = (
    "train.recompute",
    "precision.dtype",
    "model.attention_dropout",
    "model.hidden_dropout",
    "model.head_dim",
    "model.qkv_bias",
    "model.qk_norm",
    "parallel.cp_style",
    "parallel.schedule",
    "data.separate_documents",
)


def arguments(description: str, argv: list[str] | None, *add_options: Callable) -> tuple[Config, argparse.Namespace]:
    """The configuration and the options of a measured program; add_options(parser) adds options of its own."""
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("config", nargs="*", metavar="CONFIG.yaml | section.key=value", help="as for minitron.pretrain")
    parser.add_argument("--steps", type=int, default=12, help=f"steps, of which {WARMUP} warm up (default 12)")
    for add in add_options:
        add(parser)
    args = parser.parse_intermixed_args(argv)
    with cli.user_errors():
        if args.steps <= WARMUP:
            raise ValueError(f"--steps {args.steps} are all warm-up; use {WARMUP + 1} or more")
        cfg = cli.load(args.config)
    return changed(cfg, train=dict(steps=max(cfg.train.steps, args.steps))), args


def check_translated(cfg: Config, peer: str, tunes: bool = False) -> None:
    """Raises ValueError for a key that the runners of peers do not translate and that is not at its default.

    tunes: this one knows fine-tuning and its documents; the others skip it.
    """
    if cfg.finetune.kind is not None and not tunes:
        raise skip(f"{peer} is measured in pretraining only, not with finetune.kind={cfg.finetune.kind}")
    unknown = [key for key in UNTRANSLATED if not (tunes and key == "data.separate_documents")]
    if changed := [key for key in unknown if attrgetter(key)(cfg) != attrgetter(key)(Config())]:
        raise ValueError(f"{', '.join(changed)} is not what the {peer} runner knows; leave it at its default")


def choose_device() -> tuple[torch.device, tuple[int, int] | None]:
    """This rank's device, the process' current one, and its CUDA capability (None on a CPU)."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), None
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device, torch.cuda.get_device_capability(device)


def skip(reason: str) -> SystemExit:
    """Raise this where a program cannot run here through no mistake of the user."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"SKIP {reason}", flush=True)
    return SystemExit(0)


def median_seconds(step: Callable[[int], object], steps: int, device: torch.device) -> float:
    """Median time of step(i), i = 0 ... steps - 1, without the warm-up. Collective over the world."""
    times = [seconds(partial(step, i), device) for i in range(steps)]
    return highest(statistics.median(times[WARMUP:]), device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """From a barrier to the end of work() on this rank's device. Collective over the world."""
    _wait(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def squared_lengths(cfg: Config, samples: Sequence[Sample]) -> float | None:
    """Of a sample's documents, the mean over the first ones; None where a sample is one document."""
    if not cfg.data.separates:
        return None
    some = [samples[i] for i in range(min(len(samples), SAMPLES))]
    return sum(
        float(np.square(np.diff([0, *x.starts[x.starts < cfg.train.seq_len], cfg.train.seq_len])).sum()) for x in some
    ) / len(some)


def figures(
    cfg: Config, step_seconds: float, world: int, device: torch.device, squares: float | None = None, shared: int = 0
) -> dict:
    """Return time, TFLOP/s (`full`), MFU in percent by all countings (None on a device of unknown peak) and memory.

    Memory is the peak of torch's allocator, and what is taken beside it. shared: the bytes that this rank shares with
    others, which count in the peak, although torch's allocator has none of them.
    squares: of the documents in a sample. The counting `weights` leaves attention's scores out, as NVIDIA's recipe for
    fine-tuning Llama 3 8B does.
    """
    m, t, frozen = cfg.model, cfg.train, cfg.finetune.kind == "lora"
    name, share = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", flops.FROZEN if frozen else 1
    per_sample = {
        "full": share * flops.full(m, t.seq_len, squares),
        "causal": share * flops.causal(m, t.seq_len, squares),
        "weights": share * flops.full(m, t.seq_len, 0.0),
        "hardware": flops.hardware(m, t.seq_len, recompute=t.recompute != "none", frozen=frozen),
    }
    tflops = {k: flops.tflops_per_gpu(v * t.global_batch_size, step_seconds, world) for k, v in per_sample.items()}
    peak = flops.peak_tflops(name, fp8=cfg.precision.fp8 != "none")
    memory = shared + (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0)
    return {
        "gpu": name,
        "world": world,
        "gradients": cfg.optimizer.accumulates_in,
        "step_seconds": step_seconds,
        "tflops": tflops["full"],
        "tokens_per_second_per_gpu": t.global_batch_size * t.seq_len / step_seconds / world,
        **{f"mfu_{k}": 100 * v / peak if peak else None for k, v in tflops.items()},
        "peak_gib": highest(memory, device) / 2**30,
        "outside_gib": highest(outside(device) - shared, device) / 2**30,
    }


def outside(device: torch.device) -> int:
    """Return the bytes of this GPU that are taken, but not by torch's allocator: by CUDA, libraries and NCCL."""
    synchronize(device)
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def report(result: dict) -> None:
    """Print the line that `compare.py` reads, once per job."""
    if int(os.environ.get("RANK", 0)) == 0:
        print("RESULT", json.dumps(result), flush=True)


def highest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    number = torch.tensor(value, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return number.item()


def _wait(device: torch.device) -> None:
    synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
