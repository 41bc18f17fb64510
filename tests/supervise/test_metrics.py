"""Rows of metrics.jsonl: those of a run that several starts wrote."""

from minitron.supervise.metrics import rows, without_repeats


def test_rows_have_the_numbers_of_their_lines_and_torn_ones_nothing_else(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "run"}\n\n[1]\n{"kind": "st\n{"step": 2, "line": 9}\n' + "[" * 100000 + '\n{"kind": 1}')
    expected = [{"kind": "run", "line": 1}, *({"line": n} for n in (2, 3, 4)), {"step": 2, "line": 5}, {"line": 6}]
    assert list(rows(path)) == expected


def row(kind, step=None):
    return {"kind": kind} | ({} if step is None else {"step": step})


def test_what_a_later_start_made_again_is_dropped_from_its_first_step_on():
    first = [row("run"), row("eval", 0), row("step", 1), row("save", 1), row("step", 2), {}, row("step", 3)]
    for kind in "step", "eval", "ranks":
        again = [row("run"), row("save", 9), row("step"), row(kind, 2), row("step", 3), row("step", 2)]
        kept = [*first[:4], {}, row("run"), row("step"), *again[3:]]  # a step that goes back without a start stays
        assert without_repeats([*first, *again]) == kept
    headless = [row("save", 5), row("step", 5), row("step", 5)]  # its beginning is torn
    assert without_repeats(headless) == headless
