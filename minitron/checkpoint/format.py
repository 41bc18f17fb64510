"""The files of a checkpoint: what they hold, and how damage shows.

Problem: the next run has another layout, disks flip bits, and a checkpoint may come from anywhere, so opening one must
not run code. The idea: safetensors hold boxes of tensors (boxes.py), and a JSON index says where each box is.

    step_00000020/index.json                  which box of which tensor is in which file; each file's checksum
    step_00000020/rank_00003.safetensors      boxes of tensors, written by one rank

Safetensors and JSON are data only. Checksums cover every byte and are made from the memory that was to be written. The
index has each file's, and its own in its first line. CRC-32 sees any flip of up to 32 neighbouring bits, and 1 - 2^-32
of all other damage. It is no protection against forgery.

index.json: {"format": "minitron-checkpoint", "version": 1, "iteration": 20, "consumed_samples": 320, "config": {...},
    "layout": {"world": 8, "tp": 2, ...}, "state": {small named values},
    "files": {"rank_00003.safetensors": {"bytes": 1234, "checksum": "9ae0daaf", "algorithm": "crc32"}},
    "tensors": {"blocks.0.mlp.up.weight": {"shape": [96, 32], "kinds": {"master": {"dtype": "fp32", "boxes": [
        {"file": "rank_00003.safetensors", "key": "...", "start": [0, 0], "shape": [48, 32]}, ...]}}}}}
Kinds: `master`, `exp_avg`, `exp_avg_sq` where the optimizer was saved (parameters are the rounded masters), `param`
where only weights were, `fp8_history`. The boxes of a kind hold each element once. directory.py makes a checkpoint of
such a folder, reader.py reads it. Left out: compression.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from minitron.checkpoint.boxes import Piece
from minitron.checkpoint.checksum import crc32
from minitron.config.files import errors_as, parse_json, read_bytes, size_of
from minitron.kernels.gemm import DTYPES
from minitron.runtime.status import RunError

FORMAT = {"format": "minitron-checkpoint", "version": 1}
NAMES = {dtype: name for name, dtype in DTYPES.items()}  # in the index
STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}  # in safetensors
INDEX, INDEX_BEGIN = "index.json", b'{"checksum": "'
INDEX_BYTES = 2 << 30
BLOCK_BYTES = 16 << 20  # written, or read, and summed at a time
# Of a box in the index: its tensor, the whole tensor's shape, kind, dtype, and JSON that says where the box is.
Description = tuple[str, Sequence[int], str, str, str]


class CheckpointError(RunError):
    """A checkpoint that cannot be written or read: one line that names the file."""


def disk_errors(path: Path) -> AbstractContextManager:
    """Turn an OSError inside into a CheckpointError that names the file."""
    return errors_as(CheckpointError, lambda e: f"{e.filename or path}: {(e.strerror or str(e)).lower()}", OSError)


def file_size(path: Path) -> int:
    """Return the bytes of a regular file: a device or a pipe might never end. Raises CheckpointError."""
    with disk_errors(path):
        return size_of(path)


# ---- the index -------------------------------------------------------------------------------------------------------


def describe(file: str, pieces: Sequence[Piece]) -> list[Description]:
    """Describe the boxes that `write_shard` writes to a file of this name, for the index."""
    places = [
        {"file": file, "key": _key(n, p), "start": p.start, "shape": p.tensor.shape} for n, p in enumerate(pieces)
    ]
    return [(p.name, p.whole, p.kind, NAMES[p.tensor.dtype], json.dumps(x)) for p, x in zip(pieces, places)]


def index_tensors(files: Iterable[Iterable[Description]]) -> bytes:
    """Join the descriptions of all files to the index's "tensors". They depend on the layout alone, not on the step."""
    tensors: dict[str, tuple[Sequence[int], dict[str, tuple[str, list[str]]]]] = {}
    for name, whole, kind, dtype, place in chain.from_iterable(files):
        kinds = tensors.setdefault(name, (whole, {}))[1]
        kinds.setdefault(kind, (dtype, []))[1].append(place)
    texts = []
    for name, (whole, kinds) in tensors.items():
        parts = (f'"{k}": {{"dtype": "{dtype}", "boxes": [{", ".join(x)}]}}' for k, (dtype, x) in kinds.items())
        texts.append(f'{json.dumps(name)}: {{"shape": {json.dumps(whole)}, "kinds": {{{", ".join(parts)}}}}}')
    return f"{{{', '.join(texts)}}}".encode()


def index_bytes(about: dict, files: dict) -> bytes:
    """Encode what changes from save to save: `about`, and the record of each file."""
    return json.dumps({**FORMAT, **about, "files": files})[1:-1].encode()


def write_index(folder: Path, changing: bytes, tensors: bytes) -> str:
    """Write index.json of `index_bytes` and `index_tensors`. Return its checksum. Raises OSError."""
    body = b"".join([changing, b', "tensors": ', tensors, b"}"])
    write_file(folder / INDEX, [INDEX_BEGIN + f'{(mark := checksum(body))}",\n'.encode(), body])
    return mark


def read_index(path: Path) -> dict:
    """Read an index; check its checksum, format and version. Raises CheckpointError; ValueError for bad JSON."""
    with disk_errors(path):
        first, _, body = read_bytes(path, INDEX_BYTES).partition(b"\n")
    mark = checksum(body)
    if first.decode(errors="replace") != f'{{"checksum": "{mark}",':
        raise CheckpointError(f"{path} is damaged, or no index of minitron: its first line is no checksum of the rest")
    index = parse_json(b"{" + body) | {"checksum": mark}
    if (found := {key: index.get(key) for key in FORMAT}) != FORMAT:
        raise CheckpointError(f"{path} is of {found}, and this code reads {FORMAT}; use the minitron that wrote it")
    return index


# ---- safetensors -----------------------------------------------------------------------------------------------------


def write_shard(path: Path, pieces: Sequence[Piece]) -> dict:
    """Write boxes as one safetensors file and wait until it is on the disk. Raises CheckpointError.

    Returns the file's record in the index, by its name.
    """
    entries = [(_key(n, piece), piece.tensor.dtype, piece.tensor.shape) for n, piece in enumerate(pieces)]
    with disk_errors(path):
        return {path.name: write_file(path, [header(entries), *(piece.tensor for piece in pieces)])}


def _key(number: int, piece: Piece) -> str:
    """Name a box in its file."""
    return f"{piece.kind}:{piece.name}:{number}"


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], **metadata: str) -> bytes:
    """Return the beginning of a safetensors file of these (name, dtype, shape); their data follow in the same order.

    By hand, since the library wants all tensors at once: eight bytes of length, then JSON, padded to align the data.
    """
    entries, end = {"__metadata__": metadata} if metadata else {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": STORED[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_file(path: Path, parts: Iterable[bytes | Tensor]) -> dict:
    """Write a file and wait until it is on the disk. Returns its record in the index."""
    with open(path, "wb") as file:

        def written() -> Iterator[Callable[[], memoryview]]:
            for part in parts:
                if isinstance(part, Tensor):
                    part = part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                whole = memoryview(part)
                for begin in range(0, len(whole), BLOCK_BYTES):
                    block = whole[begin : begin + BLOCK_BYTES]
                    file.write(block)
                    yield partial(memoryview, block)

        crc = crc32(written())
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "checksum": f"{crc:08x}", "algorithm": "crc32"}


def checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
