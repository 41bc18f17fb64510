"""What a rank is doing, as whoever watches it may read at any moment.

Problem: when one rank of a thousand stops, the others wait for it in a collective, and none of them can say where it
stands. The idea: every rank keeps an `Activity`, a few attributes that the working thread overwrites: step, schedule
action, collective. Every `Axis` carries it, so it is wherever ranks talk, without being a global. runtime/watch.py
reads it in a run; a dry run's recorder (planning/dryrun.py) is an Activity that keeps every collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import Protocol

import torch


class Ranks(Protocol):
    """An axis of the mesh: its name and its ranks, in order."""

    name: str
    ranks: tuple[int, ...]


class Activity:
    """What this rank is doing. Written by the thread that trains, read by others at any moment.

    action: of the schedule, or a word. collective: (kind, axis, bytes) that the host stands in; it stays after one that
    failed. since: when any of this changed, by `time.monotonic`. queued: on a GPU, (event, step, action) of the last
    actions; the event comes when the device is through.
    """

    __slots__ = ("step", "action", "collective", "since", "queued")

    def __init__(self):
        self.step, self.action, self.queued = 0, "start", deque(maxlen=1024)
        self.leave()

    def begin(self, action: object) -> None:
        self.action, self.since = action, monotonic()

    def ended(self, device: torch.device) -> None:
        """The host is through with the action; a GPU may not have begun it."""
        if device.type == "cuda":
            self.queued.append((torch.cuda.current_stream().record_event(), self.step, self.action))

    def enter(self, kind: str, axis: Ranks, num_bytes: int) -> None:
        self.collective, self.since = (kind, axis, num_bytes), monotonic()

    def record(self, kind: str, axis: Ranks, x: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """x enters a collective of these ranks, or is a message to or from one. A dry run keeps a list."""

    def leave(self) -> None:
        self.collective, self.since = None, monotonic()

    def idle(self) -> float:
        """Seconds since the last change."""
        return monotonic() - self.since

    def __str__(self) -> str:
        text, collective = f"step {self.step}, {self.action}", self.collective
        if collective is not None:
            kind, axis, num_bytes = collective
            text += f", {kind} over {axis.name} ({num_bytes:,} bytes)"
        return text

    def partners(self) -> str:
        """Who takes part in the collective."""
        return "" if self.collective is None else f", together {listed(self.collective[1].ranks)}"


def listed(ranks: Iterable[int], at_most: int = 8) -> str:
    """ "rank 3", "ranks 0, 1, 2", and of many the first few."""
    names = [str(rank) for rank in ranks]
    more = f", ... ({len(names)} in all)" if len(names) > at_most else ""
    return f"rank{'s' * (len(names) > 1)} {', '.join(names[:at_most])}{more}"
