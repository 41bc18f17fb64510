"""The look at a node before its ranks start again, with faked answers: each check fails once and passes once."""

import os
import shutil
from types import SimpleNamespace

import pytest

from minitron.supervise import health
from minitron.supervise.health import Health

FIRST, SECOND = "00000000:3B:00.0", "00000000:AF:00.0"
XID = "[ 12.5] NVRM: Xid (PCI:{}): {}, pid=1, name=python, a message\n"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(name, text, status): a program on PATH; nothing else is there but what a shell needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def program(name: str, text: str, status: int = 0, before: str = ":") -> None:
        (folder / f"{name}.text").write_text(text)
        script = f'#!/bin/sh\n{before}\ncat "{folder / name}.text"\nexit {status}\n'
        (folder / "new").write_text(script)
        (folder / "new").chmod(0o755)
        (folder / "new").replace(folder / name)

    program("dmesg", "", 1)  # may not be read
    return program


def answers(*errors: str, recovery: str = "None") -> str:
    return "".join(f"{bus}, {count}, {recovery}\n" for bus, count in zip((FIRST, SECOND), errors))


def look(tmp_path, fake, before: dict, after: dict) -> str:
    """What a node finds wrong with its GPUs. before, after: the programs' answers at the start and at the look."""
    for name, arguments in before.items():
        fake(name, *arguments)
    node = Health(tmp_path, 1.0)
    for name, arguments in after.items():
        fake(name, *arguments)
    return node.unfit()


@pytest.mark.parametrize(
    "after, word",
    [
        ((answers("0"),), "0000:af:00"),  # the second is no longer listed
        ((answers("0", "3"),), "3"),
        ((answers("0", "[Unknown Error]"),), "Unknown Error"),
        ((answers("0", "0", recovery="Reset"),), "Reset"),
        (("Unable to determine the device handle: GPU is lost", 15), "15"),
        (("", 0, "exec sleep 60"), "nvidia-smi"),  # hangs
    ],
)
def test_a_gpu_that_is_unfit(tmp_path, fake, monkeypatch, after, word):
    fake("nvidia-smi", answers("0", "0"))
    node = Health(tmp_path, 1.0)
    if "exec" in str(after):
        monkeypatch.setattr(health, "ANSWER_SECONDS", 0.5)
    fake("nvidia-smi", *after)
    found = node.unfit()
    assert word in found and "\n" not in found


@pytest.mark.parametrize(
    "before, after", [("0", "0"), ("3", "3"), ("3", "0"), ("[N/A]", "[N/A]"), ("0", "[Not Supported]")]
)
def test_a_gpu_without_new_errors_is_fit(tmp_path, fake, before, after):
    """A driver that is loaded again counts from 0."""
    before, after = ({"nvidia-smi": (answers(count, "0"),)} for count in (before, after))
    assert look(tmp_path, fake, before, after) == ""


def test_errors_count_from_the_last_look_on(tmp_path, fake):
    fake("nvidia-smi", answers("0", "0"))
    node = Health(tmp_path, 1.0)
    fake("nvidia-smi", answers("2", "0"))
    assert node.unfit() and not node.unfit()


@pytest.mark.parametrize(
    "before, after, unfit",
    [
        ("", XID.format("0000:af:00", 79), True),
        ("", XID.format("0000:AF:00.0", 48), True),
        (XID.format("0000:af:00", 79), XID.format("0000:af:00", 79), False),  # the same line
        ("", XID.format("0000:17:00", 79), False),  # of another job's GPU
        ("", XID.format("0000:af:00", 43) + XID.format("0000:af:00", 31), False),  # of the application
        ("", "[ 12.5] usb 1-1: new device\n", False),
    ],
)
def test_xid_errors_in_the_kernel_log(tmp_path, fake, before, after, unfit):
    fake("nvidia-smi", answers("0", "0"))
    found = look(tmp_path, fake, {"dmesg": (before,)}, {"dmesg": (after,)})
    assert ("0000:af:00" in found and "Xid" in found) == bool(found) == unfit


def test_errors_that_only_a_reset_a_reboot_or_a_repair_ends():
    """The numbers are those of NVIDIA's catalog; 480 begins like one of them."""
    ends = {number for number in [*range(200), 480] if health.XID.search(XID.format("0000:af:00", number))}
    assert ends == {48, 62, 64, 74, 79, 95, 119, 120, 140}


def test_a_driver_without_the_recovery_action(tmp_path, fake):
    old = 'case "$*" in *gpu_recovery_action*) echo not a valid field; exit 2; esac'
    fake("nvidia-smi", f"{FIRST}, 0\n", 0, old)
    node = Health(tmp_path, 1.0)
    assert not node.unfit()
    fake("nvidia-smi", f"{FIRST}, 1\n", 0, old)
    assert "0000:3b:00" in node.unfit()


@pytest.mark.parametrize("start", [("No devices were found", 6), ("", 0)])
def test_a_node_without_gpus_has_none_to_look_at(tmp_path, fake, start):
    assert look(tmp_path, fake, {"nvidia-smi": start}, {"nvidia-smi": ("broken", 9)}) == ""


def test_warnings_of_nvidia_smi_are_no_gpus(tmp_path, fake):
    warning = f"WARNING: infoROM is corrupted at gpu {FIRST}\n"
    fake("nvidia-smi", answers("0") + warning)
    node = Health(tmp_path, 1.0)
    fake("nvidia-smi", answers("4") + warning)
    assert "4" in node.unfit()


def test_a_disk_that_is_sound(tmp_path, fake):
    assert Health(tmp_path, 600.0).poor() == "" and {path.name for path in tmp_path.iterdir()} == {"bin"}


def test_a_disk_without_space(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    assert f"{tmp_path} has 5 MiB" in Health(tmp_path, 600.0).poor()


def test_a_disk_that_fails(tmp_path, fake, monkeypatch):
    def fails(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    found = Health(tmp_path, 600.0).poor()
    assert str(tmp_path) in found and "Input/output error" in found and list(tmp_path.glob("tmp*")) == []


@pytest.mark.parametrize("seconds, slow", [(2.0, True), (0.5, False)])
def test_a_disk_that_is_slow(tmp_path, fake, monkeypatch, seconds, slow):
    now = [0.0]
    monkeypatch.setattr(health, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fsync", lambda _: now.__setitem__(0, seconds))
    assert bool(Health(tmp_path, 1.0).poor()) == slow
