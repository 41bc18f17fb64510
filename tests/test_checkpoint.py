"""Runs that are cut in two by a checkpoint, in one layout and in others, against the run that nobody interrupted."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from layouts import GPT3, LLAMA, config, dataset_of, mesh_of

from minitron.checkpoint.format import CheckpointError, Reader
from minitron.checkpoint.load import find, restore
from minitron.checkpoint.save import Checkpointer
from minitron.data.loader import Loader
from minitron.log import Log
from minitron.train import build


def run(cfg, steps: int, directory: str | None = None) -> list[float]:
    """Losses of the steps up to `steps` after what is in checkpoint.dir; saves at the end if a directory is given."""
    cfg = dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, dir=directory))
    start = find(cfg)
    mesh = mesh_of(cfg)
    trainer = build(cfg, mesh)
    restore(start, trainer.state)
    loader, losses, consumed = Loader(dataset_of(cfg), cfg, mesh), [], start.consumed_samples
    for step in range(start.step + 1, steps + 1):
        batches = loader.step(consumed, step)
        consumed += cfg.train.global_batch_size
        losses.append(trainer.step(batches, cfg.optimizer.lr).read()["loss"])
    loader.close()
    if directory is not None:
        with Log(cfg, mesh.rank, mesh.world.size) as log:
            saves = Checkpointer(cfg, trainer.state, {}, log, start.step)
            saves.save(steps, consumed)
            saves.wait()
    return losses


def test_first(ranks, tmp_path):
    cfg = config(LLAMA, {"train": {"steps": 40}})
    whole = run(cfg, 25)
    first = ranks(4, run, config(LLAMA, {"train": {"steps": 40}, "parallel": {"tp": 2, "pp": 2}}), 5, str(tmp_path))
    then = ranks(4, run, config(LLAMA, {"train": {"steps": 40}, "parallel": {"cp": 2}}), 25, str(tmp_path))
    assert first[0] == pytest.approx(whole[:5], rel=1e-6)
    print(max(abs(a / b - 1) for a, b in zip(then[0], whole[5:])))
    assert then[0] == pytest.approx(whole[5:], rel=1e-6)
    r = Reader(tmp_path); r.verify(); print(r.path, len(r.names()))
