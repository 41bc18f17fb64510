"""Gradients in bf16, on CPUs: each kernel that writes one adds in float32 and rounds once."""

import pytest
import torch

from minitron.kernels import fp8_torch, plain
from minitron.kernels.fp8_torch import Operand
from minitron.kernels.plain import AdamHyper, AdamState

BF16 = torch.bfloat16


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded_once(actual, exact):
    """Nearest neighbours of the exact values, but for a few that lie between two, where float32 chose the other."""
    assert actual.dtype == BF16
    assert (actual != exact.bfloat16()).double().mean() < 2e-3
    assert ((actual.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-30).all()


@pytest.mark.parametrize("m, n, k", [(300, 64, 48), (1, 8, 8)])
def test_products(m, n, k):
    out = torch.full((n, k), float("nan"), dtype=BF16)
    for i in range(3):
        dy, x = randn(m, n, seed=i), randn(m, k, seed=9 + i)
        exact = dy.double().t() @ x.double()
        exact = exact + out.double() if i else exact
        plain.add_product(out, dy, x, add=i > 0)
        assert_rounded_once(out, exact)


def test_parts_of_other_ranks():
    parts, own = randn(7, 5000), randn(5000, seed=1)
    exact = parts.double().sum(0) + own.double()
    before, wide, narrow = own.clone(), torch.empty(5000), torch.empty(5000, dtype=BF16)
    assert plain.sum_parts(parts, own, wide) is wide and plain.sum_parts(parts, own, narrow) is narrow
    assert torch.equal(own, before)
    assert plain.sum_parts(parts, own) is own and torch.equal(own, narrow)
    assert_rounded_once(own, exact)
    assert ((wide - exact).abs() <= 1e-6 * parts.double().abs().sum(0)).all()


@pytest.mark.parametrize("in_order", [False, True])
def test_a_table_does_not_stand_still_under_a_thousand_rows(in_order):
    """Ones, added one by one to 8 bits, would never get beyond 256."""
    ids, table = torch.tensor([3] * 1000 + [1, 999]), randn(200, 16)
    exact = table.double()
    exact[1] += 1000
    assert plain.add_rows_(table, ids, 2, torch.ones(1002, 16, dtype=BF16), in_order) is table
    assert_rounded_once(table, exact)


@pytest.mark.parametrize("scaling", [fp8_torch.TorchFp8, fp8_torch.TorchBlockFp8])
def test_products_in_fp8(scaling):
    blocks = scaling is fp8_torch.TorchBlockFp8

    def operand(seed):
        values = randn(128, 256, seed=seed).to(torch.float8_e4m3fn)
        return Operand(values, torch.full((2, 128) if blocks else (1,), 0.5))

    out = torch.full((128, 128), float("nan"), dtype=BF16)
    for i in range(3):
        a, b = operand(i), operand(9 + i)
        exact = a.values.double() @ b.values.double().t() / 4
        exact = exact + out.double() if i else exact
        scaling().multiply_into(out, a, b, add=i > 0)
        assert_rounded_once(out, exact)


def test_adamw_reads_them_in_float32():
    states = {}
    for dtype in (BF16, torch.float32):
        master = randn(1000).float()
        zeros = [torch.zeros(1000) for _ in range(2)]
        states[dtype] = AdamState(master, randn(1000, seed=1).to(dtype), *zeros, master.bfloat16(), 0.1)
        scalars = [torch.tensor(x) for x in (1.0, 3.0, 0.0)]
        plain.adamw_([states[dtype]], *scalars, AdamHyper(1e-2, (0.9, 0.99), 1e-8), lambda i: None)
    for name in ("master", "exp_avg", "exp_avg_sq", "param"):
        assert torch.equal(getattr(states[BF16], name), getattr(states[torch.float32], name))
