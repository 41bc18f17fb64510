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
PRELOAD = ("torch", "torch.fx.experimental.symbolic_shapes", "numpy.random", "minitron.pretrain")


class Limit(NamedTuple):
    """At most once + node * nodes + rank * ranks."""

    once: float = 0
    node: float = 0
    rank: float = 0

    def of(self, ranks: int) -> float:
        return self.once + self.node * ranks / NODE + self.rank * ranks


# ---- by count: sums over all ranks ----------------------------------------------------------------------------------

# Per rank there is what torch needs (store, groups), an agreement's messages, and "own" files: its log, shards, data
# and what is cached of it. All else that several nodes see is for one rank, or one rank of each node.
ALWAYS = {
    "own opens": Limit(once=40, rank=40),
    "own names": Limit(once=40, rank=40),
    "own bytes": Limit(once=1 << 20, rank=1 << 20),
    "agreements": Limit(rank=16),
}
START = {
    "opens": Limit(once=40, node=1),
    "names": Limit(once=120, node=3),
    "bytes": Limit(once=1 << 20, node=4096),
    "local": Limit(node=80),
    "store": Limit(rank=6),
    "store bytes": Limit(rank=100),
    "polls": Limit(once=100),
    "connections": Limit(rank=1),
    "groups": Limit(node=2, rank=8),
    "gloo members": Limit(node=16, rank=8),
    "agreed bytes": Limit(rank=64 << 10),
}
LIMITS: dict[str, dict[str, Limit]] = {
    "start": START,
    "first step": {"store": Limit(rank=2), "store bytes": Limit(rank=16)},
    "step": {"store": Limit(rank=3), "store bytes": Limit(rank=24)},
    "save": {
        "opens": Limit(once=40),
        "names": Limit(once=120),
        "bytes": Limit(once=1 << 20, rank=256),
        "agreed bytes": Limit(rank=1024),
    },
    "local save": {"local": Limit(node=60), "agreed bytes": Limit(rank=64 << 10)},
    "load": {"opens": Limit(once=40, node=1), "local": Limit(node=16), "agreed bytes": Limit(rank=64 << 10)},
    "restart": START,
    "end": {"opens": Limit(once=4), "names": Limit(once=4), "bytes": Limit(once=1 << 20)},
}


class Sum(NamedTuple):
    """What all ranks do in a phase, and names of shared files that an ordinary rank has used for it."""

    phase: str
    what: str
    ranks: int
    value: float
    names: tuple[str, ...] = ()

    @property
    def limit(self) -> float:
        return ({**ALWAYS, **LIMITS[self.phase]}.get(self.what) or Limit()).of(self.ranks)

    def __str__(self) -> str:
        names = f": {', '.join(self.names)}" if self.names else ""
        return f"{self.phase}, {self.what} of {self.ranks:,} ranks: {self.value:,.0f} of {self.limit:,.0f}{names}"


def count(worlds: Sequence[int], plant: Callable[[], None] | None = None) -> list[Sum]:
    """Return what all ranks do in new runs of these sizes, and in the restarts of such runs."""
    import played

    sums = []
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            new = summed(played.play(world, Path(folder, "new"), played.RUN, plant), world)
            again = summed(played.play(world, Path(folder, "again"), played.RESTART, plant), world)
        sums += [s for s in new if s.phase != "load"] + [s for s in again if s.phase in ("restart", "load")]
    return [s for s in sums if s.phase in LIMITS]


def summed(found: Mapping[int, Any], world: int) -> Iterator[Sum]:
    """Add up what all ranks do: those that are not played do as much as the busiest of their kind.

    Kinds: the job's first and last rank, the other first ranks of nodes, all others.
    """
    kinds = {
        (0,): 1,
        (world - 1,): 1,
        tuple(rank for rank in found if rank and rank % NODE == 0): world // NODE - 1,
        tuple(rank for rank in found if rank % NODE and rank != world - 1): world - world // NODE - 1,
    }
    for phase in found[0].counts:
        counts = {rank: found[rank].counts.get(phase, {}) for rank in found}
        for what in dict.fromkeys(what for row in counts.values() for what in row):
            most = {ranks: max((counts[rank].get(what, 0) for rank in ranks), default=0) for ranks in kinds}
            total = sum(number * most[ranks] for ranks, number in kinds.items())
            names = found[1].names.get(phase, {}).get(what, ())
            yield Sum(phase, what, world, total, tuple(names))


def with_fit(sums: Sequence[Sum]) -> list[Sum]:
    """Append what a job of LARGE[-1] ranks would do."""
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for s in sums:
        rows.setdefault((s.phase, s.what), {})[s.ranks] = s.value
    larger = {key: {n: row.get(n, 0.0) for n in COUNTED[1:]} for key, row in rows.items()}
    return [*sums, *(Sum(*key, LARGE[-1], fitted(row, (LARGE[-1],))[0]) for key, row in larger.items())]


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
    "first_store": Limit(once=64, rank=2),
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
        row |= dict(zip(LARGE, fitted(row, LARGE, name in BY_LEVELS)))
        found += [f"{name} of {n:,} ranks: {x:,.0f} of {limit.of(n):,.0f}" for n, x in row.items() if x > limit.of(n)]
    return found


def started_table(jobs: Sequence[Any]) -> str:
    """Write what jobs have measured, and the fit for LARGE ones."""
    ranks = [job.ranks for job in jobs]
    names = [*map("{:,}".format, ranks), *map("{:,} (fit)".format, LARGE), "fit", "c of c W^2"]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for name in jobs[0]._fields[1:]:
        row = {job.ranks: float(getattr(job, name)) for job in jobs}
        form = "{:,.2f}" if name.endswith("seconds") else "{:,.0f}"
        levels = name in BY_LEVELS
        b, a = _line(row, levels)
        c = np.polyfit(list(row), list(row.values()), 2)[0] if len(row) > 2 and not levels else 0.0
        cells = [form.format(x) for x in (*row.values(), *fitted(row, LARGE, levels))]
        cells += [f"{a:.3g} + {b:.3g} {'log2 W' if levels else 'W'}", f"{c:.1e}"]
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fitted(row: Mapping[int, float], at: Sequence[int], levels: bool = False) -> list[float]:
    """Return a least-squares line through {ranks: value} at other numbers of ranks. levels: over their logarithm."""
    return np.polyval(_line(row, levels), np.log2(at) if levels else np.array(at, float)).tolist()


def _line(row: Mapping[int, float], levels: bool) -> np.ndarray:
    ranks = np.array(list(row), float)
    return np.polyfit(np.log2(ranks) if levels else ranks, list(row.values()), 1)


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
    print(counted_table(with_fit(staged(count, COUNTED))))
    sizes = {"nccl": (32, 64, 128, 256) if everything else (32, 64, 128)} | (
        {"gloo": (16, 32, 64)} if everything else {}
    )
    for backend, ranks in sizes.items():
        print(f"\n{backend}\n" + started_table(staged(start, [(n, backend) for n in ranks])))


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    main()
