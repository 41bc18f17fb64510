"""Does minitron learn as Megatron-core does? `python benchmarks/curves.py CONFIG.yaml [section.key=value ...]`.

Both trainers start from the same weights and see the same batches in the same order, in bf16 and in FP8; minitron does
so once more from another seed, since two runs of one trainer differ, too. Each run is a row of kind "curve", and what
has no row is run, `--each N` on each GPU at a time; then the rows are compared. `--page` writes curves.md, of all that
are recorded, and its pictures.

    minitron bf16    minitron fp8    minitron bf16, next seed    megatron bf16    megatron fp8

`--formats` asks another question: may a recipe use a number format? minitron alone trains in bf16, with gradients in
bf16 (in one microbatch a step, and added over eight), and in FP8 with delayed and current scales, each from two seeds.
A format passes if its loss is no further from that of bf16 than the seeds are from each other, or than TOLERANCE.
Without a configuration it takes those of GATE.
`--changes` changes one thing at a time in short runs of GPT-2's size, to bring FP8 closer to bf16 (CHANGES).

Megatron-core gets minitron's weights, batches, learning rate and weight decay (peers/megatron.py); loss, gradients,
clipping and update are its own. `--trainer` makes one of these runs in this process, under torchrun or not, and prints
its losses. How the text is made: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder
    from minitron.runtime.environment import set_defaults

    set_defaults(os.environ)  # before torch loads, here and so in all that is forked

import torch

from benchmarks import measure, record
from benchmarks.fp8_curves import losses
from benchmarks.workers import Workers
from minitron.config import cli, rules
from minitron.config.schema import Config, changed
from minitron.planner import style

POINTS = 100  # of a recorded curve, each a mean
MOST_SECONDS = 1800  # after which a run counts as hanging
# FP8 recipe, gradients, microbatches of a step
FORMATS = (
    *(("none", "fp32", None), ("none", "bf16", None), ("none", "bf16", 8)),
    *(("delayed", "fp32", None), ("current", "fp32", None)),
)
TOLERANCE = 0.01
TEXT = (
    *("data.source=indexed", "data.paths=[data/gate_text_document]", "data.tokenizer=hf:tokenizers/gate"),
    *("model.vocab_size=50304", "model.max_positions=1024", "train.seq_len=1024", "train.micro_batch_size=32"),
    *("train.global_batch_size=32", "train.steps=3060", "optimizer.warmup_steps=200"),
)
# 100 million tokens each
GATE = (
    ("configs/gpt2_124m.yaml", *TEXT),
    (
        *("configs/llama3_8b.yaml", *TEXT, "model.num_layers=16", "model.hidden_size=1024"),
        *("model.ffn_hidden_size=2816", "model.num_heads=16", "model.num_kv_heads=8", "parallel.pp=1", "parallel.vp=1"),
    ),
)
SHORT = (
    *("configs/gpt2_124m.yaml", "data.source=indexed", "data.paths=[data/gate_text_document]"),
    *("data.tokenizer=hf:tokenizers/gate", "model.vocab_size=50304", "train.steps=3000", "optimizer.warmup_steps=200"),
    *("train.seq_len=1024", "train.micro_batch_size=8", "train.global_batch_size=8"),
)
SEEDS = 1234, 1235
# What is changed: the keys of both runs, those of FP8's alone, FP8's recipe, and the seeds.
CHANGES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, tuple[int, ...]]] = {
    "nothing": ((), (), "delayed", SEEDS),
    "current scaling": ((), (), "current", SEEDS),
    "first and last layer in bf16": ((), ("precision.fp8_bf16_layers=1",), "delayed", SEEDS[:1]),
    "first and last three layers in bf16": ((), ("precision.fp8_bf16_layers=3",), "delayed", SEEDS[:1]),
    "untied head": (("model.tie_embeddings=false",), (), "delayed", SEEDS[:1]),
    "a third of the learning rate": (("optimizer.lr=2e-4", "optimizer.min_lr=2e-5"), (), "delayed", SEEDS[:1]),
}


@dataclass(frozen=True)
class Run:
    """One curve to be."""

    config: tuple[str, ...]
    trainer: str
    fp8: str
    seed: int
    gradients: str = "fp32"
    microbatches: int | None = None  # of a step; None: as configured

    def __str__(self) -> str:
        return f"{self.name} seed {self.seed}"

    @property
    def name(self) -> str:
        trainer = {"megatron": "Megatron-core"}.get(self.trainer, self.trainer)
        return f"{trainer} {self.format}"

    @property
    def format(self) -> str:
        gradients = ", gradients bf16" if self.gradients == "bf16" else ""
        gradients += f" over {self.microbatches} microbatches" if self.microbatches else ""
        return ("bf16" if self.fp8 == "none" else f"FP8 {self.fp8}") + gradients

    @property
    def identity(self) -> dict:
        return {"kind": "curve", **asdict(self), "config": list(self.config)}

    @property
    def keys(self) -> list[str]:
        backend = "te" if torch.cuda.device_count() else "torch"  # the same numbers, on a CPU
        size = cli.load(self.config).train.global_batch_size // (self.microbatches or 1)
        return [
            *self.config,
            f"train.seed={self.seed}",
            f"precision.fp8={self.fp8}",
            f"optimizer.grad_dtype={self.gradients}",
            *[f"precision.fp8_backend={backend}"] * (self.fp8 != "none"),
            *[f"train.micro_batch_size={size}"] * bool(self.microbatches),
        ]


def main(argv: list[str] | None = None) -> dict | None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", nargs="*", metavar="CONFIG.yaml | section.key=value")
    parser.add_argument("--formats", action="store_true", help="compare number formats instead of trainers")
    parser.add_argument("--changes", action="store_true", help="change one thing at a time to bring FP8 closer")
    parser.add_argument("--trainer", choices=("minitron", "megatron"), help="make one run in this process")
    recipes = "delayed", "current", "block"
    parser.add_argument("--fp8", choices=recipes, default="delayed", help="the FP8 recipe (default delayed)")
    parser.add_argument("--each", type=int, default=1, help="runs that share a GPU: small ones leave room (default 1)")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no run after these (default 3600)")
    parser.add_argument("--page", action="store_true", help="write curves.md and its pictures beside the rows")
    record.add_options(parser)
    args = parser.parse_intermixed_args(argv)
    args.config.sort(key=lambda argument: "=" in argument)  # the file first: rows are known by it
    if args.each < 1:
        parser.error(f"--each={args.each}: at least one run has a GPU; use 1 or more")
    if args.changes and (args.config or args.formats):
        parser.error("--changes has configurations of its own: name none, and no --formats")
    if args.changes:
        make_missing(args, [*dict.fromkeys(run for pair in of_changes().values() for run in pair)])
        print(changes(record.rows(args.results)))
        return write_page(args.results) if args.page else None
    if not (args.config or args.formats):
        parser.error("name a configuration")
    configs, seeds = [tuple(args.config)] if args.config else GATE, []
    with cli.user_errors():
        for config in configs:
            cfg = cli.load(config)
            rules.check(cfg, 1, measure.choose_device()[1] if args.trainer else None)
            seeds.append(cfg.train.seed)
    if args.trainer:
        return train(cfg, args.trainer)
    compared = [of_formats(c, seed) if args.formats else wanted(c, seed, args.fp8) for c, seed in zip(configs, seeds)]
    make_missing(args, [run for runs in compared for run in runs])
    found = {run: row for runs in compared for run in runs if (row := newest(run, record.rows(args.results)))}
    for runs in compared:
        print((gate if args.formats else table)({run: found[run] for run in runs if run in found}))
    if args.page:
        write_page(args.results)
    return {str(run): row for run, row in found.items()}


def wanted(config: tuple[str, ...], seed: int, fp8: str) -> list[Run]:
    """The runs of a comparison; all others are held against the first."""
    trainers = "minitron", "megatron"
    runs = [Run(config, trainer, precision, seed) for trainer in trainers for precision in ("none", fp8)]
    return [*runs, Run(config, "minitron", "none", seed + 1)]


def of_formats(config: tuple[str, ...], seed: int) -> list[Run]:
    """Runs of minitron in each format, from two seeds."""
    return [Run(config, "minitron", fp8, s, *others) for fp8, *others in FORMATS for s in (seed, seed + 1)]


def of_changes() -> dict[tuple[str, int], tuple[Run, Run]]:
    """For each thing changed and each seed: the runs in bf16 and in FP8."""
    pairs = {}
    for name, (both, keys, fp8, seeds) in CHANGES.items():
        for seed in seeds:
            configs = (*SHORT, *both), (*SHORT, *both, *keys)
            pairs[name, seed] = Run(configs[0], "minitron", "none", seed), Run(configs[1], "minitron", fp8, seed)
    return pairs


def newest(run: Run, rows: list[dict]) -> dict | None:
    """The newest row of a run. Rows without these fields have float32 gradients and the configured microbatches."""
    defaults = {"gradients": "fp32", "microbatches": None}
    return next((row for row in reversed(rows) if run.identity.items() <= (defaults | row).items()), None)


def make_missing(args: argparse.Namespace, runs: list[Run]) -> None:
    """Make the runs that have no row, and append a row for each that ends."""
    missing = [run for run in runs if newest(run, record.rows(args.results)) is None]
    if not missing:
        return
    missing.sort(key=lambda run: run.trainer)  # Megatron-core's first, which take longest
    ends = time.monotonic() + args.seconds
    with Workers(each=args.each) as workers:
        while missing or workers.children:
            while missing and workers.free and time.monotonic() < ends:
                run = missing.pop(0)
                arguments = [*run.keys, "--trainer", run.trainer]
                workers.start(run, "benchmarks/curves.py", arguments, 1, MOST_SECONDS)
            if not workers.children:
                print(f"{args.seconds:.0f} s are over; call it again for {', '.join(map(str, missing))}")
                return
            child, result = workers.next()
            if isinstance(result, Exception):
                print(f"{child.task}: {result}", flush=True)
                continue
            print(f"{child.task}: last loss {result['last']:.4f}, {child.seconds:.0f} s", flush=True)
            record.append(args, "curve", child.task.identity | result)


def train(cfg: Config, trainer: str) -> dict:
    """Make one run in this process; report the means of its losses."""
    device, _ = measure.choose_device()
    if trainer == "megatron":
        from benchmarks.peers import megatron

        curve = megatron.losses(cfg, device)
    else:
        curve = losses(changed(cfg, train=dict(eval_every=0)), device)
    size = max(1, len(curve) // POINTS)
    result = {"steps": len(curve), "curve": [sum(part) / len(part) for part in parts(curve, size)]}
    result["last"] = sum(curve[-size:]) / len(curve[-size:])
    measure.report(result)
    return result


def parts(curve: list[float], size: int) -> list[list[float]]:
    return [curve[i : i + size] for i in range(0, len(curve), size)]


def table(found: dict[Run, dict]) -> str:
    """A line a run: its mean loss at the end, and how far it is from the first one's."""
    lines = ["| run | seed | loss | from the first | of the last fifth | at most |", "|---|---|---|---|---|---|"]
    base = next(iter(found.values()), None)
    for run, row in found.items():
        apart = [a - b for a, b in zip(row["curve"], base["curve"])]
        away = (row["last"] - base["last"], fifth(apart), max(apart, key=abs))
        cells = [run.name, str(run.seed), f"{row['last']:.4f}"]
        cells += [""] * 3 if row is base else [f"{x:+.4f}" for x in away]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gate(found: dict[Run, dict]) -> str:
    """A line a format: how far its losses are from those of bf16 with the same seed, and whether that is allowed."""
    last = {(run.format, run.seed): fifth(row["curve"]) for run, row in found.items()}
    seeds = sorted({seed for _, seed in last})
    lines = [f"| format | {' | '.join(f'from bf16, seed {s}' for s in seeds)} | mean | allowed | passes |"]
    lines.append("|---|" + "---|" * (len(seeds) + 3))
    if not last or not all(("bf16", seed) in last for seed in seeds):
        return "\n".join(lines)
    losses_of_bf16 = [last["bf16", seed] for seed in seeds]
    allowed = max(TOLERANCE, max(losses_of_bf16) - min(losses_of_bf16))
    for name in dict.fromkeys(run.format for run in found):
        away = [last[name, seed] - last["bf16", seed] for seed in seeds if (name, seed) in last]
        if name != "bf16" and len(away) == len(seeds):
            mean = sum(away) / len(away)
            cells = [name, *(f"{x:+.4f}" for x in (*away, mean)), f"{allowed:.4f}", "yes" if mean <= allowed else "no"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def changes(rows: list[dict]) -> str:
    """A line a change: how far FP8 is from bf16 with the same keys and seed."""
    lines = ["| changed | seed | bf16 | FP8 | from bf16 |", "|---|---|---|---|---|"]
    for (name, seed), pair in of_changes().items():
        found = [row for run in pair if (row := newest(run, rows))]
        if len(found) == 2:
            bf16, fp8 = (fifth(row["curve"]) for row in found)
            lines.append(f"| {name} | {seed} | {bf16:.4f} | {fp8:.4f} | {fp8 - bf16:+.4f} |")
    return "\n".join(lines)


def fifth(curve: list[float]) -> float:
    """The mean of the last fifth."""
    part = curve[-(len(curve) // 5 or 1) :]
    return sum(part) / len(part)


def draw(found: dict[Run, dict], title: str):
    """Losses over each other above, and below their distance from the first run's, as far as batches are the same."""
    figure, (above, below) = style.new(5.0, 2, sharex=True, height_ratios=(2, 1))
    first, base = next(iter(found.items()))
    for run, row in found.items():
        steps = [row["steps"] * (i + 0.5) / len(row["curve"]) for i in range(len(row["curve"]))]
        same = run.seed == first.seed
        (line,) = above.plot(steps, row["curve"], label=run.name if same else f"{run.name}, another seed")
        if same:
            below.plot(steps, [a - b for a, b in zip(row["curve"], base["curve"])], color=line.get_color())
    above.set(ylabel="training loss", title=title)
    above.legend()
    below.set(xlabel="step", ylabel=f"minus {first.name}'s")
    figure.align_ylabels()
    return figure


PAGE = """\
# Losses beside Megatron-core's, and of number formats

Written by `python benchmarks/curves.py ... --page`; no figure is typed in. The same weights and the same batches in the
same order, but for the last run, which shows what another seed makes of it. Losses are means of a hundredth of the
steps: the last one, how far it is from the first run's, that of the last fifth, and the widest of all. A table of
formats compares means of the last fifth. Its runs are on one GPU, with one microbatch a step unless the name says
otherwise. A format passes if its mean distance from bf16 is at most that of bf16's two seeds from each other, or 0.01.
"""

CHANGES_PAGE = """\
## What was changed to bring FP8 closer at GPT-2's size

```
python benchmarks/curves.py --changes
```

Short runs, 8,192 tokens a step; means of the last fifth. A difference says little that is smaller than that of the two
seeds in bf16. No change is proven to be the cause. Layers in bf16 at both ends do not close the gap; a lower learning
rate and an untied head, one seed each, end closest to bf16.
"""


def write_page(results: Path) -> None:
    """Write what is recorded as curves.md, with a picture of each configuration, beside the rows."""
    text, pictured = page(record.rows(results))
    results.parent.mkdir(parents=True, exist_ok=True)
    results.with_name("curves.md").write_text(text, encoding="utf-8")
    for name, (found, title) in pictured.items():
        style.save(draw(found, title), results.with_name(name))


def page(rows: list[dict]) -> tuple[str, dict[str, tuple[dict[Run, dict], str]]]:
    """Return the page, and the runs and the title of each of its pictures."""
    short = {run.config for pair in of_changes().values() for run in pair}
    curves = [row for row in rows if row["kind"] == "curve"]
    of_short = [row for row in curves if tuple(row["config"]) in short]
    curves = [row for row in curves if tuple(row["config"]) not in short]
    lines, pictured = [PAGE], {}
    for config in dict.fromkeys(tuple(row["config"]) for row in curves):
        cfg = cli.load([str(record.ROOT / config[0]), *config[1:]])
        m, t = cfg.model, cfg.train
        recipes = {row["fp8"]: None for row in curves if row["config"] == [*config] and row["fp8"] != "none"}
        compared = dict.fromkeys(run for fp8 in recipes or ["delayed"] for run in wanted(config, t.seed, fp8))
        of_gate = config in GATE
        runs = of_formats(config, t.seed) if of_gate else compared
        found = {run: row for run in runs if (row := newest(run, rows))}
        size = f"{m.num_layers} layers of {m.hidden_size}"
        title = f"{'GPT' if m.family == 'gpt' else 'Llama'}, {size}, {t.global_batch_size * t.seq_len:,} tokens a step"
        name = f"{'formats' if of_gate else 'curves'}_{Path(config[0]).stem}_{m.num_layers}x{m.hidden_size}.png"
        pictured[name] = found, title
        command = "python benchmarks/curves.py " + ("--formats" if of_gate else shlex.join(config))
        lines += [f"## {title}", "", "```", command, "```", "", (gate if of_gate else table)(found)]
        lines += ["", f"![losses]({name})", "", *dict.fromkeys(map(record.origin, found.values())), ""]
    if of_short:
        lines += [CHANGES_PAGE, changes(of_short), "", *dict.fromkeys(map(record.origin, of_short)), ""]
    return "\n".join(lines), pictured


if __name__ == "__main__":
    main()
