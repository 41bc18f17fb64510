"""Embedding and loss split over the vocabulary, along the `tp` axis.

Problem: the embedding, the head and above all the logits [s, b, v] of a large vocabulary take more memory than a block.
The idea (Shoeybi et al. 2019): every rank has the rows of v/tp tokens. It looks up these tokens and leaves zeros for
the others; the sum over the ranks is the embedding. For the cross-entropy, ranks exchange the maximum and the sum of
their columns and the label's logit, so no rank gathers the logits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.comm.collectives import all_reduce, gather_along, reduce_scatter
from minitron.comm.mesh import Axis
from minitron.kernels import plain
from minitron.kernels.param import Param, Shard, add_gradient
from minitron.parallel.layer_context import LayerContext


class _Lookup(torch.autograd.Function):
    """Lookup in a table with the rows of ids `first` to `first + len(table) - 1`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Param, first: int, ops: ModuleType, in_order: bool) -> Tensor:
        local = ids - first
        outside = (local < 0) | (local >= table.shape[0])
        ctx.table, ctx.first, ctx.ops, ctx.in_order = table, first, ops, in_order
        ctx.save_for_backward(ids)
        return F.embedding(local.masked_fill(outside, 0), table).masked_fill_(outside.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors

        def write(out: Tensor, add: bool) -> None:
            ctx.ops.add_rows_(out if add else out.zero_(), ids, ctx.first, dy, ctx.in_order)

        return None, add_gradient(ctx.table, write), None, None, None


def lookup(ids: Tensor, table: Param, first: int, ops: ModuleType, in_order: bool = False) -> Tensor:
    """Look up table[id - first], zeros for ids outside of the table: ids [...], table [v, h] -> [..., h].

    in_order: the gradient is a sum in a fixed order, so ranks with the same ids and dy get the same bits.
    """
    return _Lookup.apply(ids, table, first, ops, in_order)


class VocabParallelEmbedding(nn.Module):
    """Token embedding split over the vocabulary: ids [s, b] -> [s/tp, b, h].

    Without sequence parallelism the result is [s, b, h].
    """

    def __init__(self, vocab: int, hidden: int, context: LayerContext, *, std: float):
        super().__init__()
        self.context = context
        self.weight = context.parameter((vocab, hidden), Shard(0, context.axis, (vocab,)), std=std)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the tokens. Collective over tp."""
        axis = self.context.axis
        x = lookup(ids, self.weight, axis.rank * self.weight.shape[0], self.context.kernels.ops)
        return reduce_scatter(x, axis) if self.context.sequence_parallel else all_reduce(x, axis)


def token_losses(logits: Tensor, labels: Tensor, axis: Axis, ops: ModuleType, num_ids: int) -> tuple[Tensor, Tensor]:
    """Return each token's loss, and the logarithm of its sum of exp(logit), both [...] float32.

    Arguments: see `vocab_parallel_cross_entropy`. Gathers 3 numbers per token over `axis`.
    """
    sums = torch.stack(ops.softmax_sums(logits, labels, axis.rank * logits.shape[-1], num_ids))
    top, total, picked = gather_along(sums.unsqueeze(0), axis).unbind(1)  # [tp, ...] each
    highest = top.amax(0)
    lse = (total * (top - highest).exp()).sum(0).log() + highest
    return lse - picked.sum(0), lse


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, ops: ModuleType, num_ids: int) -> Tensor:
        losses, lse = token_losses(logits, labels, axis, ops, num_ids)
        ctx.save_for_backward(logits, labels, lse)
        ctx.first, ctx.ops, ctx.num_ids = axis.rank * logits.shape[-1], ops, num_ids
        return losses

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, lse = ctx.saved_tensors
        return ctx.ops.softmax_gradient_(logits, labels, ctx.first, lse, dloss, ctx.num_ids), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, axis: Axis, ops: ModuleType = plain, num_ids: int | None = None
) -> Tensor:
    """Compute the loss of each token from logits split over the vocabulary, in float32 and without gathering them.

    logits [s, b, v/tp], labels [s, b] global ids -> [s, b]. Collective over `axis`.
    num_ids: only so many first columns of this rank are token ids (None: all). The others are padding and are ignored.
    The backward pass overwrites the logits with their gradient.
    """
    return _CrossEntropy.apply(logits, labels, axis, ops, logits.shape[-1] if num_ids is None else num_ids)
