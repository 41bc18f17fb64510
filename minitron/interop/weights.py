"""Read an adapter and the weights that it was trained beside as one model.

Problem: a LoRA checkpoint holds adapters alone, a thousandth of the model, and is useless with other weights than those
it was trained with. The idea: it records their path and a fingerprint of their values. `open_weights` opens a model
from a Hugging Face folder, a checkpoint, or a LoRA checkpoint through one interface.

    open_weights("runs/lora").read("blocks.0.attention.qkv.weight", ...)       W + alpha/r B A, computed box by box
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from minitron.checkpoint.directory import newest
from minitron.checkpoint.format import CheckpointError, disk_errors
from minitron.checkpoint.load import check_tensors
from minitron.checkpoint.reader import Reader
from minitron.checkpoint.weights import Weights, base_of, best_kind, check_base, config_of, fingerprint
from minitron.config.files import errors_as
from minitron.config.schema import Config, ModelConfig
from minitron.config.sizes import adapted, linear_sizes
from minitron.interop import hf


def open_weights(
    path: str, vocab_multiple: int = ModelConfig.vocab_multiple, key: str = "", base: str | None = None
) -> Weights:
    """Open the model in a folder, with the read interface of `reader.Reader`.

    base: the folder of an adapter's weights; None: the path that its checkpoint records. vocab_multiple: how a Hugging
    Face folder's vocabulary is padded. key: what named the folder, for errors. Raises CheckpointError.
    """
    folder = Path(os.path.expanduser(path))
    with disk_errors(folder):
        foreign, own = ((folder / name).exists() for name in ("config.json", "index.json"))
    if not foreign and not own and newest(folder) is None:
        raise CheckpointError(f"{key}{folder} holds no weights; name a Hugging Face folder or a minitron checkpoint")
    reader = hf.FolderReader(folder, vocab_multiple) if foreign else Reader(folder)
    cfg = config_of(reader)
    if cfg.finetune.kind != "lora":
        if base is not None:
            raise CheckpointError(f"base={base} is for adapters, and {folder} holds a whole model; leave it out")
        return reader
    base = base or base_of(cfg)
    if base is None:
        raise CheckpointError(f"{reader.path} holds an adapter without the path of its weights; name their folder")
    key = f"the base of the adapter in {reader.path}: "
    with errors_as(CheckpointError, lambda error: f"{error}; tools take another place by --base", CheckpointError):
        frozen = open_weights(base, vocab_multiple=cfg.model.vocab_multiple, key=key)
    return MergedAdapter(reader, cfg, frozen)


class AdapterRows(NamedTuple):
    """One target's product within a weight: rows from `start` on are scale * b @ a[columns]."""

    start: int
    size: int
    b: str
    columns: slice


def factors_of(cfg: Config) -> dict[str, list[int]]:
    """Map the name of every adapter's factor to its whole shape."""
    found, rank, sizes = {}, cfg.lora.rank, linear_sizes(cfg.model)
    for layer, spans in adapted(cfg.model, cfg.lora.targets).items():
        for i in range(cfg.model.num_layers) if spans else ():
            found[f"blocks.{i}.{layer}.adapter.a"] = [len(spans) * rank, sizes[layer][0]]
            found |= {f"blocks.{i}.{layer}.adapter.b.{target}": [span.size, rank] for target, span in spans.items()}
    return found


def read_float32(reader: Weights, name: str) -> Tensor:
    """Read all of a tensor in float32."""
    return reader.read(name, best_kind(reader, name), (0,) * len(reader.shape(name)), reader.shape(name)).float()


class MergedAdapter(Weights):
    """An adapter's checkpoint and its base as one model. Raises CheckpointError if they do not belong together."""

    def __init__(self, adapter: Reader, cfg: Config, base: Weights):
        self.base_fingerprint = fingerprint(base)
        check_base(adapter, base, self.base_fingerprint)
        check_tensors(adapter, factors_of(cfg))
        self.adapter, self.base, self.cfg = adapter, base, cfg
        self.path, self.index, self.iteration = adapter.path, adapter.index, adapter.iteration
        self.config, self.state = adapter.config, adapter.state
        self.targets = adapted(cfg.model, cfg.lora.targets)

    def names(self) -> list[str]:
        return [name for name in self.base.names() if best_kind(self.base, name)]

    def kinds(self, name: str) -> list[str]:
        return ["param"] if best_kind(self.base, name) else []

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name)

    def read(self, name: str, kind: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Read any box of a weight; in float32 if something is merged into it."""
        box, parts = self.base.read(name, best_kind(self.base, name), start, shape), self.parts_of(name)
        box = box.float() if parts else box
        for part in parts:
            first, last = max(start[0], part.start), min(start[0] + shape[0], part.start + part.size)
            if first < last:
                a, b = self.factors(name, part, slice(first - part.start, last - part.start))
                box[first - start[0] : last - start[0]] += b @ a[:, start[1] : start[1] + shape[1]]
        return box

    def factors(self, name: str, part: AdapterRows, outputs: slice, scaled: bool = True) -> tuple[Tensor, Tensor]:
        """Read A [rank, k] and some rows of B [rows, rank] of a weight, float32; scaled: multiply B by alpha/r."""
        a, b = (read_float32(self.adapter, name.removesuffix("weight") + f"adapter.{x}") for x in ("a", f"b.{part.b}"))
        return a[part.columns], b[outputs] * (self.cfg.lora.scale if scaled else 1.0)

    def identity(self) -> tuple[str, Weights]:
        """Return the base's fingerprint and the adapter: merged sums differ in their last bit between machines."""
        return self.base_fingerprint, self.adapter

    def verify(self) -> None:
        """Verify all files that have a checksum. Raises CheckpointError."""
        self.adapter.verify()
        self.base.verify()

    def parts_of(self, name: str) -> list[AdapterRows]:
        """Return the targets' products within a weight; an empty list if it has no adapter."""
        match, rank = re.fullmatch(r"blocks\.\d+\.(.+)\.weight", name), self.cfg.lora.rank
        spans = enumerate(self.targets.get(match[1], {}).items() if match else ())
        return [
            AdapterRows(span.start, span.size, target, slice(i * rank, (i + 1) * rank)) for i, (target, span) in spans
        ]
