"""Name the part of the model for which a device has no room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ADVICE = (
    "use more ranks (parallel.tp, parallel.pp) or a smaller model; tools/plan.py says what each part of a layout takes"
)


class OutOfMemory(ValueError):
    """A device has no room for a part of the model: one line that names the part."""


@contextmanager
def room_for(part: str) -> Iterator[None]:
    """Turn an allocation that fails inside into an OutOfMemory that names the part."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # the CPU's allocator has no class of its own
        full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not (full or "can't allocate memory" in str(error)):
            raise
        raise OutOfMemory(f"out of memory at {part}; {ADVICE}") from error
