"""Number formats of matrix products: what a layer's three products read, and where they write.

Problem: tensor parallelism moves matrices, FP8 casts them, and both are fast only if what travels is the cast. The
idea: what is multiplied and what travels is a `Payload`, a matrix in its number format, made once for all products that
read it; and a format is an object with the three products of a linear layer:

    forward        y  = x W^T + bias
    input_grad     dx = dy W
    weight_grad    W's main_grad += dy^T x      summed in float32, inside the GEMM where the device can

`Gemm` here multiplies in the model's own format; kernels/fp8.py has the others. parallel/linear.py puts communication
around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minitron.comm.mesh import Axis
from minitron.kernels.fp8_scales import KeptInFp8
from minitron.kernels.param import Param, add_gradient

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALONE = Axis.single()
ABSENT: Any = None  # a tensor that a payload lacks; typed Any, since a format knows which ones its payloads have


class Payload(NamedTuple):
    """A matrix x [m, k] as GEMMs read it.

    rows:    x. The forward product and the input gradient sum along its rows.
    columns: its transpose [k, m], along whose rows the weight gradient sums; only formats that need both layouts
             have it.
    The scales are float32 factors that the values must be multiplied by: absent in ordinary formats, one number for
    the whole tensor, or one per 128 values of a row, [k/128, m], or of a column, [m/128, k].
    """

    rows: Tensor
    rows_scale: Tensor = ABSENT
    columns: Tensor = ABSENT
    columns_scale: Tensor = ABSENT

    def for_weight_grad(self) -> Payload:
        """Keep what the weight gradient needs: the columns, or rows if columns can be made from them."""
        return self if self.columns is None else Payload(ABSENT, ABSENT, self.columns, self.columns_scale)

    def detached(self) -> Payload:
        """Keep the values without what autograd knows of them, which would keep the whole graph."""
        return Payload(*(x if x is None else x.detach() for x in self))

    def for_product(self) -> Payload:
        """Keep what a product along the rows needs, and so all that travels for one."""
        return self if self.columns is None else Payload(self.rows, self.rows_scale)

    def cut(self, m: slice) -> Payload:
        """Keep these rows, for a product that reads rows."""
        return Payload(self.rows[m], self.rows_scale if self._is_whole(1) else self.rows_scale[:, m].contiguous())

    def parts(self) -> list[Tensor]:
        """List what ranks exchange: all but scales of the whole tensor; float8 as bytes, which gloo and NCCL know."""
        return [x if x.itemsize > 1 else x.view(torch.uint8) for i, x in enumerate(self) if not self._is_whole(i)]

    def of(self, parts: Iterable[Tensor]) -> Payload:
        """Make a payload like this one from parts: one rank's own, or gathered ones, one after another along dim 0."""
        each, dims = iter(parts), (0, 1, 1, 0)  # where m is
        return Payload(*(x if self._is_whole(i) else _join(next(each), x, dims[i]) for i, x in enumerate(self)))

    def _is_whole(self, i: int) -> bool:
        return self[i] is None or self[i].numel() == 1


def _join(stacked: Tensor, like: Tensor, dim: int) -> Tensor:
    """Join ranks' tensors like `like`: stacked along dim 0 -> one after another along `dim`."""
    if dim == 1 and stacked.shape[0] > like.shape[0]:
        stacked = stacked.unflatten(0, (-1, like.shape[0])).transpose(0, 1).flatten(1)
    return stacked.view(like.dtype)


class CastInto(NamedTuple):
    """How a kernel casts its result to FP8.

    scale [1]: the factor before the cast. amax [1]: raised to the result's largest magnitude; None: it is not needed.
    columns: cast the transpose, too.
    """

    scale: Tensor
    amax: Tensor | None
    kind: torch.dtype
    columns: bool = False


class Quantized(NamedTuple):
    """A layer's input that exists only as its FP8 cast. like: its shape and dtype, for autograd; it has no values."""

    like: Tensor
    payload: Payload


class Activation(NamedTuple):
    """The activation of an MLP: functions of a module of kernels, by the contracts of kernels/plain.py."""

    forward: Callable[..., Any]
    backward: Callable[..., tuple[Any, Tensor | None]]

    @classmethod
    def of(cls, ops: ModuleType, name: str) -> Activation:
        """Take the functions of `name`, "swiglu" or "gelu", from `ops`."""
        return cls(*(getattr(ops, f"{name}_{field}") for field in cls._fields))


class Gemm:
    """Products in the tensors' own format (bf16, fp16, fp32).

    add_product: writes or adds a product to a gradient (kernels/plain.py has the contract). kept: the scale of a weight
    that the optimizer keeps as FP8 bytes.
    """

    kept: KeptInFp8 | None = None

    def __init__(self, add_product: Callable[..., None]):
        self.add_product = add_product

    def quantize(self, x: Tensor, gathered: Axis = ALONE, *, columns: bool, record: bool) -> Payload:
        """Return the input x [m, k] of a layer as its products read it.

        gathered: the ranks whose x are gathered afterwards, so that they must agree on a scale. columns: a weight
        gradient will read it too. record: its magnitude counts for the scales of later steps, as it does not in
        evaluation.
        """
        return Payload(x)

    def cast_before(self, record: bool) -> CastInto | None:
        """Tell the kernel that makes x how to cast it; None if x is not cast, or its scale not known beforehand."""
        return None

    def quantize_grad(self, dy: Tensor, gathered: Axis = ALONE, *, columns: bool) -> Payload:
        """Return the gradient dy [m, n] of a layer's output as its products read it."""
        return Payload(dy)

    def forward(self, x: Payload, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return y [m, n] = x [m, k] W^T + bias, weight [n, k]; in `out` if it is given."""
        if bias is None:
            return torch.mm(x.rows, weight.t(), out=out)
        return torch.addmm(bias, x.rows, weight.t(), out=out)  # cuBLAS adds a bias before it stores

    def input_grad(self, dy: Payload, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return dx [m, k] = dy [m, n] W; in `out` if it is given."""
        return torch.mm(dy.rows, weight, out=out)

    def weight_grad(self, weight: Param, dy: Payload, x: Payload) -> Tensor | None:
        """Add dW [n, k] = dy^T x to the weight's main_grad; without a slot return it."""
        return add_gradient(weight, partial(self.add_product, dy=dy.rows, x=x.rows))

    def prepare(self, weight: Tensor) -> None:
        """Make the weight's cast, if the format has one: before products are launched on several streams."""

    def quantize_activation(self, inner: Tensor, act: Activation, *, columns: bool, record: bool) -> Payload:
        """Return the activation of inner [m, f or 2f] as a row-parallel product reads it: [m, f]."""
        return Payload(act.forward(inner))

    def quantize_activation_grad(
        self, dy: Tensor, inner: Tensor, act: Activation, *, columns: bool, sums: bool
    ) -> tuple[Payload, Tensor | None]:
        """Return the gradient of `inner` as its products read it, for dy [m, f] of its activation.

        sums: also return it summed over its rows, float32, the gradient of the bias; else None.
        """
        dx, total = act.backward(dy, inner, sums)
        return Payload(dx), total
