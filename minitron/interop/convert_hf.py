"""Hugging Face weights to a minitron checkpoint, and back: Llama, Mistral, Qwen and GPT-2, one tensor at a time.

    python tools/convert_hf.py import Llama-3.1-8B checkpoints/llama31
    python -m minitron.pretrain checkpoints/llama31/model.yaml checkpoint.load=checkpoints/llama31 data.source=...
    python tools/convert_hf.py export checkpoints/run7 Llama-3.1-8B-trained
    python tools/convert_hf.py export checkpoints/lora7 Llama-3.1-8B-lora --adapter

Import writes a weights-only checkpoint in the number format of the source, and beside it model.yaml, the model section
of a configuration that trains it. Export reads any checkpoint, saved in any layout, and writes config.json
and safetensors that transformers' from_pretrained loads; a LoRA checkpoint's adapters are merged into the weights that
they were trained beside. With --adapter they are written alone, as PEFT's PeftModel.from_pretrained loads them. All
write under a temporary name first: an error or Ctrl-C leaves nothing.

Tokenizers go along: an import keeps the source's files, an export writes those, or the run's own (hf_tokenizer.py).

Left out: the source's dropout, a choice of each run; an import prints it, an export writes the run's.
"""

import argparse
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from minitron.checkpoint.boxes import row_blocks
from minitron.checkpoint.format import header
from minitron.checkpoint.load import check_tensors
from minitron.config.command import Parser, positive
from minitron.config.files import write_json
from minitron.config.schema import ModelConfig
from minitron.config.text import printable
from minitron.interop import hf, hf_tokenizer
from minitron.interop import hf_write as hf_export
from minitron.interop.import_weights import BLOCK_VALUES, Source, add_arguments, import_weights, in_files
from minitron.interop.new_folder import new_folder, new_path
from minitron.interop.progress import progress_bar
from minitron.interop.weights import MergedAdapter, best_kind, config_of, open_weights
from minitron.kernels.gemm import DTYPES


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    importer = commands.add_parser("import", help="HF_FOLDER CHECKPOINT_DIR: Hugging Face to minitron")
    add_arguments(importer, "HF_FOLDER", "with config.json and safetensors")
    words, default = "pad the vocabulary to a multiple of N, so that parallel.tp divides it", ModelConfig.vocab_multiple
    importer.add_argument("--vocab-multiple", type=int, default=default, metavar="N", help=f"{words} (%(default)s)")
    exporter = commands.add_parser("export", help="CHECKPOINT_DIR HF_FOLDER: minitron to Hugging Face")
    add = exporter.add_argument
    add("source", metavar="CHECKPOINT_DIR", help="the newest in it, or one step_... folder")
    add("target", type=new_path, metavar="HF_FOLDER", help="new")
    add("--max-shard-gb", type=positive(float), default=5.0, metavar="GB", help="size of a file (%(default)s)")
    add("--base", metavar="FOLDER", help="LoRA: where the frozen weights are now")
    add("--adapter", action="store_true", help="LoRA: write only the adapters, in PEFT's format")
    add(
        "--hf-base",
        metavar="HF_FOLDER",
        help="with --adapter: where PEFT finds the base (default: the base, if it is such a folder)",
    )
    add("--tokenizer", metavar="SPEC", help="as data.tokenizer (default: that of the weights' source, or the run's)")
    add("--dtype", choices=DTYPES, help="number format of the weights (default: that of training, or of the import)")
    options = parser.parse_args(argv)
    if options.command == "import":
        reader = hf.FolderReader(options.source, options.vocab_multiple)
        source = Source(reader.model, reader.precision, reader.note, reader.read)
        import_weights(source, options.target, options.dtype, partial(hf_tokenizer.keep, reader.path))
    elif options.adapter:
        export_adapter(options.source, options.target, options.dtype, options.base, options.hf_base)
    else:
        max_bytes = int(options.max_shard_gb * 1e9)
        export_folder(options.source, options.target, options.dtype, max_bytes, options.base, options.tokenizer)


def export_folder(
    source: str, target: str, dtype: str | None, max_bytes: int, base: str | None, tokenizer: str | None = None
) -> None:
    """Write config.json, safetensors and the tokenizer to `target`. Raises ValueError for what cannot be converted."""
    reader = open_weights(source, base=base)
    if isinstance(reader, hf.FolderReader):
        raise ValueError(f"{source} is a Hugging Face folder already; name a minitron checkpoint")
    cfg = config_of(reader)
    dtype = dtype or cfg.precision.dtype
    settings = hf_export.settings_of(cfg.model, dtype)
    shapes = {name: list(shape) for name, shape in hf.global_shapes(cfg.model).items()}
    check_tensors(reader, shapes, "only models of Hugging Face's families can be exported")
    reader.verify()

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        for (row, *rest), block in row_blocks(shape, BLOCK_VALUES):
            tensor[row : row + block[0]] = reader.read(name, best_kind(reader, name), (start[0] + row, *rest), block)
        return tensor

    with new_folder(target) as folder:
        write_model(folder, cfg.model, DTYPES[dtype], hf_export.export(cfg.model, read), max_bytes)
        ids, words = hf_tokenizer.write_tokenizer(folder, reader, cfg.model.vocab_size, tokenizer)
        settings |= {key: value for key, value in ids.items() if key.endswith("_token_id")}
        write_json(folder / "config.json", settings)
    print(
        f"iteration {reader.iteration} in {dtype}, {printable(words)}; to load it:\n"
        f"transformers.AutoModelForCausalLM.from_pretrained({target!r})"
    )


def export_adapter(source: str, target: str, dtype: str | None, base: str | None, hf_base: str | None) -> None:
    """Write adapter_config.json and adapter_model.safetensors to `target`. Raises ValueError without an adapter."""
    reader = open_weights(source, base=base)
    if not isinstance(reader, MergedAdapter):
        raise ValueError(f"{source} holds no adapter; leave --adapter out, or name a checkpoint of finetune.kind=lora")
    reader.adapter.verify()
    settings, tensors = hf_export.peft(reader, hf_export.peft_base(reader, hf_base))
    dtype = dtype or reader.cfg.precision.dtype
    with new_folder(target) as folder:
        tensors = {name: tensor.to(DTYPES[dtype]).clone() for name, tensor in tensors}
        whole = save(tensors, metadata={"format": "pt"})  # with save_file no other user could read it
        (folder / "adapter_model.safetensors").write_bytes(whole)
        write_json(folder / "adapter_config.json", settings)
    print(
        f"{len(tensors) // 2} adapters of iteration {reader.iteration} in {dtype}; to load them:\n"
        f"peft.PeftModel.from_pretrained(model, {target!r})"
    )


def write_model(
    folder: Path, model: ModelConfig, dtype: torch.dtype, tensors: Iterator[tuple[str, Tensor]], max_bytes: int
) -> None:
    """Write safetensors files of at most `max_bytes`, or of one tensor, with an index if they are several."""
    parts = [part for stack in hf.tensor_map(model).values() for part in stack]
    sizes = {part.name: math.prod(part.shape) * dtype.itemsize for part in parts}
    shards, total = list(in_files(parts, lambda part: sizes[part.name], max_bytes)), sum(sizes.values())
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        places = {part.name: file for file, shard in zip(files, shards) for part in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(folder / "model.safetensors.index.json", index)
    with progress_bar(total, "B", "exporting") as bar:
        for file, shard in zip(files, shards):
            with open(folder / file, "xb") as out:
                out.write(header(((part.name, dtype, part.stored) for part in shard), format="pt"))
                for part in shard:
                    name, tensor = next(tensors)
                    assert name == part.name and tensor.shape == part.stored
                    out.write(tensor.view(torch.uint8).numpy())
                    bar.update(tensor.nbytes)
