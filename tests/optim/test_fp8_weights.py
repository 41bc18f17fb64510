"""Weights that are kept as FP8 bytes: a run is the one that keeps bf16 weights and casts them, bit by bit, in every
layout, with half of their memory and of their traffic.

The bytes are the bf16 weights' casts because a master is rounded to bf16 on its way, and because a scale is made of the
same magnitudes, whichever ranks hold the slices.
"""

from dataclasses import replace

import pytest
import torch

from layouts import GPT3, LLAMA, assemble, config, dataset_of, mesh_of
from minitron.config import rules
from minitron.data.loader import Loader
from minitron.kernels import plain
from minitron.kernels.fp8 import Fp8Gemm
from minitron.kernels.fp8_scales import DelayedScaling, WeightScales, roll_histories
from minitron.kernels.gemm import CastInto
from minitron.optim.buckets import Gradients
from minitron.parallel.linear import ParallelLinear
from minitron.planner.dryrun import dryrun
from minitron.train import build
from test_invariance import axes

E4M3 = torch.float8_e4m3fn
SIZES = {
    "model": {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 128, "num_kv_heads": 8, "max_positions": 64},
    "train": {"seq_len": 64, "steps": 4, "global_batch_size": 2},
}
TINY = {"model": {"hidden_size": 16, "ffn_hidden_size": 16, "num_heads": 1, "num_kv_heads": 1, "num_layers": 2}}
recipes = pytest.mark.parametrize("recipe", ["delayed", "current"])


def fp8(recipe, kept=True, **keys):
    return {"precision": {"dtype": "bf16", "fp8": recipe, "fp8_backend": "torch", "fp8_params": kept, **keys}}


def train(cfg, bucket_bytes=None, broken_step=None):
    """Figures of every step and of an evaluation; what a checkpoint holds; the parameters with their scales.

    broken_step: whose gradients are not finite, so that nothing is updated.
    """
    torch.set_num_threads(1)
    rules.check(cfg, mesh_of(cfg).world.size)
    with pytest.MonkeyPatch.context() as patch:
        if not cfg.precision.fp8_params:  # the same buckets: sums of three and more ranks depend on a gradient's place
            patch.setattr(ParallelLinear, "__init__", in_buckets_of_their_own(ParallelLinear.__init__))
        if bucket_bytes is not None:
            patch.setattr(Gradients, "__init__", partial_init(Gradients.__init__, bucket_bytes))
        trainer = build(cfg, mesh_of(cfg))
    figures, finish = [], trainer.gradients.finish
    loader, batch = Loader(dataset_of(cfg), cfg, trainer.mesh), cfg.train.global_batch_size
    for step in range(cfg.train.steps):

        def finish_broken(step=step):
            finish()
            if step == broken_step:
                trainer.gradients.buckets[0].grad_slice[0] = float("inf")

        trainer.gradients.finish = finish_broken
        figures.append(repr(trainer.step(loader.step(step * batch, step), cfg.optimizer.lr).read()))  # NaN equals NaN
        if step == 1:
            figures.append(trainer.evaluate(loader.step(0, 0)).tolist())
    loader.close()
    trainer.gradients.wait_parameters()
    scalings = [chunk.fp8_state.scaling for chunk in trainer.chunks]
    masters = assemble(trainer.gradients, trainer.optimizer.masters)
    histories = [scaling.history.clone() for scaling in scalings if scaling is not None]
    params = {
        p.spec.name: (p.detach().clone(), None)
        if p.dtype == torch.bfloat16
        else (
            p.detach().view(torch.uint8).clone(),
            p.spec.fp8_scale.scale_inv.clone(),
        )  # the pool of ranks knows no float8
        for chunk in trainer.chunks
        for p in chunk.parameters()
    }
    return figures, masters, histories, params


def in_buckets_of_their_own(original):
    def init(self, linear, bias):
        if isinstance(linear.gemm, Fp8Gemm):
            linear.weight.spec = replace(linear.weight.spec, decay=2)  # which is as true as True, and another key
        original(self, linear, bias)

    return init


def partial_init(original, bucket_bytes):
    return lambda self, *args, **kwargs: original(self, *args, **kwargs, bucket_bytes=bucket_bytes)


def assert_the_same_run(ranks, world, cfg, other, *args):
    for mine, twin in zip(ranks(world, train, cfg, *args), ranks(world, train, other, *args), strict=True):
        assert mine[0] == twin[0]
        for part in mine[1], mine[3]:
            assert part.keys() == twin[1].keys() == twin[3].keys()
        assert all(torch.equal(master, twin[1][name]) for name, master in mine[1].items())
        assert len(mine[2]) == len(twin[2]) and all(map(torch.equal, mine[2], twin[2]))
        for name, (weight, inverse) in mine[3].items():
            expected, _ = twin[3][name]
            assert expected.dtype == torch.bfloat16 and weight.shape == expected.shape
            if inverse is None:
                assert torch.equal(weight, expected), name
            else:  # half a unit of e4m3's last bit, or of its smallest number
                error = (weight.view(E4M3).float() * inverse - expected.float()).abs()
                assert (error <= expected.float().abs() * 2.0**-4 + inverse * 2.0**-10).all(), name
        kept = [name for name, (_, inverse) in mine[3].items() if inverse is not None]
        assert kept and all(".attention." in name or ".mlp." in name for name in kept)
        assert not any(name.endswith("bias") for name in kept)


@pytest.mark.sampled(3, "2--current")
@pytest.mark.parametrize(
    "world, layout, recipe",
    [
        (1, "", "delayed"),
        (2, "", "current"),
        (3, "", "current"),
        (2, "tp=2", "delayed"),
        (2, "pp=2", "current"),
        (4, "pp=2 schedule=zb-h1", "delayed"),
        (2, "cp=2", "delayed"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (8, "tp=2 pp=2 cp=2", "delayed"),
                (1, "", "current"),
                (2, "", "delayed"),
                (2, "overlap_grads=off", "current"),
                (4, "tp=4 sequence_parallel=off", "current"),
                (4, "tp=2", "delayed"),
                (4, "pp=2 vp=2", "delayed"),
                (4, "cp=2 cp_style=ulysses", "current"),
                (8, "tp=2 pp=2 vp=2", "current"),
            )
        ),
    ],
)
def test_a_run_is_the_one_that_casts_bf16_weights(ranks, world, layout, recipe):
    base = GPT3 if layout in ("pp=2", "tp=2", "cp=2") else LLAMA
    # of a pipeline, a second microbatch on each data rank
    more = {"train": {"global_batch_size": 6 if world == 3 else 4 if "pp=2" in layout else 2}}
    more |= {"model": {"num_layers": 4}} if "vp" in layout else {}
    cfg, other = (config(base, SIZES, fp8(recipe, kept), axes(layout), more) for kept in (True, False))
    assert_the_same_run(ranks, world, cfg, other)


@pytest.mark.sampled(3)
@recipes
@pytest.mark.parametrize("world, layout", [(2, ""), (8, ""), (4, "pp=2")])
def test_many_buckets_some_of_which_are_padding_on_some_ranks(ranks, recipe, world, layout):
    """A weight of 256 elements over 8 ranks in slices of 128: six ranks hold none of it, and gather it all the same."""
    batch = {"train": {"global_batch_size": max(4, world)}}
    cfg, other = (config(LLAMA, SIZES, TINY, fp8(recipe, kept), axes(layout), batch) for kept in (True, False))
    assert_the_same_run(ranks, world, cfg, other, 1024)


@pytest.mark.sampled(2)
@recipes
@pytest.mark.parametrize("broken", [0, 2])
def test_a_skipped_update_leaves_the_weights_and_moves_the_scales(ranks, recipe, broken):
    cfg, other = (config(LLAMA, SIZES, fp8(recipe, kept)) for kept in (True, False))
    assert_the_same_run(ranks, 2, cfg, other, None, broken)


@recipes
def test_blocks_in_bf16_and_recomputation_and_bf16_gradients(ranks, recipe):
    more = {
        "train": {"recompute": "full", "global_batch_size": 4},
        "optimizer": {"grad_dtype": "bf16"},
        "model": {"num_layers": 4},
    }
    cfg, other = (config(LLAMA, SIZES, fp8(recipe, kept, fp8_bf16_layers=1), more) for kept in (True, False))
    assert_the_same_run(ranks, 2, cfg, other)


# ---- memory and traffic ----------------------------------------------------------------------------------------------


def matrices(m) -> int:
    """Elements of the weights of the blocks' products, of a Llama with as many key as query heads."""
    return m.num_layers * (4 * m.hidden_size**2 + 3 * m.hidden_size * m.ffn_hidden_size)


def count_bytes(cfg):
    """Bytes of parameters, of their buffers, of what the forward has cast at a step's end, before and in it."""
    trainer, held = build(cfg, mesh_of(cfg)), []
    parameters = sum(p.nbytes for chunk in trainer.chunks for p in chunk.parameters())
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in all_params(trainer)}
    finish, gemms = trainer.runner.finish, [g for chunk in trainer.chunks for g in chunk.fp8_state.gemms]

    def look():
        held.append(sum(x.nbytes for g in gemms for x in (g._weight.rowwise, g._weight.columnwise)))
        shared = {x.untyped_storage().data_ptr() for g in gemms for x in (g._weight.rowwise,)}
        held.append(shared <= storages.keys())
        finish()

    trainer.runner.finish = look
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    trainer.step(loader.step(0, 1), 1e-3)
    loader.close()
    assert all(g._weight is None for g in gemms)
    return parameters, sum(storages.values()), held


def all_params(trainer):
    return [p.data for chunk in trainer.chunks for p in chunk.parameters()]


def test_there_is_no_bf16_copy(ranks):
    cfg, other = (config(LLAMA, SIZES, fp8("delayed", kept)) for kept in (True, False))
    count, padding = matrices(cfg.model), 4 * 2 * 128 * 2
    (mine, _), (twin, _) = (ranks(2, count_bytes, c) for c in (cfg, other))
    assert twin[0] - mine[0] == count
    assert mine[0] <= mine[1] <= mine[0] + padding and twin[0] <= twin[1] <= twin[0] + padding
    assert mine[2] == [2 * count, True]  # the rows are the parameter's bytes, the columns their transpose
    assert twin[2] == [2 * count, False]


def test_what_data_ranks_gather_is_bytes():
    """Of the blocks' weights half; of the rest what it was."""
    cfg, other = (config(LLAMA, SIZES, fp8("current", kept)) for kept in (True, False))
    mine, twin = (dryrun.traffic(dryrun.dry_run(c, 2)) for c in (cfg, other))
    assert twin["dp_cp all-gather"][1] - mine["dp_cp all-gather"][1] == matrices(cfg.model) // 2  # a rank's slices
    assert twin["dp_cp reduce-scatter"][1] == mine["dp_cp reduce-scatter"][1]
    assert mine["dp_cp all-reduce"] == [1, 4 * 4 * cfg.model.num_layers]  # one maximum a weight, all at once
    assert "dp_cp all-reduce" not in twin
    delayed, cast = (dryrun.traffic(dryrun.dry_run(config(LLAMA, SIZES, fp8("delayed", k)), 2)) for k in (True, False))
    assert delayed["dp_cp all-reduce"] == cast["dp_cp all-reduce"]  # the magnitudes travel with the step's others


def test_a_forward_casts_no_weight(monkeypatch):
    cfg = config(LLAMA, SIZES, fp8("delayed"))
    roles, scale = [], Fp8Gemm._scale
    monkeypatch.setattr(Fp8Gemm, "_scale", lambda self, role, *rest: roles.append(role) or scale(self, role, *rest))
    train(cfg)
    assert set(roles) == {"x", "dy"}


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_a_master_is_cast_as_the_bf16_weight_would_be():
    master = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 1, 4000)
    scale, amax, out = torch.tensor([20.0]), torch.zeros(1), torch.zeros(4000, dtype=torch.uint8).view(E4M3)
    plain.cast_master(master, scale, out, amax)
    values = plain.cast(master.bfloat16().view(40, 100), CastInto(scale, None, E4M3)).rowwise
    assert torch.equal(out.view(torch.uint8), values.view(torch.uint8).flatten())
    assert amax == master.bfloat16().float().abs().max() and out.float().abs().max() == 448  # which 20 times 24 exceeds
    direct = (master * scale).clamp(-448, 448).to(E4M3)
    assert 0 < (out.float() != direct.float()).float().mean() < 0.05  # rounded twice: seldom another number
    plain.cast_master(master, scale, None, amax.zero_())
    assert amax > 20
    plain.cast_master(master[:10], torch.tensor([40.0]), out[:10], None)
    assert torch.equal(out[:10].float(), (master[:10].bfloat16().float() * 40).to(E4M3).float())


def test_scales_are_those_of_the_recipe_and_stay_where_they_are():
    delayed = DelayedScaling(("x", "weight", "dy") * 2, (), torch.device("cpu"))
    scales = WeightScales(2, delayed, torch.device("cpu"))
    second, places = scales.of(1), [x.data_ptr() for x in (scales.scale, scales.scale_inv, scales.amax)]
    assert not scales.begin()  # no history: from the weights themselves
    scales.amax.copy_(torch.tensor([2.0, 7.0]))
    scales.follow()
    scales.end()
    assert second.scale == 64 and second.scale_inv == 1 / 64
    assert delayed.amax.tolist() == [0, 2, 0, 0, 7, 0]
    roll_histories([delayed])
    assert scales.begin() and scales.scale.tolist() == [224, 64] and scales.amax.tolist() == [0, 0]
    second.amax.fill_(14.0)
    scales.end()
    roll_histories([delayed])
    assert scales.scale.tolist() == [224, 64], "the bytes have not changed yet"
    assert scales.begin() and second.scale == 32 and second.scale_inv == 1 / 32
    assert places == [x.data_ptr() for x in (scales.scale, scales.scale_inv, scales.amax)]
