"""Name ranks that are slower than others with the same work.

Problem: all ranks of a job take as long for a step as the slowest one, since they wait for each other in every layer.
A GPU that throttles costs a thousand others a tenth of their time, and no figure of the step shows which one it is. The
idea: each rank measures the time in which it computes and waits for no other rank. The ranks of a pipeline stage, which
do the same work, compare these times.

    rank 0   [compute][wait......][compute][wait......]     own time:  8 + 7
    rank 1   [compute.........][][compute.........][   ]              17 + 17

The clock is subtracted when work begins or resumes, and added when it pauses or ends. The sum is the rank's own time.

    CPU    the host's clock, without the time in which Linux ran other programs
    GPU    a kernel reads the GPU's clock and adds it to a word of its memory, in eager and in replayed steps.
           These kernels take microseconds. So where ranks wait often, with tp, cp or vp, one microbatch is timed: the
           last forward, which waits for no gathers of parameters, and the first backward, beside which no gradients are
           reduced. Overlapped products are not timed: their wait cannot be separated. In an eager step that the host
           bounds, the host's time counts. Gradients that travel through NCCL slow the products beside them, so over a
           network a slow rank shows less

Every train.check_speed_every steps these times are gathered, and copied to the host without waiting. A rank is slow if
all but one of its last 20 steps were (`slower`): other programs make some steps slow, a slow GPU all of them. The rank
itself raises the alarm, with the driver's figures of its GPU. metrics.jsonl has all times, and tools/stragglers.py
draws them.

Left out: the update, and reading data. A stage with one rank has nothing to compare. Where documents are kept apart,
the work of data ranks differs from step to step, so a rank must be slower than that difference.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress

import numpy as np
import torch

from minitron.comm.activity import listed
from minitron.comm.collectives import gather_along, gather_json
from minitron.comm.mesh import Mesh
from minitron.config.schema import TrainConfig
from minitron.runtime.log import Log
from minitron.runtime.observer import LateCopy, Observer, StepDone

STEPS = 20  # steps that are compared together
SLOW_RATIO = 1.05  # times as long as the others
CPU_SLOW_RATIO = 2.0  # on a busy machine: other programs use the caches and the other thread of a core


class Stragglers(Observer):
    """Compares the times of ranks every cfg.check_speed_every steps; 0: never.

    `__init__` and `after` are collective over the world. slow: the ranks that are now slower than others.
    The stopwatch is that of the mesh's Activity; without one there is no comparison.
    """

    def __init__(self, mesh: Mesh, log: Log, cfg: TrainConfig):
        self.mesh, self.log, self.slow = mesh, log, set[int]()
        self.stopwatch, self.every = mesh.activity.stopwatch, cfg.check_speed_every
        self.on_host = self.stopwatch is not None and self.stopwatch.add_now is None
        self.slow_ratio = CPU_SLOW_RATIO if self.on_host else SLOW_RATIO
        self.times: deque[np.ndarray] = deque(maxlen=STEPS)  # [world] seconds, of the last steps
        self.waiting: tuple[int, LateCopy] | None = None
        if self.stopwatch is not None:
            self.readings = torch.zeros(self.every + 1, dtype=torch.int64, device=mesh.device)
            self.taken, self.places = 0, gather_rank_locations(mesh)
            log.record("places", places=self.places)

    def after(self, done: StepDone) -> None:
        """Read the time of a step. Every cfg.check_speed_every steps begin to gather the times."""
        if self.stopwatch is None:
            return
        self.close()
        self.taken += 1
        self.stopwatch.read_into(self.readings[self.taken])
        if self.taken < self.every:
            return
        world = self.mesh.world
        self.mesh.activity.begin("figures")
        everyone = gather_along(self.readings.unsqueeze(0), world)
        self.waiting = done.step, LateCopy(everyone)
        self.readings[0].copy_(self.readings[-1])
        self.taken = 0
        if not everyone.is_cuda:
            self.close()

    def close(self) -> None:
        """Compare the times that were gathered last."""
        if self.waiting is None:
            return
        (step, times), self.waiting = self.waiting, None
        rows = np.diff(times.read().numpy(), axis=1).T / 1e9
        self.times.extend(rows)
        if len(self.times) == STEPS:
            self._judge(step, np.stack(self.times))
        seconds = [float(f"{x:.4g}") for x in np.median(rows, 0)]
        self.log.record("ranks", step=step, own_seconds=seconds, slow=sorted(self.slow))

    def _judge(self, step: int, times: np.ndarray) -> None:
        """Find the slow ranks. Raise an alarm on a rank that was not slow before. times: [steps, world]."""
        stages = [slower(stage, self.slow_ratio) for stage in np.split(times, self.mesh.pp.size, 1)]
        ratio, surely = (np.concatenate(parts) for parts in zip(*stages))
        before = {rank for rank in self.slow if ratio[rank] > self.slow_ratio}
        if over := sorted(self.slow - before):
            self.log.info(f"iteration {step}: {listed(over)}: no longer slower than others")
        self.slow = before | set(np.flatnonzero(surely).tolist())
        if (rank := self.mesh.rank) in self.slow - before:
            own, facts = float(np.median(times[:, rank])), driver_facts(self.mesh.device)
            look = "" if self.on_host else ", heat and low clocks (nvidia-smi -q -d PERFORMANCE)"
            self.log.alarm(
                f"warning: iterations {step - STEPS + 1} to {step}: {self.mesh.coordinates()} on {self.places[rank]} "
                f"is slow: its own work took {own:.4g} s, without waiting for others, {ratio[rank] - 1:.0%} more than "
                f"the {own / ratio[rank]:.4g} s of the other ranks of its pipeline stage (median); {facts}all ranks "
                f"wait for it. Look there for other programs{look}, or leave its node out"
            )


def slower(times: np.ndarray, slow_ratio: float = SLOW_RATIO) -> tuple[np.ndarray, np.ndarray]:
    """Compare ranks with the same work. times: [steps, ranks] seconds.

    Returns two figures for each rank. The first is its median time over the median of the others' median times. The
    second is whether the rank is slow: its second-fastest step took more than slow_ratio times the others' median, and
    longer than the median of the others' second-slowest steps.
    """
    medians, low, high = np.median(times, 0), *np.sort(times, 0)[[1, -2]]
    usual = median_of_others(medians)
    return medians / usual, (low > slow_ratio * usual) & (low > median_of_others(high))


def median_of_others(x: np.ndarray) -> np.ndarray:
    """Return for each of two values or more the median of all others."""
    ordered, position, last = np.sort(x), x.argsort().argsort(), len(x) - 2
    lower, upper = (ordered[i + (position <= i)] for i in (last // 2, (last + 1) // 2))
    return (lower + upper) / 2


def gather_rank_locations(mesh: Mesh) -> list[str]:
    """Return the host and the GPU of every rank. Collective over the world, and waits for the device."""
    gpu = f" GPU {mesh.device.index}" if mesh.device.type == "cuda" else ""
    return gather_json(f"{socket.gethostname()}{gpu}", mesh.world, mesh.device)


def driver_facts(device: torch.device) -> str:
    """Describe this GPU, its temperature and clock, if the driver has them; "" on a CPU."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    facts = [f"{properties.name} {getattr(properties, 'uuid', '')}".rstrip()]
    for read, form in (torch.cuda.temperature, "{:.0f} C"), (torch.cuda.clock_rate, "{:,.0f} MHz"):
        with suppress(Exception):  # nvidia-ml-py is missing, or the driver has no figure: NVML has its own errors
            facts.append(form.format(read(device)))
    return ", ".join(facts) + "; "
