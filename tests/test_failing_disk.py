"""A disk that fails at any file operation costs a save or a record, and never the run."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from re import sub
from types import SimpleNamespace
from unittest import mock

import pytest

from failing_disk import ERRNOS, FailingDisk
from layouts import LLAMA, config
from minitron import pretrain
from minitron.checkpoint import destination
from minitron.checkpoint.directory import TakenOver, begin, check_owner, checkpoints, claim, newest
from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.reader import Reader
from minitron.checkpoint.save import Checkpointer
from minitron.interop.export import Exporter
from minitron.runtime.log import Log
from minitron.train import Trainer
from test_checkpoint import COMMAND, LONG, saving, start_trainer
from test_directory import Killed

ERRORS = [getattr(errno, name) for name in ERRNOS]


class Saves:
    """A run of one process that saves again and again; `folder` is where, on the node's own disk if it is `local`."""

    def __init__(self, tmp_path: Path, log: Log, local: bool):
        keys = {"local_dir": str(tmp_path / "node"), "local_every": 1} if local else {}
        cfg = saving(config(LLAMA, LONG, {"model": {"num_layers": 1}}), tmp_path / "shared", keep=2, **keys)
        self.trainer, _ = start_trainer(cfg)
        self.lines: list[str] = []
        log.info = self.lines.append
        self.folder, self.local = tmp_path / ("node" if local else "shared"), local
        self.saves, self.step = Checkpointer(cfg, self.trainer.state, {}, log), 0
        if local:
            self.saves.save(1, 1)
            self.saves.wait()
            self.step = 1
        self.save()

    def save(self) -> str:
        """Save the next step; return what the log says."""
        self.step += 1
        self.lines.clear()
        self.trainer.state.optimizer.masters[0][0] = self.step
        self.saves.save(self.step, self.step, self.local)
        self.saves.wait()
        (line,) = self.lines
        return line

    def whole(self) -> int:
        """The step of the newest save, all bytes of which are right."""
        reader = Reader(newest(self.folder))
        reader.verify()
        name = next(iter(reader.names()))
        assert reader.read(name, "master", [0] * len(reader.shape(name)), reader.shape(name)) is not None
        return reader.iteration

    def go_back(self) -> None:
        """Save the next step, and go back to before it: the save after this one replaces it."""
        self.save()
        self.step -= 1
        (self.saves.local if self.local else self.saves.shared).saved = self.step


@pytest.mark.parametrize("local", [False, True], ids=["shared", "local"])
@pytest.mark.parametrize("times", [1, 10**9], ids=["one operation", "all from there on"])
@pytest.mark.parametrize("numbers", [1, pytest.param(len(ERRORS), marks=pytest.mark.slow)], ids=["in turn", "each"])
def test_a_save_that_fails_at_any_operation_costs_itself_alone(tmp_path, monkeypatch, local, times, numbers):
    """Whatever fails, the newest save is whole, the next one succeeds, and nothing is left of the failed one.

    numbers: how many errors are raised at each operation, of those that take turns.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a thousand real ones take minutes
    with Log(config(LLAMA), 0, 1) as log:
        run = Saves(tmp_path, log, local)
        run.go_back()
        with FailingDisk(run.folder) as disk:
            assert "saved" in run.save()
        same = [sub(r"[0-9a-f]{8}", "", name) for name in disk.done]
        failed = 0
        for first in range(1, len(same) + 1):
            if same[first - 1 : first + 1] == same[first - 2 : first - 1] * 2:
                continue  # of the writes to a file the first and the last will do
            for number in [ERRORS[(first + i) % len(ERRORS)] for i in range(numbers)]:
                run.go_back()
                with FailingDisk(run.folder, number, first, times) as failing:
                    line = run.save()
                at = f"{errno.errorcode[number]} at {first}, {disk.done[first - 1]}: {line}"
                assert len(failing.done) >= first, at
                assert ("failed, training goes on" in line) != (f"step {run.step} saved" in line), at
                failed += "failed" in line
                assert run.whole() == run.step, at  # the new one, or the one that it was to replace
                assert "saved" in run.save() and run.whole() == run.step, at
                assert not list(run.folder.glob("*.tmp-*")) and max(checkpoints(run.folder)) == run.step, at
    assert failed > 30


def test_a_claim_that_fails_at_any_operation_takes_nothing_over(tmp_path):
    """It is an error of the start. The run that has the directory goes on, and the next start takes it over."""
    owner = claim(tmp_path)
    with FailingDisk(tmp_path) as disk:
        owner = claim(tmp_path)
    failed = 0
    for first in range(1, len(disk.done) + 1):
        for number in ERRORS:
            with FailingDisk(tmp_path, number, first):
                try:
                    owner = claim(tmp_path)
                except CheckpointError:
                    failed += 1
            check_owner(tmp_path, owner)
    assert failed > len(disk.done)


def test_a_run_that_is_killed_in_a_claim_stops_nobody_with_an_empty_name(tmp_path):
    """Before every operation. Until its owner file says who it is, the run before has the directory."""
    first = claim(tmp_path / "count")
    with FailingDisk(tmp_path / "count") as disk:
        claim(tmp_path / "count")
    empty = 0
    for moment in range(1, len(disk.done) + 1):
        first = claim(folder := tmp_path / f"{moment}")
        with pytest.raises(Killed), FailingDisk(folder, first=moment, times=10**9, error=Killed):
            claim(folder)
        empty += any(not path.stat().st_size for path in folder.glob("owner.*"))
        try:
            begin(folder, 1, 0, first)
        except TakenOver as error:
            assert f"taken over by process {os.getpid()} on " in str(error)
        second = claim(folder)
        begin(folder, 2, 0, second)
        assert [path.name for path in folder.glob("owner.*")] == [f"owner.{second}"]
        with pytest.raises(TakenOver, match=f"taken over by process {os.getpid()} on "):
            begin(folder, 3, 0, first)
    assert empty


@pytest.mark.parametrize("left", [b"", b"notes of somebody"])
def test_an_owner_file_that_says_no_run_does_not_count(tmp_path, left):
    owner = claim(tmp_path)
    (tmp_path / "owner.99-01234567").write_bytes(left)
    check_owner(tmp_path, owner)
    second = claim(tmp_path)
    check_owner(tmp_path, second)
    assert (tmp_path / "owner.99-01234567").exists() == bool(left)
    with pytest.raises(TakenOver, match="process"):
        check_owner(tmp_path, owner)


def test_a_run_that_cannot_save_aside_ends_as_one_whose_directory_was_taken(tmp_path):
    """Else its supervisor would start it again, and it would take the directory back."""
    with Log(config(LLAMA), 0, 1) as log:
        run = Saves(tmp_path, log, local=False)
        owner = run.saves.shared.owner
        claim(run.folder)
        with (
            FailingDisk(run.folder / f"aside.{owner}", errno.EIO, 1, 10**9),
            pytest.raises(TakenOver, match="not saved"),
        ):
            run.save()


def test_an_export_whose_folder_cannot_be_seen_costs_no_run(tmp_path):
    log = SimpleNamespace(info=print, warn=print)
    exporter = Exporter(saving(config(LLAMA), tmp_path, every=1), log)
    with FailingDisk(tmp_path) as disk:
        exporter.saved(tmp_path / "step_00000001", 1)
        exporter.close(1)
    for first in range(1, len(disk.done) + 1):
        with FailingDisk(tmp_path, errno.ESTALE, first):
            exporter.saved(tmp_path / "step_00000001", 1)
            exporter.close(1)


def test_a_run_whose_disks_fail_for_a_while_goes_on(tmp_path, capsys, monkeypatch):
    """The whole program: while steps 3 to 5 run, nothing below its folders can be read or written."""
    step, disk = Trainer.step, FailingDisk(tmp_path / "run", errno.EIO, 1, 10**9)

    def steps(trainer, *args):
        seen.append(trainer)
        if len(seen) == 3:
            disk.__enter__()
        elif len(seen) == 6:
            disk.__exit__()
        return step(trainer, *args)

    seen: list[Trainer] = []
    monkeypatch.setattr(Trainer, "step", steps)
    folder = tmp_path / "run"
    where = [
        f"checkpoint.dir={folder / 'saves'}",
        f"checkpoint.local_dir={folder / 'node'}",
        f"log.dir={folder / 'log'}",
    ]
    keys = ["train.steps=8", "checkpoint.every=2", "checkpoint.local_every=1", "checkpoint.async_save=false"]
    pretrain.main([*COMMAND, *where, *keys])
    output = capsys.readouterr()
    assert "checkpoint of step 4 failed, training goes on" in output.out
    assert "local save of step 3 failed, training goes on" in output.out
    assert "iteration        8/       8" in output.out and "Traceback" not in output.out + output.err
    reader = Reader(folder / "saves")
    reader.verify()
    assert reader.iteration == 8 and list(checkpoints(folder / "saves"))[-2:] == [6, 8]


def test_a_run_whose_last_save_fails_is_not_complete_and_the_same_command_completes_it(tmp_path, capsys):
    write = destination.write_shard

    def fails(path, shards):
        if path.parent.name.startswith("step_00000002"):
            raise CheckpointError("no space left on device")
        return write(path, shards)

    command = [*COMMAND, f"checkpoint.dir={tmp_path}", "train.steps=2", "checkpoint.every=1"]
    with mock.patch.object(destination, "write_shard", fails), pytest.raises(SystemExit) as ended:
        pretrain.main(command)
    assert ended.value.code not in (None, 0) and Reader(tmp_path).iteration == 1
    pretrain.main(command)
    assert Reader(tmp_path).iteration == 2 and "Traceback" not in capsys.readouterr().err
