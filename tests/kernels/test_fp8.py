"""FP8 behind the GEMM seam, on CPU: products against the values that the casts stand for, scales, and whole runs."""

import dataclasses
import sys
from functools import partial
from unittest import mock

import pytest
import torch

from layouts import GPT3, LLAMA, Pieces, config, dataset_of, lowered, mesh_of
from minitron.comm.mesh import Axis, Mesh
from minitron.config import rules
from minitron.config.schema import PrecisionConfig
from minitron.config.sizes import AdaptedRows
from minitron.data.loader import Loader
from minitron.kernels import fp8_torch, plain
from minitron.kernels.fp8 import Fp8Gemm, Fp8State, Fp8States
from minitron.kernels.fp8_scales import (
    FP8_DTYPES,
    HISTORY,
    ROLES,
    DelayedScaling,
    WeightScales,
    fp8_max,
    roll_histories,
    scale_of,
)
from minitron.kernels.fp8_torch import Operand
from minitron.kernels.gemm import Activation, Gemm
from minitron.kernels.kernels import Kernels, choose_apex, choose_fp8
from minitron.kernels.param import GradSlot
from minitron.model.lora import FIRST_SITE, Adapter
from minitron.parallel.layer_context import LayerContext
from minitron.parallel.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from minitron.parallel.mlp import mlp
from minitron.parallel.overlap import ProcessGroupComm
from minitron.testing import assert_close_rel
from minitron.train import build
from test_invariance import axes

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("delayed", "current", "block")
recipes = pytest.mark.parametrize("recipe", RECIPES)
families = pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
S, B, H, F = 128, 2, 128, 256


def randn(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))).bfloat16()


def precision(recipe: str, **keys) -> PrecisionConfig:
    return PrecisionConfig(fp8=recipe, fp8_backend="torch", **keys)


def state_of(recipe: str, mesh: Mesh) -> Fp8State:
    """Those of a model of one block."""
    cfg = config({"model": {"num_layers": 1}, "precision": {"fp8": recipe, "fp8_backend": "torch"}})
    return Fp8State(cfg, range(1), False, mesh, Kernels(fp8=choose_fp8(cfg.precision, CPU)))


def values(payload, columns: bool = False) -> torch.Tensor:
    """The float32 matrix [m, k] that a payload stands for, read by rows or by columns."""
    data, scale = payload[2:] if columns else payload[:2]
    full = data.float() * scale if scale.numel() == 1 else fp8_torch.dequantize(Operand(data, scale))
    return full.t() if columns else full


# ---- casts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["x", "weight", "dy"])
@pytest.mark.parametrize("backend", [fp8_torch.TorchFp8(), fp8_torch.TorchBlockFp8()])
def test_a_cast_rounds_each_value_once(backend, role):
    x = randn("x", 256, 384) * torch.logspace(-3, 3, 384)
    payload = backend.cast(x.bfloat16(), role, Axis.single(), (None, None), columnwise=True)
    blocks = type(backend) is fp8_torch.TorchBlockFp8
    step = 2**-3 if role == "dy" and not blocks else 2**-4  # half a unit of the last bit kept
    for columns in False, True:
        back, x32 = values(payload, columns), x.bfloat16().float()
        # below the smallest normal number of the scaled format the step no longer shrinks with the value
        floor = x32.abs().max() / fp8_max(E5M2 if step == 2**-3 else E4M3) * 2**-6
        assert ((back - x32).abs() <= x32.abs() * step + floor * step).all()


def test_blocks_have_powers_of_two_that_fill_the_range():
    x = randn("x", 256, 256).float()
    x[:, 128:] *= 1e-3
    rows = fp8_torch.TorchBlockFp8().cast(x, "x", Axis.single(), (None, None), columnwise=False)
    tiles = fp8_torch.TorchBlockFp8().cast(x, "weight", Axis.single(), (None, None), columnwise=False)
    assert rows.columnwise is None and rows.rowwise_scale.shape == (2, 256)
    for block in range(2):
        part = slice(128 * block, 128 * block + 128)
        for row in range(256):
            tile = slice(row // 128 * 128, row // 128 * 128 + 128)
            for payload, top in ((rows, x[row, part]), (tiles, x[tile, part])):
                used = float(top.abs().max() / payload.rowwise_scale[block, row])
                assert 224 < used <= 448  # of the limit, more than a half
    assert (torch.frexp(rows.rowwise_scale).mantissa == 0.5).all()


@pytest.mark.parametrize("role, limit", [("x", 448), ("dy", 57344)])
def test_a_given_scale_saturates_and_notes_the_magnitude(role, limit):
    """Whether a conversion to float8 saturates by itself depends on the format, the device and torch's version."""
    x = torch.tensor([[0.5, -3.0, 100.0, 1e-9]])
    scale, amax = torch.tensor([limit / 100]), torch.tensor([7.0])
    cast = fp8_torch.TorchFp8().cast(x * 2, role, Axis.single(), (scale, amax), columnwise=False)
    assert float(values(cast)[0, 2]) == pytest.approx(100, rel=1e-6) and amax == 200  # 200 would not fit
    fp8_torch.TorchFp8().cast(x, role, Axis.single(), (scale, amax), columnwise=False)
    assert amax == 200  # a smaller one changes nothing


# ---- products and communication -----------------------------------------------------------------------------------


IDENTITY = Activation(lambda x: x, lambda dy, *_: (dy, None))
GELU = Activation(plain.gelu_forward, plain.gelu_backward)


def two_layers(recipe, tp, by, sequence_parallel, recompute, how="linear"):
    """column -> row on one rank, or as an mlp with GELU between them: y, dx, and the two weight gradients.

    Weights that are "adapted" are frozen and have no gradient. Their adapters are fresh, so they add nothing.
    """
    mesh = Mesh.create(tp=tp)
    layout = LayerContext(by(mesh.tp), dtype=torch.bfloat16)
    assert layout.sequence_parallel is sequence_parallel
    state = state_of(recipe, mesh)
    column = ColumnParallelLinear(H, (F,), layout, std=0.1, bias=False, gemm=state.gemm(0))
    row = RowParallelLinear(F, H, layout, std=0.1, bias=False, gemm=state.gemm(0))
    for layer, name, shape in ((column, "w1", (F, H)), (row, "w2", (H, F))):
        with torch.no_grad():
            layer.weight.copy_(layer.weight.spec.shard.cut(randn(name, *shape)))
        if how == "adapted":
            layer.weight.requires_grad_(False)
            rows = AdaptedRows(0, (shape[0],))
            layer.adapter = Adapter(layer, {name: rows}, config({"lora": {"rank": 4}}), layout, (0, FIRST_SITE))
            for factor in layer.adapter.parameters():
                torch.nn.init.zeros_(factor)
        else:
            layer.weight.slot = GradSlot(torch.full(layer.weight.shape, float("nan")), lambda: None)
    part = (lambda t: t.chunk(tp)[mesh.tp.rank]) if sequence_parallel else (lambda t: t)
    x, dy = part(randn("x", S * B // 2, 2, H)).clone().requires_grad_(), part(randn("dy", S * B // 2, 2, H))
    for _ in range(2):  # the second backward adds to the first's gradients
        again = (lambda: x.detach()) if recompute else None
        if how == "mlp":
            y = mlp(x, column.op, row.op, GELU, again)
        else:
            inner = column(x, again)
            y = row(inner, (lambda: inner.detach()) if recompute else None)
        x.grad = None
        y.backward(dy)
    dws = [layer.weight.slot.main_grad / 2 for layer in (column, row) if layer.weight.slot is not None]
    return y.detach(), x.grad, *dws


def plain_two_layers(recipe, tp, activation=IDENTITY):
    """The same on whole tensors in float32, from casts as the design says they are made."""
    backend = choose_fp8(precision(recipe), CPU)
    cast = lambda t, role: backend.cast(t.bfloat16(), role, Axis.single(), (None, None), columnwise=True)
    x, dy = cast(randn("x", S, B, H).flatten(0, 1), "x"), cast(randn("dy", S, B, H).flatten(0, 1), "dy")
    y, dx, dw1, dw2 = 0, 0, [], []
    for w1, w2 in zip(randn("w1", F, H).chunk(tp), randn("w2", H, F).chunk(tp, 1)):
        w1, w2 = cast(w1, "weight"), cast(w2, "weight")
        before = (values(x) @ values(w1).t()).bfloat16()
        inner = cast(activation.forward(before), "x")
        y = y + (values(inner) @ values(w2).t()).bfloat16()
        dinner = cast(activation.backward((values(dy) @ values(w2, True)).bfloat16(), before)[0], "dy")
        dx = dx + (values(dinner) @ values(w1, True)).bfloat16()
        dw1.append(values(dinner, True).t() @ values(x, True))
        dw2.append(values(dy, True).t() @ values(inner, True))
    return y.view(S, B, H), dx.view(S, B, H), torch.cat(dw1), torch.cat(dw2, 1)


@recipes
@pytest.mark.parametrize(
    "tp, by, sequence_parallel, recompute",
    [
        (1, ProcessGroupComm, False, False),
        (2, ProcessGroupComm, True, False),
        (2, ProcessGroupComm, True, True),
        (2, partial(ProcessGroupComm, sequence_parallel=False), False, False),
        (2, Pieces, True, False),
    ],
)
@pytest.mark.parametrize("how", ["linear", "mlp", "adapted"])
def test_linear_layers(ranks, recipe, tp, by, sequence_parallel, recompute, how):
    results = ranks(tp, two_layers, recipe, tp, by, sequence_parallel, recompute, how)
    whole = lambda i: torch.cat([r[i] for r in results]) if sequence_parallel else results[0][i]
    actual = [whole(0), whole(1)]
    if how != "adapted":
        actual += torch.cat([r[2] for r in results]), torch.cat([r[3] for r in results], 1)
    # A sum in another order rounds another way to bf16 (2^-9), and now and then to another FP8 value (2^-4 or 2^-3).
    expected = plain_two_layers(recipe, tp, GELU if how == "mlp" else IDENTITY)
    for name, mine, twin in zip(("y", "dx", "dw1", "dw2"), actual, expected):
        assert_close_rel(mine.float(), twin.float(), 6e-3, name)


@recipes
def test_products_are_near_the_exact_ones(recipe):
    """e4m3 rounds by up to 2^-4, a random sum then by 3 to 4 %; e5m2 by twice that."""
    y, _, _, _ = plain_two_layers(recipe, 1)
    x, w1, w2 = (randn(*a).float() for a in (("x", S, B, H), ("w1", F, H), ("w2", H, F)))
    assert_close_rel(y.float(), x @ w1.t() @ w2.t(), 0.08)


# ---- delayed scaling ----------------------------------------------------------------------------------------------


def histories(magnitudes, layout):
    """Scales after each step, on one of the ranks whose x have their own magnitudes [steps][ranks]."""
    mesh = Mesh.create(**layout)
    state = state_of("delayed", mesh)
    gemm, scales = state.gemm(0), []
    for step in magnitudes:
        for part in (0.5, 1.0, 0.25):  # microbatches
            gemm.quantize(torch.full((16, 16), step[mesh.rank] * part).bfloat16(), columnwise=True, update_history=True)
        Fp8States([state]).end_step()
        scales.append(float(state.scaling.scale[0]))
    return scales, gemm.history[:, 0].clone()


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}], ids=str)
def test_scales_follow_the_largest_of_the_last_steps_on_all_ranks(ranks, layout):
    steps = 2 * HISTORY + 3
    magnitudes = torch.exp2(torch.randint(-6, 7, (steps, 4), generator=torch.Generator().manual_seed(1))).tolist()
    magnitudes[1][2] = 2.0**9  # above all others: the scale shows in which step it leaves the history
    magnitudes[20] = [float("nan"), 1.0, float("inf"), 2.0]  # leaves the newest history as it was
    tops = [max(row) for row in magnitudes]
    tops[20] = tops[19]
    expected = [448 / max(tops[max(0, i - HISTORY + 1) : i + 1]) for i in range(steps)]
    for scales, history in ranks(4, histories, magnitudes, layout):
        assert scales == expected
        assert history.tolist() == tops[: -HISTORY - 1 : -1]


@recipes
def test_the_other_recipes_take_no_scale_from_earlier_steps(recipe):
    state = state_of(recipe, Mesh.offline())
    gemm, scales = state.gemm(0), []
    for top in 1.0, 2.0, 8.0:
        x = torch.full((128, 128), top).bfloat16()
        scales.append(float(gemm.quantize(x, columnwise=True, update_history=True).rowwise_scale.max()))
        Fp8States([state]).end_step()
    assert (gemm.history is not None) == (recipe == "delayed")
    assert [scale / scales[0] for scale in scales] == ([1, 1, 2] if recipe == "delayed" else [1, 2, 8])


@pytest.mark.parametrize("kind", [None, "sft", "lora"])
def test_only_lora_keeps_the_cast_of_a_weight_over_a_step(kind):
    cfg = config({"model": {"num_layers": 1}, "precision": {"fp8": "current", "fp8_backend": "torch"}})
    cfg = dataclasses.replace(cfg, finetune=dataclasses.replace(cfg.finetune, kind=kind))
    state = Fp8State(cfg, range(1), False, Mesh.offline(), Kernels(fp8=choose_fp8(cfg.precision, CPU)))
    gemm, weight = state.gemm(0), randn("weight", 128, 128)
    x = gemm.quantize(randn("x", 128, 128), columnwise=False, update_history=True)
    before = gemm.forward(weight)(x)
    Fp8States([state]).end_step()
    assert torch.equal(gemm.forward(2 * weight)(x), before * (1 if kind == "lora" else 2))


def test_a_tensor_of_zeros_has_scale_one():
    scaling = DelayedScaling(("x", "dy"), (), CPU)
    scaling.amax[1] = 2.0
    roll_histories([scaling])
    assert scaling.scale.tolist() == [1.0, 57344 / 2]


# The smallest denormal number, the largest one, the smallest normal one, tiny ones, the largest one, and no numbers.
ODD = [2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, 1e-30, 1e-20, 3.4e38, float("inf"), float("nan")]


def delayed(top, role):
    scaling = DelayedScaling((role,), (), CPU)
    scaling.history[0] = top  # as a checkpoint may have it
    scaling.follow_history()
    return scaling.scale, scaling.scale.reciprocal()


def current(top, role):
    return scale_of(torch.tensor([top]), fp8_max(FP8_DTYPES[role])), current_cast(fp8_torch.TorchFp8(), top, role)


def current_cast(backend, top, role):
    x = torch.full((128, 128), top)
    return backend.cast(x, role, Axis.single(), (None, None), columnwise=False).rowwise_scale.flatten()[:1]


def kept(top, role):
    scales = WeightScales(1, None, CPU)
    scales.amax.fill_(top)
    scales.follow()
    return scales.scale, scales.scale_inv


def in_blocks(top, role):
    inverse = current_cast(fp8_torch.TorchBlockFp8(), top, role)
    return inverse.reciprocal(), inverse


@pytest.mark.parametrize("way", [delayed, current, kept, in_blocks])
@pytest.mark.parametrize("top", [0.0, *ODD])
def test_scales_reciprocals_and_their_products_are_normal_numbers(way, top):
    normal = lambda x: x.isfinite().all() and (x >= torch.finfo(torch.float32).tiny).all()
    pairs = [way(top, role) for role in FP8_DTYPES]
    assert all(normal(scale) and normal(inverse) for scale, inverse in pairs)
    assert all(normal(a * b) for _, a in pairs for _, b in pairs)
    if not 0 < top < float("inf"):
        assert all(scale == 1 and inverse == 1 for scale, inverse in pairs)


@pytest.mark.parametrize("role", FP8_DTYPES)
def test_scales_of_ordinary_magnitudes_bring_them_to_the_limit_bit_by_bit(role):
    top = torch.logspace(-12, 12, 1000)
    scaling = DelayedScaling([role] * len(top), (), CPU)
    scaling.amax.copy_(top)
    roll_histories([scaling])
    assert torch.equal(scaling.scale, torch.full_like(top, fp8_max(FP8_DTYPES[role])) / top)
    assert torch.equal(scale_of(top, fp8_max(FP8_DTYPES[role])), fp8_max(FP8_DTYPES[role]) / top)


def test_a_product_of_tiny_tensors_is_what_its_casts_stand_for():
    """Of both reciprocals, taken alone, the product was zero."""
    backend, tiny = fp8_torch.TorchFp8(), 2.0**-60
    x, dy = (
        backend.cast(randn(role, 16, 16).float() * tiny, role, Axis.single(), (None, None), False)
        for role in ("x", "dy")
    )
    out = torch.empty(16, 16)
    backend.multiply_into(out, Operand(*dy[:2]), Operand(*x[:2]), add=False)
    exact = values(dy).double() @ values(x).double().t()
    assert exact.abs().max() > 0
    assert_close_rel(out.double(), exact, 2e-6)  # 16 additions in float32


# ---- whole runs ---------------------------------------------------------------------------------------------------

MODEL = dict(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=90,
    vocab_multiple=16,
    max_positions=64,
    init_std=0.1,
)
ADAPTERS = {"finetune": {"kind": "lora"}, "lora": {"targets": ("qkv", "o", "gate", "down")}}
TRAIN = dict(seq_len=64, micro_batch_size=2, global_batch_size=4, steps=12)


def run(cfg, steps=None, trainer=None, first=0, evaluate=False):
    """(losses, trainer) of some steps on this rank."""
    torch.set_num_threads(1)
    trainer, losses = trainer or build(cfg, mesh_of(cfg)), []
    with_data = Loader(dataset_of(cfg), cfg, trainer.mesh)
    batch = cfg.train.global_batch_size
    for step in range(first, first + (steps or cfg.train.steps)):
        losses.append(trainer.step(with_data.step(step * batch, step), cfg.optimizer.lr).read()["loss"])
        if evaluate:
            trainer.evaluate(with_data.step(0, 0))
    with_data.close()
    return losses, trainer


def toy(recipe, base=LLAMA, **sections):
    keys = {"dtype": "bf16"} | ({} if recipe == "none" else {"fp8": recipe, "fp8_backend": "torch"})
    model = MODEL if base is LLAMA else MODEL | {"num_kv_heads": None}
    change = {"model": model, "train": TRAIN, "precision": keys | sections.pop("precision", {})}
    cfg = config(base, change, sections)
    rules.check(cfg, 2 if "parallel" in sections else 1)
    return cfg


@pytest.mark.sampled(3)
@recipes
@families
def test_training_follows_bf16(base, recipe):
    reference, _ = run(toy("none", base))
    losses, _ = run(toy(recipe, base))
    assert reference[-1] < 0.97 * reference[0]
    for mine, other in zip(losses, reference):  # rounding noise of 4 % in each product, averaged over 256 tokens
        assert abs(mine - other) < 0.01 * other
    assert losses != reference


@pytest.mark.sampled(3)
@recipes
@families
def test_the_head_is_one_more_product(base, recipe):
    """GPT's is the embedding's table, too: rows that are looked up stay as they are."""
    keys = {"precision": {"fp8_head": True}, "model": {"tie_embeddings": base is not LLAMA, "vocab_size": 128}}
    reference, _ = run(toy("none", base, model=keys["model"]))
    losses, trainer = run(toy(recipe, base, **keys))
    without, plain = run(toy(recipe, base, model=keys["model"]))
    assert losses != without
    for mine, other in zip(losses, reference):
        assert abs(mine - other) < 0.02 * other  # of these products nothing averages the noise out: they are the logits
    state, head = trainer.chunks[0].fp8_state, trainer.chunks[0].head
    assert head.op.gemm is state.gemms[-1] and len(state.gemms) == len(plain.chunks[0].fp8_state.gemms) + 1
    assert type(plain.chunks[0].head.op.gemm) is Gemm
    if recipe == "delayed":
        histories = torch.cat([gemm.history for gemm in state.gemms], 1)  # each its own: together they are all
        assert torch.equal(histories, state.scaling.history) and (head.op.gemm.history[0] > 0).all()
        names = [piece.name for piece in trainer.state.histories(trainer.chunks[0])]
        assert names[-1] == "head" and len(names) == len(state.gemms)


def test_a_head_beside_blocks_in_bf16_alone_has_its_history():
    """So it is on the last stage, if blocks at the ends stay in bf16."""
    cfg = toy("delayed", precision={"fp8_head": True, "fp8_bf16_layers": 1}, model={"vocab_size": 128})
    last = range(cfg.model.num_layers - 1, cfg.model.num_layers)
    state = Fp8State(cfg, last, True, Mesh.offline(), Kernels(fp8=choose_fp8(cfg.precision, CPU)))
    assert type(state.gemm(last[0])) is Gemm and state.head_gemm().history.shape == (HISTORY, 3)


def test_blocks_in_bf16_are_those_at_the_ends_of_the_model_on_every_stage():
    cfg = toy("delayed", precision={"fp8_bf16_layers": 2}, model={"num_layers": 8})
    for blocks in range(3), range(3, 5), range(5, 8):
        state = Fp8State(cfg, blocks, False, Mesh.offline(), Kernels(fp8=choose_fp8(cfg.precision, CPU)))
        assert [i for i in blocks if type(state.gemm(i)) is Fp8Gemm] == [i for i in blocks if 2 <= i < 6]


def losses_alone(cfg):
    return run(cfg, 4)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world, layout", [(2, "tp=2"), (2, "pp=2 schedule=zb-h1"), (2, "cp=2"), (2, "")])
@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_a_head_in_fp8_is_the_same_in_every_layout(ranks, base, world, layout):
    """Ranks share its scales, so casts are the same; sums have another order, and bf16 rounds some up or down."""
    keys = {"fp8_head": True, "fp8_params": True}
    model = {"tie_embeddings": base is not LLAMA, "vocab_size": 128, "init_std": 0.02}
    (alone,) = ranks(1, losses_alone, toy("delayed", base, precision=dict(keys), model=model))
    for losses in ranks(world, losses_alone, toy("delayed", base, precision=dict(keys), model=model, **axes(layout))):
        assert losses == pytest.approx(alone, rel=1e-3)


@recipes
@pytest.mark.parametrize(
    "base, recompute",
    [(LLAMA, "selective"), (LLAMA, "full"), (GPT3, "selective")],
    ids=["llama-selective", "llama-full", "gpt-selective"],
)
def test_recomputation_changes_nothing(base, recompute, recipe):
    """GPT's full recomputation adds biases between blocks, not in a norm, which rounds their gradients otherwise."""
    cfg = toy(recipe, base)
    losses, plain = run(cfg, 3)
    again, trainer = run(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, recompute=recompute)), 3)
    assert again == losses
    for mine, other in zip(trainer.chunks[0].fp8_state.gemms, plain.chunks[0].fp8_state.gemms):
        assert mine.history is None or torch.equal(mine.history, other.history)


@recipes
def test_evaluation_leaves_no_trace(recipe):
    assert run(toy(recipe), 4, evaluate=True)[0] == run(toy(recipe), 4)[0]


@families
def test_the_first_step_notes_the_magnitudes_that_later_ones_note(base):
    """With a rate of 0 the second step computes the same, but casts with the scale of both microbatches.

    So gradients are rounded otherwise, by 2^-3 at most in one product.
    """
    cfg = toy("delayed", base, optimizer={"lr": 0.0, "min_lr": 0.0}, model={"num_layers": 2})
    _, trainer = run(cfg, 1)
    run(cfg, 1, trainer)
    second, first = trainer.chunks[0].fp8_state.scaling.history[:2]
    assert len(first) == 2 * 4 * 3
    torch.testing.assert_close(first, second, rtol=2**-2, atol=0)


@pytest.mark.parametrize("change", [{}, ADAPTERS], ids=["all weights", "frozen"])
def test_pieces_of_the_head_note_the_magnitudes_of_the_whole_head(change):
    """Whether its weight is trained or not. Its first input has the same bits; later a rounding of 2^-3 may differ."""
    cfg = config(toy("delayed", precision={"fp8_head": True}, model={"vocab_size": 128, "num_layers": 2}), change)
    whole, pieces = (
        run(config(cfg, {"model": {"head_piece": piece}}), 2)[1].chunks[0].head.op.gemm.history[:2]
        for piece in (None, 32)
    )
    assert (whole[:, [ROLES.index("x"), ROLES.index("dy")]] > 0).all()
    assert whole[1, ROLES.index("x")] == pieces[1, ROLES.index("x")]
    torch.testing.assert_close(pieces, whole, rtol=2**-3, atol=0)


def casts_of(cfg, evaluate):
    """By step, this rank's casts in order: the largest magnitude, the limit of the format, the scale."""
    steps, cast, trainer = [], plain.cast, build(cfg, mesh_of(cfg))

    def noted(x, into):
        steps[-1].append((float(x.abs().max()), fp8_max(into.fp8_dtype), float(into.scale)))
        return cast(x, into)

    with mock.patch.object(plain, "cast", noted):
        for step in range(6):
            steps.append([])
            run(cfg, 1, trainer, first=step)
            if evaluate:  # of another sample, whose magnitudes may be larger
                steps.append([])
                data = Loader(dataset_of(cfg), cfg, trainer.mesh)
                trainer.evaluate(data.step(TRAIN["steps"] * cfg.train.global_batch_size, 0))
                data.close()
                steps.pop()
    return steps


@pytest.mark.parametrize(
    "world, layout, base, recompute, evaluate",
    [
        (1, "", GPT3, "none", True),
        (1, "", LLAMA, "selective", False),
        (2, "tp=2", LLAMA, "none", True),
        (2, "", LLAMA, "none", False),
        (2, "pp=2 vp=2", LLAMA, "none", False),
    ],
    ids=["gpt", "recomputed", "tp", "dp", "chunks"],
)
def test_each_tensor_is_cast_by_its_own_last_steps(ranks, world, layout, base, recompute, evaluate):
    """A step of one microbatch makes the same casts in the same order as any other step, in every chunk and layer.

    So the scale of a cast follows from the magnitudes of that cast, in the two steps before, which a history has here.
    """
    change = {"train": {"global_batch_size": 2 if layout else 2 * world, "recompute": recompute}}
    change |= {"optimizer": {"lr": 0.02}, "precision": {"fp8_head": True}, "model": {"vocab_size": 128}}
    cfg = config(toy("delayed", base, **(axes(layout) if world > 1 else {})), change)
    rules.check(cfg, world)
    results = ranks(world, lowered, casts_of, cfg, evaluate)
    groups = [[result] for result in results] if "pp" in layout else [results]
    for group in groups:  # ranks that have the same scales
        for casts in zip(*(zip(*steps, strict=True) for steps in group), strict=True):
            tops = [max(top for top, _, _ in of_ranks) for of_ranks in zip(*casts)]
            for steps in casts:
                for step, (_, limit, scale) in enumerate(steps[1:], 1):  # the first step has no history
                    assert scale == pytest.approx(limit / max(tops[max(0, step - 2) : step]), rel=1e-6)
        assert len({scale for _, _, scale in group[0][-1]}) > 20, "other scales would fit, too"


@pytest.mark.parametrize("change", [{}, {"model": {"head_piece": 32}}, ADAPTERS], ids=["whole", "pieces", "lora"])
def test_magnitudes_of_an_evaluation_enter_no_history(change):
    """Neither before the first step nor later, when the scales are known and other kernels cast."""
    cfg = config(toy("delayed", precision={"fp8_head": True}, model={"vocab_size": 128, "num_layers": 2}), change)
    trainer = build(cfg, mesh_of(cfg))
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    for step in range(2):
        trainer.evaluate(loader.step(0, 0))
        of_inputs, _, of_gradients = trainer.chunks[0].fp8_state.scaling.amax.view(-1, 3).unbind(1)
        assert not of_inputs.any() and not of_gradients.any()
        run(cfg, 1, trainer, first=step)
    loader.close()


def test_what_is_cast_how_often(monkeypatch):
    """Weights once per step; activations and gradients once per microbatch."""
    cfg = toy("delayed", precision={"fp8_bf16_layers": 1})
    trainer, casts = build(cfg, mesh_of(cfg)), []
    state, scale = trainer.chunks[0].fp8_state, Fp8Gemm._scale
    monkeypatch.setattr(Fp8Gemm, "_scale", lambda self, role, *rest: casts.append(role) or scale(self, role, *rest))
    run(cfg, 3, trainer)
    gemms = 4 * (MODEL["num_layers"] - 2)
    microbatches = TRAIN["global_batch_size"] // TRAIN["micro_batch_size"]
    assert len(state.gemms) == gemms
    assert {role: casts.count(role) for role in casts} == {
        "weight": 3 * gemms,
        "x": 3 * gemms * microbatches,
        "dy": 3 * gemms * microbatches,
    }
    blocks = trainer.chunks[0].blocks
    assert [type(blocks[str(i)].mlp.down.op.gemm) for i in range(4)] == [Gemm, Fp8Gemm, Fp8Gemm, Gemm]
    assert type(trainer.chunks[0].head.op.gemm) is Gemm


def test_the_scalings_of_chunks_move_on_together_as_each_would_alone():
    def filled(seed):
        draw, made = torch.Generator().manual_seed(seed), []
        for roles in ("x", "weight", "dy"), ("dy",), ("x", "dy") * 2:
            made.append(DelayedScaling(roles, (), CPU))
            made[-1].history.copy_(torch.rand(made[-1].history.shape, generator=draw))
            made[-1].amax.copy_(torch.rand(len(roles), generator=draw))
        made[0].amax[1], made[2].amax[0], made[2].history[:, 3], made[2].amax[3] = torch.inf, torch.nan, 0.0, 0.0
        return made

    together, alone = filled(1), filled(1)
    addresses = [[x.data_ptr() for x in (s.amax, s.scale, s.history)] for s in together]
    roll_histories(together)
    for scaling in alone:
        roll_histories([scaling])
    for mine, other in zip(together, alone, strict=True):
        assert torch.equal(mine.history, other.history) and torch.equal(mine.scale, other.scale)
        assert not mine.amax.any() and mine.has_history
    assert together[2].scale[3] == 1.0 and together[0].history[0, 1] == filled(1)[0].history[0, 1]
    assert [[x.data_ptr() for x in (s.amax, s.scale, s.history)] for s in together] == addresses


def test_histories_are_all_that_a_run_needs_to_go_on():
    cfg = toy("delayed")
    whole, _ = run(cfg, 6)
    _, trainer = run(cfg, 3)
    gemms = {
        name: module.op.gemm for name, module in trainer.chunks[0].named_modules() if isinstance(module, ParallelLinear)
    }
    saved = {name: gemm.history.clone() for name, gemm in gemms.items()}
    assert len(saved) == 4 * MODEL["num_layers"] and "blocks.0.attention.qkv" in saved
    old = trainer.chunks[0].fp8_state.scaling
    fresh = DelayedScaling(("x", "weight", "dy") * len(saved), (), CPU)
    for gemm in trainer.chunks[0].fp8_state.gemms:
        gemm.scaling = fresh
    for name, gemm in gemms.items():
        gemm.history.copy_(saved[name])
    fresh.follow_history()
    trainer.chunks[0].fp8_state.scaling = fresh
    assert torch.equal(fresh.scale, old.scale)
    assert run(cfg, 3, trainer, first=3)[0] == whole[3:]


# ---- errors -------------------------------------------------------------------------------------------------------


def test_transformer_engine_needs_a_gpu():
    with pytest.raises(ValueError, match="fp8_backend=te runs on CUDA devices, not on cpu; use .*=torch or"):
        choose_fp8(PrecisionConfig(fp8="current"), CPU)


def test_blocks_on_a_gpu_need_transformer_engine():
    with pytest.raises(ValueError, match="=torch has blocks for CPUs only.*use precision.fp8_backend=te, or"):
        choose_fp8(precision("block"), torch.device("cuda"))


@recipes
def test_a_dry_run_needs_no_library_and_refuses_what_a_gpu_refuses(recipe):
    """Its casts and products are those of torch, which have the shapes of Transformer Engine's."""
    twin = {"block": fp8_torch.TorchBlockFp8}.get(recipe, fp8_torch.TorchFp8)
    assert type(choose_fp8(PrecisionConfig(fp8=recipe, fp8_backend="te"), torch.device("meta"))) is twin
    if recipe == "block":
        with pytest.raises(ValueError, match="=torch has blocks for CPUs only"):
            choose_fp8(precision(recipe), torch.device("meta"))
    else:
        assert type(choose_fp8(precision(recipe), torch.device("meta"))) is twin
    assert choose_apex("apex", torch.device("meta")) is None


def test_transformer_engine_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.delitem(sys.modules, "minitron.kernels.fp8_te", raising=False)
    message = r"cannot load Transformer Engine \(.*\); \S+ -m pip install .*\[fp8\]\'?, or use .*=torch"
    with pytest.raises(ValueError, match=message):
        choose_fp8(PrecisionConfig(fp8="current"), torch.device("cuda"))
