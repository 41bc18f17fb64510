"""Tensor-parallel layers equal plain ones on whole tensors: outputs, input gradients and weight gradients."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from layouts import Pieces
from minitron.comm.mesh import Axis, Mesh
from minitron.kernels import plain
from minitron.kernels.gemm import DTYPES, Gemm
from minitron.kernels.param import GradSlot, Shard, with_main_grad
from minitron.model.layers import Norm, Residual
from minitron.parallel.layer_context import LayerContext
from minitron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from minitron.parallel.overlap import ProcessGroupComm
from minitron.parallel.vocab import VocabParallelEmbedding, lookup, vocab_parallel_cross_entropy
from minitron.testing import assert_close_rel

S, B, H, V = 8, 3, 16, 32
CHUNKS = (24, 8, 8)  # queries, keys, values
# float32: the parts are added in another order. bf16: one rounding of each partial sum, 2^-8, per tensor-parallel rank.
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-2}


def _full(name: str, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))).to(dtype)


def _set(param, full):
    with torch.no_grad():
        param.copy_(full if param.spec.shard is None else param.spec.shard.cut(full))


def _part(x, mesh, sequence_parallel):
    return x.chunk(mesh.tp.size)[mesh.tp.rank].clone() if sequence_parallel else x.clone()


in_order = partial(ProcessGroupComm, overlap=False)
reduce_only = partial(ProcessGroupComm, sequence_parallel=False)
reduce_in_order = partial(reduce_only, overlap=False)


def two_layers(tp, sequence_parallel, by, dtype, main_grad, recompute_input):
    """column -> relu -> row on one rank: y, dx, and gradients of the three parameters, each as this rank has it."""
    mesh = Mesh.create(tp=tp)
    dtype = DTYPES[dtype]
    layout = LayerContext(by(mesh.tp), dtype=dtype)
    column = ColumnParallelLinear(H, CHUNKS, layout, std=0.1, bias=True, gemm=Gemm(plain.add_product))
    row = RowParallelLinear(sum(CHUNKS), H, layout, std=0.1, bias=True, gemm=Gemm(plain.add_product))
    params = {"w1": column.weight, "b1": column.bias, "w2": row.weight, "b2": row.bias}
    for name, shape in (("w1", (sum(CHUNKS), H)), ("b1", (sum(CHUNKS),)), ("w2", (H, sum(CHUNKS))), ("b2", (H,))):
        _set(params[name], _full(name, *shape, dtype=dtype))
    reports = []
    if main_grad:
        for name, p in params.items():
            p.slot = GradSlot(torch.full(p.shape, float("nan")), partial(reports.append, name))  # of the step before
    x = _part(_full("x", S, B, H, dtype=dtype), mesh, sequence_parallel).requires_grad_()
    inner = column(x)
    y = row(inner.relu(), (lambda: inner.detach().relu()) if recompute_input else None) + with_main_grad(row.bias)
    y.backward(_part(_full("dy", S, B, H, dtype=dtype), mesh, sequence_parallel))
    grads = {name: (p.slot.main_grad if main_grad else p.grad) for name, p in params.items()}
    assert not main_grad or (sorted(reports) == sorted(params) and all(p.grad is None for p in params.values()))
    shards = {n: p.spec.shard for n, p in params.items()}
    return (
        y.detach(),
        x.grad,
        {n: (g, shards[n] and shards[n].slices(), shards[n] and shards[n].dim) for n, g in grads.items()},
    )


def _plain_two_layers(dtype):
    w1, b1, w2, b2 = (
        _full(n, *s, dtype=dtype).requires_grad_()
        for n, s in (("w1", (sum(CHUNKS), H)), ("b1", (sum(CHUNKS),)), ("w2", (H, sum(CHUNKS))), ("b2", (H,)))
    )
    x = _full("x", S, B, H, dtype=dtype).requires_grad_()
    # heads are permuted by the sharding, but the permutation of w1's rows is the same as that of w2's columns
    y = F.linear(F.linear(x, w1, b1).relu(), w2, b2)
    y.backward(_full("dy", S, B, H, dtype=dtype))
    return y.detach(), x.grad, {"w1": w1.grad, "b1": b1.grad, "w2": w2.grad, "b2": b2.grad}


@pytest.mark.parametrize(
    "tp,sequence_parallel,by,dtype,main_grad,recompute_input",
    [
        (1, False, ProcessGroupComm, "fp32", True, False),
        (2, True, ProcessGroupComm, "fp32", True, False),
        (4, True, ProcessGroupComm, "fp32", True, True),
        (4, False, reduce_only, "fp32", True, False),
        (2, True, in_order, "fp32", False, True),
        (2, False, reduce_in_order, "fp32", False, False),
        (4, True, ProcessGroupComm, "bf16", True, True),
        (4, True, Pieces, "fp32", True, False),
        (2, True, Pieces, "bf16", True, True),
    ],
)
def test_column_then_row(ranks, tp, sequence_parallel, by, dtype, main_grad, recompute_input):
    results = ranks(tp, two_layers_in_order, tp, sequence_parallel, by, dtype, main_grad, recompute_input)
    check_two_layers(results, _plain_two_layers(DTYPES[dtype]), sequence_parallel, dtype)


def check_two_layers(results, plain, sequence_parallel, dtype):
    """The ranks' results against those of plain layers on whole tensors."""
    (y, dx, grads), tol = plain, TOLERANCE[dtype]
    join = torch.cat if sequence_parallel else (lambda parts: parts[0])
    assert_close_rel(join([r[0] for r in results]).float(), y.float(), tol, "y")
    assert_close_rel(join([r[1] for r in results]).float(), dx.float(), tol, "dx")
    for name, expected in grads.items():
        parts = [r[2][name] for r in results]
        if parts[0][1] is None:  # replicated: partial over the sequence, else the same everywhere
            actual = sum(p[0] for p in parts) if sequence_parallel else parts[0][0]
        else:
            actual = torch.empty_like(expected, dtype=torch.float32)
            for grad, slices, dim in parts:
                for local, full, length in slices:
                    actual.narrow(dim, full, length).copy_(grad.narrow(dim, local, length))
        assert_close_rel(actual.float(), expected.float(), tol, f"gradient of {name}")


def two_layers_in_order(*args):
    """two_layers with the second weight cut like the first one's rows, so that columns meet their own rows."""
    original = RowParallelLinear.__init__

    def cut_by_chunks(self, in_features, out_features, layout, **kwargs):
        original(self, in_features, out_features, layout, **kwargs)
        self.weight.spec = replace(self.weight.spec, shard=Shard(1, layout.axis, CHUNKS))

    RowParallelLinear.__init__ = cut_by_chunks
    try:
        return two_layers(*args)
    finally:
        RowParallelLinear.__init__ = original


def embedding_and_loss(tp, sequence_parallel, main_grad):
    mesh = Mesh.create(tp=tp)
    layout = LayerContext(ProcessGroupComm(mesh.tp, sequence_parallel))
    words = VocabParallelEmbedding(V, H, layout, std=0.1)
    _set(words.weight, _full("words", V, H))
    if main_grad:
        words.weight.slot = GradSlot(torch.ones(words.weight.shape), lambda: None)
    ids = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(5))
    x = words(ids)
    x.backward(_part(_full("dx", S, B, H), mesh, sequence_parallel))
    logits = (5 * _full("logits", S, B, V)).chunk(tp, -1)[mesh.tp.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, ids, mesh.tp)
    loss.backward(_full("dloss", S, B))
    return x.detach(), words.weight.slot.main_grad if main_grad else words.weight.grad, loss.detach(), logits.grad


@pytest.mark.parametrize(
    "tp,sequence_parallel,main_grad", [(1, False, True), (2, True, True), (4, False, False), (4, True, True)]
)
def test_vocabulary_split(ranks, tp, sequence_parallel, main_grad):
    table = _full("words", V, H).requires_grad_()
    ids = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(5))
    x = F.embedding(ids, table)
    x.backward(_full("dx", S, B, H))
    logits = (5 * _full("logits", S, B, V)).requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(S, B)
    loss.backward(_full("dloss", S, B))
    results = ranks(tp, embedding_and_loss, tp, sequence_parallel, main_grad)
    join = torch.cat if sequence_parallel else (lambda parts: parts[0])
    assert_close_rel(join([r[0] for r in results]), x.detach(), 1e-7, "embedding")
    assert_close_rel(torch.cat([r[1] for r in results]), table.grad, 1e-6, "gradient of the table")
    for r in results:
        assert_close_rel(r[2], loss.detach(), 1e-6, "loss")
    assert_close_rel(torch.cat([r[3] for r in results], -1), logits.grad, 1e-6, "gradient of the logits")


@pytest.mark.parametrize("in_order", [False, True])
def test_ranks_that_must_get_the_same_bits_add_rows_in_order(in_order):
    """The rows are those of a table that every rank holds; only on GPUs does their order change the bits."""
    table, ids = LayerContext().parameter((V, H)), torch.randint(0, V, (S, B))
    with mock.patch.object(plain, "add_rows_", wraps=plain.add_rows_) as added:
        lookup(ids, table, 0, plain, in_order).sum().backward()
    assert added.call_args.args[-1] == in_order and table.grad.sum() == ids.numel() * H


def loss_of_large_logits(tp):
    mesh = Mesh.create(tp=tp)
    logits, ids = large_logits()
    logits = logits.chunk(tp, -1)[mesh.tp.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, ids, mesh.tp)
    loss.backward(_full("dloss", S, B))
    return loss.detach(), logits.grad


def large_logits():
    """Rows of logits around 200, around -200, and around both, which one rank may have one of."""
    logits = 3 * _full("logits", S, B, V) + torch.tensor([200.0, -200.0, 0.0]).unsqueeze(-1)
    logits[:, 2, V // 2 :] -= 400
    return logits, torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_far_beyond_the_range_of_exp(ranks, tp):
    """exp(89) is infinite in float32, exp(-104) is zero: without the maximum taken off there is no loss."""
    logits, ids = large_logits()
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact.flatten(0, 1), ids.flatten(), reduction="none").view(S, B)
    loss.backward(_full("dloss", S, B).double())
    results = ranks(tp, loss_of_large_logits, tp)
    for part, _ in results:  # a logit of 200 is rounded by 2^-17
        assert_close_rel(part, loss.detach(), 1e-5, "loss")
    assert_close_rel(torch.cat([part for _, part in results], -1), exact.grad, 1e-4, "gradient of the logits")


def test_gradients_of_many_microbatches_add_up_in_float32():
    """Of weights, biases, norms and tables, in bf16: the float64 sum over 64 microbatches, to float32's rounding.

    Rounded to bf16 each, they would be off by 2^-9 of one, which is 2e-4 of a sum of 64.
    """
    layout = LayerContext(dtype=torch.bfloat16)
    linear = ColumnParallelLinear(H, CHUNKS, layout, std=0.1, bias=True, gemm=Gemm(plain.add_product))
    words, norm = VocabParallelEmbedding(V, H, layout, std=0.1), Norm(H, 1e-5, layout, bias=True)
    params = {
        "weight": linear.weight,
        "bias": linear.bias,
        "table": words.weight,
        "gain": norm.weight,
        "shift": norm.bias,
    }
    generator = torch.Generator().manual_seed(0)
    sums = {}
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(torch.randn(p.shape, generator=generator))
            p.slot = GradSlot(torch.empty(p.shape), lambda: None)
            sums[name] = torch.zeros(p.shape, dtype=torch.float64)
    for _ in range(64):
        x, dy, dx = (torch.randn(S, B, n, generator=generator).bfloat16() for n in (H, sum(CHUNKS), H))
        ids = torch.randint(0, V, (S, B), generator=generator)
        linear(x.clone().requires_grad_()).backward(dy)
        words(ids).backward(dx)
        norm(Residual(x.clone().requires_grad_()))[1].backward(dx)
        (rows, of_rows, of_x), exact = (t.flatten(0, 1).double() for t in (x, dy, dx)), x.double()
        normal = F.layer_norm(exact, (H,), eps=1e-5).flatten(0, 1)
        sums["weight"] += of_rows.T @ rows
        sums["bias"] += of_rows.sum(0)
        sums["table"].index_add_(0, ids.flatten(), of_x)
        sums["gain"] += (of_x * normal).sum(0)
        sums["shift"] += of_x.sum(0)
    for name, p in params.items():
        assert p.slot.main_grad.dtype == torch.float32 and p.grad is None
        assert_close_rel(p.slot.main_grad, sums[name], 2e-6, name)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 1))
def test_shard_cuts_where_its_slices_say(parts, size, dim):
    """Every element lies on exactly one rank, at the place that `slices` gives."""
    chunks = tuple(p * size for p in parts)
    full = torch.arange(sum(chunks) * 3).view(3, -1) if dim else torch.arange(sum(chunks) * 3).view(-1, 3)
    shards = [Shard(dim, Axis("tp", r, size, tuple(range(size))), chunks) for r in range(size)]
    locals_ = [shard.cut(full) for shard in shards]
    assert sorted(torch.cat([t.flatten() for t in locals_]).tolist()) == list(range(full.numel()))
    joined = torch.empty_like(full)
    for shard, part in zip(shards, locals_):
        for local, start, length in shard.slices():
            joined.narrow(dim, start, length).copy_(part.narrow(dim, local, length))
    assert torch.equal(joined, full)


def test_shard_that_does_not_divide():
    with pytest.raises(AssertionError, match="6 rows or columns over 4 ranks"):
        Shard(0, Axis("tp", 0, 4, (0, 1, 2, 3)), (8, 6))
