"""tools/plot_run.py: the curves read, the picture in the terminal, the PNG, and one line for every mistake."""

import json
import math
import os
import signal
import subprocess
import sys
import unicodedata

import matplotlib.image
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minitron.planner import style
from tools import plot_run

FINITE = st.floats(-50, 50, allow_nan=False)


def write(directory, records, tail=""):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return directory


def records(losses, entropy=None, evals=(), memory=None):
    yield {"kind": "run", "unigram_entropy": entropy}
    for step, loss in enumerate(losses, start=1):
        yield {"kind": "step", "step": step, "loss": loss, "tokens_per_second": 100.0 * step, "memory_gib": memory}
        yield from ({"kind": "eval", "step": at, "loss": value} for at, value in evals if at == step)


def run_of(losses, entropy=None, evals=(), name="run"):
    steps = list(range(1, len(losses) + 1))
    return plot_run.Run(name, entropy, steps, list(losses), [1.0] * len(losses), list(evals))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_restart_replaces_what_the_earlier_attempt_wrote(tmp_path_factory, attempts):
    """Each attempt trains `count` steps from `start`; the twin is a dict that forgets its future at each start."""
    lines, steps, evals = [], {}, {}
    for attempt, (start, count) in enumerate(attempts):
        lines.append({"kind": "run", "unigram_entropy": float(attempt)})
        steps, evals = ({at: x for at, x in d.items() if at < start} for d in (steps, evals))
        for step in range(start, start + count):
            loss = attempt + step / 100
            pair = [{"kind": "step", "step": step, "loss": loss, "tokens_per_second": 10 * loss},
                    {"kind": "eval", "step": step, "loss": -loss}]  # fmt: skip
            # A step's figures may be logged while the next one runs, so after its evaluation.
            lines += pair if attempt % 2 else pair[::-1]
            steps[step], evals[step] = loss, -loss
    run = plot_run.read_run(write(tmp_path_factory.mktemp("run"), lines))
    assert dict(zip(run.steps, run.loss)) == steps and run.steps == sorted(steps)
    assert run.tokens_per_second == [10 * loss for loss in run.loss]
    assert run.evals == sorted(evals.items()) and run.unigram_entropy == len(attempts) - 1


@pytest.mark.parametrize("steps, at", [([1, 2], 9), ([7, 8], 2), ([5, 5, 3], 4)])
def test_an_evaluation_outside_of_the_steps_is_drawn_and_steps_in_any_order(steps, at):
    run = plot_run.Run("run", None, steps, [1.0] * len(steps), [1.0] * len(steps), [(at, 2.0)])
    rows = plot_run.draw([run], unicode=True).split("\n")
    found = [row.index("\u25cf") for row in rows[1:-1] if "\u25cf" in row]
    first, last = min(steps + [at]), max(steps + [at])
    assert found == [
        plot_run.MARGIN + round((2 * (plot_run.WIDTH - plot_run.MARGIN - 3) - 1) * (at - first) / (last - first)) // 2
    ]


def test_an_unfinished_last_line_and_missing_values_are_no_mistake(tmp_path):
    lines = [*records([3.0, math.nan, 2.0]), {"kind": "step", "step": 4, "loss": None}, {"kind": "memory", "bytes": 1}]
    run = plot_run.read_run(write(tmp_path, lines, tail='{"kind": "st'))
    assert run.steps == [1, 2, 3, 4] and run.final_loss == (3.0 + 2.0) / 2
    assert "training" in plot_run.draw([run], unicode=True)
    run.loss += [math.nan] * plot_run.FINAL_STEPS  # a run that ends in skipped steps still has a final loss
    assert run.final_loss == (3.0 + 2.0) / 2


@given(low=FINITE, span=st.floats(1e-3, 1e3), count=st.integers(1, 10))
def test_ticks_are_round_and_inside(low, span, count):
    found = plot_run.ticks(low, low + span, count)
    assert len(found) <= count + 1
    assert all(low - 1e-6 * span <= x <= low + span * (1 + 1e-6) for x in found)
    gaps = [b - a for a, b in zip(found, found[1:])]
    assert all(f"{gap:.0e}"[0] in "125" for gap in gaps) and len({f"{gap:.6g}" for gap in gaps}) <= 1


def test_the_dots_of_a_character_lie_where_braille_has_them():
    """Unicode's own names are the twin: dots 1 2 3 7 go down the left column, 4 5 6 8 down the right one."""
    for number, (x, y) in zip((1, 2, 3, 7, 4, 5, 6, 8), ((x, y) for x in (0, 1) for y in (3, 2, 1, 0))):
        canvas = plot_run.Canvas(1, 1, (0, 1), (0, 3))
        canvas.line([x], [y])
        assert [unicodedata.name(c) for c in canvas.text(unicode=True)] == [f"BRAILLE PATTERN DOTS-{number}"]


def decode(picture, rows):
    """Cells of the plot that hold a braille dot, as {(column, row)}."""
    body = picture.split("\n")[1 : rows + 1]
    cells = ((i, j) for j, line in enumerate(body) for i in range(len(line) - plot_run.MARGIN))
    return {(i, j) for i, j in cells if "\u2800" < body[j][plot_run.MARGIN + i] <= "\u28ff"}


@settings(deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=30), st.one_of(st.none(), FINITE), st.booleans())
@example([0.0, 2.439e-206], None, False)
def test_the_picture_passes_through_every_point_and_fits_the_terminal(losses, entropy, evaluated):
    run = run_of(losses, evals=[(len(losses), 0.5)] if evaluated else [])
    rows, columns = plot_run.HEIGHT - 6, plot_run.WIDTH - plot_run.MARGIN - 3
    cells = decode(plot_run.draw([run_of(losses)], unicode=True), rows)
    top, bottom = min(j for _, j in cells), max(j for _, j in cells)
    low, high, last = min(losses), max(losses), max(len(losses) - 1, 1)
    assert top <= 1 and bottom >= rows - 2 or high == low
    for step, loss in enumerate(losses):
        column = step / last * (columns - 0.5)
        row = (top + bottom) / 2 if high == low else top + (high - loss) / (high - low) * (bottom - top)
        # Within one cell: the dots' rounding, and the outermost points lie anywhere within their cells.
        assert any(abs(i - column) <= 1 and abs(j - row) <= 1 for i, j in cells)
    run.unigram_entropy = entropy
    for unicode in (True, False):
        picture = plot_run.draw([run], unicode)
        assert all(len(line) <= plot_run.WIDTH for line in picture.split("\n"))
        assert unicode or picture.isascii()
        assert ("unigram entropy" in picture) == (entropy is not None)
        assert (plot_run.UNICODE if unicode else plot_run.ASCII)["entropy"] in picture or entropy is None


def test_axis_labels_stand_where_their_values_are():
    """A straight line from 0 down to -100: the curve crosses each labelled row at the step that has that loss."""
    losses = [-float(i) for i in range(101)]
    picture = plot_run.draw([run_of(losses)], unicode=True).split("\n")
    columns = plot_run.WIDTH - plot_run.MARGIN - 3
    labelled = [line for line in picture if plot_run.UNICODE["tick"] in line]
    assert len(labelled) >= 4
    for line in labelled:
        drawn = [i - plot_run.MARGIN for i, c in enumerate(line) if "\u2800" < c <= "\u28ff"]
        column = -float(line[: plot_run.MARGIN - 2]) / 100 * (columns - 1)
        assert min(drawn) - 1 <= column <= max(drawn) + 1
    # On the step axis, the last label ends under the last column's tick.
    assert picture[-3].split()[-1] == "100" and picture[-4][-1] == plot_run.UNICODE["xtick"]


def test_several_runs_are_numbered_at_their_ends():
    runs = [run_of([9.0, 2.0], name="good"), run_of([9.0, 8.0], entropy=5.0, name="bad")]
    lines = plot_run.draw(runs, unicode=True).split("\n")
    good, bad = (next(i for i, line in enumerate(lines) if line.endswith(f" {n}")) for n in (1, 2))
    assert bad < good
    assert lines[-2].strip() == "1: good" and lines[-1].strip() == "2: bad, unigram entropy 5.00"
    runs[0].unigram_entropy = 5.0  # one line of both
    assert [line.strip() for line in plot_run.draw(runs, unicode=True).split("\n")[-2:]] == ["1: good", "2: bad"]


@pytest.mark.parametrize("entropy", [None, 6.0])
@pytest.mark.parametrize("evals", [(), [(2, 5.8)], [(2, 5.0)], [(2, 6.5)]])
def test_the_verdict_compares_held_out_loss_with_the_unigram_entropy(entropy, evals):
    text = plot_run.verdict(run_of([5.0, 5.2], entropy, evals))
    assert f"{(5.0 + 5.2) / 2:.3f}" in text
    judged = evals[-1][1] if evals else (5.0 + 5.2) / 2
    assert f"{judged:.3f}" in text
    if entropy is None:
        assert "The loss is" not in text
    elif judged >= entropy:
        assert "The loss is NOT below the unigram entropy" in text
    elif judged >= entropy - plot_run.WELL_BELOW:
        assert f"below the unigram entropy, but by {entropy - judged:.3f} only" in text
    else:
        assert f"well below the unigram entropy, by {entropy - judged:.3f}" in text


def test_the_command_draws_both_pictures(tmp_path):
    """In a terminal that knows ASCII only, as a user starts it."""
    a = write(tmp_path / "a", records([8.0, 7.0, 5.0, 5.0], entropy=7.5, evals=[(4, 5.5)], memory=61.25))
    b = write(tmp_path / "b", records([8.0]))
    command = [sys.executable, plot_run.__file__, str(a), str(b)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and "The loss is well below the unigram entropy" in done.stdout
    rate = (100.0 + 200.0 + 300.0 + 400.0) / 4
    assert f"Throughput: {rate:.0f} tokens/s" in done.stdout and "Memory: 61.2 GiB" in done.stdout
    height, width, _ = matplotlib.image.imread(a / "loss.png").shape
    assert width > 500 and height > 500
    plot_run.save_png([plot_run.read_run(b)], tmp_path / "b.png")  # without memory: one panel less
    assert matplotlib.image.imread(tmp_path / "b.png").shape[0] < height


def test_names_leave_out_the_folders_that_all_are_in():
    assert plot_run.short_names(["runs/x/a", "runs/x/b", "runs/x/b/c"]) == ["a", "b", "b/c"]
    assert plot_run.short_names(["/r/a", "/s/a"]) == ["r/a", "s/a"] and plot_run.short_names(["runs/a"]) == ["runs/a"]
    assert plot_run.short_names(["a", "a"]) == ["a", "a"] and plot_run.short_names(["."]) == ["."]


@settings(deadline=None)
@given(
    values=st.lists(st.one_of(st.floats(-100, 100), st.just(math.nan)), min_size=1, max_size=30),
    window=st.integers(1, 9),
)
def test_a_smoothed_curve_is_the_mean_of_the_last_values(values, window):
    for i, found in enumerate(plot_run.smoothed(values, window)):
        last = plot_run.finite(values[max(0, i - window + 1) : i + 1])
        assert math.isnan(found) if not last else found == pytest.approx(sum(last) / len(last), abs=1e-9)


def points(line):
    return [tuple(point) for point in line.get_xydata()]


def test_runs_are_compared_by_short_names_smoothed_with_gradient_norm_and_rate(tmp_path):
    runs = []
    for name, rate in (("a", 1e-3), ("b", 3e-4)):
        lines = records([8.0, 7.0, 5.0, 5.0], entropy=7.5, evals=[(4, 5.5)], memory=61.25)
        more = {"grad_norm": 100 * rate, "learning_rate": rate}
        full = [line | (more if line["kind"] == "step" else {}) for line in lines]
        runs.append(plot_run.read_run(write(tmp_path / name, full)))
    loss, norm, rate, speed, memory = plot_run.picture(runs, 2).axes
    labels = ["loss (nats per token)", "gradient norm", "learning rate", "tokens/s", "memory, GiB"]
    assert [axes.get_ylabel() for axes in (loss, norm, rate, speed, memory)] == labels
    assert memory.get_xlabel() == "step" and loss.get_title(loc="left") == "Training of 2 runs"
    legend = [text.get_text() for text in loss.figure.legends[0].get_texts()]
    assert legend == [f"{n}: {what}" for n in "ab" for what in ("training, mean of 2 steps", "validation")]
    assert [text.get_text() for text in loss.texts] == ["unigram entropy 7.50"]
    by_label = {line.get_label(): line for line in loss.lines}
    raw, mean = [(1, 8), (2, 7), (3, 5), (4, 5)], [(1, 8), (2, 7.5), (3, 6), (4, 5)]
    for i, run in enumerate("ab"):
        smooth, pale = by_label[f"{run}: training, mean of 2 steps"], loss.lines[1 + 3 * i]
        assert points(smooth) == mean and smooth.get_color() == style.CURVES[i]
        assert points(pale) == raw and pale.get_color() == style.tint(style.CURVES[i], 0.3)
        assert points(by_label[f"{run}: validation"]) == [(4, 5.5)]
        values, others = [1e-3, 3e-4][i], [line for axes in (norm, rate, speed, memory) for line in axes.lines]
        drawn = [[y for _, y in points(line)] for line in others if line.get_color() == smooth.get_color()]
        assert drawn == [pytest.approx([x] * 4) for x in (100 * values, values)] + [[100, 200, 300, 400], [61.25] * 4]


def test_a_line_of_entropy_names_its_runs_if_others_have_another():
    runs = [run_of([9.0, 2.0], entropy, name=name) for name, entropy in zip("abcd", (7.0, None, 7.0, 7.1))]
    loss = plot_run.picture(runs).axes[0]
    dashed = [(line.get_ydata()[0], line.get_color()) for line in loss.lines if line.get_linestyle() == "--"]
    assert dashed == [(7.0, style.CURVES[0]), (7.1, style.CURVES[3])]
    assert [(text.get_text(), text.get_color()) for text in loss.texts] == [
        ("unigram entropy 7.00: a, c", style.CURVES[0]),
        ("unigram entropy 7.10: d", style.CURVES[3]),
    ]
    first, second = (text.get_window_extent() for text in loss.texts)  # beside each other: the lines are close
    assert not first.overlaps(second)


@pytest.mark.parametrize("spikes", [{}, {70: 1e6}, {3: 1e6, 70: 2e6, 80: math.nan}])
def test_a_spike_of_the_gradient_norm_is_a_triangle_in_a_panel_of_the_usual_size(spikes):
    """Of a second run, too, which has none."""
    usual = [1 + 0.01 * (step % 7) for step in range(1, 101)]
    runs = [run_of([2.0] * 100, name=name) for name in "ab"]
    runs[0].grad_norm = [spikes.get(step, norm) for step, norm in enumerate(usual, start=1)]
    runs[1].grad_norm = usual
    panel = plot_run.picture(runs, 1).axes[1]
    assert max(usual) < panel.get_ylim()[1] < 4 * max(usual) and panel.get_ylim()[0] == 0
    assert all(max(plot_run.finite(line.get_ydata())) < panel.get_ylim()[1] for line in panel.lines)
    triangles = [line for line in panel.lines if line.get_marker() == "^"]
    above = {step: norm for step, norm in spikes.items() if norm > 1e5}
    assert [list(line.get_xdata()) for line in triangles] == ([list(above)] if above else [])
    assert (panel.get_legend() is not None) == bool(above)
    if above:
        (said,) = (text.get_text() for text in panel.get_legend().get_texts())
        step = max(above, key=above.get)
        assert said.startswith("a: ") and f"{above[step]:.3g}" in said and said.endswith(f" step {step}")
    # A run that diverges is no spike: its panel shows all.
    runs[0].grad_norm = [1.0] * 50 + [1e6] * 50
    panel = plot_run.picture(runs, 1).axes[1]
    assert panel.get_ylim()[1] > 1e6 and panel.get_legend() is None


@pytest.mark.parametrize("norms", [[0.0], [0.0, 1e6], [math.nan, 3.0], [0.0] * 99 + [5.0]])
def test_panels_of_few_or_zero_norms(norms, recwarn):
    run = run_of([2.0] * len(norms))
    run.grad_norm = norms
    bottom, top = plot_run.picture([run]).axes[1].get_ylim()
    assert bottom == 0 < top and not recwarn.list


def test_what_a_run_has_not_logged_has_no_panel_and_smoothing_has_its_option(tmp_path):
    run = write(tmp_path / "a", records([8.0, 7.0, 5.0, 5.0]))
    figure = plot_run.picture([plot_run.read_run(run)])
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats per token)", "tokens/s"]
    assert figure.axes[0].get_title(loc="left") == "Training of a"
    assert [line.get_label() for line in figure.axes[0].lines] == ["training"]  # so few steps are their own mean
    assert "--smooth: 0 is not a whole number" in error_of(run, "--smooth", 0)


def numerics(step, worst):
    figures = {"grad_norm/embedding": 3.0, "grad_norm/blocks.0": 1.0 * step, "grad_norm/blocks.1": None}
    figures |= {f"fp8/blocks.{i}.mlp.{at}/gradient/underflows%": 0.5 for i in (0, 1) for at in ("up", "down")}
    figures |= {"fp8/blocks.1.mlp.up/gradient/underflows%": worst, "fp8/blocks.1.mlp.up/gradient/cur_amax": 7.0}
    return {"kind": "numerics", "step": step, "param_norm": 9.0, "fp8/underflows%": 80.0, **figures}


def test_maps_show_the_block_whose_numbers_go_wrong(tmp_path, capsys):
    rows = [*records([8.0, 7.0, 5.0, 5.0]), numerics(2, 1.0), numerics(4, 61.0)]
    run = plot_run.read_run(write(tmp_path, rows))
    assert plot_run.by_block(run, "grad_norm") == {"embedding": [3.0, 3.0], "blocks.0": [2.0, 4.0]}
    assert plot_run.by_block(run, "fp8") == {"blocks.0": [0.5, 0.5], "blocks.1": [1.0, 61.0]}
    norms, underflows = plot_run.picture([run]).axes[2:4]
    assert norms.get_ylabel() == "gradient norm by block" and underflows.get_ylabel() == "underflows, %"
    assert underflows.collections[0].get_array().tolist() == [[0.5, 0.5], [1.0, 61.0]]
    assert [label.get_text() for label in underflows.get_yticklabels()] == ["blocks.0", "blocks.1"]
    assert len(plot_run.picture([run, run]).axes) == 2
    run.numerics = [(step, {f"grad_norm/blocks.{i}": 1.0 for i in range(8)}) for step in range(1, 9)]
    run.numerics[4][1]["grad_norm/blocks.3"] = 1e6  # its cell has the darkest colour, and others have one
    (mesh,) = plot_run.picture([run]).axes[2].collections
    assert mesh.norm.vmax < 10 and mesh.norm(1.0) > 0.2 and mesh.colorbar.extend == "max"
    run = plot_run.read_run(tmp_path)
    plot_run.main([str(tmp_path)])
    assert "Most FP8 underflows: 61 % of blocks.1.mlp.up's gradient, step 4." in capsys.readouterr().out


def test_the_time_of_all_starts_is_accounted_for(tmp_path, capsys):
    """Two starts, the second from step 3 on; a save's record before its first step and an end's rewind nothing."""
    rows = [{"kind": "run", "time": 102.0, "started": 100.0, "load_seconds": 0.0, "first_step": 1}]
    rows += [{"kind": "step", "step": i, "loss": 9.0 - i, "step_seconds": 1.0, "time": 102.0 + i} for i in range(1, 5)]
    rows += [{"kind": "run", "time": 112.0, "started": 110.0, "load_seconds": 1.0, "first_step": 3}]
    rows += [{"kind": "save", "step": 2, "time": 112.5, "seconds": 0.1, "local": True}]
    rows += [{"kind": "step", "step": i, "loss": 8.0 - i, "step_seconds": 1.0, "time": 110.0 + i} for i in (3, 4)]
    rows += [{"kind": "run", "time": 115.0, "started": 114.0, "load_seconds": 0.0, "first_step": 5}]
    rows += [{"kind": "end", "step": 4, "time": 115.0, "stall_seconds": 0.0, "shares": {}}]
    run = plot_run.read_run(write(tmp_path, rows))
    assert run.steps == [1, 2, 3, 4] and run.loss == [8.0, 7.0, 5.0, 4.0]
    assert run.goodput.lost_steps == 2 and run.goodput.total == 15.0
    plot_run.main([str(tmp_path)])
    line = "Goodput 26.7 % of 15.0 s since the first start (3 starts, 2 steps made again); start 26.7 %, load 6.7 %, "
    assert line + "lost 13.3 %, waiting 26.7 %.\n" in capsys.readouterr().out
    assert plot_run.read_run(write(tmp_path / "old", records([3.0, 2.0]))).goodput is None


def error_of(*arguments):
    with pytest.raises(ValueError) as error:
        plot_run.main([str(argument) for argument in arguments])
    assert "\n" not in str(error.value)
    return str(error.value)


def broken(tmp_path, name):
    if name == "missing":
        return tmp_path / "nowhere", "cannot be read"
    if name == "empty":
        return write(tmp_path, []), "holds no step with a finite loss"
    if name == "nan":
        return write(tmp_path, records([math.nan])), "holds no step with a finite loss"
    if name == "pipe":  # to wait for whoever writes into it would take for ever
        os.mkfifo(tmp_path / "metrics.jsonl")
        return tmp_path, "cannot be read"
    (tmp_path / "metrics.jsonl").write_bytes(
        {
            "binary": b"\xff\xfe\n",
            "text": b"iteration 1\n",
            "list": b"[1]\n",
            "no kind": b'{"step": 1}\n',
            "no step": b'{"kind": "step", "loss": 1.0}\n',
            "wrong type": b'{"kind": "step", "step": 1, "loss": [1.0]}\n',
            "deep": b"[" * 100_000 + b"\n",
            "huge step": b'{"kind": "step", "step": 1%s, "loss": 1.0}\n' % (b"0" * 400),
            "huge loss": b'{"kind": "step", "step": 1, "loss": -1e308}\n',
            "huge entropy": b'{"kind": "run", "unigram_entropy": 1e400}\n',
        }[name]
    )
    return tmp_path, "metrics.jsonl:1 is no record of a run"


@pytest.mark.parametrize(
    "name",
    [
        *("missing", "empty", "nan", "binary", "text", "list", "no kind", "no step", "wrong type"),
        *("pipe", "deep", "huge step", "huge loss", "huge entropy"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, name):
    directory, message = broken(tmp_path, name)
    assert message in error_of(directory)
    assert capsys.readouterr().out == "" and not (tmp_path / "loss.png").exists()


def test_a_picture_that_cannot_be_drawn_is_one_line(tmp_path, capsys, monkeypatch):
    directory = write(tmp_path, records([2.0, 1.0]))
    assert "cannot be written" in error_of(directory, "--png", tmp_path / "no" / "such" / "folder.png")
    assert "cannot be written" in error_of(directory, "--png", tmp_path / "loss.xyz")
    assert "cannot be written" in error_of(directory, "--png", tmp_path)
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = error_of(directory, "--png", tmp_path / "loss.png")
    assert "training loss" in capsys.readouterr().out
    assert "matplotlib is not installed" in message and "pip install" in message
    plot_run.main([str(directory)])  # the curve in the terminal is all that was asked for
    printed = capsys.readouterr().out
    assert "training loss" in printed and printed.endswith(f"{message}\n")


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    """`plot_run.py RUN | head -1` ended in a BrokenPipeError."""
    directory = write(tmp_path, records([2.0, 1.0]))
    read, closed = os.pipe()
    os.close(read)
    command = [sys.executable, plot_run.__file__, str(directory)]
    done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(closed)
    assert done.stderr == "" and done.returncode == 128 + signal.SIGPIPE
