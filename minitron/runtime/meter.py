"""Figures of a step, read while the next one runs.

Problem: to print a loss the host has to wait for the device, and a host that waits queues no work. The idea: after
step n is queued, begin to copy its figures to the host. After step n + 1 is queued, wait for that copy and log it.
A step's time is measured on the device, between the copies of two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.comm.handle import DeviceTime
from minitron.comm.mesh import Mesh
from minitron.runtime.log import Iteration, Log
from minitron.runtime.observer import Observer, StepDone

GIB = 2**30
STEP_FIGURES = "loss", "grad_norm", "skipped", "nan", "loss_scale"
# The first two are sums over data ranks, the last two are maxima over all ranks.
RANK_FIGURES = "squared_lengths", "padding", "memory_gib", "allocated_gib"


class Meter(Observer):
    """Logs the figures of each step, on a GPU one step late. Collective over the world.

    memory(): bytes of the GPU in use at the peak, and now. stalls(): begin and end of each wait since the last call.
    observers: get the figures of each step, after the log.
    """

    def __init__(
        self,
        log: Log,
        mesh: Mesh,
        memory: Callable[[], tuple[int, int]],
        stalls: Callable[[], Sequence[tuple[DeviceTime, DeviceTime]]],
        observers: Sequence[Observer],
    ):
        self.log, self.mesh, self.memory, self.stalls, self.observers = log, mesh, memory, stalls, observers
        self.waiting: tuple[dict[str, Any], Tensor, DeviceTime, Sequence[tuple[DeviceTime, DeviceTime]]] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin the next step's time now. So it does not include an evaluation since the last step."""
        self.last = DeviceTime(self.mesh.device)

    def after(self, done: StepDone) -> None:
        """Begin to copy the figures of a step that may still run. On a CPU log them, else those of the step before."""
        self.mesh.activity.begin("figures")
        values = done.figures
        known: dict[str, Any] = {"step": done.step, "consumed_samples": done.consumed_samples, "lr": done.lr}
        known["batch_size"] = sum(len(batch.samples) for batch in done.batches) * self.mesh.dp.size
        extra = torch.zeros(len(RANK_FIGURES), dtype=values.dtype, device=values.device)
        squared_lengths, padding, *memory = extra
        if done.batches[0].documents is None:
            known["squared_lengths"] = None
        else:
            # Each data rank counts once. Not over dp: its group may still gather parameters, and the sum would wait.
            if self.mesh.pp.rank == self.mesh.cp.rank == self.mesh.tp.rank == 0:
                squared_lengths.fill_(sum(batch.squared_lengths for batch in done.batches))
                padding.fill_(sum(batch.padding for batch in done.batches))
            all_reduce_(extra[:2], self.mesh.world)
        if values.is_cuda:
            for figure, num_bytes in zip(memory, self.memory()):
                figure.fill_(num_bytes / GIB)
        else:
            known |= {"memory_gib": None, "allocated_gib": None}
        all_reduce_(extra[2:], self.mesh.world, op=dist.ReduceOp.MAX)
        host = torch.cat([values, extra]).to("cpu", non_blocking=True)
        copied = DeviceTime(values.device)
        self.close()
        self.waiting = known, host, copied, self.stalls()
        if not values.is_cuda:  # a CPU has finished the step already
            self.close()

    def close(self) -> None:
        """Log the last step, if its figures are not logged yet."""
        if self.waiting is None:
            return
        (known, host, copied, stalls), self.waiting = self.waiting, None
        seconds, self.last = copied.seconds_since(self.last), copied
        stalled = min(seconds, sum(max(0.0, end.seconds_since(begin)) for begin, end in stalls))
        figures = dict(zip(STEP_FIGURES + RANK_FIGURES, host.tolist(), strict=True)) | known
        it = Iteration(**figures, seconds=seconds, stall_seconds=stalled)
        self.log.iteration(it)
        for observer in self.observers:
            observer.on_figures(it)
