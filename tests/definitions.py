"""Find a run of tokens in a definition, wherever in the project its file lies.

A definition is a function, a class, a variable of a module or a class, or a whole module. It is named by the end of its
dotted path: `Zero1Optimizer.step` and `optim.zero1.Zero1Optimizer.step` both name the method of that class. The name of
a function inside a function is `outer.inner`. A name may fit several definitions; then all of them are searched.

Tokens are those of Python, but comments, white space, line breaks and a comma before a closing bracket do not count.
A formatter or a move to another file therefore changes nothing. A string is one token, an f-string, too.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<skipped> \s+ | \\\n | \#[^\n]* )
    | (?: [rRbBuUfF]{0,2} (?: \"{3} (?: \\. | [^\\] )*? \"{3} | '{3} (?: \\. | [^\\] )*? '{3}
                            | " (?: \\. | [^"\\\n] )* " | ' (?: \\. | [^'\\\n] )* ' ) )
    | 0[xXoObB]\w+ | (?: \d[\d_]*\.?[\d_]* | \.\d[\d_]* ) (?: [eE][+-]?\d+ )? [jJ]?
    | \w+
    | \*\*= | //= | >>= | <<= | \.\.\. | != | -> | := | \*\* | // | << | >> | [-+*/%&|^@=<>]= | .""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    text: str
    start: int
    end: int


class Place(NamedTuple):
    """source[start:end] of a file is the run of tokens."""

    file: Path
    start: int
    end: int


def tokens(source: str) -> list[Token]:
    """Split Python, or a part of it, into tokens with their positions in `source`."""
    found = [Token(match[0], *match.span()) for match in _TOKEN.finditer(source) if match["skipped"] is None]
    following = [token.text for token in found[1:]] + [""]
    return [token for token, after in zip(found, following) if (token.text, after in {")", "]", "}"}) != (",", True)]


class Sources:
    """The definitions of Python files, to be searched. It reads each file once."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        """files: names below `root`. Raises SyntaxError."""
        self.root = root
        self._tokens: dict[Path, list[Token]] = {}
        self._text = {root / name: (root / name).read_text() for name in files}
        self._definitions: list[tuple[str, Path, int, int]] = []  # dotted path, file, range of characters
        for path, text in self._text.items():
            starts = [0]
            for line in text.splitlines(keepends=True):
                starts.append(starts[-1] + len(line))
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self._definitions.append((module, path, 0, len(text)))
            for name, first, last in _definitions(ast.parse(text, str(path)), module):
                self._definitions.append((name, path, starts[first - 1], starts[last]))

    def find(self, name: str, run: str) -> list[Place]:
        """Return each place of a run of tokens in the definitions of that name, in the order of the files."""
        wanted, found = [token.text for token in tokens(run)], set()
        for path, start, end in self.named(name):
            if path not in self._tokens:
                self._tokens[path] = tokens(self._text[path])
            inside = [token for token in self._tokens[path] if start <= token.start and token.end <= end]
            texts = [token.text for token in inside]
            for i in range(len(texts) - len(wanted) + 1):
                if wanted and texts[i : i + len(wanted)] == wanted:
                    found.add(Place(path, inside[i].start, inside[i + len(wanted) - 1].end))
        return sorted(found)

    def named(self, name: str) -> list[tuple[Path, int, int]]:
        """Return file and range of characters of the definitions of that name."""
        return [rest for path, *rest in self._definitions if f".{path}".endswith(f".{name}")]


def find_text(file: Path, text: str) -> list[Place]:
    """Return each place of a text in a file that is not Python; none if there is no such file."""
    found = re.finditer(re.escape(text), file.read_text()) if file.is_file() else ()
    return [Place(file, *match.span()) for match in found]


def _definitions(node: ast.AST, path: str) -> Iterator[tuple[str, int, int]]:
    """Yield dotted path, first and last line of each definition below `node`, whose own path is `path`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{path}.{child.name}"
            yield name, min([child, *child.decorator_list], key=lambda n: n.lineno).lineno, child.end_lineno
            yield from _definitions(child, name)
        elif isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Module | ast.ClassDef):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            for target in (name for top in targets for name in ast.walk(top) if isinstance(name, ast.Name)):
                yield f"{path}.{target.id}", child.lineno, child.end_lineno
        else:
            yield from _definitions(child, path)
