"""One call for all documents equals a call for each."""

import pytest
import torch

from minitron.comm.mesh import Axis
from minitron.kernels.attention import FLASH_CPU, REFERENCE, Backend
from minitron.parallel.context import attention
from minitron.testing import assert_close_rel


def cut(bounds, *tensors):
    """[t, n, d] of each document as [1, n, t, d]."""
    ends = bounds.tolist()
    return [[x[a:b].transpose(0, 1)[None] for x in tensors] for a, b in zip(ends, ends[1:])]


def forward(q, k, v, bounds, longest, scale):
    assert longest == int(bounds.diff().max()) and bounds.dtype == torch.int32
    parts = [REFERENCE.forward(*part, causal=True, scale=scale) for part in cut(bounds, q, k, v)]
    return torch.cat([out[0].transpose(0, 1) for out, *_ in parts]), [lse for _, lse, _ in parts]


def backward(dout, q, k, v, out, lses, bounds, longest, scale):
    grads = [
        REFERENCE.backward(*part, lse, None, causal=True, scale=scale)
        for part, lse in zip(cut(bounds, dout, q, k, v, out), lses)
    ]
    return [torch.cat([x[0].transpose(0, 1) for x in parts]) for parts in zip(*grads)]


@pytest.mark.parametrize("documents", [((0, 3, 8, 16),), ((0, 16), (0, 1, 16), (0, 7, 8, 16))])
def test_packed_equals_blocks(documents):
    shape = 16, len(documents)
    tensors = [torch.randn(*shape, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    dout, results = torch.randn(*shape, 4, 8), []
    for backend in FLASH_CPU, Backend("packed", REFERENCE.forward, REFERENCE.backward, (forward, backward)):
        y = attention(*tensors, axis=Axis.single(), style="ring", backend=backend, documents=documents)
        results.append([y, *torch.autograd.grad(y, tensors, dout)])
    for twin, ours in zip(*results):
        assert_close_rel(ours, twin, 1e-5)
