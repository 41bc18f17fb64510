"""A run on several "nodes" of this machine that is hurt again and again, and has to heal without a hand.

    bash launch/soak.sh --faults 20 [--seed 1] [--nodes 4] [--ranks 2] [--apart 60]

Every node is a supervisor on loopback (minitron/supervise/). Faults come in random order at random moments:
the steps from a recovery to the next fault are exponential, with mean `--apart`; the seed decides both. This program is
also what the scheduler is: it starts a node again that ended alone, and the whole job when all nodes have ended before
the last step. After each fault, the next record of restarts.jsonl must name it; at the end the loss must be that of the
run that nobody hurt. Goodput is measured by the run's own record and predicted by
minitron/planner/failures.py from four measured numbers: how often faults come, how long a recovery takes, what a save
costs, how long it takes.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT = 128 + signal.SIGTERM  # status of a supervisor without which the run goes on
MODEL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.vocab_size=300",
    "train.seq_len=32",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "data.source=mock",
    "precision.dtype=fp32",
    "parallel.tp=2",
    "optimizer.warmup_steps=10",
    "train.rerun=on",
]
WRONG = {"nan": math.nan, "spike": 1e4}  # what a gradient is multiplied by
SPIKE_STEPS = 24  # of the run, until it can tell a spike from what is usual
SAVE_EVERY = 5  # steps
APART = 60.0  # steps from a recovery to the next fault, on average
GOODPUT_OFF = 0.05  # how far the predicted share may be from the measured one
STEPS_BESIDE = 12  # that a run may make at a fault, until it is noticed and counted
HANG_SECONDS = 12
DEAD_SECONDS = 8  # without a beat, until a node is lost; on a machine with other work, too
OWN_PARTS = "import", "build", "load", "prepare", "first_step"  # of a start: what the ranks do themselves
PATIENCE = 600.0  # seconds for a recovery, on a machine with other work, too
EXPECTED = {
    "rank": "rank {rank} on {host} was killed by SIGKILL",
    "agent": "the agent on {host} was killed by SIGKILL",
    "node": r"node {node} \({host}\) is lost",
    "stop": "rank {rank} on {host} made no progress",
    "exception": "rank {rank} on {host} ended with status 1: RuntimeError: planted",
    "term": "{host} got SIGTERM",
    "disk": r"checkpoint of step \d+ failed, training goes on",
    "nan": "rank {rank} on {host} has a broken device: .* norm is nan.* rank {rank} got a different result: .*",
    "spike": r"rank {rank} on {host} has a broken device: .* norm is \d.* rank {rank} got a different result: .*",
}


# ---- a rank -------------------------------------------------------------------------------------------------------


def rank(orders: Path, argv: list[str]) -> None:
    """Train, and do what files of `orders` ask for: exception-RANK, nan-RANK, spike-RANK, disk."""
    from minitron import pretrain
    from minitron.checkpoint import format as files
    from minitron.optim.buckets import Bucket
    from minitron.train import Trainer

    step, write, reduce = Trainer.step, files.write_file, Bucket.reduce

    spoiled = []  # factors that the first gradients of this step take

    def obedient(trainer, batches, lr):
        order = orders / f"exception-{os.environ['RANK']}"
        if order.exists():
            order.unlink()
            raise RuntimeError("planted")
        for kind, factor in WRONG.items():
            if (order := orders / f"{kind}-{os.environ['RANK']}").exists():
                order.unlink()
                spoiled.append(factor)
        return step(trainer, batches, lr)

    def full(*args):
        if (orders / "disk").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    def reduced(bucket):
        for param in bucket.params.values() if spoiled else ():
            param.slot.main_grad.mul_(spoiled[0])
        spoiled.clear()
        return reduce(bucket)

    Trainer.step, files.write_file, Bucket.reduce = obedient, full, reduced
    pretrain.main(argv)


# ---- the nodes ------------------------------------------------------------------------------------------------------


class Job:
    """A run, its nodes, and what a scheduler does for them."""

    def __init__(self, folder: Path, nodes: int, ranks: int, steps: int, port: int, on_gpus: bool = False):
        self.folder, self.nodes, self.ranks, self.steps, self.port = folder, nodes, ranks, steps, port
        self.hidden, self.more = {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}, []
        self.starts, self.processes, self.broken = 0, {}, set[int]()
        self.hosts = {node: f"node{node}" for node in range(nodes)}
        (folder / "orders").mkdir(parents=True)
        self.log = folder / "log"

    def start(self, node: int) -> None:
        options = {
            "node": node,
            "nodes": self.nodes,
            "ranks": self.ranks,
            "dir": self.log,
            "id": self.starts,
            "host": self.hosts[node],
            "address": "localhost",
            "port": self.port + 100 * (self.starts % 20),
            "beat-seconds": 0.2,
            "dead-seconds": DEAD_SECONDS,
            "rejoin-seconds": PATIENCE,
        }
        command = [sys.executable, "-m", "minitron.supervise"]
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command += ["--", __file__, "--orders", str(self.folder / "orders"), *MODEL]
        command += [f"train.steps={self.steps}", f"optimizer.decay_steps={self.steps}", "log.every=1000000"]
        command += [f"log.dir={self.log}", f"train.hang_seconds={HANG_SECONDS}", "checkpoint.keep=2"]
        command += [f"checkpoint.dir={self.folder / 'saved'}", f"checkpoint.every={SAVE_EVERY}", *self.more]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with open(self.folder / f"output-{node}", "a") as output:
            self.processes[node] = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | self.hidden,
            )

    def tend(self) -> bool:
        """Start again what has ended; return whether the run has reached its last step."""
        ended = {node: p.poll() for node, p in self.processes.items() if p.poll() is not None}
        if any(status == 1 for status in ended.values()):
            raise SystemExit(f"the run gave up: {self.report()[-1]['cause']}\nsee {self.folder}")
        if len(ended) == len(self.processes):
            if ended and self.step() == self.steps:
                return True
            self.starts += 1
            for node in range(self.nodes):
                self.start(node)
            return False
        for node, status in ended.items():
            if status in (-signal.SIGKILL, LEFT):  # a machine that is up again, or another one
                if node in self.broken:
                    self.hosts[node] += "x"
                    self.broken.remove(node)
                self.start(node)
        return False

    def until(self, condition: Callable[[], object], what: str) -> bool:
        """Wait, tending the job; return False if the run ends before. Raises SystemExit after PATIENCE."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.tend():
                return False
            if time.monotonic() > deadline:
                raise SystemExit(f"no {what} within {PATIENCE:.0f} s; see {self.folder}")
            time.sleep(0.05)
        return True

    def rows(self, kind: str) -> list[dict]:
        with suppress(FileNotFoundError):
            lines = (self.log / "metrics.jsonl").read_text().splitlines()
            return [row for line in lines if line.startswith(f'{{"kind": "{kind}"') and (row := json.loads(line))]
        return []

    def step(self) -> int:
        return max((row["step"] for row in self.rows("step")), default=0)

    def report(self) -> list[dict]:
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.log / "restarts.jsonl").read_text().splitlines()]
        return []

    def failed_saves(self) -> list[str]:
        with suppress(FileNotFoundError):
            return re.findall(r"checkpoint of step \d+ failed, training goes on", (self.log / "errors.log").read_text())
        return []

    def agent(self, node: int) -> int:
        return children(self.processes[node].pid)[0]

    def ranks_of(self, node: int) -> list[int]:
        return children(self.agent(node))

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def children(pid: int) -> list[int]:
    """List the process ids of its children, oldest first."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return sorted(map(int, listed.split()))


def hurt(job: Job, kind: str, node: int, local: int) -> str:
    """Do it; return how the report must name it, a regular expression."""
    rank, orders = node * job.ranks + local, job.folder / "orders"
    if kind in ("rank", "stop"):
        os.kill(job.ranks_of(node)[local], signal.SIGKILL if kind == "rank" else signal.SIGSTOP)
    elif kind == "agent":
        os.kill(job.agent(node), signal.SIGKILL)
    elif kind in ("node", "term"):
        job.processes[node].send_signal(signal.SIGKILL if kind == "node" else signal.SIGTERM)
    else:
        (orders / (kind if kind == "disk" else f"{kind}-{rank}")).touch()
        job.broken |= {node} if kind in WRONG else set()
    return EXPECTED[kind].format(rank=rank, node=node, host=job.hosts[node])


def soak(
    folder: Path,
    faults: list[str],
    seed: int,
    nodes: int,
    ranks: int,
    say: Callable[[str], object],
    apart: float = APART,
) -> dict:
    """Run the job, hurt it, compare it with one that nobody hurt; return the figures. Raises SystemExit."""
    random_ = random.Random(seed)
    distances = [1 + round(random_.expovariate(1 / apart)) for _ in faults]
    steps = sum(distances) + STEPS_BESIDE * len(faults) + SPIKE_STEPS + 2 * SAVE_EVERY
    port = 20000 + random_.randrange(4000)
    calm = Job(folder / "calm", nodes, ranks, steps, port)
    try:
        while not calm.tend():
            time.sleep(0.05)
    finally:
        calm.end()
    job = Job(folder / "hurt", nodes, ranks, steps, port + 2000)
    seconds, own_seconds, named, done = [], [], 0, 0
    try:
        job.until(lambda: job.rows("start"), "first step")
        for number, (kind, distance) in enumerate(zip(faults, distances), start=1):
            starts, records = len(job.rows("start")), len(job.report())
            wanted = job.rows("step")[-1]["step"] + distance
            if kind == "spike":
                wanted = max(wanted, SPIKE_STEPS)
            if not job.until(lambda: job.rows("step")[-1]["step"] >= wanted, f"step {wanted}"):
                raise SystemExit(f"the run ended before fault {number}")
            saves, hit = len(job.failed_saves()), time.time()
            expected = hurt(job, kind, random_.randrange(nodes), random_.randrange(ranks))
            if kind == "disk":
                job.until(lambda: len(job.failed_saves()) > saves, "save that failed")
                (job.folder / "orders" / "disk").unlink()
                found = job.failed_saves()[saves:]
                right = all(re.fullmatch(expected, line) for line in found)
            else:
                job.until(lambda: len(job.rows("start")) > starts, f"recovery from {kind}")
                seconds.append((kind, time.time() - hit))
                row = job.rows("start")[starts]
                own_seconds.append(sum(row.get(f"{part}_seconds", 0.0) for part in OWN_PARTS))
                found = [record["cause"] for record in job.report()[records:]]
                right = len(found) == 1 and bool(re.fullmatch(expected, found[0]))
            done, named = done + 1, named + right
            took = f"{time.time() - hit:5.1f} s"
            say(f"{number:3d} {kind:10s} {took} {'ok   ' if right else 'WRONG'} {'; '.join(found)}")
        while not job.tend():
            time.sleep(0.05)
    finally:
        job.end()
    losses = [next(r["loss"] for r in reversed(j.rows("step")) if r["step"] == steps) for j in (calm, job)]
    parts: Counter[str] = Counter()
    for row in job.rows("start")[1:]:
        parts.update({name.removesuffix("_seconds"): s for name, s in row.items() if name.endswith("_seconds")})
    return {
        "faults": done,
        "named": named,
        "restarts": len(job.rows("start")) - 1,
        "seconds": seconds,
        "own_seconds": own_seconds,
        "parts": {name: s / max(1, len(seconds)) for name, s in parts.items()},
        "losses": losses,
        **goodput_of(job, [s for _, s in seconds]),
    }


def goodput_of(job: Job, recoveries: list[float]) -> dict:
    """Measure the share of time that became training, and predict it.

    Faults come only while the run trains. So the formula, by which they come at any time, predicts which share of that
    time counts. Both shares of the whole have the same starts, loads and waits, which depend on the machine's load.
    """
    from minitron.planner.failures import predict
    from minitron.supervise import goodput, metrics

    rows = list(metrics.rows(job.log / "metrics.jsonl"))
    measured = goodput.measure(rows)
    saves = [row["seconds"] for row in rows if row.get("kind") == "save"]
    made = sum(row.get("kind") == "step" for row in rows)
    step = (measured.seconds["training"] + measured.seconds["lost"]) / made
    recovery, failures = sum(recoveries), max(1, len(recoveries))
    trained = sum(measured.seconds[part] for part in ("training", "lost", "saves"))
    between = trained / failures
    inputs = {
        "interval": SAVE_EVERY * step,
        "stall": measured.seconds["saves"] / max(1, len(saves)),
        "save": sum(saves) / max(1, len(saves)),
    }
    counts = predict(**inputs, recovery=0.0, mtbf=between)
    return {
        "goodput": measured.shares["training"],
        "shares": measured.shares,
        "predicted": counts * trained / measured.total,
        "inputs": {**inputs, "between": between, "recovery": recovery / failures},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="of a node")
    parser.add_argument(
        "--apart", type=float, default=APART, help="steps from a recovery to the next fault, on average"
    )
    parser.add_argument("--kinds", nargs="+", choices=EXPECTED, default=list(EXPECTED))
    from benchmarks import record

    record.add_options(parser, None)
    args = parser.parse_args()
    random_ = random.Random(args.seed)
    faults = [args.kinds[i % len(args.kinds)] for i in range(args.faults)]
    random_.shuffle(faults)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"{args.faults} faults on {args.nodes} nodes of {args.ranks} ranks, in {folder}", flush=True)
    figures = soak(folder, faults, args.seed, args.nodes, args.ranks, lambda line: print(line, flush=True), args.apart)
    seconds, (calm, hurt_) = sorted(s for _, s in figures["seconds"]), figures["losses"]
    parts = ", ".join(f"{name} {s:.1f}" for name, s in figures["parts"].items())
    print(f"{figures['faults']} faults, {figures['named']} named rightly; {figures['restarts']} restarts")
    if seconds:
        print(
            f"from a fault to the next step: {seconds[len(seconds) // 2]:.1f} s (median), at most {seconds[-1]:.1f} s"
        )
        print(f"mean of the parts in seconds: {parts}")
    shares = ", ".join(f"{part} {100 * share:.1f}" for part, share in figures["shares"].items() if share >= 5e-4)
    inputs = ", ".join(f"{name} {s:.2f}" for name, s in figures["inputs"].items())
    print(f"goodput measured: {100 * figures['goodput']:.1f} % (of the time, in %: {shares})")
    print(f"goodput predicted: {100 * figures['predicted']:.1f} % (seconds: {inputs})")
    print(f"final loss {hurt_:.6f}, without faults {calm:.6f}")
    if args.results is not None:
        record.append(args, "soak", {"nodes": args.nodes, "ranks": args.ranks, **figures})
    off = abs(figures["predicted"] - figures["goodput"])
    if figures["named"] < figures["faults"] or abs(hurt_ - calm) > 1e-5 or off > GOODPUT_OFF:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # the repository, not this folder
    if sys.argv[1:2] == ["--orders"]:
        rank(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
