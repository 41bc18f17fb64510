"""Text that machines have, as JSONL: `python benchmarks/text.py text.jsonl [--mb 200] [--under FOLDER ...]`.

A loss curve wants more text than the Python standard library's 12 MB, and nothing is downloaded. Installed packages
hold some hundred megabytes of sources and pages that people wrote. Each file is a document; files that are no UTF-8,
shorter than 200 characters, longer than a megabyte or seen already are left out. The order is that of a hash of the
text, so any part of it holds all kinds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

KINDS = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".c", ".cpp", ".cu"}
SHORTEST, LONGEST = 200, 1_000_000  # characters


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("output", type=Path, help="file to write")
    parser.add_argument("--mb", type=float, default=200, help="megabytes of text to write at most (default 200)")
    standard = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    parser.add_argument("--under", nargs="+", default=standard, help="folders (default: Python's and its packages')")
    args = parser.parse_args(argv)
    texts, size, count = dict(documents(args.under)), 0, 0
    with open(args.output, "w", encoding="utf-8") as file:
        for _, path in sorted(texts.items()):
            text = path.read_text(encoding="utf-8")
            if size + len(text) > args.mb * 1e6:
                break
            file.write(json.dumps({"text": text}) + "\n")
            size, count = size + len(text), count + 1
    print(f"{count:,} documents, {size / 1e6:.1f} MB of {sum(p.stat().st_size for p in texts.values()) / 1e6:.1f}")
    if not count:
        sys.exit(f"error: there is no text under {' '.join(map(str, args.under))}; name other folders with --under")


def documents(folders: list[str]) -> Iterator[tuple[str, Path]]:
    """A hash of the text and its file."""
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.suffix not in KINDS or not path.is_file():
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if SHORTEST <= len(text) <= LONGEST:
                yield hashlib.sha256(text.encode()).hexdigest(), path


if __name__ == "__main__":
    main()
