"""Find our key for a name that users of NeMo and Megatron-LM type; names.yaml is the table.

error: unknown key trainer.max_steps; use train.steps
"""

from __future__ import annotations

import functools
from pathlib import Path

from minitron.config.schema import keys
from minitron.config.text import read_file


def our_key(theirs: str) -> str | None:
    """Return our key for a name that ends with a name of the table or with a key of ours, as training.model.num_layers.

    Dashes count as underscores, capitals as small letters. The `--` of an option and the `+` of Hydra do not count.
    """
    parts = theirs.lstrip("-+").replace("-", "_").lower().split(".")[-3:]
    return next((table()[end] for i in range(len(parts)) if (end := ".".join(parts[i:])) in table()), None)


@functools.cache
def table() -> dict[str, str]:
    """Map every name of names.yaml, and every key of ours, to our key."""
    rows = read_file(str(Path(__file__).with_name("names.yaml")))
    return {name: key for key, names in rows.items() for name in names.split()} | {key.name: key.name for key in keys()}


def keys_named(name: str) -> list[str]:
    """List our keys of this name, in whatever section."""
    return [key.name for key in keys() if key.name.split(".")[-1] == name]
