"""Measurements side by side, one a GPU, each in a process of its own that finds its libraries loaded.

Problem: a process imports torch and Transformer Engine for ten seconds, to measure for ten. But two measurements in one
process are not two: what the first leaves on the device and in a profiler is in the figures of the second, and one that
hangs or crashes ends them all. The idea: this process imports everything, never touches CUDA, and is forked for each.

    import, ask for GPUs through NVML    fork: GPU 0, row 1    fork: GPU 0, row 3    ...
                                         fork: GPU 1, row 2        fork: GPU 1, row 4    ...

One fork is made before, to see whether it gets a GPU and a profile. If some library has initialised CUDA as it was
imported it gets none, and every child loads all by itself.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch

from benchmarks import record, shares
from benchmarks.programs import Failed, Skipped, reported
from minitron.runtime.environment import DEFAULTS

FORK = multiprocessing.get_context("fork")
LOADED_LATE = "minitron.kernels.fp8_te", "minitron.kernels.fused"
PROBE_SECONDS, POLL_SECONDS = 60, 0.05
PORT_TAKEN, TRIES = "EADDRINUSE", 3  # what torch's store writes of a port that was free when it was chosen


@dataclass
class Child:
    """A measurement that runs: a process for each of its GPUs, which all write to `output`."""

    task: Any
    processes: list[Any]
    gpus: list[str | None]
    output: Path
    begun: float
    ends: float
    again: Callable[[], None] | None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def over(self) -> bool:
        """Whether all have ended, or one has failed, or the time is up."""
        codes = [process.exitcode for process in self.processes]
        return None not in codes or any(codes) or time.monotonic() >= self.ends


class Workers:
    """As many measurements at a time as there are GPUs; one without GPUs. each: how many share a GPU."""

    def __init__(self, count: int | None = None, each: int = 1):
        found = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(found)))).split(",")[:found]
        self.free: list[str | None] = [*(visible or [None] * (count or 1))][:count] * each
        self.count = len(self.free)
        self.children: list[Child] = []
        self._folder = tempfile.TemporaryDirectory()
        load()
        self.fresh = found > 0 and not forks_get_gpus(self.free[0])
        if self.fresh:
            print("a forked process gets no GPU here: each measurement loads its libraries by itself", flush=True)

    def __enter__(self) -> Workers:
        self._before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # of `timeout`, say
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            end(child)
        self._folder.cleanup()
        signal.signal(signal.SIGTERM, self._before)

    def start(
        self,
        task: Any,
        program: str,
        arguments: Sequence[str],
        gpus: int,
        seconds: float,
        environment: Mapping[str, str] = MappingProxyType({}),
        tries: int = TRIES,
    ) -> None:
        """Run a program of this folder with `gpus` of the free GPUs, on each as a rank, with torchrun's variables. One
        whose port is taken between its choice and its use is run again, `tries` times in all."""
        mine, self.free = self.free[:gpus], self.free[gpus:]
        output = Path(self._folder.name) / f"{time.monotonic_ns()}.txt"
        job = {} if mine[0] is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))}
        job |= {"WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = []
        for rank in range(gpus):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(gpus)}
            entered = program, list(arguments), DEFAULTS | os.environ | environment | job | ranks, output
            processes.append(FORK.Process(target=enter, args=(*entered, self.fresh), daemon=True))
            processes[-1].start()
        now = time.monotonic()
        options = task, program, arguments, gpus, seconds, environment, tries - 1
        again = partial(self.start, *options) if tries > 1 else None
        self.children.append(Child(task, processes, mine, output, now, now + seconds, again))

    def next(self) -> tuple[Child, dict | Exception]:
        """Wait for one to end; return it with its figures, or with why there are none."""
        while not (over := [child for child in self.children if child.over()]):
            time.sleep(POLL_SECONDS)
        child = over[0]
        late = time.monotonic() >= child.ends
        end(child)
        self.children.remove(child)
        self.free += child.gpus
        text = child.output.read_text(encoding="utf-8", errors="replace") if child.output.exists() else ""
        status = next((p.exitcode for p in child.processes if p.exitcode), 0)
        if status and PORT_TAKEN in text and child.again:
            child.again()
            return self.next()
        try:
            return child, reported(text, str(child.task), status)
        except (Failed, Skipped) as error:
            return child, Failed(f"took longer than {child.seconds:.0f} s") if late else error


def end(child: Child) -> None:
    """End what still runs, at once: a rank that hangs in CUDA hears no signal but this."""
    for process in child.processes:
        if process.exitcode is None:
            process.kill()
        process.join()


def enter(program: str, arguments: list[str], environment: dict[str, str], output: Path, fresh: bool) -> None:
    """Become the measurement, in a forked process."""
    file = open(output, "a", buffering=1, encoding="utf-8")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    os.chdir(record.ROOT)
    os.environ.update(environment)
    if fresh:
        os.execv(sys.executable, [sys.executable, program, *arguments])
    sys.argv = [program, *arguments]
    importlib.import_module(program.removesuffix(".py").replace("/", ".")).main(arguments)


def load() -> None:
    """Import what a measurement would import when it needs it, with GPUs hidden: some libraries look for them."""
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        for name in LOADED_LATE:
            with suppress(Exception):  # whatever a library raises that is not there: who needs it says so
                importlib.import_module(name)


def forks_get_gpus(gpu: str | None) -> bool:
    """Whether a process forked from this one has CUDA and sees its kernels in a profile."""

    def probe() -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        kernels = shares.record(lambda _: torch.ones(1, device="cuda").add_(1), 1, warm_up=0)
        raise SystemExit(not kernels)

    return succeeds(probe, PROBE_SECONDS)


def succeeds(work: Callable[[], object], seconds: float) -> bool:
    """Whether work() ends well in a forked process, and in time."""
    process = FORK.Process(target=work, daemon=True)
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode == 0


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
