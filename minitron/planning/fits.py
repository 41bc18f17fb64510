"""Check that a device can hold a rank's part of the model, before the part is built."""

from __future__ import annotations

import os

import torch

from minitron.config.schema import Config
from minitron.planning.memory import LASTING, Memory
from minitron.runtime.room import ADVICE, OutOfMemory


def check_room(cfg: Config, world: int, device: torch.device) -> None:
    """Raise OutOfMemory if a rank's parameters, gradients and optimizer alone are more than the device's memory.

    A host would not refuse too large an allocation: it would swap for hours, or kill the process.
    """
    parts = Memory(cfg, world, gpus_per_node=1).lasting()
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory
    else:
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sum(parts) > has:
        sizes = ", ".join(f"{part} {size / 2**30:,.1f}" for part, size in zip(LASTING, parts) if size)
        needs = f"a rank's part of the model needs {sum(parts) / 2**30:,.1f} GiB ({sizes})"
        raise OutOfMemory(f"{needs}, and this {device.type} has {has / 2**30:.1f}; {ADVICE}")
