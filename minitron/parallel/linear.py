"""Linear layers split over the `tp` axis: a matrix product, and the communication before or after it.

Problem: one GPU is too small, or too slow, for a layer's weights and activations. The idea (Shoeybi et al. 2019): pair
a layer split by output columns with one split by input rows. Between them every rank works on its own columns. Only two
things must be summed over the ranks: the second layer's outputs and the first layer's input gradients.

    x [s, b, h] -> gather -> ColumnParallel -> [s, b, f/tp] -> activation -> RowParallel -> scatter -> [s, b, h]

Under sequence parallelism (Korthikanti et al. 2022) `gather` is an all-gather of the sequence and `scatter` a
reduce-scatter, so norms, dropout and residuals work on s/tp of it. Otherwise `gather` does nothing and `scatter` is an
all-reduce. Each is the adjoint of the other (f and g in comm/collectives.py):

                    column-parallel                            row-parallel
    forward         quantize x, gather x, y = x W^T + bias     quantize x, y = x W^T, scatter y
    backward        quantize dy; gather x again beside         quantize dy, gather dy, dx = dy W,
                    dx = dy W; scatter dx beside dW += dy^T x  dW += dy^T x
    ZB-H1: input    quantize dy, dx = dy W, scatter dx         quantize dy, gather dy, dx = dy W
    ZB-H1: weight   gather x again, dW += dy^T x               gather dy again, dW += dy^T x

A `Gemm` (kernels/gemm.py) has the products of a number format. A `ProcessGroupComm` (overlap.py) runs a product with
its communication, in one piece or in several. Ranks exchange the quantized matrix, so FP8 also halves the traffic. Each
cell of the table is a method of `ColumnOp` or `RowOp`. The autograd functions of a layer, of the MLP (mlp.py) and of
adapters (model/lora.py) call these. A split backward queues its weight gradients (pipeline/weight_queue.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minitron.comm.mesh import Axis
from minitron.kernels.gemm import ALONE, Gemm, Payload, Quantized
from minitron.kernels.param import Param, Shard, accumulate
from minitron.kernels.plain import sum_rows
from minitron.parallel.layer_context import LayerContext
from minitron.parallel.overlap import ProcessGroupComm
from minitron.pipeline.weight_queue import WeightQueue

RecomputeInput = Callable[[], Tensor | Quantized]


@dataclass(frozen=True, eq=False)
class LinearOp(ABC):
    """A weight with what its products need, and the passes that autograd functions call.

    bias: added by the product of a column-parallel layer; None in a row-parallel one. input_axis, grad_axis: the ranks
    that gather each other's x or dy, and so cast it with one FP8 scale. If nothing is gathered, an axis of one rank.
    """

    weight: Param
    bias: Param | None
    gemm: Gemm
    comm: ProcessGroupComm
    weight_queue: WeightQueue
    by_columns: ClassVar[bool]  # split by output features, else by input features

    @property
    def input_axis(self) -> Axis:
        return self.comm.gather_axis if self.by_columns else ALONE

    @property
    def grad_axis(self) -> Axis:
        return ALONE if self.by_columns else self.comm.gather_axis

    @abstractmethod
    def forward(self, x: Payload) -> Tensor:
        """Multiply and communicate."""

    @abstractmethod
    def backward(self, dy: Payload, x: Payload | None, need_dx: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return (dx, dW).

        x: the layer's input; None if the weight is frozen. dW is added to the weight's main_grad, now or by the weight
        queue, and None is returned. A weight without a gradient slot has no main_grad: then dW is returned.
        """


class ColumnOp(LinearOp):
    """Split by output features."""

    by_columns = True

    def forward(self, x: Payload) -> Tensor:
        """Gather x, then return x W^T + bias: x [m/tp, k] -> [m, n/tp]. Without sequence parallelism x is [m, k]."""
        product = self.gemm.forward(self.weight, self.bias)
        return self.comm.gather_matmul(x.for_product(), product, self.weight.shape[0])[0]

    def backward(self, dy: Payload, x: Payload | None, need_dx: bool) -> tuple[Tensor | None, Tensor | None]:
        weight, gemm, comm, dw = self.weight, self.gemm, self.comm, None
        if x is not None and self.weight_queue.deferring:
            add = partial(gemm.weight_grad, weight, dy.for_weight_grad())
            self.weight_queue.put(partial(comm.start_gather, x.for_weight_grad().detached()), add)
            x, dy = None, dy.for_product()
        gather = None if x is None else comm.start_gather(x.for_weight_grad())
        scatter = None
        if need_dx:
            product = gemm.input_grad(weight)
            if gather is None:
                return comm.matmul_scatter(dy, product, weight.shape[1]), None
            scatter = comm.start_matmul_scatter(dy, product, weight.shape[1])
        if gather is not None:
            dw = gemm.weight_grad(weight, dy, gather.wait())
        return None if scatter is None else scatter.wait(), dw


class RowOp(LinearOp):
    """Split by input features."""

    by_columns = False

    def forward(self, x: Payload) -> Tensor:
        """Return the sum over tp of x W^T, scattered: x [m, k/tp] -> [m/tp, n]; [m, n] without sequence parallelism."""
        return self.comm.matmul_scatter(x, self.gemm.forward(self.weight), self.weight.shape[0])

    def backward(self, dy: Payload, x: Payload | None, need_dx: bool) -> tuple[Tensor | None, Tensor | None]:
        weight, gemm, comm = self.weight, self.gemm, self.comm
        if x is not None and self.weight_queue.deferring:
            kept, gather = x.detached(), partial(comm.start_gather, dy.for_weight_grad())
            self.weight_queue.put(gather, lambda whole: gemm.weight_grad(weight, whole, kept))
            x, dy = None, dy.for_product()
        if not need_dx:
            return None, None if x is None else gemm.weight_grad(weight, comm.start_gather(dy).wait(), x)
        dx, whole = comm.gather_matmul(dy, gemm.input_grad(weight), weight.shape[1], keep=x is not None)
        return dx, None if x is None or whole is None else gemm.weight_grad(weight, whole, x)


# ---- the autograd function of both layers ---------------------------------------------------------------------------


def apply_linear(x: Tensor | Quantized, op: LinearOp, recompute_input: RecomputeInput | None = None) -> Tensor:
    """Multiply and communicate. Column-parallel: [s/tp, b, k] -> [s, b, n]. Row-parallel: [s, b, k] -> [s/tp, b, n].

    Without sequence parallelism both are [s, b, k] -> [s, b, n].

    recompute_input: recomputes x in the backward pass, so that x is not kept (selective recomputation).
    """
    training = torch.is_grad_enabled()
    return _Linear.apply(*parts_of(x), op.weight, op.bias, op, recompute_input, training)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        payload: Payload | None,
        weight: Param,
        bias: Param | None,
        op: LinearOp,
        recompute_input: RecomputeInput | None,
        training: bool,
    ) -> Tensor:
        keep = training and recompute_input is None and ctx.needs_input_grad[2]
        if payload is None:
            payload = op.gemm.quantize(rows(x), op.input_axis, columnwise=keep, update_history=training)
        ctx.op, ctx.recompute_input, ctx.batch = op, recompute_input, x.shape[1:-1]
        if keep:
            ctx.save_for_backward(*payload.for_weight_grad())
        return unrows(op.forward(payload), ctx.batch)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        op, dy = ctx.op, rows(dy)
        need_dx, _, need_dw, need_db = ctx.needs_input_grad[:4]
        x = saved_or_recomputed(ctx.saved_tensors, ctx.recompute_input, op) if need_dw else None
        db = accumulate(op.bias, sum_rows(dy)) if need_db else None
        if not (need_dx or need_dw):
            return None, None, None, db, None, None, None
        payload = op.gemm.quantize_grad(dy, op.grad_axis, columnwise=need_dw)
        del dy  # it may be a copy, which rows() makes of a dy that is not contiguous
        dx, dw = op.backward(payload, x, need_dx)
        return None if dx is None else unrows(dx, ctx.batch), None, dw, db, None, None, None


def saved_or_recomputed(saved: Sequence[Tensor], recompute_input: RecomputeInput | None, op: LinearOp) -> Payload:
    """Return the layer's input as the weight gradient reads it: saved by the forward pass, or recomputed."""
    if recompute_input is None:
        return Payload(*saved)
    x, payload = parts_of(recompute_input())
    if payload is not None:
        return payload
    return op.gemm.quantize(rows(x), op.input_axis, columnwise=True, update_history=True)


def parts_of(x: Tensor | Quantized) -> tuple[Tensor, Payload | None]:
    """Return (input, its cast or None). A `Quantized` input has a shape and a dtype, but no values."""
    return x if isinstance(x, Quantized) else (x, None)


def rows(x: Tensor) -> Tensor:
    """View [..., k] as [m, k]."""
    return x.reshape(-1, x.shape[-1])


def unrows(x: Tensor, batch: Sequence[int]) -> Tensor:
    """View [m, k] as [s, *batch, k]."""
    return x.view(-1, *batch, x.shape[-1])


# ---- the layers ------------------------------------------------------------------------------------------------------


class ParallelLinear(nn.Module):
    """What column- and row-parallel layers share. adapter: replaces the product; model/lora.py sets it."""

    def __init__(self, op: LinearOp, bias: Param | None):
        super().__init__()
        self.weight, self.bias, self.op = op.weight, bias, op
        self.adapter: nn.Module | None = None

    def forward(
        self, x: Tensor | Quantized, recompute_input: RecomputeInput | None = None, counters: Tensor | None = None
    ) -> Tensor:
        """Multiply. recompute_input: see `apply_linear`. counters: an adapter's dropout counters, one per row of x."""
        if self.adapter is not None:
            return self.adapter(x, recompute_input, counters)
        return apply_linear(x, self.op, recompute_input)

    @property
    def format(self) -> Gemm | None:
        """The number format in which the layer reads x; None with an adapter, which reads x in full precision."""
        return self.op.gemm if self.adapter is None else None


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + bias, split by output features: x [s/tp, b, h] -> [s, b, out/tp].

    Without sequence parallelism x is [s, b, h]. chunks: sizes of the outputs that are fused in one weight. Each is
    split over tp separately.
    """

    def __init__(
        self, in_features: int, chunks: tuple[int, ...], context: LayerContext, *, std: float, bias: bool, gemm: Gemm
    ):
        n, shard = sum(chunks), Shard(0, context.axis, chunks)
        weight = context.parameter((n, in_features), shard, std=std, fp8_scale=gemm.fp8_scale)
        b = context.parameter((n,), shard) if bias else None
        super().__init__(ColumnOp(weight, b, gemm, context.comm, context.weight_queue), b)


class RowParallelLinear(ParallelLinear):
    """y = x W^T, split by input features: x [s, b, in/tp] -> [s/tp, b, h].

    Without sequence parallelism y is [s, b, h]. The layer has a bias but does not add it. `Block` passes the bias to
    the next norm, which adds it to the residual stream and computes its gradient (`_AddNorm` in model/layers.py).
    """

    def __init__(
        self, in_features: int, out_features: int, context: LayerContext, *, std: float, bias: bool, gemm: Gemm
    ):
        shape, shard = (out_features, in_features), Shard(1, context.axis, (in_features,))
        weight = context.parameter(shape, shard, std=std, fp8_scale=gemm.fp8_scale)
        b = context.parameter(shape[:1]) if bias else None
        super().__init__(RowOp(weight, None, gemm, context.comm, context.weight_queue), b)
