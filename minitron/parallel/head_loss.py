"""The head's product and the loss, for the whole sequence at once or in pieces of it.

Problem: with a vocabulary of 128k the logits of 8,192 tokens take 2 GiB, more than a block keeps, and those of 32,768
tokens four times as much. The idea: only the loss reads them, and it is a sum over tokens. So a forward that knows the
gradient of the loss (`loss_grad`) can make all gradients of a piece at once, and reuse the piece's memory:

    forward     for each piece: gather x; logits; losses; their gradient, in place; dx = dlogits W, scatter dx;
                dW += dlogits^T x. The next piece is gathered and the last one's dx scattered beside these products
    backward    return dx

Under sequence parallelism piece c is the c-th part of each rank's slice, so each rank gathers a part of its own slice:

    2 ranks, pieces of 4 of 8 tokens     rank 0 has 0 1 2 3, rank 1 has 4 5 6 7     pieces 0 1 4 5 and 2 3 6 7

The forwards of a step add dW to main_grad; the first one overwrites it (kernels/param.py). Each backward reports the
weight. All forwards of a chunk have run before its last backward, whose reports count. A split backward reports it with
its BackwardInput, and leaves nothing to its BackwardWeight.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minitron.comm.handle import Handle
from minitron.kernels.gemm import Payload, Quantized
from minitron.kernels.param import Param
from minitron.parallel.linear import ColumnOp, apply_linear, parts_of, rows
from minitron.parallel.vocab import token_losses, vocab_parallel_cross_entropy


def head_loss(
    x: Tensor | Quantized,
    op: ColumnOp,
    labels: Tensor,
    mask: Tensor,
    ops: ModuleType,
    num_ids: int,
    piece: int | None = None,
    loss_grad: Tensor | None = None,
) -> Tensor:
    """Sum the losses of tokens: x [s/cp/tp, b, h], labels and mask [s/cp, b] -> 0-d float32. Collective over tp.

    num_ids: see `vocab_parallel_cross_entropy`. piece: tokens whose logits this rank holds at a time; None: all.
    loss_grad: 0-d, the gradient with which the backward of the sum will begin; None: 1. Only pieces read it.
    """
    if piece is None:
        losses = vocab_parallel_cross_entropy(apply_linear(x, op), labels, op.comm.axis, ops, num_ids)
        return (losses * mask).sum()
    ranks = op.input_axis.size
    slices = (t.reshape(ranks, -1).split(piece // ranks, 1) for t in (labels, mask))
    targets = [(ids.flatten(), counts.flatten()) for ids, counts in zip(*slices)]
    training = torch.is_grad_enabled()
    return _HeadLoss.apply(*parts_of(x), op.weight, op, targets, ops, num_ids, piece // ranks, loss_grad, training)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cast: Payload | None,
        weight: Param,
        op: ColumnOp,
        targets: Sequence[tuple[Tensor, Tensor]],
        ops: ModuleType,
        num_ids: int,
        size: int,
        loss_grad: Tensor | None,
        training: bool,
    ) -> Tensor:
        need_dx, need_dw = (training and ctx.needs_input_grad[i] for i in (0, 2))
        gemm, comm, first = op.gemm, op.comm, op.comm.axis.rank * len(weight)
        forward, input_grad = gemm.forward(weight), gemm.input_grad(weight) if need_dx else None
        dx = x.new_empty(x.shape) if need_dx else None
        total = torch.zeros((), device=x.device)
        dws: list[Tensor | None] = []

        def gather(i: int) -> Handle[Payload]:
            part = slice(i * size, (i + 1) * size)
            if cast is not None:
                return comm.start_gather(cast.cut(part))
            return comm.start_gather(
                gemm.quantize(rows(x)[part], op.input_axis, columnwise=need_dw, update_history=training)
            )

        def compute(i: int, inputs: Payload, scattering: Handle[Any]) -> Handle[Any]:
            """Compute a piece; return the handle of its dx. Its logits are freed at the end."""
            labels, mask = targets[i]
            logits = forward(inputs)
            losses, lse = token_losses(logits, labels, comm.axis, ops, num_ids)
            total.add_((losses * mask).sum())
            if not (need_dx or need_dw):
                return scattering
            dlosses = mask if loss_grad is None else mask * loss_grad
            dlogits = ops.softmax_gradient_(logits, labels, first, lse, dlosses, num_ids)
            dy = gemm.quantize_grad(dlogits, columnwise=need_dw)
            scattering.wait()
            if dx is not None and input_grad is not None:
                scattering = comm.start_matmul_scatter(dy.for_product(), input_grad, weight.shape[1])
                scattering = scattering.then(rows(dx)[i * size : (i + 1) * size].copy_)
            if need_dw:
                dws.append(gemm.weight_grad(weight, dy, inputs))
            return scattering

        gathering, scattering = gather(0), Handle[Any]()
        for i in range(len(targets)):
            inputs = gathering.wait()
            if i + 1 < len(targets):
                gathering = gather(i + 1)
            scattering = compute(i, inputs, scattering)
        scattering.wait()
        ctx.save_for_backward(dx)
        ctx.weight, ctx.dws = weight if need_dw else None, [dw for dw in dws if dw is not None]
        return total

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """Return what the forward has made: `dloss` is the loss_grad that it has multiplied by."""
        if ctx.weight is not None and ctx.weight.slot is not None:
            ctx.weight.slot.notify()
        (dx,), dw = ctx.saved_tensors, sum(ctx.dws) if ctx.dws else None
        return dx, None, dw, None, None, None, None, None, None, None
