"""What NCCL takes of a GPU beside torch's allocator: `torchrun --nproc-per-node N benchmarks/nccl_memory.py`.

Problem: a job has a dozen communicators, and NCCL gives each its buffers when it is made, when it first runs a
collective, and for each peer with which it first exchanges a message. torch counts none of it. The idea: make several
communicators of all ranks, do each thing for the first time, and read the GPU's free memory before and after.

    communicator 0   made 310 MiB   all-reduce 180 MiB   message to rank 1 20 MiB   ...
    communicator 1   made  40 MiB   ...

`--nodes 2` lets the ranks play two nodes: between them NCCL uses the network, here sockets. Prints a row each, of the
highest rank, with the transports that NCCL itself logs; `--results FILE` appends a record. On CPUs all are 0.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tests")]

import torch
import torch.distributed as dist

from benchmarks import measure, record

MIB = 2**20
ELEMENTS = 2**22  # of each rank's part: long enough for the protocol of large messages


def operations(group: dist.ProcessGroup, device: torch.device) -> dict[str, Callable[[], object]]:
    """Name what a communicator does for the first time, in order. Its tensors exist before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part, whole = torch.zeros(ELEMENTS, device=device), torch.zeros(world * ELEMENTS, device=device)
    other = torch.zeros_like(whole)

    def trade(distance: int) -> None:
        """Send to the rank at this distance, receive from the one at the other side."""
        to, source = (rank + distance) % world, (rank - distance) % world
        sends = dist.P2POp(dist.isend, part, to, group), dist.P2POp(dist.irecv, other[:ELEMENTS], source, group)
        for work in dist.batch_isend_irecv(list(sends)):
            work.wait()

    return {
        "all-reduce": lambda: dist.all_reduce(part, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        # Before the all-to-all, which connects all peers.
        **{f"message, peer {i} of {world - 1}": (lambda i=i: trade(i)) for i in range(1, world)},
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
    }


def transports(log: Path) -> list[str]:
    """Return by which transports NCCL connected this rank, by its own log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return sorted(set(re.findall(r" via ([A-Z0-9]+(?:/[A-Za-z]+)?)", text)))


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--communicators", type=int, default=3, help="of all ranks (default 3)")
    parser.add_argument("--nodes", type=int, default=1, help="that the ranks play (default 1)")
    record.add_options(parser, results=None)
    args, (device, _) = parser.parse_args(argv), measure.choose_device()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = Path(tempfile.mkdtemp()) / "nccl"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
    if args.nodes > 1:
        import nodes  # of tests/

        nodes.play(rank, world, args.nodes)
    torch.zeros(1, device=device)  # CUDA's own memory
    before = measure.outside(device)
    dist.init_process_group("gloo") if device.type == "cpu" else dist.init_process_group("nccl", device_id=device)
    grown = measure.outside(device) - before  # before a collective, which `highest` is
    rows, before = [("world", "made", measure.highest(grown, device) / MIB)], before + grown
    rows.append(("world", "all-reduce", measure.highest(measure.outside(device) - before, device) / MIB))
    for number in range(args.communicators):
        before = measure.outside(device)
        group = dist.new_group(list(range(world)))  # split from the world's, as those of a mesh
        grown = measure.outside(device) - before
        rows.append((str(number), "made", measure.highest(grown, device) / MIB))
        for name, work in operations(group, device).items():
            before = measure.outside(device)
            work()
            rows.append((str(number), name, measure.highest(measure.outside(device) - before, device) / MIB))
    result = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "world": world,
        "nodes": args.nodes,
        "transports": transports(log),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None,
        "mib": [{"communicator": number, "first": name, "mib": mib} for number, name, mib in rows],
        "mib_of_all": measure.highest(sum(mib for *_, mib in rows), device),
    }
    if rank == 0:
        print(f"{world} ranks, {args.nodes} nodes, NCCL {result['nccl']}, by {', '.join(result['transports'])}")
        for number, name, mib in rows:
            print(f"communicator {number:<5}   {name:<22} {mib:8.1f} MiB")
        print(f"{'all':<43} {result['mib_of_all']:8.1f} MiB")
        if args.results:
            record.append(args, "nccl", result)
    measure.report(result)
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
