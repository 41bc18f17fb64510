"""Draw how long each rank of a run computes, over time: in the terminal, and as a PNG.

A run with `train.check_speed_every` (which is on) and a `log.dir` leaves in metrics.jsonl what every rank takes for its
own work, without waiting for others. Shown is how many times as long that is as for the other ranks of the same
pipeline stage (their median): a row is a rank, time goes to the right. One dark row is a slow GPU, eight are a slow
node; dark spots here and there are noise. If all is well the picture is pale blue.

    python tools/stragglers.py runs/llama             # terminal, and runs/llama/stragglers.png

A run started again appends to its file: from its first step on, its figures replace those of the earlier start.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.config import command
from minitron.config.files import errors_as
from minitron.config.text import printable
from minitron.planner import style
from minitron.planner.style import BLUE, GOLD, INK, RED, tint
from minitron.supervise.metrics import rows, without_repeats

LARGEST = 1e15  # of steps and seconds
COLUMNS, ROWS = 60, 32  # of the terminal picture at most
LIMITS = (1.05, 1.1, 1.25, 1.5)  # from here on a cell is darker
KEYS = (f"below {LIMITS[0]}", *(f"from {limit}" for limit in LIMITS))
UNICODE, ASCII = "·░▒▓█", ".:+*#"
COLORS = tint(BLUE, 0.25), tint(GOLD, 0.45), GOLD, RED, INK


@dataclass
class Times:
    """What the ranks of a run took. steps [n]; ratio, seconds [n, ranks]; slow: ranks that were named, at each step."""

    steps: list[int]
    seconds: np.ndarray
    ratio: np.ndarray
    slow: list[list[int]]
    places: list[str]


def read(directory: Path) -> Times:
    """Read the times of the run that logged to `directory`. Raises ValueError if it left none."""
    path = directory / "metrics.jsonl"
    with errors_as(ValueError, lambda error: f"{path} cannot be read ({error}); name the log.dir of a run", OSError):
        found = without_repeats(rows(path))
    records: dict[int, tuple[list[float], list[int]]] = {}
    places, world, stages = [], 0, 1
    for row in found:
        try:
            kind = row["kind"]
            if kind == "run":
                now = int(row["world"]), int(row.get("pp", 1))
                if now != (world, stages):  # other ranks or stages: earlier times do not describe them
                    records.clear()
                world, stages = now
            elif kind == "places":
                places = [printable(place) for place in row["places"]]
            elif kind == "ranks":
                step, slow = int(row["step"]), list(map(int, row["slow"]))
                own = list(map(float, row["own_seconds"]))
                assert 0 <= step < LARGEST and all(0 <= seconds < LARGEST for seconds in own)
                assert len(own) == world and stages > 0 == world % stages and set(slow) <= set(range(world))
                records[step] = own, slow
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, AssertionError):
            raise ValueError(f"{path}:{row['line']} is no record of a run; leave the line out") from None
    if not records:
        why = "it had one rank in a stage, train.check_speed_every=0, or fewer steps than that"
        raise ValueError(f"{path} holds no times of ranks; {why}")
    seconds = np.array([own for own, _ in records.values()])
    of_stages = seconds.reshape(len(seconds), stages, -1)
    usual = np.maximum(np.median(of_stages, 2, keepdims=True), 1e-9)
    slow_ranks = [slow for _, slow in records.values()]
    return Times(list(records), seconds, (of_stages / usual).reshape(seconds.shape), slow_ranks, places)


def binned(x: np.ndarray, most: int, dim: int, reduce) -> tuple[np.ndarray, list[range]]:
    """Join neighbours along `dim` until there are `most` at most; return them and which they are."""
    edges = np.linspace(0, x.shape[dim], min(most, x.shape[dim]) + 1).astype(int)
    parts = [range(a, b) for a, b in zip(edges[:-1], edges[1:])]
    return np.stack([reduce(x.take(part, dim), dim) for part in parts], dim), parts


def draw(times: Times, unicode: bool) -> str:
    """Draw the picture for the terminal. Of ranks in one row the slowest is shown, of steps in one column the mean."""
    signs = UNICODE if unicode else ASCII
    cells, _ = binned(times.ratio, COLUMNS, 0, np.mean)
    cells, rows = binned(cells, ROWS, 1, np.max)
    names = [f"{row[0]}" if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows]
    width = max(map(len, names)) + 5
    lines = ["own time of each rank, by the median of its pipeline stage"]
    for name, row, values in zip(names, rows, cells.T):
        shades = "".join(signs[sum(value >= limit for limit in LIMITS)] for value in values)
        named = [rank for rank in row if any(rank in slow for slow in times.slow)]
        lines.append(f"{'rank ' + name:>{width}} {shades}{'  <- slow' * bool(named)}")
    first, last = str(times.steps[0]), str(times.steps[-1])
    lines.append(f"{'step':>{width}} {first}{last:>{max(len(cells) - len(first), len(last) + 1)}}")
    return "\n".join([*lines, " " * (width + 1) + "  ".join(map(" ".join, zip(signs, KEYS)))])


def verdict(times: Times) -> str:
    """Describe which ranks were slow, on which node, when, and by how much."""
    lines = []
    for rank in sorted(set().union(*times.slow)):
        when = [i for i, slow in enumerate(times.slow) if rank in slow]
        place = f" on {times.places[rank]}" if rank < len(times.places) else ""
        more = np.median(times.ratio[when, rank]) - 1
        steps = f"steps {times.steps[when[0]]} to {times.steps[when[-1]]}"
        lines.append(f"rank {rank}{place} was slow in {steps}: {more:.0%} more than the median of its stage")
    return "\n".join(lines) or "No rank was slower than the others of its stage for long."


def save_png(times: Times, path: Path) -> None:
    """Draw every rank and every comparison. Raises ValueError if that cannot be drawn or written."""
    style.save_png(picture(times), path)


@style.styled
def picture(times: Times):
    """Draw a row for each rank, with the terminal's limits as steps of colour; slow ranks are named beside theirs."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    steps, ranks = times.steps, times.ratio.shape[1]
    figure, axes = style.new(min(12.0, 2.0 + 0.2 * ranks))
    before = steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)  # a record is of the steps until its own
    colors, norm = ListedColormap(COLORS), BoundaryNorm(LIMITS, len(COLORS), extend="both")
    axes.pcolormesh([before, *steps], np.arange(ranks + 1) - 0.5, times.ratio.T, cmap=colors, norm=norm)
    axes.invert_yaxis()
    for axis in axes.xaxis, axes.yaxis:
        axis.get_major_locator().set_params(integer=True)
    slow = set().union(*times.slow)
    for rank in slow - {rank + 1 for rank in slow}:  # the first of neighbours
        axes.annotate("slow", (1, rank), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      va="center", color=RED)  # fmt: skip
    axes.set(xlabel="step", ylabel="rank", title="Own time of each rank" + ": none was slow" * (not slow))
    patches = [Patch(color=color, label=key) for color, key in zip(COLORS, KEYS)]
    title = "own time, divided by the median of the rank's pipeline stage"
    figure.legend(handles=patches, loc="outside lower center", ncols=len(KEYS), title=title)
    return figure


def main(argv: list[str]) -> None:
    parser = command.Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="log.dir of a run")
    parser.add_argument("--png", type=Path, help="the picture's file (default: stragglers.png in RUN_DIR)")
    arguments = parser.parse_args(argv)
    times = read(arguments.run_dir)
    print(draw(times, unicode=(sys.stdout.encoding or "").lower().replace("-", "") == "utf8"), end="\n\n")
    print(verdict(times))
    try:
        save_png(times, path := arguments.png or arguments.run_dir / "stragglers.png")
        print(f"Picture: {printable(path)}")
    except style.NoMatplotlib as error:
        if arguments.png:
            raise
        print(error)


if __name__ == "__main__":
    command.run(main)
