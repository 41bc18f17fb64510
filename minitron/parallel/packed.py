"""Documents packed into one sequence and attended to apart, by one call of a kernel.

Problem: a sample of 4096 tokens may hold thirty documents, none of which may see another. A call for each of them, in
every layer, takes the host longer than all products take the GPU. The idea: kernels of variable length, which are told
where documents begin and end, and do all of them in one call, all samples of a batch included.

    boundaries 0 3 8 and 0 2 8 of two samples of 8 tokens -> bounds 0 3 8 10 16, the longest 6

The boundaries are on the host, but the kernel reads them on the device: they are copied once a microbatch, without
waiting.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minitron.kernels.attention import Backend, PackedKernels

# For each sample its boundaries 0 = b_0 < b_1 < ... < b_m = s. Tuples, since they are keys of caches: every layer has
# the same boundaries, and gets what was made for the first layer.
Documents = tuple[tuple[int, ...], ...]


def packed_attention(q: Tensor, k: Tensor, v: Tensor, backend: Backend, documents: Documents) -> Tensor:
    """Attend causally within each document: q [s, b, n, d]; k, v [s, b, g, d] -> like q. The backend has `packed`."""
    return _Packed.apply(q, k, v, backend.packed, documents)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: PackedKernels, documents: Documents) -> Tensor:
        ctx.kernels, ctx.places = kernels, (*_bounds(documents, q.device), q.shape[-1] ** -0.5)
        q, k, v = (_in_a_row(x) for x in (q, k, v))
        out, ctx.kernel_saved = kernels[0](q, k, v, *ctx.places)
        ctx.save_for_backward(q, k, v, out)
        ctx.samples = len(documents)
        return _side_by_side(out, ctx.samples)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.kernels[1](_in_a_row(dout.contiguous()), *ctx.saved_tensors, ctx.kernel_saved, *ctx.places)
        return *(_side_by_side(dx, ctx.samples) for dx in grads), None, None


def _in_a_row(x: Tensor) -> Tensor:
    """Lay samples one after another: [s, b, n, d] -> [b s, n, d]; a view if there is one."""
    return x.transpose(0, 1).flatten(0, 1)


def _side_by_side(x: Tensor, samples: int) -> Tensor:
    """Undo `_in_a_row`."""
    return x.unflatten(0, (samples, -1)).transpose(0, 1)


@lru_cache(16)
def _bounds(documents: Documents, device: torch.device) -> tuple[Tensor, int]:
    """Return the boundaries of all documents, samples one after another, int32, and the longest document's length."""
    bounds = [i * sample[-1] + begin for i, sample in enumerate(documents) for begin in sample[:-1]]
    bounds.append(len(documents) * documents[0][-1])
    host = torch.tensor(bounds, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True), max(end - begin for begin, end in pairwise(bounds))
