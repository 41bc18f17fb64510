"""The Triton kernel that casts masters to FP8 weights, without a GPU: in Triton's interpreter, and compiled for one.

tests/gpu/test_fp8_gpu.py holds it against plain torch on a GPU, bit by bit. The interpreter truncates where a GPU
rounds to bf16, and flushes the smallest FP8 numbers: here values are chosen that need neither.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minitron.kernels import plain

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which a GPU's torch has"
)
ROOT = Path(__file__).parents[2]


def test_in_tritons_interpreter():
    """In a process of its own: kernels are interpreted if the variable is set when they are defined."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


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
    import triton
    from triton.backends.compiler import GPUTarget

    from minitron.kernels.fused import _cast_master

    values = dict(LIMIT=448.0, BLOCK=4096) | {name: None for name in ("out", "amax") if name not in given}
    types = dict(master="*fp32", scale="*fp32", out="*fp8e4nv", amax="*fp32", n="i32")
    signature = {name: "constexpr" if name in values else types[name] for name in _cast_master.arg_names}
    code = triton.compile(
        triton.compiler.ASTSource(_cast_master, signature, values),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 8},
    ).asm["ptx"]
    assert ("cvt.rn.satfinite.e4m3x2.f32" in code) == ("out" in given)
    assert "cvt.rn.bf16" in code and "cvt.rz" not in code


if __name__ == "__main__":
    interpreted()
