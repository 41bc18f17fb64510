"""A directory of checkpoints: a save is complete or invisible, and one run at a time saves there.

Problem: training is killed at any moment, also inside a save; disks fill up; two runs may be started in one directory;
and other things may lie there. The idea:

    runs/a/latest                                   the name of the newest, and a checksum of that name
    runs/a/owner.7-5e0c91d2                         the seventh run to save here: its process, host and start
    runs/a/step_00000020/                           a checkpoint (format.py)
    runs/a/step_00000030.tmp-8d21f06b/              a save under way, or what is left of one that was killed

  1. A save fills a folder of a temporary name. Once all of it has reached the disk, a rename makes it a checkpoint,
     and then `latest` is replaced. Killed before, it leaves everything as it was.
  2. There is no lock file, because a killed run could not remove it. A run that starts takes the directory over, and
     the run before, if it still lives, checks this before it deletes or renames anything.
  3. A save deletes, renames or replaces only what another save has made, as both its name and its content must show. So
     a checkpoint into which a user has put a file of his own stays.

1. is as good as the rename of a folder: atomic on disks, Lustre, NFS, and in a bucket with a hierarchical namespace. In
others gcsfuse copies file by file, and a kill leaves half a folder. `latest` never names it. If the first save is
killed so, there is no `latest`: opening the half is then an error, which the index or a checksum reveals.
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
# What lies in a folder that a save wrote; .nfs* are deleted files that somebody has open.
SAVED = re.compile(r"index\.json|latest|(rank|part)_\d{5,}\.safetensors|\.nfs\w+")


class TakenOver(CheckpointError):
    """Another run saves in this directory now. status: of the process, which no supervisor is to start again."""

    status = TAKEN


ERRORS = TakenOver, CheckpointError  # that ranks tell each other


def checkpoints(directory: Path) -> dict[int, Path]:
    """Map iterations, ascending, to the checkpoints in a directory: folders in which at least one file is a save's."""
    return {step: path for step, path in _named(directory).items() if any(map(SAVED.fullmatch, _names(path)))}


def in_the_way(directory: Path, after: int, until: int) -> Path | None:
    """Find what would keep one of these steps from being saved: a folder that only has the name of a checkpoint."""
    steps = _named(directory)
    return next((steps[step] for step in steps if after < step <= until and not _is_saved(steps[step])), None)


def _named(directory: Path) -> dict[int, Path]:
    """Map iterations, ascending, to all paths that have the name of a checkpoint."""
    found = (match for match in map(STEP.fullmatch, _names(directory)) if match)
    return dict(sorted((int(match[1]), directory / match[0]) for match in found))


def _names(folder: Path) -> list[str]:
    """List the names in a folder; none if it is no folder, or others' alone. Raises OSError if the disk fails."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # `glob` ignores what a failing disk raises
        return os.listdir(folder)
    return []


def _is_saved(folder: Path) -> bool:
    """Tell whether a save wrote all that lies in a folder. False for an empty one: anybody may have made it."""
    names = _names(folder)
    return (
        bool(names)
        and not folder.is_symlink()
        and all(SAVED.fullmatch(name) and _begins(folder / name, b"") for name in names)
        and (files.INDEX not in names or _begins(folder / files.INDEX, files.INDEX_BEGIN))
    )


def _begins(path: Path, text: bytes) -> bool:
    """Tell whether a file begins with text, or holds only a part of it, as after a save that was killed."""
    with suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            with open(path, "rb") as file:
                return text.startswith(file.read(len(text)))
    return False


def newest(directory: Path) -> Path | None:
    """Return the checkpoint that `latest` names; without a `latest` that of the highest step; None if there is none.

    One whose save was killed in the midst of replacing it is put in its place.
    Raises CheckpointError if `latest` is damaged or cannot be read, or what it names is missing.
    """
    pointer = directory / "latest"
    with disk_errors(pointer):
        try:
            size_of(pointer)
        except (FileNotFoundError, NotADirectoryError):  # the first save was killed, or somebody copied folders only
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
    """Put a checkpoint in its place whose save was killed between the two renames that replace an older one by it."""
    for whole in map(folder.with_name, filter(TEMPORARY.fullmatch, _names(folder.parent))):
        # Until it is committed it holds the `latest` to be, written after all else; what it replaces no longer does.
        if whole.stem == folder.name and (whole / "latest").is_file() and not folder.exists():
            with suppress(FileNotFoundError):  # all ranks try
                os.rename(whole, folder)


def make_writable(directory: Path) -> None:
    """Make the directory if it does not exist, and try what a save does. Raises CheckpointError."""
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        _check_pointer(directory / "latest")
        (probe := directory / f"probe.tmp-{secrets.token_hex(4)}").mkdir()
        (probe / files.INDEX).touch()
        fix = "as every save has to; use a disk, or a bucket with a hierarchical namespace"
        line = lambda e: f"checkpoint.dir={directory}: folders cannot be renamed ({e.strerror}), {fix}"
        with errors_as(CheckpointError, line, OSError):
            _remove(probe)


def _check_pointer(pointer: Path) -> None:
    """Raise CheckpointError if `latest`, which a save would replace, was not written by a save."""
    if os.path.lexists(pointer):
        with open(pointer if _begins(pointer, b"") else os.devnull, "rb") as file:
            if not POINTER.fullmatch(file.read(64).decode(errors="replace")):
                fix = "move it away, or use another checkpoint.dir"
                raise CheckpointError(f"{pointer} is damaged, or not minitron's, and a save would replace it; {fix}")


def claim(directory: Path) -> str:
    """Take a directory over. Returns its new owner, as "7-5e0c91d2", for `begin` and `commit`. Raises CheckpointError.

    Each owner is a file of its own name: a mount may remember for long what was in a file, but lists folders anew.
    The number says who came last. The rest tells apart who came at the same instant, or before somebody emptied the
    directory, where numbers begin again.
    """
    make_writable(directory)
    with disk_errors(directory):
        before = _owners(directory)
        owner = f"{before[-1][0] + 1 if before else 1}-{secrets.token_hex(4)}"
        about = f"process {os.getpid()} on {socket.gethostname()}, started {datetime.now():%Y-%m-%d %H:%M:%S}"
        try:
            (directory / f"owner.{owner}").write_text(about)
        except OSError:  # a full disk: an owner that never ran would stop the one that does
            (directory / f"owner.{owner}").unlink(missing_ok=True)
            raise
        for _, name in before:
            if _begins(path := directory / f"owner.{name}", OWNER_BEGIN):
                with suppress(OSError):  # the last one counts
                    path.unlink()
    return owner


def _owners(directory: Path) -> list[tuple[int, str]]:
    """List (number, owner) of all files with the name of an owner, ascending."""
    return sorted((int(match[2]), match[1]) for match in map(OWNER.fullmatch, _names(directory)) if match)


def check_owner(directory: Path, owner: str | None) -> None:
    """Raise TakenOver if the directory has another owner. None, as a tool passes, is not checked.

    The last file counts that is ours and not empty: a run that is killed while it claims a directory leaves it empty.
    """
    with disk_errors(directory):
        for _, name in reversed(_owners(directory) if owner is not None else []):
            if name == owner:
                return
            path = directory / f"owner.{name}"
            if _begins(path, OWNER_BEGIN) and (newest := path.read_text(errors="replace")):
                fix = "only one run at a time can save there: end one of them, or give it another"
                raise TakenOver(f"checkpoint.dir={directory} was taken over by {newest}; {fix}")


def begin(directory: Path, iteration: int, num_bytes: int, owner: str | None = None, token: str = "") -> Path:
    """Make a temporary folder for a save; delete those of killed ones. CheckpointError without room for num_bytes.

    token: eight hex digits that the folder's name ends with; by default random ones.
    """
    make_writable(directory)
    with disk_errors(directory):
        check_owner(directory, owner)
        for stale in map(directory.joinpath, filter(TEMPORARY.fullmatch, _names(directory))):
            if _is_saved(stale):
                _remove(stale)
            with suppress(OSError):
                stale.rmdir()  # of a save that had not begun to write: it removes empty folders alone
        free = shutil.disk_usage(directory).free
        if free < num_bytes:
            needs = f"{free / 1e6:.0f} MB free and a save needs {num_bytes / 1e6:.0f} MB"
            raise CheckpointError(f"{directory} has {needs}; free some, or lower checkpoint.keep")
        temporary = directory / f"{STEP_NAME(iteration)}.tmp-{token or secrets.token_hex(4)}"
        temporary.mkdir()
    return temporary


def commit(
    temporary: Path, changing: bytes, tensors: bytes, keep: int = 0, after: int = 0, owner: str | None = None
) -> str:
    """Make a filled temporary folder the newest checkpoint. Returns its index's checksum. Raises CheckpointError.

    changing, tensors: the two parts of the index (`write_index`). keep: how many of the run's checkpoints stay, 0: all.
    after: the iteration of its save before this one, or that it went on from. What lies between the two it has left by
    going back: they do not count, and go. What lies beyond this one stays for now.
    """
    directory, folder = temporary.parent, temporary.with_name(temporary.name.split(".")[0])
    iteration = int(STEP.fullmatch(folder.name)[1])
    with disk_errors(directory):
        mark = files.write_index(temporary, changing, tensors)
        files.write_file(temporary / "latest", [_pointer(folder.name).encode()])
        _sync(temporary)
        check_owner(directory, owner)
        if os.path.lexists(folder) and not _is_saved(folder):
            raise CheckpointError(f"{folder} is in the way: it holds what no save wrote; move it away")
        replaced = _hide(folder)  # if it is there, of a run that went back to before it
        try:
            os.rename(temporary, folder)
        except OSError:
            with suppress(OSError):  # a start finishes what a kill leaves here, but not what the disk has refused
                os.rename(replaced, folder)
            raise
        _sync(directory)
        os.replace(folder / "latest", directory / "latest")
        _sync(directory)
        shutil.rmtree(replaced, ignore_errors=True)
        if keep:
            passed = {step: path for step, path in checkpoints(directory).items() if step <= iteration}
            ours = [step for step in passed if step <= after or step == iteration]
            for step in passed.keys() - set(ours[-keep:]):
                if _is_saved(passed[step]):
                    _remove(passed[step])
    return mark


def _remove(folder: Path) -> None:
    shutil.rmtree(_hide(folder), ignore_errors=True)  # the next save tries again


def _hide(folder: Path) -> Path:
    """Rename what is to be removed, so that no half of it is ever taken for a checkpoint, nor committed as one."""
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
