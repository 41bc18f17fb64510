"""The MLP of both families, down(activation(up(x))), as one operation.

Problem: between its two linear layers an FP8 MLP casts the activation, and in the backward pass the gradient of the
activation's input: the largest tensors of the model. If each is an operation of its own, the activation writes bf16
that the cast reads back, and where `up` has a bias, its gradient is a sum that reads the same once more. The idea: one
autograd function, in which one kernel computes, casts and sums (`Gemm.quantize_activation`, `_grad`):

    forward    x cast -> up -> inner -> activation, cast -> down -> y
    backward   dy cast -> down -> d activation -> gradient of inner, cast and summed for the bias, -> up -> dx

In other formats it computes what linear, activation, linear compute. For the backward pass it keeps the casts of x and
of the activation, and inner; with `recompute_input` (selective recomputation), or with frozen weights, inner alone.

An adapter (model/lora.py) reads x or the activation in full precision, so a layer with one runs as linear, `activate`,
linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minitron.kernels.gemm import ABSENT, Activation, Payload, Quantized
from minitron.kernels.param import Param, accumulate
from minitron.parallel.linear import (
    Linear,
    RecomputeInput,
    column_backward,
    column_forward,
    parts_of,
    row_backward,
    row_forward,
    rows,
    saved_or_recomputed,
    unrows,
)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cast: Payload | None,
        up_weight: Param,
        up_bias: Param | None,
        down_weight: Param,
        up: Linear,
        down: Linear,
        activation: Activation,
        recompute_input: RecomputeInput | None,
        training: bool,
    ) -> Tensor:
        keep, (_, _, need_up, _, need_down, *_) = training and recompute_input is None, ctx.needs_input_grad
        if cast is None:
            cast = up.gemm.quantize(rows(x), up.input_axis, columnwise=keep and need_up, record=training)
        inner = column_forward(up, cast)
        act = down.gemm.quantize_activation(inner, activation, columnwise=keep and need_down, record=training)
        ctx.up, ctx.down, ctx.activation = up, down, activation
        ctx.recompute_input, ctx.batch = recompute_input, x.shape[1:-1]
        saved = (
            [
                payload.for_weight_grad() if needed else Payload(ABSENT)
                for payload, needed in ((cast, need_up), (act, need_down))
            ]
            if keep
            else []
        )
        ctx.save_for_backward(inner, *(x for payload in saved for x in payload))
        return unrows(row_forward(down, act), ctx.batch)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        up, down, activation, (inner, *saved) = ctx.up, ctx.down, ctx.activation, ctx.saved_tensors
        need_dx, _, need_up, need_bias, need_down = ctx.needs_input_grad[:5]
        act = cast = None
        if need_down:
            act = (
                Payload(*saved[4:])
                if saved
                else down.gemm.quantize_activation(inner, activation, columnwise=True, record=True)
            )
        payload = down.gemm.quantize_grad(rows(dy), down.grad_axis, columnwise=need_down)
        d_act, dw_down = row_backward(down, payload, act, need_dx=True)
        d_inner, sums = up.gemm.quantize_activation_grad(d_act, inner, activation, columnwise=need_up, sums=need_bias)
        del d_act
        db = None if sums is None else accumulate(up.bias, sums)
        if need_up:
            cast = saved_or_recomputed(ctx, saved[:4], up)
        dx, dw_up = column_backward(up, d_inner, cast, need_dx)
        dx = None if dx is None else unrows(dx, ctx.batch)
        return dx, None, dw_up, db, dw_down, None, None, None, None, None


def mlp(
    x: Tensor | Quantized, up: Linear, down: Linear, activation: Activation, recompute_input: RecomputeInput | None
) -> Tensor:
    """Run an MLP: x [s', b, h] -> the same, s' being s/tp or, without sequence parallelism, s.

    up: column-parallel, for SwiGLU gate and up side by side; down: row-parallel, its bias is the caller's.
    recompute_input: makes x anew in the backward pass, so that neither x nor the activation is kept.
    """
    training = torch.is_grad_enabled()
    return _MLP.apply(*parts_of(x), up.weight, up.bias, down.weight, up, down, activation, recompute_input, training)


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, activation: Activation) -> Any:
        ctx.save_for_backward(inner)
        ctx.activation = activation
        return activation.forward(inner)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.activation.backward(dy, *ctx.saved_tensors)[0], None


def activate(inner: Tensor, activation: Activation) -> Tensor:
    """Apply the activation alone; for the backward pass it keeps `inner`. For a layer with an adapter."""
    return _Activate.apply(inner, activation)
