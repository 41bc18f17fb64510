"""Build a cached directory once, however many processes ask for it at the same time.

Every rank of every job calls `build_once(directory, build)`.  The first to take the file lock builds into
`directory.partial` and renames it; a rename is atomic, so `directory` is complete or absent.  The others wait for the
lock, find the directory and read it.  A build that is killed leaves only a `.partial`, which the next builder deletes;
the kernel drops the lock of a killed process, so nobody waits for ever.  Code that reads the
directory does so under `reading`, which tells a user what to do when a file in it was later lost or cut short.

    rank 0   lock ---- build into index-3f.partial ---- rename to index-3f ---- unlock
    rank 1   waits ------------------------------------------------------------ finds index-3f

Left out: eviction.  A cache directory may be deleted by hand whenever no run uses it.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from filelock import FileLock

from minitron.config.files import errors_as


def build_once(directory: str | os.PathLike, build: Callable[[Path], None]) -> Path:
    """Return `directory`, filled by exactly one call of `build(temporary_directory)` across processes.

    Raises ValueError when the directory cannot be written, and whatever else `build` raises (every waiting process then
    tries in turn and reports the same error).
    """
    final = Path(directory)
    fix = "choose a directory that this job may write, with room in it"
    with errors_as(ValueError, lambda error: f"data.cache_dir={final.parent}: {error}; {fix}", OSError):
        if not final.is_dir():
            final.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(final.parent, os.W_OK):
                raise PermissionError(f"{final.parent} is not writable")
            with FileLock(f"{final}.lock"):
                if not final.is_dir():
                    _build(final, build)
    return final


def reading(directory: Path) -> AbstractContextManager:
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


def _build(final: Path, build: Callable[[Path], None]) -> None:
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        os.replace(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
