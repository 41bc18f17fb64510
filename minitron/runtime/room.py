"""Memory of a device: how much is in use, and one line for a model that does not fit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minitron.config.schema import Config
from minitron.config.sizes import PERSISTENT, StateBytes
from minitron.runtime.status import RunError

ADVICE = (
    "use more ranks (parallel.tp, parallel.pp) or a smaller model; tools/plan.py lists what each part of a layout takes"
)


class OutOfMemory(RunError):
    """This rank's device has no room for a part of the model: one line that names the part."""

    quiet = False


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


def check_room(cfg: Config, world: int, device: torch.device) -> None:
    """Raise ValueError if a rank's parameters, gradients and optimizer alone are more than the device's memory.

    A host does not refuse an allocation that is too large: it swaps for hours, or kills the process.
    """
    parts = StateBytes(cfg, world).lasting()
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory
    else:
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sum(parts) > has:
        sizes = ", ".join(f"{part} {size / 2**30:,.1f}" for part, size in zip(PERSISTENT, parts) if size)
        needs = f"a rank's part of the model needs {sum(parts) / 2**30:,.1f} GiB ({sizes})"
        raise ValueError(f"{needs}, and this {device.type} has {has / 2**30:.1f}; {ADVICE}")


def memory_in_use(shared: int, replaying: bool) -> tuple[int, int]:
    """Return the bytes of the current GPU in use at the peak, and now.

    shared: bytes that ranks of a node share, which torch's allocator does not count. replaying: whether steps are
    replayed. Then the allocator has only seen the recording, so the device's own figure is returned for both.
    """
    if replaying:
        free, total = torch.cuda.mem_get_info()
        return total - free, total - free
    return torch.cuda.max_memory_allocated() + shared, torch.cuda.memory_allocated() + shared
