"""Draw a pipeline schedule, with its bubble and the activations that each rank holds.

    python tools/draw_pipeline.py --pp 4 --vp 2 --microbatches 8
    python tools/draw_pipeline.py --pp 4 --microbatches 16 --backward 3 --transfer 0.1 --svg schedule.svg

Times are in seconds for one microbatch through one chunk.  In the text, 3a is the forward of microbatch 3 through the
rank's first chunk, 3A its backward; dashes carry an operation on, dots are idle time.  Needs no torch and no GPU.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.pipeline.check import check
from minitron.pipeline.draw import describe, draw_svg, draw_text
from minitron.pipeline.schedule import make
from minitron.pipeline.simulate import peak_activations, simulate
from tools.command import Parser, run

WIDE = 200  # columns; most terminals wrap such a text beyond recognition


def main(argv: list[str]) -> None:
    parser = Parser(description="Draw a pipeline schedule: who computes what when, and who waits.")
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--vp", type=int, default=1, help="model chunks per rank (default 1; more: interleaved)")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches per step and replica")
    parser.add_argument("--forward", type=float, default=1.0, help="seconds of a chunk's forward (default 1)")
    parser.add_argument("--backward", type=float, default=2.0, help="seconds of a chunk's backward (default 2)")
    parser.add_argument("--transfer", type=float, default=0.0, help="seconds between two ranks (default 0)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the drawing there as SVG")
    args = parser.parse_args(argv)
    schedule = make(args.pp, args.vp, args.microbatches)
    check(schedule)
    timeline = simulate(schedule, args.forward, args.backward, args.transfer)
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


if __name__ == "__main__":
    run(main)
