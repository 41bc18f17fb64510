"""The GEMM seam: every matrix product of the model passes through here, with the communication next to it.

Problem: tensor parallelism puts a collective before or after each linear layer, FP8 puts a cast before it, and
both are fast only when they know of each other and of the gradient accumulation. The idea: one object, `Layer`, owns
the sequence

    forward    quantize x -> [gather x] -> y = x W^T + bias -> [reduce or scatter y]
    backward   quantize dy -> [gather dy], meanwhile gather x again
               dx = dy W -> [reduce or scatter dx], meanwhile
               W.main_grad += dy^T x      in float32, inside the GEMM where the device can

and asks two others: a `Gemm` for the number format (this file has the ordinary ones, minitron/fp8.py the others), and
`Separate` or `Pipelined` (minitron/overlap.py) for a product next to a collective, in one piece or in several. What is
gathered is the quantized payload, so FP8 also halves the traffic. Its users are two autograd functions: `linear` here,
and Llama's whole MLP in minitron/parallel/gated.py.

Gradients of weights do not pass through autograd's `.grad`: a parameter with a `main_grad` (float32, a view into the
optimizer's flat buffer) has its gradient added there, or written if `grad_stale` says that the buffer still holds
the last step's; then `grad_ready()` is called on it, so that its bucket can be reduced. A parameter without one gets
an ordinary `.grad`, so layers can be tested alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from minitron import meta
from minitron.collectives import Done, all_reduce_
from minitron.mesh import Axis
from minitron.overlap import Pipelined, Separate

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# ---- gradients into main_grad -------------------------------------------------------------------------------------


def accumulate(param: Tensor, grad: Tensor) -> Tensor | None:
    """Add `grad` to param.main_grad and report it; without a main_grad hand it back to autograd."""
    if not hasattr(param, "main_grad"):
        return grad.to(param.dtype)
    if param.grad_stale:
        param.main_grad.copy_(grad)
        param.grad_stale = False
    else:
        param.main_grad.add_(grad)
    param.grad_ready()
    return None


def accumulate_product(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """weight.main_grad += dy^T x.  dy [m, n], x [m, k] -> [n, k], accumulated in float32."""
    if not hasattr(weight, "main_grad"):
        return dy.t() @ x
    main, dy = weight.main_grad, dy.t()
    beta, weight.grad_stale = (0 if weight.grad_stale else 1), False  # beta 0 reads nothing, not even a NaN
    if dy.is_meta:
        meta.add_product(main, dy, x)
    elif dy.dtype == torch.float32 or dy.is_cpu:
        main.addmm_(dy.float(), x.float(), beta=beta)
    elif beta:
        torch.ops.aten.addmm.dtype_out(main, dy, x, torch.float32, out=main)
    else:
        torch.ops.aten.mm.dtype_out(dy, x, torch.float32, out=main)
    weight.grad_ready()
    return None


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx, param):
        ctx.param = param
        return param.view_as(param)

    @staticmethod
    def backward(ctx, grad):
        return accumulate(ctx.param, grad)


def use(param: Tensor) -> Tensor:
    """`param` for ordinary autograd operations; its gradient lands in main_grad. For small ones: biases."""
    return _Use.apply(param) if hasattr(param, "main_grad") else param


# ---- number formats -----------------------------------------------------------------------------------------------


class Payload(NamedTuple):
    """What GEMMs read of a matrix x [m, k].

    rows:    x. The forward product and the input gradient sum along them.
    columns: its transpose [k, m], along which the weight gradient sums; only formats that need both layouts have it.
    The scales are float32 factors that the values must be multiplied by: None in ordinary formats, one number for
    the whole tensor, or one per 128 values of a row, [k/128, m], or of a column, [m/128, k].
    """

    rows: Tensor | None
    rows_scale: Tensor | None = None
    columns: Tensor | None = None
    columns_scale: Tensor | None = None

    def for_weight_grad(self) -> Payload:
        """What the weight gradient needs: the columns, or rows if columns can be made from them."""
        return self if self.columns is None else Payload(None, None, self.columns, self.columns_scale)

    def cut(self, m: slice) -> Payload:
        """These rows, for a product that reads rows."""
        return Payload(self.rows[m], self.rows_scale if self._is_whole(1) else self.rows_scale[:, m].contiguous())

    def parts(self) -> list[Tensor]:
        """What ranks exchange: all but scales of the whole tensor, float8 as bytes, which is how it can travel."""
        return [x if x.itemsize > 1 else x.view(torch.uint8) for i, x in enumerate(self) if not self._is_whole(i)]

    def of(self, parts: list[Tensor]) -> Payload:
        """A payload like this one from parts that were gathered (one after another, along dim 0) or one rank's own."""
        parts, dims = iter(parts), (0, 1, 1, 0)  # where m is
        return Payload(*(x if self._is_whole(i) else _join(next(parts), x, dims[i]) for i, x in enumerate(self)))

    def _is_whole(self, i: int) -> bool:
        return self[i] is None or self[i].numel() == 1


def _join(stacked: Tensor, like: Tensor, dim: int) -> Tensor:
    """Ranks' tensors like `like`, one after another along dim 0 -> one after another along dim."""
    if dim == 1 and stacked.shape[0] > like.shape[0]:
        stacked = stacked.unflatten(0, (-1, like.shape[0])).transpose(0, 1).flatten(1)
    return stacked.view(like.dtype)


class Gemm:
    """Products in the tensors' own format (bf16, fp16, fp32).

    accumulate: adds a weight gradient to main_grad, accumulate_product or a twin of it.
    """

    def __init__(self, accumulate: Callable[[Tensor, Tensor, Tensor], Tensor | None] = accumulate_product):
        self.accumulate = accumulate

    def quantize(self, x: Tensor, shared: Axis, *, gradient: bool = False, columns: bool = False,
                 record: bool = True) -> Payload:
        """x [m, k] as GEMMs will read it.

        shared: the ranks whose x are gathered together afterwards, so that they must agree on a scale.
        gradient: x is the gradient of an output. columns: a weight gradient will read it too. record: its magnitude
        counts for the scales of later steps; evaluation leaves no trace there.
        """
        return Payload(x)

    def forward(self, x: Payload, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """y [m, n] = x [m, k] W^T + bias, weight [n, k]; in `out` if it is given."""
        if bias is None:
            return torch.mm(x.rows, weight.t(), out=out)
        return torch.addmm(bias, x.rows, weight.t(), out=out)  # cuBLAS adds a bias before it stores

    def input_grad(self, dy: Payload, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """dx [m, k] = dy [m, n] W; in `out` if it is given."""
        return torch.mm(dy.rows, weight, out=out)

    def weight_grad(self, weight: Tensor, dy: Payload, x: Payload) -> Tensor | None:
        """weight.main_grad += dy^T x."""
        return self.accumulate(weight, dy.rows, x.rows)

    def prepare(self, weight: Tensor) -> None:
        """To be called before products of this weight are launched on several streams."""

    def quantize_swiglu(self, inner: Tensor, ops: ModuleType, *, columns: bool, record: bool) -> Payload:
        """quantize() of silu(gate) * up, which nobody else gathers; inner [m, 2f]."""
        return Payload(ops.swiglu_forward(inner))

    def quantize_swiglu_grad(self, dy: Tensor, inner: Tensor, ops: ModuleType, *, columns: bool) -> Payload:
        """quantize() of the gradient of `inner`; dy [m, f] of silu(gate) * up."""
        return Payload(ops.swiglu_backward(dy, inner))


# ---- a linear layer: a GEMM and the collective beside it ------------------------------------------------------------


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
