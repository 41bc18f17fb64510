"""Fill the configuration of a fine-tuning from its base: the sizes of the model, and the tokenizer.

    python -m minitron.finetune finetune.kind=lora finetune.base=Llama-3.1-8B data.source=sft data.paths=[chats.jsonl]

Problem: the weights have a description beside them, and a command line that repeats it may contradict it. The idea: the
description is read like a configuration file, below those of the user, so a key that the user gives wins. Then one
error lists all such keys that are of another model. Keys that belong to a run (OWN) are not copied. Each rank fills its
configuration before the rendezvous. It opens config.json, or reads the head of index.json without its tensors, which
may be megabytes. Rank 0 checks the whole index later. torch is loaded only if there is a base.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from minitron.config import cli
from minitron.config.files import errors_as, parse_json
from minitron.config.schema import Config

HEAD_BYTES = 1 << 20  # the part of an index before its tensors
MISSING = "of the base"  # no tokenizer has this name
OWN = ("init_std", "hidden_dropout", "attention_dropout", "attention", "head_piece")


class Described(NamedTuple):
    """The description beside weights. The attributes are those of `Weights`."""

    path: Path
    index: Path
    config: dict[str, Any]
    state: dict[str, Any]


class NotHere(ValueError):
    """The base cannot be read on this machine, and no key gives its sizes."""


def load(argv: list[str], first: Sequence[cli.Tree] = ()) -> Config:
    """Return the Config of files and overrides, filled from finetune.base. first: see cli.load. Raises ValueError.

    A base that is not here is left to the run, if the keys give a model.
    """
    read = partial(cli.load, argv, first=first)
    cfg = read()
    if cfg.finetune.base is None:
        return cfg
    key, why = f"finetune.base={cfg.finetune.base}", "holds no weights here"
    try:
        base = describe(cfg.finetune.base)
    except ImportError as error:  # a checker on a machine without torch
        base, why = None, f"cannot be read here ({error})"
    if base is None:
        if read(({"model": {"num_layers": 9999}}, "")).model.num_layers == 9999:
            fix = "name a Hugging Face folder or a minitron checkpoint"
            raise NotHere(f"{key} {why}, and no model.* gives its sizes; {fix}")
        return cfg
    from minitron.checkpoint.load import MEANING, STRUCTURE, check_model
    from minitron.checkpoint.weights import config_of
    from minitron.interop.hf_tokenizer import spec_of

    tree: dict[str, Any] = {"model": {k: v for k, v in asdict(config_of(base).model).items() if k not in OWN}}
    if cfg.data.source == "sft":
        tree["data"] = {"tokenizer": spec_of(base, base.state.get("data", {})) or MISSING}
    filled = read((tree, key))
    if filled.data.tokenizer == MISSING:
        fix = "copy the model's tokenizer.json into it, or set data.tokenizer"
        raise ValueError(f"{key} has no tokenizer that is known here; {fix}")
    fix = f"drop these keys or those of a file (model=null drops all), or name another base than {cfg.finetune.base}"
    check_model(base, filled, STRUCTURE + MEANING, fix)
    return filled


def describe(path: str) -> Described | None:
    """Read the description beside the weights in a folder; None if it holds no weights. Raises CheckpointError."""
    from minitron.checkpoint.directory import newest
    from minitron.checkpoint.format import INDEX, disk_errors
    from minitron.interop.hf import _json, model_config

    folder = Path(os.path.expanduser(path))
    with disk_errors(folder):
        foreign = (folder / "config.json").exists()
    if foreign:
        index = folder / "config.json"
        model = model_config(_json(index), str(index))
        return Described(folder, index, {"model": asdict(model), "precision": {}, "data": {}}, {})
    folder = newest(folder) or folder
    index = folder / INDEX
    return Described(folder, index, *_head(index)) if index.exists() else None


def _head(index: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration and the state in an index. Raises CheckpointError."""
    from minitron.checkpoint.format import CheckpointError, disk_errors, read_index

    with disk_errors(index), open(index, "rb") as file:
        head, tensors, _ = file.read(HEAD_BYTES).partition(b', "tensors": ')
    damaged = lambda error: f"{index} is damaged, or not an index of minitron: {error}"
    with errors_as(CheckpointError, damaged, ValueError, KeyError, TypeError):
        found = parse_json(head + b"}") if tensors else read_index(index)
        return dict(found["config"]), dict(found["state"])
