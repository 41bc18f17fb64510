"""minitron/planner/style.py: whoever draws, draws in one style, and says in one line what is missing."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import table
from minitron.pipeline.schedule import make
from minitron.planner import command, draw, pictures, style
from minitron.planner.draw import draw_svg
from minitron.planner.machine import choose_machine
from minitron.planner.simulate import simulate
from tools import plot_run, stragglers

ROOT = Path(__file__).resolve().parents[2]


def planned():
    argv = ["llama3_8b", "train.global_batch_size=32", "--world", "8", "--device", "h200"]
    options = command.parse(argv)
    return command.plan(command.cli.load(options.config), options.world, choose_machine(options.device, None))


def figures():
    """One figure of every program that draws with matplotlib."""
    job = planned()
    yield pictures.memory(job)
    yield pictures.time_bars([job])
    yield pictures.curves([job], [job], [(8, 1e5)])
    run = plot_run.Run("run", 5.0, [1, 2], [3.0, 2.0], evals=[(2, 2.5)])
    run.tokens_per_second, run.memory_gib, run.grad_norm, run.learning_rate = ([1.0, 2.0] for _ in range(4))
    yield plot_run.picture([run])
    yield stragglers.picture(stragglers.Times([10, 20], np.ones((2, 8)), np.ones((2, 8)), [[], [3]], []))
    yield table.draw(table.newest(table.RESULTS))
    yield table.draw_curves({"curves": {"bf16": [3.0, 2.0], "block": [3.1, 2.0]}, "steps": 20})


def test_all_pictures_have_one_width_one_font_and_three_sizes(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    for number, figure in enumerate(figures()):
        style.save(figure, tmp_path / f"{number}.png")
        assert figure.get_figwidth() == style.WIDTH
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        sizes = {text.get_fontsize() for text in texts}
        assert sizes <= {style.SMALL, style.TEXT, style.TITLE, style.TITLE + 1} and len(texts) > 10
        assert {tuple(text.get_fontfamily()) for text in texts} == {(style.FONT,)}
        inside = figure.get_tightbbox()  # nothing is cut off at the page's edge
        assert -0.05 <= inside.x0 and inside.x1 <= style.WIDTH + 0.05
    root = ElementTree.fromstring(draw_svg(simulate(make(2, 1, 2), 1, 2)))
    assert root.get("width") == f"{style.WIDTH}in" and root.get("font-family").startswith(style.FONT)
    assert {float(size) for size in re.findall(r'font-size="(\d+)"', ElementTree.tostring(root, "unicode"))} == {
        style.SMALL,
        style.TEXT,
        style.TITLE,
    }


def test_nobody_draws_in_a_style_of_its_own():
    """pyplot has a style and figures of its own; sizes and colours are written in one file."""
    for path in [*ROOT.glob("tools/*.py"), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("minitron/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert "pyplot" not in text and "rcParams" not in text, path
        if path.name != "style.py":
            assert not re.findall(r'"#[0-9a-f]{6}"|figsize|fontsize=\d|savefig', text), path


def test_a_tint_is_between_the_color_and_white():
    assert style.tint("#2a6fbb", 1) == "#2a6fbb" and style.tint("#2a6fbb", 0) == "#ffffff"
    assert style.tint("#000000", 0.5) == "#808080"


def test_a_drawn_schedule_names_its_picture(tmp_path, capsys):
    svg = tmp_path / "s.svg"
    draw.main(["--pp", "2", "--microbatches", "4", "--svg", str(svg)])
    assert ElementTree.parse(svg) and capsys.readouterr().out.endswith(f"Picture: {svg}\n")


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="matplotlib is not installed; .*pip install .*plot.*, or do without"):
        list(pictures.draw(planned(), tmp_path / "plan", 1e12, lambda job: 1.0))
    results = tmp_path / "results.jsonl"
    results.write_text(table.RESULTS.read_text(encoding="utf-8"), encoding="utf-8")
    assert table.main(["--results", str(results)]) == 0  # the table is there
    assert "no picture was drawn: matplotlib is not installed" in capsys.readouterr().out
    assert (tmp_path / "compare.md").exists() and not (tmp_path / "compare.png").exists()
