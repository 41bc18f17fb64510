"""errors.log of log.dir: the warnings and errors of all ranks in one file, so that nobody has to open a thousand.

It holds alarms (a hang, a dead rank, a save that failed), the error that ended a rank, and warnings of Python code, but
not what libraries in C write to stderr. Without any of these the file does not exist. Each record opens the file and
appends in one write, since ranks of other nodes write there, too (on an object store only the last writer's records
remain). If the file cannot be written, the record is missing there; rank-N.log and stderr still have it.
"""

from __future__ import annotations

import traceback
import warnings
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from minitron.config.text import printable
from minitron.runtime.sinks import append_to


class ErrorLog:
    """The part of one rank in errors.log. Listens to Python's warnings until it is closed."""

    def __init__(self, folder: Path, rank: int):
        self.path, self.rank = folder / "errors.log", rank
        self._shown, warnings.showwarning = warnings.showwarning, self._warned

    def write(self, text: str) -> None:
        record = f"{datetime.now():%Y-%m-%d %H:%M:%S} rank {self.rank}: {text.rstrip()}\n".encode(errors="replace")
        with suppress(OSError), append_to(self.path) as file:
            file.write(record)

    def ended(self, error: BaseException) -> None:
        """Write the error that ends the rank: its message where a line on stderr says it, else its traceback."""
        if isinstance(error, SystemExit):
            if isinstance(error.__context__, ValueError):  # of cli.user_errors
                self.write(f"error: {printable(' '.join(str(error.__context__).split()))}")
        elif isinstance(error, Exception):
            self.write("".join(traceback.format_exception(error)))

    def close(self) -> None:
        if warnings.showwarning == self._warned:
            warnings.showwarning = self._shown

    def _warned(self, message, category, filename, lineno, file=None, line=None) -> None:
        self.write(warnings.formatwarning(message, category, filename, lineno, line))
        self._shown(message, category, filename, lineno, file, line)
