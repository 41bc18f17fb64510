"""Weights that are kept as FP8 bytes: the optimizer casts its slices of the masters, so no bf16 weight exists.

Problem: an FP8 product reads bytes. But if the optimizer gathers bf16 weights, every data rank casts them afterwards.
Only this cast reads the 2 bytes an element, which take memory and traffic. The idea: each rank casts the slice that it
has updated, and ranks gather the casts. A weight has one scale, and several ranks have its slices:

    delayed     per bucket: update, cast with the scale of the histories, gather. The amax of the slices enter the
                histories with those of the next step, without another collective
    current     update all buckets, compute the amax of each slice, all-reduce them over the data ranks for all weights
                at once, cast, gather

    Two data ranks, weight [1.5, -3.0 | 0.5, 2.0]: amax 3.0 gives scale 448 / 3, so the bytes are the FP8 numbers
    [224, -448 | 72, 288], and products divide by the scale.

The cast rounds a master to bf16 first, in a register. So the bytes are those of a run that keeps bf16 weights and casts
them, and losses are equal, bit by bit. Checkpoints and exports contain the masters. Left out: block scaling, which
would have to gather its scales beside the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.kernels.fp8_scales import FP8_DTYPES, Fp8WeightScale, WeightScales
from minitron.optim.buckets import Gradients


class _Part(NamedTuple):
    """This rank's elements of a weight: master [n] float32 and value [n] FP8, views of a bucket's slices."""

    weight: Fp8WeightScale
    master: Tensor
    value: Tensor


class WeightWriter:
    """Writes updated weights: casts the masters of FP8 weights, and starts the all-gather of every bucket.

    cast_master: the kernel (kernels/plain.py). A pass is begin(), write(bucket) for each bucket after the update of its
    masters, and end(). All of it is collective over dp_cp. Without FP8 weights, write() only starts all-gathers.
    """

    def __init__(self, gradients: Gradients, masters: list[Tensor], cast_master: Callable[..., None]):
        self.gradients, self.cast_master = gradients, cast_master
        self.parts: list[list[_Part]] = [[] for _ in masters]
        values = [bucket.data_slice for bucket in gradients.buckets]
        for part in gradients.owned():
            if (scale := part.param.spec.fp8_scale) is not None:
                value = part.of(values).view(FP8_DTYPES["weight"])
                self.parts[part.bucket].append(_Part(scale, part.of(masters), value))
        # One entry per bucket. All data ranks have the same list, even a rank whose slices are only padding.
        of_buckets = ((p.spec.fp8_scale for p in bucket.params.values()) for bucket in gradients.buckets)
        self.scales = [next((scale.scales for scale in of_one if scale is not None), None) for of_one in of_buckets]
        self.all = [scales for scales in dict.fromkeys(self.scales) if scales is not None]
        self.unknown: list[WeightScales] = []  # scales that depend on the new weights
        self.late: list[int] = []  # buckets that need those scales

    def begin(self) -> None:
        """Begin a pass with new masters."""
        self.unknown, self.late = [scales for scales in self.all if not scales.begin()], []

    def write(self, i: int) -> None:
        """Cast the updated masters of bucket i and start its all-gather. If the scale is unknown, end() does both."""
        late = self.scales[i] in self.unknown
        for weight, master, value in self.parts[i]:
            self.cast_master(master, weight.scale, None if late else value, weight.amax)
        if late:
            self.late.append(i)
        else:
            self.gradients.buckets[i].start_gather()

    def end(self) -> None:
        """Compute the unknown scales with the other ranks, and cast and all-gather the buckets that need them."""
        if self.unknown:
            amaxes = torch.cat([scales.amax for scales in self.unknown])
            all_reduce_(amaxes, self.gradients.mesh.dp_cp, op=dist.ReduceOp.MAX)
            for scales, amax in zip(self.unknown, amaxes.split([len(scales.amax) for scales in self.unknown])):
                scales.amax.copy_(amax)
                scales.follow()
        for i in self.late:
            for weight, master, value in self.parts[i]:
                self.cast_master(master, weight.scale, value, None)
            self.gradients.buckets[i].start_gather()
        for scales in self.all:
            scales.end()
