"""FP8 on a GPU: Transformer Engine's casts and products equal plain torch's, and models train with them."""

import gc
from importlib.util import find_spec

import pytest
import torch

from layouts import GPT3, LLAMA, config, dataset_of
from minitron.comm.mesh import Axis, Mesh
from minitron.config import rules
from minitron.config.schema import PrecisionConfig
from minitron.data.loader import Loader
from minitron.kernels import fp8_torch
from minitron.kernels.fp8 import Fp8Gemm
from minitron.kernels.fp8_torch import Operand
from minitron.kernels.kernels import choose_fp8
from minitron.testing import assert_close_rel
from minitron.train import build

INSTALLED = torch.cuda.is_available() and find_spec("transformer_engine") is not None
if INSTALLED:  # now, before another test file has torch load its cuDNN: see minitron.kernels.kernels.choose_fp8
    import transformer_engine.pytorch  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU, ALONE = torch.device("cuda"), Axis.single()
RECIPES = ("delayed", "current", "block")
recipes = pytest.mark.parametrize("recipe", RECIPES)
te = pytest.mark.skipif(not INSTALLED, reason="needs Transformer Engine")


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def backends(recipe):
    twin = fp8_torch.TorchBlockFp8() if recipe == "block" else fp8_torch.TorchFp8()
    return choose_fp8(PrecisionConfig(fp8=recipe), GPU), twin


def given(recipe, top):
    """scale and amax as delayed scaling gives them: the history knew a smaller tensor."""
    if recipe != "delayed":
        return None, None
    return torch.full((1,), 448 / (0.8 * top), device="cuda"), torch.ones(1, device="cuda")


@te
@recipes
@pytest.mark.parametrize("role", ["x", "weight", "dy"])
@pytest.mark.parametrize("columns", [False, True])
def test_casts_are_the_same(recipe, role, columns):
    x, results = randn(0, 384, 256), []
    for backend in backends(recipe):
        scale, amax = given(recipe, float(x.abs().max()))
        results.append((backend.cast(x, role, ALONE, (scale, amax), columns), amax))
    (mine, amax), (twin, other) = results
    assert amax is None or torch.equal(amax, other)
    if recipe == "block" and role == "weight":  # tiles have one scale each there, one per row here
        assert torch.equal(mine.rowwise_scale[:, :2].t().repeat_interleave(128, 1), twin.rowwise_scale)
        assert not columns or torch.equal(
            mine.columnwise_scale[:, :3].t().repeat_interleave(128, 1), twin.columnwise_scale
        )
        mine = mine._replace(rowwise_scale=twin.rowwise_scale, columnwise_scale=twin.columnwise_scale)
    for part, expected in zip(mine, twin):
        assert (part is None) == (expected is None)
        if part is not None:
            assert part.dtype == expected.dtype and part.shape == expected.shape
            # where a scale is a quotient its last bit may differ, and with it a value that lies between two others
            wrong = (part.float() - expected.float()).abs()
            assert (wrong <= 0.25 * expected.float().abs()).all() and (wrong > 1e-6).float().mean() < 1e-3


@te
@recipes
def test_products_equal_those_of_what_the_casts_stand_for(recipe):
    x, w, dy = randn(0, 512, 256), randn(1, 384, 256), randn(2, 512, 384)
    for backend in backends(recipe):
        x8, w8, dy8 = (
            backend.cast(t, role, ALONE, given(recipe, 4.0), True) for t, role in ((x, "x"), (w, "weight"), (dy, "dy"))
        )
        rows, columns = zip(
            *(
                (Operand(p.rowwise, p.rowwise_scale, p is w8), Operand(p.columnwise, p.columnwise_scale, p is w8))
                for p in (x8, w8, dy8)
            )
        )
        assert torch.equal(backend.transpose(x8.rowwise).view(torch.uint8), x8.rowwise.view(torch.uint8).t())
        # one rounding to bf16 of the result; float32 sums in another order, in FP8 tensor cores with fewer bits
        gemm = Fp8Gemm(backend, torch.bfloat16)
        gemm._weight = w8
        y = gemm.forward(w)(x8)
        assert_close_rel(y.float(), value(rows[0]) @ value(rows[1]).t(), 3e-3, "y")
        dx = gemm.input_grad(w)(dy8)
        assert_close_rel(dx.float(), value(rows[2]) @ value(columns[1]).t(), 3e-3, "dx")
        dw = value(columns[2]) @ value(columns[0]).t()
        main = torch.full((384, 256), float("nan"), device="cuda")
        backend.multiply_into(main, columns[2], columns[0], add=False)
        assert_close_rel(main, dw, 1e-3, "dw")
        backend.multiply_into(main, columns[2], columns[0], add=True)
        assert_close_rel(main, 2 * dw, 1e-3, "dw + dw")
        half = torch.full((384, 256), float("nan"), dtype=torch.bfloat16, device="cuda")
        for count, add in ((1, False), (2, True)):  # each sum that is kept is rounded
            backend.multiply_into(half, columns[2], columns[0], add=add)
            assert_close_rel(half.float(), count * dw, count * 2.0**-8, f"{count} dw in bf16")


@pytest.mark.parametrize("n", [1, 5000, 384 * 256])
@pytest.mark.parametrize("size", [0.01, 30.0])
def test_masters_are_cast_as_their_bf16_weights(n, size):
    """In one kernel as in plain torch, on slices that begin anywhere; with the largest magnitude, or one of both."""
    from minitron.kernels import fused, plain

    whole = torch.randn(n + 128, generator=torch.Generator("cuda").manual_seed(n), device="cuda")
    master, scales = whole[128:], torch.tensor([1.0, 448 / (3 * size), 9.0], device="cuda")
    master.mul_(size)
    scale = scales[1:2]  # saturates beyond three sigma
    results = []
    for ops in (fused, plain):
        data, tops = torch.full((n + 256,), 7, dtype=torch.uint8, device="cuda"), torch.zeros(2, device="cuda")
        out = data[128 : n + 128].view(torch.float8_e4m3fn)
        ops.cast_master(master, scale, out, tops[1:])
        again = torch.zeros_like(data)[:n].view(torch.float8_e4m3fn)
        ops.cast_master(master, scale, again, None)
        assert torch.equal(again.view(torch.uint8), out.view(torch.uint8)) and (data[:128] == 7).all()
        assert (data[n + 128 :] == 7).all() and tops[0] == 0
        alone = torch.zeros(1, device="cuda")
        ops.cast_master(master, scale, None, alone)
        assert alone == tops[1] == master.bfloat16().float().abs().max()
        results.append(data)
    assert torch.equal(*results)
    assert n == 1 or out.float().abs().max() == 448


@te
def test_masters_are_cast_as_transformer_engine_casts():
    master = torch.randn(384, 256, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    from minitron.kernels import fused

    scale, amax, top = (torch.full((1,), x, device="cuda") for x in (448 / 4.0, 1.0, 1.0))
    backend, _ = backends("delayed")
    theirs = backend.cast(master.bfloat16(), "weight", ALONE, (scale, amax), columnwise=True)
    out = torch.zeros(384 * 256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    fused.cast_master(master.view(-1), scale, out, top)
    assert torch.equal(out.view(torch.uint8), theirs.rowwise.view(torch.uint8).view(-1)) and top == amax
    columns = backend.transpose(out.view(384, 256))
    assert torch.equal(columns.view(torch.uint8), theirs.columnwise.view(torch.uint8))


def value(x: Operand) -> torch.Tensor:
    """The float32 matrix that an operand stands for, in the layout in which it is multiplied."""
    if x.scale.numel() == 1:
        return x.values.float() * x.scale
    rows, blocks = x.values.shape[0], x.values.shape[1] // 128
    scale = x.scale
    if scale.shape != (blocks, rows):  # Transformer Engine's tiles, padded: [m/128, k/128 or more]
        scale = scale[:, :blocks].t().repeat_interleave(128, 1)
    return fp8_torch.dequantize(Operand(x.values, scale))


MODEL = dict(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=512,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=250,
    vocab_multiple=16,
    max_positions=256,
    init_std=0.05,
)
TRAIN = dict(seq_len=256, micro_batch_size=2, global_batch_size=8, steps=20)


def losses_of(recompute="none", base=LLAMA, **precision):
    model = MODEL if base is LLAMA else MODEL | dict(num_kv_heads=None)
    cfg = config(
        base, dict(model=model, train=TRAIN | dict(recompute=recompute), precision=dict(dtype="bf16") | precision)
    )
    rules.check(cfg, 1, torch.cuda.get_device_capability())
    trainer = build(cfg, Mesh.offline(device=GPU))
    loader, losses, batch = Loader(dataset_of(cfg), cfg, trainer.mesh), [], cfg.train.global_batch_size
    for step in range(cfg.train.steps):
        losses.append(trainer.step(loader.step(step * batch, step), 1e-3).read()["loss"])
    loader.close()
    return torch.tensor(losses)


@te
@recipes
@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_training_follows_bf16_and_the_torch_backend(base, recipe):
    reference, mine = losses_of(base=base), losses_of(base=base, fp8=recipe)
    assert reference[-1] < 0.97 * reference[0]
    # rounding noise of 4 % in each product, averaged over 2048 tokens
    assert ((mine - reference).abs() < 0.01 * reference).all()
    if recipe != "block":
        assert ((losses_of(base=base, fp8=recipe, fp8_backend="torch") - reference).abs() < 0.01 * reference).all()
    for recompute in "selective", "full":  # the same casts; some kernels add in another order from run to run
        assert_close_rel(losses_of(recompute, base, fp8=recipe), mine, 2e-3, recompute)


@te
@recipes
def test_the_head_in_fp8_follows_bf16_and_the_torch_backend(recipe):
    reference, mine = losses_of(), losses_of(fp8=recipe, fp8_head=True)
    assert ((mine - reference).abs() < 0.01 * reference).all() and not torch.equal(mine, losses_of(fp8=recipe))
    if recipe != "block":
        torch_backend = losses_of(fp8=recipe, fp8_head=True, fp8_backend="torch")
        assert ((torch_backend - reference).abs() < 0.01 * reference).all()


@te
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_weights_kept_in_fp8_train_as_casts_of_bf16_weights(recipe):
    """The casts are the same, but for the last bit of a scale that Transformer Engine finds; sums vary, as above."""
    mine, reference = losses_of(fp8=recipe, fp8_params=True), losses_of(fp8=recipe)
    assert mine[-1] < 0.97 * mine[0]
    assert_close_rel(mine, reference, 2e-3)
    assert_close_rel(losses_of("full", fp8=recipe, fp8_params=True), reference, 2e-3)
    torch_backend = losses_of(fp8=recipe, fp8_params=True, fp8_backend="torch")
    assert ((torch_backend - reference).abs() < 0.01 * reference).all()


def requested_bytes():
    """Not what is allocated: that counts blocks, which are up to a megabyte larger than what was asked for."""
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)  # none before CUDA is used


@te
def test_weights_kept_in_fp8_take_half_of_the_memory():
    held = []
    for kept in (False, False, True):  # the first one takes what libraries keep for themselves, too
        gc.collect()
        before = requested_bytes()
        cfg = config(
            LLAMA, dict(model=MODEL, train=TRAIN, precision=dict(dtype="bf16", fp8="delayed", fp8_params=kept))
        )
        trainer = build(cfg, Mesh.offline(device=GPU))
        held.append(requested_bytes() - before)
        kinds = {p.dtype for p in trainer.chunks[0].parameters()}
        assert kinds == ({torch.bfloat16, torch.float8_e4m3fn} if kept else {torch.bfloat16})
        del trainer
    matrices = 4 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 512)
    assert abs((held[1] - held[2]) / matrices - 1) < 0.02
