"""Checkpoints on disk: what the files hold, how they are written so that none is ever half there, how they are read.

Problem: training is killed at any moment, also inside a save; disks fill up and flip bits; the next run has another
layout; and a checkpoint comes from anywhere, so that opening one must not run code. The idea:

    runs/a/latest                             "step_00000020 7d3f..": the newest, and a checksum of that name
    runs/a/step_00000020/index.json           which box of which tensor lies in which file, and each file's checksum
    runs/a/step_00000020/rank_00003.safetensors      boxes of tensors, written by one rank
    runs/a/step_00000030.tmp-5e0c91d2/        a save under way, or the rest of one that was killed

  1. Files are safetensors and JSON: data only. A box knows its place in the tensor of the whole model (boxes.py).
  2. A save fills a folder of a temporary name. When everything in it has reached the disk, one rename makes it a
     checkpoint, and only then is `latest` replaced. Whatever is killed leaves the last checkpoint as it was.
  3. Checksums cover every byte: each file's is in the index, the index's in its own first line. They are computed from
     the memory that was to be written, not from what was.

CRC-32 finds every flip of up to 32 neighbouring bits and other damage but once in 4 billion times, at 6 GB/s a core; it
is no protection against forgery. Left out: compression, and repair: a damaged checkpoint is refused, not mended.

index.json, after the line with its checksum:
    {"format": "minitron-checkpoint", "version": 1, "iteration": 20, "consumed_samples": 320, "config": {...},
     "layout": {"world": 8, "tp": 2, ...}, "state": {small named values},
     "files": {"rank_00000.safetensors": {"bytes": 1234, "checksum": "9ae0daaf", "algorithm": "crc32"}},
     "tensors": {"blocks.0.mlp.up.weight": {"shape": [96, 32], "kinds": {"master": {"dtype": "fp32", "boxes": [
         {"file": "rank_00000.safetensors", "key": "master:blocks.0.mlp.up.weight:0", "start": [0, 0], "shape": [48, 32]},
         ...]}}}}}
Kinds: `master`, `exp_avg`, `exp_avg_sq` of a training checkpoint, whose parameters are the rounded masters; `param` of
one with weights only; `fp8_history`. The boxes of a kind hold every element once.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minitron.checkpoint.boxes import Box, Piece, covers

FORMAT, VERSION = "minitron-checkpoint", 1
DTYPES = {"fp32": (torch.float32, "F32"), "bf16": (torch.bfloat16, "BF16"), "fp16": (torch.float16, "F16")}
NAMES = {dtype: (name, code) for name, (dtype, code) in DTYPES.items()}
SHARD_BYTES = 2 << 30   # at which a Writer begins another file
BLOCK_BYTES = 16 << 20  # written, or read and summed, at a time: it stays in a core's cache in between
STEP = re.compile(r"step_(\d{8,})")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: one line that names the file."""


# ---- a directory of checkpoints ------------------------------------------------------------------------------------


def step_name(iteration: int) -> str:
    return f"step_{iteration:08d}"


def checkpoints(directory: Path) -> dict[int, Path]:
    """The complete checkpoints in a directory by iteration, ascending."""
    found = {int(match[1]): path for path in directory.glob("step_*") if (match := STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def newest(directory: Path) -> Path | None:
    """The checkpoint that `latest` names; without a `latest`, the one of the highest step; None if there is none.

    Raises CheckpointError if `latest` is damaged or names one that is not there.
    """
    pointer = directory / "latest"
    if not pointer.exists():  # its first save was killed after the rename, or somebody copied folders only
        return next(reversed(checkpoints(directory).values()), None)
    name, _, checksum = pointer.read_bytes().decode(errors="replace").removesuffix("\n").partition(" ")
    if not STEP.fullmatch(name) or checksum != _crc(name.encode()):
        raise CheckpointError(f"{pointer} is damaged: its checksum is not that of the name in it")
    if not (directory / name).is_dir():
        raise CheckpointError(f"{directory / name} is missing, and {pointer} names it")
    return directory / name


def make_writable(directory: Path) -> None:
    """The directory is there afterwards. Raises CheckpointError if it cannot be made, or not be written."""
    with _naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


def begin(directory: Path, iteration: int, num_bytes: int) -> Path:
    """A fresh temporary folder for the save of an iteration; what killed saves left behind is removed.

    Raises CheckpointError if the disk has no num_bytes left, or the directory cannot be written.
    """
    make_writable(directory)
    with _naming(directory):
        for stale in directory.glob("step_*.tmp-*"):
            shutil.rmtree(stale)
        free = shutil.disk_usage(directory).free
        if free < num_bytes:
            raise CheckpointError(f"{directory} has {free / 1e9:.3f} GB free and a save needs {num_bytes / 1e9:.3f} GB;"
                                  " free some, or lower checkpoint.keep")
        temporary = directory / f"{step_name(iteration)}.tmp-{secrets.token_hex(4)}"
        temporary.mkdir()
    return temporary


def commit(temporary: Path, index: dict) -> Path:
    """Make a filled temporary folder the newest checkpoint of its directory: from here on it is there, and whole."""
    directory, folder = temporary.parent, temporary.with_name(temporary.name.split(".")[0])
    with _naming(directory):
        body = json.dumps({"format": FORMAT, "version": VERSION, **index})[1:].encode()
        _write(temporary / "index.json", [f'{{"checksum": "{_crc(body)}",\n'.encode(), body])
        _sync(temporary)
        if folder.exists():  # of a run that went back to before it
            _remove(folder)
        os.rename(temporary, folder)
        _sync(directory)
        _write(directory / "latest.tmp", [f"{folder.name} {_crc(folder.name.encode())}\n".encode()])
        os.replace(directory / "latest.tmp", directory / "latest")
        _sync(directory)
    return folder


def prune(directory: Path, iteration: int, keep: int) -> None:
    """Of the checkpoints up to this iteration remove all but the `keep` newest; 0 keeps all."""
    with _naming(directory):
        old = [folder for step, folder in checkpoints(directory).items() if step <= iteration]
        for folder in old[:-keep] if keep else []:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Renamed first, so that no half of it is ever taken for a checkpoint."""
    doomed = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _sync(folder: Path) -> None:
    """The names in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns an error of the disk into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {(error.strerror or str(error)).lower()}") from error


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_shard(path: Path, pieces: Sequence[Piece]) -> dict:
    """Write boxes as one safetensors file, and see it on the disk; returns the part of the index that tells of it."""
    header: dict[str, dict] = {}
    tensors: dict[str, dict] = {}
    end = 0
    for number, piece in enumerate(pieces):
        dtype, code = NAMES[piece.tensor.dtype]
        key, shape = f"{piece.kind}:{piece.name}:{number}", list(piece.tensor.shape)
        header[key] = {"dtype": code, "shape": shape, "data_offsets": [end, end + piece.tensor.nbytes]}
        end += piece.tensor.nbytes
        tensor = tensors.setdefault(piece.name, {"shape": list(piece.whole), "kinds": {}})
        assert tensor["shape"] == list(piece.whole), f"{piece.name} has shapes {tensor['shape']} and {piece.whole}"
        kind = tensor["kinds"].setdefault(piece.kind, {"dtype": dtype, "boxes": []})
        kind["boxes"].append({"file": path.name, "key": key, "start": list(piece.start), "shape": shape})
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _naming(path):
        written, checksum = _write(path, _bytes_of([struct.pack("<Q", len(text)) + text], pieces))
    return {"files": {path.name: {"bytes": written, "checksum": checksum, "algorithm": "crc32"}}, "tensors": tensors}


def merge(parts: Iterable[dict]) -> dict:
    """The `files` and `tensors` of an index from those of all its shards."""
    files: dict[str, dict] = {}
    tensors: dict[str, dict] = {}
    for part in parts:
        files |= part["files"]
        for name, tensor in part["tensors"].items():
            kinds = tensors.setdefault(name, {"shape": tensor["shape"], "kinds": {}})["kinds"]
            for kind, stored in tensor["kinds"].items():
                boxes = kinds.setdefault(kind, {"dtype": stored["dtype"], "boxes": []})["boxes"]
                boxes += stored["boxes"]
    return {"files": files, "tensors": tensors}


class Writer:
    """Writes a checkpoint from one process, in files of about 2 GB: what makes checkpoints of other systems' weights.

        with Writer(directory, iteration=0, config=config_dict) as writer:
            writer.add("head.weight", "param", (128, 32), (0, 0), tensor)

    The boxes that were added exist on disk, whole and named by `latest`, once the `with` is left; if it is left by an
    exception, nothing does. state, layout: as in the index. Raises CheckpointError if the directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike, iteration: int, config: dict, *, consumed_samples: int = 0,
                 layout: dict | None = None, state: dict | None = None):
        one = dict.fromkeys(("world", "tp", "pp", "vp", "cp", "dp"), 1)
        self.index = {"iteration": iteration, "consumed_samples": consumed_samples, "config": config,
                      "layout": layout or one, "state": state or {}}
        self.temporary = begin(Path(directory).expanduser(), iteration, 0)
        self.waiting: list[Piece] = []
        self.parts: list[dict] = []

    def add(self, name: str, kind: str, whole: Sequence[int], start: Sequence[int], tensor: Tensor) -> None:
        """Take the box of `name` (of shape `whole`) that begins at `start`; the tensor is not to change afterwards."""
        self.waiting.append(Piece(name, kind, tuple(whole), tuple(start), tensor))
        if sum(piece.tensor.nbytes for piece in self.waiting) >= SHARD_BYTES:
            self._flush()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._flush()
                commit(self.temporary, self.index | merge(self.parts))
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)  # gone already if it was committed

    def _flush(self) -> None:
        if self.waiting:
            path = self.temporary / f"part_{len(self.parts):05d}.safetensors"
            self.parts.append(write_shard(path, self.waiting))
            self.waiting = []


def _bytes_of(head: list[bytes], pieces: Iterable[Piece]) -> Iterator[bytes | memoryview]:
    yield from head
    for piece in pieces:
        whole = memoryview(piece.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        for begin in range(0, len(whole), BLOCK_BYTES):
            yield whole[begin:begin + BLOCK_BYTES]


def _write(path: Path, blocks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file and see it on the disk; returns its size and its checksum."""
    size = checksum = 0
    with open(path, "wb") as file:
        for block in blocks:
            size, checksum = size + len(block), zlib.crc32(block, checksum)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return size, f"{checksum:08x}"


def _crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


# ---- reading ---------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A box on disk."""

    file: str
    key: str
    box: Box


class Reader:
    """An open checkpoint. folder: its own, or a directory of checkpoints, then of its newest.

    Opening reads the index alone and checks all of it; `verify` checks the files. Attributes: path, iteration,
    consumed_samples, config, layout, state and files as in the index. Raises CheckpointError.
    """

    def __init__(self, folder: str | os.PathLike):
        self.path = Path(folder).expanduser()
        if not (self.path / "index.json").is_file() and not STEP.fullmatch(self.path.name):
            self.path = newest(self.path) or self.path
        index = _read_index(self.path / "index.json")
        try:
            self.iteration, self.consumed_samples = index["iteration"], index["consumed_samples"]
            self.config, self.layout, self.state = index["config"], index["layout"], index["state"]
            self.files: dict[str, dict] = index["files"]
            self._shapes = {name: tuple(tensor["shape"]) for name, tensor in index["tensors"].items()}
            self._stored = {(name, kind): (DTYPES[stored["dtype"]], [
                Stored(b["file"], b["key"], Box(tuple(b["start"]), tuple(b["shape"]))) for b in stored["boxes"]])
                for name, tensor in index["tensors"].items() for kind, stored in tensor["kinds"].items()}
            self._check_boxes()
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path}/index.json is no index of version {VERSION}: {error!r}") from error
        self._open = lru_cache(32)(self._open_file)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._shapes[name]

    def kinds(self, name: str) -> list[str]:
        """What is stored of a tensor; nothing of an unknown one."""
        return [kind for other, kind in self._stored if other == name]

    def files_of(self, name: str, kind: str, box: Box) -> set[str]:
        """The files that hold elements of a box."""
        return {stored.file for stored in self._stored[name, kind][1] if stored.box.meet(box)}

    def read(self, name: str, kind: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Any box of a tensor, on the CPU and in the dtype it was saved in, put together from what is stored.

        It trusts the bytes that `verify` has checked. Memory: twice the box at most.
        """
        wanted, (dtype, code) = Box(tuple(start), tuple(shape)), self._stored[name, kind][0]
        result = torch.empty(wanted.shape, dtype=dtype)
        for file, key, box in self._stored[name, kind][1]:
            common = box.meet(wanted)
            if common is None:
                continue
            try:
                part = self._open(file).get_slice(key)
                if part.get_dtype() != code or tuple(part.get_shape()) != box.shape:
                    raise CheckpointError(f"{self.path / file}: {key} is not of the dtype and shape that index.json "
                                          "says")
                result[common.within(wanted)] = part[common.within(box)]
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path / file} cannot be read: {error}") from error
        return result

    def verify(self, files: Iterable[str] | None = None) -> None:
        """Sizes and checksums of these files, of all by default. Raises CheckpointError naming the first bad one."""
        for name in self.files if files is None else files:
            self.check_size(name)
            path, checksum, block = self.path / name, 0, memoryview(bytearray(BLOCK_BYTES))
            with _naming(path), open(path, "rb", buffering=0) as file:
                while count := file.readinto(block):
                    checksum = zlib.crc32(block[:count], checksum)
            if f"{checksum:08x}" != self.files[name]["checksum"]:
                raise CheckpointError(f"{path} is damaged: its checksum is {checksum:08x}, and index.json says "
                                      f"{self.files[name]['checksum']}")

    def check_size(self, name: str) -> None:
        """Raises CheckpointError unless the file is there and as long as it was written."""
        path, size = self.path / name, self.files[name]["bytes"]
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, and index.json says {size}")

    def _check_boxes(self) -> None:
        for (name, kind), (_, stored) in self._stored.items():
            if not covers(self._shapes[name], [s.box for s in stored]):
                raise CheckpointError(f"{self.path}/index.json: the boxes of {kind} of {name} do not hold every "
                                      "element once")
            for file in {s.file for s in stored}:
                if Path(file).name != file or self.files[file]["algorithm"] != "crc32":
                    raise CheckpointError(f"{self.path}/index.json names {file!r}, which is no file beside it with a "
                                          "crc32 checksum")

    def _open_file(self, name: str):
        return safe_open(self.path / name, framework="pt")


def _read_index(path: Path) -> dict:
    """The index, its own checksum, format and version checked. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: {path.parent} is no checkpoint")
    with _naming(path):
        first, _, body = path.read_bytes().partition(b"\n")
    match = re.fullmatch(rb'\{"checksum": "([0-9a-f]{8})",', first)
    if not match or match[1].decode() != _crc(body):
        raise CheckpointError(f"{path} is damaged, or no index of a minitron checkpoint: its checksum is not that of "
                              "its contents")
    try:
        index = json.loads(b"{" + body)
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if (index.get("format"), index.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(f"{path} is of format {index.get('format')!r} version {index.get('version')!r}; this code "
                              f"reads {FORMAT!r} version {VERSION}: use the minitron that wrote it")
    return index
