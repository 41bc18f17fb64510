"""Pictures of a simulated schedule: a text for the terminal, an SVG for the page.

One row is a rank, one column a slice of time.  The text writes each operation as its microbatch and its chunk, a
small letter for a forward and a capital for a backward, and fills the rest of its time with dashes:

    0 0a1a....0A--..1A--        pp = 2, two microbatches, forward 1 s, backward 2 s
    1 ..0a0A--1a1A--....

The SVG shows forwards in blue, backwards in orange, later chunks darker, idle time hatched.
"""

from math import floor, inf, log10
from string import ascii_lowercase

from minitron.pipeline.schedule import Forward
from minitron.pipeline.simulate import Event, Timeline

MAX_COLUMNS = 10_000  # of text; nobody reads more, and a thousandfold spread of durations would fill the memory
ROW, GAP, LEFT, TOP = 30, 6, 64, 84  # pixels: height of a row, space between rows, margins of the picture
HUES = {True: 212, False: 28}  # forward, backward


def describe(timeline: Timeline) -> str:
    """One line: the schedule and its bubble, the idle time over the compute time."""
    s = timeline.schedule
    kind = "Forward only" if not s.training else "1F1B" if s.vp == 1 else "Interleaved 1F1B"
    sizes = f"pp {s.pp}, vp {s.vp}, microbatches {s.num_microbatches}"
    return f"{kind}: {sizes}, bubble {100 * timeline.bubble:.1f} % of the compute time"


def draw_text(timeline: Timeline) -> str:
    """One row per rank; the shortest operation is as wide as its label, all others in proportion.

    Raises ValueError for more than 26 chunks (letters) or MAX_COLUMNS columns.
    """
    s = timeline.schedule
    if s.vp > len(ascii_lowercase):
        raise ValueError(f"vp={s.vp} has more chunks than the alphabet has letters; use vp=26 or less")
    label = len(str(s.num_microbatches - 1)) + 1
    shortest = min(event.end - event.start for event in timeline.events)
    wide = label * timeline.makespan / shortest if shortest else inf  # a transfer can be too long to count beside
    if not wide <= MAX_COLUMNS:  # a NaN is not: seconds without end less seconds without end
        raise ValueError(
            f"the drawing would have {wide:.6g} columns, the limit is {MAX_COLUMNS}; use fewer microbatches, or times "
            f"that differ less"
        )

    def column(seconds: float) -> int:
        return floor(label * seconds / shortest + 0.5)

    rows = [["."] * column(timeline.makespan) for _ in range(s.pp)]
    for event in timeline.events:
        start, end = column(event.start), column(event.end)
        letter = ascii_lowercase[event.action.chunk]
        text = f"{event.action.mb}{letter if type(event.action) is Forward else letter.upper()}"
        rows[event.rank][start:end] = text.ljust(end - start, "-")[: end - start]
    width = len(str(s.pp - 1))
    return "\n".join(f"{rank:>{width}} {''.join(row)}" for rank, row in enumerate(rows))


def draw_svg(timeline: Timeline) -> str:
    """The same as an SVG document; every box has a tooltip with rank, microbatch, chunk and times."""
    s = timeline.schedule
    shortest = min(event.end - event.start for event in timeline.events)
    plot = min(max(720.0, 22 * timeline.makespan / shortest), 6000.0)  # 22 pixels hold three digits
    scale = plot / timeline.makespan  # pixels per second
    bottom = TOP + s.pp * (ROW + GAP)
    width = max(LEFT + plot + 24, LEFT + 150 + 28 * s.vp + 320)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + 44}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">',
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#f4f4f4"/><rect width="1.5" height="6" fill="#d4d4d4"/></pattern></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="28" font-size="17" font-weight="bold">{describe(timeline)}</text>',
        *_legend(s.vp),
    ]
    for rank in range(s.pp):
        y = TOP + rank * (ROW + GAP)
        parts.append(f'<text x="{LEFT - 10}" y="{y + ROW / 2 + 4}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{plot:.2f}" height="{ROW}" fill="url(#idle)"/>')
    parts += [_box(event, s.vp, scale) for event in timeline.events]
    parts += _axis(timeline.makespan, scale, bottom)
    return "\n".join([*parts, "</svg>", ""])


def _colour(forward: bool, chunk: int, vp: int) -> str:
    lightness = 76 if vp == 1 else 86 - 30 * chunk / (vp - 1)
    return f"hsl({HUES[forward]}, 85%, {lightness:.0f}%)"


def _box(event: Event, vp: int, scale: float) -> str:
    op, forward = event.action, type(event.action) is Forward
    x, y = LEFT + event.start * scale, TOP + event.rank * (ROW + GAP)
    width = (event.end - event.start) * scale
    tooltip = (
        f"rank {event.rank}: {'forward' if forward else 'backward'} of microbatch {op.mb} through chunk {op.chunk}, "
        f"{event.start:g} to {event.end:g} s"
    )
    text = ""
    if width >= 7 * len(str(op.mb)) + 1:
        text = f'<text x="{x + width / 2:.2f}" y="{y + ROW / 2 + 4}" text-anchor="middle">{op.mb}</text>'
    return (
        f'<g><title>{tooltip}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" '
        f'fill="{_colour(forward, op.chunk, vp)}" stroke="white" stroke-width="0.8"/>{text}</g>'
    )


def _legend(vp: int) -> list[str]:
    """Forward and backward with one swatch per chunk, and idle."""
    parts, x = [], float(LEFT)
    for name, forward in (("forward", True), ("backward", False)):
        for chunk in range(vp):
            parts.append(f'<rect x="{x}" y="46" width="14" height="14" fill="{_colour(forward, chunk, vp)}"/>')
            x += 14
        parts.append(f'<text x="{x + 6}" y="57">{name}</text>')
        x += 80
    parts.append(f'<rect x="{x}" y="46" width="14" height="14" fill="url(#idle)"/>')
    parts.append(f'<text x="{x + 20}" y="57">idle</text>')
    chunks = f"; chunks 0 to {vp - 1} from light to dark" if vp > 1 else ""
    parts.append(f'<text x="{x + 66}" y="57">number: microbatch{chunks}</text>')
    return parts


def _axis(makespan: float, scale: float, y: float) -> list[str]:
    """A time axis with 5 to 12 ticks at 1, 2 or 5 times a power of ten seconds."""
    power = 10.0 ** floor(log10(makespan / 5))
    step = max(factor * power for factor in (1, 2, 5) if factor * power <= makespan / 5)
    parts = [f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + makespan * scale:.2f}" y2="{y}" stroke="#888"/>']
    for n in range(floor(makespan / step) + 1):
        x = LEFT + n * step * scale
        parts.append(f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 5}" stroke="#888"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 19}" text-anchor="middle" fill="#555">{n * step:g}</text>')
    parts.append(f'<text x="{LEFT - 10}" y="{y + 19}" text-anchor="end" fill="#555">seconds</text>')
    return parts
