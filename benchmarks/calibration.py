"""How far the planner's predictions are from measurements: `python benchmarks/calibration.py [--fit]`.

Three kinds of rows: minitron's own runs and Megatron-core's beside them, from the records of kind "compare" in
results.jsonl (of each case the newest); single ranks of large jobs, alone on a GPU, from those of kind "one_rank"; and
what NVIDIA, Google, Juelich and Meta published, from published.json. Writes calibration.md beside the results, and
calibration.json for the planner: measured over predicted seconds of the held-out rows by GPU, without those that the
host bounds.

A configuration is fitted or held out, at all of its scales. `--fit` first finds the constants that no kernel alone
tells, and writes them to devices.json:

    in_step                  on own runs of one GPU
    copy_felt, piece_felt    on own runs of two and four GPUs

by the least sum of squared relative errors, one constant after another until none moves. All devices get the same
in_step, all fabrics the same share. Nothing is fitted on a published run, on Megatron, or on a single rank.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

from benchmarks import record
from benchmarks.cases import CASES
from minitron.planner.machine import DEVICES, SOFTWARE, Device, Fabric, Machine, read_machines
from minitron.planner.plan import Plan, Step, plan
from minitron.planner.published import configuration, published_steps
from minitron.planner.work import HIDDEN

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "results.jsonl"
STEPS = {"in_step": 0.005, "copy_felt": 0.05, "piece_felt": 0.05}  # of the search, and its grid
ROUNDS = 10  # each kind of row has its own error to make small, so that the two could chase each other


@dataclass(frozen=True)
class Row:
    """A measurement. fitted: which constants of `--fit` it decides, "device" or "fabric"; "": none.

    products: seconds of the first rank's matrix products, timed alone. floor_share: theirs and attention's of the step.
    kernel_seconds: the step's seconds divided by the kernels of its graph.
    """

    name: str
    gpus: int
    arguments: tuple[str, ...]
    device: str
    seconds: float
    gib: float | None = None
    products: float | None = None
    fabric: str | None = None
    fitted: str = ""
    floor_share: float | None = None
    kernel_seconds: float | None = None
    software: str = "megatron"
    source: str = ""

    @property
    def host_bound(self) -> bool:
        """Whether products and attention leave the GPU idle for a third of the step: hosts differ by more than GPUs."""
        return self.floor_share is not None and self.floor_share < 2 / 3

    @property
    def short_kernels(self) -> bool:
        """Whether gaps are a large share of the step. They were measured between kernels ten times as long as this."""
        return self.kernel_seconds is not None and self.kernel_seconds < 2e-5

    @property
    def kind(self) -> str:
        if self.software == "minitron":
            return "own"
        return "Megatron-core beside them" if self.name.startswith(BESIDE) else "published"


BESIDE = "Megatron-core, "  # how rows of a peer beside our own begin
Machines = tuple[dict[str, Device], dict[str, Fabric]]


def own_rows(path: Path) -> list[Row]:
    """Of each case, precision and GPU the newest record; those of a CPU or of a case that is no more are left out."""
    found = {}
    for one in record.rows(path):
        case = CASES.get(re.sub("-(bf16|fp8)$", "", one.get("case", "")))
        if one["kind"] == "compare" and case and (gpu := device_of(one)):
            found[one["case"], gpu] = row = Row(
                one["case"],
                case.gpus,
                (*case.arguments(one["fp8"]), f"optimizer.grad_dtype={record.gradients(one['ours'])}"),
                gpu,
                one["ours"]["step_seconds"],
                one["ours_gib"],
                one["ours"].get("floor_gemm_seconds"),
                fitted=("device" if case.gpus == 1 else "fabric") if gpu == "h200" else "",
                floor_share=one["ours"].get("floor_share"),
                kernel_seconds=one["ours"]["step_seconds"] / nodes if (nodes := one["ours"].get("nodes")) else None,
                software="minitron",
            )
            if row.host_bound or row.short_kernels:
                found[one["case"], gpu] = replace(row, fitted="")
            if one["peer"] == "megatron" and one["peer_figures"]:
                mode = (one.get("mode") or "eager").split("+")
                overlaps = "tp-overlap" in mode  # it has user buffers then
                found["Megatron", one["case"], gpu] = replace(
                    row,
                    name=f"{BESIDE}{one['case']}",
                    arguments=(*row.arguments, f"parallel.overlap_tp={str(overlaps).lower()}"),
                    seconds=one["peer_figures"]["step_seconds"],
                    gib=one["peer_gib"],
                    products=None,
                    floor_share=None,
                    fitted="",
                    software="megatron-graph" if "graph" in mode else "megatron",
                )
    return list(found.values())


def published_rows() -> list[Row]:
    return [Row(**step._asdict()) for step in published_steps()]


def predict(row: Row, machines: Machines) -> Plan:
    device = known(row.device, row.name, machines)
    machine = Machine(device, machines[1][row.fabric or device.fabric], SOFTWARE[row.software])
    return plan(configuration(row.arguments), row.gpus, machine)


def known(device: str, run: str, machines: Machines) -> Device:
    if device not in machines[0]:
        raise ValueError(f"{run} ran on {device}, of which {DEVICES.name} knows nothing; add its constants")
    return machines[0][device]


def alone(machine: Machine) -> Machine:
    """The machine of a rank whose partners are made up (one_rank.py): messages are copies on its own GPU, which hide
    behind nothing, and no card and no other GPU is waited for."""
    rate = machine.device.copy_tb_s * 1000 / 2
    links = {
        "nvlink_gb_s": rate,
        "copy_gb_s": rate,
        "network_gb_s": rate,
        "cards_per_node": 10**6,
        "copy_felt": 1.0,
        "felt": 0.0,
    }
    return replace(machine, fabric=replace(machine.fabric, **links, nvlink_seconds=0.0, network_seconds=0.0))


def rank_seconds(one: dict, machines: Machines) -> float:
    """Predict the step of a record of one_rank.py: its microbatches and its update, without any other rank."""
    arguments = (f"configs/{one['recipe']}.yaml", *one["keys"], f"optimizer.grad_dtype={record.gradients(one)}")
    cfg, world = configuration(arguments), one["world"]
    software = SOFTWARE["minitron" if one["replayed"] else "minitron-eager"]
    device = known(device_of(one), one["recipe"], machines)
    named = re.search(r"--fabric (\S+)", one["command"])  # how many GPUs a node has
    fabric = machines[1][named[1] if named else device.fabric]
    step = Step(cfg, world, alone(Machine(device, fabric, software)))
    pp = cfg.parallel.pp
    rank = one["rank"] * pp // world
    of_one = sum(
        seconds
        for pair in step.parts[rank::pp]
        for parts in pair
        for part, seconds in parts.items()
        if part not in HIDDEN or part == "cp_hidden"
    )
    return one["microbatches"] * of_one + step.update_seconds(rank)


def single_ranks(records: list[dict]) -> list[dict]:
    """The newest record of every rank that was measured alone, on each kind of GPU."""
    found = {}
    for one in records:
        if one["kind"] == "one_rank" and device_of(one):
            identity = (device_of(one), *(str(one[key]) for key in ("recipe", "keys", "world", "rank", "replayed")))
            found[identity] = one
    return sorted(found.values(), key=device_of)


def device_of(one: dict) -> str | None:
    """The planner's name of a record's GPU; None of a CPU."""
    gpu = re.search(r"[HAB]\d00", one["gpu"] or "")
    return gpu and gpu[0].lower()


# ---- the fit ---------------------------------------------------------------------------------------------------------


def fit(rows: list[Row], machines: Machines) -> Machines:
    """The machines with the constants of STEPS that suit the fitted rows best: devices and fabrics in turn, until
    neither moves, or ROUNDS times."""
    for _ in range(ROUNDS):
        before = machines
        for section, kind, names in ((0, "device", ("in_step",)), (1, "fabric", ("copy_felt", "piece_felt"))):
            deciding = [row for row in rows if row.fitted == kind]
            if not deciding:
                raise ValueError(
                    f"there is no row to fit the constants of a {kind} on; run benchmarks/compare.py first"
                )
            values = {name: getattr(next(iter(machines[section].values())), name) for name in names}
            machines = _with(machines, section, descend(partial(_squares, deciding, machines, section), values))
        if machines == before:
            break
    return machines


def _squares(rows: list[Row], machines: Machines, section: int, values: dict[str, float]) -> float:
    machines = _with(machines, section, values)
    return sum((predict(row, machines).step_seconds / row.seconds - 1) ** 2 for row in rows)


def descend(error: Callable[[dict], float], values: dict[str, float]) -> dict[str, float]:
    """One value after another, a step of STEPS up or down, until none makes the error smaller; all stay in (0, 1]."""
    best, moved = error(values), True
    while moved:
        moved = False
        for name in values:
            for sign in (1, -1):
                other = values | {name: round(values[name] + sign * STEPS[name], 6)}
                if 0 < other[name] <= 1 and (found := error(other)) < best:
                    values, best, moved = other, found, True
    return values


def _with(machines: Machines, section: int, values: dict[str, float]) -> Machines:
    changed = {name: replace(one, **values) for name, one in machines[section].items()}
    return (changed, machines[1]) if section == 0 else (machines[0], changed)


def store(machines: Machines, path: Path) -> None:
    """The fitted constants into the file; its lines stay as they are."""
    text = path.read_text(encoding="utf-8")
    for section in machines:
        for name in STEPS:
            value = getattr(next(iter(section.values())), name, None)
            if value is not None:
                text = re.sub(rf'"{name}": [\d.e-]+', f'"{name}": {value:g}', text)
    path.write_text(text, encoding="utf-8")


# ---- the table -------------------------------------------------------------------------------------------------------

Predicted = list[tuple[Row, Plan]]


def markdown(planned: Predicted, records: list[dict], machines: Machines) -> str:
    """The method, then a line a row: held out first; then errors by group, and what each constant weighs."""
    lines, rows = ["# Predicted against measured", "", _method(machines)], [row for row, _ in planned]
    for title, chosen in (
        ("Held out", [(row, job) for row, job in planned if not row.fitted]),
        ("Fitted", [(row, job) for row, job in planned if row.fitted]),
    ):
        lines += [
            "",
            f"## {title}",
            "",
            "| run | device | GPUs | predicted s | measured s | error | predicted GiB | measured GiB | error |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row, job in chosen:
            name = f"{row.name}, bound by the host" if row.host_bound else row.name
            lines.append(
                f"| {name} | {row.device} | {row.gpus} | {job.step_seconds:.3f} | {row.seconds:.3f} | "
                f"{_error(job.step_seconds, row.seconds)} | {job.memory_gib:.1f} | "
                + (f"{row.gib:.1f} | {_error(job.memory_gib, row.gib)} |" if row.gib else "| |")
            )
        for kind in dict.fromkeys(row.kind for row, _ in chosen):
            mine = [(row, job) for row, job in chosen if row.kind == kind]
            lines += summary(f"{kind}, step times", [_off(pair) for pair in mine if not pair[0].host_bound])
            lines += summary(f"{kind}, memory", [job.memory_gib / row.gib - 1 for row, job in mine if row.gib])
    lines += by_group(planned) + validated(records) + one_rank_table(single_ranks(records), machines)
    lines += products_alone(rows, machines)
    return "\n".join(lines + sensitivity(rows, machines) + sources(rows)) + "\n"


def held_out(planned: Predicted) -> dict[str, list[float]]:
    """Measured over predicted seconds of the held-out rows that no host bounds, by GPU."""
    ratios: dict[str, list[float]] = {}
    for row, job in planned:
        if not row.fitted and not row.host_bound:
            ratios.setdefault(row.device.partition("-")[0], []).append(round(row.seconds / job.step_seconds, 4))
    return ratios


def _off(pair: tuple[Row, Plan]) -> float:
    return pair[1].step_seconds / pair[0].seconds - 1


def summary(what: str, errors: list[float]) -> list[str]:
    if not errors:
        return []
    size, bias = (100 * sum(map(f, errors)) / len(errors) for f in (abs, float))
    largest = 100 * max(errors, key=abs)
    text = (
        f"largest error {largest:+.1f} %, mean of the magnitudes {size:.1f} %, mean {bias:+.1f} %, {len(errors)} rows."
    )
    return ["", f"{what[0].upper() + what[1:]}: {text}"]


def by_group(planned: Predicted) -> list[str]:
    """Errors of published configurations (each the mean of its scales), and by what a reader may have in common."""
    published = [pair for pair in planned if pair[0].kind == "published"]
    configurations: dict[tuple, list] = {}
    for pair in published:
        configurations.setdefault(of_configuration(pair[0]), []).append(pair)
    lines = ["", "## Published, by configuration and by kind", "", "A configuration counts once, with the mean of its "]
    lines[-1] += "errors at all its scales and in all releases; nothing is fitted on any of them."
    for title, chosen in (("H100", "h100"), ("A100", "a100")):
        means = [
            sum(map(_off, pairs)) / len(pairs) for pairs in configurations.values() if pairs[0][0].device[:4] == chosen
        ]
        lines += summary(f"{title}, configurations", means)
    lines += ["", "| published, by | rows | mean error | mean of the magnitudes | largest |", "|---|---|---|---|---|"]
    keys: dict[str, Callable[[Row, Plan], str]] = {
        "device": lambda row, _: row.device,
        "tp": lambda _, job: f"tp {job.cfg.parallel.tp}",
        "precision": lambda _, job: "bf16" if job.cfg.precision.fp8 == "none" else "FP8",
        "task": lambda row, _: "fine-tuning" if "SFT" in row.name or "LoRA" in row.name else "pretraining",
        "scale": lambda row, _: f"{'up to 64' if row.gpus <= 64 else 'up to 512' if row.gpus <= 512 else 'more'} GPUs",
    }
    for key, of in keys.items():
        groups: dict[str, list[float]] = {}
        for pair in published:
            groups.setdefault(of(*pair), []).append(_off(pair))
        for group, errors in sorted(groups.items()):
            size, bias = (100 * sum(map(f, errors)) / len(errors) for f in (abs, float))
            largest = f"{100 * max(errors, key=abs):+.1f} %"
            lines.append(f"| {key}: {group} | {len(errors)} | {bias:+.1f} % | {size:.1f} % | {largest} |")
    return lines


def of_configuration(row: Row) -> tuple[str, ...]:
    """What rows of one configuration have in common: the device and all keys but the batch, which grows with GPUs."""
    kept = (argument for argument in row.arguments if not argument.startswith("train.global_batch_size="))
    return (row.device, *sorted(dict.fromkeys(kept)))


def validated(records: list[dict]) -> list[str]:
    """What validate.sh found, the planner's figures as they were then."""
    found = [one for one in records if one["kind"] == "validate" and one["gpu"]]
    lines = [
        "",
        "## By `benchmarks/validate.sh`",
        "",
        "Each job was planned before it ran, with the constants of its time.",
    ]
    lines += ["", "| job | device | GPUs | predicted s | measured s | error | predicted GiB | measured GiB | error |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for one in found:
        cells = [one["case"], one["device"], str(one["gpus"])]
        for unit, digits in (("seconds", 3), ("gib", 1)):
            predicted, measured = (one[f"{which}_{unit}"] for which in ("predicted", "measured"))
            cells += [f"{predicted:.{digits}f}", f"{measured:.{digits}f}", _error(predicted, measured)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines if found else []


def one_rank_table(ranks: list[dict], machines: Machines) -> list[str]:
    """Steps of one rank alone, without traffic; eager ones say how far hosts differ."""
    if not ranks:
        return []
    lines = ["", "## One rank alone", "", "Of jobs whose other ranks were made up; none is fitted. Eager steps in FP8 "]
    lines[-1] += "wait for the host, and the planner knows one: that which ran `benchmarks/host.py`."
    lines += [""]
    lines += ["| rank | device | format | steps | predicted s | measured s | error |", "|---|---|---|---|---|---|---|"]
    errors: dict[str, list[float]] = {"recorded": [], "eager": []}
    for one in ranks:
        predicted, measured = rank_seconds(one, machines), one["step_seconds"]
        name = f"{record.named(one['recipe'], one['keys'])}, {one['rank']} of {one['world']}"
        kind = one["dtype"] if one["fp8"] == "none" else f"FP8 {one['fp8']}"
        how = "recorded" if one["replayed"] else "eager"
        line = f"| {name} | {device_of(one)} | {kind} | {how} | {predicted:.3f} | {measured:.3f} |"
        lines.append(f"{line} {_error(predicted, measured)} |")
        errors[how].append(predicted / measured - 1)
    return lines + [line for how in errors for line in summary(f"single ranks, {how} steps", errors[how])]


def sensitivity(rows: list[Row], machines: Machines) -> list[str]:
    """What 10 % more of a constant, on all devices or fabrics, changes in the predictions."""
    lines = [
        "",
        "## What each constant weighs",
        "",
        "The mean and the largest change of predicted steps if the constant",
    ]
    lines[-1] += " is 10 % larger everywhere; * is fitted, all others are measured alone or of the source in "
    lines[-1] += "`devices.json`."
    lines += ["", "| constant | on h200 | own runs | published | largest |", "|---|---|---|---|---|"]
    # Of each configuration the first scale; schedules of more than 5,000 stages and microbatches take minutes.
    of_each = (row for row in reversed(rows) if row.fitted or row.kind == "published" and depth(row) < 5000)
    smallest = {of_configuration(row): row for row in of_each}
    before = {row: predict(row, machines).step_seconds for row in smallest.values()}
    for section, of in ((0, Device), (1, Fabric)):
        for field in fields(of):
            if field.type == "str" or field.name in ("memory_gib", "context_gib", "gpus_per_node", "cards_per_node"):
                continue
            changed = tuple(
                {name: _larger(one, field.name) for name, one in table.items()} if i == section else table
                for i, table in enumerate(machines)
            )
            change = {row: predict(row, changed).step_seconds / seconds - 1 for row, seconds in before.items()}
            means = [
                f"{100 * sum(mine) / len(mine):+.2f} %" if mine else ""
                for mine in ([x for row, x in change.items() if (row.kind == kind)] for kind in ("own", "published"))
            ]
            value = getattr(machines[section]["h200" if section == 0 else "ndr400"], field.name)
            name = f"{field.name}{'*' if field.name in STEPS else ''}"
            told = ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, dict) else f"{value:g}"
            largest = f"{100 * max(change.values(), key=abs):+.2f} %"
            lines.append(f"| {name} | {told} | {means[0]} | {means[1]} | {largest} |")
    return lines


def depth(row: Row) -> int:
    """Count the forwards of a step: stages times microbatches."""
    cfg = configuration(row.arguments)
    return cfg.parallel.pp * cfg.parallel.vp * cfg.num_microbatches(cfg.dp(row.gpus))


def _larger(one: Device | Fabric, name: str) -> Device | Fabric:
    value = getattr(one, name)
    larger = {k: 1.1 * v for k, v in value.items()} if isinstance(value, dict) else 1.1 * value
    return replace(one, **{name: round(larger) if name == "processors" else larger})


def sources(rows: list[Row]) -> list[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.source:
            found.setdefault(row.source, []).append(row.name)
    lines = [f"- {source}: {'; '.join(dict.fromkeys(names))}." for source, names in found.items()]
    return ["", "## Sources of published rows", "", *lines] if lines else []


def products_alone(rows: list[Row], machines: Machines) -> list[str]:
    """A table of the own runs in which every rank has the whole depth, and so the same products."""
    lines = [
        "",
        "## Products alone",
        "",
        "The matrix products of a step, one by one and nothing beside them: what the constants of products are worth.",
        "",
        "| run | predicted s | measured s | error |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if row.products and configuration(row.arguments).parallel.pp == 1:
            job = predict(row, machines)
            alone = job.seconds["gemm"] * job.machine.device.in_step
            lines.append(f"| {row.name} | {alone:.3f} | {row.products:.3f} | {_error(alone, row.products)} |")
    return lines


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %"


METHOD = """\
Written by `python benchmarks/calibration.py`; no figure in a table is typed in. Constants:
`minitron/planner/devices.json`.

- Measured alone on an H200: products, attention, copies, NVLink, and what launching a kernel takes the host; on an
  H100: products, attention and copies, while the rest but the host is the H200's. Kernels of a block were counted on
  single ranks. The A100 is scaled by data sheets and others' measurements, and networks between nodes are data sheets'
  or assumed; each source says which.
- Fitted, three constants: in_step {in_step:g}, the rate of kernels in a step over that alone, on own runs of one H200,
  for all devices; and the share of a hidden copy's time by which what runs beside it takes longer: copy_felt {copy:g}
  of gradients and parameters, piece_felt {piece:g} of tensor parallelism, on own runs of two and four GPUs, for all
  fabrics. Only minitron copies so; NCCL's share, `felt`, is that of the multiprocessors it takes. Nothing is fitted on
  memory.
- Held out: every published run at all scales, Megatron-core beside our own, single ranks, own runs of an H100 and those
  that are bound by the host.
- Not blind: some choices were made after published rows had been seen. NCCL's share `felt` is that of its
  multiprocessors and not one fitted with the copies', which was tried and made published errors larger; Meta's rows are
  planned without overlap of tensor parallelism; Megatron's user buffers launch no piece of their own from the host;
  that a kernel costs a gap was seen on single ranks with published steps beside them; the recipes of NeMo 24.07's GPT-3
  rows, which have dropout and gradients in bf16, were looked up because the smallest was planned too fast; and what
  Megatron's update, embedding and loss move was read in its source because its rows beside our own were planned too
  fast. Then the published jobs' own files were read for such keys. The rows of dgxc-benchmarking v25.02 of GPT-3 and
  70B, but for two of 128 GPUs, were added after all this, and changed nothing. Then 45 configurations more were found
  and planned at once, to see: they were 8.4 % off on average, and 3.3 % without the eleven whose software had flash
  attention 2 (NeMo 24.01 and 24.03, up to -39 % at a million positions). That bought its rate, at first from a figure
  of others, then measured, and with it what dropout of attention costs, which the files of all GPT-3 rows set; the
  gradients' format in Transformer Engine's ring, from its source; and the keys of 70B's LoRA, from its file. And it
  showed that messages of interleaved stages did not hide, in minitron's schedule as in the plan of Megatron's: now they
  do in both. The rows of MLPerf 4.1 and 5.0 and of fms-fsdp were added last, and changed nothing.

A plan is of a software. Own rows are planned as `minitron`, published ones and Megatron-core's as `megatron`: its and
Transformer Engine's kernels, steps that the host launches, user buffers where tensor parallelism overlaps. Where
Megatron-core replayed its iterations as CUDA graphs, it is planned as `megatron-graph`: the same without the host.
Fine-tuning rows are the recipes' random documents of at most 512 tokens, packed: what the published runs held is not
known, and own ones of before 2026-11-23 ran them by flash attention 2, some 3 % of a step slower than the kernel that
is planned. Attention is that of the kernel that a job's files name: flash attention 2 in dgxc-benchmarking v24.11.1
(its launch.sh of GPT-3), in NeMo's launcher before 24.09 but for GPT-3 175B in FP8 (its config.yaml), and taken for
Meta's, whose runs were over before PyTorch had a faster one; cuDNN's in all others. Meta's stages of a rank are not
published: four are planned. Its software is none of these, and its TFLOP/s are taken to count all scores. Where a row
has no measured memory, the predicted one is that of minitron in this layout, and above the device's room it would need
`train.recompute`. Measured memory is torch's own peak and what GPUs of a node share.

What is known of errors above 7 %. A3 Mega: what TCPXO reaches is assumed. GPT-3 175B FP8 of v24.11.1, most from 512
GPUs on: the same document has 2,048 GPUs faster than fewer, and its next version has all of them faster. NeMo 24.01: an
early release for H100; a month later the same model in FP8 took a tenth less. 175B and 405B in FP8 on 2,048 GPUs and
more, 405B of release 25.11 on 1,024 and Meta's on 8,192: measured steps grow more with the GPUs than planned ones.
JUWELS Booster, 13B: no constant of its GPUs is measured. LoRA of 70B is planned too fast, by a fifth on 32 GPUs, where
it took a seventh longer than on 16. 7B's SFT in FP8: the same document trains as many tokens a second with four times
the microbatches a step. Long sequences: rings of four and more are planned 7 to 11 % too slow. GPT-2 124M, in
microbatches of 1,024 tokens, is planned too slow for both trainers: its kernels take 8 microseconds, and the H200's gap
between longer ones is a third of its planned step. The same is seen on single ranks of 13B in FP8. JUBE's 13B on an
H100 is planned too fast, most in fp16. Megatron-core, of two and four GPUs: with tp 2 it is planned too fast, in FP8
most. Not counted are that its host waits for the norm of the gradients before it launches the update, and that the
head's weight gradient, without apex, is added to the sum by a kernel of its own. Releases of one job differ by up to 7
%: no plan of a configuration can meet all of them.

Left out of the model of time: other jobs on the same switches, data, checkpoints, evaluation, and that power limits
slow some kernels more than others. A run whose products and attention fill less than two thirds of its step is bound by
the host: hosts differ by half, so it does not count among the errors of step times. Left out of that of memory: padding
and fragments, NCCL's buffers and the CUDA context (the room leaves space for these), and the start of a run."""


def _method(machines: Machines) -> str:
    device, fabric = next(iter(machines[0].values())), next(iter(machines[1].values()))
    return METHOD.format(in_step=device.in_step, copy=fabric.copy_felt, piece=fabric.piece_felt)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--fit", action="store_true", help="first fit the constants, and write them to devices.json")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        rows, machines = own_rows(args.results) + published_rows(), read_machines(DEVICES)
        if args.fit:
            machines = fit(rows, machines)
            store(machines, DEVICES)
        planned = [(row, predict(row, machines)) for row in rows]
        text = markdown(planned, record.rows(args.results), machines)
        args.results.with_name("calibration.md").write_text(text, encoding="utf-8")
        args.results.with_name("calibration.json").write_text(json.dumps(held_out(planned)) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
