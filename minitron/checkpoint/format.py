"""Checkpoints on disk: what the files hold, how they are written so that none is ever half there, how they are read.

Problem: training is killed at any moment, also inside a save; disks fill up and flip bits; the next run has another
layout; and a checkpoint may come from anywhere, so opening one must not run code. The idea:

    runs/a/latest                                   the name of the newest, and a checksum of that name
    runs/a/owner.7-5e0c91d2                         the seventh run to save here: its process, host and start
    runs/a/step_00000020/index.json                 which box of which tensor is in which file; each file's checksum
    runs/a/step_00000020/rank_00003.safetensors     boxes of tensors (boxes.py), written by one rank
    runs/a/step_00000030.tmp-8d21f06b/              a save under way, or what is left of one that was killed

  1. Safetensors and JSON are data only.
  2. A save fills a folder of a temporary name. Once all of it has reached the disk, a rename makes it a checkpoint,
     and then `latest` is replaced. Killed before, it leaves everything as it was.
  3. Checksums cover every byte and are made from the memory that was to be written. The index has each file's, and its
     own in its first line. CRC-32 sees any flip of up to 32 neighbouring bits, and 1 - 2^-32 of all other damage, at
     6 GB/s a core. It is no protection against forgery.
  4. No lock, which a killed run could not give back: whoever starts takes the directory over, and the run before, if
     it lives, finds that out before it deletes or renames anything.
  5. A directory may hold other things. Deleted, renamed and replaced is only what both its name and what lies in it
     show to be a save's. So a checkpoint into which somebody has put a file of his own stays.

2. is as good as the rename of a folder: atomic on disks, Lustre, NFS, and in a bucket with a hierarchical namespace. In
others gcsfuse copies file by file, and a kill leaves half a folder. `latest` never names it; without a `latest`, in a
first save, it is an error, for index or checksums find it.

index.json: {"format": "minitron-checkpoint", "version": 1, "iteration": 20, "consumed_samples": 320, "config": {...},
    "layout": {"world": 8, "tp": 2, ...}, "state": {small named values},
    "files": {"rank_00003.safetensors": {"bytes": 1234, "checksum": "9ae0daaf", "algorithm": "crc32"}},
    "tensors": {"blocks.0.mlp.up.weight": {"shape": [96, 32], "kinds": {"master": {"dtype": "fp32", "boxes": [
        {"file": "rank_00003.safetensors", "key": "...", "start": [0, 0], "shape": [48, 32]}, ...]}}}}}
Kinds: `master`, `exp_avg`, `exp_avg_sq` where the optimizer was saved (parameters are the rounded masters), `param`
where only weights were, `fp8_history`. The boxes of a kind hold each element once. Left out: compression.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minitron.checkpoint.boxes import Box, Piece, covers
from minitron.config.files import parse_json, read_bytes, size_of
from minitron.kernels.gemm import DTYPES

FORMAT = {"format": "minitron-checkpoint", "version": 1}
NAMES = {dtype: name for name, dtype in DTYPES.items()}  # in the index
STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}  # in safetensors
STEP, STEP_NAME = re.compile(r"step_(\d{8}|[1-9]\d{8,})"), "step_{:08d}".format
OWNER = re.compile(r"owner\.((\d+)-[0-9a-f]{8})")
TEMPORARY = re.compile(r"(step_\d{8,}|probe)(\.tmp-[0-9a-f]{8})+")
POINTER = re.compile(r"step_\d{8,} [0-9a-f]{8}\n")
INDEX_BEGIN, OWNER_BEGIN = b'{"checksum": "', b"process "
# What lies in a folder that a save wrote; .nfs* are deleted files that somebody has open.
SAVED = re.compile(r"index\.json|latest|(rank|part)_\d{5,}\.safetensors|\.nfs\w+")
SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")
INDEX_BYTES = 2 << 30
MAX_COUNT, MAX_DIMS = 1 << 48, 8
COUNTERS = ("optimizer_steps", "clean_steps", "loss_tolerance")  # of `state`; the last may be negative
SHARD_BYTES = 2 << 30  # at which a Writer begins another file
BLOCK_BYTES = 16 << 20  # written, or read, and summed at a time: in between it stays in the cache


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: one line that names the file."""


class TakenOver(CheckpointError):
    """Another run saves in this directory now."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an OSError inside into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {(error.strerror or str(error)).lower()}") from error


# ---- a directory of checkpoints ------------------------------------------------------------------------------------


def checkpoints(directory: Path) -> dict[int, Path]:
    """The checkpoints in a directory by iteration, ascending; a folder in which no file is a save's is none."""
    return {step: path for step, path in _named(directory).items() if any(map(SAVED.fullmatch, _names(path)))}


def in_the_way(directory: Path, after: int, until: int) -> Path | None:
    """What has the name of a checkpoint of these steps, and no save wrote: it would keep that step from being saved."""
    return next(
        (path for step, path in _named(directory).items() if after < step <= until and not _is_saved(path)), None
    )


def _named(directory: Path) -> dict[int, Path]:
    """All that has the name of a checkpoint, by iteration, ascending."""
    return dict(
        sorted((int(match[1]), path) for path in directory.glob("step_*") if (match := STEP.fullmatch(path.name)))
    )


def _names(folder: Path) -> list[str]:
    """What lies in a folder; nothing in what is none."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _is_saved(folder: Path) -> bool:
    """Whether a save wrote all that lies in a folder. Nobody knows who made an empty one."""
    names = _names(folder)
    return (
        bool(names)
        and not folder.is_symlink()
        and all(SAVED.fullmatch(name) and _begins(folder / name, b"") for name in names)
        and ("index.json" not in names or _begins(folder / "index.json", INDEX_BEGIN))
    )


def _is_empty(folder: Path) -> bool:
    """Whether it is a folder, no link, with nothing in it."""
    with suppress(OSError):
        return not folder.is_symlink() and not os.listdir(folder)
    return False


def _begins(path: Path, text: bytes) -> bool:
    """Whether a regular file begins with text. One that is shorter may have been killed while it was written."""
    with suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            with open(path, "rb") as file:
                return text.startswith(file.read(len(text)))
    return False


def newest(directory: Path) -> Path | None:
    """The checkpoint that `latest` names; without a `latest` that of the highest step; None if there is none.

    Raises CheckpointError if `latest` is damaged or cannot be read, or what it names is missing.
    """
    pointer = directory / "latest"
    with disk_errors(pointer):
        if not pointer.exists():  # the first save was killed after its rename, or somebody copied folders only
            return next(reversed(checkpoints(directory).values()), None)
        _size(pointer)
        with open(pointer, "rb") as file:
            text = file.read(256).decode(errors="replace")
    name = text.split(" ")[0]
    if not STEP.fullmatch(name) or text != _pointer(name):
        raise CheckpointError(f"{pointer} is damaged: its checksum is not that of the name in it")
    if not (directory / name).is_dir():
        raise CheckpointError(f"{directory / name} is missing, and {pointer} names it")
    return directory / name


def make_writable(directory: Path) -> None:
    """Make the directory if it is not there, and try what a save does. Raises CheckpointError."""
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        _check_pointer(directory / "latest")
        (probe := directory / f"probe.tmp-{secrets.token_hex(4)}").mkdir()
        (probe / "index.json").touch()
        try:
            _remove(probe)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.dir={directory}: folders cannot be renamed ({error.strerror}), as every "
                "save has to; use a disk, or a bucket with a hierarchical namespace"
            ) from error


def _check_pointer(pointer: Path) -> None:
    """Raises CheckpointError if `latest`, which a save would replace, is somebody else's."""
    if os.path.lexists(pointer):
        with open(pointer if _begins(pointer, b"") else os.devnull, "rb") as file:
            if not POINTER.fullmatch(file.read(64).decode(errors="replace")):
                raise CheckpointError(
                    f"{pointer} is damaged, or not minitron's, and a save would replace it; move it "
                    "away, or use another checkpoint.dir"
                )


def claim(directory: Path) -> str:
    """Take a directory over: its new owner, for `begin` and `commit`, as "7-5e0c91d2". Raises CheckpointError.

    Each owner is a file of its own name: a mount may remember for long what was in a file, but lists folders anew.
    The number says who came last. The rest tells apart who came at the same instant, or before somebody emptied the
    directory, where numbers begin again.
    """
    make_writable(directory)
    with disk_errors(directory):
        before = _owners(directory)
        owner = f"{max((number for number, _ in before), default=0) + 1}-{secrets.token_hex(4)}"
        (directory / f"owner.{owner}").write_text(
            f"process {os.getpid()} on {socket.gethostname()}, started {datetime.now():%Y-%m-%d %H:%M:%S}"
        )
        for _, name in before:
            (directory / f"owner.{name}").unlink(missing_ok=True)
    return owner


def _owners(directory: Path) -> list[tuple[int, str]]:
    """(number, owner), the one that counts last."""
    return sorted(
        (int(match[2]), match[1])
        for path in directory.glob("owner.*")
        if (match := OWNER.fullmatch(path.name)) and _begins(path, OWNER_BEGIN)
    )


def check_owner(directory: Path, owner: str | None) -> None:
    """Raises TakenOver if the directory has another owner. None: nobody's, as that of a tool."""
    owners = _owners(directory) if owner is not None else []
    if owners and owners[-1][1] != owner:
        with disk_errors(directory):
            newest = (directory / f"owner.{owners[-1][1]}").read_text(errors="replace")
        raise TakenOver(
            f"checkpoint.dir={directory} was taken over by {newest}; only one run at a time can save "
            "there: end one of them, or give it another"
        )


def begin(directory: Path, iteration: int, num_bytes: int, owner: str | None = None) -> Path:
    """A fresh temporary folder for a save; what killed saves left goes. CheckpointError without room for num_bytes."""
    make_writable(directory)
    with disk_errors(directory):
        check_owner(directory, owner)
        for stale in directory.glob("*.tmp-*"):
            if TEMPORARY.fullmatch(stale.name) and (_is_saved(stale) or _is_empty(stale)):
                _remove(stale)
        free = shutil.disk_usage(directory).free
        if free < num_bytes:
            raise CheckpointError(
                f"{directory} has {free / 1e6:.0f} MB free and a save needs {num_bytes / 1e6:.0f} MB"
                "; free some, or lower checkpoint.keep"
            )
        temporary = directory / f"{STEP_NAME(iteration)}.tmp-{secrets.token_hex(4)}"
        temporary.mkdir()
    return temporary


def commit(
    temporary: Path,
    about: dict,
    shards: Iterable[tuple[dict, list]],
    keep: int = 0,
    after: int = 0,
    owner: str | None = None,
) -> None:
    """Make a filled temporary folder the newest checkpoint. Raises CheckpointError.

    about: the index but files and tensors, which come from the shards (`write_shard`). keep: how many of the run's
    checkpoints stay, 0: all. after: the iteration of its save before this one, or that it went on from. What lies
    between the two it has left by going back: they do not count, and go. What lies beyond this one stays for now.
    """
    directory, folder = temporary.parent, temporary.with_name(temporary.name.split(".")[0])
    files, tensors = {}, {}
    for record, boxes in shards:
        files |= record
        for name, whole, kind, dtype, box in boxes:
            kinds = tensors.setdefault(name, {"shape": whole, "kinds": {}})["kinds"]
            kinds.setdefault(kind, {"dtype": dtype, "boxes": []})["boxes"].append(box)
    body = json.dumps({**FORMAT, **about, "files": files, "tensors": tensors})[1:].encode()
    with disk_errors(directory):
        _write(temporary / "index.json", [INDEX_BEGIN + f'{_crc(body)}",\n'.encode(), body])
        _write(temporary / "latest", [_pointer(folder.name).encode()])
        _sync(temporary)
        check_owner(directory, owner)
        if os.path.lexists(folder) and not _is_saved(folder):
            raise CheckpointError(f"{folder} is in the way: it holds what no save wrote; move it away")
        replaced = _hide(folder)  # if it is there, of a run that went back to before it
        os.rename(temporary, folder)
        _sync(directory)
        os.replace(folder / "latest", directory / "latest")
        _sync(directory)
        shutil.rmtree(replaced, ignore_errors=True)
        if keep:
            passed = {step: path for step, path in checkpoints(directory).items() if step <= about["iteration"]}
            ours = [step for step in passed if step <= after or step == about["iteration"]]
            for step in passed.keys() - set(ours[-keep:]):
                if _is_saved(passed[step]):
                    _remove(passed[step])


def _remove(folder: Path) -> None:
    shutil.rmtree(_hide(folder), ignore_errors=True)  # the next save tries again


def _hide(folder: Path) -> Path:
    """Rename what is to be removed, so that no half of it is ever taken for a checkpoint, nor committed as one."""
    hidden = folder.with_name(f"{folder.name.split('.')[0]}.tmp-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        os.rename(folder, hidden)
    return hidden


def _sync(folder: Path) -> None:
    """The names in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_shard(path: Path, pieces: Sequence[Piece]) -> tuple[dict, list[tuple]]:
    """Write boxes as one safetensors file and see it on the disk. Raises CheckpointError.

    Returns what `commit` makes the index from: the file's record, and (name, whole, kind, dtype, place) of each box.
    """
    boxes = [
        (
            name,
            whole,
            kind,
            NAMES[tensor.dtype],
            {"file": path.name, "key": f"{kind}:{name}:{number}", "start": start, "shape": tensor.shape},
        )
        for number, (name, kind, whole, start, tensor) in enumerate(pieces)
    ]
    begin = header((box["key"], piece.tensor.dtype, box["shape"]) for piece, (*_, box) in zip(pieces, boxes))
    with disk_errors(path):
        return {path.name: _write(path, [begin, *(piece.tensor for piece in pieces)])}, boxes


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], **metadata: str) -> bytes:
    """What a safetensors file of these (name, dtype, shape) begins with; their data follow in the same order.

    By hand, for the library wants all tensors at once: eight bytes of length, then JSON, filled up so that data align.
    """
    entries, end = {"__metadata__": metadata} if metadata else {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": STORED[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class Writer(AbstractContextManager):
    """Writes a checkpoint from one process, in files of about 2 GB: for weights that come from elsewhere.

        with Writer(directory, iteration=0, config=config_dict) as writer:
            writer.add("head.weight", "param", (128, 32), (0, 0), tensor)

    When the `with` is left, directory/step_00000000 is there, and `latest` names it; if by an exception, nothing is.
    config: a whole Config as a dict. Raises CheckpointError.
    """

    def __init__(self, directory: str | os.PathLike, iteration: int, config: dict):
        self.about = {
            "iteration": iteration,
            "consumed_samples": 0,
            "config": config,
            "state": {},
            "layout": dict.fromkeys(("world", "tp", "pp", "vp", "cp", "dp"), 1),
        }
        self.temporary = begin(Path(os.path.expanduser(directory)), iteration, 0)
        self.waiting: list[Piece] = []
        self.shards: list[tuple] = []

    def add(self, name: str, kind: str, whole: Sequence[int], start: Sequence[int], tensor: Tensor) -> None:
        """Take the box of `name`, of shape `whole`, that begins at `start`. The tensor must not change afterwards."""
        self.waiting.append(Piece(name, kind, tuple(whole), tuple(start), tensor))
        if sum(piece.tensor.nbytes for piece in self.waiting) >= SHARD_BYTES:
            self._flush()

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._flush()
                commit(self.temporary, self.about, self.shards)
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)  # not there if it was committed

    def _flush(self) -> None:
        name = f"part_{len(self.shards):05d}.safetensors"
        self.shards.append(write_shard(self.temporary / name, self.waiting))
        self.waiting = []


def _write(path: Path, parts: Iterable[bytes | Tensor]) -> dict:
    """Write a file and see it on the disk; returns its record in the index."""
    size = checksum = 0
    with open(path, "wb") as file:
        for part in parts:
            if isinstance(part, Tensor):
                part = part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            whole = memoryview(part)
            for begin in range(0, len(whole), BLOCK_BYTES):
                block = whole[begin : begin + BLOCK_BYTES]
                checksum = zlib.crc32(block, checksum)
                file.write(block)
            size += len(whole)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "checksum": f"{checksum:08x}", "algorithm": "crc32"}


def _pointer(name: str) -> str:
    return f"{name} {_crc(name.encode())}\n"


def _crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


# ---- reading ---------------------------------------------------------------------------------------------------------


class Reader:
    """An open checkpoint: its folder, or a directory of checkpoints, then the newest of them.

    Opening reads the index alone, and checks all of it; `verify` checks the files. Attributes: path, iteration,
    consumed_samples, config, layout, state and files as in the index. Raises CheckpointError.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(os.path.expanduser(path))
        if not STEP.fullmatch(self.path.name):
            self.path = newest(self.path) or self.path
        self.index = self.path / "index.json"
        try:
            index = _read_index(self.index)
            self.iteration, self.consumed_samples = _counts(index["iteration"], index["consumed_samples"])
            self.config, self.layout, self.state = (
                _mapping(index[part], part) for part in ("config", "layout", "state")
            )
            self.files, self._tensors = index["files"], index["tensors"]
            self._check_head()
            self._check_tensors()
        except CheckpointError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self.index} is not as version 1 has it: {repr(error)[:200]}") from error

    def _check_head(self) -> None:
        """All but the tensors. Raises ValueError and what wrong types do."""
        folder = STEP.fullmatch(self.path.name)
        if folder and int(folder[1]) != self.iteration:
            raise CheckpointError(
                f"{self.index} is of iteration {self.iteration}, and its folder says {folder[1]}; "
                "give it its old name back, or the index.json of its safetensors"
            )
        for section in self.config:
            _mapping(self.config[section], f"config.{section}")
        _counts(*self.layout.values())
        data = _mapping(self.state.get("data", {}), "state.data")
        _counts(*(data[name] for name in ("train_samples", "valid_samples") if name in data))
        for name in COUNTERS:
            if not -1 << 31 < self.state.get(name, 0) < 1 << 31:
                raise ValueError(f"{name}={self.state[name]} is no counter")
        if not 1 <= (scale := self.state.get("loss_scale", 1)) < math.inf:
            raise ValueError(f"loss_scale={scale} is no loss scale")
        for file, record in self.files.items():
            _counts(record["bytes"])
            if not SHARD_NAME.fullmatch(file) or record["algorithm"] != "crc32":
                raise CheckpointError(f"{self.index}: {file!r} is no file beside it with a crc32 checksum")

    def _check_tensors(self) -> None:
        """Every box. Raises ValueError and what wrong types do."""
        used: set[tuple[str, str]] = set()
        for name in self._tensors:
            for kind in self.kinds(name):
                if not (self.dtype(name, kind) and self._tensors[name]["kinds"][kind]["boxes"]):
                    raise ValueError(f"{kind} of {name} has no boxes")
                found, whole = list(self._boxes(name, kind)), self.shape(name)
                _counts(*whole, *(number for _, _, box in found for part in box for number in part))
                if (
                    len(whole) > MAX_DIMS
                    or not covers(whole, [box for *_, box in found])
                    or not all(file in self.files for file, _, _ in found)
                ):
                    raise CheckpointError(f"{self.index}: the boxes of {kind} of {name} do not hold each element once")
                for file, key, _ in found:
                    if not isinstance(key, str):
                        raise ValueError(f"the key {key!r} is no text")
                    if (file, key) in used:
                        raise CheckpointError(f"{self.index}: two boxes are {key!r} of {file}")
                    used.add((file, key))

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._tensors[name]["shape"])

    def kinds(self, name: str) -> list[str]:
        """What is stored of a tensor; nothing of an unknown one."""
        return list(self._tensors.get(name, {"kinds": ()})["kinds"])

    def dtype(self, name: str, kind: str) -> torch.dtype:
        return DTYPES[self._tensors[name]["kinds"][kind]["dtype"]]

    def files_of(self, name: str, kind: str, box: Box) -> set[str]:
        """The files that hold elements of a box."""
        return {file for file, _, stored in self._boxes(name, kind) if stored.meet(box)}

    def read(self, name: str, kind: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Any box of a tensor, on the CPU and in the dtype it was saved in, put together from the boxes it meets.

        It trusts the bytes of the files, which `verify` checks. A file is mapped only while it is read: its pages count
        as memory of this process.
        """
        wanted = Box(tuple(start), tuple(shape))
        assert all(first + size <= whole for first, size, whole in zip(*wanted, self.shape(name), strict=True))
        result = torch.empty(wanted.shape, dtype=self.dtype(name, kind))
        for file, group in groupby(self._boxes(name, kind), itemgetter(0)):
            if found := [(key, stored, common) for _, key, stored in group if (common := stored.meet(wanted))]:
                self._read_boxes(self.path / file, found, wanted, result)
        return result

    def _read_boxes(self, path: Path, found: list[tuple[str, Box, Box]], wanted: Box, result: Tensor) -> None:
        """Copy what `wanted` has in common with each (key, box) of a file."""
        _size(path)
        try:
            with safe_open(path, framework="pt") as opened:
                for key, stored, common in found:
                    part = opened.get_slice(key)
                    if (part.get_dtype(), tuple(part.get_shape())) != (STORED[result.dtype], stored.shape):
                        raise CheckpointError(f"{path}: {key} is not of the dtype and shape that index.json says")
                    result[common.within(wanted)] = part[common.within(stored)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def verify(self, files: Iterable[str] | None = None) -> None:
        """Size and checksum of these files, by default of all. Raises CheckpointError naming the first bad one."""
        for name in self.files if files is None else files:
            path, expected = self.path / name, self.files[name]
            size, checksum, block = _size(path), 0, memoryview(bytearray(BLOCK_BYTES))
            if size != expected["bytes"]:
                raise CheckpointError(f"{path} is damaged: {size} bytes instead of {expected['bytes']}")
            with disk_errors(path), open(path, "rb", buffering=0) as file:
                while count := file.readinto(block):
                    checksum = zlib.crc32(block[:count], checksum)
            if f"{checksum:08x}" != expected["checksum"]:
                raise CheckpointError(
                    f"{path} is damaged: its checksum is {checksum:08x} instead of {expected['checksum']}"
                )

    def _boxes(self, name: str, kind: str) -> Iterator[tuple[str, str, Box]]:
        for box in self._tensors[name]["kinds"][kind]["boxes"]:
            yield box["file"], box["key"], Box(tuple(box["start"]), tuple(box["shape"]))


def _counts(*values: object) -> tuple[int, ...]:
    """Raises ValueError for what is no count: JSON knows floats, truth values, and numbers of any size."""
    for value in values:
        if type(value) is not int or not 0 <= value < MAX_COUNT:
            raise ValueError(f"{str(value)[:40]} is no count")
    return values


def _mapping(value: object, what: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no object")
    return value


def _size(path: Path) -> int:
    """Bytes of a regular file: a device or a pipe might never end. Raises CheckpointError."""
    with disk_errors(path):
        return size_of(path)


def _read_index(path: Path) -> dict:
    """The index, once its checksum, format and version are as they should be. Raises CheckpointError."""
    with disk_errors(path):
        first, _, body = read_bytes(path, INDEX_BYTES).partition(b"\n")
    if first.decode(errors="replace") != f'{{"checksum": "{_crc(body)}",':
        raise CheckpointError(f"{path} is damaged, or no index of minitron: its first line is no checksum of the rest")
    index = _mapping(parse_json(b"{" + body), "it")
    if (found := {key: index.get(key) for key in FORMAT}) != FORMAT:
        raise CheckpointError(f"{path} is of {found}, and this code reads {FORMAT}; use the minitron that wrote it")
    return index
