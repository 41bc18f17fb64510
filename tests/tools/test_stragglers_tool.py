"""Times of ranks are drawn as they were, and who was slow is named."""

import json
import os

import numpy as np
import pytest
from matplotlib.colors import to_hex

from tools import stragglers


def write(folder, *records):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def ranks_row(step, seconds, slow=()):
    return {"kind": "ranks", "step": step, "own_seconds": seconds, "slow": list(slow)}


START = {"kind": "run", "world": 4, "pp": 2, "first_step": 1}
PLACES = {"kind": "places", "places": ["n1 GPU 0", "n1 GPU 1", "n2 GPU 0", "n2 GPU 1"]}
ROWS = [ranks_row(10, [1, 1, 3, 3]), ranks_row(20, [1, 1, 4.2, 3], [2]), ranks_row(30, [1, 1, 4.2, 3], [2])]


def test_a_slow_rank_is_drawn_and_named(tmp_path, capsys):
    stragglers.main([str(write(tmp_path, START, PLACES, *ROWS))])
    output = capsys.readouterr().out
    assert "rank 2 on n2 GPU 0 was slow in steps 20 to 30: 17% more than the median of its stage" in output
    rows = [line for line in output.splitlines() if line.strip().startswith("rank") and "was slow" not in line]
    assert [row.endswith("<- slow") for row in rows] == [False, False, True, False]
    cells = rows[2].split()[2]
    assert len(cells) == 3 and cells[0] in "·." and cells[1] == cells[2] in "▒+"
    assert (tmp_path / "stragglers.png").stat().st_size > 1000


def test_the_picture_is_coloured_as_the_terminal_and_names_slow_ranks(tmp_path):
    """A usual rank was white, as if nothing had been drawn."""
    ratios = [[0.9, 1.0, 1.06, 1.2], [1.0, 1.0, 1.3, 2.0], [1.0, 1.0, 1e6, 2.0]]
    times = stragglers.Times([10, 20, 30], np.array(ratios), np.array(ratios), [[], [2, 3], [2]], [])
    figure = stragglers.picture(times)
    (axes,) = figure.axes
    (mesh,) = axes.collections
    drawn = [to_hex(color) for color in mesh.cmap(mesh.norm(np.ravel(ratios)))]
    assert drawn == [stragglers.COLORS[sum(x >= limit for limit in stragglers.LIMITS)] for x in np.ravel(ratios)]
    assert drawn[0] == drawn[1] != "#ffffff" and axes.get_xlim() == (0, 30)  # step 10 has the times of 1 to 10
    legend = figure.legends[0]
    keys = dict(zip((text.get_text() for text in legend.get_texts()), legend.get_patches()))
    assert [to_hex(patch.get_facecolor()) for patch in keys.values()] == list(stragglers.COLORS)
    assert list(keys) == list(stragglers.KEYS) and "median" in legend.get_title().get_text()
    assert [(text.get_text(), text.xy[1]) for text in axes.texts] == [("slow", 2)]  # of neighbours the first
    assert "none was slow" not in axes.get_title(loc="left")
    times.slow = [[], [], []]
    (well,) = stragglers.picture(times).axes
    assert "none was slow" in well.get_title(loc="left") and not well.texts


def test_a_run_of_many_ranks_and_steps_fits_the_terminal(tmp_path):
    seconds = np.ones((500, 256))
    seconds[:, 77] = 2
    rows = [ranks_row(10 * i, list(row), [77]) for i, row in enumerate(seconds, 1)]
    times = stragglers.read(write(tmp_path, {"kind": "run", "world": 256, "pp": 4}, *rows))
    lines = stragglers.draw(times, unicode=False).splitlines()
    assert len(lines) == stragglers.ROWS + 3 and max(map(len, lines)) < 100
    (named,) = [line for line in lines if line.endswith("<- slow")]
    assert "72-79 " in named and "#" * stragglers.COLUMNS in named


def test_a_run_started_again_replaces_what_it_does_anew(tmp_path):
    later = {"kind": "step", "step": 15}, ranks_row(20, [1, 1, 3, 3])
    times = stragglers.read(write(tmp_path, START, *ROWS, START, *later))
    assert times.steps == [10, 20] and times.slow == [[], []]
    other = START | {"world": 2, "pp": 1}, {"kind": "step", "step": 31}, ranks_row(40, [1, 1])
    assert stragglers.read(write(tmp_path, START, *ROWS, *other)).steps == [40]
    stages = START | {"pp": 4}, {"kind": "step", "step": 31}, ranks_row(40, [1, 1, 3, 3])
    times = stragglers.read(write(tmp_path, START, *ROWS, *stages))
    assert times.steps == [40] and times.ratio.tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    "records, said",
    [
        ([START], "holds no times of ranks; it had one rank in a stage, train.check_speed_every=0, or fewer steps"),
        ([START, ranks_row(10, [1, 1])], "metrics.jsonl:2 is no record of a run"),
        ([ranks_row(10, None)], "metrics.jsonl:1 is no record of a run"),
        ([START | {"pp": 0}, ROWS[0]], "metrics.jsonl:2 is no record of a run"),
        ([START, ranks_row(10, [1, 1, 3, "x"])], "metrics.jsonl:2 is no record of a run"),
        ([START, ranks_row(10, [1, 1, 3, 10**400])], "metrics.jsonl:2 is no record of a run"),
        ([START, ranks_row(10**400, [1, 1, 3, 3])], "metrics.jsonl:2 is no record of a run"),
        ([START, ranks_row(10, [1, 1, 3, 3], [4])], "metrics.jsonl:2 is no record of a run"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(tmp_path, records, said):
    with pytest.raises(ValueError, match=said):
        stragglers.main([str(write(tmp_path, *records))])
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "metrics.jsonl")
    for folder in "nothing", "pipe":
        with pytest.raises(ValueError, match="cannot be read .*; name the log.dir of a run"):
            stragglers.main([str(tmp_path / folder)])
