"""Dropout masks: fair coins, the same in every layout, equal in forward, backward and recompute."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from minitron.kernels import rng
from minitron.kernels.rng import AttentionDropout, dropout, token_counters

# Every test of a statistic draws its numbers from fixed seeds. 5 standard errors leave a chance of 6e-7 a comparison
# that a fair coin fails, had the seeds been chosen blindly; there are about 2,000 comparisons.
SIGMAS = 5


def arange_keys(b=4, s=64, seed=1, step=2):
    return token_counters(seed, step, torch.arange(b), torch.arange(s))


def kept(keys, h, p=0.3, layer=0, site=0):
    """The mask [s, b, h] as 0 and 1, in float64."""
    return dropout(torch.ones(*keys.shape, h), p, keys, layer, site).ne(0).double()


def assert_uncorrelated(a, b, p, what):
    """a, b: masks of one shape that keep with probability 1 - p, element by element a pair of independent coins?"""
    standard = [(x.double() - (1 - p)) / math.sqrt(p * (1 - p)) for x in (a, b)]
    correlation = float((standard[0] * standard[1]).mean())
    assert abs(correlation) < SIGMAS / math.sqrt(a.numel()), f"{what}: correlation {correlation:.2e}"


# ---- the mixer ----------------------------------------------------------------------------------------------------


def mix_in_python(x):
    """The same function in plain integers; `% 2**32` is what a 32-bit register does."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
    x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
    return x ^ (x >> 15)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_mix_equals_plain_integers(values):
    assert rng._mix(torch.tensor([*values, 2**32 - 1])).tolist() == [mix_in_python(x) for x in [*values, 2**32 - 1]]


def test_each_input_bit_flips_each_output_bit_with_probability_one_half():
    x = torch.randint(2**32, (1 << 16,), generator=torch.Generator().manual_seed(0))
    bits = torch.arange(32)
    for bit in range(32):
        flips = rng._mix(x) ^ rng._mix(x ^ (1 << bit))
        probability = (flips[:, None] >> bits & 1).double().mean(0)
        assert (probability - 0.5).abs().max() < SIGMAS * 0.5 / math.sqrt(len(x)), bit


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_all_64_bits_of_a_name_count(a, b):
    words = [rng._hash(1, x) for x in (a, b)]
    assert words == rng._hash(1, torch.tensor([a, b])).tolist()
    assert (a == b) == (words[0] == words[1])  # hypothesis draws far fewer than the 2^16 that would meet a collision


def test_each_bit_of_a_name_counts():
    """Two random names differ in many bits."""
    names = [0, *(1 << bit for bit in range(63)), -(1 << 63)]
    assert len({rng._hash(1, name) for name in names}) == len(names)


# ---- statistics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate_overall_per_token_and_per_channel(p):
    mask = kept(arange_keys(b=4, s=256), 1024, p)
    for dims in [(0, 1, 2), (0, 1), (2,), (1, 2), (0, 2)]:
        count = math.prod(mask.shape[d] for d in dims)
        deviation = (mask.mean(dims) - (1 - p)).abs().max() / math.sqrt(p * (1 - p) / count)
        assert deviation < SIGMAS, (dims, float(deviation))
    # And the counts vary as independent coins' do: the sample variance of n normal deviates has error sqrt(2 / n).
    for dims in [(0, 1), (2,)]:
        count = math.prod(mask.shape[d] for d in dims)
        deviates = (mask.mean(dims) - (1 - p)) / math.sqrt(p * (1 - p) / count)
        assert abs(float((deviates**2).mean()) - 1) < SIGMAS * math.sqrt(2 / deviates.numel()), dims


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_in_every_coordinate_are_independent(p):
    keys, h = arange_keys(b=4, s=256), 512
    mask = kept(keys, h, p, layer=3, site=1)
    for dim in range(3):
        for distance in (1, 2):
            length = mask.shape[dim] - distance
            assert_uncorrelated(mask.narrow(dim, 0, length), mask.narrow(dim, distance, length), p, (dim, distance))
    for what, other in {
        "layer": kept(keys, h, p, layer=4, site=1),
        "site": kept(keys, h, p, layer=3, site=2),
        "layer and site exchanged": kept(keys, h, p, layer=1, site=3),
        "step": kept(arange_keys(s=256, step=3), h, p, layer=3, site=1),
        "seed": kept(arange_keys(s=256, seed=2), h, p, layer=3, site=1),
        "seed and step exchanged": kept(arange_keys(s=256, seed=2, step=1), h, p, layer=3, site=1),
    }.items():
        assert_uncorrelated(mask, other, p, what)


def test_no_parity_over_the_corners_of_a_rectangle():
    """The words of (token, channel) are xors of two words, and xors over a rectangle cancel: the mixer must hide it."""
    p = 0.5
    mask = kept(arange_keys(b=4, s=256), 512, p) * 2 - 1
    rows = mask[:-1] * mask[1:]
    assert_uncorrelated(rows[..., :-1] > 0, rows[..., 1:] > 0, p, "rectangle")


def test_attention_mask_keeps_at_its_rate_and_is_independent_over_heads_queries_keys_and_layers():
    p, keys = 0.2, arange_keys(b=2, s=96)
    mask = AttentionDropout(p, keys, 0, 0).mask(16)
    assert mask.shape == (2, 16, 96, 96) and mask.dtype == torch.float32
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    coins = mask.ne(0).double()
    assert abs(float(coins.mean()) - (1 - p)) < SIGMAS * math.sqrt(p * (1 - p) / coins.numel())
    for dim in range(4):
        length = coins.shape[dim] - 1
        assert_uncorrelated(coins.narrow(dim, 0, length), coins.narrow(dim, 1, length), p, dim)
    query, key = torch.tril_indices(96, 96, offset=-1)
    assert_uncorrelated(coins[..., query, key], coins[..., key, query], p, "query and key exchanged")
    assert_uncorrelated(coins, AttentionDropout(p, keys, 1, 0).mask(16).ne(0), p, "layer")


# ---- layouts ------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.data())
def test_a_rank_with_some_samples_and_positions_has_its_slice_of_the_mask(data):
    """dp and microbatches take samples; cp and sequence parallelism take positions, also out of order."""
    samples = torch.tensor(data.draw(st.lists(st.integers(0, 2**62), min_size=2, max_size=5, unique=True)))
    positions = torch.arange(16)
    mine = torch.tensor(data.draw(st.lists(st.sampled_from(range(len(samples))), min_size=1, unique=True)))
    held = torch.tensor(data.draw(st.lists(st.sampled_from(range(16)), min_size=1, unique=True)))
    seed, step = data.draw(st.integers(0, 2**63 - 1)), data.draw(st.integers(0, 2**40))
    whole = token_counters(seed, step, samples, positions)
    part = token_counters(seed, step, samples[mine], positions[held])
    assert torch.equal(part, whole[held][:, mine])
    x = torch.randn(16, len(samples), 8)
    assert torch.equal(dropout(x[held][:, mine], 0.4, part, 2, 1), dropout(x, 0.4, whole, 2, 1)[held][:, mine])


def test_a_tensor_parallel_rank_has_its_heads_of_the_attention_mask():
    keys = arange_keys(b=3, s=16)
    parts = [AttentionDropout(0.3, keys, 5, first).mask(2) for first in (0, 2, 4)]
    whole = AttentionDropout(0.3, keys, 5, 0).mask(6)
    assert torch.equal(torch.cat(parts, 1), whole)
    samples, positions = slice(1, 3), slice(4, 9)
    selected = AttentionDropout(0.3, keys, 5, 0).select(samples, positions)
    assert torch.equal(selected.mask(6), whole[samples, :, positions, positions])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_gives_the_masks_of_the_cpu():
    keys = token_counters(1, 2, torch.arange(4).cuda(), torch.arange(64).cuda())
    assert torch.equal(keys.cpu(), arange_keys())
    for fn in (dropout, torch.compile(dropout, fullgraph=True)):
        for layer in range(3):
            assert torch.equal(
                fn(torch.ones(64, 4, 96).cuda(), 0.3, keys, layer, 1).cpu(),
                dropout(torch.ones(64, 4, 96), 0.3, arange_keys(), layer, 1),
            )
    assert torch.equal(
        AttentionDropout(0.3, keys, 3, 2).mask(4).cpu(), AttentionDropout(0.3, arange_keys(), 3, 2).mask(4)
    )


# ---- autograd and compilation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_multiplies_by_the_mask_of_the_forward(dtype):
    keys, p = arange_keys(), 0.25
    x = torch.randn(64, 4, 32, dtype=dtype, requires_grad=True)
    y = dropout(x, p, keys, 1, 2)
    grad = torch.randn_like(y)
    y.backward(grad)
    mask = kept(keys, 32, p, 1, 2).bool()  # does not depend on x
    scale = 1 / (1 - p)
    assert y.dtype == dtype
    assert torch.equal(y, torch.where(mask, x * scale, 0)) and torch.equal(x.grad, torch.where(mask, grad * scale, 0))


def test_only_the_keys_are_saved():
    saved = []
    keys = arange_keys()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout(torch.randn(64, 4, 32, requires_grad=True), 0.25, keys, 1, 2)
    assert [t.data_ptr() for t in saved] == [keys.data_ptr()]


def test_recompute_gives_the_same_gradient_without_any_generator_state():
    keys, results = arange_keys(), []

    def layer(x):
        return dropout(torch.tanh(dropout(x, 0.1, keys, 0, 0)), 0.1, keys, 0, 1)

    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)):
        x = torch.linspace(-2, 2, 64 * 4 * 32).view(64, 4, 32).requires_grad_()
        run(x).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_one_graph_serves_all_layers():
    graphs, keys, x = [], arange_keys(s=8), torch.randn(8, 4, 16)
    compiled = torch.compile(dropout, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    for layer in range(6):
        assert torch.equal(compiled(x, 0.3, keys, layer, 1), dropout(x, 0.3, keys, layer, 1))
    assert len(graphs) <= 2  # one for the first number, one for any number


# ---- edges --------------------------------------------------------------------------------------------------------


def test_without_dropout_x_itself_is_returned():
    x = torch.randn(64, 4, 32)
    assert dropout(x, 0.0, arange_keys(), 0, 0) is x and dropout(x, 0.5, None, 0, 0) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_probability_outside_of_the_range_is_refused(p):
    with pytest.raises(AssertionError, match="dropout probability"):
        dropout(torch.randn(64, 4, 32), p, arange_keys(), 0, 0)
    with pytest.raises(AssertionError, match="dropout probability"):
        AttentionDropout(p, arange_keys(), 0, 0).mask(1)
