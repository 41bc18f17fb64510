"""Linear layers split over the `tp` axis: a matrix product, and the communication before or after it.

Problem: a layer's weights, and the activations between layers, do not fit, or are too slow, on one GPU. The idea
(Shoeybi et al. 2019): pair a layer split by output columns with one split by input rows. Between them every rank works
on its own columns, and only the second layer's partial sums must be added up.

    x [s, b, h] --ColumnParallel--> [s, b, f/tp] --activation--> [s, b, f/tp] --RowParallel--> sum over tp [s, b, h]

Sequence parallelism (Korthikanti et al. 2022) splits that sum: each rank keeps s/tp of the sequence (reduce-scatter),
does norms, dropout and residuals on it, and the next column-parallel layer gathers the sequence again. Same traffic as
one all-reduce, 1/tp of the activations. Every layer is then

                    column-parallel                          row-parallel
    forward         quantize x, f, y = x W^T + bias          quantize x, y = x W^T, g
    backward        quantize dy, dx = dy W, g,               quantize dy, f, dx = dy W,
                    meanwhile gather x again,                dW += dy^T x
                    dW += dy^T x
    split           quantize dy, dx = dy W, g                quantize dy, f, dx = dy W
    ... later       gather x again, dW += dy^T x             gather dy again, dW += dy^T x

where f gathers the sequence and g reduces and scatters it (without sequence parallelism f does nothing and g is an
all-reduce). Two objects do the work: a `Gemm` (kernels/gemm.py) has the products of a number format, and a `LinearComm`
(parallel/overlap.py) runs a product together with f or g, in one piece or in several. What is gathered is the quantized
payload, so FP8 also halves the traffic. From a layer to its product it is three calls: the autograd function, the
communication, the format. The MLP (mlp.py) and adapters (model/lora.py) are autograd functions of their own
that use the same two. A backward that the schedule has split hands dW in for later (pipeline/deferred.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitron.comm.mesh import Axis
from minitron.kernels.gemm import ALONE, Gemm, Payload, Quantized
from minitron.kernels.param import Param, Shard, accumulate
from minitron.kernels.plain import sum_rows
from minitron.parallel.layout import Layout
from minitron.parallel.overlap import LinearComm, Product
from minitron.pipeline.deferred import Deferred

RecomputeInput = Callable[[], Tensor | Quantized]


class Linear(NamedTuple):
    """What the product of a layer needs. bias: the one that the product adds, in column-parallel layers."""

    weight: Param
    bias: Param | None
    gemm: Gemm
    comm: LinearComm
    put_off: Deferred

    @property
    def product(self) -> Product:
        """The forward product: product(x, weight, out) -> x W^T + bias."""
        return self.gemm.forward if self.bias is None else partial(self.gemm.forward, bias=self.bias)


# ---- column-parallel -------------------------------------------------------------------------------------------------


def column_linear(x: Tensor | Quantized, linear: Linear, recompute_input: RecomputeInput | None = None) -> Tensor:
    """Return f(x) W^T + bias: x [s/tp, b, k], weight [n/tp, k] -> [s, b, n/tp].

    Without sequence parallelism x is [s, b, k]. recompute_input: makes x anew in the backward pass, so that x is not
    kept (selective recomputation).
    """
    return _ColumnLinear.apply(
        *parts_of(x), linear.weight, linear.bias, linear, recompute_input, torch.is_grad_enabled()
    )


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        payload: Payload | None,
        weight: Param,
        bias: Param | None,
        linear: Linear,
        recompute_input: RecomputeInput | None,
        training: bool,
    ) -> Tensor:
        gemm, comm = linear.gemm, linear.comm
        keep = training and recompute_input is None and ctx.needs_input_grad[2]
        if payload is None:
            payload = gemm.quantize(rows(x), comm.gathered, columns=keep, record=training)
        ctx.linear, ctx.recompute_input, ctx.batch = linear, recompute_input, x.shape[1:-1]
        if keep:
            ctx.save_for_backward(*payload.for_weight_grad())
        gemm.prepare(weight)
        y, _ = comm.gather_matmul(payload.for_product(), linear.product, weight, weight.shape[0])
        return unrows(y, ctx.batch)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        linear, dy = ctx.linear, rows(dy)
        need_dx, _, need_dw, need_db = ctx.needs_input_grad[:4]
        x = saved_or_recomputed(ctx, ctx.saved_tensors, linear.gemm, linear.comm.gathered) if need_dw else None
        db = accumulate(linear.bias, sum_rows(dy)) if need_db else None
        payload = linear.gemm.quantize_grad(dy, columns=need_dw)
        del dy  # which is a copy if the gradient was not contiguous
        if not (need_dx or need_dw):
            return None, None, None, db, None, None, None
        dx, dw = column_backward(linear, payload, x, need_dx)
        return None if dx is None else unrows(dx, ctx.batch), None, dw, db, None, None, None


def column_backward(
    linear: Linear, dy: Payload, x: Payload | None, need_dx: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return (dx, dW).  x None: the weight is frozen. dW is None then, and where it went to main_grad."""
    weight, _, gemm, comm, put_off = linear
    if x is not None and put_off.holding:
        add = partial(gemm.weight_grad, weight, dy.for_weight_grad())
        put_off.put(partial(comm.start_gather, x.for_weight_grad().detached()), add)
        x, dy = None, dy.for_product()
    if x is None:
        if not need_dx:
            return None, None
        gemm.prepare(weight)
        return comm.matmul_scatter(dy, gemm.input_grad, weight, weight.shape[1]), None
    gathering = comm.start_gather(x.for_weight_grad())
    if not need_dx:
        return None, gemm.weight_grad(weight, dy, gathering.wait())
    gemm.prepare(weight)
    scattering = comm.start_matmul_scatter(dy, gemm.input_grad, weight, weight.shape[1])
    dw = gemm.weight_grad(weight, dy, gathering.wait())
    return scattering.wait(), dw


# ---- row-parallel ----------------------------------------------------------------------------------------------------


class _RowLinear(torch.autograd.Function):
    """g(x W^T): x [s, b, k/tp], weight [n, k/tp] -> [s/tp, b, n]; [s, b, n] without sequence parallelism."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Param, linear: Linear, recompute_input: RecomputeInput | None, training: bool
    ) -> Tensor:
        gemm = linear.gemm
        keep = training and recompute_input is None and ctx.needs_input_grad[1]
        payload = gemm.quantize(rows(x), columns=keep, record=training)
        ctx.linear, ctx.recompute_input, ctx.batch = linear, recompute_input, x.shape[1:-1]
        if keep:
            ctx.save_for_backward(*payload.for_weight_grad())
        gemm.prepare(weight)
        return unrows(linear.comm.matmul_scatter(payload, gemm.forward, weight, weight.shape[0]), ctx.batch)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        linear, (need_dx, need_dw) = ctx.linear, ctx.needs_input_grad[:2]
        x = saved_or_recomputed(ctx, ctx.saved_tensors, linear.gemm) if need_dw else None
        payload = linear.gemm.quantize_grad(rows(dy), linear.comm.gathered, columns=need_dw)
        dx, dw = row_backward(linear, payload, x, need_dx)
        return None if dx is None else unrows(dx, ctx.batch), dw, None, None, None


def row_backward(linear: Linear, dy: Payload, x: Payload | None, need_dx: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return (dx, dW) as `column_backward` does."""
    weight, _, gemm, comm, put_off = linear
    if x is not None and put_off.holding:
        kept = x.detached()
        put_off.put(
            partial(comm.start_gather, dy.for_weight_grad()), lambda whole: gemm.weight_grad(weight, whole, kept)
        )
        x, dy = None, dy.for_product()
    if not need_dx:
        return None, None if x is None else gemm.weight_grad(weight, comm.start_gather(dy).wait(), x)
    gemm.prepare(weight)
    dx, whole = comm.gather_matmul(dy, gemm.input_grad, weight, weight.shape[1], keep=x is not None)
    return dx, None if x is None or whole is None else gemm.weight_grad(weight, whole, x)


# ---- what both share -------------------------------------------------------------------------------------------------


def saved_or_recomputed(ctx: Any, saved: Sequence[Tensor], gemm: Gemm, gathered: Axis = ALONE) -> Payload:
    """Return the layer's input as the weight gradient reads it: `saved` by the forward pass, or made anew."""
    if saved:
        return Payload(*saved)
    x, payload = parts_of(ctx.recompute_input())
    return gemm.quantize(rows(x), gathered, columns=True, record=True) if payload is None else payload


def parts_of(x: Tensor | Quantized) -> tuple[Tensor, Payload | None]:
    """Return an input, or what stands for it, and its cast if it has been made."""
    return x if isinstance(x, Quantized) else (x, None)


def rows(x: Tensor) -> Tensor:
    """View [..., k] as [m, k]."""
    return x.reshape(-1, x.shape[-1])


def unrows(x: Tensor, batch: Sequence[int]) -> Tensor:
    """View [m, k] as [s, *batch, k]."""
    return x.view(-1, *batch, x.shape[-1])


# ---- the layers ------------------------------------------------------------------------------------------------------


class ParallelLinear(nn.Module):
    """What column- and row-parallel layers share. adapter: takes the product's place; model/lora.py sets it."""

    by_columns: bool

    def __init__(self, weight: Param, bias: Param | None, gemm: Gemm, layout: Layout):
        super().__init__()
        self.weight, self.bias = weight, bias
        gemm.adopt(weight)
        self.linear = Linear(weight, bias if self.by_columns else None, gemm, layout.comm, layout.put_off)
        self.adapter: nn.Module | None = None


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + bias, split by output features: x [s/tp, b, h] -> [s, b, out/tp].

    Without sequence parallelism x is [s, b, h]. chunks: sizes of the outputs that are fused in one weight, each split
    over tp by itself.
    """

    by_columns = True

    def __init__(
        self, in_features: int, chunks: tuple[int, ...], layout: Layout, *, std: float, bias: bool, gemm: Gemm
    ):
        shard = Shard(0, layout.axis, chunks)
        super().__init__(
            layout.parameter((sum(chunks), in_features), shard, std=std),
            layout.parameter((sum(chunks),), shard) if bias else None,
            gemm,
            layout,
        )

    def forward(
        self, x: Tensor | Quantized, recompute_input: RecomputeInput | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """Multiply. recompute_input: as in `column_linear`. keys: dropout's, of the rows of x, for an adapter."""
        if self.adapter is not None:
            return self.adapter(x, recompute_input, keys)
        linear = self.linear  # without `column_linear` in between: three calls from a layer to its product
        return _ColumnLinear.apply(
            *parts_of(x), linear.weight, linear.bias, linear, recompute_input, torch.is_grad_enabled()
        )

    @property
    def format(self) -> Gemm | None:
        """The format in which the layer reads x; None if it reads x as it is, since an adapter does."""
        return self.linear.gemm if self.adapter is None else None


class RowParallelLinear(ParallelLinear):
    """y = x W^T, split by input features: x [s, b, in/tp] -> [s/tp, b, h].

    Without sequence parallelism y is [s, b, h]. The caller adds the bias, in one pass with the residual.
    """

    by_columns = False

    def __init__(self, in_features: int, out_features: int, layout: Layout, *, std: float, bias: bool, gemm: Gemm):
        super().__init__(
            layout.parameter((out_features, in_features), Shard(1, layout.axis, (in_features,)), std=std),
            layout.parameter((out_features,)) if bias else None,
            gemm,
            layout,
        )

    def forward(self, x: Tensor, recompute_input: RecomputeInput | None = None, keys: Tensor | None = None) -> Tensor:
        """Multiply. recompute_input: as in `column_linear`. keys: dropout's, of the rows of x, for an adapter."""
        if self.adapter is not None:
            return self.adapter(x, recompute_input, keys)
        return _RowLinear.apply(x, self.linear.weight, self.linear, recompute_input, torch.is_grad_enabled())
