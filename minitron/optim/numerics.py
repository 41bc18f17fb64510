"""Log norms and zeros of some steps, and in FP8 also what casts lose, by layer.

Problem: a run that diverges shows one loss and one gradient norm. They do not show which layer's gradients grow, or
which FP8 tensor has lost its small values. The idea: every log.numerics_every steps each rank sums up figures of its
slices of the buckets. One sum and one maximum over the world make a record of metrics.jsonl:

    param_norm                 of all trained parameters
    grad_zeros, grad_zeros%    elements of the gradient that are exactly zero
    grad_norm/blocks.3         by part of the model; the squares add up to the square of the step's logged norm
    fp8/blocks.3.mlp.up/gradient/underflows%
                               by layer and tensor (activation, weight, gradient), with Transformer Engine's names:
                               underflows%, cur_amax; overflows% of delayed scaling; scale_inv_min and _max, but not
                               with block scaling, which has many scales

They describe the step's weights before the update, and its gradients before clipping. The update overwrites gradients,
so the device reads them right after the backward. The host reads the result after it has launched the next step's
backward, and launches nothing in other steps. kernels/fp8_counts.py counts casts. Weights that are kept as FP8 bytes
were cast in the previous update, so they are counted here, from the masters. Null stands for a tensor that this step
did not cast: LoRA's frozen weights are cast once. Left out: the norm of frozen weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.config.schema import Config
from minitron.kernels.fp8_counts import CastCounts
from minitron.kernels.fp8_scales import FP8_DTYPES
from minitron.optim.rerun import CountedBatch, Rerun
from minitron.optim.scaler import LossScaler
from minitron.optim.zero1 import Zero1Optimizer
from minitron.pipeline.executor import local_totals
from minitron.pipeline.replay import Eager, Replay
from minitron.runtime.log import Log
from minitron.runtime.observer import LateCopy, Observer

TENSORS = "activation", "weight", "gradient"  # x, weight and dy
STATS = "underflows%", "cur_amax", "scale_inv_min", "scale_inv_max", "overflows%"
KNOWN = {"none": 0, "block": 2, "current": 4, "delayed": 5}  # the number of STATS that precision.fp8 logs


class Numerics(Observer):
    """Logs norms, zeros and FP8's losses of every log.numerics_every-th step.

    runner: runs the passes of a step. counts: those of FP8's casts. log: None writes nothing.
    """

    def __init__(
        self,
        cfg: Config,
        runner: Eager | Replay | Rerun,
        scaler: LossScaler,
        optimizer: Zero1Optimizer,
        counts: CastCounts,
        log: Log | None,
    ):
        self.every, self.known, self.log = cfg.log.numerics_every, KNOWN[cfg.precision.fp8], log
        self.runner, self.scaler, self.counts = runner, scaler, counts
        self.gradients, self.masters = optimizer.gradients, optimizer.masters
        self.units = ["embedding", *(f"blocks.{i}" for i in range(cfg.model.num_layers)), "head"]
        tensors = [f"fp8/{layer}/{tensor}" for layer in counts.layers for tensor in TENSORS]
        self.names = ["param_norm", "grad_zeros", "grad_zeros%", *(f"grad_norm/{unit}" for unit in self.units)]
        self.names += [f"{tensor}/{stat}" for tensor in tensors for stat in STATS[: self.known]]
        self.waiting: tuple[int, LateCopy] | None = None

    def forward_backward(self, batches: Sequence[CountedBatch]) -> tuple[Tensor, bool]:
        """Compute the gradients of a step. If figures are due, begin to read them, collectively over the world."""
        step = self.gradients.mesh.activity.step
        due = step % self.every == 0
        self.counts.count(due)
        loss_sum, skip = self.runner.forward_backward(batches)
        self.close()
        if due:
            _, count = local_totals(self.gradients.mesh, loss_sum, batches)
            self.waiting = step, LateCopy(self._read(count * self.scaler.loss_grad(len(batches))))
        self.counts.count(False)
        return loss_sum, skip

    def close(self) -> None:
        """Log the figures that are under way."""
        if self.waiting is None:
            return
        (step, copy), self.waiting = self.waiting, None
        if self.log is None:
            return
        sizes = 1, 4 * len(self.units), self.counts.sums.numel(), self.counts.tops.numel()
        denominator, by_unit, sums, tops = copy.read().split(sizes)
        squares, params, zeros, elements = by_unit.view(-1, 4).t()
        whole = [params.sum().sqrt(), zeros.sum(), 100 * zeros.sum() / elements.sum()]
        underflows, overflows, cast = sums.view(-1, 3).t()
        amax, smallest, largest = tops.view(-1, 3).t()
        stats = torch.stack([100 * underflows / cast, amax, -smallest, largest, 100 * overflows / cast], 1)
        norms = squares.sqrt() / denominator  # gradients are sums over tokens
        figures = torch.cat([torch.stack(whole), norms, stats[:, : self.known].flatten()])
        self.log.record("numerics", step=step, **dict(zip(self.names, figures.tolist(), strict=True)))

    @torch.no_grad()
    def _read(self, denominator: Tensor) -> Tensor:
        """Add up all figures over the world. denominator: this rank's term of the divisor of gradients."""
        world, tops = self.gradients.mesh.world, self.counts.tops
        sums = torch.cat([denominator.view(1), self._read_slices().flatten(), self.counts.sums.flatten()])
        all_reduce_(sums, world)
        if self.counts.layers:
            all_reduce_(tops, world, op=dist.ReduceOp.MAX)
        return torch.cat([sums, tops.flatten()])

    def _read_slices(self) -> Tensor:
        """Sum up squares of gradients and masters, zeros and elements by part of the model: [units, 4].

        The world's sum counts each element once. This also counts the cast losses of weights kept as FP8 bytes.
        """
        sums = torch.zeros(len(self.units), 4, dtype=torch.float64, device=self.gradients.mesh.device)
        buckets = self.gradients.buckets
        grads, data = [b.grad_slice for b in buckets], [b.data_slice for b in buckets]
        for part in self.gradients.owned():
            bucket, (first, second, *_) = buckets[part.bucket], part.name.split(".")
            grad, master = part.of(grads), part.of(self.masters)
            if self.gradients.has_first_copy(bucket):
                unit = sums[self.units.index(f"{first}.{second}" if first == "blocks" else first)]
                unit[:2] += torch.stack([bucket.square_sum(grad), bucket.square_sum(master)])
                unit[2] += part.numel - grad.count_nonzero()
                unit[3] += part.numel
            if (scale := part.param.spec.fp8_scale) is not None and self.counts.on:
                layer, values = part.name.removesuffix(".weight"), part.of(data).view(FP8_DTYPES["weight"])
                self.counts.add(layer, "weight", master.bfloat16(), values, scale.scale_inv)
        return sums
