"""What the numbers of a step are doing: counts by hand, every layout, and the layer whose scale is wrong."""

import json
import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from exactly import without_rounding
from layouts import GPT3, LLAMA, config, dataset_of, first_gradients, lowered, mesh_of
from minitron import pretrain
from minitron.comm.mesh import Axis
from minitron.config import rules
from minitron.data.loader import Loader
from minitron.kernels import fp8_counts
from minitron.kernels.fp8_counts import CastCounts
from minitron.kernels.fp8_scales import ROLES
from minitron.kernels.fp8_torch import TorchBlockFp8, TorchFp8
from minitron.optim.numerics import TENSORS
from minitron.runtime.log import Log
from minitron.train import Trainer, build
from test_invariance import axes

EVERY = {"log": {"numerics_every": 1, "dir": "unused"}, "train": {"steps": 2, "global_batch_size": 4}}


BLOCKS = {"model": {"hidden_size": 128, "ffn_hidden_size": 128, "num_kv_heads": 8, "max_positions": 128}}


def fp8(recipe, **keys) -> dict:
    blocks = BLOCKS | {"train": {"seq_len": 128}} if recipe == "block" else {}  # of 128 values
    return blocks | {"precision": {"dtype": "bf16", "fp8": recipe, "fp8_backend": "torch", **keys}}


class Rows:
    """Stands in for a Log: keeps what it is given."""

    def __init__(self):
        self.rows = {}

    def record(self, kind, step, **values):
        self.rows[step] = values


def toy(base, *changes, layout=""):
    return config(base, EVERY, {"model": {"num_layers": 2}}, *changes, axes(layout))


def run(cfg, log, before=lambda trainer, step: None) -> tuple[Trainer, list[dict]]:
    """Train as train.train does; before(trainer, step) is called before each step."""
    torch.set_num_threads(1)
    trainer, figures, batch = build(cfg, mesh_of(cfg), log=log), [], cfg.train.global_batch_size
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    for step in range(1, cfg.train.steps + 1):
        before(trainer, step)
        trainer.mesh.activity.begin_step(step)
        stats = trainer.step(loader.step((step - 1) * batch, step), cfg.optimizer.lr)
        figures.append(stats.read())
        if step == 1:
            trainer.evaluate(loader.step(0, 0))  # counts nothing
    if trainer.numerics is not None:
        trainer.numerics.close()
    loader.close()
    trainer.gradients.wait_parameters()
    return trainer, figures


def rows_of(cfg) -> tuple[dict, list[dict]]:
    _, figures = lowered(run, cfg, log := Rows())
    return log.rows, figures


# ---- casts ----------------------------------------------------------------------------------------------------------


def counted(x: torch.Tensor, backend=TorchFp8(), role: str = "x", scale=None, times: int = 1) -> tuple[list, list]:
    """The row of a tensor's counts, in the middle of others."""
    counts = CastCounts(["a", "b", "c"])
    counts.sums.fill_(7.0)  # of an earlier step
    counts.tops.fill_(1e9)
    counts.count(True)
    for _ in range(times):
        cast = backend.cast(x, role, Axis.single(), (scale, None), columnwise=False)
        counts.add("b", role, x, *cast[:2])
    place = 1, ROLES.index(role)
    sums, tops = counts.sums[place].tolist(), counts.tops[place].tolist()
    counts.sums[place], counts.tops[place] = 0, -math.inf
    assert not counts.sums.any() and (counts.tops == -math.inf).all()
    return sums, tops


@pytest.mark.parametrize("role, smallest, largest", [("x", 2.0**-9, 448.0), ("dy", 2.0**-16, 57344.0)])
def test_casts_are_counted_by_hand(monkeypatch, role, smallest, largest):
    """Half of the smallest number is rounded to zero, and what is above the largest one is clipped."""
    values = [0.0, -0.0, smallest / 2, -smallest / 2, smallest, 1.0, -largest, 1.5 * largest, -2 * largest, 4 * largest]
    scale = torch.tensor([2.0**-6])
    x = (torch.tensor(values) / scale).bfloat16().view(5, 2)
    for at_once in (1, 4, 1000):  # elements
        monkeypatch.setattr(fp8_counts, "COUNTED_AT_ONCE", at_once)
        assert counted(x, role=role, scale=scale) == ([2, 3, 10], [4 * largest * 64, -64, 64])
    assert counted(x, role=role, scale=scale, times=3)[0] == [6, 9, 30]
    sums, _ = counted(x, role=role)  # the tensor's own scale clips nothing
    assert sums[1:] == [0, 10]


def test_a_scale_that_fits_exactly_overflows_nowhere():
    for top in torch.logspace(-3, 3, 200).bfloat16():
        x = torch.stack([top, -top]).view(1, 2)
        assert counted(x, scale=448 / top.float().view(1))[0] == [0, 0, 2]


def test_blocks_underflow_by_their_own_scales():
    x = torch.full((128, 256), 1.0)
    x[:, 1], x[:, 129:] = 1e-9, 2.0**-30
    x[:, 128] = 0.0
    assert counted(x.bfloat16(), TorchBlockFp8())[0] == [128, 0, 128 * 256]


def test_nothing_is_counted_without_the_key_and_in_other_steps():
    counts = CastCounts()
    counts.count(True)
    assert not counts.on and not counts.sums.numel()
    off, third = (config(toy(LLAMA, fp8("delayed")), {"log": {"numerics_every": every}}) for every in (0, 3))
    trainer = build(off, mesh_of(off))
    assert trainer.numerics is None and not trainer.kernels.counts.layers
    trainer, counted_steps = build(third, mesh_of(third)), []
    numerics, counts = trainer.numerics, trainer.kernels.counts

    def forward_backward(batches):
        counted_steps.append(counts.on)
        return runner.forward_backward(batches)

    runner, numerics.runner = numerics.runner, SimpleNamespace(forward_backward=forward_backward)
    loader = Loader(dataset_of(third), third, trainer.mesh)
    for step in range(1, 8):
        trainer.mesh.activity.begin_step(step)
        trainer.step(loader.step(0, step), 0.0)
        assert (numerics.waiting is not None) == (step % 3 == 0) and not counts.on
    loader.close()
    assert counted_steps == [step % 3 == 0 for step in range(1, 8)]


# ---- runs -----------------------------------------------------------------------------------------------------------


def by_hand(cfg):
    """The figures of the first step, from its parameters and gradients as the optimizer sees them."""
    trainer = build(cfg, mesh_of(cfg))
    params = {p.spec.name: p.detach().double().clone() for chunk in trainer.chunks for p in chunk.parameters()}
    grads, loader = first_gradients(trainer), Loader(dataset_of(cfg), cfg, trainer.mesh)
    batches = loader.step(0, 1)
    trainer.step(batches, 0.0)
    loader.close()
    tokens, flat = sum(batch.count for batch in batches), {name: grad.double() for name, (grad, _) in grads.items()}
    parts: dict[str, float] = {}
    for name, grad in flat.items():
        part = ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])
        parts[part] = parts.get(part, 0.0) + float(grad.square().sum())
    zeros, elements = (sum(int(f(grad)) for grad in flat.values()) for f in (lambda g: (g == 0).sum(), torch.numel))
    return {
        "param_norm": math.sqrt(sum(float(p.square().sum()) for p in params.values())),
        "grad_zeros": zeros,
        "grad_zeros%": 100 * zeros / elements,
        **{f"grad_norm/{part}": math.sqrt(square) / tokens for part, square in parts.items()},
    }


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_figures_are_those_counted_by_hand(base):
    cfg = config(toy(base), {"train": {"steps": 1}})
    rows, (figures,) = rows_of(cfg)
    expected = by_hand(cfg)
    assert rows[1] == pytest.approx(expected, rel=1e-6) and rows[1]["grad_zeros"] > 0
    assert rows[1].keys() == expected.keys() >= {"grad_norm/embedding", "grad_norm/blocks.1", "grad_norm/head"}
    assert whole_norm(rows[1]) == pytest.approx(figures["grad_norm"], rel=1e-9)


def whole_norm(row):
    return math.sqrt(sum(value**2 for name, value in row.items() if name.startswith("grad_norm/")))


def test_squares_of_layers_are_those_of_the_step_also_with_a_loss_scale():
    rows, figures = rows_of(toy(LLAMA, {"precision": {"dtype": "fp16", "loss_scale": 2.0**8}}))
    for step, of_step in enumerate(figures, start=1):
        assert whole_norm(rows[step]) == pytest.approx(of_step["grad_norm"], rel=1e-9) and not of_step["skipped"]


def test_a_layer_whose_gradients_are_not_finite_hides_no_other():
    def spoil(trainer, step):
        runner, slices = trainer.numerics.runner, [bucket.grad_slice for bucket in trainer.gradients.buckets]

        def forward_backward(batches):
            result = runner.forward_backward(batches)
            for part in trainer.gradients.owned():
                if part.name == "blocks.1.mlp.up.weight":
                    part.of(slices)[0] = math.inf
            return result

        if step == 2:
            trainer.numerics.runner = SimpleNamespace(forward_backward=forward_backward)

    lowered(run, toy(LLAMA), log := Rows(), spoil)
    assert [name for name, value in log.rows[2].items() if not math.isfinite(value)] == ["grad_norm/blocks.1"]


def test_records_are_written_beside_those_of_steps(tmp_path):
    keys = "model.num_layers=1 model.hidden_size=32 model.ffn_hidden_size=32 model.num_heads=2 model.num_kv_heads=2 "
    keys += "model.vocab_size=64 train.seq_len=16 train.micro_batch_size=2 train.global_batch_size=4 train.steps=6 "
    keys += f"data.source=mock precision.dtype=fp32 log.numerics_every=3 log.dir={tmp_path}"
    pretrain.main(keys.split())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    norms = {row["step"]: row["grad_norm"] for row in rows if row["kind"] == "step"}
    written = {row["step"]: whole_norm(row) for row in rows if row["kind"] == "numerics"}
    assert written == {step: pytest.approx(norms[step], rel=1e-9) for step in (3, 6)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "base, layout, world",
    [
        (GPT3, "tp=2 pp=2", 4),
        (LLAMA, "", 2),
        (GPT3, "pp=2", 2),
        (LLAMA, "cp=2", 2),
        (GPT3, "tp=2", 2),
        (LLAMA, "tp=2 sequence_parallel=off", 2),
    ],
)
def test_every_layout_has_the_figures_of_one_process(ranks, base, layout, world):
    """Zeros are the rows of tokens that the batch lacks, and now and then a sum that is zero in one order only."""
    alone, _ = rows_of(toy(base))
    for rows, _ in ranks(world, rows_of, toy(base, layout=layout)):
        for step, name in product((1, 2), alone[1]):
            tolerance = 0.02 if name.startswith("grad_zeros") else 1e-4
            assert rows[step][name] == pytest.approx(alone[step][name], rel=tolerance), name


def exact_rows(cfg) -> dict:
    """What casts that keep float32's bits log: their scales, and what they clip. Nothing underflows."""
    with without_rounding(cfg.precision.fp8_params):
        return rows_of(config(cfg, {"precision": {"dtype": "fp32"}}))[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout, world", [("", 2), ("tp=2", 2), ("pp=2", 2)])
@pytest.mark.parametrize(
    "recipe, keys", [("delayed", {"fp8_head": True}), ("delayed", {"fp8_params": True}), ("current", {})]
)
def test_every_layout_counts_the_casts_of_one_process(ranks, recipe, keys, layout, world):
    alone = exact_rows(toy(LLAMA, fp8(recipe, **keys)))
    assert recipe == "current" or max(value for name, value in alone[2].items() if name.endswith("overflows%")) > 0
    for rows in ranks(world, exact_rows, toy(LLAMA, fp8(recipe, **keys), layout=layout)):
        for step in (1, 2):
            assert rows[step].keys() == alone[step].keys()
            for name, value in rows[step].items():
                # without a history each rank has a scale of its own for its part of a tensor
                own = name.endswith("scale_inv_min") and (recipe == "current" or step == 1)
                if name.startswith("fp8/") and not own:
                    assert value == pytest.approx(alone[step][name], rel=1e-3, abs=0.01 * name.endswith("%")), name


@pytest.mark.parametrize("recipe, stats", [("delayed", 5), ("current", 4), ("block", 2)])
def test_counting_changes_no_bit_of_a_run(recipe, stats):
    cfg = toy(LLAMA, fp8(recipe))
    plain, figures = lowered(run, config(cfg, {"log": {"numerics_every": 0}}), None)
    watched, same = lowered(run, cfg, log := Rows())
    assert figures == same
    for mine, other in zip(watched.chunks[0].parameters(), plain.chunks[0].parameters(), strict=True):
        assert torch.equal(mine, other)
    assert all(map(math.isfinite, log.rows[2].values()))
    names = [name for name in log.rows[2] if name.startswith("fp8/")]
    assert len(names) == 2 * 4 * 3 * stats and {name.split("/")[2] for name in names} == set(TENSORS)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_weights_kept_as_bytes_have_the_figures_of_those_that_are_cast(recipe):
    """The bytes are the same; so is everything else."""
    kept, _ = rows_of(toy(LLAMA, fp8(recipe, fp8_params=True)))
    cast, _ = rows_of(toy(LLAMA, fp8(recipe)))
    assert kept == cast


def test_recomputed_casts_change_no_share():
    plain, _ = rows_of(toy(LLAMA, fp8("delayed")))
    again, _ = rows_of(toy(LLAMA, fp8("delayed"), {"train": {"recompute": "selective"}}))
    assert again == plain


def planted(factor: float, layer: str, tensor: str, trainer: Trainer, step: int) -> None:
    """Multiply the scale of a tensor before the second step."""
    state = trainer.chunks[0].fp8_state
    if step == 2:
        gemm = next(gemm for gemm in state.gemms if gemm.name == layer)
        state.scaling.scale[gemm.first + TENSORS.index(tensor)] *= factor


@pytest.mark.parametrize("factor, lost", [(2.0**-40, "underflows%"), (2.0**12, "overflows%")])
@pytest.mark.parametrize(
    "layer, tensor",
    [("blocks.1.mlp.up", "gradient"), ("blocks.0.attention.out", "activation"), ("blocks.1.mlp.down", "weight")],
)
def test_the_log_names_the_layer_whose_scale_is_wrong(tmp_path, layer, tensor, factor, lost):
    cfg = config(toy(LLAMA, fp8("delayed")), {"log": {"dir": str(tmp_path)}})
    rules.check(config(cfg, {"precision": {"dtype": "bf16"}}), 1)
    with Log(cfg, 0, 1) as log:
        run(cfg, log, partial(planted, factor, layer, tensor))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    before, after = ({k: v for k, v in row.items() if k.endswith(lost)} for row in rows if row["kind"] == "numerics")
    worst = max(after, key=after.get)
    assert worst == f"fp8/{layer}/{tensor}/{lost}" and after[worst] > 50 and max(before.values()) < 20
