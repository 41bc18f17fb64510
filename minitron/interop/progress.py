"""The progress of work that takes minutes: a bar on a terminal, and nothing in a log."""

from typing import Any

from tqdm import tqdm


def progress_bar(total: int, unit: str, doing: str) -> Any:
    """Return a tqdm bar that appears once the work has taken a second, if stderr is a terminal."""
    return tqdm(total=total, unit=unit, unit_scale=True, desc=doing, disable=None, delay=1)
