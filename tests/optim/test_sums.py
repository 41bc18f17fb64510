"""Sums of gradients over data ranks: how far they are from float64 by ranks, whose bytes cross nodes, and the slices.

Ranks of one gloo world play nodes: `node_ranks` of them are one. Errors of thousands of ranks are simulated with the
functions that the ranks call.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from math import sqrt
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_grads import SMALL_BUCKETS, UNITS, Chunk

from layouts import GPT3, LLAMA, config
from minitron import pretrain
from minitron.checkpoint.load import ResumePoint
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.kernels import plain
from minitron.kernels.kernels import PLAIN
from minitron.optim.buckets import Gradients
from minitron.optim.slices import PARTS_AT_ONCE, add_rounded
from minitron.planner.dryrun.dryrun import Recorder, fake_world, recorded
from minitron.planner.memory import Memory, data_levels
from minitron.train import build

F32, BF16 = torch.float32, torch.bfloat16
ELEMENTS, MICROBATCHES = 1024, 64


# ---- errors, simulated -----------------------------------------------------------------------------------------------


def drawn(count, noise, seed=0):
    """Gradients [count, n] of one signal, each with noise of so many times its size. Elements have all mantissas."""
    draw = torch.Generator().manual_seed(seed)
    signal, scale = torch.randn(ELEMENTS, generator=draw), torch.rand(ELEMENTS, generator=draw).exp2()
    return torch.randn(count, ELEMENTS, generator=draw).mul_(noise).add_(signal).mul_(scale)


def summed_in_levels(grads, local):
    """What the rank of the first node makes of a slice; grads [ranks, n], of `local` ranks a node."""
    others = grads.view(-1, local, ELEMENTS).transpose(0, 1).contiguous()
    parts, total = torch.empty(others.shape[1:], dtype=BF16), torch.empty(ELEMENTS)
    plain.sum_parts(others[1:], others[0], parts)
    plain.sum_parts(others[1:, 0], others[0, 0], total)
    parts[0].zero_()
    add_rounded(total, parts, plain.sum_parts)
    return total


@pytest.mark.parametrize("nodes", [1, 2, PARTS_AT_ONCE, PARTS_AT_ONCE + 1, 2 * PARTS_AT_ONCE + 1])
def test_parts_of_any_number_of_nodes_are_added(nodes):
    parts = torch.randint(-100, 100, (nodes, 24), generator=torch.Generator().manual_seed(nodes)).bfloat16()
    total = torch.arange(24.0)
    expected = total + parts.float().sum(0)
    add_rounded(total, parts, plain.sum_parts)
    assert torch.equal(total, expected)


def ring_in_bf16(grads):
    return reduce(torch.add, grads.bfloat16())


def error(total, exact):
    return float((total.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("ratio", [1.0, 0.1])
@pytest.mark.parametrize("of", ["the step", "a rank"])
def test_errors_of_sums_by_ranks(of, ratio):
    """At most 1.5 times the error of rounding each rank's gradient once, or that of rounding the exact sum once.

    ratio: signal to noise of the step's gradient, or of each rank's. A signal s with noise z on each of L ranks of a
    node has a sum of sqrt((L s)^2 + L z^2). If s is as large as z, rounding it costs sqrt((L + 1) / 2) times as much as
    rounding L terms, whoever adds; but then the step's signal to noise is sqrt(ranks), and the sum's error is small.

    Sums of gradients in bf16 are often halfway between two numbers of bf16: their rounding has 3/2 of the variance.
    """
    print(f"\nsignal to noise {ratio:g} of {of}: the error of rounding each rank's gradient once, and multiples of it")
    print(f"{'ranks':>6} {'error':>9}  ring in bf16   accumulated in float32 (in bf16), for 1, 2, 4, 8 ranks of a node")
    for ranks in (8, 64, 512, 4096):
        noise = (sqrt(ranks) if of == "the step" else 1) / ratio
        grads = drawn(ranks, noise)
        exact = grads.sum(0, dtype=torch.float64)
        once, sum_once = error(grads.bfloat16().sum(0, dtype=torch.float64), exact), error(exact.bfloat16(), exact)
        row = []
        for local in (1, 2, 4, 8):
            wide, narrow = (error(summed_in_levels(x, local), exact) for x in (grads, grads.bfloat16()))
            rounded = (1 - local / ranks) * (local + noise**2) / (1 + noise**2)
            assert wide <= 1.1 * sqrt(rounded) * once + 1e-6 and wide <= max(1.5 * once, sum_once), (ranks, local)
            assert narrow <= 1.1 * sqrt(1 + 1.5 * rounded * (local > 1)) * once, (ranks, local)
            row.append(f"{wide / once:.2f} ({narrow / once:.2f})")
        print(f"{ranks:6} {once:9.2e}  {error(ring_in_bf16(grads), exact) / once:12.2f}   {'  '.join(row)}")


def test_errors_of_sums_of_microbatches_in_bf16():
    """Each addition rounds a sum that grows, so m of them cost less than sqrt(m) roundings of the last one."""
    for ratio in (1.0, 0.1):
        grads = drawn(MICROBATCHES, 1 / ratio)
        total, exact = grads[0].bfloat16(), grads.double().sum(0)
        for grad in grads[1:]:
            total.add_(grad)
        once, found = error(exact.bfloat16(), exact), error(total, exact)
        print(
            f"\n{MICROBATCHES} microbatches, signal to noise {ratio:g}: error {found:.2e}, of one rounding {once:.2e}"
        )
        assert once < found < sqrt(MICROBATCHES) * once


# ---- sums of real ranks ----------------------------------------------------------------------------------------------


@dataclass
class Owned:
    """A bucket of one rank: its slice, all of its gradients before the sum, the summed slice, all gathered values."""

    place: slice
    grads: torch.Tensor
    total: torch.Tensor
    gathered: torch.Tensor


def integers(numel, rank, most):
    """Gradients whose float32 sums are exact in any order."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(-most, most + 1, (numel,), generator=draw).float()


def reduced(dtype, most, overlap, **mesh_args):
    """What two steps of a rank make of gradients like these. Each rank then writes its own number to its slice."""
    mesh = Mesh.create(**mesh_args)
    chunk = Chunk(list(UNITS), mesh, BF16)
    gradients = Gradients([chunk], mesh, PLAIN, overlap=overlap, dtype=dtype, bucket_bytes=SMALL_BUCKETS)
    for step in range(2):
        before = []
        for i, bucket in enumerate(gradients.buckets):
            bucket.grad.copy_(integers(len(bucket.grad), mesh.rank + 8 * (i + step), most))
            before.append(bucket.grad.clone())
            bucket.reduce()
        for bucket, own in zip(gradients.buckets, before):
            bucket.reduction.wait()
            kept = bucket.slice_comm.unsummed(bucket.grad)
            levels = mesh.in_node.size if mesh.in_node.size > 1 else mesh.across_nodes.size
            assert len(own) - sum(map(len, kept)) == len(own) // levels  # all but what the rank sums first
            for part in kept:
                first = part.storage_offset() - bucket.grad.storage_offset()
                assert torch.equal(part, own[first : first + len(part)])
    for bucket in gradients.buckets:
        bucket.data_slice.fill_(mesh.rank)
        bucket.start_gather()
    gradients.wait_parameters()
    rows = [
        Owned(bucket.plan.slice_of(mesh.dp_cp.rank), grads, bucket.grad_slice.clone(), bucket.data.clone())
        for bucket, grads in zip(gradients.buckets, before)
    ]
    return mesh.dp_cp.ranks, mesh.uneven, rows


@pytest.mark.parametrize(
    "world, local, mesh_args",
    [
        (4, 1, dict(node_ranks=1)),
        (4, 2, dict(node_ranks=2)),
        (4, 4, dict(node_ranks=4)),
        (4, 4, dict()),
        (8, 4, dict(node_ranks=4)),
        (8, 2, dict(node_ranks=2, cp=4)),
        (8, 2, dict(node_ranks=4, tp=2)),
        (8, 1, dict(node_ranks=2, tp=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype, most", [(F32, 5000), (BF16, 200)], ids=["fp32", "bf16"])
def test_a_sum_is_that_of_parts_rounded_once(ranks, world, local, mesh_args, dtype, most):
    """Bit for bit. local: the data ranks of a node; the sum of another node is rounded, that of the own one is not."""
    results, rounded = ranks(world, reduced, dtype, most, most == 200, **mesh_args), 0
    for rank, (members, uneven, rows) in enumerate(results):
        assert not uneven
        mine = members.index(rank) // local
        for i, row in enumerate(rows):
            grads = torch.stack([results[other][2][i].grads[row.place].float() for other in members])
            nodes = grads.view(-1, local, grads.shape[1]).sum(1)
            parts = nodes.bfloat16().float()
            parts[mine] = nodes[mine]
            rounded += int((parts != nodes).sum())
            assert row.total.dtype == F32 and torch.equal(row.total, parts.sum(0))
            for other in members:
                assert (row.gathered[results[other][2][i].place] == other).all()
    assert bool(rounded) == (local < len(members) and (dtype == F32 or local > 1))


@pytest.mark.parametrize("dtype, most", [(F32, 5000), (BF16, 200)], ids=["fp32", "bf16"])
def test_uneven_nodes_sum_in_float32(ranks, dtype, most):
    """Of three data ranks, each two ranks of tp, a node of four ranks has two and the next one the third."""
    results = ranks(6, reduced, dtype, most, True, node_ranks=4, tp=2)
    for members, uneven, rows in results:
        assert uneven
        for i, row in enumerate(rows):
            assert torch.equal(row.total, sum(results[other][2][i].grads[row.place].float() for other in members))


def across_of_a_run(keys):
    rank, cfg = dist.get_rank(), config(Config(), keys)
    environ = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
    with (
        mock.patch.object(pretrain, "joined", lambda *_: nullcontext((None, rank, 4))),
        mock.patch.object(dist, "init_process_group") as begun,
        mock.patch.dict(os.environ, {name: str(value) for name, value in environ.items()}),
    ):
        across = pretrain.make_mesh(cfg, 4, torch.device("cpu"), None).across_nodes.ranks
        assert begun.call_args.kwargs["timeout"].total_seconds() > cfg.train.hang_seconds  # whose report comes first
        return across


@pytest.mark.parametrize(
    "keys, levels",
    [
        ({}, False),
        ({"reduce_dtype": "bf16"}, True),
        ({"grad_dtype": "bf16"}, True),
        ({"accumulate_dtype": "bf16"}, False),
        ({"grad_dtype": "bf16", "reduce_dtype": "fp32"}, False),
    ],
)
def test_a_run_makes_levels_of_its_nodes_for_gradients_in_bf16(ranks, keys, levels):
    found = ranks(4, across_of_a_run, {"optimizer": keys})
    assert found == ([(0, 2), (1, 3), (0, 2), (1, 3)] if levels else [(0,), (1,), (2,), (3,)])


@pytest.mark.parametrize(
    "environ, count",
    [
        ({}, 0),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 0),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, 0),  # dealt out in turns
    ],
    ids=str,
)
def test_an_environment_that_does_not_say_how_many_ranks_a_node_has(environ, count):
    assert pretrain.ranks_of_node(environ) == count


@pytest.mark.parametrize("uneven", [False, True])
def test_a_run_logs_that_its_nodes_are_uneven(uneven):
    cfg, log = (
        config(LLAMA, {"precision": {"dtype": "bf16"}, "optimizer": {"reduce_dtype": "bf16"}}),
        mock.Mock(world=1),
    )
    trainer = build(cfg, replace(Mesh.offline(), uneven=uneven))
    startup = mock.Mock(begun=0.0, parts={"load_seconds": 0.0})
    pretrain.describe_run(log, trainer, mock.Mock(info={}, note=None), ResumePoint(), "cpu", startup)
    lines = [call.args[0] for call in log.info.call_args_list]
    assert sum("optimizer.reduce_dtype=bf16" in line and "float32" in line for line in lines) == uneven


# ---- bytes and memory ------------------------------------------------------------------------------------------------


def traffic(rank, dtype, node_ranks, tp):
    """Elements of a rank's buckets, and bytes that it sends for their sums: (to its node, to other nodes)."""
    world, recorder, sent = 16 * tp, Recorder(), [0, 0]
    with fake_world(world, rank, "cpu"):
        mesh = recorded(Mesh.create(node_ranks=node_ranks, tp=tp), recorder)
        gradients = Gradients([Chunk(list(UNITS), mesh, BF16)], mesh, PLAIN, overlap=False, dtype=dtype)
        for bucket in gradients.buckets:
            bucket.reduce()
            bucket.reduction.wait()
    node = rank // node_ranks
    for record in recorder.records:
        place, size = record.ranks.index(rank), len(record.ranks)
        assert record.kind in ("reduce-scatter", "all-to-all")
        others = [other for other in record.ranks if other != rank]
        if record.kind == "reduce-scatter":  # a ring: all but one part, to the next rank
            others = [record.ranks[(place + 1) % size]] * (size - 1)
        for other in others:
            sent[other // node_ranks != node] += record.num_bytes // size
    return sum(bucket.plan.size for bucket in gradients.buckets), sent


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("local", [1, 2, 4, 8])
def test_a_node_sends_no_more_than_a_ring_would(local, dtype):
    """16 data ranks. A ring over all ranks leaves a node once: with 15 of 16 parts of a bucket, in bf16 at least."""
    ranks, nodes = 16, 16 // local
    found = [traffic(rank, dtype, local, 1) for rank in range(local)]  # of the first node
    (size,) = {size for size, _ in found}
    across, inside = (sum(sent[far] for _, sent in found) for far in (True, False))
    assert across == (nodes - 1) * size * 2 // nodes <= (ranks - 1) * size * 2 // ranks
    assert inside == (local - 1) * size * 4  # by the process group, in float32
    two = traffic(0, dtype, 2 * local, 2)  # each rank of tp 2 has its own group, in nodes of as many of both
    assert two[1][True] * local == (nodes - 1) * two[0] * 2 // nodes


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("accumulate", ["fp32", "bf16"])
@pytest.mark.parametrize("node_ranks", [1, 2, 8])
def test_staging_is_allocated_once_and_planned(accumulate, overlap, node_ranks):
    """At most two buffers, of the largest bucket's part, or the cast of a whole one. GPUs of a node need no cast."""
    keys = {"accumulate_dtype": accumulate, "reduce_dtype": "bf16"}
    cfg = config(
        LLAMA,
        {"model": {"hidden_size": 256, "ffn_hidden_size": 1024, "vocab_size": 512}},
        {"precision": {"dtype": "bf16"}, "optimizer": keys, "parallel": {"overlap_grads": overlap}},
    )
    with fake_world(8, 0, "cpu"):
        mesh = Mesh.create(node_ranks=node_ranks)
        slices = build(cfg, mesh).gradients.slice_comm
    assert (mesh.in_node.size, mesh.across_nodes.size) == data_levels(cfg, 8, node_ranks)
    staging = [x for x in (slices.received, slices.rounded, slices.wide) if len(x)]
    assert len(staging) <= 2
    messages = Memory(cfg, 8, gpus_per_node=node_ranks).bytes_by_part(0)["messages"]
    if not overlap or node_ranks == 1:
        assert messages == pytest.approx(sum(x.nbytes for x in staging), rel=0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_the_largest_bucket_is_planned_with_learned_positions_in_one_of_their_own(tied):
    sizes = dict(hidden_size=256, ffn_hidden_size=1024, vocab_size=512, num_layers=2, max_positions=8192)
    cfg = config(GPT3, {"model": sizes | {"tie_embeddings": tied}, "precision": {"dtype": "bf16"}})
    with fake_world(2, 0, "cpu"):
        buckets = build(cfg, Mesh.create()).gradients.buckets
    assert Memory(cfg, 2, gpus_per_node=1)._largest_bucket(0) == max(bucket.plan.size for bucket in buckets)
