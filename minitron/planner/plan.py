"""Plan a job before it is queued: the memory of a rank and the time of a step, by part.

    forward and backward of every stage (work.py) -> the run's own schedule, simulated (simulate.py)
    -> reductions and gathers of the data ranks, concurrent with it -> the update -> seconds of a step

A chunk's reduce-scatter starts with its last backward. Its part beyond the end of the schedule is exposed. A gather may
take until the first forward of its chunk in the next step. The parts are those of the rank that computes longest, so
that they add up to the step: the time that it waits is the bubble, and what messages between stages add to that is
`pp_exposed`. GPUs differ, and each rank waits for the slowest at every message: `stragglers` is what that adds to the
schedule.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf

from minitron.config import flops
from minitron.config.schema import Config, changed
from minitron.config.sizes import ITEM, bucket_limit
from minitron.pipeline.schedule import Forward, Kind, Schedule, make
from minitron.planner.check import check
from minitron.planner.machine import Machine
from minitron.planner.memory import Memory, data_levels
from minitron.planner.simulate import Timeline, simulate
from minitron.planner.walk import Meetings
from minitron.planner.work import SecondsByPart, StageTime, document_tokens, total

UPDATE_BYTES = 26  # read and written per element by the update: master, moments, parameter; and the gradient twice


@dataclass(frozen=True)
class Plan:
    """The plan of a job.

    seconds: by part, of the slowest pipeline rank. memory: bytes by part, of the fullest one. sizes: the memory of all
    pipeline ranks. stays_eager: the job fits, but with its CUDA graphs it would not, so its steps are eager, and
    `seconds` are those of eager steps.
    """

    cfg: Config
    world: int
    machine: Machine
    seconds: Counter
    memory: Counter
    sizes: Memory
    fullest: int
    stays_eager: bool
    timeline: Timeline

    @property
    def step_seconds(self) -> float:
        return total(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.cfg.train.global_batch_size * self.cfg.train.seq_len / self.step_seconds

    @property
    def mfu_percent(self) -> float | None:
        """The share of the dense peak, as in logs: all scores within documents, and 2/3 where weights are frozen.

        None if the device's peak is unknown.
        """
        t, peak = self.cfg.train, flops.peak_tflops(self.machine.device.gpu, self.cfg.precision.fp8 != "none")
        share = flops.FROZEN if self.cfg.finetune.kind == "lora" else 1
        squares = t.seq_len * document_tokens(self.cfg)
        operations = share * flops.full(self.cfg.model, t.seq_len, squares) * t.global_batch_size
        rate = flops.tflops_per_gpu(operations, self.step_seconds, self.world)
        return 100 * rate / peak if peak else None

    @property
    def memory_gib(self) -> float:
        return self.memory.total() / 2**30

    @property
    def room_gib(self) -> float:
        return available_gib(self.machine, self.sizes)

    @property
    def graph_gib(self) -> float:
        """Return the GiB that recorded steps need beyond `memory_gib`."""
        return 0.0 if self.machine.software.eager else self.sizes.graph(self.fullest) / 2**30

    @property
    def fits(self) -> bool:
        return self.memory_gib <= self.room_gib


def available_gib(machine: Machine, memory: Memory) -> float:
    """Return the GiB that torch's allocator can have on each GPU of a job."""
    return machine.device.memory_gib - machine.device.context_gib - memory.communicators() / 2**30


def plan(cfg: Config, world: int, machine: Machine) -> Plan:
    """Plan a configuration that `rules.check` accepts. Raises ValueError for what the device cannot do."""
    step = Step(cfg, world, machine)
    sizes = step.memory
    fullest, memory = sizes.peak()
    stays_eager = no_room_for_graphs(sizes, machine)
    if stays_eager:
        step = Step(changed(cfg, train=dict(cuda_graph="off")), world, machine)
    timeline = step.timeline(step.transfer_seconds)
    return Plan(cfg, world, machine, step.seconds(timeline), memory, sizes, fullest, stays_eager, timeline)


def no_room_for_graphs(memory: Memory, machine: Machine) -> bool:
    """Return whether the job fits, but not with the CUDA graphs of every rank: then all ranks stay eager."""
    room = available_gib(machine, memory) * 2**30
    ranks = [(memory.bytes_by_part(rank).total(), memory.graph(rank)) for rank in range(memory.cfg.parallel.pp)]
    fits = max(peak for peak, _ in ranks) <= room
    return fits and not machine.software.eager and max(peak + graph for peak, graph in ranks) > room


@lru_cache(32)
def checked_schedule(pp: int, vp: int, num_microbatches: int, kind: Kind) -> tuple[Schedule, Meetings]:
    """Make and prove the schedule that the run will have, once; and return which Exchanges meet."""
    schedule = make(pp, vp, num_microbatches, kind)
    return schedule, check(schedule)


class Step:
    """The time of a step, in parts that a search computes one by one, the cheap ones first."""

    def __init__(self, cfg: Config, world: int, machine: Machine):
        p = cfg.parallel
        precision, gpu = cfg.precision, machine.device.gpu
        if precision.dtype == "fp32" or (precision.fp8 != "none" and "fp8" not in machine.device.gemm_tflops):
            key, other = ("dtype", "bf16") if precision.dtype == "fp32" else ("fp8", "none")
            given, fix = f"{key}={getattr(precision, key)}", f"use precision.{key}={other}, or another device"
            raise ValueError(f"precision.{given} has no rate in the table of {gpu}; {fix}")
        self.cfg, self.world, self.machine = cfg, world, machine
        self.microbatches = cfg.num_microbatches(cfg.dp(world))
        self.memory = Memory(cfg, world, gpus_per_node=machine.fabric.gpus_per_node)
        self.work = work = StageTime(cfg, machine)
        last = len(self.memory.layers) - 1
        self.parts = [work.stage(layers, i == 0, i == last) for i, layers in enumerate(self.memory.layers)]
        self.forward, self.backward = ([total(pair[i]) for pair in self.parts] for i in (0, 1))
        self.transfer_seconds = machine.message(cfg.model.hidden_size * ITEM * work.slice, p.pp, world // p.pp)
        computing = [sum(self.forward[rank :: p.pp] + self.backward[rank :: p.pp]) for rank in range(p.pp)]
        self.slowest = max(range(p.pp), key=computing.__getitem__)
        self.busy = self.microbatches * computing[self.slowest]  # seconds of a step

    def at_least(self) -> float:
        """Bound the step's seconds from below, without the schedule.

        Sum the slowest rank's work, its update, one forward through the stages before it, and with 1F1B one backward
        through them.
        """
        before = sum(self.forward[: self.slowest])
        if self.cfg.parallel.schedule == "1f1b":
            before += sum(self.backward[: self.slowest])
        return self.busy + before + self.update_seconds(self.slowest)

    def timeline(self, transfer_seconds: float, checked: tuple[Schedule, Meetings] | None = None) -> Timeline:
        """Simulate the step; checked: another schedule of it, see `checked_schedule`."""
        p = self.cfg.parallel
        schedule, meets = checked or checked_schedule(p.pp, p.vp, self.microbatches, p.schedule)
        shares = [b["deferred"] / total(b) or 0.5 for _, b in self.parts]  # 0.5: nothing is deferred
        deferred = [share * seconds for share, seconds in zip(shares, self.backward)]
        return simulate(schedule, self.forward, self.backward, transfer_seconds, deferred, meets)

    def update_seconds(self, rank: int) -> float:
        """Time the update: the norm, AdamW, and the FP8 casts of the new weights.

        Megatron sets gradients to zero before a step and adds the first microbatch to them. Separate kernels scale
        them, and copy parameters from their masters.
        """
        memory, stages = self.memory, self.memory.stages(rank)
        casts = 0 if memory.frozen else 4 * memory.cast(rank)
        gradient = memory.slice_bytes if self.machine.software.fused else memory.grad_bytes
        moved = (UPDATE_BYTES + 2 * gradient) * sum(map(memory.trained, stages)) / memory.shards
        if kept := sum(map(memory.kept, stages)):  # the masters are cast to FP8 and the bytes transposed
            read = 4 if self.cfg.precision.fp8 == "delayed" else 8  # current scaling also reads them for the amax
            moved, casts = moved + (read + 1 - ITEM) * kept / memory.shards, casts - 2 * kept
        if not self.machine.software.fused:
            trained = sum(map(memory.trained, stages))
            moved += 2 * memory.grad_bytes * trained + (2 * memory.grad_bytes + 4) * trained / memory.shards
        return self.machine.copied(moved + casts)

    def seconds(self, timeline: Timeline) -> Counter:
        """Return the seconds of every part, of the rank that computes longest."""
        pp, parts = self.cfg.parallel.pp, SecondsByPart()
        for pair in self.parts[self.slowest :: pp]:
            for part in pair:
                parts.update({name: self.microbatches * seconds for name, seconds in part.items()})
        exchanged = timeline.makespan - self.timeline(0.0).makespan if pp > 1 else 0.0
        parts["pp_exposed"] = exchanged
        parts["bubble"] = timeline.makespan - self.busy - exchanged
        parts["stragglers"] = timeline.makespan * self.machine.slowest(self.world)
        parts["dp_exposed"], parts["dp_hidden"] = self.data_parallel(timeline)
        parts["optimizer"] = self.update_seconds(self.slowest)
        return parts

    def whole_seconds(self, timeline: Timeline) -> float:
        """Return the sum of `seconds`, without dividing the schedule into parts."""
        stragglers = timeline.makespan * self.machine.slowest(self.world)
        return timeline.makespan + stragglers + self.data_parallel(timeline)[0] + self.update_seconds(self.slowest)

    def data_parallel(self, timeline: Timeline) -> tuple[float, float]:
        """Return (exposed, hidden) seconds of reductions and gathers, for the rank that waits longest for them."""
        if self.memory.shards == 1:
            return 0.0, 0.0
        # chunk -> [start of its first forward, start and end of its last backward]
        moments: list[dict] = [{} for _ in range(self.cfg.parallel.pp)]
        for event in timeline.events:
            chunk = moments[event.rank].setdefault(event.action.chunk, [event.start, 0.0, 0.0])
            if type(event.action) is not Forward:
                chunk[1:] = event.start, event.end
        return max(self._data_rank(rank, chunks, timeline.makespan) for rank, chunks in enumerate(moments))

    def exposed_at_least(self) -> float:
        """Bound the exposed seconds of reductions and gathers: those of a schedule that leaves them all their time."""
        if self.memory.shards == 1:
            return 0.0
        chunks = dict.fromkeys(range(self.cfg.parallel.vp), [inf, 0.0, 0.0])
        return max(self._data_rank(rank, chunks, inf)[0] for rank in range(self.cfg.parallel.pp))

    def _data_rank(self, rank: int, chunks: dict, makespan: float) -> tuple[float, float]:
        p, grad_bytes = self.cfg.parallel, self.memory.grad_bytes
        counts = {chunk: self.memory.trained(chunk * p.pp + rank) for chunk in chunks}
        local, nodes, sent = self.memory.shards, 1, grad_bytes
        if self.machine.software.fused:  # other software has one ring in the gradients' format
            local, nodes = data_levels(self.cfg, local, self.machine.fabric.gpus_per_node)
            sent = grad_bytes if self.machine.inside(local, p.tp) else 4
        inside = partial(self.machine.collective, ranks=local, stride=p.tp)
        across = partial(self.machine.collective, ranks=nodes, stride=p.tp * local)
        reduce = {chunk: inside(sent * count) + across(ITEM * count / local) for chunk, count in counts.items()}
        gathered = {chunk: self.memory.gathered_bytes(chunk * p.pp + rank) for chunk in chunks}
        gather = {chunk: inside(size) + across(size / local) for chunk, size in gathered.items()}
        both = sum(reduce.values()) + sum(gather.values())
        if not p.overlap_grads:
            return both, 0.0
        over, limit = 0.0, bucket_limit(self.memory.shards)
        for chunk in sorted(chunks, key=lambda c: chunks[c][2]):
            _, start, end = chunks[chunk]
            tail = reduce[chunk] * min(1.0, limit / (grad_bytes * counts[chunk]))
            over = max(max(over, start) + reduce[chunk], end + tail)
        late, there = 0.0, 0.0
        for chunk in sorted(chunks):
            head = gather[chunk] * min(1.0, limit / (grad_bytes * counts[chunk]))
            forward = self.forward[chunk * p.pp + rank]
            late = max(late, there + head - chunks[chunk][0], there + gather[chunk] - chunks[chunk][0] - forward)
            there += gather[chunk]
        alone = max(0.0, over - makespan) + late
        copied = self.machine.software.fused and nodes == 1 and self.machine.inside(local, p.tp)
        slowdown = self.machine.fabric.copy_felt if copied else self.machine.fabric.felt
        hidden = max(0.0, both - alone) * (1 - slowdown)
        return both - hidden, hidden
