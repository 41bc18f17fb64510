"""Find the fastest layouts that fit, what less memory costs, and why the others are slower or do not fit.

The idea: thousands of GPUs have hundreds of thousands of layouts, and a lower bound on the step is cheap. So the search
refines the bound of the layout whose bound is lowest, until no other layout can be among the best:

    1. what a rank computes for a block       tp, cp and its style, micro batch, sequence parallel, schedule: seconds
                                              of all stages, over all ranks, if none ever waits
    2. the pipeline: pp, vp, layers a stage   the rules of `rules.check`; the bounds of `Family.member_at_least`
    3. recomputation, as little as fits,      memory, of the first pipeline rank, then of all
       and as leaves room for CUDA graphs
    4. the whole plan                         its schedule, simulated

Stages are as equal as by the trainer's default, or balanced: layers go one by one to the rank that computes least, with
the embedding and the head counted. The search counts why it rejected each layout. After the fastest layouts come those
that need less memory: each is the fastest that fits into less than the one before.

The global batch and the number formats, and with them the result of training, stay.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import inf
from operator import attrgetter, itemgetter
from typing import NamedTuple

from tqdm import tqdm

from minitron.config import rules
from minitron.config.schema import Config, changed
from minitron.config.sizes import fp8_layers, stage_layers
from minitron.planner.machine import Machine
from minitron.planner.memory import Memory
from minitron.planner.plan import Plan, Step, available_gib, no_room_for_graphs, plan
from minitron.planner.work import StageTime, total

RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)
MEMORY_STEP = 0.9  # a slower layout is shown if it needs less than this share of the memory of faster ones
MAX_END_LAYERS = 2  # stages at the ends, with the embedding and the head, may have up to this many layers less
SLOWER = 1.05  # times the fastest step, beyond which less memory is not worth showing
BOUND_SLACK = 1.02  # a step may be this factor above its bound
TOO_LARGE = "too large: parameters, gradients and optimizer alone"
TOO_MUCH = "too large: with activations, even recomputed"
TOO_SLOW = "slower than those shown"
NOT_SMALLER = "slower than those shown, and no smaller with any recomputation"


@dataclass(frozen=True)
class Found:
    """What a search has found.

    best: plans, fastest first. smaller: plans, each of less memory and slower than the one before; the first is the
    fastest. others: (configuration, seconds that its step takes at least) of others that fit, fastest first. reasons:
    how many layouts were rejected, by reason.
    """

    best: list[Plan]
    smaller: list[Plan]
    others: list[tuple[Config, float]]
    reasons: Counter


def search(cfg: Config, world: int, machine: Machine, count: int = 5, *, smaller: bool = True) -> Found:
    """Find the `count` fastest layouts of `world` GPUs, those that need less memory, and why others were rejected.

    On a terminal a bar counts the layouts that were evaluated.
    """
    with tqdm(desc="searching", unit=" layouts", leave=False, disable=None) as bar:
        return _Search(cfg, world, machine, count, smaller, bar).run()


@dataclass(eq=False)
class Candidate:
    """A layout whose step takes at least `seconds`.

    gib: its memory, set once it is known to fit; else None. stays_eager: as in Plan, set with gib. makes_room: it
    recomputes more only so that CUDA graphs fit. extra: it recomputes more than it needs, to save memory.
    """

    seconds: float
    cfg: Config
    family: Family
    gib: float | None = None
    stays_eager: bool = False
    makes_room: bool = False
    extra: bool = False


class Costs(NamedTuple):
    """Seconds of a microbatch, forward and backward. layers: the sum over all layers before each one.

    least, most: the smallest and largest share of a block's seconds that is its forward. deferred: the largest share
    that is weight gradients which a split backward defers.
    """

    layers: list[float]
    embedding: float
    head: float
    least: float
    most: float
    deferred: float


class Family:
    """Layouts whose ranks compute the same for a microbatch and a block. cfg: one member.

    Members differ in pp, vp, layers of stages and recomputation.
    """

    def __init__(self, cfg: Config, world: int, machine: Machine):
        self.cfg, self.world, self.machine = cfg, world, machine
        self.costs = lru_cache(None)(self._costs)

    def _costs(self, recompute: str) -> Costs:
        work = StageTime(changed(self.cfg, train=dict(recompute=recompute)), self.machine)
        m, splits = self.cfg.model, {False, work.zero_bubble}
        in_fp8 = fp8_layers(self.cfg.precision, m.num_layers)
        kinds = {layer in in_fp8 for layer in range(m.num_layers)}
        ways = {(fp8, split): work.block(fp8, split) for fp8 in kinds for split in splits}
        block = {fp8: min(sum(map(total, ways[fp8, split])) for split in splits) for fp8 in kinds}
        layers = accumulate((block[layer in in_fp8] for layer in range(m.num_layers)), initial=0.0)
        head = min(sum(map(total, work.head(split))) for split in splits)
        shares = [total(f) / (total(f) + total(b)) for f, b in ways.values()]
        late = max(b["deferred"] / (total(f) + total(b)) for f, b in ways.values())
        return Costs(list(layers), sum(map(total, work.embedding())), head, min(shares), max(shares), late)

    def at_least(self) -> float:
        """Bound the step of every member: all its work divided by all ranks, without any waiting."""
        layers, embedding, head, *_ = self.costs("none")
        t, p = self.cfg.train, self.cfg.parallel
        return (layers[-1] + embedding + head) * t.global_batch_size * p.tp * p.cp / t.micro_batch_size / self.world

    def member_at_least(self, member: Config) -> float:
        """Bound the step of one member, by the largest of three times:

        1. All work of the slowest rank. With 1F1B also one microbatch through the stages before it, and back.
        2. With 1F1B: one microbatch through all stages and back, after the other forwards in the slowest stage but the
           last one.
        3. With vp = 1: rank 0's first backward waits for one microbatch through all other stages and back. Before it,
           rank 0 can run at most pp forwards; the rest of its work follows.
        """
        costs = self.costs(member.train.recompute)
        layers, p, count = costs.layers, member.parallel, member.num_microbatches(member.dp(self.world))
        ends = _ends(len(layers) - 1, p.pp, p.vp, p.layers_per_stage)
        stages = [layers[end] - layers[start] for start, end in zip(ends, ends[1:])]
        first = stages[0]
        stages[0] += costs.embedding
        stages[-1] += costs.head
        ranks = [sum(stages[rank :: p.pp]) for rank in range(p.pp)] if p.vp > 1 else stages
        slowest = max(range(p.pp), key=ranks.__getitem__)
        bounds = [count * ranks[slowest]]
        if p.schedule == "1f1b":
            bounds[0] += sum(stages[:slowest])
            bounds.append(sum(stages) + (count - 1) * costs.least * max(stages[:-1], default=0.0))
        if p.vp == 1:
            others = (layers[-1] - first) * (1 - costs.deferred)
            bounds.append(others + count * first - min(count, p.pp) * costs.most * first)
        return max(bounds)

    def pipelines(self) -> Iterator[Config]:
        """List members, all of which recompute nothing, by pp; some break a rule."""
        m, given, ranks = self.cfg.model, self.cfg.parallel, self.cfg.parallel.tp * self.cfg.parallel.cp
        layers, embedding, head, *_ = self.costs("none")
        ends = tuple(round(x * m.num_layers / layers[-1], 2) for x in (embedding, head))  # in layers
        split = given.schedule != "1f1b"
        for pp in range(2 if split else 1, m.num_layers + 1):
            if self.world % (ranks * pp) == 0:
                for vp in (1,) if split or pp == 1 else _interleaved(m.num_layers, pp):
                    for counts in divisions(m.num_layers, pp, vp, *ends):
                        yield changed(self.cfg, parallel=dict(pp=pp, vp=vp, layers_per_stage=counts))


@lru_cache(8192)
def _ends(num_layers: int, pp: int, vp: int, counts: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the layers before each stage, and of all."""
    return (0, *(stage.stop for stage in stage_layers(num_layers, pp, vp, counts)))


@lru_cache(4096)
def _interleaved(num_layers: int, pp: int) -> list[int]:
    """List vp: 1, and those with equal stages except for up to MAX_END_LAYERS layers, or two of each rank.

    Others are left out: they are many, and none is much faster than the nearest of these.
    """
    fits = (vp for vp in range(2, (num_layers + MAX_END_LAYERS) // pp + 1) if num_layers >= pp * vp)
    return [1, *(vp for vp in fits if -num_layers % (pp * vp) <= max(MAX_END_LAYERS, 2 * pp))]


@lru_cache(4096)
def divisions(num_layers: int, pp: int, vp: int, embedding: float, head: float) -> list[tuple[int, ...] | None]:
    """List ways to divide layers among stages: None for the default, balanced, and balanced with a lighter first rank.

    embedding, head: their costs, in layers.
    """
    default = tuple(map(len, stage_layers(num_layers, pp, vp)))
    found = dict.fromkeys(_balanced(num_layers, pp, vp, first, head) for first in (embedding, embedding + 1))
    found.pop(default, None)
    return [None, *found] if pp > 1 else [None]


def _balanced(num_layers: int, pp: int, vp: int, first: float, last: float) -> tuple[int, ...]:
    """Give each layer to the rank with the least load, and there to the stage with the least.

    Of equal ranks the later one gets it, since it holds fewer activations; of equal stages the earlier one.
    """
    counts = [1] * (pp * vp)
    extra = [first] + [0.0] * (pp * vp - 2) + [last]
    ranks = [(vp + sum(extra[rank::pp]), -rank) for rank in range(pp)]
    heapq.heapify(ranks)
    for _ in range(num_layers - pp * vp):
        load, rank = ranks[0]
        heapq.heapreplace(ranks, (load + 1, rank))
        stage = min(range(-rank, pp * vp, pp), key=lambda stage: (counts[stage] + extra[stage], stage))
        counts[stage] += 1
    return tuple(counts)


def families(cfg: Config, world: int, machine: Machine) -> Iterator[Config]:
    """List one configuration of each family, that of the given values first. pp is 1, or 2 if it must be larger."""
    m, p = cfg.model, cfg.parallel

    styles = dict.fromkeys((p.cp_style, "ring", "allgather", "ulysses"))
    splits = dict.fromkeys((p.sequence_parallel, True, False))
    kinds = dict.fromkeys((p.schedule, "1f1b", "zb-h1"))
    sizes = dict.fromkeys((cfg.train.micro_batch_size, *MICRO_BATCHES))
    for tp in _divisors(world, 2 * machine.fabric.gpus_per_node):
        for cp in _divisors(world // tp, 64):
            for style, split, kind, size in product(styles, splits, kinds, sizes):
                idle = cp == 1 and style != p.cp_style or tp == 1 and split != p.sequence_parallel
                if idle or kind == "zb-h1" and (m.num_layers == 1 or world == tp * cp):
                    continue
                parallel = dict(tp=tp, cp=cp, cp_style=style, sequence_parallel=split, schedule=kind)
                stages = dict(pp=1, vp=1, layers_per_stage=None)
                train = dict(micro_batch_size=size, recompute="none")
                yield changed(cfg, parallel=parallel | stages, train=train)


def listed(cfg: Config) -> Config:
    """Return the configuration as in `Family.pipelines`: layers_per_stage is None if stages are the default's."""
    p = cfg.parallel
    default = tuple(map(len, stage_layers(cfg.model.num_layers, p.pp, p.vp)))
    return changed(cfg, parallel=dict(layers_per_stage=None)) if p.layers_per_stage == default else cfg


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _whole(cfg: Config) -> Config:
    """Return the layout without its recomputation."""
    return changed(cfg, train=dict(recompute="none"))


class _Search:
    """The state of a search: candidates, lowest bound first, and what was found."""

    def __init__(self, cfg: Config, world: int, machine: Machine, count: int, smaller: bool, bar: tqdm):
        self.cfg, self.bar = _whole(cfg), bar
        self.given = listed(self.cfg)
        self.world, self.machine, self.count, self.smaller = world, machine, count, smaller
        self.heap: list[tuple[float, int, Candidate]] = []  # by lower bound; numbers order equal ones
        self.timed: list[Candidate] = []  # fastest first; seconds are those of the whole step
        self.fastest: list[Candidate] = []  # the same, without those that recompute more than they need
        self.others: list[tuple[Config, float]] = []
        self.reasons: Counter = Counter()
        self.same: set = set()
        self.lasts: dict[tuple, int] = {}
        self.numbers = 0

    def run(self) -> Found:
        every = (Family(cfg, self.world, self.machine) for cfg in families(self.cfg, self.world, self.machine))
        closed = sorted(((family.at_least(), i, family) for i, family in enumerate(every)), reverse=True)
        given = Family(self.cfg, self.world, self.machine)
        self.push(Candidate(given.member_at_least(self.cfg), self.cfg, given))
        while self.heap or closed:
            if closed and (not self.heap or closed[-1][0] <= self.heap[0][0]):
                if closed[-1][0] > self.limit:
                    break
                self.open(closed.pop()[-1])
            elif self.heap[0][0] > self.limit:
                break
            else:
                self.evaluate(heapq.heappop(self.heap)[-1])
        for *_, candidate in self.heap:
            self.drop(candidate)
        self.reasons[TOO_SLOW] += sum(member != self.given for *_, family in closed for member in family.pipelines())
        best, smaller = self.fastest[: self.count], []
        for one in self.timed if self.smaller else ():
            if not smaller or one.gib < MEMORY_STEP * smaller[-1].gib:
                smaller.append(one)
        plans = {one: plan(one.cfg, self.world, self.machine) for one in (*best, *smaller)}
        self.others += [(one.cfg, one.seconds) for one in self.fastest if one not in plans]
        best, smaller = ([plans[one] for one in some] for some in (best, smaller))
        # A layout that recomputes to make room for graphs counts as one with the layout that stays eager.
        shown, others = {_whole(job.cfg) for job in best}, []
        for cfg, seconds in sorted(self.others, key=itemgetter(1)):
            if _whole(cfg) not in shown:
                shown.add(_whole(cfg))
                others.append((cfg, seconds))
        return Found(best, smaller, others, +self.reasons)

    @property
    def limit(self) -> float:
        """Seconds beyond which no layout is shown."""
        if len(self.fastest) < self.count:
            return inf
        most = self.fastest[self.count - 1].seconds
        return max(most, SLOWER * self.fastest[0].seconds) if self.smaller else most

    def useful(self, candidate: Candidate, gib: float) -> bool:
        """Return whether a layout of at least its seconds, and of this memory, may be shown."""
        seconds, fastest = candidate.seconds, self.fastest
        if not candidate.extra and (len(fastest) < self.count or seconds < fastest[self.count - 1].seconds):
            return True
        if not self.smaller or fastest and seconds > SLOWER * fastest[0].seconds:
            return False
        faster = (one.gib for one in self.timed if one.seconds <= seconds * BOUND_SLACK)
        return gib < MEMORY_STEP * min(faster, default=inf)

    def push(self, candidate: Candidate) -> None:
        self.numbers += 1
        heapq.heappush(self.heap, (candidate.seconds, self.numbers, candidate))

    def drop(self, candidate: Candidate, reason: str = TOO_SLOW) -> None:
        """Count why a layout is not planned, or list it if it fits."""
        if candidate.extra:
            return
        if candidate.gib is None:
            self.reasons[reason] += not candidate.makes_room
        else:
            self.others.append((candidate.cfg, candidate.seconds))

    def open(self, family: Family) -> None:
        """Add the members of a family that keep the rules to the candidates."""
        broken: dict[int, str] = {}  # by pp, on which rules depend; not on the stages, which are made to keep them
        for member in family.pipelines():
            p = member.parallel
            if member == self.given:  # it was evaluated first
                continue
            if p.pp not in broken:
                broken[p.pp] = self.broken(changed(member, parallel=dict(vp=1, layers_per_stage=None)))
                key = p.pp, p.tp, p.cp, p.sequence_parallel, p.schedule, member.train.micro_batch_size
                if not broken[p.pp]:
                    alike = key, family.at_least()
                    broken[p.pp] = "planned as another parallel.cp_style" if alike in self.same else ""
                    self.same.add(alike)
            if broken[p.pp]:
                self.reasons[broken[p.pp]] += 1
            else:
                self.push(Candidate(family.member_at_least(member), member, family))

    def broken(self, cfg: Config) -> str:
        try:
            rules.check(cfg, self.world)
        except ValueError as error:
            return f"breaks a rule of {str(error).partition('=')[0]}"  # the key, with which its line begins
        return ""

    def evaluate(self, candidate: Candidate) -> None:
        """Refine the bound of a layout: first its memory, then the whole plan."""
        self.bar.update()
        if candidate.gib is not None:
            if not self.useful(candidate, candidate.gib):
                return self.drop(candidate)
            cfg = changed(candidate.cfg, train=dict(cuda_graph="off")) if candidate.stays_eager else candidate.cfg
            step = Step(cfg, self.world, self.machine)
            candidate.seconds = step.whole_seconds(step.timeline(step.transfer_seconds))
            for some in (self.timed,) if candidate.extra else (self.timed, self.fastest):
                insort(some, candidate, key=attrgetter("seconds"))
            self.bar.set_postfix_str(f"fastest {self.timed[0].seconds:.3f} s")
            return None
        reason = self.check_memory(candidate)
        if not reason:
            step = Step(candidate.cfg, self.world, self.machine)
            before = max(candidate.seconds + step.update_seconds(step.slowest), step.at_least())
            candidate.seconds = before + step.exposed_at_least()
            self.push(candidate)
        t = candidate.cfg.train
        too_much, eager = reason == TOO_MUCH, candidate.stays_eager
        if t.recompute != RECOMPUTE[-1] and (too_much or eager or reason in ("", TOO_SLOW) and self.smaller):
            cfg = changed(candidate.cfg, train=dict(recompute=RECOMPUTE[RECOMPUTE.index(t.recompute) + 1]))
            more = Candidate(candidate.family.member_at_least(cfg), cfg, candidate.family)
            more.makes_room = eager or candidate.makes_room
            more.extra = candidate.extra or not (too_much or eager)
            self.push(more)
            reason = "" if too_much else reason
        if reason:
            self.drop(candidate, reason)

    def lasting(self, cfg: Config, memory: Memory) -> int:
        """Count the lasting bytes on the first rank. They are cached, since most keys do not change them."""
        p = cfg.parallel
        key = p.tp, p.cp, p.pp, p.vp, p.layers_per_stage
        if key not in self.lasts:
            self.lasts[key] = sum(memory.lasting_parts(0))
        return self.lasts[key]

    def check_memory(self, candidate: Candidate) -> str:
        """Find the candidate's memory, first that of its first rank. Return why it is rejected, "" if it is not."""
        memory = Memory(candidate.cfg, self.world, gpus_per_node=self.machine.fabric.gpus_per_node)
        available = available_gib(self.machine, memory)
        for measure, reason in (
            (lambda: self.lasting(candidate.cfg, memory), TOO_LARGE),
            (lambda: memory.bytes_by_part(0).total(), TOO_MUCH),
            (lambda: sum(memory.lasting()), TOO_LARGE),
            (lambda: memory.peak()[1].total(), TOO_MUCH),
        ):
            gib = measure() / 2**30
            if gib > available:
                return reason
            if not self.useful(candidate, gib):
                return NOT_SMALLER if reason == TOO_LARGE else TOO_SLOW
        candidate.gib, candidate.stays_eager = gib, no_room_for_graphs(memory, self.machine)
        return ""
