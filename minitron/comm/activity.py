"""What a rank is doing, for a watching thread to read at any moment.

Problem: when one rank of a thousand stops, the others wait for it in a collective, and their stacks do not show why.
The idea: every rank keeps an `Activity`, a few attributes that the training thread overwrites: step, schedule action,
collective. Every `Axis` has it, so every collective writes to it without a global. runtime/watch.py reads it in a
run. A dry run's recorder (planner/dryrun/dryrun.py) is an Activity that keeps every collective.

An Activity also drives two clocks of the same actions: `Progress`, how far a GPU is, and `Stopwatch`, how long a rank
computes without waiting for others (runtime/stragglers.py).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """An axis of the mesh: its name and its ranks, in order."""

    @property
    def name(self) -> str: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...


class PeerLost(RuntimeError):
    """A collective failed that no Activity records, such as a save's; most likely another rank has died."""


class Activity:
    """What this rank is doing. Written by the thread that trains, read by others at any moment.

    action: of the schedule, or a word. collective: (kind, axis, bytes) of the collective that the host is in, or that
    has failed. since: time of the last change, by `time.monotonic`. progress: on a GPU, what the device itself is
    doing. stopwatch: times the rank's own work; None if that is not measured.
    """

    __slots__ = ("step", "action", "collective", "since", "progress", "stopwatch")

    def __init__(self, device: torch.device = torch.device("cpu"), stopwatch: Stopwatch | None = None):
        self.step = 0
        self.action: object = "start"
        self.collective: tuple[str, Ranks, int] | None = None
        self.since = monotonic()
        self.progress = Progress.of(device) if device.type == "cuda" else None
        self.stopwatch = stopwatch

    def begin_step(self, step: int) -> None:
        """Note that the host begins a step."""
        self.step = step
        if self.progress is not None:
            self.progress.begin_step(step)

    def begin(self, action: object) -> None:
        """Note that the host begins an action."""
        self.action, self.since = action, monotonic()

    def ended(self) -> None:
        """Note that the host has launched the whole action. A GPU may not have begun it."""
        if self.progress is not None:
            self.progress.ended(self.action)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note that launches within the block are recorded and do not run."""
        queued: list[object] = [] if self.progress is None else self.progress.queued[-1][1]
        before = len(queued)
        try:
            yield
        finally:
            del queued[before:]

    def replay(self, actions: Sequence[object]) -> None:
        """Note that the host is about to launch a recording of these actions. The device notes the end of each."""
        self.begin("replay")
        if self.progress is not None:
            self.progress.queued[-1][1].extend(actions)

    def enter(self, kind: str, axis: Ranks, num_bytes: int, waits: bool = True) -> None:
        """Note that the host enters a collective. waits: the host, or a GPU's current stream, waits for its end."""
        self.collective, self.since = (kind, axis, num_bytes), monotonic()
        if waits:
            self.pause()

    def record(self, kind: str, axis: Ranks, x: Tensor, ranks: tuple[int, ...]) -> None:
        """Do nothing. A dry run lists x here, the input of a collective of `ranks` or a message to or from one."""

    def leave(self) -> None:
        """Note that the host has left the collective."""
        self.collective, self.since = None, monotonic()
        self.resume()

    def pause(self) -> None:
        """Note that the current stream's next work depends on other ranks."""
        if self.stopwatch is not None:
            self.stopwatch.pause()

    def resume(self) -> None:
        """Note that the current stream's work depends on this rank alone again."""
        if self.stopwatch is not None:
            self.stopwatch.resume()

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
        """Name the ranks of the collective: ", together ranks 0, 1"; "" without a collective."""
        return "" if self.collective is None else f", together {listed(self.collective[1].ranks)}"


class Progress:
    """How far a GPU is: after each action a kernel writes step and action count to pinned host memory.

    The host, which runs ahead, keeps the queue: (step, its actions) of the last steps. Reading `words` calls no CUDA
    function, so it also works after the device has failed.
    """

    def __init__(self, words: Tensor, on_device: Tensor):
        self.words = words
        self._step, self._done = on_device.unbind()
        self.queued: deque[tuple[int, list[object]]] = deque([(0, [])], maxlen=4)

    @staticmethod
    def of(device: torch.device) -> Progress:
        """Make the words of a GPU, which accesses pinned memory at the host's address."""
        words = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        view = {"shape": (2,), "typestr": "<i8", "data": (words.data_ptr(), False), "version": 3}
        return Progress(words, torch.as_tensor(SimpleNamespace(__cuda_array_interface__=view), device=device))

    def begin_step(self, step: int) -> None:
        """Queue the beginning of a step."""
        self.queued.append((step, []))
        self._step.fill_(step)
        self._done.zero_()

    def ended(self, action: object) -> None:
        """Queue the end of an action."""
        self.queued[-1][1].append(action)
        self._done.add_(1)

    def unfinished(self) -> str:
        """Name the first action that the device has not finished."""
        step, done = self.words.tolist()
        for queued, actions in self.queued.copy():
            first = done if queued == step else 0
            if queued >= step and first < len(actions):
                return f"not through with step {queued}, {actions[first]}"
        return "through with all actions"


class Stopwatch:
    """Adds up the nanoseconds between a begin and its end, without those between a pause and its resume.

    add_now(total, sign): adds sign times the time to total, 0-d int64 on a GPU, when the current stream comes to it.
    None: use the host's clock. waits_often: ranks wait for each other in every layer (tp, cp) or every few (vp). Then
    a GPU times one microbatch instead of the whole pass, since each reading of its clock is a kernel.
    """

    def __init__(self, device: torch.device, add_now: Callable[[Tensor, int], None] | None, waits_often: bool = False):
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self.add_now, self.on_host, self.one_microbatch = add_now, 0, add_now is not None and waits_often
        self.running = self.paused = False
        self.scheduler = None
        with suppress(OSError):  # no Linux
            self.scheduler = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self.stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Begin a pass or an action that is timed."""
        self.running, self.paused, self.stream = True, False, self._stream()
        self._add(-1)

    def end(self) -> None:
        """End it."""
        self._add(1)
        self.running = False

    def pause(self) -> None:
        """Note that this stream now waits for other ranks. Only the stream of `begin` is timed."""
        if self.running and not self.paused and self._stream() == self.stream:
            self.paused = True
            self._add(1)

    def resume(self) -> None:
        """Note that the wait is over."""
        if self.paused and self._stream() == self.stream:
            self.paused = False
            self._add(-1)

    def read_into(self, reading: Tensor) -> None:
        """Write the sum to reading, 0-d int64 on the device."""
        reading.fill_(self.on_host) if self.add_now is None else reading.copy_(self.total)

    def _add(self, sign: int) -> None:
        if self.add_now is None:
            self.on_host += sign * (time.perf_counter_ns() - self._delayed())
        else:
            self.add_now(self.total, sign)

    def _delayed(self) -> int:
        """Return the nanoseconds in which Linux delayed this thread, which was ready to run."""
        return 0 if self.scheduler is None else int(os.pread(self.scheduler, 64, 0).split()[1])

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.total.device.index) if self.total.is_cuda else None


def listed(ranks: Iterable[int], at_most: int = 8, kind: str = "rank") -> str:
    """Write ranks as text: "rank 3", "ranks 0, 1, 2". Of more than `at_most`, the first ones and the count."""
    names = [str(rank) for rank in ranks]
    more = f", ... ({len(names)} in all)" if len(names) > at_most else ""
    return f"{kind}{'s' * (len(names) > 1)} {', '.join(names[:at_most])}{more}"
