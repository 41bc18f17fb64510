"""Runs of minitron.pretrain with a planted fault; `Run` starts this file, mostly under torchrun:

fault_run.py FAULT[+FAULT...] CONFIG...

none
sleep@2       rank 2 sleeps forever before its forward of microbatch 1 in step 3
halt@2        rank 2 sleeps forever before step 9, which is replayed on a GPU with train.cuda_graph=on
slow@2        rank 2 takes 0.1 s longer for each forward, on a GPU some milliseconds of products
busy          the stopwatch reads the clock of a busy machine instead of the real one
nan           a weight becomes NaN before step 3
overflow@N    a gradient of rank 0 becomes infinite in every N-th step
wrong@R@S@F   rank R multiplies its gradient of step S by F, once: computed again it is right
batch@S@F     a sample of data rank 0 counts F times in step S, each time that it is computed
drift@R       from step 3 on rank R updates a norm's weight differently
unrecorded@R  rank R cannot record a step as a graph
replay        on CPUs steps are recorded and replayed by the graphs' twin, tests/replay.py
disk@S        a file of a checkpoint takes S seconds
speaks@S      to say which collective failed takes S seconds
impatient     after SIGTERM a rank may stand still for one second
dies@R@P      rank R is killed when it comes to P: groups (before it makes any), mesh (before those of its axes), start
patient       torch waits a day for other ranks, so that train.hang_seconds alone ends a rank that waits
nodes@N       the ranks play N nodes, which communicate by sockets (tests/nodes.py)
says_port     a rank prints the port of torchrun's store
late@P        rank 0 serves the store on port P, as where srun starts ranks, and rank 1 is late at the gate after step 3
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import nodes as played
import replay as twin
import warm
from minitron import pretrain
from minitron.checkpoint import format as files
from minitron.comm import activity as activities
from minitron.comm.activity import Activity, Stopwatch
from minitron.comm.mesh import Mesh
from minitron.data.loader import Loader
from minitron.optim.buckets import Bucket
from minitron.optim.zero1 import Zero1Optimizer
from minitron.pipeline import executor
from minitron.pipeline import replay as graph
from minitron.pipeline.replay import Replay
from minitron.runtime import stop
from minitron.runtime.stragglers import Stragglers
from minitron.train import Trainer

ROOT = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
TINY = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.vocab_size=300",
    "train.seq_len=32",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "data.source=mock",
    "precision.dtype=fp32",
    "train.steps=1000000",
]


PATIENCE = 600.0  # seconds that a test waits for what must come, on a machine with other work, too


class Run:
    """A run in the background: so many ranks under torchrun, or one plain process (None).

    `wait_for` and `end` fail when their patience ends, and at the end no process is left.
    """

    def __init__(
        self, folder: Path, fault: str, *argv: str, ranks: int | None, on_gpus: bool = False, restarts: int = 0
    ):
        self.folder, self.output, self.ranks = folder / "log", folder / "output", ranks
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} --max-restarts {restarts}".split()
        words = [*(torchrun if ranks else []), "tests/fault_run.py", fault, *TINY]
        words += [f"data.cache_dir={folder / 'cache'}", f"log.dir={self.folder}", *argv]
        hidden = {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, **hidden}
        if on_gpus:
            with open(self.output, "w") as output:
                self.process = subprocess.Popen(
                    [sys.executable, *words],
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=env,
                )
        else:
            self.process = warm.start(words, self.output, cwd=ROOT, env=env)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.workers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def workers(self) -> list[int]:
        """Process ids of the ranks that live, in the order of their start."""
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        return sorted(int(pid) for pid in listed.stdout.split())

    def wait_for(self, text: str, file: Path | None = None) -> str:
        deadline, ended = time.monotonic() + PATIENCE, False
        while time.monotonic() < deadline and not ended:
            ended = self.process.poll() is not None
            seen = (file or self.output).read_text() if (file or self.output).exists() else ""
            if text in seen:
                return seen
            time.sleep(0.05)
        pytest.fail(f"no {text!r} in\n{seen}\n{self.output.read_text()}")

    def training(self) -> "Run":
        self.wait_for('"step": 3', self.folder / "metrics.jsonl")
        return self

    def end(self) -> tuple[int, float, str]:
        """The exit status, torchrun's if there is one, the seconds until then, and what everybody printed."""
        begin = time.monotonic()
        status = self.process.wait(PATIENCE)
        return status, time.monotonic() - begin, self.output.read_text()

    def rows(self, kind: str) -> list[dict]:
        """What the log has of a kind, "run", "step" or "eval", of all runs in its folder."""
        path = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if row["kind"] == kind]

    def last_step(self) -> int:
        return json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def sleep(rank):
    forward = executor.Pass.forward

    def stuck(run, op):
        if os.environ["RANK"] == rank and op.mb == 1 and run.executor.pp.activity.step == 3:
            print(f"rank {rank} sleeps", flush=True)
            time.sleep(1000)
        return forward(run, op)

    executor.Pass.forward = stuck


def halt(rank):
    step = Trainer.step

    def stuck(trainer, batches, lr):
        if os.environ["RANK"] == rank and trainer.mesh.activity.step == 9:
            time.sleep(1000)
        return step(trainer, batches, lr)

    Trainer.step = stuck


def slow(rank):
    forward, judge = executor.Pass.forward, Stragglers._judge

    def shown(compared, step, times):
        if os.environ["RANK"] == "0":
            lowest_and_highest = np.sort(times, 0)[[0, 1, -2, -1]].T.round(4).tolist()
            print(f"step {step}: own seconds, lowest two and highest two by rank: {lowest_and_highest}", flush=True)
        judge(compared, step, times)

    def dawdles(run, op):
        if os.environ["RANK"] == rank and run.executor.device.type == "cpu":
            time.sleep(0.1)
        elif os.environ["RANK"] == rank:
            x = torch.ones(4096, 4096, device=run.executor.device, dtype=torch.bfloat16)
            for _ in range(20):
                x @ x
        return forward(run, op)

    executor.Pass.forward, Stragglers._judge = dawdles, shown


def busy():
    """Count time by what the rank does: some ranks are interrupted by other programs, some wait longer for others."""
    rank, clock = int(os.environ["RANK"]), SimpleNamespace(now=0, interrupted=0)
    noise = random.Random(rank)

    def works(act):
        def timed(run, op):
            clock.now += int(10e6 * (1 + noise.random() / 2))  # nanoseconds
            other = 50_000_000 if rank % 2 else 0
            clock.now, clock.interrupted = clock.now + other, clock.interrupted + other
            return act(run, op)

        return timed

    def waits(activity, kind, axis, num_bytes, waits=True):
        enter(activity, kind, axis, num_bytes, waits)
        clock.now += 0 if rank % 2 or not waits else 50_000_000

    executor.Pass.forward, executor.Pass.backward = works(executor.Pass.forward), works(executor.Pass.backward)
    enter, Activity.enter = Activity.enter, waits
    activities.time = SimpleNamespace(perf_counter_ns=lambda: clock.now)
    Stopwatch._delayed = lambda watch: clock.interrupted


def nan():
    step = Trainer.step

    def poisoned(trainer, batches, lr):
        if trainer.mesh.activity.step == 3:
            with torch.no_grad():
                next(trainer.chunks[0].parameters()).fill_(torch.nan)
        return step(trainer, batches, lr)

    Trainer.step = poisoned


def overflow(every):
    step = Zero1Optimizer.step

    def overflows(optimizer, *args):
        gradients = optimizer.gradients
        if os.environ["RANK"] == "0" and gradients.mesh.activity.step % int(every) == 0:
            gradients.buckets[0].grad_slice[0] = torch.inf
            gradients.buckets[0].norm_squared.fill_(torch.inf)  # which may have been taken during the backward
        return step(optimizer, *args)

    Zero1Optimizer.step = overflows


def wrong(rank, step, factor):
    reduce, replay, done = Bucket.reduce, Replay.forward_backward, set()

    def spoil(bucket):
        if os.environ["RANK"] == rank and bucket.slice_comm.axis.activity.step == int(step) and id(bucket) not in done:
            done.add(id(bucket))
            for param in bucket.params.values():  # between them is padding, which stays 0
                param.slot.main_grad.mul_(float(factor))
            bucket.norm_squared.mul_(float(factor) ** 2)  # which a replayed step has taken already

    def reduced(bucket):
        spoil(bucket)
        return reduce(bucket)

    def replayed(runner, batches):
        loss = replay(runner, batches)
        if runner.replaying:
            for bucket in runner.eager.finish.__self__.buckets:  # of Gradients.finish
                spoil(bucket)
        return loss

    Bucket.reduce, Replay.forward_backward = reduced, replayed


def batch(step, factor):
    read = Loader.step

    def spoiled(loader, consumed, of_step):
        batches = read(loader, consumed, of_step)
        if of_step == int(step) and loader.mesh.dp.rank == 0:
            batches[0].mask[:, 0].mul_(float(factor))
        return batches

    Loader.step = spoiled


def unrecorded(rank):
    record = graph.CudaRecorder.record
    broken = os.environ.get("RANK", "0") == rank

    def on_a_gpu(recorder, work):
        def fails():
            work()
            if broken:
                raise RuntimeError("planted: operation not permitted")

        return record(recorder, fails)

    def on_a_cpu(recorder, work):  # where a recording would run the step and wait for the rank that does not
        if broken:
            raise RuntimeError("planted: operation not permitted")
        return SimpleNamespace(nodes=0)

    graph.CudaRecorder.record, twin.CpuRecorder.record = on_a_gpu, on_a_cpu


def replay():
    build = pretrain.build

    def recorded(*args, **keys):
        return twin.replayed(build(*args, **keys), log=args[3])

    pretrain.build = recorded


def drift(rank):
    step = Trainer.step

    def drifting(trainer, batches, lr):
        stats = step(trainer, batches, lr)
        if os.environ["RANK"] == rank and trainer.mesh.activity.step >= 3:
            with torch.no_grad():
                trainer.chunks[0].blocks["0"].norm1.weight.add_(0.01)
        return stats

    Trainer.step = drifting


def disk(seconds):
    write = files.write_file

    def slow_write(*args):
        time.sleep(float(seconds))
        return write(*args)

    files.write_file = slow_write


def speaks(seconds):
    format_exc = traceback.format_exc

    def slow_format():
        time.sleep(float(seconds))
        return format_exc()

    traceback.format_exc = slow_format


def impatient():
    stop.PATIENCE_SECONDS = 1.0


def dies(rank, place):
    places = {"groups": (dist, "init_process_group"), "mesh": (Mesh, "create"), "start": (pretrain, "build")}
    if os.environ["RANK"] == rank:
        setattr(*places[place], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def patient():
    pretrain.timedelta = lambda seconds: timedelta(days=1)


def says_port():
    print(f"port {os.environ['MASTER_PORT']}", flush=True)


def late(port):
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port}
    should_stop = stop.Stop.should_stop

    def waits(gates):
        if os.environ["RANK"] == "1" and gates.mesh.activity.step == 3:
            time.sleep(3)
        return should_stop(gates)

    stop.Stop.should_stop = waits


def nodes(number):
    played.play(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(number))


def main(planted, *argv):
    faults = (
        sleep,
        halt,
        slow,
        busy,
        nan,
        overflow,
        wrong,
        batch,
        drift,
        unrecorded,
        replay,
        disk,
        speaks,
        impatient,
        says_port,
        late,
        nodes,
    )
    for one in planted.split("+"):
        fault, *arguments = one.split("@")
        {"none": lambda: None, **{fault.__name__: fault for fault in (*faults, dies, patient)}}[fault](*arguments)
    pretrain.main(list(argv))


if __name__ == "__main__":
    main(*sys.argv[1:])
