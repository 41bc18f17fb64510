"""The AdamW update in Triton, and the cast of masters to FP8 weights: see kernels/fused.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitron.kernels.plain import AdamHyper, AdamState, Updated


@triton.jit
def _adamw(master, grad, average, square, param, corrections, divisor, found_inf, numbers, n, BLOCK: tl.constexpr):
    lr, beta1, beta2, rest1, rest2, eps, decay = numbers
    if tl.load(found_inf) == 0.0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        g = tl.load(grad + i, inside).to(tl.float32) / tl.load(divisor)
        p = tl.load(master + i, inside) * (1 - lr * decay)
        m = tl.load(average + i, inside) * beta1 + g * rest1
        v = tl.load(square + i, inside) * beta2 + g * g * rest2
        p -= lr / tl.load(corrections) * m / (tl.sqrt(v / tl.load(corrections + 1)) + eps)
        tl.store(master + i, p, inside)
        tl.store(average + i, m, inside)
        tl.store(square + i, v, inside)
        if param is not None:
            tl.store(param + i, p, inside)


def adamw_(
    states: list[AdamState], steps: Tensor, divisor: Tensor, found_inf: Tensor, hyper: AdamHyper, updated: Updated
) -> None:
    """Update each state in one pass over memory; see kernels/plain.py."""
    corrections = torch.stack([1 - beta ** steps.double() for beta in hyper.betas]).float()
    rests = [1 - beta for beta in hyper.betas]  # here in float64: in the kernel's float32, 1 - 0.999 is 1e-5 off
    for i, s in enumerate(states):
        n, param = s.master.numel(), None if s.param.dtype == torch.float32 else s.param  # then it is the master
        tensors = s.master, s.grad, s.average, s.square, param, corrections, divisor, found_inf
        numbers = hyper.lr, *hyper.betas, *rests, hyper.eps, s.decay
        _adamw[(triton.cdiv(n, 4096),)](*tensors, numbers, n, BLOCK=4096, num_warps=8)
        updated(i)


@triton.jit
def _cast_master(master, scale, out, amax, n, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(master + i, inside, other=0.0).to(tl.bfloat16).to(tl.float32)
    if out is not None:
        scaled = tl.minimum(tl.maximum(value * tl.load(scale), -LIMIT), LIMIT)
        tl.store(out + i, scaled.to(out.dtype.element_ty), inside)
    if amax is not None:
        tl.atomic_max(amax, tl.max(tl.abs(value)), sem="relaxed")


def cast_master(master: Tensor, scale: Tensor, out: Tensor | None, amax: Tensor | None) -> None:
    """Cast masters to an FP8 weight; see kernels/plain.py."""
    n, limit = master.numel(), 0.0 if out is None else torch.finfo(out.dtype).max
    _cast_master[(triton.cdiv(n, 4096),)](master, scale, out, amax, n, LIMIT=limit, BLOCK=4096, num_warps=8)
