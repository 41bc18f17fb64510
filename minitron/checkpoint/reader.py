"""Read any box of any tensor of a checkpoint from the boxes that were saved.

Opening reads the index only, and checks all of it, since a checkpoint may come from anywhere: names, counts, and that
the boxes of each tensor hold every element once. The index of a local save lists the boxes of one node: there, each box
that is read is checked. A file is mapped only while it is read.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minitron.checkpoint.boxes import Box, TensorShard, covers
from minitron.checkpoint.checksum import crc32
from minitron.checkpoint.directory import STEP, newest
from minitron.checkpoint.format import BLOCK_BYTES, INDEX, STORED, CheckpointError, disk_errors, read_index
from minitron.config.files import errors_as, size_of
from minitron.kernels.gemm import DTYPES

SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")
MAX_COUNT, MAX_DIMS = 1 << 48, 8
COUNTERS = {"optimizer_steps": 0, "clean_steps": 0, "loss_tolerance": -1 << 31}  # their smallest values in `state`


class Reader:
    """An open checkpoint. path: its folder, or a directory of checkpoints: then the newest is opened.

    facts: the `facts()` of another rank's Reader of it; the index is then neither opened nor checked again.
    Attributes: path, index, iteration, consumed_samples, config, layout, state and files as in the index;
    index_checksum; resume_step, to which the saved run went back. `verify` checks the files. Raises CheckpointError.
    """

    note = ""

    def __init__(self, path: str | os.PathLike[str], facts: dict[str, Any] | None = None):
        self.path = Path(os.path.expanduser(path))
        if facts is None and not STEP.fullmatch(self.path.name):
            self.path = newest(self.path) or self.path
        self.index = self.path / INDEX
        try:
            index = read_index(self.index) if facts is None else facts
            self.iteration, self.consumed_samples = _counts(index["iteration"], index["consumed_samples"])
            self.config, self.layout, self.state = (_mapping(index, part) for part in ("config", "layout", "state"))
            self.files, self._tensors = _mapping(index, "files"), _mapping(index, "tensors")
            self.index_checksum = index["checksum"]
            self.resume_step = self.config.get("checkpoint", {}).get("resume_step")
            self._index = index | {"path": str(self.path)}
            if facts is None:
                self._check_head()
                self._check_tensors()
        except CheckpointError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            why = f"is damaged or from another version ({repr(error)[:200]}); copy it again, or use an older checkpoint"
            raise CheckpointError(f"{self.index} {why}") from error

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(self._tensor(name)["shape"])

    def kinds(self, name: str) -> list[str]:
        """List the kinds under which a tensor is stored; none for an unknown one."""
        return list(self._tensor(name)["kinds"]) if name in self._tensors else []

    def dtype(self, name: str, kind: str) -> torch.dtype:
        return DTYPES[self._tensor(name)["kinds"][kind]["dtype"]]

    def read(self, name: str, kind: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read any box of a tensor, on the CPU and in the dtype it was saved in, from the boxes that it meets.

        `verify` checks the bytes of the files, this method does not. A file is mapped only while it is read, because
        its pages count as memory of this process. Raises CheckpointError.
        """
        wanted = Box(tuple(start), tuple(shape))
        assert all(first + size <= whole for first, size, whole in zip(*wanted, self.shape(name), strict=True))
        result = torch.empty(wanted.shape, dtype=self.dtype(name, kind))
        for file, group in groupby(self._overlaps(name, kind, wanted), itemgetter(0)):
            self._read_boxes(self.path / file, [found[1:] for found in group], wanted, result)
        return result

    def verify(self, files: Iterable[str] | None = None) -> None:
        """Check size and checksum of these files, by default all. Raises CheckpointError naming the first bad one."""
        for name in self.files if files is None else files:
            path, saved, buffers = self.path / name, self.files[name], threading.local()
            with disk_errors(path):
                if (size := size_of(path)) != saved["bytes"]:
                    raise CheckpointError(f"{path} is damaged: {size} bytes instead of {saved['bytes']}")
                blocks = (partial(_block, path, begin, buffers) for begin in range(0, size, BLOCK_BYTES))
                checksum = f"{crc32(blocks):08x}"
            if checksum != saved["checksum"]:
                raise CheckpointError(f"{path} is damaged: its checksum is {checksum} instead of {saved['checksum']}")

    def files_of(self, shards: Iterable[TensorShard]) -> list[str]:
        """List the files that hold these boxes. Raises CheckpointError unless they hold each element once."""
        return sorted({file for x in shards for file, *_ in self._overlaps(x.name, x.kind, x.box)})

    def facts(self) -> dict[str, Any]:
        """Return the index for a Reader on another rank, which parses the text of a tensor when it first needs it."""
        return self._index | {"tensors": {name: json.dumps(self._tensor(name)) for name in self._tensors}}

    def identity(self) -> tuple[str, Reader]:
        """Return what `Weights.identity` describes."""
        return "", self

    def _read_boxes(self, path: Path, found: list[tuple[str, Box, Box]], wanted: Box, result: Tensor) -> None:
        """Copy what `wanted` has in common with each (key, box) of a file."""
        # safetensors maps a file by torch, which raises RuntimeError, for example if the file was just deleted.
        kinds = SafetensorError, OSError, RuntimeError
        with errors_as(CheckpointError, lambda error: f"{path} cannot be read: {error}", *kinds):
            size_of(path)  # refuses a pipe or a device, which might never end
            with safe_open(path, framework="pt") as opened:
                for key, stored, common in found:
                    part = opened.get_slice(key)
                    if (part.get_dtype(), tuple(part.get_shape())) != (STORED[result.dtype], stored.shape):
                        raise CheckpointError(f"{path}: {key} does not have the dtype and shape that index.json lists")
                    result[common.within(wanted)] = part[common.within(stored)]

    def _overlaps(self, name: str, kind: str, box: Box) -> list[tuple[str, str, Box, Box]]:
        """List (file, key, stored box, what it has in common with `box`). Raises as `files_of` does."""
        boxes = self._boxes(name, kind) if kind in self.kinds(name) else ()
        found = [(*stored, common) for stored in boxes if (common := stored[2].meet(box))]
        inside = [Box(tuple(s - o for s, o in zip(common.start, box.start)), common.shape) for *_, common in found]
        if 0 not in box.shape and not covers(box.shape, inside):
            raise CheckpointError(f"{self.index} lacks parts of {kind} of {name} that this rank needs")
        return found

    def _tensor(self, name: str) -> dict[str, Any]:
        """Return the index's part of a tensor."""
        if isinstance(found := self._tensors[name], str):
            found = self._tensors[name] = json.loads(found)
        return found

    def _boxes(self, name: str, kind: str) -> Iterator[tuple[str, str, Box]]:
        for box in self._tensor(name)["kinds"][kind]["boxes"]:
            yield box["file"], box["key"], Box(tuple(box["start"]), tuple(box["shape"]))

    def _check_head(self) -> None:
        """Check all but the tensors. Raises ValueError, or for wrong types other errors."""
        folder = STEP.fullmatch(self.path.name)
        if folder and int(folder[1]) != self.iteration:
            fix = "give it its old name back, or the index.json of its safetensors"
            raise CheckpointError(
                f"{self.index} is of iteration {self.iteration}, and the name of its folder of {folder[1]}; {fix}"
            )
        for section in self.config:
            _mapping(self.config, section, "config.")
        _counts(*self.layout.values())
        data = _mapping({"data": {}} | self.state, "data", "state.")
        _counts(*(data.get(name, 0) for name in ("train_samples", "valid_samples")))
        rerun = _mapping({"rerun": {}} | self.state, "rerun", "state.")
        _counts(rerun.get("in_a_row", 0))
        for values in _mapping({"history": {}} | rerun, "history", "state.rerun.").values():
            if not all(isinstance(value, float) for value in values):  # `read_index` refuses NaN and infinity
                raise ValueError("state.rerun.history holds a value that is not a number")
        for name, least in COUNTERS.items():
            if not least <= self.state.get(name, 0) < 1 << 31:
                raise ValueError(f"{name}={self.state[name]} is not a counter")
        if not 1 <= (scale := self.state.get("loss_scale", 1)) < 2.0**128:
            raise ValueError(f"loss_scale={scale} is not a loss scale")
        for file, record in self.files.items():
            _counts(record["bytes"])
            if not SHARD_NAME.fullmatch(file) or record["algorithm"] != "crc32":
                raise CheckpointError(f"{self.index}: {file!r} is not a file beside it with a crc32 checksum")

    def _check_tensors(self) -> None:
        """Check every box. Raises ValueError, or for wrong types other errors."""
        used: set[tuple[str, str]] = set()
        for name in self._tensors:
            whole = self.shape(name)
            for kind in self.kinds(name):
                found = list(self._boxes(name, kind))
                if not (self.dtype(name, kind) and found):
                    raise ValueError(f"{kind} of {name} has no boxes")
                files, keys, boxes = zip(*found)
                _counts(*whole, *(number for box in boxes for part in box for number in part))
                part = "local_save" in self.state  # it lists the files of a node
                held = len(whole) <= MAX_DIMS and (part or covers(whole, boxes))
                if not held or not self.files.keys() >= set(files):
                    fix = "do not fit its shape and the list of files; copy the checkpoint again"
                    raise CheckpointError(f"{self.index}: the boxes of {kind} of {name} {fix}")
                for file, key in zip(files, keys):
                    if not isinstance(key, str):
                        raise ValueError(f"the key {key!r} is not a string")
                    if (file, key) in used:
                        raise CheckpointError(f"{self.index}: two boxes have the key {key!r} of {file}")
                    used.add((file, key))


def _block(path: Path, begin: int, buffers: threading.local) -> memoryview:
    """Read a block into this thread's buffer, which its next one overwrites."""
    if not hasattr(buffers, "block"):
        buffers.block = memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        end = 0
        while count := file.readinto(buffers.block[end:]):  # a network file system may return fewer bytes
            end += count
    return buffers.block[:end]


def _counts(*values: Any) -> tuple[int, ...]:
    """Raise ValueError for a value that is not a count: JSON has floats, booleans, and numbers of any size."""
    for value in values:
        if type(value) is not int or not 0 <= value < MAX_COUNT:
            raise ValueError(f"{str(value)[:40]} is not a count")
    return values


def _mapping(parent: dict[str, Any], name: str, path: str = "") -> dict[str, Any]:
    if not isinstance(parent[name], dict):
        raise ValueError(f"{path}{name} is not an object")
    return parent[name]
