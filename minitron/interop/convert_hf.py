"""Hugging Face weights to a minitron checkpoint, and back: Llama 2, 3, 3.1 and GPT-2, one tensor in memory at a time.

    python tools/convert_hf.py import Llama-3.1-8B checkpoints/llama31
    python -m minitron.pretrain checkpoints/llama31/model.yaml checkpoint.load=checkpoints/llama31 data.source=...
    python tools/convert_hf.py export checkpoints/run7 Llama-3.1-8B-trained
    python tools/convert_hf.py export checkpoints/lora7 Llama-3.1-8B-lora --adapter

Import writes a weights-only checkpoint in the number format of the source, and beside it model.yaml, the model section
of a configuration that trains it.  Export reads any checkpoint, in whatever layout it was saved, and writes config.json
and safetensors that transformers' from_pretrained loads; a LoRA checkpoint's adapters are merged into the weights that
they were trained beside, or with --adapter written alone, as PEFT's PeftModel.from_pretrained loads them.  All write
under a temporary name first: an error or Ctrl-C leaves nothing.

Tokenizers go along: an import keeps the source's files, an export writes those, or the run's own (hf_tokenizer.py).

Left out: the source's dropout, a choice of each run; an import says what it was, an export names the run's.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from minitron.checkpoint.boxes import Box, Piece
from minitron.checkpoint.directory import begin, commit
from minitron.checkpoint.format import Description, describe, header, index_bytes, index_tensors, write_shard
from minitron.config.command import Parser, new_folder
from minitron.config.schema import Config, ModelConfig, PrecisionConfig
from minitron.config.text import printable
from minitron.interop import hf, hf_tokenizer
from minitron.interop import hf_write as hf_export
from minitron.interop.weights import Merged, Weights, best_kind, config_of, open_weights
from minitron.kernels.gemm import DTYPES

SHARD_BYTES = 2 << 30  # at which a Writer begins another file
BLOCK_VALUES = 1 << 26  # of a tensor, read at a time: 256 MB in float32


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    importer = commands.add_parser("import", help="HF_FOLDER CHECKPOINT_DIR: Hugging Face to minitron")
    importer.add_argument("source", metavar="HF_FOLDER", help="with config.json and safetensors")
    importer.add_argument("target", metavar="CHECKPOINT_DIR", help="new; gets the checkpoint and model.yaml")
    importer.add_argument(
        "--vocab-multiple",
        type=int,
        default=ModelConfig.vocab_multiple,
        metavar="N",
        help="pad the vocabulary to a multiple of N, so that parallel.tp divides it (%(default)s)",
    )
    exporter = commands.add_parser("export", help="CHECKPOINT_DIR HF_FOLDER: minitron to Hugging Face")
    exporter.add_argument("source", metavar="CHECKPOINT_DIR", help="the newest in it, or one step_... folder")
    exporter.add_argument("target", metavar="HF_FOLDER", help="new")
    exporter.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB", help="size of a file (%(default)s)")
    exporter.add_argument("--base", metavar="FOLDER", help="of LoRA: where the frozen weights are now")
    exporter.add_argument("--adapter", action="store_true", help="of LoRA: the adapters alone, in PEFT's format")
    exporter.add_argument(
        "--tokenizer", metavar="SPEC", help="as data.tokenizer (that of the weights' source, or the run's)"
    )
    for command, default in (importer, "as the source has them"), (exporter, "those of training, or of the import"):
        command.add_argument("--dtype", choices=DTYPES, help=f"number format of the weights ({default})")
    options = parser.parse_args(argv)
    if os.path.exists(options.target):
        raise ValueError(f"{options.target} exists already; delete it or name a new folder")
    if options.command == "import":
        import_folder(options.source, options.target, options.dtype, options.vocab_multiple)
    elif options.adapter:
        export_adapter(options.source, options.target, options.dtype, options.base)
    elif not 0 < options.max_shard_gb < math.inf:
        raise ValueError(f"--max-shard-gb={options.max_shard_gb:g} is no size of a file; use 5 or so")
    else:
        export_folder(
            options.source,
            options.target,
            options.dtype,
            int(options.max_shard_gb * 1e9),
            options.base,
            options.tokenizer,
        )


class Writer(contextlib.AbstractContextManager):
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
        self.files: dict[str, dict] = {}
        self.described: list[list[Description]] = []

    def add(self, name: str, kind: str, whole: Sequence[int], start: Sequence[int], tensor: Tensor) -> None:
        """Take the box of `name`, of shape `whole`, that begins at `start`. The tensor must not change afterwards."""
        self.waiting.append(Piece(name, kind, tuple(whole), tuple(start), tensor))
        if sum(piece.tensor.nbytes for piece in self.waiting) >= SHARD_BYTES:
            self._flush()

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._flush()
                commit(self.temporary, index_bytes(self.about, self.files), index_tensors(self.described))
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)  # not there if it was committed

    def _flush(self) -> None:
        name = f"part_{len(self.files):05d}.safetensors"
        self.files |= write_shard(self.temporary / name, self.waiting)
        self.described.append(describe(name, self.waiting))
        self.waiting = []


def import_folder(source: str, target: str, dtype: str | None, vocab_multiple: int) -> None:
    """A checkpoint of iteration 0 and model.yaml in `target`.  Raises ValueError for what cannot be converted."""
    reader = hf.FolderReader(source, vocab_multiple)
    shapes = {name: reader.shape(name) for name in reader.names()}
    dtype = dtype or reader.precision
    config, values = Config(model=reader.model, precision=PrecisionConfig(dtype)), sum(map(math.prod, shapes.values()))
    with new_folder(target) as folder, tqdm(total=values, unit=" weights", unit_scale=True, desc="importing") as bar:
        with Writer(folder, 0, asdict(config)) as writer:
            for name, shape in shapes.items():
                for start, box in row_blocks(shape):
                    tensor = reader.read(name, "param", start, box).to(DTYPES[dtype])
                    writer.add(name, "param", shape, start, tensor)
                    bar.update(tensor.numel())
        (folder / "model.yaml").write_text(yaml.safe_dump({"model": asdict(reader.model)}, sort_keys=False))
        hf_tokenizer.keep(Path(source), folder)
    if reader.note:
        print(printable(reader.note))
    print(
        f"{values:,} weights of a {reader.model.family} model in {dtype}; to train them:\n"
        f"python -m minitron.pretrain {printable(Path(target, 'model.yaml'))} "
        f"checkpoint.load={printable(target)} data.source=..."
    )


def export_folder(
    source: str, target: str, dtype: str | None, max_bytes: int, base: str | None, tokenizer: str | None = None
) -> None:
    """config.json, safetensors and the tokenizer in `target`.  Raises ValueError for what cannot be converted."""
    reader = open_weights(source, base=base)
    if isinstance(reader, hf.FolderReader):
        raise ValueError(f"{source} is a Hugging Face folder already; name a minitron checkpoint")
    cfg = config_of(reader)
    dtype = dtype or cfg.precision.dtype
    settings, kinds = hf_export.settings_of(cfg.model, dtype), check_tensors(reader, cfg.model)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        for (row, *rest), block in row_blocks(shape):
            tensor[row : row + block[0]] = reader.read(name, kinds[name], (start[0] + row, *rest), block)
        return tensor

    with new_folder(target) as folder:
        write_model(folder, cfg.model, DTYPES[dtype], hf_export.export(cfg.model, read), max_bytes)
        ids, words = hf_tokenizer.write_tokenizer(folder, reader, cfg.model.vocab_size, tokenizer)
        settings |= {key: value for key, value in ids.items() if key.endswith("_token_id")}
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(
        f"iteration {reader.iteration} in {dtype}, {printable(words)}; to load it:\n"
        f"transformers.AutoModelForCausalLM.from_pretrained({target!r})"
    )


def export_adapter(source: str, target: str, dtype: str | None, base: str | None) -> None:
    """adapter_config.json and adapter_model.safetensors in `target`.  Raises ValueError for what is no adapter."""
    reader = open_weights(source, base=base)
    if not isinstance(reader, Merged):
        raise ValueError(f"{source} holds no adapter; leave --adapter out, or name a checkpoint of finetune.kind=lora")
    reader.adapter.verify()
    (settings, tensors), dtype = hf_export.peft(reader), dtype or reader.cfg.precision.dtype
    with new_folder(target) as folder:
        tensors = {name: tensor.to(DTYPES[dtype]).clone() for name, tensor in tensors}
        whole = save(tensors, metadata={"format": "pt"})  # save_file would let nobody else read it
        (folder / "adapter_model.safetensors").write_bytes(whole)
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(
        f"{len(tensors) // 2} adapters of iteration {reader.iteration} in {dtype}; to load them:\n"
        f"peft.PeftModel.from_pretrained(model, {target!r})"
    )


def check_tensors(reader: Weights, model: ModelConfig) -> dict[str, str]:
    """The most exact kind of every tensor.

    Raises ValueError unless they are the model's, no more and no less, and the bytes those that were saved.
    """
    best = {name: best_kind(reader, name) for name in reader.names()}
    have = {name: reader.shape(name) for name, kind in best.items() if kind}
    wanted = hf.global_shapes(model)
    for name in sorted(have.keys() | wanted.keys()):
        if have.get(name) != wanted.get(name):
            raise ValueError(
                f"{reader.path}: {name} has shape {have.get(name)}, and {wanted.get(name)} in the Hugging "
                "Face model that its configuration describes; only such models can be exported"
            )
    if isinstance(reader, Merged):
        reader.verify()
    else:
        reader.verify(
            sorted(
                {
                    file
                    for name, shape in have.items()
                    for file in reader.files_of(name, best[name], Box((0,) * len(shape), shape))
                }
            )
        )
    return {name: best[name] for name in have}


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, shape) of blocks of whole rows, BLOCK_VALUES at most in each, that make up a tensor."""
    rows = max(1, BLOCK_VALUES // math.prod(shape[1:]))
    for row in range(0, shape[0], rows):
        yield (row, *(0 for _ in shape[1:])), (min(rows, shape[0] - row), *shape[1:])


def write_model(
    folder: Path, model: ModelConfig, dtype: torch.dtype, tensors: Iterator[tuple[str, Tensor]], max_bytes: int
) -> None:
    """Safetensors files of at most `max_bytes`, or of one tensor, with an index if they are several."""
    parts = [part for stack in hf.tensor_map(model).values() for part in stack]
    sizes = {part.name: math.prod(part.shape) * dtype.itemsize for part in parts}
    shards, used = [[]], 0
    for part in parts:
        if shards[-1] and used + sizes[part.name] > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(part)
        used += sizes[part.name]
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        places = {part.name: file for file, shard in zip(files, shards, strict=True) for part in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc="exporting") as bar:
        for file, shard in zip(files, shards, strict=True):
            with open(folder / file, "xb") as out:
                out.write(header(((part.name, dtype, part.stored) for part in shard), format="pt"))
                for part in shard:
                    name, tensor = next(tensors)
                    assert name == part.name and tensor.shape == part.stored
                    out.write(tensor.view(torch.uint8).numpy())
                    bar.update(tensor.nbytes)
