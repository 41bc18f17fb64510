"""What this machine can do at all: matrix products, attention, copies and collectives, each alone.

    python benchmarks/ceilings.py                          # one GPU
    torchrun --nproc-per-node 4 benchmarks/ceilings.py     # collectives too

No step of a trainer is faster than the sum of its parts here. `--json` prints objects instead of a table, `--results
FILE` also appends them as records. Attention counts the pairs that a causal mask leaves, forward and backward (two
products and five), and at GPT-3 175B's shape once more with dropout; then as other trainers call it, torch's kernels
with and without dropout, forward alone and both. Copies count bytes read and bytes written; collectives the bus:
(ranks - 1) / ranks of the gathered bytes per second.

A product of all GPUs at once tells how far their speeds lie apart: a step waits for the slowest.

`--device-file FILE` writes the planner's table of devices, minitron/planner/devices.json, with this machine in it as
device and fabric `here`: `python tools/plan.py ... --device here --devices FILE`. What no kernel alone tells (in_step,
the shares exposed, the network between nodes) it takes from the device of that table that is most like it; the spread
of speeds, too, where fewer than 8 GPUs ran.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import measure, record
from benchmarks.floor import AttentionCall, Product, seconds
from minitron.comm.collectives import gather_start, reduce_scatter_start
from minitron.comm.mesh import Axis, Mesh
from minitron.kernels import attention
from minitron.planner.machine import Device, Fabric, Machine, read_machines

# [m, n, k] of the linear layers of one block and the head, per rank.
GEMMS = {
    "Llama-3 8B, s 8192": [
        (8192, 6144, 4096),
        (8192, 4096, 4096),
        (8192, 28672, 4096),
        (8192, 4096, 14336),
        (8192, 128256, 4096),
    ],
    "Llama-3 70B, s 8192, tp 4": [(8192, 2560, 8192), (8192, 8192, 2048), (8192, 14336, 8192), (8192, 8192, 7168)],
    "GPT-3 175B, s 2048, tp 4": [(2048, 9216, 12288), (2048, 12288, 3072), (2048, 12288, 12288)],
}
ATTENTION = {
    "32/8 heads of 128": [AttentionCall(1, 32, 8, 128, s, s, True) for s in (2048, 4096, 8192, 16384)],
    "24/24 heads of 128": [AttentionCall(1, 24, 24, 128, 2048, 2048, True, dropout) for dropout in (0.0, 0.1)],
}
FLASH = "flash attention 2"
THEIRS = {"cuDNN's attention": SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
THEIR_TOKENS, THEIR_HEADS, THEIR_LENGTHS = 16384, (32, 128), (2048, 4096, 8192, 16384)
SPREAD_SHAPE, SPREAD_REPEATS = (8192, 8192, 8192), 400  # of a product: half a second, until power is the limit
FEWEST_GPUS = 8  # whose speeds tell how far those of their kind lie apart
COPY_BYTES, NCCL_BYTES = 2**30, (2**26, 2**29)  # NCCL: of the gathered tensor
KINDS = ("forward", "input_grad", "weight_grad")
Row = tuple[str, str, float, str]  # what, size, figure, unit


def gemm_rows(
    shapes: list[tuple[int, int, int]], name: str, device: torch.device, fp8: tuple[bool, ...]
) -> Iterator[Row]:
    for shape in shapes:
        for is_fp8 in fp8:
            for kind in KINDS:
                product = Product(kind, *shape, is_fp8)
                rate = product.operations / seconds(product.prepare(torch.bfloat16, device), device)
                yield f"GEMM {'fp8' if is_fp8 else 'bf16'} {kind}, {name}", str(list(shape)), rate / 1e12, "TFLOP/s"


def attention_rows(calls: list[AttentionCall], name: str, device: torch.device) -> Iterator[Row]:
    for call in calls:
        backend = attention.choose("auto", device, torch.bfloat16, call.head_dim, call.dropout)
        what = f"attention ({backend.name}), {name}"
        if call.dropout:
            what = f"dropout {call.dropout} {what}"
        took = seconds(call.prepare(backend, torch.bfloat16, device), device)
        yield what, f"s {call.queries}", call.operations / took / 1e12, "TFLOP/s"


def their_attention_rows(
    name: str, lengths: tuple[int, ...], tokens: int, heads: tuple[int, int], device: torch.device
) -> Iterator[Row]:
    """torch's own kernel of this name, causal, of sequences that are `tokens` together. heads: (how many, size)."""
    for dropout, length in itertools.product((0.0, 0.1), lengths):
        shape = (tokens // length, heads[0], length, heads[1])
        q, k, v, dout = (torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(4))

        def forward(q=q, k=k, v=v, dropout=dropout) -> torch.Tensor:
            with sdpa_kernel(THEIRS[name]):
                return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)

        def both(forward=forward, inputs=(q, k, v), dout=dout) -> object:
            return torch.autograd.grad(forward(), inputs, dout)

        of_one = 2 * tokens * length / 2 * heads[0] * heads[1]
        for what, call, products in (("forward", forward, 2), ("both", both, 7)):
            rate = products * of_one / seconds(call, device) / 1e12
            yield f"{name}{', dropout 0.1' * (dropout > 0)}, {what}", f"s {length}", rate, "TFLOP/s"


def copy_rows(num_bytes: int, device: torch.device) -> Iterator[Row]:
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    rate = 2 * num_bytes / seconds(lambda: target.copy_(source), device)
    yield "copy", f"{num_bytes / 2**20:g} MiB", rate / 1e12, "TB/s"


def collective_rows(num_bytes: int, axis: Axis, device: torch.device) -> Iterator[Row]:
    whole = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
    part = whole[: whole.numel() // axis.size].clone()
    for name, start, x in (("all-gather", gather_start, part), ("reduce-scatter", reduce_scatter_start, whole)):
        rate = num_bytes * (axis.size - 1) / axis.size / seconds(lambda: start(x, axis).wait(), device)
        yield f"{name}, {axis.size} ranks", f"{num_bytes / 2**20:g} MiB", rate / 1e9, "GB/s"


def spread_rows(shape: tuple[int, int, int], repeats: int, device: torch.device) -> Iterator[Row]:
    """The standard deviation of the speeds of all ranks' GPUs, each alone with its product, all at the same time."""
    call = Product("forward", *shape, False).prepare(torch.bfloat16, device)
    mine = torch.tensor([1 / seconds(call, device, repeats)], dtype=torch.float64, device=device)
    speeds = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(speeds, mine)
    found = [speed.item() for speed in speeds]
    spread = 100 * statistics.stdev(found) / statistics.mean(found)
    yield f"spread of speeds, {len(found)} ranks", str(list(shape)), spread, "%"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON records instead of a table")
    parser.add_argument("--device-file", type=Path, metavar="FILE", help="write a table of devices for tools/plan.py")
    record.add_options(parser, results=None)
    args = parser.parse_args(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device, capability = measure.choose_device()
    if capability is None:
        raise SystemExit("error: the ceilings are those of GPUs, and there is none")
    rows, fp8 = [], (False, True) if capability >= (8, 9) else (False,)
    for name, shapes in GEMMS.items():
        rows += gemm_rows(shapes, name, device, fp8)
    for name, calls in ATTENTION.items():
        rows += attention_rows(calls, name, device)
    for name in THEIRS:
        rows += their_attention_rows(name, THEIR_LENGTHS, THEIR_TOKENS, THEIR_HEADS, device)
    rows += copy_rows(COPY_BYTES, device)
    if world > 1:
        dist.init_process_group("nccl", device_id=device)
        axis = Mesh.create(device=device).world
        for num_bytes in NCCL_BYTES:
            rows += collective_rows(num_bytes, axis, device)
        rows += spread_rows(SPREAD_SHAPE, SPREAD_REPEATS, device)
        dist.destroy_process_group()
    if rank == 0:
        show(rows, args)
        if args.device_file:
            write_device(rows, torch.cuda.get_device_properties(device), args.device_file, world)


def show(rows: list[Row], args: argparse.Namespace) -> None:
    for what, size, figure, unit in rows:
        entry = {"what": what, "size": size, "figure": figure, "unit": unit}
        if args.results:
            record.append(args, "ceiling", entry)
        print(json.dumps(entry) if args.json else f"{what:55} {size:22} {figure:9.2f} {unit}")


# ---- constants of the planner ----------------------------------------------------------------------------------------


def write_device(rows: list[Row], properties, path: Path, world: int = 1) -> None:
    """The table of devices with this machine as `here`. properties: of the GPU, as torch.cuda has them."""
    devices, fabrics = read_machines()
    like = next((name for name, one in devices.items() if one.gpu in properties.name), next(iter(devices)))
    gpu, spread = re.sub("^NVIDIA ", "", properties.name), [row[2] for row in rows if row[3] == "%"]
    here = replace(
        devices[like],
        gpu=gpu,
        fabric="here",
        memory_gib=round(properties.total_memory / 2**30, 2),
        processors=properties.multi_processor_count,
        **constants(rows, devices[like]),
        **({"spread": round(spread[0] / 100, 4)} if spread and world >= FEWEST_GPUS else {}),
        source=f"benchmarks/ceilings.py on {gpu}; the rest is that of {like}",
    )
    fabric, bus = fabrics[devices[like].fabric], [row[2] for row in rows if row[3] == "GB/s"]
    if bus:
        fabric = replace(fabric, nvlink_gb_s=round(statistics.median(bus), 1))
    fabric = replace(fabric, source=f"benchmarks/ceilings.py inside of the node; the rest as {devices[like].fabric}")
    tables = [
        {name: asdict(one) for name, one in (table | {"here": mine}).items()}
        for table, mine in ((devices, here), (fabrics, fabric))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(zip(("devices", "fabrics"), tables)), indent=1) + "\n", encoding="utf-8")


def constants(rows: list[Row], like: Device) -> dict:
    """What the planner's formulas need to reproduce these rows best, in its own names."""
    found = {"copy_tb_s": round(next(figure for what, _, figure, _ in rows if what == "copy"), 2)}
    products = [
        (what.split()[1], "weight_grad" in what, json.loads(size), rate)
        for what, size, rate, _ in rows
        if what.startswith("GEMM")
    ]
    # Rates and the unhidden share of memory traffic depend on each other: of all shares the one with the least spread.
    trials = []
    for unhidden in (step / 10 for step in range(16)):
        device = replace(like, copy_tb_s=found["copy_tb_s"], unhidden=unhidden)
        rates = {
            key: statistics.median(_rate(device, *row) for row in products if row[:2] == key)
            for key in sorted({row[:2] for row in products})
        }  # (kind, weight_grad): TFLOP/s
        spread = sum(
            (_predicted(device, kind, grad, rates[kind, grad], shape) / measured - 1) ** 2
            for kind, grad, shape, measured in products
        )
        trials.append((spread, unhidden, rates))
    _, found["unhidden"], rates = min(trials, key=lambda trial: trial[:2])
    found["gemm_tflops"] = {kind: round(rate, 1) for (kind, grad), rate in rates.items() if not grad}
    found["weight_grad"] = {kind: round(rate / rates[kind, False], 3) for (kind, grad), rate in rates.items() if grad}
    for names, beginning in (
        (("attention_tflops", "half_keys"), "attention"),
        (("flash_tflops", "flash_half_keys"), f"{FLASH}, both"),
    ):
        # 1 / rate = 1 / best + (half_keys / best) / keys is a straight line in 1 / keys.
        points = [
            (1 / int(size.split()[1]), 1 / figure) for what, size, figure, _ in rows if what.startswith(beginning)
        ]
        slope, offset = statistics.linear_regression(*zip(*points))
        found |= zip(names, (round(1 / offset, 1), round(max(0.0, slope / offset))))
    return found


def _predicted(device: Device, kind: str, weight_grad: bool, rate: float, shape: list[int]) -> float:
    """TFLOP/s of a product alone, by the planner's formula, at this rate of its arithmetic."""
    m, n, k = shape
    alone = replace(device, gemm_tflops={kind: rate}, weight_grad={kind: 1.0}, in_step=1.0, gap_seconds=0.0)
    machine = Machine(alone, Fabric(1, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0, 0, ""))
    return 2 * m * n * k / machine.product(m, n, k, fp8=kind == "fp8", weight_grad=weight_grad) / 1e12


def _rate(device: Device, kind: str, weight_grad: bool, shape: list[int], measured: float) -> float:
    """The rate with which the formula gives what was measured: its time is a part over the rate, and a rest."""
    whole, half = (1 / _predicted(device, kind, weight_grad, rate, shape) for rate in (1.0, 2.0))
    part = 2 * (whole - half)
    return part / max(1 / measured - (whole - part), part / 1e4)


if __name__ == "__main__":
    main()
