"""From the command line to a Config: defaults, then YAML files, then `section.key=value`; the later one wins.

    torchrun --nproc-per-node 8 -m minitron.pretrain configs/llama3_8b.yaml train.steps=50 model.rope_scaling.factor=8

Problem: YAML guesses. To it 2026_11_22 is an integer, 010 is eight, 1:30 is ninety, and `a #b` is a. The idea: a value
stays the text that was typed until its key is known, and the key's type says what it is:

    log.dir=010     text     "010"            model.num_layers=1:30    no integer    error

Files are read from the parser's events, and so are overrides that begin with a bracket or a quote: into mappings,
lists, texts in quotes (str) and texts without (Plain). `_apply` then makes the frozen dataclasses of
`minitron.config.schema`, key by key, so that an error can name where it came from, what the key takes and which key was
meant. A mistake is one line and exit status 1; a traceback would say that the program is wrong, not its input.

Left out: interpolation (`${...}`; a config has to mean the same on every machine), anchors, tags, config groups and
sweeps (Hydra's), environment variables.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import sys
import textwrap
import time
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field, asdict, fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from minitron.config.files import read_bytes
from minitron.config.schema import Config, PrecisionConfig

QUIET_SECONDS = 3.0
DRY_RUN = "--dry-run --world N [--ranks first,middle,last] [--json]"
USAGE = "[CONFIG.yaml ...] [section.key=value ...] [--print-config] [--dry-run --world N] [--help]"
FILE_BYTES = 1 << 20
MAX_DEPTH = 8
SHOWN = 200  # characters of a value in an error
EVENTS = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
NULLS = ("null", "Null", "NULL")  # and in a file, as YAML has it, "~" and nothing
BOOLEANS = {
    word: truth
    for truth, words in ((True, ("true", "yes", "on")), (False, ("false", "no", "off")))
    for lower in words
    for word in (lower, lower.title(), lower.upper())
}
INTEGER = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
NUMBER = re.compile(r"[+-]?([0-9](_?[0-9])*(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?\.(inf|nan)", re.I)
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Plain(str):
    """A value that was typed without quotes: its key says what it is."""


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
def user_errors(
    kind: type[ValueError] | tuple[type[ValueError], ...] = ValueError, *, quiet: bool = False
) -> Iterator[None]:
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
            print("error:", _short(error, 2000), file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def load(argv: list[str]) -> Config:
    """YAML files and `section.key=value` overrides -> Config. Raises ValueError for whatever is not one of these."""
    files, overrides = [], []
    for arg in argv:
        if arg.startswith("-"):
            raise ValueError(f"unknown option {_short(arg)}; use {USAGE}")
        if re.match(r"[\w.]+=", arg):
            overrides.append((_parse(arg), ""))
        elif arg.endswith((".yaml", ".yml")):
            files.append((_read(arg), f"{arg}: "))
        else:
            raise ValueError(
                f"{_short(arg) or 'an empty argument'} is neither a YAML file nor an override; write "
                "FILE.yaml or section.key=value"
            )
    cfg = functools.reduce(_apply, files, Config())
    changed = functools.reduce(_apply, overrides, cfg)
    if cfg.precision.dtype == "fp16" != changed.precision.dtype:  # the files' loss scale goes with their fp16
        default = {f.name: f.default for f in fields(PrecisionConfig) if f.name.startswith("loss_scale")}
        changed = functools.reduce(_apply, overrides, replace(cfg, precision=replace(cfg.precision, **default)))
    return changed


def from_tree(tree: dict, origin: str) -> Config:
    """The Config of a mapping from JSON, checked like a file. Errors are ValueErrors that begin with `origin`."""
    return _apply(Config(), (_written(tree), f"{origin}: "))


def to_yaml(cfg: Config) -> str:
    """Every key of `cfg` as YAML, which `load` reads back to an equal Config."""
    return yaml.dump(_listed(asdict(cfg)), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that are something else without quotes here, and not for YAML: 1e3."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        quotes = "'" if text == "???" or NUMBER.fullmatch(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, quotes)


_Dumper.add_representer(str, _Dumper.represent_str)


# ---- reading: to mappings, lists, str and Plain ----------------------------------------------------------------------


def _read(path: str) -> dict:
    try:
        tree = _parse_yaml(read_bytes(path, FILE_BYTES).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror.lower()
        raise ValueError(f"{path} cannot be read: {reason}; name an existing YAML file") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {_short(error, 300)}; correct it there") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds no mapping; write `section:` and below it, indented, `key: value`")
    return tree


def _parse(override: str) -> dict:
    key, text = override.split("=", 1)
    if not all(key.split(".")):
        raise ValueError(f"{_short(override)} has an empty part before '='; write section.key=value")
    value: Any = Plain(text)
    if text.startswith(("[", "{", "'", '"')):
        try:
            value = _parse_yaml(text)
        except (yaml.YAMLError, UnicodeError):
            raise ValueError(f"{key}: {_short(text)} is not valid YAML; quote it or close its brackets") from None
    *sections, name = key.split(".")
    if len(sections) > MAX_DEPTH:
        raise ValueError(f"unknown key {_short(key)}; write section.key=value")
    return functools.reduce(lambda tree, section: {section: tree}, reversed(sections), {name: value})


def _parse_yaml(text: str) -> Any:
    """The one document of a text, None if there is none. Raises yaml.YAMLError."""
    events = (event for event in yaml.parse(text, Loader=EVENTS) if not isinstance(event, _FRAME))
    tree = next((_node(event, events, 0) for event in events), None)
    for event in events:
        raise yaml.MarkedYAMLError(problem="more than one document", problem_mark=event.start_mark)
    return tree


_FRAME = yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent


def _node(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Any:
    """The scalar, list or mapping that begins with `event`."""

    def fail(problem: str) -> typing.NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    if event.anchor is not None or event.tag is not None:  # an alias has an anchor, too
        fail("anchors, aliases and tags are not read")
    if depth > MAX_DEPTH:
        fail("it is nested too deeply")
    if isinstance(event, yaml.ScalarEvent):
        return event.value if event.style else Plain(event.value if event.value not in ("", "~") else "null")
    items = []
    while not isinstance(inner := next(events), yaml.CollectionEndEvent):
        items.append(_node(inner, events, depth + 1))
    if isinstance(event, yaml.SequenceStartEvent):
        return items
    keys, mapping = items[::2], {}
    for key, value in zip(keys, items[1::2]):
        if not isinstance(key, str):
            fail("a key is no text")
        if key in mapping:
            fail(f"duplicate key {_short(key)}")
        mapping[key] = value
    return mapping


def _written(tree: Any) -> Any:
    """A value of JSON's as a file would have it."""
    if isinstance(tree, dict):
        return {str(key): _written(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_written(value) for value in tree]
    return tree if isinstance(tree, str) else Plain(json.dumps(tree))


def _listed(tree: Any) -> Any:
    """Tuples as lists."""
    if isinstance(tree, dict):
        return {key: _listed(value) for key, value in tree.items()}
    return list(tree) if isinstance(tree, tuple) else tree


# ---- from what was read to the dataclasses --------------------------------------------------------------------------


def _apply(section: Any, source: tuple[dict, str], prefix: str = "") -> Any:
    """`section` with the keys of a tree, converted. source: the tree, and what its errors begin with.

    Raises ValueError for an unknown key and for a wrong value.
    """
    tree, origin = source
    hints, known, changes = _hints(type(section)), {f.name: f for f in fields(section)}, {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in known:
            raise ValueError(f"{origin}unknown key {_short(key)}; {_suggestion(name, list(known), prefix)}")
        inner = _without_none(hints[name])
        if is_dataclass(inner) and isinstance(value, dict):
            changes[name] = _apply(getattr(section, name) or inner(), (value, origin), f"{key}.")
            continue
        try:
            changes[name] = _convert(hints[name], value)
        except _Unfit as error:
            why = str(error) or f"is not {_expected(hints[name], value)}; {_instead(key, hints[name], known[name])}"
            raise ValueError(f"{origin}{key}={_shown(value)} {why}") from None
    return replace(section, **changes)


class _Unfit(Exception):
    """A value that a key does not take. Its message: the rule and the fix, empty if it is of another type."""


def _convert(hint: Any, value: Any) -> Any:
    """The value that was read, as the type says. Raises _Unfit."""
    if isinstance(value, str) and "${" in value:
        raise _Unfit("holds an interpolation ${...}, which is not expanded; write the value itself")
    bare = _without_none(hint)
    others = get_args(hint) if bare is not hint else (hint,)
    if isinstance(value, Plain):
        if value in NULLS and type(None) in others:
            return None
        if value in BOOLEANS and bool in others:
            return BOOLEANS[value]
        if value == "":
            raise _Unfit(
                "is empty, as a shell variable that is not set; give a value" + ", or null" * (type(None) in others)
            )
    if get_origin(bare) is tuple and isinstance(value, list):
        item, *rest = get_args(bare)
        if Ellipsis in rest or len(rest) + 1 == len(value):
            return tuple(_convert(item, x) for x in value)
    elif get_origin(bare) is Literal and value in get_args(bare):
        return str(value)
    elif bare is str and isinstance(value, str):
        return _text(value, numbers=bool not in others)
    elif bare is int and isinstance(value, Plain) and INTEGER.fullmatch(value):
        if len(value.lstrip("+-")) > 18:
            raise _Unfit("has more than 18 digits; use a smaller number")
        return int(value)
    elif bare is float and isinstance(value, Plain) and NUMBER.fullmatch(value):
        number = float(re.sub(r"\.(?=[inIN])", "", value))  # .inf and .nan: no interval holds them
        if math.isinf(number) and "f" not in value.lower():
            raise _Unfit("is not a finite number; use a smaller one")
        return number
    raise _Unfit


def _text(value: str, numbers: bool) -> str:
    """numbers: whether a number without quotes is text, too."""
    if value == "":
        raise _Unfit("is empty, as a shell variable that is not set; give a value, or drop the key")
    if UNPRINTABLE.search(value):
        raise _Unfit("holds a character that cannot be printed; rename it")
    if isinstance(value, Plain) and (value in (*NULLS, *BOOLEANS, "???") or not numbers and NUMBER.fullmatch(value)):
        raise _Unfit
    return str(value)


def _suggestion(name: str, known: list[str], prefix: str) -> str:
    close = [f"{prefix}{match}" for match in difflib.get_close_matches(name, known, n=1)]
    elsewhere = [key for key, _, _ in _keys() if key.split(".")[-1] == name]
    if close or elsewhere:
        return f"did you mean {' or '.join(close + elsewhere)}?"
    return f"use one of {', '.join(prefix + k for k in known)}"


# ---- what an error shows ---------------------------------------------------------------------------------------------


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
        hints = _hints(cls)
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


_NAMES = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", ""),
    type(None): ("null", ""),
}
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


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _expected(hint: Any, value: Any) -> str:
    finite = isinstance(value, str) and re.fullmatch(r"[+-]?(inf(inity)?|nan)", value, re.I)
    return _type_name(hint).replace("a number", "a finite number") if finite else _type_name(hint)


def _shown(value: Any) -> str:
    """On one line, as it was or would be written in YAML."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {_shown(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(_shown, value))}]"
    else:
        text = value if isinstance(value, Plain) else yaml.safe_dump(value, width=10**6).removesuffix("\n...\n")
    return _short(text)


def _short(text: object, most: int = SHOWN) -> str:
    """On one line, without what a terminal would obey, the end of a long one cut off."""
    line = UNPRINTABLE.sub("?", " ".join(str(text).split()))
    return line if len(line) <= most else f"{line[:most]}..."


# ---- help -----------------------------------------------------------------------------------------------------------


def help_text(description: str) -> str:
    """Every key by section: its default, what it means, its type and its range."""
    lines = [
        description.strip().split("\n\n")[0],
        "",
        f"usage: {USAGE}",
        "",
        f"{DRY_RUN}: one step of some of N ranks, here, without GPUs: its",
        "memory, its communication, its errors; ranks by number too.",
        "",
        "Later files win over earlier ones, and overrides over files. Every key, with its default:",
    ]
    meanings = {f.name: f.metadata["help"] for f in fields(Config)}
    section = None
    for key, hint, f in _keys():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines += ["", f"{section}: {meanings[section]}"]
        lines += [
            f"  {key}={_shown(f.default)}   ({_type_name(hint, f.metadata['within'])})",
            *(f"      {line}" for line in textwrap.wrap(f.metadata["help"], 110)),
        ]
    return "\n".join(lines)
