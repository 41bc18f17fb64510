"""Draw the loss, gradients, rate, throughput and memory of runs: in the terminal (the loss), and as a PNG.

A run that logs to a directory leaves `metrics.jsonl` there, one JSON object a line: a record of kind `run` at each
start (with the unigram entropy of the corpus where it is known), then `step` and `eval` records. The unigram entropy is
what a model reaches that knows how often each token occurs and nothing else: a curve below it has learned from context.

    python tools/plot_run.py runs/quickstart            # terminal, and runs/quickstart/loss.png
    python tools/plot_run.py runs/a runs/b --png ab.png --smooth 50

The terminal has no pixels, but braille characters have eight dots in a 2 x 4 grid, one bit each: a plot of 60 x 16
characters is a bitmap of 120 x 64. Where the terminal cannot show them, every cell with a dot becomes a `*`.
A run with log.numerics_every also has the norm of its gradient by block, and in FP8 the underflows, as maps of colours.
The terminal then names the FP8 tensor that underflows most.
A run started again appends to its file: from its first step on, its figures replace those of the earlier start. Below
the picture is how all starts together spent their time: training that counted, repeated steps, starts, saves, waiting.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.config import command
from minitron.config.files import errors_as
from minitron.config.text import printable
from minitron.planner import style
from minitron.supervise.goodput import Goodput, measure
from minitron.supervise.metrics import rows, without_repeats

WIDTH, HEIGHT = 80, 24  # of the terminal picture, in characters, axes and legend included
MARGIN = 8  # columns left of the plot: tick labels and axis
COLUMNS = ("tokens_per_second", "memory_gib", "grad_norm", "learning_rate")  # of metrics.jsonl, beside the loss
SMOOTH = 100  # points that a smoothed curve has, about
FINAL_STEPS = 10  # the loss of single steps is noisy: the final loss is the mean of this many
LARGEST_STEP, LARGEST = 1e15, 1e100  # that can be drawn
NUMERICS = re.compile(r"grad_norm/[^/]+|fp8/[^/]+/[^/]+/underflows%")  # names in a record of log.numerics_every
USUAL, ROOM = 0.95, 3  # a panel reaches to ROOM times what this share of its values stay below
WELL_BELOW = 0.5  # nats; the perplexity is then less than exp(-0.5) = 61 % of the unigram model's

# Bits of U+2800 for the dots of one braille character, [row][column].
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
UNICODE = {"eval": "●", "entropy": "╌", "y": "│", "tick": "┤", "x": "─", "xtick": "┴", "corner": "└", "train": "⣀⠤⠒"}
ASCII = {"eval": "o", "entropy": "-", "y": "|", "tick": "+", "x": "-", "xtick": "+", "corner": "+", "train": "***"}


@dataclass
class Run:
    """One run's curves; all but `evals` are parallel to `steps`, a missing value is NaN."""

    name: str
    unigram_entropy: float | None = None
    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    memory_gib: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    goodput: Goodput | None = None
    numerics: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    @property
    def final_loss(self) -> float:
        """Mean of the last losses; skipped steps, which have none, do not count."""
        return mean(finite(self.loss)[-FINAL_STEPS:])


def finite(values: list[float]) -> list[float]:
    return [x for x in values if math.isfinite(x)]


def smoothed(values: list[float], window: int) -> list[float]:
    """The mean of each value and the `window` - 1 before it; what is not finite does not count."""
    means, total, count = [], 0.0, 0
    for i, value in enumerate(values):
        for x, sign in ((value, 1), (values[i - window] if i >= window else math.nan, -1)):
            if math.isfinite(x):
                total, count = total + sign * x, count + sign
        means.append(total / count if count else math.nan)
    return means


def top(values: list[float]) -> float:
    """Return the largest value that a panel shows at its height: of a few spikes it shows that they are there."""
    ordered = sorted(finite(values))
    return min(ordered[-1], ROOM * ordered[int(USUAL * (len(ordered) - 1))] or ordered[-1])


def short_names(names: list[str]) -> list[str]:
    """Names without the folders that all of them are in: runs/a, runs/b -> a, b."""
    parts = [Path(name).parts for name in names]
    shared = 0
    while len(names) > 1 and all(len(part) > shared + 1 for part in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    return [str(Path(*part[shared:])) for part in parts]


def read_run(directory: Path) -> Run:
    """Read the run that logged to `directory`. Raises ValueError if it left no readable steps."""
    path, run = directory / "metrics.jsonl", Run(printable(directory))
    with errors_as(ValueError, lambda error: f"{path} cannot be read ({error}); name the log.dir of a run", OSError):
        found = list(rows(path))
    for row in without_repeats(found):
        try:
            add_record(run, row)
        except (ValueError, KeyError, TypeError, OverflowError):
            raise ValueError(f"{path}:{row['line']} is no record of a run; leave the line out") from None
    if not finite(run.loss):
        raise ValueError(f"{path} holds no step with a finite loss; nothing to draw")
    run.goodput = measure(found)
    return run


def add_record(run: Run, record: dict) -> None:
    def number(key: str) -> float:
        value = record.get(key)
        if value is not None and abs(value) >= LARGEST:
            raise ValueError(f"{key} is too large to be drawn")
        return math.nan if value is None else float(value)

    kind = record["kind"]
    if kind in ("step", "eval", "numerics") and not 0 <= record["step"] < LARGEST_STEP:
        raise ValueError("no run has this step")
    if kind == "run":
        entropy = number("unigram_entropy")
        run.unigram_entropy = None if math.isnan(entropy) else entropy
    elif kind == "step":
        run.steps.append(int(record["step"]))
        run.loss.append(number("loss"))
        for column in COLUMNS:
            getattr(run, column).append(number(column))
    elif kind == "eval":
        run.evals.append((int(record["step"]), number("loss")))
    elif kind == "numerics":
        run.numerics.append((int(record["step"]), {name: number(name) for name in record if NUMERICS.fullmatch(name)}))


def by_block(run: Run, kind: str) -> dict[str, list[float]]:
    """Map each part of the model to its grad_norm or fp8 figures, one per record: of several tensors the largest."""
    parts: dict[str, list[float]] = {}
    for i, (_, figures) in enumerate(run.numerics):
        for name, value in figures.items():
            if name.startswith(f"{kind}/") and math.isfinite(value):
                part = name.split("/")[1]
                part = ".".join(part.split(".")[: 2 if part.startswith("blocks") else 1])
                row = parts.setdefault(part, [math.nan] * len(run.numerics))
                row[i] = max(value, row[i] if math.isfinite(row[i]) else value)
    return parts


# ---------------------------------------------------------------------------------------------------- the terminal


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class Canvas:
    """A bitmap of 2 x 4 dots per character over the data window, with characters laid over it."""

    def __init__(self, columns: int, rows: int, x_range: tuple[float, float], y_range: tuple[float, float]):
        self.columns, self.rows = columns, rows
        self.x_range, self.y_range = x_range, y_range
        self.bits = [[0] * columns for _ in range(rows)]
        self.over = [[""] * columns for _ in range(rows)]

    def dot(self, x: float, y: float) -> tuple[int, int]:
        """Data coordinates to the nearest dot, (0, 0) at the top left."""
        across = (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        down = (self.y_range[1] - y) / (self.y_range[1] - self.y_range[0])
        return round(across * (2 * self.columns - 1)), round(down * (4 * self.rows - 1))

    def cell(self, x: float, y: float) -> tuple[int, int]:
        across, down = self.dot(x, y)
        return across // 2, down // 4

    def line(self, xs: list[float], ys: list[float]) -> None:
        """Joins the points; a NaN breaks the line."""
        last = None
        for x, y in zip(xs, ys):
            here = self.dot(x, y) if math.isfinite(y) else None
            if here is not None:
                start = last or here
                length = max(abs(here[0] - start[0]), abs(here[1] - start[1]), 1)
                for i in range(length + 1):
                    across = start[0] + round((here[0] - start[0]) * i / length)
                    down = start[1] + round((here[1] - start[1]) * i / length)
                    self.bits[down // 4][across // 2] |= BRAILLE[down % 4][across % 2]
            last = here

    def text(self, unicode: bool) -> list[str]:
        def char(row: int, column: int) -> str:
            bits = self.bits[row][column]
            return self.over[row][column] or ((chr(0x2800 + bits) if unicode else "*") if bits else " ")

        return ["".join(char(row, column) for column in range(self.columns)) for row in range(self.rows)]


def draw(runs: list[Run], unicode: bool) -> str:
    """The picture for the terminal: loss over steps, at most WIDTH columns wide."""
    signs = UNICODE if unicode else ASCII
    entropies = sorted({run.unigram_entropy for run in runs if run.unigram_entropy is not None})
    values = [x for run in runs for x in run.loss + [loss for _, loss in run.evals] if math.isfinite(x)] + entropies
    low, high = min(values), max(values)
    pad = 0.04 * (high - low) or 0.5
    steps = [step for run in runs for step in (*run.steps, *(at for at, _ in run.evals))]
    first, last = min(steps), max(steps)
    canvas = Canvas(WIDTH - MARGIN - 3, HEIGHT - 6, (first, max(last, first + 1)), (low - pad, high + pad))

    for entropy in entropies:
        row = canvas.cell(first, entropy)[1]
        for column in range(canvas.columns):
            canvas.over[row][column] = signs["entropy"] if column % 2 == 0 else ""
    ends = {}
    for i, run in enumerate(runs, start=1):
        canvas.line(run.steps, run.loss)
        for step, loss in run.evals:
            if math.isfinite(loss):
                column, row = canvas.cell(step, loss)
                canvas.over[row][column] = signs["eval"]
        row = canvas.cell(first, run.final_loss)[1]
        ends[row] = ends.get(row, "") + f"{i}"

    lines = ["loss, nats per token"]
    labels = {
        canvas.cell(first, y)[1]: f"{y:g}" for y in ticks(low - pad, high + pad, 6) if len(f"{y:g}") <= MARGIN - 2
    }  # no loss of a model has a longer one
    for row, body in enumerate(canvas.text(unicode)):
        axis = signs["tick"] if row in labels else signs["y"]
        mark = " " + ends.get(row, "") if len(runs) > 1 else ""
        lines.append((f"{labels.get(row, ''):>{MARGIN - 2}} {axis}{body}{mark}").rstrip())
    lines += x_axis(canvas, signs) + legend(runs, bool(entropies), signs)
    return "\n".join(lines)


def x_axis(canvas: Canvas, signs: dict[str, str]) -> list[str]:
    rule, labels = [signs["x"]] * canvas.columns, [" "] * (canvas.columns + 3)
    for step in ticks(*canvas.x_range, 6):
        if step != int(step):
            continue
        column = canvas.cell(step, canvas.y_range[0])[0]
        rule[column] = signs["xtick"]
        label = f"{int(step)}"
        start = max(0, column - len(label) // 2)
        labels[start : start + len(label)] = label
    name = "step"
    indent = " " * MARGIN
    return [
        indent[:-1] + signs["corner"] + "".join(rule),
        (indent + "".join(labels)).rstrip(),
        indent + f"{name:^{canvas.columns}}".rstrip(),
    ]


def legend(runs: list[Run], entropy: bool, signs: dict[str, str]) -> list[str]:
    parts = [f"{signs['train']} training"]
    if any(run.evals for run in runs):
        parts.append(f"{signs['eval']} validation")
    if entropy:
        parts.append(" ".join([signs["entropy"]] * 3) + " unigram entropy")
    lines = [" " * MARGIN + "   ".join(parts)]
    if len(runs) > 1:
        own = len({run.unigram_entropy for run in runs}) > 1  # which line is whose?
        for i, (run, name) in enumerate(zip(runs, short_names([run.name for run in runs])), start=1):
            known = f", unigram entropy {run.unigram_entropy:.2f}" if own and run.unigram_entropy is not None else ""
            lines.append(f"{' ' * MARGIN}{i}: {name}{known}")
    return lines


def verdict(run: Run) -> str:
    """The final losses of a run, and how they stand to the unigram entropy where that is known."""
    rows = [("training loss", run.final_loss, f"mean of the last {min(FINAL_STEPS, len(run.steps))} steps")]
    loss = run.final_loss
    if run.evals:
        loss = run.evals[-1][1]  # text that was not trained on is the better judge
        rows.append(("validation loss", loss, f"at step {run.evals[-1][0]}"))
    entropy = run.unigram_entropy
    if entropy is not None:
        rows.append(("unigram entropy", entropy, "of the corpus: what token frequencies alone reach"))
    lines = [f"{run.name} after step {run.steps[-1]}, in nats per token:"]
    lines += [f"  {name:<16} {value:6.3f}  {note}" for name, value, note in rows]
    if rates := finite(run.tokens_per_second)[-FINAL_STEPS:]:
        lines.append(f"Throughput: {mean(rates):,.0f} tokens/s, mean of the last {len(rates)} steps.")
    if memory := finite(run.memory_gib):
        lines.append(f"Memory: {max(memory):.1f} GiB at most, of the GPU that needs most.")
    losses = {k: v for k, v in run.numerics[-1][1].items() if k.startswith("fp8/") and v > 0} if run.numerics else {}
    if losses:
        worst = max(losses, key=losses.__getitem__)
        layer, tensor = worst.split("/")[1:3]
        lines.append(f"Most FP8 underflows: {losses[worst]:.3g} % of {layer}'s {tensor}, step {run.numerics[-1][0]}.")
    if run.goodput is not None:
        lines.append(f"G{str(run.goodput)[1:]}.")
    if entropy is not None:
        if loss < entropy - WELL_BELOW:
            judgement = f"well below the unigram entropy, by {entropy - loss:.3f}: it learned from context"
        elif loss < entropy:
            judgement = f"below the unigram entropy, but by {entropy - loss:.3f} only: train for longer"
        else:
            judgement = f"NOT below the unigram entropy: {loss:.3f} against {entropy:.3f}"
        lines.append(f"The loss is {judgement}.")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- the PNG


@style.styled
def picture(runs: list[Run], window: int | None = None):
    """Loss (with validation points and the unigram entropy) above gradient norm, rate, tokens/s and memory, if known.

    Below these, of one run: what `by_block` finds of its gradient norms and underflows.
    window: steps of the mean that is drawn over the loss and its gradient's norm; None: about SMOOTH means a curve.
    Gradient norms above `top` are drawn at that height, as triangles, and count as that in the mean.
    """
    panels = {"gradient norm": "grad_norm", "learning rate": "learning_rate"}
    panels |= {"tokens/s": "tokens_per_second", "memory, GiB": "memory_gib"}
    panels = {label: name for label, name in panels.items() if any(finite(getattr(run, name)) for run in runs)}
    kinds = {"gradient norm by block": "grad_norm", "underflows, %": "fp8"} if len(runs) == 1 else {}
    maps = {label: parts for label, kind in kinds.items() if (parts := by_block(runs[0], kind))}
    ratios = [3] + [1] * len(panels) + [1.5] * len(maps)
    figure, grid = style.new(3.2 + 1.1 * sum(ratios[1:]), len(ratios), sharex=True, squeeze=False, height_ratios=ratios)
    above, *below = grid.flat[: 1 + len(panels)]
    for axes, (label, parts) in zip(grid.flat[1 + len(panels) :], maps.items()):
        highest = top(sum(parts.values(), [])) if label.startswith("gradient") else None
        draw_map(axes, [step for step, _ in runs[0].numerics], parts, label, highest)
    names = [name.replace("$", r"\$") for name in short_names([run.name for run in runs])]  # no formula
    entropies = sorted({run.unigram_entropy for run in runs if run.unigram_entropy is not None})
    for at, entropy in enumerate(entropies):
        having = [i for i, run in enumerate(runs) if run.unigram_entropy == entropy]
        shared = len(having) == len(runs)  # else the line has the colour of its first run, and names them all
        color = style.FAINT if shared else style.CURVES[having[0] % len(style.CURVES)]
        whose = "" if shared else ": " + ", ".join(names[i] for i in having)
        above.axhline(entropy, color=color, linestyle="--", linewidth=1)
        text = f"unigram entropy {entropy:.2f}{whose}"
        above.annotate(text, (1 - at / len(entropies), entropy), (-4, 4), xycoords=("axes fraction", "data"),
                       textcoords="offset points", ha="right", color=color)  # fmt: skip

    def curve(axes, run: Run, values: list[float], color: str, label: str | None) -> None:
        """Draw the values, pale where their mean is drawn over them."""
        width = window or max(1, len(values) // SMOOTH)
        point = "." if len(run.steps) == 1 else ""  # a line of one point would be invisible
        if width > 1:
            axes.plot(run.steps, values, color=style.tint(color, 0.3), linewidth=0.6)
            values = smoothed(values, width)
            label = label and f"{label}, mean of {width} steps"
        axes.plot(run.steps, values, color=color, marker=point, label=label, zorder=3)

    highest = max((top(run.grad_norm) for run in runs if finite(run.grad_norm)), default=0.0)
    for i, run in enumerate(runs):
        color = style.CURVES[i % len(style.CURVES)]
        name = "" if len(runs) == 1 else f"{names[i]}: "
        point = "." if len(run.steps) == 1 else ""
        curve(above, run, run.loss, color, f"{name}training")
        if run.evals:
            above.plot(*zip(*run.evals), "o", color=color, markersize=5, markerfacecolor="white", markeredgewidth=1.2,
                       label=f"{name}validation", zorder=4)  # fmt: skip
        for axes, column in zip(below, panels.values()):
            if column == "grad_norm":
                curve(axes, run, [min(norm, highest) for norm in run.grad_norm], color, None)
                if over := {step: norm for step, norm in zip(run.steps, run.grad_norm) if norm > highest}:
                    step = max(over, key=over.__getitem__)
                    label = f"{name}{len(over)} above, at most {over[step]:.3g} in step {step}"
                    axes.plot(list(over), [highest] * len(over), "^", color=color, label=label, zorder=4)
                    axes.legend(loc="upper right")
            else:
                axes.plot(run.steps, getattr(run, column), color=color, marker=point)
    above.set_ylabel("loss (nats per token)")
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    above.set_title(f"Training of {Path(names[0]).name}" if len(runs) == 1 else f"Training of {len(runs)} runs")
    for axes, (label, column) in zip(below, panels.items()):
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)
        form = "{:,.0f}" if column in ("tokens_per_second", "memory_gib") else "{:.3g}"
        axes.yaxis.set_major_formatter(lambda value, _, form=form: form.format(value))
    grid.flat[-1].set_xlabel("step")
    for axes in (above, *below):
        axes.grid()
    figure.align_ylabels()
    return figure


def draw_map(axes, steps: list[int], parts: dict[str, list[float]], label: str, highest: float | None) -> None:
    """Draw a row of colours for each part of the model, the first one on top, over the steps of its records.

    highest: from here on all values have the darkest colour.
    """
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("", ["white", style.BLUE])
    before = steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)
    mesh = axes.pcolormesh([before, *steps], range(len(parts) + 1), list(parts.values()), cmap=colors, vmin=0,
                           vmax=highest)  # fmt: skip
    every = math.ceil(len(parts) / 12)
    axes.set_yticks([i + 0.5 for i in range(0, len(parts), every)], list(parts)[::every])
    axes.invert_yaxis()
    axes.set_ylabel(label)
    beyond = highest is not None and highest < max(map(max, (finite(row) for row in parts.values())))
    axes.figure.colorbar(mesh, ax=axes, pad=0.01, aspect=12, extend="max" if beyond else "neither")


def save_png(runs: list[Run], path: Path, window: int | None = None) -> None:
    """Write `picture` to a file. Raises ValueError if that cannot be, or without matplotlib."""
    style.save_png(picture(runs, window), path)


def main(argv: list[str]) -> None:
    parser = command.Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="log.dir of a run")
    parser.add_argument("--png", type=Path, help="the picture's file (default: loss.png in the first RUN_DIR)")
    steps = f"mean over so many (a {SMOOTH}th of the run)"
    parser.add_argument("--smooth", type=command.positive(int), metavar="STEPS", help=steps)
    arguments = parser.parse_args(argv)
    path = arguments.png or arguments.run_dirs[0] / "loss.png"
    runs = [read_run(directory) for directory in arguments.run_dirs]
    print(draw(runs, unicode=(sys.stdout.encoding or "").lower().replace("-", "") == "utf8"), end="\n\n")
    print("\n".join(verdict(run) for run in runs))
    try:
        save_png(runs, path, arguments.smooth)
        print(f"Picture: {printable(path)}")
    except style.NoMatplotlib as error:
        if arguments.png:
            raise
        print(error)  # the curve is above; nothing that was asked for is missing


if __name__ == "__main__":
    command.run(main)
