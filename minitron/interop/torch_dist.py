"""Read a checkpoint of torch.distributed.checkpoint (Megatron-core's `torch_dist`) without running its pickles.

    .metadata         a pickle: every tensor's shape, and for each of its chunks the file, offset and length
    __0_1.distcp      the chunks, each as torch.save writes a tensor
    common.pt         Megatron's: a zip with a pickle of what is not a tensor, the run's arguments above all

A pickle is a program: it names functions and calls them. `Reader` follows one with an unpickler that imports none of
them: names of MODULES become records without code, torch's dtypes and Size are themselves, and every other name is
refused. torch's own restricted unpickler
(`weights_only`) reads the chunks. So a hostile checkpoint can cause an error or, by
tuples nested some 100,000 deep, the end of this process; it cannot run code.

Left out: all that is not a tensor, except common.pt (FP8 states, random numbers), compressed files.
"""

import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitron.checkpoint.boxes import Box, covers
from minitron.checkpoint.reader import MAX_COUNT, MAX_DIMS
from minitron.config.files import errors_as, read_bytes, size_of
from minitron.config.text import short
from minitron.interop.limits import limited_memory

METADATA_BYTES = 1 << 30
MEMORY_BYTES, MEMORY_TIMES = 256 << 20, 64  # memory for a pickle, and per byte of it: objects take some 15
# Errors of a chunk whose file is damaged, or whose offset and length in .metadata are wrong.
UNREADABLE = (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, MemoryError)
UNREADABLE += (AttributeError, TypeError, OverflowError)
# The modules of the classes of an index, and of values of arguments other than numbers and texts: enumerations, paths,
# the signal that ends a run. Megatron's modules have only enumerations.
MODULES = {
    *(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner", "default_planner")),
    *("argparse", "types", "collections", "pathlib", "pathlib._local", "signal", "torch.serialization"),
    *("megatron.core.transformer.enums", "megatron.core.enums"),
}


class Record:
    """An object of a known class, as its constructor's arguments and its fields. It has no code."""

    def __new__(cls, *args: Any, **_: Any) -> "Record":
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any, **__: Any):
        """Take any arguments."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__[str(key)] = value


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) == ("torch", "Size"):
            return tuple
        if module in MODULES:
            return type(name, (Record,), {})
        raise pickle.UnpicklingError(f"it calls for {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> Record:
        return Record(pid)  # a tensor in common.pt


def unpickle(data: bytes, origin: str) -> Any:
    """Follow a pickle without running anything. Raises ValueError, also for a damaged one."""
    fix = "give a checkpoint that Megatron wrote"
    with (
        errors_as(ValueError, lambda e: f"{origin} is refused: {short(e) or repr(e)}; {fix}", Exception),
        limited_memory(MEMORY_BYTES + MEMORY_TIMES * len(data)),  # seven bytes may ask for a table of gigabytes
    ):
        return _Unpickler(io.BytesIO(data)).load()


class Reader:
    """An open checkpoint: names, `shape` and `dtype` of its tensors, and any slice of them. Raises ValueError."""

    def __init__(self, folder: Path):
        self.path = folder
        origin = folder / ".metadata"
        fix = "name a folder of Megatron's, iter_..."
        with errors_as(ValueError, lambda e: f"{origin} cannot be read ({e.strerror}); {fix}", OSError):
            data = read_bytes(origin, METADATA_BYTES)
        whole = unpickle(data, str(origin))
        why = f"{origin} is not an index of a torch_dist checkpoint"
        kinds = AttributeError, TypeError, KeyError, IndexError
        with errors_as(ValueError, lambda error: f"{why} ({error!r:.200}); copy it again", *kinds):
            self._tensors = {
                name: entry
                for name, entry in whole.state_dict_metadata.items()
                if type(entry).__name__ == "TensorStorageMetadata"
            }
            self.others = sorted(whole.state_dict_metadata.keys() - self._tensors.keys())
            self._places = {
                (index.fqn, tuple(index.offset)): info
                for index, info in whole.storage_data.items()
                if getattr(index, "offset", None) is not None
            }
            for name in self._tensors:
                self._check(name)
            self._check_bytes()

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].properties.state[0]

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read a tensor, or one row of its first dimension. Raises ValueError for a damaged or compressed file."""
        rows, *others = self.shape(name)
        first, count = (0, rows) if row is None else (row, 1)
        wanted = Box((first, *(0 for _ in others)), (count, *others))
        out = torch.empty(wanted.shape, dtype=self.dtype(name))
        for chunk in self._tensors[name].chunks:
            stored = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if common := stored.meet(wanted):
                out[common.within(wanted)] = self._chunk(name, *stored)[common.within(stored)]
        return out if row is None else out[0]

    def common(self) -> dict[str, Any]:
        """Return the run's arguments in common.pt; {} without any. Raises ValueError for what is refused."""
        path = self.path / "common.pt"
        if not path.exists():
            return {}
        kinds = zipfile.BadZipFile, ValueError, OSError, NotImplementedError, RuntimeError
        with errors_as(ValueError, lambda error: f"{path} cannot be read ({error}); copy it again", *kinds):
            size = size_of(path)
            with zipfile.ZipFile(path) as file:
                (name,) = [name for name in file.namelist() if name.endswith("/data.pkl")]
                if file.getinfo(name).file_size > size:
                    raise ValueError(f"{name} is compressed, which torch.save does not do")
                data = file.read(name)
        content = unpickle(data, str(path))
        args = content.get("args") if isinstance(content, dict) else None
        if not isinstance(args, Record | None):
            raise ValueError(f"{path} has a {type(args).__name__} for the run's arguments; copy it again")
        return {} if args is None else {k: v for k, v in vars(args).items() if k not in ("args", "state")}

    def _check(self, name: str) -> None:
        """Raise ValueError unless the chunks of a tensor hold each element once; wrong types raise other errors."""
        if not isinstance(name, str) or not isinstance(self.dtype(name), torch.dtype):
            raise TypeError(f"{name!r:.80} is not the name of a tensor with a number format")
        shape, chunks = self.shape(name), self._tensors[name].chunks
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
        counts = [number for box in boxes for part in box for number in part]
        sound = (
            0 < len(shape) <= MAX_DIMS
            and all(type(number) is int and 0 <= number < MAX_COUNT for number in (*shape, *counts))
            and all(len(box.start) == len(shape) == len(box.shape) for box in boxes)
            and all((name, box.start) in self._places for box in boxes)
        )
        if not (sound and covers(shape, boxes)):
            wrong = "overlap or leave gaps" if sound else "have sizes or files that are not valid"
            why = f"the chunks of {name!r:.80} with shape {str(shape):.80} {wrong}"
            raise ValueError(f"{self.path}/.metadata: {why}; copy it again")

    def _check_bytes(self) -> None:
        """Raise ValueError if the tensors are larger than the files: a small folder takes little memory."""
        total = sum(math.prod(self.shape(name)) * self.dtype(name).itemsize for name in self._tensors)
        there = sum(path.stat().st_size for path in self.path.iterdir() if path.is_file())
        if total > there:
            raise ValueError(f"{self.path} has {there} bytes, and its .metadata tensors of {total}; copy all its files")

    def _chunk(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        info = self._places[name, begin]
        file_name = str(getattr(info, "relative_path", None))
        path = self.path / file_name
        if path.parent != self.path:
            raise ValueError(f"{self.path}/.metadata names {file_name}, which is not beside it; copy it again")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{path} is compressed; save it without stream extensions")
        line = "{}: {} cannot be read ({}); copy the file again"
        with errors_as(ValueError, lambda error: line.format(path, name, short(error)), *UNREADABLE):
            size_of(path)
            with open(path, "rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
            with limited_memory(MEMORY_BYTES + 2 * len(data)):
                tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not dense or tensor.is_nested or (tensor.dtype, tuple(tensor.shape)) != (self.dtype(name), size):
            why = "does not have the number format and shape that .metadata lists"
            raise ValueError(f"{path}: {name} {why}; copy the files of one checkpoint")
        return tensor
