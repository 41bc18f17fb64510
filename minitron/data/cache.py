"""Build a cached folder once, for any number of processes on any number of nodes.

A file lock of one node may not hold on another (Lustre localflock, NFS nolock), so nothing here depends on a lock. A
process builds in a folder that only it uses, then renames it. A rename is atomic and fails if the final folder exists:
then that one is used, and the second build is dropped. So a folder is complete or absent.

    node 0   makes NAME.0.partial    builds in NAME.0.partial/RANDOM     renames it to NAME
    node 1   finds NAME.0.partial    looks again, with growing pauses    finds NAME

The mkdir succeeds in one process, and the others wait. The builder may be dead, so once its folder is too old, one
more process makes NAME.1.partial and builds as well. The first to finish deletes all of these folders. A build writes
contents.json last: lengths and checksums of its files. A folder without it gets one if it can be written.

Left out: eviction. A cache directory may be deleted by hand while no run uses it.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minitron.config.files import errors_as, read_json, status_of

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 5.0  # seconds between two looks; each pause is twice the one before
PATIENCE_SECONDS = 30.0  # the age of NAME.0.partial at which one more process builds; twice as much for the next
CONTENTS = "contents.json"


class Cache(NamedTuple):
    """A directory of cached folders, used by one process.

    first_on_node: this process checks the files of a folder in full. One process of a node is enough.
    """

    directory: str | os.PathLike[str]
    first_on_node: bool = True

    def build_once(self, name: str, build: Callable[[Path], object]) -> Path:
        """Return the folder `name`, filled by one call of `build(temporary_directory)` in any of the processes.

        Every process checks the names and lengths of its files. The first on a node checks the checksums too, unless
        it has built the folder.
        Raises ValueError when the folder cannot be written or is damaged, and what `build` raises (every waiting
        process then tries in turn and reports the same error).
        """
        final, built = Path(self.directory) / name, False
        fix = "choose a directory that this job may write, with room in it"
        with errors_as(ValueError, lambda error: f"data.cache_dir={self.directory}: {error}; {fix}", OSError):
            if not final.is_dir():
                final.parent.mkdir(parents=True, exist_ok=True)
                built = _build(final, build)
        with reading(final):
            _check(final, checksums=self.first_on_node and not built)
        return final

    def recall(self, name: str, compute: Callable[[], str]) -> str:
        """Return the text of `compute()`, kept in the folder `name`. Compute it again if no folder can be made."""
        directory = Path(self.directory)
        if directory.is_dir() and not (os.access(directory, os.W_OK) or (directory / name).is_dir()):
            return compute()
        with reading(folder := self.build_once(name, lambda partial: (partial / "text").write_text(compute()))):
            return (folder / "text").read_text()


def fingerprint_of(*parts: bytes | memoryview) -> str:
    """Hash the parts, one after another, to 16 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def state_of(*paths: str) -> str:
    """Return 16 hex digits of these paths that change whenever a file is replaced or written. Raises OSError."""
    files = [(os.path.abspath(path), status_of(path)) for path in paths]
    return fingerprint_of(repr([(path, f.st_size, f.st_mtime_ns, f.st_ctime_ns) for path, f in files]).encode())


def digest_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hex digits. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reading(directory: Path) -> AbstractContextManager[None]:
    """Turn the error of a missing or damaged file, read inside, into a ValueError that names the fix."""
    what, fix = f"{directory}: this folder of data.cache_dir is damaged", "delete it, the next run builds it again"
    return errors_as(ValueError, lambda error: f"{what} ({error}); {fix}", OSError, EOFError, ValueError)


def save_arrays(folder: Path, **arrays: np.ndarray) -> None:
    """Write arrays under their names into a folder that is being built."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def load_arrays(folder: Path, *names: str) -> list[np.ndarray]:
    """Map arrays of a finished folder, read-only. Raises ValueError, as `reading` does."""
    with reading(folder):
        return [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names]


def _build(final: Path, build: Callable[[Path], object]) -> bool:
    """Build `final`, or wait until another process has. Return whether this process built it."""
    if (claim := _claim(final)) is None:
        return False
    partial = claim / secrets.token_hex(4)
    try:
        if not final.is_dir():  # else it was renamed after the last look
            partial.mkdir()
            build(partial)
            _write_contents(partial)
            os.replace(partial, final)
            return True
    except (OSError, ValueError):
        if not final.is_dir():  # else another process was faster
            raise
    finally:
        for folder in final.parent.glob(f"{final.name}.*.partial") if final.is_dir() else [claim]:
            shutil.rmtree(folder, ignore_errors=True)
    return False


def _claim(final: Path) -> Path | None:
    """Make a folder to build in. Return None once another process has built `final`."""
    number, pause = 0, FIRST_PAUSE
    while not final.is_dir():
        claim = final.with_name(f"{final.name}.{number}.partial")
        with suppress(FileExistsError):
            claim.mkdir()  # atomic, so it succeeds in one process
            return claim
        with suppress(FileNotFoundError):
            number += time.time() - claim.stat().st_mtime > PATIENCE_SECONDS * 2**number
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return None


def _write_contents(folder: Path) -> None:
    """Write {name: [bytes, checksum]} of all files, by a rename, as others may be reading the folder."""
    draft = folder / f"{CONTENTS}.{secrets.token_hex(4)}"
    with open(draft, "x") as file:
        paths = [path for path in folder.iterdir() if not path.name.startswith(CONTENTS)]
        json.dump({path.name: [path.stat().st_size, digest_of(path)] for path in paths}, file)
    os.replace(draft, folder / CONTENTS)


def _check(folder: Path, checksums: bool) -> None:
    """Compare the files with contents.json. With checksums, write it first if it is missing."""
    contents = folder / CONTENTS
    if checksums and not contents.exists():
        with suppress(OSError):  # a read-only or a full disk
            _write_contents(folder)
    known = read_json(contents) if contents.exists() else {}
    if not isinstance(known, dict) or not all(Path(n).name == n and isinstance(x, list) for n, x in known.items()):
        raise ValueError(f"{CONTENTS} is not a list of files")
    for name, (size, checksum) in known.items():
        path = folder / name
        if path.stat().st_size != size or checksums and digest_of(path) != checksum:
            raise ValueError(f"{name} differs from its size or checksum in {CONTENTS}")
