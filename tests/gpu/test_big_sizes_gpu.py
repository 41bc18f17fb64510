"""Tensors of more than 2**31 elements on one GPU: kernels, products, attention and buckets, at sampled places.

An index in 32 bits wraps there, and reads or writes a wrong element. So each case compares rows at both ends, around
2**31 and 2**32 elements, and some between with formulas in float64. Tolerances allow the rounding of the result and
float32 arithmetic before it; a wrong element is off by as much as the values themselves. Cases that run in libraries
are the last ones, because an illegal access of theirs ends the process's CUDA context. cuDNN's and flash-attn's
gradients are wrong beyond 2**31 elements, so config/rules.py refuses such sizes.

Needs 70 GiB of free memory. Each case prints a row: its largest error as a share of the tolerance, memory, seconds.
"""

import gc
import time

import pytest
import torch
from torch import nn

from minitron.comm.mesh import Mesh
from minitron.config.schema import PrecisionConfig
from minitron.kernels import attention, plain
from minitron.kernels.fp8 import Fp8Gemm
from minitron.kernels.fp8_scales import ROLES, DelayedScaling
from minitron.kernels.fp8_torch import Operand, dequantize
from minitron.kernels.gemm import CastInto, Gemm, Payload
from minitron.kernels.kernels import Kernels, choose_fp8
from minitron.kernels.param import GradSlot, ParamSpec
from minitron.kernels.plain import AdamHyper, AdamState
from minitron.kernels.rng import AttentionDropout
from minitron.optim.buckets import Gradients
from minitron.parallel.vocab import lookup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BIG, NEEDED, GPU = 2**31, 70 * 2**30, torch.device("cuda")
WIDTH = 8192  # of most rows
BF16, FP32 = 2.0**-8, 2.0**-22  # one rounding of a result; four, of float32 arithmetic
E4M3 = torch.float8_e4m3fn
IN_E4M3 = 2.0**-4 + BF16


@pytest.fixture
def close(request):
    """Free the memory of earlier cases; return a comparison, of whose results a row is printed at the end."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of free GPU memory")
    torch.cuda.reset_peak_memory_stats()
    shares, start = [0.0], time.perf_counter()

    def compare(actual, expected, rounding, floor=1e-5):
        """Compare with float64 values: `rounding` of each, and `floor` of the largest, may be lost."""
        assert actual.shape == expected.shape
        bound = rounding * expected.abs() + floor * expected.abs().max()
        shares.append(float(((actual.double() - expected).abs() / bound).max()))
        assert shares[-1] <= 1  # not NaN either

    yield compare
    torch.cuda.synchronize()
    gib, seconds = torch.cuda.max_memory_allocated() / 2**30, time.perf_counter() - start
    print(f"\n{request.node.name:56} {max(shares):5.2f} of the tolerance {gib:5.1f} GiB {seconds:5.1f} s", end=" ")


@pytest.fixture
def fused():
    from minitron.kernels import fused

    return fused


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.empty(shape, dtype=dtype, device=GPU).normal_(generator=torch.Generator(GPU).manual_seed(seed))


def rows_of(width):
    """How many rows have more than BIG elements."""
    return BIG // width + 3


def chosen(rows, width):
    """Rows at both ends, where BIG and 2 BIG elements are passed, and some between."""
    edges = {k * BIG // width + j for k in (1, 2) for j in (-1, 0, 1)}
    between = torch.randint(rows, (8,), generator=torch.Generator().manual_seed(0)).tolist()
    return [i for i in sorted({0, 1, rows - 2, rows - 1, *edges, *between}) if i < rows]


def take(x, rows):
    """x at `rows` of dim 0; each by a view, because an indexing kernel might be wrong, too."""
    return torch.stack([x[i] for i in rows])


def take64(x, rows):
    return take(x, rows).double()


def columns64(x, columns):
    return torch.stack([x[:, i] for i in columns], 1).double()


# ---- pointwise kernels ----------------------------------------------------------------------------------------------


def test_swiglu(fused, close):
    m = rows_of(WIDTH)
    x, dy, rows = randn(m, 2 * WIDTH), randn(m, WIDTH, seed=1), chosen(m, WIDTH)
    close(take(fused.swiglu_forward(x), rows), plain.swiglu_forward(take64(x, rows)), BF16)
    expected, _ = plain.swiglu_backward(take64(dy, rows), take64(x, rows))
    close(take(fused.swiglu_backward(dy, x)[0], rows), expected, BF16)


FORMULAS = {
    "cast": lambda dy, x: x,
    "gelu_forward": lambda dy, x: plain.gelu_forward(x),
    "swiglu_forward": lambda dy, x: plain.swiglu_forward(x),
    "gelu_backward": lambda dy, x: plain.gelu_backward(dy, x)[0],
    "swiglu_backward": lambda dy, x: plain.swiglu_backward(dy, x)[0],
}


@pytest.mark.parametrize("name", FORMULAS)
def test_casts(fused, close, name):
    """Rows, columns and sums; the scale leaves room for products of three normal numbers."""
    m, gated, backward = rows_of(WIDTH), "swiglu" in name, "backward" in name
    x, dy = randn(m, WIDTH * (1 + gated)), randn(m, WIDTH, seed=1)
    scale, amax = torch.tensor([448 / 256], device=GPU), torch.zeros(1, device=GPU)
    into = CastInto(scale, amax, E4M3, columnwise=True)
    cast, sums = getattr(fused, name)(dy, x, True, into) if backward else (getattr(fused, name)(x, into), None)
    rows = chosen(m, cast.rowwise.shape[1])
    expected = FORMULAS[name](take64(dy, rows), take64(x, rows))
    values = take(cast.rowwise, rows).double() * cast.rowwise_scale.double()
    close(values, expected, IN_E4M3, floor=float(2.0**-10 / scale / expected.abs().max()))  # of its smallest number
    assert torch.equal(take(cast.columnwise.view(torch.uint8).t(), rows), take(cast.rowwise.view(torch.uint8), rows))
    assert amax >= (1 - BF16) * expected.abs().max()
    if sums is not None:
        some = [0, WIDTH // 2, WIDTH - 1]
        places = [*some, *(WIDTH + i for i in some)] if gated else some
        of_columns = FORMULAS[name](columns64(dy, some), columns64(x, places)).bfloat16().double().sum(0)
        close(sums[places], of_columns, 0, floor=1e-3)  # a value near a tie is rounded one way or the other


@pytest.mark.parametrize("layer_norm", [False, True])
def test_norms(fused, close, layer_norm):
    m, h, eps = rows_of(WIDTH), WIDTH, 1e-5
    x, delta, weight, rows = randn(m, h), randn(m, h, seed=1), randn(h, seed=2), chosen(m, h)
    bias, delta_bias = (randn(h, seed=3), randn(h, seed=4)) if layer_norm else (None, None)
    total, y, statistics = fused.add_norm((x, delta, delta_bias), weight, bias, eps)
    summed = take64(x, rows) + take64(delta, rows) + (delta_bias.double() if layer_norm else 0)
    close(take(total, rows), summed, BF16)
    t = take64(total, rows)
    mean = t.mean(1, keepdim=True) if layer_norm else 0
    rstd = ((t - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    normal = (t - mean) * rstd
    expected = normal * weight.double() + (bias.double() if layer_norm else 0)
    close(take(y, rows), expected, BF16)
    into = CastInto(torch.tensor([448 / 64], device=GPU), None, E4M3)
    _, cast, _ = fused.add_norm((x, delta, delta_bias), weight, bias, eps, into)
    close(take(cast.rowwise, rows).double() / into.scale, expected, IN_E4M3, floor=1e-4)
    del x, delta, y, cast
    dy, dtotal = randn(m, h, seed=5), randn(m, h, seed=6)
    dx, dweight, dbias, _ = fused.add_norm_backward(dy, dtotal, total, statistics, weight, layer_norm, False)
    grad = take64(dy, rows) * weight.double()
    grad = grad - normal * (grad * normal).mean(1, keepdim=True) - (grad.mean(1, keepdim=True) if layer_norm else 0)
    close(take(dx, rows), grad * rstd + take64(dtotal, rows), BF16)
    some, middle = [0, h // 2, h - 1], statistics[1, :, None].double() if layer_norm else 0
    normals = (columns64(total, some) - middle) * statistics[0, :, None].double()
    close(dweight[some], (columns64(dy, some) * normals).sum(0), 0, floor=1e-4)  # sums of many terms in float32
    if layer_norm:
        close(dbias[some], columns64(dy, some).sum(0), 0, floor=1e-4)


def turned(x, angles, rows, sign):
    """x [rows, b, n, d] turned by the angles of its rows."""
    first, second = x.chunk(2, -1)
    cos, sin = (torch.stack([f[i] for i in rows])[:, None, None].double() for f in (angles.cos(), angles.sin()))
    return torch.cat([first * cos - sign * second * sin, second * cos + sign * first * sin], -1)


def test_rotary_positions(fused, close):
    """In place; the gradients lie [b, n, s, d] in memory, so that strides of samples and heads are large, too."""
    b, n, g, d = 8, 32, 8, 128
    s = rows_of(b * n * d)
    qkv, rows, angles = randn(s, b, n + 2 * g, d), chosen(s, b * (n + 2 * g) * d), randn(s, d // 2, dtype=torch.float32)
    rope = angles.cos()[:, None, None], angles.sin()[:, None, None]
    before = take64(qkv, rows)
    fused.split_heads(qkv, (n, g, g), rope)
    close(take(qkv, rows)[:, :, : n + g], turned(before[:, :, : n + g], angles, rows, 1), BF16)
    assert torch.equal(take64(qkv, rows)[:, :, n + g :], before[:, :, n + g :])
    del qkv
    dq, dk, dv = (randn(b, heads, s, d, seed=i).permute(2, 0, 1, 3) for i, heads in enumerate((n, g, g)))
    out = fused.split_heads_backward((dq, dk, dv), rope)
    expected = torch.cat([turned(take64(dx, rows), angles, rows, -1) for dx in (dq, dk)], 2)
    close(take(out, rows)[:, :, : n + g], expected, BF16)
    assert torch.equal(take(out, rows)[:, :, n + g :], take(dv, rows))


def words(*shape, seed=0):
    """Random words, as counters of dropout are."""
    return torch.randint(2**32, shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU)


def test_dropout(fused, close):
    b, h = 4, WIDTH
    s = rows_of(b * h)
    x, keys, rows = randn(s, b, h), words(s, b), chosen(s, b * h)
    name = 0x9ABCDEF0, 0, round(0.1 * 2**32), 1 / 0.9
    y = take(fused.drop_elements(x, keys, *name), rows)
    expected = plain.drop_elements(take64(x, rows), take(keys, rows), *name)
    close(y, expected, BF16)
    assert 0.05 < float((expected == 0).double().mean()) < 0.15


def test_cross_entropy(fused, close):
    """The logits of 32,768 tokens of Llama-3, with a padded vocabulary."""
    m, v, padding = 32768 * BIG // 2**31, 128256, 56
    logits, rows, num_ids = randn(m, v).mul_(3), chosen(m, v), v - padding
    labels = torch.randint(num_ids, (m,), generator=torch.Generator(GPU).manual_seed(1), device=GPU)
    labels[-1] = num_ids - 1
    before, ids = take64(logits, rows)[:, :num_ids], take(labels, rows)
    top, total, picked = fused.softmax_sums(logits, labels, 0, num_ids)
    highest = before.amax(1)
    close(take(top, rows), highest, FP32)
    close(take(total, rows), (before - highest[:, None]).exp().sum(1), FP32)
    close(take(picked, rows), before.gather(1, ids[:, None])[:, 0], FP32)
    dloss = randn(m, dtype=torch.float32, seed=2)
    fused.softmax_gradient_(logits, labels, 0, total.log() + top, dloss, num_ids)
    expected = before.softmax(1)
    expected.scatter_add_(1, ids[:, None], -torch.ones_like(expected[:, :1]))
    after = take(logits, rows)
    close(after[:, :num_ids], expected * take64(dloss, rows)[:, None], BF16, floor=1e-8)
    assert not after[:, num_ids:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw(fused, close, dtype):
    n, hyper, decay, divisor = BIG + 4224, AdamHyper(1e-2, (0.9, 0.95), 1e-8), 0.1, 2.0
    grad, (master, average, square) = randn(n, dtype=dtype), (randn(n, dtype=torch.float32, seed=i) for i in (1, 2, 3))
    square.abs_()
    param, rows = torch.empty(n, dtype=torch.bfloat16, device=GPU), chosen(n, 1)
    g, p, m, v = (take64(x, rows) for x in (grad, master, average, square))
    numbers = (torch.tensor(x, dtype=torch.float32, device=GPU) for x in (3.0, divisor, 0.0))
    fused.adamw_([AdamState(master, grad, average, square, param, decay)], *numbers, hyper, lambda i: None)
    g, (beta1, beta2) = g / divisor, hyper.betas
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    p = p * (1 - hyper.lr * decay) - hyper.lr * (m / (1 - beta1**3)) / ((v / (1 - beta2**3)).sqrt() + hyper.eps)
    for actual, expected in ((master, p), (average, m), (square, v)):
        close(take(actual, rows), expected, FP32)
    close(take(param, rows), p, BF16)


def test_cast_of_masters(fused, close):
    n = BIG + 4224
    master, out, rows = randn(n, dtype=torch.float32), torch.empty(n, dtype=E4M3, device=GPU), chosen(n, 1)
    scale, amax = torch.tensor([448 / 16], device=GPU), torch.zeros(1, device=GPU)
    master[-1] = 15.0
    fused.cast_master(master, scale, out, amax)
    assert amax == 15
    close(take(out, rows).double() / scale, take64(master, rows), IN_E4M3, floor=1e-4)


def test_sums_of_parts(fused, close):
    n = BIG + 4224
    parts, onto, rows = randn(2, n), randn(n, seed=1), chosen(n, 1)
    expected = take64(parts.t(), rows).sum(1)
    close(take(fused.sum_parts(parts), rows), expected, BF16)
    expected = expected + take64(onto, rows)
    close(take(fused.sum_parts(parts, onto), rows), expected, BF16)


@pytest.mark.parametrize("n", [BIG - 128, BIG + 4224])
def test_norm_of_a_gradient(fused, close, n):
    """Below 2**31 elements, too, where the count of blocks may wrap."""
    x = randn(n, dtype=torch.float32)
    expected = sum(part.double().square().sum() for part in x.split(2**27))
    close(fused.square_sum(x), expected, 1e-9, floor=0)


def test_merged_attention(fused, close):
    b, n, d = 4, 64, 128
    s = rows_of(b * n * d)
    out, other = (randn(s, b, n, d, seed=i) for i in (0, 1))
    lse, other_lse = (randn(b, n, s, dtype=torch.float32, seed=i) for i in (2, 3))
    rows = chosen(s, b * n * d)
    old, new, a, c = (
        take64(out, rows),
        take64(other, rows),
        *(take64(x.permute(2, 0, 1), rows) for x in (lse, other_lse)),
    )
    fused.merge_(out.permute(1, 2, 0, 3), lse, other.permute(1, 2, 0, 3), other_lse)
    close(take(out, rows), old + torch.sigmoid(c - a)[..., None] * (new - old), BF16)
    close(take(lse.permute(2, 0, 1), rows), torch.logaddexp(a, c), FP32)


# ---- embedding and buckets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, in_order", [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
def test_embedding(fused, close, dtype, in_order):
    v, h = 128256, 4096
    table, m = nn.Parameter(randn(v, h)), rows_of(h)
    ids = torch.randint(v, (m, 1), generator=torch.Generator(GPU).manual_seed(1), device=GPU)
    with torch.no_grad():
        y, rows = lookup(ids, table, 0, fused).squeeze(1), chosen(m, h)
    assert torch.equal(take(y, rows), torch.stack([table.detach()[int(ids[i])] for i in rows]))
    grad = torch.zeros(v, h, dtype=dtype, device=GPU)
    fused.add_rows_(grad, ids, 0, y, in_order)
    for i in (int(ids[rows[0]]), int(ids[rows[-1]])):
        same = (ids[:, 0] == i).nonzero()[:, 0].tolist()
        close(grad[i], take64(y, same).sum(0), BF16 if dtype == torch.bfloat16 else FP32)


@pytest.mark.parametrize("dtype, in_order", [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
def test_a_large_table(fused, close, dtype, in_order):
    h = 4096
    v = rows_of(h)
    table, kept = torch.zeros(v, h, dtype=dtype, device=GPU), chosen(v, h)
    ids = torch.tensor(kept * 2, device=GPU)
    gradient = randn(len(ids), h)
    fused.add_rows_(table, ids, 0, gradient, in_order)
    close(take(table, kept), gradient.double().unflatten(0, (2, -1)).sum(0), BF16 if dtype == torch.bfloat16 else FP32)
    assert int(sum(part.any(1).sum() for part in table.split(2**16))) == len(kept)  # and no other row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets(fused, close, dtype):
    """One weight that fills a bucket, and a small one behind it."""
    layer, h = nn.Module(), WIDTH
    for name, rows in (("small", 8), ("large", rows_of(h))):
        layer.register_parameter(name, nn.Parameter(randn(rows, h, seed=rows % 97)))
        layer.get_parameter(name).spec = ParamSpec(name)
    layer.units = lambda: [layer]
    kept = chosen(len(layer.large), h)
    before, small = take(layer.large.detach(), kept), layer.small.detach().clone()
    kernels = Kernels(ops=fused, gemm=Gemm(fused.add_product))
    gradients = Gradients([layer], Mesh.offline(device=GPU), kernels, overlap=False, dtype=dtype, bucket_bytes=8 * BIG)
    (bucket,) = gradients.buckets
    assert torch.equal(take(layer.large.detach(), kept), before) and torch.equal(layer.small.detach(), small)
    gradients.begin_backward(0, last=True)
    x, dy = randn(16, h, seed=1), randn(16, len(layer.large), seed=2)
    for weight, width in ((layer.large, len(layer.large)), (layer.small, 8)):
        assert kernels.gemm.weight_grad(weight, Payload(dy[:, :width]), Payload(x)) is None
    gradients.finish()
    rounding = BF16 if dtype == torch.bfloat16 else FP32
    close(take(layer.large.slot.main_grad, kept), take64(dy.t(), kept) @ x.double(), rounding)
    close(layer.small.slot.main_grad, dy[:, :8].double().t() @ x.double(), rounding)
    flat = bucket.grad_slice
    close(gradients.square_sum(), sum(part.double().square().sum() for part in flat.split(2**27)), 1e-9, floor=0)


# ---- products and libraries' attention ------------------------------------------------------------------------------

TOKENS, VOCAB, HIDDEN = 32768 * BIG // 2**31, 128256, 4096
LONG_SUM = 1e-3  # what tensor cores may lose of the largest sum where it has 128,256 terms
# Of FP8 with fast sums, where tensor cores keep 14 bits of partial sums.
FAST_SUM = 1e-2


def head():
    """x, weight and dy of a head, with the gradient of its weight to be made."""
    weight = nn.Parameter(randn(VOCAB, HIDDEN, seed=1).mul_(HIDDEN**-0.5))
    weight.slot = GradSlot(torch.full((VOCAB, HIDDEN), float("nan"), device=GPU), lambda: None)
    return randn(TOKENS, HIDDEN), weight, chosen(TOKENS, VOCAB), chosen(VOCAB, TOKENS)


def test_products_of_the_head(fused, close):
    gemm, (x, weight, rows, columns) = Gemm(fused.add_product), head()
    with torch.no_grad():
        y = gemm.forward(weight)(gemm.quantize(x, columnwise=True, update_history=True))
        close(take(y, rows), take64(x, rows) @ weight.double().t(), BF16, LONG_SUM)
        dy = y.normal_(generator=torch.Generator(GPU).manual_seed(2))
        dx = gemm.input_grad(weight)(gemm.quantize_grad(dy, columnwise=True))
        close(take(dx, rows), take64(dy, rows) @ weight.double(), BF16, LONG_SUM)
        for times in (1, 2):
            assert (
                gemm.weight_grad(
                    weight,
                    gemm.quantize_grad(dy, columnwise=True),
                    gemm.quantize(x, columnwise=True, update_history=True),
                )
                is None
            )
            close(take(weight.slot.main_grad, columns), times * take64(dy.t(), columns) @ x.double(), FP32, LONG_SUM)


def heads(s, b, n, seed):
    """[b, n, s, 128], in memory [s, b, n, 128]."""
    return randn(s, b, n, 128, seed=seed).permute(1, 2, 0, 3)


def operands(s, b, n, g):
    return (heads(s, b, n, 0), heads(s, b, g, 1), heads(s, b, g, 2), heads(s, b, n, 3))


def compare_attention(close, backend, s, b, parts, *, p=0.0, document_bounds=None):
    """Run both passes; compare `parts`, (sample, tokens) of whole documents or samples, with the reference there."""
    n, g = 32, 8
    q, k, v, dout = operands(s, b, n, g)
    dropout = AttentionDropout(p, words(s, b, seed=1), layer=3, first_head=0) if p else None
    options = attention.Options(True, 128**-0.5, dropout, document_bounds)
    out, lse, saved = backend.forward(q, k, v, options)
    grads = backend.backward(dout, q, k, v, out, lse, saved, options)
    reference = attention.REFERENCE
    for sample, tokens in parts:
        for group in (0, g - 1):
            mine = slice(group * n // g, (group + 1) * n // g)
            cut = lambda x, some: x[sample : sample + 1, some, tokens].double()
            q1, k1, v1, dout1 = cut(q, mine), *(cut(x, slice(group, group + 1)) for x in (k, v)), cut(dout, mine)
            part = attention.Options(True, 128**-0.5)
            if dropout is not None:
                named = dropout._replace(first_head=mine.start)
                part = part._replace(dropout=named.select(slice(sample, sample + 1), tokens))
            out1, lse1, _ = reference.forward(q1, k1, v1, part)
            exact = reference.backward(dout1, q1, k1, v1, out1, lse1, None, part)
            close(cut(out, mine), out1, BF16, 1e-2)  # probabilities are rounded to bf16 before a product
            close(lse[sample : sample + 1, mine, tokens].double(), lse1, FP32, 1e-4)
            for grad, some, expected in zip(grads, (mine, slice(group, group + 1), slice(group, group + 1)), exact):
                close(cut(grad, some), expected, BF16, 1e-2)


def many_samples():
    """s, b and what is compared of samples of 1,024 tokens."""
    b = rows_of(1024 * 32 * 128)
    return 1024, b, [(i, slice(0, 1024)) for i in (0, b // 2, b - 1)]


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_our_attention_of_many_samples(close, p):
    compare_attention(close, attention.choose("fused", GPU, torch.bfloat16, 128, p), *many_samples(), p=p)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_our_attention_within_documents_of_one_long_sample(close, p):
    s, length = rows_of(32 * 128), 1000
    begins = torch.arange(s, dtype=torch.int32, device=GPU) // length * length
    spans = torch.stack([begins, (begins + length).clamp(max=s)])[:, None]
    parts = [(0, slice(i, min(i + length, s))) for i in (0, s // 2 // length * length, (s - 1) // length * length)]
    backend = attention.choose("fused", GPU, torch.bfloat16, 128, p, documents=True)
    compare_attention(close, backend, s, 1, parts, p=p, document_bounds=spans)


# ---- FP8 ------------------------------------------------------------------------------------------------------------


def fp8_gemm(recipe):
    pytest.importorskip("transformer_engine", reason="needs Transformer Engine")
    backend, scaling = choose_fp8(PrecisionConfig(fp8=recipe), GPU), None
    if recipe == "delayed":
        scaling = DelayedScaling(ROLES, (), GPU)
        scaling.history[0] = 8.0
        scaling.follow_history()
    return Fp8Gemm(backend, torch.bfloat16, scaling)


def stands_for(data, scale, rows, tiled=False):
    """The float64 values of some rows of a cast, or of all."""
    rows = range(len(data)) if rows is None else rows
    values = take(data.view(torch.uint8), rows).view(data.dtype)
    if scale.numel() == 1:
        return values.double() * scale.double()
    if tiled:
        return values.double() * take(scale, [i // 128 for i in rows])[
            :, : data.shape[1] // 128
        ].double().repeat_interleave(128, 1)
    return dequantize(Operand(values, take(scale.t(), rows).t())).double()


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fp8_products_of_the_head(close, recipe):
    """Casts stand for their values, and products are those of what casts stand for."""
    gemm, (x, weight, rows, columns) = fp8_gemm(recipe), head()
    with torch.no_grad():
        cast, w = gemm.quantize(x, columnwise=True, update_history=True), gemm._quantized(weight)
        tiled = recipe == "block"
        values = stands_for(w.rowwise, w.rowwise_scale, None, tiled)
        y = gemm.forward(weight)(cast)
        close(take(y, rows), stands_for(cast.rowwise, cast.rowwise_scale, rows) @ values.t(), BF16, FAST_SUM)
        dy = y.normal_(generator=torch.Generator(GPU).manual_seed(2))
        grad = gemm.quantize_grad(dy, columnwise=True)
        of_rows = stands_for(grad.rowwise, grad.rowwise_scale, rows)
        close(of_rows, take64(dy, rows), 2.0**-3 + BF16, floor=1e-3)  # e5m2 has 2 bits
        dx = gemm.input_grad(weight)(grad)
        close(take(dx, rows), of_rows @ values, BF16, LONG_SUM)
        del dx, values
        other = gemm._columnwise(grad)
        of_columns = stands_for(other.values, other.scale, columns)
        close(of_columns, take64(dy.t(), columns), 2.0**-3 + BF16, floor=1e-3)
        exact = of_columns @ stands_for(*gemm._columnwise(cast)[:2], None).t()
        for times in (1, 2):
            assert gemm.weight_grad(weight, grad, cast) is None
            close(take(weight.slot.main_grad, columns), times * exact, FP32, LONG_SUM)
