"""The MLP of both families, down(activation(up(x))), as one operation.

Problem: an FP8 MLP casts the activation between its two linear layers, and in the backward pass the gradient of the
activation's input. These are the largest tensors of the model. As separate operations, the activation would write bf16
that the cast reads back. The sum for the gradient of `up`'s bias would read the same tensor once more.
The idea: one autograd function, in which one kernel computes, casts and sums (`Gemm.quantize_activation`, `_grad`):

    forward    x cast -> up -> inner -> activation, cast -> down -> y
    backward   dy cast -> down -> d activation -> gradient of inner, cast and summed for the bias, -> up -> dx

It keeps inner and the casts of x and of the activation for the backward pass. With `recompute_input` (selective
recomputation) or frozen weights it keeps inner alone. In other formats it computes the same without casts. A gradient
of inner that its kernel does not cast is written over inner.

An adapter (model/lora.py) reads x or the activation in full precision, so a layer with one runs as linear, `activate`,
linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minitron.kernels.gemm import ABSENT, Activation, Payload, Quantized
from minitron.kernels.param import Param, accumulate
from minitron.parallel.linear import LinearOp, RecomputeInput, parts_of, rows, saved_or_recomputed, unrows

NOTHING = Payload(ABSENT)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cast: Payload | None,
        up_weight: Param,
        up_bias: Param | None,
        down_weight: Param,
        up: LinearOp,
        down: LinearOp,
        activation: Activation,
        recompute_input: RecomputeInput | None,
        training: bool,
    ) -> Tensor:
        keep, (_, _, need_up, _, need_down, *_) = training and recompute_input is None, ctx.needs_input_grad
        keep_x, keep_act = keep and need_up, keep and need_down  # what is not kept is recomputed, or not needed
        if cast is None:
            cast = up.gemm.quantize(rows(x), up.input_axis, columnwise=keep_x, update_history=training)
        inner = up.forward(cast)
        act = down.gemm.quantize_activation(inner, activation, columnwise=keep_act, update_history=training)
        ctx.layers, ctx.recompute_input, ctx.batch = (up, down, activation), recompute_input, x.shape[1:-1]
        saved_x = cast.for_weight_grad() if keep_x else NOTHING
        ctx.save_for_backward(inner, *saved_x, *(act.for_weight_grad() if keep_act else NOTHING))
        return unrows(down.forward(act), ctx.batch)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (up, down, activation), (inner, *saved) = ctx.layers, ctx.saved_tensors
        need_dx, _, need_up, need_bias, need_down = ctx.needs_input_grad[:5]
        x = act = None
        if need_down and ctx.recompute_input is None:
            act = Payload(*saved[4:])
        elif need_down:
            act = down.gemm.quantize_activation(inner, activation, columnwise=True, update_history=True)
        payload = down.gemm.quantize_grad(rows(dy), down.grad_axis, columnwise=need_down)
        d_act, dw_down = down.backward(payload, act, need_dx=True)
        del payload, act
        d_inner, sums = up.gemm.quantize_activation_grad(d_act, inner, activation, columnwise=need_up, sums=need_bias)
        del d_act
        db = None if sums is None else accumulate(up.bias, sums)
        if need_up:
            x = saved_or_recomputed(saved[:4], ctx.recompute_input, up)
        dx, dw_up = up.backward(d_inner, x, need_dx)
        dx = None if dx is None else unrows(dx, ctx.batch)
        return dx, None, dw_up, db, dw_down, None, None, None, None, None


def mlp(
    x: Tensor | Quantized, up: LinearOp, down: LinearOp, activation: Activation, recompute_input: RecomputeInput | None
) -> Tensor:
    """Run an MLP: x [s/tp, b, h] -> the same shape; [s, b, h] without sequence parallelism.

    up: column-parallel, for SwiGLU gate and up side by side. down: row-parallel; the caller adds its bias.
    recompute_input: recomputes x in the backward pass, so that neither x nor the activation is kept.
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
    """Apply the activation alone, for a layer with an adapter. It keeps `inner` for the backward pass."""
    return _Activate.apply(inner, activation)
