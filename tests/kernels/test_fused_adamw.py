"""The Triton kernel that casts masters to FP8 weights, without a GPU: in Triton's interpreter, and compiled for one.

tests/gpu/test_fp8_gpu.py holds it against plain torch on a GPU, bit by bit. The interpreter truncates where a GPU
rounds to bf16, and flushes the smallest FP8 numbers: here values are chosen that need neither.
"""

import pytest
import torch

from minitron.kernels import plain
from triton_cpu import compile_kernel, needs_triton, run_interpreted

pytestmark = needs_triton


def test_in_tritons_interpreter():
    run_interpreted(__file__)


def interpreted():
    from minitron.kernels import fused

    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[grid.isfinite() & (grid.abs() >= 2.0**-6)]
    for n in (1, 100, 4096, 9000):
        master = grid[torch.randint(len(grid), (n,), generator=torch.Generator().manual_seed(n))] / 4
        scale = torch.tensor([0.0, 8.0])[1:]  # half of the largest ones saturate
        for wants_out, wants_amax in ((True, True), (True, False), (False, True)):
            results = []
            for cast in (plain.cast_master, fused.cast_master):
                data, amax = torch.full((n + 8,), 7, dtype=torch.uint8), torch.full((1,), 0.5)
                out = data[:n].view(torch.float8_e4m3fn)
                cast(master, scale, out if wants_out else None, amax if wants_amax else None)
                results.append((data, amax))
            assert all(map(torch.equal, *results)), (n, wants_out, wants_amax)
            assert (results[0][0][n:] == 7).all()


@pytest.mark.parametrize("given", [("out", "amax"), ("out",), ("amax",)])
def test_it_compiles_for_hopper_and_rounds_as_torch_does(given):
    from minitron.kernels.fused import _cast_master

    values = dict(LIMIT=448.0, BLOCK=4096) | {name: None for name in ("out", "amax") if name not in given}
    types = dict(master="*fp32", scale="*fp32", out="*fp8e4nv", amax="*fp32", n="i32")
    code = compile_kernel(_cast_master, types, values, warps=8).asm["ptx"]
    assert ("cvt.rn.satfinite.e4m3x2.f32" in code) == ("out" in given)
    assert "cvt.rn.bf16" in code and "cvt.rz" not in code


if __name__ == "__main__":
    interpreted()
