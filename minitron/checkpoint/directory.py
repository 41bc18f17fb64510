"""A directory of checkpoints: a save is complete or invisible, and one run at a time saves there.

Problem: training may be killed inside a save, disks fill up, two runs may start in one directory, and users put files
of their own into it. The idea:

    runs/a/latest                                   the name of the newest, and a checksum of that name
    runs/a/owner.7-5e0c91d2                         the seventh run to save here: its process, host and start
    runs/a/step_00000020/                           a checkpoint (format.py)
    runs/a/step_00000030.tmp-8d21f06b/              a save under way, or one that was killed

  1. A save fills a folder of a temporary name. Once all of it is on the disk, a rename makes it a checkpoint, and then
     `latest` is replaced. A save that is killed before the rename leaves everything as it was.
  2. There is no lock file, because a killed run could not remove it. A run that starts takes the directory over. A run
     that saved there before checks this before it deletes or renames anything.
  3. A save deletes, renames or replaces only what another save has made, as both its name and its content must show. So
     a checkpoint into which a user has put a file stays.

Rule 1 needs an atomic rename of folders. Disks, Lustre, NFS, and buckets with a hierarchical namespace have it. In
other buckets gcsfuse copies file by file, and a kill leaves half a folder. `latest` never names it. If the first save
is killed in this way, there is no `latest`, and opening the half is an error: its index or a checksum does not fit.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import stat
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from minitron.checkpoint import format as files
from minitron.checkpoint.format import CheckpointError, disk_errors
from minitron.config.files import errors_as, size_of
from minitron.runtime.status import TAKEN

STEP, STEP_NAME = re.compile(r"step_(\d{8}|[1-9]\d{8,})"), "step_{:08d}".format
OWNER = re.compile(r"owner\.((\d+)-[0-9a-f]{8})")
TEMPORARY = re.compile(r"(step_\d{8,}|probe)(\.tmp-[0-9a-f]{8})+")
POINTER = re.compile(r"step_\d{8,} [0-9a-f]{8}\n")
OWNER_BEGIN = b"process "
# Files of a save; .nfs* are deleted files that a process has open.
SAVED = re.compile(r"index\.json|latest|(rank|part)_\d{5,}\.safetensors|\.nfs\w+")


class TakenOver(CheckpointError):
    """Another run saves in this directory now. A process ends with `status`, and no supervisor starts it again."""

    status = TAKEN


ERRORS = TakenOver, CheckpointError  # ranks send these errors to each other


def checkpoints(directory: Path) -> dict[int, Path]:
    """Map iterations, ascending, to the checkpoints in a directory: folders in which at least one file is a save's."""
    return {step: path for step, path in _step_folders(directory).items() if any(map(SAVED.fullmatch, _list(path)))}


def foreign_folder(directory: Path, after: int, until: int) -> Path | None:
    """Find a folder that has the name of a checkpoint of one of these steps, but holds files that no save wrote."""
    steps = _step_folders(directory)
    return next((steps[step] for step in steps if after < step <= until and not _is_saved(steps[step])), None)


def _step_folders(directory: Path) -> dict[int, Path]:
    """Map iterations, ascending, to all paths that have the name of a checkpoint."""
    found = (match for match in map(STEP.fullmatch, _list(directory)) if match)
    return dict(sorted((int(match[1]), directory / match[0]) for match in found))


def _list(folder: Path) -> list[str]:
    """List the names in a folder; none if it is not a folder, or not readable. Raises OSError if the disk fails."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # `glob` ignores what a failing disk raises
        return os.listdir(folder)
    return []


def _is_saved(folder: Path) -> bool:
    """Tell whether a save wrote all files of a folder. False for an empty folder, which a user may have made."""
    names = _list(folder)
    return (
        bool(names)
        and not folder.is_symlink()
        and all(SAVED.fullmatch(name) and _begins(folder / name, b"") for name in names)
        and (files.INDEX not in names or _begins(folder / files.INDEX, files.INDEX_BEGIN))
    )


def _begins(path: Path, text: bytes) -> bool:
    """Tell whether a file begins with `text`, or is a prefix of it, as a killed save may leave it."""
    with suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            with open(path, "rb") as file:
                return text.startswith(file.read(len(text)))
    return False


def newest(directory: Path) -> Path | None:
    """Return the checkpoint that `latest` names; without `latest` the one of the highest step; None without any.

    If a save was killed while it replaced this checkpoint, the replacement is completed first.
    Raises CheckpointError if `latest` is damaged or cannot be read, or what it names is missing.
    """
    pointer = directory / "latest"
    with disk_errors(pointer):
        try:
            size_of(pointer)
        except (FileNotFoundError, NotADirectoryError):  # the first save was killed, or a user copied folders only
            return next(reversed(checkpoints(directory).values()), None)
        with open(pointer, "rb") as file:
            text = file.read(256).decode(errors="replace")
    name = text.split(" ")[0]
    if not STEP.fullmatch(name) or text != _pointer(name):
        raise CheckpointError(f"{pointer} is damaged: its checksum is not that of the name in it")
    with disk_errors(directory):
        _finish(directory / name)
    if not (directory / name).is_dir():
        raise CheckpointError(f"{directory / name} is missing, and {pointer} names it")
    return directory / name


def _finish(folder: Path) -> None:
    """Complete a save that was killed between the two renames by which it replaces an older checkpoint."""
    for whole in map(folder.with_name, filter(TEMPORARY.fullmatch, _list(folder.parent))):
        # A complete save holds the next `latest` until it is committed; the checkpoint that it replaces holds none.
        if whole.stem == folder.name and (whole / "latest").is_file() and not folder.exists():
            with suppress(FileNotFoundError):  # all ranks try
                os.rename(whole, folder)


def make_writable(directory: Path) -> None:
    """Make the directory if it does not exist, and try the operations of a save in it. Raises CheckpointError."""
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        _check_pointer(directory / "latest")
        (probe := directory / f"probe.tmp-{secrets.token_hex(4)}").mkdir()
        (probe / files.INDEX).touch()
        fix = "which every save does; use a disk, or a bucket with a hierarchical namespace"
        line = lambda e: f"{directory}: folders cannot be renamed ({e.strerror}), {fix}"
        with errors_as(CheckpointError, line, OSError):
            _remove(probe)


def _check_pointer(pointer: Path) -> None:
    """Raise CheckpointError if `latest`, which a save would replace, was not written by a save."""
    if os.path.lexists(pointer):
        with open(pointer if _begins(pointer, b"") else os.devnull, "rb") as file:
            if not POINTER.fullmatch(file.read(64).decode(errors="replace")):
                fix = "move it away, or save in another directory"
                raise CheckpointError(f"{pointer} is damaged, or not minitron's, and a save would replace it; {fix}")


def claim(directory: Path) -> str:
    """Take a directory over. Returns its new owner, as "7-5e0c91d2", for `begin` and `commit`. Raises CheckpointError.

    Each owner is a file with a name, since a mount may cache the content of a file, but not the names in a folder. The
    number tells which run came last. The rest distinguishes runs that start at the same instant, or with the same
    number because a user has emptied the directory in between.
    """
    make_writable(directory)
    with disk_errors(directory):
        before = _owners(directory)
        owner = f"{before[-1][0] + 1 if before else 1}-{secrets.token_hex(4)}"
        about = f"process {os.getpid()} on {socket.gethostname()}, started {datetime.now():%Y-%m-%d %H:%M:%S}"
        try:
            (directory / f"owner.{owner}").write_text(about)
        except OSError:  # a full disk: the file of a run that never began would stop the one that saves
            (directory / f"owner.{owner}").unlink(missing_ok=True)
            raise
        for _, name in before:
            if _begins(path := directory / f"owner.{name}", OWNER_BEGIN):
                with suppress(OSError):  # it does not matter, as the last file counts
                    path.unlink()
    return owner


def _owners(directory: Path) -> list[tuple[int, str]]:
    """List (number, owner) of all files with the name of an owner, ascending."""
    return sorted((int(match[2]), match[1]) for match in map(OWNER.fullmatch, _list(directory)) if match)


def check_owner(directory: Path, owner: str | None) -> None:
    """Raise TakenOver if the directory has another owner. owner: None, as a tool passes, is not checked.

    The last non-empty file counts: a run that is killed while it claims a directory leaves its file empty.
    """
    with disk_errors(directory):
        for _, name in reversed(_owners(directory) if owner is not None else []):
            if name == owner:
                return
            path = directory / f"owner.{name}"
            if _begins(path, OWNER_BEGIN) and (other := path.read_text(errors="replace")):
                fix = "only one run at a time can save there: end one of them, or give it another directory"
                raise TakenOver(f"{directory} was taken over by {other}; {fix}")


def begin(directory: Path, iteration: int, num_bytes: int, owner: str | None = None, token: str = "") -> Path:
    """Make a temporary folder for a save of num_bytes, and delete those of killed saves.

    token: eight hex digits at the end of the folder's name; by default random ones. Raises CheckpointError, also if the
    disk has not num_bytes free.
    """
    make_writable(directory)
    with disk_errors(directory):
        check_owner(directory, owner)
        for stale in map(directory.joinpath, filter(TEMPORARY.fullmatch, _list(directory))):
            if _is_saved(stale):
                _remove(stale)
            with suppress(OSError):
                stale.rmdir()  # a save was killed before it wrote; rmdir removes empty folders only
        free = shutil.disk_usage(directory).free
        if free < num_bytes:
            needs = f"{free / 1e6:.0f} MB free and a save needs {num_bytes / 1e6:.0f} MB"
            raise CheckpointError(f"{directory} has {needs}; free some")
        temporary = directory / f"{STEP_NAME(iteration)}.tmp-{token or secrets.token_hex(4)}"
        temporary.mkdir()
    return temporary


def commit(
    temporary: Path, changing: bytes, tensors: bytes, keep: int = 0, after: int = 0, owner: str | None = None
) -> str:
    """Make a filled temporary folder the newest checkpoint. Returns its index's checksum. Raises CheckpointError.

    changing, tensors: the two parts of the index (`write_index`). keep, after: see `_prune`; keep=0 deletes nothing.
    """
    directory, folder = temporary.parent, temporary.with_name(temporary.name.split(".")[0])
    iteration = int(folder.name.removeprefix("step_"))
    with disk_errors(directory):
        index_checksum = files.write_index(temporary, changing, tensors)
        files.write_file(temporary / "latest", [_pointer(folder.name).encode()])
        _sync(temporary)
        check_owner(directory, owner)
        if os.path.lexists(folder) and not _is_saved(folder):
            raise CheckpointError(f"{folder} is in the way: it holds files that no save wrote; move it away")
        replaced = _hide(folder)  # it exists if the run went back to an earlier step
        try:
            os.rename(temporary, folder)
        except OSError:
            with suppress(OSError):  # the next start completes what a kill leaves here, but not a rename that failed
                os.rename(replaced, folder)
            raise
        _sync(directory)
        os.replace(folder / "latest", directory / "latest")
        _sync(directory)
        shutil.rmtree(replaced, ignore_errors=True)
        if keep:
            _prune(directory, iteration, keep, after)
    return index_checksum


def _prune(directory: Path, iteration: int, keep: int, after: int) -> None:
    """Delete all but the newest `keep` of the run's checkpoints up to `iteration`, which it has just saved.

    after: the iteration of the run's save before, or of the checkpoint that it resumed. Checkpoints between `after` and
    `iteration` are from before the run went back: they do not count, and are deleted. Later ones stay for now.
    """
    passed = {step: path for step, path in checkpoints(directory).items() if step <= iteration}
    ours = [step for step in passed if step <= after or step == iteration]
    for step in passed.keys() - set(ours[-keep:]):
        if _is_saved(passed[step]):
            _remove(passed[step])


def _remove(folder: Path) -> None:
    shutil.rmtree(_hide(folder), ignore_errors=True)  # the next save tries again


def _hide(folder: Path) -> Path:
    """Rename a folder before it is removed, so that a half of it is never taken for a checkpoint, nor committed."""
    hidden = folder.with_name(f"{folder.name.split('.')[0]}.tmp-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        os.rename(folder, hidden)
    return hidden


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pointer(name: str) -> str:
    return f"{name} {files.checksum(name.encode())}\n"
