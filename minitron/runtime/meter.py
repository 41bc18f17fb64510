"""Figures of a step, read while the next one runs.

Problem: to print a loss the host has to wait for the device, and a host that waits queues no work. The idea: when
step n has been queued, begin to copy its figures to the host; when step n + 1 has been queued, wait for that copy and
log it. A step's time is taken on the device, between the copies of two steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Mesh
from minitron.runtime.log import Iteration, Log

GIB = 2**30


class Watcher(Protocol):
    """Whoever looks at the figures of every step."""

    def saw(self, it: Iteration) -> None: ...


class Stall(Protocol):
    """Something that a step waited for; `seconds` is asked when the device is through with the step."""

    def seconds(self) -> float: ...


class Meter:
    """Logs the figures of each step, device tensors, one step late. Collective over the world.

    watchers: whom each step's figures are handed to, after the log.
    """

    def __init__(self, log: Log, mesh: Mesh, *watchers: Watcher):
        self.log, self.mesh, self.watchers = log, mesh, watchers
        self.waiting: tuple[dict, Tensor, Mark, Sequence[Stall]] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin the next step's time now, so that it does not include an evaluation since the last step."""
        self.last = Mark(self.mesh.device)

    def step(self, values: Tensor, memory: tuple[int, int], stalls: Sequence[Stall] = (), **known) -> None:
        """Take the figures of a step that may still run, log those of the step before.

        values: loss, grad_norm, skipped, nan, loss_scale, float64 on the device and equal on all ranks. memory: bytes
        of the GPU at the peak, and now. stalls: the saves that the step waited for. known: the other fields of
        `Iteration` that the host has; squared_lengths and padding are those of this data rank, and missing if each
        sample is one document.
        """
        self.mesh.activity.begin("figures")
        extra = torch.zeros(4, dtype=values.dtype, device=values.device)
        if "padding" in known:
            extra[0].fill_(known["squared_lengths"])
            extra[1].fill_(known["padding"])
            all_reduce_(extra[:2], self.mesh.dp)
        if values.is_cuda:
            extra[2].fill_(memory[0] / GIB)
            extra[3].fill_(memory[1] / GIB)
            known |= {"memory_gib": 0.0, "allocated_gib": 0.0}
        all_reduce_(extra[2:], self.mesh.world, op=dist.ReduceOp.MAX)
        host = torch.cat([values, extra]).to("cpu", non_blocking=True)
        copied = Mark(values.device)
        self.flush()
        self.waiting = known, host, copied, stalls
        if not values.is_cuda:  # a CPU has finished the step already
            self.flush()

    def flush(self) -> None:
        """Log the step that is still waiting, if there is one."""
        if self.waiting is None:
            return
        (known, host, copied, stalls), self.waiting = self.waiting, None
        seconds, self.last = copied.seconds_since(self.last), copied
        *common, squares, padding, memory, allocated = host.tolist()
        figures = dict(zip(("loss", "grad_norm", "skipped", "nan", "loss_scale"), common, strict=True))
        measured = {"squared_lengths": squares, "padding": padding, "memory_gib": memory, "allocated_gib": allocated}
        known = {k: measured.get(k, v) for k, v in known.items()}
        stalled = min(seconds, sum(max(0.0, stall.seconds()) for stall in stalls))
        it = Iteration(**figures, **known, seconds=seconds, stall_seconds=stalled)
        self.log.iteration(it)
        for watcher in self.watchers:
            watcher.saw(it)


class Mark:
    """A moment in the device's work: an event of its stream, or the time on a CPU."""

    def __init__(self, device: torch.device):
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        else:
            self.time = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        """Wait until this moment has come, and return the seconds since `earlier`."""
        if self.event is None:
            return self.time - earlier.time
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000


class Pause(NamedTuple):
    """The time that the device had nothing to do between two moments at which the host was at the same place."""

    begin: Mark
    end: Mark

    def seconds(self) -> float:
        return self.end.seconds_since(self.begin)
