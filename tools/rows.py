"""Documents from what people keep them in: JSON lines, Parquet, and datasets that Hugging Face's library saved.

    web.jsonl  .jsonl.gz  .xz  .zst      an object a line
    my.parquet                           known by its first four bytes, whatever its name
    saved/train/                         `dataset.save_to_disk`: state.json lists Arrow files
    data-00000-of-00002.arrow            one of these

A table is read some rows at a time, and of its columns those that are wanted. The rest is alike: batches of about
BATCH_BYTES, which worker processes can take apart.

A small file may hold a huge text: 64 KiB of zstd are 2 GiB of zeros. So what is compressed is decompressed a little at
a time, a document has at most RECORD_BYTES, and one read of a table takes at most TABLE_BYTES of memory.

Left out: nested fields, and downloads: a dataset of the Hub is a folder of Parquet files once it is here.
"""

import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

from minitron.config.files import RECORD_BYTES, errors_as, lines_of, read_json
from minitron.interop.limits import limited_memory
from minitron.interop.rows import read_table, table_kind

BATCH_BYTES = 1 << 20
READ_BYTES = 1 << 17
FED_BYTES = 1 << 10  # compressed, decompressed at a time: at most 32 MiB come of it
XZ_BYTES = 1 << 30  # of memory, that the dictionary of an .xz file may take
TABLE_BYTES = 4 << 30  # of memory, that one read of a table may take


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
    if (folder / "dataset_dict.json").exists():
        splits = _names(folder / "dataset_dict.json", lambda content: content["splits"])
        names = " or ".join(str(folder / split) for split in splits)
        raise ValueError(f"{folder} holds the splits of a dataset; name one of them: {names}")
    if not (folder / "state.json").exists():
        parquet = "its Parquet files" if any(folder.rglob("*.parquet")) else "files"
        why = "is a folder, and none that save_to_disk of Hugging Face's datasets wrote (it has no state.json)"
        raise ValueError(f"{folder} {why}; name {parquet}")
    if _content(folder / "state.json").get("_indices_data_files"):
        fix = "call flatten_indices() before save_to_disk"
        raise ValueError(f"{folder} holds its rows in another order than its files; {fix}")
    names = _names(folder / "state.json", lambda state: [data["filename"] for data in state["_data_files"]])
    for name in names:
        if not os.path.isfile(folder / name):
            raise ValueError(f"{folder} lacks {name}, which its state.json names; copy it again")
    return [str(folder / name) for name in names]


def _content(path: Path) -> dict:
    """The JSON object that a file of a saved dataset holds. Raises ValueError."""
    try:
        if isinstance(content := read_json(path), dict):
            return content
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); save the dataset again") from error
    raise ValueError(f"{path} holds no JSON object; save the dataset again")


def _names(path: Path, listed: Callable[[dict], list]) -> list[str]:
    """The names that such a file lists. Raises ValueError for one that is not of a file or folder beside it."""
    try:
        names = list(listed(_content(path)))
        for name in names:
            if Path(name).name != name or name in ("", ".."):
                raise ValueError(f"{path} names {name!r}, which is not beside it; save the dataset again")
            if names.count(name) > 1:
                raise ValueError(f"{path} names {name!r} twice; save the dataset again")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not as save_to_disk writes it ({error!r}); save the dataset again") from error
    return names


def read_batches(files: list[str], keys: tuple[str, ...] = ("text",)) -> Iterator[Batch]:
    """Batches of about BATCH_BYTES of text; a batch never spans two files. keys: the columns of a table to read."""
    for path in files:
        with errors_as(ValueError, partial(_unreadable, path), OSError):
            kind = table_kind(path)
        if kind:
            yield from _table_batches(path, kind, keys)
            continue
        with _opened(path) as raw:
            reported, number, first, lines, size = 0, 0, 1, [], 0
            try:
                for number, line in enumerate(lines_of(_decompressed(path, raw), path), start=1):
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
    with errors_as(ValueError, partial(_unreadable, path), OSError):
        return open(path, "rb")


def _unreadable(path: str, error: OSError) -> str:
    return f"{path}: cannot be read ({error}); correct --input or its permissions"


# ---- tables ---------------------------------------------------------------------------------------------------------


def _table_batches(path: str, kind: str, keys: tuple[str, ...]) -> Iterator[Batch]:
    """Batches of the columns `keys` of a table. Raises ValueError for other columns, and for a damaged file."""
    first, rows, size, total = 1, [], 0, os.path.getsize(path)
    mapped = total if kind == "arrow" else 0  # a map counts as memory
    parts = read_table(path, kind, partial(_check_columns, path, keys))
    while True:
        with limited_memory(TABLE_BYTES + mapped):
            if (found := next(parts, None)) is None:
                break
        for row in found:
            rows.append(row)
            sizes = [len(row[key] or "") for key in keys]
            if max(sizes) > RECORD_BYTES:
                where = f"{path}: row {first + len(rows) - 1}"
                raise ValueError(f"{where} has more than {RECORD_BYTES >> 20} MiB; split it or leave it out")
            size += sum(sizes) + 1
            if size >= BATCH_BYTES:
                share = min(size, total)  # of a compressed file nobody knows it; the bar ends where it should
                total -= share
                yield Batch(path, first, rows, share)
                first, rows, size = first + len(rows), [], 0
    yield Batch(path, first, rows, total)


def _check_columns(path: str, keys: tuple[str, ...], schema: Any) -> list[str]:
    """Return the keys. Raises ValueError unless each is a column of text."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)

    texts = [field.name for field in schema if is_text(field.type)]
    for key in keys:
        if key not in texts:
            kind = f"is {schema.field(key).type}, no text" if key in schema.names else "is not one of its columns"
            known = "use " + " or ".join(f"--text-field {name}" for name in texts) if texts else "no column is text"
            raise ValueError(f"{path}: {key!r} {kind}; {known}")
    return list(keys)


# ---- lines ----------------------------------------------------------------------------------------------------------


DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": partial(zlib.decompressobj, 16 + zlib.MAX_WBITS),
    ".xz": partial(lzma.LZMADecompressor, memlimit=XZ_BYTES),
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


def _decompressed(path: str, raw: BinaryIO) -> BinaryIO:
    """A stream of what a file holds, whose readline can be limited."""
    decoder = DECODERS.get(Path(path).suffix)
    return raw if decoder is None else io.BufferedReader(_Blocks(_frames(raw, decoder)), READ_BYTES)


def _frames(raw: BinaryIO, new_decoder: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress any number of frames, with zeros between them. Raises EOFError if the last one is not whole."""
    decoder, compressed = None, raw.read(FED_BYTES)
    while compressed:
        if decoder is None:
            compressed = compressed.lstrip(b"\0")
            decoder = new_decoder() if compressed else None
        if decoder is not None:
            yield decoder.decompress(compressed)
            compressed = decoder.unused_data
            decoder = None if decoder.eof else decoder
        compressed = compressed or raw.read(FED_BYTES)
    if decoder is not None:
        raise EOFError("it ends inside a frame")


class _Blocks(io.RawIOBase):
    """A file of the blocks that an iterator yields."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (block := next(self._blocks, None)) is None:
                return 0
            self._rest = memoryview(block)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


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
            raise ValueError(f"{where} has no text under the key {key!r}; correct {_fix(document, keys, where)}")
        try:
            document[key].encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: {key!r} is no Unicode text ({error}); write surrogate pairs or the characters"
            ) from error
    return document


def _fix(document: Any, keys: tuple[str, ...], where: str) -> str:
    """What to correct: a line with texts under other keys wants another option."""
    kind = "row" if ": row " in where else "line"
    texts = [key for key, value in document.items() if isinstance(value, str)] if isinstance(document, dict) else []
    option = "--json-keys" if len(keys) > 1 else "--text-field"
    return f"the {kind} or {option}" + (f" (it has text under {', '.join(map(repr, texts[:5]))})" if texts else "")
