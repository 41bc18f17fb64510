"""A suspicious step is computed twice: the data are blamed for what comes again, and a rank for what does not."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fault_run import Run
from layouts import GPT3, LLAMA, config, dataset_of, mesh_of
from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.data.loader import Loader
from minitron.optim import rerun
from minitron.optim.rerun import Rerun, WrongResult
from minitron.optim.scaler import LossScaler
from minitron.supervise.lead import BROKEN, LOST
from minitron.train import Trainer, build
from replay import replayed
from test_replay import APART, DROPOUT, FP16, fp8

# ---- the second result is the first ---------------------------------------------------------------------------------


def figures_of(compared: Rerun, batches: list) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """This rank's figures of a step that is computed, as the second time; and its slices of the gradients."""
    compared.fp8.drop_casts()
    loss_sum, _ = compared.runner.forward_backward(batches)
    return compared._own_figures(loss_sum, batches), [b.grad_slice.clone() for b in compared.gradients.buckets]


def computed_twice(cfg, again: bool) -> tuple[list, set]:
    """In each step, the figures and the gradients of both times; and which figures the ranks took for different."""
    torch.set_num_threads(1)
    trainer, found = build(cfg, mesh_of(cfg)), []
    if again:
        trainer = replayed(trainer)
    compared = Rerun(trainer.runner, trainer.gradients, trainer.fp8, trainer.scaler, None)
    loader, batch = Loader(dataset_of(cfg), cfg, trainer.mesh), cfg.train.global_batch_size
    for step in range(cfg.train.steps):
        batches = loader.step(step * batch, step)
        first, before = figures_of(compared, batches)
        second, after = figures_of(compared, batches)
        found.append((first.tolist(), second.tolist(), compared._differing(first, second)))
        assert all(map(torch.equal, before, after))
        trainer.step(batches, cfg.optimizer.lr)
    loader.close()
    assert not again or trainer.runner.replaying
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world, base, change, layout, again",
    [
        (1, GPT3, DROPOUT, "", False),
        (1, LLAMA, FP16, "", True),
        (1, LLAMA, fp8("delayed"), "", False),
        (2, LLAMA, fp8("delayed", fp8_params=True), "tp=2", True),
        (2, LLAMA, APART, "", True),
        (2, GPT3, DROPOUT, "tp=2", False),
        (2, LLAMA, {}, "cp=2", False),
        (4, GPT3, DROPOUT, "tp=2 pp=2", True),
        (4, LLAMA, {}, "pp=2 vp=2", False),
        (2, GPT3, {}, "pp=2 schedule=zb-h1", True),
    ],
)
def test_a_step_computed_again_is_the_same_in_every_layout(ranks, world, base, change, layout, again):
    from test_invariance import axes

    small = {"model": {"num_layers": 4 if "vp" in layout else 2}, "train": {"steps": 3, "global_batch_size": 4}}
    cfg = config(base, small, change, axes(layout))
    for found in ranks(world, computed_twice, cfg, again, timeout=600):
        assert len(found) == 3
        for first, second, differing in found:
            assert first == second and first[1] > 0 and differing == []


def test_a_weight_that_was_cast_wrongly_is_cast_again():
    """Else the same wrong result came again, and the data were blamed."""
    small = {"model": {"num_layers": 1}, "train": {"global_batch_size": 1}}
    cfg = config(LLAMA, fp8("current"), small)
    trainer = build(cfg, mesh_of(cfg))
    compared = Rerun(trainer.runner, trainer.gradients, trainer.fp8, trainer.scaler, None)
    compared._suspicion = lambda figures: "the loss is high"
    loader, gemm = Loader(dataset_of(cfg), cfg, trainer.mesh), trainer.fp8.states[0].gemms[0]
    cast, wrong = gemm._cast, iter([100.0])

    def spoil(x, role, *args):
        payload = cast(x, role, *args)
        return payload._replace(rowwise_scale=payload.rowwise_scale * (next(wrong, 1.0) if role == "weight" else 1.0))

    with mock.patch.object(gemm, "_cast", spoil), pytest.raises(WrongResult, match="Suspect the hardware"):
        compared.forward_backward(loader.step(0, 1))
    loader.close()


def spoiled(cfg, place: int, shared: str = "") -> list[int]:
    """Who is blamed if rank 0 once computes another gradient, in the slice of data rank `place`.

    shared: what the key of the bucket has, that is spoiled: it is summed over another axis, too.
    """
    torch.set_num_threads(1)
    trainer = build(cfg, mesh_of(cfg))
    compared = Rerun(trainer.runner, trainer.gradients, trainer.fp8, trainer.scaler, None)
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    bucket = next(b for b in trainer.gradients.buckets if not shared or getattr(b.key, shared))
    batches, reduce = loader.step(0, 1), type(bucket.slice_comm).reduce
    loader.close()
    first, _ = figures_of(compared, batches)

    def reduce_spoiled(slices, buffer, out):
        if buffer is bucket.grad and trainer.mesh.rank == 0:
            buffer[bucket.plan.slice_of(place)] *= 1000
        return reduce(slices, buffer, out)

    with mock.patch.object(type(bucket.slice_comm), "reduce", reduce_spoiled):
        second, _ = figures_of(compared, batches)
    return compared._differing(first, second)


@pytest.mark.parametrize("place", range(4))
def test_wrong_sums_of_a_node_are_blamed_on_it_and_not_on_who_gets_them(ranks, place):
    """Ranks 0 and 1 are a node. Rank 0 sums its slice and that of rank 2, in the other node."""
    bf16 = {"precision": {"dtype": "bf16"}, "optimizer": {"reduce_dtype": "bf16"}, "train": {"global_batch_size": 4}}
    cfg = config(LLAMA, {"model": {"num_layers": 2}}, bf16)
    assert all(blamed == [0] for blamed in ranks(4, spoiled, cfg, place))


@pytest.mark.parametrize("base, layout, shared", [(LLAMA, "tp=2", "sum_over_tp"), (GPT3, "pp=2", "tied")])
def test_a_sum_over_tp_or_stages_is_no_result_of_the_ranks_that_get_it(ranks, base, layout, shared):
    """With several data ranks the rank's own gradients name it."""
    from test_invariance import axes

    small = {"model": {"num_layers": 2}, "train": {"global_batch_size": 4}}
    for world, data_ranks in (2, 1), (4, 2):
        cfg = config(base, small, axes(layout))
        assert ranks(world, spoiled, cfg, data_ranks - 1, shared) == [[0] * (data_ranks > 1)] * world


# ---- what is suspicious ---------------------------------------------------------------------------------------------


def a_rerun(mesh) -> Rerun:
    """Of a runner that fakes a step's loss sum, with gradients of norm 0.5."""
    square_sum = lambda: torch.tensor(0.25, dtype=torch.float64)
    gradients = SimpleNamespace(mesh=mesh, square_sum=square_sum, buckets=[])
    runner = SimpleNamespace(forward_backward=lambda _: (torch.tensor(5.0), False))
    scaler = SimpleNamespace(dynamic=False, loss_grad=lambda _: 1.0)
    return Rerun(runner, gradients, SimpleNamespace(drop_casts=lambda: None), scaler, None)


def with_history(loss: float, norm: float, steps: int = rerun.MIN_HISTORY) -> Rerun:
    compared = a_rerun(Mesh.offline())
    for i in range(steps):
        compared.history["loss"].append(loss * (1 + 0.005 * (-1) ** i))
        compared.history["gradient norm"].append(norm * (1 + 0.2 * (-1) ** i))
    return compared


def test_a_spike_is_ten_spreads_above_the_median():
    check = with_history(2.0, 0.5)._suspicion
    assert check({"loss": 2.15, "gradient norm": 5.0}) is None
    assert check({"loss": 0.1, "gradient norm": 0.01}) is None
    assert check({"loss": 2.3, "gradient norm": 0.5}).startswith("the loss is 2.3, and was 2 +- 0.02 in the last 20")
    assert check({"loss": 2.0, "gradient norm": 6.0}).startswith("the gradient norm is 6, and was 0.5 +- 0.5")
    noisy = with_history(2.0, 0.5)
    noisy.history["loss"].extend([2.5, 1.5] * 40)
    assert noisy._suspicion({"loss": 4.0, "gradient norm": 0.5}) is None


def test_what_was_usual_long_ago_is_forgotten_also_by_a_run_that_goes_on(monkeypatch):
    """Forty high losses before twenty-five low ones: only the window's are known."""
    monkeypatch.setattr(rerun, "WINDOW", 25)
    compared, resumed = (with_history(5.0, 0.5, steps=n) for n in (40, 0))
    for values in compared.history.values():
        assert len(values) == 25
    for _ in range(25):
        compared.history["loss"].append(2.0)
    resumed.restore(json.loads(json.dumps(compared.state())))
    assert resumed.history == compared.history
    for run in compared, resumed:
        assert run._suspicion({"loss": 2.1, "gradient norm": 0.5}) is None
        assert "was 2 +- 0.02 in the last 25" in run._suspicion({"loss": 3.0, "gradient norm": 0.5})
    resumed.history["loss"].append(9.0)
    assert resumed.history["loss"][0] == 2.0 and len(resumed.history["loss"]) == 25


def test_what_is_not_finite_is_always_suspicious_and_a_spike_only_against_enough_steps():
    check = with_history(2.0, 0.5, steps=rerun.MIN_HISTORY - 1)._suspicion
    assert check({"loss": 1e9, "gradient norm": 1e9}) is None
    assert check({"loss": math.nan, "gradient norm": 1.0}) == "the loss is nan"
    assert check({"loss": 2.0, "gradient norm": math.inf}) == "the gradient norm is inf"


@pytest.mark.parametrize(
    "places, statuses",
    [
        (["a GPU 0", "a GPU 1", "b GPU 0", "b GPU 1"], [LOST, BROKEN, LOST, LOST]),
        (["a GPU 0", "b GPU 0", "b GPU 1", "b GPU 2"], [LOST, BROKEN, BROKEN, LOST]),
        (["a GPU 0", "a GPU 1", "b GPU 0", "b GPU 1"], [LOST, 1, 1, LOST]),
    ],
)
def test_a_node_is_left_out_only_if_no_other_may_be_to_blame(monkeypatch, places, statuses):
    """What a wrong value reaches through pipeline stages and tensor parallelism differs there, too."""
    monkeypatch.setattr(rerun, "gather_rank_locations", lambda mesh: places)
    wrong = [rank for rank, status in enumerate(statuses) if status != LOST]
    errors = [with_mesh(rank)._blame("the loss is nan", wrong) for rank in range(4)]
    assert [error.status for error in errors] == statuses
    assert all(("without that node" in str(error)) == (BROKEN in statuses) for error in errors)


def with_mesh(rank: int) -> Rerun:
    return a_rerun(SimpleNamespace(rank=rank, activity=SimpleNamespace(step=9)))


# ---- who is blamed, in runs -----------------------------------------------------------------------------------------

ON = "train.rerun=on"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "ranks, rank, argv, factor, how",
    [
        (2, 1, [], "nan", ""),
        pytest.param(4, 2, ["parallel.tp=2"], "1e4", "", marks=pytest.mark.slow),
        pytest.param(2, 0, ["parallel.pp=2"], "1e4", "", marks=pytest.mark.slow),
        pytest.param(1, 0, [], "nan", "", marks=pytest.mark.slow),
        pytest.param(2, 1, [], "1e4", "replay+", marks=pytest.mark.slow),
    ],
)
def test_a_result_that_does_not_come_again_is_the_rank_s(tmp_path, ranks, rank, argv, factor, how):
    with Run(tmp_path, f"{how}wrong@{rank}@25@{factor}", *argv, ON, "train.steps=40", ranks=ranks) as run:
        status, _, output = run.end()
    assert status == 1 and re.search(rf"exitcode *: {BROKEN}\b", output), output
    (said,) = set(re.findall(r"^error: (iteration 25: .*)", output, re.M))
    assert f"rank {rank} got a different result: rank {rank} on " in said
    assert said.startswith("iteration 25: the gradient norm is " + ("nan" if factor == "nan" else ""))
    assert run.last_step() == 24 and said in (run.folder / "errors.log").read_text()


@pytest.mark.parametrize(
    "ranks, argv",
    [(2, []), *(pytest.param(2, [axis], marks=pytest.mark.slow) for axis in ("parallel.tp=2", "parallel.pp=2"))],
)
@pytest.mark.parametrize(
    "factor, what", [pytest.param("nan", "the loss is nan", marks=pytest.mark.slow), ("2000", "the loss is ")]
)
def test_what_comes_again_is_the_data_s(tmp_path, ranks, argv, factor, what):
    with Run(tmp_path, f"batch@25@{factor}", *argv, ON, "train.steps=30", ranks=ranks) as run:
        status, _, output = run.end()
    (said,) = re.findall(r"^iteration 25: .*", output, re.M)
    assert status == 0 and said.startswith(f"iteration 25: {what}")
    assert "the update is skipped. Look at samples 192, 193, " in said
    samples = [*range(192, 200)] if argv else [192, 193, 196, 197]  # of the data rank that has it
    assert said.endswith(f"samples {', '.join(map(str, samples))} of the run's order")
    rows = run.rows("step")
    assert [row["skipped_total"] for row in rows[23:26]] == [0, 1, 1] and len(rows) == 30
    assert all(row["loss"] < 7 for row in rows[25:])


@pytest.mark.parametrize("ranks, more", [(None, []), pytest.param(2, ["parallel.tp=2"], marks=pytest.mark.slow)])
def test_a_run_that_goes_on_knows_what_was_usual(tmp_path, ranks, more):
    """Four steps after a restart a spike is skipped, as without one."""
    rows = []
    for name, ends in ("at once", [30]), ("in parts", [20, 30]):
        (folder := tmp_path / name).mkdir()
        for end in ends:
            keys = ON, f"train.steps={end}", "optimizer.decay_steps=30", f"checkpoint.dir={folder / 'saved'}"
            keys = *keys, "checkpoint.every=20"
            with Run(folder, "batch@25@2000", *keys, *more, ranks=ranks) as run:
                status, _, output = run.end()
            assert status == 0, output
        assert "iteration 25: " in output and "the update is skipped" in output
        rows.append([(row["step"], row["loss"], row["grad_norm"], row["skipped_total"]) for row in run.rows("step")])
    assert [row[:3] for row in rows[0]] == [row[:3] for row in rows[1]]


@pytest.mark.slow
def test_fp16_s_overflows_are_no_one_s_fault_and_nothing_else_changes(tmp_path):
    losses = []
    for how in "on", "off":
        (folder := tmp_path / how).mkdir()
        keys = "precision.dtype=fp16", "precision.loss_scale=1e9", "precision.loss_scale_hysteresis=1", "train.steps=25"
        with Run(folder, "none", f"train.rerun={how}", *keys, ranks=None) as run:
            status, _, output = run.end()
        assert status == 0 and "computed again" not in output
        losses.append([(row["loss"], row["loss_scale"], row["skipped_total"]) for row in run.rows("step")])
    assert losses[0] == losses[1] and losses[0][-1][2] > 2


def samples_blamed(losses: list[float], norms: list[float], usual: tuple[float, float]) -> str:
    """The samples to look at after a step with these figures of the ranks, of which each has the sample of its number.

    usual: the loss and the norm of the steps before.
    """
    compared, said = with_history(*usual), []
    compared.mesh, compared.log = Mesh.create(), SimpleNamespace(warn=said.append)
    loss, norm = losses[compared.mesh.rank], norms[compared.mesh.rank]
    compared.runner.forward_backward = lambda _: (torch.tensor(loss), False)
    compared.gradients.square_sum = lambda: torch.tensor(norm**2, dtype=torch.float64)
    compared._own_figures = lambda *_: torch.tensor([loss, norm, 0.0, 0.0], dtype=torch.float64)
    compared.forward_backward([SimpleNamespace(samples=torch.tensor([compared.mesh.rank]), count=1)])
    return re.search(r"Look at (.*) of the run's order", *said)[1]


@pytest.mark.parametrize(
    "losses, norms, usual, samples",
    [
        ([9.0, 5.0], [1.0, 7.0], (2.0, 9.0), "sample 0"),
        ([9.0, 5.0], [1.0, 7.0], (9.0, 0.1), "sample 1"),
        ([math.nan, 5.0], [1.0, math.inf], (2.0, 9.0), "samples 0, 1"),
    ],
    ids=["loss", "norm", "not finite"],
)
def test_the_samples_of_the_rank_with_the_largest_figure_are_named(ranks, losses, norms, usual, samples):
    """Rank 0 has the larger loss, rank 1 the larger gradients."""
    assert ranks(2, samples_blamed, losses, norms, usual) == [samples] * 2


def test_losses_that_stay_high_are_a_new_level():
    """Three spikes are skipped, the fourth is not; then there is a new history."""
    compared, said = with_history(2.0, 0.5), []
    compared.log = SimpleNamespace(warn=said.append)
    batch = SimpleNamespace(samples=torch.tensor([7]), count=1)
    skipped = [compared.forward_backward([batch])[1] for _ in range(6)]
    assert skipped == [True] * rerun.IN_A_ROW + [False] * 3 and len(said) == 4
    assert "spikes in a row are a new level: the update is made" in said[-1]
    assert {name: len(values) for name, values in compared.history.items()} == {"loss": 2, "gradient norm": 2}
    with pytest.raises(
        WrongResult, match="the loss is nan. .* computed again .* rank 0 on .* Suspect the hardware, and"
    ):
        losses = iter([math.nan, 5.0])
        compared.runner.forward_backward = lambda _: (torch.tensor(next(losses)), False)
        compared.forward_backward([batch])


def test_spikes_count_in_a_row_only():
    """A step between them that is not suspicious begins the count anew."""
    compared = with_history(2.0, 0.5)
    batch, spike = SimpleNamespace(samples=torch.tensor([7]), count=1), compared.runner.forward_backward
    for _ in range(rerun.IN_A_ROW):
        assert compared.forward_backward([batch])[1]
        compared.runner.forward_backward = lambda _: (torch.tensor(2.0), False)
        assert not compared.forward_backward([batch])[1]
        compared.runner.forward_backward = spike
    assert compared.forward_backward([batch])[1]


def test_spikes_before_a_restart_count_among_those_in_a_row():
    compared, resumed = with_history(2.0, 0.5), with_history(2.0, 0.5, steps=0)
    batch = SimpleNamespace(samples=torch.tensor([7]), count=1)
    assert all(compared.forward_backward([batch])[1] for _ in range(rerun.IN_A_ROW - 1))
    resumed.restore(json.loads(json.dumps(compared.state())))
    assert [resumed.forward_backward([batch])[1] for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    "fp16, loss, norm, skip, told",
    [
        (False, math.nan, 0.5, True, True),
        (False, math.nan, math.inf, False, True),
        (False, 2.0, math.inf, False, True),
        (True, math.nan, 0.5, True, True),
        (True, math.nan, math.inf, False, True),
        (True, 2.0, math.inf, False, False),  # the loss scale is too large
    ],
)
def test_a_loss_that_is_not_finite_skips_the_update(fp16, loss, norm, skip, told):
    """If the norm is not finite, too, the optimizer skips it."""
    compared, said = with_history(2.0, 0.5), []
    compared.log, compared.scaler.dynamic, compared.in_a_row = SimpleNamespace(warn=said.append), fp16, 2
    compared.gradients.square_sum = lambda: torch.tensor(norm**2, dtype=torch.float64)
    compared.runner.forward_backward = lambda _: (torch.tensor(loss), False)
    assert compared.forward_backward([SimpleNamespace(samples=torch.tensor([7]), count=1)])[1] is skip
    assert len(said) == told and compared.in_a_row == (3 if skip else 0 if told else 2)


def test_figures_are_those_of_the_mean_loss():
    compared = a_rerun(Mesh.offline())
    compared.scaler.loss_grad = lambda microbatches: torch.tensor(16.0) / microbatches
    figures = compared._figures(torch.tensor(6.0), [SimpleNamespace(count=3), SimpleNamespace(count=1)])
    assert figures == {"loss": 6.0 / 4, "gradient norm": 0.5 / (4 * 8)}


def test_a_spike_that_is_skipped_is_no_overflow():
    """The loss scale and its count of clean steps go on as after an ordinary step."""
    values = {}
    for name, skipped, skip in ("clean", 0.0, False), ("spike", 1.0, True), ("overflow", 1.0, False):
        scaler = LossScaler(cli.load(["precision.dtype=fp16"]).precision, torch.device("cpu"), 8)
        trainer = SimpleNamespace(
            numerics=None,
            rerun=SimpleNamespace(forward_backward=lambda _, skip=skip: (torch.tensor(5.0), skip)),
            fp8=SimpleNamespace(end_step=lambda: None),
            scaler=scaler,
            optimizer=SimpleNamespace(step=lambda *_, skipped=skipped: SimpleNamespace(skipped=torch.tensor(skipped))),
            mesh=Mesh.offline(),
        )
        for _ in range(3):
            Trainer.step(trainer, [SimpleNamespace(count=1)], 0.1)
        values[name] = {key: float(value) for key, value in scaler.state().items()}
    assert values["spike"] == values["clean"] != values["overflow"]


@pytest.mark.parametrize("norm", [1.0, math.inf])
def test_a_step_that_is_not_finite_leaves_the_history(norm):
    """A spike right after it is still found. The optimizer itself skips a step whose norm is not finite."""
    compared = with_history(2.0, 0.5)
    batch = SimpleNamespace(samples=torch.tensor([7]), count=1)
    known = {name: list(values) for name, values in compared.history.items()}
    compared.runner.forward_backward = lambda _: (torch.tensor(math.nan), False)
    with mock.patch.object(compared.gradients, "square_sum", return_value=torch.tensor(norm).double()):
        assert compared.forward_backward([batch])[1] == math.isfinite(norm)
    assert {name: list(values) for name, values in compared.history.items()} == known
    compared.runner.forward_backward = lambda _: (torch.tensor(50.0), False)
    assert compared.forward_backward([batch])[1]
