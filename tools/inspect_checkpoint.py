"""Show what is in a checkpoint, and check every byte of it.

    python tools/inspect_checkpoint.py runs/a                        # the newest of a directory
    python tools/inspect_checkpoint.py runs/a/step_00000020 --tensors

Exit status 1, with one line that names the file, if anything is damaged or missing.
"""

import argparse
import sys
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.checkpoint.directory import checkpoints
from minitron.checkpoint.reader import Reader
from minitron.config.command import Parser, run
from minitron.config.text import printable


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a checkpoint, or a directory of checkpoints: then its newest")
    parser.add_argument("--tensors", action="store_true", help="list every tensor: its shape and what is stored of it")
    parser.add_argument("--no-verify", action="store_true", help="read the index alone, not the files it names")
    options = parser.parse_args(argv)
    if not Path(options.path).expanduser().exists():
        raise ValueError(f"{options.path}: there is no such folder; name a checkpoint, or a directory of checkpoints")
    reader = Reader(options.path)
    print(describe(reader))
    if options.tensors:
        for name in reader.names():
            print(f"  {printable(name)}   {list(reader.shape(name))}   {', '.join(_stored(reader, name))}")
    if not options.no_verify:
        reader.verify()
        print(f"  all {len(reader.files)} checksums are right")


def describe(reader: Reader) -> str:
    """The paragraph about a checkpoint; nothing but its index is read."""
    elements = {name: prod(reader.shape(name)) for name in reader.names()}
    weights = [name for name in elements if {"param", "master"} & set(reader.kinds(name))]
    total = {}
    for name, count in elements.items():
        for kind in reader.kinds(name):
            total[kind] = total.get(kind, 0) + count * reader.dtype(name, kind).itemsize
    others = [printable(folder.name) for folder in checkpoints(reader.path.parent).values() if folder != reader.path]
    size = sum(record["bytes"] for record in reader.files.values())
    state = [printable(f"{name} {value}") for name, value in reader.state.items() if name not in ("data", "rerun")]
    return "\n".join(
        [
            printable(reader.path),
            f"  iteration {reader.iteration:,}   consumed samples {reader.consumed_samples:,}",
            f"  saved by {'   '.join(f'{printable(axis)} {size}' for axis, size in reader.layout.items())}",
            f"  parameters {sum(elements[name] for name in weights):,} in {len(weights)} tensors",
            f"  {size / 1e9:.3f} GB in {len(reader.files)} files: "
            + ", ".join(f"{printable(kind)} {num_bytes / 1e9:.3f} GB" for kind, num_bytes in total.items()),
            f"  state: {', '.join(state) or 'weights only'}",
            f"  beside it: {', '.join(others) or 'no other checkpoint'}",
        ]
    )


def _stored(reader: Reader, name: str) -> list[str]:
    return [f"{printable(kind)} {str(reader.dtype(name, kind)).removeprefix('torch.')}" for kind in reader.kinds(name)]


if __name__ == "__main__":
    run(main)
