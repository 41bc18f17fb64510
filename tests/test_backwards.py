"""Hand-written backwards equal autograd of the same formula, written here once more in plain torch.

In float64, where a wrong term cannot hide behind rounding, unless the code computes in float32 whatever it is given.
Others stand with what they belong to: norms in test_norm.py, linear layers, embeddings and the cross-entropy in
test_tensor_parallel.py, attention kernels in test_attention.py, adapters in test_lora.py, dropout in test_rng.py,
collectives in test_collectives.py; Triton's kernels against minitron/kernels/plain.py in gpu/test_kernels_gpu.py.
"""

import math
import weakref
from functools import partial

import pytest
import torch

from minitron.kernels import plain
from minitron.kernels.gemm import Activation, Gemm
from minitron.kernels.param import GradSlot
from minitron.model.layers import rope_frequencies, rope_tables, split_heads
from minitron.parallel.layer_context import LayerContext
from minitron.parallel.linear import ColumnParallelLinear, RowParallelLinear, apply_linear
from minitron.parallel.mlp import activate, mlp
from minitron.parallel.vocab import lookup
from minitron.testing import assert_close_rel
from test_context import STYLES, Case, expect, run_whole

# 2^-53 and 2^-24, some tens of roundings.
EXACT, SINGLE = 1e-13, 1e-6
S, B, H, F = 6, 3, 8, 10


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_same(ours, twin, inputs, tol, name):
    """Both outputs, and the gradients of both for the same random dy; inputs: what they are functions of."""
    assert_close_rel(ours, twin, tol, name)
    dy = randn(*twin.shape, seed=99)
    expected = torch.autograd.grad(twin, inputs, dy, retain_graph=True)
    for i, (grad, wanted) in enumerate(zip(torch.autograd.grad(ours, inputs, dy.to(ours.dtype)), expected)):
        assert_close_rel(grad, wanted, tol, f"{name}: gradient of input {i}")


# ---- activations ----------------------------------------------------------------------------------------------------


def silu_gated(x):
    gate, up = x[..., :F], x[..., F:]
    return gate / (1 + torch.exp(-gate)) * up


def tanh_gelu(x):
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


TWINS = {"swiglu": silu_gated, "gelu": tanh_gelu}
NAMES = [name.removesuffix("_forward") for name in vars(plain) if name.endswith("_forward")]  # a new one needs a twin
ACTIVATIONS = {n: Activation(getattr(plain, f"{n}_forward"), getattr(plain, f"{n}_backward")) for n in NAMES}
activations = pytest.mark.parametrize("name", NAMES)


@activations
def test_activations(name):
    x, activation = (3 * randn(S, B, 2 * F)).requires_grad_(), ACTIVATIONS[name]
    assert_same(activate(x, activation), TWINS[name](x), [x], EXACT, name)
    dy, old = randn(*activation.forward(x).shape), x.detach()
    dx, sums = activation.backward(dy, old, True)
    assert_close_rel(sums, dx.sum((0, 1)), SINGLE, "sums")
    assert not torch.equal(old, dx)
    over, again = activation.backward(dy, old, True, over_x=True)
    assert over.data_ptr() == old.data_ptr() and torch.equal(over, dx) and torch.equal(again, sums)


# ---- products -------------------------------------------------------------------------------------------------------


def double_layout():
    return LayerContext(dtype=torch.float64)


def filled_parameters(*shapes):
    params = [double_layout().parameter(shape) for shape in shapes]
    with torch.no_grad():
        for p in params:
            p.copy_(randn(*p.shape))
    return params


def filled(layer):
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(randn(*p.shape, seed=10 + i))
    return layer


@pytest.mark.parametrize("remade", [False, True])
def test_linear(remade):
    """Its bias's gradient, which is summed in float32, is compared in test_tensor_parallel.py."""
    layer = filled(ColumnParallelLinear(H, (F,), double_layout(), std=1.0, bias=True, gemm=Gemm(plain.add_product)))
    x = randn(S, B, H).requires_grad_()
    ours = apply_linear(x, layer.op, x.detach if remade else None)
    assert_same(ours, x @ layer.weight.t() + layer.bias, [x, layer.weight], EXACT, "linear")


def two_layers(name):
    """The layers of an MLP with this activation: GELU's first has a bias, SwiGLU's has none."""
    layout, chunks = double_layout(), (F, F) if name == "swiglu" else (F,)
    up = filled(ColumnParallelLinear(H, chunks, layout, std=1.0, bias=name == "gelu", gemm=Gemm(plain.add_product)))
    return up, filled(RowParallelLinear(F, H, layout, std=1.0, bias=False, gemm=Gemm(plain.add_product)))


def ours_and_twin(name, layers, x, recompute_input=None):
    up, down = layers
    inner = x @ up.weight.t()
    inner = inner if up.bias is None else inner + up.bias
    ours = mlp(x, up.op, down.op, ACTIVATIONS[name], recompute_input)
    return ours, TWINS[name](inner) @ down.weight.t()


@activations
@pytest.mark.parametrize("remade", [False, True])
def test_mlp(name, remade):
    layers, x = two_layers(name), randn(S, B, H).requires_grad_()
    ours, twin = ours_and_twin(name, layers, x, x.detach if remade else None)
    assert_same(ours, twin, [x, *(layer.weight for layer in layers)], EXACT, "MLP")
    bias = layers[0].bias
    if bias is not None:  # summed in float32
        ours, twin = ours_and_twin(name, layers, x, x.detach if remade else None)
        assert_same(ours, twin, [bias], SINGLE, "MLP's bias")


@activations
def test_an_mlp_keeps_little_in_its_backward(name):
    """A recomputed activation is gone before the gradient of its input is written over that input."""
    of, made, written = ACTIVATIONS[name], [], []

    def forward(inner, into=None):
        made.append(weakref.ref(act := of.forward(inner, into)))
        return act

    def backward(dy, inner, *args, **options):
        before, result = [act() for act in made], of.backward(dy, inner, *args, **options)
        written.append((before, result[0] is inner))
        return result

    up, down = two_layers(name)
    x = randn(S, B, H).requires_grad_()
    mlp(x, up.op, down.op, Activation(forward, backward), x.detach).sum().backward()
    assert len(made) == 2 and written == [([None, None], True)]


@activations
@pytest.mark.parametrize("frozen", [None, "up", "down"])
@pytest.mark.parametrize("remade", [False, True])
def test_an_mlp_keeps_what_its_weights_need(name, remade, frozen):
    """A weight's gradient needs the layer's input, unless that is recomputed; the activation's gradient needs inner."""
    layers, x, kept = two_layers(name), randn(S, B, H).requires_grad_(), []
    up, down = layers
    for layer_name, layer in zip(("up", "down"), layers):
        layer.requires_grad_(layer_name != frozen)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        mlp(x, up.op, down.op, ACTIVATIONS[name], x.detach if remade else None)
    inputs = [(S * B, H)] * (frozen != "up") + [(S * B, F)] * (frozen != "down")
    assert kept == [(S * B, len(up.weight)), *([] if remade else inputs)]


@activations
@pytest.mark.parametrize("frozen", ["up", "down"])
def test_mlp_with_a_frozen_weight(name, frozen):
    """What the other weight's gradient needs is kept all the same."""
    layers = two_layers(name)
    dict(zip(("up", "down"), layers))[frozen].requires_grad_(False)
    x = randn(S, B, H).requires_grad_()
    inputs = [x, *(layer.weight for layer in layers if layer.weight.requires_grad)]
    assert_same(*ours_and_twin(name, layers, x), inputs, EXACT, "MLP")


@activations
@pytest.mark.parametrize("remade", [False, True])
def test_mlp_adds_microbatches_up_in_main_grad(name, remade):
    """Which is float32, and full of what the last step left."""
    layers, reports = two_layers(name), []
    params = [p for layer in layers for p in layer.parameters()]
    total = [torch.zeros_like(p) for p in params]
    for p in params:
        p.slot = GradSlot(torch.full(p.shape, float("nan")), partial(reports.append, id(p)))
    for seed in range(3):
        x, dy = randn(S, B, H, seed=seed), randn(S, B, H, seed=50 + seed)
        ours, twin = ours_and_twin(name, layers, x, x.clone if remade else None)
        for sum_, grad in zip(total, torch.autograd.grad(twin, params, dy)):
            sum_ += grad
        ours.backward(dy)
    for p, expected in zip(params, total):
        assert p.grad is None and reports.count(id(p)) == 3
        assert_close_rel(p.slot.main_grad, expected, SINGLE, "main_grad")


# ---- tables and heads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 4])
def test_lookup(first):
    """Ids that repeat, and ids beyond the table, which have no row and leave no gradient."""
    (table,) = filled_parameters((8, H))
    ids = torch.randint(0, 12, (40, B), generator=torch.Generator().manual_seed(0))
    assert len(ids.unique()) == 12
    hits = (ids.unsqueeze(-1) == torch.arange(first, first + 8)).double()
    assert_same(lookup(ids, table, first, plain), hits @ table, [table], EXACT, "lookup")


@pytest.mark.parametrize("batch", [1, B], ids=["one position for all samples", "positions of each sample"])
@pytest.mark.parametrize("sizes", [(4, 2, 2), (6, 1, 1), (3, 3, 3)])
def test_heads_are_split_and_turned(sizes, batch):
    """Channels i and i + d/2 of q and k are a complex number, times e^(i angle). Angles and products are float32."""
    d, theta = 8, 100.0
    positions = torch.randint(0, 40, (S, batch), generator=torch.Generator().manual_seed(3))
    qkv = randn(S, B, sum(sizes), d, dtype=torch.float32).requires_grad_()
    rope = rope_tables(positions, rope_frequencies(d, theta, None))
    angles = positions[..., None, None].double() * theta ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(x):
        pairs = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    exact = qkv.double()
    q, k, v = exact[:, :, : sizes[0]], exact[:, :, sizes[0] : -sizes[2]], exact[:, :, -sizes[2] :]
    ours, twins = split_heads(qkv, sizes, rope, plain), (turned(q), turned(k), v)
    assert [x.shape for x in ours] == [x.shape for x in twins]
    for name, mine, twin in zip("qkv", ours, twins):
        assert_close_rel(mine, twin, 4 * SINGLE, name)  # angles of up to 40 radians, rounded
    dq, dk, dv = (randn(*x.shape, seed=i, dtype=torch.float32) for i, x in enumerate(twins))
    (grad,) = torch.autograd.grad(ours, qkv, (dq, dk, dv))
    (expected,) = torch.autograd.grad(twins, qkv, (dq.double(), dk.double(), dv.double()))
    assert_close_rel(grad, expected, 4 * SINGLE, "gradient")


def test_heads_without_rotation_are_only_split():
    qkv = randn(S, B, 8, 4).requires_grad_()
    ours = torch.cat(split_heads(qkv, (4, 2, 2), None, plain), 2)
    assert_same(ours, qkv * 1.0, [qkv], 0.0, "heads")


# ---- attention across ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_style_of_attention(ranks, world):
    """Blocks merged and their gradients added in float64 equal one masked softmax: nothing is approximated."""
    cases = [
        Case(style, 8, 4, documents, backend, torch.float64)
        for style in STYLES
        for documents in (False, True)
        for backend in ("reference", "flash")
    ]
    for case, actual in run_whole(ranks, world, cases):
        for name, value in expect(case).items():
            assert actual[name].dtype == torch.float64
            assert_close_rel(actual[name], value, EXACT, f"{case}: {name}")
