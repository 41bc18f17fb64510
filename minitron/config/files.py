"""Read files that a user names, which may be pipes, devices, a terabyte large, or hostile JSON.

Opening a pipe blocks; a device may be endless. Python's json accepts NaN and infinity, and overflows the stack on
deeply nested brackets. Here each of these is an OSError or a ValueError, as a missing file is. `errors_as` turns such
an error into the line that a user reads.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, NoReturn

RECORD_BYTES = 128 << 20  # one document
JSON_BYTES = 64 << 20  # more than any description of a model or of its files


@contextmanager
def errors_as(kind: type[ValueError], line: Callable[[Any], str], *caught: type[Exception]) -> Iterator[None]:
    """Raise kind(line(error)) in the place of an error of the `caught` types: one line for the user."""
    try:
        yield
    except caught as error:
        raise kind(line(error)) from error


def status_of(path: str | os.PathLike[str]) -> os.stat_result:
    """Return what `os.stat` returns for a regular file. Raises OSError, also for a pipe, a device or a folder."""
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return status


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the size of a regular file in bytes. Raises OSError, as `status_of` does."""
    return status_of(path).st_size


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a regular file of at most `most` bytes. Raises OSError."""
    if (size := size_of(path)) > most:
        raise OSError(errno.EFBIG, f"its {size} bytes are more than {most}", os.fspath(path))
    with open(path, "rb") as file:
        return file.read(size)  # a buffer of `most` bytes could be more than this process may have


def lines_of(file: BinaryIO, path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the lines of an open file. Raises OSError, and ValueError for a line of more than RECORD_BYTES."""
    for number, line in enumerate(iter(partial(file.readline, RECORD_BYTES + 1), b""), 1):
        if len(line) > RECORD_BYTES:
            raise ValueError(f"{path}: line {number} has more than {RECORD_BYTES >> 20} MiB; split it or leave it out")
        yield line


def read_json(path: str | os.PathLike[str], most: int = JSON_BYTES) -> Any:
    """Read a regular file that holds JSON. Raises OSError and ValueError."""
    return parse_json(read_bytes(path, most))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for NaN, infinity, and numbers too large for float64."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(path: str | os.PathLike[str], content: object) -> None:
    """Write a file of indented JSON. Raises OSError."""
    with open(path, "w", encoding="ascii") as file:
        file.write(json.dumps(content, indent=2) + "\n")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number in JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is too large a number")
    return value
