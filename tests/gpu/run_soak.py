"""A run that is interrupted again and again, its steps replayed, held bit by bit against an eager one that is not.

    python tests/gpu/run_soak.py [--seconds 600] [--seed 1] [--layout tp2] [--results FILE]      on two GPUs
    python tests/gpu/run_soak.py --cpu --seconds 60                                              a rehearsal

Steps are replayed as CUDA graphs; on CPUs by tests/replay.py. The run evaluates and saves as it goes, and every
SKIPPED-th step has an infinite gradient and is skipped. It is started under torchrun; then, as the seed says,

    SIGTERM      comes to one rank: the run saves and ends, and the next start goes on behind it
    SIGKILL      ends one rank: torchrun ends the others, and the next start goes on from the newest checkpoint
    restart      is a SIGKILL after which torchrun itself starts the ranks again
    fallback     one rank of a start cannot record its step: all ranks go on eagerly, until one of the above comes

and when the run has made all its steps another one begins, until the time is over. Each start prints a row. Losses,
norms, loss scales and evaluations are compared; and the memory that the ranks hold by the driver, which must be the
same in every replayed start and not grow. Other work on the GPUs disturbs none of this. Exits with status 1 at the
first difference.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository

from benchmarks import record
from fault_run import Run
from minitron.checkpoint.directory import checkpoints

LAYOUTS = {
    "tp2": ("parallel.tp=2", "precision.dtype=fp16"),
    "pp2": ("parallel.pp=2", "parallel.vp=2", "precision.dtype=bf16"),
    "dp2": ("precision.dtype=bf16",),
}
KEYS = (
    "train.deterministic=true",
    "train.eval_every=7",
    "train.eval_steps=1",
    "train.hang_seconds=60",
    "checkpoint.every=20",
    "checkpoint.keep=2",
)
# 0.1 billion parameters, and steps that take a fraction of a second; a toy for CPUs.
MODEL = (
    "model.num_layers=8",
    "model.hidden_size=1024",
    "model.ffn_hidden_size=2816",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.max_positions=512",
    "train.seq_len=512",
    "train.global_batch_size=16",
)
TOY = ("model.num_layers=4", "model.max_positions=32", "train.global_batch_size=8")
STEPS = 300
SKIPPED = 23
LEAST, MOST = 12, 90  # steps of a start: more than are made before one is recorded, see pipeline/replay.py
SETTLED = 12  # steps after which all memory has been taken
GIB = 0.05  # by which memory may differ
FIGURES = "loss", "grad_norm", "loss_scale"


class Soak:
    """The eager run, and the one that is interrupted."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder, self.rng = args, folder, random.Random(args.seed)
        self.keys = (*KEYS, *(TOY if args.cpu else MODEL), *LAYOUTS[args.layout])
        self.keys += (f"train.steps={args.steps}", f"optimizer.decay_steps={args.steps}")
        self.events: Counter[str] = Counter()
        self.made: Counter[str] = Counter()
        self.gib: list[float] = []  # of the fuller rank, at settled steps of replayed starts
        self.starts, self.runs, self.longest = 0, 0, 0.0

    def launch(self, folder: Path, fault: str, *keys: str, restarts: int = 0) -> Run:
        folder.mkdir(exist_ok=True)
        fault = f"overflow@{SKIPPED}" + fault
        return Run(folder, fault, *self.keys, *keys, ranks=2, on_gpus=not self.args.cpu, restarts=restarts)

    def measure_eager(self) -> None:
        """Make the run that nothing interrupts."""
        begun = time.monotonic()
        with self.launch(self.folder / "eager", "", "train.cuda_graph=off") as run:
            status, _, output = run.end()
            assert status == 0, output
        self.steps = {row["step"]: figures(row) for row in run.rows("step")}
        self.evaluations = {row["step"]: row["loss"] for row in run.rows("eval")}
        skipped = run.rows("step")[-1]["skipped_total"]
        assert len(self.steps) == self.args.steps and skipped >= self.args.steps // SKIPPED, (len(self.steps), skipped)
        print(
            f"eager: {len(self.steps)} steps, {skipped} skipped, {len(self.evaluations)} evaluations; "
            f"{run.rows('step')[-1]['step_seconds']:.4f} s a step; {time.monotonic() - begun:.0f} s",
            flush=True,
        )

    def interrupt(self, end: float) -> None:
        """Make runs that are interrupted, until the time is over."""
        while time.monotonic() + self.longest < end:
            self.runs += 1
            folder, done = self.folder / f"run-{self.runs}", False
            while not done and time.monotonic() + self.longest < end:
                begun = time.monotonic()
                done = self.start(folder)
                self.longest = max(self.longest, time.monotonic() - begun)

    def start(self, folder: Path) -> bool:
        """Start the run, let something happen, and compare what it made; return whether it has made its last step."""
        begun, rng, saved = time.monotonic(), self.rng, folder / "saved"
        newest = max(checkpoints(saved), default=0) if saved.exists() else 0
        event, fallback = rng.choice(["SIGTERM", "SIGKILL", "restart"]), rng.random() < 0.25
        seen: list[float] = []
        fault = "+replay" * self.args.cpu + f"+unrecorded@{rng.randrange(2)}" * fallback
        keys = ("train.cuda_graph=on", f"checkpoint.dir={saved}")
        with self.launch(folder, fault, *keys, restarts=int(event == "restart")) as run:
            before, made = {kind: len(run.rows(kind)) for kind in ("run", "step", "eval")}, run.rows("step")
            last = max([newest, *(row["step"] for row in made)])
            at = last + rng.randint(LEAST, MOST)
            for step in (last + SETTLED, at - LEAST):
                if not self.args.cpu and last + SETTLED <= step < self.args.steps - LEAST:
                    self.reach(run, step)
                    seen += held_gib(run.workers())
            text = self.happen(run, event, at)
            status, _, output = run.end()
            rows = {kind: run.rows(kind)[number:] for kind, number in before.items()}
        assert rows["run"] and rows["run"][0]["first_step"] == newest + 1, (
            f"{newest} was saved: {rows['run']}\n{output}"
        )
        said = "another rank could not record them|planted: operation" if fallback else r"recorded [\d,]+ kernels"
        assert re.search(said, output), f"no {said!r} in\n{output}"
        expected = {"SIGKILL": 1}.get(text.split()[0], 0)
        assert status == expected, f"status {status} after {text}\n{output}"
        self.compare(rows["step"], rows["eval"], output)
        self.gib += [] if fallback else seen
        assert not self.gib or max(self.gib) - min(self.gib) < GIB, f"memory is not flat: {self.gib}"
        self.starts += 1
        self.events.update([text.split()[0], *["fallback"] * fallback])
        self.made.update(
            {kind: len(rows[kind]) for kind in ("step", "eval")},
            saves=len(re.findall(r"checkpoint of step \d+ saved", output)),
        )
        first, last = rows["step"][0]["step"], rows["step"][-1]["step"]
        print(
            f"run {self.runs} start {self.starts}: steps {first} to {last}, {'eager' if fallback else 'replayed'}, "
            f"{text}; {len(rows['eval'])} evaluations, as the eager run's; "
            + (f"{min(seen):.3f} to {max(seen):.3f} GiB; " if seen and not fallback else "")
            + f"{time.monotonic() - begun:.0f} s",
            flush=True,
        )
        return last == self.args.steps

    def happen(self, run: Run, event: str, at: int) -> str:
        """Let the event come after step `at`; return in words what did."""
        if event == "restart":
            text, at = self.signal(run, signal.SIGKILL, at), at + self.rng.randint(LEAST, MOST)
            if text == "end":
                return text
            return f"restart after {text}, then {self.signal(run, signal.SIGTERM, at)}"
        return self.signal(run, signal.Signals[event], at)

    def signal(self, run: Run, number: signal.Signals, at: int) -> str:
        """Send a signal to one rank after step `at`, or let the run end if it has no such step."""
        if at >= self.args.steps - LEAST:  # it may end while the driver is asked
            return "end"
        self.reach(run, at)
        rank = self.rng.randrange(2)
        os.kill(run.workers()[rank], number)
        return f"{number.name} to rank {rank} after step {at}"

    def compare(self, steps: list[dict], evaluations: list[dict], output: str) -> None:
        """Raise AssertionError where a figure is not the eager run's."""
        for row in steps:
            assert figures(row) == self.steps[row["step"]], f"{row} instead of {self.steps[row['step']]}\n{output}"
        for row in evaluations:
            assert row["loss"] == self.evaluations[row["step"]], f"{row}, {self.evaluations[row['step']]}\n{output}"

    def reach(self, run: Run, step: int) -> None:
        run.wait_for(f'"step": {step},', run.folder / "metrics.jsonl")


def held_gib(pids: list[int]) -> list[float]:
    """What the driver says that the fullest of these processes holds of its GPU, in GiB."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    rows = [line.split(", ") for line in subprocess.check_output(command, text=True).splitlines()]
    found = [float(mib) / 1024 for pid, mib in rows if int(pid) in pids]
    assert found, f"nvidia-smi shows none of the processes {pids}; run this where it sees them: {rows}"
    return [max(found)]


def figures(row: dict) -> list[str]:
    """Those that must be equal, as text, in which NaN is NaN."""
    return [repr(row[name]) for name in FIGURES]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run (default {STEPS})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp2")
    parser.add_argument("--cpu", action="store_true", help="a toy on two CPU ranks")
    record.add_options(parser, results=None)
    args = parser.parse_args(argv)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(args, Path(folder))
        soak.measure_eager()
        soak.interrupt(begun + args.seconds)
    result = {
        "layout": args.layout,
        "seed": args.seed,
        "device": "cpu" if args.cpu else "gpu",
        "seconds": time.monotonic() - begun,
        "starts": soak.starts,
        "runs": soak.runs,
        "made": dict(soak.made),
        "events": dict(soak.events.most_common()),
        "least_gib": min(soak.gib, default=None),
        "most_gib": max(soak.gib, default=None),
    }
    print(f"all as in the eager run: {result}", flush=True)
    if args.results:
        record.append(args, "soak", result)


if __name__ == "__main__":
    main()
