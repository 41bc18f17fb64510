"""The GEMM seam: every matrix product of the model passes through here, with the communication next to it.

Problem: tensor parallelism puts a collective before or after each linear layer, FP8 puts a cast before it, and
both are fast only when they know of each other and of the gradient accumulation. The idea: one autograd function,
`linear`, owns the sequence

    forward    quantize x -> [gather x] -> y = x W^T -> [reduce or scatter y]
    backward   quantize dy -> [gather dy], meanwhile gather x again
               dx = dy W -> [reduce or scatter dx], meanwhile
               W.main_grad += dy^T x      in float32, inside the GEMM where the device can

and asks a `Gemm` object for the number format: this file has the ordinary ones, minitron/fp8.py the others. What is
gathered is the quantized payload, so FP8 also halves the traffic. A faster way to run one of these lines (a fused
gather-GEMM, another FP8 library) replaces that line here and no layer changes.

Gradients of weights do not pass through autograd's `.grad`: a parameter with a `main_grad` (float32, a view into the
optimizer's flat buffer) has its gradient added there, or written if `grad_stale` says that the buffer still holds
the last step's; then `grad_ready()` is called on it, so that its bucket can be reduced. A parameter without one gets
an ordinary `.grad`, so layers can be tested alone.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
from torch import Tensor

from minitron.collectives import Done, all_reduce_, gather_start, reduce_scatter_start
from minitron.mesh import Axis

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
    if dy.dtype == torch.float32 or not dy.is_cuda:
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
    """`param` for ordinary autograd operations; its gradient lands in main_grad. For small ones: norms, biases."""
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

    def for_forward(self) -> Payload:
        return Payload(self.rows, self.rows_scale)

    def for_weight_grad(self) -> Payload:
        """What the weight gradient needs: the columns, or rows if columns can be made from them."""
        return self if self.columns is None else Payload(None, None, self.columns, self.columns_scale)


class Gemm:
    """Products in the tensors' own format (bf16, fp16, fp32)."""

    def quantize(self, x: Tensor, shared: Axis, *, gradient: bool = False, columns: bool = False,
                 record: bool = True) -> Payload:
        """x [m, k] as GEMMs will read it.

        shared: the ranks whose x are gathered together afterwards, so that they must agree on a scale.
        gradient: x is the gradient of an output. columns: a weight gradient will read it too. record: its magnitude
        counts for the scales of later steps; evaluation leaves no trace there.
        """
        return Payload(x)

    def forward(self, x: Payload, weight: Tensor) -> Tensor:
        """y [m, n] = x [m, k] W^T, weight [n, k]."""
        return x.rows @ weight.t()

    def input_grad(self, dy: Payload, weight: Tensor) -> Tensor:
        """dx [m, k] = dy [m, n] W."""
        return dy.rows @ weight

    def weight_grad(self, weight: Tensor, dy: Payload, x: Payload) -> Tensor | None:
        """weight.main_grad += dy^T x."""
        return accumulate_product(weight, dy.rows, x.rows)


# ---- linear: a GEMM and the collective beside it --------------------------------------------------------------------


class Traffic(NamedTuple):
    """What a linear layer communicates along the tensor-parallel axis."""

    axis: Axis
    before: str = "none"  # "copy": x is the same on every rank; "gather": x is a slice of the sequence
    after: str = "none"   # "reduce": y is a partial sum; "scatter": of it only a slice of the sequence is kept
    overlap: bool = True


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gemm, traffic, remake, training):
        gather, keep = traffic.before == "gather", training and remake is None and ctx.needs_input_grad[1]
        local = gemm.quantize(x.reshape(-1, x.shape[-1]), _shared(traffic, gather), columns=keep, record=training)
        y = gemm.forward(_gather(local.for_forward(), traffic, gather)(), weight)
        y, handle = _combine(y, traffic, traffic.after)
        handle.wait()
        # Not a saved tensor: recomputation hands those back as new tensors, without their main_grad.
        ctx.weight, ctx.gemm, ctx.traffic, ctx.remake, ctx.leading = weight, gemm, traffic, remake, x.shape[1:-1]
        if keep:
            ctx.save_for_backward(*local.for_weight_grad())
        return y.view(-1, *ctx.leading, y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        weight, gemm, traffic, saved = ctx.weight, ctx.gemm, ctx.traffic, ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad[:2]
        gather, scatter = traffic.before == "gather", traffic.after == "scatter"
        dy = gemm.quantize(dy.reshape(-1, dy.shape[-1]), _shared(traffic, scatter), gradient=True, columns=need_dw)
        dy = _gather(dy, traffic, scatter)()
        dx, dx_handle, dw = None, Done(), None
        if need_dw:
            if ctx.remake is not None:
                again = ctx.remake()
                saved = gemm.quantize(again.reshape(-1, again.shape[-1]), _shared(traffic, gather), columns=True)
            x = _gather(Payload(*saved).for_weight_grad(), traffic, gather)
        if need_dx:
            dx = gemm.input_grad(dy, weight)
            adjoint = {"copy": "reduce", "gather": "scatter", "none": "none"}[traffic.before]
            dx, dx_handle = _combine(dx, traffic, adjoint)
        if need_dw:
            dw = gemm.weight_grad(weight, dy, x())
        dx_handle.wait()
        return None if dx is None else dx.view(-1, *ctx.leading, dx.shape[-1]), dw, None, None, None, None


def _shared(traffic: Traffic, gathered: bool) -> Axis:
    return traffic.axis if gathered else Axis.single()


def _gather(x: Payload, traffic: Traffic, wanted: bool) -> Callable[[], Payload]:
    """Begin gathering a payload along the sequence, the m of [m, k]; the function returned waits for the result."""
    if not wanted or traffic.axis.size == 1:
        return lambda: x
    # m is a dim of each part; a scale of the whole tensor is the same everywhere
    parts = [_gather_part(part, dim, traffic.axis) for part, dim in zip(x, (0, 1, 1, 0))]
    if traffic.overlap:
        return lambda: Payload(*(part() for part in parts))
    done = Payload(*(part() for part in parts))
    return lambda: done


def _gather_part(x: Tensor | None, dim: int, axis: Axis) -> Callable[[], Tensor | None]:
    if x is None or x.numel() == 1:
        return lambda: x
    kind = x.dtype if x.itemsize > 1 else torch.uint8  # float8 cannot be communicated as such
    out, handle = gather_start(x.view(kind), axis)

    def finish() -> Tensor:
        handle.wait()
        full = out if dim == 0 else out.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1)
        return full.view(x.dtype)

    return finish


def _combine(y: Tensor, traffic: Traffic, how: str):
    """Begin adding up partial sums: "reduce" keeps all of y, "scatter" this rank's slice of the sequence."""
    if how == "none" or traffic.axis.size == 1:
        return y, Done()
    if how == "scatter":
        y, handle = reduce_scatter_start(y, traffic.axis)
    else:
        handle = all_reduce_(y, traffic.axis, wait=False)
    if not traffic.overlap:
        handle.wait()
        handle = Done()
    return y, handle


def linear(x: Tensor, weight: Tensor, gemm: Gemm, traffic: Traffic,
           remake: Callable[[], Tensor] | None = None) -> Tensor:
    """y = x W^T with the communication that `traffic` names.  x [s, b, k], weight [n, k] -> [s', b, n].

    s' is s times the axis' size after "gather", s divided by it after "scatter".
    remake: makes x again in the backward pass, so that x is not kept (selective recomputation).
    """
    return _Linear.apply(x, weight, gemm, traffic, remake, torch.is_grad_enabled())
