"""The goodput of a planned job that fails now and then, and the best interval between its saves.

Problem: a plan's days are those of machines that never fail. The idea: the cost of failures follows from four
times. They are the time between failures, of a recovery, that a save takes from training, and until a save is
complete. The user gives the first; the others have defaults, each with its source in `SOURCES`:

    a save costs     its wait for the copy, and the share by which steps are slower while files are written
    a save takes     the state, 12 bytes a trained parameter, at what all GPUs can write and the shared disk takes
    a recovery       finding the failure and ending the ranks, a start, and reading the state again

Left out: failures of half a job, spare nodes that are missing, evaluations, and saves on the nodes' own disks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minitron.config.save_interval import best_interval
from minitron.config.schema import Config, changed
from minitron.planner.memory import Memory

SAVED_BYTES = 12  # of a trained parameter: master and two moments, float32
WRITE_GB_S, READ_GB_S = 0.91, 0.95  # of a GPU
SHARED_GB_S = 50.0  # of the shared disk, all together
COPY_SECONDS, SLOWER = 0.007, 0.004
NOTICE_SECONDS, START_SECONDS = 60.0, 10.0
_MEASURED = "benchmarks/checkpoint.py on an H200"
SOURCES = {  # of the defaults, by fields of Failures
    "recovery_seconds": f"assumed {NOTICE_SECONDS:g} s to detect it and end the ranks; a start of {START_SECONDS:g} s, "
    f"{_MEASURED}; reading the state",
    "save_cost_seconds": f"{1000 * COPY_SECONDS:g} ms of waiting, and steps {100 * SLOWER:g} % slower while files are "
    f"written, {_MEASURED}",
    "save_seconds": f"{WRITE_GB_S} GB/s of a GPU, {_MEASURED}; assumed {SHARED_GB_S:g} GB/s of the shared disk",
}


@dataclass(frozen=True)
class Failures:
    """Failures and saves of a job. mtbf_seconds: mean time between failures of the whole job."""

    mtbf_seconds: float
    recovery_seconds: float
    save_cost_seconds: float
    save_seconds: float

    @property
    def interval(self) -> float:
        """The seconds of training between two saves that cost least."""
        return best_interval(self.save_cost_seconds, self.save_seconds, self.mtbf_seconds)

    def goodput(self, interval: float | None = None) -> float:
        """Return the share of time that counts, with saves this many seconds of training apart; None: the best."""
        times = self.save_cost_seconds, self.save_seconds, self.recovery_seconds, self.mtbf_seconds
        return predict(interval or self.interval, *times)


def failures(
    cfg: Config, world: int, mtbf: float, recovery: float | None, cost: float | None, save: float | None
) -> Failures:
    """Return the given numbers, with defaults for those that are None."""
    gigabytes = state_bytes(cfg) / 1e9
    save = gigabytes / min(world * WRITE_GB_S, SHARED_GB_S) if save is None else save
    cost = COPY_SECONDS + SLOWER * save if cost is None else cost
    reading = gigabytes / min(world * READ_GB_S, SHARED_GB_S)
    recovery = NOTICE_SECONDS + START_SECONDS + reading if recovery is None else recovery
    return Failures(mtbf, recovery, cost, save)


def state_bytes(cfg: Config) -> int:
    """Count the bytes of a checkpoint, of all ranks together."""
    alone = changed(cfg, parallel=dict(tp=1, pp=1, vp=1, cp=1, layers_per_stage=None))
    memory = Memory(alone, cfg.train.global_batch_size, gpus_per_node=1)
    return SAVED_BYTES * memory.trained(0)


def predict(interval: float, stall: float, save: float, recovery: float, mtbf: float) -> float:
    """Predict the share of time that becomes training which counts; all in seconds.

    interval: of training between two saves. recovery: from a failure to the first new step. Of the time T to the next
    failure, which is exponential with mean mtbf, the k-th save counts if T > recovery + k (interval + stall) + save, so
    the expected number of saves that count is a geometric series.
    """
    lost = math.exp(-(recovery + save) / mtbf)
    growth = (interval + stall) / mtbf
    return 0.0 if growth > 700 else interval / mtbf * lost / math.expm1(growth)
