"""What a job costs that its ranks share, by their number: limits, measurements, the table of both.

    python tests/scale/table.py [--all]         prints the table; --all: with jobs of 256 ranks, and on gloo alone

By count: some ranks of a job are played (played.py) and stand for the others of their kind. By real processes: jobs of
up to 256 ranks start on this machine (forked.py). The columns of larger jobs are a least-squares fit.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

COUNTED = (8, 64, 512, 2048)  # ranks
LARGEST = 16384
NODE = 8  # ranks
PRELOAD = ("torch", "torch.fx.experimental.symbolic_shapes", "numpy.random", "minitron.pretrain")


class Limit(NamedTuple):
    """The sum over all ranks is at most once + node * nodes + rank * ranks."""

    once: float = 0
    node: float = 0
    rank: float = 0

    def of(self, ranks: int) -> float:
        return self.once + self.node * ranks / NODE + self.rank * ranks


# Files that all nodes see. "opens": of files that ranks share; "names": operations on folders and names there. "own":
# the same of a rank's log, of shards and of data files. "local": on the node's disk.
LIMITS: dict[str, dict[str, Limit]] = {
    "start": {
        "opens": Limit(once=100, node=4),
        "names": Limit(once=300, node=8),
        "bytes": Limit(once=1 << 20, node=8 << 10),
        "own opens": Limit(rank=16),
        "own names": Limit(rank=16),
        "own bytes": Limit(rank=1 << 20),
        "local": Limit(node=100, rank=8),
        "store": Limit(rank=8),
        "store bytes": Limit(rank=256),
        "connections": Limit(rank=1),
        "groups": Limit(rank=12),
        "gloo members": Limit(rank=8, node=16),
        "agreements": Limit(rank=16),
    },
}
LIMITS["restart"] = LIMITS["start"]


def summed(counts: Mapping[int, Mapping[str, Mapping[str, int]]], world: int) -> dict[str, dict[str, int]]:
    """Add up what all ranks do, by phase: those that are not played do as much as the busiest of their kind.

    Kinds: the job's first and last rank, other first ranks of nodes, all others.
    """
    kinds = {
        "first": ([0], 1),
        "last": ([world - 1], 1),
        "firsts": ([rank for rank in counts if rank and rank % NODE == 0], world // NODE - 1),
        "others": ([rank for rank in counts if rank % NODE and rank != world - 1], world - world // NODE - 1),
    }
    total: dict[str, dict[str, int]] = {}
    for ranks, number in kinds.values():
        for phase in {phase for rank in ranks for phase in counts[rank]}:
            rows = [counts[rank].get(phase, {}) for rank in ranks]
            for what in {what for row in rows for what in row}:
                most = max(row.get(what, 0) for row in rows)
                sums = total.setdefault(phase, {})
                sums[what] = sums.get(what, 0) + number * most
    return total


def fit(ranks: Sequence[int], values: Sequence[float], degree: int = 1) -> np.ndarray:
    """Return the coefficients, the highest power first, of the polynomial with the least squared error."""
    return np.polyfit(np.array(ranks, float), np.array(values, float), degree)


def exceeded(phase: str, what: str, ranks: int, value: float) -> str | None:
    """Describe what is above its limit; None if it is not."""
    limit = LIMITS[phase].get(what, Limit())
    if value <= limit.of(ranks):
        return None
    return f"{phase}: {what} of {ranks:,} ranks: {value:,.0f}, and the limit is {limit.of(ranks):,.0f} ({limit})"


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
    import traceback

    os.fsync = lambda _: None  # what is written here is thrown away
    try:
        connection.send((True, job(*args)))
    except BaseException:
        connection.send((False, traceback.format_exc()))


def count(worlds: Sequence[int], plant: Callable[[], None] | None = None) -> dict[int, dict[str, dict[str, int]]]:
    """Return what all ranks do, by world size, phase and operation."""
    import played

    found = {}
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            new = played.play(world, Path(folder, "new"), played.RUN, plant)
            again = played.play(world, Path(folder, "again"), played.RESTART, plant)
        sums, resumed = summed(new, world), summed(again, world)
        found[world] = sums | {phase: resumed[phase] for phase in (played.RESTART, "load")}
    return found


def start(jobs: Sequence[tuple[int, str]]) -> list:
    """Start jobs of (ranks, backend) for real; return what each has measured."""
    import forked

    with tempfile.TemporaryDirectory() as folder:
        return [forked.start(*job, Path(folder, f"{i}")) for i, job in enumerate(jobs)]


# ---- the table ------------------------------------------------------------------------------------------------------


def counted_table(found: Mapping[int, Mapping[str, Mapping[str, int]]]) -> str:
    """Write what all ranks do, by phase and operation, with the fit at LARGEST."""
    lines = ["| phase | of all ranks | " + " | ".join(f"{n:,}" for n in (*found, LARGEST)) + " (fit) |"]
    lines.append("|---" * (len(found) + 3) + "|")
    for phase, sums in found[max(found)].items():
        for what in sums:
            values = [found[ranks][phase].get(what, 0) for ranks in found]
            last = np.polyval(fit(list(found)[1:], values[1:]), LARGEST)
            lines.append(f"| {phase} | {what} | " + " | ".join(f"{value:,.0f}" for value in (*values, last)) + " |")
    return "\n".join(lines)


def started_table(jobs: Sequence[Any]) -> str:
    """Write what jobs have measured, with the fit at 2,048 and LARGEST ranks."""
    ranks = [job.ranks for job in jobs]
    larger = (2048, LARGEST)
    lines = ["| | " + " | ".join([*(f"{n:,}" for n in ranks), *(f"{n:,} (fit)" for n in larger)]) + " | a + b W | c W^2 |"]
    lines.append("|---" * (len(ranks) + 5) + "|")
    for name in jobs[0]._fields[1:]:
        values = [getattr(job, name) for job in jobs]
        b, a = fit(ranks, values)
        c = fit(ranks, values, 2)[0] if len(ranks) > 2 else 0.0
        cells = [*values, *(np.polyval((b, a), n) for n in larger)]
        form = "{:,.2f}" if name.endswith("seconds") else "{:,.0f}"
        fitted = f"{a:.3g} + {b:.3g} W | {c:+.1e}"
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(map(form.format, cells)) + f" | {fitted} |")
    return "\n".join(lines)


def main() -> None:
    everything = "--all" in sys.argv[1:]
    print(counted_table(staged(count, COUNTED)))
    for backend, sizes in ("nccl", (32, 64, 128, 256) if everything else (32, 64, 128)), ("gloo", (16, 32, 64, 128)):
        if backend == "nccl" or everything:
            print(f"\n{backend}\n" + started_table(staged(start, [(ranks, backend) for ranks in sizes])))


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    main()
