"""Import weights of another format: a checkpoint of iteration 0, and beside it the model.yaml of a run that trains it.

Formats differ in names, in the order of rows and in the description of the model. A `Source` hides that: it has the
model and the number format of the weights, and reads boxes of tensors under minitron's names.

    convert_hf.py         a Hugging Face folder    reads the rows of a block
    convert_megatron.py   open_megatron            reads and rearranges one tensor at a time

The checkpoint appears whole or not at all: it is written below a temporary name (new_folder.py).
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from torch import Tensor

from minitron.checkpoint.boxes import TensorShard, row_blocks
from minitron.checkpoint.directory import begin, commit
from minitron.checkpoint.format import describe, index_bytes, index_tensors, write_shard
from minitron.config.schema import Config, ModelConfig, PrecisionConfig
from minitron.config.text import printable
from minitron.interop import hf
from minitron.interop.new_folder import new_folder, new_path
from minitron.interop.progress import progress_bar
from minitron.kernels.gemm import DTYPES

FILE_BYTES = 2 << 30  # the most that a file of a checkpoint holds
BLOCK_VALUES = 1 << 26  # elements of a tensor that are read at a time: 256 MB in float32
Item = TypeVar("Item")


class Source(NamedTuple):
    """Weights to import: the tensors of `hf.global_shapes(model)`.

    precision: the name in DTYPES of the format that holds them exactly. note: a line to print, or "".
    read(name, "param", start, shape) -> the box [start, start + shape) of a tensor.
    """

    model: ModelConfig
    precision: str
    note: str
    read: Callable[[str, str, tuple[int, ...], tuple[int, ...]], Tensor]


def add_arguments(command: argparse.ArgumentParser, source: str, help: str) -> None:
    """Add the arguments of an import: the source, with this name and help, the target and the number format."""
    command.add_argument("source", metavar=source, help=help)
    words = "new; gets the checkpoint and model.yaml"
    command.add_argument("target", type=new_path, metavar="CHECKPOINT_DIR", help=words)
    words = "number format of the weights (default: the source's)"
    command.add_argument("--dtype", choices=DTYPES, help=words)


def import_weights(
    source: Source, target: str, dtype: str | None, finish: Callable[[Path], None] = lambda folder: None
) -> None:
    """Write `source` as a checkpoint in the new folder `target`, and print how to train it.

    dtype: a name in DTYPES; None: the source's. finish(folder) adds more files. Raises ValueError.
    """
    dtype = dtype or source.precision
    shapes = hf.global_shapes(source.model)
    values = sum(map(prod, shapes.values()))
    with new_folder(target) as folder, progress_bar(values, " weights", "importing") as bar:

        def pieces() -> Iterator[TensorShard]:
            for name, whole in shapes.items():
                for start, shape in row_blocks(whole, BLOCK_VALUES):
                    tensor = source.read(name, "param", start, shape).to(DTYPES[dtype])
                    yield TensorShard(name, "param", whole, start, tensor)
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
    """Write a checkpoint of weights from one process, in files of up to FILE_BYTES. Raises CheckpointError.

    config: a whole Config as a dict. After an error nothing of it is left in `directory`.
    """
    layout = dict.fromkeys(("world", "tp", "pp", "vp", "cp", "dp"), 1)
    about = {"iteration": iteration, "consumed_samples": 0, "config": config, "state": {}, "layout": layout}
    temporary, files, described = begin(directory, iteration, 0), {}, []
    try:
        for group in in_files(pieces, lambda piece: piece.tensor.nbytes, FILE_BYTES):
            name = f"part_{len(files):05d}.safetensors"
            files |= write_shard(temporary / name, group)
            described.append(describe(name, group))
        commit(temporary, index_bytes(about, files), index_tensors(described))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # it has another name if it was committed


def in_files(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Group items, in their order, into files of at most `most` bytes, or of one item."""
    group: list[Item] = []
    used = 0
    for item in items:
        if group and used + size_of(item) > most:
            yield group
            group, used = [], 0
        group.append(item)
        used += size_of(item)
    if group:
        yield group
