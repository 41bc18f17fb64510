"""The Triton kernels of dropout, alone and in attention, without a GPU: in Triton's interpreter, and compiled for one.

tests/gpu has the same checks on a GPU. In the interpreter there is no bf16.
"""

import numpy as np
import pytest
import torch

from attention_twin import (
    allowed_pairs,
    attend_with_grads,
    kept_in_each_product,
    random_block,
    random_dropout,
    run_backend,
    run_backend_in_two_blocks,
)
from minitron.kernels import plain
from minitron.kernels.attention import FUSED_SHARED_BYTES, Backend
from minitron.parallel.tiles import as_documents
from minitron.testing import assert_close_rel
from triton_cpu import compile_kernel, needs_triton, run_interpreted

pytestmark = needs_triton
# Rounding of the format, 2^-24 and 2^-12, and in float16 a p and a ds that were rounded before.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}


def test_in_tritons_interpreter():
    run_interpreted(__file__)


def interpreted():
    from minitron.kernels import fused_attention
    from minitron.kernels.fused import drop_elements

    backend, tiles = Backend("fused", fused_attention.forward, fused_attention.backward), fused_attention.tiles
    # Blocks of a loop are half of a program's own, as they are on a GPU in some widths.
    unequal = lambda kernel, *_, documents: (16, 32, 4, 1) if "kv" in kernel.fn.__name__ else (32, 16, 4, 1)
    shapes = [
        (64, 64, True, 1, 1, 64, True),
        (56, 56, True, 4, 2, 24, False),
        (70, 130, False, 1, 1, 64, True),
        (100, 40, False, 2, 1, 16, True),
    ]
    for dtype, tolerance in TOLERANCE.items():
        for sq, sk, causal, n, g, d, permuted in shapes if dtype == torch.float32 else shapes[:1]:
            fused_attention.tiles = tiles if n == 1 else unequal
            dout, q, k, v = random_block(sq, sk, n=n, g=g, d=d, dtype=dtype, permuted=permuted)
            allowed = torch.from_numpy(allowed_pairs(sq)) if causal else torch.ones(sq, sk, dtype=torch.bool)
            for dropout in (None, random_dropout(sq, 0.3)) if sq == sk else (None,):
                mask = None if dropout is None else dropout.mask(n)
                expected = attend_with_grads(dout, q, k, v, allowed, mask)
                actual = run_backend(backend, dout, q, k, v, causal, dropout=dropout)
                for name, value in expected.items():
                    assert_close_rel(actual[name], value, tolerance, f"{name} of {sq} x {sk} in {dtype}")
            if causal:
                samples = [(0, 1, 40, 64, sq), (0, sq)] if sq == 64 else [(0, 1, 31, 32, 48, sq - 1, sq), (0, 50, sq)]
                documents = as_documents([sorted(set(cuts)) for cuts in samples])
                apart = torch.from_numpy(np.stack([allowed_pairs(sq, cuts) for cuts in documents.cu_seqlens]))[:, None]
                for options, mask in (({}, None), ({"dropout": dropout}, dropout.mask(n))):
                    expected = attend_with_grads(dout, q, k, v, apart, mask)
                    actual = run_backend(backend, dout, q, k, v, True, document_bounds=documents.spans, **options)
                    for name, value in expected.items():
                        assert_close_rel(actual[name], value, tolerance, f"{name} of documents of {sq} in {dtype}")
    keys = torch.randint(2**32, (3, 7)).t()
    for x, first in ((torch.randn(3, 7, 1100).transpose(0, 1), 0), (torch.randn(7, 3, 48).half(), 48)):
        for place in (5, 2**32 - 5):  # words of either sign
            expected, actual = (
                drop(x, keys, place, first, 2**30, 4 / 3) for drop in (plain.drop_elements, drop_elements)
            )
            assert torch.equal(actual == 0, expected == 0)
            assert_close_rel(actual, expected, TOLERANCE[x.dtype])
    # One sample of two, as a tile of documents is cut: its tokens are as far apart as those of both. And one alone.
    for b, permuted in (2, True), (1, False):
        block = [x[-1:] for x in random_block(40, 40, b=b, n=2, g=1, d=16, permuted=permuted)]
        dropout = random_dropout(40, 0.3, b=b).select(slice(b - 1, b), slice(None))
        expected = attend_with_grads(*block, torch.from_numpy(allowed_pairs(40)), dropout.mask(2))
        for name, actual in run_backend(backend, *block, causal=True, dropout=dropout).items():
            assert_close_rel(actual, expected[name], TOLERANCE[torch.float32], f"{name} of one sample of {b}")
    dout, q, k, v = random_block(40, 40, n=2, g=1)
    q[..., 0], k[..., 0] = -200.0 * q.shape[-1] ** 0.5, 1.0  # scores far below 0, whose exp is 0
    expected = attend_with_grads(dout, q, k, v, torch.from_numpy(allowed_pairs(40)))
    for name, actual in run_backend_in_two_blocks(backend, dout, q, k, v).items():
        assert_close_rel(actual, expected[name], 1e-4, f"{name} of merged blocks")  # as in test_attention.py
    dropout = random_dropout(64, 0.3)
    for name, kept in kept_in_each_product(backend, 64, 64, dropout).items():
        assert torch.equal(kept, dropout.mask(2) != 0), name


OPERANDS = {  # of each kernel: those with a stride, and the others
    "_attention_forward": (("q", "k", "v"), ("out", "lse")),
    "_attention_backward_q": (("q", "k", "v", "out", "dout"), ("lse", "delta", "dq")),
    "_attention_backward_kv": (("q", "k", "v", "dout"), ("lse", "delta", "dk", "dv")),
}
OF_FLOAT32 = {"lse": "*fp32", "delta": "*fp32"}


@pytest.mark.parametrize(
    "width, documents, gpu",
    [
        (128, True, 90),
        pytest.param(128, True, 89, marks=pytest.mark.slow),
        *(
            pytest.param(width, documents, gpu, marks=pytest.mark.slow)
            for width, documents in ((64, False), (64, True), (128, False), (256, False), (256, True))
            for gpu in (89, 90)
        ),
    ],
)
def test_kernels_compile_and_fit_the_shared_memory_of_a_gpu_that_is_given_them(width, documents, gpu):
    from minitron.kernels import fused_attention

    available = {89: 99 * 2**10, 90: 227 * 2**10}[gpu]
    if available < FUSED_SHARED_BYTES[max(128, width)]:
        pytest.skip("the kernels are not chosen there")

    for kernel in (getattr(fused_attention, f"_attention_{name}") for name in ("forward", "backward_q", "backward_kv")):
        for kind, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
            m, n, warps, stages = fused_attention.tiles(kernel, dtype, width, documents=documents)
            values = dict(CAUSAL=True, DOCUMENTS=documents, THRESHOLD=2**31, FACTOR=2.0)
            values |= dict(GROUP=2, D=width, WIDTH=width, M=m, N=n)
            inputs, others = OPERANDS[kernel.__name__]
            pointers = *(f"*{kind}" for _ in inputs), *(OF_FLOAT32.get(name, f"*{kind}") for name in others)
            types = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32", "strides": ("i32",) * len(inputs)}
            types["tensors"] = *pointers, "*i64", "*i32"  # and counters, document_bounds
            # pointers and strides that 16 divides are loaded in pieces of 16 bytes, as they are in a step
            aligned = lambda name, kind: kind[0] == "*" or name == "strides"
            compiled = compile_kernel(kernel, types, values, warps, stages, aligned, gpu)
            assert compiled.metadata.shared <= available, f"{kernel.__name__} in {kind} on sm_{gpu}"


if __name__ == "__main__":
    interpreted()
