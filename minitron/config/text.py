"""Read YAML without guessing types, and write it so that it is read back.

Problem: YAML guesses. It reads 2026_11_22 as an integer, 010 as eight, 1:30 as ninety, and `a #b` as a. The idea: only
the key determines what a value is. So the parser's events become mappings, lists, texts in quotes (str) and texts
without quotes (Unquoted), and `minitron.config.convert` gives each Unquoted the type of its key:

    log: {dir: 010, every: 1}    ->    {"log": {"dir": Unquoted("010"), "every": Unquoted("1")}}

Left out: anchors, aliases, tags and several documents, which a configuration does not need and a hostile file abuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NoReturn

import yaml

from minitron.config.files import read_bytes
from minitron.config.schema import Config

FILE_BYTES = 1 << 20
MAX_DEPTH = 8
SHOWN = 200  # characters of a value in an error
EVENTS = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
FRAME = yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent
NUMBER = re.compile(r"[+-]?([0-9](_?[0-9])*(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
# Control characters, line separators, marks that turn the direction of writing, halves of surrogate pairs.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Unquoted(str):
    """A value that was typed without quotes. Its key determines its type."""


def read_file(path: str) -> dict:
    """Read the mapping that a YAML file holds, {} from an empty file. Raises ValueError."""
    try:
        return parse_mapping(read_bytes(path, FILE_BYTES).decode("utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror.lower()
        raise ValueError(f"{path} cannot be read: {reason}; name an existing YAML file") from None


def parse_mapping(text: str, origin: str) -> dict:
    """Parse a text that holds a mapping, {} if it is empty. origin: the first word of an error. Raises ValueError."""
    try:
        tree = parse(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{origin} is not valid YAML: {short(error, 300)}; correct it there") from None
    if tree is not None and not isinstance(tree, dict):
        raise ValueError(f"{origin} holds no mapping; write `section:` and below it, indented, `key: value`")
    return tree or {}


def parse(text: str) -> Any:
    """Parse a text of one YAML document; None if it has none. Raises yaml.YAMLError."""
    events = (event for event in yaml.parse(text, Loader=EVENTS) if not isinstance(event, FRAME))
    tree = next((_node(event, events, 0) for event in events), None)
    for event in events:
        _fail("more than one document", event)
    return tree


def _node(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Any:
    """Return the scalar, list or mapping that begins with `event`."""
    if event.anchor is not None or event.tag is not None:  # an alias has an anchor, too
        _fail("anchors, aliases and tags are not read", event)
    if depth > MAX_DEPTH:
        _fail("it is nested too deeply", event)
    if isinstance(event, yaml.ScalarEvent):
        return event.value if event.style else Unquoted(event.value if event.value not in ("", "~") else "null")
    items = []
    while not isinstance(inner := next(events), yaml.CollectionEndEvent):
        items.append(_node(inner, events, depth + 1))
    if isinstance(event, yaml.SequenceStartEvent):
        return items
    mapping = {}
    for key, value in zip(items[::2], items[1::2]):
        if not isinstance(key, str):
            _fail("a key is not text", event)
        if key in mapping:
            _fail(f"duplicate key {short(key)}", event)
        mapping[key] = value
    return mapping


def _fail(problem: str, event: yaml.Event) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def from_json(tree: Any) -> Any:
    """Turn a value of JSON into what `read_file` would have read: all but texts become Unquoted."""
    if isinstance(tree, dict):
        return {str(key): from_json(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [from_json(value) for value in tree]
    return tree if isinstance(tree, str) else Unquoted(json.dumps(tree))


def to_yaml(cfg: Config) -> str:
    """Write every key of `cfg` as YAML, which loads as an equal Config."""
    return yaml.dump(asdict(cfg), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around texts that PyYAML would leave bare and that are numbers here, as 1e3. Writes no aliases."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        quotes = "'" if text == "???" or NUMBER.fullmatch(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, quotes)

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_str)


def shown(value: Any) -> str:
    """Write a value on one line, as it was or would be written in YAML."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {shown(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(shown, value))}]"
    else:
        text = value if isinstance(value, Unquoted) else yaml.safe_dump(value, width=10**6).removesuffix("\n...\n")
    return short(text)


def printable(text: object) -> str:
    """Escape the characters of a name that move the cursor or end a line."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def short(text: object, most: int = SHOWN) -> str:
    """Put a text on one line, cut off after `most` characters."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= most else f"{line[:most]}..."
