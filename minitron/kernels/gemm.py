"""Number formats of matrix products: what the three products of a layer read, and where they write.

Problem: tensor parallelism moves matrices between ranks, and FP8 casts them. Both are fast only if ranks exchange the
cast. The idea: a `Payload` is a matrix in its number format. It is made once, products multiply it, and ranks exchange
it. A format is an object with the three products of a linear layer:

    forward        y  = x W^T + bias            a Product, a function of x
    input_grad     dx = dy W                    a Product, a function of dy
    weight_grad    W's main_grad += dy^T x      summed in float32, inside the GEMM where the device can

`Gemm` multiplies in the model's own format; kernels/fp8.py has FP8. parallel/linear.py adds the communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minitron.comm.mesh import Axis
from minitron.kernels.fp8_scales import Fp8WeightScale
from minitron.kernels.param import Param, add_gradient

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALONE = Axis.single()
Product = Callable[..., Tensor]  # product(x, out) multiplies a payload x with a weight; into `out` if it is given
ABSENT: Any = None  # a tensor that a payload lacks. Typed Any: code of a format reads only tensors that it has


class Payload(NamedTuple):
    """A matrix x [m, k] as GEMMs read it.

    rowwise: x, for products that sum over k. In the forward product k is the layer's inputs, in the input gradient
    its outputs; m is the tokens. columnwise: the transpose [k, m], for formats that need both layouts; the weight
    gradient sums over m. The scales are float32 factors by which the values must be multiplied. Ordinary formats have
    none. FP8 has one for the whole tensor, or one per 128 summed values: [k/128, m] rowwise, [m/128, k] columnwise.
    """

    rowwise: Tensor
    rowwise_scale: Tensor = ABSENT
    columnwise: Tensor = ABSENT
    columnwise_scale: Tensor = ABSENT

    def for_weight_grad(self) -> Payload:
        """Return the part that the weight gradient reads: the transpose, or all of it if there is no transpose."""
        return self if self.columnwise is None else Payload(ABSENT, ABSENT, self.columnwise, self.columnwise_scale)

    def detached(self) -> Payload:
        """Detach the tensors, so that they do not keep autograd's graph allocated."""
        return Payload(*(x if x is None else x.detach() for x in self))

    def for_product(self) -> Payload:
        """Return what the forward product and the input gradient read, and ranks exchange: no transpose."""
        return self if self.columnwise is None else Payload(self.rowwise, self.rowwise_scale)

    def cut(self, m: slice) -> Payload:
        """Keep rows `m`, for the forward product or the input gradient."""
        scale = self.rowwise_scale if self._is_whole(1) else self.rowwise_scale[:, m].contiguous()
        return Payload(self.rowwise[m], scale)

    def parts(self) -> list[Tensor]:
        """List the tensors that ranks exchange. A single scale is not exchanged. float8 travels as bytes."""
        return [x if x.itemsize > 1 else x.view(torch.uint8) for i, x in enumerate(self) if not self._is_whole(i)]

    def of(self, parts: Iterable[Tensor]) -> Payload:
        """Make a payload like this one from `parts`, those of one rank or of several, concatenated along dim 0."""
        each, dims = iter(parts), (0, 1, 1, 0)  # the dim of m in each field
        return Payload(*(x if self._is_whole(i) else _join(next(each), x, dims[i]) for i, x in enumerate(self)))

    def _is_whole(self, i: int) -> bool:
        return self[i] is None or self[i].numel() == 1


def _join(stacked: Tensor, like: Tensor, dim: int) -> Tensor:
    """Concatenate the ranks' tensors along `dim`, in the dtype of `like`; `stacked` has them along dim 0."""
    if dim == 1 and stacked.shape[0] > like.shape[0]:
        stacked = stacked.unflatten(0, (-1, like.shape[0])).transpose(0, 1).flatten(1)
    return stacked.view(like.dtype)


class CastInto(NamedTuple):
    """How a kernel casts its result to FP8.

    scale [1]: the factor before the cast. amax [1]: becomes the maximum of itself and the result's largest magnitude;
    None: it is not needed. columnwise: whether to cast the transpose, too.
    """

    scale: Tensor
    amax: Tensor | None
    fp8_dtype: torch.dtype
    columnwise: bool = False


class Quantized(NamedTuple):
    """A layer's input that exists only as its FP8 cast. like: gives autograd its shape and dtype, and has no values."""

    like: Tensor
    payload: Payload


class Activation(NamedTuple):
    """The activation of an MLP: its forward and its backward (kernels/plain.py has the contract)."""

    forward: Callable[..., Any]
    backward: Callable[..., tuple[Any, Tensor | None]]


class Gemm:
    """Products in the tensors' own format (bf16, fp16, fp32).

    add_product: writes a product to a gradient or adds it (kernels/plain.py has the contract). fp8_scale: the scale of
    a weight that the optimizer keeps as FP8 bytes.
    """

    fp8_scale: Fp8WeightScale | None = None

    def __init__(self, add_product: Callable[..., None]):
        self.add_product = add_product

    def quantize(self, x: Tensor, gather_axis: Axis = ALONE, *, columnwise: bool, update_history: bool) -> Payload:
        """Return a layer's input x [m, k] as its products read it.

        gather_axis: ranks that gather x afterwards, and so need one scale. columnwise: whether a weight gradient reads
        x, too. update_history: whether x's amax enters the scales of later steps; False in evaluation.
        """
        return Payload(x)

    def producer_cast(self, update_history: bool) -> CastInto | None:
        """Return the cast for the kernel that computes x; None if no cast is wanted or its scale is not known yet."""
        return None

    def quantize_grad(self, dy: Tensor, gather_axis: Axis = ALONE, *, columnwise: bool) -> Payload:
        """Return the gradient dy [m, n] of a layer's output as its products read it."""
        return Payload(dy)

    def forward(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """Return the product x [m, k] -> x W^T + bias [m, n], weight [n, k].

        If the format needs a cast of the weight, this call makes it, before the product is launched on several streams.
        """

        def product(x: Payload, out: Tensor | None = None) -> Tensor:
            if bias is None:
                return torch.mm(x.rowwise, weight.t(), out=out)
            return torch.addmm(bias, x.rowwise, weight.t(), out=out)  # cuBLAS adds a bias before it stores

        return product

    def input_grad(self, weight: Tensor) -> Product:
        """Return the product dy [m, n] -> dy W [m, k], and cast the weight as `forward` does."""
        return lambda dy, out=None: torch.mm(dy.rowwise, weight, out=out)

    def weight_grad(self, weight: Param, dy: Payload, x: Payload) -> Tensor | None:
        """Add dW [n, k] = dy^T x to the weight's main_grad; without a slot return it."""
        return add_gradient(weight, partial(self.add_product, dy=dy.rowwise, x=x.rowwise))

    def quantize_activation(self, inner: Tensor, act: Activation, *, columnwise: bool, update_history: bool) -> Payload:
        """Return the activation of inner [m, f or 2f] as a row-parallel product reads it: [m, f]."""
        return Payload(act.forward(inner))

    def quantize_activation_grad(
        self, dy: Tensor, inner: Tensor, act: Activation, *, columnwise: bool, sums: bool
    ) -> tuple[Payload, Tensor | None]:
        """Return the gradient of `inner` as its products read it; dy [m, f] is the gradient of its activation.

        The caller must not read `inner` afterwards: the gradient may be written over it.
        sums: whether to return the float32 sum over rows, the gradient of the bias; otherwise that is None.
        """
        dx, total = act.backward(dy, inner, sums, over_x=True)
        return Payload(dx), total
