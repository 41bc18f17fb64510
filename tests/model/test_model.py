"""Logits and losses equal Hugging Face transformers' Llama and GPT-2 on the same weights."""

import dataclasses
import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from layouts import GPT3, LLAMA, QWEN, config, train_steps, whole_model
from minitron.comm.mesh import Axis, Mesh
from minitron.config.schema import RopeScaling
from minitron.data.batch import Batch
from minitron.interop import hf_write as hf_export
from minitron.kernels import plain
from minitron.kernels.kernels import choose
from minitron.kernels.param import Shard
from minitron.kernels.rng import AttentionDropout, dropout, token_counters
from minitron.model.gpt import GPT
from minitron.model.init import initialise
from minitron.model.layers import Norm, rope_frequencies, rope_tables, split_heads
from minitron.parallel.layer_context import LayerContext, make_layer_context
from minitron.parallel.overlap import ProcessGroupComm
from minitron.parallel.tiles import as_documents
from minitron.testing import assert_close_rel
from test_invariance import assert_equals_one_process, axes

# Both compute in float32; sums run in another order through eight layers.
TOLERANCE = 1e-5


def model_of(cfg, std=0.1) -> GPT:
    """The model in one piece, every vector given values too, so that no weight or bias could be exchanged unnoticed."""
    model = whole_model(cfg, Mesh.offline(1))
    initialise([model], cfg.train.seed)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=generator) * std)
    return model


def batch_of(cfg, b=3) -> Batch:
    s = cfg.train.seq_len
    tokens = torch.randint(0, cfg.model.vocab_size, (s + 1, b), generator=torch.Generator().manual_seed(1))
    order = torch.arange(s)
    return Batch(tokens[:-1], tokens[1:], torch.ones(s, b), order[:, None], order, torch.arange(b), count=float(s * b))


def twin_of(cfg, model: GPT):
    """transformers' model of the same weights, by the map that exports them."""
    settings = hf_export.settings_of(cfg.model, "fp32")
    twin = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**settings), attn_implementation="eager"
    )
    params = {p.spec.name: p.detach() for p in model.parameters()}

    def read(name, start, shape):
        return params[name][tuple(slice(first, first + n) for first, n in zip(start, shape, strict=True))]

    missing, unexpected = twin.load_state_dict(dict(hf_export.export(cfg.model, read)), strict=False)
    assert not unexpected and missing == ["lm_head.weight"] * cfg.model.tie_embeddings
    return twin.eval()


SCALED = {"model": {"rope_scaling": RopeScaling(factor=8.0, original_max_positions=16)}}


@pytest.mark.parametrize(
    "base,change",
    [
        (LLAMA, {}),
        (LLAMA, SCALED),
        (LLAMA, {"model": {"tie_embeddings": True}}),
        (LLAMA, {"model": {"num_kv_heads": None}}),
        (QWEN, {"model": {"qk_norm": False, "tie_embeddings": True}}),
        (QWEN, {"model": {"qkv_bias": False}}),
        (QWEN, {"model": {"qkv_bias": False, "qk_norm": False, "hidden_size": 30}}),
        (GPT3, {}),
        (GPT3, {"model": {"tie_embeddings": False}}),
    ],
    ids=["llama3", "llama3.1", "llama-tied", "llama2", "qwen2", "qwen3", "mistral", "gpt", "gpt-untied"],
)
def test_logits_and_loss_equal_transformers(base, change):
    cfg = config(base, change, {"model": {"vocab_multiple": 1}})  # padding is minitron's alone
    model, batch = model_of(cfg), batch_of(cfg)
    twin = twin_of(cfg, model)
    with torch.no_grad():
        expected = twin(batch.tokens.T).logits.transpose(0, 1)
        assert_close_rel(model.logits(batch), expected, TOLERANCE, "logits")
        loss = F.cross_entropy(expected.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        assert float(model(batch)) == pytest.approx(float(loss), rel=TOLERANCE)


class Masked(torch.nn.Module):
    """In place of a dropout of transformers': the mask that minitron's random words give these names."""

    def __init__(self, p, keys, layer, site):
        super().__init__()
        self.p, self.keys, self.place = p, keys, (layer, site)

    def forward(self, x):  # [b, s, h]
        return dropout(x.transpose(0, 1), self.p, self.keys, *self.place).transpose(0, 1)


def test_dropout_is_where_transformers_has_it_with_a_mask_of_its_own_each(monkeypatch):
    """After the embedding, of the probabilities, and of what attention and MLP add, their biases included."""
    p = dict(hidden_dropout=0.3, attention_dropout=0.2)
    change = {**p, "num_layers": 3, "vocab_multiple": 1, "attention": "reference"}
    cfg = config(GPT3, {"model": change, "train": {"seed": 5}})
    model, batch = model_of(cfg).train(), batch_of(cfg)
    batch.step = 7
    keys = token_counters(cfg.train.seed, batch.step, batch.samples, batch.order)
    twin = twin_of(cfg, model).transformer
    twin.drop = Masked(0.3, keys, 0, 0)
    for i, block in enumerate(twin.h):
        block.attn.resid_dropout, block.mlp.dropout = Masked(0.3, keys, i, 1), Masked(0.3, keys, i, 2)
    layers, heads = itertools.count(), cfg.model.num_heads
    with torch.no_grad(), monkeypatch.context() as patch:  # of the probabilities, the one that is no module
        patch.setattr(F, "dropout", lambda x, **_: x * AttentionDropout(0.2, keys, next(layers), 0).mask(heads))
        expected = twin(batch.tokens.T).last_hidden_state @ twin.wte.weight.T
        assert_close_rel(model.logits(batch), expected.transpose(0, 1), TOLERANCE, "logits")
    assert next(layers) == cfg.model.num_layers


def test_rope_scaling_defaults_are_metas():
    """Llama 3.1's: `apply_scaling` in github.com/meta-llama/llama-models, models/llama3/model.py, is the one source.

    Recipes of those models name the factor alone.
    """
    metas = dict(scale_factor=8, low_freq_factor=1, high_freq_factor=4, old_context_len=8192)
    assert tuple(metas.values()) == dataclasses.astuple(RopeScaling())


def test_rope_scaling_matters_here():
    """The scaled case above would prove nothing if its frequencies were those of the plain one."""
    cfg = config(LLAMA, SCALED)
    plain = config(LLAMA)
    model, other = model_of(cfg), model_of(plain)
    assert not torch.allclose(model.frequencies, other.frequencies)


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_documents_apart_equal_documents_alone(base):
    """A packed sample gives each document the logits it has alone, and no gradient crosses a boundary: exactly 0."""
    cfg = config(base, {"data": {"separate_documents": True}})
    model, batch = model_of(cfg), batch_of(cfg, b=1)
    s, bounds = cfg.train.seq_len, np.array([0, 5, 18, cfg.train.seq_len])
    positions = torch.arange(s) - torch.from_numpy(np.repeat(bounds[:-1], np.diff(bounds)))
    batch.documents, batch.positions = as_documents([bounds]), positions[:, None]
    logits = model.logits(batch)
    for start, end in zip(bounds[:-1], bounds[1:]):
        order = torch.arange(end - start)
        alone = Batch(
            batch.tokens[start:end],
            batch.labels[start:end],
            batch.mask[start:end],
            order[:, None],
            order,
            batch.samples,
            count=float(end - start),
        )
        assert_close_rel(logits[start:end], model.logits(alone), TOLERANCE, f"document at {start}")
    embedded = []
    hook = model.embedding.words.register_forward_hook(lambda *args: embedded.append(args[2]))
    logits = model.logits(batch)
    hook.remove()
    (grad,) = torch.autograd.grad(logits[5:18].square().sum(), embedded)
    assert grad[5:18].abs().sum() > 0
    assert float(grad[:5].abs().max()) == float(grad[18:].abs().max()) == 0.0


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_every_matrix_begins_with_values_of_its_own(base):
    """Of its name and of train.seed: equal ones, or one with multiples of another's, would train as one."""
    model, other = (model_of(config(base, {"train": {"seed": seed}}), std=0.0) for seed in (1, 2))
    starts = [
        p.detach().flatten()[:512] / p.detach().flatten()[:512].norm()
        for chunk in (model, other)
        for p in chunk.parameters()
        if p.dim() > 1
    ]
    products = torch.stack(starts) @ torch.stack(starts).T - torch.eye(len(starts))
    assert products.abs().max() < 0.25  # of 512 independent values they vary by 512^-0.5 = 0.044


def test_initial_weights_do_not_depend_on_the_number_of_stages():
    """A parameter's values come from its global name: the last of two stages begins like the whole model ends."""
    cfg = config(LLAMA)
    whole = model_of(cfg, std=0.0)
    mesh = Mesh.offline(2, 1, pp=2)
    last = GPT(cfg, mesh, make_layer_context(cfg, mesh, choose(cfg, mesh.device)), range(4, 8), first=False, last=True)
    initialise([last], cfg.train.seed)
    params = dict(whole.named_parameters())
    for name, param in last.named_parameters():
        assert torch.equal(param, params[name]), name


# ---- a parameter of each head --------------------------------------------------------------------------------------


def train_as_if_all_ranks_had_all_heads(cfg):
    parameter = LayerContext.parameter

    def whole(self, *args, per_head=False, **keys):
        return parameter(self, *args, **keys)

    with mock.patch.object(LayerContext, "parameter", whole):
        return train_steps(cfg)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_of_parts_are_summed_over_tp(sequence_parallel):
    """Each rank has its tokens' part, under sequence parallelism, or its heads' part."""
    context = LayerContext(ProcessGroupComm(Axis("tp", 0, 2, (0, 1)), sequence_parallel=sequence_parallel))
    alone = LayerContext(ProcessGroupComm(Axis.single(), sequence_parallel=sequence_parallel))
    for options, summed in (
        ({}, sequence_parallel),
        ({"whole_sequence": True}, False),
        ({"per_head": True}, True),
        ({"shard": Shard(0, context.axis, (8,))}, False),
    ):
        assert context.parameter((8,), **options).spec.sum_over_tp == summed, options
        assert not alone.parameter((8,), **options | {"shard": None}).spec.sum_over_tp
    for bias, per_head in itertools.product((True, False), repeat=2):
        norm = Norm(8, 1e-5, context, bias=bias, per_head=per_head)
        assert norm.weight.spec.sum_over_tp == (sequence_parallel or per_head)
        assert norm.bias is None or norm.bias.spec.sum_over_tp == sequence_parallel


def test_heads_of_a_width_that_the_kernel_has_not_are_split_by_plain_torch():
    calls = []
    fused = SimpleNamespace(
        split_heads=lambda *args: calls.append(args[0].shape) or plain.split_heads(*args),
        split_heads_backward=lambda *args: calls.append("backward") or plain.split_heads_backward(*args),
    )
    for width, by_kernel in (16, True), (24, False), (32, True):
        calls.clear()
        qkv = torch.randn(17, 2, 4, width, requires_grad=True)
        rope = rope_tables(torch.arange(17)[:, None], rope_frequencies(width, 100.0, None))
        sum(x.sum() for x in split_heads(qkv.clone(), (2, 1, 1), rope, fused)).backward()
        assert calls == [qkv.shape, "backward"] * by_kernel


def test_a_parameter_of_each_head_that_does_not_say_so_is_found(ranks):
    with pytest.raises(AssertionError, match="gradient of blocks.*attention.[qk]_norm"):
        assert_equals_one_process(
            ranks, 2, QWEN, {}, axes("tp=2 sequence_parallel=off"), run=train_as_if_all_ranks_had_all_heads
        )
