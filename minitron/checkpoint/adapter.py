"""Adapters and the weights that they belong to: one model again.

Problem: a LoRA checkpoint holds adapters alone, a thousandth of the model, and is useless with other weights than those
it was trained with. The idea: it records these weights, by their path and by a fingerprint of their values; and
`open_weights` reads a model from a Hugging Face folder, a checkpoint, or a LoRA checkpoint through one interface.

    open_weights("runs/lora").read("blocks.0.attention.qkv.weight", ...)       W + alpha/r B A, computed box by box

The fingerprint is a hash of the first row of every tensor: little to read, the same for a Hugging Face folder and the
checkpoint that was imported from it, and another one after a step of training, which changes every row that it uses.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from minitron.checkpoint import hf
from minitron.checkpoint.directory import newest
from minitron.checkpoint.format import CheckpointError, disk_errors
from minitron.checkpoint.reader import Reader
from minitron.config import cli
from minitron.config.schema import Config, ModelConfig
from minitron.config.sizes import adapted


def open_weights(
    path: str, base: str | None = None, vocab_multiple: int = ModelConfig.vocab_multiple, key: str = ""
) -> Weights:
    """Open the model in a folder, with the read interface of `reader.Reader`.

    base: where an adapter's weights are now, None: at the path that its checkpoint records. vocab_multiple: how a
    Hugging Face folder's vocabulary is padded. key: who named the folder, for errors. Raises CheckpointError.
    """
    folder = Path(os.path.expanduser(path))
    with disk_errors(folder):
        foreign, own = ((folder / name).exists() for name in ("config.json", "index.json"))
    if not foreign and not own and newest(folder) is None:
        raise CheckpointError(f"{key}{folder} holds no weights; name a Hugging Face folder or a minitron checkpoint")
    reader = hf.FolderReader(folder, vocab_multiple) if foreign else Reader(folder)
    if reader.config.get("finetune", {}).get("kind") != "lora":
        if base is not None:
            raise CheckpointError(f"base={base} is for adapters, and {folder} holds a whole model; leave it out")
        return reader
    cfg = config_of(reader)
    base = base or base_of(cfg)
    if base is None:
        raise CheckpointError(f"{reader.path} holds an adapter and does not say of which weights; name their folder")
    key = f"the base of the adapter in {reader.path}: "
    return Merged(reader, cfg, open_weights(base, vocab_multiple=cfg.model.vocab_multiple, key=key))


def base_of(cfg: Config) -> str | None:
    """Return the folder of the weights that a run starts from; None if it starts from none."""
    return cfg.checkpoint.load if cfg.finetune.base is None else cfg.finetune.base


def config_of(reader: Reader) -> Config:
    """Return the configuration that a checkpoint was saved with, as far as weights depend on it."""
    sections = ("model", "precision", "finetune", "lora")
    tree = {name: reader.config[name] for name in sections if name in reader.config}
    tree |= {"checkpoint": {"load": reader.config.get("checkpoint", {}).get("load")}}
    return cli.from_tree(tree, str(reader.index))


def best_kind(reader: Weights, name: str) -> str | None:
    """Return the most exact of the kinds in which a tensor is stored; None if it is no weight."""
    return next((kind for kind in ("master", "param") if kind in reader.kinds(name)), None)


def fingerprint(reader: Weights) -> str:
    """Hash the values of a model to 16 hex digits."""
    digest = hashlib.sha256()
    if isinstance(reader, Merged):  # not of sums, whose last bit differs from machine to machine
        digest.update(reader.mark.encode())
        reader = reader.adapter
    for name in sorted(reader.names()):
        if kind := best_kind(reader, name):
            shape = reader.shape(name)
            part = reader.read(name, kind, (0,) * len(shape), shape if len(shape) == 1 else (1, *shape[1:]))
            digest.update(f"{name} {shape}".encode() + part.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_base(adapter: Reader, base: Weights, mark: str) -> None:
    """Raise CheckpointError unless the adapter was trained beside these weights. mark: their fingerprint."""
    if adapter.state.get("base") != mark:
        why = f"its weights had the fingerprint {adapter.state.get('base')}, and {base.path} has {mark}"
        raise CheckpointError(f"{adapter.path} holds an adapter of another model: {why}; name the former as the base")


class LowRank(NamedTuple):
    """One target's product within a weight: rows from `start` on are scale * b @ a[columns]."""

    start: int
    size: int
    b: str
    columns: slice


class Merged:
    """An adapter's checkpoint and its base as one model. Raises CheckpointError if they do not belong together."""

    def __init__(self, adapter: Reader, cfg: Config, base: Weights):
        self.mark = fingerprint(base)
        check_base(adapter, base, self.mark)
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

    def factors(self, name: str, part: LowRank, outputs: slice, scaled: bool = True) -> tuple[Tensor, Tensor]:
        """Read A [rank, k] and some rows of B [rows, rank] of a weight, float32; scaled: multiply B by alpha/r."""
        a, b = (whole(self.adapter, name.removesuffix("weight") + f"adapter.{x}") for x in ("a", f"b.{part.b}"))
        return a[part.columns], b[outputs] * (self.cfg.lora.scale if scaled else 1.0)

    def verify(self) -> None:
        """Verify all files that have a checksum. Raises CheckpointError."""
        self.adapter.verify()
        self.base.verify()

    def parts_of(self, name: str) -> list[LowRank]:
        """Return the targets' products within a weight; an empty list if it has no adapter."""
        match, rank = re.fullmatch(r"blocks\.\d+\.(.+)\.weight", name), self.cfg.lora.rank
        spans = enumerate(self.targets.get(match[1], {}).items() if match else ())
        return [LowRank(span.start, span.size, target, slice(i * rank, (i + 1) * rank)) for i, (target, span) in spans]


Weights = Reader | hf.FolderReader | Merged


def whole(reader: Reader, name: str) -> Tensor:
    """Read all of a tensor in float32."""
    return reader.read(name, best_kind(reader, name), (0,) * len(reader.shape(name)), reader.shape(name)).float()
