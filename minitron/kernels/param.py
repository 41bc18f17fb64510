"""What a parameter says of itself, and where its gradient goes.

Problem: a weight is created in a layer, and many others must know something of it: initialisation (how it is drawn),
checkpoints (which part of the whole it is), the optimizer (whether it decays), gradient sums (what a rank's gradient
still lacks). Rules inferred from names or shapes go wrong silently. The idea: a parameter is an ordinary nn.Parameter
with two attributes, which `new_parameter` declares where it is created:

    param.spec    a ParamSpec, what it is; frozen
    param.slot    a GradSlot, where its gradient is accumulated; None as long as no optimizer has adopted it

    norm weight [h], tp 2, sequence parallel    shard None, sum_over_tp: each rank saw half of the tokens
    qkv weight [(n + 2g) d, h], tp 2            shard dim 0 in three chunks; complete on each rank
    norm of q [d], tp 2                         shard None, sum_over_tp: each rank saw half of the heads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minitron.comm.mesh import Axis


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
            if size % self.axis.size:
                raise ValueError(
                    f"{size} rows or columns cannot be split evenly over the {self.axis.size} ranks of "
                    f"axis {self.axis.name!r}; choose a divisor of {size}"
                )

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
    """What a parameter is.

    name: in the whole model, the same on every rank that has it. shard: how it is cut over tp, None: every rank holds
    all of it. decay: whether weight decay applies. std: of its normal initialisation, None: filled with `fill`. tied:
    the embedding weight that the head shares. uses: gradients that one backward pass adds. sum_over_tp: a rank's
    gradient is a part, from its tokens or heads, of what the tp ranks have together.
    """

    name: str = ""
    shard: Shard | None = None
    decay: bool = True
    std: float | None = None
    fill: float = 0.0
    tied: bool = False
    uses: int = 1
    sum_over_tp: bool = False

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank holds all of it."""
        return self.shard is None


class GradSlot:
    """Where a parameter's gradient is accumulated: main_grad, a float32 view into the optimizer's flat buffer.

    overwrite: main_grad still holds the last step's gradient, so the next one is written, not added.
    """

    __slots__ = ("main_grad", "overwrite", "_report")

    def __init__(self, main_grad: Tensor, report: Callable[[], None]):
        self.main_grad, self.overwrite, self._report = main_grad, True, report

    def begin(self) -> bool:
        """Return whether a gradient is to be added, not written; call it once for each gradient."""
        add, self.overwrite = not self.overwrite, False
        return add

    def ready(self) -> None:
        """Report that a gradient is in main_grad, so that its bucket can be reduced."""
        self._report()


def new_parameter(shape: tuple[int, ...], spec: ParamSpec, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Make an uninitialised parameter of the full `shape`, cut by spec.shard."""
    local = list(shape)
    if spec.shard is not None:
        assert local[spec.shard.dim] == sum(spec.shard.chunks)
        local[spec.shard.dim] //= spec.shard.axis.size
    param = nn.Parameter(torch.empty(local, dtype=dtype, device=device))
    param.spec, param.slot = spec, None
    return param


def accumulate(param: nn.Parameter, grad: Tensor) -> Tensor | None:
    """Add `grad` to the parameter's main_grad and report it; without a slot hand it back to autograd."""
    slot = param.slot
    if slot is None:
        return grad.to(param.dtype)
    if slot.begin():
        slot.main_grad.add_(grad)
    else:
        slot.main_grad.copy_(grad)
    slot.ready()
    return None


class _WithMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, param):
        ctx.param = param
        return param.view_as(param)

    @staticmethod
    def backward(ctx, grad):
        return accumulate(ctx.param, grad)


def with_main_grad(param: nn.Parameter) -> Tensor:
    """Return `param` for ordinary autograd operations; its gradient lands in main_grad. For small ones: biases."""
    return param if param.slot is None else _WithMainGrad.apply(param)
