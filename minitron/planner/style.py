"""One style for all pictures: sizes, letters and colours.

A picture is as wide as a page's text, so its letters are as large in print as they are here. Colours have a meaning
(COLORS), and the tints of one colour are parts of one thing. Letters are matplotlib's own, which every machine that
draws has. Programs that write SVG without matplotlib take sizes and colours from here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path

from minitron.config.files import errors_as
from minitron.config.installed import pip_install

WIDTH = 7.0  # inches
DPI = 200
FONT = "DejaVu Sans"
SMALL = 7  # points: the smallest letters; all others have TEXT or TITLE
TEXT, TITLE = 8, 9
INK, FAINT = "#222222", "#8a8f98"  # of letters and lines
BLUE, ORANGE, GREEN, RED = "#2a6fbb", "#e07b39", "#5f9257", "#c94f4f"
GOLD, PURPLE, GREY = "#d9a441", "#7d5ba6", "#b0b7c0"
CURVES = (BLUE, ORANGE, GREEN, PURPLE, GOLD, RED, GREY)

STYLE = {
    "font.family": FONT,
    **dict.fromkeys(("font.size", "axes.labelsize"), TEXT),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), SMALL),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), FAINT),
    **dict.fromkeys(("axes.titleweight", "figure.titleweight"), "bold"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.titlesize": TITLE,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.prop_cycle": f"cycler('color', {list(CURVES)})",
    "figure.titlesize": TITLE + 1,
    "figure.constrained_layout.use": True,
    "grid.color": "#ebebeb",
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,  # letters as letters: journals refuse the other kind
    "svg.fonttype": "none",
}


class NoMatplotlib(ValueError):
    """matplotlib is not installed; the message has the command that installs it."""


def tint(color: str, share: float) -> str:
    """Mix a colour "#rrggbb" with white: 1 leaves it as it is, 0 is white."""
    mixed = (round(255 - share * (255 - int(color[i : i + 2], 16))) for i in (1, 3, 5))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def styled(draw: Callable) -> Callable:
    """Let a function that draws with matplotlib do so in this style. A call raises NoMatplotlib without that."""

    @wraps(draw)
    def in_style(*args, **kwargs):
        try:
            import matplotlib.figure  # noqa: F401, here to say in one line what is missing
            import matplotlib.style
        except ImportError:
            fix = f"{pip_install('plot')}, or do without"
            raise NoMatplotlib(f"no picture was drawn: matplotlib is not installed; {fix}") from None
        with matplotlib.style.context(["default", STYLE]):
            return draw(*args, **kwargs)

    return in_style


@styled
def new(height: float, rows: int = 1, columns: int = 1, **options):
    """Make a figure `height` inches tall; returns it and its axes, as `Figure.subplots` does with these options."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.subplots(rows, columns, **options)


@styled
def save(figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix, PNG without one. Raises OSError or ValueError."""
    figure.savefig(path, dpi=DPI, format=path.suffix[1:] or "png")


def save_png(figure, path: Path) -> None:
    """Do the same for a tool's --png. Raises ValueError."""
    named = f"{path} cannot be written"
    with errors_as(ValueError, lambda error: f"{named} ({error}); name another file with --png", OSError, ValueError):
        save(figure, path)
