"""Weight gradients and AdamW by NVIDIA's apex, where it is built: train.kernels=apex.

Two functions of kernels/plain.py can run on apex's kernels; nothing else of apex is used:

    add_product   fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32, or _fp16 to gradients in bf16
    adamw_        amp_C.multi_tensor_adam_capturable, what FusedAdam calls

Both are separate extension modules, so the name `apex`, which on PyPI is another project's, is never imported. Only
kernels/kernels.py imports this file. These products do not use apex even with train.kernels=apex:

    the first gradient of a step    apex can only add; torch's GEMM overwrites, so main_grad need not be zeroed
    float32 products                apex lets cuBLAS multiply float32 in float16
    FP8 products                    precision.fp8_backend computes them

Its AdamW reads every tensor as if it had the gradient's dtype, without a check. So a bf16 gradient is cast to float32
first. multi_tensor_adam_capturable_master would write the bf16 parameter in the same pass. But it reads the gradient as
if it had the parameter's dtype, also without a check. So the parameter is cast in a second pass.
"""

from __future__ import annotations

import torch  # first: apex's extensions need the libraries that it loads
from amp_C import multi_tensor_adam_capturable
from fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp16, wgrad_gemm_accum_fp32
from torch import Tensor

from minitron.kernels import fused
from minitron.kernels.plain import AdamHyper, AdamState, Updated

CHUNK = 2048 * 32  # elements per block of threads, apex's own choice
PIECE = 1 << 30  # elements of a tensor: the kernels count them in int32
DECOUPLED_DECAY = 1  # the kernel's mode 1 is AdamW
CORRECT_BIAS = 1


def add_product(out: Tensor, dy: Tensor, x: Tensor, *, add: bool) -> None:
    """Write or add dy^T x; see kernels/plain.py."""
    if dy.dtype == torch.float32 or not add:
        return fused.add_product(out, dy, x, add=add)
    assert out.is_contiguous()  # apex ignores strides
    accumulate = wgrad_gemm_accum_fp32 if out.dtype == torch.float32 else wgrad_gemm_accum_fp16
    accumulate(x.contiguous(), dy.contiguous(), out)


def adamw_(
    states: list[AdamState], steps: Tensor, divisor: Tensor, skipped: Tensor, hyper: AdamHyper, updated: Updated
) -> None:
    """Update every state, with all numbers of the step on the device; see kernels/plain.py."""
    skip, steps, inverse = skipped.int(), steps.int(), divisor.reciprocal()
    lr = torch.full_like(inverse, hyper.lr)
    for i, s in enumerate(states):
        tensors = [list(x.split(PIECE)) for x in (s.grad.float(), s.master, s.exp_avg, s.exp_avg_sq)]
        numbers = lr, *hyper.betas, hyper.eps, steps, DECOUPLED_DECAY, CORRECT_BIAS, s.decay, inverse
        multi_tensor_adam_capturable(CHUNK, skip, tensors, *numbers)
        if s.param.dtype != torch.float32:
            s.param.copy_(s.master)
        updated(i)
