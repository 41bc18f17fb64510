"""Answer a name that users of other trainers type with our key, or with the reason why none does the same.

    error: unknown key trainer.max_steps; use train.steps
    error: unknown option --num-experts; mixtures of experts are not supported; drop it

names.yaml is the table. `configs/README.md` shows it.
"""

from __future__ import annotations

import functools
from pathlib import Path

from minitron.config.schema import keys
from minitron.config.text import read_file


def answer(theirs: str, value: str = "") -> str | None:
    """Return "use train.steps" for max_steps, or a sentence of the table; None for a name that is not there.

    value: is written behind the key. The name may have more before it, as training.model.num_layers. Dashes count as
    underscores, capitals as small letters. The `--` of an option and the `+` of Hydra do not count.
    """
    parts = theirs.lstrip("-+").replace("-", "_").lower().split(".")[-3:]
    found = next((table()[end] for i in range(len(parts)) if (end := ".".join(parts[i:])) in table()), None)
    return f"use {found}{value}" if found in table() else found


@functools.cache
def table() -> dict[str, str]:
    """Map every name of names.yaml to our key or to a sentence, and every key of ours to itself."""
    rows = read_file(str(Path(__file__).with_name("names.yaml")))
    theirs = {name: row for row, trainers in rows.items() for names in trainers.values() for name in names.split()}
    return theirs | {key.name: key.name for key in keys()}


def keys_named(name: str) -> list[str]:
    """List our keys of this name, in any section."""
    return [key.name for key in keys() if key.name.split(".")[-1] == name]
