"""The page of a tour: what a run has recorded, as data for minitron/planner/tour.html, which draws it.

Problem: a reader wants to see who holds what, who sends what to whom, and when. All of it is data already: traces of
ranks (dryrun/trace.py), schedules, plans. The idea: put that data into one page as JSON, and let the page draw. Nothing
is drawn from rules that a run could contradict: `checks` compares what was recorded with these rules, and the page
shows the result.

The template has no library and loads nothing. Its one placeholder is the JSON, in which `<` is escaped, so text of a
configuration cannot end the script. The script writes text as text, never as HTML. Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minitron.config.schema import Config, changed
from minitron.config.sizes import bucket_limit, stage_layers, stream_length
from minitron.pipeline.schedule import Backward, BackwardInput, BackwardWeight, Exchange, Forward, Schedule
from minitron.planner.check import check
from minitron.planner.draw import NAMES, peak_activations
from minitron.planner.machine import Machine
from minitron.planner.memory import Memory
from minitron.planner.plan import Step, available_gib, checked_schedule
from minitron.planner.simulate import Timeline, simulate
from minitron.planner.walk import Meetings

TEMPLATE, PLACEHOLDER = Path(__file__).with_name("tour.html"), "@DATA@"
CODES = {Forward: "F", Backward: "B", BackwardInput: "b", BackwardWeight: "w"}
PER_MICROBATCH = ("tp", "cp", "pp")  # axes along which each microbatch communicates


@dataclass(frozen=True)
class Tour:
    """What was run. as_it_is: the trained ranks have the configuration's own sizes, so the page shows their traces.

    real: traces of the trained ranks. dry: pipeline rank -> trace on the meta device, of `few_microbatches`. holds: for
    each pipeline rank, what its first rank holds. proofs: by number format, the results of `tools.tour.compared`.
    """

    name: str
    cfg: Config
    world: int
    machine: Machine | None
    twin: Config
    twin_world: int
    as_it_is: bool
    real: list[dict]
    dry: dict[int, dict]
    holds: list[dict]
    recompute: list[dict]
    proofs: list[dict]

    @property
    def recordings(self) -> list[tuple[str, Config, list[dict], list[dict]]]:
        """What ran: its name, configuration, the traces of ranks, and what ranks hold. The page shows the last one."""
        trained = f"{self.twin_world} trained rank{'s' if self.twin_world > 1 else ''}"
        if self.as_it_is:
            return [(trained, self.cfg, self.real, self.real)]
        dry = ("dry run", self.cfg, list(self.dry.values()), self.holds)
        return [(f"{trained} of the twin", self.twin, self.real, self.real), dry]


def few_microbatches(cfg: Config, world: int) -> Config:
    """Return the configuration with the fewest microbatches that still show every phase of its schedule."""
    p, dp = cfg.parallel, cfg.dp(world)
    count = min(cfg.num_microbatches(dp), max(2 * p.pp, 8 // p.pp * p.pp))
    train = dict(global_batch_size=count * cfg.train.micro_batch_size * dp)
    return changed(cfg, train=train, log=dict(numerics_every=0))


def html(tour: Tour) -> str:
    """Return the page."""
    finite = json.loads(json.dumps(content(tour), default=str), parse_constant=str)  # JSON has no NaN: it becomes text
    text = json.dumps(finite, separators=(",", ":")).replace("<", "\\u003c")
    before, after = TEMPLATE.read_text(encoding="utf-8").split(PLACEHOLDER)
    return before + text + after


def content(tour: Tour) -> dict:
    """Return all that the page shows."""
    world, (_, cfg, shown, holders) = tour.world, tour.recordings[-1]
    m, p, t = cfg.model, cfg.parallel, cfg.train
    dp, own = cfg.dp(world), recorded_schedule(cfg, shown)
    stages = stage_layers(m.num_layers, p.pp, p.vp, p.layers_per_stage)
    per_node = tour.machine.fabric.gpus_per_node if tour.machine else 8
    tokens = {cp: places for trace in shown for cp, places in trace["tokens"].items()}
    return {
        "name": tour.name,
        "world": world,
        "sizes": {"pp": p.pp, "dp": dp, "cp": p.cp, "tp": p.tp, "vp": p.vp},
        **{section: asdict(getattr(cfg, section)) for section in ("model", "parallel", "train", "precision")},
        "microbatches": cfg.num_microbatches(dp),
        "accumulates_in": cfg.optimizer.accumulates_in,
        "bucket_bytes": bucket_limit(dp * p.cp),
        "source": "run" if tour.as_it_is else "dry",
        "twin": twin_in_words(tour),
        "per_node": per_node,
        "groups": {trace["rank"]: trace["groups"] for trace in shown},
        "tokens": [tokens.get(cp, []) for cp in range(p.cp)],
        "samples": {trace["rank"]: trace["samples"] for trace in shown if "samples" in trace},
        "stages": [[layers.start, layers.stop] for layers in stages],
        "holds": holdings(holders),
        "layers": [{"rank": trace["rank"], "events": trace["events"]} for trace in shown],
        "recompute": tour.recompute,
        "message": [stream_length(cfg), t.micro_batch_size, m.hidden_size],
        "schedules": schedules(tour, own),
        "traffic": [{"rank": trace["rank"], "rows": traffic(tour, trace, per_node)} for trace in shown],
        "reductions": [{"rank": trace["rank"], "rows": reductions(trace)} for trace in shown],
        "memory": memory(tour, per_node),
        "proof": proof(tour),
    }


def twin_in_words(tour: Tour) -> dict:
    """Describe what the trained twin has in the place of the configuration's sizes."""
    cfg, twin = tour.cfg, tour.twin
    pairs = {
        "layers": (cfg.model.num_layers, twin.model.num_layers),
        "hidden size": (cfg.model.hidden_size, twin.model.hidden_size),
        "sequence": (cfg.train.seq_len, twin.train.seq_len),
        "global batch": (cfg.train.global_batch_size, twin.train.global_batch_size),
        "ranks": (tour.world, tour.twin_world),
        **{key: (getattr(cfg.parallel, key), getattr(twin.parallel, key)) for key in ("tp", "pp", "vp", "cp")},
        "dp": (cfg.dp(tour.world), twin.dp(tour.twin_world)),
    }
    return {"world": tour.twin_world, "changes": [[k, a, b] for k, (a, b) in pairs.items() if a != b]}


# ---- who holds what --------------------------------------------------------------------------------------------------


def holdings(traces: list[dict]) -> list[dict]:
    """For each pipeline rank: its parameters with the slices of each tp rank, and its buckets with their owners.

    Each slice is the one that its rank has reported.
    """
    found = []
    for stage in range(1 + max(trace["place"]["pp"] for trace in traces)):
        ranks = [trace for trace in traces if trace["place"]["pp"] == stage]
        params = [dict(param, slices={}) for param in ranks[0]["params"]]
        buckets = [dict(bucket, owners={}) for bucket in ranks[0]["buckets"]]
        for trace in reversed(ranks):  # the first replica is what remains; `checks` compares the others with it
            for into, param in zip(params, trace["params"]):
                into["slices"] |= param["slices"]
            for into, bucket in zip(buckets, trace["buckets"]):
                into["owners"] |= bucket["owners"]
        found.append({"params": params, "buckets": buckets})
    return found


# ---- the schedule ----------------------------------------------------------------------------------------------------


def recorded_schedule(cfg: Config, traces: list[dict]) -> Schedule:
    """Return the schedule that ran: recorded actions, and those of `make` for pipeline ranks that were not run."""
    p = cfg.parallel
    recorded = {trace["place"]["pp"]: tuple(trace["actions"]) for trace in reversed(traces)}
    count = 1 + max(action.mb for action in recorded[0] if not isinstance(action, Exchange))
    made, _ = checked_schedule(p.pp, p.vp, count, p.schedule)
    return replace(made, ranks=tuple(recorded.get(rank, made.ranks[rank]) for rank in range(p.pp)))


def schedules(tour: Tour, own: Schedule) -> list[dict]:
    """Simulate the schedule that ran, and the others that this model can have, with the same times of its layers."""
    p, m = tour.cfg.parallel, tour.cfg.model
    others = [("1f1b", 1), ("1f1b", p.vp if p.vp > 1 else 2), ("zb-h1", 1)]
    variants = [(p.schedule, p.vp), *(v for v in others if v != (p.schedule, p.vp) and p.pp > 1)]
    found: list[dict] = []
    few, count = own.num_microbatches, tour.cfg.num_microbatches(tour.cfg.dp(tour.world))
    for kind, vp in variants:
        if m.num_layers < p.pp * vp:
            continue
        mine = not found
        name = "ZB-H1" if kind == "zb-h1" else "1F1B" if vp == 1 else f"interleaved 1F1B, {vp} chunks"
        parallel = dict(schedule=kind, vp=vp, layers_per_stage=p.layers_per_stage if mine else None)
        cfg = changed(tour.cfg, parallel=parallel)
        try:
            schedule, meets = (own, check(own)) if mine else checked_schedule(p.pp, vp, few, kind)
            drawn = timed(tour, cfg, schedule, meets)
        except (ValueError, AssertionError) as error:
            found.append({"name": name, "own": mine, "error": str(error), "events": [], "whole": None})
            continue
        whole = drawn if count == few else timed(tour, cfg, *checked_schedule(p.pp, vp, count, kind))
        shape = dict(name=name, own=mine, vp=vp, microbatches=few, of=count)
        idle, events = sum(whole.idle) / (whole.makespan * p.pp), [event_row(event) for event in drawn.events]
        times = dict(idle=idle, bubble=whole.bubble, makespan=drawn.makespan, whole=whole.makespan)
        found.append(shape | times | dict(held=peak_activations(schedule, layer_counts(cfg)), events=events))
    return found


def timed(tour: Tour, cfg: Config, schedule: Schedule, meets: Meetings) -> Timeline:
    """Simulate a schedule with the planner's seconds; without a device a layer's forward takes 1, its backward 2."""
    if tour.machine is not None and cfg.precision.dtype != "fp32":
        step = Step(cfg, tour.world, tour.machine)
        return step.timeline(step.transfer_seconds, (schedule, meets))
    layers = layer_counts(cfg)
    return simulate(schedule, layers, [2 * x for x in layers], meets=meets)


def layer_counts(cfg: Config) -> list[int]:
    """Count the layers of each stage."""
    p = cfg.parallel
    return [len(layers) for layers in stage_layers(cfg.model.num_layers, p.pp, p.vp, p.layers_per_stage)]


def event_row(event: Any) -> list:
    """[rank, code, microbatch, chunk, start, end, sender or -1, receiver or -1]."""
    op = event.action
    peers = [-1 if transfer is None else transfer.peer for transfer in (op.input, op.output)]
    times = [float(f"{x:.6g}") for x in (event.start, event.end)]
    return [event.rank, CODES[type(op)], op.mb, op.chunk, *times, *peers]


# ---- communication and memory ----------------------------------------------------------------------------------------


def traffic(tour: Tour, trace: dict, per_node: int) -> list[dict]:
    """Sum the bytes that a rank puts into collectives and messages of a whole step, by axis and kind."""
    recorded = 1 + max(action.mb for action in trace["actions"] if not isinstance(action, Exchange))
    times = tour.cfg.num_microbatches(tour.cfg.dp(tour.world)) / recorded
    rows: dict[tuple[str, str], dict] = {}
    for record in trace["records"]:
        if record.action == "start" or record.kind == "recv":  # the sender counts it
            continue
        new = {"axis": record.axis, "kind": record.kind, "count": 0, "bytes": 0, "members": set()}
        row = rows.setdefault((record.axis, record.kind), new)
        scale = times if record.axis in PER_MICROBATCH and record.action != "update" else 1
        row["count"] += scale
        row["bytes"] += scale * record.num_bytes
        row["members"] |= set(record.ranks) if record.kind == "send" else {trace["rank"], *record.ranks}
    for row in rows.values():
        row["inside"] = len({rank // per_node for rank in (trace["rank"], *row["members"])}) == 1
        row |= {"count": round(row["count"]), "bytes": round(row["bytes"]), "members": sorted(row["members"])}
    return list(rows.values())


def reductions(trace: dict) -> list[dict]:
    """List the sums of gradients over data ranks: in which action each began, and its bytes."""
    axes, kinds = ("dp_cp", "in_node", "across_nodes", "tied_stages"), ("reduce-scatter", "all-to-all", "all-reduce")
    sums = (r for r in trace["records"] if r.axis in axes and r.kind in kinds and r.action != "start")
    return [
        {"axis": r.axis, "kind": r.kind, "bytes": r.num_bytes, "action": action_text(r.action)}
        for r in sums
        if r.num_bytes > 64
    ]


def action_text(action: Any) -> str:
    """Name an action: "backward of microbatch 3, chunk 0"."""
    if isinstance(action, Exchange) or not hasattr(action, "mb"):
        return "messages" if isinstance(action, Exchange) else str(action)
    return f"{NAMES[type(action)]} of microbatch {action.mb}, chunk {action.chunk}"


def memory(tour: Tour, per_node: int) -> dict:
    """Return the bytes at the peak by part and pipeline rank: from a dry run, or else by the planner's formulas."""
    planned, rows = Memory(tour.cfg, tour.world, gpus_per_node=per_node), []
    for rank in range(tour.cfg.parallel.pp):
        trace = tour.dry.get(rank)
        parts = dict(planned.bytes_by_part(rank)) if trace is None else trace["memory"]
        rows.append({"parts": parts, "planned": trace is None})
        if trace is not None:
            timeline = [[action_text(action), size] for action, size in trace["timeline"] if action != "build"]
            rows[-1] |= {"peak": action_text(trace["peak_action"]), "timeline": timeline}
    limit = None if tour.machine is None else available_gib(tour.machine, planned) * 2**30
    return {"rows": rows, "limit": limit, "device": tour.machine and tour.machine.device.gpu}


# ---- the proof -------------------------------------------------------------------------------------------------------


def proof(tour: Tour) -> dict:
    """Compare the layout with one process, and what was recorded with the rules that it must keep.

    A row's `ok` is None if it has no limit.
    """
    rows = [row | {"run": tour.recordings[0][0]} for run in tour.proofs for row in run["rows"]]
    rows += [row | {"run": name} for name, *recording in tour.recordings for row in checks(*recording)]
    return {"ok": all(row["ok"] is not False for row in rows), "rows": rows, "runs": tour.proofs}


def judged(name: str, ok: bool | None, text: str) -> dict:
    return {"ok": ok, "name": name, "text": text}


def checks(cfg: Config, traces: list[dict], holders: list[dict]) -> list[dict]:
    """Compare what was recorded with the rules: each a row with `ok`, its name and what was found.

    traces: those of ranks that ran a step. holders: those of ranks that report what they hold.
    """
    p, rows, own = cfg.parallel, [], recorded_schedule(cfg, traces)

    def add(name: str, wrong: list[str], found: str) -> None:
        rows.append(judged(name, not wrong, "; ".join(wrong[:3]) or found))

    holds = holdings(holders)
    shards = [f"{x['name']} on pp {pp}" for pp, hold in enumerate(holds) for x in hold["params"] if not covered(x)]
    count = f"{sum(len(hold['params']) for hold in holds):,} parameters of {len(holds)} pipeline ranks"
    add("the tensor-parallel shards hold each element once", shards, count)
    owners: dict[tuple, list] = {}
    for trace in holders:
        for i, bucket in enumerate(trace["buckets"]):
            key = (trace["place"]["pp"], trace["place"]["tp"], i, bucket["size"])
            owners.setdefault(key, []).extend(bucket["owners"].values())
    slices = [f"bucket {i} of pp {pp}, tp {tp}" for (pp, tp, i, n), x in owners.items() if not contiguous(sorted(x), n)]
    add("the slices of the optimizer hold each element once", slices, f"{len(owners)} gradient buckets")
    made, _ = checked_schedule(p.pp, p.vp, own.num_microbatches, p.schedule)
    order = [f"rank {x['rank']}" for x in traces if tuple(x["actions"]) != made.ranks[x["place"]["pp"]]]
    count = sum(len(trace["actions"]) for trace in traces)
    add("the actions ran in the order of the schedule", order, f"{count:,} actions; recorded ranks: {len(traces)}")
    rows += schedule_rules(own)
    if traces is not holders:
        return rows  # a dry run of a few ranks: there is no other one to compare with
    first: dict[tuple, dict] = {}  # (pp, tp) -> the trace of its first rank
    replicas = [
        f"ranks {other['rank']} and {trace['rank']}"
        for trace in traces
        if (other := first.setdefault((trace["place"]["pp"], trace["place"]["tp"]), trace))["params"] != trace["params"]
    ]
    add("ranks that should hold the same parts do", replicas, f"{len(traces)} ranks")
    together = [
        f"{trace['rank']} and {first['rank']}"
        for trace in traces
        for first in traces
        for axis, group in trace["groups"].items()
        if first["rank"] == group[0] and shared(trace, axis) != shared(first, axis)
    ]
    count = sum(len(trace["records"]) for trace in traces)
    add("ranks of a group run the same collectives, in the same order", together, f"{count:,} recorded in one step")
    return rows


def schedule_rules(own: Schedule) -> list[dict]:
    """Check the recorded order itself: that it cannot deadlock, the bubble, and the activations that ranks hold."""
    pp, vp, m, complete = own.pp, own.vp, own.num_microbatches, "the schedule is complete and cannot deadlock"
    try:
        timeline = simulate(own, 1.0, 2.0, meets=check(own))
    except (ValueError, AssertionError) as error:
        return [judged(complete, False, str(error))]
    rows = [judged(complete, True, f"{m} microbatches, {pp} pipeline ranks")]
    if pp > 1 and m >= pp and (vp == 1 or m % pp == 0):
        rule = (pp - 1) / (3 * m) if own.kind == "zb-h1" else (pp - 1) / (vp * m)
        text = f"{timeline.bubble:.2%} of the work with {m} microbatches and equal stages, by the formula {rule:.2%}"
        rows.append(judged("the bubble is that of its schedule", timeline.bubble <= 1.05 * rule, text))
    if vp == 1:
        held, most = peak_activations(own), [pp if own.kind == "zb-h1" else pp - r for r in range(pp)]
        too_many = [f"rank {r} holds {held[r]}, not {most[r]}" for r in range(pp) if held[r] > most[r]]
        text = "; ".join(too_many) or f"{', '.join(map(str, held))} microbatches by rank"
        rows.append(judged("ranks hold no more activations than their schedule needs", not too_many, text))
    return rows


def covered(param: dict) -> bool:
    """Return whether the slices of all tp ranks hold each row or column of a parameter once."""
    if param["dim"] is None:
        return True
    parts = sorted((full, full + n) for cut in param["slices"].values() for _, full, n in cut)
    return contiguous(parts, param["shape"][param["dim"]])


def contiguous(parts: list[tuple], size: int) -> bool:
    ends = [0, *(stop for _, stop in parts)]
    return [start for start, _ in parts] == ends[:-1] and ends[-1] == size


def shared(trace: dict, axis: str) -> list[tuple]:
    """List a rank's collectives over all ranks of an axis."""
    group = tuple(trace["groups"][axis])
    records = (r for r in trace["records"] if r.ranks == group and r.kind not in ("send", "recv"))
    return [(r.kind, r.num_bytes, str(r.dtype)) for r in records if len(group) > 1 and r.axis == axis]
