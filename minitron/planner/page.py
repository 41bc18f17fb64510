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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minitron.config.schema import Config, changed
from minitron.config.sizes import stage_layers, stream_length
from minitron.pipeline.schedule import Backward, BackwardInput, BackwardWeight, Exchange, Forward, Schedule, make
from minitron.planner.check import check
from minitron.planner.draw import NAMES, peak_activations
from minitron.planner.machine import Machine
from minitron.planner.memory import Memory
from minitron.planner.plan import Step, available_gib
from minitron.planner.simulate import Timeline, simulate

TEMPLATE, PLACEHOLDER = Path(__file__).with_name("tour.html"), "@DATA@"
CODES = {Forward: "F", Backward: "B", BackwardInput: "b", BackwardWeight: "w"}
# Relative differences of losses and gradients by rounding alone. FP8's casts move small gradients far: no limit.
LIMITS = {"fp32": (1e-4, 1e-4), "fp16": (2e-2, 0.1), "bf16": (2e-2, 0.2), "FP8": (5e-2, None)}
PER_MICROBATCH = ("tp", "cp", "pp")  # axes along which each microbatch communicates


@dataclass(frozen=True)
class Tour:
    """What was run. as_it_is: the trained ranks have the configuration's own sizes, so the page shows their traces.

    real: traces of the trained ranks. dry: pipeline rank -> trace on the meta device, of `few_microbatches`. holds: of
    each pipeline rank, what its first rank holds. proofs: by number format, losses and differences of gradients.
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
    def shown(self) -> list[dict]:
        """The traces that the page shows, in the order of their ranks."""
        return self.real if self.as_it_is else list(self.dry.values())


def few_microbatches(cfg: Config, world: int) -> Config:
    """Return the configuration with as few microbatches as show all that its schedule does."""
    p, dp = cfg.parallel, cfg.dp(world)
    count = min(cfg.num_microbatches(dp), max(2 * p.pp, 8 // p.pp * p.pp))
    return changed(
        cfg, train=dict(global_batch_size=count * cfg.train.micro_batch_size * dp), log=dict(numerics_every=0)
    )


def html(tour: Tour) -> str:
    """Return the page."""
    text = json.dumps(content(tour), separators=(",", ":"), default=str).replace("<", "\\u003c")
    before, after = TEMPLATE.read_text(encoding="utf-8").split(PLACEHOLDER)
    return before + text + after


def content(tour: Tour) -> dict:
    """Return all that the page shows."""
    cfg, world = tour.cfg, tour.world
    m, p, t = cfg.model, cfg.parallel, cfg.train
    dp, own = cfg.dp(world), recorded_schedule(tour)
    stages = stage_layers(m.num_layers, p.pp, p.vp, p.layers_per_stage)
    per_node = tour.machine.fabric.gpus_per_node if tour.machine else 8
    tokens = {cp: places for trace in tour.shown for cp, places in trace["tokens"].items()}
    return {
        "name": tour.name,
        "world": world,
        "sizes": {"pp": p.pp, "dp": dp, "cp": p.cp, "tp": p.tp, "vp": p.vp},
        **{section: asdict(getattr(cfg, section)) for section in ("model", "parallel", "train", "precision")},
        "microbatches": cfg.num_microbatches(dp),
        "accumulates_in": cfg.optimizer.accumulates_in,
        "source": "run" if tour.as_it_is else "dry",
        "twin": twin_in_words(tour),
        "per_node": per_node,
        "groups": {trace["rank"]: trace["groups"] for trace in tour.shown},
        "tokens": [tokens.get(cp, []) for cp in range(p.cp)],
        "samples": {trace["rank"]: trace["samples"] for trace in tour.shown if "samples" in trace},
        "stages": [[layers.start, layers.stop] for layers in stages],
        "holds": holdings(tour),
        "layers": [{"rank": trace["rank"], "events": trace["events"]} for trace in tour.shown],
        "recompute": tour.recompute,
        "message": [stream_length(cfg), t.micro_batch_size, m.hidden_size],
        "schedules": schedules(tour, own),
        "traffic": [{"rank": trace["rank"], "rows": traffic(tour, trace, per_node)} for trace in tour.shown],
        "reductions": [{"rank": trace["rank"], "rows": reductions(trace)} for trace in tour.shown],
        "memory": memory(tour),
        "proof": proof(tour, own),
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


def holdings(tour: Tour) -> list[dict]:
    """For each pipeline rank: its parameters with the slices of each tp rank, and its buckets with their owners.

    If the page shows trained ranks, each slice is the one that its rank has reported.
    """
    if not tour.as_it_is:
        return [{key: trace[key] for key in ("params", "buckets")} for trace in tour.holds]
    found = []
    for stage in range(tour.cfg.parallel.pp):
        ranks = [trace for trace in tour.real if trace["place"]["pp"] == stage]
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


def recorded_schedule(tour: Tour) -> Schedule:
    """Return the schedule that ran: recorded actions, and those of `make` for pipeline ranks that were not run."""
    p, shown = tour.cfg.parallel, tour.shown
    recorded = {trace["place"]["pp"]: tuple(trace["actions"]) for trace in reversed(shown)}
    count = 1 + max(action.mb for action in recorded[0] if not isinstance(action, Exchange))
    made = make(p.pp, p.vp, count, p.schedule)
    ranks = tuple(recorded.get(rank, made.ranks[rank]) for rank in range(p.pp))
    return Schedule(p.pp, p.vp, count, ranks, kind=p.schedule)


def schedules(tour: Tour, own: Schedule) -> list[dict]:
    """Simulate the schedule that ran, and the others that this model can have, with the same times of its layers."""
    p, m = tour.cfg.parallel, tour.cfg.model
    others = [("1f1b", 1), ("1f1b", p.vp if p.vp > 1 else 2), ("zb-h1", 1)]
    variants = [(p.schedule, p.vp), *(v for v in others if v != (p.schedule, p.vp) and p.pp > 1)]
    found = []
    for number, (kind, vp) in enumerate(variants):
        name = "ZB-H1" if kind == "zb-h1" else "1F1B" if vp == 1 else f"interleaved 1F1B, {vp} chunks"
        if m.num_layers < p.pp * vp:
            continue
        mine = number == 0
        cfg = changed(
            tour.cfg, parallel=dict(schedule=kind, vp=vp, layers_per_stage=p.layers_per_stage if mine else None)
        )
        schedule = own if mine else make(p.pp, vp, own.num_microbatches, kind)
        try:
            drawn = timed(tour, cfg, schedule)
        except (ValueError, AssertionError) as error:
            found.append({"name": name, "own": mine, "error": str(error), "events": [], "whole": None})
            continue
        count = tour.cfg.num_microbatches(tour.cfg.dp(tour.world))
        whole = drawn if count == own.num_microbatches else timed(tour, cfg, make(p.pp, vp, count, kind))
        idle = sum(whole.idle) / (whole.makespan * p.pp)
        found.append(
            {
                "name": name,
                "own": mine,
                "vp": vp,
                "microbatches": own.num_microbatches,
                "of": count,
                "idle": idle,
                "bubble": whole.bubble,
                "makespan": drawn.makespan,
                "whole": whole.makespan,
                "held": peak_activations(schedule),
                "events": [event_row(event) for event in drawn.events],
            }
        )
    return found


def timed(tour: Tour, cfg: Config, schedule: Schedule) -> Timeline:
    """Simulate a schedule with the planner's seconds; without a device a layer's forward takes 1, its backward 2."""
    meets = check(schedule)
    if tour.machine is not None and cfg.precision.dtype != "fp32":
        step = Step(cfg, tour.world, tour.machine)
        shares = [b["deferred"] / sum(b.values()) or 0.5 for _, b in step.parts]
        deferred = [share * seconds for share, seconds in zip(shares, step.backward)]
        return simulate(schedule, step.forward, step.backward, step.transfer_seconds, deferred, meets)
    p = cfg.parallel
    layers = [float(len(x)) for x in stage_layers(cfg.model.num_layers, p.pp, p.vp, p.layers_per_stage)]
    return simulate(schedule, layers, [2 * x for x in layers], meets=meets)


def event_row(event: Any) -> list:
    """[rank, code, microbatch, chunk, start, end, sender or -1, receiver or -1]."""
    op = event.action
    peers = [-1 if transfer is None else transfer.peer for transfer in (op.input, op.output)]
    times = [float(f"{x:.6g}") for x in (event.start, event.end)]
    return [event.rank, CODES[type(op)], op.mb, op.chunk, *times, *peers]


# ---- communication and memory ----------------------------------------------------------------------------------------


def traffic(tour: Tour, trace: dict, per_node: int) -> list[dict]:
    """Sum a rank's collectives of a whole step by axis and kind."""
    recorded = 1 + max(action.mb for action in trace["actions"] if not isinstance(action, Exchange))
    times = tour.cfg.num_microbatches(tour.cfg.dp(tour.world)) / recorded
    rows: dict[tuple[str, str], dict] = {}
    for record in trace["records"]:
        if record.action == "start":
            continue
        ranks = sorted({trace["rank"], *record.ranks})
        row = rows.setdefault(
            (record.axis, record.kind), {"axis": record.axis, "kind": record.kind, "count": 0, "bytes": 0}
        )
        scale = times if record.axis in PER_MICROBATCH and record.action != "update" else 1
        row["count"] += scale
        row["bytes"] += scale * record.num_bytes
        row["ranks"] = len(ranks) if record.kind not in ("send", "recv") else 2
        row["inside"] = ranks[0] // per_node == ranks[-1] // per_node
        row["members"] = ranks[:16]
    return [row | {"count": round(row["count"]), "bytes": round(row["bytes"])} for row in rows.values()]


def reductions(trace: dict) -> list[dict]:
    """List the sums of gradients over data ranks: in which action each began, and its bytes."""
    kinds = ("reduce-scatter", "all-to-all", "all-reduce")
    return [
        {"axis": r.axis, "kind": r.kind, "bytes": r.num_bytes, "action": action_text(r.action)}
        for r in trace["records"]
        if r.axis in ("dp_cp", "local", "across", "embedding")
        and r.kind in kinds
        and r.action != "start"
        and r.num_bytes > 64
    ]


def action_text(action: Any) -> str:
    """Name an action: "backward of microbatch 3, chunk 0"."""
    if isinstance(action, Exchange) or not hasattr(action, "mb"):
        return "messages" if isinstance(action, Exchange) else str(action)
    return f"{NAMES[type(action)]} of microbatch {action.mb}, chunk {action.chunk}"


def memory(tour: Tour) -> dict:
    """Return the bytes at the peak by part and pipeline rank: of a dry run, or else by the planner's formulas."""
    planned, rows = Memory(tour.cfg, tour.world, gpus_per_node=8), []
    for rank in range(tour.cfg.parallel.pp):
        trace = tour.dry.get(rank)
        parts = dict(planned.bytes_by_part(rank)) if trace is None else trace["memory"]
        rows.append({"parts": parts, "planned": trace is None})
        if trace is not None:
            timeline = [
                [action_text(action), num_bytes] for action, num_bytes in trace["timeline"] if action != "build"
            ]
            rows[-1] |= {"peak": action_text(trace["peak_action"]), "timeline": timeline}
    limit = None if tour.machine is None else available_gib(tour.machine) * 2**30
    return {"rows": rows, "limit": limit, "device": tour.machine and tour.machine.device.gpu}


# ---- the proof -------------------------------------------------------------------------------------------------------


def proof(tour: Tour, own: Schedule) -> dict:
    """Compare the layout with one process, and what was recorded with the rules that it must keep."""
    runs = [compared(run) for run in tour.proofs]
    rows = [run.pop("row") for run in runs] + checks(tour, own)
    return {"ok": all(row["ok"] for row in rows), "rows": rows, "runs": runs}


def compared(run: dict) -> dict:
    """Compare losses and gradients of one number format, with limits that come from its rounding."""
    layout, alone = run["figures"]
    steps = [
        {
            "one": one["loss"],
            "ranks": [rank[i]["loss"] for rank in layout],
            "norm": [one["grad_norm"], layout[0][i]["grad_norm"]],
        }
        for i, one in enumerate(alone)
    ]
    loss_limit, limit = LIMITS[run["format"].split()[0]]
    far = max(abs(loss - step["one"]) / abs(step["one"]) for step in steps for loss in step["ranks"])
    worst = max(run["gradients"], key=lambda row: row["difference"])
    ok = far <= loss_limit and (limit is None or worst["difference"] <= limit)
    found = f"losses differ by {far:.1e} at most (limit {loss_limit:g}), gradients by {worst['difference']:.1e}"
    found += "" if limit is None else f" (limit {limit:g})"
    found += f", in {worst['name']} on rank {worst['rank']}"
    row = {"ok": ok, "name": f"the layout trains as one process does, in {run['format']}", "text": found}
    facts = dict(format=run["format"], steps=steps, gradients=run["gradients"])
    return facts | dict(far=far, limit=limit, worst=worst, row=row)


def checks(tour: Tour, own: Schedule) -> list[dict]:
    """Compare what was recorded with the rules: each a row with `ok`, its name and what was found."""
    p, rows = tour.cfg.parallel, []

    def add(name: str, wrong: list[str], found: str) -> None:
        rows.append({"ok": not wrong, "name": name, "text": "; ".join(wrong[:3]) or found})

    shards, slices, holds = [], [], holdings(tour)
    for stage, hold in enumerate(holds):
        shards += [f"{x['name']} on stage {stage}" for x in hold["params"] if not covered(x)]
        slices += [
            f"bucket {i} on stage {stage}"
            for i, b in enumerate(hold["buckets"])
            if not contiguous(sorted(b["owners"].values()), b["size"])
        ]
    count = sum(len(hold["params"]) for hold in holds)
    add(
        "the tensor-parallel shards hold each element once",
        shards,
        f"{count} parameters on {len(holds)} pipeline ranks",
    )
    count = sum(len(hold["buckets"]) for hold in holds)
    add("the slices of the optimizer hold each element once", slices, f"{count} gradient buckets")
    first: dict[tuple, dict] = {}  # (pp, tp) -> the trace of its first rank
    replicas = [
        f"ranks {other['rank']} and {trace['rank']}"
        for trace in tour.real
        if (other := first.setdefault((trace["place"]["pp"], trace["place"]["tp"]), trace))["params"] != trace["params"]
    ]
    add("ranks that should hold the same parts do", replicas, f"{len(tour.real)} trained ranks")
    made = make(p.pp, p.vp, own.num_microbatches, p.schedule)
    order = [f"pipeline rank {r}" for r in range(p.pp) if own.ranks[r] != made.ranks[r]]
    add("the actions ran in the order of the schedule", order, f"{sum(map(len, own.ranks)):,} actions")
    rows += schedule_rules(own)
    together = [
        f"{trace['rank']} and {first['rank']}"
        for trace in tour.real
        for first in tour.real
        for axis, group in trace["groups"].items()
        if first["rank"] == group[0] and shared(trace, axis) != shared(first, axis)
    ]
    count = sum(len(trace["records"]) for trace in tour.real)
    add("ranks of a group run the same collectives, in the same order", together, f"{count:,} recorded in one step")
    return rows


def schedule_rules(own: Schedule) -> list[dict]:
    """Check the recorded order itself: that it cannot deadlock, the bubble, and the activations that ranks hold."""
    pp, vp, m, rows = own.pp, own.vp, own.num_microbatches, []
    try:
        timeline = simulate(own, 1.0, 2.0, meets=check(own))
    except (ValueError, AssertionError) as error:
        return [{"ok": False, "name": "the schedule is complete and cannot deadlock", "text": str(error)}]
    rows.append(
        {"ok": True, "name": "the schedule is complete and cannot deadlock", "text": f"{m} microbatches, {pp} ranks"}
    )
    if pp > 1 and m >= pp and (vp == 1 or m % pp == 0):
        rule = (pp - 1) / (3 * m) if own.kind == "zb-h1" else (pp - 1) / (vp * m)
        text = f"{timeline.bubble:.2%} of the work for equal stages, by the formula {rule:.2%}"
        rows.append({"ok": timeline.bubble <= 1.05 * rule, "name": "the bubble is that of its schedule", "text": text})
    if vp == 1:
        held, most = peak_activations(own), [pp if own.kind == "zb-h1" else pp - r for r in range(pp)]
        too_many = [f"rank {r} holds {held[r]}, not {most[r]}" for r in range(pp) if held[r] > most[r]]
        text = "; ".join(too_many) or f"{', '.join(map(str, held))} microbatches by rank"
        rows.append(
            {"ok": not too_many, "name": "ranks hold no more activations than their schedule needs", "text": text}
        )
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
