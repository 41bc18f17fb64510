"""Start a tool: a mistake of the user is one line and exit status 1, never a traceback or a page of usage.

A tool's `main(argv)` parses with `Parser`, raises ValueError for a user's mistake, and is started by `run(main)`.
"""

import argparse
import contextlib
import math
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from minitron.config.cli import output, user_errors
from minitron.config.installed import typed
from minitron.config.text import printable


class Parser(argparse.ArgumentParser):
    """Raises ValueError for a bad argument, where argparse prints its usage and exits with status 2.

    In a wheel --help names the commands.
    """

    def __init__(self, description: str | None = None, **options: Any):
        super().__init__(description=description and typed(description), **options)
        self.prog = typed(f"tools/{self.prog}").removeprefix("tools/")

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists what there is")


class Printable:
    """A stream that escapes characters which move a terminal's cursor, since a printed name may hold them.

    Newlines and tabs are not escaped, so callers put a name in a table or a paragraph through `printable` first.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(re.sub(r"[^\n\t]+", lambda found: printable(found[0]), text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run(main: Callable[[list[str]], None]) -> None:
    """Call `main` with the command line. Status: 1 for a ValueError, 128 + the signal for Ctrl-C and a closed pipe."""
    try:
        with contextlib.redirect_stdout(Printable(sys.stdout)), output(), user_errors():
            main(sys.argv[1:])
    except MemoryError:
        sys.exit("error: out of memory; raise the limit, or use smaller files")
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def positive(kind: type[int] | type[float]) -> Callable[[str], Any]:
    """Return the type of an argument that is a positive, finite number of this kind."""

    name = "whole number of 1 or more" if kind is int else "positive number"

    def convert(text: str) -> int | float:
        with contextlib.suppress(ValueError, OverflowError):
            if 0 < (value := kind(text)) < math.inf:
                return value
        raise argparse.ArgumentTypeError(f"{text} is not a {name}")

    return convert
