"""One host that looks like several nodes, so that its ranks communicate as over a network.

GPUs of one host read each other's memory, and no collective of NCCL runs between them. `play` lets a rank answer two
questions differently: NCCL takes the name of the host from NCCL_HOSTID once, when the first communicator is made, and
between hosts it uses the network, here sockets. Our own test of one host (comm/shared_memory.py) compares host names.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

from minitron.comm import shared_memory


def play(rank: int, world: int, nodes: int) -> None:
    """Put this rank on its node, of `nodes` with as many ranks each. Call it before a process group is made."""
    if nodes == 1:
        return
    if world % nodes:
        raise ValueError(f"{world} ranks do not fill {nodes} nodes; use a divisor of {world}")
    name = f"node{rank * nodes // world}"
    os.environ |= {"NCCL_HOSTID": name, "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}
    shared_memory.socket = SimpleNamespace(gethostname=lambda: name)
