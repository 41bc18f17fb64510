"""Draw a pipeline schedule, with its bubble and the activations that each rank holds.

    python tools/draw_pipeline.py --pp 4 --vp 2 --microbatches 8
    python tools/draw_pipeline.py --pp 4 --microbatches 16 --backward 3 --transfer 0.1 --svg schedule.svg
    python tools/draw_pipeline.py --pp 4 --microbatches 8 --schedule zb-h1 --weight 0.9

Times are in seconds for one microbatch through one chunk. One row is a rank, one column a slice of time.  3a is the
forward of microbatch 3 through the rank's first chunk, 3A its backward; dashes carry an operation on, dots are idle:

    0 0a1a....0A--..1A--        pp = 2, two microbatches, forward 1 s, backward 2 s
    1 ..0a0A--1a1A--....

Of a split backward 3A is the gradient of the input and 3w are those of the weights, which are part of --backward.
Text is as wide as the terminal, the SVG as a page. Of a longer step they show the warm-up and a window of the steady
part. In the SVG forwards are blue, backwards orange, or gold and green where they are split; later chunks darker,
idle time hatched. Needs no torch and no GPU.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import ceil, floor, log10
from pathlib import Path
from shutil import get_terminal_size
from string import ascii_lowercase
from textwrap import fill

from minitron.config.command import Parser, positive
from minitron.config.files import errors_as
from minitron.pipeline.schedule import Backward, BackwardInput, BackwardWeight, Forward, Operation, Schedule, make
from minitron.planner import style
from minitron.planner.check import check
from minitron.planner.simulate import Timeline, simulate
from minitron.planner.walk import Event

WIDTH, NARROWEST = 120, 40  # columns of text: without a terminal, and in any
MOST = 1e6  # a step is at most this many of its shortest operations: beyond that a drawing shows little
LEFT, TOP, ROW, GAP = 44, 58, 13, 2  # points: left of the plot, above it, a row's height, space between rows
PLOT = 72 * style.WIDTH - LEFT - 12
DIGIT = 0.65 * style.SMALL
COLOURS = {Forward: style.BLUE, Backward: style.ORANGE, BackwardInput: style.GOLD, BackwardWeight: style.GREEN}
NAMES = {Forward: "forward", Backward: "backward", BackwardInput: "input gradient", BackwardWeight: "weight gradients"}


def main(argv: list[str]) -> None:
    count = positive(int)
    parser = Parser(description="Draw a pipeline schedule: when each rank computes what, and when it waits.")
    parser.add_argument("--pp", type=count, required=True, help="pipeline ranks")
    parser.add_argument("--vp", type=count, default=1, help="model chunks per rank (default 1; more: interleaved)")
    parser.add_argument("--schedule", choices=("1f1b", "zb-h1"), default="1f1b", help="default 1f1b")
    parser.add_argument("--microbatches", type=count, required=True, help="microbatches per step and replica")
    parser.add_argument("--forward", type=float, default=1.0, help="seconds of a chunk's forward (default 1)")
    parser.add_argument("--backward", type=float, default=2.0, help="seconds of a chunk's backward (default 2)")
    parser.add_argument("--weight", type=float, help="seconds of it for gradients of weights (default: half of it)")
    parser.add_argument("--transfer", type=float, default=0.0, help="seconds between two ranks (default 0)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the drawing there, always as SVG")
    args = parser.parse_args(argv)
    if args.vp > 1 and (args.pp == 1 or args.schedule == "zb-h1"):
        why = "one rank has no pipeline" if args.pp == 1 else "zb-h1 has one chunk a rank"
        raise ValueError(f"--vp {args.vp} interleaves the chunks of several ranks, and {why}; use --vp 1")
    schedule = make(args.pp, args.vp, args.microbatches, args.schedule)
    timeline = simulate(schedule, args.forward, args.backward, args.transfer, args.weight, check(schedule))
    width = max(NARROWEST, get_terminal_size((WIDTH, 0)).columns)
    text = draw_text(timeline, width)
    if args.svg is not None:
        unwritable = f"--svg {args.svg} cannot be written"
        with errors_as(ValueError, lambda error: f"{unwritable} ({error}); name another file", OSError):
            args.svg.write_text(draw_svg(timeline), encoding="utf-8")
    print(describe(timeline), text, sep="\n")
    peaks = ", ".join(map(str, peak_activations(schedule)))
    held = f"activations held at most, in chunks x microbatches, by rank: {peaks}"
    picture = [f"Picture: {args.svg}"] if args.svg else []
    print(fill(notation(timeline), width), fill(f"step {timeline.makespan:g} s; {held}", width), *picture, sep="\n")


def peak_activations(schedule: Schedule, layers: Sequence[int] | None = None) -> tuple[int, ...]:
    """Count for each rank the most chunk activations alive at once: forwards minus whole backwards.

    layers: those of each stage; then a chunk's activations count once per layer.
    """
    change, pp = {Forward: 1, Backward: -1, BackwardWeight: -1}, schedule.pp
    counts = layers or [1] * pp * schedule.vp
    return tuple(
        max(accumulate(change[type(op)] * counts[op.chunk * pp + r] for op in actions if type(op) in change))
        for r, actions in enumerate(schedule.ranks)
    )


def describe(timeline: Timeline) -> str:
    """Describe the schedule and its bubble in one line."""
    return f"{heading(timeline.schedule)}, {bubble_of(timeline)}"


def bubble_of(timeline: Timeline) -> str:
    """Describe the idle time of all ranks over their compute time."""
    return f"bubble {100 * timeline.bubble:.1f} % of the compute time"


def heading(s: Schedule) -> str:
    """Return the schedule's name and sizes."""
    kind = "Interleaved 1F1B" if s.vp > 1 else s.kind.upper()
    kind = kind if s.training else "Forward only"
    return f"{kind}: pp {s.pp}, vp {s.vp}, microbatches {s.num_microbatches}"


def draw_text(timeline: Timeline, width: int = WIDTH) -> str:
    """Draw one row per rank, in lines of at most `width` columns: `windows` of a long step, one below the other.

    The shortest operation is as wide as its label, all others in proportion. If five of the longest do not fit then,
    all are narrower, and the shortest have a letter without a number. Raises ValueError for more than 26 chunks
    (letters), or if a step is longer than MOST of its shortest operations.
    """
    s, end = timeline.schedule, timeline.makespan
    if s.vp > len(ascii_lowercase):
        raise ValueError(f"vp={s.vp} has more chunks than the alphabet has letters; use vp=26 or less")
    seconds = [event.end - event.start for event in timeline.events]
    if not end <= MOST * min(seconds):  # a NaN is not: seconds without end less seconds without end
        fix = "use fewer microbatches, or times that differ less"
        raise ValueError(f"no drawing shows operations of {min(seconds):g} s in a step of {end:g} s; {fix}")
    digits, room = len(str(s.pp - 1)), width - len(str(s.pp - 1)) - 1
    scale = min((len(str(s.num_microbatches - 1)) + 1) / min(seconds), room / (5 * max(seconds)))  # columns per second
    lines = []
    for name, first, last in windows(timeline, room, digit=1, beside=1):
        columns = floor((last - first) * scale + 0.5)
        rows = [["."] * columns for _ in range(s.pp)]
        for event in timeline.events:
            start, stop = (floor((at - first) * scale + 0.5) for at in (event.start, event.end))
            left, right, letter = max(start, 0), min(stop, columns), _letter(event.action)
            if left < right:
                label = f"{event.action.mb}{letter}" if right - left > len(str(event.action.mb)) else letter
                rows[event.rank][left:right] = ("" if start < 0 else label).ljust(right - left, "-")
        lines += [caption(timeline, name, first, last)] if last - first < end else []
        lines += [f"{rank:>{digits}} {''.join(row)}" for rank, row in enumerate(rows)]
    return "\n".join(lines)


def notation(timeline: Timeline) -> str:
    """Explain the signs of `draw_text` that this schedule has."""
    kinds, vp = {type(event.action) for event in timeline.events}, timeline.schedule.vp
    signs = ["0a: forward of microbatch 0", "0A: its backward" if kinds - {Forward} else ""]
    signs.append("0w: its weight gradients, where 0A leaves them out" if BackwardWeight in kinds else "")
    signs.append(f"a to {ascii_lowercase[vp - 1]}: the rank's chunks" if vp > 1 else "")
    return "; ".join([*filter(None, signs), "--: an operation goes on", "..: idle"])


def _letter(op: Operation) -> str:
    if type(op) is BackwardWeight:
        return "w"
    letter = ascii_lowercase[op.chunk]
    return letter if type(op) is Forward else letter.upper()


def windows(
    timeline: Timeline, room: float = PLOT, digit: float = DIGIT, beside: float = 2
) -> list[tuple[str, float, float]]:
    """Choose parts of a step that fit into `room` with a number in every box: (name, start, end) in seconds, one a row.

    A short step is one part, a longer one two halves. Of a long step the parts are the warm-up, and as much from the
    middle of the steady phase, which is between the last rank's first backward and the first rank's last forward. If
    durations differ so much that five of the longest do not fit, the shortest have no number.
    digit: width of a number's digit; beside: what a box needs besides.
    """
    s, end = timeline.schedule, timeline.makespan
    seconds = [event.end - event.start for event in timeline.events]
    span = max(room * min(seconds) / (digit * len(str(s.num_microbatches - 1)) + beside), 5 * max(seconds))
    if end <= span:
        return [("whole step", 0.0, end)]
    if end <= 2 * span:
        return [("first half", 0.0, end / 2), ("second half", end / 2, end)]
    first, last = ([event for event in timeline.events if event.rank == rank] for rank in (0, s.pp - 1))
    end_of_forwards = max(event.end for event in first if type(event.action) is Forward)
    begin_of_backwards = min((event.start for event in last if type(event.action) is not Forward), default=0.0)
    middle = (begin_of_backwards + end_of_forwards) / 2
    start = min(max(middle - span / 2, span), end - span)
    return [("warm-up", 0.0, span), ("steady", start, start + span)]


def caption(timeline: Timeline, name: str, start: float, end: float) -> str:
    """Return the title of a window."""
    of = f", {start:.4g} to {end:.4g} s of {timeline.makespan:.4g}" if end - start < timeline.makespan else ""
    return name + of


def draw_svg(timeline: Timeline, bubble: str | None = None) -> str:
    """Draw `windows` of the step as an SVG document a page wide, in points; boxes have tooltips.

    bubble: its text; None: that of `describe`.
    """
    pp, shown = timeline.schedule.pp, windows(timeline)
    panel = pp * (ROW + GAP) + 36
    width, height = 72 * style.WIDTH, TOP + len(shown) * panel
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{style.WIDTH}in" height="{height / 72:.2f}in" '
        f'viewBox="0 0 {width:g} {height}" font-family="{style.FONT}, Verdana, sans-serif" '
        f'font-size="{style.SMALL}" fill="{style.INK}">',
        '<defs><pattern id="idle" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="4" height="4" fill="white"/>'
        f'<rect width="1" height="4" fill="{style.tint(style.GREY, 0.6)}"/></pattern></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="14" font-size="{style.TITLE}" font-weight="bold">{heading(timeline.schedule)}</text>',
        f'<text x="{LEFT}" y="26" font-size="{style.TEXT}">{bubble or bubble_of(timeline)}</text>',
        *_legend(timeline),
    ]
    for i, (name, start, end) in enumerate(shown):
        top, scale = TOP + i * panel + 14, PLOT / (end - start)  # points per second
        title = caption(timeline, name, start, end)
        parts.append(f'<text x="{LEFT}" y="{top - 5}" font-weight="bold">{title}</text>')
        for rank in range(pp):
            y = top + rank * (ROW + GAP)
            parts.append(f'<text x="{LEFT - 4}" y="{y + ROW / 2 + 2.5}" text-anchor="end">rank {rank}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{PLOT}" height="{ROW}" fill="url(#idle)"/>')
        for event in timeline.events:
            left, right = max(event.start, start), min(event.end, end)
            if left < right:
                x, y = LEFT + (left - start) * scale, top + event.rank * (ROW + GAP)
                parts.append(_box(event, timeline.schedule.vp, x, y, (right - left) * scale))
        parts += _axis(start, end, scale, top + pp * (ROW + GAP))
    return "\n".join([*parts, "</svg>", ""])


def _colour(kind: type[Operation], chunk: int, vp: int) -> str:
    return style.tint(COLOURS[kind], 0.5 if vp == 1 else 0.25 + 0.5 * chunk / (vp - 1))


def _box(event: Event, vp: int, x: float, y: float, width: float) -> str:
    op, kind = event.action, type(event.action)
    what = f"{NAMES[kind]} of microbatch {op.mb} through chunk {op.chunk}"
    tooltip = f"rank {event.rank}: {what}, {event.start:g} to {event.end:g} s"
    text = ""
    if width >= DIGIT * len(str(op.mb)):
        text = f'<text x="{x + width / 2:.2f}" y="{y + ROW / 2 + 2.5}" text-anchor="middle">{op.mb}</text>'
    return (
        f'<g><title>{tooltip}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" '
        f'fill="{_colour(kind, op.chunk, vp)}" stroke="white" stroke-width="0.5"/>{text}</g>'
    )


def _legend(timeline: Timeline) -> list[str]:
    """Draw each kind of operation of the step with the tints of its chunks, and idle time."""
    parts, x, vp = [], float(LEFT), timeline.schedule.vp
    present = {type(event.action) for event in timeline.events}
    for kind in (kind for kind in NAMES if kind in present):
        width = max(8, 24 / vp)
        for chunk in range(vp):
            fill = _colour(kind, chunk, vp)
            parts.append(f'<rect x="{x:.2f}" y="33" width="{width:.2f}" height="8" fill="{fill}"/>')
            x += width
        parts.append(f'<text x="{x + 4:.2f}" y="39.5">{NAMES[kind]}</text>')
        x += 14 + DIGIT * len(NAMES[kind])
    parts.append(f'<rect x="{x:.2f}" y="33" width="8" height="8" fill="url(#idle)"/>')
    chunks = f"; chunks 0 to {vp - 1} from light to dark" if vp > 1 else ""
    parts.append(f'<text x="{x + 12:.2f}" y="39.5">idle</text>')
    parts.append(f'<text x="{LEFT}" y="51.5">number: microbatch{chunks}</text>')
    return parts


def _axis(start: float, end: float, scale: float, y: float) -> list[str]:
    """Draw a time axis with 5 to 12 ticks at 1, 2 or 5 times a power of ten seconds."""
    span = end - start
    power = 10.0 ** floor(log10(span / 5))
    step = max(factor * power for factor in (1, 2, 5) if factor * power <= span / 5)
    colour = style.FAINT
    parts = [f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + PLOT}" y2="{y}" stroke="{colour}" stroke-width="0.7"/>']
    for n in range(ceil(start / step - 1e-9), floor(end / step + 1e-9) + 1):
        x = LEFT + (n * step - start) * scale
        parts.append(f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 3}" stroke="{colour}" stroke-width="0.7"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 11}" text-anchor="middle">{n * step:g}</text>')
    parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">seconds</text>')
    return parts
