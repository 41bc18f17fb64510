"""What the README tells users to type exists: files, keys with their values, options of the tools."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from minitron.config import cli

ROOT = Path(__file__).parents[1]
SECTIONS = "model|parallel|train|precision|optimizer|data|checkpoint|log|profile|finetune|lora"


def typed() -> list[str]:
    """Each command of the shell, its lines joined, and each code span; of a table that begins with what users used to
    type, what they type now."""
    prose, *blocks = re.split(r"^```(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    texts = [prose, *blocks[1::2]]
    commands = [
        line.split("  #")[0]
        for block in blocks[::2]
        if block[0] == "\n"  # another language is named there
        for line in re.sub(r"\\\n\s*", "", block).splitlines()
    ]
    old = None
    for line in "\n".join(texts).splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1] if line.startswith("|") else []
        if not cells:
            old = None
        elif any("you used to type" in cell for cell in cells):
            old = next(i for i, cell in enumerate(cells) if "you used to type" in cell)
        commands += re.findall(r"`([^`]+)`", "|".join(cells[old + 1 :]) if old is not None else line)
    return commands


TYPED = typed()


def test_the_files_are_there():
    paths = {
        path
        for text in TYPED
        for path in re.findall(r"(?<![\w/.-])(?:launch|configs|tools|benchmarks|tests|minitron)/[\w./-]*\w", text)
    }
    paths -= {"launch/jube/nlp_benchmark_run"}  # which JUBE makes
    assert len(paths) > 50 and not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_the_keys_are_there_and_take_the_values():
    words = {
        word
        for text in TYPED
        if not text.startswith("error:")
        for word in re.findall(rf"(?<![\w/.-])(?:{SECTIONS})\.[a-z_]\w*(?:\.\w+)*(?:=(?:\[.*?\]|[^\s,|\"}}]+))?", text)
    }
    defaults = cli.to_yaml(cli.load([]))
    for word in words:
        section, name, value = re.fullmatch(r"(\w+)\.(\w+)[\w.]*(=.*)?", word).groups()
        assert re.search(rf"^{section}:\n(  .*\n)*?  {name}:", defaults, re.M), word
        if value and not re.fullmatch(r"=([A-Z]+|\.\.\.)", value):  # placeholders
            cli.load([word])
    assert len(words) > 40


TOOLS = {path for text in TYPED if " --" in text for path in re.findall(r"(?:tools|benchmarks)/\w+\.py", text)}


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_the_options_are_there(tool):
    options = {
        option for text in TYPED if tool in text for option in re.findall(r"(?<=\s)--[\w-]+", text[text.index(tool) :])
    }
    shown = subprocess.run([sys.executable, str(ROOT / tool), "--help"], capture_output=True, text=True).stdout
    assert not [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", shown)]
