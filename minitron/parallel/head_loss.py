"""The head's product and the loss, for the whole sequence at once or in pieces of it.

Problem: with a vocabulary of 128k the logits of 8,192 tokens take 2 GiB, more than a block keeps, and those of 32,768
tokens four times as much. The idea: only the loss reads them, and it is a sum over tokens. So a forward that gets the
gradient of the loss (`loss_grad`) can make all gradients of a piece at once, and reuse the piece's memory:

    forward     for each piece: gather x; logits; losses; their gradient, in place; dx = dlogits W, scatter dx;
                dW += dlogits^T x. Beside these products the next piece is gathered, and the previous dx scattered
    backward    return dx

Under sequence parallelism piece c consists of the c-th part of each rank's slice, which the ranks gather:

    2 ranks, pieces of 4 of 8 tokens     rank 0 has 0 1 2 3, rank 1 has 4 5 6 7     pieces 0 1 4 5 and 2 3 6 7

The forwards of a step add dW to main_grad; the first one overwrites it (kernels/param.py). Each backward reports the
weight's gradient to its bucket. Only the report in a chunk's last backward counts. All forwards of the chunk have run
by then, so main_grad is complete. Under ZB-H1 the BackwardInput reports it; its BackwardWeight has no head product.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minitron.comm.handle import Handle
from minitron.kernels.gemm import Payload, Quantized
from minitron.kernels.param import Param
from minitron.parallel.linear import ColumnOp, apply_linear, rows
from minitron.parallel.vocab import token_losses, vocab_parallel_cross_entropy

Target = tuple[Tensor, Tensor]  # labels and mask of a piece


@dataclass(frozen=True)
class HeadLoss:
    """The sum of the tokens' losses. Collective over tp.

    op: the product with the vocabulary. num_ids: see `vocab_parallel_cross_entropy`. piece: tokens whose logits this
    rank holds at a time; None: all.
    """

    op: ColumnOp
    ops: ModuleType
    num_ids: int
    piece: int | None

    def __call__(self, x: Tensor | Quantized, labels: Tensor, mask: Tensor, loss_grad: Tensor | None = None) -> Tensor:
        """Map x [s/cp/tp, b, h], labels and mask [s/cp, b] to a 0-d float32 tensor. With `piece`, x must be a Tensor.

        loss_grad: 0-d, the gradient with which the backward of the result will begin; None: 1. Read only with `piece`.
        """
        if self.piece is None:
            logits = apply_linear(x, self.op)
            losses = vocab_parallel_cross_entropy(logits, labels, self.op.comm.axis, self.ops, self.num_ids)
            return (losses * mask).sum()
        ranks = self.op.input_axis.size
        slices = (t.reshape(ranks, -1).split(self.piece // ranks, 1) for t in (labels, mask))
        targets = [(ids.flatten(), counts.flatten()) for ids, counts in zip(*slices)]
        if loss_grad is None and torch.is_grad_enabled():
            loss_grad = mask.new_ones(())
        return _InPieces.apply(x, self.op.weight, self, targets, loss_grad)


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Param, head: HeadLoss, targets: list[Target], loss_grad: Tensor | None
    ) -> Tensor:
        """Make the loss sum and the gradients; without loss_grad only the loss sum."""
        training, ops, gemm, comm = loss_grad is not None, head.ops, head.op.gemm, head.op.comm
        need_dw, first = training and ctx.needs_input_grad[1], comm.axis.rank * len(weight)
        product, input_grad = gemm.forward(weight), gemm.input_grad(weight)
        total, dx = torch.zeros((), device=x.device), x.new_empty(x.shape) if training else x
        size = len(targets[0][0]) // head.op.input_axis.size  # rows of x in a piece
        x_parts, dx_parts = rows(x).split(size), rows(dx).split(size)

        def gather(part: Tensor) -> Handle[Payload]:
            payload = gemm.quantize(part, head.op.input_axis, columnwise=need_dw, update_history=training)
            return comm.start_gather(payload)

        dws, gathering, scattering = [], gather(x_parts[0]), Handle[Any]()
        for i, (labels, mask) in enumerate(targets):
            inputs = gathering.wait()
            if i + 1 < len(targets):
                gathering = gather(x_parts[i + 1])
            logits = product(inputs)
            losses, lse = token_losses(logits, labels, comm.axis, ops, head.num_ids)
            total += (losses * mask).sum()
            if loss_grad is not None:
                ops.softmax_gradient_(logits, labels, first, lse, mask * loss_grad, head.num_ids)
                dy = gemm.quantize_grad(logits, columnwise=need_dw)
                scattering.wait()
                scattering = comm.start_matmul_scatter(dy.for_product(), input_grad, weight.shape[1])
                scattering = scattering.then(dx_parts[i].copy_)
                if need_dw:
                    dws.append(gemm.weight_grad(weight, dy, inputs))
                del dy
            del logits, inputs  # the next piece reuses their memory
        scattering.wait()
        ctx.save_for_backward(dx)
        ctx.weight, ctx.dws = weight, dws
        return total

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that the forward made. They already contain the factor loss_grad, which equals dloss."""
        (dx,), slot, dws = ctx.saved_tensors, ctx.weight.slot, ctx.dws
        if dws and slot is not None:
            slot.report()
        dw = torch.stack(dws).sum(0) if dws and slot is None else None
        return dx, dw, None, None, None
