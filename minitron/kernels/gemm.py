"""The GEMM seam: every matrix product of the model passes through here, with the communication next to it.

Problem: tensor parallelism puts a collective before or after each linear layer, FP8 puts a cast before it, and
both are fast only when they know of each other and of the gradient accumulation. The idea: one object, `Layer`, owns
the sequence

    forward    quantize x -> [gather x] -> y = x W^T + bias -> [reduce or scatter y]
    backward   quantize dy -> [gather dy], meanwhile gather x again
               dx = dy W -> [reduce or scatter dx], meanwhile
               W.main_grad += dy^T x      in float32, inside the GEMM where the device can

and asks two others: a `Gemm` for the number format (this file has the ordinary ones, minitron/kernels/fp8.py the others), and
`Separate` or `Pipelined` (minitron/parallel/overlap.py) for a product next to a collective, in one piece or in several. What is
gathered is the quantized payload, so FP8 also halves the traffic. Its users are two autograd functions: `linear` here,
and Llama's whole MLP in minitron/parallel/gated.py.

Gradients of weights do not pass through autograd's `.grad`: a parameter with a `main_grad` (float32, a view into the
optimizer's flat buffer) has its gradient added there, or written if `grad_stale` says that the buffer still holds
the last step's; then `grad_ready()` is called on it, so that its bucket can be reduced. A parameter without one gets
an ordinary `.grad`, so layers can be tested alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.comm.mesh import Axis
from minitron.kernels import meta

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
