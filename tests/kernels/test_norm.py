"""The sum of the residual stream and its norm equal torch's own norms in float64, every gradient included."""

import pytest
import torch
import torch.nn.functional as F

from minitron.kernels.gemm import DTYPES
from minitron.kernels.param import GradSlot
from minitron.model.layers import Norm, Residual
from minitron.parallel.layer_context import LayerContext
from minitron.testing import assert_close_rel

# float32: a few roundings more or less. bf16: inputs are the same, and results are rounded once, by 2^-9 on average.
TOLERANCE = {"fp32": 1e-6, "bf16": 4e-3}
S, B, H = 9, 3, 40


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(param, seed):
    with torch.no_grad():
        param.copy_(1 + randn(*param.shape, seed=seed))
    return param


def watch(param):
    """Give it a main_grad that holds rubbish, and a list of its reports."""
    param.reports = []
    param.slot = GradSlot(torch.full(param.shape, 7.0), lambda: param.reports.append(1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sum_is_read", [True, False])
@pytest.mark.parametrize("delta,delta_bias", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_sum_and_norm(layer_norm, delta, delta_bias, sum_is_read, dtype):
    """Twice, without and with main_grad; two microbatches add up there, each reporting every gradient once."""
    layout = LayerContext(dtype=DTYPES[dtype])
    norm = Norm(H, 1e-5, layout, bias=layer_norm)
    extra = layout.parameter((H,)) if delta_bias else None
    params = [filled(p, i) for i, p in enumerate([*norm.parameters(), *([extra] if delta_bias else [])])]
    x, d = ((3 + randn(S, B, H, seed=i)).to(layout.dtype).requires_grad_() for i in (5, 6))
    dtotal, dy = (randn(S, B, H, seed=i).to(layout.dtype) for i in (7, 8))

    exact = [t.detach().double().requires_grad_() for t in (x, d, *params)]
    total = exact[0] + exact[1] if delta else exact[0]
    total = total + exact[-1] if delta_bias else total
    # the norm is that of the sum as it was rounded
    rounded = total + (total.to(layout.dtype).double() - total).detach()
    expected = (
        F.layer_norm(rounded, (H,), exact[2], exact[3], 1e-5)
        if layer_norm
        else F.rms_norm(rounded, (H,), exact[2], 1e-5)
    )
    torch.autograd.backward(
        [total, expected] if sum_is_read else [expected],
        [dtotal.double(), dy.double()] if sum_is_read else [dy.double()],
    )

    for main_grad in (False, True):
        for step in range(2 if main_grad else 1):
            if main_grad and not step:
                for p in params:
                    watch(p)
            x.grad = d.grad = None
            stream = Residual(x, d if delta else None, extra)
            mine, y = norm(stream)
            torch.autograd.backward([mine, y] if sum_is_read else [y], [dtotal, dy] if sum_is_read else [dy])
        for name, actual, wanted in (("sum", mine, total), ("norm", y, expected), ("dx", x.grad, exact[0].grad)):
            assert actual.dtype == layout.dtype
            assert_close_rel(actual.double(), wanted, TOLERANCE[dtype], name)
        assert torch.equal(d.grad, x.grad) if delta else d.grad is None and mine.data_ptr() == x.data_ptr()
        assert torch.equal(norm.recompute(mine), y)
        assert torch.equal(stream.materialize(), mine), "the sum made without the norm is rounded as the norm's is"
        for param, twin in zip(params, exact[2:]):
            actual = param.slot.main_grad / 2 if main_grad else param.grad
            assert_close_rel(actual.double(), twin.grad, TOLERANCE["fp32" if main_grad else dtype], "parameter")
            assert not main_grad or len(param.reports) == 2
