"""One call for all documents equals a call for each."""

import pytest
import torch

from attention_twin import PACKS, allowed_pairs, attend_with_grads, random_block, random_dropout, run_backend
from minitron.comm.mesh import Axis
from minitron.kernels.attention import FLASH_CPU, REFERENCE
from minitron.parallel.context_parallel import ContextAttention
from minitron.parallel.tiles import as_documents
from minitron.testing import assert_close_rel

SAMPLES = [((0, 3, 8, 16),), ((0, 16), (0, 1, 16), (0, 7, 8, 16))]


def attend(tensors, dout, backend, documents):
    y = ContextAttention(Axis.single(), "ring", backend)(*tensors, documents)
    return [y, *torch.autograd.grad(y, tensors, dout)]


@pytest.mark.parametrize("samples", SAMPLES)
def test_packed_equals_blocks(samples):
    shape, documents = (16, len(samples)), as_documents(samples)
    tensors = [torch.randn(*shape, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    dout = torch.randn(*shape, 4, 8)
    for twin, ours in zip(attend(tensors, dout, FLASH_CPU, documents), attend(tensors, dout, PACKS, documents)):
        assert_close_rel(ours, twin, 1e-5)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_plain_kernel_masks_documents(p):
    samples = ((0, 5, 6, 20), (0, 1, 19, 20))
    dout, q, k, v = random_block(20, 20)
    allowed = torch.stack([torch.from_numpy(allowed_pairs(20, sample)) for sample in samples])[:, None]
    dropout = random_dropout(20, p) if p else None
    expected = attend_with_grads(dout, q, k, v, allowed, None if dropout is None else dropout.mask(q.shape[1]))
    options = dict(document_bounds=as_documents(samples).spans, dropout=dropout)
    for name, value in run_backend(REFERENCE, dout, q, k, v, True, **options).items():
        assert_close_rel(value, expected[name], 1e-5, name)


def test_every_token_knows_its_document():
    documents = as_documents([[0, 3, 8], (0, 8)])
    assert documents.cu_seqlens == ((0, 3, 8), (0, 8)) and documents.spans.dtype == torch.int32
    assert documents.spans[0].tolist() == [[0, 0, 0, 3, 3, 3, 3, 3], [0] * 8]
    assert documents.spans[1].tolist() == [[3, 3, 3, 8, 8, 8, 8, 8], [8] * 8]


@pytest.mark.parametrize("wrong", [(0, 5, 5, 8), (0, 5, 4, 8), (1, 8), (0, 7)])
def test_boundaries_rise_from_zero_to_one_length(wrong):
    with pytest.raises(AssertionError, match="boundaries"):
        as_documents([(0, 8), wrong])
