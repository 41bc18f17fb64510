"""Will a job fit, and how fast will it be? Memory and time by part, pictures, and the fastest layout, on a laptop.

    python tools/plan.py configs/gpt3_175b.yaml --world 128 --device h100
    python tools/plan.py configs/llama31_70b.yaml train.seq_len=4096 --world 64 --device h100 --json
    python tools/plan.py configs/gpt3_175b.yaml train.global_batch_size=4096 --world 2048 --device h100 --search
    python tools/plan.py configs/gpt3_175b.yaml --world 128 --device h100 --draw plan/
    python tools/plan.py configs/gpt3_175b.yaml train.global_batch_size=4096 --world 2048 --device h100 --mtbf-hours 4
    python tools/plan.py configs/gpt3_175b.yaml --world 128 --device h100 --search --sweep world=128,256 \
        --sweep train.global_batch_size=256,512

--search ranks all layouts that fit, for the same global batch, shows what less memory costs, and counts why it rejected
the others. --sweep plans the job for several values of a key, or of the GPUs (world); with --search the best layout of
each. For a job that does not fit it prints the nearest change that would, and exits with status 1. Devices and fabrics:
minitron/planner/devices.json; `benchmarks/ceilings.py --device-file` writes such a table for your own machine. How far
predictions are from measurements: benchmarks/results/calibration.md. --mtbf-hours adds failures to days and
cost, and the best interval between saves; the other inputs are printed with their sources. Jobs of other sizes, in
--sweep and --draw, fail in proportion to their GPUs. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby, product
from pathlib import Path

from minitron.config import cli, rules
from minitron.config.command import Parser, positive
from minitron.config.schema import Config, changed
from minitron.planner import cost, pictures
from minitron.planner.failures import SOURCES, Failures, failures
from minitron.planner.fit import Options, changes, keeps_rules, memory_options, nearest_fit, reached, written
from minitron.planner.machine import DEVICES, SOFTWARE, Machine, choose_machine
from minitron.planner.pictures import MEANINGS
from minitron.planner.plan import Plan, plan
from minitron.planner.search import Found, search
from minitron.planner.work import HIDDEN

TOKENS = 1e12


def main(argv: list[str], load: cli.Load = cli.load) -> None:
    """Run the command. load: reads files and overrides."""
    o = parse(argv)
    machine = choose_machine(o.device, o.fabric, o.software, o.devices)
    if o.sweep:
        rows = list(sweep(o, machine, load))
        print(json.dumps(rows) if o.json else sweep_table(rows, o.tokens))
        return
    given = load(o.config)
    cfg = searchable(given, o.world) if o.search else given
    rules.check(cfg, o.world)
    job = plan(cfg, o.world, machine)
    if o.search:
        found = search(cfg, o.world, machine, o.count)
        if not found.best:
            raise ValueError(nearest_fit(job, given))
        print(json.dumps(search_record(found, job, given, o.tokens)) if o.json else ranking(found, job, given))
        return
    options = memory_options(job) if not job.fits or job.stays_eager else []
    print(json.dumps(record(job, o.tokens) | failure_record(job, o)) if o.json else table(job, o, options))
    if o.draw is not None:
        for path in pictures.draw(job, o.draw, o.tokens, lambda other: goodput(other, o)):
            print(path, file=sys.stderr)
    if not job.fits:
        raise ValueError(nearest_fit(job, given, options))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("config", nargs="+", metavar="CONFIG", help="YAML files and section.key=value, as the trainer takes them")
    add("--world", type=positive(int), required=True, help="GPUs in all")
    add("--device", required=True, help="GPU in the table of devices: h100, h200, a100, ...")
    add("--fabric", help="network in the same table (default: the device's usual one)")
    add("--software", choices=SOFTWARE, default="minitron", help="whose kernels and overlap (default: minitron)")
    add("--devices", type=Path, default=DEVICES, metavar="FILE", help="the table (default: planner/devices.json)")
    add("--tokens", type=positive(float), default=TOKENS, help="tokens of the whole training (default: %(default)g)")
    add("--json", action="store_true", help="print one object instead of a table")
    add("--search", action="store_true", help="rank all layouts")
    add("--count", type=positive(int), default=5, help="layouts that --search shows (default: 5)")
    add("--draw", type=Path, metavar="FOLDER", help="write pictures there: timeline, memory, time, scaling, cost")
    add("--sweep", type=_values, action="append", metavar="KEY=V,V", help="plan each value; KEY is world or a key")
    add("--mtbf-hours", type=positive(float), help="mean time between failures of the job; adds their cost")
    add("--recovery-seconds", type=positive(float), help="seconds from a failure to the first new step")
    add("--save-cost-seconds", type=positive(float), help="seconds of training lost per save")
    add("--save-seconds", type=positive(float), help="seconds until a save is complete")
    o = parser.parse_intermixed_args(argv)
    more = [name for name in SOURCES if getattr(o, name) is not None]
    if more and o.mtbf_hours is None:
        raise ValueError(f"--{more[0].replace('_', '-')} needs the time between failures; give --mtbf-hours, too")
    if o.search and o.mtbf_hours is not None and not o.sweep:
        raise ValueError("--mtbf-hours is of one plan; leave --search out, and give the layout that it found")
    if o.draw is not None and (o.search or o.sweep):
        raise ValueError("--draw shows one plan; leave --search and --sweep out, and give a layout or a value")
    return o


def _values(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if not equals or not all(values.split(",")):
        raise argparse.ArgumentTypeError(f"{text} is not KEY=VALUE,VALUE; as in world=512,1024")
    return key, values.split(",")


# ---- one plan --------------------------------------------------------------------------------------------------------


def record(job: Plan, tokens: float) -> dict:
    """Return what --json prints: seconds and GiB of a rank; the layout as keys of the configuration."""
    p, t, dp = job.cfg.parallel, job.cfg.train, job.cfg.dp(job.world)
    return {
        "step_seconds": job.step_seconds,
        "mfu_percent": job.mfu_percent,
        "memory_gib": job.memory_gib,
        "graph_gib": job.graph_gib,
        "stays_eager": job.stays_eager,
        "room_gib": job.room_gib,
        "fits": job.fits,
        "tokens_per_second": job.tokens_per_second,
        **cost.cost(job, tokens)._asdict(),
        "world": job.world,
        "gpu": job.machine.device.gpu,
        "software": job.machine.software.name,
        "layout": {key: getattr(p, key) for key in ("tp", "pp", "vp", "cp")}
        | {"dp": dp, "micro_batch_size": t.micro_batch_size, "recompute": t.recompute},
        "microbatches": job.cfg.num_microbatches(dp),
        "seconds": {part: job.seconds[part] for part in (*MEANINGS, *HIDDEN)},
        "memory": {part: size / 2**30 for part, size in job.memory.items()},
        "fullest_pipeline_rank": job.fullest,
    }


def layout(cfg: Config, world: int) -> str:
    p, dp = cfg.parallel, cfg.dp(world)
    kind = "" if p.schedule == "1f1b" else f", {p.schedule}"
    style = f" {p.cp_style}" if p.cp > 1 and p.cp_style != "ring" else ""
    whole = ", no sequence parallel" if p.tp > 1 and not p.sequence_parallel else ""
    runs = [(count, len(list(same))) for count, same in groupby(p.layers_per_stage or ())]
    counts = ", ".join(f"{many} x {count}" if many > 1 else str(count) for count, many in runs)
    axes = f"tp {p.tp}, pp {p.pp}{kind}, vp {p.vp}, cp {p.cp}{style}, dp {dp}"
    batch = f"{cfg.num_microbatches(dp)} microbatches of {cfg.train.micro_batch_size}, recompute {cfg.train.recompute}"
    return f"{axes}, {batch}{whole}{f', layers {counts}' if counts else ''}"


def mfu(job: Plan) -> str:
    return "unknown" if job.mfu_percent is None else f"{job.mfu_percent:.2f} %"


def table(job: Plan, o: argparse.Namespace, options: Options) -> str:
    total, seconds, tokens = job.memory.total(), job.step_seconds, o.tokens
    whole = job.cfg.finetune.kind is None or tokens != TOKENS  # no fine-tuning reads so many
    lines = [
        f"{job.world} x {job.machine.device.gpu}: {layout(job.cfg, job.world)}",
        "",
        f"memory {job.memory_gib:8.2f} GiB of {job.room_gib:.1f} on pipeline rank {job.fullest}: "
        f"{'fits' if job.fits else 'does not fit'}",
    ]
    lines += [
        f"  {part:12} {size / 2**30:8.2f} GiB {100 * size / total:5.1f} %" for part, size in job.memory.items() if size
    ]
    if job.graph_gib:
        why = ": no room for that, so they stay eager" if job.stays_eager else ""
        lines.append(f"  and {job.graph_gib:17.2f} GiB more if steps are recorded as CUDA graphs{why}")
    lines += [
        "",
        f"step   {seconds:8.3f} s   MFU {mfu(job)}   {job.tokens_per_second:,.0f} tokens/s"
        + f"   {tokens / job.tokens_per_second / 86400:,.1f} days for {tokens:g} tokens" * whole,
    ]
    for part, meaning in MEANINGS.items():
        hidden = job.seconds[part.replace("_exposed", "_hidden")] if part.endswith("_exposed") else 0.0
        beside = f"   and {hidden:.3f} s hidden" if hidden > 5e-4 else ""
        took = job.seconds[part]
        if took > 5e-4 * seconds or beside:
            lines.append(f"  {part:12} {took:8.3f} s   {100 * took / seconds:5.1f} %   {meaning}{beside}")
    if job.seconds["host"] > 0.01 * seconds:
        lines += ["", f"bound by the host, which launches kernels too slowly: {host_remedy(job)}"]
    if not job.fits or job.stays_eager:
        lines += ["", *memory_keys(job, options)]
    lines += ["", *failure_report(job, o)]
    return "\n".join(lines + [cost.cost_line(job, tokens, goodput(job, o))] * whole).rstrip()


def host_remedy(job: Plan) -> str:
    """Return what shortens a step that waits for its host."""
    if job.stays_eager:
        return "make room for CUDA graphs, by keys below, more GPUs or another layout"
    if job.machine.software.eager:
        return "use larger microbatches, less tensor parallelism, or a faster CPU"
    return "record steps as CUDA graphs, train.cuda_graph=auto"


def memory_keys(job: Plan, options: Options) -> list[str]:
    """List what each key that saves memory saves and costs, the fastest step first."""
    lines = [f"{'GiB':>8} {'saved':>7} {'step s':>9} {'cost':>8}   with"] if options else ["no key saves memory"]
    for keys, other in options:
        slower = f"{100 * (other.step_seconds / job.step_seconds - 1):+.1f} %"
        figures = f"{other.memory_gib:8.2f} {job.memory_gib - other.memory_gib:7.2f} {other.step_seconds:9.3f}"
        gained = (": recorded" if job.fits else ": fits") if reached(job, other) else ""
        lines.append(f"{figures} {slower:>8}   {' '.join(keys)}{gained}")
    return lines


# ---- with failures ---------------------------------------------------------------------------------------------------


def failure_model(job: Plan, o: argparse.Namespace) -> Failures | None:
    """Return what failures do to a plan; None without --mtbf-hours, which is that of --world GPUs."""
    if o.mtbf_hours is None:
        return None
    mtbf = 3600 * o.mtbf_hours * o.world / job.world
    return failures(job.cfg, job.world, mtbf, o.recovery_seconds, o.save_cost_seconds, o.save_seconds)


def goodput(job: Plan, o: argparse.Namespace) -> float:
    """Return the share of the time that becomes steps which count; 1 without failures."""
    hard = failure_model(job, o)
    return 1.0 if hard is None else hard.goodput()


def failure_record(job: Plan, o: argparse.Namespace) -> dict:
    """Return what --json prints of a job that fails; days and GPU-hours are null if it never ends."""
    hard = failure_model(job, o)
    if hard is None:
        return {}
    days, hours = cost.cost(job, o.tokens, hard.goodput())
    figures = {
        **asdict(hard),
        "interval_seconds": hard.interval,
        "interval_steps": max(1, round(hard.interval / job.step_seconds)),
        "goodput": hard.goodput(),
        "days": days if days < math.inf else None,
        "gpu_hours": hours if days < math.inf else None,
    }
    return {"failures": figures}


def failure_report(job: Plan, o: argparse.Namespace) -> list[str]:
    """Describe the same in lines, with the source of each number and the goodput of the configured interval."""
    hard = failure_model(job, o)
    if hard is None:
        return []
    found, every = failure_record(job, o)["failures"], job.cfg.checkpoint.every
    days = "no end" if found["days"] is None else f"{found['days']:,.1f} days"
    head = f"failures every {o.mtbf_hours:g} h: {100 * found['goodput']:.2f} % of the time counts, {days}"
    lines = [
        head + f" for {o.tokens:g} tokens",
        f"  best interval {hard.interval:8.1f} s   checkpoint.every={found['interval_steps']}, or auto, which measures "
        f"the cost of saves, with checkpoint.mtbf_hours={o.mtbf_hours:g}",
    ]
    if isinstance(every, int) and every:
        seconds = every * job.step_seconds
        share = 100 * hard.goodput(seconds)
        lines.append(f"  as configured {seconds:8.1f} s   checkpoint.every={every}: {share:.2f} %")
    for field, source in SOURCES.items():
        name = field.removesuffix("_seconds").replace("_", " ")
        said = source if getattr(o, field) is None else "as given"
        lines.append(f"  {name:13} {getattr(hard, field):8.3g} s   {said}")
    return [*lines, ""]


# ---- a search --------------------------------------------------------------------------------------------------------


def searchable(cfg: Config, world: int, *, quiet: bool = False) -> Config:
    """Return the configuration, with the plainest layout if its own breaks a rule for this world."""
    try:
        rules.check(cfg, world)
    except ValueError as error:
        plainest = dict(tp=1, pp=1, vp=1, cp=1, schedule="1f1b", layers_per_stage=None)
        cfg = changed(cfg, parallel=plainest, train=dict(micro_batch_size=1))
        if not keeps_rules(cfg, world):
            raise
        if not quiet:
            print(f"the given layout breaks a rule: {error}", file=sys.stderr)
    return cfg


def search_record(found: Found, job: Plan, given: Config, tokens: float) -> dict:
    """Return what --search --json prints. given: as the user wrote it; `job` differs if that breaks a rule."""
    return {
        "given": record(job, tokens),
        "best": [record(best, tokens) for best in found.best],
        "changes": [changes(given, best.cfg) for best in found.best],
        "smaller": [record(less, tokens) | {"changes": changes(given, less.cfg)} for less in found.smaller[1:]],
        "others_that_fit": len(found.others),
        "reasons": found.reasons,
    }


def ranking(found: Found, job: Plan, given: Config) -> str:
    """Describe the best layouts, what the first changes, and why the others are not shown."""
    figures = f"{job.step_seconds:.3f} s, MFU {mfu(job)}, {job.memory_gib:.1f} GiB"
    lines = [
        f"given: {layout(job.cfg, job.world)}: {figures}{'' if job.fits else ', does not fit'}",
        "",
        f"{'step s':>8} {'MFU':>8} {'GiB':>6}  layout",
    ]
    lines += [
        f"{p.step_seconds:8.3f} {mfu(p):>8} {p.memory_gib:6.1f}  {layout(p.cfg, p.world)}{', eager' * p.stays_eager}"
        for p in found.best
    ]
    lines += ["", difference(job, found.best[0], changes(given, found.best[0].cfg))]
    for less in found.smaller[1:]:
        slower = 100 * (less.step_seconds / found.best[0].step_seconds - 1)
        keys = " ".join(written(changes(given, less.cfg))) or "as given"
        lines.append(f"with {less.memory_gib:.1f} GiB, {slower:.1f} % slower: {keys}")
    if found.others:
        (cfg, seconds), count = found.others[0], len(found.others)
        next_one = f"the next one takes {seconds:.3f} s or more: {layout(cfg, job.world)}"
        lines.append(f"{count} other layouts fit; {next_one}")
    lines += [f"{count:6} layouts: {reason}" for reason, count in found.reasons.most_common()]
    return "\n".join(lines)


def difference(given: Plan, best: Plan, changed: dict[str, object]) -> str:
    """Describe in one line the keys that differ, and the parts of the step that become longer or shorter."""
    if not changed:
        return "the given layout is the fastest that fits"
    gains = {part: best.seconds[part] - given.seconds[part] for part in MEANINGS}
    parts = sorted((part for part in gains if abs(gains[part]) > 0.002 * given.step_seconds), key=lambda x: gains[x])
    share = 100 * (given.step_seconds / best.step_seconds - 1)
    verdict = f"{abs(share):.1f} % {'faster' if share > 0 else 'slower, but it fits'}"
    return f"{' '.join(written(changed))}: {verdict} ({', '.join(f'{part} {gains[part]:+.3f} s' for part in parts)})"


# ---- several jobs ----------------------------------------------------------------------------------------------------


def sweep(o: argparse.Namespace, machine: Machine, load: cli.Load) -> Iterator[dict]:
    """Plan the job, or with --search its fastest layout, for every combination of values; yield a row of each."""
    for values in product(*(values for _, values in o.sweep)):
        chosen_values = dict(zip((key for key, _ in o.sweep), values))
        keys = [f"{key}={value}" for key, value in chosen_values.items() if key != "world"]
        try:
            world, given = positive(int)(chosen_values.get("world", str(o.world))), load([*o.config, *keys])
            cfg = searchable(given, world, quiet=True) if o.search else given
            rules.check(cfg, world)
            job = plan(cfg, world, machine)
            if o.search:
                found = search(cfg, world, machine, 1, smaller=False)
                job = found.best[0] if found.best else job
        except (ValueError, argparse.ArgumentTypeError) as error:
            yield {"sweep": chosen_values, "error": str(error)}
            continue
        more = {"changes": changes(given, job.cfg), "says": layout(job.cfg, world)}
        yield {"sweep": chosen_values, **record(job, o.tokens), **failure_record(job, o), **more}


def sweep_table(rows: list[dict], tokens: float) -> str:
    failing = ", days and GPU-hours with failures" if any("failures" in entry for entry in rows) else ""
    lines = [f"of {tokens:g} tokens{failing}; layouts that do not fit have a * behind their memory"]
    lines.append(f"{'step s':>8} {'MFU %':>6} {'GiB':>6}  {'tokens/s':>12} {'days':>8} {'GPU-hours':>12}")
    for entry in rows:
        values = " ".join(f"{key}={value}" for key, value in entry["sweep"].items())
        if "error" in entry:
            lines.append(f"{values}: {entry['error']}")
            continue
        days, hours = (entry.get("failures", entry)[name] for name in ("days", "gpu_hours"))
        share = "?" if entry["mfu_percent"] is None else f"{entry['mfu_percent']:.2f}"
        lines.append(
            f"{entry['step_seconds']:8.3f} {share:>6} {entry['memory_gib']:6.1f}{' ' if entry['fits'] else '*'} "
            f"{entry['tokens_per_second']:12,.0f} {_or_endless(days, 8, 1)} {_or_endless(hours, 12, 0)}  "
            f"{values}: {entry['says']}"
        )
    return "\n".join(lines)


def _or_endless(value: float | None, width: int, digits: int) -> str:
    return f"{'no end':>{width}}" if value is None else f"{value:{width},.{digits}f}"
