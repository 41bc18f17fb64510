"""Dynamic loss scale for fp16, wholly on the device.

Problem: fp16 has no numbers below 6e-8, so small gradients vanish, and none above 65504, so large ones overflow. The
idea (Micikevicius et al. 2018): multiply the loss by a power of two before the backward and divide the gradients after
it. The largest factor that does not overflow is found by trying. A step with an overflow is skipped, and a repeated
overflow halves the factor; many clean steps double it. The optimizer finds the overflow in the gradient norm, a device
scalar, so everything here is a `torch.where` and the host never waits.

    hysteresis 2, window 3      overflow  - x - x x - - - -         (x: a step with an overflow, skipped)
                                scale     8 8 8 4 2 2 2 4 4         the first x costs tolerance, each further one halves
                                tolerance 2 1 1 0 -1-1-1 2 2        the scale; a clean window doubles and resets

This is Megatron-LM's rule: clean steps in between do not restore the tolerance, only a whole clean window does.
The scale of bf16 and fp32 is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minitron.config.schema import PrecisionConfig

MIN_SCALE = 1.0


class LossScaler:
    """The loss scale of a run: dynamic in fp16, 1 in other formats.

    scale: 0-d float32. clean, tolerance: 0-d int32, the counters behind it. The three are changed in place and are the
    whole state.
    """

    def __init__(self, cfg: PrecisionConfig, device: torch.device, microbatch_tokens: int):
        self.dynamic, self.microbatch_tokens = cfg.dtype == "fp16", microbatch_tokens
        self.window, self.hysteresis = cfg.loss_scale_window, cfg.loss_scale_hysteresis
        scale = cfg.loss_scale if self.dynamic else 1.0
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self.clean = torch.zeros((), dtype=torch.int32, device=device)  # steps since the last overflow or doubling
        # Overflows left before the scale halves.
        self.tolerance = torch.full((), self.hysteresis, dtype=torch.int32, device=device)

    def loss_grad(self, num_microbatches: int) -> Tensor | float:
        """Return the gradient with which the backward of a microbatch's loss sum begins; the optimizer divides by it.

        fp16 cannot hold the gradient of a sum over all tokens times the loss scale, so there the sum becomes a mean.
        """
        return self.scale / (self.microbatch_tokens * num_microbatches) if self.dynamic else 1.0

    def state(self) -> dict[str, Tensor]:
        """Map the names in a checkpoint to 0-d tensors; empty if the scale is constant."""
        if not self.dynamic:
            return {}
        return {"loss_scale": self.scale, "clean_steps": self.clean, "loss_tolerance": self.tolerance}

    def update(self, overflow: Tensor) -> None:
        """Adapt the scale to a step: `overflow` 0-d, not 0 if its gradients were not finite (`Stats.skipped`)."""
        if not self.dynamic:
            return
        overflow = overflow != 0
        clean = (self.clean + 1).masked_fill(overflow, 0)
        tolerance = self.tolerance - overflow.int()
        grow, shrink = clean >= self.window, overflow & (tolerance <= 0)
        halved = (self.scale * 0.5).clamp(min=MIN_SCALE)
        self.scale.copy_(torch.where(shrink, halved, torch.where(grow, self.scale * 2, self.scale)))
        self.clean.copy_(clean.masked_fill(grow, 0))
        self.tolerance.copy_(tolerance.masked_fill(grow, self.hysteresis))
