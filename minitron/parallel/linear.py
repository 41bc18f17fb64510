"""A linear layer: a matrix product and the communication beside it.

Problem: tensor parallelism puts a collective before or after each linear layer, FP8 puts a cast before it, and both are
fast only when they know of each other and of the gradient accumulation. The idea: one object, `Layer`, owns the sequence

    forward    quantize x -> [gather x] -> y = x W^T + bias -> [reduce or scatter y]
    backward   quantize dy -> [gather dy], meanwhile gather x again
               dx = dy W -> [reduce or scatter dx], meanwhile
               W.main_grad += dy^T x      in float32, inside the GEMM where the device can

and asks two others: a `Gemm` for the number format (kernels/gemm.py has the ordinary ones, kernels/fp8.py the others), and
`Separate` or `Pipelined` (parallel/overlap.py) for a product next to a collective, in one piece or in several. What is
gathered is the quantized payload, so FP8 also halves the traffic. Its users are two autograd functions: `linear` here,
and Llama's whole MLP in parallel/gated.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.comm.collectives import Done, all_reduce_
from minitron.comm.mesh import Axis
from minitron.kernels.gemm import Gemm, Payload, accumulate
from minitron.parallel.overlap import Pipelined, Separate


class Traffic(NamedTuple):
    """What a linear layer communicates along the tensor-parallel axis, and the way it does."""

    comm: Separate | Pipelined
    before: str = "none"  # "copy": x is the same on every rank; "gather": x is a slice of the sequence
    after: str = "none"   # "reduce": y is a partial sum; "scatter": of it only a slice of the sequence is kept

    def adjoint(self) -> Traffic:
        """What is communicated for dx from dy: a gather becomes a scatter, a copy a reduction, and the other way."""
        return Traffic(self.comm, {"reduce": "copy", "scatter": "gather"}.get(self.after, "none"),
                       {"copy": "reduce", "gather": "scatter"}.get(self.before, "none"))


class Layer(NamedTuple):
    """A linear layer as this file sees it."""

    weight: Tensor
    bias: Tensor | None  # only where nothing is communicated after the product
    gemm: Gemm
    traffic: Traffic

    def quantize(self, x: Tensor, *, columns: bool, record: bool) -> Payload:
        """The input x [m, k]."""
        return self.gemm.quantize(x, self._shared(self.traffic.before == "gather"), columns=columns, record=record)

    def quantize_grad(self, dy: Tensor, *, columns: bool) -> Payload:
        """The gradient dy [m, n] of the output."""
        return self.gemm.quantize(dy, self._shared(self.traffic.after == "scatter"), gradient=True, columns=columns)

    def forward(self, x: Payload) -> Tensor:
        """y [m', n] with its communication done."""
        multiply = self.gemm.forward if self.bias is None else partial(self.gemm.forward, bias=self.bias)
        self.gemm.prepare(self.weight)
        x = Payload(x.rows, x.rows_scale)  # all that this product reads, and so all that travels
        finish, _ = _product(multiply, x, self.weight, self.weight.shape[0], self.traffic, again=False)
        return finish()

    def backward(self, dy: Payload, x: Payload | None, need_dx: bool) -> tuple[Tensor | None, Tensor | None]:
        """(dx, dW); x None: the weight has no gradient. dW is None also if it went into main_grad."""
        traffic, weight, again = self.traffic, self.weight, x is not None
        gathered = _gather(x.for_weight_grad(), traffic.comm, traffic.before == "gather") if again else None
        finish, dw = None, None
        if need_dx:
            self.gemm.prepare(weight)
            finish, dy = _product(self.gemm.input_grad, dy, weight, weight.shape[1], traffic.adjoint(), again)
        elif again:
            dy = _gather(dy, traffic.comm, traffic.after == "scatter")()
        if again:
            dw = self.gemm.weight_grad(weight, dy, gathered())
        return finish() if need_dx else None, dw

    def _shared(self, gathered: bool) -> Axis:
        return self.traffic.comm.axis if gathered else Axis.single()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer, remake, training):
        keep = training and remake is None and ctx.needs_input_grad[1]
        payload = layer.quantize(rows(x), columns=keep, record=training)
        # Not saved tensors: recomputation hands those back as new tensors, without their main_grad.
        ctx.layer, ctx.remake, ctx.leading = layer, remake, x.shape[1:-1]
        if keep:
            ctx.save_for_backward(*payload.for_weight_grad())
        return unrows(layer.forward(payload), ctx.leading)

    @staticmethod
    def backward(ctx, dy):
        layer, x, dy = ctx.layer, None, rows(dy)
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        db = accumulate(layer.bias, dy.sum(0, dtype=torch.float32)) if need_db else None
        if not (need_dx or need_dw):
            return None, None, db, None, None, None
        if need_dw:
            x = (Payload(*ctx.saved_tensors) if ctx.remake is None else
                 layer.quantize(rows(ctx.remake()), columns=True, record=True))
        dx, dw = layer.backward(layer.quantize_grad(dy, columns=need_dw), x, need_dx)
        return None if dx is None else unrows(dx, ctx.leading), dw, db, None, None, None


def linear(x: Tensor, layer: Layer, remake: Callable[[], Tensor] | None = None) -> Tensor:
    """y = x W^T + bias with the communication that layer.traffic names.  x [s, b, k], weight [n, k] -> [s', b, n].

    s' is s times the axis' size after "gather", s divided by it after "scatter".
    remake: makes x again in the backward pass, so that x is not kept (selective recomputation).
    """
    return _Linear.apply(x, layer.weight, layer.bias, layer, remake, torch.is_grad_enabled())


def rows(x: Tensor) -> Tensor:
    """[..., k] -> [m, k]"""
    return x.reshape(-1, x.shape[-1])


def unrows(x: Tensor, batch: Sequence[int]) -> Tensor:
    """[m, k] -> [s, *batch, k]"""
    return x.view(-1, *batch, x.shape[-1])


def _product(multiply: Callable, x: Payload, weight: Tensor, columns: int, traffic: Traffic, again: bool):
    """multiply(x, weight) [m', columns] with its communication: (a function that waits for the result, x gathered).

    again: another product of the gathered x follows, which the communication of the result can run beside.
    """
    comm, shape = traffic.comm, (x.rows.shape[0], columns)
    if comm.axis.size > 1 and traffic.before == "gather":
        y = weight.new_empty(comm.axis.size * shape[0], columns)
        parts = comm.gather_then(x.parts(), lambda at, parts: multiply(x.of(parts), weight, y[at]), keep=again)
        return lambda: y, x.of(parts) if again else None
    if comm.axis.size > 1 and traffic.after == "scatter":
        def produce(at: slice, out: Tensor) -> None:
            multiply(x.cut(at), weight, out)

        if again:
            return comm.scatter(produce, shape, weight), x
        y = comm.then_scatter(produce, shape, weight)
        return lambda: y, x
    y = multiply(x, weight)
    handle = all_reduce_(y, comm.axis, wait=not comm.overlap) if traffic.after == "reduce" else Done()

    def finish() -> Tensor:
        handle.wait()
        return y

    return finish, x


def _gather(x: Payload, comm: Separate | Pipelined, wanted: bool) -> Callable[[], Payload]:
    """Begin gathering a payload along the sequence, the m of [m, k]; the function returned waits for the result."""
    if not wanted or comm.axis.size == 1:
        return lambda: x
    finish = comm.gather(x.parts())
    return lambda: x.of(finish())
