"""From the command line to a Config: defaults, then YAML files, then `section.key=value`; the later one wins.

    torchrun --nproc-per-node 8 -m minitron.pretrain configs/llama3_8b.yaml train.steps=50 model.rope_scaling.factor=8

A recipe can be given by name in place of its file: `llama3_8b` (`minitron.config.installed`).

A value of an override stays the text that was typed, as in a file (`minitron.config.text`). Its key determines its type
(`minitron.config.convert`). A value that begins with a bracket or a quote is read as YAML. `section.key=null` drops
what a file has set, unless null is a value of the key, and `model=null` a section. A mistake is one line and exit
status 1. A traceback would mean that the program is wrong, not its input.

Left out: config groups and sweeps (Hydra's), environment variables.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from minitron.config.convert import merge
from minitron.config.describe import USAGE, help_text, json_schema
from minitron.config.installed import list_recipes, recipe, similar_recipe, typed
from minitron.config.names import answer, keys_named
from minitron.config.schema import Config, PrecisionConfig
from minitron.config.text import MAX_DEPTH, Unquoted, from_json, parse, read_file, short, to_yaml

QUIET_SECONDS = 3.0
Load = Callable[[list[str]], Config]  # from files and overrides to a Config
Tree = tuple[dict, str]  # a mapping from JSON or a file, and its origin for errors


def configure(description: str, argv: list[str] | None = None, read: Load | None = None) -> Config:
    """Return the Config of a command line (`sys.argv` if not given).

    Exits after --help, --recipes, --schema and --print-config.

    description: its first paragraph is shown by --help. read: in the place of `load`. Raises ValueError for mistakes:
    call it under `user_errors`.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        _print(help_text(description, [arg for arg in argv if arg.isidentifier() and not recipe(arg)]))
    if "--recipes" in argv:
        _print(list_recipes())
    if "--schema" in argv:
        _print(json_schema())
    cfg = (read or load)([arg for arg in argv if arg != "--print-config"])
    if "--print-config" in argv:
        _print(to_yaml(cfg))
    return cfg


def _print(text: str) -> NoReturn:
    with output():
        print(text.removesuffix("\n"))
    raise SystemExit(0)


@contextmanager
def output() -> Iterator[None]:
    """Print inside. If the reader of the pipe, as `head`, has ended, end without an error line, by a shell's status."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at exit
        raise SystemExit(128 + signal.SIGPIPE) from None


@contextmanager
def user_errors(kind: type[ValueError] = ValueError, *, quiet: bool = False) -> Iterator[None]:
    """Turn an error of this kind inside into one line on stderr and an exit status: 1, or that of a RunError.

    While the command line is parsed and the run is built, every ValueError is a mistake of the user, and all ranks
    raise it. Later only a RunError is (kind=RunError). One rank alone may raise it, so its own `quiet` decides. quiet:
    another rank prints the line. This one exits some seconds later, since torchrun ends all ranks when the first one
    exits.
    """
    try:
        yield
    except kind as error:
        own = None if kind is ValueError else getattr(error, "quiet", None)
        if quiet if own is None else own:
            time.sleep(QUIET_SECONDS)
        else:
            print("error:", typed(short(error, 2000)), file=sys.stderr, flush=True)
        raise SystemExit(getattr(error, "status", 1)) from None


def load(argv: list[str], under: Tree | None = None, first: Sequence[Tree] = ()) -> Config:
    """Return the Config of YAML files and overrides. Raises ValueError for any other argument and for a wrong value.

    under: a configuration that files and overrides replace. first: read like a file, before those of argv.
    """
    trees = first if under is None else (under, *first)
    files, overrides = [(from_json(tree), f"{origin}: ") for tree, origin in trees], []
    for arg in argv:
        if not arg.startswith("-") and re.match(r"[\w.]+=", arg):
            overrides.append(_override(arg))
        elif not arg.startswith("-") and arg.endswith((".yaml", ".yml")):
            if not os.path.lexists(arg) and recipe(name := Path(arg).stem):
                raise ValueError(f"{arg} cannot be read: no such file or directory; the recipe is found as {name}")
            files.append((read_file(arg), f"{arg}: "))
        elif path := recipe(arg):
            files.append((read_file(str(path)), f"{path}: "))
        else:
            raise ValueError(_unknown_argument(arg))
    below = Config() if under is None else merge(Config(), *files.pop(0))
    cfg = functools.reduce(lambda cfg, file: merge(cfg, *file), files, below)
    override = functools.partial(merge, below=below)
    changed = functools.reduce(override, overrides, cfg)
    if cfg.precision.dtype == "fp16" != changed.precision.dtype:  # the files' loss scale goes with their fp16
        default = {f.name: f.default for f in fields(PrecisionConfig) if f.name.startswith("loss_scale")}
        changed = functools.reduce(override, overrides, replace(cfg, precision=replace(cfg.precision, **default)))
    return changed


def from_tree(tree: dict, origin: str) -> Config:
    """Return the Config of a mapping from JSON, checked like a file. Raises ValueError that begins with `origin`."""
    return load([], (tree, origin))


def _override(arg: str) -> dict:
    """Return `section.key=value` as the mapping that a file would give: {"section": {"key": value}}."""
    key, text = arg.split("=", 1)
    if not all(key.split(".")):
        raise ValueError(f"{short(arg)} has an empty part before '='; write section.key=value")
    value: Any = Unquoted(text)
    if text.startswith(("[", "{", "'", '"')):
        try:
            value = parse(text)
        except (yaml.YAMLError, UnicodeError):
            raise ValueError(f"{key}: {short(text)} is not valid YAML; quote it or close its brackets") from None
    *sections, name = key.split(".")
    if len(sections) > MAX_DEPTH:
        raise ValueError(f"unknown key {short(key)}; write section.key=value")
    return functools.reduce(lambda tree, section: {section: tree}, reversed(sections), {name: value})


def _unknown_argument(arg: str) -> str:
    """Describe what to type instead of an argument that is neither a file nor an override."""
    theirs, option = arg.split("=")[0], arg.startswith("-")
    if option or "=" in arg:
        named = " or ".join(keys_named(theirs.lstrip("-").replace("-", "_")))
        if fix := answer(theirs, "=VALUE") or named and f"use {named}=VALUE":
            return f"unknown {'option' if option else 'key'} {short(theirs)}; {fix}"
    if option:
        return f"unknown option {short(arg)}; use {USAGE}"
    shown, meant = short(arg) or "an empty argument", similar_recipe(arg)
    hint = f"; did you mean the recipe {meant}?" if meant else ""
    return f"{shown} is neither a YAML file nor an override; write FILE.yaml or section.key=value{hint}"
