"""Kill a training run at random moments, start it again in random layouts; for tests/checkpoint/test_kill.py, and

    python tests/kill_run.py --kills 100 --seed 1

which adds a record of kind "kills" to the results. Every start is the same command but for the layout. Ranks get what
torchrun would give them, its environment and one store for all starts, but they are forks of a server that has torch
loaded: a start takes one second instead of ten. SIGKILL comes to all ranks together, as when a node is lost, or to one;
then torchrun's part is played to the others: SIGTERM, and 30 seconds. The seed decides what is attempted; where exactly
a kill lands, the machine's load does too. After each kill:

    every step_* folder without .tmp-     is whole, by its checksums
    the newest checkpoint                 is at least as new as the log or `latest` ever said
    the next start                        goes on right behind it

and at the end the loss of every step, as often as it was made, is that of one process that nobody interrupted.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import warm
from benchmarks import record
from minitron import pretrain
from minitron.checkpoint.directory import checkpoints, newest
from minitron.checkpoint.reader import Reader
from minitron.config import cli, rules

TORCHRUN_PATIENCE = 30.0  # seconds between its SIGTERM and its SIGKILL
TEST_PATIENCE = 600.0  # seconds for a start that is not killed, on a machine with other work, too
# Five blocks make pipelines uneven. eps: above the noise in gradients that nearly vanish (see layouts.py).
MODEL = [
    "model.num_layers=5",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.vocab_size=90",
    "model.vocab_multiple=16",
    "model.init_std=0.2",
    "model.hidden_dropout=0.1",
    "train.seq_len=32",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "data.source=mock",
    "precision.dtype=fp32",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=0",
    "optimizer.eps=1e-5",
]


# ---- ranks ----------------------------------------------------------------------------------------------------------


class Ranks:
    """One start of minitron.pretrain on `world` ranks, in the background. Their output is appended to a file."""

    def __init__(self, store: dist.TCPStore, world: int, argv: list[str], output: Path):
        self.store, self.output = store, output  # it is served as long as somebody has it
        context = warm.context()
        shared = {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "CUDA_VISIBLE_DEVICES": "",
        }
        environments = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
        self.processes = [
            context.Process(target=_rank, args=(environment, argv, str(output)), daemon=True)
            for environment in environments
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        self.kill()

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def kill_one(self, rank: int) -> None:
        """Kill this one, and tell the others to end, as torchrun does. Fails if torchrun would have to kill them."""
        self.processes[rank].kill()
        self.processes[rank].join()
        for process in self.processes:
            process.terminate()
        self.wait(TORCHRUN_PATIENCE)

    def wait(self, seconds: float = TEST_PATIENCE) -> list[int]:
        """The exit statuses. Fails, with all stacks, if a rank lives longer."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        if self.alive():
            for process in self.processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR2)
            time.sleep(1.0)
            raise AssertionError(f"ranks still run after {seconds} s:\n{self.output.read_text()[-20000:]}")
        return [process.exitcode for process in self.processes]


def _rank(environment: dict, argv: list[str], output: str) -> None:
    """What a forked process does: run pretrain as this rank."""
    gc.freeze()  # no collection writes to pages that it shares with the server
    os.environ.update({name: str(value) for name, value in environment.items()})
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    torch.set_num_threads(1)
    pretrain.main(argv)


def new_store() -> dist.TCPStore:
    """What torchrun's agent serves to its ranks: a restart finds the keys of the start before in it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run(folder: Path, world: int, *argv: str) -> None:
    """A run that nobody interrupts. Its records and output are in the folder."""
    folder.mkdir(exist_ok=True)
    with Ranks(new_store(), world, [*MODEL, f"log.dir={folder}", *argv], folder / "output") as ranks:
        assert not any(ranks.wait()), (folder / "output").read_text()


def records(folder: Path, kind: str) -> list[dict]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) in the order in which steps were made; some are there again."""
    return [(entry["step"], entry["loss"]) for entry in records(folder, "step")]


# ---- layouts --------------------------------------------------------------------------------------------------------


def draw_layout(rng: random.Random) -> tuple[int, str, list[str]]:
    """(number of ranks, the layout in words, the layout as overrides): mostly of 4 ranks."""
    world = rng.choice([4] * 8 + [2, 1])
    while True:
        values = {f"parallel.{axis}": rng.choice([1, 1, 2, 4]) for axis in ("tp", "pp", "cp")} | {
            "parallel.vp": rng.choice([1, 2]),
            "parallel.cp_style": rng.choice(["ring", "allgather", "ulysses"]),
            "parallel.sequence_parallel": rng.choice(["true", "false"]),
            "parallel.overlap_grads": rng.choice(["true", "false"]),
            "train.recompute": rng.choice(["none", "selective", "full"]),
            "checkpoint.every": rng.choice([1, 1, 1, 2]),
            "checkpoint.async_save": rng.choice(["true", "true", "false"]),
        }
        argv = [f"{key}={value}" for key, value in values.items()]
        cfg = cli.load([*MODEL, *argv])
        try:
            rules.check(cfg, world)
        except ValueError:
            continue
        p = cfg.parallel
        return world, f"tp {p.tp} pp {p.pp} vp {p.vp} cp {p.cp} dp {cfg.dp(world)}", argv


# ---- kills ----------------------------------------------------------------------------------------------------------


class Victim:
    """One training run in one folder, started again and again until it has made all its steps.

    safe: the newest step that is known to have been saved.
    """

    def __init__(self, folder: Path, steps: int, rng: random.Random):
        self.folder, self.saves, self.rng = folder, folder / "saves", rng
        self.argv = [*MODEL, f"train.steps={steps}", f"log.dir={folder}", f"checkpoint.dir={self.saves}"]
        self.store, self.safe, self.start_seconds = new_store(), 0, 2.0
        self.killed, self.landed, self.starts = Counter(), Counter(), Counter()
        folder.mkdir(parents=True)

    def attempt(self, kill: bool) -> bool:
        """Start it, and if `kill`, kill it at a random moment. Returns whether it ended by itself."""
        world, layout, argv = draw_layout(self.rng)
        self.starts[layout] += 1
        before, runs, steps = self._temporaries(), len(records(self.folder, "run")), len(losses(self.folder))
        with Ranks(self.store, world, [*self.argv, *argv], self.folder / "output") as ranks:
            finished = not (kill and self._moment(ranks, before, steps))
            if finished:
                assert not any(ranks.wait()), f"{layout}:\n{self.output()[-20000:]}"
            elif world > 1 and self.rng.random() < 0.2:
                ranks.kill_one(self.rng.randrange(world))
                self.killed["one rank"] += 1
            else:
                ranks.kill()
                self.killed["all ranks"] += 1
        made = len(losses(self.folder)) - steps
        starts = [entry["first_step"] for entry in records(self.folder, "run")[runs:]]
        assert starts in ([], [self.safe + 1]), f"{layout}: went on at {starts}, and step {self.safe} was saved"
        if not finished:
            self.landed[self._where(before, made)] += 1
        self._check_saves()
        return finished

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def _moment(self, ranks: Ranks, before: set[str], steps: int) -> bool:
        """Wait for a random moment in a save, in the start or in a step. False if the ranks ended before it."""
        kind, count = self.rng.choice(["save"] * 4 + ["start", "step"]), self.rng.randint(1, 3)
        delay = self.rng.uniform(0, {"save": 0.04, "start": self.start_seconds, "step": 0.2}[kind])
        seen, begun = set(), time.monotonic()
        while kind != "start" and len(seen) < count:
            if not ranks.alive():
                return False
            seen |= self._temporaries() - before if kind == "save" else set(range(len(losses(self.folder)) - steps))
            time.sleep(0.001)
        if kind != "start":
            self.start_seconds = time.monotonic() - begun
        time.sleep(delay)
        return ranks.alive()

    def _temporaries(self) -> set[str]:
        return {path.name for path in self.saves.glob("step_*.tmp-*")}

    def _where(self, before: set[str], made: int) -> str:
        """Where the kill landed, by what it left."""
        complete, latest = checkpoints(self.saves), self._latest()
        if complete and max(complete) > latest:
            return "save: between the rename and latest"
        for name in self._temporaries() - before:
            if int(name.removeprefix("step_").split(".")[0]) <= latest:
                return "save: while an old one was removed"
            return f"save: {'after' if (self.saves / name / 'index.json').exists() else 'before'} the index"
        return "between saves" if made else "before the first step"

    def _latest(self) -> int:
        return Reader(newest(self.saves)).iteration if (self.saves / "latest").exists() else 0

    def _check_saves(self) -> None:
        """No half checkpoint is seen, and none that was announced is lost."""
        for folder in checkpoints(self.saves).values():
            Reader(folder).verify()
        announced = max(map(int, re.findall(r"checkpoint of step (\d+) saved", self.output())), default=0)
        folder = newest(self.saves)
        now = Reader(folder).iteration if folder else 0
        assert now >= max(announced, self.safe), f"goes back to {now}; {announced} and {self.safe} were saved"
        self.safe = now


def campaign(folder: Path, kills: int, seed: int, steps: int) -> dict:
    """Kill a run of `steps` steps so many times, a second one if it ends before, and compare all its losses with those
    of one process that nobody interrupts. Returns figures for a record.
    """
    begun, rng = time.monotonic(), random.Random(seed)
    run(folder / "whole", 1, f"train.steps={steps}")
    expected = dict(losses(folder / "whole"))
    assert len(expected) == steps
    totals = {"killed": Counter(), "landed": Counter(), "starts": Counter()}
    worst, made, runs, done = 0.0, 0, 0, 0
    while done < kills:
        victim = Victim(folder / f"run-{runs}", steps, rng)
        try:
            while not victim.attempt(kill=done < kills):
                done += 1
                print(f"kill {done}: {dict(victim.landed)}, step {victim.safe} is saved", flush=True)
            found = losses(victim.folder)
            assert {step for step, _ in found} == expected.keys() and victim.safe == steps, f"{victim.safe} was saved"
            farthest, step = max((abs(loss / expected[step] - 1), step) for step, loss in found)
            assert farthest <= 1e-5, f"the loss of step {step} is {farthest:.1e} from the uninterrupted run's"
            worst = max(worst, farthest)
        except Exception as error:
            error.add_note(f"seed {seed}, run {runs}, after kill {done}: see {victim.folder}")
            raise
        for name, counts in totals.items():
            counts.update(getattr(victim, name))
        made, runs = made + len(found), runs + 1
    inside = sum(count for where, count in totals["landed"].items() if where.startswith("save"))
    return {
        "kills": kills,
        "seed": seed,
        "steps": steps,
        "runs": runs,
        "inside_saves": inside,
        "made_steps": made,
        **{name: dict(counts.most_common()) for name, counts in totals.items()},
        "largest_relative_difference": worst,
        "seconds": time.monotonic() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200, help="of the run that is killed (default: 200)")
    record.add_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(record.append(args, "kills", campaign(Path(folder), args.kills, args.seed, args.steps)))


if __name__ == "__main__":
    main()
