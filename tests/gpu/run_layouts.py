"""On every GPU rank: a toy model in each layout that the world allows, held against one process on one GPU.

torchrun --nproc-per-node N tests/gpu/run_layouts.py [PATTERN ...]    prints a row per layout, exits 1 if one is off

PATTERN: a regular expression that the wanted rows match somewhere, such as "gpt fp8.*'tp': 2". `--part 1/2` runs the
first half of these rows. `--nodes 2` lets the ranks play two nodes, which communicate by sockets (tests/nodes.py).
N may be more than there are GPUs: start NVIDIA's MPS before, or ranks that wait for each other take turns.
"""

import argparse
import os
import re
import sys
import time
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

import nodes
from layouts import GPT3, LLAMA, adapters_that_do_something, config, first_gradients, part_of, split_backwards
from minitron.comm.mesh import Mesh
from minitron.config import rules
from minitron.data.loader import Loader
from minitron.data.mock import MockDataset
from minitron.train import build

# Heads of 64 channels, so that the fused kernels are used; weights of 1/sqrt(h), so that activations keep their size.
BIG = dict(
    hidden_size=512,
    ffn_hidden_size=1024,
    vocab_size=1000,
    vocab_multiple=128,
    max_positions=512,
    num_layers=8,
    init_std=512**-0.5,
)
LAYOUTS = [
    (1, {}),
    (1, dict(recompute="selective")),
    (1, dict(recompute="full")),
    (1, dict(separate=True)),
    (1, dict(lora=("qkv", "o", "up", "down"))),
    (2, dict(lora=("qkv", "o", "up", "down"), tp=2)),
    (2, dict(lora=("q", "v"), tp=2, sequence_parallel=False)),
    (2, dict(lora=("qkv",), pp=2, recompute="selective")),
    (2, dict(lora=("qkv", "down"), dropout=0.1)),
    (4, dict(lora=("qkv", "o", "up", "down"), tp=4)),
    (4, dict(lora=("v", "down"), tp=2, cp=2, recompute="full")),
    (1, dict(split=True)),  # backwards, on one stage
    (1, dict(split=True, recompute="selective")),
    (2, dict(split=True, tp=2)),
    (2, dict(split=True, tp=2, recompute="full")),
    (2, dict(split=True, tp=2, lora=("qkv", "o", "up", "down"), dropout=0.1)),
    (2, dict(split=True)),
    (2, dict(pp=2, schedule="zb-h1")),
    (2, dict(pp=2, schedule="zb-h1", recompute="selective", dropout=0.1)),
    (2, dict(pp=2, schedule="zb-h1", lora=("qkv", "down"))),
    (4, dict(tp=2, pp=2, schedule="zb-h1")),
    (4, dict(pp=4, schedule="zb-h1")),
    (1, dict(dropout=0.1)),
    (2, dict(dropout=0.1, tp=2)),
    (2, dict(dropout=0.1, cp=2, recompute="full")),
    (1, dict(attention_dropout=0.1)),
    (1, dict(attention_dropout=0.1, separate=True)),
    (2, dict(attention_dropout=0.1)),
    (2, dict(attention_dropout=0.1, tp=2)),
    (2, dict(attention_dropout=0.1, pp=2, recompute="full")),
    (4, dict(attention_dropout=0.1, dropout=0.1, tp=2, pp=2)),
    (2, {}),
    (2, dict(tp=2)),
    (2, dict(tp=2, sequence_parallel=False)),
    (2, dict(tp=2, recompute="full")),
    (2, dict(pp=2)),
    (2, dict(pp=2, vp=2)),
    (2, dict(pp=2, vp=4)),
    (2, dict(cp=2)),
    (2, dict(cp=2, cp_style="allgather")),
    (2, dict(cp=2, cp_style="ulysses")),
    (2, dict(cp=2, separate=True)),
    (2, dict(cp=2, cp_style="allgather", separate=True)),
    (2, dict(cp=2, cp_style="ulysses", separate=True)),
    (2, dict(tp=2, separate=True)),
    (2, dict(pp=2, vp=2, separate=True)),
    (2, dict(overlap_grads=False)),
    (2, dict(tp=2, overlap_tp=False)),
    (4, dict(tp=4)),
    (4, dict(tp=2, pp=2, vp=2)),
    (4, dict(tp=2, cp=2)),
    (4, dict(pp=2, cp=2)),
    (4, dict(pp=4, vp=2)),
    (4, dict(pp=2)),
    (4, dict(tp=2)),
    (4, dict(cp=4)),
    (4, dict(cp=2, cp_style="ulysses", tp=2)),
    (2, dict(node_ranks=1)),  # each GPU plays a node
    (4, dict(node_ranks=2)),
    (4, dict(node_ranks=2, tp=2)),
]
FAMILIES = {"llama": LLAMA, "gpt": GPT3}
FORMATS = {name: dict(precision=dict(dtype=name)) for name in ("fp32", "bf16", "fp16")}
FORMATS["bf16 gradients"] = dict(precision=dict(dtype="bf16"), optimizer=dict(grad_dtype="bf16"))
FORMATS["bf16 wire"] = dict(precision=dict(dtype="bf16"), optimizer=dict(reduce_dtype="bf16"))
FORMATS["head in pieces"] = dict(precision=dict(dtype="bf16"), model=dict(head_piece=192))
if find_spec("transformer_engine"):  # which must be loaded before torch's cuDNN
    import transformer_engine.pytorch  # noqa: F401

    FORMATS |= {
        f"fp8 {recipe}": dict(precision=dict(dtype="bf16", fp8=recipe)) for recipe in ("delayed", "current", "block")
    }
    FORMATS["fp8 head"] = dict(precision=dict(dtype="bf16", fp8="delayed", fp8_head=True))
    FORMATS |= {
        f"fp8 params {recipe}": dict(precision=dict(dtype="bf16", fp8=recipe, fp8_params=True))
        for recipe in ("delayed", "current")
    }


def formats_of(layout: dict) -> list[str]:
    """The formats that a layout is tried in: FP8 weights wherever ranks gather, other FP8 where they multiply."""
    if "node_ranks" in layout:
        return ["bf16 gradients", "bf16 wire"]
    few = {"tp", "sequence_parallel", "lora", "split"} | ({"pp", "schedule"} if "schedule" in layout else set())
    if set(layout) <= few:
        return [name for name in FORMATS if "params" not in name or "lora" not in layout]
    kept = set(layout) <= {"tp", "pp", "vp", "cp", "cp_style", "overlap_grads"}
    return [name for name in FORMATS if ("params" in name and kept) or "fp8" not in name]


@lru_cache
def mesh_of(tp: int, pp: int, cp: int, device: torch.device, node_ranks: int | None) -> Mesh:
    """Each mesh once: NCCL keeps memory for every group of every mesh until the process ends."""
    return Mesh.create(tp=tp, pp=pp, cp=cp, device=device, node_ranks=node_ranks)


def make(base: dict, name: str, layout: dict, device: torch.device, world: int, layers=BIG["num_layers"], **train_keys):
    """A configuration in this layout and format, and its mesh."""
    layout = {key: value for key, value in layout.items() if key != "split"}
    node_ranks = layout.pop("node_ranks", None)
    train_keys = dict(recompute=layout.pop("recompute", "none"), seq_len=512, steps=2) | train_keys
    data = dict(separate_documents=layout.pop("separate", False))
    dropout, targets = layout.pop("dropout", 0.0), layout.pop("lora", None)
    attention = {key: layout.pop(key) for key in ("attention", "attention_dropout") if key in layout}
    if attention:
        attention = {"attention": "fused"} | attention
    model, lora = BIG | dict(num_layers=layers, hidden_dropout=dropout) | attention, {}
    if targets is not None:
        lora = dict(finetune=dict(kind="lora"), lora=dict(targets=targets, dropout=dropout, alpha=8.0))
    cfg = config(base, lora, FORMATS[name], dict(model=model, parallel=layout, train=train_keys, data=data))
    rules.check(cfg, world)
    p = cfg.parallel
    return cfg, Mesh.offline(device=device) if world == 1 else mesh_of(p.tp, p.pp, p.cp, device, node_ranks)


def train(base: dict, name: str, layout: dict, device: torch.device, world: int):
    cfg, mesh = make(base, name, layout, device, world)
    with adapters_that_do_something():
        trainer = build(cfg, mesh, schedule=split_backwards if layout.get("split") else None)
    data = MockDataset(1000, 512, 24, 1, document_length=120.0)
    gradients, losses, loader = first_gradients(trainer), [], Loader(data, cfg, mesh)
    for step in range(2):
        losses.append(trainer.step(loader.step(step * 8, step), 1e-3).read())
    loader.close()
    return losses, gradients


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="which the wanted rows match somewhere")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="the I-th of N parts of the rows")
    parser.add_argument("--nodes", type=int, default=1, help="that the ranks play")
    return parser


def part(text: str) -> tuple[int, int]:
    i, n = map(int, text.split("/"))
    if not 0 < i <= n:
        raise argparse.ArgumentTypeError(f"{text!r} is no part; the last one of {n} is {n}/{n}")
    return i, n


def chosen(args: argparse.Namespace, rows: list[tuple]) -> list[tuple]:
    """Return the part of the matching rows that the command line asks for. A row: family, format, layout."""
    i, n = args.part
    rows = [row for row in rows if all(re.search(pattern, "{} {} {}".format(*row)) for pattern in args.patterns)]
    return rows[len(rows) * (i - 1) // n : len(rows) * i // n]


def single_of(layout: dict) -> dict:
    """Return the keys of a layout that the one process has as well."""
    single = {
        key: value for key, value in layout.items() if key in ("separate", "dropout", "attention_dropout", "lora")
    }
    if "attention_dropout" in layout:
        single["attention"] = "reference"  # the plain formulas, whatever the layout runs
    return single


def rows_of(world: int) -> list[tuple]:
    """List (family, format, layout), those together that have one twin: each part of the rows then has few twins."""
    layouts = [layout for size, layout in LAYOUTS if size == world]
    rows = [(family, name, layout) for family in FAMILIES for layout in layouts for name in formats_of(layout)]
    return sorted(rows, key=lambda row: (row[0], str(single_of(row[2])), row[1]))


def begin(nodes_played: int) -> tuple[int, int, torch.device]:
    """Make the process group of the ranks, which play that many nodes; return rank, world and this rank's GPU.

    Where there are fewer GPUs than ranks, ranks share them.
    """
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    rank, world, local_rank, local_world = (int(os.environ[name]) for name in names)
    gpus = torch.cuda.device_count()
    if 1 < nodes_played < local_world / gpus:
        raise ValueError(f"{local_world} ranks on {gpus} GPUs play at least {local_world // gpus} nodes, or 1")
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    nodes.play(rank, world, nodes_played)
    if nodes_played == 1 and gpus < local_world:
        nodes.share_gpu(rank)
    dist.init_process_group("nccl", device_id=device)
    return rank, world, device


def distance(parts: dict, whole: dict) -> float:
    """The largest relative error of a gradient on this rank."""
    errors = []
    for name, (grad, how) in parts.items():
        expected = part_of(whole[name][0], how).double()
        errors.append(float((grad.double() - expected).norm() / expected.norm()))
    return max(errors)


def main() -> None:
    args, begun = parser().parse_args(), time.monotonic()
    rank, world, device = begin(args.nodes)
    rows, twins, off = chosen(args, rows_of(world)), {}, 0
    for family, dtype, layout in rows:
        base, single = FAMILIES[family], single_of(layout)
        for d in ("fp32", dtype):
            if (key := (family, d, str(single))) not in twins:
                twins = {k: twin for k, twin in twins.items() if (k[0], k[2]) == (family, str(single))}
                twins[key] = train(base, d, single, device, 1)
        exact, twin = twins[family, "fp32", str(single)], twins[family, dtype, str(single)]
        losses, gradients = train(base, dtype, layout, device, world)
        error, loss_error = distance(gradients, exact[1]), abs(losses[1]["loss"] / exact[0][1]["loss"] - 1)
        # float32: sums in another order. Else: no further off than one process in that format, but for chance.
        bound = 1e-5 if dtype == "fp32" else 1.5 * distance(twin[1], exact[1])
        worst = torch.tensor([error, loss_error], device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        error, loss_error = worst.tolist()
        ok = error <= bound and loss_error <= (1e-5 if dtype == "fp32" else 5e-3 if "fp8" in dtype else 1e-3)
        off += not ok
        if rank == 0:
            print(
                f"{'ok  ' if ok else 'FAIL'} {family} {dtype} world {world} {layout}: gradients off by "
                f"{error:.2e} (bound {bound:.2e}), second loss by {loss_error:.2e}",
                flush=True,
            )
    if rank == 0:
        print(f"{len(rows)} rows and {len(twins)} twins in {time.monotonic() - begun:.0f} s, {off} off")
    dist.destroy_process_group()
    sys.exit(off > 0)


if __name__ == "__main__":
    main()
