"""The weights that a run starts from: one interface for all formats, and what identifies a model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from minitron.checkpoint.format import CheckpointError
from minitron.config import cli
from minitron.config.schema import Config


class Weights(Protocol):
    """An open model: a checkpoint of minitron's own (reader.py), or another format (interop/).

    path, index: its folder and the file that describes it. config: what it was saved with. note: a
    line for the log, or "". A tensor is stored in one or
    more kinds; names are those of minitron's parameters, shapes those of whole tensors.
    """

    path: Path
    index: Path
    config: dict[str, Any]
    note: str

    def names(self) -> list[str]: ...

    def kinds(self, name: str) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, kind: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Read the box [start, start + shape) of a tensor."""

    def verify(self) -> None:
        """Verify all files that have a checksum. Raises CheckpointError."""

    def parts(self) -> tuple[str, Weights]:
        """Return what a fingerprint covers: a text, and weights that were saved as they are read."""


def base_of(cfg: Config) -> str | None:
    """Return the folder of the weights that a run starts from; None if it starts from none."""
    return cfg.checkpoint.load if cfg.finetune.base is None else cfg.finetune.base


def config_of(reader: Weights) -> Config:
    """Return the configuration that a checkpoint was saved with, as far as weights depend on it."""
    sections = ("model", "precision", "finetune", "lora")
    tree = {name: reader.config[name] for name in sections if name in reader.config}
    tree |= {"checkpoint": {"load": reader.config.get("checkpoint", {}).get("load")}}
    return cli.from_tree(tree, str(reader.index))


def best_kind(reader: Weights, name: str) -> str | None:
    """Return the most exact of the kinds in which a tensor is stored; None if it is no weight."""
    return next((kind for kind in ("master", "param") if kind in reader.kinds(name)), None)


def whole(reader: Weights, name: str) -> Tensor:
    """Read all of a tensor in float32."""
    return reader.read(name, best_kind(reader, name), (0,) * len(reader.shape(name)), reader.shape(name)).float()


def fingerprint(reader: Weights) -> str:
    """Hash the first row of every tensor to 16 hex digits.

    It is cheap to read, the same for a Hugging Face folder and the checkpoint imported from it, and changes with every
    step of training, which changes every row that it uses.
    """
    mark, reader = reader.parts()
    digest = hashlib.sha256(mark.encode())
    for name in sorted(reader.names()):
        if kind := best_kind(reader, name):
            shape = reader.shape(name)
            part = reader.read(name, kind, (0,) * len(shape), shape if len(shape) == 1 else (1, *shape[1:]))
            digest.update(f"{name} {shape}".encode() + part.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_base(adapter: Weights, base: Weights, mark: str) -> None:
    """Raise CheckpointError unless the adapter was trained beside these weights. mark: their fingerprint."""
    if adapter.state.get("base") != mark:
        why = f"its weights had the fingerprint {adapter.state.get('base')}, and {base.path} has {mark}"
        raise CheckpointError(f"{adapter.path} holds an adapter of another model: {why}; name the former as the base")
