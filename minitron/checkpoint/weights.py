"""The weights that a run starts from: one interface for all formats, and what identifies a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.reader import Reader
from minitron.config import cli
from minitron.config.schema import Config


class Weights(Protocol):
    """An open model: a checkpoint of minitron's own (reader.py), or another format (interop/).

    path, index: its folder and the file that describes it. config: the configuration it was saved with. note: a line
    for the log, or "". Names are those of minitron's parameters, shapes those of global tensors. A tensor is stored
    under one or more kinds.
    """

    path: Path
    index: Path
    config: dict[str, Any]
    note: str = ""

    def names(self) -> list[str]: ...

    def kinds(self, name: str) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, kind: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read the box [start, start + shape) of a tensor."""

    def verify(self) -> None:
        """Verify all files that have a checksum. Raises CheckpointError."""

    def identity(self) -> tuple[str, Weights]:
        """Return (prefix, weights), which `fingerprint` hashes. prefix: an adapter's base_fingerprint, else ""."""
        return "", self


def base_of(cfg: Config) -> str | None:
    """Return the folder of the weights that a run starts from; None if it starts from none."""
    return cfg.checkpoint.load if cfg.finetune.base is None else cfg.finetune.base


def config_of(reader: Weights) -> Config:
    """Return the configuration that weights were saved with, as far as these and their tokens depend on it.

    A key that is missing has its default. Raises CheckpointError for a missing section, and ValueError for a value that
    its key cannot have.
    """
    for name in ("model", "precision", "data"):
        if name not in reader.config:
            raise CheckpointError(f"{reader.index} has no config.{name}, which every save has; copy the file again")
    tree = {name: reader.config.get(name, {}) for name in ("model", "precision", "finetune", "lora")}
    for section, key in (("data", "tokenizer"), ("checkpoint", "load")):
        found = reader.config.get(section, {})
        tree[section] = {key: found[key]} if key in found else {}
    return cli.from_tree(tree, str(reader.index))


def best_kind(reader: Weights, name: str) -> str:
    """Return the most exact of the kinds under which a tensor is stored; "" if it is not a weight."""
    return next((kind for kind in ("master", "param") if kind in reader.kinds(name)), "")


def fingerprint(reader: Weights) -> str:
    """Hash the first row of every tensor to 16 hex digits.

    It is cheap to read and changes with every step of training. A Hugging Face folder and the checkpoint imported from
    it have the same.
    """
    prefix, reader = reader.identity()
    digest = hashlib.sha256(prefix.encode())
    for name in sorted(reader.names()):
        if kind := best_kind(reader, name):
            shape = reader.shape(name)
            part = reader.read(name, kind, (0,) * len(shape), shape if len(shape) == 1 else (1, *shape[1:]))
            digest.update(f"{name} {shape}".encode() + part.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_base(adapter: Reader, base: Weights, base_fingerprint: str | None) -> None:
    """Raise CheckpointError unless the adapter was trained beside these weights, which have this fingerprint."""
    if (trained := adapter.state.get("base")) != base_fingerprint:
        why = f"its weights had the fingerprint {trained}, and {base.path} has {base_fingerprint}"
        raise CheckpointError(f"{adapter.path} holds an adapter of another model: {why}; name the former as the base")
