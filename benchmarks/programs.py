"""Measured programs as others run them: started, waited for, and read for the line that they report (measure.py)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess

from benchmarks import record

UNITS = {"G": 1.0, "M": 2.0**-10, "K": 2.0**-20}
GRACE_SECONDS = 45  # torchrun itself gives its processes 30 to end


class Skipped(Exception):
    """A side cannot run here."""


class Failed(Exception):
    """A side broke, or took too long."""


class OutOfMemory(Failed):
    """A side needs more memory than its GPU has. gib: what it had and then asked for; None if torch names none."""

    def __init__(self, message: str, gib: float | None):
        super().__init__(message)
        self.gib = gib


def launch(command: list[str], timeout: float, environment: dict[str, str]) -> dict:
    """What a measured program reported. Raises Skipped, or Failed with the end of its output."""
    process = subprocess.Popen(
        command,
        cwd=record.ROOT,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun ends its processes; killed, it would leave them on the GPUs
        try:
            process.communicate(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise Failed(f"took longer than {timeout:g} s: {' '.join(command)}") from None
    return reported(output, " ".join(command), process.returncode)


def reported(output: str, what: str, status: int) -> dict:
    """The figures that a measured program wrote. Raises Skipped, or Failed with the end of its output."""
    for text in output.splitlines():
        if text.startswith("RESULT "):
            return json.loads(text.removeprefix("RESULT "))
        if text.startswith("SKIP "):
            raise Skipped(text.removeprefix("SKIP "))
    message = f"exit status {status}: {what}\n{output[-3000:]}"
    raise OutOfMemory(message, needed_gib(output)) if "out of memory" in output else Failed(message)


def needed_gib(output: str) -> float | None:
    """What torch had allocated and what it could not allocate, from its message."""
    found = re.search(r"Tried to allocate ([\d.]+ .)iB.*? ([\d.]+ .)iB is allocated by PyTorch", output, re.DOTALL)
    sizes = [text.split() for text in found.groups()] if found else []
    return sum(float(number) * UNITS[unit] for number, unit in sizes) or None
