"""A disk that fails: chosen file operations of this process raise an OSError.

    with FailingDisk(folder) as disk:                       counts the operations below folder
    with FailingDisk(folder, errno.EIO, first=7) as disk:   the seventh fails; times=n: so do the n - 1 after it

Python's own operations are replaced: what a library does in C is not seen.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

# What a mount that fails for some seconds answers, and a process that has too many files open.
ERRNOS = ["EIO", "ESTALE", "ENOTCONN", "EMFILE"]
OPERATIONS = (
    *("open", "stat", "lstat", "statvfs", "listdir", "scandir", "mkdir", "rmdir", "unlink", "remove", "rename"),
    *("replace", "fsync", "utime", "truncate", "readlink"),
)


class FailingDisk:
    """Use it as a context manager. done: the operations below `folder`, as "fsync step_00000001/latest"."""

    def __init__(
        self, folder: Path, number: int = 0, first: int = 0, times: int = 1, error: type[BaseException] = OSError
    ):
        self.folder, self.done, self._error = os.fspath(folder), [], error
        self._failing, self._number = range(first, first + times if first else 0), number
        self._patch = pytest.MonkeyPatch()
        self._readlink = os.readlink

    def __enter__(self) -> FailingDisk:
        for name in OPERATIONS:
            self._patch.setattr(os, name, self._failing_twin(name, getattr(os, name)))
        opens = self._failing_twin("open", builtins.open, lambda file, path: _File(file, path, self))
        for module in builtins, io:
            self._patch.setattr(module, "open", opens)
        return self

    def __exit__(self, *_) -> None:
        self._patch.undo()

    def _failing_twin(self, name: str, real: Callable, wrap: Callable = lambda result, _: result) -> Callable:
        def call(*args, **kwargs):
            path = self._path(args[0] if args else ".", kwargs.get("dir_fd"))
            if path is None:
                return real(*args, **kwargs)
            self.operation(name, path)
            return wrap(real(*args, **kwargs), path)

        return call

    def _path(self, path: object, dir_fd: int | None) -> str | None:
        """The path of an operation, if it is below the folder."""
        if isinstance(path, int):
            path = self._readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(self._readlink(f"/proc/self/fd/{dir_fd}"), path)
        path = os.fsdecode(path)
        return path if path == self.folder or path.startswith(f"{self.folder}/") else None

    def operation(self, name: str, path: str) -> None:
        """Count an operation. Raises `error` if it is to fail."""
        self.done.append(f"{name} {os.path.relpath(path, self.folder)}")
        if len(self.done) in self._failing:
            raise self._error(self._number, os.strerror(self._number), path)


class _File:
    """An open file whose writes are operations, too."""

    def __init__(self, file: io.IOBase, path: str, disk: FailingDisk):
        self._file, self._path, self._disk = file, path, disk

    def write(self, data) -> int:
        self._disk.operation("write", self._path)
        return self._file.write(data)

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def __iter__(self):
        return iter(self._file)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
