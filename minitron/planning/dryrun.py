"""A dry run: one step of any rank of any job, on a laptop, with the code that the job itself will run.

Problem: one waits in a queue to learn whether a layout fits, and whether this code works at 2,048 ranks. The idea:

  1. torch's meta device has tensors with shapes and without memory, and its `fake` process group is a world of any size
     in which every collective succeeds at once. So a rank of the job builds its part of the model and runs its schedule
     and its optimizer here: a shape that does not fit fails as it would there, with the same message.
  2. Kernels that only a GPU has are replaced by their plain twins (kernels/meta.py), and the report names them.
  3. `MemoryWalk` follows every allocation, `Recorder` writes down every collective. The recorder is the rank's
     `Activity`, so a real run on gloo is recorded in the same way, and the two lists are equal.

    python -m minitron.pretrain configs/gpt3_175b.yaml train.global_batch_size=4096 --dry-run --world 2048

The step is like one in the middle of a run: FP8 scales come from histories. Its samples are random tokens. Left out:
what libraries allocate for themselves, time (see planning/plan.py), and errors that only arise between ranks.
"""

from __future__ import annotations

import argparse
import json
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
from minitron.config.describe import DRY_RUN
from minitron.config.schema import Config
from minitron.data.build import build_datasets
from minitron.data.loader import Loader
from minitron.planning.memory import LASTING, Memory
from minitron.planning.memory_walk import MemoryWalk
from minitron.train import Trainer, build

PARTS = (*LASTING, "activations", "other")


class Record(NamedTuple):
    """A collective as one rank takes part in it, with the bytes that it puts in; or a message, a "send" or a "recv"."""

    kind: str
    axis: str
    num_bytes: int
    dtype: torch.dtype
    ranks: tuple[int, ...]  # who takes part; of a message the peer
    action: object  # of the schedule, in which it begins


@dataclass(frozen=True)
class Report:
    """What one rank's step took.

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


def dry_run(cfg: Config, world: int, rank: int = 0) -> Report:
    """Run one step of `rank` in a default process group of its own. Raises whatever the run would raise."""
    rules.check(cfg, world)
    with fake_world(world, rank):
        return walk_step(cfg, make_mesh(cfg, world))


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


def walk_step(cfg: Config, mesh: Mesh) -> Report:
    """Build this rank and run a step, watched, on the mesh's device."""
    start, walk = time.perf_counter(), MemoryWalk()

    def begun(action: object) -> None:
        if action == "update":  # the schedule's activations are gone: what it leaves are casts of weights
            walk.label("other" if cfg.precision.fp8 == "none" else "fp8 weights")
        walk.begin(action)

    recorder = Recorder(begun)
    with walk:
        trainer = prepare(cfg, recorded(mesh, recorder))
        label(walk, trainer)
        run_step(trainer)
    peak, action = walk.peak()
    memory, seconds = {part: peak.get(part, 0) for part in PARTS}, time.perf_counter() - start
    return Report(
        mesh.rank, mesh.coordinates(), memory, action, walk.timeline(), recorder.records, replaced(trainer), seconds
    )


def make_mesh(cfg: Config, world: int) -> Mesh:
    """Make the rank's mesh on the meta device: of the default process group, or of one process alone."""
    p = cfg.parallel
    return Mesh.offline(device="meta") if world == 1 else Mesh.create(tp=p.tp, pp=p.pp, cp=p.cp, device="meta")


def recorded(mesh: Mesh, recorder: Recorder) -> Mesh:
    """Return the same mesh with axes that report to `recorder`."""
    axes = {f.name: axis for f in fields(mesh) if isinstance(axis := getattr(mesh, f.name), Axis)}
    return replace(mesh, **{name: replace(axis, activity=recorder) for name, axis in axes.items()})


def prepare(cfg: Config, mesh: Mesh) -> Trainer:
    """Build a trainer as it is in the middle of a run. Collective over the world."""
    trainer = build(cfg, mesh)
    for chunk in trainer.chunks:
        if chunk.fp8_state.scaling is not None:
            chunk.fp8_state.scaling.follow_history()
    return trainer


def run_step(trainer: Trainer) -> None:
    """Run one step on random tokens. Collective over the world."""
    cfg, t = trainer.cfg, trainer.cfg.train
    sizes = dict(vocab_size=cfg.model.vocab_size, seq_len=t.seq_len, train_samples=t.global_batch_size, valid_samples=0)
    data = build_datasets(replace(cfg.data, source="mock"), **sizes, seed=t.seed)
    loader = Loader(data.train, cfg, trainer.mesh)
    trainer.step(loader.step(0, 1), cfg.optimizer.lr)
    loader.close()


def label(walk: MemoryWalk, trainer: Trainer) -> None:
    """Label what is allocated before the step: parameters, gradients, optimizer, other."""
    buckets, optimizer = trainer.gradients.buckets, trainer.optimizer
    walk.label("parameters", (p for chunk in trainer.chunks for p in chunk.parameters()))
    walk.label("gradients", (bucket.grad for bucket in buckets))
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
    }
    return [text for text, used in stand_ins.items() if used]


# ---- the command ----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(f"{message}; use {DRY_RUN}")


def split(argv: list[str]) -> tuple[argparse.Namespace | None, list[str]]:
    """Split off the options of a dry run: (options or None, all other arguments). Raises ValueError."""
    if "--dry-run" not in argv:
        return None, argv
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--ranks", "--rank", default="first,middle,last")
    parser.add_argument("--json", action="store_true")
    return parser.parse_known_args(argv)


def command(cfg: Config, options: argparse.Namespace) -> None:
    """Print the reports that the options of `split` ask for. Raises ValueError."""
    world = options.world
    rules.check(cfg, world)
    reports = [dry_run(cfg, world, rank) for rank in choose_ranks(options.ranks, cfg.parallel.pp, world)]
    with cli.output():
        print(as_json(reports) if options.json else "\n".join(table(cfg, world, reports)))


def choose_ranks(names: str, pp: int, world: int) -> list[int]:
    """Parse ranks: numbers and "first", "middle", "last" (of the pipeline), with commas. Raises ValueError."""
    places = {"first": 0, "middle": pp // 2 * (world // pp), "last": world - 1 if pp > 1 else 0}
    ranks = [places.get(name, int(name) if name.isdecimal() else -1) for name in names.split(",")]
    if not all(0 <= rank < world for rank in ranks):
        fix = f"use first, middle, last or numbers from 0 to {world - 1}, with commas"
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


def table(cfg: Config, world: int, reports: list[Report]) -> Iterator[str]:
    """Yield the lines of a table of the reports, a column each."""
    p, dp = cfg.parallel, cfg.dp(world)
    layout = f"tp {p.tp} pp {p.pp} vp {p.vp} cp {p.cp} dp {dp}"
    count = cfg.num_microbatches(dp)
    yield f"one step on {world} ranks: {layout}, {count} microbatches of {cfg.train.micro_batch_size}"

    def row(name: str, cells: Iterable[str]) -> str:
        return f"{name:<24}" + "".join(f"{cell:>30}" for cell in cells)

    def gib(num_bytes: int) -> str:
        return f"{num_bytes / 2**30:.2f} GiB"

    yield row("", (r.cell.partition(",")[0] + ")" for r in reports))
    yield row("peak memory", (gib(r.peak_bytes) for r in reports))
    yield from (row(f"  {part}", (gib(r.memory[part]) for r in reports)) for part in PARTS)
    yield row("  first reached in", (str(r.peak_action).replace(", last=False", "") for r in reports))
    planned = Memory(cfg, world, gpus_per_node=1)
    yield row("CUDA graphs, about", (gib(planned.graph(r.rank // (world // p.pp))) for r in reports))
    totals = [traffic(r) for r in reports]
    for name in sorted({name for total in totals for name in total}):
        counts = [total.get(name, (0, 0)) for total in totals]
        yield row(name, (f"{count:,} x, {gib(num_bytes)}" for count, num_bytes in counts))
    yield row("seconds for this", (f"{r.seconds:.1f}" for r in reports))
    yield "of collectives: how many, and the bytes that this rank puts in"
    yield f"replaced: {'; '.join(reports[0].replaced)}"
    yield "left out: workspaces of libraries, NCCL's and shared buffers, the CUDA context, fragmentation"


def as_json(reports: list[Report]) -> str:
    """Write the reports' fields and `traffic` as a JSON list; actions and dtypes as text."""
    return json.dumps([vars(r) | {"peak_bytes": r.peak_bytes, "traffic": traffic(r)} for r in reports], default=str)
