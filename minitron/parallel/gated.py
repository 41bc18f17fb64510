"""The MLP of Llama, down(silu(gate) * up) with gate and up from one product, as one operation.

Problem: between its two linear layers an FP8 MLP casts the result of SwiGLU, and in the backward pass the gradient of
SwiGLU's input: the largest tensors of the model. If each is an operation of its own, SwiGLU writes bf16 that the cast
reads back. The idea: one autograd function, in which one kernel computes and casts (`Gemm.quantize_swiglu`):

    forward    x cast -> up -> inner -> silu(gate) * up, cast -> down -> y
    backward   dy cast -> down -> d act -> gradient of inner, cast -> up -> dx

In other formats it computes what linear, `swiglu`, linear compute. For the backward pass it keeps the casts of x and of
the activation, and inner; with `recompute_input` (selective recomputation), or with frozen weights, inner alone.

An adapter (model/lora.py) reads x or the activation in full precision, so a layer with one runs as linear, `swiglu`,
linear.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minitron.kernels.gemm import ABSENT, Payload
from minitron.kernels.param import Param
from minitron.parallel.linear import Linear, RecomputeInput, column_backward, row_backward, rows, unrows


class _SwigluMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up_weight: Param,
        down_weight: Param,
        up: Linear,
        down: Linear,
        ops: ModuleType,
        recompute_input: RecomputeInput | None,
        training: bool,
    ) -> Tensor:
        keep = training and recompute_input is None
        cast = up.gemm.quantize(rows(x), up.comm.gathered, columns=keep and ctx.needs_input_grad[1], record=training)
        up.gemm.prepare(up_weight)
        inner, _ = up.comm.gather_matmul(cast.for_product(), up.gemm.forward, up_weight, up_weight.shape[0])
        act = down.gemm.quantize_swiglu(inner, ops, columns=keep and ctx.needs_input_grad[2], record=training)
        ctx.up, ctx.down, ctx.ops, ctx.recompute_input, ctx.batch = up, down, ops, recompute_input, x.shape[1:-1]
        saved = (
            [
                payload.for_weight_grad() if needed else Payload(ABSENT)
                for payload, needed in zip((cast, act), ctx.needs_input_grad[1:3])
            ]
            if keep
            else []
        )
        ctx.save_for_backward(inner, *(x for payload in saved for x in payload))
        down.gemm.prepare(down_weight)
        y = down.comm.matmul_scatter(act, down.gemm.forward, down_weight, down_weight.shape[0])
        return unrows(y, ctx.batch)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        up, down, ops, (inner, *saved) = ctx.up, ctx.down, ctx.ops, ctx.saved_tensors
        need_dx, need_up, need_down = ctx.needs_input_grad[:3]
        act = cast = None
        if need_down:
            act = Payload(*saved[4:]) if saved else down.gemm.quantize_swiglu(inner, ops, columns=True, record=True)
        payload = down.gemm.quantize_grad(rows(dy), down.comm.gathered, columns=need_down)
        d_act, dw_down = row_backward(down, payload, act, need_dx=True)
        d_inner = up.gemm.quantize_swiglu_grad(d_act, inner, ops, columns=need_up)
        if need_up:
            cast = (
                Payload(*saved[:4])
                if saved
                else up.gemm.quantize(rows(ctx.recompute_input()), up.comm.gathered, columns=True, record=True)
            )
        dx, dw_up = column_backward(up, d_inner, cast, need_dx)
        dx = None if dx is None else unrows(dx, ctx.batch)
        return dx, dw_up, dw_down, None, None, None, None, None


def swiglu_mlp(x: Tensor, up: Linear, down: Linear, ops: ModuleType, recompute_input: RecomputeInput | None) -> Tensor:
    """Run Llama's MLP: x [s', b, h] -> the same, s' being s/tp or, without sequence parallelism, s.

    up: column-parallel, gate and up side by side; down: row-parallel; both without bias. recompute_input: makes x anew
    in the backward pass, so that neither x nor the activation is kept.
    """
    return _SwigluMLP.apply(x, up.weight, down.weight, up, down, ops, recompute_input, torch.is_grad_enabled())


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, ops: ModuleType) -> Any:
        ctx.save_for_backward(inner)
        ctx.ops = ops
        return ops.swiglu_forward(inner)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.ops.swiglu_backward(dy, *ctx.saved_tensors), None


def swiglu(inner: Tensor, ops: ModuleType) -> Tensor:
    """Compute silu(gate) * up, gate and up side by side: [..., 2f] -> [..., f]."""
    return _Swiglu.apply(inner, ops)
