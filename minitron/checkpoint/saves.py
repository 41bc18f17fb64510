"""When a run saves: after the steps that are due, and where a signal stops it. Before that, ranks compare copies."""

from __future__ import annotations

import time
from typing import Any

from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.load import ResumePoint
from minitron.checkpoint.save import Checkpointer, Exporter
from minitron.checkpoint.state import State
from minitron.comm.handle import DeviceTime
from minitron.config.schema import Config
from minitron.optim.replicas import Replicas
from minitron.runtime.log import Log
from minitron.runtime.log_formats import Iteration
from minitron.runtime.observer import Observer, StepDone
from minitron.runtime.stop import Stop


class Saves(Observer):
    """Saves a run into checkpoint.dir and checkpoint.local_dir; does nothing without checkpoint.dir.

    start: what the run starts from. The others are as Checkpointer has them. waited: seconds that the end of the run
    waited for a save. `close` raises CheckpointError if the last step had to be saved and is not.
    """

    def __init__(
        self,
        cfg: Config,
        state: State,
        data: dict[str, Any],
        log: Log,
        stop: Stop,
        replicas: Replicas,
        start: ResumePoint,
        exporter: Exporter | None,
    ):
        self.activity, self.stop, self.replicas = replicas.mesh.activity, stop, replicas
        self.first, self.step, self.consumed = start.step, start.step, start.consumed_samples
        self.folder, self.waited, self.checkpointer = cfg.checkpoint.dir, 0.0, None
        if self.folder is not None:
            self.checkpointer = Checkpointer(cfg, state, data, log, start.step, start.parent_checkpoint, exporter)

    def stalls(self) -> list[tuple[DeviceTime, DeviceTime]]:
        """Return begin and end of each wait of the training since the last call."""
        return [] if self.checkpointer is None else self.checkpointer.stalls()

    def on_figures(self, it: Iteration) -> None:
        """Measure what saves cost by the figures of a step."""
        if self.checkpointer is not None:
            self.checkpointer.saw(it)

    def after(self, done: StepDone) -> None:
        self.step, self.consumed = done.step, done.consumed_samples
        if self.checkpointer is not None:
            shared = bool(self.stop.agreed) or self.checkpointer.due(done.step)
            if shared or self.checkpointer.local_due(done.step):
                self._save(self.checkpointer, local=not shared)

    def close(self) -> None:
        saved, due = False, False
        if self.checkpointer is not None:
            due = bool(self.stop.agreed) or self.checkpointer.due(self.step)
            if due and self.step == self.first:  # the run resumed after its last step, from the nodes' own disks
                self._save(self.checkpointer)
            self.activity.begin("checkpoint")
            began = time.perf_counter()
            self.checkpointer.close(self.stop.agreed)
            self.waited, saved = time.perf_counter() - began, self.checkpointer.shared.saved == self.step
        if self.stop.agreed:
            self.stop.report(self.step, saved)
        if due and not saved:  # a scheduler must not take the run for complete
            raise CheckpointError(
                f"the run ends after step {self.step}, of which there is no checkpoint in {self.folder}: "
                "its save failed, as said above"
            )

    def _save(self, checkpointer: Checkpointer, local: bool = False) -> None:
        self.replicas.require_equal(self.step)
        self.activity.begin("checkpoint")  # from here on a rank may wait as long as its disk takes
        checkpointer.save(self.step, self.consumed, local=local)
