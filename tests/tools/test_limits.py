"""Small files that become huge: each is one line, in bounded memory. And names that would move a terminal's cursor."""

import gzip
import json
import lzma
import pickle
import subprocess
import sys
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import pytest
import zstandard

from minitron.config import command, files
from minitron.config.text import printable
from minitron.interop import torch_dist
from tools import check_job, plot_run, rows

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
PACKED = {
    "": lambda path: open(path, "wb"),
    ".gz": lambda path: gzip.open(path, "wb", compresslevel=1),
    ".xz": lambda path: lzma.open(path, "wb", preset=0),
    ".zst": lambda path: zstandard.open(path, "wb"),
}
# Reads each file with a limit of 2 GiB on what the process has at this moment.
CHILD = """
import resource, sys
from tools import rows
from minitron.interop import torch_dist
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), resource.RLIM_INFINITY))
for path in sys.argv[1:]:
    try:
        if path.endswith(".metadata"):
            torch_dist.unpickle(open(path, "rb").read(), path)
        else:
            next(rows.read_batches([path]))
    except ValueError as error:
        assert path in str(error) and "\\n" not in str(error)
        print("refused")
"""


def pack(path, block, times):
    with PACKED[path.suffix](path) as file:
        for _ in range(times):
            file.write(block)
    return str(path)


def table(path, text, count):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), [text])
    parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd", store_schema=False)
    return str(path)


def test_small_files_that_become_gigabytes_are_refused_within_two(tmp_path):
    line = pack(tmp_path / "in.jsonl.zst", bytes(MIB), 2048)
    wide = table(tmp_path / "in.parquet", "x" * 20_000_000, 1000)
    (tmp_path / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")
    paths = [line, wide, str(tmp_path / ".metadata")]
    assert all(Path(path).stat().st_size <= 1 << 17 for path in paths)
    child = subprocess.run([sys.executable, "-c", CHILD, *paths], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["refused"] * 3


@pytest.mark.parametrize("suffix", PACKED)
def test_a_line_is_read_up_to_its_limit(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(files, "RECORD_BYTES", MIB)
    path = pack(tmp_path / f"in{suffix}", bytes(MIB), 48)
    tracemalloc.start()
    with pytest.raises(ValueError, match="line 1 has more than 1 MiB"):
        next(rows.read_batches([path]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 44 * MIB  # what FED_BYTES become at most, 32 MiB, and some lines
    path = pack(tmp_path / f"whole{suffix}", b"x" * (MIB - 1) + b"\n", 3)
    assert sum(len(batch.lines) for batch in rows.read_batches([path])) == 3


@pytest.mark.parametrize("suffix", PACKED)
def test_a_batch_is_bounded_also_if_its_lines_are_empty(tmp_path, suffix):
    batches = rows.read_batches([pack(tmp_path / f"in{suffix}", b"\n" * MIB, 4)])
    assert len(next(batches).lines) <= rows.BATCH_BYTES


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("keep", [-3, 30])
def test_frames_follow_one_another_and_a_truncated_one_is_damaged(tmp_path, suffix, keep):
    first = Path(pack(tmp_path / f"first{suffix}", b'{"text": "a"}\n', 3)).read_bytes()
    (tmp_path / f"both{suffix}").write_bytes(first + first)
    (tmp_path / f"cut{suffix}").write_bytes((first + first)[:keep])
    assert sum(len(batch.lines) for batch in rows.read_batches([str(tmp_path / f"both{suffix}")])) == 6
    with pytest.raises(ValueError, match="the file is damaged"):
        list(rows.read_batches([str(tmp_path / f"cut{suffix}")]))


def test_a_read_of_a_table_is_bounded(tmp_path, monkeypatch):
    path = table(tmp_path / "in.parquet", "x" * MIB, 130)
    assert sum(len(batch.lines) for batch in rows.read_batches([path])) == 130
    # In a process of its own: this one may have 64 MiB that it has mapped and freed.
    code = f"import pyarrow.parquet; from tools import rows; rows.TABLE_BYTES = {64 * MIB}\n"
    code += f"list(rows.read_batches([{path!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "more memory" in done.stderr, done.stderr
    monkeypatch.setattr(rows, "RECORD_BYTES", MIB - 1)
    with pytest.raises(ValueError, match="row 1 has more than"):
        list(rows.read_batches([path]))


def test_offsets_of_a_table_that_point_elsewhere_are_refused(tmp_path):
    pyarrow, path = pytest.importorskip("pyarrow"), tmp_path / "in.arrow"
    batch = pyarrow.record_batch({"text": ["x" * 77]})
    with pyarrow.ipc.new_stream(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    assert [len(batch.lines) for batch in rows.read_batches([str(path)])] == [1]
    head, found, text = path.read_bytes().rpartition(bytes([0, 0, 0, 0, 77, 0, 0, 0]))  # the row's begin and end
    assert found
    path.write_bytes(head + bytes([0, 0, 0, 0, 0, 0, 0, 64]) + text)
    with pytest.raises(ValueError, match="damaged"):
        list(rows.read_batches([str(path)]))


def test_a_pickle_takes_no_more_than_its_bytes_allow(monkeypatch):
    """The operation LONG_BINPUT names a place of the unpickler's table, which would grow up to there: 1 GiB here."""
    monkeypatch.setattr(torch_dist, "MEMORY_BYTES", 64 * MIB)
    with pytest.raises(ValueError, match="m is refused"):
        torch_dist.unpickle(b"\x80\x02Nr\xff\xff\xff\x03.", "m")
    assert torch_dist.unpickle(b"\x80\x02Nr\xff\xff\x00\x00.", "m") is None


def test_a_large_pickle_may_take_more_memory_than_a_small_one(monkeypatch):
    asked = []
    monkeypatch.setattr(torch_dist, "limited_memory", lambda more: asked.append(more) or nullcontext())
    small, large = pickle.dumps([1]), pickle.dumps([1] * 999)
    assert [torch_dist.unpickle(data, "m") for data in (small, large)] == [[1], [1] * 999]
    assert asked == [torch_dist.MEMORY_BYTES + torch_dist.MEMORY_TIMES * len(data) for data in (small, large)]


# ---- names of files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/passwd", "a/b.arrow", "..", "", 3, None, ["x"]])
def test_a_saved_dataset_names_only_files_beside_it(tmp_path, name):
    (tmp_path / "x.arrow").write_text("of another")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(ValueError, match=r"state\.json.*save the dataset again"):
        rows.files_of([str(folder)])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(ValueError, match=r"dataset_dict\.json.*save the dataset again"):
        rows.files_of([str(folder)])


@pytest.mark.parametrize("names, fix", [(["x" * 5000], "copy"), (["a.arrow", "b.arrow", "a.arrow"], "save")])
def test_a_name_that_no_file_can_have_or_that_is_listed_twice_is_refused(tmp_path, names, fix):
    for name in "a.arrow", "b.arrow":
        (tmp_path / name).write_text("rows")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    with pytest.raises(ValueError, match=rf"state\.json.*{fix}"):
        rows.files_of([str(tmp_path)])


@pytest.mark.parametrize("text", ["{", "[]", '"ab"', "{}", '{"_data_files": 1}', '{"_data_files": [[]]}'])
def test_a_state_that_is_none_is_named(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state\.json"):
        rows.files_of([str(tmp_path)])


# ---- names in print -------------------------------------------------------------------------------------------------

HOSTILE = "a\x1b[2Jb\nc\r\u202ed\u2028e"


def plain(text):
    return all(character.isprintable() for character in text)


def test_printable_keeps_what_can_be_printed():
    assert plain(printable(HOSTILE + "\udc80\x9b")) and "\\x1b" in printable(HOSTILE)
    assert printable("café \u05d0\u0628 \\x") == "café \u05d0\u0628 \\x"


def test_what_a_tool_prints_and_its_error_move_no_cursor(capsys, monkeypatch):
    def main(argv):
        print(f"name {HOSTILE}\tnext")
        raise ValueError(HOSTILE)

    with pytest.raises(SystemExit) as caught:
        command.run(main)
    out, err = capsys.readouterr()
    assert caught.value.code == 1 and plain(err.rstrip("\n")) and "\\x1b" in err
    assert plain(out.replace("\n", "").replace("\t", "")) and "\tnext" in out


def test_an_error_that_quotes_a_file_is_as_short_as_a_line(capsys):
    def main(argv):
        raise ValueError(f"model.safetensors: unknown type {'a' * 100_000}")

    with pytest.raises(SystemExit) as caught:
        command.run(main)
    err = capsys.readouterr().err
    assert caught.value.code == 1 and "model.safetensors" in err and len(err) < 2500


def test_no_memory_is_one_line():
    def main(argv):
        raise MemoryError

    with pytest.raises(SystemExit, match="error: "):
        command.run(main)


def test_the_parts_of_a_job_are_a_line_each(capsys):
    check_job.say("wrong", "data", HOSTILE)
    assert plain(capsys.readouterr().out.rstrip("\n"))


def test_a_run_s_name_is_no_escape_and_no_formula(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folders = [tmp_path / f"{HOSTILE}$x", tmp_path / "$\\frac$"]
    for folder in folders:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2.0}\n')
    plot_run.main([*map(str, folders), "--png", str(tmp_path / "loss.png")])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\nc" not in out and (tmp_path / "loss.png").stat().st_size
    figure = plot_run.picture([plot_run.read_run(folder) for folder in folders])
    assert all(plain(text.get_text()) for text in figure.legends[0].texts)
