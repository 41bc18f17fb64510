"""One rank of any job, alone on one GPU: `python benchmarks/one_rank.py configs/gpt3_175b.yaml --world 128 --rank 64`.

Problem: nobody has 128 GPUs at hand, but a step of the job is what its slowest rank does, and a rank's kernels, host
and memory do not ask whether its partners are real. The idea: the trainer itself, its loader and its step, in torch's
fake process group (planner/dryrun/dryrun.py), with partners that are made up (partners.py).

Measured with a few microbatches: `step_seconds`; `busy_seconds`, in which a kernel runs; `host_seconds`, until the step
is queued, and `update_host_seconds` of an update that waits for no device; the device's memory, runtime and graph
included; and the seconds of every forward, backward and update. With these from the first, a middle and the last
pipeline rank the whole job is simulated, at the recipe's batch:

    schedule of the measured forwards and backwards + the planner's traffic + update  ->  job_step_seconds
                                                                                          job_quiet_seconds: no traffic

The other two ranks are measured first, each in a process of its own, unless `--results FILE` has them of this commit.
`--profile` also prints the kernels that take longest, and the time of the products and attention alone (floor.py).
On CPUs everything runs but what only a GPU has. What is left out is printed, see LEFT_OUT.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder
    from minitron.runtime.environment import set_defaults

    set_defaults(os.environ)  # before torch loads

import torch

from benchmarks import floor, measure, record, shares
from benchmarks.partners import partners
from benchmarks.programs import launch
from minitron import train
from minitron.comm.activity import Activity
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.schema import Config
from minitron.data.build import build_datasets
from minitron.data.loader import Loader
from minitron.optim.zero1 import Stats
from minitron.pipeline import replay as recorded_steps
from minitron.pipeline.schedule import TICKS, Forward, Operation
from minitron.planner.dryrun.dryrun import choose_ranks, fake_world, recorded
from minitron.planner.machine import Machine, choose_machine, read_machines
from minitron.planner.plan import Step

LEFT_OUT = (
    "left out: traffic (job_step_seconds has the planner's), partners that are late, what posting a message to NCCL "
    "takes the host, memory of NCCL. Received values are copied on this GPU, between kernels"
)
SECONDS = 900  # that the measurement of another rank may take
EAGER = 2  # steps before one is recorded: the first compiles kernels, the second has what steps leave to the next


# ---- the clock ------------------------------------------------------------------------------------------------------


class HostEvent:
    """torch.cuda.Event of a CPU."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.at - self.at)


class Clock(Activity):
    """An Activity with events around every forward and backward: (start, end) by type, chunk and microbatch.

    A capture turns its events into nodes of the graph, which each replay passes: so those stay valid.
    """

    __slots__ = ("device", "eager", "captured")

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.device = device
        self.eager, self.captured = {}, {}

    def begin(self, action: object) -> None:
        super().begin(action)
        self._pass(action, 0)

    def ended(self) -> None:
        self._pass(self.action, 1)
        super().ended()

    def _pass(self, action: object, index: int) -> None:
        if isinstance(action, Operation):
            events, key = self.captured if self.captures() else self.eager, (type(action), action.chunk, action.mb)
            if key not in events:
                events[key] = self.event(external=True), self.event(external=True)
            events[key][index].record()

    def captures(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def event(self, external: bool = False) -> Any:
        return HostEvent() if self.device.type == "cpu" else torch.cuda.Event(enable_timing=True, external=external)

    def seconds(self, replayed: bool, end: Any) -> dict[str, Any]:
        """Of the step that ended at `end`, the seconds of its parts.

        forward_seconds, backward_seconds: means of each chunk, without the first and the last microbatch. ends_seconds:
        what those two took longer, all together: they cast weights, write gradients first and reduce them. A graph may
        run one recorded microbatch for all in the middle. update_seconds: what came after the last backward.
        """
        events, spent, ends = self.captured if replayed else self.eager, defaultdict(dict), 0.0
        for (kind, chunk, mb), (begun, done) in events.items():
            spent[kind, chunk][mb] = begun.elapsed_time(done) / 1e3
        parts: dict[type, list[float]] = {kind: [] for kind in TICKS}
        for kind, chunk in sorted(spent, key=itemgetter(1)):
            times = spent[kind, chunk]
            first, last = min(times), max(times)
            parts[kind].append(mean([t for mb, t in times.items() if first < mb < last] or times.values()))
            ends += sum(times[mb] - parts[kind][-1] for mb in {first, last})
        backwards = [times for kind, times in parts.items() if kind is not Forward]  # whole ones, or two halves
        update = min(done.elapsed_time(end) for _, done in events.values()) / 1e3
        return {
            "forward_seconds": parts[Forward],
            "backward_seconds": [sum(halves) for halves in zip(*filter(None, backwards))],
            "ends_seconds": ends,
            "update_seconds": update,
        }


class Laps:
    """Where the seconds of this process go, by name; the first ones, before there was a clock, are asked of Linux."""

    def __init__(self) -> None:
        ticks = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        before = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
        self.at, self.seconds = time.perf_counter(), {"import": before}

    def end(self, name: str) -> None:
        """Count what came since the last end as `name`."""
        now = time.perf_counter()
        self.seconds[name], self.at = self.seconds.get(name, 0.0) + now - self.at, now

    def move(self, name: str, other: str, seconds: float) -> None:
        """Count `seconds` of `name` as `other`."""
        self.seconds[name] -= seconds
        self.seconds[other] = self.seconds.get(other, 0.0) + seconds

    def __str__(self) -> str:
        return "  ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())


# ---- one rank -------------------------------------------------------------------------------------------------------


def fewer(cfg: Config, world: int, args: argparse.Namespace) -> Config:
    """The recipe with the microbatches, the data and the graph that are measured.

    With fewer than 2 pp microbatches of chunks no rank would hold as many activations as in a whole step.
    """
    p, t, all_of_them = cfg.parallel, cfg.train, cfg.num_microbatches(cfg.dp(world))
    microbatches = args.microbatches or min(all_of_them, max(2 * p.pp, 4))
    batch = microbatches * t.micro_batch_size * cfg.dp(world)
    return replace(cfg, train=replace(t, global_batch_size=batch, eval_every=0, cuda_graph=args.graph))


def measured(
    cfg: Config, world: int, rank: int, args: argparse.Namespace, machine: Machine, laps: Laps
) -> tuple[dict, floor.Work]:
    """Train one rank of `world`: (its figures, what its floor consists of)."""
    device, capability = measure.choose_device()
    with cli.user_errors():
        rules.check(cfg, world, capability)
    p = cfg.parallel
    with fake_world(world, rank, device.type) if world > 1 else nullcontext(), partners(machine.fabric.gpus_per_node):
        if world > 1:
            mesh = Mesh.create(tp=p.tp, pp=p.pp, cp=p.cp, device=device)
        else:
            mesh = Mesh.offline(device=device)
        clock = Clock(device)
        with mock.patch.object(recorded_steps, "WARM_UP", EAGER):
            return run(cfg, args, recorded(mesh, clock), clock, laps)


def run(cfg: Config, args: argparse.Namespace, mesh: Mesh, clock: Clock, laps: Laps) -> tuple[dict, floor.Work]:
    """Train on random tokens until the steps are alike: (the figures, what the floor consists of)."""
    t, device = cfg.train, mesh.device
    data = build_datasets(
        replace(cfg.data, source="mock", paths=()),
        vocab_size=cfg.model.vocab_size // cfg.parallel.tp,  # see partners.look_up
        seq_len=t.seq_len,
        seed=t.seed,
        train_samples=t.steps * t.global_batch_size,
        valid_samples=0,
    )
    trainer = train.build(cfg, mesh, log=SimpleNamespace(info=print, warn=print, alarm=print))
    loader, steps = Loader(data.train, cfg, mesh), iter(range(1, 10**9))
    train.keep_collector_out()
    laps.end("build")

    def step(_: int = 0) -> Stats:
        number = next(steps)
        clock.begin_step(number)
        batches = loader.step(number % t.steps * t.global_batch_size, number)
        return trainer.step(batches, cfg.optimizer.lr)

    graph = trainer.runner if isinstance(trainer.runner, recorded_steps.Replay) else None
    for _ in range(measure.WARMUP - 1):
        step()
        measure.synchronize(device)
    update_host = host_of_update(trainer, step)  # of a step that is recorded and replayed
    measure.synchronize(device)
    laps.end("eager")
    recording = None if graph is None else graph.training
    if recording is not None:
        laps.move("eager", "capture", recording.seconds)
    elif graph is not None:
        raise SystemExit("error: no step could be recorded, for the reason above; use --graph off")
    timed = []
    for _ in range(args.steps - measure.WARMUP):
        measure.synchronize(device)
        begun, end = time.perf_counter(), clock.event()
        stats = step()
        host = time.perf_counter() - begun
        end.record()
        measure.synchronize(device)
        timed.append((time.perf_counter() - begun, host, clock.seconds(graph is not None, end)))
    laps.end("timed")
    timed = sorted(timed, key=itemgetter(0))
    seconds, host, parts = timed[(len(timed) - 1) // 2]  # all of one step, the median one
    figures = stats.read()
    if figures["skipped"] or figures["nan"]:
        raise SystemExit(f"error: {figures} are not finite: a mistake of partners.py, and kernels had the wrong data")
    gib = device_gib(device)  # before a profiler takes memory
    microbatches = cfg.num_microbatches(mesh.dp.size)
    kernels = shares.record(step, 1, warm_up=0) if device.type == "cuda" else []
    result = {
        "replayed": graph is not None,
        "microbatches": microbatches,
        "step_seconds": seconds,
        "busy_seconds": shares.union(kernels) / 1e6 if kernels else None,  # at least one kernel or copy runs
        "host_seconds": host,
        "update_host_seconds": update_host,
        "job_step_seconds": None,
        "job_quiet_seconds": None,
        "nodes": None if recording is None else recording.nodes - 4 * microbatches * len(trainer.chunks),  # the clock's
        "capture_seconds": None if recording is None else recording.seconds,
        "device_gib": gib,
        "loss": figures["loss"] if trainer.chunks[-1].head is not None else None,
        "grad_norm": figures["grad_norm"],
        "layers": sum(len(chunk.blocks) for chunk in trainer.chunks),
        **parts,
    }
    laps.end("profile")
    print(trainer.describe())
    if args.profile:
        print(shares.table(kernels, 1))
    loader.close()
    trainer.runner.close()  # before the process group
    return result, floor.step_work(trainer)


def host_of_update(trainer: train.Trainer, step: Callable[[], object]) -> float:
    """Run a step; return what the host takes for its update, after the device has ended everything before.

    In an ordinary step the host waits there, too, whenever the device's queue is full.
    """
    work, ended = trainer.runner.forward_backward, []

    def wait_after(batches: list) -> tuple[torch.Tensor, bool]:
        result = work(batches)
        measure.synchronize(trainer.mesh.device)
        ended.append(time.perf_counter())
        return result

    with mock.patch.object(trainer.runner, "forward_backward", wait_after):
        step()
    return time.perf_counter() - ended[0]


def device_gib(device: torch.device) -> float | None:
    """All that is taken of the device: by the allocator, a graph, libraries and CUDA itself; None on a CPU."""
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


# ---- the job --------------------------------------------------------------------------------------------------------


def place(rank: int, pp: int, world: int) -> str:
    """Whose measurement stands for this rank's: that of the first, a middle or the last pipeline rank."""
    stage = rank // (world // pp)
    return "first" if stage == 0 else "last" if stage == pp - 1 else "middle"


def job_seconds(step: Step, world: int, rows: dict[str, dict]) -> tuple[float, float]:
    """Seconds of the job's step with the planner's traffic, and without any. step: the plan of it; rows: by `place`.

    Between the first and the last pipeline rank a stage takes what the measured one takes, by its number of layers.
    """
    p = step.cfg.parallel
    quiet: dict[str, list[float]] = {"forward_seconds": [], "backward_seconds": []}
    for stage, layers in enumerate(step.memory.layers):
        chunk, rank = divmod(stage, p.pp)
        row = rows[place(rank * (world // p.pp), p.pp, world)]
        like = step.memory.layers[chunk * p.pp + row["rank"] // (world // p.pp)]
        for name, of_stages in quiet.items():
            of_stages.append(row[name][chunk] * len(layers) / len(like))
    update = max(row["ends_seconds"] + row["update_seconds"] for row in rows.values())
    step.forward, step.backward = quiet.values()
    alone = step.timeline(0.0).makespan
    step.forward, step.backward = (
        [own + parts[i]["tp_exposed"] + parts[i]["cp_exposed"] for own, parts in zip(of_stages, step.parts)]
        for i, of_stages in enumerate(quiet.values())
    )
    timeline = step.timeline(step.transfer_seconds)
    exposed, _ = step.data_parallel(timeline)
    return timeline.makespan + exposed + update, alone + update


def others(args: argparse.Namespace, pp: int, rank: int) -> dict[str, dict]:
    """Rows of the ranks beside `rank` that the job's simulation needs, by place: read, or measured in a process."""
    needed = {place(r, pp, args.world): r for r in choose_ranks("first,middle,last", pp, args.world)}
    del needed[place(rank, pp, args.world)]
    return {name: earlier(args, other) or child(args, other) for name, other in needed.items()}


def earlier(args: argparse.Namespace, rank: int) -> dict | None:
    """The newest row of this commit and this kind of GPU that measures the same; None if there is none."""
    wanted = identity(args, rank) | {"gpu": record.environment()["gpu"]}
    commit = _clean(args.commit or record.commit())
    for row in reversed(record.rows(args.results)):
        if _clean(row["commit"]) == commit and wanted.items() <= row.items():
            return row
    return None


def _clean(commit: str | None) -> str | None:
    """Without the mark of a changed tree, which the first record of a run makes of it."""
    return commit and commit.removesuffix("-dirty")


def identity(args: argparse.Namespace, rank: int) -> dict:
    """What says that two records measure the same."""
    recipe = [Path(arg).stem for arg in args.config if arg.endswith((".yaml", ".yml"))]
    keys = sorted(arg for arg in args.config if not arg.endswith((".yaml", ".yml")))
    return {
        "kind": "one_rank",
        "recipe": " ".join(recipe),
        "keys": keys,
        "world": args.world,
        "rank": rank,
        "graph": args.graph,
    }


def machine_of(gpu: str | None, fabric: str) -> Machine:
    """Return the planner's machine of a GPU, by the name that its driver has for it; of an H200 on a CPU."""
    names = {device.gpu: name for name, device in reversed(read_machines()[0].items())}
    return choose_machine(next((name for title, name in names.items() if title in (gpu or "")), "h200"), fabric)


def child(args: argparse.Namespace, rank: int) -> dict:
    """Measure another rank with the same options."""
    options = {"--world": args.world, "--rank": rank, "--graph": args.graph, "--steps": args.steps}
    options |= {"--fabric": args.fabric, "--microbatches": args.microbatches, "--results": args.results}
    options |= {"--commit": args.commit}
    config = [str(Path(arg).resolve()) if arg.endswith((".yaml", ".yml")) else arg for arg in args.config]
    given = [str(x) for name, value in options.items() if value is not None for x in (name, value)]
    return launch([sys.executable, __file__, *config, *given, "--alone"], SECONDS, {})


# ---- the command ----------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=int, required=True, help="ranks of the job")
    parser.add_argument("--rank", default="middle", help="which of them: a number, or first, middle, last (of pp)")
    parser.add_argument(
        "--graph",
        choices=("on", "off"),
        default="on" if torch.cuda.is_available() else "off",
        help="replay the step as a CUDA graph, if it can be recorded (default: on a GPU)",
    )
    parser.add_argument("--microbatches", type=int, help="of the measured step (default: a few, 2 pp or more)")
    parser.add_argument("--alone", action="store_true", help="this rank only: without the others that the job takes")
    shares.add_options(parser)
    parser.add_argument("--fabric", default="ndr400", help="network of the job, in devices.json (default ndr400)")
    parser.set_defaults(steps=measure.WARMUP + 3)
    record.add_options(parser, results=None)


def main(argv: list[str] | None = None) -> dict:
    """Measures one rank, simulates its job, prints the row and returns it."""
    laps = Laps()
    cfg, args = measure.arguments(__doc__, argv, add_options)
    os.environ["LOCAL_RANK"] = "0"  # or the mesh would choose a device by the rank
    with cli.user_errors():
        rules.check(cfg, args.world)
        shares.check_profile(args)
        (rank,) = choose_ranks(args.rank, cfg.parallel.pp, args.world)
        machine = machine_of(record.environment()["gpu"], args.fabric)
        plan = None if args.alone else Step(cfg, args.world, machine)
    rows = {} if args.alone else others(args, cfg.parallel.pp, rank)  # before this process takes memory of the GPU
    figures, work = measured(fewer(cfg, args.world, args), args.world, rank, args, machine, laps)
    formats = {"dtype": cfg.precision.dtype, "fp8": cfg.precision.fp8, "gradients": cfg.optimizer.accumulates_in}
    result = identity(args, rank) | formats | figures
    if plan is not None:
        rows[place(rank, cfg.parallel.pp, args.world)] = result
        result["job_step_seconds"], result["job_quiet_seconds"] = job_seconds(plan, args.world, rows)
    print("\n".join(f"{name:18} {text(value)}" for name, value in result.items()))
    print(LEFT_OUT)
    if args.profile:
        alone = floor.floor_seconds(work, cfg, measure.choose_device()[0])
        print("floor: GEMM {gemm:.4f} s (head {head:.4f}) + attention {attention:.4f} s".format_map(alone))
    if args.results:
        record.append(args, "one_rank", result)
    laps.end("end")
    print(f"seconds of this process: {laps}")
    measure.report(result | {"wall_seconds": laps.seconds})
    return result


def text(value: object) -> str:
    """A figure as one reads it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(map(text, value)) if isinstance(value, list) else "-" if value is None else str(value)


if __name__ == "__main__":
    main()
