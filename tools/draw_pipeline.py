"""Draw a pipeline schedule, with its bubble and the activations that each rank holds.

    python tools/draw_pipeline.py --pp 4 --vp 2 --microbatches 8
    python tools/draw_pipeline.py --pp 4 --microbatches 16 --backward 3 --transfer 0.1 --svg schedule.svg
    python tools/draw_pipeline.py --pp 4 --microbatches 8 --schedule zb-h1 --weight 0.9

Times are in seconds for one microbatch through one chunk.  One row is a rank, one column a slice of time.  3a is the
forward of microbatch 3 through the rank's first chunk, 3A its backward; dashes carry an operation on, dots are idle:

    0 0a1a....0A--..1A--        pp = 2, two microbatches, forward 1 s, backward 2 s
    1 ..0a0A--1a1A--....

Of a split backward 3A is the gradient of the input and 3w are those of the weights, which are part of --backward.
The SVG shows forwards in blue, backwards in orange, gradients of weights alone in green, later chunks darker, idle time
hatched.  Needs no torch and no GPU.
"""

import sys
from itertools import accumulate
from math import floor, inf, log10
from pathlib import Path
from string import ascii_lowercase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.pipeline.check import check
from minitron.pipeline.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Operation,
    Schedule,
    make,
)
from minitron.planning.simulate import Event, Timeline, simulate
from tools.command import Parser, run

WIDE = 200  # columns; most terminals wrap such a text beyond recognition
MAX_COLUMNS = 10_000  # of text; nobody reads more, and a thousandfold spread of durations would fill the memory
ROW, GAP, LEFT, TOP = 30, 6, 64, 84  # pixels: height of a row, space between rows, margins of the picture
HUES = {Forward: 212, Backward: 28, BackwardInput: 28, BackwardWeight: 140}
NAMES = {Forward: "forward", Backward: "backward", BackwardInput: "input gradient", BackwardWeight: "weight gradients"}


def main(argv: list[str]) -> None:
    parser = Parser(description="Draw a pipeline schedule: who computes what when, and who waits.")
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--vp", type=int, default=1, help="model chunks per rank (default 1; more: interleaved)")
    parser.add_argument("--schedule", choices=("1f1b", "zb-h1"), default="1f1b", help="default 1f1b")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches per step and replica")
    parser.add_argument("--forward", type=float, default=1.0, help="seconds of a chunk's forward (default 1)")
    parser.add_argument("--backward", type=float, default=2.0, help="seconds of a chunk's backward (default 2)")
    parser.add_argument("--weight", type=float, help="seconds of it for gradients of weights (default: half of it)")
    parser.add_argument("--transfer", type=float, default=0.0, help="seconds between two ranks (default 0)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the drawing there as SVG")
    args = parser.parse_args(argv)
    schedule = make(args.pp, args.vp, args.microbatches, args.schedule)
    check(schedule)
    timeline = simulate(schedule, args.forward, args.backward, args.transfer, args.weight)
    text = draw_text(timeline)
    if args.svg is not None:
        try:
            args.svg.write_text(draw_svg(timeline), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--svg {args.svg} cannot be written ({error}); name another file") from error
    print(describe(timeline))
    print(text)
    peaks = ", ".join(map(str, peak_activations(schedule)))
    print(f"step {timeline.makespan:g} s; activations held at most, in chunks x microbatches, by rank: {peaks}")
    columns = text.index("\n") if args.pp > 1 else len(text)
    if columns > WIDE and args.svg is None:
        print(f"The drawing is {columns} columns wide; --svg FILE makes one for the browser.")


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most chunk activations alive at once: forwards run minus whole backwards run."""
    change = {Forward: 1, Backward: -1, BackwardInput: 0, BackwardWeight: -1, Exchange: 0}
    return tuple(max(accumulate(change[type(action)] for action in actions)) for actions in schedule.ranks)


def describe(timeline: Timeline) -> str:
    """One line: the schedule and its bubble, the idle time over the compute time."""
    s = timeline.schedule
    kind = "Interleaved 1F1B" if s.vp > 1 else s.kind.upper()
    kind = kind if s.training else "Forward only"
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
        text = f"{event.action.mb}{_letter(event.action)}"
        rows[event.rank][start:end] = text.ljust(end - start, "-")[: end - start]
    width = len(str(s.pp - 1))
    return "\n".join(f"{rank:>{width}} {''.join(row)}" for rank, row in enumerate(rows))


def _letter(op: Operation) -> str:
    if type(op) is BackwardWeight:
        return "w"
    letter = ascii_lowercase[op.chunk]
    return letter if type(op) is Forward else letter.upper()


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
        *_legend(timeline),
    ]
    for rank in range(s.pp):
        y = TOP + rank * (ROW + GAP)
        parts.append(f'<text x="{LEFT - 10}" y="{y + ROW / 2 + 4}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{plot:.2f}" height="{ROW}" fill="url(#idle)"/>')
    parts += [_box(event, s.vp, scale) for event in timeline.events]
    parts += _axis(timeline.makespan, scale, bottom)
    return "\n".join([*parts, "</svg>", ""])


def _colour(kind: type[Operation], chunk: int, vp: int) -> str:
    lightness = 76 if vp == 1 else 86 - 30 * chunk / (vp - 1)
    return f"hsl({HUES[kind]}, 85%, {lightness:.0f}%)"


def _box(event: Event, vp: int, scale: float) -> str:
    op, kind = event.action, type(event.action)
    x, y = LEFT + event.start * scale, TOP + event.rank * (ROW + GAP)
    width = (event.end - event.start) * scale
    tooltip = (
        f"rank {event.rank}: {NAMES[kind]} of microbatch {op.mb} through chunk {op.chunk}, "
        f"{event.start:g} to {event.end:g} s"
    )
    text = ""
    if width >= 7 * len(str(op.mb)) + 1:
        text = f'<text x="{x + width / 2:.2f}" y="{y + ROW / 2 + 4}" text-anchor="middle">{op.mb}</text>'
    return (
        f'<g><title>{tooltip}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" '
        f'fill="{_colour(kind, op.chunk, vp)}" stroke="white" stroke-width="0.8"/>{text}</g>'
    )


def _legend(timeline: Timeline) -> list[str]:
    """Forward and backward with one swatch per chunk, gradients of weights where they are apart, and idle."""
    parts, x, vp = [], float(LEFT), timeline.schedule.vp
    apart = [BackwardWeight] if any(type(event.action) is BackwardWeight for event in timeline.events) else []
    for kind in (Forward, Backward, *apart):
        for chunk in range(vp):
            parts.append(f'<rect x="{x}" y="46" width="14" height="14" fill="{_colour(kind, chunk, vp)}"/>')
            x += 14
        parts.append(f'<text x="{x + 6}" y="57">{NAMES[kind]}</text>')
        x += 24 + 7 * len(NAMES[kind])
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


if __name__ == "__main__":
    run(main)
