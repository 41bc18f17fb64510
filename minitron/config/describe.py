"""Describe every key to a reader (`--help`) and to an editor (`--schema`), as `minitron.config.schema` declares it.

An editor with a YAML language server completes and checks a file whose first line names the JSON schema, as those of
the recipes do: `# yaml-language-server: $schema=schema.json`. The schema has types, choices and intervals. Rules that
involve several keys are checked by a run and by `--dry-run` alone.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from minitron.config.convert import type_name
from minitron.config.schema import Config, Shares, accepted_types, keys
from minitron.config.text import short, shown

DRY_RUN = "--dry-run --world N [--ranks first,middle,last,fullest] [--json]"
USAGE = (
    "[CONFIG.yaml or RECIPE ...] [section.key=value ...] [--print-config] [--dry-run --world N] [--evaluate] "
    "[--recipes] [--schema] [--help [SECTION ...]]"
)
# Text without quotes may look like a number to JSON: data.paths=[0.7,data/web].
JSON_TYPES = {int: ["integer"], float: ["number"], str: ["string", "number"], bool: ["boolean"], NoneType: ["null"]}


def help_text(description: str, asked: Collection[str] = ()) -> str:
    """Write every key by section: its default, what it means, its type and its range. asked: sections, none for all.

    Raises ValueError for another word in `asked`.
    """
    sections = {section.name: section for section in fields(Config)}
    if unknown := [name for name in asked if name not in sections]:
        raise ValueError(f"--help {short(unknown[0])}: no such section; use one of {', '.join(sections)}")
    overview = [
        description.strip().split("\n\n")[0],
        "",
        textwrap.fill(f"usage: {USAGE}", 120, subsequent_indent="    "),
        "",
        f"{DRY_RUN}: run one step of some of N ranks here, without GPUs;",
        "print its memory, communication and errors. --ranks also takes the numbers of ranks.",
        "--evaluate: only the validation loss of the checkpoint, or the weights, that the run would start from.",
        "--recipes: the recipes by name, each with what it trains.",
        "--schema: a JSON schema of a configuration file, from which editors complete and check it.",
        textwrap.fill(f"--help SECTION: its keys alone, of {', '.join(f.name for f in fields(Config))}.", 120),
        "",
        "Later files win over earlier ones, and overrides over files; key=null drops what a file has set.",
        "Every key, with its default:",
    ]
    lines = [] if asked else overview
    for name in asked or sections:
        lines += ["", f"{name}: {sections[name].metadata['help']}"]
        for key, accepted, f in keys(accepted_types(Config)[name][0], f"{name}."):
            lines += [
                f"  {key}={shown(f.default)}   ({type_name(accepted, f.metadata['within'])})",
                *(f"      {line}" for line in textwrap.wrap(f.metadata["help"], 110)),
            ]
    return "\n".join(lines).lstrip("\n")


def json_schema() -> str:
    """Write the JSON schema of a configuration file."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "minitron configuration"}
    return json.dumps(schema | _typed((Config,)), indent=1)


def _typed(accepted: tuple, within: str | None = None) -> dict[str, Any]:
    """Return the JSON schema of a value of the accepted types. within: the interval of its numbers."""
    kind, args = accepted[0], get_args(accepted[0])
    if get_origin(kind) is Literal:
        return {"enum": [*args, *([None] if NoneType in accepted else [])]}
    if kind is Shares:
        return {"type": ["array", "string", "number"], "items": {"type": "number"}, "minItems": 1}
    if is_dataclass(kind):
        properties = {f.name: _described(accepted_types(kind)[f.name], f) for f in fields(kind)}
        first, rest = ["object"], {"properties": properties, "additionalProperties": False}
    elif get_origin(kind) is tuple:
        size = {} if Ellipsis in args else {"minItems": len(args), "maxItems": len(args)}
        first, rest = ["array"], {"items": _typed(args[:1], within), **size}
    else:
        first = ["string"] if kind is str and bool in accepted else JSON_TYPES[kind]
        rest = _bounds(within) if within else {}
    words = [word for other in accepted[1:] if get_origin(other) is Literal for word in get_args(other)]
    names = [*first, *(name for other in accepted[1:] for name in JSON_TYPES.get(other, ["string"]))]
    pattern = {"pattern": f"^({'|'.join(words)})$"} if words else {}
    return {"type": names if len(names) > 1 else names[0], **rest, **pattern}


def _described(accepted: tuple, f: Any) -> dict[str, Any]:
    default = {} if f.default is MISSING else {"default": f.default}
    return {"description": f.metadata["help"], **default, **_typed(accepted, f.metadata["within"])}


def _bounds(within: str) -> dict[str, float]:
    """Write "[0, 1)" as {"minimum": 0, "exclusiveMaximum": 1}."""
    low, high = within[1:-1].split(", ")
    lowest = "minimum" if within[0] == "[" else "exclusiveMinimum"
    highest = "maximum" if within[-1] == "]" else "exclusiveMaximum"
    return {lowest: json.loads(low), highest: json.loads(high)}
