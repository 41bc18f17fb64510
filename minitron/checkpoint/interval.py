"""When saves are due: every n steps, or after the interval that costs least (`checkpoint.every=auto`).

Problem: with rare saves a failure loses much work, and frequent ones cost time themselves. The best interval depends on
what a save costs training and on how long it takes, which is unknown before the run. The idea: two early saves,
FIRST_STEPS apart, are measured; each later one comes after the interval of `save_interval.best_interval`.

    step  0 ... 10    the first save: the time of a step is known
               20     the second: now the cost of the first is known, and the ranks agree on an interval
               20 + n, and so on; each save is measured

A save costs the extra time of the steps that overlap it. The step after it waits for the copy. The steps during its
writing share cores, disks and networks with it. Medians are compared, since steps vary for other reasons, too.

Measurements differ from rank to rank. At each save the largest measurement of all ranks is used, and all ranks get the
same number of steps. An interval is kept as long as the best one is within a quarter of it: there its cost is within
some percent of the least, and measurements are not more exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from minitron.config.save_interval import best_interval, duration
from minitron.runtime.log_formats import Iteration

FIRST_STEPS = 10
RECENT_STEPS, RECENT_SAVES = 20, 8  # medians are taken of these
KEPT = 1.25  # an interval is kept unless the best one is longer or shorter by more than this factor


class SaveInterval:
    """The steps after which one kind of save is due. every: steps, or "auto". done: steps before this start."""

    def __init__(self, every: int | str | None, mtbf_hours: float | None, done: int):
        self.auto = every == "auto"
        self.steps = FIRST_STEPS if isinstance(every, str) else every or 0
        self.mtbf = 3600.0 * (mtbf_hours or 0.0)
        self.last, self.measured, self.running, self.own = done, False, False, True
        self.during_save: list[float] = []  # seconds of the steps during the last save
        self.step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)  # only steps without a save
        self.stall_seconds: deque[float] = deque(maxlen=RECENT_SAVES)
        self.save_seconds: deque[float] = deque(maxlen=RECENT_SAVES)

    def due(self, step: int) -> bool:
        """Tell whether a save is due after this step, the same on all ranks."""
        return step >= self.last + self.steps if self.auto else self.steps > 0 and step % self.steps == 0

    def begin(self, step: int, own: bool = True) -> None:
        """Note that a save of this step begins, and that the one before has ended. own: it is of this kind."""
        self._settle()
        self.last, self.running, self.own = step, True, own

    def end(self, seconds: float | None) -> None:
        """Note that the save has ended: whole after `seconds`, or failed if None. May be called from any thread."""
        if seconds is not None:
            self.save_seconds.append(seconds)
        self.running = False

    def observe(self, it: Iteration) -> None:
        """Measure a step."""
        if not self.auto:
            return
        if it.step > self.last and (self.running or it.step == self.last + 1 and self.save_seconds):
            self.during_save.append(it.seconds)
        else:
            self._settle()
            self.step_seconds.append(it.seconds)

    def _settle(self) -> None:
        """Compare the steps during a save of this kind with others."""
        if self.own and self.during_save and self.step_seconds:
            typical, (first, *rest) = median(self.step_seconds), self.during_save
            more = len(rest) * max(0.0, median(rest) - typical) if rest else 0.0
            self.stall_seconds.append(max(0.0, first - typical) + more)
        self.during_save = []

    def choose(self, decide: Callable[..., Any]) -> str:
        """Choose the steps between saves if they are measured; return why, or "" if they stay. Collective.

        decide: `Agreement.decide`, of the measurements of all ranks.
        """
        if not self.auto:
            return ""
        self.steps, why = decide(self._medians, self._best)
        self.measured = self.measured or bool(why)
        return why

    def _medians(self) -> list[float | None]:
        """Return this rank's seconds per step, of training lost per save, and per save; None if not measured."""
        return [median(x) if x else None for x in (self.step_seconds, self.stall_seconds, self.save_seconds)]

    def _best(self, of_ranks: Iterable[list[float | None]]) -> tuple[int, str]:
        """Return the steps between saves by the measurements of all ranks, and why, or "" if they stay."""
        step, stall, save = (max((x for x in kind if x is not None), default=None) for kind in zip(*of_ranks))
        if not step or stall is None or save is None:
            return self.steps, ""
        steps = max(1, round(best_interval(stall, save, self.mtbf) / step))
        if self.measured and self.steps / KEPT <= steps <= self.steps * KEPT:
            return self.steps, ""
        why = f"a save costs {stall:.3g} s and takes {save:.3g} s, and the job fails every {duration(self.mtbf)}"
        return steps, f"every {steps} steps ({duration(steps * step)}), since {why}"
