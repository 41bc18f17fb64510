"""A dry run: one step of any rank of any job, on a laptop, with the code that the job itself will run.

Problem: without it a user learns only after the queue whether a layout fits and works at 2,048 ranks. The idea:

  1. torch's meta device has tensors with shapes and without memory, and its `fake` process group is a world of any size
     in which every collective succeeds at once. So a rank of the job builds its part of the model and runs its schedule
     and its optimizer here: a shape that does not fit fails as it would there, with the same message.
  2. Kernels that only a GPU has are replaced by their plain twins (kernels.py beside this file). The report names them.
  3. `MemoryWalk` follows every allocation, `Recorder` writes down every collective. The recorder is the rank's
     `Activity`, so a real run on gloo is recorded in the same way, and the two lists are equal.
  4. Microbatches that do what the one before did are walked once (repeats.py).

    python -m minitron.pretrain configs/gpt3_175b.yaml train.global_batch_size=4096 --dry-run --world 2048

The step is like one in the middle of a run: FP8 scales come from histories. Its samples are random tokens. Left out:
what libraries allocate for themselves, time (see planner/plan.py), and errors that only arise between ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from minitron.comm.activity import Activity
from minitron.comm.mesh import Axis, Mesh
from minitron.config import cli, rules
from minitron.config.batch import batch_size, final
from minitron.config.command import Parser, positive
from minitron.config.schema import Config, changed
from minitron.config.sizes import PERSISTENT
from minitron.data.build import build_datasets
from minitron.data.loader import Loader
from minitron.kernels.kernels import Kernels
from minitron.pipeline.executor import MakeSchedule
from minitron.pipeline.schedule import Schedule, make
from minitron.planner.dryrun import kernels, repeats
from minitron.planner.dryrun.memory_walk import MemoryWalk
from minitron.planner.memory import Memory
from minitron.train import Trainer, build

PARTS = (*PERSISTENT, "activations", "other")


class Record(NamedTuple):
    """One rank's part in a collective, with the bytes that it contributes; or a message, a "send" or a "recv"."""

    kind: str
    axis: str
    num_bytes: int
    dtype: torch.dtype
    ranks: tuple[int, ...]  # those that take part; for a message the peer
    action: object  # the action of the schedule in which it begins


@dataclass(frozen=True)
class Report:
    """The record of one rank's step.

    memory: bytes by part at the peak, which is in `peak_action`. timeline: (action, most bytes allocated in it), all
    actions in order, the first ones before the step. collectives: in order. replaced: kernels, in words.
    """

    rank: int
    cell: str
    memory: dict[str, int]
    peak_action: object
    timeline: list[tuple[object, int]]
    collectives: list[Record]
    replaced: list[str]
    seconds: float

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


class Recorder(Activity):
    """An Activity that keeps every collective. begun(action): called when an action begins."""

    __slots__ = ("records", "begun")

    def __init__(self, begun: Callable[[object], None] = lambda action: None):
        super().__init__()
        self.records, self.begun = [], begun

    def begin(self, action: object) -> None:
        super().begin(action)
        self.begun(action)

    def record(self, kind: str, axis: Axis, x: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self.records.append(Record(kind, axis.name, x.nbytes, x.dtype, ranks, self.action))


def dry_run(cfg: Config, world: int, rank: int = 0, begun: Callable[[object], None] = lambda action: None) -> Report:
    """Run one step of `rank` in a new default process group. Raises what the run would raise.

    begun(action): called when an action begins.
    """
    rules.check(cfg, world)
    with fake_world(world, rank):
        return walk_step(cfg, make_mesh(cfg, world), begun)


@contextmanager
def fake_world(world: int, rank: int, device: str = "meta") -> Iterator[None]:
    """Make the default process group one of `world` ranks, of which only this one exists; for the host and `device`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch's own tests': no run should need them

    backends = ",".join(f"{kind}:fake" for kind in dict.fromkeys(("cpu", device)))
    dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=world)
    dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # or its end warns that it has none
    try:
        yield
    finally:
        dist.destroy_process_group()


def walk_step(cfg: Config, mesh: Mesh, begun: Callable[[object], None] = lambda action: None) -> Report:
    """Build this rank and run a recorded step on the mesh's device. Repeated microbatches are not run again."""
    start, p = time.perf_counter(), cfg.parallel
    count = cfg.num_microbatches(mesh.dp.size)
    few = repeats.microbatches_to_walk(p.pp, p.vp, count)
    walked, whole = (make(mesh.pp.size, p.vp, n, p.schedule) for n in (few, count))
    report = _walk(cfg, mesh, walked, begun)
    if few < count:
        report = _expanded(report, walked, whole, mesh.pp.rank) or _walk(cfg, mesh, whole, begun)
    return replace(report, seconds=time.perf_counter() - start)


def _walk(cfg: Config, mesh: Mesh, schedule: Schedule, begun: Callable[[object], None]) -> Report:
    """Run and record a step of `schedule`. The batches of all microbatches are allocated, as in the run."""
    walk = MemoryWalk(casts=cfg.precision.fp8 != "none")

    def begin(action: object) -> None:
        walk.begin(action)
        begun(action)

    recorder = Recorder(begin)
    with walk:
        trainer = prepare(cfg, recorded(mesh, recorder), lambda *sizes: schedule)
        label(walk, trainer)
        run_step(trainer, schedule.num_microbatches)
    peak, action = walk.peak()
    memory = {part: peak.get(part, 0) for part in PARTS}
    return Report(
        mesh.rank, mesh.coordinates(), memory, action, walk.timeline(), recorder.records, replaced(trainer), 0.0
    )


def _expanded(report: Report, few: Schedule, every: Schedule, rank: int) -> Report | None:
    """Return the report of all microbatches from that of a few; None if the walk does not repeat."""
    walked, whole = few.ranks[rank], every.ranks[rank]
    first = [action for action, _ in report.timeline].index(walked[0])
    before, step, after = (
        report.timeline[i:j] for i, j in ((0, first), (first, first + len(walked)), (first + len(walked), None))
    )
    posted: dict[object, list[Record]] = {}  # by action: the records of one follow each other
    for record in report.collectives:
        posted.setdefault(record.action, []).append(record)
    mine = [posted.pop(action, []) for action in walked]
    did = [(size, [r._replace(action=None) for r in records]) for (_, size), records in zip(step, mine)]
    order = repeats.expand(walked, whole, repeats.periods(few, every), lambda i, j: did[i] == did[j])
    if order is None:
        return None
    records = [r._replace(action=action) for action, i in zip(whole, order) for r in mine[i]]
    built = posted.pop("start", [])
    peak = report.peak_action
    return replace(
        report,
        peak_action=whole[order.index(walked.index(peak))] if peak in walked else peak,
        timeline=[*before, *((action, did[i][0]) for action, i in zip(whole, order)), *after],
        collectives=[*built, *records, *(r for rest in posted.values() for r in rest)],
    )


def make_mesh(cfg: Config, world: int) -> Mesh:
    """Make the rank's mesh on the meta device: of the default process group, or of one process alone."""
    p = cfg.parallel
    tied = cfg.model.tie_embeddings
    if world == 1:
        return Mesh.offline(device="meta")
    alone = 1 if cfg.optimizer.reduces_in == "bf16" else None  # each rank counts as a node: it shares no memory
    return Mesh.create(tp=p.tp, pp=p.pp, cp=p.cp, tied=tied, device="meta", node_ranks=alone)


def recorded(mesh: Mesh, recorder: Recorder) -> Mesh:
    """Return the same mesh with axes that report to `recorder`."""
    axes = {f.name: axis for f in fields(mesh) if isinstance(axis := getattr(mesh, f.name), Axis)}
    return replace(mesh, **{name: replace(axis, activity=recorder) for name, axis in axes.items()})


def prepare(cfg: Config, mesh: Mesh, schedule: MakeSchedule | None = None, chosen: Kernels | None = None) -> Trainer:
    """Build a trainer as it is in the middle of a run. Collective over the world. schedule, chosen: see build."""
    if chosen is None and mesh.device.type == "meta":
        chosen = kernels.choose(cfg)
    trainer = build(cfg, mesh, chosen, schedule=schedule)
    for chunk in trainer.chunks:
        if chunk.fp8_state.scaling is not None:
            chunk.fp8_state.scaling.follow_history()
    return trainer


def run_step(trainer: Trainer, read: int | None = None) -> None:
    """Run one step on random tokens. Collective over the world.

    read: how many microbatches are read (None: all); the others are only allocated.
    """
    cfg, t, dp = trainer.cfg, trainer.cfg.train, trainer.mesh.dp.size
    samples = t.global_batch_size if read is None else read * t.micro_batch_size * dp
    sizes = dict(vocab_size=cfg.model.vocab_size, seq_len=t.seq_len, train_samples=samples, valid_samples=0)
    data = build_datasets(replace(cfg.data, source="mock"), **sizes, seed=t.seed)
    loader = Loader(data.train, changed(final(cfg), train=dict(global_batch_size=samples)), trainer.mesh)
    batches = loader.step(0, 1)
    for _ in range(cfg.num_microbatches(dp) - len(batches)):
        batches.append(replace(batches[0], packed=batches[0].packed.clone()))
    trainer.mesh.activity.begin_step(cfg.log.numerics_every)  # a step that counts casts needs the most memory
    trainer.step(batches, cfg.optimizer.lr)
    loader.close()


def label(walk: MemoryWalk, trainer: Trainer) -> None:
    """Label what is allocated before the step: parameters, gradients, optimizer, other."""
    buckets, optimizer = trainer.gradients.buckets, trainer.optimizer
    walk.label("parameters", (p for chunk in trainer.chunks for p in chunk.parameters()))
    walk.label("gradients", (x for bucket in buckets for x in (bucket.grad, bucket.grad_slice)))
    walk.label("optimizer", [*optimizer.masters, *optimizer.exp_avg, *optimizer.exp_avg_sq])
    walk.label("other")


def replaced(trainer: Trainer) -> list[str]:
    """List the kernels of a GPU that were replaced: "kernel: its replacement"."""
    cfg, attention = trainer.cfg, trainer.kernels.attention.name
    stand_ins = {
        "Triton: minitron.kernels.plain": True,
        f"attention by {attention}: its formulas": attention != "reference",
        f"FP8 by {cfg.precision.fp8_backend}: minitron.kernels.fp8_torch": cfg.precision.fp8 != "none",
        "apex: torch and minitron.kernels.plain": cfg.train.kernels == "apex",
        "NCCL, and memory that a node's GPUs share: torch's fake process group": trainer.mesh.world.size > 1,
        "nodes: each rank is one, and sends all of its gradients in bf16": trainer.mesh.across_nodes.size > 1,
    }
    return [text for text, used in stand_ins.items() if used]


# ---- the command ----------------------------------------------------------------------------------------------------


def split(argv: list[str]) -> tuple[argparse.Namespace | None, list[str]]:
    """Split off the options of a dry run: (options or None, all other arguments). Raises ValueError."""
    if "--dry-run" not in argv:
        return None, argv
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--world", type=positive(int), default=1)
    parser.add_argument("--ranks", "--rank", default="first,middle,last,fullest")
    parser.add_argument("--json", action="store_true")
    return parser.parse_known_args(argv)


def command(cfg: Config, options: argparse.Namespace) -> None:
    """Print the reports that the options of `split` select. Raises ValueError."""
    world, pp = options.world, cfg.parallel.pp
    rules.check(cfg, world)
    rules.check_batch_sizes(cfg, world)
    fullest, _ = Memory(cfg, world, gpus_per_node=1).peak()
    ranks = choose_ranks(options.ranks, pp, world, fullest)
    warn_of_bubble(cfg, world)
    reports = [
        dry_run(cfg, world, rank, ProgressLine(f"rank {rank}, {i} of {len(ranks)}")) for i, rank in enumerate(ranks, 1)
    ]
    with cli.output():
        print(as_json(reports) if options.json else "\n".join(table(cfg, world, reports, fullest)))


class ProgressLine:
    """Shows the progress of a rank's dry run in a line on a terminal, and clears it at the end of the step."""

    def __init__(self, what: str):
        self.what, self.count, self.printed = what, 0, 0.0
        self.shown = sys.stderr.isatty()

    def __call__(self, action: object) -> None:
        self.count += 1
        ends, now = action == "update", time.monotonic()
        if self.shown and (ends or now - self.printed > 0.2):
            self.printed = now
            text = "" if ends else f"{self.what}: action {self.count}, {type(action).__name__}"
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def warn_of_bubble(cfg: Config, world: int) -> None:
    """Print a warning if the batch does not fill the pipeline: most of its step would be a bubble."""
    batch, pp, dp = cfg.train.global_batch_size, cfg.parallel.pp, cfg.dp(world)
    if (count := cfg.num_microbatches(dp)) < pp:
        why = f"gives each of {dp} data ranks {count} microbatches for a pipeline of parallel.pp={pp}"
        fix = f"give the batch of the whole job, such as train.global_batch_size={2 * world}, two samples a GPU"
        print(f"warning: train.global_batch_size={batch} {why}, which they do not fill; {fix}", file=sys.stderr)


def choose_ranks(names: str, pp: int, world: int, fullest: int = 0) -> list[int]:
    """Parse ranks: numbers and "first", "middle", "last", "fullest" (of the pipeline), with commas.

    fullest: the pipeline rank that is planned to need most memory. Raises ValueError.
    """
    stage, last = world // pp, world - 1 if pp > 1 else 0
    fullest_rank = last if fullest == pp - 1 else fullest * stage
    places = {"first": 0, "middle": pp // 2 * stage, "last": last, "fullest": fullest_rank}
    ranks = [places.get(name, int(name) if name.isdecimal() else -1) for name in names.split(",")]
    if not all(0 <= rank < world for rank in ranks):
        fix = f"use first, middle, last, fullest or numbers from 0 to {world - 1}, with commas"
        raise ValueError(f"--ranks={names} does not name ranks of --world={world}; {fix}")
    return list(dict.fromkeys(ranks))


def traffic(report: Report) -> dict[str, list[int]]:
    """Count the step's collectives: "axis kind" -> [how many, bytes in all]. Those of the build are left out."""
    totals: dict[str, list[int]] = {}
    for record in report.collectives:
        if record.action != "start":
            count, num_bytes = totals.get(key := f"{record.axis} {record.kind}", (0, 0))
            totals[key] = [count + 1, num_bytes + record.num_bytes]
    return dict(sorted(totals.items()))


def table(cfg: Config, world: int, reports: list[Report], fullest: int) -> Iterator[str]:
    """Yield the lines of a table of the reports, a column each; fullest: the pipeline rank with most memory."""
    p, dp = cfg.parallel, cfg.dp(world)
    layout = f"tp {p.tp} pp {p.pp} vp {p.vp} cp {p.cp} dp {dp}"
    count = cfg.num_microbatches(dp)
    t, first = cfg.train, batch_size(cfg.train, 0)
    smaller = "" if first == t.global_batch_size else f" (the first steps have {first // (t.micro_batch_size * dp)})"
    yield f"one step on {world} ranks: {layout}, {count} microbatches of {t.micro_batch_size}{smaller}"

    def row(name: str, cells: Iterable[str]) -> str:
        return f"{name:<24}" + "".join(f"{cell:>30}" for cell in cells)

    def gib(num_bytes: int) -> str:
        return f"{num_bytes / 2**30:.2f} GiB"

    stage = world // p.pp
    yield row("", (f"{r.cell.partition(',')[0]}){', fullest' * (r.rank // stage == fullest)}" for r in reports))
    yield row("peak memory", (gib(r.peak_bytes) for r in reports))
    yield from (row(f"  {part}", (gib(r.memory[part]) for r in reports)) for part in PARTS)
    yield row("  first reached in", (str(r.peak_action).replace(", last=False", "") for r in reports))
    planned = Memory(cfg, world, gpus_per_node=1)
    yield row("CUDA graphs, about", (gib(planned.graph(r.rank // stage)) for r in reports))
    totals = [traffic(r) for r in reports]
    for name in sorted({name for total in totals for name in total}):
        counts = [total.get(name, (0, 0)) for total in totals]
        yield row(name, (f"{count:,} x, {gib(num_bytes)}" for count, num_bytes in counts))
    yield row("seconds for this", (f"{r.seconds:.1f}" for r in reports))
    yield "collectives: how many, and the bytes that this rank contributes"
    yield f"replaced: {'; '.join(reports[0].replaced)}"
    yield "left out: workspaces of libraries, NCCL's and shared buffers, the CUDA context, fragmentation"


def as_json(reports: list[Report]) -> str:
    """Write the reports' fields and `traffic` as a JSON list; actions and dtypes as text."""
    return json.dumps([vars(r) | {"peak_bytes": r.peak_bytes, "traffic": traffic(r)} for r in reports], default=str)
