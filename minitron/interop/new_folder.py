"""The folder that a conversion makes: it appears whole, under a name that was free, or not at all.

    with new_folder("out/model") as folder:     # out/model.partial-4711
        ...                                     # an error in here removes it
                                                # out/model

Conversions write their models into such a folder.
"""

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def new_path(text: str) -> str:
    """Convert the argument that names what a command makes. Raises ArgumentTypeError if it exists."""
    if os.path.lexists(text):
        raise argparse.ArgumentTypeError(f"{text} exists already; delete it or name a new folder")
    return text


@contextlib.contextmanager
def new_folder(target: str) -> Iterator[Path]:
    """Make a temporary folder beside `target`. It is renamed to `target` at the end, and removed after an error."""
    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        partial.mkdir()
        try:
            yield partial
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error}); nothing is left of it") from error
