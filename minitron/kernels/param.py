"""Facts about each parameter, and where its gradient goes.

Problem: a layer makes a weight, and other parts need facts about it. Initialisation needs its distribution, and the
optimizer whether it decays. Checkpoints need its place in the whole weight. The sum of gradients needs the ranks that
compute other parts of the weight's gradient. Rules inferred from names or shapes go wrong silently. The idea: a
parameter is an ordinary nn.Parameter with two attributes, which `new_parameter` sets:

    param.spec    a ParamSpec, the facts; frozen
    param.slot    a GradSlot, where its gradient is accumulated; None until an optimizer adopts the parameter

    norm weight [h], tp 2, sequence parallel    shard None, sum_over_tp: the gradient is of half of the tokens
    qkv weight [(n + 2g) d, h], tp 2            shard: dim 0 in three parts, q, k and v; the shard's gradient is whole
    norm of q [d], tp 2                         shard None, sum_over_tp: the gradient is of half of the heads

For type checkers `Param` has the two attributes. At run time it is nn.Parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from minitron.comm.collectives import with_adjoint
from minitron.comm.mesh import Axis
from minitron.kernels.fp8_scales import Fp8WeightScale

if TYPE_CHECKING:

    class Param(nn.Parameter):
        spec: ParamSpec
        slot: GradSlot | None
else:
    Param = nn.Parameter


@dataclass(frozen=True)
class Shard:
    """How a parameter is split along `dim`: it is a concatenation of `chunks` (sizes), each cut evenly over `axis`.

    A fused query-key-value weight has three chunks of different size, and rank 1 of 2 holds the second half of each:

        full   [q q q q | k k | v v]     rank 0 [q q | k | v]     rank 1 [q q | k | v]
    """

    dim: int
    axis: Axis
    chunks: tuple[int, ...]

    def __post_init__(self) -> None:
        for size in self.chunks:
            assert size % self.axis.size == 0, f"{size} rows or columns over {self.axis.size} ranks"

    def slices(self) -> list[tuple[int, int, int]]:
        """List (offset in the local tensor, offset in the full tensor, length) of this rank's part of each chunk."""
        result, local, full = [], 0, 0
        for size in self.chunks:
            length = size // self.axis.size
            result.append((local, full + self.axis.rank * length, length))
            local, full = local + length, full + size
        return result

    def cut(self, full: Tensor) -> Tensor:
        """Return the part of `full` that this rank holds."""
        return torch.cat([full.narrow(self.dim, start, length) for _, start, length in self.slices()], self.dim)


@dataclass(frozen=True)
class ParamSpec:
    """Facts about a parameter.

    name: its name in the whole model, the same on every rank that has the parameter. shard: how it is cut over tp;
    None: every tp rank holds all of it. decay: whether weight decay applies. std: of its normal initialisation; None:
    it is filled with `fill`. tied: whether it is the embedding weight that the head shares. uses: the number of
    gradients that one backward pass adds; 2 for a weight that is used twice. sum_over_tp: this rank's gradient comes
    only from its own tokens or heads, so ranks must sum it over tp. fp8_scale: the scale of a weight that the optimizer
    keeps as FP8 bytes. Until the optimizer adopts it, the weight is in the model's format.
    """

    name: str = ""
    shard: Shard | None = None
    decay: bool = True
    std: float | None = None
    fill: float = 0.0
    tied: bool = False
    uses: int = 1
    sum_over_tp: bool = False
    fp8_scale: Fp8WeightScale | None = field(default=None, compare=False)


class GradSlot:
    """Where a parameter's gradient is accumulated.

    main_grad: a view into the optimizer's flat buffer of gradients. report: call it after each gradient, so that the
    bucket can be reduced. overwrite: the next gradient replaces what main_grad holds, the sum of the step before.

    Nothing zeroes main_grad. The end of a step, or of a pass that is given up, sets `overwrite`
    (`Gradients.finish`, `Gradients.reset`), and the next gradient clears it. The bucket counts a report only in a
    chunk's last backward.
    """

    __slots__ = ("main_grad", "report", "overwrite")

    def __init__(self, main_grad: Tensor, report: Callable[[], None]):
        self.main_grad, self.report, self.overwrite = main_grad, report, True


def new_parameter(shape: tuple[int, ...], spec: ParamSpec, dtype: torch.dtype, device: torch.device) -> Param:
    """Make this rank's part of an uninitialised parameter: the full `shape`, cut by spec.shard."""
    local = list(shape)
    if spec.shard is not None:
        assert local[spec.shard.dim] == sum(spec.shard.chunks)
        local[spec.shard.dim] //= spec.shard.axis.size
    param = Param(torch.empty(local, dtype=dtype, device=device))
    param.spec, param.slot = spec, None
    return param


def params_of(module: nn.Module) -> Iterator[Param]:
    """List the parameters of a module. `new_parameter` must have made all of them."""
    return cast("Iterator[Param]", module.parameters())


def named_params_of(module: nn.Module) -> Iterator[tuple[str, Param]]:
    """List (name in the module, parameter). `new_parameter` must have made all of them."""
    return cast("Iterator[tuple[str, Param]]", module.named_parameters())


def add_gradient(param: Param, write: Callable[..., object]) -> Tensor | None:
    """Add a gradient to the parameter's main_grad and report it to its bucket. Without a slot return it, for autograd.

    write(out, add=...) writes the gradient to `out`, or adds it to `out`.
    """
    slot = param.slot
    if slot is None:
        write(grad := torch.empty_like(param), add=False)
        return grad
    add, slot.overwrite = not slot.overwrite, False
    write(slot.main_grad, add=add)
    slot.report()
    return None


def accumulate(param: Param, grad: Tensor) -> Tensor | None:
    """Add `grad` to the parameter's main_grad as `add_gradient` does."""
    return add_gradient(param, lambda out, add: out.add_(grad) if add else out.copy_(grad))


def with_main_grad(param: Param) -> Tensor:
    """Return `param` for ordinary autograd operations; its gradient goes to main_grad.

    Autograd makes the gradient as a tensor first, so use it for small parameters, such as biases.
    """
    return param if param.slot is None else with_adjoint(param, lambda p: p.view_as(p), partial(accumulate, param))
