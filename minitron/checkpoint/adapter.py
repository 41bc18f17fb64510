"""Adapters and the weights that they belong to: one model again, or an adapter in PEFT's format.

Problem: a LoRA checkpoint holds adapters alone, a thousandth of the model, and means nothing beside other weights. The
idea: it records which weights those were, by where they lay and by a fingerprint of their values; and `open_weights`
opens whatever holds a model, a Hugging Face folder, a checkpoint, or a LoRA checkpoint, as one thing that can be read.

    open_weights("runs/lora").read("blocks.0.attention.qkv.weight", ...)       W + alpha/r B A, computed box by box

The fingerprint is a hash of the first row of every tensor: little to read, the same for a Hugging Face folder and the
checkpoint that was imported from it, and another one after a step of training, which changes every row that it uses.

PEFT (github.com/huggingface/peft) keeps an adapter as adapter_config.json and adapter_model.safetensors, with a pair of
matrices for each module of the Hugging Face model. An adapter of the fused q, k, v becomes three with the same A.

    blocks.0.attention.qkv.adapter.a  -> base_model.model.model.layers.0.self_attn.{q,k,v}_proj.lora_A.weight
    blocks.0.attention.qkv.adapter.b.qkv, its rows of q, of k and of v -> ....{q,k,v}_proj.lora_B.weight

Left out: starting from an adapter of PEFT's; have PEFT merge it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.checkpoint import hf
from minitron.checkpoint.format import CheckpointError, Reader, disk_errors, newest
from minitron.config import cli
from minitron.config.schema import Config, ModelConfig
from minitron.config.sizes import adapted


def open_weights(
    path: str, base: str | None = None, vocab_multiple: int = ModelConfig.vocab_multiple, key: str = ""
) -> Weights:
    """The model in a folder, with the read interface of `format.Reader`.

    base: where the weights of an adapter lie now, None: where they did. vocab_multiple: how a Hugging Face folder's
    vocabulary is padded. key: who named the folder, for errors. Raises CheckpointError.
    """
    folder = Path(os.path.expanduser(path))
    with disk_errors(folder):
        foreign, own = ((folder / name).exists() for name in ("config.json", "index.json"))
    if not foreign and not own and newest(folder) is None:
        raise CheckpointError(f"{key}{folder} holds no weights; name a Hugging Face folder or a minitron checkpoint")
    reader = hf.Reader(folder, vocab_multiple) if foreign else Reader(folder)
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
    """Where the weights lie that a run starts from."""
    return cfg.checkpoint.load if cfg.finetune.base is None else cfg.finetune.base


def config_of(reader: Reader) -> Config:
    """What a checkpoint was saved with, as far as weights depend on it."""
    sections = ("model", "precision", "finetune", "lora")
    tree = {name: reader.config[name] for name in sections if name in reader.config}
    tree |= {"checkpoint": {"load": reader.config.get("checkpoint", {}).get("load")}}
    return cli.from_tree(tree, str(reader.index))


def best_kind(reader: Weights, name: str) -> str | None:
    """The most exact kind of a tensor; None of what is no weight."""
    return next((kind for kind in ("master", "param") if kind in reader.kinds(name)), None)


def fingerprint(reader: Weights) -> str:
    """16 hex digits that identify the values of a model."""
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
    """Raises CheckpointError unless these are the weights, with this fingerprint, that the adapter was trained with."""
    if adapter.state.get("base") != mark:
        raise CheckpointError(
            f"{adapter.path} holds an adapter of another model: its weights had the fingerprint "
            f"{adapter.state.get('base')}, and {base.path} has {mark}; name the former as the base"
        )


class Part(NamedTuple):
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
        rank = cfg.lora.rank
        self.parts = {
            layer: [
                Part(span.start, span.size, target, slice(i * rank, (i + 1) * rank))
                for i, (target, span) in enumerate(spans.items())
            ]
            for layer, spans in adapted(cfg.model, cfg.lora.targets).items()
            if spans
        }

    def names(self) -> list[str]:
        return [name for name in self.base.names() if best_kind(self.base, name)]

    def kinds(self, name: str) -> list[str]:
        return ["param"] if best_kind(self.base, name) else []

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name)

    def dtype(self, name: str, kind: str) -> torch.dtype:
        return torch.float32 if self._parts(name) else self.base.dtype(name, best_kind(self.base, name))

    def read(self, name: str, kind: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Any box of a merged weight."""
        box = self.base.read(name, best_kind(self.base, name), start, shape).to(self.dtype(name, kind))
        for part in self._parts(name):
            first, last = max(start[0], part.start), min(start[0] + shape[0], part.start + part.size)
            if first < last:
                a, b = self.factors(name, part, slice(first - part.start, last - part.start))
                box[first - start[0] : last - start[0]] += b @ a[:, start[1] : start[1] + shape[1]]
        return box

    def factors(self, name: str, part: Part, outputs: slice, scaled: bool = True) -> tuple[Tensor, Tensor]:
        """A [rank, k] and some rows of B [rows, rank] of a weight, float32; scaled: alpha/r is in B."""
        a, b = (whole(self.adapter, name.removesuffix("weight") + f"adapter.{x}") for x in ("a", f"b.{part.b}"))
        return a[part.columns], b[outputs] * (self.cfg.lora.scale if scaled else 1.0)

    def verify(self) -> None:
        """Checksums of all files that have one."""
        self.adapter.verify()
        if not isinstance(self.base, hf.Reader):
            self.base.verify()

    def peft(self) -> tuple[dict, Iterator[tuple[str, Tensor]]]:
        """adapter_config.json, and the tensors of adapter_model.safetensors. Raises ValueError."""
        pairs = list(self._modules())
        lora, gpt = self.cfg.lora, self.cfg.model.family == "gpt"
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self.base.path),
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "bias": "none",
            # GPT-2 has a c_proj in attention and another one in the MLP
            "target_modules": sorted({".".join(module.split(".")[-2 if gpt else -1 :]) for module, *_ in pairs}),
            "fan_in_fan_out": gpt,
            "inference_mode": True,
        }
        tensors = (
            (f"base_model.model.{module}.lora_{side}.weight", tensor.contiguous())
            for module, name, part, rows in pairs
            for side, tensor in zip("AB", self.factors(name, part, rows, scaled=False))
        )
        return settings, tensors

    def _modules(self) -> Iterator[tuple[str, str, Part, slice]]:
        """(Hugging Face module, minitron's weight, the target that covers it, its rows of that target's B)."""
        for name, stack in hf.tensor_map(self.cfg.model).items():
            row = 0
            for module in stack:
                end = row + module.shape[0]
                for part in self._parts(name):
                    if part.start <= row and end <= part.start + part.size:
                        yield (
                            module.name.removesuffix(".weight"),
                            name,
                            part,
                            slice(row - part.start, end - part.start),
                        )
                    elif part.start < end and row < part.start + part.size:
                        raise ValueError(
                            f"{self.path} has an adapter of {part.b} alone, which is a part of "
                            f"{module.name} in a Hugging Face model; export merged weights instead"
                        )
                row = end

    def _parts(self, name: str) -> list[Part]:
        match = re.fullmatch(r"blocks\.\d+\.(.+)\.weight", name)
        return self.parts.get(match[1], []) if match else []


Weights = Reader | hf.Reader | Merged


def whole(reader: Reader, name: str) -> Tensor:
    """All of a tensor in float32."""
    return reader.read(name, best_kind(reader, name), (0,) * len(reader.shape(name)), reader.shape(name)).float()
