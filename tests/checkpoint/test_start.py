"""How ranks come to a common start: who opens what, how long they wait for each other, and which model they refuse."""

from __future__ import annotations

import dataclasses
import gc
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from layouts import LLAMA, config, mesh_of
from minitron import pretrain
from minitron.checkpoint import directory, load, reader
from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.load import agree_on_start, restore
from minitron.checkpoint.reader import Reader
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.interop import weights as adapter
from minitron.model import gpt
from minitron.pretrain import open_weights
from minitron.runtime.log import Log
from minitron.train import build
from test_checkpoint import COMMAND, LONG, contents, flip, leg, resume_on_2, save, saving, start_trainer
from tools import generate

# ---- who opens what -----------------------------------------------------------------------------------------------


def counted(cfg: Config) -> dict:
    """Start, and count what this rank does in checkpoint.dir, and how much of the index it has parsed."""
    counts = {"indices": 0, "probes": 0, "listings": 0}

    def count(name: str, function):
        def counting(*args):
            counts[name] += 1
            return function(*args)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "read_index", count("indices", reader.read_index))
        patch.setattr(load, "make_writable", count("probes", load.make_writable))
        patch.setattr(directory, "_step_folders", count("listings", directory._step_folders))
        mesh = mesh_of(cfg)
        start = agree_on_start(cfg, mesh, open_weights, mesh.rank == 0)
        trainer = build(cfg, mesh)
        restore(start, trainer.state)
    own = {p.spec.name for chunk in trainer.chunks for p in chunk.parameters()}
    parsed = {name for name, part in start.reader._tensors.items() if isinstance(part, dict)}
    return {"step": start.step, "own": own, "parsed": parsed, "names": set(start.reader.names()), **counts}


@pytest.mark.parametrize("step", [None, 1])
def test_one_rank_reads_the_index_and_the_others_parse_their_part(ranks, tmp_path, step):
    """Also where it opens every checkpoint, since the newest is damaged and may descend from the step to go back to."""
    cfg = saving(config(LLAMA, LONG), tmp_path, keep=0)
    trainer, _ = start_trainer(cfg)
    for saved in 1, 2, 3:
        save(trainer, cfg, saved)
    if step is not None:
        flip(tmp_path / "step_00000003" / "index.json")
    cfg = saving(config(LLAMA, LONG, {"parallel": {"pp": 2}}), tmp_path, resume_step=step)
    first, *others = ranks(4, counted, cfg)
    assert (first["indices"] == 1) == (step is None) and first["probes"] == 1
    for other in others:
        assert other["step"] == first["step"] == (step or 3)
        assert other["indices"] == other["probes"] == other["listings"] == 0
        assert other["names"] == first["names"] and other["parsed"] <= other["own"] < other["names"]


def test_no_index_is_kept_while_training(tmp_path, monkeypatch):
    command = [*COMMAND, f"checkpoint.dir={tmp_path / 'saves'}", f"data.cache_dir={tmp_path}"]
    pretrain.main([*command, "train.steps=2"])
    train, kept = pretrain.train, []

    def look(*args):
        kept.append([r for r in gc.get_objects() if isinstance(r, Reader) and tmp_path in r.path.parents])
        return train(*args)

    monkeypatch.setattr(pretrain, "train", look)
    pretrain.main([*command, "train.steps=4"])
    assert kept == [[]]


@pytest.mark.parametrize("whole", [True, False])
def test_a_rank_verifies_what_it_reads_and_its_part_of_all_other_files(whole):
    """A local save is verified at the start and not read again. A folder of another format verifies itself."""

    class Stored(Reader):
        def __init__(self):
            self.files, self.verified = {f"{i}": {"bytes": 10} for i in range(7)}, []

        def files_of(self, wanted):
            return ["5"]

        def verify(self, files=None):
            self.verified += ["all"] if files is None else files

    for rank in range(4):
        stored, mesh = Stored(), Mesh.offline(4, rank, tp=2)
        load._fill(stored, [], mesh, verified=not whole)
        assert stored.verified == (sorted({"5", *"0123456"[rank::4]}) if whole else [])
        other = mock.Mock()
        load._fill(other, [], mesh, verified=not whole)
        assert other.verify.call_args_list == [mock.call()] * whole


# ---- a slow disk --------------------------------------------------------------------------------------------------


def waits_for_the_late(cfg: Config, late_seconds: float, timeout: timedelta) -> float:
    """Resume, while the last rank reads late: what the first one has waited. No collective may wait for it."""
    mesh = mesh_of(cfg)
    trainer, start = build(cfg, mesh), agree_on_start(cfg, mesh, open_weights)
    fill, write = load._fill, trainer.optimizer.write_parameters
    groups = [axis.group for axis in vars(mesh).values() if getattr(axis, "group", None) is not None]

    def limit(seconds: timedelta) -> None:
        for group in {dist.group.WORLD, *groups}:
            dist.distributed_c10d._set_pg_timeout(seconds, group)

    def late(*args):
        time.sleep(late_seconds if mesh.rank else 0)
        fill(*args)

    def in_step() -> None:
        limit(timedelta(days=1))
        write()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_fill", late)
        patch.setattr(trainer.optimizer, "write_parameters", in_step)
        limit(timeout)
        begin = time.monotonic()
        restore(start, trainer.state)
        return time.monotonic() - begin


def test_a_rank_that_reads_longer_than_a_collective_may_take(ranks, tmp_path):
    cfg = saving(config(LLAMA, LONG), tmp_path)
    save(start_trainer(cfg)[0], cfg, 1)
    assert min(ranks(2, waits_for_the_late, cfg, 6.0, timedelta(seconds=3))) >= 6.0


def test_the_log_tells_how_far_a_slow_disk_is(tmp_path, monkeypatch):
    cfg = saving(config(LLAMA, LONG), tmp_path)
    trainer, _ = start_trainer(cfg)
    save(trainer, cfg, 1)
    monkeypatch.setattr(load, "PROGRESS_SECONDS", 0.0)
    made, progress = [], load._LoadProgress
    monkeypatch.setattr(load, "_LoadProgress", lambda *given: made.append(progress(*given)) or made[-1])
    mesh = mesh_of(cfg)
    trainer, lines = build(cfg, mesh), []
    with Log(cfg, 0, 1) as log:
        log.info = lines.append
        restore(agree_on_start(cfg, mesh, open_weights), trainer.state, log)
        assert len(lines) > 1 and all("GB" in line for line in lines)
        assert [each.done for each in made] == [each.total for each in made]  # to check the files counts as well
        lines.clear()
        monkeypatch.setattr(load, "PROGRESS_SECONDS", 60.0)
        restore(agree_on_start(cfg, mesh, open_weights), trainer.state, log)
        assert not lines or time.monotonic() - log._begun.timestamp() > 60


def test_progress_is_written_once_a_minute(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(load, "monotonic", lambda: now[0])
    progress = load._LoadProgress(SimpleNamespace(info=lines.append), 8 * 10**9)
    for now[0] in range(20, 180, 20):
        progress.add(10**9)
    assert ["3.00 of 8.00 GB" in lines[0], "6.00 of 8.00 GB" in lines[1], len(lines)] == [True, True, 2]


# ---- another model ------------------------------------------------------------------------------------------------


class WithScale(gpt.Attention):
    """Attention with a parameter that the network of the repository lacks."""

    def __init__(self, cfg, mesh, layout, layer, gemm):
        super().__init__(cfg, mesh, layout, layer, gemm)
        self.scale = layout.parameter((self.head_dim,), fill=1.0)


OWN = "blocks.0.attention.scale"


def refused(cfg: Config) -> str:
    with pytest.raises(CheckpointError) as caught:
        start_trainer(cfg)
    return str(caught.value)


def in_layout(cfg: Config, **keys) -> Config:
    return dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, **keys))


@pytest.fixture
def own(tmp_path, monkeypatch) -> Config:
    """A run with a class of its own has saved here."""
    cfg = saving(config(LLAMA, LONG), tmp_path / "own")
    with monkeypatch.context() as patch:
        patch.setattr(gpt, "Attention", WithScale)
        save(start_trainer(cfg)[0], cfg, 1)
        assert start_trainer(cfg)[1].step == 1
    return cfg


@pytest.mark.parametrize("world, layout", [(1, {}), (2, dict(tp=2)), (2, dict(pp=2))], ids=str)
def test_a_checkpoint_with_more_tensors_is_not_resumed(ranks, own, world, layout):
    before = contents(Path(own.checkpoint.dir))
    for message in ranks(world, resume_on_2, in_layout(own, **layout)):
        assert OWN in message and "start it with the class that made it" in message and "\n" not in message
    assert OWN in {name for name, _ in filter(lambda key: isinstance(key, tuple), before)}


@pytest.mark.parametrize("kind", [None, "sft", "lora"])
def test_its_weights_start_no_run(own, kind):
    place = {"checkpoint": {"load": own.checkpoint.dir}} if kind is None else {"finetune": {"base": own.checkpoint.dir}}
    message = refused(config(LLAMA, LONG, {"finetune": {"kind": kind}}, place))
    assert OWN in message and "start it with the class that made it" in message


def test_fewer_tensors_are_refused_alike(tmp_path, monkeypatch):
    cfg = saving(config(LLAMA, LONG), tmp_path)
    save(start_trainer(cfg)[0], cfg, 1)
    monkeypatch.setattr(gpt, "Attention", WithScale)
    assert OWN in refused(cfg)


def test_nothing_is_generated_from_a_part_of_a_model(own, monkeypatch):
    monkeypatch.setattr(generate, "find_tokenizer", lambda *_: None)
    with pytest.raises(CheckpointError) as caught:
        generate.load_model(own.checkpoint.dir, torch.device("cpu"))
    assert OWN in str(caught.value)


def test_adapters_beside_a_base_of_another_class(own, tmp_path, monkeypatch):
    """Adapters that were trained beside the user's own class are resumed with it, and not without."""
    keys = {"finetune": {"kind": "lora", "base": own.checkpoint.dir}, "lora": {"targets": ("q",)}}
    cfg = saving(config(LLAMA, LONG, keys), tmp_path / "adapters")
    with monkeypatch.context() as patch:
        patch.setattr(gpt, "Attention", WithScale)
        leg(cfg, 1)
        assert start_trainer(cfg)[1].step == 1
    assert OWN in refused(cfg)
    assert not adapter.best_kind(Reader(cfg.checkpoint.dir), OWN)
