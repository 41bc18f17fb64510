"""The proof: every layout has the losses and the gradients of one process.

A toy model is trained for three steps in float32 on gloo ranks and in a single process, from the same seed and data.
On every rank all losses, the gradient norms and each parameter's gradient must agree to 1e-5 of their norm with what
the single process has there; summation order alone moves them by about 1e-7.
"""

from __future__ import annotations

import json

import pytest
import torch

from layouts import GPT3, LLAMA, QWEN, config, part_of, train_steps
from minitron.config import rules
from minitron.config.schema import ParallelConfig
from minitron.optim.buckets import Gradients
from minitron.testing import assert_close_rel, assert_same_training

TOLERANCE = 1e-5
_twins: dict[str, tuple] = {}


def twin(base: dict, *changes: dict) -> tuple:
    """Figures and gradients of the single process, trained once per model."""
    name = json.dumps([base, *changes], sort_keys=True)
    if name not in _twins:
        figures, gradients = train_steps(config(base, *changes))
        _twins[name] = figures, {name: whole for name, (whole, _) in gradients.items()}
    return _twins[name]


def size(layers: int, samples: int) -> dict:
    return {"model": {"num_layers": layers}, "train": {"global_batch_size": samples}}


TINY, SMALL = size(2, 4), size(4, 4)


def size_for(world: int, p: ParallelConfig) -> dict:
    """A layer for each chunk, but two at least. Four samples, eight for large layouts, and three, the first, the last
    and one between, without data and pipeline parallelism."""
    layers, dp = sum(p.layers_per_stage or ()) or max(2, p.pp * p.vp), world // (p.tp * p.pp * p.cp)
    large = layers > 4 or p.pp == 4 or dp > 4
    return size(layers, 8 if large else 3 if dp == p.pp == 1 else 4)


def assert_equals_one_process(ranks, world: int, base: dict, change: dict, *layout: dict, run=train_steps) -> None:
    size = size_for(world, config(base, *layout).parallel)
    figures, gradients = twin(base, size, change)
    cfg = config(base, size, change, *layout)
    rules.check(cfg, world)
    results = ranks(world, run, cfg, timeout=600)
    assert_same_training(results, figures, gradients, TOLERANCE)


def axes(text: str) -> dict:
    """ "tp=2 cp=4 cp_style=ulysses" -> the parallel section."""
    pairs = (item.split("=") for item in text.split())
    words = {"on": True, "off": False}
    return {"parallel": {name: int(value) if value.isdigit() else words.get(value, value) for name, value in pairs}}


# world, axes: every axis alone, every pair, three and four at once. dp is what is left.
# fmt: off
LAYOUTS = [
    (2, "tp=2"), (4, "tp=4"), (2, "tp=2 sequence_parallel=off"), (4, "tp=4 overlap_tp=off"),
    (2, "pp=2"), (4, "pp=4"), (2, "pp=2 vp=2"), (4, "pp=4 vp=2"), (2, "pp=2 vp=4"),
    (2, "cp=2"), (4, "cp=4"), (2, "cp=2 cp_style=allgather"), (4, "cp=4 cp_style=allgather"),
    (2, "cp=2 cp_style=ulysses"), (4, "cp=4 cp_style=ulysses"),
    (2, ""), (8, ""), (4, "overlap_grads=off"),
    (4, "tp=2 pp=2"), (8, "tp=2 pp=4"), (4, "tp=2 cp=2"), (8, "tp=2 cp=4 cp_style=allgather"),
    (4, "tp=2 cp=2 cp_style=ulysses"), (4, "tp=2"), (8, "tp=4 sequence_parallel=off"),
    (4, "pp=2 cp=2"), (4, "pp=2"), (8, "pp=4"), (4, "cp=2"), (8, "cp=4 cp_style=ulysses"), (8, "pp=2 vp=4"),
    (8, "tp=2 pp=2 cp=2"), (8, "tp=2 pp=2"), (8, "tp=2 cp=2"), (8, "pp=2 cp=2 vp=2"),
    (8, "tp=2 pp=2 vp=4 cp=2 cp_style=allgather"), (8, "tp=2 pp=2 vp=2 cp=2"), (8, "tp=2 pp=2 cp=2 cp_style=ulysses"),
    (8, "tp=2 pp=2 vp=2 sequence_parallel=off overlap_grads=off"), (8, "tp=2 pp=2 vp=2 overlap_tp=off"),
]
# fmt: on
NONE: dict = {}
DOCUMENTS = {"data": {"separate_documents": True}}
DROPOUT = {"model": {"hidden_dropout": 0.2}}
ATTENTION_DROPOUT = {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.2}}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world,layout", LAYOUTS)
def test_llama(ranks, world, layout):
    assert_equals_one_process(ranks, world, LLAMA, NONE, axes(layout))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world,layout",
    [
        (2, "tp=2"),
        (2, "tp=2 sequence_parallel=off"),
        (2, "pp=2"),
        (2, "pp=2 vp=4"),
        (2, "cp=2"),
        (2, ""),
        (4, "pp=4 vp=2"),
        (8, "tp=2 pp=2 vp=2 cp=2"),
        (8, "tp=2 pp=2 cp=2 cp_style=ulysses"),
        (8, "tp=2 cp=2 cp_style=allgather"),
        (8, "pp=4"),
        (8, "pp=2 vp=2 sequence_parallel=off tp=2"),
    ],
)
def test_gpt_with_tied_embeddings(ranks, world, layout):
    assert_equals_one_process(ranks, world, GPT3, NONE, axes(layout))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world,layout",
    [
        (2, "tp=2 sequence_parallel=off"),
        (2, "tp=2"),
        (2, "pp=2"),
        (8, "tp=2 pp=2 cp=2"),
        (2, "cp=2"),
        (2, "cp=2 cp_style=allgather"),
        (4, "cp=2 cp_style=ulysses tp=2 sequence_parallel=off"),
        (2, ""),
        (4, "tp=4 sequence_parallel=off overlap_grads=off"),
        (4, "pp=2 vp=2 tp=2"),
        (8, "pp=4 tp=2 sequence_parallel=off"),
    ],
)
def test_heads_as_qwen_has_them(ranks, world, layout):
    """A rank has some of the heads, so what it adds up for a norm's weight, which all heads share, is a part."""
    assert_equals_one_process(ranks, world, QWEN, NONE, axes(layout))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world,layout",
    [
        (1, ""),
        (2, "cp=2"),
        (4, "cp=4"),
        (2, "cp=2 cp_style=allgather"),
        (2, "cp=2 cp_style=ulysses"),
        (4, "tp=2 pp=2"),
        (4, "cp=4 cp_style=ulysses"),
        (4, "cp=4 cp_style=allgather"),
        (8, "tp=2 pp=2 vp=2 cp=2"),
        (8, "tp=2 cp=2 cp_style=ulysses"),
    ],
)
def test_documents_kept_apart(ranks, world, layout):
    assert_equals_one_process(ranks, world, LLAMA, DOCUMENTS, axes(layout))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "world,layout",
    [
        (2, ""),
        (2, "tp=2"),
        (2, "tp=2 sequence_parallel=off"),
        (2, "pp=2 vp=2"),
        (2, "cp=2"),
        (2, "cp=2 cp_style=ulysses"),
        (8, "tp=2 pp=2 vp=2 cp=2"),
        (8, "tp=2 pp=2"),
        (8, "tp=2 cp=2 cp_style=allgather"),
    ],
)
@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_dropout(ranks, base, world, layout):
    assert_equals_one_process(ranks, world, base, DROPOUT, axes(layout))


@pytest.mark.sampled(3, "none-2-tp=2")
@pytest.mark.parametrize(
    "world,layout", [(2, ""), (4, "tp=4 sequence_parallel=off"), (2, "tp=2"), (4, "tp=2 pp=2 vp=2")]
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_attention_dropout(ranks, world, layout, recompute):
    assert_equals_one_process(ranks, world, GPT3, ATTENTION_DROPOUT, axes(layout), {"train": {"recompute": recompute}})


@pytest.mark.parametrize("layout", ["tp=2", "tp=4 sequence_parallel=off"])
def test_attention_dropout_with_grouped_queries(ranks, layout):
    """Each query head has its own mask, also where a group of them shares one key head."""
    assert_equals_one_process(ranks, 4, LLAMA, ATTENTION_DROPOUT, axes(layout))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "world,layout",
    [
        (1, ""),
        (2, "tp=2"),
        (2, "tp=2 sequence_parallel=off"),
        (2, "cp=2"),
        (2, "pp=2 vp=2"),
        (8, "tp=2 pp=2 vp=2 cp=2"),
    ],
)
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_recomputation_changes_nothing(ranks, base, world, layout, recompute):
    assert_equals_one_process(ranks, world, base, DROPOUT, axes(layout), {"train": {"recompute": recompute}})


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "world,layout,recompute",
    [
        (2, "pp=2", "none"),
        (4, "pp=4", "selective"),
        (4, "tp=2 pp=2", "none"),
        (4, "tp=2 pp=2 sequence_parallel=off overlap_tp=off", "full"),
        (4, "pp=2 cp=2", "none"),
        (8, "pp=4", "none"),
        (8, "tp=2 pp=2 overlap_grads=off", "selective"),
    ],
)
@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_weight_gradients_apart(ranks, base, world, layout, recompute):
    """More of it, bit by bit against 1F1B, is in tests/pipeline/test_weight_queue.py."""
    layout = axes(f"{layout} schedule=zb-h1")
    assert_equals_one_process(ranks, world, base, DROPOUT, layout, {"train": {"recompute": recompute}})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world,layout,counts",
    [
        (2, "pp=2", [5, 3]),
        (8, "tp=2 pp=2 vp=2", [3, 1, 1, 3]),
        (2, "pp=2 vp=2", [1, 3, 2, 2]),
        (4, "pp=4", [1, 2, 4, 1]),
        (2, "pp=2 schedule=zb-h1", [5, 3]),
    ],
)
def test_uneven_stages(ranks, world, layout, counts):
    assert_equals_one_process(ranks, world, GPT3, NONE, axes(layout), {"parallel": {"layers_per_stage": counts}})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world,layout,micro",
    [
        (2, "pp=2", 2),
        (4, "pp=4 vp=2", 2),
        (4, "pp=4 vp=2", 4),
        (4, "pp=4 schedule=zb-h1", 4),
        (2, "tp=2", 8),
        (4, "cp=2", 4),
        (8, "tp=2 pp=2 cp=2", 2),
    ],
)
def test_micro_batch_size_changes_nothing(ranks, world, layout, micro):
    """Also fewer microbatches than stages, and a number that is not a multiple of the stages."""
    change = {**DOCUMENTS, "train": {"global_batch_size": 8}}
    assert_equals_one_process(ranks, world, LLAMA, change, axes(layout), {"train": {"micro_batch_size": micro}})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world,layout", [(3, "pp=3 vp=2"), (3, "pp=3"), (3, "pp=3 schedule=zb-h1"), (6, "pp=3 vp=2 tp=2"), (4, "pp=4 vp=2")]
)
def test_microbatches_that_are_no_multiple_of_the_stages(ranks, world, layout):
    assert_equals_one_process(ranks, world, LLAMA, {"train": {"global_batch_size": 7}}, axes(layout))


TIED = {"model": {"tie_embeddings": True}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world,layout,recompute,micro",
    [
        (4, "cp=2 cp_style=allgather", "full", 2),
        (8, "tp=2 pp=2 vp=2 cp=2", "full", 1),
        (4, "tp=2 pp=2", "selective", 1),
        (4, "tp=2 cp=2 cp_style=ulysses", "selective", 2),
    ],
)
def test_documents_dropout_and_recomputation_together(ranks, world, layout, recompute, micro):
    change = {**DOCUMENTS, **DROPOUT, "train": {"global_batch_size": 4}}
    more = {"train": {"recompute": recompute, "micro_batch_size": micro}}
    assert_equals_one_process(ranks, world, GPT3, change, axes(layout), more)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world,layout", [(2, "pp=2"), (2, "tp=2"), (8, "tp=2 pp=2 vp=2"), (4, "pp=2 cp=2 sequence_parallel=off")]
)
def test_llama_with_tied_embeddings(ranks, world, layout):
    assert_equals_one_process(ranks, world, LLAMA, TIED, axes(layout))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "base,world,layout",
    [
        (GPT3, 2, "tp=2"),
        (LLAMA, 2, "tp=2 sequence_parallel=off"),
        (LLAMA, 2, "cp=2"),
        (LLAMA, 4, "tp=2 pp=2 schedule=zb-h1"),
        (GPT3, 1, "pp=1"),
        (GPT3, 2, "pp=2 schedule=zb-h1"),
        (GPT3, 4, "pp=2 vp=2"),
        (LLAMA, 8, "tp=2 pp=2 vp=2 cp=2"),
        (LLAMA, 2, "overlap_grads=off"),
    ],
)
def test_a_head_in_pieces(ranks, base, world, layout):
    """Of 12 tokens, which leave a smaller piece at the end."""
    assert_equals_one_process(ranks, world, base, NONE, axes(layout), {"model": {"head_piece": 12}})


def train_with_small_buckets(cfg):
    """Many buckets instead of one of each kind."""
    original = Gradients.__init__

    def small(self, *args, **kwargs):
        original(self, *args, **kwargs, bucket_bytes=4096)
        assert len(self.buckets) > 8

    Gradients.__init__ = small
    try:
        return train_steps(cfg)
    finally:
        Gradients.__init__ = original


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world,layout", [(2, ""), (8, "tp=2 pp=2 vp=2"), (4, "cp=2 overlap_grads=off"), (4, "pp=2 schedule=zb-h1")]
)
def test_many_buckets(ranks, world, layout):
    assert_equals_one_process(ranks, world, GPT3, NONE, axes(layout), run=train_with_small_buckets)


HALF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


EIGHT = pytest.param(8, "tp=2 pp=2 vp=2 cp=2", marks=pytest.mark.slow)  # in float32 it is in the ordinary run


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world,layout", [(1, "pp=1"), (2, "tp=2"), (2, "cp=2"), (4, "pp=2 vp=2"), EIGHT])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_half_precision_is_as_near_to_float32_in_every_layout(ranks, base, world, layout, dtype):
    """The distance to the float32 gradients is at most 1.5 times that of one process in the same format: chance."""
    half = {"precision": {"dtype": dtype}}
    size = size_for(world, config(base, axes(layout)).parallel)
    (_, exact), (_, single) = twin(base, size, NONE), twin(base, size, half)
    allowed = mean_error({name: (grad, None) for name, grad in single.items()}, exact)
    assert HALF[dtype] < allowed < 0.1, "the comparison would prove nothing"
    for _, parts in ranks(world, train_steps, config(base, size, half, axes(layout)), timeout=600):
        assert mean_error(parts, exact) <= 1.5 * allowed


def mean_error(parts: dict, whole: dict) -> float:
    """The relative errors of a rank's gradients, averaged over its parameters."""
    errors = []
    for name, (grad, how) in parts.items():
        expected = part_of(whole[name], how)
        errors.append(float((grad - expected).norm() / expected.norm()))
    return sum(errors) / len(errors)


@pytest.mark.sampled(3, "gpt-2-tp=2")
@pytest.mark.parametrize("world,layout", [(1, "pp=1"), (2, ""), (2, "tp=2"), (4, "pp=2 vp=2"), EIGHT])
@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_gradients_in_bf16_are_off_by_the_rounding_of_their_sums_in_every_layout(ranks, base, world, layout):
    """Of a model in float32, which no run has, so that nothing else is rounded: against one process' float32 sums.

    A sum is rounded after each microbatch, and sums over ranks are float32: up to four samples on one rank or several,
    and two uses of a tied weight, so at most eight times. Each rounds by 2^-9 at most, 2^-10 on average, of a sum that
    may be somewhat larger than the last one: 6 * 2^-8 is allowed. Losses follow within 1e-3.
    """
    grads = {"optimizer": {"grad_dtype": "bf16"}}
    size = size_for(world, config(base, axes(layout)).parallel)
    figures, exact = twin(base, size, NONE)
    for steps, parts in ranks(world, train_steps, config(base, size, grads, axes(layout)), timeout=600):
        for name, (grad, how) in parts.items():
            assert grad.dtype == torch.float32 or layout in ("pp=1", "tp=2")  # with one data rank
            expected = part_of(exact[name], how)
            assert_close_rel(grad.float(), expected, 6 * 2.0**-8, name)
        assert (
            2.0**-11 < mean_error({name: (grad.float(), how) for name, (grad, how) in parts.items()}, exact) < 2.0**-8
        )
        assert steps[0]["loss"] == pytest.approx(figures[0]["loss"], rel=TOLERANCE)
        assert steps[0]["grad_norm"] == pytest.approx(figures[0]["grad_norm"], rel=2.0**-9)
        assert [s["loss"] for s in steps] == pytest.approx([f["loss"] for f in figures], rel=1e-3)


def test_the_gradients_of_a_head_in_pieces_are_scaled_before_they_are_rounded():
    """In fp16 they are those of the whole head: as one process rounds them, whose products have other sizes."""
    half = {"precision": {"dtype": "fp16"}}
    _, whole = twin(LLAMA, SMALL, half)
    _, parts = train_steps(config(LLAMA, SMALL, half, {"model": {"head_piece": 12}}))
    for name, (grad, _) in parts.items():
        assert_close_rel(grad, whole[name], 2 * HALF["fp16"], name)


@pytest.mark.parametrize("world,layout", [(1, "pp=1"), (4, "tp=2 pp=2")])
def test_fp16_overflow_skips_the_step_and_lowers_the_scale(ranks, world, layout):
    """A scale that overflows halves until a step goes through; until then nothing is updated."""
    overflowing = {
        "precision": {"dtype": "fp16", "loss_scale": 2.0**24, "loss_scale_hysteresis": 1},
        "train": {"steps": 12},
    }
    figures = ranks(world, train_steps, config(LLAMA, size(2, 2), axes(layout), overflowing))[0][0][:-1]
    skipped = [f["skipped"] for f in figures]
    first = skipped.index(0)
    assert first >= 2 and sum(skipped) < 10
    assert [f["loss_scale"] for f in figures] == [2.0 ** (24 - sum(skipped[: i + 1])) for i in range(12)]
    untrained, _ = twin(LLAMA, size(2, 2), {"optimizer": {"lr": 0.0}, "train": {"steps": 12}})
    losses = [(f["loss"], u["loss"]) for f, u in zip(figures, untrained)]
    for mine, expected in losses[: first + 1]:
        assert mine == pytest.approx(expected, rel=2e-3)  # fp16 against float32
    assert losses[-1][0] < losses[-1][1] - 0.01, "the later steps do train"
