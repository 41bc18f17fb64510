"""Documents from what people keep them in: JSON lines, Parquet, and datasets that Hugging Face's library saved.

    web.jsonl  .jsonl.gz  .xz  .zst      an object a line
    my.parquet                           known by its first four bytes, whatever its name
    saved/train/                         `dataset.save_to_disk`: state.json lists Arrow files
    data-00000-of-00002.arrow            one of these

A table is read some rows at a time, and of its columns those that are wanted. The rest is alike: batches of about
BATCH_BYTES, which worker processes can take apart.

Left out: nested fields, and downloads: a dataset of the Hub is a folder of Parquet files once it is here.
"""

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

from minitron.config.files import read_json
from minitron.config.installed import pip_install

BATCH_BYTES = 1 << 20
READ_BYTES = 1 << 17
ROWS = 128  # of a table, read at a time


class Batch(NamedTuple):
    """Lines of a file, or rows of its columns; first_line: of lines[0], from 1; read_bytes: since the batch before."""

    path: str
    first_line: int
    lines: list[bytes] | list[dict]
    read_bytes: int


def files_of(inputs: list[str]) -> list[str]:
    """The files that hold the inputs: themselves, or what a saved dataset consists of. Raises ValueError."""
    files = []
    for path in inputs:
        if os.path.isdir(path):
            files += _saved_files(Path(path))
        elif not os.path.isfile(path):
            raise ValueError(f"{path}: no such input file; correct --input")
        else:
            files.append(path)
    return files


def _saved_files(folder: Path) -> list[str]:
    """The Arrow files of a dataset that `save_to_disk` wrote, in order."""
    try:
        if (folder / "dataset_dict.json").exists():
            splits = dict(read_json(folder / "dataset_dict.json"))["splits"]
            names = " or ".join(str(folder / split) for split in splits)
            raise ValueError(f"{folder} holds the splits of a dataset; name one of them: {names}")
        if not (folder / "state.json").exists():
            parquet = "its Parquet files" if any(folder.rglob("*.parquet")) else "files"
            why = "is a folder, and none that save_to_disk of Hugging Face's datasets wrote (it has no state.json)"
            raise ValueError(f"{folder} {why}; name {parquet}")
        state = dict(read_json(folder / "state.json"))
        names = [data["filename"] for data in state["_data_files"]]
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} cannot be read as a saved dataset ({error!r}); save it again") from error
    if state.get("_indices_data_files"):
        fix = "call flatten_indices() before save_to_disk"
        raise ValueError(f"{folder} holds its rows in another order than its files; {fix}")
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} lacks {name}, which its state.json names; copy it again")
    return [str(folder / name) for name in names]


def read_batches(files: list[str], keys: tuple[str, ...] = ("text",)) -> Iterator[Batch]:
    """Batches of about BATCH_BYTES of text; a batch never spans two files. keys: the columns of a table to read."""
    for path in files:
        if kind := _table_kind(path):
            yield from _table_batches(path, kind, keys)
            continue
        with _opened(path) as raw:
            reported, number, first, lines, size = 0, 0, 1, [], 0
            try:
                for number, line in enumerate(_lines(path, raw), start=1):
                    lines.append(line)
                    size += len(line)
                    if size >= BATCH_BYTES:
                        position = raw.tell()
                        yield Batch(path, first, lines, position - reported)
                        reported, first, lines, size = position, number + 1, [], 0
            except (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
                raise ValueError(
                    f"{path}: cannot be read after line {number} ({error}); the file is damaged: copy it again"
                ) from error
            yield Batch(path, first, lines, raw.tell() - reported)


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error}); correct --input or its permissions") from error


# ---- tables ---------------------------------------------------------------------------------------------------------


def _table_kind(path: str) -> str | None:
    """ "parquet" or "arrow"; None for lines."""
    if path.endswith((".parquet", ".arrow")):
        return path.rsplit(".", 1)[1]
    with _opened(path) as file:
        return "parquet" if file.read(4) == b"PAR1" else None


def _table_batches(path: str, kind: str, keys: tuple[str, ...]) -> Iterator[Batch]:
    """Batches of the columns `keys` of a table. Raises ValueError for other columns, and for a damaged file."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        why = "needs the package pyarrow, which is not installed"
        raise ValueError(f"{path} {why}; {pip_install('data')}") from error
    first, rows, size, total = 1, [], 0, os.path.getsize(path)
    try:
        if kind == "parquet":
            table = parquet.ParquetFile(path)
            schema, tables = table.schema_arrow, table.iter_batches(ROWS, columns=list(keys))
        else:
            table = ipc.open_stream(pyarrow.memory_map(path))
            schema = table.schema
            tables = (part for whole in table for part in _slices(whole.select(list(keys))))
        _check_columns(path, schema, keys)
        for part in tables:
            for row in part.to_pylist():
                rows.append(row)
                size += sum(len(row[key] or "") for key in keys)
            if size >= BATCH_BYTES:
                share = min(size, total)  # of a compressed file nobody knows it; the bar ends where it should
                total -= share
                yield Batch(path, first, rows, share)
                first, rows, size = first + len(rows), [], 0
    except (pyarrow.ArrowException, OSError) as error:
        why = f"cannot be read after row {first + len(rows) - 1} ({' '.join(str(error).split())})"
        raise ValueError(f"{path}: {why}; the file is damaged: copy it again") from error
    yield Batch(path, first, rows, total)


def _slices(batch: Any) -> Iterator[Any]:
    for row in range(0, batch.num_rows, ROWS):
        yield batch.slice(row, ROWS)


def _check_columns(path: str, schema: Any, keys: tuple[str, ...]) -> None:
    """Raise ValueError unless each key is a column of text."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)

    texts = [field.name for field in schema if is_text(field.type)]
    for key in keys:
        if key not in texts:
            kind = f"is {schema.field(key).type}, no text" if key in schema.names else "is none of its columns"
            known = "use " + " or ".join(f"--text-field {name}" for name in texts) if texts else "no column is text"
            raise ValueError(f"{path}: {key!r} {kind}; {known}")


# ---- lines ----------------------------------------------------------------------------------------------------------


def _lines(path: str, raw: BinaryIO) -> Iterable[bytes]:
    match Path(path).suffix:
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst":
            return _zstandard_lines(raw)
    return raw


def _zstandard_lines(raw: BinaryIO) -> Iterator[bytes]:
    """Lines of any number of frames.  zstandard's own reader would take a truncated file for a whole one."""
    rest, frame, compressed = b"", None, raw.read(READ_BYTES)
    while compressed:
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        *lines, rest = (rest + frame.decompress(compressed)).split(b"\n")
        yield from lines
        compressed = frame.unused_data or raw.read(READ_BYTES)
        frame = None if frame.eof else frame
    if frame:
        raise EOFError("it ends inside a frame")
    yield rest


def documents(batch: Batch, keys: tuple[str, ...]) -> Iterator[dict]:
    """The documents of a batch, each with a text under every key; empty lines are none. Raises ValueError."""
    for number, line in enumerate(batch.lines, start=batch.first_line):
        if isinstance(line, dict):
            yield _checked(line, keys, f"{batch.path}: row {number}")
        elif line.strip():
            where = f"{batch.path}: line {number}"
            try:
                document = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not JSON ({error}); write one object a line, in UTF-8") from error
            yield _checked(document, keys, where)


def _checked(document: Any, keys: tuple[str, ...], where: str) -> dict:
    for key in keys:
        if not isinstance(document, dict) or not isinstance(document.get(key), str):
            raise ValueError(f"{where} has no text under the key {key!r}; correct {_fix(document, where)}")
        try:
            document[key].encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: {key!r} is no Unicode text ({error}); write surrogate pairs or the characters"
            ) from error
    return document


def _fix(document: Any, where: str) -> str:
    """What to correct: a line with texts under other keys wants another --text-field."""
    kind = "row" if ": row " in where else "line"
    texts = [key for key, value in document.items() if isinstance(value, str)] if isinstance(document, dict) else []
    return f"the {kind} or --json-keys" + (f" (it has text under {', '.join(map(repr, texts[:5]))})" if texts else "")
