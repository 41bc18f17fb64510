"""From the command line to a Config: defaults, then YAML files, then `section.key=value`; the later one wins.

    torchrun --nproc-per-node 8 -m minitron.pretrain configs/llama3_8b.yaml train.steps=50 model.rope_scaling.factor=8

Files and overrides are brought into one form, a list of (dotted key, value). Each is first checked against its field,
so that an error can name where it came from, what the key takes and which key was meant; then OmegaConf merges all of
them into its structured config and makes the dataclasses. `${...}` is refused, not expanded: a config has to mean the
same on every machine. A mistake is one line and exit status 1; a traceback would say that the program is wrong, not its
input.

Left out: config groups and sweeps (Hydra's), environment variables.
"""

from __future__ import annotations

import difflib
import re
import sys
import time
import textwrap
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError

from minitron.config import Config

QUIET_SECONDS = 3.0
DRY_RUN = "--dry-run --world N [--ranks first,middle,last] [--json]"
USAGE = "[CONFIG.yaml ...] [section.key=value ...] [--print-config] [--dry-run --world N] [--help]"


def configure(description: str, argv: list[str] | None = None) -> Config:
    """The Config of a command line (`sys.argv` if not given). Exits after --help and --print-config.

    description: its first paragraph is shown by --help. Raises ValueError for mistakes: call it under `user_errors`.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(help_text(description))
        raise SystemExit(0)
    cfg = load([arg for arg in argv if arg != "--print-config"])
    if "--print-config" in argv:
        print(to_yaml(cfg), end="")
        raise SystemExit(0)
    return cfg


@contextmanager
def user_errors(kind: type[ValueError] | tuple[type[ValueError], ...] = ValueError, *,
                quiet: bool = False) -> Iterator[None]:
    """Turns an error of this kind inside into one line on stderr and exit status 1.

    While parsing and building, every ValueError is the user's to mend; later only narrower kinds are.
    quiet: leave the line to another rank, which finds the same mistake, and time to print it: torchrun ends all ranks
    when the first one exits.
    """
    try:
        yield
    except kind as error:
        if quiet:
            time.sleep(QUIET_SECONDS)
        else:
            print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def load(argv: list[str]) -> Config:
    """YAML files and `section.key=value` overrides -> Config. Raises ValueError for whatever is not one of these."""
    files, overrides = [], []
    for arg in argv:
        if arg.startswith("-"):
            raise ValueError(f"unknown option {arg}; use {USAGE}")
        if re.match(r"[\w.]+=", arg):
            overrides += _settings(_parse(arg))
        elif arg.endswith((".yaml", ".yml")):
            files += _settings(_read(arg), f"{arg}: ")
        else:
            raise ValueError(f"{arg} is neither a YAML file nor an override; write FILE.yaml or section.key=value")
    return _merge(files + overrides)


def from_tree(tree: dict, origin: str) -> Config:
    """The Config of a nested mapping, checked like a file. Errors are ValueErrors that begin with `origin`."""
    if "${" in str(tree):
        raise _interpolation(f"{origin}: it")
    return _merge(_settings(tree, f"{origin}: "))


def _merge(settings: list[tuple[str, Any]]) -> Config:
    tree: dict = {}
    for key, value in settings:
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            if not isinstance(node.get(section), dict):  # not there yet, or set to null before
                node[section] = {}
            node = node[section]
        if value == {}:  # of a section: all its defaults, unless it has been set before
            value = node.get(name) or {}
        node[name] = value
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), tree))


def to_yaml(cfg: Config) -> str:
    """Every key of `cfg` as YAML, which `load` reads back to an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


# ---- reading: to a list of (dotted key, value) --------------------------------------------------------------------


def _read(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            node = OmegaConf.load(file)
    except (FileNotFoundError, IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror.lower()
        raise ValueError(f"{path} cannot be read: {reason}; name an existing YAML file") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}; correct it there") from None
    except GrammarParseError:
        raise _interpolation(path) from None
    except OSError:  # OmegaConf's error for a lone number
        node = None
    if not isinstance(node, DictConfig):
        raise ValueError(f"{path} holds no mapping; write `section:` and below it, indented, `key: value`")
    return _plain(node, path)


def _parse(override: str) -> dict:
    key, text = override.split("=", 1)
    if not all(key.split(".")):
        raise ValueError(f"{override} has an empty part before '='; write section.key=value")
    try:
        return _plain(OmegaConf.from_dotlist([override]), override)
    except yaml.YAMLError:
        raise ValueError(f"{key}: {text} is not valid YAML; quote it or close its brackets") from None
    except GrammarParseError:
        raise _interpolation(override) from None


def _plain(node: DictConfig, origin: str) -> dict:
    """As dicts, lists and scalars, nothing resolved. Read by OmegaConf, because it takes 1e-3 for a number and refuses
    duplicate keys; as YAML has it, yes, no, on and off are booleans."""
    plain = OmegaConf.to_container(node, resolve=False)
    if "${" in str(plain):
        raise _interpolation(origin)
    return plain


def _interpolation(origin: str) -> ValueError:
    return ValueError(f"{origin} holds an interpolation ${{...}}, which is not expanded; write the value itself")


def _settings(tree: dict, origin: str = "") -> list[tuple[str, Any]]:
    """[("model.num_layers", 4), ...] of a nested mapping, after checking that its keys exist and take such values."""
    settings = []

    def walk(cls: type, mapping: dict, prefix: str) -> None:
        hints, known = typing.get_type_hints(cls), {f.name: f for f in fields(cls)}
        for name, value in mapping.items():
            key = f"{prefix}{name}"
            if name not in known:
                raise ValueError(f"{origin}unknown key {key}; {_suggestion(str(name), list(known), prefix)}")
            section = _without_none(hints[name])
            if is_dataclass(section) and isinstance(value, dict) and value:
                walk(section, value, f"{key}.")
            else:
                _check_type(origin, key, value, hints[name], known[name])
                settings.append((key, value))

    walk(Config, tree, "")
    return settings


def _suggestion(name: str, known: list[str], prefix: str) -> str:
    close = [f"{prefix}{match}" for match in difflib.get_close_matches(name, known, n=1)]
    elsewhere = [key for key, _, _ in _keys() if key.split(".")[-1] == name]
    if close or elsewhere:
        return f"did you mean {' or '.join(close + elsewhere)}?"
    return f"use one of {', '.join(prefix + k for k in known)}"


# ---- types ----------------------------------------------------------------------------------------------------------


def _check_type(origin: str, key: str, value: Any, hint: Any, field: Field) -> None:
    if not _fits(hint, value):
        expected = _type_name(hint)
        if re.fullmatch(r"[+-]?(inf(inity)?|nan)", str(value), re.I):
            expected = expected.replace("a number", "a finite number")
        raise ValueError(f"{origin}{key}={_shown(value)} is not {expected}; {_instead(key, hint, field)}")


def _fits(hint: Any, value: Any) -> bool:
    """Stricter than OmegaConf, which turns 3 into true, true into "True", "3" into 3 and `???` into a missing value."""
    if value is None or isinstance(value, bool):
        return (type(None) if value is None else bool) in (get_args(hint) or (hint,))
    bare = _without_none(hint)
    if is_dataclass(bare):
        return value == {}
    if get_origin(bare) is Literal:
        return value in get_args(bare)
    if get_origin(bare) is tuple:
        items, *rest = get_args(bare)
        fixed = len(rest) + 1 if Ellipsis not in rest else None
        return isinstance(value, list) and fixed in (None, len(value)) and all(_fits(items, item) for item in value)
    texts = str if bool in get_args(hint) else (str, int, float)  # OmegaConf makes no text of a number there
    accepted = {int: int, float: (int, float), str: texts}.get(bare, ())
    return isinstance(value, accepted) and value != "???"


def _instead(key: str, hint: Any, field: Field) -> str:
    bare = _without_none(hint)
    if is_dataclass(bare):
        return f"set its keys, for example {key}.{fields(bare)[0].name}={_shown(fields(bare)[0].default)}"
    if field.default not in (None, ()):
        example = _shown(field.default)
    else:
        example = get_args(bare)[0] if get_origin(bare) is Literal else _EXAMPLES[bare]
    return f"write for example {key}={example}"


def _keys() -> Iterator[tuple[str, Any, Field]]:
    """(dotted key, type, field) of every key that holds a value, in order."""

    def walk(cls: type, prefix: str) -> Iterator[tuple[str, Any, Field]]:
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            section = _without_none(hints[f.name])
            if not is_dataclass(section) or f.default is None:
                yield f"{prefix}{f.name}", hints[f.name], f
            if is_dataclass(section):
                yield from walk(section, f"{prefix}{f.name}.")

    return walk(Config, "")


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


_NAMES = {int: ("an integer", "integers"), float: ("a number", "numbers"), str: ("text", "texts"),
          bool: ("true or false", ""), type(None): ("null", "")}
# Of types, for keys whose default is no example.
_EXAMPLES = {int: "8", float: "0.5", str: "NAME", tuple[int, ...]: "[8, 8]", tuple[str, ...]: "[NAME]"}


def _type_name(hint: Any, within: str | None = None) -> str:
    bare = _without_none(hint)
    args = get_args(bare)
    if get_origin(bare) is Literal:
        name = "one of " + ", ".join(args)
    elif get_origin(bare) is tuple:
        name = f"a list of {'' if args[-1] is Ellipsis else f'{len(args)} '}{_NAMES[args[0]][1]}"
    else:
        name = "a section" if is_dataclass(bare) else _NAMES[bare][0]
    others = () if bare is hint else [arg for arg in get_args(hint) if arg is not bare]
    return ", or ".join([name + (f" in {within}" if within else ""), *(_NAMES[arg][0] for arg in others)])


def _shown(value: Any) -> str:
    """On one line, as it would be written in YAML."""
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


# ---- help -----------------------------------------------------------------------------------------------------------


def help_text(description: str) -> str:
    """Every key by section: its default, what it means, its type and its range."""
    lines = [description.strip().split("\n\n")[0], "", f"usage: {USAGE}", "",
             f"{DRY_RUN}: one step of some of N ranks, here, without GPUs: its",
             "memory, its communication, its errors; ranks by number too.", "",
             "Later files win over earlier ones, and overrides over files. Every key, with its default:"]
    meanings = {f.name: f.metadata["help"] for f in fields(Config)}
    section = None
    for key, hint, f in _keys():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines += ["", f"{section}: {meanings[section]}"]
        lines += [f"  {key}={_shown(f.default)}   ({_type_name(hint, f.metadata['within'])})",
                  *(f"      {line}" for line in textwrap.wrap(f.metadata["help"], 110))]
    return "\n".join(lines)
