"""The manual, as tests read it: every README and page, and the code blocks in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
READMES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md")])


def blocks(path: Path, language: str = "") -> list[str]:
    """Return the code blocks of that language; without one, those that name none: commands of the shell."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S)
    return [code for kind, code in fenced if kind == language]


def program(path: Path, name: str) -> str:
    """Return the Python block whose first line, a docstring, names that file or test."""
    (found,) = [block for block in blocks(path, "python") if re.search(rf"(?<!\w){re.escape(name)}", block)]
    return found
