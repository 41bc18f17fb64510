"""Results that can be traced: every record names the machine, the versions, the command and the commit behind it.

`benchmarks/results/results.jsonl` holds one JSON object a line, oldest first; `kind` says which program wrote it.
A copy of the project without its git history names the commit with `--commit`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "results.jsonl"
PACKAGES = ("torch", "triton", "transformer_engine", "megatron-core", "torchtitan", "transformers", "peft")


def add_options(parser: argparse.ArgumentParser, results: Path | None = RESULTS) -> None:
    parser.add_argument(
        "--results",
        type=_file,
        default=results,
        metavar="FILE",
        help=f"where records are appended (default: {results or 'nowhere'})",
    )
    parser.add_argument("--commit", help="commit to name in the records (default: git's)")


def _file(text: str) -> Path:
    """Asked before a measurement, whose record would be lost after it."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    return Path(text)


def named(recipe: str, keys: Sequence[str]) -> str:
    """A recipe with the keys that change it, without their sections. Number formats have a column of their own."""
    others = (key for key in keys if key.split("=")[0] not in ("precision.fp8", "precision.dtype"))
    return " ".join([recipe, *(key.split(".", 1)[1] for key in others)])


def append(args: argparse.Namespace, kind: str, figures: dict) -> dict:
    """Write one record and return it."""
    return write(args.results, {"kind": kind, **figures, **environment(), "commit": args.commit or commit()})


def write(path: Path, entry: dict) -> dict:
    """Append a whole line, also where several processes do, and return its record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, and so written
        file.write(json.dumps(entry) + "\n")
    return entry


def rows(path: Path | None) -> list[dict]:
    """All records of a file, oldest first; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    return [json.loads(line) for line in lines]


def gradients(row: dict) -> str:
    """The format of a row's gradients: float32 where it names none."""
    return row.get("gradients", "fp32")


def environment() -> dict:
    """What a figure depends on beside the code. None where there is no GPU or package."""
    gpu, power = (
        (_output("nvidia-smi", "--query-gpu=name,power.limit", "--format=csv,noheader,nounits") or ",")
        .split("\n")[0]
        .split(",")
    )
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu or None,
        "power_limit_watts": float(power) if power else None,
        "versions": {"cuda": torch.version.cuda, **{name: _version(name) for name in PACKAGES}},
        "command": shlex.join(_without(sys.argv, "--results", "--commit", "--plot", "--dir")),
    }


def commit() -> str | None:
    """The checked-out commit, marked if the working tree differs from it; None outside of a git repository."""
    head = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    return head and head + ("-dirty" if _output("git", "-C", str(ROOT), "status", "--porcelain", "-uno") else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _without(argv: list[str], *options: str) -> list[str]:
    """The arguments less these options and their values: where a record goes does not change what it says."""
    return [arg for before, arg in zip([""] + argv, argv) if arg not in options and before not in options]


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def origin(row: dict) -> str:
    """Say in one line where a row comes from: GPU, versions, day, commit."""
    power = f" at {row['power_limit_watts']:g} W" if row["power_limit_watts"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
    return f"{row['gpu'] or 'CPU'}{power}; {versions}; {row['time'][:10]}, commit {(row['commit'] or 'unknown')[:10]}"
