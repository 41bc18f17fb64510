"""CUDA attention kernels against the masked softmax in float64, whole and in blocks that are merged as in the ring."""

import dataclasses
import importlib.util
import sys

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
from minitron.comm.mesh import Axis
from minitron.kernels.attention import CUDNN, FLASH_CUDA, REFERENCE, choose
from minitron.parallel.context_parallel import ContextAttention
from minitron.parallel.tiles import as_documents
from minitron.testing import assert_close_rel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Rounding of the format, 2^-9 and 2^-12: out is rounded once, gradients come from a p and a ds that were rounded too.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
KERNELS = ["cudnn", "flash", "flash-attn", "fused", "reference"]


def backend_named(name, dtype=torch.bfloat16, head_dim=64):
    if name == "flash-attn" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    return choose(name, "cuda", dtype, head_dim)


def check(actual, expected, tolerance, what=""):
    for name, value in expected.items():
        assert_close_rel(actual[name], value, tolerance, f"{what} {name}")


def documents_on_gpu(samples):
    documents = as_documents(samples)
    return dataclasses.replace(documents, spans=documents.spans.cuda())


def triangle(s):
    return torch.from_numpy(allowed_pairs(s)).cuda()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("permuted", [True, False])
def test_kernel_equals_float64_softmax(name, dtype, head_dim, permuted):
    backend = backend_named(name, dtype, head_dim)
    for sq, sk, causal in [(512, 512, True), (300, 300, True), (256, 512, False), (512, 256, False), (37, 100, False)]:
        for n, g in [(8, 8), (8, 2)]:
            dout, q, k, v = random_block(sq, sk, n=n, g=g, d=head_dim, dtype=dtype, device="cuda", permuted=permuted)
            allowed = triangle(sq) if causal else torch.ones(sq, sk, dtype=torch.bool, device="cuda")
            actual = run_backend(backend, dout, q, k, v, causal)
            assert actual["lse"].dtype == torch.float32 and actual["out"].stride(-1) == 1
            check(actual, attend_with_grads(dout, q, k, v, allowed), TOLERANCE[dtype], f"{sq} x {sk}, {g} groups")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("permuted", [True, False])
def test_blocks_merge_to_the_whole(name, head_dim, permuted):
    backend = backend_named(name, head_dim=head_dim)
    dout, q, k, v = random_block(512, 512, n=8, g=2, d=head_dim, dtype=torch.bfloat16, device="cuda", permuted=permuted)
    expected = attend_with_grads(dout, q, k, v, triangle(512))
    check(run_backend_in_two_blocks(backend, dout, q, k, v), expected, TOLERANCE[torch.bfloat16])


def test_reference_in_float32():
    dout, q, k, v = random_block(256, 256, device="cuda")
    check(run_backend(REFERENCE, dout, q, k, v, True), attend_with_grads(dout, q, k, v, triangle(256)), 1e-5)


@pytest.mark.parametrize("name", ["flash", "flash-attn", "fused", "reference"])
def test_tiny_documents(name):
    """Blocks of one and of a few tokens, as packing makes them."""
    backend = backend_named(name)
    for sq, sk, causal in [(1, 9, False), (9, 1, False), (3, 3, True)]:
        dout, q, k, v = random_block(sq, sk, n=8, g=2, d=64, dtype=torch.bfloat16, device="cuda")
        allowed = triangle(sq) if causal else torch.ones(sq, sk, dtype=torch.bool, device="cuda")
        expected = attend_with_grads(dout, q, k, v, allowed)
        if sk == 1:  # one key: p is 1 whatever the score is, and dq and dk are 0 but for rounding
            del expected["dq"], expected["dk"]
        check(run_backend(backend, dout, q, k, v, causal), expected, TOLERANCE[torch.bfloat16], f"{sq} x {sk}")


@pytest.mark.parametrize("head_dim", [64, 80, 100, 128, 160, 256])
@pytest.mark.parametrize("documents", [False, True])
def test_what_auto_takes_runs(head_dim, documents):
    backend = choose("auto", "cuda", torch.bfloat16, head_dim, documents=documents)
    print(f"auto takes {backend.name} for head dimension {head_dim}", file=sys.stderr)
    dout, q, k, v = random_block(256, 256, n=8, g=2, d=head_dim, dtype=torch.bfloat16, device="cuda")
    expected = attend_with_grads(dout, q, k, v, triangle(256))
    check(run_backend(backend, dout, q, k, v, True), expected, TOLERANCE[torch.bfloat16])


def test_auto_on_hopper_is_cudnn_and_ours_for_documents():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    assert choose("auto", "cuda", torch.bfloat16, 128) is CUDNN
    assert choose("auto", "cuda", torch.bfloat16, 128, documents=True).name == "fused"
    assert choose("auto", "cuda", torch.bfloat16, 128, documents=True, ring=True) is FLASH_CUDA
    assert choose("auto", "cuda", torch.float32, 128) is REFERENCE
    assert choose("auto", "cuda", torch.float32, 128, dropout=0.1).name == "reference"
    assert choose("auto", "cuda", torch.bfloat16, 128, dropout=0.1).name == "fused"


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("samples", [None, ((0, 100, 256, 512), (0, 300, 512))])
def test_attention_of_a_fused_projection_without_a_host_sync(name, samples):
    """The layer's way in: q, k and v are views into one [s, b, (n + 2 g) d] tensor; nothing may wait for the GPU."""
    backend = backend_named(name, head_dim=128)
    s, b, n, g, d = 512, 2, 8, 2, 128
    documents = samples and documents_on_gpu(samples)
    qkv = torch.randn(s, b, (n + 2 * g) * d, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dout = torch.randn(s, b, n * d, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.unflatten(2, (-1, d)) for x in qkv.split([n * d, g * d, g * d], 2))

    attend = ContextAttention(Axis.single(), "ring", backend)

    def run():
        out = attend(q, k, v, documents).flatten(2)
        return out, *torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    run()  # what a kernel loads or compiles at its first call may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, *grads = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allowed = np.stack([allowed_pairs(s, boundaries) for boundaries in samples or [None] * b])
    as_blocks = [x.permute(1, 2, 0, 3) for x in (dout.unflatten(2, (-1, d)), q, k, v)]
    expected = attend_with_grads(*as_blocks, torch.from_numpy(allowed).unsqueeze(1).cuda())
    actual = dict(zip(("out", "dq", "dk", "dv"), (out.unflatten(2, (-1, d)), *grads)))
    for key, value in actual.items():
        assert_close_rel(value.permute(1, 2, 0, 3), expected[key], TOLERANCE[torch.bfloat16], key)


@pytest.mark.parametrize(
    "dtype, tolerance, p, b, s, n, g, d",
    [
        (torch.bfloat16, 1e-2, 0.0, 3, 1024, 8, 2, 128),
        (torch.bfloat16, 1e-2, 0.0, 2, 1000, 4, 4, 64),
        (torch.bfloat16, 1e-2, 0.0, 1, 300, 4, 1, 80),
        (torch.bfloat16, 1e-2, 0.0, 2, 130, 2, 2, 256),
        (torch.float16, 2e-3, 0.1, 3, 1000, 8, 2, 128),
        (torch.float32, 1e-5, 0.1, 2, 300, 4, 4, 64),
    ],
)
def test_all_documents_in_one_call_equal_float64_softmax(dtype, tolerance, p, b, s, n, g, d):
    """Of one token, of whole blocks, over several of them; none at all in the last sample."""
    rng = np.random.default_rng(s)
    samples = [(0, *sorted({1, 64, 128, 129, *rng.integers(2, s, 4).tolist()}), s) for _ in range(b - 1)] + [(0, s)]
    dout, q, k, v = random_block(s, s, b=b, n=n, g=g, d=d, dtype=dtype, device="cuda")
    allowed = torch.from_numpy(np.stack([allowed_pairs(s, sample) for sample in samples])).unsqueeze(1).cuda()
    backend = choose("fused", "cuda", dtype, d, dropout=p)
    options = {"document_bounds": documents_on_gpu(samples).spans}
    mask = None
    if p:
        options["dropout"] = random_dropout(s, p, b=b, device="cuda")
        mask = options["dropout"].mask(n)
    actual = run_backend(backend, dout, q, k, v, True, **options)
    check(actual, attend_with_grads(dout, q, k, v, allowed, mask), tolerance)
    again = run_backend(backend, dout, q, k, v, True, **options)
    assert all(torch.equal(x, again[name]) for name, x in actual.items())  # sums have one order


def test_a_replayed_graph_attends_to_new_documents():
    first, second = (documents_on_gpu([cut]) for cut in [(0, 200, 512), (0, 7, 100, 101, 512)])
    q, dout = (torch.randn(512, 1, 8, 64, dtype=torch.bfloat16, device="cuda", requires_grad=i == 0) for i in (0, 1))
    backend = choose("auto", "cuda", torch.bfloat16, 64, documents=True)
    assert backend.name == "fused" and backend.masks_documents

    def run(documents):
        y = ContextAttention(Axis.single(), "ring", backend)(q, q, q, documents)
        return y, *torch.autograd.grad(y, [q], dout)

    static = first.spans.clone()
    recorded = dataclasses.replace(first, spans=static)
    run(recorded)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(recorded)
    static.copy_(second.spans)
    graph.replay()
    for replayed, value in zip(captured, run(second)):
        assert torch.equal(replayed, value)


# ---- with dropout ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [*TOLERANCE.items(), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "b, s, n, g, d",
    [(1, 2048, 24, 24, 128), (2, 1000, 8, 2, 64), (2, 300, 4, 4, 80), (1, 500, 4, 1, 160), (1, 65, 2, 2, 256)],
)
def test_dropout_equals_float64_softmax_under_the_plain_mask(dtype, tolerance, b, s, n, g, d):
    dout, q, k, v = random_block(s, s, b=b, n=n, g=g, d=d, dtype=dtype, device="cuda")
    dropout = random_dropout(s, 0.1, b=b, device="cuda")
    backend = choose("fused", "cuda", dtype, d, dropout=0.1)
    actual = run_backend(backend, dout, q, k, v, True, dropout=dropout)
    check(actual, attend_with_grads(dout, q, k, v, triangle(s), dropout.mask(n)), tolerance)
    again = run_backend(backend, dout, q, k, v, True, dropout=dropout)
    assert all(torch.equal(x, again[name]) for name, x in actual.items())  # sums have one order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d, p", [(64, 0.1), (128, 0.5), (256, 0.9)])
def test_every_product_has_the_plain_mask_bit_for_bit(dtype, d, p):
    dropout = random_dropout(500, p, device="cuda")
    backend = choose("fused", "cuda", dtype, d, dropout=p)
    for name, kept in kept_in_each_product(backend, 500, d, dropout, dtype=dtype, device="cuda").items():
        assert torch.equal(kept, dropout.mask(2) != 0), name


def test_dropout_in_a_replayed_graph_has_the_masks_of_new_counters():
    dout, q, k, v = random_block(512, 512, n=8, g=2, d=128, dtype=torch.bfloat16, device="cuda")
    backend = choose("fused", "cuda", torch.bfloat16, 128)
    static, second = (random_dropout(512, 0.1, seed=seed, device="cuda") for seed in (0, 1))
    run_backend(backend, dout, q, k, v, True, dropout=static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_backend(backend, dout, q, k, v, True, dropout=static)
    static.counters.copy_(second.counters)
    graph.replay()
    for name, value in run_backend(backend, dout, q, k, v, True, dropout=second).items():
        assert torch.equal(captured[name], value), name
