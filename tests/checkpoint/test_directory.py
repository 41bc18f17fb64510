"""A directory of checkpoints: what is killed in a save leaves the checkpoint before it, and what others have put there
stays."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import config
from minitron.checkpoint import destination as destinations
from minitron.checkpoint import directory as directories
from minitron.checkpoint import load
from minitron.checkpoint.boxes import TensorShard
from minitron.checkpoint.destination import Destination
from minitron.checkpoint.directory import TakenOver, begin, claim, commit, make_writable, newest
from minitron.checkpoint.format import CheckpointError, describe, index_bytes, index_tensors, write_shard
from minitron.checkpoint.reader import Reader
from minitron.comm.mesh import Mesh
from minitron.config.cli import user_errors
from minitron.interop import import_weights
from minitron.supervise.lead import TAKEN
from test_checkpoint_format import write


class Killed(BaseException):
    """A process that has died does nothing more, so every later call raises it again."""


ABOUT = {"consumed_samples": 24, "config": {}, "layout": {}, "state": {}}


def piece(step: int) -> TensorShard:
    return TensorShard("a", "param", (2,), (0,), torch.full((2,), float(step)))


def described(step: int) -> list:
    return describe("rank_00000.safetensors", [piece(step)])


def save_until(directory: Path, moment: int) -> list[int]:
    """Save steps 1, 2, 2 again (a run that had gone back) and 3, keeping one; die at the moment-th change of the disk.

    Returns the steps whose save had ended.
    """
    calls, done = itertools.count(1), []

    def deadly(real):
        def call(*args, **kwargs):
            if next(calls) >= moment:
                raise Killed
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in "fsync", "rename", "replace", "mkdir", "rmdir", "unlink":
            patch.setattr(os, name, deadly(getattr(os, name)))
        try:
            for step in 1, 2, 2, 3:
                shard = write_shard((folder := begin(directory, step, 8)) / "rank_00000.safetensors", [piece(step)])
                commit(
                    folder,
                    index_bytes({**ABOUT, "iteration": step}, shard),
                    index_tensors([described(step)]),
                    keep=1,
                    after=step - 1,
                )
                done.append(step)
        except Killed:
            pass
    return done


def test_killed_at_any_moment_the_newest_is_whole(tmp_path):
    """Nothing that was saved is lost, nothing that was not is seen, and the next save clears up."""
    finished = 0
    for moment in itertools.count(1):
        directory = tmp_path / str(moment)
        directory.mkdir()
        done = save_until(directory, moment)
        between = done == [1, 2] and not (directory / "step_00000002").exists()  # the two renames that replace it
        finished += between
        folder = newest(directory)
        assert folder is not None or not done
        if folder is not None:
            reader = Reader(folder)
            reader.verify()
            assert max(done, default=0) <= reader.iteration <= max(done, default=0) + 1
            assert (reader.read("a", "param", (0,), (2,)) == reader.iteration).all()
        write(directory, 4)
        assert not list(directory.glob("*.tmp*"))
        if len(done) == 4:
            break
    assert moment > 40 and finished


def test_names_appear_by_renaming_what_the_disk_has(tmp_path, monkeypatch):
    """After a power cut a name must not stand for contents that never left the host's memory.

    Each file and its folder are synced before the rename that shows them, and the directory after it. Nothing is ever
    written under a final name, where a reader could find the first half of it.
    """
    events, fsync = [], os.fsync

    def synced(descriptor):
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def recorded(rename):
        def record(source, target):
            files = [path for path in Path(source).rglob("*")] if Path(source).is_dir() else []
            events.append(("rename", Path(source), Path(target), files))
            rename(source, target)

        return record

    monkeypatch.setattr(os, "fsync", synced)
    for name in "rename", "replace":
        monkeypatch.setattr(os, name, recorded(getattr(os, name)))
    monkeypatch.setattr(import_weights, "FILE_BYTES", 200)
    write(tmp_path)
    step, latest = (tmp_path / "step_00000003", tmp_path / "latest")
    shown = [(i, *event[1:]) for i, event in enumerate(events) if event[0] == "rename" and event[2] in (step, latest)]
    assert [target for _, _, target, _ in shown] == [step, latest] and len(shown[0][3]) > 2
    assert {path.name for path in shown[0][3]} == {path.name for path in step.iterdir()} | {"latest"}  # which moves on
    temporary = shown[0][1]
    for i, source, target, contents in shown:
        for path in (source, *contents):
            if path.parent == step:  # by the name that it had when it was written
                path = temporary / path.name
            assert ("sync", path) in events[:i], f"{path.name} shown as {target.name} before the disk has it"
        assert ("sync", tmp_path) in events[i:], f"{target.name} is not on the disk"
    assert ("sync", tmp_path) in events[shown[0][0] : shown[1][0]], "latest may reach the disk before what it names"
    written = [path for kind, path, *_ in events if kind == "sync"]
    assert not [path for path in written if path == latest or step in path.parents]


def test_old_ones_are_removed_and_later_ones_left(tmp_path):
    for step in 1, 2, 9:
        write(tmp_path, step)

    def save(step: int, after: int, keep: int) -> list[int]:
        commit(begin(tmp_path, step, 0), index_bytes({"iteration": step}, {}), b"{}", keep, after)
        return list(directories.checkpoints(tmp_path))

    assert save(3, 2, keep=2) == [2, 3, 9]
    assert save(8, 3, keep=2) == [3, 8, 9]
    assert save(10, 8, keep=0) == [3, 8, 9, 10]
    # of the run before it went back to 3: neither counts, nor pushes 8 out
    (tmp_path / "step_00000010").rename(tmp_path / "step_00000012")
    assert save(11, 8, keep=2) == [8, 11, 12]
    assert save(12, 11, keep=2) == [11, 12]
    assert save(13, 12, keep=2) == [12, 13]


def test_a_newer_owner_is_noticed_before_anything_is_deleted(tmp_path):
    """Whoever came first keeps its hands off; a killed run's number stops nobody, and nobody's files are in the way."""
    first, mine = claim(tmp_path), {"iteration": 1, **ABOUT}
    under_way = begin(tmp_path, 1, 0, first)
    second = claim(tmp_path)
    for call in (
        lambda: begin(tmp_path, 1, 0, first),
        lambda: commit(under_way, index_bytes(mine, {}), b"{}", owner=first),
    ):
        with pytest.raises(TakenOver, match=f"was taken over by process {os.getpid()} on .*, started 20"):
            call()
    other = begin(tmp_path, 1, 0, second)
    assert not under_way.exists() and other.exists()
    commit(other, index_bytes(mine, {}), b"{}", owner=second)
    (tmp_path / f"owner.{second}").unlink()  # as somebody may who tidies up
    begin(tmp_path, 2, 0, second)
    assert claim(tmp_path).startswith("1-")
    with pytest.raises(SystemExit, match=str(TAKEN)), user_errors(CheckpointError):  # no supervisor starts it again
        begin(tmp_path, 2, 0, first)
    with pytest.raises(TakenOver):  # the numbers begin again, and yet it is none of the two that were
        begin(tmp_path, 2, 0, first)


def test_a_run_that_finds_no_room_for_its_owner_file_takes_nothing_over(tmp_path, monkeypatch):
    owner = claim(tmp_path)

    def full(path, _):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match="no space left"):
        claim(tmp_path)
    directories.check_owner(tmp_path, owner)


def test_of_two_runs_that_start_at_the_same_instant_one_gets_the_directory(tmp_path, monkeypatch):
    both = threading.Barrier(2)

    def together(directory, owners=directories._owners):
        found = owners(directory)
        both.wait(10)
        return found

    with ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(directories, "_owners", together)
        owners = list(threads.map(claim, [tmp_path] * 2))
    monkeypatch.undo()
    assert [owner[:2] for owner in owners] == ["1-", "1-"]
    begin(tmp_path, 1, 0, max(owners))
    with pytest.raises(TakenOver):
        begin(tmp_path, 1, 0, min(owners))
    begin(tmp_path, 1, 0, third := claim(tmp_path))
    assert third.startswith("2-") and len(list(tmp_path.glob("owner.*"))) == 1


def test_a_replaced_step_is_back_if_the_new_one_cannot_be_renamed(tmp_path, monkeypatch):
    """A run that went back saves a step again, and the disk refuses the rename: the old save has its name again."""
    write(tmp_path, 2)
    shard = write_shard((folder := begin(tmp_path, 2, 0)) / "rank_00000.safetensors", [piece(2)])
    rename = os.rename

    def refuses(source, target):
        if Path(source) == folder:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuses)
    with pytest.raises(CheckpointError, match="input/output error"):
        commit(folder, index_bytes({**ABOUT, "iteration": 2}, shard), index_tensors([described(2)]))
    monkeypatch.undo()
    old = Reader(newest(tmp_path))
    old.verify()
    assert old.iteration == 2 and len(old.names()) > 1


def test_a_run_cannot_finish_a_save_that_another_deletes(tmp_path, monkeypatch):
    """Between a look at the owner and a rename another run may start, save, and clear up: then the rename fails."""
    under_way, rmtree = begin(tmp_path, 1, 0), shutil.rmtree
    (under_way / "rank_00000.safetensors").touch()

    def deletes(path, **options):
        if path.name.startswith("step_"):
            with pytest.raises(CheckpointError, match="step_00000001.tmp-.*: no such file"):
                commit(under_way, index_bytes({"iteration": 1, **ABOUT}, {}), b"{}")
            assert path.name.startswith("step_00000001.tmp-")
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", deletes)
    begin(tmp_path, 2, 0)
    assert newest(tmp_path) is None and not under_way.exists()


def test_a_mount_that_cannot_rename_folders_is_refused_at_the_start(tmp_path, monkeypatch):
    """As gcsfuse does by default in a bucket without folders."""

    def rename(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match=r"folders cannot be renamed \(Too many open files\).*; use a disk, or"):
        make_writable(tmp_path)


def test_an_error_leads_to_the_newest_checkpoint_before_it_else_to_the_newest(tmp_path):
    for step in 2, 4, 6:
        write(tmp_path, step)
    (tmp_path / "step_00000007").mkdir()
    (tmp_path / "step_00000007" / "index.json").write_text("damaged")
    for bad, other in (None, 6), (6, 4), (4, 2), (2, 6):
        reader = None if bad is None else Reader(tmp_path / f"step_{bad:08d}")
        assert f"checkpoint.resume_step={other} " in load.suggest_other_checkpoint(tmp_path, reader)


def test_a_foreign_folder_is_in_the_way_only_of_steps_to_come(tmp_path):
    """Up to train.steps, or of any later step if epochs decide. The one that is resumed may hold a user's file."""
    write(tmp_path, 4)
    (tmp_path / "step_00000004" / "notes.txt").write_text("the best one")
    for name, epochs, refused in [
        ("step_00000003", None, False),
        ("step_00000010", None, True),
        ("step_00000011", None, False),
        ("step_00000011", 2, True),
    ]:
        cfg = config({"train": {"steps": 10, "epochs": epochs}, "checkpoint": {"dir": str(tmp_path), "every": 5}})
        (tmp_path / name).mkdir()
        (tmp_path / name / "photo.jpg").write_text("photo")
        with pytest.raises(CheckpointError, match=name) if refused else nullcontext():
            assert load._newest_checkpoint(cfg, tmp_path).iteration == 4
        shutil.rmtree(tmp_path / name)


def test_a_link_to_a_checkpoint_is_a_user_s(tmp_path):
    """One that a user keeps elsewhere is neither deleted by keep nor replaced."""
    write(tmp_path / "kept", 1)
    for step in 1, 4:
        (tmp_path / f"step_{step:08d}").symlink_to("kept/step_00000001")
    before = everything_in(tmp_path / "kept")
    for step in 2, 3:
        commit(begin(tmp_path, step, 0), index_bytes({"iteration": step}, {}), b"{}", keep=1, after=step - 1)
    with pytest.raises(CheckpointError, match="step_00000004 is in the way"):
        write(tmp_path, 4)
    links = [path.name for path in sorted(tmp_path.iterdir()) if path.is_symlink()]
    assert links == ["step_00000001", "step_00000004"] and everything_in(tmp_path / "kept") == before


def test_latest(tmp_path):
    assert newest(tmp_path) is None
    write(tmp_path, 2)
    write(tmp_path, 1)  # of a run that went back: what was saved last counts
    assert newest(tmp_path).name == "step_00000001"
    (tmp_path / "latest").unlink()
    assert newest(tmp_path).name == "step_00000002"
    write(tmp_path, 3)
    shutil.rmtree(tmp_path / "step_00000003")
    with pytest.raises(CheckpointError, match="step_00000003 is missing, and .*latest names it"):
        newest(tmp_path)


@pytest.mark.parametrize("old, new", [("00000000", "ffffffff"), ("ffffffff", "00000000")])
@pytest.mark.parametrize("backwards", [False, True])
def test_of_two_hidden_folders_of_a_step_the_whole_save_gets_its_name(tmp_path, monkeypatch, old, new, backwards):
    """A kill between the two renames leaves them: the save that was to be replaced, and the one to replace it."""
    write(tmp_path, 2)
    (tmp_path / "step_00000002").rename(tmp_path / f"step_00000002.tmp-{old}")
    shutil.copytree(tmp_path / f"step_00000002.tmp-{old}", whole := tmp_path / f"step_00000002.tmp-{new}")
    (whole / "latest").write_bytes((tmp_path / "latest").read_bytes())
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listdir(path), reverse=backwards))
    assert newest(tmp_path).name == "step_00000002" and not whole.exists()
    assert (tmp_path / f"step_00000002.tmp-{old}").exists()


def test_steps_ranks_and_owners_of_more_digits(tmp_path):
    """A hundred million steps, a hundred thousand ranks, and a tenth run beside a file that it may not delete."""
    for step in 99_999_999, 100_000_000:
        killed, folder = (begin(tmp_path, step, 0) for _ in range(2))
        assert not killed.exists()
        shard = write_shard(folder / "rank_100000.safetensors", [piece(1)])
        tensors = index_tensors([describe("rank_100000.safetensors", [piece(1)])])
        commit(folder, index_bytes(ABOUT | {"iteration": step}, shard), tensors, keep=1, after=step - 1)
        assert newest(tmp_path).name == f"step_{step}" and Reader(tmp_path).iteration == step
    assert list(directories.checkpoints(tmp_path)) == [100_000_000]
    commit(begin(tmp_path, 12, 0), index_bytes({"iteration": 12}, {}), b"{}")
    assert zlib.crc32(b"step_00000012") < 1 << 28 and newest(tmp_path).name == "step_00000012"  # 0 is its first digit
    for number in 9, 10:
        (tmp_path / f"owner.{number}-5e0c91d2").write_text("somebody's")
    assert claim(tmp_path).startswith("11-")


SAVED = [
    ({}, False),
    ({"rank_00000.safetensors": b"x", "rank_100000.safetensors": b"", "index.json": b""}, True),
    ({"part_00000.safetensors": b"x", "latest": b"x", ".nfs0123": b"x", "index.json": b'{"checksum": "1'}, True),
    ({"rank_00000.safetensors": b"x", "index.json": b'{"check'}, True),
    ({"rank_00000.safetensors": b"x", "index.json": b'{"a": 1}'}, False),
    ({"rank_00000.safetensors": b"x", "notes.txt": b""}, False),
    ({"rank_00000.safetensors": "../file"}, False),
    ({"index.json": "../empty"}, False),
    ({"rank_00000.safetensors": {}}, False),
    ("folder", False),
]


@pytest.mark.parametrize("what, saved", SAVED)
def test_a_folder_is_a_saves_by_the_names_and_contents_of_all_its_files(tmp_path, what, saved):
    for name, content in {"file": b"x", "empty": b"", "folder": {"rank_00000.safetensors": b"x"}}.items():
        put(tmp_path / name, content)
    put(tmp_path / "step_00000001", what)
    assert directories._is_saved(tmp_path / "step_00000001") == saved


def test_a_disk_without_room_or_rights(tmp_path):
    with pytest.raises(CheckpointError, match="MB free and a save needs 1000000000 MB; free some"):
        begin(tmp_path, 1, 10**15)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: file exists"):
        begin(tmp_path / "file", 1, 0)
    assert begin(tmp_path / "a" / "b", 1, 0).is_dir()
    with pytest.raises(CheckpointError, match="/proc/nothing: no such file or directory"):
        begin(Path("/proc/nothing"), 1, 0)


def saved_with(free: int, folder: Path) -> bool:
    """Save 16 bytes of each rank and 8 of one rank of the stage, on a disk with `free` bytes. Each rank is a node."""
    mesh = Mesh.create()
    shards = [TensorShard("a", "master", (8,), (4 * mesh.rank,), torch.ones(4))]
    histories = [TensorShard("b", "fp8_history", (2,), (0,), torch.ones(2))]
    with mock.patch.object(destinations, "identity", return_value=mesh.rank):
        destination = Destination(folder, 1, mesh, 0, shards, histories)
    if destination.has_histories:
        shards += histories
    with mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=free)):
        try:
            destination.write(ABOUT | {"iteration": 1}, shards)
        except CheckpointError as error:
            assert "MB free and a save needs" in str(error)
            return False
    return True


def test_a_save_needs_room_for_what_all_ranks_write(ranks, tmp_path):
    assert ranks(2, saved_with, 39, tmp_path) == [False, False] and newest(tmp_path) is None
    assert ranks(2, saved_with, 40, tmp_path) == [True, True]


# ---- what others have put there -----------------------------------------------------------------------------------


def everything_in(folder: Path) -> dict[str, object]:
    """What a folder holds, at any depth: bytes of files, targets of links, None for folders."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


NAMES = st.one_of(
    st.sampled_from(
        [
            "thesis.tmp-final",
            "notes.tmp-1",
            "latest.tmp",
            "latest.txt",
            "owner.txt",
            "step_1",
            "index.json",
            "step_00000009",
            "step_00000009.tmp-8d21f06b",
            "probe.tmp-8d21f06b",
            "owner.1-5e0c91d2",
            "owner.99-5e0c91d2",
            "rank_00000.safetensors",
            "aside.1-5e0c91d2",
        ]
    ),
    st.from_regex(
        r"(step_\d{7,9}|probe|thesis|latest|owner)(\.\d\d?)?(-|\.tmp-)([0-9a-g]{7,9}|\w{3})(\.tmp-\w{8})?",
        fullmatch=True,
        alphabet=st.characters(codec="ascii"),
    ),
)
CONTENTS = st.one_of(
    st.binary(min_size=1, max_size=20),
    st.sampled_from([b"latest", b"step_00000009 and more", b"the process owner", b'{"a": 1}']),
)
PARTS = st.sampled_from(["index.json", "notes.txt", "file", "rank_00000.safetensors.bak", "rank_00000.safetensors"])


@st.composite
def foreign(draw) -> object:
    """What a name stands for that no save wrote: a file, a link, or a folder with something of somebody's in it."""
    kind = draw(st.sampled_from(["file", "link", "folder"]))
    if kind == "file":
        return draw(CONTENTS)
    if kind == "link":
        return draw(st.sampled_from(["../elsewhere", "../elsewhere/thesis.txt", "nowhere", "."]))
    names = draw(st.sets(PARTS, min_size=1)) | {draw(st.sampled_from(["notes.txt", "index.json"]))}
    return {name: draw(CONTENTS) for name in names}


def put(path: Path, what: object) -> None:
    if isinstance(what, bytes):
        path.write_bytes(what)
    elif isinstance(what, str):
        path.symlink_to(what)
    else:
        path.mkdir()
        for name, content in what.items():
            put(path / name, content)


@settings(max_examples=40)
@given(st.dictionaries(NAMES, foreign(), max_size=6))
def test_whatever_others_put_there_survives(tmp_path_factory, strangers):
    """Start, save, a save killed, deletions by keep, and another run that takes over: of theirs not a byte changes."""
    top = tmp_path_factory.mktemp("shared")
    directory, elsewhere = top / "here", top / "elsewhere"
    for folder in directory, elsewhere:
        folder.mkdir()
    (elsewhere / "thesis.txt").write_text("years of work")
    for name, what in strangers.items():
        put(directory / name, what)
    before, beside = everything_in(directory), everything_in(elsewhere)

    def save(step: int, owner: str) -> None:
        shard = write_shard((folder := begin(directory, step, 8, owner)) / "rank_00000.safetensors", [piece(step)])
        commit(
            folder,
            index_bytes({**ABOUT, "iteration": step}, shard),
            index_tensors([described(step)]),
            keep=1,
            after=step - 1,
            owner=owner,
        )

    make_writable(directory)
    first = claim(directory)
    for step in 1, 2:
        save(step, first)
    killed = begin(directory, 3, 0, first)
    write_shard(killed / "rank_00000.safetensors", [piece(3)])
    second = claim(directory)
    with pytest.raises(TakenOver):
        save(3, first)
    save(3, second)
    save(3, second)  # as a run that went back
    assert not killed.exists() and newest(directory).name == "step_00000003"
    Reader(directory).verify()
    after = everything_in(directory)
    assert everything_in(elsewhere) == beside
    ours = {"latest", f"owner.{second}", *(name for name in after if name.split("/")[0] == "step_00000003")}
    assert {name: content for name, content in after.items() if name not in ours} == before


def test_a_checkpoint_with_a_file_of_somebody_s_stays(tmp_path):
    """Deleted by keep, or replaced by a run that went back, it would take the file along."""
    write(tmp_path, 1)
    (tmp_path / "step_00000001" / "notes.txt").write_text("the best one")
    before = everything_in(tmp_path / "step_00000001")
    for step in 2, 3:
        commit(begin(tmp_path, step, 0), index_bytes({"iteration": step}, {}), b"{}", keep=1, after=step - 1)
    assert list(directories.checkpoints(tmp_path)) == [1, 3]
    with pytest.raises(CheckpointError, match="step_00000001 is in the way: it holds .*; move it away"):
        write(tmp_path, 1)
    assert everything_in(tmp_path / "step_00000001") == before and newest(tmp_path).name == "step_00000003"
    (tmp_path / "step_00000004").mkdir()  # a rename would replace an empty one
    with pytest.raises(CheckpointError, match="step_00000004 is in the way"):
        write(tmp_path, 4)
    assert (tmp_path / "step_00000004").is_dir() and not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize("what", [b"the latest news\n", b"", "step_00000002", {"a": b"b"}, b"step_00000002 is best\n"])
def test_a_latest_that_is_not_ours_is_not_replaced(tmp_path, what):
    write(tmp_path, 2)
    (tmp_path / "latest").unlink()
    put(tmp_path / "latest", what)
    before = everything_in(tmp_path)
    for call in lambda: make_writable(tmp_path), lambda: claim(tmp_path), lambda: begin(tmp_path, 3, 0):
        with pytest.raises(CheckpointError, match="latest is damaged, or not minitron's, and a save would replace it"):
            call()
    assert everything_in(tmp_path) == before
