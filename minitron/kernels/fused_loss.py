"""Cross-entropy in Triton, forward and backward: see kernels/fused.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _softmax_sums(logits, labels, top, total, picked, vocab, num_ids, first, BLOCK: tl.constexpr):
    # Loads are masked by the row's end, not by num_ids: a bound that is no multiple of 16 would keep them from being
    # vectorized.
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row) - first
    best, summed = float("-inf"), 0.0
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + columns, columns < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(columns < num_ids, x, float("-inf"))
        higher = tl.maximum(best, tl.max(x))
        summed = summed * tl.exp(best - higher) + tl.sum(tl.exp(x - higher))
        best = higher
    inside = (label >= 0) & (label < num_ids)
    tl.store(top + row, best)
    tl.store(total + row, summed)
    tl.store(picked + row, tl.load(logits + row * vocab + label, inside, other=0.0).to(tl.float32))


@triton.jit
def _softmax_gradient(logits, labels, lse, dloss, vocab, num_ids, first, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    label = tl.load(labels + row) - first
    x = tl.load(logits + row * vocab + columns, inside).to(tl.float32)
    p = tl.exp(x - tl.load(lse + row)) - tl.where(columns == label, 1.0, 0.0)
    grad = tl.where(columns < num_ids, p * tl.load(dloss + row), 0.0)
    tl.store(logits + row * vocab + columns, grad, inside)


def softmax_sums(
    logits: Tensor, labels: Tensor, first: int, num_ids: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Reduce each row of logits [..., v] to its maximum, its sum of exp(x - maximum) and the label's logit.

    See kernels/plain.py.
    """
    assert logits.is_contiguous() and labels.is_contiguous()
    vocab = logits.shape[-1]
    num_ids = vocab if num_ids is None else num_ids
    top, total, picked = (torch.empty(labels.shape, dtype=torch.float32, device=logits.device) for _ in range(3))
    tensors, grid = (logits, labels, top, total, picked), (labels.numel(),)
    _softmax_sums[grid](*tensors, vocab, num_ids, first, BLOCK=8192, num_warps=4)
    return top, total, picked


def softmax_gradient_(
    logits: Tensor, labels: Tensor, first: int, lse: Tensor, dloss: Tensor, num_ids: int | None = None
) -> Tensor:
    """Replace the logits by their gradient, (softmax - onehot(label)) * dloss; see kernels/plain.py."""
    assert logits.is_contiguous() and labels.is_contiguous() and lse.is_contiguous()
    vocab = logits.shape[-1]
    num_ids = vocab if num_ids is None else num_ids
    tensors, grid = (logits, labels, lse, dloss.contiguous()), (labels.numel(), triton.cdiv(vocab, 4096))
    _softmax_gradient[grid](*tensors, vocab, num_ids, first, BLOCK=4096, num_warps=8)
    return logits
