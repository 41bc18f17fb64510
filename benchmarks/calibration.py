"""How far the planner's predictions are from measurements: `python benchmarks/calibration.py [--fit]`.

Two kinds of rows: minitron's own runs, memory and step time, from the records of kind "compare" in results.jsonl (of
each case the newest); and what NVIDIA, Google and Jülich published, from published.json. Writes calibration.md beside
the results, a table with fitted rows and held-out rows apart. `--fit` first finds the constants that no kernel alone
tells, and writes them to devices.json:

    in_step                  on own runs of one GPU
    tp_exposed, dp_exposed   on the smallest scale of every table with H100

by the least sum of squared relative errors, one constant after another until none moves. All devices get the same
in_step, all fabrics the same shares. Nothing is fitted on A100, A3 Mega or later software.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

from benchmarks.cases import CASES
from minitron.config import cli
from minitron.config.schema import Config
from minitron.planning.machine import Device, Fabric, Machine, read_machines
from minitron.planning.plan import Plan, plan

FOLDER = Path(__file__).resolve().parent
DEVICES, PUBLISHED, RESULTS = FOLDER / "devices.json", FOLDER / "published.json", FOLDER / "results" / "results.jsonl"
STEPS = {"in_step": 0.005, "tp_exposed": 0.05, "dp_exposed": 0.05}  # of the search, and its grid
ROUNDS = 10  # each kind of row has its own error to make small, so that the two could chase each other


@dataclass(frozen=True)
class Row:
    """A measurement. fitted: which constants of `--fit` it decides, "device" or "fabric"; "": none.

    products: seconds of the first rank's matrix products, timed alone. floor_share: theirs and attention's of the step.
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

    @property
    def host_bound(self) -> bool:
        """Whether products and attention leave the GPU idle for a third of the step: the plan knows no host time."""
        return self.floor_share is not None and self.floor_share < 2 / 3


Machines = tuple[dict[str, Device], dict[str, Fabric]]


def own_rows(path: Path) -> list[Row]:
    """Of each case and precision the newest record; those of a CPU or of a case that is no more are left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        record = json.loads(line)
        case = CASES.get(re.sub("-(bf16|fp8)$", "", record.get("case", "")))
        if record["kind"] == "compare" and case and (gpu := re.search(r"[HAB]\d00", record["gpu"] or "")):
            found[record["case"]] = Row(
                record["case"],
                case.gpus,
                tuple(case.arguments(record["fp8"])),
                gpu[0].lower(),
                record["ours"]["step_seconds"],
                record["ours_gib"],
                record["ours"].get("floor_gemm_seconds"),
                fitted="device" if case.gpus == 1 else "",
                floor_share=record["ours"].get("floor_share"),
            )
    return list(found.values())


def published_rows(path: Path) -> list[Row]:
    data, rows = json.loads(path.read_text(encoding="utf-8")), []
    for table in data["tables"]:
        for i, (gpus, seconds) in enumerate(zip(table["cells"]["gpus"], table["cells"]["step_seconds"])):
            rows.append(
                Row(
                    table["name"],
                    int(gpus),
                    _arguments(table, table["samples_per_gpu"] * int(gpus)),
                    table["device"],
                    float(seconds),
                    fitted="" if i else "fabric",
                )
            )
    for entry in data["reports"] + data["single"]:
        batch = entry["global_batch_size"]
        seconds = entry.get("step_seconds") or batch * entry["seq_len"] / float(entry["tokens_per_second"])
        rows.append(
            Row(
                entry["name"],
                entry["gpus"],
                _arguments(entry, batch),
                entry["device"],
                float(seconds),
                fabric=entry.get("fabric"),
            )
        )
    return rows


def _arguments(entry: dict, batch: int) -> tuple[str, ...]:
    return (str(FOLDER.parent / entry["config"]), *entry["overrides"], f"train.global_batch_size={batch}")


@lru_cache(None)
def configuration(arguments: tuple[str, ...]) -> Config:
    return cli.load([str(FOLDER.parent / arg) if arg.startswith("configs/") else arg for arg in arguments])


def predict(row: Row, machines: Machines) -> Plan:
    if row.device not in machines[0]:
        raise ValueError(f"{row.name} ran on {row.device}, of which {DEVICES.name} knows nothing; add its constants")
    device = machines[0][row.device]
    machine = Machine(device, machines[1][row.fabric or device.fabric])
    return plan(configuration(row.arguments), row.gpus, machine)


# ---- the fit ---------------------------------------------------------------------------------------------------------


def fit(rows: list[Row], machines: Machines) -> Machines:
    """The machines with the constants of STEPS that suit the fitted rows best: devices and fabrics in turn, until
    neither moves, or ROUNDS times."""
    for _ in range(ROUNDS):
        before = machines
        for section, kind, names in ((0, "device", ("in_step",)), (1, "fabric", ("tp_exposed", "dp_exposed"))):
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


def markdown(rows: list[Row], machines: Machines) -> str:
    """The method, then a line a row: fitted first, and of each half the largest error."""
    lines = ["# Predicted against measured", "", _method(machines)]
    for title, chosen in (
        ("Held out", [row for row in rows if not row.fitted]),
        ("Fitted", [row for row in rows if row.fitted]),
    ):
        plans = [predict(row, machines) for row in chosen]
        lines += [
            "",
            f"## {title}",
            "",
            "| run | device | GPUs | predicted s | measured s | error | predicted GiB | measured GiB | error |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row, job in zip(chosen, plans):
            name = f"{row.name}, bound by the host" if row.host_bound else row.name
            lines.append(
                f"| {name} | {row.device} | {row.gpus} | {job.step_seconds:.3f} | {row.seconds:.3f} | "
                f"{_error(job.step_seconds, row.seconds)} | {job.memory_gib:.1f} | "
                + (f"{row.gib:.1f} | {_error(job.memory_gib, row.gib)} |" if row.gib else "| |")
            )
        for what, errors in {
            "published step times": [j.step_seconds / r.seconds - 1 for r, j in zip(chosen, plans) if not r.gib],
            "own step times": [
                j.step_seconds / r.seconds - 1 for r, j in zip(chosen, plans) if r.gib and not r.host_bound
            ],
            "own memory": [j.memory_gib / r.gib - 1 for r, j in zip(chosen, plans) if r.gib],
        }.items():
            if errors:
                lines += [
                    "",
                    f"{what.capitalize()}: largest error {100 * max(errors, key=abs):+.1f} %, mean of the "
                    f"magnitudes {100 * sum(map(abs, errors)) / len(errors):.1f} %, {len(errors)} rows.",
                ]
    return "\n".join(lines + products_alone(rows, machines)) + "\n"


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
Written by `python benchmarks/calibration.py`; no figure is typed in. Constants: `benchmarks/devices.json`.

- Measured alone on an H200: products, attention, copies, NVLink. Those of H100 and A100 are scaled by data sheets, and
  networks between nodes are data sheets' or assumed; each source says which. The share of memory traffic that
  products do not hide is left open by their times from 0 to 0.6, and was chosen with the published FP8 runs in view.
- Fitted: in_step {in_step:g}, the rate of kernels in a step over that alone, on own runs of one GPU, for all devices;
  the exposed shares tp {tp:g} and dp {dp:g} of communication, on the smallest scale of each table with H100, for all
  fabrics. Nothing is fitted on memory.
- Held out: larger scales, own runs of more GPUs, all of A100 and A3 Mega, later versions of the published software.

The published runs are of other software (NeMo, Megatron-LM), so their rows ask for a well-tuned trainer of Megatron's
kind; own rows are minitron's runs. Fine-tuning rows are the recipes' random documents of at most 512 tokens, packed:
what the published runs held is not known. A3 Mega's row is planned without its recipe's attention dropout, which
minitron computes by plain formulas. Where a row has no measured memory, the predicted one is that of minitron in this
layout, and above the device's room it would need `train.recompute`. Measured memory is torch's own peak and what GPUs
of a node share.

Left out of the model of time: stragglers and congestion, which grow with the scale, host time, data, checkpoints,
evaluation, and that power limits slow some kernels more than others; of packed documents, that their kernel is another
one. A run whose products and attention fill less than two thirds of its step is bound by the host: its prediction says
what the GPUs need, and does not count among the errors of step times. Left out of that of memory: padding and
fragments, NCCL's buffers and the CUDA context (the room leaves space for these), and the start of a run."""


def _method(machines: Machines) -> str:
    device, fabric = next(iter(machines[0].values())), next(iter(machines[1].values()))
    return METHOD.format(in_step=device.in_step, tp=fabric.tp_exposed, dp=fabric.dp_exposed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--fit", action="store_true", help="first fit the constants, and write them to devices.json")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        rows, machines = own_rows(args.results) + published_rows(PUBLISHED), read_machines(DEVICES)
        if args.fit:
            machines = fit(rows, machines)
            store(machines, DEVICES)
        text = markdown(rows, machines)
        args.results.with_name("calibration.md").write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
