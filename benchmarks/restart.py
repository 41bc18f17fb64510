"""How long a run is away when a rank dies: from SIGKILL to the first new step, and by part.

    python benchmarks/restart.py configs/llama3_8b.yaml model.num_layers=8 data.source=mock --ranks 2 --times 3

A supervisor starts the ranks on this node (minitron/supervise/supervisor.py); after each save the last rank is killed.
The parts are those of minitron/runtime/startup.py; "away" is measured here, from the kill until the record of the new
step. With --preload '' every rank is a new Python, as under torchrun: the difference is what the agents' forks are
worth.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

from benchmarks import record

PATIENCE = 900.0  # seconds for a start


def rows(folder: Path, kind: str) -> list[dict]:
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [line for line in text.split("\n")[:-1] if line.startswith(f'{{"kind": "{kind}"')]
    return [json.loads(line) for line in lines]


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return sorted(map(int, listed.split()))


def until(condition, supervisor: subprocess.Popen) -> None:
    deadline = time.time() + PATIENCE
    while not condition():
        if supervisor.poll() is not None or time.time() > deadline:
            raise SystemExit("the run has ended, or does not go on: see what it printed above")
        time.sleep(0.01)


def measure(command: list[str], ranks: int, times: int, preload: str, folder: Path) -> list[dict]:
    """Kill a rank `times` times, each after a save; return the parts of each recovery, in seconds."""
    options = {"node": 0, "nodes": 1, "ranks": ranks, "dir": folder, "id": 1, "preload": preload}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    supervisor = subprocess.Popen([sys.executable, "-m", "minitron.supervise", *words, "--", *command])
    found = []
    try:
        for number in range(1, times + 1):
            until(lambda: len(rows(folder, "start")) == number, supervisor)
            saves = len(rows(folder, "save"))
            until(lambda: len(rows(folder, "save")) > saves, supervisor)
            (agent,) = children(supervisor.pid)
            os.kill(children(agent)[-1], signal.SIGKILL)
            killed = time.time()
            until(lambda: len(rows(folder, "start")) > number, supervisor)
            start = rows(folder, "start")[-1]
            parts = {name: seconds for name, seconds in start.items() if name.endswith("_seconds")}
            found.append({"away_seconds": round(time.time() - killed, 2), **parts})
            print(json.dumps(found[-1]), flush=True)
    finally:
        supervisor.terminate()
        supervisor.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="+", help="as of python -m minitron.pretrain")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--preload", default="minitron.train", help="'': each rank is a new Python")
    record.add_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        folder = Path(name)
        command = [
            "-m",
            "minitron.pretrain",
            *args.overrides,
            f"log.dir={folder}",
            f"checkpoint.dir={folder / 'saved'}",
        ]
        command += ["checkpoint.every=10", "checkpoint.keep=1", "train.steps=1000000"]
        found = measure(command, args.ranks, args.times, args.preload, folder)
    figures = {name: round(median(parts.get(name, 0.0) for parts in found), 2) for name in found[-1]}
    record.append(args, "restart", {"ranks": args.ranks, "times": args.times, **figures})
    print("median: " + ", ".join(f"{name.removesuffix('_seconds')} {s:.1f} s" for name, s in figures.items()))


if __name__ == "__main__":
    main()
