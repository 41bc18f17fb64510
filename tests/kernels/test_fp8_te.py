"""How kernels/fp8_te.py calls Transformer Engine, on CPUs: against a stand-in of the library.

The stand-in takes the arguments that the library is given today, without default values, and computes in plain torch.
So casts equal those of kernels/fp8_torch.py bit by bit. tests/gpu/test_fp8_gpu.py has the library itself.
"""

import importlib.util
import sys
from functools import partial
from types import ModuleType

import pytest
import torch

from minitron.comm.mesh import Axis
from minitron.kernels import fp8_torch
from minitron.kernels.fp8_scales import FP8_DTYPES, LARGEST_SCALE, fp8_max, scale_of
from minitron.kernels.fp8_torch import Operand

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {"e4m3": E4M3, "e5m2": E5M2}
SINGLE, PAIR = Axis.single(), Axis("tp", 0, 2, (0, 1), group="pair")


class Result:
    def __init__(self, **parts):
        self.parts = parts

    def get_metadata(self):
        return self.parts


class Quantizer:
    internal = False

    def __call__(self, x):
        assert self.internal and x.is_contiguous()
        return self.run(x)

    def cast(self, x, scale):
        limit = fp8_max(DTYPES[self.code])
        data = (x.float() * scale).clamp(-limit, limit).to(DTYPES[self.code]).view(torch.uint8)
        transposed = data.t().contiguous() if self.columnwise else None
        return Result(data=data, data_transpose=transposed, fp8_scale_inv=scale.reciprocal())


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(self, code, device, *, with_amax_reduction, amax_reduction_group, columnwise, amax_epsilon):
        self.code, self.columnwise, self.smallest = code, columnwise, amax_epsilon
        assert amax_reduction_group == (PAIR.group if with_amax_reduction else None)
        self.others = 2.0 if with_amax_reduction else 0.0  # the largest value of the other rank, over that of this one

    def run(self, x):
        top = x.abs().max().float().view(1)
        return self.cast(x, fp8_max(DTYPES[self.code]) / (top * max(1.0, self.others)).clamp(min=self.smallest))


class Float8Quantizer(Quantizer):
    def __init__(self, scale, amax, code, *, columnwise):
        self.scale, self.amax, self.code, self.columnwise = scale, amax, code, columnwise

    def run(self, x):
        torch.maximum(self.amax, x.abs().max().float(), out=self.amax)
        return self.cast(x, self.scale)


class Float8BlockQuantizer(Quantizer):
    def __init__(self, code, *, rowwise, columnwise, block_scaling_dim, amax_epsilon):
        assert (code, rowwise, amax_epsilon) == ("e4m3", True, 448.0 / LARGEST_SCALE)
        self.role, self.columnwise = {1: "x", 2: "weight"}[block_scaling_dim], columnwise

    def run(self, x):
        cast = fp8_torch.TorchBlockFp8().cast(x, self.role, SINGLE, (None, None), self.columnwise)
        rows, scale, columns, scales = (x if x is None or x.itemsize > 1 else x.view(torch.uint8) for x in cast)
        return Result(rowwise_data=rows, rowwise_scale_inv=scale, columnwise_data=columns, columnwise_scale_inv=scales)


class Wrapped:
    def __init__(self, *, data, fp8_scale_inv, fp8_dtype, fake_dtype):
        assert fake_dtype == torch.bfloat16
        self.values = data.view(DTYPES[fp8_dtype]).float() * fp8_scale_inv


class WrappedBlocks:
    def __init__(
        self, *, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, fake_dtype, **more
    ):
        assert columnwise_data is columnwise_scale_inv is None and fake_dtype == torch.bfloat16
        assert more == dict(quantizer=None, is_2D_scaled=more["is_2D_scaled"])
        self.values = fp8_torch.dequantize(Operand(rowwise_data.view(DTYPES[fp8_dtype]), rowwise_scale_inv))
        self.in_tiles = more["is_2D_scaled"]


class Library:
    """The modules that fp8_te.py imports. workspaces, in_tiles: each product's memory and kinds of operands."""

    def __init__(self):
        self.workspaces, self.in_tiles = [], []
        pytorch = "transformer_engine.pytorch"
        names = {
            "transformer_engine": {},
            pytorch: {},
            "transformer_engine_torch": dict(generic_gemm=self.gemm, fp8_transpose=self.transpose),
            f"{pytorch}.constants": dict(
                DType=type("DType", (), dict(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2")),
                TE_DType={torch.float32: "float32", torch.bfloat16: "bfloat16"},
            ),
            f"{pytorch}.quantized_tensor": dict(Quantizer=Quantizer),
            f"{pytorch}.tensor.float8_blockwise_tensor": dict(Float8BlockQuantizer=Float8BlockQuantizer),
            f"{pytorch}.tensor.float8_tensor": dict(
                Float8CurrentScalingQuantizer=Float8CurrentScalingQuantizer, Float8Quantizer=Float8Quantizer
            ),
            f"{pytorch}.tensor.storage.float8_blockwise_tensor_storage": dict(
                Float8BlockwiseQTensorStorage=WrappedBlocks
            ),
            f"{pytorch}.tensor.storage.float8_tensor_storage": dict(Float8TensorStorage=Wrapped),
        }
        self.modules = {name: ModuleType(name) for name in names}
        for name, contents in names.items():
            vars(self.modules[name]).update(contents)

    def transpose(self, data, code, *, out):
        assert data.dtype == torch.uint8 and code in DTYPES and out is None
        return data.t().contiguous()

    def gemm(self, b, transpose_b, a, transpose_a, out, quantizer, dtype, bias, bias_dtype, *more, beta, **options):
        """[m, n] = a [m, k] b [n, k]^T; the library's matrices are column-major, so its first one is b."""
        gelu, gelu_input, grad, workspace, size, accumulate, accurate = more
        assert transpose_b and not transpose_a and quantizer is None and bias_dtype == "bfloat16"
        assert not gelu and gelu_input is None and not grad and accurate and beta == float(accumulate)
        off = dict(comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False)
        assert options == off | {"alpha": 1.0} and size == len(workspace)
        self.workspaces.append(workspace.data_ptr())
        self.in_tiles.append([getattr(x, "in_tiles", None) for x in (a, b)])
        product = a.values @ b.values.t() + (0.0 if bias is None else bias)
        if out is None:
            return [product.to(getattr(torch, dtype))]
        assert out.dtype == getattr(torch, dtype)
        return [out.add_(product) if accumulate else out.copy_(product)]


class Stream:
    device = torch.device("cpu")


@pytest.fixture
def library(monkeypatch):
    found, stream = Library(), Stream()
    for name, module in found.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    spec = importlib.util.find_spec("minitron.kernels.fp8_te")
    found.fp8_te = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found.fp8_te)  # under no name, so that no later import finds it
    return found


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_equal(mine, twin):
    for one, other in zip(mine, twin, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            bits = [x.view(torch.uint8) if x.itemsize == 1 else x for x in (one, other)]
            assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("role", FP8_DTYPES)
def test_casts_with_one_scale(library, role, columnwise):
    te, plain, limit = library.fp8_te.TeFp8(), fp8_torch.TorchFp8(), fp8_max(FP8_DTYPES[role])
    for x in (randn(48, 32), randn(32, 48).t(), 1e-3 * randn(48, 32), torch.zeros(48, 32, dtype=torch.bfloat16)):
        for scale in (None, torch.tensor([limit / 2])):  # 2 is less than some values
            for amax in (None, 0.0, 0.5, 100.0):
                tops = [None if amax is None else torch.tensor([amax]) for _ in range(2)]
                mine, twin = (by.cast(x, role, SINGLE, (scale, top), columnwise) for by, top in zip((te, plain), tops))
                if x.any() or scale is not None:
                    assert_equal(mine, twin)
                else:  # the scale of zeros is the largest one there
                    assert not mine.rowwise.float().any() and mine.rowwise_scale == 1 / LARGEST_SCALE
                assert amax is None or tops[0].item() == pytest.approx(tops[1].item(), rel=1e-6, abs=0)
    mine = te.cast(x := randn(48, 32), role, PAIR, (None, None), columnwise)
    assert mine.columnwise is None  # gathered first
    assert_equal([mine.rowwise_scale], [scale_of(2 * x.abs().max().float().view(1), limit).reciprocal()])
    transposed = te.transpose(mine.rowwise)
    assert_equal([transposed], [mine.rowwise.t().contiguous()])


@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("role", FP8_DTYPES)
def test_casts_in_blocks(library, role, columnwise):
    x = randn(256, 384) * torch.logspace(-3, 3, 384).bfloat16()
    pair = (
        by.cast(x, role, SINGLE, (None, None), columnwise)
        for by in (library.fp8_te.TeBlockFp8(), fp8_torch.TorchBlockFp8())
    )
    assert_equal(*pair)


@pytest.mark.parametrize("blocks", [False, True])
def test_products(library, blocks, monkeypatch):
    te = library.fp8_te.TeBlockFp8() if blocks else library.fp8_te.TeFp8()
    plain = fp8_torch.TorchBlockFp8() if blocks else fp8_torch.TorchFp8()
    a, b = (plain.cast(randn(m, 128, seed=m), "x", SINGLE, (None, None), False) for m in (128, 256))
    operands, bias = (Operand(*a[:2]), Operand(*b[:2], block_2d=True)), randn(256)
    for dtype in (torch.float32, torch.bfloat16):
        for add in (False, True):
            start = torch.full((128, 256), float("nan") if not add else 1.0, dtype=dtype)
            mine, twin = start.clone(), start.clone()
            te.multiply_into(mine, *operands, add=add)
            plain.multiply_into(twin, *operands, add=add)
            torch.testing.assert_close(mine, twin)
    assert library.in_tiles == [[False, True] if blocks else [None, None]] * 4
    multiply = partial(te.multiply, *operands, torch.bfloat16, fast=True)
    expected = plain.multiply(*operands, torch.bfloat16, None, bias, True)
    torch.testing.assert_close(multiply(out=None, bias=bias), expected)
    out = torch.empty(128, 256, dtype=torch.bfloat16)
    assert multiply(out=out, bias=bias) is out
    torch.testing.assert_close(out, expected)
    before = len(set(library.workspaces))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None, other=Stream(): other)
    te.multiply_into(torch.empty(128, 256), *operands, add=False)
    assert (before, len(set(library.workspaces))) == (1, 2)  # one for each stream
