"""Measure what saving and resuming cost: `python benchmarks/checkpoint.py [CONFIG.yaml | section.key=value ...]`.

Also under torchrun. Each rank starts three processes, one after another, so that every run begins from nothing:

    saving      trains, then saves while it goes on training, then saves and waits
    fresh       a run's start, up to the end of its first step
    resumed     the same from the checkpoint, whose files have left the page cache; then it loads again, from that cache

Prints a summary and appends a record of kind "checkpoint" to the results. All times are of the slowest rank, memory is
that of the largest. Memory fresh and resumed is the peak up to the end of the first step: of the host, as Linux counts
it with the pages of mapped files, and of the GPU by torch's allocator. What is written goes to a temporary folder in
`--dir`, which has to have room for two checkpoints, and is removed. Left out: what other jobs on the same disk take.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import measure, record
from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.load import ResumePoint, find_resume_point, restore
from minitron.checkpoint.reader import Reader
from minitron.checkpoint.save import Checkpointer
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.schema import Config, changed
from minitron.data.build import Datasets
from minitron.data.loader import Loader
from minitron.kernels import kernels
from minitron.pretrain import build_data, make_mesh, open_weights
from minitron.runtime.log import Log
from minitron.runtime.signals import Listener
from minitron.runtime.status import RunError
from minitron.train import build, keep_collector_out

LEGS = ("saving", "fresh", "resumed")
SAVES = 3  # of which each figure is the median


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="on the disk to measure (default: .)")
    parser.add_argument("--leg", choices=LEGS, help=argparse.SUPPRESS)  # what a process of ours is started as,
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)  # and when, by time.time()
    record.add_options(parser)


def main(argv: list[str] | None = None) -> dict | None:
    """Runs the measurement on this rank, and returns its record on the first one."""
    argv = sys.argv[1:] if argv is None else argv
    cfg, args = measure.arguments(__doc__, argv, add_options)
    if args.leg:
        return measure.report(leg(cfg, args))
    with cli.user_errors():
        if not args.dir.is_dir():
            raise ValueError(f"--dir {args.dir} is no directory; name one on the disk to measure")
    busy = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]}  # others' work, which a CPU's figures show
    together, first = int(os.environ.get("WORLD_SIZE", 1)) > 1, int(os.environ.get("RANK", 0)) == 0
    if together:
        dist.init_process_group("gloo")
    results, dropped = {}, False
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.dir) if first else nullcontext() as own:
        folder = Path(_of_first(own))
        for name in LEGS:
            if name == "resumed":
                dropped = drop_from_page_cache(folder)
            results[name] = launch([*argv, "--leg", name, "--dir", str(folder)], _meeting_point() if together else {})
        if together:
            dist.barrier()  # nobody needs the folder any more
            dist.destroy_process_group()
    if not first:
        return None
    entry = record.append(args, "checkpoint", figures(results, dropped) | busy)
    print(summary(entry))
    return entry


def figures(results: dict[str, dict], dropped: bool) -> dict:
    """What the legs reported, as rates and side by side. dropped: the first load had to read the disk."""
    saving, fresh, resumed = (results[name] for name in LEGS)
    size = saving["bytes"] / 1e9
    both = {
        f"{what}_{name}": results[name][what]
        for what in ("start_seconds", "host_gib", "gpu_gib")
        for name in ("fresh", "resumed")
    }
    return {
        "model": saving["model"],
        "world": saving["world"],
        "state_gb": size,
        **{
            key: saving[key]
            for key in (
                "step_seconds",
                "blocked_seconds",
                "stall_seconds",
                "step_seconds_while_writing",
                "gpu_gib_more_by_saving",
            )
        },
        "save_gb_per_second": size / saving["save_seconds"],
        "load_gb_per_second_from_disk": size / resumed["load_seconds"] if dropped else None,
        "load_gb_per_second_from_cache": size / resumed["load_again_seconds"],
        **both,
    }


def summary(entry: dict) -> str:
    def value(key: str, unit: str) -> str:
        return f"{entry[key]:.3f} {unit}" if entry[key] is not None else "unknown"

    return (
        f"{entry['model']}\n{entry['state_gb']:.2f} GB on disk: save {value('save_gb_per_second', 'GB/s')}, load "
        f"{value('load_gb_per_second_from_disk', 'GB/s')}, "
        f"{value('load_gb_per_second_from_cache', 'GB/s')} from the page cache\n"
        f"step {value('step_seconds', 's')}; with a save before it {value('stall_seconds', 's')} longer, of which "
        f"the call takes {value('blocked_seconds', 's')}; while files are written "
        f"{value('step_seconds_while_writing', 's')}\n"
        f"first step done after {value('start_seconds_fresh', 's')} fresh, {value('start_seconds_resumed', 's')} "
        f"resumed; host {value('host_gib_fresh', 'GiB')} and {value('host_gib_resumed', 'GiB')}, GPU "
        f"{value('gpu_gib_fresh', 'GiB')} and {value('gpu_gib_resumed', 'GiB')}, "
        f"{value('gpu_gib_more_by_saving', 'GiB')} more by saving"
    )


# ---- one run, in a process of its own --------------------------------------------------------------------------------


class Run:
    """One rank's part of a run from its start to the end of its first step, and what that took."""

    def __init__(self, cfg: Config, args: argparse.Namespace, mesh: Mesh, start: ResumePoint, data: Datasets, log: Log):
        self.cfg, self.mesh, self.start, self.trainer = cfg, mesh, start, build(cfg, mesh)
        load_seconds = self.load()
        keep_collector_out()
        self.saves = Checkpointer(cfg, self.trainer.state, data.info, log, start.step)
        self.loader = Loader(data.train, cfg, mesh)
        self.step(0)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        taken = time.time() - args.started
        gpu = _gpu_gib(mesh.device)
        self.figures = {
            "start_seconds": measure.highest(taken, mesh.device),
            "load_seconds": load_seconds,
            "host_gib": measure.highest(_host_gib(), mesh.device),
            "gpu_gib": gpu,
            "model": self.trainer.describe(),
            "world": mesh.world.size,
        }

    def step(self, i: int) -> None:
        batch = i % self.cfg.train.steps * self.cfg.train.global_batch_size
        self.trainer.step(self.loader.step(batch, i), self.cfg.optimizer.lr)

    def seconds(self, work) -> float:
        return measure.highest(measure.seconds(work, self.mesh.device), self.mesh.device)

    def load(self) -> float:
        return self.seconds(lambda: restore(self.start, self.trainer.state))


def leg(cfg: Config, args: argparse.Namespace) -> dict:
    """One of the three runs on this rank: its figures."""
    rank, world, local_rank = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    device, capability = measure.choose_device()
    cfg = changed(
        cfg,
        checkpoint=dict(
            dir=str(args.dir), keep=1, resume=args.leg == "resumed", resume_step=None, async_save=True, load=None
        ),
    )
    with cli.user_errors(quiet=local_rank > 0):
        rules.check(cfg, world, capability)
        kernels.choose(cfg, device)
        start = find_resume_point(cfg, open_weights)
        data = build_data(cfg, start)
    with Log(cfg, rank, world) as log, cli.user_errors(RunError, quiet=rank > 0):
        run = Run(cfg, args, make_mesh(cfg, world, device, Listener(os.environ)), start, data, log)
        if args.leg == "saving":
            run.figures |= save_figures(run, args.steps)
        elif args.leg == "resumed":
            run.figures["load_again_seconds"] = run.load()
        run.loader.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return run.figures


def save_figures(run: Run, steps: int) -> dict:
    """Steps alone, after a save and while its files are written; then a save alone. Collective over the world."""
    device, saves = run.mesh.device, run.saves
    plain, before = measure.median_seconds(run.step, steps, device), _gpu_gib(device)
    blocked, stalls, writing = [], [], []

    def save_and_step() -> None:
        began = time.perf_counter()
        saves.save(len(blocked) + 1, 0)
        blocked.append(time.perf_counter() - began)
        run.step(0)

    for _ in range(SAVES):
        stalls.append(run.seconds(save_and_step) - plain)
        while measure.highest(not saves.running.done(), device):
            writing.append(run.seconds(lambda: run.step(0)))
    after, last = _gpu_gib(device), SAVES + 1
    alone = run.seconds(lambda: (saves.save(last, 0), saves.wait()))
    if saves.shared.saved != last:
        raise CheckpointError(f"{run.cfg.checkpoint.dir} did not take the checkpoint, for the reason given above")
    return {
        "step_seconds": plain,
        "stall_seconds": statistics.median(stalls),
        "save_seconds": alone,
        "blocked_seconds": measure.highest(statistics.median(blocked), device),
        "step_seconds_while_writing": statistics.median(writing) if writing else None,
        "gpu_gib_more_by_saving": after - before if after is not None else None,
        "bytes": sum(file["bytes"] for file in Reader(run.cfg.checkpoint.dir).files.values()),
    }


def _gpu_gib(device: torch.device) -> float | None:
    """The peak of all ranks so far, None on CPUs."""
    if device.type != "cuda":
        return None
    return measure.highest(torch.cuda.max_memory_allocated(device), device) / 2**30


def _host_gib() -> float:
    """The peak of this process so far; unlike getrusage's, without that of the process that started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20


# ---- processes and the page cache ------------------------------------------------------------------------------------


def launch(arguments: list[str], environment: dict[str, str]) -> dict | None:
    """Run this program with these arguments: what it reported, None on all ranks but the first."""
    command, result = [sys.executable, __file__, *arguments, "--started", str(time.time())], None
    kept = {name: value for name, value in os.environ.items() if not (environment and name.startswith("TORCHELASTIC"))}
    with subprocess.Popen(command, env=kept | environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
            else:
                print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(process.returncode)
    return result


def _of_first(value: object) -> object:
    """The value of the first rank, on all."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def _meeting_point() -> dict[str, str]:
    """Where the processes that the ranks start find each other: torchrun's own is taken by the ranks."""
    with socket.socket() as free:
        free.bind(("", 0))
        return {"MASTER_PORT": str(_of_first(free.getsockname()[1]))}


def drop_from_page_cache(folder: Path) -> bool:
    """Whether this node has forgotten the files below, so that a load must read the disk."""
    files = list(folder.rglob("*.safetensors"))
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return all(cached_share(path) < 0.01 for path in files)  # the system may keep single pages


def cached_share(path: Path) -> float:
    """Of a file's pages, those that are in memory: asked of mincore, which reads none."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(content) // mmap.PAGESIZE), np.uint8)
        status = ctypes.CDLL(None).mincore(
            *(ctypes.c_void_p(n) for n in (content.ctypes.data, len(content), pages.ctypes.data))
        )
        del content  # or the file could not be unmapped
    assert status == 0, "mincore of a file of our own"
    return float((pages & 1).mean())


if __name__ == "__main__":
    main()
