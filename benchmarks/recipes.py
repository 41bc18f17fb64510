"""Every recipe's ranks, each measured alone on a GPU: `python benchmarks/recipes.py [--missing --seconds S]`.

Problem: eighty measurements do not fit into one stay on a machine. The idea: each is a row of results.jsonl
(benchmarks/one_rank.py), and what this kind of GPU has no row of is missing. `--missing` runs that, one on each GPU
at a time (benchmarks/workers.py), and begins none that may last longer than `--seconds`; the next call goes on. A row
is written when it exists. Every call writes recipes.md of the rows there are, a table for each kind of GPU; a job's
time, which takes rows of three ranks, is simulated with today's schedule and planner.

    all recipes        a middle rank with the graph, in bf16 and FP8, and the first and the last one for the job's time
    175B, 70B, 405B    and the second pipeline rank; and the middle one eager

GPT-3 175B is measured with dropout, too, as its published job has it.

`--missing --two-gpus` measures the method itself: jobs of two GPUs that both run, and as one rank alone.

`--whole` runs the documents' one-node jobs themselves on eight GPUs (benchmarks/whole_job.py), in bf16 and FP8: 20
steps on mock data as the recipe stands, then 200 steps of the built-in corpus with a smaller batch for the loss. It
begins none that `--seconds` does not allow for. `--gpus 4` runs what fits into four, which is not the documents' job.

To measure something again, take its rows out of the file. One number of GPUs each: the smallest that is documented.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder
    from minitron.runtime.environment import set_defaults

    set_defaults(os.environ)  # before torch loads, here and so in all that is forked

from benchmarks import calibration, one_rank, record, whole_job
from benchmarks.cases import CASES
from benchmarks.workers import Workers
from minitron.config import cli
from minitron.config.schema import Config
from minitron.planner.dryrun.dryrun import choose_ranks
from minitron.planner.plan import Plan, Step, plan


def both(*keys: str) -> tuple[tuple[str, ...], ...]:
    """The keys in bf16 and in FP8."""
    return keys, ("precision.fp8=delayed", *keys)


def _layers(*of_stages: int) -> str:
    return f"parallel.layers_per_stage=[{','.join(map(str, of_stages))}]"


BOTH = both()
FP16 = (), ("precision.dtype=bf16", "precision.fp8=delayed")
GRADIENTS, WEIGHTS = "optimizer.grad_dtype=bf16", "precision.fp8_params=true"
DROPOUT = "model.hidden_dropout=0.1", "model.attention_dropout=0.1"
PUBLISHED_405B = GRADIENTS, "parallel.pp=8", "parallel.vp=8"
BEST_70B = GRADIENTS, WEIGHTS, "parallel.pp=8", "parallel.cp=1"
MLPERF = GRADIENTS, WEIGHTS, "parallel.vp=6", "train.micro_batch_size=2", "train.global_batch_size=2048"
ZB_405B = (
    *("parallel.tp=2", "parallel.pp=64", "parallel.vp=1", "parallel.cp=4", "parallel.cp_style=ulysses"),
    *("parallel.schedule=zb-h1", "parallel.layers_per_stage=null", "train.recompute=selective"),
)
TP4_405B = (
    *("parallel.tp=4", "parallel.pp=16", "parallel.vp=4", "parallel.cp=4"),
    *("parallel.layers_per_stage=null", "train.recompute=selective"),
)
DATA_PARALLEL = "parallel.pp=1", "parallel.vp=1", "parallel.layers_per_stage=null"
# recipe, GPUs, network, keys of each number format; the first ones matter most. Rows are identified by these keys, so
# keys that a recipe has adopted since are kept.
RECIPES = (
    ("gpt3_175b", 128, "ndr400", both(GRADIENTS)),
    ("gpt3_175b", 128, "ndr400", both(GRADIENTS, *DROPOUT)),
    ("llama31_70b", 64, "ndr400", both(GRADIENTS)),
    ("llama31_405b", 512, "ndr400", (PUBLISHED_405B, ("precision.fp8=delayed", WEIGHTS, *PUBLISHED_405B))),
    ("llama3_8b", 8, "ndr400", both(GRADIENTS)),
    ("llama31_70b", 64, "ndr400", (("precision.fp8=delayed", *BEST_70B),)),
    ("gpt3_175b", 256, "ndr400", (("precision.fp8=delayed", *MLPERF),)),
    ("llama3_8b_sft", 8, "ndr400", both(GRADIENTS, *DATA_PARALLEL)),
    ("llama3_8b_lora", 8, "ndr400", BOTH),
    ("gpt3_175b_gke", 256, "a3-mega", (("precision.fp8=none", GRADIENTS), (GRADIENTS,))),
    ("gpt3_13b", 8, "ndr400", BOTH),
    ("gpt3_175b_jube", 384, "juwels-booster", FP16),
    ("gpt3_13b_jube", 32, "juwels-booster", FP16),
)
# The same jobs on H100 in the fastest layouts that `tools/plan.py --search` found with 3 GiB for CUDA and NCCL. 70B's
# in bf16 may not leave NCCL enough.
ULYSSES_70B = "parallel.tp=2", "parallel.vp=7", "parallel.cp=4", "parallel.cp_style=ulysses"
PAIRS_175B = "train.micro_batch_size=2", "train.recompute=selective"
MLPERF_TP2 = GRADIENTS, WEIGHTS, "parallel.tp=2", "parallel.pp=16", "parallel.vp=6", "train.global_batch_size=2048"
FP8_175B = "precision.fp8=delayed", GRADIENTS, WEIGHTS, *PAIRS_175B
FASTEST = (
    (
        "llama3_8b",
        8,
        "ndr400",
        (
            (GRADIENTS, "parallel.vp=6", _layers(2, *[3] * 8, 2, 3, 1)),
            ("precision.fp8=delayed", GRADIENTS, WEIGHTS, "parallel.vp=3", _layers(5, *[6] * 4, 3)),
        ),
    ),
    (
        "llama31_70b",
        64,
        "ndr400",
        (
            (GRADIENTS, *ULYSSES_70B, _layers(1, *[3] * 24, 2, 3, 2)),
            ("precision.fp8=delayed", GRADIENTS, WEIGHTS, *ULYSSES_70B, _layers(1, *[3] * 26, 1)),
        ),
    ),
    ("gpt3_175b", 128, "ndr400", ((GRADIENTS, *PAIRS_175B), FP8_175B, (*FP8_175B, *DROPOUT))),
    (
        "llama3_8b_lora",
        8,
        "ndr400",
        (("train.micro_batch_size=4",), ("precision.fp8=delayed", "train.micro_batch_size=2")),
    ),
    ("llama31_405b", 512, "ndr400", ((GRADIENTS, *TP4_405B), ("precision.fp8=delayed", GRADIENTS, WEIGHTS, *ZB_405B))),
    ("gpt3_175b", 256, "ndr400", (("precision.fp8=delayed", *MLPERF_TP2),)),
)
CLOSELY = "gpt3_175b", "llama31_70b", "llama31_405b"
CHECKED = "2gpu-8b-16layers-s8192-dp2", "2gpu-70b-4layers-tp2", "2gpu-175b-2layers-tp2", "2gpu-8b-16layers-pp2"
LEAST_SECONDS = 45  # of a measurement, until one has been longer; with less left none is begun
MOST_SECONDS = 180  # after which one counts as hanging
WHOLE = "llama3_8b", "llama3_8b_sft", "llama3_8b_lora"
WHOLE_GPUS = 8
USES = (("train.steps=20",), False), (("train.steps=200", "train.global_batch_size=16"), True)  # keys, of the corpus
START_SECONDS = 90  # until a whole job steps: libraries, weights, recording
LABEL = """\
# One rank of every recipe

Written by `python benchmarks/recipes.py`; no figure is typed in. **One GPU each, without traffic**: the partners of
the rank are not there, what they send is made up ([`one_rank.py`](../one_rank.py)), and no rank is late.

- Step, busy (a kernel runs) and host (until the step is queued) are of the microbatches in the row. Nodes of the graph
  are per layer and microbatch. GiB is all that is taken of the device.
- Job is *modelled (one rank, planned traffic)*: the schedule of the whole job, simulated with what the first, a middle
  and the last rank measured, and the traffic that the planner expects; beside it the same without traffic. Planned is
  the planner's step on the GPU of the table; published is what others measured on the GPU named, at first and at best,
  mostly with gradients in bf16 and GPT-3 with dropout. These are of the recipe's batch. Keys beside a recipe replace
  those in it. The last rows of an H100 are the same jobs in layouts that `tools/plan.py --search` found.
"""
TWO_GPUS = "Jobs of two GPUs: the step that both took (`benchmarks/step.py`), and what one rank at a time says of it."
WHOLE_LABEL = (
    "The jobs themselves ([`whole_job.py`](../whole_job.py)): medians of a run's log. GiB is all that is taken of the "
    "device. A job is the document's with its GPUs, batch and data; the others show the loss, or what fewer GPUs do."
)
WHOLE_COLUMNS = (
    "recipe | GPUs | format | data | steps | batch | step s | planned s | off | published s | TFLOP/s | GiB "
    "| planned GiB | first loss | last loss | the document's job"
)
COLUMNS = (
    "recipe | GPUs | format | rank | graph | microbatches | step s | busy s | step / busy | host s | nodes | GiB "
    "| job s | without traffic s | planned s | published s"
)


@dataclass(frozen=True)
class Run:
    """One row to be. alone: no job's time is told with it."""

    recipe: str
    keys: tuple[str, ...]
    world: int
    rank: int
    graph: str
    fabric: str
    alone: bool

    @property
    def config(self) -> list[str]:
        return [f"configs/{self.recipe}.yaml", *self.keys]

    @property
    def gpus(self) -> int:
        return 1

    @property
    def program(self) -> str:
        return "benchmarks/one_rank.py"

    @property
    def arguments(self) -> list[str]:
        options = ["--world", self.world, "--rank", self.rank, "--graph", self.graph, "--fabric", self.fabric]
        return [*self.config, *map(str, options), "--alone"]

    def __str__(self) -> str:
        return " ".join(map(str, (*self.config, "rank", self.rank, "of", self.world, "graph", self.graph)))

    def row(self, rows: list[dict]) -> dict | None:
        """The newest record of this run among those of one kind of GPU; None if it is missing."""
        options = argparse.Namespace(config=self.config, world=self.world, graph=self.graph)
        wanted = one_rank.identity(options, self.rank)
        gradients = configuration(self.recipe, self.keys).optimizer.accumulates_in  # a recipe's own may have changed
        found = (row for row in reversed(rows) if wanted.items() <= row.items())
        return next((row for row in found if record.gradients(row) == gradients), None)


@dataclass(frozen=True)
class Real:
    """The step of two GPUs that both run, by benchmarks/step.py."""

    config: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((*self.config, "on two GPUs"))

    @property
    def gpus(self) -> int:
        return 2

    @property
    def program(self) -> str:
        return "benchmarks/step.py"

    @property
    def arguments(self) -> list[str]:
        return [*self.config, "train.cuda_graph=on"]

    def row(self, rows: list[dict]) -> dict | None:
        gradients = cli.load([str(record.ROOT / self.config[0]), *self.config[1:]]).optimizer.accumulates_in
        for row in reversed(rows):
            found = row["kind"] == "step" and row["world"] == 2 and {*self.config} <= {*shlex.split(row["command"])}
            if found and record.gradients(row) == gradients:
                return row
        return None


@dataclass(frozen=True)
class Job:
    """support: ranks whose rows `main` needs for the job's time. beside: more rows of the same job."""

    support: tuple[Run, ...]
    main: Run
    beside: tuple[Run, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return (self.main, *self.support, *self.beside)


@dataclass(frozen=True)
class Whole:
    """A whole job, on mock data for its time or on the built-in corpus for its loss."""

    recipe: str
    keys: tuple[str, ...]
    corpus: bool
    world: int
    fabric: str

    def __str__(self) -> str:
        return " ".join((*self.config, *["--corpus"] * self.corpus, f"on {self.world} GPUs"))

    @property
    def config(self) -> list[str]:
        return [f"configs/{self.recipe}.yaml", *self.keys]

    def plan(self, gpu: str | None) -> Plan:
        return plan(configuration(self.recipe, self.keys), self.world, one_rank.machine_of(gpu, self.fabric))

    def row(self, rows: list[dict]) -> dict | None:
        wanted = whole_job.identity(self.config, self.world, self.corpus)
        return next((row for row in reversed(rows) if wanted.items() <= row.items()), None)


def jobs(gpu: str | None) -> Iterator[Job]:
    for some, closely in ((RECIPES, CLOSELY), (FASTEST if "H100" in (gpu or "") else (), ())):
        for recipe, world, fabric, formats in some:
            for keys in formats:
                yield job_of(recipe, keys, world, fabric, closely=recipe in closely)


def whole_jobs(gpus: int) -> Iterator[Whole]:
    """Yield those of mock data first: of them are the documents' figures."""
    for use, corpus in USES:
        for keys in BOTH:
            for recipe in WHOLE:
                yield Whole(recipe, (*keys, *use), corpus, gpus, "ndr400")


def checks() -> Iterator[tuple[str, Job, Real]]:
    """Jobs of two GPUs: (name, one rank alone, both)."""
    for name in CHECKED:
        for fp8 in ("none", "delayed"):
            config, *keys = CASES[name].arguments(fp8)
            job = job_of(Path(config).stem, tuple(keys), 2, "ndr400")
            yield f"{name}, {'bf16' if fp8 == 'none' else 'FP8'}", job, Real(tuple(job.main.config))


def job_of(recipe: str, keys: tuple[str, ...], world: int, fabric: str, closely: bool = False) -> Job:
    """Return the job. closely: a second pipeline rank and an eager step are measured, too."""
    pp = configuration(recipe, keys).parallel.pp
    run = Run(recipe, keys, world, 0, "on", fabric, alone=True)
    ranks = {one_rank.place(rank, pp, world): rank for rank in choose_ranks("first,last,middle", pp, world)}
    main = ranks.pop("middle", None) or ranks.pop("last", None) or ranks.pop("first")
    support = tuple(replace(run, rank=rank) for rank in ranks.values())
    beside = ()
    if closely:
        beside = replace(run, rank=world // pp), replace(run, rank=main, graph="off")
    return Job(support, replace(run, rank=main, alone=False), beside)


@lru_cache(None)
def configuration(recipe: str, keys: tuple[str, ...]) -> Config:
    return cli.load([str(record.ROOT / "configs" / f"{recipe}.yaml"), *keys])


# ---- what is missing ------------------------------------------------------------------------------------------------


def of_gpu(rows: list[dict], gpu: str | None) -> list[dict]:
    return [row for row in rows if row["gpu"] == gpu]


def todo(args: argparse.Namespace, gpu: str | None, tried: set[Run | Real]) -> list[Run | Real]:
    """What has no row of this kind of GPU and was not tried.

    Ranks that jobs' times need come first, then what stands beside them, and what takes all GPUs.
    """
    every = [(job, real) for _, job, real in checks()] if args.two_gpus else [(job, None) for job in jobs(gpu)]
    wanted: list[Run | Real] = [run for job, _ in every for run in (*job.support, job.main)]
    wanted += [real for _, real in every if real is not None] or [run for job, _ in every for run in job.beside]
    rows = of_gpu(record.rows(args.results), gpu)
    return [run for run in wanted if run not in tried and run.row(rows) is None]


def run_missing(args: argparse.Namespace) -> int:
    """Run it until the time is over; return how many failed. None is begun that may take as long as the longest did."""
    end, tried, failed, longest = time.monotonic() + args.seconds, set(), 0, LEAST_SECONDS
    gpu = record.environment()["gpu"]
    options = ["--results", str(args.results.resolve())] + (["--commit", args.commit] if args.commit else [])
    with Workers(args.workers) as workers:
        while True:
            for run in todo(args, gpu, tried):
                if (left := end - time.monotonic()) < longest:
                    print(f"{args.seconds:g} s are over; call it again for the rest", flush=True)
                    tried.update(todo(args, gpu, tried))
                    break
                if run.gpus > len(workers.free) < workers.count:
                    break  # when others have ended
                tried.add(run)
                if run.gpus > workers.count:
                    print(f"{run}\n    needs {run.gpus} GPUs; there are {workers.count}", flush=True)
                    failed += 1
                else:
                    workers.start(run, run.program, run.arguments + options, run.gpus, min(left, MOST_SECONDS))
            if not workers.children:
                return failed
            child, result = workers.next()
            print(f"{child.task} on GPU {', '.join(map(str, child.gpus))}: {child.seconds:.1f} s", flush=True)
            if isinstance(result, Exception):
                print(f"    {result}", flush=True)
                failed += 1
                continue
            longest = max(longest, child.seconds)
            wall = "  ".join(f"{name} {seconds:.1f}" for name, seconds in result.get("wall_seconds", {}).items())
            print(f"    {result['step_seconds']:.3f} s a step; seconds: {wall or 'not told'}", flush=True)


def run_whole(args: argparse.Namespace) -> int:
    """Run whole jobs one after another, on all of args.gpus; return how many failed."""
    end, failed, gpu = time.monotonic() + args.seconds, 0, record.environment()["gpu"]
    options = ["--results", str(args.results.resolve())] + (["--commit", args.commit] if args.commit else [])
    with Workers(args.workers) as workers:
        if args.gpus > workers.count:
            few = "; --gpus 4 runs what fits into four" if workers.count >= 4 else ""
            print(f"whole jobs of {args.gpus} GPUs cannot run: there are {workers.count}{few}", flush=True)
            return 1
        for whole in whole_jobs(args.gpus):
            if whole.row(of_gpu(record.rows(args.results), gpu)) is not None:
                continue
            planned, left = whole.plan(gpu), end - time.monotonic()
            seconds = START_SECONDS + 1.2 * planned.cfg.train.steps * planned.step_seconds
            if not planned.fits:
                gib = f"{planned.memory_gib:.1f} GiB of {planned.room_gib:.1f}"
                print(f"{whole}\n    does not fit: {gib} planned", flush=True)
            elif left < seconds:
                print(f"{whole}\n    takes some {seconds:.0f} s; {max(0, left):.0f} s are left", flush=True)
            else:
                arguments = [*whole.config, *["--corpus"] * whole.corpus, *options]
                workers.start(whole, "benchmarks/whole_job.py", arguments, args.gpus, min(left, 2 * seconds))
                child, result = workers.next()
                bad = isinstance(result, Exception)
                failed += bad
                print(f"{whole}: {child.seconds:.1f} s\n    {result if bad else whole_job.summary(result)}", flush=True)
    return failed


# ---- the page -------------------------------------------------------------------------------------------------------


def markdown(rows: list[dict]) -> str:
    """A table for each kind of GPU, H100 first: a line a row, jobs in their order, and what is missing."""
    gpus = {row["gpu"] for row in rows if row["kind"] in ("one_rank", "step", "job")}
    lines = [LABEL.rstrip()]
    for gpu in sorted(gpus, key=lambda gpu: ("H100" not in (gpu or ""), gpu or "")):
        mine = of_gpu(rows, gpu)
        lines += [*table(gpu, mine), *against_two_gpus(gpu, mine), *of_whole_jobs(gpu, mine)]
    return "\n".join(lines) + "\n"


def table(gpu: str | None, rows: list[dict]) -> list[str]:
    """Write what one kind of GPU measured. rows: of this kind."""
    lines = ["", f"## {gpu or 'CPU'}", "", f"| {COLUMNS} |", "|" + "---|" * (COLUMNS.count("|") + 1)]
    found, missing = [], 0
    for job in jobs(gpu):
        for run in sorted(job.runs, key=lambda run: (run.graph == "off", run.rank)):
            if (row := run.row(rows)) is None:
                missing += 1
                continue
            found.append(row)
            lines.append(line(run, row, job_times(job, rows, gpu) if run == job.main else None))
    if missing:
        lines += ["", f"Not yet measured: {missing} of {missing + len(found)} rows."]
    return [*lines, "", *dict.fromkeys(map(record.origin, found))] if found else []


def against_two_gpus(gpu: str | None, rows: list[dict]) -> list[str]:
    """A table of what both GPUs took and what one rank alone says of it; nothing without rows."""
    lines = []
    for name, job, real in checks():
        times, both = job_times(job, rows, gpu), real.row(rows)
        if times is not None and both is not None:
            (said, quiet), took = times, both["step_seconds"]
            lines.append(
                f"| {name} | {took:.4f} | {said:.4f} | {_off(said, took)} | {quiet:.4f} | {_off(quiet, took)} |"
            )
    header = [
        "",
        f"### Held against two {gpu or 'CPU'}s",
        "",
        TWO_GPUS,
        "",
        "| job | both s | job s | off | without traffic s | off |",
    ]
    return [*header, "|---|---|---|---|---|---|", *lines] if lines else []


def of_whole_jobs(gpu: str | None, rows: list[dict]) -> list[str]:
    """Write a table of the jobs that ran whole on one kind of GPU; nothing without rows. rows: of this kind."""
    lines, found = [], []
    worlds = sorted({row["world"] for row in rows if row["kind"] == "job"}, reverse=True)
    for whole in (whole for world in worlds for whole in whole_jobs(world)):
        if (row := whole.row(rows)) is None:
            continue
        expected, cfg = whole.plan(gpu), configuration(whole.recipe, whole.keys)
        as_it_stands = whole.world == WHOLE_GPUS and not whole.corpus
        cells = [whole.recipe, whole.world, cfg.precision.dtype if cfg.precision.fp8 == "none" else "FP8"]
        cells += ["corpus" if whole.corpus else "mock", row["steps"], cfg.train.global_batch_size]
        cells += [f"{row['step_seconds']:.3f}", f"{expected.step_seconds:.3f}"]
        cells += [_off(expected.step_seconds, row["step_seconds"]), published(cfg, whole) if as_it_stands else ""]
        cells += [f"{row['tflops']:.0f}", _figure(row["memory_gib"], 1), f"{expected.memory_gib:.1f}"]
        cells += [f"{row['first_loss']:.3f}", f"{row['last_loss']:.3f}", "yes" if as_it_stands else "no"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        found.append(row)
    header = ["", f"### Whole jobs on {gpu or 'CPU'}s", "", WHOLE_LABEL, "", f"| {WHOLE_COLUMNS} |"]
    columns = WHOLE_COLUMNS.count("|") + 1
    origins = dict.fromkeys(map(record.origin, found))
    return [*header, "|" + "---|" * columns, *lines, "", *origins] if lines else []


def _off(said: float, took: float) -> str:
    return f"{100 * (said / took - 1):+.1f} %"


def job_times(job: Job, rows: list[dict], gpu: str | None) -> tuple[float, float] | None:
    """Seconds of the job's step with the planner's traffic, and without any; None if a rank's row is missing."""
    main, cfg = job.main, configuration(job.main.recipe, job.main.keys)
    places = {one_rank.place(run.rank, cfg.parallel.pp, run.world): run.row(rows) for run in (*job.support, main)}
    if None in places.values():
        return None
    step = Step(cfg, main.world, one_rank.machine_of(gpu, main.fabric))
    return one_rank.job_seconds(step, main.world, places)


def line(run: Run, row: dict, times: tuple[float, float] | None) -> str:
    cfg = configuration(run.recipe, run.keys)
    stage = f"pp {run.rank * cfg.parallel.pp // run.world} of {cfg.parallel.pp}"
    cells = [
        record.named(run.recipe, run.keys),
        run.world,
        row["dtype"] if row["fp8"] == "none" else f"FP8 {row['fp8']}",
    ]
    cells += [f"{run.rank} ({stage})", "on" if row["replayed"] else "off", row["microbatches"]]
    nodes = None if row["nodes"] is None else row["nodes"] / (row["layers"] * row["microbatches"])
    share = row["busy_seconds"] and row["step_seconds"] / row["busy_seconds"]
    figures = ((row["step_seconds"], 3), (row["busy_seconds"], 3), (share, 3), (row["host_seconds"], 3), (nodes, 0))
    cells += [_figure(value, digits) for value, digits in (*figures, (row["device_gib"], 1))]
    job = ["", "", "", ""]
    if not run.alone:
        job = [_figure(times and times[0], 2), _figure(times and times[1], 2)]
        job += [f"{planned(cfg, run, row['gpu']):.2f}", published(cfg, run)]
    return f"| {' | '.join(map(str, cells + job))} |"


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


@lru_cache(None)
def planned(cfg: Config, run: Run, gpu: str | None) -> float:
    """The planner's seconds of the job's step on this kind of GPU."""
    return plan(cfg, run.world, one_rank.machine_of(gpu, run.fabric)).step_seconds


def published(cfg: Config, run: Run | Whole) -> str:
    """What published.json has of the same recipe, GPUs, batch and number format: the first of them, and the best."""

    def kind(cfg: Config) -> tuple:
        m, t, p = cfg.model, cfg.train, cfg.precision
        return t.seq_len, t.global_batch_size, m.num_layers, m.vocab_size, p.dtype, p.fp8

    found = [
        row
        for row in calibration.published_rows()
        if Path(row.arguments[0]).stem == run.recipe
        and row.gpus == run.world
        and kind(calibration.configuration(row.arguments)) == kind(cfg)
    ]
    if not found:
        return ""
    first, best = found[0], min(found, key=lambda row: row.seconds)
    return f"{first.seconds:.2f}" + f", best {best.seconds:.2f}" * (best is not first) + f" ({first.device})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--missing", action="store_true", help="run what has no row yet")
    parser.add_argument("--two-gpus", action="store_true", help="with --missing: the jobs of two GPUs instead")
    parser.add_argument("--whole", action="store_true", help="run the documents' one-node jobs themselves")
    parser.add_argument("--gpus", type=int, default=WHOLE_GPUS, help=f"with --whole (default {WHOLE_GPUS})")
    parser.add_argument("--workers", type=int, help="measurements at a time (default: one on each visible GPU)")
    parser.add_argument("--seconds", type=float, default=3600, help="time for that, in all (default 3600)")
    record.add_options(parser)
    args = parser.parse_args(argv)
    if args.gpus != WHOLE_GPUS and not args.whole:
        parser.error("--gpus is of --whole; add it")
    failed = (run_missing(args) if args.missing else 0) + (run_whole(args) if args.whole else 0)
    text = markdown(record.rows(args.results))
    args.results.with_name("recipes.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
