"""Draw what parallelism does to a model, from a run of it: one HTML page, which needs no network.

    python tools/tour.py configs/quickstart.yaml parallel.tp=2 parallel.pp=2 --output tour.html
    python tools/tour.py gpt3_175b --world 128 --device h100 --output big.html

Up to eight ranks are trained here, on CPU ranks: the configuration itself if it is small, else a twin with the same
layout and switches and smaller sizes. A larger world is drawn from the dry run, and a twin of at most eight ranks, two
along each axis, proves the layout. In every case one process trains the same model, and the page shows the difference.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf, isfinite, prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

import torch

from minitron.config import rules
from minitron.config.batch import final
from minitron.config.command import Parser, positive, run
from minitron.config.files import errors_as
from minitron.config.schema import (
    Config,
    DataConfig,
    FinetuneConfig,
    LogConfig,
    PrecisionConfig,
    ProfileConfig,
    changed,
)
from minitron.interop.base import load
from minitron.planner.dryrun.trace import block_events, dry_trace, held, real_trace
from minitron.planner.machine import DEVICES, Machine, choose_machine
from minitron.planner.page import Tour, few_microbatches, html, judged
from minitron.testing import RankPool

MOST_RANKS = 8  # that are trained here
SMALL = dict(num_layers=8, hidden_size=256, ffn_hidden_size=1024, vocab_size=8192)  # a model that is trained as it is
TOKENS = 16384  # of its global batch, at most
# Relative differences of losses and gradients by rounding alone. FP8's casts move small gradients far: no limit.
LIMITS = {"fp32": (1e-4, 1e-4), "fp16": (2e-2, 0.1), "bf16": (2e-2, 0.2), "FP8": (5e-2, None)}
Start = Callable[..., list]  # start(world, function, *arguments): what each rank returned


def main(argv: list[str]) -> None:
    o = parse(argv)
    cfg = load(o.config)
    world = o.world or cfg.parallel.tp * cfg.parallel.pp * cfg.parallel.cp
    rules.check(cfg, world)
    machine = choose_machine(o.device, None, path=DEVICES) if o.device else None
    unwritable = f"--output {o.output} cannot be written"
    with errors_as(ValueError, lambda error: f"{unwritable} ({error}); name another file", OSError):
        is_new = not o.output.exists()
        o.output.open("a").close()
        if is_new:  # a run that fails leaves no empty page
            o.output.unlink()
    with RankPool(preload=(real_trace.__module__,)) as pool:
        gc.freeze()  # and below: imports and recordings stay, so no collection needs to go through them
        tour = collect(cfg, world, machine, pool.run, " ".join(o.config))
    gc.freeze()
    page = html(tour)
    with errors_as(ValueError, lambda error: f"{unwritable} ({error}); name another file", OSError):
        o.output.write_text(page, encoding="utf-8")
    print(f"Tour: {o.output} (open it in a browser)")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("config", nargs="*", metavar="CONFIG", help="YAML files and section.key=value, as the trainer takes them")
    add("--world", type=positive(int), help="ranks in all (default: tp x pp x cp)")
    add("--device", help="of the planner's table: h100, ...; adds its memory limit, and the times of stages")
    add("--output", type=Path, required=True, metavar="FILE", help="the page, HTML")
    return parser.parse_intermixed_args(argv)


def collect(cfg: Config, world: int, machine: Machine | None, start: Start, name: str = "") -> Tour:
    """Run what the page shows. start: starts a function on so many ranks, as `RankPool.run`."""
    cfg = final(cfg)  # a batch size that grows has its last value here
    twin, twin_world = small_twin(cfg, world)
    with ThreadPoolExecutor(1) as beside:
        proof = beside.submit(prove, twin, twin_world, start)
        few, stage, pp = few_microbatches(cfg, world), world // cfg.parallel.pp, cfg.parallel.pp
        last = {pp - 1} if cfg.parallel.schedule == "zb-h1" else set()  # rank 0 splits no backward
        listed = range(pp) if world <= MOST_RANKS else sorted({0} | last)
        dry = {rank: dry_trace(few, world, rank * stage) for rank in listed}
        holds = [dry[rank] if rank in dry else held(few, world, rank * stage) for rank in range(pp)]
        costs = recompute_costs(cfg)
        real, proofs = proof.result()
    as_it_is = twin.model == cfg.model and twin.train == cfg.train and twin_world == world
    return Tour(name, cfg, world, machine, twin, twin_world, as_it_is, real, dry, holds, costs, proofs)


def prove(twin: Config, world: int, start: Start) -> tuple[list[dict], list[dict]]:
    """Train the twin and one process; return the traces, and by number format losses and differences of gradients."""
    exact = replace(twin, precision=PrecisionConfig(dtype="fp32"))
    exact = changed(exact, optimizer=dict(grad_dtype="fp32", accumulate_dtype=None, reduce_dtype=None))
    proofs, traces = [], []
    for cfg in [twin] if twin.precision.dtype == "fp32" else [twin, exact]:
        one = dict(tp=1, pp=1, vp=1, cp=1, schedule="1f1b", layers_per_stage=None)
        layout, (alone,) = start(world, real_trace, cfg), start(1, real_trace, changed(cfg, parallel=one))
        traces = traces or layout
        number_format = f"FP8 ({cfg.precision.fp8})" if cfg.precision.fp8 != "none" else cfg.precision.dtype
        figures = [trace["figures"] for trace in layout]
        proofs.append(compared(number_format, figures, alone["figures"], differences(layout, alone)))
    return traces, proofs


def differences(traces: list[dict], alone: dict) -> list[dict]:
    """Compare the gradients of a layout's ranks with those of one process: for each parameter the relative difference.

    Norms over all copies. rank: which one differs most. missing: elements whose gradient no rank owns (below 0: several
    own it). A gradient that one process lacks is NaN, and so is its difference.
    """
    trained = {p["name"]: p["shape"] for p in alone["params"] if p["bucket"] is not None}
    whole = {name: torch.full((prod(shape),), torch.nan) for name, shape in trained.items()}
    for name, offset, part in alone["gradients"]:
        whole[name][offset : offset + len(part)] = part
    local = {
        (p["name"], trace["place"]["pp"], trace["place"]["tp"]): prod(p["local"])
        for trace in traces
        for p in trace["params"]
    }
    found: dict[str, dict] = {name: {"square": 0.0, "rank": 0, "most": 0.0, "norm": 0.0, "count": 0} for name in whole}
    for trace in traces:
        params = {p["name"]: p for p in trace["params"]}
        for name, offset, part in trace["gradients"]:
            param, row = params[name], found[name]
            expected = whole[name].view(param["shape"])
            if param["dim"] is not None:
                cuts = param["slices"][trace["place"]["tp"]]
                expected = torch.cat([expected.narrow(param["dim"], full, n) for _, full, n in cuts], param["dim"])
            expected = expected.reshape(-1)[offset : offset + len(part)]
            square = float((part - expected).double().square().sum())
            row["square"] += square
            row["norm"] += float(expected.double().square().sum())
            row["count"] += len(part)
            if not square <= row["most"]:  # also if it is not a number
                row["most"], row["rank"] = square, trace["rank"]
    return [
        {
            "name": name,
            "difference": (row["square"] / (row["norm"] or 1e-30)) ** 0.5,
            "rank": row["rank"],
            "missing": (sum(n for key, n in local.items() if key[0] == name) or prod(trained[name])) - row["count"],
        }
        for name, row in found.items()
    ]


def largest(values: Iterable[float]) -> float:
    """Return the largest value; one that is not finite is larger than all, and so is the lack of any."""
    return max(values, key=lambda x: x if isfinite(x) else inf, default=inf)


def compared(name: str, layout: list[list[dict]], alone: list[dict], gradients: list[dict]) -> dict:
    """Judge losses and gradients of one number format, with limits that come from its rounding.

    layout: of each rank the figures of its steps. alone: those of one process. gradients: see `differences`.
    """
    steps = [
        {key: [one[key], *(rank[i][key] for rank in layout)] for key in ("loss", "grad_norm")}
        for i, one in enumerate(alone)
    ]
    loss_limit, limit = LIMITS[name.split()[0]]
    far, norm = (
        largest(abs(x - one) / max(abs(one), 1e-30) for step in steps for one, *ranks in [step[key]] for x in ranks)
        for key in ("loss", "grad_norm")
    )
    none = {"name": "no parameter", "rank": 0, "difference": inf}  # if all steps were skipped
    worst = max(gradients, key=lambda row: row["difference"] if isfinite(row["difference"]) else inf, default=none)
    missing = [row["name"] for row in gradients if row["missing"]]
    sound = not missing and isfinite(worst["difference"]) and isfinite(norm)
    within = None if limit is None else max(worst["difference"], norm) <= limit
    casts = "FP8's casts move small gradients far; float32 proves the layout"
    limits = f"no limit: {casts}" if limit is None else f"limit {limit:g}"
    place = f"in {worst['name']} on rank {worst['rank']}"
    text = f"they differ by {worst['difference']:.1e} at most, {place}, and their norm by {norm:.1e} ({limits})"
    text = f"no rank has the whole gradient of {', '.join(missing[:3])}" if missing else text
    found = f"they differ by {far:.1e} of their size at most (limit {loss_limit:g})"
    rows = [
        judged(f"losses are those of one process, in {name}", far <= loss_limit, found),
        judged(f"gradients are those of one process, in {name}", within if sound else False, text),
    ]
    facts = dict(format=name, steps=steps, gradients=gradients)
    return facts | dict(far=far, limit=limit, worst=worst, rows=rows)


def recompute_costs(cfg: Config) -> list[dict]:
    """For each way to recompute, run one block alone on the meta device: bytes kept, and the products done again."""
    alone, costs = dict(pp=1, vp=1, schedule="1f1b", layers_per_stage=None), []
    for kind in ("none", "selective", "full"):
        train = dict(recompute=kind, global_batch_size=cfg.train.micro_batch_size)
        one = changed(cfg, model=dict(num_layers=1), parallel=alone, train=train, precision=dict(fp8_bf16_layers=0))
        events = block_events(dry_trace(one, cfg.parallel.tp * cfg.parallel.cp, 0)["events"])
        flops = {again: sum(e.get("flops", 0) for e in events if e.get("again") == again) for again in (False, True)}
        kept = sum(e["bytes"] for e in events if e["kind"] == "keep")
        costs.append({"kind": kind, "kept": kept, "again": flops[True] / flops[False]})
    return costs


def small_twin(cfg: Config, world: int) -> tuple[Config, int]:
    """Return a configuration with the same layout and switches that CPU ranks train in seconds, and its ranks.

    More than MOST_RANKS ranks become at most two along each axis, of as many axes as fit.
    """
    p, m, t, left = cfg.parallel, cfg.model, cfg.train, MOST_RANKS
    sizes = dict(tp=p.tp, pp=p.pp, cp=p.cp, dp=cfg.dp(world))
    if world > MOST_RANKS:
        for axis, size in sizes.items():
            sizes[axis] = 2 if size > 1 and left > 1 else 1
            left //= sizes[axis]
    tp, pp, cp, dp = sizes.values()
    vp = p.vp if world <= MOST_RANKS else min(p.vp, 2) if pp > 1 else 1
    count = cfg.num_microbatches(cfg.dp(world))
    small = world <= MOST_RANKS and all(getattr(m, key) <= most for key, most in SMALL.items())
    if not small or t.global_batch_size * t.seq_len > TOKENS:
        unit, kept = 128 if cfg.precision.fp8 == "block" else 16, cfg.precision.fp8_bf16_layers
        heads, width = tp * (cp if p.cp_style == "ulysses" else 1), 64 if unit == 128 else 16
        grouped, piece, micro = m.kv_heads < m.num_heads, m.head_piece, min(t.micro_batch_size, 2)
        hidden = 2 * heads * width
        layers = pp * vp * -(-max(2, 2 * min(kept, 1) + 1) // (pp * vp))
        model = dict(num_layers=layers, num_heads=2 * heads, num_kv_heads=heads if grouped else None)
        model |= dict(hidden_size=hidden, ffn_hidden_size=2 * hidden, vocab_size=500, vocab_multiple=unit * tp)
        train = dict(seq_len=(length := max(64, 2 * unit * cp * tp)), micro_batch_size=micro)
        train |= dict(global_batch_size=micro * dp * min(count, max(2 * pp, 4)))
        model |= dict(max_positions=length, head_piece=None if piece is None else 8 * tp)
        cfg = changed(cfg, model=model, train=train, parallel=dict(layers_per_stage=None))
        cfg = changed(cfg, precision=dict(fp8_bf16_layers=min(kept, 1)))
    schedule = p.schedule if pp > 1 else "1f1b"
    here = dict(attention=m.attention if m.attention == "reference" else "auto")
    cfg = changed(cfg, parallel=dict(tp=tp, pp=pp, cp=cp, vp=vp, schedule=schedule), model=here)
    backend = "te" if cfg.precision.fp8 == "none" else "torch"
    cfg = changed(cfg, precision=dict(fp8_backend=backend), train=dict(kernels="auto"))
    data = DataConfig(source="mock", separate_documents=cfg.data.separates)
    finetune = FinetuneConfig(kind=cfg.finetune.kind)
    cfg = replace(cfg, data=data, finetune=finetune, log=LogConfig(), profile=ProfileConfig())
    return cfg, tp * pp * cp * dp


if __name__ == "__main__":
    run(main)
