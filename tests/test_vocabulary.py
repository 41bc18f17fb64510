"""Padding of the vocabulary is no part of the model: a padded model trains as transformers' unpadded one does.

1,003 tokens are padded to 1,024 or 2,048 rows, so that on tp ranks the boundary lies inside a rank's columns, between
two ranks, or leaves ranks without a single token.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F

from layouts import GPT3, LLAMA, adapters_that_do_something, config, dataset_of, first_gradients, mesh_of, part_of
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.data.loader import Loader
from minitron.interop import hf
from minitron.parallel.vocab import vocab_parallel_cross_entropy
from minitron.testing import assert_close_rel
from minitron.train import build
from test_checkpoint import contents, save, saving, start_trainer, train
from test_invariance import axes
from test_lora import ALL, lora
from test_model import model_of, twin_of

SIZES = {
    "model": {"num_layers": 2, "vocab_size": 1003, "vocab_multiple": 1},
    "train": {"global_batch_size": 2, "steps": 3},
}
TIED = {"model": {"tie_embeddings": True}}
VOCABULARY = ("embedding.words.weight", "head.weight")
# float32: sums in another order, of gradients through two layers; and AdamW divides small gradients by their size.
LOSS, GRADIENT, CHANGE = 1e-6, 3e-6, 2e-4
HALF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def padded_to(multiple: int) -> dict:
    return {"model": {"vocab_multiple": multiple}}


# ---- the loss alone -------------------------------------------------------------------------------------------------


def loss_and_gradient(num_tokens: int, columns: int, mean: float):
    """Of this rank's `columns` columns, where every padding column has a logit that no sum survives."""
    mesh = Mesh.create(tp=torch.distributed.get_world_size())
    whole, labels, dloss = logits_of(num_tokens, mean)
    whole = F.pad(whole, (0, columns * mesh.tp.size - num_tokens), value=float("inf"))
    logits = whole.chunk(mesh.tp.size, -1)[mesh.tp.rank].clone().requires_grad_()
    here = min(max(num_tokens - mesh.tp.rank * columns, 0), columns)
    loss = vocab_parallel_cross_entropy(logits * 1, labels, mesh.tp, num_ids=here)
    loss.backward(dloss)
    return loss.detach(), logits.grad


def logits_of(num_tokens: int, mean: float):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, num_tokens, (8, 3), generator=generator)
    labels[0] = num_tokens - 1
    logits = mean + 5 * torch.randn(8, 3, num_tokens, generator=generator)
    return logits, labels, torch.randn(8, 3, generator=generator)


@pytest.mark.parametrize(
    "world, num_tokens, columns", [(1, 13, 16), (2, 13, 8), (2, 8, 8), (4, 13, 8), (4, 16, 16), (4, 1, 8)]
)
@pytest.mark.parametrize("mean, tolerance", [(0.0, LOSS), (-200.0, 3e-5)])  # rounded to 2^-17 are numbers about 200
def test_padding_columns_count_for_nothing_and_get_a_gradient_of_zero(
    ranks, world, num_tokens, columns, mean, tolerance
):
    """Also beside logits far below zero: the maximum of a rank that has nothing else is below any of them."""
    whole, labels, dloss = logits_of(num_tokens, mean)
    whole.requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    expected.backward(dloss)
    results = ranks(world, loss_and_gradient, num_tokens, columns, mean)
    for loss, _ in results:
        assert_close_rel(loss, expected, tolerance, "loss")
    gradient = torch.cat([grad for _, grad in results], -1)
    assert_close_rel(gradient[..., :num_tokens], whole.grad, tolerance, "gradient of the logits")
    assert not gradient[..., num_tokens:].any()


# ---- training -------------------------------------------------------------------------------------------------------


def train_steps(cfg: Config):
    """Figures of each step and of an evaluation, the first gradients, and how all steps changed the weights."""
    torch.set_num_threads(1)
    with adapters_that_do_something():
        trainer = build(cfg, mesh_of(cfg))
    gradients, batch = first_gradients(trainer), cfg.train.global_batch_size
    params = {p.spec.name: p.detach() for chunk in trainer.chunks for p in chunk.parameters()}
    before = {name: p.clone() for name, p in params.items()}
    figures, loader = train(trainer, 0, cfg.train.steps), Loader(dataset_of(cfg), cfg, trainer.mesh)
    loss, count = trainer.evaluate(loader.step(cfg.train.steps * batch, 0)).tolist()
    loader.close()
    changes = {name: params[name] - before[name] for name in gradients}
    return [*figures, {"loss": loss / count}], gradients, changes


@lru_cache
def transformers_steps(family: str, tied: bool):
    """The same of transformers' model under torch's AdamW and clipping, all tensors whole and under our names."""
    cfg = config({"llama": LLAMA, "gpt": GPT3}[family], SIZES, {"model": {"tie_embeddings": tied}})
    o, t, m = cfg.optimizer, cfg.train, cfg.model
    twin = twin_of(cfg, model_of(cfg, std=0.0))
    params = dict(twin.named_parameters())
    before = {name: p.detach().clone() for name, p in params.items()}
    groups = [
        {"params": [p for p in params.values() if (p.dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, o.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
    loader, figures, gradients = Loader(dataset_of(cfg), cfg, Mesh.offline(1)), [], {}

    def mean_loss(step):
        batches = loader.step(step * t.global_batch_size, step)
        tokens, labels = (torch.cat([getattr(b, name) for b in batches], 1).T for name in ("tokens", "labels"))
        return F.cross_entropy(twin(tokens).logits.flatten(0, 1), labels.flatten())

    def ours(tensors):
        return {
            name: torch.cat([tensors[p.name].T if p.across else tensors[p.name] for p in parts])
            for name, parts in hf.tensor_map(m).items()
        }

    for step in range(t.steps):
        adamw.zero_grad()
        loss = mean_loss(step)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in params.items()}
        gradients = gradients or {name: grad * t.global_batch_size * t.seq_len for name, grad in ours(grads).items()}
        norm = torch.nn.utils.clip_grad_norm_(params.values(), o.clip_grad)
        adamw.step()
        figures.append({"loss": loss.item(), "grad_norm": norm.item()})
    figures.append({"loss": mean_loss(t.steps).item()})
    loader.close()
    return figures, gradients, ours({name: p.detach() - before[name] for name, p in params.items()})


def assert_equals_unpadded(cfg: Config, results: list, twin: tuple, tolerances: tuple[float, float, float]) -> None:
    """Every rank's figures, gradients and changes are its part of the twin's; gradients of padding rows are 0."""
    (figures, gradients, changes), (loss, gradient, change) = twin, tolerances
    rows = cfg.model.padded_vocab_size
    assert rows > cfg.model.vocab_size
    for rank, (steps, parts, after) in enumerate(results):
        for step, (mine, expected) in enumerate(zip(steps, figures, strict=True)):
            for key in expected:
                assert mine[key] == pytest.approx(expected[key], rel=loss), f"{key} of step {step} on rank {rank}"
        for name, (grad, how) in parts.items():
            whole, change_of_whole, real = gradients[name], changes[name], slice(None)
            if name in VOCABULARY:
                fill = 0, 0, 0, rows - cfg.model.vocab_size
                whole, change_of_whole = F.pad(whole, fill), F.pad(change_of_whole, fill)
                real = part_of(torch.arange(rows) < cfg.model.vocab_size, how)
                assert not grad[~real].any(), f"gradient of {name}'s padding on rank {rank}"
            assert_close_rel(grad, part_of(whole, how), gradient, f"gradient of {name} on rank {rank}")
            expected = part_of(change_of_whole, how)[real]
            assert_close_rel(after[name][real], expected, change, f"change of {name} on rank {rank}")
    assert {name for _, parts, _ in results for name in parts} == gradients.keys()


LAYOUTS = [
    (1, "", 128),  # 1,003 tokens and 21 of padding
    (2, "tp=2", 1024),  # 512 | 491 and 21
    (2, "tp=2 sequence_parallel=off", 2048),  # 1,003 and 21 | 1,024 of padding
    (4, "tp=4", 2048),  # 512 | 491 and 21 | 512 of padding | 512 of padding
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world, layout, multiple", [*LAYOUTS, (4, "tp=2 pp=2", 2048), (2, "cp=2", 1024)])
@pytest.mark.parametrize("family, tied", [("llama", False), ("llama", True), ("gpt", True)])
def test_a_padded_model_trains_as_transformers_does(ranks, family, tied, world, layout, multiple):
    cfg = config(
        {"llama": LLAMA, "gpt": GPT3}[family],
        SIZES,
        {"model": {"tie_embeddings": tied}},
        padded_to(multiple),
        axes(layout),
    )
    twin = transformers_steps(family, tied)
    assert any(f["grad_norm"] > 1 for f in twin[0][:-1]), "some steps clip"
    assert_equals_unpadded(cfg, ranks(world, train_steps, cfg), twin, (LOSS, GRADIENT, CHANGE))


ADAPTERS = lora(*ALL) | {"data": {"separate_documents": True}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "change",
    [{}, ADAPTERS, {"precision": {"dtype": "bf16"}}, {"precision": {"dtype": "fp16"}}],
    ids=["all weights", "adapters", "bf16", "fp16"],
)
@pytest.mark.parametrize("world, layout, multiple", LAYOUTS)
def test_a_padded_model_trains_as_an_unpadded_one(ranks, change, world, layout, multiple):
    samples = {"train": {"global_batch_size": 4}} if "precision" in change else {}  # over which roundings average out
    cfg = config(LLAMA, change, SIZES, samples, padded_to(multiple), axes(layout))
    ((figures, gradients, changes),) = ranks(1, train_steps, config(LLAMA, change, SIZES, samples))
    assert ("head.weight" in gradients) == (change is not ADAPTERS)
    tolerances = LOSS, GRADIENT, CHANGE
    if cfg.precision.dtype in HALF:  # partial sums are rounded, and that step by step
        tolerances = tuple(factor * HALF[cfg.precision.dtype] for factor in (1, 8, 100))
    twin = figures, {name: grad for name, (grad, _) in gradients.items()}, changes
    assert_equals_unpadded(cfg, ranks(world, train_steps, cfg), twin, tolerances)


def test_padding_rows_only_decay(ranks):
    """Without a gradient AdamW leaves them to weight decay. 1e-3: float32 weights whose changes are 3e-4 of them."""
    cfg = config(LLAMA, SIZES, padded_to(1024), axes("tp=2"))
    o, before = cfg.optimizer, model_of(cfg, std=0.0).state_dict()
    changes = ranks(2, train_steps, cfg)[1][2]  # rank 1: 491 tokens
    for name in VOCABULARY:
        expected = before[name][1003:] * ((1 - o.lr * o.weight_decay) ** cfg.train.steps - 1)
        assert_close_rel(changes[name][491:], expected, 1e-3, name)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def save_as_before(cfg: Config) -> dict:
    """A run of two steps whose loss counts the padding, as versions of minitron did, and its checkpoint."""
    trainer, _ = start_trainer(cfg)
    head = trainer.chunks[0].head
    head.loss = dataclasses.replace(head.loss, num_ids=None)
    train(trainer, 0, 2)
    save(trainer, cfg, 2)
    (chunk,) = trainer.chunks
    return {p.spec.name: p.detach() for p in chunk.parameters()}


def go_on(cfg: Config) -> list[dict]:
    trainer, start = start_trainer(cfg)
    assert start.resume and start.step == 2
    again = saving(cfg, f"{cfg.checkpoint.dir}/again")
    save(trainer, again, 2)
    return train(trainer, 2, 3)


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "tied gpt"])
def test_a_checkpoint_whose_padding_was_trained_goes_on_without_it(ranks, tmp_path, base):
    cfg = saving(config(base, SIZES, padded_to(1024)), tmp_path)
    (params,) = ranks(1, save_as_before, cfg)
    name, model = VOCABULARY[base is LLAMA], model_of(cfg, std=0.0)
    untrained = model.state_dict()[name][1003:].clone()
    decay = 2 * cfg.optimizer.lr * cfg.optimizer.weight_decay
    assert (params[name][1003:] - untrained).norm() > 10 * decay * untrained.norm(), "the padding had a gradient"

    with torch.no_grad():
        for p in model.parameters():
            p.copy_(params[p.spec.name])
    twin, loader = twin_of(cfg, model), Loader(dataset_of(cfg), cfg, Mesh.offline(1))
    batches = loader.step(2 * cfg.train.global_batch_size, 0)
    loader.close()
    tokens, labels = (torch.cat([getattr(b, name) for b in batches], 1).T for name in ("tokens", "labels"))
    loss = F.cross_entropy(twin(tokens).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)

    resumed = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, tp=2))
    for (figures,) in ranks(2, go_on, resumed):
        assert figures["loss"] == pytest.approx(loss.item(), rel=LOSS)
        assert figures["grad_norm"] == pytest.approx(norm.item(), rel=LOSS)
    before, again = contents(tmp_path), contents(tmp_path / "again")
    assert before.keys() == again.keys()
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, again[key]), f"{key}: the padding stays in the files"
