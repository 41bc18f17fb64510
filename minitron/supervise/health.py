"""Check a node before its ranks start again: a round with a broken GPU costs all nodes another restart.

    nvidia-smi    Every GPU of the start is listed. It has no more uncorrectable ECC errors than before, and its driver
                  requests no recovery, such as a reset or a reboot. Drivers before 570 do not have that field.
    dmesg         the kernel log, if this user may read it: Xid errors of these GPUs that only a reset, a reboot or a
                  repair ends. A crash of the application also leaves Xid errors; they do not count.
    log.dir       its free space, and the seconds until a small write has reached the disk

ECC and Xid errors count from the last check on. GPUs are not checked if nvidia-smi listed none at the start. The leader
compares the clocks (lead.py).
Source: NVIDIA's catalog of Xid errors; nvidia-resiliency-ext reads the recovery action before a rendezvous, too.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic

FIELDS = "ecc.errors.uncorrected.volatile.total", "gpu_recovery_action"
GOOD = "0", "None", "N/A", "Not Supported"
ANSWER_SECONDS = 30.0
XID = re.compile(r"(.*)NVRM: Xid \(PCI:(\w+:\w+:\w+)[^)]*\): (48|62|64|74|79|95|119|120|140)\b")
FREE_BYTES, PROBE_BYTES = 64 << 20, 1 << 20


class Health:
    """The GPUs and log.dir of a node. write_seconds: a small write to log.dir that takes longer is too slow."""

    def __init__(self, folder: Path, write_seconds: float):
        self.folder, self.write_seconds = folder, write_seconds
        self.gpus: dict[str, set[str]] = {}
        for self.fields in FIELDS, FIELDS[:1]:
            with suppress(OSError):
                self.gpus = self._gpus()
                break

    def unfit(self) -> str:
        """Describe in one line why this node's GPUs cannot take part in another round; empty if they can."""
        before = self.gpus
        try:
            self.gpus = self._gpus() if before else {}
        except OSError as error:
            return str(error)
        now = [(gpu, self.gpus.get(gpu, {"is no longer visible"})) for gpu in before]
        return next((f"GPU {gpu} {wrong}" for gpu, found in now for wrong in sorted(found - before[gpu])), "")

    def poor(self) -> str:
        """Describe in one line what is wrong with log.dir on this node; empty if nothing is."""
        begun = monotonic()
        try:
            free = shutil.disk_usage(self.folder).free
            with NamedTemporaryFile(dir=self.folder, buffering=0) as file:
                file.write(bytes(PROBE_BYTES))
                os.fsync(file.fileno())
        except OSError as error:
            return f"{self.folder} cannot be written: {error.strerror}"
        if (seconds := monotonic() - begun) > self.write_seconds:
            return f"{self.folder} takes {seconds:.1f} s for a small write"
        return f"{self.folder} has {free >> 20} MiB of free space" if free < FREE_BYTES else ""

    def _gpus(self) -> dict[str, set[str]]:
        """Return the faults of each GPU, by its address on the PCI bus. Raises OSError."""
        query = f"--query-gpu=pci.bus_id,{','.join(self.fields)}"
        found: dict[str, set[str]] = {}
        for bus, *values in csv.reader(answer("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines()):
            pairs = [(field, value.strip(" []")) for field, value in zip(self.fields, values)]
            if pairs:  # else it is a warning
                found[bus.lower()[-12:-2]] = {f"has {field} {value}" for field, value in pairs if value not in GOOD}
        with suppress(OSError):  # this user may not read the kernel log
            for time, gpu, xid in XID.findall(answer("dmesg")):
                found.get(gpu.lower(), set()).add(f"has Xid error {xid} {time}".strip())
        return found


def answer(*argv: str) -> str:
    """Return what a command prints. Raises OSError if it fails, or does not end in time."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True).stdout
    except (subprocess.SubprocessError, UnicodeError) as error:
        raise OSError(str(error)) from None
