"""Triton kernels without a GPU: run in Triton's interpreter, or compiled for a Hopper GPU."""

import importlib.util
import os

import pytest

import warm

ANEW = """
import runpy, sys
for name in [*sys.modules]:
    if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
        del sys.modules[name]
runpy.run_path(sys.argv[1], run_name="__main__")
"""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux")


def run_interpreted(file: str) -> None:
    """Run a test file as a script in a process whose Triton kernels are interpreted.

    Triton reads TRITON_INTERPRET when a kernel is defined, its own among them, so a fork imports it anew.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = warm.run("-c", ANEW, file, env=environment, timeout=1800.0)
    assert done.returncode == 0, done.stdout + done.stderr


def compile_kernel(kernel, types, values, warps, stages=3, aligned=None, gpu=90):
    """Compile a kernel for a GPU of compute capability gpu / 10. Returns Triton's result, with `asm` and `metadata`.

    types: of the arguments that are no constants, by name; a tuple of them for a tuple. values: the constants.
    aligned(name, type): whether an argument is a multiple of 16; by default pointers are, as they are in a step.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    aligned = aligned or (lambda name, kind: kind[0] == "*")
    signature = {name: "constexpr" if name in values else types[name] for name in kernel.arg_names}
    parts = [
        (name, part, path)
        for i, (name, kind) in enumerate(signature.items())
        for part, path in ([(k, (i, j)) for j, k in enumerate(kind)] if isinstance(kind, tuple) else [(kind, (i,))])
    ]
    even = {
        path: [["tt.divisibility", 16]] for name, kind, path in parts if kind != "constexpr" and aligned(name, kind)
    }
    return triton.compile(
        triton.compiler.ASTSource(kernel, signature, values, even),
        target=GPUTarget("cuda", gpu, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
