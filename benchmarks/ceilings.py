"""What this machine can do at all: matrix products, attention, copies and collectives, each alone.

    python benchmarks/ceilings.py                          # one GPU
    torchrun --nproc-per-node 4 benchmarks/ceilings.py     # collectives too

No step of a trainer is faster than the sum of its parts here. `--json` prints objects instead of a table, `--results
FILE` also appends them as records. Attention counts the pairs that a causal mask leaves, forward and backward (two
products and five); copies count bytes read and bytes written; collectives the bus: (ranks - 1) / ranks of the
gathered bytes per second.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch
import torch.distributed as dist

from benchmarks import measure, record
from benchmarks.floor import AttentionCall, Product, seconds
from minitron import attention
from minitron.collectives import gather_start, reduce_scatter_start
from minitron.mesh import Axis, Mesh

# [m, n, k] of the linear layers of one block and the head, per rank.
GEMMS = {
    "Llama-3 8B, s 8192": [(8192, 6144, 4096), (8192, 4096, 4096), (8192, 28672, 4096), (8192, 4096, 14336),
                           (8192, 128256, 4096)],
    "Llama-3 70B, s 8192, tp 4": [(8192, 2560, 8192), (8192, 8192, 2048), (8192, 14336, 8192), (8192, 8192, 7168)],
    "GPT-3 175B, s 2048, tp 4": [(2048, 9216, 12288), (2048, 12288, 3072), (2048, 12288, 12288)],
}
ATTENTION = {"32/8 heads of 128": [AttentionCall(1, 32, 8, 128, s, s, True) for s in (2048, 4096, 8192, 16384)],
             "24/24 heads of 128": [AttentionCall(1, 24, 24, 128, 2048, 2048, True)]}
COPY_BYTES, NCCL_BYTES = 2**30, (2**26, 2**29)  # NCCL: of the gathered tensor
KINDS = ("forward", "input_grad", "weight_grad")
Row = tuple[str, str, float, str]  # what, size, figure, unit


def gemm_rows(shapes: list[tuple[int, int, int]], name: str, device: torch.device,
              fp8: tuple[bool, ...]) -> Iterator[Row]:
    for shape in shapes:
        for is_fp8 in fp8:
            for kind in KINDS:
                product = Product(kind, *shape, is_fp8)
                rate = product.operations / seconds(product.prepare(torch.bfloat16, device), device)
                yield f"GEMM {'fp8' if is_fp8 else 'bf16'} {kind}, {name}", str(list(shape)), rate / 1e12, "TFLOP/s"


def attention_rows(calls: list[AttentionCall], name: str, device: torch.device) -> Iterator[Row]:
    for call in calls:
        backend = attention.choose("auto", device, torch.bfloat16, call.head_dim)
        took = seconds(call.prepare(backend, torch.bfloat16, device), device)
        yield f"attention ({backend.name}), {name}", f"s {call.queries}", call.operations / took / 1e12, "TFLOP/s"


def copy_rows(num_bytes: int, device: torch.device) -> Iterator[Row]:
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    rate = 2 * num_bytes / seconds(lambda: target.copy_(source), device)
    yield "copy", f"{num_bytes / 2**20:g} MiB", rate / 1e12, "TB/s"


def collective_rows(num_bytes: int, axis: Axis, device: torch.device) -> Iterator[Row]:
    whole = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
    part = whole[: whole.numel() // axis.size].clone()
    for name, start, x in (("all-gather", gather_start, part), ("reduce-scatter", reduce_scatter_start, whole)):
        rate = num_bytes * (axis.size - 1) / axis.size / seconds(lambda: start(x, axis)[1].wait(), device)
        yield f"{name}, {axis.size} ranks", f"{num_bytes / 2**20:g} MiB", rate / 1e9, "GB/s"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON records instead of a table")
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
    rows += copy_rows(COPY_BYTES, device)
    if world > 1:
        dist.init_process_group("nccl", device_id=device)
        axis = Mesh.create(device=device).world
        for num_bytes in NCCL_BYTES:
            rows += collective_rows(num_bytes, axis, device)
        dist.destroy_process_group()
    if rank == 0:
        show(rows, args)


def show(rows: list[Row], args: argparse.Namespace) -> None:
    for what, size, figure, unit in rows:
        entry = {"what": what, "size": size, "figure": figure, "unit": unit}
        if args.results:
            record.append(args, "ceiling", entry)
        print(json.dumps(entry) if args.json else f"{what:55} {size:22} {figure:9.2f} {unit}")


if __name__ == "__main__":
    main()
