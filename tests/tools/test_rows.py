"""Parquet and saved datasets: the same documents as their JSON lines, whoever wrote them; mistakes by their names."""

import json
import re
import sys

import pytest
import zstandard

from minitron.data.indexed import IndexedDataset
from minitron.interop import rows as tables
from tools import preprocess_data, rows

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
TEXTS = [f"document {i}, café\n" * (i % 7) for i in range(400)]
OTHERS = {"url": ["u"] * 400, "id": list(range(400))}


def encode(prefix, *inputs, fields=("--text-field", "body")):
    words = ["--output-prefix", prefix, "--tokenizer", "bytes", "--workers", "1", "--append-eod", *fields]
    preprocess_data.main(["--input", *map(str, inputs), *map(str, words)])


def files_of(prefix):
    return [prefix.with_name(f"{prefix.name}_text_document.{kind}").read_bytes() for kind in ("bin", "idx", "json")]


def error_of(*arguments, **options):
    with pytest.raises(ValueError) as error:
        encode(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def table():
    return pyarrow.table({"body": TEXTS} | OTHERS)


@pytest.fixture
def expected(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in TEXTS))
    encode(tmp_path / "lines", tmp_path / "in.jsonl")
    assert len(IndexedDataset(str(tmp_path / "lines_text_document")).document_indices) == 401
    return files_of(tmp_path / "lines")


@pytest.mark.parametrize("batch_bytes, at_a_time", [(1, 7), (1000, 128), (1 << 20, 1)])
def test_parquet_is_its_lines(tmp_path, table, expected, monkeypatch, batch_bytes, at_a_time):
    """In row groups of any size, compressed or not, with strings as Arrow has them, under any name of the file."""
    monkeypatch.setattr(rows, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(tables, "ROWS", at_a_time)
    wide = pyarrow.table({"body": pyarrow.array(TEXTS, pyarrow.large_string())} | OTHERS)
    few = pyarrow.table({"body": pyarrow.array(TEXTS).dictionary_encode()} | OTHERS)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=33, compression="zstd")
    parquet.write_table(wide, tmp_path / "b.pq", compression="none")
    parquet.write_table(few, tmp_path / "c")
    for name in ("a.parquet", "b.pq", "c"):
        encode(tmp_path / name[0], tmp_path / name)
        assert files_of(tmp_path / name[0]) == expected, name
        batches = list(rows.read_batches([str(tmp_path / name)], ("body",)))
        assert sum(batch.read_bytes for batch in batches) == (tmp_path / name).stat().st_size
        assert set(batches[0].lines[0]) == {"body"}, "other columns are not read"


@pytest.mark.parametrize("read_bytes", [1, 7, 1000])
def test_lines_in_frames_are_the_same_however_much_is_read_at_a_time(tmp_path, monkeypatch, read_bytes):
    """Frames end, lines are cut and multi-byte characters are cut anywhere in what is read."""
    monkeypatch.setattr(rows, "READ_BYTES", read_bytes)
    lines = [json.dumps({"text": f"{text} \u00e9" * 9}, ensure_ascii=False) for text in TEXTS[:20]]
    content, frames = "\n".join(lines).encode(), zstandard.ZstdCompressor()
    parts = content[:100], content[100:101], content[101:900], content[900:]
    (tmp_path / "in.jsonl.zst").write_bytes(b"".join(map(frames.compress, parts)))
    (tmp_path / "in.jsonl").write_bytes(content)
    read = [list(rows.read_batches([str(tmp_path / name)], ("text",))) for name in ("in.jsonl.zst", "in.jsonl")]
    found = [[line.rstrip(b"\n") for batch in batches for line in batch.lines] for batches in read]
    assert found[0] == found[1] == [line.encode() for line in lines]


def test_a_dataset_of_hugging_face_is_its_lines(tmp_path, table, expected):
    """Written by their library itself: in shards, filtered, and as the splits of one."""
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset(table)
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    twice = datasets.concatenate_datasets([dataset, dataset]).select([*range(399), 799])
    datasets.DatasetDict(train=twice, test=dataset).save_to_disk(str(tmp_path / "splits"))
    for name in ("saved", "splits/train"):
        encode(tmp_path / name.replace("/", "-"), tmp_path / name)
        assert files_of(tmp_path / name.replace("/", "-")) == expected, name
    message = error_of(tmp_path / "x", tmp_path / "splits")
    assert f"name one of them: {tmp_path}/splits/train or {tmp_path}/splits/test" in message
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    assert "lacks data-00001-of-00003.arrow, which its state.json names" in error_of(tmp_path / "x", tmp_path / "saved")


def test_the_saved_form_is_read_without_their_library(tmp_path, table, expected):
    """As save_to_disk of version 5 writes it: state.json, and streams of Arrow."""
    folder = tmp_path / "saved"
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 150), table.slice(150))):
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(part, max_chunksize=47)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    encode(tmp_path / "out", folder)
    encode(tmp_path / "files", *(folder / name for name in names))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "files") == expected
    (folder / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}')
    assert "call flatten_indices() before save_to_disk" in error_of(tmp_path / "x", folder)
    for state in ("[]", "{", '{"_data_files": [1]}'):
        (folder / "state.json").write_text(state)
        assert error_of(tmp_path / "x", folder)


def test_a_field_of_any_name_gives_the_text_document(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"my/text body": "hello"}\n')
    encode(tmp_path / "out", tmp_path / "in.jsonl", fields=("--text-field", "my/text body"))
    assert IndexedDataset(str(tmp_path / "out_text_document")).get(0).tolist() == [*b"hello", 256]


def test_mistakes_with_tables_are_named(tmp_path, table):
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-40])
    (tmp_path / "lines.parquet").write_text('{"body": "x"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "hub" / "data").mkdir(parents=True)
    parquet.write_table(table, tmp_path / "hub" / "data" / "train-0.parquet")
    parquet.write_table(table.select(["id"]), tmp_path / "ids.parquet")
    parquet.write_table(pyarrow.table({"body": ["x", None]}), tmp_path / "null.parquet")
    with pyarrow.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name, field, message in (
        ("a.parquet", "text", "a.parquet: 'text' is not one of its columns; use --text-field body or --text-field url"),
        ("a.parquet", "id", "a.parquet: 'id' is int64, no text; use --text-field body"),
        ("ids.parquet", "text", "'text' is not one of its columns; no column is text"),
        ("null.parquet", "body", "null.parquet: row 2 has no text under the key 'body'; correct the row"),
        ("cut.parquet", "body", "cut.parquet: cannot be read after row 0"),
        ("lines.parquet", "body", "lines.parquet: cannot be read after row 0"),
        ("file.arrow", "body", "file.arrow: cannot be read after row 0"),
        ("empty", "body", "is a folder, and none that save_to_disk"),
        ("hub", "body", "name its Parquet files"),
    ):
        assert message in error_of(tmp_path / "x", tmp_path / name, fields=("--text-field", field)), name
    (tmp_path / "in.jsonl").write_text('{"body": "x", "n": 1}\n')
    message = error_of(tmp_path / "x", tmp_path / "in.jsonl", fields=())
    assert "line 1 has no text under the key 'text'; correct the line or --text-field (it has text" in message
    assert "not allowed with argument" in error_of(
        tmp_path / "x", tmp_path / "in.jsonl", fields=("--text-field", "a", "--json-keys", "b")
    )
    assert not list(tmp_path.glob("x*"))


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, table, monkeypatch):
    parquet.write_table(table, tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = error_of(tmp_path / "x", tmp_path / "a.parquet")
    assert re.search(
        r"a.parquet needs the package pyarrow, which is not installed; \S+ -m pip install .*\[data\]", message
    )
