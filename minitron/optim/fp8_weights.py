"""Weights that are kept as FP8 bytes: made of the masters' slices, so that bf16 never exists.

Problem: an FP8 product reads bytes, yet the optimizer gathers bf16 weights, which are cast afterwards on every data
rank: 2 bytes an element of memory and of traffic that nothing else reads. The idea: each rank casts the slice that it
has updated, and ranks gather the casts. A weight has one scale, and its slices lie on several ranks:

    delayed     bucket by bucket: update, cast with the scale that the histories give, gather. Largest magnitudes enter
                the histories together with the step's others: no collective more
    current     update all, note the largest magnitude of each slice, one maximum over the data ranks for all weights,
                cast, gather

    Two data ranks, weight [1.5, -3.0 | 0.5, 2.0]: the maximum 3.0 gives scale 448 / 3, and the bytes stand for
    [224, -448 | 72, 288], of which products take out the scale.

A master is rounded to bf16 on its way, in a register: so the bytes are those of a run that keeps bf16 weights and casts
them, and losses are the same, bit by bit. What is exported and saved are masters, as ever.

Left out: block scaling, whose scales would be gathered beside the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.kernels.fp8_scales import KINDS, KeptInFp8, WeightScales
from minitron.optim.buckets import Gradients


class _Part(NamedTuple):
    """Some elements of a weight: master [n] float32 and value [n] FP8, views of a bucket's slices."""

    weight: KeptInFp8
    master: Tensor
    value: Tensor


class Fp8Weights:
    """Writes the FP8 weights of this rank's slices. Nothing is to be done where no weight is kept in FP8.

    cast_master: the kernel (kernels/plain.py). A pass is begin(), write(bucket) for each bucket when its masters are
    new, and end(); all of it collective over dp_cp.
    """

    def __init__(self, gradients: Gradients, masters: list[Tensor], cast_master: Callable[..., None]):
        self.gradients, self.cast_master = gradients, cast_master
        self.parts: list[list[_Part]] = [[] for _ in masters]
        values = [bucket.data_slice for bucket in gradients.buckets]
        for part in gradients.owned():
            if (kept := part.param.spec.kept) is not None:
                value = part.of(values).view(KINDS["weight"])
                self.parts[part.bucket].append(_Part(kept, part.of(masters), value))
        # By bucket, on all data ranks alike, whether their slices hold anything or padding alone.
        of_buckets = ((p.spec.kept for p in bucket.params.values()) for bucket in gradients.buckets)
        self.scales = [next((kept.scales for kept in of_one if kept is not None), None) for of_one in of_buckets]
        self.all = [scales for scales in dict.fromkeys(self.scales) if scales is not None]
        self.unknown: list[WeightScales] = []  # scales that depend on the new weights
        self.late: list[int] = []  # buckets that wait for them

    def begin(self) -> None:
        """Begin with new masters."""
        self.unknown, self.late = [scales for scales in self.all if not scales.begin()], []

    def write(self, i: int) -> None:
        """Cast bucket i, whose masters are new, and start its gather; or put that off until all are."""
        late = self.scales[i] in self.unknown
        for weight, master, value in self.parts[i]:
            self.cast_master(master, weight.scale, None if late else value, weight.top)
        if late:
            self.late.append(i)
        else:
            self.gradients.buckets[i].start_gather()

    def end(self) -> None:
        """Find the scales that are unknown, with the other ranks, and cast what has waited for them."""
        if self.unknown:
            tops = torch.cat([scales.top for scales in self.unknown])
            all_reduce_(tops, self.gradients.mesh.dp_cp, op=dist.ReduceOp.MAX)
            for scales, top in zip(self.unknown, tops.split([len(scales.top) for scales in self.unknown])):
                scales.top.copy_(top)
                scales.follow()
        for i in self.late:
            for weight, master, value in self.parts[i]:
                self.cast_master(master, weight.scale, value, None)
            self.gradients.buckets[i].start_gather()
        for scales in self.all:
            scales.end()
