"""Context parallelism: every style equals one masked softmax, and the tiles cover what they must."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_twin import allowed_pairs, attend_with_grads
from minitron.comm.mesh import Axis, Mesh
from minitron.kernels.attention import FLASH_CPU, REFERENCE, Backend, Options
from minitron.kernels.rng import AttentionDropout
from minitron.parallel.context_parallel import ContextAttention
from minitron.parallel.tiles import as_documents, gathered_tiles, local_positions, ring_tiles
from minitron.testing import assert_close_rel

SEQ_LEN, BATCH, HEAD_DIM = 48, 2, 8
STYLES = ("ring", "allgather", "ulysses")
BACKENDS = {"flash": FLASH_CPU, "reference": REFERENCE}
# Two samples with boundaries inside chunks, on their edges, and documents of one token.
DOCUMENTS = as_documents([[0, 1, 17, 18, 36, 48], [0, 12, 45, 48]])


@dataclass(frozen=True)
class Case:
    """One attention call. With `lonely`, the loss sees document 1 of sample 0 alone. `shift` is added to all scores."""

    style: str
    num_heads: int
    num_groups: int
    documents: bool
    backend: str = "flash"
    dtype: torch.dtype = torch.float32
    lonely: bool = False
    shift: float = 0.0

    def inputs(self):
        """dout, q [s, b, n, d] and k, v [s, b, g, d], the same on every rank."""
        generator = torch.Generator().manual_seed(self.num_heads)
        dout, q, k, v = (
            torch.randn(SEQ_LEN, BATCH, heads, HEAD_DIM, generator=generator).to(self.dtype)
            for heads in (self.num_heads, self.num_heads, self.num_groups, self.num_groups)
        )
        if self.lonely:
            dout = dout * lonely_document().to(self.dtype)
        if self.shift:  # a channel of its own
            q[..., 0], k[..., 0] = self.shift * HEAD_DIM**0.5, 1.0
        return dout, q, k, v


def lonely_document():
    """1 at document 1 of sample 0, 0 elsewhere: [s, b, 1, 1]"""
    mask = torch.zeros(SEQ_LEN, BATCH, 1, 1)
    _, begin, end, *_ = DOCUMENTS.cu_seqlens[0]
    mask[begin:end, 0] = 1
    return mask


def run_local(cases):
    """On one rank of the cp axis: this rank's part of (out, dq, dk, dv), for each case."""
    axis = Mesh.create(cp=torch.distributed.get_world_size()).cp
    results = []
    for case in cases:
        positions = torch.from_numpy(local_positions(SEQ_LEN, axis.size, axis.rank, case.style))
        dout, q, k, v = (x[positions] for x in case.inputs())
        # views into one tensor, as a fused projection gives them: none of them is contiguous
        qkv = torch.cat([q, k, v], 2).requires_grad_()
        q, k, v = qkv.split([q.shape[2], k.shape[2], v.shape[2]], 2)
        attend = ContextAttention(axis, case.style, BACKENDS[case.backend])
        out = attend(q, k, v, DOCUMENTS if case.documents else None)
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), dout)])
    return results


def assemble(parts, style):
    """The ranks' parts -> the whole sequence, for each of out, dq, dk, dv."""
    order = np.concatenate([local_positions(SEQ_LEN, len(parts), rank, style) for rank in range(len(parts))])
    whole = {}
    for name, pieces in zip(("out", "dq", "dk", "dv"), zip(*parts)):
        whole[name] = torch.empty_like(torch.cat(pieces))
        whole[name][order] = torch.cat(pieces)
    return whole


def allowed(documents):
    boundaries = [None] * BATCH if documents is None else documents.cu_seqlens
    return torch.from_numpy(np.stack([allowed_pairs(SEQ_LEN, b) for b in boundaries])).unsqueeze(1)


def expect(case):
    pairs = allowed(DOCUMENTS if case.documents else None)
    result = attend_with_grads(*(x.permute(1, 2, 0, 3) for x in case.inputs()), pairs)
    return {name: result[name].permute(2, 0, 1, 3) for name in ("out", "dq", "dk", "dv")}


def run_whole(ranks, world, cases):
    """Yield each case with its whole results. Ranks that wait for a message that never comes fail after two minutes."""
    for case, *parts in zip(cases, *ranks(world, run_local, cases, timeout=120.0)):
        yield case, assemble(parts, case.style)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_style_equals_one_masked_softmax(ranks, world):
    cases = [
        Case(style, *heads, documents)
        for style in STYLES
        for documents in (False, True)
        for heads in [(8, 4), (4, 4), (3, 1)]
        if style != "ulysses" or heads[1] % world == 0
    ]
    cases += [Case(style, 4, 4, True, "reference") for style in STYLES]
    for case, actual in run_whole(ranks, world, cases):
        for name, value in expect(case).items():
            assert_close_rel(actual[name], value, 1e-5, f"{case}: {name}")  # float32 sums in another order


@pytest.mark.parametrize("world", [2, 4])
def test_bf16_is_as_exact_as_one_kernel_call(ranks, world):
    """Sums over tiles are float32: splitting costs one more rounding, of the parts. Two alike add up to sqrt(2)."""
    cases = [Case(style, 8, 4, documents, dtype=torch.bfloat16) for style in STYLES for documents in (False, True)]
    for (case, actual), (_, single) in zip(run_whole(ranks, world, cases), run_whole(ranks, 1, cases)):
        for name, value in expect(case).items():
            error, error_of_one = ((x[name].double() - value).norm() / value.norm() for x in (actual, single))
            assert actual[name].dtype == torch.bfloat16
            assert error <= 1.5 * error_of_one, f"{case}: {name} is off by {error:.1e}, one call by {error_of_one:.1e}"


def exact_forward(q, k, v, options):
    """What one kernel call would be that rounds nothing: float32 results of bf16 inputs."""
    return REFERENCE.forward(q.float(), k.float(), v.float(), options)


def exact_backward(dout, q, k, v, out, lse, saved, options):
    return REFERENCE.backward(dout.float(), q.float(), k.float(), v.float(), out.float(), lse, saved, options)


BACKENDS["exact"] = Backend("exact", exact_forward, exact_backward)


def test_sums_over_ranks_are_rounded_to_bf16_once(ranks):
    """With kernels that round nothing each element is off by at most half a step of bf16, 2^-8 of it, however many
    parts are added: sums kept in bf16 would be rounded with every part."""
    for case, actual in run_whole(
        ranks,
        4,
        [
            Case(style, 8, 4, documents, "exact", torch.bfloat16)
            for style in ("ring", "allgather")
            for documents in (False, True)
        ],
    ):
        dout, q, k, v = (x.permute(1, 2, 0, 3).double() for x in case.inputs())
        pairs = allowed(DOCUMENTS if case.documents else None)
        expected = attend_with_grads(dout, q, k, v, pairs)
        # the backward takes the rounded out: dq and dk with that, by the formula of minitron/kernels/attention.py
        k2, v2 = (x.repeat_interleave(2, 1) for x in (k, v))
        p = torch.where(pairs, (q @ k2.mT * HEAD_DIM**-0.5 - expected["lse"].unsqueeze(-1)).exp(), 0.0)
        out = actual["out"].permute(1, 2, 0, 3).double()
        ds = p * (dout @ v2.mT - (dout * out).sum(-1, keepdim=True)) * HEAD_DIM**-0.5
        expected |= {"dq": ds @ k2, "dk": (ds.mT @ q).unflatten(1, (4, 2)).sum(2)}
        for name in ("out", "dq", "dk", "dv"):
            value, rounded = expected[name].permute(2, 0, 1, 3), actual[name].double()
            assert actual[name].dtype == torch.bfloat16
            assert ((rounded - value).abs() <= 2.0**-8 * value.abs() + 1e-5).all(), f"{case}: {name}"


def uneven_backward(dout, q, k, v, out, lse, saved, options):
    """Gradients of 256 from the rank's own keys and of 1 from others': a sum that is kept in bf16 stays 256."""
    return tuple(torch.full_like(x, 256.0 if options.causal else 1.0) for x in (q, k, v))


BACKENDS["uneven"] = Backend("uneven", FLASH_CPU.forward, uneven_backward)


def test_bf16_results_of_kernels_are_added_up_in_float32(ranks):
    ((_, actual),) = run_whole(ranks, 4, [Case("ring", 8, 4, False, "uneven", torch.bfloat16)])
    # Queries of chunk c of 8 meet keys of min(c, 3) other ranks; its keys meet queries of min(7 - c, 3).
    others = torch.arange(8).clamp(max=3).repeat_interleave(SEQ_LEN // 8)
    for name, steps in (("dq", others), ("dk", others.flip(0)), ("dv", others.flip(0))):
        expected = (256 + steps).bfloat16()[:, None, None, None]
        assert torch.equal(actual[name], expected.expand_as(actual[name])), name


@pytest.mark.parametrize("world", [2, 4])
def test_scores_far_beyond_the_range_of_exp(ranks, world):
    """exp(89) is infinite in float32; tiles' lse of +-200 are merged all the same."""
    for far in (200.0, -200.0):
        cases = [Case(style, 4, 4, documents, shift=far) for style in STYLES for documents in (False, True)]
        for case, actual in run_whole(ranks, world, cases):
            for name, value in expect(case).items():  # a score of 200 is rounded by 2^-17, and so is its exp
                assert_close_rel(actual[name], value, 1e-4, f"{case}: {name}")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_gradient_leaks_into_another_document(ranks, world):
    cases = [
        Case(style, 4, 4, True, backend, lonely=True) for style in STYLES for backend in ("flash", "reference", "exact")
    ]
    outside = ~lonely_document().bool().squeeze(-1).squeeze(-1)
    for case, actual in run_whole(ranks, world, cases):
        for name in ("dq", "dk", "dv"):
            assert torch.count_nonzero(actual[name][outside]) == 0, f"{case}: {name}"
            assert torch.count_nonzero(actual[name][~outside]) > 0


def test_dropout_mask_on_one_rank():
    dout, q, k, v = Case("ring", 4, 2, True).inputs()
    counters = torch.randint(2**32, (SEQ_LEN, BATCH))
    dropout = AttentionDropout(0.4, counters, 0, 0)
    for documents in (None, DOCUMENTS):
        expected = attend_with_grads(
            *(x.permute(1, 2, 0, 3) for x in (dout, q, k, v)), allowed(documents), dropout.mask(4)
        )
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = ContextAttention(Axis.single(), "ring", REFERENCE)(*inputs, documents, dropout)
        actual = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, inputs, dout))))
        for name, value in actual.items():
            assert_close_rel(value.permute(1, 2, 0, 3), expected[name], 1e-5, name)


@pytest.mark.parametrize("style", STYLES)
def test_one_rank_without_documents_is_one_call_on_views(style):
    calls = []

    def forward(q, k, v, options):
        calls.append((q, k, v, options))
        return FLASH_CPU.forward(q, k, v, options)

    inputs = Case(style, 4, 2, False).inputs()[1:]
    out = ContextAttention(Axis.single(), style, Backend("spy", forward, FLASH_CPU.backward))(*inputs, None)
    [(*seen, options)] = calls
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in inputs]
    assert options == Options(causal=True, scale=HEAD_DIM**-0.5)
    assert out.is_contiguous()  # so the [s, b, n d] that the output projection wants is a view


# ---- positions and tiles: no ranks needed --------------------------------------------------------------------------


@st.composite
def layouts(draw):
    """(sequence length, cp, documents of each sample or None)"""
    size = draw(st.sampled_from([1, 2, 3, 4]))
    seq_len = 2 * size * draw(st.integers(1, 5))
    if draw(st.booleans()):
        return seq_len, size, None
    inner = st.sets(st.integers(1, seq_len - 1))
    boundaries = [np.array([0, *sorted(draw(inner)), seq_len]) for _ in range(draw(st.integers(1, 2)))]
    return seq_len, size, as_documents(boundaries).cu_seqlens


def count_pairs(counts, tiles, queries, keys):
    """Add 1 at every global (sample, query, key) that a tile computes; queries, keys: the global positions at hand."""
    for tile in tiles:
        rows, columns = queries[tile.queries], keys[tile.keys]
        assert len(rows) and len(columns) and (not tile.causal or len(rows) == len(columns))
        pairs = np.tri(len(rows), dtype=int) if tile.causal else np.ones((len(rows), len(columns)), dtype=int)
        counts[tile.samples, rows[:, None], columns[None, :]] += pairs


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_tiles_cover_each_allowed_pair_once(layout):
    seq_len, size, documents = layout
    expected = np.stack([allowed_pairs(seq_len, None if b is None else np.array(b)) for b in documents or [None]])
    ring, gathered = np.zeros((2, *expected.shape), dtype=int)
    held = [local_positions(seq_len, size, rank, "ring") for rank in range(size)]
    for rank in range(size):
        for source in range(size):
            count_pairs(ring, ring_tiles(seq_len, size, rank, source, documents), held[rank], held[source])
        count_pairs(gathered, ring_tiles(seq_len, size, rank, rank, documents), held[rank], held[rank])
        count_pairs(gathered, gathered_tiles(seq_len, size, rank, documents), held[rank], np.arange(seq_len))
    np.testing.assert_array_equal(ring, expected)
    np.testing.assert_array_equal(gathered, expected)


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_own_tiles_cover_every_local_query_and_key_once(layout):
    """What lets step 0 of the ring write where later steps add."""
    seq_len, size, documents = layout
    for rank in range(size):
        for side in ("queries", "keys"):
            counts = np.zeros((len(documents or [None]), seq_len // size), dtype=int)
            for tile in ring_tiles(seq_len, size, rank, rank, documents):
                counts[tile.samples, getattr(tile, side)] += 1
            assert (counts == 1).all()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_without_documents_a_step_is_one_tile_and_the_ranks_are_in_balance(size):
    seq_len = 16 * size
    for rank in range(size):
        for source in range(size):
            [tile] = ring_tiles(seq_len, size, rank, source, None)
            num_pairs = (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
            assert num_pairs == (16 * 16 if rank == source else 16 * 16 // 2)
        assert len(gathered_tiles(seq_len, size, rank, None)) == (2 if 0 < rank < size - 1 else 1)


@pytest.mark.parametrize("style", STYLES)
def test_positions_are_a_partition(style):
    for size in (1, 2, 4):
        held = [local_positions(SEQ_LEN, size, rank, style) for rank in range(size)]
        assert {(len(x), x.dtype) for x in held} == {(SEQ_LEN // size, np.dtype(np.int64))}
        assert all((np.diff(x) > 0).all() for x in held)
        assert sorted(np.concatenate(held)) == list(range(SEQ_LEN))
    # zigzag: a rank's first chunk is as far from the start as its second is from the end
    rank1 = local_positions(SEQ_LEN, 4, 1, style)
    assert np.array_equal(rank1, SEQ_LEN - 1 - rank1[::-1]) == (style != "ulysses")


def test_one_rank_takes_a_sequence_of_any_length():
    assert local_positions(7, 1, 0, "ring").tolist() == list(range(7))
    q = torch.randn(7, 1, 2, HEAD_DIM)
    attend = ContextAttention(Axis.single(), "ring", FLASH_CPU)
    out = attend(q, q, q, as_documents([[0, 3, 7]]))
    alone = attend(q[3:], q[3:], q[3:], None)
    assert torch.equal(out[3:], alone)


@pytest.mark.parametrize(
    "args, message",
    [((12, 4, 0, "ring"), "12 positions in 8 equal pieces"), ((10, 4, 0, "ulysses"), "10 positions in 4 equal pieces")],
)
def test_positions_that_do_not_exist(args, message):
    with pytest.raises(AssertionError) as error:
        local_positions(*args)
    assert message in str(error.value)


@pytest.mark.parametrize("size, samples", [(1, [[0, 8]]), (2, [[0, 8], [0, 8]])])
def test_documents_cover_every_token_of_the_batch(size, samples):
    q, axis = torch.zeros(8, 2, 4, HEAD_DIM), Axis("cp", 0, size, tuple(range(size)))
    with pytest.raises(AssertionError, match="documents"):
        ContextAttention(axis, "ring", FLASH_CPU)(q, q, q, as_documents(samples))


@pytest.mark.parametrize("size, backend", [(2, REFERENCE), (1, FLASH_CPU)])
def test_dropout_needs_one_rank_and_a_kernel_that_has_it(size, backend):
    q, axis = torch.zeros(8, 1, 4, HEAD_DIM), Axis("cp", 0, size, tuple(range(size)))
    dropout = AttentionDropout(0.1, torch.zeros(8, 1, dtype=torch.int64), 0, 0)
    with pytest.raises(AssertionError, match="dropout"):
        ContextAttention(axis, "ring", backend)(q, q, q, None, dropout)
