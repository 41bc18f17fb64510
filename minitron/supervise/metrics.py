"""Read metrics.jsonl, to which all starts of a run append their figures (log.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from minitron.config.files import lines_of, size_of


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl, each with the number of its line under "line".

    A row that a kill tore, or that is not a JSON object, has no other key. An unfinished last line is left out: a run
    may be writing it. Raises OSError, and ValueError for a line that is too long.
    """
    size_of(path)  # a device or a pipe might never end
    with open(path, "rb") as file:
        for number, line in enumerate(lines_of(file, path), 1):
            row: object = None
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
            if line.endswith(b"\n"):
                yield (row if isinstance(row, dict) else {}) | {"line": number}


def without_repeats(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the rows of steps that a later start made again: those from its first step or evaluation on."""
    kept: list[dict[str, Any]] = []
    started = False
    for row in rows:
        kind, step = row.get("kind"), row.get("step")
        if kind == "run":
            started = True
        elif started and kind in ("step", "eval", "ranks") and isinstance(step, int):
            kept = [earlier for earlier in kept if not isinstance(at := earlier.get("step"), int) or at < step]
            started = False
        kept.append(row)
    return kept
