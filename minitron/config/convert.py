"""Convert parsed YAML to a Config, key by key, by the type that `minitron.config.schema` declares for each key.

    {"log": {"dir": Unquoted("010"), "every": Unquoted("1")}}    ->    LogConfig(dir="010", every=1)

A value that does not fit raises an error of one line: where it came from, the key, the value as typed, what the key
takes, and an example. For an unknown key the error names the key that was meant: with the right spelling, in another
section, or ours for a name of another trainer (`minitron.config.names`).

Left out: interpolation (`${...}`); a config has to mean the same on every machine.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from minitron.config.names import answer, keys_named
from minitron.config.schema import Shares, accepted_types
from minitron.config.text import NUMBER, UNPRINTABLE, Unquoted, short, shown

NULLS = ("null", "Null", "NULL")  # in a file also "~" and nothing, as in YAML
WRITTEN = (str.lower, str.title, str.upper)
BOOLEANS = {write(word): value for word, value in yaml.SafeLoader.bool_values.items() for write in WRITTEN}
INTEGER = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
NAMES = {int: "an integer", float: "a finite number", str: "text", bool: "true or false", NoneType: "null"}
NAMES |= {Shares: "a list of numbers"}
PLURALS = {int: "integers", float: "numbers", str: "texts", tuple[int, int]: "pairs of integers"}
# A value of each type, for errors about keys whose default shows none.
EXAMPLES = {int: "8", float: "0.5", str: "NAME", tuple[int, ...]: "[8, 8]", tuple[str, ...]: "[NAME]"}
EXAMPLES |= {tuple[int, int, int]: "[8, 8, 4000]", tuple[tuple[int, int], ...]: "[[0, 16], [32, 64]]"}


class BadValue(Exception):
    """A key does not take this value. The message has the rule and the fix; it is empty if the type is wrong."""


def merge(section: Any, tree: dict, origin: str = "", prefix: str = "", below: Any = None) -> Any:
    """Return a copy of `section` with the keys of `tree`, converted. origin: the first words of every error.

    below: the same section without files. A null takes the value from there, unless null is a value of the key.
    Raises ValueError for an unknown key and for a wrong value.
    """
    known, changes = {f.name: f for f in fields(section)}, {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in known:
            raise ValueError(f"{origin}unknown key {_meant(prefix, name, value, list(known))}")
        accepted = accepted_types(type(section))[name]
        if is_dataclass(accepted[0]) and isinstance(value, dict):
            inner = getattr(section, name) or accepted[0]()
            changes[name] = merge(inner, value, origin, f"{key}.", below and getattr(below, name))
            continue
        if below and isinstance(value, Unquoted) and value in NULLS and NoneType not in accepted:
            changes[name] = getattr(below, name)
            continue
        try:
            changes[name] = convert(accepted, value)
        except BadValue as error:
            why = str(error) or f"is not {type_name(accepted)}; {_example(key, accepted[0], known[name])}"
            raise ValueError(f"{origin}{key}={shown(value)} {why}") from None
    return replace(section, **changes)


def convert(accepted: tuple, value: Any) -> Any:
    """Convert the value that was read to one of the accepted types. Raises BadValue."""
    if accepted[0] is Shares:
        numbers = isinstance(value, list) and convert((tuple[float, ...],), value)
        return convert((str,), Unquoted(",".join(map(str, value))) if numbers else value)
    kind, plain = accepted[0], isinstance(value, Unquoted)
    if isinstance(value, str):
        if "${" in value:
            raise BadValue("holds an interpolation ${...}, which is not expanded; write the value itself")
        if not value.strip():
            other = "null" if NoneType in accepted else "drop the key"
            raise BadValue(f"is empty, as a shell variable that is not set; give a value, or {other}")
    if plain and value in NULLS and NoneType in accepted:
        return None
    if plain and value in BOOLEANS and bool in accepted:
        return BOOLEANS[value]
    if any(get_origin(other) is Literal and value in get_args(other) for other in accepted[1:]):
        return str(value)
    if get_origin(kind) is tuple and isinstance(value, list):
        items = get_args(kind)
        if Ellipsis in items or len(items) == len(value):
            return tuple(convert(items[:1], item) for item in value)
    elif get_origin(kind) is Literal and value in get_args(kind):
        return str(value)
    elif kind is str and isinstance(value, str):
        if UNPRINTABLE.search(value):
            raise BadValue("holds a character that cannot be printed; rename it")
        if not plain or not (value in (*NULLS, *BOOLEANS, "???") or bool in accepted and NUMBER.fullmatch(value)):
            return str(value)
    elif kind is int and plain and INTEGER.fullmatch(value):
        if len(value.lstrip("+-")) > 18:
            raise BadValue("has more than 18 digits; use a smaller number")
        return int(value)
    elif kind is float and plain and NUMBER.fullmatch(value):
        if math.isinf(number := float(value)):
            raise BadValue("is not a finite number; use a smaller one")
        return number
    raise BadValue


# ---- the texts of errors ---------------------------------------------------------------------------------------------


def _meant(prefix: str, name: str, value: Any, siblings: list[str]) -> str:
    """Name the unknown key, of a section the first of its keys, and the keys that may have been meant."""
    given = [*_leaves(prefix + name, value), prefix + name]
    for theirs in given:
        if fix := answer(theirs):
            return f"{short(theirs)}; {fix}"
    named = keys_named(given[0].rpartition(".")[2])
    close = [prefix + match for match in difflib.get_close_matches(name, siblings, n=1)]
    if meant := named if isinstance(value, dict) and named else close + named:
        return f"{short(given[0])}; did you mean {' or '.join(meant)}?"
    return f"{short(given[0])}; use one of {', '.join(prefix + sibling for sibling in siblings)}"


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key


def _example(key: str, kind: Any, field: Field) -> str:
    if is_dataclass(kind):
        first = fields(kind)[0]
        return f"set its keys, for example {key}.{first.name}={shown(first.default)}"
    if field.default not in (None, ()):
        example = shown(field.default)
    else:
        example = get_args(kind)[0] if get_origin(kind) is Literal else EXAMPLES[kind]
    return f"write for example {key}={example}"


def type_name(accepted: tuple, within: str | None = None) -> str:
    """Describe what a key takes: "an integer in [1, 1e12], or null". within: the interval of the first type."""
    kind, args = accepted[0], get_args(accepted[0])
    if get_origin(kind) is Literal:
        name = "one of " + ", ".join(args)
    elif get_origin(kind) is tuple:
        name = f"a list of {'' if args[-1] is Ellipsis else f'{len(args)} '}{PLURALS[args[0]]}"
    else:
        name = "a section" if is_dataclass(kind) else NAMES[kind]
    others = (" or ".join(get_args(other)) if get_origin(other) is Literal else NAMES[other] for other in accepted[1:])
    return ", or ".join([name + (f" in {within}" if within else ""), *others])
