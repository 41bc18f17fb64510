"""Replicas that drift apart are noticed and named before they are saved; those that do not are left alone."""

import signal
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fault_run import Run
from layouts import GPT3, LLAMA, adapters_that_do_something, config, mesh_of
from minitron.checkpoint.directory import checkpoints
from minitron.checkpoint.load import ResumePoint, find_resume_point, restore
from minitron.comm.collectives import all_gather_into
from minitron.comm.handle import Handle
from minitron.data.build import Datasets
from minitron.data.mock import MockDataset
from minitron.kernels.param import with_main_grad
from minitron.model import gpt
from minitron.model.layers import split_heads
from minitron.optim import replicas
from minitron.optim.replicas import ReplicasDiffer, checksum
from minitron.optim.slices import ProcessGroupSliceComm
from minitron.planner.dryrun.dryrun import Recorder, recorded
from minitron.pretrain import open_weights
from minitron.runtime.log import Log
from minitron.runtime.observer import Observer
from minitron.runtime.startup import Startup
from minitron.train import Trainer, build, train

SMALL = {
    "model": dict(num_layers=2),
    "train": dict(steps=6, global_batch_size=4, check_replicas_every=2),
    "log": dict(every=1000),
}
LORA = {"finetune": dict(kind="lora", base="anywhere"), "lora": dict(targets=("qkv", "o", "down"))}
NORMED = "blocks.0.attention.q_norm"


def small(base, **sections):
    return config(base, SMALL, sections)


# ---- on every rank ------------------------------------------------------------------------------------------------


class NormedHeads(gpt.Attention):
    """Attention whose queries and keys are normalised by head. A rank's gradient of their weights is that of its own
    heads, and without sequence parallelism nobody adds up the ranks'."""

    def __init__(self, cfg, mesh, layout, *args):
        super().__init__(cfg, mesh, layout, *args)
        self.q_norm, self.k_norm = (layout.parameter((self.head_dim,), fill=1.0) for _ in range(2))

    def forward(self, x, mb, recompute_input=None):
        qkv = self.qkv(x, recompute_input, mb.local_counters).unflatten(-1, (-1, self.head_dim))
        q, k, v = split_heads(qkv, (self.heads, self.kv_heads, self.kv_heads), mb.rope, self.ops)
        q, k = (
            torch.nn.functional.rms_norm(x, x.shape[-1:]) * with_main_grad(w)
            for x, w in ((q, self.q_norm), (k, self.k_norm))
        )
        return self.out(self.attend(q, k, v, mb.documents).flatten(2), counters=mb.counters)


def late_gather(slices, buffer, own):
    """ProcessGroupSliceComm.gather that moves nothing before somebody waits for it."""
    return Handle(waits=[partial(all_gather_into, buffer, own, slices.axis)])


def run(cfg, spoil=None, attention=gpt.Attention, gather=ProcessGroupSliceComm.gather, stop_at=None):
    """Train on this rank: what ReplicasDiffer said ("": nothing differed), what comparisons communicated, parameters.

    spoil: called with the trainer after each step. stop_at: the step after which a signal comes.
    """
    with adapters_that_do_something(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt, "Attention", attention)
        patch.setattr(ProcessGroupSliceComm, "gather", gather)
        return train_here(cfg, spoil, stop_at)


def train_here(cfg, spoil, stop_at):
    torch.set_num_threads(1)
    recorder, t, said = Recorder(), cfg.train, ""
    mesh = recorded(mesh_of(cfg), recorder)
    trainer = build(cfg, mesh)
    start = ResumePoint() if cfg.checkpoint.dir is None else find_resume_point(cfg, open_weights)
    restore(start, trainer.state)
    step = Trainer.step

    def step_and_spoil(trainer, batches, lr):
        stats = step(trainer, batches, lr)
        trainer.gradients.wait_parameters()
        with torch.no_grad():
            spoil(trainer)
        return stats

    class StopAt(Observer):
        agreed = 0

        def after(self, done):
            self.agreed = signal.SIGTERM if done.step == stop_at else 0

        def report(self, *_): ...

    stop = StopAt()
    data = MockDataset(cfg.model.vocab_size, t.seq_len, t.global_batch_size * t.steps, t.seed, document_length=10.0)
    with (
        Log(cfg, mesh.rank, mesh.world.size) as log,
        mock.patch.object(Trainer, "step", step_and_spoil if spoil else step),
    ):
        try:
            train(trainer, Datasets(data, None, None, {}), log, stop, start, Startup({}, log, 0.0, 1.0))
        except ReplicasDiffer as error:
            said = str(error)
    params = [(p.spec.shard is None, p.spec.tied) for chunk in trainer.chunks for p in chunk.parameters()]
    return said, [record for record in recorder.records if record.action == "replicas"], params


def parameter(trainer, name):
    """The parameter of this rank's that the name ends with."""
    return next(p for chunk in trainer.chunks for p in chunk.parameters() if p.spec.name.endswith(name))


def flip(ranks, at, name, trainer):
    """One bit of one element changes on these ranks."""
    if trainer.mesh.rank in ranks and trainer.mesh.activity.step == at:
        bits = parameter(trainer, name).view(torch.int32)
        bits[(0,) * bits.dim()] ^= 1


def swap(ranks, at, name, trainer):
    """Two rows change places on these ranks: the same numbers in another order."""
    if trainer.mesh.rank in ranks and trainer.mesh.activity.step == at:
        rows = parameter(trainer, name)[:2]
        rows.copy_(rows.flip(0))


def nudge(rank, at, name, trainer):
    """From a step on, one rank's parameter is updated differently. Data parallelism would make it equal again."""
    if trainer.mesh.rank == rank and trainer.mesh.activity.step >= at:
        parameter(trainer, name).add_(0.01)


# ---- sums of bits -------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


@pytest.fixture(params=[48, replicas.PIECE_BYTES], ids=["pieces", "whole"], scope="module")
def piece_bytes(request):
    """So many bytes are added up at once: few, so that a tensor of the tests has several pieces, or all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "PIECE_BYTES", request.param)
        yield


@pytest.mark.usefixtures("piece_bytes")
@given(st.integers(1, 9), st.integers(1, 17), DTYPES, st.booleans(), st.integers(0, 2**31))
def test_the_sums_are_those_of_plain_python(rows, columns, dtype, vector, seed):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x = x[0].clone() if vector else x
    width = next(width for width in (8, 4, 2, 1) if columns * x.itemsize % width == 0)
    words = np.frombuffer(x.view(torch.uint8).numpy().tobytes(), f"{'i' if width > 1 else 'u'}{width}").tolist()
    expected = sum(words), sum(place * value for place, value in enumerate(words))
    assert [value % 2**64 for value in checksum(x).tolist()] == [value % 2**64 for value in expected]


@pytest.mark.usefixtures("piece_bytes")
@given(st.integers(1, 9), st.integers(1, 17), DTYPES, st.data())
def test_a_flipped_bit_and_a_swap_change_the_sums(rows, columns, dtype, data):
    x = torch.randn(rows, columns).to(dtype)
    before, bits = checksum(x), x.view(torch.uint8).flatten()
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not torch.equal(checksum(x), before)
    before, values = checksum(x), bits.view(-1, x.itemsize)  # as bytes: a flipped bit may have made a NaN
    here, there = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    differ = not torch.equal(values[here], values[there])
    values[[here, there]] = values[[there, here]]
    assert torch.equal(checksum(x), before) == (not differ)


# ---- healthy runs -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world,cfg",
    [
        (8, small(GPT3, parallel=dict(tp=2, pp=2))),
        (8, small(LLAMA, parallel=dict(tp=2, pp=2, sequence_parallel=False), precision=dict(dtype="bf16"))),
        (4, small(GPT3, parallel=dict(pp=2, overlap_grads=False), precision=dict(dtype="fp16", loss_scale=2.0**24))),
        (4, small(LLAMA, **LORA, model=dict(num_layers=4), parallel=dict(pp=2, vp=2))),
        (4, small(LLAMA, **LORA, parallel=dict(tp=2, cp=2, sequence_parallel=False), precision=dict(dtype="bf16"))),
        (2, small(GPT3, parallel=dict(tp=2, sequence_parallel=False), data=dict(separate_documents=True))),
        (2, small(LLAMA, parallel=dict(pp=2))),
    ],
    ids=["tied", "bf16", "fp16", "lora", "lora-cp", "positions", "no-copies"],
)
def test_a_healthy_run_is_left_alone(ranks, world, cfg):
    p = cfg.parallel
    for said, records, params in ranks(world, run, cfg):
        assert not said
        copies = {
            "dp_cp": len(params) * (world > p.tp * p.pp),
            "tp": sum(whole for whole, _ in params) * (p.tp > 1),
            "tied_stages": sum(tied for _, tied in params) * (p.pp > 1),
        }
        once = [(axis, 2 * 2 * 8 * number) for axis, number in copies.items() if number] + [("world", 8)]
        assert [(record.axis, record.num_bytes) for record in records] == 3 * once  # after 2, 4 and 6 steps
        assert all(record.kind == "all-reduce" for record in records)


def test_never_compares_nothing(ranks, tmp_path):
    cfg = small(
        LLAMA,
        parallel=dict(tp=2, sequence_parallel=False),
        train=dict(check_replicas_every=0),
        checkpoint=dict(dir=str(tmp_path), every=3),
    )
    assert [out[:2] for out in ranks(2, run, cfg, attention=NormedHeads)] == [("", [])] * 2
    assert list(checkpoints(tmp_path)) == [3, 6]


def test_gathers_under_way_are_waited_for(ranks):
    assert [said for said, *_ in ranks(2, run, small(LLAMA), gather=late_gather)] == ["", ""]


def test_one_process_has_no_replicas():
    said, records, _ = run(small(LLAMA))
    assert not said and not records


# ---- replicas that differ -----------------------------------------------------------------------------------------


def found(outputs):
    """The one sentence that all ranks said, up to the advice."""
    (said,) = {said for said, *_ in outputs}
    assert said.endswith(
        ". A layer of your own must give all ranks that hold a parameter the same gradient; else "
        "suspect the memory of these ranks. Each save came after a comparison: start again from the "
        "newest checkpoint"
    )
    return said.split(". A layer")[0]


def test_a_gradient_that_no_rank_has_whole_is_noticed(ranks):
    """A norm by head under tp without sequence parallelism: each rank's gradient lacks what the others' heads add."""
    cfg = small(LLAMA, parallel=dict(tp=2, sequence_parallel=False))
    assert found(ranks(2, run, cfg, attention=NormedHeads)) == (
        f"iteration 2: rank 1 and rank 0 hold different copies of {NORMED}, and of 3 more"
    )
    cfg = small(LLAMA, parallel=dict(tp=4, pp=2, sequence_parallel=False))
    assert found(ranks(8, run, cfg, attention=NormedHeads)) == (
        f"iteration 2: ranks 1, 2, 3 and rank 0 hold different copies of {NORMED}, and of 3 more"
    )


def test_a_gradient_that_is_summed_is_left_alone(ranks):
    """The same norm under sequence parallelism, where what is whole on every rank is summed over tp."""
    cfg = small(LLAMA, parallel=dict(tp=2))
    assert [said for said, *_ in ranks(2, run, cfg, attention=NormedHeads)] == ["", ""]


def test_a_flipped_bit_is_noticed_though_the_next_update_repairs_it(ranks):
    cfg, name = small(LLAMA), "blocks.1.mlp.down.weight"
    assert found(ranks(4, run, cfg, partial(flip, [2], 4, name))) == (
        f"iteration 4: rank 2 and ranks 0, 1, 3 hold different copies of {name}; after iteration 2 they were equal"
    )


def test_a_flipped_bit_and_a_swap_of_a_frozen_weight_are_noticed(ranks):
    cfg, name = small(LLAMA, **LORA, parallel=dict(tp=2)), "blocks.0.attention.qkv.weight"
    assert found(ranks(4, run, cfg, partial(flip, [1], 3, name))) == (  # of tp rank 1, which rank 3 has, too
        f"iteration 4: rank 3 and rank 1 hold different copies of {name}; after iteration 2 they were equal"
    )
    assert found(ranks(4, run, cfg, partial(swap, [2, 3], 2, name))) == (  # of both tp ranks: two shards
        f"iteration 2: rank 2 and rank 0 hold different copies of {name}, and of 1 more"
    )


def test_tied_weights_that_part_are_noticed(ranks):
    cfg, name = small(GPT3, parallel=dict(tp=2, pp=2), train=dict(steps=5)), "embedding.words.weight"
    said = found(ranks(4, run, cfg, partial(nudge, 3, 1, name)))
    assert said == f"iteration 2: rank 3 and rank 1 hold different copies of {name}"


def test_the_last_comparison_is_read_before_the_run_ends(ranks):
    assert found(ranks(2, run, small(LLAMA), partial(flip, [1], 6, "head.weight"))) == (
        "iteration 6: rank 1 and rank 0 hold different copies of head.weight; after iteration 4 they were equal"
    )


# ---- what is saved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at,iteration", [(None, 4), (3, 3)], ids=["save", "signal"])
def test_replicas_are_compared_before_each_save_also_in_a_resumed_run(ranks, tmp_path, stop_at, iteration):
    layout = dict(tp=2, sequence_parallel=False)
    keys = dict(parallel=layout, checkpoint=dict(dir=str(tmp_path), every=2))
    assert [
        said for said, *_ in ranks(2, run, small(LLAMA, **keys, train=dict(steps=2, check_replicas_every=1000)))
    ] == ["", ""]
    cfg = small(LLAMA, **keys, train=dict(check_replicas_every=1000))
    assert found(ranks(2, run, cfg, partial(nudge, 1, 3, "head.norm.weight"), stop_at=stop_at)) == (
        f"iteration {iteration}: rank 1 and rank 0 hold different copies of head.norm.weight"
    )
    assert list(checkpoints(tmp_path)) == [2]
    for said, records, _ in ranks(2, run, small(LLAMA, **keys)):  # what was saved is sound
        assert not said and [record.axis for record in records] == ["tp", "world"] * 2  # once where both are due
    assert list(checkpoints(tmp_path)) == [4, 6]


def test_the_run_ends_with_one_line(tmp_path):
    saved = tmp_path / "saved"
    with Run(
        tmp_path,
        "drift@1",
        "parallel.tp=2",
        "train.check_replicas_every=4",
        f"checkpoint.dir={saved}",
        "checkpoint.every=2",
        ranks=2,
    ) as started:
        status, _, output = started.end()
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == 1 and line.startswith(
        "error: iteration 4: rank 1 and rank 0 hold different copies of "
        "blocks.0.norm1.weight; after iteration 2 they were equal. A layer"
    ), output
    assert list(checkpoints(saved)) == [2]
