"""`python -m minitron.pretrain` with a fault planted: fault_run.py FAULT CONFIG... Only tests/test_faults.py starts it.

    sleep   rank 2 sleeps forever before its forward of microbatch 1 in step 3
    nan     a weight becomes NaN before step 3
    save    a `save` that leaves a file for each rank, in log.dir
"""

import functools
import os
import sys
import time
from pathlib import Path

import torch

from minitron import pretrain
from minitron.pipeline import executor
from minitron.train import Trainer


def sleep():
    forward = executor._Run.forward

    def stuck(run, op):
        if os.environ["RANK"] == "2" and op.mb == 1 and run.executor.pp.activity.step == 3:
            time.sleep(1000)
        return forward(run, op)

    executor._Run.forward = stuck


def nan():
    step = Trainer.step

    def poisoned(trainer, batches, lr):
        if trainer.mesh.activity.step == 3:
            with torch.no_grad():
                next(trainer.chunks[0].parameters()).fill_(torch.nan)
        return step(trainer, batches, lr)

    Trainer.step = poisoned


def save():
    folder = next(arg for arg in sys.argv if arg.startswith("log.dir=")).split("=")[1]

    def mark(step):
        Path(folder, f"saved-by-{os.environ['RANK']}").write_text(str(step))

    pretrain.train = functools.partial(pretrain.train, save=mark)


if __name__ == "__main__":
    {"none": lambda: None, "sleep": sleep, "nan": nan, "save": save}[sys.argv[1]]()
    pretrain.main(sys.argv[2:])
