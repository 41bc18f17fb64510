"""The loss on validation data, in the middle of a run: the same batches each time, without dropout."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.data.batch import Batch
from minitron.data.build import Dataset
from minitron.data.loader import Loader
from minitron.runtime.log import Log
from minitron.runtime.meter import Meter
from minitron.runtime.observer import Observer, StepDone
from minitron.runtime.stop import Stop


@dataclass
class Evaluation(Observer):
    """Logs the mean loss per token over train.eval_steps global batches, every train.eval_every steps.

    evaluate(batches): returns [loss sum, tokens] of a global batch, on the device. Collective over the world.
    """

    evaluate: Callable[[list[Batch]], Tensor]
    cfg: Config
    mesh: Mesh
    dataset: Dataset | None
    log: Log
    stop: Stop
    meter: Meter

    def after(self, done: StepDone) -> None:
        t = self.cfg.train
        if self.stop.agreed or not t.eval_every or done.step % t.eval_every:
            return
        assert self.dataset is not None, "rules require validation data with train.eval_every"
        self.meter.close()  # its line comes before that of the evaluation
        began, loader = time.perf_counter(), Loader(self.dataset, self.cfg, self.mesh)
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for i in range(t.eval_steps):
            total += self.evaluate(loader.step(i * t.global_batch_size, step=0))
            if self.stop.should_stop():  # without a result
                break
        else:
            loss_sum, count = total.tolist()
            self.log.evaluation(done.step, loss_sum / count, time.perf_counter() - began)
        loader.close()
        self.meter.restart()
