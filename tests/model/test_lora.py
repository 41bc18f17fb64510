"""Adapters beside frozen weights: against the formula, in every layout, and what they leave alone.

Layouts agree with one process to 1e-5 of each gradient's norm: summation order alone moves float32 by about 1e-7.
"""

from __future__ import annotations

import pytest
import torch

import test_invariance
from layouts import GPT3, LLAMA, QWEN, adapters_that_do_something, config, dataset_of, mesh_of, train_steps, whole_model
from minitron.comm.mesh import Mesh
from minitron.config import rules
from minitron.config.schema import Config
from minitron.config.sizes import adapters
from minitron.data.loader import Loader
from minitron.kernels import fp8_torch, plain
from minitron.kernels.fp8_scales import ROLES
from minitron.kernels.gemm import Gemm
from minitron.kernels.rng import dropout, token_counters
from minitron.model.lora import FIRST_SITE, Adapter, adapted, attach
from minitron.parallel.layer_context import LayerContext
from minitron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from minitron.testing import assert_close_rel
from minitron.train import Trainer, build
from test_invariance import DOCUMENTS, assert_equals_one_process, axes, mean_error

ALL = ("q", "k", "v", "o", "gate", "up", "down")


def lora(*targets: str, **keys) -> dict:
    return {
        "finetune": {"kind": "lora"},
        "lora": {"rank": 4, "alpha": 4.0, "targets": targets or ("qkv",), **keys},
        "model": {"num_layers": 4},
    }


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("targets", [("qkv",), ("q", "v", "o"), ALL])
def test_sizes_are_those_of_the_model(targets, tp):
    """The planner counts adapters by config/sizes.py: one A for each target of a layer."""
    cfg = config(LLAMA, lora(*targets), {"parallel": {"tp": tp}})
    model = whole_model(cfg, Mesh.offline(tp, tp=tp))
    attach(model, cfg)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert trained == cfg.model.num_layers * sum(size.elements(tp) for size in adapters(cfg).values())


# ---- one layer against the formula ----------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [("qkv",), ("q", "v"), ("v", "k", "q"), ("o",)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_formula(targets, p):
    """y = x W^T + alpha/r dropout(x) A^T B^T for the rows of every target; its gradients by autograd, in float64."""
    cfg, generator = config(LLAMA, lora(*targets, dropout=p, alpha=6.0)), torch.Generator().manual_seed(0)
    layout, m = LayerContext(dtype=torch.float64), cfg.model
    name, spans = next((n, s) for n, s in adapted(m, targets).items() if s)
    make = dict(std=1.0, bias=False, gemm=Gemm(plain.add_product))
    linear = (
        ColumnParallelLinear(32, (32, 16, 16), layout, **make)
        if name == "attention.qkv"
        else RowParallelLinear(32, 32, layout, **make)
    ).requires_grad_(False)
    linear.adapter = adapter = Adapter(linear, spans, cfg, layout, (2, FIRST_SITE))
    for param in linear.parameters():
        param.data.normal_(generator=generator)
    x = torch.randn(8, 2, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    keys = token_counters(1, 2, torch.arange(2), torch.arange(8))

    twin = torch.nn.functional.linear(x, linear.weight)
    dropped, updates = dropout(x, p, keys, 2, FIRST_SITE), torch.zeros_like(twin)
    for i, (target, span) in enumerate(spans.items()):
        low = dropped @ adapter.a[4 * i : 4 * i + 4].t()
        updates[..., span.start : span.start + span.size] = 6.0 / 4 * low @ adapter.b[target].t()
    twin = twin + updates
    y, dy = linear(x, counters=keys), torch.randn(twin.shape, generator=generator, dtype=torch.float64)
    params = [x, adapter.a, *adapter.b.values()]
    assert_close_rel(y, twin, 1e-13)
    for ours, expected in zip(torch.autograd.grad(y, params, dy), torch.autograd.grad(twin, params, dy)):
        assert_close_rel(ours, expected, 1e-13)
    assert torch.equal(linear(x), linear(x)) and not linear.weight.requires_grad


def adapters_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


@pytest.mark.parametrize("base, targets", [(LLAMA, ALL), (GPT3, ("qkv", "o", "up", "down"))], ids=["llama", "gpt"])
def test_adapters_begin_as_pefts_do(base, targets):
    """A with the deviation of a kaiming_uniform_ of sqrt(5), drawn here, B with zeros: W alone decides at the start."""
    cfg = config(base, lora(*targets, rank=32))
    for name, adapter in adapters_of(build(cfg, Mesh.offline()).chunks[0]).items():
        drawn = torch.nn.init.kaiming_uniform_(torch.empty(4096, adapter.a.shape[1]), a=5**0.5)
        a = adapter.a.detach()
        # the deviation of n normal values varies by 1 / sqrt(2 n): four of those
        assert float(torch.std(a)) == pytest.approx(float(drawn.std()), rel=4 / (2 * a.numel()) ** 0.5), name
        assert not any(b.any() for b in adapter.b.values())


def test_every_adapter_drops_by_itself():
    """Masks of inputs of one width are another in each layer and place, and none is of the residual stream."""
    cfg = config(LLAMA, lora(*ALL, dropout=0.5), {"model": {"ffn_hidden_size": 32}})
    ones, keys = torch.ones(32, 4, 32), token_counters(1, 2, torch.arange(4), torch.arange(32))
    adapters = adapters_of(build(cfg, Mesh.offline()).chunks[0])
    masks = [adapter.drop(ones, keys).flatten() for adapter in adapters.values()]
    # of the stream: after the embedding, what attention adds, what the MLP adds
    masks += [dropout(ones, 0.5, keys, layer, site).flatten() for layer in range(4) for site in range(3)]
    assert len(adapters) == 4 * 4
    signs = torch.stack(masks) - 1
    alike = signs @ signs.T / ones.numel() - torch.eye(len(masks))
    assert alike.abs().max() < 0.1  # 4,096 fair coins: 1 / 64 = 0.016


# ---- layouts --------------------------------------------------------------------------------------------------------


def train_adapters(cfg: Config):
    with adapters_that_do_something():
        return train_steps(cfg)


@pytest.fixture
def assert_layout(ranks, monkeypatch):
    monkeypatch.setattr(test_invariance, "train_steps", train_adapters)  # of the twin

    def check(world, base, change, layout, **more):
        layers = {} if "vp" in layout else {"num_layers": 2}
        change = {**change, "model": change["model"] | layers}
        assert_equals_one_process(ranks, world, base, change, axes(layout), more, run=train_adapters)

    return check


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world, layout, targets",
    [
        (2, "tp=2", ("qkv",)),
        (2, "tp=2", ALL),
        (4, "tp=4 sequence_parallel=off", ALL),
        (2, "pp=2 vp=2", ("qkv",)),
        (4, "tp=2 pp=2 schedule=zb-h1", ALL),
        (2, "cp=2", ALL),
        (2, "", ("qkv", "o")),
        (4, "tp=2 overlap_tp=off overlap_grads=off", ("qkv", "down")),
        (4, "tp=2 cp=2 cp_style=ulysses", ("gate", "v")),
        (8, "tp=2 pp=2 vp=2 cp=2", ALL),
    ],
)
def test_every_layout_equals_one_process(assert_layout, world, layout, targets):
    assert_layout(world, LLAMA, lora(*targets), layout)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "world, layout",
    [(2, "tp=2 sequence_parallel=off"), (2, "tp=2"), (2, "pp=2"), (2, "cp=2"), (2, ""), (8, "tp=2 pp=2 cp=2")],
)
def test_beside_heads_as_qwen_has_them(assert_layout, world, layout):
    """Norms of q and k are frozen: their backward computes no gradient of a weight."""
    assert_layout(world, QWEN, lora(*ALL), layout)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world, layout, recompute",
    [
        (2, "tp=2", "none"),
        (2, "tp=2 sequence_parallel=off", "selective"),
        (4, "tp=2 cp=2", "full"),
        (4, "tp=2 pp=2 vp=2 sequence_parallel=off overlap_grads=off", "full"),
        (8, "tp=2 pp=2 vp=2 cp=2", "selective"),
    ],
)
@pytest.mark.parametrize(
    "base, targets",
    [(LLAMA, ("qkv", "o", "up", "down")), (GPT3, ("q", "v", "o", "up", "down"))],
    ids=["llama", "tied gpt"],
)
def test_dropout_and_recomputation(assert_layout, base, targets, world, layout, recompute):
    change = lora(*targets, dropout=0.2)
    change["model"] |= {"hidden_dropout": 0.1}
    change |= DOCUMENTS
    assert_layout(world, base, change, layout, train={"recompute": recompute})


@pytest.mark.parametrize(
    "world, layout, recompute",
    [(2, "tp=2 sequence_parallel=off", "selective"), pytest.param(4, "tp=2 cp=2", "full", marks=pytest.mark.slow)],
)
def test_fp8_is_as_near_to_float32_in_every_layout(ranks, world, layout, recompute):
    """The distance to the float32 gradients is at most 1.5 times that of one process in FP8: chance."""
    model = {"hidden_size": 64, "ffn_hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "init_std": 0.05}
    change = lora(*ALL, dropout=0.1) | {"train": {"global_batch_size": 4}}
    change["model"] |= model | {"num_layers": 2}
    fp8 = {"precision": {"dtype": "bf16", "fp8": "delayed", "fp8_backend": "torch"}, "train": {"recompute": recompute}}
    (expected, exact), (_, single) = (train_adapters(config(LLAMA, change, more)) for more in ({}, fp8))
    exact = {name: whole for name, (whole, _) in exact.items()}
    allowed = 1.5 * mean_error(single, exact)
    assert 0.03 < allowed < 0.3, "the comparison would prove nothing"
    cfg = config(LLAMA, change, fp8, axes(layout))
    rules.check(cfg, world)
    for figures, parts in ranks(world, train_adapters, cfg, timeout=600):
        assert mean_error(parts, exact) <= allowed
        # three steps of a loss near log(90), each moved by 1 % of a gradient that is 10 % off at the most
        assert [f["loss"] for f in figures] == pytest.approx([f["loss"] for f in expected], rel=1e-3)


# ---- what stays as it is --------------------------------------------------------------------------------------------


def steps_of(trainer: Trainer, count: int) -> list[float]:
    cfg, loader = trainer.cfg, Loader(dataset_of(trainer.cfg), trainer.cfg, trainer.mesh)
    batch = cfg.train.global_batch_size
    losses = [trainer.step(loader.step(i * batch, i), 1e-2).read()["loss"] for i in range(count)]
    loader.close()
    return losses


@pytest.mark.parametrize("fp8", ["none", "delayed", "current"])
@pytest.mark.parametrize("base, targets", [(LLAMA, ALL), (GPT3, ("qkv", "o", "up", "down"))], ids=["llama", "gpt"])
def test_a_fresh_adapter_changes_nothing(base, targets, fp8):
    """B = 0: not one bit of the loss. The MLP's operation is three there, of the same kernels."""
    precision = {"precision": {"dtype": "bf16", "fp8": fp8, "fp8_backend": "torch"}} if fp8 != "none" else {}
    cfg, tuned = config(base, {"model": {"num_layers": 4}}, precision), config(base, lora(*targets), precision)
    plain, tuned = build(cfg, mesh_of(cfg)), build(tuned, mesh_of(cfg))
    loader = Loader(dataset_of(cfg), cfg, plain.mesh)
    batches = loader.step(0, 0)
    loader.close()
    assert torch.equal(plain.evaluate(batches), tuned.evaluate(batches))


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_the_model_and_its_adapters_drop_each_by_its_own_key(base):
    """A fresh adapter leaves the model's dropout as it is; one that does something drops with it and without it."""
    size = {"model": {"num_layers": 2}}
    dropping = {"model": {"hidden_dropout": 0.2}}

    def loss(*changes):
        cfg = config(base, *changes, size)
        return steps_of(build(cfg, mesh_of(cfg)), 1)[0]

    plain, dropped = loss(), loss(dropping)
    assert loss(lora("qkv"), dropping) == pytest.approx(dropped, rel=1e-6) and dropped != pytest.approx(plain, rel=1e-6)
    with adapters_that_do_something():
        losses = [loss(lora("qkv", dropout=p), more) for p in (0.0, 0.3) for more in ({}, dropping)]
    assert len({round(value, 5) for value in losses}) == 4


def test_a_run_describes_how_many_parameters_are_trained():
    for change in {}, lora("qkv", "o"):
        cfg = config(LLAMA, {"model": {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 256}}, change)
        trainer = build(cfg, mesh_of(cfg))
        here, trained = (
            f"{sum(p.numel() for p in trainer.chunks[0].parameters() if p.requires_grad >= least) / 1e6:.2f} M"
            for least in (False, True)
        )
        assert (here == trained) == (not change)
        more = f", of which {trained} are trained" if change else ""
        assert f", {here} parameters on rank 0{more} | tp 1 " in trainer.describe()


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "tied gpt"])
def test_frozen_weights_have_no_gradients_states_or_products(base, monkeypatch):
    """Weight gradients of adapters alone; of frozen weights no buffer, no optimizer state, and not a bit changes."""
    cfg = config(base, lora("qkv", "o"))
    trainer = build(cfg, mesh_of(cfg))
    adapters = {p.spec.name: p for p in trainer.chunks[0].parameters() if ".adapter." in p.spec.name}
    frozen = {p.spec.name: p for p in trainer.chunks[0].parameters() if p.spec.name not in adapters}
    assert len(adapters) == 4 * 2 * 2 and "embedding.words.weight" in frozen
    before = {name: p.clone() for name, p in (adapters | frozen).items()}
    weight_grad = Gemm.weight_grad

    def of_adapters(gemm, weight, dy, x):
        assert weight.spec.name in adapters, "a weight gradient of a frozen weight"
        return weight_grad(gemm, weight, dy, x)

    monkeypatch.setattr(Gemm, "weight_grad", of_adapters)
    steps_of(trainer, 3)
    assert all(torch.equal(p, before[name]) and p.grad is None and p.slot is None for name, p in frozen.items())
    assert not any(torch.equal(p, before[name]) for name, p in adapters.items())
    assert {span.name for bucket in trainer.gradients.buckets for span in bucket.plan.spans} == adapters.keys()
    assert sum(master.numel() for master in trainer.optimizer.masters) < 1.2 * sum(
        -(-p.numel() // 128) * 128 for p in adapters.values()
    )


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_frozen_fp8_weights_are_cast_once(recipe, monkeypatch):
    """And training follows that in bf16: rounding of 4 % in each product, averaged over the batch."""
    model = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "num_heads": 4, "num_kv_heads": 4}
    losses, casts = {}, []
    original = fp8_torch.TorchFp8.cast
    monkeypatch.setattr(
        fp8_torch.TorchFp8, "cast", lambda self, x, role, *rest: (casts.append(role), original(self, x, role, *rest))[1]
    )
    for fp8 in ({}, {"fp8": recipe, "fp8_backend": "torch"}):
        cfg = config(LLAMA, lora("qkv", "down"), {"model": model, "precision": {"dtype": "bf16"} | fp8})
        rules.check(cfg, 1)
        trainer = build(cfg, mesh_of(cfg))
        losses[bool(fp8)] = torch.tensor(steps_of(trainer, 4))
    assert casts.count("weight") == 4 * 2  # four products in each of two blocks, in four steps
    assert_close_rel(losses[True], losses[False], 1e-2)
    if recipe == "delayed":  # it would give the cast another scale after a resume, when that step has left the history
        of_weights = trainer.chunks[0].fp8_state.scaling.history[:, ROLES.index("weight") :: len(ROLES)]
        assert not of_weights.any(), "one cast has entered the history"


def saved_for_backward(cfg: Config) -> int:
    """Bytes that a forward pass keeps for the backward, parameters left out."""
    trainer, kept = build(cfg, mesh_of(cfg)), {}
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    (chunk,), batch = trainer.chunks, loader.step(0, 0)[0]
    loader.close()
    own = {p.untyped_storage().data_ptr() for p in chunk.parameters()}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = chunk(batch)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def test_inputs_of_frozen_products_are_not_kept():
    """Of each block the MLP's input and activation; of the head its input. The adapter keeps u, r numbers a token."""
    cfg = config(LLAMA, {"model": {"num_layers": 4}})
    m, tokens = cfg.model, cfg.train.seq_len * cfg.train.micro_batch_size
    adapters = saved_for_backward(config(LLAMA, lora("qkv")))
    less = tokens * 4 * (m.num_layers * (m.hidden_size + m.ffn_hidden_size) + m.hidden_size)
    first = tokens * 4 * (m.hidden_size + 1)  # block 0's norm: nothing below learns
    assert adapters == saved_for_backward(cfg) - less - first + m.num_layers * tokens * 4 * 4
