"""The files of a checkpoint: what they hold, and how damage shows.

Problem: the next run has another layout, disks flip bits, and a checkpoint may come from anywhere, so opening one must
not run code. The idea: safetensors hold boxes of tensors (boxes.py), and a JSON index says where each box is.

    step_00000020/index.json                  which box of which tensor is in which file; each file's checksum
    step_00000020/rank_00003.safetensors      boxes of tensors, written by one rank

Safetensors and JSON are data only. Checksums cover every byte and are made from the memory that was to be written. The
index has each file's, and its own in its first line. CRC-32 detects any flip of up to 32 neighbouring bits, and all but
2^-32 of other damage. It is no protection against forgery.

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
from typing import Any

import torch
from torch import Tensor

from minitron.checkpoint.boxes import TensorShard
from minitron.checkpoint.checksum import crc32
from minitron.config.files import errors_as, parse_json, read_bytes
from minitron.kernels.gemm import DTYPES
from minitron.runtime.status import RunError

FORMAT = {"format": "minitron-checkpoint", "version": 1}
NAMES = {dtype: name for name, dtype in DTYPES.items()}  # in the index
STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}  # in safetensors
INDEX, INDEX_BEGIN = "index.json", b'{"checksum": "'
INDEX_BYTES = 2 << 30
BLOCK_BYTES = 16 << 20  # written, or read, and summed at a time
Description = tuple[str, Sequence[int], str, str, dict[str, Any]]  # see `describe`


class CheckpointError(RunError):
    """A checkpoint that cannot be written or read: one line that names the file."""


def disk_errors(path: Path) -> AbstractContextManager[None]:
    """Turn an OSError inside into a CheckpointError that names the file."""
    return errors_as(CheckpointError, lambda e: f"{e.filename or path}: {(e.strerror or str(e)).lower()}", OSError)


# ---- the index -------------------------------------------------------------------------------------------------------


def describe(file: str, shards: Sequence[TensorShard]) -> list[Description]:
    """Describe the boxes that `write_shard` writes to a file of this name, for the index.

    Returns the name and the whole shape of each box's tensor, its kind and dtype, and the box's entry in the index.
    """
    boxes = ({"file": file, "key": _key(n, x), "start": x.start, "shape": x.tensor.shape} for n, x in enumerate(shards))
    return [(x.name, x.global_shape, x.kind, NAMES[x.tensor.dtype], box) for x, box in zip(shards, boxes)]


def index_tensors(files: Iterable[Iterable[Description]]) -> bytes:
    """Join the descriptions of all files to the index's "tensors". They depend on the layout alone, not on the step."""
    tensors: dict[str, dict[str, Any]] = {}
    for name, shape, kind, dtype, box in chain.from_iterable(files):
        kinds = tensors.setdefault(name, {"shape": shape, "kinds": {}})["kinds"]
        kinds.setdefault(kind, {"dtype": dtype, "boxes": []})["boxes"].append(box)
    return json.dumps(tensors).encode()


def index_bytes(about: dict[str, Any], files: dict[str, Any]) -> bytes:
    """Encode what changes from save to save: `about`, and the record of each file."""
    return json.dumps({**FORMAT, **about, "files": files})[1:-1].encode()


def write_index(folder: Path, changing: bytes, tensors: bytes) -> str:
    """Write index.json of `index_bytes` and `index_tensors`. Return its checksum. Raises OSError."""
    body = b"".join([changing, b', "tensors": ', tensors, b"}"])
    write_file(folder / INDEX, [INDEX_BEGIN + f'{(found := checksum(body))}",\n'.encode(), body])
    return found


def read_index(path: Path) -> dict[str, Any]:
    """Read an index; check its checksum, format and version. Raises CheckpointError; ValueError for bad JSON."""
    with disk_errors(path):
        first, _, body = read_bytes(path, INDEX_BYTES).partition(b"\n")
    index_checksum = checksum(body)
    if first.decode(errors="replace") != f'{{"checksum": "{index_checksum}",':
        raise CheckpointError(
            f"{path} is damaged, or not an index of minitron: its first line is not the checksum of the rest"
        )
    index = parse_json(b"{" + body) | {"checksum": index_checksum}
    if (found := {key: index.get(key) for key in FORMAT}) != FORMAT:
        raise CheckpointError(f"{path} is of {found}, and this code reads {FORMAT}; use the minitron that wrote it")
    return index


# ---- safetensors -----------------------------------------------------------------------------------------------------


def write_shard(path: Path, shards: Sequence[TensorShard]) -> dict[str, Any]:
    """Write boxes as one safetensors file and wait until it is on the disk. Raises CheckpointError.

    Returns the file's record in the index, by its name.
    """
    entries = [(_key(n, shard), shard.tensor.dtype, shard.tensor.shape) for n, shard in enumerate(shards)]
    with disk_errors(path):
        return {path.name: write_file(path, chain([header(entries)], (_bytes(shard.tensor) for shard in shards)))}


def _key(number: int, shard: TensorShard) -> str:
    """Name a box in its file."""
    return f"{shard.kind}:{shard.name}:{number}"


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], **metadata: str) -> bytes:
    """Return the beginning of a safetensors file of these (name, dtype, shape); their data follow in the same order.

    By hand, since the library wants all tensors at once: eight bytes of length, then JSON, padded to align the data.
    """
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": STORED[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file and wait until it is on the disk. Returns its record in the index."""
    with open(path, "wb") as file:

        def written() -> Iterator[Callable[[], Any]]:
            for part in parts:
                view = memoryview(part)
                for begin in range(0, len(view), BLOCK_BYTES):
                    block = view[begin : begin + BLOCK_BYTES]
                    file.write(block)
                    yield partial(block.cast, "B")

        crc = crc32(written())
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "checksum": f"{crc:08x}", "algorithm": "crc32"}


def _bytes(x: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, a view if it is there."""
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
