"""Mistakes that other trainers made, as tests of this one: layouts that train, but another model.

A report to Megatron-LM of September 2026 lists layouts that train silently wrong there, and two repairs belong to
it. What concerns parts that minitron has is tested here by name, or already elsewhere:

- a parameter that all heads share (a norm of each head's output) lacks the sum over tensor-parallel ranks unless
  sequence parallelism is on: `tests/model/test_worked_examples.py` trains such a norm with and without it.

What minitron does not have: experts (a padding mask gathered over the wrong ranks, counts of tokens for a balancing
loss), prediction of several tokens (its loss divided by local counts), attention sinks (but see the norm below),
gated delta nets, and recipes that set the above.
"""

import math

import pytest

import layouts
from layouts import GPT3, LLAMA, config, train_steps
from minitron.data.gpt import Sample
from test_invariance import SMALL, TOLERANCE, assert_equals_one_process, axes, twin


class FewAnswers:
    """Samples of which few labels count: one, near the start or the end; in every third sample none."""

    def __init__(self, dataset):
        self.dataset, self.fingerprint = dataset, dataset.fingerprint

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        sample = self.dataset[i]
        mask = sample.tokens[1:] * 0.0
        if i % 3:
            mask[1 if i % 2 else -2] = 1
        return Sample(sample.tokens, sample.starts, mask.astype("float32"))


def train_on_few_answers(cfg):
    original = layouts.dataset_of
    layouts.dataset_of = lambda cfg: FewAnswers(original(cfg))
    try:
        return train_steps(cfg)
    finally:
        layouts.dataset_of = original


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world,layout",
    [(2, "cp=2"), (2, "cp=2 cp_style=allgather"), (2, "cp=2 cp_style=ulysses"), (4, "cp=4"), (2, ""), (4, "cp=2 pp=2")],
)
def test_the_loss_is_divided_by_the_tokens_of_all_ranks(ranks, monkeypatch, world, layout):
    """There the loss of a microbatch was divided by the counted tokens of one context-parallel rank.

    The ranks' gradients were averaged after that. If one rank has the only token that counts, the gradient is 1 / cp
    of what it should be; if the ranks have unequal numbers, tokens weigh unequally. The same goes for data-parallel
    ranks, for microbatches, and for the loss of an evaluation.
    """
    monkeypatch.setattr("test_invariance.train_steps", train_on_few_answers)
    few = {"data": {"source": "mock"}, "train": {"eval_steps": 3}}  # a twin of its own: its name has the changes
    assert_equals_one_process(ranks, world, LLAMA, few, axes(layout), run=train_on_few_answers)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
@pytest.mark.parametrize("world,layout", [(2, "pp=2"), (4, "tp=2 pp=2 vp=2"), (2, "tp=2"), (4, "tp=2")])
def test_the_norm_counts_every_weight_once(ranks, base, world, layout):
    """There the norm of gradients, by which they are clipped, had a weight twice or only in part.

    A tied embedding has a copy on the first pipeline stage and one on the last: both were counted. Where a vector is
    split over tensor-parallel ranks by heads and nothing says so, it passes for a replica, and the norm has the part of
    the first rank alone. Here the expected norm is added up by hand, from the whole gradients.
    """
    tied = {"model": {"tie_embeddings": True}}
    figures, gradients = twin(base, SMALL, tied)
    tokens = SMALL["train"]["global_batch_size"] * base["train"]["seq_len"]
    squares = {name: float(gradient.double().square().sum()) for name, gradient in gradients.items()}
    norm = math.sqrt(sum(squares.values())) / tokens
    assert figures[0]["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
    # a weight too many or too few would show
    assert sum(square > 1e-3 * sum(squares.values()) for square in squares.values()) > 3
    for steps, _ in ranks(world, train_steps, config(base, SMALL, tied, axes(layout)), timeout=600):
        assert steps[0]["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)


def loss_of_equal_logits(tp):
    """The loss where every logit is 0, by the layers of one of tp ranks. Without padding it is log(vocabulary)."""
    cfg = config(LLAMA, SMALL, {"model": {"init_std": 1e-9}}, {"parallel": {"tp": tp}, "train": {"steps": 1}})
    return train_steps(cfg)[0][0]["loss"]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_loss_takes_each_logit_from_one_rank(ranks, tp):
    """There a head could gather its logits, and the loss took each rank's copy for a part of the vocabulary.

    The loss is log(tp) too large then, and its gradient is wrong. Here 90 ids are padded to 96 for tp ranks.
    """
    for loss in ranks(tp, loss_of_equal_logits, tp):
        assert loss == pytest.approx(math.log(LLAMA["model"]["vocab_size"]), rel=1e-6)
