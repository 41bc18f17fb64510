"""When saves are due: every so many steps, or as often as costs least (`checkpoint.every=auto`).

Problem: with rare saves a failure loses much work, and frequent ones cost time themselves. The best interval depends on
what a save costs training and on how long it takes, which is unknown before the run. The idea: two early saves,
FIRST_STEPS apart, are measured; each later one comes after the interval of `save_interval.best_interval`.

    step  0 ... 10    the first save: the time of a step is known
               20     the second: so is what the first one cost. All ranks agree on the next interval
               20 + n, and so on; each save measures anew

A save costs the extra time of the steps that overlap it: the step after it waits for the copy, and those beside its
writing share cores, disks and networks with it. Medians are compared, since steps vary for other reasons, too.

Measurements differ from rank to rank. At each save the largest measurement of all ranks is used, and all ranks get the
same number of steps. An interval is kept as long as the best one is within a quarter of it: there its cost is within
some percent of the least, and measurements are not more exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from minitron.config.save_interval import best_interval, duration
from minitron.runtime.log_formats import Iteration

FIRST_STEPS = 10
RECENT_STEPS, RECENT_SAVES = 20, 8  # of which medians are taken
KEPT = 1.25  # an interval is kept unless the best one is longer or shorter by more than this factor


class Costs(NamedTuple):
    """Seconds, None where nothing has been measured: of a step, lost to a save, from a save's begin to its end."""

    step: float | None
    lost: float | None
    save: float | None


class Cadence:
    """The steps after which one kind of save is due. every: steps, or "auto". done: steps before this start."""

    def __init__(self, every: int | str | None, mtbf_hours: float | None, done: int):
        self.auto = every == "auto"
        self.steps = FIRST_STEPS if isinstance(every, str) else every or 0
        self.mtbf = 3600.0 * (mtbf_hours or 0.0)
        self.last, self.agreed, self.running = done, False, False
        self.beside: list[float] = []  # steps behind the last save's begin, to its end
        self.step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)  # of steps beside no save
        self.lost: deque[float] = deque(maxlen=RECENT_SAVES)
        self.save_seconds: deque[float] = deque(maxlen=RECENT_SAVES)

    def due(self, step: int) -> bool:
        """Tell whether a save is due after this step: on all ranks alike."""
        return step >= self.last + self.steps if self.auto else self.steps > 0 and step % self.steps == 0

    def begin(self, step: int) -> None:
        """Note that a save of this step begins; the one before it is over."""
        self._settle()
        self.last, self.running = step, True

    def end(self, seconds: float | None) -> None:
        """Note that the save is over, whole after so many seconds; None: it failed. From any thread."""
        if seconds is not None:
            self.save_seconds.append(seconds)
        self.running = False

    def saw(self, it: Iteration) -> None:
        """Measure a step."""
        if not self.auto:
            return
        if it.step > self.last and (self.running or it.step == self.last + 1 and self.save_seconds):
            self.beside.append(it.seconds)
        else:
            self._settle()
            self.step_seconds.append(it.seconds)

    def _settle(self) -> None:
        """Compare the steps beside a save with others."""
        if self.beside and self.step_seconds:
            typical, (first, *rest) = median(self.step_seconds), self.beside
            more = len(rest) * max(0.0, median(rest) - typical) if rest else 0.0
            self.lost.append(max(0.0, first - typical) + more)
        self.beside = []

    def costs(self) -> Costs:
        """Return this rank's measurements."""
        return Costs(*(median(x) if x else None for x in (self.step_seconds, self.lost, self.save_seconds)))

    def best(self, of_ranks: Iterable[Costs]) -> tuple[int, str]:
        """Choose the steps between saves by the measurements of all ranks; say why if that is another number."""
        step, lost, save = (max((x for x in kind if x is not None), default=None) for kind in zip(*of_ranks))
        if not step or lost is None or save is None:
            return self.steps, ""
        steps = max(1, round(best_interval(lost, save, self.mtbf) / step))
        if self.agreed and self.steps / KEPT <= steps <= self.steps * KEPT:
            return self.steps, ""
        why = f"a save costs {lost:.3g} s and takes {save:.3g} s, and the job fails every {duration(self.mtbf)}"
        return steps, f"every {steps} steps ({duration(steps * step)}), since {why}"

    def agree(self, chosen: tuple[int, str]) -> str:
        """Take what was chosen for all ranks; return the reason if it changes."""
        self.steps, why = chosen
        self.agreed = self.agreed or bool(why)
        return why
