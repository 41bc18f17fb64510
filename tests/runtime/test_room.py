"""A model that a device has no room for: refused before it is built, or one line that names the part."""

from types import SimpleNamespace

import pytest
import torch

from layouts import LLAMA, config
from minitron.config.sizes import StateBytes
from minitron.runtime import room
from minitron.runtime.room import OutOfMemory, check_room, room_for

CFG = config(LLAMA)
NEEDS = sum(StateBytes(CFG, 2).lasting())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("lacks", [0, 1])
def test_a_rank_s_part_of_the_model_must_fit_into_its_own_device(monkeypatch, device, lacks):
    """The other kind of device has none or plenty; it does not count."""
    has = {"cpu": lacks << 50, "cuda": lacks << 50} | {device: NEEDS - lacks}
    pages = {"SC_PHYS_PAGES": has["cpu"], "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(room.os, "sysconf", pages.get)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=has["cuda"]))
    if not lacks:
        check_room(CFG, 2, torch.device(device))
        return
    with pytest.raises(ValueError, match=f"this {device} has .*parallel.tp"):
        check_room(CFG, 2, torch.device(device))


@pytest.mark.parametrize(
    "error, full",
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_an_allocation_that_fails_names_its_part(error, full):
    with pytest.raises(OutOfMemory if full else RuntimeError) as caught, room_for("the optimizer"):
        raise error
    assert ("out of memory at the optimizer" in str(caught.value)) == full
    assert full or caught.value is error


def test_memory_in_use_is_the_device_s_where_steps_are_replayed(monkeypatch):
    for name, value in {"mem_get_info": (30, 100), "max_memory_allocated": 60, "memory_allocated": 50}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert room.memory_in_use(7, replaying=False) == (67, 57) and room.memory_in_use(7, replaying=True) == (70, 70)
