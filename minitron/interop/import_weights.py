"""Import weights of another format: a checkpoint of iteration 0, and beside it the model.yaml of a run that trains it.

Formats differ in names, in the order of rows and in what describes the model. The reader of a format hides that: it
returns the model, the number format of the weights, and boxes of tensors under minitron's names.

    convert_hf.py        FolderReader       hf.py                 reads the rows of a block
    convert_megatron.py  MegatronWeights    convert_megatron.py   reads and rearranges one tensor at a time

The checkpoint appears whole or not at all: it is written below a temporary name (`config.command.new_folder`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, Protocol

import yaml
from torch import Tensor
from tqdm import tqdm

from minitron.checkpoint.boxes import TensorShard, row_blocks
from minitron.checkpoint.directory import begin, commit
from minitron.checkpoint.format import describe, index_bytes, index_tensors, write_shard
from minitron.config.command import new_folder
from minitron.config.schema import Config, ModelConfig, PrecisionConfig
from minitron.config.text import printable
from minitron.kernels.gemm import DTYPES

FILE_BYTES = 2 << 30  # at which the next file of a checkpoint begins
BLOCK_VALUES = 1 << 26  # of a tensor, read at a time: 256 MB in float32


class Source(Protocol):
    """Weights to import. precision: the format, of DTYPES, that holds all of them exactly. note: a line to print."""

    model: ModelConfig
    precision: str
    note: str

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, kind: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Read the box [start, start + shape) of a tensor; the kind is "param"."""


def import_weights(
    source: Source, target: str, dtype: str | None, finish: Callable[[Path], None] = lambda folder: None
) -> None:
    """Write `source` as a checkpoint in the new folder `target`, and print how to train it.

    dtype: of DTYPES; None: that of the source. finish(folder) adds more files. Raises ValueError.
    """
    dtype = dtype or source.precision
    values = sum(prod(source.shape(name)) for name in source.names())
    with new_folder(target) as folder, tqdm(total=values, unit=" weights", unit_scale=True, desc="importing") as bar:

        def pieces() -> Iterator[TensorShard]:
            for name in source.names():
                for start, shape in row_blocks(source.shape(name), BLOCK_VALUES):
                    tensor = source.read(name, "param", start, shape).to(DTYPES[dtype])
                    yield TensorShard(name, "param", source.shape(name), start, tensor)
                    bar.update(tensor.numel())

        write_checkpoint(folder, asdict(Config(model=source.model, precision=PrecisionConfig(dtype))), pieces())
        (folder / "model.yaml").write_text(yaml.safe_dump({"model": asdict(source.model)}, sort_keys=False))
        finish(folder)
    if source.note:
        print(printable(source.note))
    print(
        f"{values:,} weights of a {source.model.family} model in {dtype}; to train them:\n"
        f"python -m minitron.pretrain {printable(Path(target, 'model.yaml'))} "
        f"checkpoint.load={printable(target)} data.source=..."
    )


def write_checkpoint(
    directory: Path, config: dict[str, Any], pieces: Iterable[TensorShard], iteration: int = 0
) -> None:
    """Write a checkpoint of weights from one process, in files of about FILE_BYTES. Raises CheckpointError.

    config: a whole Config as a dict. After an error nothing of it is left in `directory`.
    """
    layout = dict.fromkeys(("world", "tp", "pp", "vp", "cp", "dp"), 1)
    about = {"iteration": iteration, "consumed_samples": 0, "config": config, "state": {}, "layout": layout}
    temporary, files, described = begin(directory, iteration, 0), {}, []
    try:
        for group in _by_file(pieces):
            name = f"part_{len(files):05d}.safetensors"
            files |= write_shard(temporary / name, group)
            described.append(describe(name, group))
        commit(temporary, index_bytes(about, files), index_tensors(described))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # it has another name if it was committed


def _by_file(pieces: Iterable[TensorShard]) -> Iterator[list[TensorShard]]:
    """Group pieces, in their order, into lists of FILE_BYTES or slightly more."""
    group: list[TensorShard] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += piece.tensor.nbytes
        if size >= FILE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
