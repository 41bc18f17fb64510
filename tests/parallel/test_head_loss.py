"""The head in pieces is the head: its loss and every gradient, what it reports, and at most one piece's logits."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F

from layouts import Pieces
from minitron.comm.mesh import Mesh
from minitron.kernels import plain
from minitron.kernels.gemm import DTYPES, Gemm
from minitron.kernels.param import GradSlot, Shard
from minitron.parallel import head_loss as module
from minitron.parallel.head_loss import HeadLoss
from minitron.parallel.layer_context import LayerContext
from minitron.parallel.linear import ColumnOp
from minitron.parallel.overlap import ProcessGroupComm
from minitron.testing import assert_close_rel
from test_linear import gemms_of

S, B, H, V, IDS = 12, 2, 16, 40, 33  # of two ranks the second has padding
SCALE = 512.0


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sample(vocab: int, s: int = S, b: int = B) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels, and a mask that leaves some out."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, vocab, (s, b), generator=generator), (torch.rand(s, b, generator=generator) > 0.3).float()


def head(tp, piece, make_comm=ProcessGroupComm, *, main_grad=True, frozen=False, dtype="fp32", evaluate=False):
    """Loss, dx, dW and the reports of a forward and a backward on this rank; dW is added to a gradient of ones."""
    mesh = Mesh.create(tp=tp) if tp > 1 else Mesh.offline()
    context = LayerContext(make_comm(mesh.tp), dtype=DTYPES[dtype])
    weight = context.parameter((V, H), Shard(0, mesh.tp, (V,)), std=1.0)
    weight.data.copy_(weight.spec.shard.cut(drawn(V, H, seed=1)))
    weight.requires_grad_(not frozen)
    reports = []
    if main_grad and not frozen:
        weight.slot = GradSlot(torch.ones(weight.shape), lambda: reports.append(weight.slot.main_grad.clone()))
        weight.slot.overwrite = False
    x = drawn(S, B, H, seed=2, dtype=DTYPES[dtype])
    if context.sequence_parallel:
        x = x.chunk(tp)[mesh.tp.rank].contiguous()
    x.requires_grad_()
    op = ColumnOp(weight, None, Gemm(plain.add_product), context.comm, context.weight_queue)
    num_ids = min(max(IDS - mesh.tp.rank * len(weight), 0), len(weight))
    with torch.set_grad_enabled(not evaluate):
        loss = HeadLoss(op, plain, num_ids, piece)(x, *sample(IDS), None if evaluate else torch.tensor(SCALE))
    if evaluate:
        return loss, None, None, len(reports)
    before = len(reports)
    loss.backward(torch.tensor(SCALE))
    dw = weight.grad if weight.slot is None else weight.slot.main_grad - 1
    assert frozen or not main_grad or torch.equal(reports[-1], weight.slot.main_grad), "reported before it is complete"
    return loss.detach(), x.grad, dw, len(reports) - before


def without_sequence_parallelism(axis):
    return ProcessGroupComm(axis, sequence_parallel=False)


def exact(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, dx and dW of autograd in float64."""
    weight, x = drawn(V, H, seed=1).to(dtype).requires_grad_(), drawn(S, B, H, seed=2).to(dtype).requires_grad_()
    labels, mask = sample(IDS)
    logits = (x @ weight.t())[..., :IDS].flatten(0, 1)
    loss = (F.cross_entropy(logits, labels.flatten(), reduction="none") * mask.flatten()).sum()
    loss.backward(torch.tensor(SCALE, dtype=dtype))
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("piece", [6, 10, 24, 100])  # the last piece is smaller, or there is one
@pytest.mark.parametrize(
    "tp, comm", [(1, ProcessGroupComm), (2, ProcessGroupComm), (2, Pieces), (2, without_sequence_parallelism)]
)
def test_every_gradient_is_that_of_the_whole_head(ranks, tp, comm, piece):
    loss, dx, dw = exact()
    results = ranks(tp, head, tp, piece, comm)
    join = torch.cat if comm is not without_sequence_parallelism else (lambda parts: parts[0])
    for result in results:
        assert float(result[0]) == pytest.approx(float(loss), rel=1e-6)
        assert result[3] == 1
    assert_close_rel(join([r[1] for r in results]), dx, 2e-6, "dx")
    assert_close_rel(torch.cat([r[2] for r in results]), dw, 2e-6, "dW")


def test_a_weight_without_a_slot_and_a_frozen_one():
    _, dx, dw = exact()
    assert_close_rel(head(1, 7, main_grad=False)[2], dw, 2e-6, "dW")
    result = head(1, 7, frozen=True)
    assert result[2] is None and result[3] == 0
    assert_close_rel(result[1], dx, 2e-6, "dx")


def test_an_evaluation_makes_no_gradient():
    loss, *_ = exact()
    result = head(1, 7, evaluate=True)
    assert float(result[0]) == pytest.approx(float(loss), rel=1e-6) and result[3] == 0


def test_gradients_are_scaled_before_they_are_rounded():
    """Of a head in fp16 that is scaled by 512, dx is that of the whole head, bit by bit: products sum in float32."""
    whole, pieces = (head(1, piece, dtype="fp16") for piece in (None, 8))
    assert torch.equal(pieces[1], whole[1])
    assert_close_rel(pieces[2], whole[2], 2e-6, "dW")


def in_fp8(tp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and dx of a piece; the half of the second rank is eight times as large as that of the first."""
    mesh = Mesh.create(tp=tp) if tp > 1 else Mesh.offline()
    context = LayerContext(ProcessGroupComm(mesh.tp), dtype=torch.bfloat16)
    weight = context.parameter((32, H), Shard(0, mesh.tp, (32,)), std=1.0)
    weight.data.copy_(weight.spec.shard.cut(drawn(32, H, seed=1)))
    x = (drawn(32, 1, H, seed=2) * torch.tensor([0.25, 2.0]).repeat_interleave(16)[:, None, None]).bfloat16()
    x = x.chunk(tp)[mesh.tp.rank].clone().requires_grad_()
    gemm = gemms_of("current", plain.add_product)()
    op = ColumnOp(weight, None, gemm, context.comm, context.weight_queue)
    loss = HeadLoss(op, plain, len(weight), 32)(x, *sample(32, 32, 1))
    loss.backward()
    return loss.detach(), x.grad.float()


def test_ranks_cast_their_parts_of_a_piece_with_one_scale(ranks):
    """Each rank scales the gradients of its columns by itself, so dx differs by at most 2^-3."""
    loss, dx = in_fp8(1)
    results = ranks(2, in_fp8, 2)
    for result in results:
        assert float(result[0]) == pytest.approx(float(loss), rel=2.0**-8)
    assert_close_rel(torch.cat([r[1] for r in results]), dx, 2.0**-3, "dx")


def test_one_piece_of_logits_exists_at_a_time(monkeypatch):
    """The next product finds the memory of the last one's logits free."""
    alive, seen = [], []
    losses = module.token_losses

    def watched(logits, *args):
        seen.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(logits))
        return losses(logits, *args)

    monkeypatch.setattr(module, "token_losses", watched)
    head(1, 8)
    assert seen == [0, 0, 0]


def large(tp: int):
    """A vocabulary of 256k, whose last rank has padding: loss, dx and dW."""
    mesh = Mesh.create(tp=tp)
    context = LayerContext(ProcessGroupComm(mesh.tp))
    weight = context.parameter((256 * 1024, 8), Shard(0, mesh.tp, (256 * 1024,)), std=1.0)
    weight.data.copy_(weight.spec.shard.cut(drawn(256 * 1024, 8, seed=1)))
    x = drawn(16, 1, 8, seed=2).chunk(tp)[mesh.tp.rank].clone().requires_grad_()
    op = ColumnOp(weight, None, Gemm(plain.add_product), context.comm, context.weight_queue)
    num_ids = min(256_000 - mesh.tp.rank * len(weight), len(weight))
    loss = HeadLoss(op, plain, num_ids, 8)(x, *sample(256_000, 16, 1))
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def test_a_vocabulary_of_256k_equals_float64(ranks):
    """A CPU's float32 product adds the 128k terms of dx one after another, which autograd's own misses by as much."""
    weight = drawn(256 * 1024, 8, seed=1).double().requires_grad_()
    x, (labels, mask) = drawn(16, 1, 8, seed=2).double().requires_grad_(), sample(256_000, 16, 1)
    logits = (x @ weight.t())[..., :256_000].flatten(0, 1)
    loss = (F.cross_entropy(logits, labels.flatten(), reduction="none") * mask.flatten()).sum()
    loss.backward()
    results = ranks(2, large, 2)
    for result in results:
        assert float(result[0]) == pytest.approx(loss.item(), rel=1e-6)
    assert_close_rel(torch.cat([r[1] for r in results]), x.grad, 1e-4, "dx")
    assert_close_rel(torch.cat([r[2] for r in results]), weight.grad, 1e-6, "dW")
