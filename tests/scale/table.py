"""What the ranks of a job do to what they share: limits, measurements, and the table of both.

    python tests/scale/table.py [--all]      prints the table. --all: also jobs of 256 ranks, and jobs on CPUs

By count: some ranks of a job are played (played.py) and stand for the others of their kind. By real processes: jobs of
up to 256 ranks start on this machine (forked.py). The columns of larger jobs are least-squares fits.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # the repository

COUNTED = (8, 64, 512, 2048)  # ranks
LARGE = (2048, 16384)
NODE = 8  # ranks
SFT = ("data.source=sft", "data.tokenizer=bytes", "data.split=1", "model.vocab_size=512")  # keys of a run
STEPS = ("step", "save", "local save", "end")
PRELOAD = ("torch", "torch.fx.experimental.symbolic_shapes", "numpy.random", "minitron.pretrain")


class Limit(NamedTuple):
    """At most once + node * nodes + rank * ranks; and index: so many times the checkpoint's index, for each rank."""

    once: float = 0
    node: float = 0
    rank: float = 0
    index: float = 0

    def of(self, ranks: int, index_bytes: float = 0) -> float:
        return self.once + self.node * ranks / NODE + (self.rank + self.index * index_bytes) * ranks


# ---- by count: sums over all ranks ----------------------------------------------------------------------------------

# Per rank there is what torch needs (store, groups), an agreement's messages, and "own" files: its log, shards, data
# and what is cached of it. All else that several nodes see is for one rank of the job, or of each node.
START = {
    "opens": Limit(once=30),
    "folders": Limit(once=60, node=4),
    "looks": Limit(once=60, node=4, rank=1),
    "bytes": Limit(once=1 << 20, rank=256),
    "own opens": Limit(once=40, rank=20),
    "own looks": Limit(once=40, rank=42),
    "own bytes": Limit(once=1 << 20, rank=1 << 19),
    "local": Limit(node=60),
    "polls": Limit(once=100, node=60),
    "store": Limit(once=8, rank=5),
    "store bytes": Limit(rank=128),
    "connections": Limit(rank=1),
    "groups": Limit(rank=8),
    "gloo members": Limit(rank=11),
    "agreements": Limit(rank=12),
    "agreed bytes": Limit(rank=64 << 10),
}
LIMITS: dict[str, dict[str, Limit]] = {
    "start": START,
    "first step": {
        "looks": Limit(once=4),
        "folders": Limit(once=4),
        "own opens": Limit(once=4),
        "own looks": Limit(once=4),
        "own bytes": Limit(once=1 << 16),
        "store": Limit(rank=1),
        "store bytes": Limit(rank=16),
    },
    "step": {"store": Limit(rank=4), "store bytes": Limit(rank=40)},  # of three steps; fewer if they are short
    "save": {
        "opens": Limit(once=40),
        "folders": Limit(once=60),
        "looks": Limit(once=60),
        "bytes": Limit(once=1 << 16, rank=4096),
        "own opens": Limit(rank=2),
        "own looks": Limit(rank=2),
        "own bytes": Limit(once=1 << 20, rank=4096),
        "agreements": Limit(rank=4),
        "agreed bytes": Limit(rank=2048),
    },
    "local save": {"local": Limit(node=60), "agreements": Limit(rank=4), "agreed bytes": Limit(rank=8192)},
    "load": {
        "own opens": Limit(once=80, rank=12),
        "own looks": Limit(once=80, rank=12),
        "own bytes": Limit(once=1 << 22, rank=1 << 16),
        "local": Limit(rank=1),
        "agreements": Limit(rank=4),
        "agreed bytes": Limit(rank=1024),
    },
    "restart": {**START, "agreed bytes": Limit(rank=64 << 10, index=1.1)},
    "end": {"opens": Limit(once=4), "looks": Limit(once=4), "bytes": Limit(once=1 << 16, rank=16)},
}


class Sum(NamedTuple):
    """What all ranks do in a phase. index_bytes: of the job's index. names: shared ones that an ordinary rank used."""

    phase: str
    what: str
    ranks: int
    value: float
    index_bytes: float = 0
    names: tuple[str, ...] = ()

    @property
    def limit(self) -> float:
        return limit_of(self.phase, self.what).of(self.ranks, self.index_bytes)

    def __str__(self) -> str:
        names = f": {', '.join(self.names)}" if self.names else ""
        return f"{self.phase}, {self.what} of {self.ranks:,} ranks: {self.value:,.0f} of {self.limit:,.0f}{names}"


def limit_of(phase: str, what: str) -> Limit:
    return LIMITS[phase].get(what, Limit())


def count(worlds: Sequence[int], plant: Callable[[], None] | None = None, more: Sequence[str] = ()) -> list[Sum]:
    """Return what all ranks do in new runs of these sizes, and in the restarts of such runs. more: keys of the runs."""
    import played

    sums = []
    for world in worlds:
        for kind, left_out in (played.RUN, {"load"}), (played.RESTART, {"start", "first step", *STEPS}):
            with tempfile.TemporaryDirectory() as folder:
                found = played.play(world, Path(folder), kind, plant, more)
                index_bytes = max(path.stat().st_size for path in Path(folder, "shared").rglob("index.json"))
            sums += [s for s in summed(found, world, index_bytes) if s.phase in LIMITS.keys() - left_out]
    return sums


def summed(found: Mapping[int, Any], world: int, index_bytes: int) -> Iterator[Sum]:
    """Add up what all ranks do: those that are not played do as much as the busiest of their kind.

    Kinds: the job's first rank, its last one, and the others by their number of groups in the agreement's tree.
    """
    levels = [_levels(rank) for rank in range(1, world - 1)]
    kinds = {
        (0,): 1,
        (world - 1,): 1,
        **{
            tuple(rank for rank in found if 0 < rank < world - 1 and _levels(rank) == level): levels.count(level)
            for level in set(levels)
        },
    }
    for phase in found[0].counts:
        counts = {rank: found[rank].counts.get(phase, {}) for rank in found}
        for what in dict.fromkeys(what for row in counts.values() for what in row):
            most = {ranks: max(counts[rank].get(what, 0) for rank in ranks) for ranks in kinds}
            total = sum(number * most[ranks] for ranks, number in kinds.items())
            names = found[1].names.get(phase, {}).get(what, ())
            yield Sum(phase, what, world, total, index_bytes, tuple(names))


def _levels(rank: int) -> int:
    """Count how often NODE, which is also the tree's fan-out, divides a rank."""
    return 0 if rank % NODE else 1 + _levels(rank // NODE)


def with_fit(sums: Sequence[Sum]) -> list[Sum]:
    """Append what a job of LARGE[-1] ranks would do, by those of more than one node."""
    ranks = LARGE[-1]
    rows: dict[tuple[str, str], dict[int, Sum]] = {}
    for s in sums:
        rows.setdefault((s.phase, s.what), {})[s.ranks] = s
    fits = []
    for (phase, what), row in rows.items():
        values = {n: row[n].value if n in row else 0.0 for n in COUNTED[1:]}
        index_bytes = {s.ranks: s.index_bytes for s in sums if s.phase == phase}
        degree = 2 if limit_of(phase, what).index else 1
        fits.append(Sum(phase, what, ranks, fit(values, [ranks], degree)[0], fit(index_bytes, [ranks])[0]))
    return [*sums, *fits]


def counted_table(sums: Sequence[Sum]) -> str:
    """Write the sums, a column for each number of ranks."""
    ranks = list(dict.fromkeys(s.ranks for s in sums))
    values = {(s.phase, s.what, s.ranks): s.value for s in sums}
    lines = ["| phase | of all ranks | " + " | ".join(f"{n:,}" for n in ranks) + " |", "|---" * (len(ranks) + 2) + "|"]
    for phase in LIMITS:
        for what in dict.fromkeys(s.what for s in sums if s.phase == phase):
            row = (f"{values.get((phase, what, n), 0):,.0f}" for n in ranks)
            lines.append(f"| {phase} | {what} | " + " | ".join(row) + " |")
    return "\n".join(lines)


# ---- by real processes ----------------------------------------------------------------------------------------------

# Of forked.Measured, for jobs whose axes are NCCL's. Descriptors and threads are those of one process.
STARTED = {
    "store": Limit(once=64, rank=32),
    "store_of_first": Limit(once=64, rank=2),
    "descriptors": Limit(once=64),
    "threads": Limit(once=24),
    "agent_descriptors": Limit(once=64, rank=2),
    "agent_threads": Limit(once=8),
}
BY_LEVELS = ("descriptors", "threads")  # of the agreement's tree, so they grow with the logarithm of the ranks


def start(jobs: Sequence[tuple[int, str]]) -> list:
    """Start jobs of (ranks, backend) for real; return what each has measured."""
    import forked

    with tempfile.TemporaryDirectory() as folder:
        return [forked.start(*job, Path(folder, str(i))) for i, job in enumerate(jobs)]


def beyond(jobs: Sequence[Any]) -> list[str]:
    """Describe what is above its limit, also of LARGE jobs by the fit."""
    found = []
    for name, limit in STARTED.items():
        row = {job.ranks: float(getattr(job, name)) for job in jobs}
        row |= dict(zip(LARGE, fit(row, LARGE, levels=name in BY_LEVELS)))
        found += [f"{name} of {n:,} ranks: {x:,.0f} of {limit.of(n):,.0f}" for n, x in row.items() if x > limit.of(n)]
    return found


def started_table(jobs: Sequence[Any], parabola: bool = False) -> str:
    """Write what jobs have measured, and least-squares fits for LARGE ones: a + b W, or a + b log2 W, and c W^2.

    parabola: for LARGE ones, too; else c is shown alone.
    """
    sizes = [*(f"{job.ranks:,}" for job in jobs), *(f"{n:,} (fit)" for n in LARGE)]
    lines = ["| | " + " | ".join([*sizes, "fit", "c W^2"]) + " |", "|---" * (len(sizes) + 3) + "|"]
    for name in jobs[0]._fields[1:]:
        row = {job.ranks: float(getattr(job, name)) for job in jobs}
        levels = name in BY_LEVELS and not parabola
        c, *_ = _coefficients(row, 2) if len(row) > 2 and not levels else (0.0,)
        *_, b, a = _coefficients(row, 1 + parabola, levels)
        form = "{:,.2f}" if name.endswith("seconds") else "{:,.0f}"
        cells = [form.format(x) for x in (*row.values(), *fit(row, LARGE, 1 + parabola, levels))]
        cells += [f"{a:.3g} + {b:.3g} {'log2 W' if levels else 'W'}", f"{c:.1e}"]
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fit(row: Mapping[int, float], at: Sequence[int], degree: int = 1, levels: bool = False) -> list[float]:
    """Return {ranks: value} at other numbers of ranks, by least squares. levels: a polynomial of their logarithm."""
    return np.polyval(_coefficients(row, degree, levels), np.log2(at) if levels else np.array(at, float)).tolist()


def _coefficients(row: Mapping[int, float], degree: int, levels: bool = False) -> np.ndarray:
    ranks = np.array(list(row), float)
    return np.polyfit(np.log2(ranks) if levels else ranks, list(row.values()), degree)


# ---- the table of launch/README.md ----------------------------------------------------------------------------------

SUMMARY = (  # what is counted, in which phase; and fields of forked.Measured
    ("shared files that are opened", "opens"),
    ("looks at shared names", "looks"),
    ("shared folders that are listed or changed", "folders"),
    ("opens of a rank's log, of data and of its cache", "own opens"),
)
STARTED_SUMMARY = (
    ("operations on the store", "store"),
    ("open files of the process with the store", "agent_descriptors"),
    ("seconds for which it computes", "agent_cpu_seconds"),
    ("open files of rank 0 for the store and for agreements", "descriptors"),
)


def summary(sums: Sequence[Sum], jobs: Sequence[Any]) -> str:
    """Write what a start costs at LARGE sizes: of a new run, and of one that goes on from a checkpoint."""
    values = {(s.phase, s.what, s.ranks): s.value for s in sums}
    lines = ["| | " + " | ".join(f"{n:,} ranks" for n in LARGE) + " |", "|---" * (len(LARGE) + 1) + "|"]
    for text, what in SUMMARY:
        new, again = ([f"{values.get((phase, what, n), 0):,.0f}" for n in LARGE] for phase in ("start", "restart"))
        cells = (x if x == y else f"{x}; a restart {y}" for x, y in zip(new, again))
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    for text, name in STARTED_SUMMARY:
        row = {job.ranks: float(getattr(job, name)) for job in jobs}
        form = "{:,.1f}" if name.endswith("seconds") else "{:,.0f}"
        lines.append(f"| {text} | " + " | ".join(map(form.format, fit(row, LARGE, levels=name in BY_LEVELS))) + " |")
    return "\n".join(lines)


# ---- the process that forks ranks -----------------------------------------------------------------------------------


def staged(job: Callable, *args: Any) -> Any:
    """Call a function in a process without threads, in which torch is loaded, so that it may fork ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    ours, theirs = context.Pipe()
    process = context.Process(target=_stage, args=(theirs, job, args))
    process.start()
    theirs.close()
    try:
        succeeded, result = ours.recv()
    except EOFError:
        succeeded, result = False, "the process that forks ranks has died"
    process.join()
    if not succeeded:
        raise RuntimeError(result)
    return result


def _stage(connection: Any, job: Callable, args: tuple) -> None:
    os.fsync = lambda _: None  # what is written here is thrown away
    try:
        connection.send((True, job(*args)))
    except BaseException:
        connection.send((False, traceback.format_exc()))


def main() -> None:
    everything = "--all" in sys.argv[1:]
    sums = with_fit(staged(count, COUNTED))
    jobs = staged(start, [(n, "nccl") for n in (32, 64, 128, 256)[: 3 + everything]])
    print(counted_table(sums), started_table(jobs), sep="\n\n")
    if everything:
        print("\nAll groups are gloo's:\n" + started_table(staged(start, [(n, "gloo") for n in (16, 32, 64)]), True))
    print("\n" + summary(sums, jobs))


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    main()
