"""Instruction pairs that every machine has: what the standard library's functions say of themselves.

A first fine-tuning must need no download either.  The sources of corpus.py hold some thousand functions whose docstring
begins with a sentence, which makes a task that a small model pretrained on those sources can learn in minutes:

    {"prompt": "Explain random.Random.shuffle(self, x):", "completion": " Shuffle list x in place, and return None."}

The base model would go on with code here; a tuned one answers in a sentence.  The pairs are a pure function of the
sources, kept in `data.cache_dir` as JSONL, and read from there like any other file (sft.py).

Left out: private functions, and first lines that end in the middle of a sentence.
"""

import ast
import json
import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path

from minitron.data.cache import build_once
from minitron.data.corpus import fingerprint_of, read_sources


def build_docstrings(cache_dir: str | os.PathLike, root: str | os.PathLike | None = None) -> Path:
    """The JSONL file of pairs, built once; safe to call from any number of processes at once.

    root: the folder of sources, by default this Python's standard library.  Raises ValueError when there is no source.
    """
    sources = read_sources(root)
    fingerprint = fingerprint_of(sources, Path(__file__).read_bytes())  # another form of the pairs is another file
    folder = Path(cache_dir) / f"docstrings-{platform.python_version()}-{fingerprint}"
    return build_once(folder, lambda folder: _build(folder, sources)) / "docstrings.jsonl"


def _build(folder: Path, sources: list[tuple[str, bytes]]) -> None:
    pairs = {}  # the first of equal signatures
    for name, content in sources:
        for signature, sentence in explained(name, content):
            pairs.setdefault(f"Explain {signature}:", f" {sentence}")
    rows = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in pairs.items()]
    (folder / "docstrings.jsonl").write_text("".join(f"{row}\n" for row in rows))


def explained(name: str, content: bytes) -> Iterator[tuple[str, str]]:
    """(signature, first sentence of the docstring) of a module's public functions and methods, top to bottom."""
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python no longer likes
            tree = ast.parse(content)
    except (SyntaxError, ValueError):  # templates and files of another Python
        return

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{prefix}{node.name}.")
                elif (first := (ast.get_docstring(node) or "").split("\n")[0].strip()).endswith("."):
                    yield f"{prefix}{node.name}({ast.unparse(node.args)})", first

    yield from walk(tree.body, f"{module}.")
