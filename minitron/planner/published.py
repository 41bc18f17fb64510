"""Steps that others published (published.json), as configurations that can be planned."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from minitron.config import cli, flops
from minitron.config.installed import ROOT
from minitron.config.schema import Config

PUBLISHED = Path(__file__).with_name("published.json")


class PublishedStep(NamedTuple):
    """One measured step. arguments: minitron.pretrain's. device, fabric: names in devices.json; None: the device's."""

    name: str
    gpus: int
    arguments: tuple[str, ...]
    device: str
    seconds: float
    fabric: str | None = None
    source: str = ""


def published_steps(path: Path = PUBLISHED) -> list[PublishedStep]:
    """Read all published steps, one for each number of GPUs."""
    data, rows = json.loads(path.read_text(encoding="utf-8")), []
    for table in data["tables"]:
        for gpus, seconds in zip(table["cells"]["gpus"], table["cells"]["step_seconds"]):
            arguments = _arguments(table, table["samples_per_gpu"] * int(gpus))
            rows.append(PublishedStep(table["name"], int(gpus), arguments, table["device"], float(seconds)))
    for entry in data["reports"] + data["single"] + [one for entry in data["sourced"] for one in _scales(entry)]:
        arguments = _arguments(entry, entry["global_batch_size"])
        step = entry["gpus"], arguments, entry["device"], _seconds(entry, arguments)
        rows.append(PublishedStep(entry["name"], *step, entry.get("fabric"), entry.get("source", "")))
    return rows


def _scales(entry: dict) -> list[dict]:
    """Split an entry with lists of GPUs, batches and figures into entries of one scale."""
    if not isinstance(entry["gpus"], list):
        return [entry]
    listed = [key for key in ("gpus", "global_batch_size", "step_seconds") if key in entry]
    return [entry | dict(zip(listed, values)) for values in zip(*(entry[key] for key in listed), strict=True)]


def _seconds(entry: dict, arguments: tuple[str, ...]) -> float:
    """Compute the seconds of a step from the published figure: these, tokens/s, or a GPU's TFLOP/s with all scores."""
    if "step_seconds" in entry:
        return float(entry["step_seconds"])
    if "tokens_per_second" in entry:
        return entry["global_batch_size"] * entry["seq_len"] / float(entry["tokens_per_second"])
    model = configuration(arguments).model
    operations = flops.full(model, entry["seq_len"]) * entry["global_batch_size"]
    return operations / (float(entry["tflops"]) * 1e12 * entry["gpus"])


def _arguments(entry: dict, batch: int) -> tuple[str, ...]:
    return (str(ROOT / entry["config"]), *entry["overrides"], f"train.global_batch_size={batch}")


@lru_cache(None)
def configuration(arguments: tuple[str, ...]) -> Config:
    return cli.load([str(ROOT / arg) if arg.startswith("configs/") else arg for arg in arguments])
