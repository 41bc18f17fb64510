"""One host that looks like several nodes, so that its ranks communicate as over a network; ranks that share a GPU.

GPUs of one host read each other's memory, and no collective of NCCL runs between them. `play` lets a rank answer two
questions differently: NCCL takes the name of the host from NCCL_HOSTID once, when the first communicator is made, and
between hosts it uses the network, here sockets. Our own test of one host (comm/shared_memory.py) compares host names.

NCCL refuses two ranks of a host on one GPU, but not of two hosts. So ranks of different played nodes may share a GPU.
With `share_gpu` all ranks of the one host may: they exchange by symmetric memory, as GPUs do.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

from minitron.comm import shared_memory

SOCKETS = {"NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}


def play(rank: int, world: int, nodes: int) -> None:
    """Put this rank on its node, of `nodes` with as many ranks each. Call it before a process group is made."""
    if nodes == 1:
        return
    if world % nodes:
        raise ValueError(f"{world} ranks do not fill {nodes} nodes; use a divisor of {world}")
    name = f"node{rank * nodes // world}"
    os.environ |= SOCKETS | {"NCCL_HOSTID": name}
    shared_memory.socket = SimpleNamespace(gethostname=lambda: name)


def share_gpu(rank: int) -> None:
    """Put this rank on a GPU that other ranks of its node use. Call it before a process group is made."""
    from minitron.optim import slices
    from minitron.parallel import layer_context

    os.environ |= SOCKETS | {"NCCL_HOSTID": f"rank{rank}", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    for module in (layer_context, slices):
        module.can_access_peers = lambda axis, device: axis.size > 1
