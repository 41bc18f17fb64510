"""Run some steps under a profiler of time or memory.

Problem: a trace of a whole run is too large to open, and its first steps, which compile and allocate, are not like the
others. The idea: `profiled` is the range of steps itself. It starts the profiler before profile.start_step and stops it
after profile.end_step, only on profile.ranks:

    for step in profiled(range(1, 51), cfg, mesh, log):     profile.kind=torch profile.start_step=41 profile.end_step=43
        ...                                                 -> log.dir/profile-rank-0.json and .txt

    nsys    cudaProfilerStart and Stop, and one NVTX range a step; the trace is nsys' own:
            nsys profile -s none -t nvtx,cuda --capture-range=cudaProfilerApi --capture-range-end=stop torchrun ...
    torch   a Chrome trace (ui.perfetto.dev opens it) and a table of the operations that took longest
    memory  a snapshot of the allocator, with the Python stack of each allocation, for pytorch.org/memory_viz

The host runs ahead of a GPU. So it waits for the device before the first and after the last of these steps, and nowhere
else. The profile has all of their work and no other work. A loop that ends early, for example out of memory, leaves
the profile up to there. If the disk is full, the profile is lost and training continues.
Left out: NVTX ranges of single operations, which would slow the measured steps.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch

from minitron.comm.mesh import Mesh
from minitron.config.schema import Config, ProfileConfig
from minitron.runtime.log import Log

TABLE_ROWS = 40
MEMORY_EVENTS = 1_000_000  # the last allocations and frees that a snapshot holds

# Of a started profiler: mark(name) is a context that marks a step in the trace; stop() returns where the profile is.
Started = tuple[Callable[[str], AbstractContextManager], Callable[[], str]]


def check(profile: ProfileConfig, device: torch.device) -> None:
    """Raise ValueError if this device has no such profiler."""
    if device.type != "cuda" and profile.kind in ("nsys", "memory"):
        raise ValueError(f"profile.kind={profile.kind} watches a GPU, and there is none; use profile.kind=torch")


def profiled(steps: range, cfg: Config, mesh: Mesh, log: Log) -> Iterator[int]:
    """Yield the same steps; run those of cfg.profile under its profiler, on the ranks of cfg.profile."""
    p = cfg.profile
    inside = range(max(steps.start, p.start_step), min(steps.stop, p.end_step + 1))
    if p.kind == "none" or mesh.rank not in p.ranks or not inside:
        yield from steps
        return
    yield from range(steps.start, inside.start)
    _wait(mesh.device)
    stem = Path(cfg.log.dir or ".").expanduser() / f"profile-rank-{mesh.rank}"
    mark, stop = {"nsys": _nsys, "torch": _torch, "memory": _memory}[p.kind](stem, mesh.device)
    try:
        for step in inside:
            with mark(f"step {step}"):
                yield step
    finally:
        mesh.activity.begin("profile")
        _wait(mesh.device)
        try:
            where = stop()
        except OSError as error:
            with suppress(OSError):
                for path in stem.parent.glob(f"{stem.name}.*"):
                    path.unlink()
            where = f"{stem}.* cannot be written: {(error.strerror or str(error)).lower()}; training goes on"
        log.info(f"profiled iterations {inside.start} to {step}: {where}", mesh.rank)
    yield from range(inside.stop, steps.stop)


def _nsys(*_) -> Started:
    def stop() -> str:
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
        return "in the report of nsys, if that started this run"

    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    return torch.cuda.nvtx.range, stop


def _torch(stem: Path, device: torch.device) -> Started:
    def stop() -> str:
        profiler.stop()
        by = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=TABLE_ROWS)
        Path(f"{stem}.txt").write_text(table, encoding="utf-8")
        Path(f"{stem}.json").write_bytes(b"")
        profiler.export_chrome_trace(f"{stem}.json")
        with open(f"{stem}.json", "rb") as trace:  # the library that writes it does not report a full disk
            trace.seek(-min(16, os.fstat(trace.fileno()).st_size), os.SEEK_END)
            if not trace.read().rstrip().endswith(b"}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return f"{stem}.json for ui.perfetto.dev, {stem}.txt"

    kinds = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[kinds.CPU] if device.type == "cpu" else [kinds.CPU, kinds.CUDA])
    profiler.start()
    return torch.profiler.record_function, stop


def _memory(stem: Path, _) -> Started:
    def stop() -> str:
        try:
            torch.cuda.memory._dump_snapshot(f"{stem}.pickle")
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return f"{stem}.pickle for pytorch.org/memory_viz"

    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    return nullcontext, stop


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
