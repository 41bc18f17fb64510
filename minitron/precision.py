"""The GEMM seam: every matrix product of the model passes through here, with the communication next to it.

Problem: tensor parallelism puts a collective before or after each linear layer, FP8 puts a cast before it, and
both are fast only when they know of each other and of the gradient accumulation. The idea: one autograd function,
`linear`, owns the sequence

    forward    quantize x -> [gather x] -> y = x W^T -> [reduce or scatter y]
    backward   quantize dy -> [gather dy], meanwhile gather x again
               dx = dy W -> [reduce or scatter dx], meanwhile
               W.main_grad += dy^T x      in float32, inside the GEMM where the device can

and asks a `Gemm` object for the number format. What is gathered is the quantized payload, so FP8 also halves the traffic. A
faster way to run one of these lines (a fused gather-GEMM, another FP8 library) replaces that line here and no layer changes.

Gradients of weights do not pass through autograd's `.grad`: a parameter with a `main_grad` (float32, a view into the
optimizer's flat buffer) has its gradient added there, or written if `grad_stale` says that the buffer still holds
the last step's; then `grad_ready()` is called on it, so that its bucket can be reduced. A parameter without one gets an
ordinary `.grad`, so layers can be tested alone.
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
    """`param` for use in ordinary autograd operations; its gradient lands in main_grad. For small parameters: norms, biases."""
    return _Use.apply(param) if hasattr(param, "main_grad") else param


# ---- number formats -----------------------------------------------------------------------------------------------


class Payload(NamedTuple):
    """What a GEMM reads: values, and for FP8 the factor that they must be multiplied by (0-d float32)."""

    data: Tensor
    scale: Tensor | None = None


class Gemm:
    """Products in the tensors' own format (bf16, fp16, fp32)."""

    def quantize(self, x: Tensor, axis: Axis, *, gradient: bool = False) -> Payload:
        """x [m, k] as the GEMM will read it. `axis`: the ranks whose x are gathered together, and so share one scale."""
        return Payload(x)

    def forward(self, x: Payload, weight: Tensor) -> Tensor:
        """y [m, n] = x [m, k] W^T, weight [n, k]."""
        return x.data @ weight.t()

    def input_grad(self, dy: Payload, weight: Tensor) -> Tensor:
        """dx [m, k] = dy [m, n] W."""
        return dy.data @ weight

    def weight_grad(self, weight: Tensor, dy: Payload, x: Payload) -> Tensor | None:
        """weight.main_grad += dy^T x."""
        return accumulate_product(weight, dy.data, x.data)

    def on_weights_updated(self) -> None:
        """Called once after each optimizer step."""


class Fp8Gemm(Gemm):
    """FP8 with current per-tensor scaling in plain torch: e4m3 forward, e5m2 gradients, output in the model's dtype.

    One object per layer: it keeps the weight's two FP8 copies (as it is, and transposed for the input gradient) until the
    optimizer changes the weight. `_scaled_mm` multiplies row-major by column-major only, hence the transposes.
    Source: Micikevicius et al. 2022, "FP8 formats for deep learning".
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._weight: tuple[Payload, Tensor] | None = None

    def quantize(self, x: Tensor, axis: Axis, *, gradient: bool = False) -> Payload:
        kind = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
        amax = x.abs().amax().float()
        all_reduce_(amax, axis, op=torch.distributed.ReduceOp.MAX)
        scale = torch.finfo(kind).max / amax.clamp(min=1e-12)
        return Payload((x.float() * scale).to(kind), scale.reciprocal())

    def forward(self, x: Payload, weight: Tensor) -> Tensor:
        w, _ = self._quantized(weight)
        return self._product(x, w)

    def input_grad(self, dy: Payload, weight: Tensor) -> Tensor:
        w, transposed = self._quantized(weight)
        return self._product(dy, Payload(transposed, w.scale))

    def weight_grad(self, weight: Tensor, dy: Payload, x: Payload) -> Tensor | None:
        product = self._product(Payload(_transpose(dy.data), dy.scale), Payload(_transpose(x.data), x.scale))
        return accumulate(weight, product)

    def on_weights_updated(self) -> None:
        self._weight = None

    def _quantized(self, weight: Tensor) -> tuple[Payload, Tensor]:
        if self._weight is None:
            w = self.quantize(weight.detach(), Axis.single())
            self._weight = w, _transpose(w.data)
        return self._weight

    def _product(self, a: Payload, b: Payload) -> Tensor:
        """a [m, k] times b [n, k] transposed."""
        return torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale, out_dtype=self.dtype)


def _transpose(x: Tensor) -> Tensor:
    """A contiguous transpose; float8 has no copy kernel on some devices, so its bytes are moved."""
    return x.view(torch.uint8).t().contiguous().view(x.dtype)


# ---- linear: a GEMM and the collective beside it ----------------------------------------------------------------------


class Traffic(NamedTuple):
    """What a linear layer communicates along the tensor-parallel axis."""

    axis: Axis
    before: str = "none"  # "copy": x is the same on every rank; "gather": x is a slice of the sequence
    after: str = "none"   # "reduce": y is a partial sum; "scatter": of it only a slice of the sequence is kept
    overlap: bool = True


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gemm, traffic, remake):
        local = gemm.quantize(x.reshape(-1, x.shape[-1]), traffic.axis if traffic.before == "gather" else Axis.single())
        full, handle = _gather(local, traffic, traffic.before == "gather")
        handle.wait()
        y = gemm.forward(full, weight)
        y, handle = _combine(y, traffic, traffic.after)
        handle.wait()
        # Not a saved tensor: recomputation hands those back as new tensors, without their main_grad.
        ctx.weight, ctx.gemm, ctx.traffic, ctx.remake, ctx.leading = weight, gemm, traffic, remake, x.shape[1:-1]
        if remake is None:
            ctx.save_for_backward(*(t for t in local if t is not None))
        return y.view(-1, *ctx.leading, y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        weight, gemm, traffic, saved = ctx.weight, ctx.gemm, ctx.traffic, ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        scatter = traffic.after == "scatter"
        gradient, handle = _gather(gemm.quantize(dy, traffic.axis if scatter else Axis.single(), gradient=True),
                                   traffic, scatter)
        handle.wait()
        x_handle, dx_handle, dx, dw = Done(), Done(), None, None
        if ctx.needs_input_grad[1]:
            gather = traffic.before == "gather"
            if ctx.remake is not None:
                again = ctx.remake()
                saved = gemm.quantize(again.reshape(-1, again.shape[-1]), traffic.axis if gather else Axis.single())
            x, x_handle = _gather(Payload(*saved), traffic, gather)
        if ctx.needs_input_grad[0]:
            dx = gemm.input_grad(gradient, weight)
            dx, dx_handle = _combine(dx, traffic, {"copy": "reduce", "gather": "scatter", "none": "none"}[traffic.before])
        if ctx.needs_input_grad[1]:
            x_handle.wait()
            dw = gemm.weight_grad(weight, gradient, x)
        dx_handle.wait()
        return None if dx is None else dx.view(-1, *ctx.leading, dx.shape[-1]), dw, None, None, None


def _gather(x: Payload, traffic: Traffic, wanted: bool):
    """Begin gathering a payload along the sequence, which is dim 0 of [s * b, k]."""
    if not wanted or traffic.axis.size == 1:
        return x, Done()
    if x.scale is None:
        data, handle = gather_start(x.data, traffic.axis)
    else:  # float8 cannot be communicated as such
        data, handle = gather_start(x.data.view(torch.uint8), traffic.axis)
        data = data.view(x.data.dtype)
    if not traffic.overlap:
        handle.wait()
        handle = Done()
    return Payload(data, x.scale), handle


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


def linear(x: Tensor, weight: Tensor, gemm: Gemm, traffic: Traffic, remake: Callable[[], Tensor] | None = None) -> Tensor:
    """y = x W^T with the communication that `traffic` names.  x [s, b, k], weight [n, k] -> [s', b, n].

    s' is s times the axis' size after "gather", s divided by it after "scatter".
    remake: makes x again in the backward pass, so that x is not kept (selective recomputation).
    """
    return _Linear.apply(x, weight, gemm, traffic, remake)
