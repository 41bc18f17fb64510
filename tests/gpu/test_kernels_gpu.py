"""Each Triton kernel equals its plain twin: in float32 closely, in bf16 up to the rounding of its output.

So do NVIDIA's apex's, where they are built.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F

from minitron.kernels.gemm import CastInto, Gemm, Payload
from minitron.kernels.param import GradSlot
from minitron.testing import assert_close_rel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# float32: exp and division differ in the last bits. bf16: one rounding of the result, 2^-9 of it on average.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def kernels(name):
    """minitron.kernels.<name>; skips where it is apex and NVIDIA's apex is absent."""
    if name != "apex":
        return importlib.import_module(f"minitron.kernels.{name}")
    reason = "NVIDIA's apex is not built here (train.kernels=apex says how)"
    return pytest.importorskip("minitron.kernels.apex", reason=reason, exc_type=ImportError)


@dtypes
@pytest.mark.parametrize("f", [48, 2048, 3000])
def test_swiglu(dtype, f):
    from minitron.kernels import fused

    x, dy = randn(5, 3, 2 * f, dtype=dtype), randn(5, 3, f, dtype=dtype, seed=1)
    plain = x.float().requires_grad_()
    gate, up = plain.chunk(2, -1)
    expected = F.silu(gate) * up
    expected.backward(dy.float())
    assert_close_rel(fused.swiglu_forward(x).float(), expected, TOLERANCE[dtype], "y")
    dx, _ = fused.swiglu_backward(dy, x)
    assert_close_rel(dx.float(), plain.grad, TOLERANCE[dtype], "dx")
    over, _ = fused.swiglu_backward(dy, x, over_x=True)
    assert torch.equal(over, dx) and over.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("name", ["cast", "gelu_forward", "gelu_backward", "swiglu_forward", "swiglu_backward"])
@pytest.mark.parametrize("m, f", [(16, 48), (200, 128), (384, 1040), (2048, 12288)])
@pytest.mark.parametrize("columns", [False, True])
def test_casts_of_what_was_just_computed(m, f, columns, name, sums):
    from minitron.kernels import fused, plain

    backward = "backward" in name
    if sums and not backward:
        pytest.skip("an activation has no bias behind it")
    x = 3 * randn(m, 2 * f if "swiglu" in name else f)
    inputs = [t.bfloat16() for t in ((3 * randn(m, f, seed=1), x) if backward else (x,))]
    kind, size = (torch.float8_e5m2, 20000.0) if backward else (torch.float8_e4m3fn, 100.0)  # large values saturate
    scale, (amax, other) = torch.full((1,), size, device="cuda"), (torch.full((1,), 0.5, device="cuda") for _ in "12")
    into, more = CastInto(scale, amax, kind, columns), (sums,) if backward else ()
    result = getattr(fused, name)(*inputs, *more, into)
    (rows, inverse, transposed, _), total = result if backward else (result, None)
    if name == "cast":
        values = inputs[0]
    else:
        values = getattr(plain, name)(*(t.float() for t in inputs))
        values = (values[0] if backward else values).bfloat16()
    expected = plain.cast(values, into._replace(amax=other))
    # exp and division differ in the last bits, so now and then bf16 rounds the other way, and FP8 after it
    assert_close_rel(amax, other, 4e-3, "amax")
    assert_close_rel(rows.float(), expected.rowwise.float(), 4e-3, name)
    assert rows.float().abs().max() == torch.finfo(kind).max
    assert torch.equal(inverse, expected.rowwise_scale)
    assert (transposed is not None) == columns and (total is not None) == sums
    if columns:
        assert torch.equal(transposed.float(), rows.float().t())
    if sums:
        assert_close_rel(total, plain.sum_rows(values), 1e-4, "sums")
    again = getattr(fused, name)(*inputs, *more, into._replace(amax=None))
    assert torch.equal((again[0] if backward else again).rowwise.float(), rows.float())


@dtypes
@pytest.mark.parametrize("f", [48, 2048, 3000])
def test_gelu_backward(dtype, f):
    from minitron.kernels import fused, plain

    x, dy = 3 * randn(7, 31, f, dtype=dtype), randn(7, 31, f, dtype=dtype, seed=1)
    expected, sums = plain.gelu_backward(dy.float(), x.float(), True)
    dx, total = fused.gelu_backward(dy, x, True)
    assert_close_rel(dx.float(), expected, TOLERANCE[dtype], "dx")
    assert_close_rel(total, sums, TOLERANCE[dtype], "sums")
    again, total = fused.gelu_backward(dy, x)
    assert total is None and torch.equal(again, dx)


@dtypes
@pytest.mark.parametrize("sizes", [(8, 2, 2), (5, 5, 5)])
@pytest.mark.parametrize("rope_batch", [1, 3])
def test_heads_are_split_and_rotated(dtype, sizes, rope_batch):
    from minitron.kernels import fused
    from minitron.kernels.plain import rotate
    from minitron.model.layers import rope_frequencies, rope_tables, split_heads

    qkv = randn(17, 3, sum(sizes), 64, dtype=dtype)
    positions = torch.randint(0, 100, (17, rope_batch), device="cuda")
    rope = rope_tables(positions, rope_frequencies(64, 100.0, None).cuda())
    plain = qkv.float().clone().requires_grad_()
    q, k, v = plain.split(sizes, 2)
    expected = rotate(q, rope), rotate(k, rope), v
    # attention hands gradients back as [b, n, s, d] in another order of memory
    grads = [randn(3, n, 17, 64, dtype=dtype, seed=n).permute(2, 0, 1, 3) for n in sizes]
    torch.autograd.backward(expected, [g.float() for g in grads])
    leaf = qkv.clone().requires_grad_()
    actual = split_heads(leaf * 1, sizes, rope, fused)
    torch.autograd.backward(actual, grads)
    for mine, other in zip(actual, expected):
        assert_close_rel(mine.float(), other, TOLERANCE[dtype])
    assert_close_rel(leaf.grad.float(), plain.grad, TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("d", [64, 96, 128])
def test_blocks_are_merged(dtype, d):
    from minitron.kernels import fused, plain

    lse, block_lse = 5 * randn(2, 3, 77), 5 * randn(2, 3, 77, seed=1)
    # views as the ring has them: [s, b, n, d] seen as [b, n, s, d], the second half of the positions
    out, block = (randn(154, 2, 3, d, dtype=dtype, seed=i).permute(1, 2, 0, 3)[:, :, 77:] for i in (2, 3))
    twin, twin_lse = out.float().clone(), lse.clone()
    fused.merge_(out, lse, block, block_lse)
    plain.merge_(twin, twin_lse, block, block_lse)
    assert_close_rel(out.float(), twin, TOLERANCE[dtype])
    assert_close_rel(lse, twin_lse, 2e-6)


@dtypes
@pytest.mark.parametrize("parts, shape", [(2, (7, 48)), (4, (300, 100)), (8, (1, 5000))])
def test_parts_are_summed(dtype, parts, shape):
    from minitron.kernels import fused, plain

    x = randn(parts, *shape, dtype=dtype)
    expected = plain.sum_parts(x.float())
    assert_close_rel(fused.sum_parts(x).float(), expected, TOLERANCE[dtype])
    onto, wide = x[0].clone(), torch.empty(shape, device="cuda")
    assert fused.sum_parts(x[1:], onto, wide) is wide and torch.equal(onto, x[0])
    assert_close_rel(wide, expected, TOLERANCE[torch.float32])
    assert fused.sum_parts(x[1:], onto) is onto
    assert_close_rel(onto.float(), expected, TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("h", [48, 2048, 3000])
def test_rows_are_added(dtype, h):
    from minitron.kernels import fused, plain

    ids, rows = torch.randint(0, 40, (60, 3), device="cuda"), randn(60, 3, h, dtype=dtype)
    tables = [torch.ones(16, h, device="cuda") for _ in range(2)]
    fused.add_rows_(tables[0], ids, 12, rows)
    plain.add_rows_(tables[1], ids, 12, rows)
    assert_close_rel(*tables, 2e-6)


def test_rows_are_added_in_order():
    """Replicas of learned positions drifted apart where documents restart them: each rank added in another order."""
    from minitron.kernels import fused

    ids, rows = torch.randint(0, 8, (2000, 4), device="cuda"), randn(2000, 4, 512)
    sums = [fused.add_rows_(torch.zeros(8, 512, device="cuda"), ids, 0, rows, in_order=True) for _ in range(20)]
    assert all(torch.equal(sums[0], other) for other in sums)
    assert_close_rel(sums[0], fused.add_rows_(torch.zeros(8, 512, device="cuda"), ids, 0, rows), 1e-5)


@dtypes
@pytest.mark.parametrize(
    "vocab, num_ids",
    [
        (96, 96),
        (8192, 8192),
        (20000, 20000),
        (96, 90),
        (128, 1),
        (1024, 1003),
        (20000, 19999),
        (20000, 8193),
        (20000, 8192),
        (20000, 4097),
    ],
)
def test_cross_entropy(dtype, vocab, num_ids):
    """Columns from num_ids on pad the vocabulary: nothing sees what is there, and their gradient is exactly 0."""
    from minitron.comm.mesh import Axis
    from minitron.kernels import fused
    from minitron.parallel.vocab import vocab_parallel_cross_entropy

    leaf = (3 * randn(7, 2, vocab)).to(dtype)
    leaf[..., num_ids:] = float("inf")
    leaf.requires_grad_()
    labels, dloss = torch.randint(0, num_ids, (7, 2), device="cuda"), randn(7, 2)
    labels[0] = num_ids - 1
    loss = vocab_parallel_cross_entropy(leaf * 1, labels, Axis.single(), fused, num_ids)
    loss.backward(dloss)
    plain = leaf.detach()[..., :num_ids].float().requires_grad_()
    expected = F.cross_entropy(plain.flatten(0, 1), labels.flatten(), reduction="none").view(7, 2)
    expected.backward(dloss)
    assert_close_rel(loss, expected, 2e-6, "loss")
    assert_close_rel(leaf.grad[..., :num_ids].float(), plain.grad, TOLERANCE[dtype], "dlogits")
    assert not leaf.grad[..., num_ids:].any()


@pytest.mark.parametrize("num_ids", [100, 99, 61, 1, 0])
def test_cross_entropy_of_labels_on_other_ranks(num_ids):
    """Also on ranks with some tokens, and with none: their maximum is -inf and their sum 0."""
    from minitron.kernels import fused, plain

    logits, labels = randn(40, 100), torch.arange(40, device="cuda") * 10
    labels[0] = 100 + num_ids  # the first id that is not here
    sums, twins = (ops.softmax_sums(logits, labels, 100, num_ids) for ops in (fused, plain))
    for mine, twin in zip(sums, twins, strict=True):
        if num_ids == 0:  # of infinities there is no distance
            assert torch.equal(mine, twin)
        else:
            assert_close_rel(mine, twin, 2e-6)
    lse, dloss = randn(40, seed=1) + 5, randn(40, seed=2)
    expected = plain.softmax_gradient_(logits.clone(), labels, 100, lse, dloss, num_ids)
    assert_close_rel(fused.softmax_gradient_(logits, labels, 100, lse, dloss, num_ids), expected, 2e-6)
    assert not logits[:, num_ids:].any()


@dtypes
@pytest.mark.parametrize("h", [48, 2048, 3000])
def test_rows_are_added_to_a_table_in_bf16(dtype, h):
    """2000 tokens of one id and some of others: their float32 sum, rounded once, the same every time."""
    from minitron.kernels import fused

    ids = torch.cat([torch.full((2000,), 17), torch.randint(0, 40, (400,))]).cuda()
    ids = ids[torch.randperm(2400, device="cuda")].view(800, 3)
    rows, start = 1 + randn(800, 3, h, dtype=dtype), randn(16, h, dtype=torch.bfloat16, seed=1)
    expected = start.double()
    for id in range(12, 28):
        expected[id - 12] += rows.flatten(0, 1)[ids.flatten() == id].double().sum(0)
    tables = [fused.add_rows_(start.clone(), ids, 12, rows) for _ in range(5)]
    assert all(torch.equal(tables[0], table) for table in tables)
    assert_close_rel(tables[0].double(), expected, 2.0**-8)


@pytest.mark.parametrize("backend", ["fused", "apex"])
@pytest.mark.parametrize(
    "dtype, grad_dtype",
    [*((dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16, torch.float32)), [torch.bfloat16] * 2],
)
@pytest.mark.parametrize("m, n, k", [(40, 96, 64), (4096, 1024, 512)])
def test_weight_gradient(backend, dtype, grad_dtype, m, n, k):
    """The first microbatch overwrites what the last step left, the others add; dy also as a transpose."""
    gemm = Gemm(kernels(backend).add_product)
    weight, reports = torch.nn.Parameter(randn(n, k, dtype=dtype)), []
    weight.slot = GradSlot(torch.full((n, k), float("nan"), dtype=grad_dtype, device="cuda"), lambda: reports.append(1))
    expected = torch.zeros(n, k, dtype=torch.float64, device="cuda")
    for i, dy in enumerate(
        [randn(m, n, dtype=dtype), randn(m, n, dtype=dtype, seed=1), randn(n, m, dtype=dtype, seed=2).t()]
    ):
        x = randn(m, k, dtype=dtype, seed=3 + i)
        assert gemm.weight_grad(weight, Payload(dy), Payload(x)) is None
        expected += dy.double().t() @ x.double()
        # a tensor core adds 16 products at a time to float32 and truncates: 3 * 4096 / 16 times 2^-24 at most
        # bf16: each sum that is kept is rounded, by 2^-9 at most, and where cuBLAS splits a long sum its parts as well
        tolerance = 5e-5 if grad_dtype == torch.float32 else (i + 1) * 2.0**-8
        assert_close_rel(weight.slot.main_grad.double(), expected, tolerance, f"after {i + 1}")
    assert len(reports) == 3 and not weight.slot.overwrite


@pytest.mark.parametrize("backend", ["fused", "apex"])
@pytest.mark.parametrize(
    "param_dtype, grad_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_adamw_equals_torchs_and_skips(backend, param_dtype, grad_dtype):
    from minitron.kernels.plain import AdamHyper, AdamState

    adamw_ = kernels(backend).adamw_
    n, lr, betas, eps, decay = 10_000, 1e-2, (0.9, 0.999), 1e-8, 0.1
    master, grad = randn(n), randn(n, dtype=grad_dtype, seed=1)
    reference = torch.nn.Parameter(master.clone())
    twin = torch.optim.AdamW([reference], lr=lr, betas=betas, eps=eps, weight_decay=decay)
    state = AdamState(
        master, grad.clone(), torch.zeros_like(master), torch.zeros_like(master), master.to(param_dtype), decay
    )
    divisor, finite, infinite = (torch.tensor(x, device="cuda") for x in (2.0, 0.0, 1.0))
    for step in range(1, 5):
        steps = torch.tensor(float(step), device="cuda")
        state.grad.copy_(grad * step)
        adamw_([state], steps, divisor, finite, AdamHyper(lr, betas, eps), lambda i: None)
        before = [x.clone() for x in state[:5]]
        adamw_([state], steps, divisor, infinite, AdamHyper(lr, betas, eps), lambda i: None)
        assert all(torch.equal(a, b) for a, b in zip(before, state[:5]))
        reference.grad = (grad * step).float() / 2
        twin.step()
        assert_close_rel(master, reference, 1e-6, f"master after {step}")
    if param_dtype == torch.bfloat16:
        assert torch.equal(state.param, master.bfloat16())


@dtypes
@pytest.mark.parametrize("h", [96, 5000])
def test_dropout(dtype, h):
    from minitron.kernels import fused
    from minitron.kernels.rng import dropout, token_counters

    keys = token_counters(1, 2, torch.arange(3, device="cuda"), torch.arange(40, device="cuda"))
    x, dy = randn(40, 3, h, dtype=dtype).requires_grad_(), randn(40, 3, h, dtype=dtype, seed=1)
    twin = x.detach().clone().requires_grad_()
    y, expected = dropout(x, 0.3, keys, 5, 1, fused.drop_elements), dropout(twin, 0.3, keys, 5, 1)
    assert torch.equal(y == 0, expected == 0)
    y.backward(dy)
    expected.backward(dy)
    assert_close_rel(y.float(), expected.float(), TOLERANCE[dtype])
    assert_close_rel(x.grad.float(), twin.grad.float(), TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("n", [1, 4095, 4096 * 529 + 8, 30_000_000])
def test_square_sum(dtype, n):
    from minitron.kernels import fused, plain

    x = randn(n, dtype=dtype)
    mine = fused.square_sum(x)
    assert mine.dtype == torch.float64 and mine.shape == () and torch.equal(mine, fused.square_sum(x))
    assert_close_rel(mine, plain.square_sum(x.double()), 1e-12)
    x[n // 2] = float("inf")
    assert fused.square_sum(x).isinf() and fused.square_sum(x.fill_(float("nan"))).isnan()


@dtypes
@pytest.mark.parametrize("h", [64, 128, 512, 4096, 5120, 8192, 12288])
@pytest.mark.parametrize(
    "layer_norm,delta,delta_bias,dtotal",
    [
        (False, True, False, True),
        (False, False, False, False),
        (True, True, True, True),
        (True, True, False, False),
        (True, False, False, True),
        (False, True, True, True),
    ],
)
def test_add_norm(dtype, h, layer_norm, delta, delta_bias, dtotal):
    """1055 rows: more than programs in the backward, and no multiple of anything. Sums over rows are float32."""
    from minitron.kernels import fused, plain

    x, weight = 3 + randn(211, 5, h, dtype=dtype), 1 + randn(h, dtype=dtype, seed=1)
    bias = randn(h, dtype=dtype, seed=2) if layer_norm else None
    delta = randn(5, 211, h, dtype=dtype, seed=3).transpose(0, 1) if delta else None
    delta_bias = randn(h, dtype=dtype, seed=4) if delta_bias else None
    results = [ops.add_norm((x, delta, delta_bias), weight, bias, 1e-5) for ops in (fused, plain)]
    (total, y, statistics), twins = results
    assert torch.equal(total, twins[0]) and (delta is not None or total is x)
    assert_close_rel(y.float(), twins[1].float(), TOLERANCE[dtype], "y")
    assert_close_rel(statistics, twins[2], 2e-6, "statistics")

    scale, amax = torch.full((1,), 100.0, device="cuda"), [torch.zeros(1, device="cuda") for _ in range(2)]
    inputs, kind = ((x, delta, delta_bias), weight, bias, 1e-5), torch.float8_e4m3fn
    again, cast, _ = fused.add_norm(*inputs, CastInto(scale, amax[0], kind))
    expected = plain.cast(y.flatten(0, -2), CastInto(scale, amax[1], kind))
    # A kernel that stores bytes may add a row up in another order: the last bit of its statistics, and so the cast of
    # a number in a million, is another. One in sixty would be if the norm were not rounded before its cast.
    near, differ = 1 / 8, cast.rowwise.float() != expected.rowwise.float()
    assert torch.equal(again, total) and differ.float().mean() < 1e-4
    torch.testing.assert_close(cast.rowwise.float(), expected.rowwise.float(), rtol=near, atol=2**-9)
    assert torch.equal(cast.rowwise_scale, expected.rowwise_scale)
    assert_close_rel(amax[0], amax[1], 2**-7 if dtype == torch.bfloat16 else 2**-9)

    dy = randn(5, 211, h, dtype=dtype, seed=5).transpose(0, 1)
    dtotal = randn(211, 5, h, dtype=dtype, seed=6) if dtotal else None
    wanted = delta_bias is not None, False
    results = [ops.add_norm_backward(dy, dtotal, *twins[::2], weight, *wanted) for ops in (fused, plain)]
    for name, mine, twin in zip(("dx", "dweight", "dbias", "ddelta_bias"), *results, strict=True):
        assert (mine is None) == (twin is None), name
        if mine is not None:
            assert mine.dtype == (dtype if name == "dx" else torch.float32)
            # ddelta_bias adds up dx, which in bf16 is rounded by then
            tolerance = TOLERANCE[dtype if name in ("dx", "ddelta_bias") else mine.dtype]
            assert_close_rel(mine.float(), twin.float(), tolerance, name)


def test_add_norm_repeats_bit_by_bit():
    from minitron.kernels import fused

    x, weight = randn(1055, 1, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16, seed=1)
    total, y, statistics = fused.add_norm((x, x, weight), weight, weight, 1e-5)
    first, second = (fused.add_norm_backward(y, x, total, statistics, weight, True, False) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
