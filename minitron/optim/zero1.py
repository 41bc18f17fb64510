"""ZeRO-1: AdamW with float32 masters and moments, of which every data-parallel rank keeps one slice.

Problem: Adam needs 12 bytes of state per parameter (master, two moments); on every one of P data ranks the same 12
bytes would be kept and the same update computed P times. The idea (Rajbhandari et al. 2020, stage 1): the
reduce-scatter has left each rank with the summed gradient of its own slice, so let it keep the state of that slice
only, update it, and gather.

One step, with no value read by the host:
  1. totals = sum over the world of [loss sum, token count, squared gradient norm]: one all-reduce of three numbers.
  2. gradient of the mean loss = sum / (count * backward_scale); its norm, and from that the clipping factor.
  3. Both divisions become one device scalar that the fused AdamW kernel applies as it reads the gradient.
  4. A norm that is not finite sets `found_inf`: then masters, moments and the step count stay as they are.
  5. Parameters of a smaller dtype are rewritten from the masters; all-gathers bring the other ranks' slices. Those that
     are kept in FP8 are cast in between (fp8_weights.py).

    Two ranks, 24 elements:   rank 0  grad[0:12]  -> master, exp_avg, exp_avg_sq [12] -> data[0:12]  \\  all-gather:
                              rank 1  grad[12:24] -> its own three [12]               -> data[12:24] /  both have [0:24]

In float32 the master is the parameter slice itself. The update works on whole buckets, never on single parameters. On
CUDA the update and the cast are one kernel. Left out: a choice of optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minitron.comm.collectives import Done, all_reduce_
from minitron.config.schema import OptimizerConfig
from minitron.kernels.kernels import Kernels
from minitron.kernels.plain import AdamHyper, AdamState
from minitron.optim.buckets import Gradients
from minitron.optim.fp8_weights import Fp8Weights

# Keeps the clipping factor finite, as torch.nn.utils.clip_grad_norm_ and Megatron-LM do.
CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Stats:
    """A step's figures, equal on every rank: one float64 device tensor, so that a log can copy it without waiting.

    loss: mean over the counted tokens; grad_norm: global, of the mean loss, before clipping; skipped: 1 if the
    gradients were not finite, or the step was to be skipped, and nothing was updated; nan: 1 if the loss is not finite.
    """

    values: Tensor  # [4]

    FIELDS = ("loss", "grad_norm", "skipped", "nan")

    @property
    def skipped(self) -> Tensor:
        """0-d, 0 or 1; what `LossScaler.update` wants."""
        return self.values[2]

    def read(self) -> dict[str, float]:
        """Return the figures as Python numbers. On a GPU tensor this waits for the step."""
        return dict(zip(self.FIELDS, self.values.tolist(), strict=True))


class Waitable(Protocol):
    """Something that the current stream, or the host, can wait for."""

    def wait(self) -> None: ...


class Zero1Optimizer:
    """AdamW over this rank's slices of the buckets. Make it after the parameters have got their first values.

    Making it is collective over dp_cp where weights are kept in FP8, which then get their first bytes.

    masters, exp_avg, exp_avg_sq: one float32 tensor [size / dp_cp] per bucket, the same as long as it lives. steps: 0-d
    float32, updates so far. snapshot_done: the end of a state copy in progress on another stream. The update waits for
    it.
    """

    def __init__(self, gradients: Gradients, cfg: OptimizerConfig, kernels: Kernels):
        self.gradients, self.cfg = gradients, cfg
        buckets = gradients.buckets
        self.masters = [bucket.take_masters() for bucket in buckets]
        self.exp_avg = [torch.zeros_like(master) for master in self.masters]
        self.exp_avg_sq = [torch.zeros_like(master) for master in self.masters]
        self.steps = torch.zeros((), dtype=torch.float32, device=gradients.mesh.device)
        self.snapshot_done: Waitable = Done()
        self.adamw_ = kernels.adamw_
        self.fp8_weights = Fp8Weights(gradients, self.masters, kernels.ops.cast_master)
        self.states = [
            AdamState(
                master,
                bucket.grad_slice,
                average,
                square,
                bucket.data_slice if bucket.data.is_floating_point() else master,
                cfg.weight_decay if bucket.key.decay else 0.0,
            )
            for bucket, master, average, square in zip(buckets, self.masters, self.exp_avg, self.exp_avg_sq)
        ]
        if self.fp8_weights.all:
            self.write_parameters()

    @torch.no_grad()
    def step(
        self, lr: float, loss_sum: Tensor, count: Tensor, backward_scale: float | Tensor = 1.0, skip: bool = False
    ) -> Stats:
        """Divide, clip, update, gather: call it after `gradients.finish()`. Collective over the world.

        loss_sum, count: 0-d device tensors, this rank's contributions to the sum of token losses and to the number of
        tokens; zeros on ranks that are not to contribute. backward_scale: what the loss sum was multiplied with
        before its backward (the fp16 loss scale), a number or a 0-d tensor. skip: update nothing.
        Gradients are invalid after this call.
        """
        totals = torch.stack([loss_sum.double(), count.double(), self.gradients.square_sum()])
        all_reduce_(totals, self.gradients.mesh.world)
        loss_sum, count, square_sum = totals.unbind()
        denominator = count * backward_scale
        norm = square_sum.sqrt() / denominator
        skipped = norm.isfinite().logical_not() | skip
        divisor = denominator
        if self.cfg.clip_grad:
            divisor = denominator * ((norm + CLIP_EPS) / self.cfg.clip_grad).clamp(min=1.0)
        self._update(lr, divisor.float(), skipped.float())
        self.gradients.after_gathers()
        loss = loss_sum / count
        return Stats(torch.stack([loss, norm, skipped.double(), loss.isfinite().logical_not().double()]))

    def _update(self, lr: float, divisor: Tensor, found_inf: Tensor) -> None:
        """Update all slices with gradient / divisor, unless found_inf is 1; one travels while the next is made."""
        self.steps += 1 - found_inf
        self.snapshot_done.wait()
        self.fp8_weights.begin()
        self.adamw_(
            self.states,
            self.steps,
            divisor,
            found_inf,
            AdamHyper(lr, self.cfg.betas, self.cfg.eps),
            updated=self.fp8_weights.write,
        )
        self.fp8_weights.end()

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Make all parameters of the masters, and wait until they are there. Collective over dp_cp."""
        self.fp8_weights.begin()
        for i, state in enumerate(self.states):
            state.param.copy_(state.master)
            self.fp8_weights.write(i)
        self.fp8_weights.end()
        self.gradients.wait_parameters()
