"""Tensor and sequence parallelism: weights split over the `tp` axis.

Problem: a layer's weights and the activations between them do not fit, or are too slow, on one GPU. The idea
(Shoeybi et al. 2019): pair a layer split by output columns with one split by input rows. Between them every rank
works on its own columns, and only the second layer's partial sums must be added up.

    x [s, b, h] --ColumnParallel--> [s, b, f/tp] --activation--> [s, b, f/tp] --RowParallel--> sum over tp [s, b, h]

Sequence parallelism (Korthikanti et al. 2022) splits that sum: each rank keeps s/tp of the sequence (reduce-scatter),
does norms, dropout and residuals on it, and the next ColumnParallel gathers the sequence again. Same traffic as
one all-reduce, 1/tp of the activations. The embedding and the loss are split over the vocabulary, so that no rank ever
holds whole logits.

A parameter says how it is split where it is created, by its `Shard`. Initialisation, checkpoints, the gradient norm and
the sum over sequence-parallel ranks all read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.comm import collectives
from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Axis
from minitron.kernels import meta, plain
from minitron.kernels.gemm import Gemm
from minitron.parallel.linear import Layer, Traffic, linear
from minitron.parallel.overlap import Pipelined, Separate


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
                raise ValueError(f"{size} rows or columns cannot be split evenly over the {self.axis.size} ranks of "
                                 f"axis {self.axis.name!r}; choose a divisor of {size}")

    def slices(self) -> list[tuple[int, int, int]]:
        """(offset in the local tensor, offset in the full tensor, length) of this rank's part of each chunk."""
        result, local, full = [], 0, 0
        for size in self.chunks:
            length = size // self.axis.size
            result.append((local, full + self.axis.rank * length, length))
            local, full = local + length, full + size
        return result

    def cut(self, full: Tensor) -> Tensor:
        """The part of `full` that this rank holds."""
        return torch.cat([full.narrow(self.dim, start, length) for _, start, length in self.slices()], self.dim)


def choose_ops(device: torch.device) -> ModuleType:
    """The pointwise kernels of a device: minitron.kernels.fused on CUDA, minitron.kernels.meta in a dry run, else minitron.kernels.plain."""
    if device.type != "cuda":
        return meta if device.type == "meta" else plain
    from minitron.kernels import fused
    return fused


def choose_apex(kernels: str, device: torch.device) -> ModuleType | None:
    """minitron.kernels.apex if train.kernels asks for it. Raises ValueError if it cannot run here."""
    if kernels != "apex" or device.type == "meta":
        return None
    if device.type != "cuda":
        raise ValueError(f"train.kernels=apex runs on CUDA devices, not on {device.type}; use train.kernels=auto")
    try:
        from minitron.kernels import apex
    except ImportError as error:
        raise ValueError(f"train.kernels=apex cannot load the extensions of NVIDIA's apex ({error}); build them with "
                         "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation "
                         "git+https://github.com/NVIDIA/apex.git (`apex` on PyPI is another project), or use "
                         "train.kernels=auto") from error
    return apex


@dataclass(frozen=True)
class Layout:
    """What every layer needs to know: where it is, the format of its parameters, and its kernels."""

    comm: Separate | Pipelined  # how it communicates along the tensor-parallel axis
    sequence_parallel: bool = True
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    ops: ModuleType = plain
    gemm: Gemm = Gemm()  # of products in the parameters' own format

    @property
    def axis(self) -> Axis:
        return self.comm.axis

    def parameter(self, shape: tuple[int, ...], shard: Shard | None = None, *, std: float | None = None,
                  fill: float = 0.0) -> nn.Parameter:
        """An uninitialised parameter of full `shape`, cut by `shard` (None: the same on every tensor-parallel rank).

        std: of its normal initialisation, None: filled with `fill`. Matrices decay, vectors do not. `uses` counts the
        gradients that one backward pass adds; `tied` marks the embedding weight that the head shares.
        """
        shape = list(shape)
        if shard is not None:
            assert shape[shard.dim] == sum(shard.chunks)
            shape[shard.dim] //= shard.axis.size
        param = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))
        param.shard, param.std, param.fill = shard, std, fill
        param.decay, param.tied, param.uses = len(shape) > 1, False, 1
        return param


class ParallelLinear(nn.Module):
    """What the two below share: a weight, and the product with it as the GEMM seam or an adapter does it."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, gemm: Gemm, traffic: Traffic):
        super().__init__()
        self.weight, self.bias, self.gemm, self.traffic = weight, bias, gemm, traffic
        self.adapter = None  # model/lora.py puts one there

    def forward(self, x: Tensor, remake: Callable[[], Tensor] | None = None, keys: Tensor | None = None) -> Tensor:
        """remake: as of `precision.linear`. keys: dropout counters of the rows of x, for an adapter."""
        if self.adapter is not None:
            return self.adapter(x, self.layer, remake, keys)
        return linear(x, self.layer, remake)

    @property
    def layer(self) -> Layer:
        return Layer(self.weight, self.bias if self.traffic.after == "none" else None, self.gemm, self.traffic)


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + bias, split by output features: x [s/tp, b, h] -> [s, b, out/tp].

    Without sequence parallelism x is [s, b, h].

    chunks: sizes of the outputs fused in one weight, each split over tp by itself.
    """

    def __init__(self, in_features: int, chunks: tuple[int, ...], layout: Layout, *, std: float, bias: bool,
                 gemm: Gemm):
        shard = Shard(0, layout.axis, chunks)
        super().__init__(layout.parameter((sum(chunks), in_features), shard, std=std),
                         layout.parameter((sum(chunks),), shard) if bias else None, gemm,
                         Traffic(layout.comm, before="gather" if layout.sequence_parallel else "copy"))


class RowParallelLinear(ParallelLinear):
    """y = x W^T, split by input features: x [s, b, in/tp] -> [s/tp, b, h].

    Without sequence parallelism y is [s, b, h]. The bias is for the caller to add, who has another sum to make.
    """

    def __init__(self, in_features: int, out_features: int, layout: Layout, *, std: float, bias: bool, gemm: Gemm):
        super().__init__(layout.parameter((out_features, in_features), Shard(1, layout.axis, (in_features,)), std=std),
                         layout.parameter((out_features,)) if bias else None, gemm,
                         Traffic(layout.comm, after="scatter" if layout.sequence_parallel else "reduce"))


class _Lookup(torch.autograd.Function):
    """Rows of a table that holds `first <= id < first + len(table)`; zeros for other ids."""

    @staticmethod
    def forward(ctx, ids, table, first, ops, in_order):
        local = ids - first
        elsewhere = (local < 0) | (local >= table.shape[0])
        ctx.table, ctx.first, ctx.ops, ctx.in_order = table, first, ops, in_order
        ctx.save_for_backward(ids)
        return F.embedding(local.masked_fill(elsewhere, 0), table).masked_fill_(elsewhere.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx, dy):
        (ids,), table = ctx.saved_tensors, ctx.table
        if not hasattr(table, "main_grad"):
            return None, ctx.ops.add_rows_(torch.zeros_like(table), ids, ctx.first, dy, ctx.in_order), None, None, None
        if table.grad_stale:
            table.main_grad.zero_()
            table.grad_stale = False
        ctx.ops.add_rows_(table.main_grad, ids, ctx.first, dy, ctx.in_order)
        table.grad_ready()
        return None, None, None, None, None


def lookup(ids: Tensor, table: nn.Parameter, first: int, ops: ModuleType, in_order: bool = False) -> Tensor:
    """table[id - first], zeros for ids beyond the table: ids [...], table [v, h] -> [..., h].

    in_order: ranks with the same ids and the same dy get the same gradient, bit by bit.
    """
    return _Lookup.apply(ids, table, first, ops, in_order)


class VocabParallelEmbedding(nn.Module):
    """Token embedding split over the vocabulary: ids [s, b] -> [s/tp, b, h].

    Without sequence parallelism the result is [s, b, h].
    """

    def __init__(self, vocab: int, hidden: int, layout: Layout, *, std: float):
        super().__init__()
        self.layout = layout
        self.weight = layout.parameter((vocab, hidden), Shard(0, layout.axis, (vocab,)), std=std)

    def forward(self, ids: Tensor) -> Tensor:
        axis = self.layout.axis
        x = lookup(ids, self.weight, axis.rank * self.weight.shape[0], self.layout.ops)
        return collectives.reduce_scatter(x, axis) if self.layout.sequence_parallel else collectives.all_reduce(x, axis)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, axis, ops, num_ids):
        first = axis.rank * logits.shape[-1]
        top, total, picked = ops.softmax_sums(logits, labels, first, num_ids)
        highest = top.clone()
        all_reduce_(highest, axis, op=torch.distributed.ReduceOp.MAX)
        sums = torch.stack([total * (top - highest).exp(), picked])
        all_reduce_(sums, axis)
        lse = sums[0].log() + highest
        ctx.save_for_backward(logits, labels, lse)
        ctx.first, ctx.ops, ctx.num_ids = first, ops, num_ids
        return lse - sums[1]

    @staticmethod
    def backward(ctx, dloss):
        logits, labels, lse = ctx.saved_tensors
        return ctx.ops.softmax_gradient_(logits, labels, ctx.first, lse, dloss, ctx.num_ids), None, None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, axis: Axis, ops: ModuleType = plain,
                                 num_ids: int | None = None) -> Tensor:
    """Compute the loss of each token from logits split over the vocabulary, in float32 and without gathering them.

    logits [s, b, v/tp], labels [s, b] global ids -> [s, b]. Two all-reduces of [s, b] numbers over `axis`. Of this
    rank's columns the first num_ids (None: all; 0: none) are token ids; the others pad the vocabulary and are left
    out. The backward pass uses the logits up: their memory becomes their gradient.
    """
    return _CrossEntropy.apply(logits, labels, axis, ops, num_ids)
