"""What a rank is doing, for a watching thread to read at any moment.

Problem: when one rank of a thousand stops, the others wait for it in a collective, and none of them can say what it
is doing. The idea: every rank keeps an `Activity`, a few attributes that the working thread overwrites: step, schedule
action, collective. Every `Axis` carries it, so every collective can write to it, and it is no global. runtime/watch.py
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

    @property
    def name(self) -> str: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...


class Activity:
    """What this rank is doing. Written by the thread that trains, read by others at any moment.

    action: of the schedule, or a word. collective: (kind, axis, bytes) of the collective that the host is in; after a
    failed one it is kept. since: when any of this changed last, by `time.monotonic`. queued: on a GPU, (event, step,
    action) of the last actions; the device reaches the event when it has finished the action.
    """

    __slots__ = ("step", "action", "collective", "since", "queued")

    def __init__(self) -> None:
        self.step = 0
        self.action: object = "start"
        self.collective: tuple[str, Ranks, int] | None = None
        self.since = monotonic()
        self.queued: deque[tuple[torch.cuda.Event, int, object]] = deque(maxlen=1024)

    def begin(self, action: object) -> None:
        """Note that the host begins an action."""
        self.action, self.since = action, monotonic()

    def ended(self, device: torch.device) -> None:
        """Note that the host has launched all of the action, which a GPU may not have begun."""
        if device.type == "cuda":
            self.queued.append((torch.cuda.current_stream().record_event(), self.step, self.action))

    def enter(self, kind: str, axis: Ranks, num_bytes: int) -> None:
        """Note that the host enters a collective."""
        self.collective, self.since = (kind, axis, num_bytes), monotonic()

    def record(self, kind: str, axis: Ranks, x: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Do nothing. A dry run lists x here, the input of a collective of `ranks` or a message to or from one."""

    def leave(self) -> None:
        """Note that the host has left the collective."""
        self.collective, self.since = None, monotonic()

    def idle(self) -> float:
        """Return the seconds since the last change."""
        return monotonic() - self.since

    def __str__(self) -> str:
        text, collective = f"step {self.step}, {self.action}", self.collective
        if collective is not None:
            kind, axis, num_bytes = collective
            text += f", {kind} over {axis.name} ({num_bytes:,} bytes)"
        return text

    def partners(self) -> str:
        """Name the ranks of the collective: ", together ranks 0, 1"; "" outside of one."""
        return "" if self.collective is None else f", together {listed(self.collective[1].ranks)}"


def listed(ranks: Iterable[int], at_most: int = 8) -> str:
    """Write ranks as text: "rank 3", "ranks 0, 1, 2"; of more than `at_most` the first ones and their number."""
    names = [str(rank) for rank in ranks]
    more = f", ... ({len(names)} in all)" if len(names) > at_most else ""
    return f"rank{'s' * (len(names) > 1)} {', '.join(names[:at_most])}{more}"
