"""The cost of a training, for `tools/plan.py`: GPU-hours and days, with the planner's error range.

A buyer needs to know how far a plan may be off. benchmarks/results/calibration.md has runs that no constant was fitted
to, and calibration.json beside it their measured over predicted seconds. The range is from the 10th to the 90th
percentile of the runs on the plan's GPU, widened to include the plan itself, since most runs on one kind of GPU may be
slower than planned. Evaluation is not counted. Failures and checkpoints are counted if `--mtbf-hours` gives the mean
time between failures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from minitron.config.installed import ROOT
from minitron.planner import style
from minitron.planner.plan import Plan
from minitron.planner.style import BLUE, tint

CALIBRATION = ROOT / "benchmarks" / "results" / "calibration.json"
LEAST = 0.01  # the smallest goodput; below it the job is reported as endless
FEWEST = 5  # runs needed for a range of one GPU kind; with fewer, the runs of all kinds are used


class Range(NamedTuple):
    """Measured over predicted seconds: the 10th and the 90th percentile of `rows` runs, widened to include 1."""

    low: float
    high: float
    rows: int


class Cost(NamedTuple):
    days: float
    gpu_hours: float


def cost(job: Plan, tokens: float, goodput: float = 1.0) -> Cost:
    """Count days and GPU-hours for these tokens. goodput: share of the time that is steps; below LEAST endless."""
    hours = tokens / job.tokens_per_second / 3600 / goodput if goodput >= LEAST else inf
    return Cost(hours / 24, hours * job.world)


def error_range(gpu: str, path: Path = CALIBRATION) -> Range | None:
    """Read the error range of predictions for this GPU; None without a file of enough held-out runs."""
    by_gpu = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    ratios = by_gpu.get(gpu.lower(), [])
    if len(ratios) < FEWEST:
        ratios = [ratio for others in by_gpu.values() for ratio in others]
    if len(ratios) < FEWEST:
        return None
    tenths = quantiles(ratios, n=10, method="inclusive")
    return Range(min(1.0, tenths[0]), max(1.0, tenths[-1]), len(ratios))


def cost_line(job: Plan, tokens: float, goodput: float) -> str:
    """Describe the cost in one line, with its range."""
    days, hours = cost(job, tokens, goodput)
    text = f"cost   {hours:,.0f} GPU-hours{' with failures' if goodput < 1 else ''}"
    if (off := error_range(job.machine.device.gpu)) is None or days == inf:
        return text
    low, high, rows = off
    between = f"{hours * low:,.0f} to {hours * high:,.0f}, or {days * low:,.1f} to {days * high:,.1f} days"
    return f"{text}; {between}, the error range of {rows} measured runs (calibration.md)"


@style.styled
def curves(plans: list[Plan], tokens: float, goodput: Callable[[Plan], float]):
    """Draw GPU-hours and days over GPUs, with their range: plans of one job at growing scale, and their goodput."""
    shares, off = [goodput(job) for job in plans], error_range(plans[0].machine.device.gpu)
    plans = [job for job, share in zip(plans, shares) if share >= LEAST]  # beyond these the job never ends
    failing = ", with failures" if min(shares) < 1 else ""
    figure, axes = style.new(3.8, columns=2)
    worlds, costs = [job.world for job in plans], [cost(job, tokens, goodput(job)) for job in plans]
    hours, days = [one.gpu_hours for one in costs], [one.days for one in costs]
    for axis, name, values in zip(axes, ("GPU-hours", "days"), (hours, days)):
        axis.plot(worlds, values, "o-", ms=4, color=BLUE, label="planned")
        if off is not None:
            band = [[value * ratio for value in values] for ratio in (off.low, off.high)]
            axis.fill_between(worlds, *band, color=tint(BLUE, 0.3), lw=0, label=f"error range of {off.rows} runs")
        axis.set(xscale="log", xlabel="GPUs", ylabel=name, title=f"{name} for {tokens:g} tokens{failing}")
        if not plans:
            axis.text(0.5, 0.5, "no end at any size", transform=axis.transAxes, ha="center")
        axis.set_xticks(worlds, worlds, rotation=45)
        axis.minorticks_off()
        axis.set_ylim(0, None)
        axis.grid()
    axes[0].legend(loc="lower left")
    return figure
