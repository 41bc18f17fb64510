"""Documents packed into one sequence and attended to apart, by one call of a kernel.

Problem: a sample of 4096 tokens may hold thirty documents, none of which may see another. A call for each of them, in
every layer, takes the host longer than all products take the GPU. The idea: kernels of variable length, which are told
where documents begin and end, and do all of them in one call, all samples of a batch included.

    boundaries 0 3 8 and 0 2 8 of two samples of 8 tokens -> bounds 0 3 8 10 16, 4 documents, the longest of 6 tokens

The host knows the boundaries, and the kernel reads the bounds on the device, where they travel with the batch. A CUDA
graph repeats a call whose numbers are those of its recording. So there the kernel is told the most documents that a
microbatch of the run can have, each as long as a sample; bounds that are left over repeat the end:

    with room for 8     0 3 8 10 16 16 16 16 16     8 documents, 4 of them empty, the longest of 8 tokens

A document that is empty, or shorter than the longest, costs blocks of threads that end at once: one for each head and
128 tokens that are not there. They are few beside a block's products while documents are some hundreds of tokens long;
the comparison of runtime/graph.py sees them. And in its backward the kernel takes float32 memory for 128 rows of q for
each document, empty or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minitron.kernels.attention import Backend, PackedKernels

# For each sample its boundaries 0 = b_0 < b_1 < ... < b_m = s. Tuples, since they are keys of caches: every layer has
# the same boundaries, and gets what was made for the first layer.
Boundaries = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Documents:
    """The documents of a microbatch, as the host and as a kernel knows them.

    bounds: int32 [room + 1], where they begin and end if samples lie one after another; what is left over repeats the
    end. count, longest: how many documents a kernel is told of, and how many tokens the longest of them may have.
    """

    boundaries: Boundaries
    bounds: Tensor
    count: int
    longest: int

    def any(self) -> Documents:
        """Return the same documents with a count and a length that any others of this room have at most."""
        return replace(self, count=len(self.bounds) - 1, longest=self.boundaries[0][-1])


def as_documents(boundaries: Iterable[Iterable[int]], room: int | None = None) -> Documents:
    """Make documents of each sample's boundaries, which come in sequences or arrays of any kind; bounds on the host.

    room: for how many documents; None: as many as there are.
    """
    samples = tuple(tuple(int(position) for position in sample) for sample in boundaries)
    bounds = [i * sample[-1] + begin for i, sample in enumerate(samples) for begin in sample[:-1]]
    count, end = len(bounds), len(samples) * samples[0][-1]
    assert room is None or count <= room, f"{count} documents, and room for {room}"
    bounds += [end] * (1 if room is None else room + 1 - count)
    longest = max(end - begin for sample in samples for begin, end in pairwise(sample))
    return Documents(samples, torch.tensor(bounds, dtype=torch.int32), count, longest)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, backend: Backend, documents: Documents) -> Tensor:
    """Attend causally within each document: q [s, b, n, d]; k, v [s, b, g, d] -> like q. The backend has `packed`."""
    return _Packed.apply(q, k, v, backend.packed, documents)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: PackedKernels, documents: Documents) -> Tensor:
        bounds = documents.bounds[: documents.count + 1]
        ctx.kernels, ctx.places = kernels, (bounds, documents.longest, q.shape[-1] ** -0.5)
        q, k, v = (_in_a_row(x) for x in (q, k, v))
        out, ctx.kernel_saved = kernels[0](q, k, v, *ctx.places)
        ctx.save_for_backward(q, k, v, out)
        ctx.samples = len(documents.boundaries)
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
