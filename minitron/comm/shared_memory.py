"""Symmetric memory: a buffer on each GPU of a node that the other GPUs can read, its barrier, and a switch of streams.

Problem: a collective of NCCL is a kernel, which takes SMs from the products beside it. Over NVLink a GPU reads another
GPU's memory with its copy engines, which take none. The idea: every rank of an axis makes a buffer of the same size,
and all ranks map all of them. parallel/overlap.py exchanges activations in them, within a product, and optim/slices.py
gradients and parameters.

    rank 0   own [ a0 | b0 ]      view(1, shape of b, start of b) = b1, in the memory of rank 1
    rank 1   own [ a1 | b1 ]      barrier(): both ranks have done the work that they launched before it

A barrier is a short kernel on the current stream. Left out: several nodes, which share no memory, and NVLink's
multicast.
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from minitron.comm.collectives import gather_json
from minitron.comm.mesh import Axis


class SymmetricBuffer:
    """A buffer of `nbytes` on every rank of `axis`, which all ranks can read. The constructor is collective."""

    def __init__(self, axis: Axis, nbytes: int, device: torch.device):
        assert axis.group is not None
        self.nbytes = nbytes
        axis.activity.enter("rendezvous", axis, nbytes)
        self.own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._memory = symmetric_memory.rendezvous(self.own, axis.group.group_name)
        axis.activity.leave()
        self._views: dict[tuple[int, torch.Size, torch.dtype, int], Tensor] = {}

    def view(self, rank: int, shape: torch.Size, dtype: torch.dtype, start: int) -> Tensor:
        """View the buffer of `rank` from element `start` of `dtype` on. Views are made once."""
        key = rank, shape, dtype, start
        if key not in self._views:
            self._views[key] = self._memory.get_buffer(rank, shape, dtype, start)
        return self._views[key]

    def barrier(self) -> None:
        """Wait, on the current stream, until all ranks have done the work that they launched before their barrier."""
        self._memory.barrier(channel=0)


class OnStream:
    """Launch on `stream` within the block, on `main` after it.

    torch.cuda.stream does the same, but looks up the device each time, which takes a layer too much host time.
    """

    __slots__ = ("stream", "main")

    def __init__(self, stream: torch.cuda.Stream, main: torch.cuda.Stream):
        self.stream, self.main = stream, main

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self.main)


def can_access_peers(axis: Axis, device: torch.device) -> bool:
    """Return whether the ranks are GPUs of one node that can read each other's memory. Collective over `axis`."""
    if axis.size == 1 or axis.group is None or device.type != "cuda":
        return False
    places = [tuple(place) for place in gather_json((socket.gethostname(), device.index), axis, device)]
    here = places[axis.rank]
    near = len(set(places)) == axis.size and all(
        host == here[0] and (gpu == here[1] or torch.cuda.can_device_access_peer(here[1], gpu)) for host, gpu in places
    )
    near_everywhere = torch.tensor(near, dtype=torch.int32, device=device)
    dist.all_reduce(near_everywhere, op=dist.ReduceOp.MIN, group=axis.group)
    return bool(near_everywhere)
