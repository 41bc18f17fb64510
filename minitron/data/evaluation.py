"""The loss on validation data: the same batches each time, without dropout.

A run evaluates every train.eval_every steps. `--evaluate` evaluates one checkpoint and exits: `evaluation_only` makes
its configuration. Both read train.eval_steps batches of train.global_batch_size, even under a batch ramp.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minitron.comm.mesh import Mesh
from minitron.config.batch import final
from minitron.config.schema import Config, changed
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

    evaluate(batches): returns [loss sum, tokens] of a global batch, on the device. Collective over the world. meter:
    the run's; None in an evaluation without a run.
    """

    evaluate: Callable[[list[Batch]], Tensor]
    cfg: Config
    mesh: Mesh
    dataset: Dataset | None
    log: Log
    stop: Stop
    meter: Meter | None = None

    def after(self, done: StepDone) -> None:
        t = self.cfg.train
        if self.stop.agreed or not t.eval_every or done.step % t.eval_every:
            return
        assert self.meter is not None, "a run has a meter"
        self.meter.close()  # its line comes before that of the evaluation
        self.run(done.step)
        self.meter.restart()

    def run(self, step: int) -> None:
        """Log the loss of the weights after `step`, unless `stop` comes first. Collective over the world."""
        assert self.dataset is not None, "there is validation data with train.eval_every"
        t, began, loader = self.cfg.train, time.perf_counter(), Loader(self.dataset, final(self.cfg), self.mesh)
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for i in range(t.eval_steps):
            total += self.evaluate(loader.step(i * t.global_batch_size, step=0))
            if self.stop.should_stop():  # without a result
                break
        else:
            loss_sum, count = total.tolist()
            self.log.evaluation(step, loss_sum / count, time.perf_counter() - began)
        loader.close()


def evaluation_only(cfg: Config) -> Config:
    """Return the configuration of an evaluation without training: it records, saves and writes nothing."""
    return changed(
        final(cfg),
        train=dict(steps=1, epochs=None, eval_every=1, rerun="off", cuda_graph="off"),
        checkpoint=dict(every=None, local_dir=None, export="none"),
        log=dict(dir=None, tensorboard=False, wandb=None, prometheus=None, numerics_every=0),
        profile=dict(kind="none"),
    )
