"""The interval between saves that costs least: Young's and Daly's formula, for the trainer and the planner."""

from __future__ import annotations

import math

IDLE_BETWEEN = 2.0  # saves begin this many times their own duration apart, so that disks are idle for half of the time


def best_interval(stall: float, save: float, mtbf: float) -> float:
    """Return the seconds of training between two saves that cost least; all in seconds.

    stall: how long training waits for a save. save: until it is whole on the disk, which bounds the interval from
    below. mtbf: mean time between failures. Source: Daly 2006 (Future Generation Computer Systems 22). Its first
    term, sqrt(2 stall mtbf), is Young's.
    """
    x = stall / (2 * mtbf)
    seconds = mtbf if x >= 1 else math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - stall
    return max(seconds, IDLE_BETWEEN * save)


def duration(seconds: float) -> str:
    """Write seconds in the largest unit that gives two or more: "95.0 s", "2.5 min", "47.0 h", "3.1 days"."""
    units = ("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)
    name, size = next((unit for unit in units if seconds >= 2 * unit[1]), units[-1])
    return f"{seconds / size:.1f} {name}"
