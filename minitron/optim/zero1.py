"""ZeRO-1: AdamW with float32 masters and moments, sharded over the data-parallel ranks.

Problem: Adam needs 12 bytes of state per parameter (master, two moments). All P data ranks would keep the same bytes
and compute the same update. The idea (Rajbhandari et al. 2020, stage 1): after the reduce-scatter each rank has the
summed gradient of one slice. So it keeps the state of that slice only, updates it, and gathers the other slices.

One step, in which the host reads no value:
  1. totals = sum over the world of [loss sum, token count, squared gradient norm]: one all-reduce of three numbers.
  2. gradient of the mean loss = sum / (count * loss_grad); its norm, and from that the clipping factor.
  3. Both divisions become one device scalar that the fused AdamW kernel applies as it reads the gradient.
  4. If the norm is not finite, `skipped` is 1, and masters, moments and the step count stay as they are.
  5. AdamW writes the new masters and, from them, parameters of a smaller dtype. `WeightWriter.write` starts the
     all-gather of each bucket; it casts FP8 weights first. The next forward waits for the gathers (buckets.py).

    Two ranks, 24 elements:   rank 0  grad[0:12]  -> master, exp_avg, exp_avg_sq [12] -> data[0:12]  \\  all-gather:
                              rank 1  grad[12:24] -> its own three [12]               -> data[12:24] /  both have [0:24]

In float32 the master is the parameter slice itself. The update works on whole buckets. On CUDA the update and the cast
are one kernel. The only optimizer is AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.comm.handle import Handle
from minitron.config.schema import OptimizerConfig
from minitron.kernels.kernels import Kernels
from minitron.kernels.plain import AdamHyper, AdamState
from minitron.optim.buckets import Gradients
from minitron.optim.fp8_weights import WeightWriter

# Keeps the clipping factor finite, as torch.nn.utils.clip_grad_norm_ and Megatron-LM do.
CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Stats:
    """A step's figures, equal on every rank: one float64 device tensor, so that a log can copy it without waiting.

    loss: mean over the counted tokens. grad_norm: global, of the mean loss, before clipping. skipped: 1 if nothing was
    updated, because gradients were not finite or the caller skipped the step. nan: 1 if the loss is not finite.
    """

    values: Tensor  # [4]

    FIELDS = ("loss", "grad_norm", "skipped", "nan")

    @property
    def skipped(self) -> Tensor:
        """0-d, 0 or 1."""
        return self.values[2]

    def read(self) -> dict[str, float]:
        """Return the figures as Python numbers. On a GPU tensor this waits for the step."""
        return dict(zip(self.FIELDS, self.values.tolist(), strict=True))


class Zero1Optimizer:
    """AdamW over this rank's slices of the buckets. Make it after the parameters have their initial values.

    With FP8 weights the constructor writes their initial bytes and is collective over dp_cp.

    masters, exp_avg, exp_avg_sq: one float32 tensor [size / dp_cp] per bucket, never replaced. steps: 0-d float32, the
    number of updates so far.
    """

    def __init__(self, gradients: Gradients, cfg: OptimizerConfig, kernels: Kernels):
        self.gradients, self.cfg = gradients, cfg
        buckets = gradients.buckets
        self.masters = [b.data_slice.float() if b.initial_masters is None else b.initial_masters for b in buckets]
        self.exp_avg = [torch.zeros_like(master) for master in self.masters]
        self.exp_avg_sq = [torch.zeros_like(master) for master in self.masters]
        self.steps = torch.zeros((), dtype=torch.float32, device=gradients.mesh.device)
        self.copied: Handle[Any] = Handle()
        self.adamw_ = kernels.adamw_
        self.writer = WeightWriter(gradients, self.masters, kernels.ops.cast_master)
        self.states = [
            AdamState(
                master,
                bucket.grad_slice,
                exp_avg,
                exp_avg_sq,
                bucket.data_slice if bucket.data.is_floating_point() else master,
                cfg.weight_decay if bucket.key.decay else 0.0,
            )
            for bucket, master, exp_avg, exp_avg_sq in zip(buckets, self.masters, self.exp_avg, self.exp_avg_sq)
        ]
        if self.writer.all:
            self.write_parameters()

    @torch.no_grad()
    def step(
        self, lr: float, loss_sum: Tensor, count: Tensor, loss_grad: float | Tensor = 1.0, skip: bool = False
    ) -> Stats:
        """Divide, clip, update, gather: call it after `gradients.finish()`. Collective over the world.

        loss_sum, count: 0-d device tensors, the sum of token losses and the number of tokens on this rank, or zeros.
        The world's sums count each token once. loss_grad: the gradient with which each backward began
        (`LossScaler.loss_grad`), a number or a 0-d tensor. skip: update nothing. Gradients are invalid after this
        call. Parameters are complete when their gathers end: a unit's forward waits for them, other code calls
        `gradients.wait_parameters()`.
        """
        totals = torch.stack([loss_sum.double(), count.double(), self.gradients.square_sum()])
        all_reduce_(totals, self.gradients.mesh.world)
        loss_sum, count, square_sum = totals.unbind()
        denominator = count * loss_grad
        norm = square_sum.sqrt() / denominator
        skipped = norm.isfinite().logical_not() | skip
        divisor = denominator
        if self.cfg.clip_grad:
            divisor = denominator * ((norm + CLIP_EPS) / self.cfg.clip_grad).clamp(min=1.0)
        self._update(lr, divisor.float(), skipped.float())
        if not self.gradients.overlap:  # with overlap, each unit of the model waits in its forward
            self.gradients.wait_parameters()
        loss = loss_sum / count
        return Stats(torch.stack([loss, norm, skipped.double(), loss.isfinite().logical_not().double()]))

    def wait_before_update(self, copied: Handle[Any]) -> None:
        """Let the next update wait for a copy of the state that is under way."""
        self.copied = copied

    def _update(self, lr: float, divisor: Tensor, skipped: Tensor) -> None:
        """Update all slices with gradient / divisor, unless skipped is 1.

        The gather of a bucket overlaps the update of the next bucket.
        """
        self.steps += 1 - skipped
        self.copied.wait()
        self.writer.begin()
        self.adamw_(
            self.states,
            self.steps,
            divisor,
            skipped,
            AdamHyper(lr, self.cfg.betas, self.cfg.eps),
            updated=self.writer.write,
        )
        self.writer.end()

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Write all parameters from the masters, and wait for their gathers. Collective over dp_cp."""
        self.writer.begin()
        for i, state in enumerate(self.states):
            state.param.copy_(state.master)
            self.writer.write(i)
        self.writer.end()
        self.gradients.wait_parameters()
