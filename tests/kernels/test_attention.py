"""Attention backends: each equals the masked softmax in float64, also block by block, and `choose` picks or refuses."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attention_twin import allowed_pairs, attend_with_grads, random_block, run_backend, run_backend_in_two_blocks
from minitron.config import cli
from minitron.kernels import kernels
from minitron.kernels.attention import CUDNN, FLASH_CPU, FLASH_CUDA, REFERENCE, Options, choose
from minitron.kernels.rng import AttentionDropout
from minitron.testing import assert_close_rel

ROOT = Path(__file__).parents[2]

# Rounding of the number format (2^-24, 2^-53) times the hundreds of terms of a sum, and room.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float64: 1e-13,
    # bf16 rounds by 2^-9 = 0.2 %: out once, gradients from a p and a ds that were rounded before
    torch.bfloat16: 1e-2,
}
ON_CPU = [pytest.param(REFERENCE, id="reference"), pytest.param(FLASH_CPU, id="flash")]


def check(actual, expected, dtype, what=""):
    for name, value in expected.items():
        assert_close_rel(actual[name], value, TOLERANCE[dtype], f"{what} {name}")


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("permuted", [True, False])
def test_backend_equals_float64_softmax(backend, dtype, permuted):
    for n, g in [(4, 4), (4, 2), (6, 1)]:
        for sq, sk, causal in [(1, 1, True), (37, 37, True), (40, 24, False), (1, 9, False)]:
            dout, q, k, v = random_block(sq, sk, n=n, g=g, dtype=dtype, permuted=permuted)
            allowed = torch.from_numpy(allowed_pairs(sq)) if causal else torch.ones(sq, sk, dtype=torch.bool)
            expected = attend_with_grads(dout, q, k, v, allowed)
            actual = run_backend(backend, dout, q, k, v, causal)
            assert actual["out"].dtype == actual["dq"].dtype == dtype
            assert actual["lse"].dtype == torch.promote_types(dtype, torch.float32)
            if sq == sk == 1:  # one key: p is 1 whatever the score is, so these gradients are rounding errors
                for name in ("dq", "dk"):
                    assert actual[name].abs().max() < TOLERANCE[dtype] * 10 and expected.pop(name).abs().max() < 1e-12
            check(actual, expected, dtype, f"{n} heads, {g} groups, {sq} x {sk}")


@pytest.mark.parametrize("backend", ON_CPU)
def test_scores_far_beyond_the_range_of_exp(backend):
    """exp(89) is infinite in float32: without the maximum taken off, a row of scores around +-200 has no softmax."""
    dout, q, k, v = random_block(24, 24)
    for far in (200.0, -200.0):  # a channel of its own shifts every score
        q[..., 0], k[..., 0] = far * q.shape[-1] ** 0.5, 1.0
        expected = attend_with_grads(dout, q, k, v, torch.from_numpy(allowed_pairs(24)))
        assert expected["lse"].sub(far).abs().max() < 20
        actual = run_backend(backend, dout, q, k, v, True)
        for name, value in expected.items():  # a score of 200 is rounded by 2^-17, and so is its exp
            assert_close_rel(actual[name], value, 1e-4, f"{name} at {far}")


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_blocks_merge_to_the_whole(backend, dtype):
    dout, q, k, v = random_block(48, 48, dtype=dtype)
    expected = attend_with_grads(dout, q, k, v, torch.from_numpy(allowed_pairs(48)))
    check(run_backend_in_two_blocks(backend, dout, q, k, v), expected, dtype)


def test_reference_drops_what_the_mask_says():
    dout, q, k, v = random_block(20, 20, dtype=torch.float64)
    dropout = AttentionDropout(0.3, torch.randint(2**32, (20, 2)), layer=1, first_head=4)
    allowed = torch.from_numpy(allowed_pairs(20))
    expected = attend_with_grads(dout, q, k, v, allowed, dropout.mask(4))
    check(run_backend(REFERENCE, dout, q, k, v, True, dropout=dropout), expected, torch.float64)


@pytest.mark.parametrize("backend", [CUDNN, FLASH_CUDA], ids=["cudnn", "flash"])
def test_calls_of_cuda_kernels_fit_their_schemas(backend):
    """On the meta device: shapes only, but every argument is parsed by this version of torch."""
    dout, q, k, v = random_block(128, 64, d=64, dtype=torch.bfloat16, device="meta")
    actual = run_backend(backend, dout, q, k, v, causal=False)
    assert {name: x.shape for name, x in actual.items()} == dict(
        out=q.shape, lse=q.shape[:3], dq=q.shape, dk=k.shape, dv=v.shape
    )


class FlashAttn:
    """Stands in for the package flash-attn: its interface of [b, s, n, d], without default values, and plain formulas.

    It keeps whether each backward had to be deterministic.
    """

    def __init__(self):
        self.deterministic = []

    def _flash_attn_forward(self, q, k, v, *, softmax_scale, causal, return_softmax, **off):
        self.check(off)
        tensors = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, _ = REFERENCE.forward(*tensors, Options(causal, softmax_scale))
        return out.transpose(1, 2), lse, None, "generator"

    def _flash_attn_backward(
        self, dout, q, k, v, out, lse, dq, dk, dv, *, softmax_scale, causal, deterministic, rng_state, **off
    ):
        self.check(off)
        assert rng_state == "generator" and lse.is_contiguous()
        self.deterministic.append(deterministic)
        tensors = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = REFERENCE.backward(*tensors, lse, None, Options(causal, softmax_scale))
        for into, grad in zip((dq, dk, dv), grads):
            into.copy_(grad.transpose(1, 2))

    def check(self, off):
        assert off == dict(dropout_p=0.0, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None)


def test_flash_attn_is_called_by_its_interface(monkeypatch):
    package = FlashAttn()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", package)
    backend = choose("flash-attn", "cuda", torch.bfloat16, 16)
    for sq, sk, causal in (37, 37, True), (40, 24, False):
        dout, q, k, v = random_block(sq, sk)
        allowed = torch.from_numpy(allowed_pairs(sq)) if causal else torch.ones(sq, sk, dtype=torch.bool)
        check(run_backend(backend, dout, q, k, v, causal), attend_with_grads(dout, q, k, v, allowed), torch.float32)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    dout, q, k, v = random_block(48, 48)
    expected = attend_with_grads(dout, q, k, v, torch.from_numpy(allowed_pairs(48)))
    check(run_backend_in_two_blocks(backend, dout, q, k, v), expected, torch.float32)
    assert package.deterministic == [False, False, True, True, True]


def test_auto_takes_the_fastest_that_fits():
    for dtype in (torch.float32, torch.bfloat16):
        assert choose("auto", "cpu", dtype, 64) is FLASH_CPU
        assert choose("auto", "cpu", dtype, 64, documents=True) is FLASH_CPU
        assert choose("auto", "cpu", dtype, 64, dropout=0.1) is REFERENCE
    assert choose("auto", "cuda", torch.float32, 64) is REFERENCE
    for dtype in (torch.float32, torch.bfloat16):  # on meta as on a GPU
        assert choose("fused", "meta", dtype, 80, dropout=0.1).name == "fused"
        assert choose("auto", "meta", dtype, 80, dropout=0.1).name == ("reference", "fused")[dtype == torch.bfloat16]
        assert choose("reference", "meta", dtype, 80, dropout=0.1) is REFERENCE
    assert choose("auto", "cuda", torch.bfloat16, 100) is REFERENCE
    assert choose("flash", "cpu", torch.float32, 64) is FLASH_CPU
    assert choose("reference", "cuda", torch.bfloat16, 64) is REFERENCE


DROPOUT, DOCUMENTS, ON_A_RING = {"dropout": 0.1}, {"documents": True}, {"documents": True, "ring": True}


@pytest.mark.parametrize(
    "dtype, head_dim, options, name",
    [
        (torch.bfloat16, 64, {}, "cudnn"),
        (torch.float16, 256, {}, "cudnn"),
        (torch.bfloat16, 256, {"ring": True}, "cudnn"),
        (torch.bfloat16, 264, {}, "reference"),
        (torch.bfloat16, 100, {}, "reference"),
        (torch.float32, 64, {}, "reference"),
        (torch.bfloat16, 100, DROPOUT, "fused"),
        (torch.bfloat16, 264, DROPOUT, "reference"),
        (torch.float16, 64, DROPOUT, "fused"),
        (torch.float32, 64, DROPOUT, "reference"),
        (torch.bfloat16, 256, DOCUMENTS, "fused"),
        (torch.float32, 64, DOCUMENTS, "reference"),
        (torch.bfloat16, 256, ON_A_RING, "flash"),
        (torch.bfloat16, 256, ON_A_RING | DROPOUT, "fused"),
    ],
)
def test_a_dry_run_takes_the_backend_of_a_gpu_with_what_it_can_do(dtype, head_dim, options, name):
    backend = choose("auto", "meta", dtype, head_dim, **options)
    assert (backend.name, backend.masks_documents) == (name, name == "fused")
    assert backend.has_dropout == (name in ("fused", "reference"))


@pytest.mark.parametrize(
    "name, device, dtype, head_dim, dropout, message",
    [
        ("cudnn", "cpu", torch.bfloat16, 64, 0.0, "model.attention=cudnn does not run on the device type 'cpu'; use"),
        (
            "flash-attn",
            "cpu",
            torch.bfloat16,
            64,
            0.0,
            "model.attention=flash-attn does not run on the device type 'cpu'",
        ),
        ("fused", "cpu", torch.float32, 64, 0.1, "model.attention=fused does not run on the device type 'cpu'; use"),
        ("fused", "meta", torch.float32, 512, 0.1, "fused needs a head dimension of up to 256, not 512; use"),
        ("flash-attn", "cuda", torch.float32, 64, 0.0, "flash-attn needs bf16 or fp16 on CUDA, not torch.float32"),
        ("flash", "cuda", torch.bfloat16, 100, 0.0, "a head dimension that is a multiple of 8 up to 256, not 100; use"),
        (
            "flash-attn",
            "cuda",
            torch.bfloat16,
            512,
            0.0,
            "head dimension that is a multiple of 8 up to 256, not 512; use",
        ),
    ],
)
def test_impossible_choices_are_refused(name, device, dtype, head_dim, dropout, message):
    with pytest.raises(ValueError) as error:
        choose(name, device, dtype, head_dim, dropout)
    assert message in str(error.value)


def test_a_gpu_with_little_shared_memory_has_dropout_of_wide_heads_in_plain_torch(monkeypatch):
    properties = SimpleNamespace(shared_memory_per_block_optin=99 * 2**10)  # of sm_86, sm_89 and sm_120
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert choose("auto", "cuda", torch.bfloat16, 136, dropout=0.1) is REFERENCE
    with pytest.raises(ValueError, match="needs 163840 bytes of shared memory a block, and this GPU has 101376; use"):
        choose("fused", "cuda", torch.bfloat16, 256, dropout=0.1)
    properties.shared_memory_per_block_optin = 64 * 2**10  # of sm_75
    with pytest.raises(ValueError, match="needs 101376 bytes of shared memory a block, and this GPU has 65536; use"):
        choose("fused", "cuda", torch.bfloat16, 128, dropout=0.1)


@pytest.mark.parametrize(
    "world, layout, backend",
    [
        (1, [], "fused"),
        (2, ["parallel.cp=2"], "flash"),
        (2, ["parallel.cp=2", "parallel.cp_style=allgather"], "flash"),
        (2, ["parallel.cp=2", "parallel.cp_style=ulysses"], "fused"),
    ],
)
def test_documents_are_given_to_a_kernel_that_masks_them_where_a_rank_has_the_sequence_whole(world, layout, backend):
    keys = ["precision.dtype=bf16", "data.separate_documents=true", *layout]
    cfg = cli.load([str(ROOT / "configs/llama3_8b.yaml"), *keys])
    assert kernels.choose(cfg, "meta").attention.name == backend


def test_heads_have_the_width_of_their_key():
    keys = ["precision.dtype=bf16", "model.head_dim=264"]  # wider than any kernel has them
    cfg = cli.load([str(ROOT / "configs/llama3_8b.yaml"), *keys])
    assert kernels.choose(cfg, "meta").attention.name == "reference"


def test_missing_flash_attn_names_the_install_line(monkeypatch):
    for module in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)  # makes the import fail, installed or not
    with pytest.raises(ValueError, match=r"-m pip install --no-build-isolation .*\[flash-attn\]'"):
        choose("flash-attn", "cuda", torch.bfloat16, 64)
