"""The Triton kernels with FP8 casts, without a GPU: in Triton's interpreter, and compiled for one.

tests/gpu/test_kernels_gpu.py has the same checks on a GPU. The interpreter's conversion to FP8 does not saturate, it
rounds ties up, where a value is rounded up to a power of two it forgets to raise the exponent, and its bf16 is cut off.
"""

import pytest
import torch

from minitron.kernels import plain
from minitron.kernels.gemm import CastInto
from minitron.testing import assert_close_rel
from triton_cpu import compile_kernel, needs_triton, run_interpreted

pytestmark = needs_triton
SCALES = {torch.float8_e4m3fn: 1.0, torch.float8_e5m2: 100.0}
# by what the kernel does: the function of kernels/plain.py
CASTS = {
    "cast": "cast",
    "gelu": "gelu_forward",
    "gelu backward": "gelu_backward",
    "swiglu": "swiglu_forward",
    "swiglu backward": "swiglu_backward",
}


def test_in_tritons_interpreter():
    run_interpreted(__file__)


def randn(seed, *shape, dtype):
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def inputs_of(of, m, f, dtype):
    """x, or dy and x."""
    x = randn(0, m, 2 * f if of.startswith("swiglu") else f, dtype=dtype)
    return (randn(1, m, f, dtype=dtype), x) if "backward" in of else (x,)


def cast_and_sums(ops, of, inputs, into, sums):
    """Run one module's cast; return its result and its sums, which only a backward has."""
    function = getattr(ops, CASTS[of])
    return function(*inputs, sums, into, over_x=True) if "backward" in of else (function(*inputs, into), None)


def interpreted():
    from minitron.kernels import fused

    for of, name in CASTS.items():
        for m, f, kind, dtype, columns, sums in [
            (16, 48, torch.float8_e4m3fn, torch.float32, False, False),
            (5, 2100, torch.float8_e5m2, torch.float32, False, False),  # over several tiles of rows alone
            (100, 80, torch.float8_e5m2, torch.float16, True, True),
            (70, 130, torch.float8_e4m3fn, torch.float16, True, False),
            (70, 64, torch.float8_e5m2, torch.float32, False, True),
        ]:
            inputs, scale = inputs_of(of, m, f, dtype), torch.tensor([SCALES[kind]])
            what = f"{name} {m} x {f}"
            amax = [torch.full((1,), 0.5) for _ in range(2)]
            (mine, total), (twin, wanted) = (
                cast_and_sums(ops, of, inputs, CastInto(scale, top, kind, columns), sums)
                for ops, top in zip((fused, plain), amax)
            )
            # a last bit of exp, and after it now and then another float16 value
            assert_close_rel(*amax, 4e-3, what)
            assert torch.equal(mine.rowwise_scale, twin.rowwise_scale)
            ours, theirs = mine.rowwise.float(), twin.rowwise.float()
            # torch rounds between its steps, and below -5 its tanh is -1 and its GELU 0
            away = (ours - theirs).abs() - (1e-5 if dtype == torch.float32 else 1e-2) * SCALES[kind]
            assert ours.shape == theirs.shape and (away > 0).float().mean() < 0.1, what
            assert (away <= 0.5 * theirs.abs() + torch.finfo(kind).smallest_normal).all(), what
            wide = CastInto(scale, None, torch.float32)
            exact = (cast_and_sums(ops, of, inputs, wide, False)[0] for ops in (fused, plain))
            assert_close_rel(*(cast.rowwise for cast in exact), 1e-6 if dtype == torch.float32 else 1e-3, what)
            assert (mine.columnwise is not None) == columns and (total is None) == (wanted is None)
            if columns:
                assert torch.equal(mine.columnwise.view(torch.uint8), mine.rowwise.view(torch.uint8).t()), what
            if total is not None:
                assert_close_rel(total, wanted, 1e-6 if dtype == torch.float32 else 1e-3, what)
    for layer_norm, delta, kind in (
        (True, True, torch.float8_e4m3fn),
        (False, True, torch.float8_e5m2),
        (False, False, torch.float8_e4m3fn),
    ):
        norms(layer_norm, delta, kind)
    dy, x = (t.view(5, 20, 80) for t in inputs_of("gelu backward", 100, 80, torch.float32))
    for sums in False, True:
        (mine, total), (twin, wanted) = (ops.gelu_backward(dy, x, sums) for ops in (fused, plain))
        assert_close_rel(mine, twin, 1e-6, "gelu_backward")
        over = fused.gelu_backward(dy, old := x.clone(), sums, over_x=True)[0]
        assert torch.equal(over, mine) and over.data_ptr() == old.data_ptr()
        assert (total is None) == (not sums) and (not sums or assert_close_rel(total, wanted, 1e-6, "sums") is None)


def norms(layer_norm, delta, kind):
    """What the interpreter makes of a cast is the cast of what it makes of the norm."""
    from minitron.kernels import fused

    x, weight, scale = randn(0, 5, 3, 72, dtype=torch.float16), randn(1, 72, dtype=torch.float16), torch.tensor([10.0])
    summed = (randn(2, 5, 3, 72, dtype=torch.float16), randn(3, 72, dtype=torch.float16)) if delta else (None, None)
    inputs = (x, *summed), weight, randn(4, 72, dtype=torch.float16) if layer_norm else None, 1e-5
    amax = [torch.full((1,), 0.5) for _ in range(3)]
    total, y, statistics = fused.add_norm(*inputs)
    expected = fused.cast(y.flatten(0, -2), CastInto(scale, amax[0], kind))
    mine, cast, found = fused.add_norm(*inputs, CastInto(scale, amax[1], kind))
    assert torch.equal(mine, total) and torch.equal(found, statistics) and cast.columnwise is None
    assert torch.equal(cast.rowwise.view(torch.uint8), expected.rowwise.view(torch.uint8))
    assert torch.equal(cast.rowwise_scale, expected.rowwise_scale) and torch.equal(amax[0], amax[1])
    twin = plain.add_norm(*inputs, CastInto(scale, amax[2], torch.float32))
    assert torch.equal(total, twin[0])
    assert_close_rel(statistics, twin[2], 1e-6, "of the sum in float16")
    exact = fused.add_norm(*inputs, CastInto(scale, None, torch.float32))[1]
    assert_close_rel(exact.rowwise, twin[1].rowwise, 1e-3, "norm and cast")
    assert_close_rel(amax[1], amax[2], 1e-3, "amax")
    if not delta:  # its backward in one pass asks for the GPU: see test_fused_pointwise.py
        return
    dy = randn(5, 5, 3, 72, dtype=torch.float16)
    grads = (ops.add_norm_backward(dy, None, *twin[::2], weight, delta, False) for ops in (fused, plain))
    for mine, wanted in zip(*grads):
        assert (mine is None) == (wanted is None)
        if mine is not None:  # sums of rows are float32
            assert mine.dtype == wanted.dtype
            assert_close_rel(mine, wanted, 1e-3, "backward")


@pytest.mark.parametrize("of", CASTS)
def test_kernels_compile_for_hopper(of):
    from minitron.kernels import fused

    tile, kernel = fused.BLOCK_SHAPES[of], fused._cast
    values: dict[str, object] = dict(OF=of.removesuffix(" backward"), M=tile.rows, F=tile.columns)
    types = dict(dy="*bf16", x="*bf16", rows="*fp8e5", columns="*fp8e5", m="i32", f="i32") | dict.fromkeys(
        ("scale", "scale_inv", "amax", "sums"), "*fp32"
    )
    if "backward" not in of:
        values |= dict(dy=None)
    compiled = compile_kernel(kernel, types, values, tile.warps, aligned=lambda *_: True)
    for access in "ld.global.v4.b32", "st.global.v4.b32":  # 16 bytes a thread
        assert access in compiled.asm["ptx"], access


if __name__ == "__main__":
    interpreted()
