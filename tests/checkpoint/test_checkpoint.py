"""Runs that go on from a checkpoint, in their own layout and in others, against the run that nobody interrupted."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import re
import resource
import shutil
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from layouts import GPT3, LLAMA, config, dataset_of, lowered, mesh_of
from minitron import pretrain
from minitron.checkpoint.boxes import TensorShard
from minitron.checkpoint.directory import ERRORS, TakenOver, begin, claim
from minitron.checkpoint.format import CheckpointError, write_shard
from minitron.checkpoint.load import ResumePoint, agree_on_start, check_data, find_resume_point, restore
from minitron.checkpoint.reader import Reader
from minitron.checkpoint.save import Checkpointer, copy_beside, host_memory
from minitron.comm.agree import Agreement
from minitron.config import rules
from minitron.config.schema import Config, RopeScaling
from minitron.data.indexed import IndexedWriter
from minitron.data.loader import Loader
from minitron.interop.import_weights import write_checkpoint
from minitron.pretrain import build_data, open_weights
from minitron.runtime.log import Log
from minitron.train import Trainer, build
from tools import inspect_checkpoint

# Steps of which a test runs some: they set what the data hold. Five blocks make every pipeline uneven.
LONG = {"train": {"steps": 30, "global_batch_size": 4}, "model": {"num_layers": 5}}
SHORT = LONG | {"model": {"num_layers": 2}}
DROPOUT = {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.1}}
FP16 = {"precision": {"dtype": "fp16", "loss_scale": 2.0**24, "loss_scale_hysteresis": 1, "loss_scale_window": 3}}
LEVELS = {"precision": {"dtype": "bf16"}, "optimizer": {"grad_dtype": "bf16"}}  # of nodes of two ranks
FP8 = {
    "precision": {"dtype": "bf16", "fp8": "delayed", "fp8_backend": "torch"},
    "model": {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 64, "num_heads": 4, "num_kv_heads": 4},
    "train": {"global_batch_size": 2},
}


def saving(cfg: Config, directory: Path, **keys) -> Config:
    return dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, dir=str(directory), **keys))


def start_trainer(cfg: Config) -> tuple[Trainer, ResumePoint]:
    torch.set_num_threads(1)
    mesh = mesh_of(cfg)
    start = agree_on_start(cfg, mesh, open_weights)
    trainer = build(cfg, mesh, base_fingerprint=start.base_fingerprint)
    restore(start, trainer.state)
    return trainer, start


def train(trainer: Trainer, done: int, until: int) -> list[dict]:
    """Steps done + 1 to until: their figures."""
    cfg, batch = trainer.cfg, trainer.cfg.train.global_batch_size
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    figures = [
        trainer.step(loader.step((step - 1) * batch, step), cfg.optimizer.lr).read()
        | {"loss_scale": float(trainer.scaler.scale)}
        for step in range(done + 1, until + 1)
    ]
    loader.close()
    return figures


def save(trainer: Trainer, cfg: Config, step: int, after: int = -1) -> None:
    with Log(cfg, trainer.mesh.rank, trainer.mesh.world.size) as log:
        saves = Checkpointer(cfg, trainer.state, {}, log, after)
        saves.save(step, step * cfg.train.global_batch_size)
        saves.wait()


def leg(cfg: Config, until: int) -> list[dict]:
    """Go on from what is in checkpoint.dir up to a step, and save. What was read is first saved again, under again/."""
    trainer, start = start_trainer(cfg)
    if start.resume:
        save(trainer, saving(cfg, Path(cfg.checkpoint.dir) / "again"), start.step)
    figures = train(trainer, start.step, until)
    save(trainer, cfg, until, start.step)
    return figures


def whole(cfg: Config, until: int) -> list[dict]:
    """The run that nobody interrupts."""
    return train(start_trainer(cfg)[0], 0, until)


def contents(directory: Path) -> dict:
    reader = Reader(directory)
    reader.verify()
    tensors = {
        (name, kind): reader.read(name, kind, [0] * len(reader.shape(name)), reader.shape(name))
        for name in reader.names()
        for kind in reader.kinds(name)
    }
    return {"state": {k: v for k, v in reader.state.items()}, "consumed": reader.consumed_samples} | tensors


def assert_same(mine: dict, other: dict) -> None:
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key], key


# ---- from any layout to any other ---------------------------------------------------------------------------------

LLAMA_LEGS = [
    (2, dict(tp=2), "none"),
    (4, dict(pp=2, vp=2), "none"),
    (8, dict(tp=2, pp=2, cp=2), "none"),
    (1, {}, "none"),
    (4, dict(tp=4, sequence_parallel=False), "selective"),
    (4, dict(pp=4), "none"),
    (4, dict(overlap_grads=False), "none"),
    (2, dict(pp=2, layers_per_stage=(1, 4)), "full"),
    (4, dict(tp=2, pp=2, vp=2), "none"),
    (4, dict(cp=2, cp_style="ulysses"), "full"),
    (4, dict(pp=2, vp=2, layers_per_stage=(2, 1, 1, 1)), "selective"),
]
TIED_LEGS = [
    (2, dict(pp=2), "none"),
    (4, dict(tp=2, pp=2), "none"),
    (1, {}, "none"),
    (4, dict(pp=2, vp=2), "full"),
    (2, dict(cp=2), "none"),
    (2, {}, "selective"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "base, legs",
    [(LLAMA, LLAMA_LEGS[1::3]), (LLAMA, LLAMA_LEGS), (GPT3, TIED_LEGS)],
    ids=["a third of llama's", "llama", "tied gpt"],
)
def test_a_relay_through_layouts_is_one_run(ranks, tmp_path, base, legs):
    """Every two steps another layout takes over; what it reads and saves again is bit-equal, whatever the layouts.

    In every second leg gradients have many buckets, and files many blocks. 1e-6: summation order alone moves losses by
    2e-7 in these 20 steps.
    """
    figures, until, before = [], 0, {}
    for (world, parallel, recompute), until in zip(legs, itertools.count(2, 2)):
        cfg = saving(config(base, LONG, {"parallel": parallel, "train": {"recompute": recompute}}), tmp_path)
        rules.check(cfg, world)
        results = ranks(world, leg, cfg, until) if until % 4 else ranks(world, lowered, leg, cfg, until)
        assert all(result == results[0] for result in results)
        figures += results[0]
        if until > 2:
            assert_same(contents(tmp_path / "again"), before)
        before = contents(tmp_path)
    expected = whole(config(base, LONG), until)
    assert [f["loss"] for f in figures] == pytest.approx([f["loss"] for f in expected], rel=1e-6)


def test_slices_of_any_number_of_nodes_are_saved_alike(ranks, tmp_path):
    """Slices have another order on two nodes than in one level: what one of them saves all others read."""
    before = {}
    for i, (world, parallel, change) in enumerate(
        [(4, {}, LEVELS), (8, dict(tp=2), LEVELS), (2, {}, {}), (4, {}, LEVELS)]
    ):
        cfg = saving(
            config(LLAMA, SHORT, {"train": {"global_batch_size": 8}}, change, {"parallel": parallel}), tmp_path
        )
        ranks(world, lowered, leg, cfg, i + 1)
        if before:
            assert_same(contents(tmp_path / "again"), before)
        before = contents(tmp_path)


@pytest.mark.parametrize(
    "world, parallel, change",
    [
        (4, dict(tp=2, pp=2), DROPOUT),
        (4, dict(cp=2), {"model": {"hidden_dropout": 0.2}}),
        (2, dict(pp=2, vp=2), FP16),
        (2, {}, {"precision": {"dtype": "bf16"}}),
        (4, dict(tp=2, pp=2, vp=2), FP8),
        (4, {}, LEVELS),
    ],
    ids=["dropout", "context", "fp16", "bf16", "fp8", "levels"],
)
def test_the_same_layout_goes_on_bit_for_bit(ranks, tmp_path, world, parallel, change):
    """With many buckets and blocks, and FP8's magnitudes of two steps alone."""
    cfg = config(LLAMA, LONG if "vp" in parallel else SHORT, change, {"parallel": parallel})
    expected = ranks(world, lowered, whole, cfg, 4)
    first = ranks(world, lowered, leg, saving(cfg, tmp_path), 2)
    then = ranks(world, lowered, leg, saving(cfg, tmp_path), 4)
    assert repr([a + b for a, b in zip(first, then)]) == repr(expected)  # as text: a NaN norm equals itself
    if change is FP16:
        scales = [f["loss_scale"] for f in expected[0]]
        assert len(set(scales)) > 2 and expected[0][1]["skipped"]


def test_a_loss_scale_goes_on_in_the_middle_of_its_window(tmp_path):
    """Two clean steps and a forgiven overflow before the save: the next doubling and halving come as without it."""
    precision = {
        "precision": {"dtype": "fp16", "loss_scale": 1024.0, "loss_scale_window": 5, "loss_scale_hysteresis": 2}
    }
    cfg = saving(config(LLAMA, SHORT, precision), tmp_path)
    trainer, _ = start_trainer(cfg)
    trainer.scaler.scale.fill_(512.0)  # not the first one any more
    for overflow in (1.0, 0.0, 0.0):
        trainer.scaler.update(torch.tensor(overflow))
    save(trainer, cfg, 3)
    resumed, fresh = start_trainer(cfg)[0].scaler, start_trainer(saving(cfg, tmp_path / "none"))[0].scaler
    assert float(resumed.scale) == 512.0 != float(fresh.scale)
    fresh.scale.fill_(512.0)  # so that the counters alone make a difference

    def scales(scaler, steps):
        return [(scaler.update(torch.tensor(overflow)), float(scaler.scale))[1] for overflow in steps]

    steps = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert scales(resumed, steps[:4]) == scales(trainer.scaler, steps[:4]) != scales(fresh, steps[:4])
    assert scales(resumed, steps) == scales(trainer.scaler, steps)
    save(start_trainer(cfg)[0], cfg, 4, 3)
    other, _ = start_trainer(cfg)  # nothing but the save and the resume in between: the forgiven one counts
    none = start_trainer(saving(cfg, tmp_path / "none"))[0].scaler
    assert scales(other.scaler, [1.0, 1.0, 1.0]) == [256.0, 128.0, 64.0] != scales(none, [1.0, 1.0, 1.0])
    assert other.scaler.tolerance < 0  # more overflows than were forgiven
    save(other, cfg, 5, 3)
    assert scales(start_trainer(cfg)[0].scaler, steps) == scales(other.scaler, steps)


def test_fp8_histories_follow_their_layers(ranks, tmp_path):
    cfg = saving(config(LLAMA, SHORT, FP8), tmp_path)
    before = None
    for until, (world, parallel) in zip((2, 4, 6), [(2, dict(pp=2)), (4, dict(pp=2, vp=2)), (1, {})]):
        ranks(world, leg, dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, **parallel)), until)
        if before is not None:
            assert_same(contents(tmp_path / "again"), before)
        before = contents(tmp_path)
    histories = [
        tensor
        for (name, kind), tensor in ((k, t) for k, t in before.items() if isinstance(k, tuple))
        if kind == "fp8_history"
    ]
    assert len(histories) == 4 * 4 and all((h[:6] > 0).all() and (h[6:] == 0).all() for h in histories)
    plain = dataclasses.replace(cfg, precision=config(LLAMA, {"precision": {"dtype": "bf16"}}).precision)
    start_trainer(plain)  # without FP8 the histories are left
    more = dataclasses.replace(cfg, precision=dataclasses.replace(cfg.precision, fp8_bf16_layers=1))
    save(start_trainer(more)[0], saving(more, tmp_path / "fewer"), 6)
    trainer, _ = start_trainer(saving(cfg, tmp_path / "fewer"))
    assert not trainer.chunks[0].fp8_state.scaling.has_history  # not all of its layers have one: it looks first


def test_a_head_in_fp8_goes_on_with_its_history(tmp_path):
    without = config(LLAMA, SHORT, FP8)
    cfg = dataclasses.replace(without, precision=dataclasses.replace(without.precision, fp8_head=True))
    expected = [figures["loss"] for figures in whole(cfg, 4)]
    leg(saving(cfg, tmp_path / "with"), 2)
    assert [figures["loss"] for figures in leg(saving(cfg, tmp_path / "with"), 4)] == expected[2:]
    leg(saving(without, tmp_path / "without"), 2)
    trainer, _ = start_trainer(saving(cfg, tmp_path / "without"))
    assert not trainer.chunks[0].fp8_state.scaling.has_history  # the head has none: all look first


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_weights_kept_in_fp8_come_back_from_their_masters(ranks, tmp_path, recipe):
    """In any layout, from a run with bf16 weights, and to one: a checkpoint says nothing of the key."""
    bf16 = config(LLAMA, SHORT, FP8, {"precision": FP8["precision"] | {"fp8": recipe}})
    cfg = dataclasses.replace(bf16, precision=dataclasses.replace(bf16.precision, fp8_params=True))
    expected = whole(cfg, 4)
    assert [figures["loss"] for figures in expected] == [figures["loss"] for figures in whole(bf16, 4)]
    for name, (first, second) in {"kept": (cfg, cfg), "old": (bf16, cfg), "back": (cfg, bf16)}.items():
        leg(saving(first, tmp_path / name), 2)
        went_on = leg(saving(second, tmp_path / name), 4)
        assert [figures["loss"] for figures in went_on] == [figures["loss"] for figures in expected[2:]], name
        assert_same(contents(tmp_path / name), contents(tmp_path / "kept"))
    before, cfg = None, saving(cfg, tmp_path / "layouts")
    for until, (world, parallel) in zip((2, 4, 6, 8), [(2, dict(pp=2)), (8, dict(pp=2, vp=2, tp=2)), (1, {}), (2, {})]):
        ranks(world, leg, dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, **parallel)), until)
        if before is not None:
            assert_same(contents(tmp_path / "layouts" / "again"), before)
        before = contents(tmp_path / "layouts")


# ---- weights only -------------------------------------------------------------------------------------------------


def test_weights_start_a_run_of_their_own(ranks, tmp_path):
    """From a training checkpoint, and the same weights as a checkpoint of weights in bf16."""
    cfg = config(LLAMA, SHORT)
    ranks(2, leg, saving(dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, tp=2)), tmp_path / "a"), 3)
    masters = {name: tensor for (name, kind), tensor in list(contents(tmp_path / "a").items())[2:] if kind == "master"}
    weights = [
        TensorShard(name, "param", tuple(tensor.shape), (0,) * tensor.dim(), tensor.bfloat16())
        for name, tensor in masters.items()
    ]
    write_checkpoint(tmp_path / "b", dataclasses.asdict(cfg), weights)
    for folder, dtype in ("a", torch.float32), ("b", torch.bfloat16):
        loading = dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, load=str(tmp_path / folder)))
        trainer, start = start_trainer(loading)
        assert start == ResumePoint(start.reader) and trainer.optimizer.steps == 0
        for param in trainer.chunks[0].parameters():
            assert torch.equal(param, masters[param.spec.name].to(dtype).float())
        assert all(not moment.any() for moment in trainer.optimizer.exp_avg)
        resumed = saving(loading, tmp_path / "a")  # what is in checkpoint.dir goes before
        assert find_resume_point(resumed, open_weights).step == 3
    with pytest.raises(CheckpointError, match="step_00000000 holds weights only; start from it with checkpoint.load="):
        find_resume_point(saving(cfg, tmp_path / "b"), open_weights)


# ---- the save -----------------------------------------------------------------------------------------------------


class LateCopy:
    """In place of copy_beside and its event: a stream that copies as late as it may, when somebody waits for it."""

    def __init__(self, stream, pairs):
        self.pairs, self.lock = list(pairs), threading.Lock()

    def wait(self):
        with self.lock:
            for host, device in self.pairs:
                host.copy_(device)
            self.pairs = []

    synchronize = wait


@pytest.mark.parametrize("change", [FP8, FP16, {}], ids=["fp8", "fp16", "fp32"])
@pytest.mark.parametrize("copy", [copy_beside, LateCopy])
def test_the_save_is_of_its_moment_and_waits_for_none(tmp_path, monkeypatch, change, copy):
    """Training goes on while the thread is held up; the files hold what was there when `save` was called."""
    cfg = config(LLAMA, SHORT, change)
    trainer, _ = start_trainer(cfg)
    train(trainer, 0, 2)
    save(trainer, saving(cfg, tmp_path / "then"), 2)
    gate, cfg, samples = threading.Event(), saving(cfg, tmp_path / "late"), cfg.train.global_batch_size
    monkeypatch.setattr("minitron.checkpoint.save.copy_beside", copy)
    with Log(cfg, 0, 1) as log:
        saves = Checkpointer(cfg, trainer.state, {}, log)
        saves.thread.submit(gate.wait)
        saves.save(2, 2 * samples)
        figures = train(trainer, 2, 4)
        assert not list(tmp_path.glob("late/step_*"))
        gate.set()
        saves.wait()
        saves.save(2, 2 * samples)  # once is enough
        assert saves.running is None
        saves.save(4, 4 * samples)  # the last one: no update waits for it
        saves.wait()
    assert_same(contents(tmp_path / "late" / "step_00000002"), contents(tmp_path / "then"))
    save(trainer, saving(cfg, tmp_path / "end"), 4)
    assert_same(contents(tmp_path / "late"), contents(tmp_path / "end"))
    assert repr(figures) == repr(whole(config(LLAMA, SHORT, change), 4)[2:])  # as text: a NaN norm equals itself


def lacks_memory(cfg: Config) -> str:
    trainer, _ = start_trainer(cfg)
    with pytest.MonkeyPatch.context() as patch, Log(cfg, trainer.mesh.rank, trainer.mesh.world.size) as log:
        if trainer.mesh.rank == 1:
            patch.setattr(
                "minitron.checkpoint.save.host_memory",
                lambda rows, _, pinned: host_memory(rows, 1 << 55, pinned=pinned),
            )
        try:
            return str(Checkpointer(cfg, trainer.state, {}, log))
        except CheckpointError as error:
            return str(error)


def test_a_host_without_memory_for_the_copy(ranks, tmp_path, monkeypatch):
    """One rank lacks it: all say so. A GPU's driver may refuse to lock what the host has."""
    messages = ranks(2, lacks_memory, saving(config(LLAMA, SHORT), tmp_path))
    assert len(set(messages)) == 1 and messages[0].startswith(
        f"checkpoint.dir is set and the host has no {3 * 4 * 2**55 / 1e9:.1f} GB for a copy of this rank's state; use"
    )
    calls = []
    cuda = SimpleNamespace(
        cudaHostRegister=lambda *range_: calls.append(range_) or len(calls) - 1, cudaHostUnregister=calls.append
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    memory = host_memory(3, 5, pinned=True)
    assert not memory.any() and calls == [(memory.data_ptr(), 60, 0)]
    with pytest.raises(CheckpointError, match="the host has no 0.0 GB"):
        host_memory(3, 5, pinned=True)
    address = memory.data_ptr()
    del memory
    assert calls[-1] == address  # before the memory goes to somebody else


def names_in(directory: Path) -> list[str]:
    """What lies there, without what tells owners of the same number apart."""
    return sorted(re.sub(r"^(owner|aside)\.(\d+)-\w{8}$", r"\1.\2", path.name) for path in directory.iterdir())


def fails_on_rank_1(cfg: Config) -> tuple[list[str], list[dict]]:
    """Saves of steps 1, 2 and 3; during that of step 2 the files of rank 1 may not grow, as on a disk that is full."""
    trainer, _ = start_trainer(cfg)
    with Log(cfg, trainer.mesh.rank, trainer.mesh.world.size) as log:
        lines = []
        log.info = lines.append
        saves, figures = Checkpointer(cfg, trainer.state, {}, log), []
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for step in 1, 2, 3:
            figures += train(trainer, step - 1, step)
            if step == 2 and trainer.mesh.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            saves.save(step, 4 * step)
            saves.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return lines, figures


def test_a_failing_disk_costs_the_checkpoint_and_not_the_run(ranks, tmp_path):
    cfg = config(LLAMA, SHORT, {"parallel": {"tp": 2}})
    for lines, figures in ranks(2, fails_on_rank_1, saving(cfg, tmp_path, keep=0)):
        assert [("saved" in line, "failed" in line) for line in lines] == [(True, False), (False, True), (True, False)]
        assert lines[1].startswith("checkpoint of step 2 failed, training goes on: ")
        assert "step_00000002.tmp-" in lines[1] and "rank_00001.safetensors: file too large" in lines[1]
        assert figures == ranks(2, whole, cfg, 3)[0]
    assert names_in(tmp_path) == ["latest", "owner.1", "step_00000001", "step_00000003"]
    Reader(tmp_path).verify()


def test_the_directory_is_lost_during_the_run(tmp_path, capsys):
    cfg = saving(config(LLAMA, SHORT), tmp_path / "gone")
    trainer, _ = start_trainer(cfg)
    with Log(cfg, 0, 1) as log:
        saves = Checkpointer(cfg, trainer.state, {}, log)
        shutil.rmtree(tmp_path / "gone")
        (tmp_path / "gone").touch()
        saves.save(1, 4)
        saves.wait()
    assert f"checkpoint of step 1 failed, training goes on: {tmp_path}/gone: file exists\n" == capsys.readouterr().out
    for start in (
        partial(find_resume_point, open_weights=open_weights),
        lambda cfg: Checkpointer(cfg, trainer.state, {}, log),
    ):
        with pytest.raises(CheckpointError, match="gone: file exists"):
            start(cfg)


@pytest.mark.parametrize("place, reason", [("file", "file exists"), ("file/runs", "not a directory")])
@pytest.mark.parametrize("keys", [{}, {"every": None, "local_dir": "node"}], ids=["shared", "local"])
def test_a_directory_that_cannot_be_written_is_an_error_with_its_key(tmp_path, place, reason, keys):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        find_resume_point(saving(config(LLAMA), tmp_path / place, **keys), open_weights)
    folder = f"{tmp_path}/{place}"
    assert str(caught.value) == (
        f"checkpoint.dir={folder} cannot be written: {folder}: {reason}; name another directory, or null for none"
    )


def two_runs(cfg: Config) -> list[str]:
    """A second run starts where the first saves; both save step 2, the first one also step 3."""
    trainer, _ = start_trainer(cfg)
    with Log(cfg, trainer.mesh.rank, trainer.mesh.world.size) as log:
        lines = []
        log.info = lines.append
        first = Checkpointer(cfg, trainer.state, {}, log)
        first.save(1, 4)
        first.wait()
        second = Checkpointer(cfg, trainer.state, {}, log, step=1)
        agreement = Agreement.create(dist.get_rank(), dist.get_world_size(), None)  # it saves at the same time
        second.decide = second.shared.decide = partial(agreement.decide, errors=ERRORS)
        for saves in second, first:
            saves.save(2, 8)
        second.wait()
        try:
            first.save(3, 12)
        except CheckpointError as error:
            lines.append(str(error))
        second.save(3, 12)
        second.wait()
    return lines


def test_a_second_run_in_one_directory_takes_it_over(ranks, tmp_path):
    """The first notices, touches nothing there, loses nothing of its own, and ends."""
    for lines in ranks(2, two_runs, saving(config(LLAMA, SHORT), tmp_path, keep=1)):
        said = [line for line in lines if "taken over" in line]
        assert len(said) == 2 and [" saved: " in line for line in lines].count(True) == 4
        for line in said:
            assert line.startswith(f"{tmp_path} was taken over by process ")
            assert "started 20" in line and "; only one run at a time can save there: end one of them, or" in line
        (aside,) = tmp_path.glob("aside.*")
        assert said[1].endswith(f"; this run's step 2 is in {aside}")
    assert names_in(tmp_path) == ["aside.1", "latest", "owner.2", "step_00000003"]
    for folder, step in (tmp_path, 3), (aside, 2):
        Reader(folder).verify()
        assert Reader(folder).iteration == step


def cleared_away(cfg: Config) -> str:
    """While rank 1 writes its file, a second run takes the directory over and begins to save."""
    trainer, _ = start_trainer(cfg)

    def late(path: Path, mine: list) -> tuple:
        if trainer.mesh.rank == 1 and "aside" not in str(path):
            begin(path.parents[1], 2, 0, claim(path.parents[1]))
        return write_shard(path, mine)

    with pytest.MonkeyPatch.context() as patch, Log(cfg, trainer.mesh.rank, trainer.mesh.world.size) as log:
        patch.setattr("minitron.checkpoint.destination.write_shard", late)
        saves = Checkpointer(cfg, trainer.state, {}, log)
        saves.save(1, 4)
        with pytest.raises(TakenOver) as raised:
            saves.wait()
    return str(raised.value)


def test_a_save_that_the_next_run_has_cleared_away_is_made_aside(ranks, tmp_path):
    """A run that is told to end, and its successor is already there: this save is its last."""
    messages = ranks(2, cleared_away, saving(config(LLAMA, SHORT, {"parallel": {"tp": 2}}), tmp_path))
    (aside,) = tmp_path.glob("aside.*")
    assert len(set(messages)) == 1 and messages[0].endswith(f"; this run's step 1 is in {aside}")
    Reader(aside).verify()


# ---- what is refused ----------------------------------------------------------------------------------------------


def resume_on_2(cfg: Config) -> str:
    try:
        return f"step {start_trainer(cfg)[1].step}"
    except CheckpointError as error:
        return str(error)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_ends_the_run_and_names_another(ranks, tmp_path):
    """One rank finds the damage; all say it, and where to go back to. Going back holds for restarts too."""
    cfg = saving(config(LLAMA, SHORT), tmp_path)
    for until in 2, 4:
        ranks(2, leg, cfg, until)
    assert ranks(2, resume_on_2, cfg) == ["step 4"] * 2
    shard = tmp_path / "step_00000004" / "rank_00001.safetensors"
    flip(shard)
    first, second = ranks(2, resume_on_2, cfg)
    assert first == second and first.startswith(f"{shard} is damaged: ")
    assert first.endswith("; checkpoint.resume_step=2 goes back to step_00000002")
    assert ranks(2, resume_on_2, saving(cfg, tmp_path, resume=False)) == ["step 0"] * 2

    back = saving(cfg, tmp_path, resume_step=2)
    ranks(2, leg, back, 3)
    assert ranks(2, resume_on_2, back) == ["step 3"] * 2  # the same command again does not go back again
    flip(tmp_path / "step_00000003" / "index.json")
    assert ranks(2, resume_on_2, back) == ["step 2"] * 2
    assert ranks(2, resume_on_2, cfg)[0].endswith(
        "its first line is not the checksum of the rest; checkpoint.resume_step=4 goes back to step_00000004"
    )
    for folder in "step_00000002", "step_00000004":
        (tmp_path / folder / "index.json").unlink()
    assert ranks(2, resume_on_2, cfg)[0].endswith("there is no other checkpoint; checkpoint.resume=false begins anew")
    (tmp_path / "latest").write_text("step_00000002 00000000\n")
    assert ranks(2, resume_on_2, cfg)[0].startswith(f"{tmp_path}/latest is damaged")


def test_a_damaged_descendant_is_not_passed_over(ranks, tmp_path):
    """A restart with resume_step still on its command line must not begin there again and lose what followed."""
    cfg = saving(config(LLAMA, SHORT), tmp_path)
    ranks(2, leg, cfg, 2)
    back = saving(cfg, tmp_path, resume_step=2)
    for until in 3, 4:
        ranks(2, leg, back, until)
    flip(tmp_path / "step_00000004" / "index.json")
    first, second = ranks(2, resume_on_2, back)
    assert first == second and first.startswith(f"{tmp_path}/step_00000004/index.json is damaged")
    assert first.endswith("checkpoint.resume_step=3 goes back to step_00000003")


def sees_another(cfg: Config) -> str:
    """Each rank is a node, which sees its own disk under the same name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(cfg.checkpoint.dir) / str(torch.distributed.get_rank()))
        return resume_on_2(saving(cfg, Path("saves")))


@pytest.mark.parametrize("has_it", [0, 1])
def test_a_directory_that_is_not_shared(ranks, tmp_path, has_it):
    ranks(1, leg, saving(config(LLAMA, SHORT), tmp_path / str(has_it) / "saves"), 1)
    (tmp_path / str(1 - has_it)).mkdir()
    first, second = ranks(2, sees_another, saving(config(LLAMA, SHORT), tmp_path))
    assert first == second and f"start after step {1 - has_it}; it must be one directory that all nodes share" in first


@pytest.mark.parametrize("more", [{}, {"finetune": {"kind": "lora"}}])
def test_saves_would_delete_the_weights_that_a_run_starts_from(tmp_path, more):
    """Adapters need theirs for good: their step 1 would have taken the place of the base's."""
    cfg = saving(config(LLAMA, SHORT), tmp_path)
    save(start_trainer(cfg)[0], cfg, 1)
    (link := tmp_path / "link").symlink_to(".")  # another name of the same directory
    for path in tmp_path, os.path.relpath(tmp_path / "step_00000001"):
        anew = saving(config(LLAMA, SHORT, more), tmp_path, resume=False, load=str(path))
        with pytest.raises(CheckpointError, match=f"^checkpoint.load={path} is in checkpoint.dir={tmp_path}, where"):
            find_resume_point(anew, open_weights)
        with pytest.raises(CheckpointError, match="where this run's saves would delete it"):
            find_resume_point(saving(anew, link), open_weights)
        find_resume_point(saving(anew, tmp_path / "another"), open_weights)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_layers": 4}, "index.json is of another model: model.num_layers was 2 and is 4; "),
        ({"num_kv_heads": 2}, "model.num_kv_heads was 4 and is 2"),
        ({"head_dim": 6}, "model.head_dim was 4 and is 6"),
        ({"qkv_bias": True}, "model.qkv_bias was False and is True"),
        ({"qk_norm": True}, "model.qk_norm was False and is True"),
        ({"rope_theta": 500.0}, "model.rope_theta was 100.0 and is 500.0"),
        ({"rope_scaling": RopeScaling()}, "model.rope_scaling was None and is "),
        ({"norm_eps": 1e-6}, "model.norm_eps was 1e-05 and is 1e-06"),
        ({"vocab_size": 91}, "model.vocab_size was 90 and is 91"),
        ({"family": "gpt"}, "model.family was llama and is gpt"),
        ({"tie_embeddings": True}, "model.tie_embeddings was False and is True"),
        ({"vocab_multiple": 128}, r"head.weight was \[96, 32\] and is \[128, 32\]"),
    ],
)
def test_another_model(tmp_path, change, message):
    cfg = saving(config(LLAMA, SHORT), tmp_path)
    save(start_trainer(cfg)[0], cfg, 1)
    other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **change))
    with pytest.raises(CheckpointError, match=message):
        start_trainer(other)
    # A width that is written out is no other one.
    start_trainer(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, head_dim=cfg.model.head_width)))
    loading = dataclasses.replace(other, checkpoint=dataclasses.replace(Config().checkpoint, load=str(tmp_path)))
    # A longer context, say, is a reason to take weights into another model.
    if change.keys() & {"rope_theta", "rope_scaling", "norm_eps", "vocab_size"}:
        start_trainer(loading)
    else:
        with pytest.raises(CheckpointError, match=message):
            start_trainer(loading)


# ---- as users run it ----------------------------------------------------------------------------------------------

COMMAND = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.vocab_size=300",
    "train.seq_len=32",
    "train.global_batch_size=8",
    "train.eval_every=3",
    "train.eval_steps=1",
    "data.source=mock",
    "precision.dtype=fp32",
    "optimizer.lr_schedule=constant",
    "model.hidden_dropout=0.1",
]


def losses_of(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


def test_the_same_command_goes_on(tmp_path, capsys):
    """Saved every 2 steps, kept 2, ended by train.steps; with more of them, the same command goes on from there."""

    def command(name: str, steps: int, *more: str) -> str:
        pretrain.main([*COMMAND, f"log.dir={tmp_path / name}", f"train.steps={steps}", *more])
        return capsys.readouterr().out

    saves = [f"checkpoint.dir={tmp_path / 'saves'}", "checkpoint.every=2"]
    command("whole", 8)
    first, then = command("cut", 5, *saves), command("cut", 8, *saves)
    assert "resumed" not in first and f"resumed from {tmp_path}/saves/step_00000005\n" in then
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")
    assert names_in(tmp_path / "saves") == ["latest", "owner.2", "step_00000006", "step_00000008"]
    assert "consumed samples" not in command("cut", 8, *saves)  # nothing is left to do
    assert "weights of" in command("new", 1, f"checkpoint.load={tmp_path / 'saves'}")
    assert losses_of(tmp_path / "new")[1] < losses_of(tmp_path / "whole")[1]

    inspect_checkpoint.main([str(tmp_path / "saves"), "--tensors"])
    shown = capsys.readouterr().out
    for text in (
        "iteration 8   consumed samples 64",
        "world 1   tp 1",
        "optimizer_steps 8.0",
        "beside it: step_00000006",
        "blocks.1.mlp.up.weight   [96, 32]   master float32, exp_avg float32",
        "all 1 checksums are right",
    ):
        assert text in shown
    shard = tmp_path / "saves" / "step_00000008" / "rank_00000.safetensors"
    flip(shard)
    inspect_checkpoint.main([str(tmp_path / "saves"), "--no-verify"])
    with pytest.raises(CheckpointError, match="rank_00000.safetensors is damaged"):
        inspect_checkpoint.main([str(tmp_path / "saves")])
    with pytest.raises(ValueError, match="no-saves.*name a checkpoint"):
        inspect_checkpoint.main([str(tmp_path / "no-saves")])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command("cut", 9, *saves)
    lines = capsys.readouterr().err
    assert ended.value.code == 1 and lines.count("\n") == 1 and lines.startswith(f"error: {shard} is damaged")


def test_a_run_that_saves_only_if_it_is_stopped(tmp_path, capsys):
    """tests/launch/test_slurm.py stops one."""
    pretrain.main([*COMMAND, "train.steps=3", "checkpoint.every=null", f"checkpoint.dir={tmp_path / 'saves'}"])
    assert "iteration        3/       3" in capsys.readouterr().out
    assert not list(tmp_path.glob("saves/step_*"))


def test_a_run_that_saves_only_if_it_is_stopped_resumes_from_a_directory_that_cannot_be_written(
    tmp_path, capsys, monkeypatch
):
    command, mkdir = [*COMMAND, f"checkpoint.dir={tmp_path / 'saves'}"], Path.mkdir
    pretrain.main([*command, "train.steps=2"])
    before = names_in(tmp_path / "saves")

    def refuse(path, *args, **kwargs):  # permissions do not bind root
        if path.is_relative_to(tmp_path / "saves"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        pretrain.main([*command, "train.steps=3"])
    assert "read-only file system" in capsys.readouterr().err
    pretrain.main([*command, "train.steps=3", "checkpoint.every=null"])
    output = capsys.readouterr()
    assert "resumed from" in output.out and "iteration        3/       3" in output.out
    assert "read-only file system" in output.out + output.err and names_in(tmp_path / "saves") == before


def test_a_directory_with_other_things_in_it(tmp_path, capsys):
    """Temporary names are recognised by their whole form; a step that is not ours ends the start, not the last save."""
    (tmp_path / "thesis.tmp-final").mkdir()
    (tmp_path / "notes.tmp-1").write_text("notes")
    command = [*COMMAND, f"checkpoint.dir={tmp_path}"]
    pretrain.main([*command, "train.steps=2"])
    assert names_in(tmp_path) == ["latest", "notes.tmp-1", "owner.1", "step_00000002", "thesis.tmp-final"]
    (tmp_path / "step_00000004").mkdir()
    (tmp_path / "step_00000004" / "photo.jpg").write_text("photo")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        pretrain.main([*command, "train.steps=4"])
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/step_00000004 is in the way of a save of this run: it holds "
        "files that no save wrote; move it away, or use another checkpoint.dir\n"
    )
    pretrain.main([*command, "train.steps=3"])
    assert names_in(tmp_path / "step_00000004") == ["photo.jpg"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_under_log_dir_does_not_end_a_run(tmp_path, capsys):
    folder = tmp_path / "log"
    folder.mkdir()
    for name in "metrics.jsonl", "rank-0.log", "profile-rank-0.txt":
        (folder / name).symlink_to("/dev/full")
    pretrain.main(
        [
            *COMMAND,
            "train.steps=3",
            f"checkpoint.dir={tmp_path / 'saves'}",
            f"log.dir={folder}",
            "profile.kind=torch",
            "profile.start_step=2",
            "profile.end_step=2",
        ]
    )
    output = capsys.readouterr()
    assert output.err.startswith(f"warning: {folder}/metrics.jsonl cannot be written: no space left on device; ")
    assert output.err.count("warning: ") == 1
    assert "profiled iterations 2 to 2: " in output.out and "profile-rank-0.* cannot be written: no space" in output.out
    assert not (folder / "profile-rank-0.txt").exists()
    assert "iteration        3/       3" in output.out and Reader(tmp_path / "saves").iteration == 3
    (file := tmp_path / "file").touch()  # what the user has to mend ends the start
    with pytest.raises(SystemExit):
        pretrain.main([*COMMAND, "train.steps=4", f"log.dir={file}"])
    assert capsys.readouterr().err.startswith(f"error: log.dir={file} cannot be written: ")


# ---- the order of samples -----------------------------------------------------------------------------------------


def test_the_data_index_is_pinned(tmp_path):
    """A run that goes on has its samples in the order it began with, whatever train.steps is now."""

    def write(documents: int) -> None:
        with IndexedWriter(str(tmp_path / "text"), np.dtype("<i4")) as writer:
            for i in range(documents):
                writer.add_document([np.arange(40, dtype=np.int32) + i % 50])

    def with_(section: str, **keys) -> Config:
        return dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **keys)})

    write(60)
    cfg = config(
        LLAMA,
        {
            "train": {"steps": 20, "global_batch_size": 8},
            "data": {
                "source": "indexed",
                "paths": (str(tmp_path / "text"),),
                "split": "1",
                "cache_dir": str(tmp_path / "cache"),
            },
        },
    )
    data = build_data(cfg)
    reader = Reader.__new__(Reader)
    reader.path = tmp_path / "step_00000005"
    reader.index = reader.path / "index.json"
    start = ResumePoint(reader, True, 5, 40, json.loads(json.dumps(data.info)))
    for steps in 3, 12, 20:
        again = build_data(with_("train", steps=steps), start)
        assert len(again.train) == len(data.train)
        assert all((again.train[i].tokens == data.train[i].tokens).all() for i in range(160))
    assert build_data(with_("train", steps=12)).info["train"] != data.info["train"]  # which is why it is pinned
    most = len(data.train) // 8
    build_data(with_("train", steps=most), start)
    message = rf"train.steps={most + 1} needs {8 * most + 8} samples.*use at most {most}, or"
    with pytest.raises(ValueError, match=message):
        build_data(with_("train", steps=most + 1), start)
    for changed, name in (
        (with_("train", seed=5), "seed was 1234 and is 5"),
        (with_("data", split="2,1"), "split was 1 and is 2,1"),
    ):
        with pytest.raises(CheckpointError, match=f"index.json was saved with other data: {name}.*checkpoint.load="):
            build_data(changed, start)
    write(61)
    with pytest.raises(CheckpointError, match="data was .* and is "):
        build_data(cfg, start)


def test_a_run_resumes_with_other_evaluations(tmp_path):
    reader = SimpleNamespace(path=tmp_path, index=tmp_path / "index.json")
    data = {"train": "a", "train_samples": 40, "valid": "b", "valid_samples": 8}
    start = ResumePoint(reader, True, 5, 40, data)
    for change in {}, {"valid": "c"}, {"valid_samples": 16}, {"valid": None, "valid_samples": 0}:
        check_data(start, data | change)
    for change in {"train": "c"}, {"train": None}, {"train_samples": 41}:
        with pytest.raises(CheckpointError, match=f"data: {next(iter(change))} was"):
            check_data(start, data | change)
