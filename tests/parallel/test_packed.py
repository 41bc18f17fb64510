"""One call for all documents equals a call for each."""

import pytest
import torch

from attention_twin import PACKS
from minitron.comm.mesh import Axis
from minitron.kernels.attention import FLASH_CPU
from minitron.parallel.context import attention
from minitron.parallel.packed import as_documents
from minitron.testing import assert_close_rel

SAMPLES = [((0, 3, 8, 16),), ((0, 16), (0, 1, 16), (0, 7, 8, 16))]


def attend(tensors, dout, backend, documents):
    y = attention(*tensors, axis=Axis.single(), style="ring", backend=backend, documents=documents)
    return [y, *torch.autograd.grad(y, tensors, dout)]


@pytest.mark.parametrize("samples", SAMPLES)
def test_packed_equals_blocks(samples):
    shape, documents = (16, len(samples)), as_documents(samples)
    tensors = [torch.randn(*shape, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    dout = torch.randn(*shape, 4, 8)
    packed = attend(tensors, dout, PACKS, documents)
    for twin, ours in zip(attend(tensors, dout, FLASH_CPU, documents), packed):
        assert_close_rel(ours, twin, 1e-5)
    for ours, again in zip(packed, attend(tensors, dout, PACKS, as_documents(samples, 9).any())):
        assert torch.equal(ours, again), "empty documents change nothing"


@pytest.mark.parametrize("samples", SAMPLES)
def test_a_kernel_is_told_of_these_documents_or_of_any(samples):
    lengths = [end - begin for sample in samples for begin, end in zip(sample, sample[1:])]
    few, some = as_documents(samples), as_documents([list(sample) for sample in samples], 9)
    assert few.bounds.diff().tolist() == lengths and some.bounds.diff().tolist() == lengths + [0] * (9 - len(lengths))
    assert (few.count, few.longest) == (some.count, some.longest) == (len(lengths), max(lengths))
    assert (some.any().count, some.any().longest, some.boundaries) == (9, 16, samples)
    assert some.bounds.dtype == torch.int32
    with pytest.raises(AssertionError, match=f"{len(lengths)} documents, and room for 2"):
        as_documents(samples, 2)
