"""The sharded AdamW against torch.optim.AdamW in one process; the learning rate and the loss scale against plain
twins.

The toy model and its layouts are those of test_grads.py.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grads import LAYOUTS, SAMPLES, SPECS, Toy, cut, twin_gradients

from layouts import assemble
from minitron.checkpoint.state import State
from minitron.comm.mesh import Mesh
from minitron.config.schema import OptimizerConfig, PrecisionConfig, TrainConfig
from minitron.kernels.kernels import PLAIN
from minitron.optim.lr import learning_rate
from minitron.optim.scaler import LossScaler
from minitron.optim.zero1 import Zero1Optimizer
from minitron.testing import assert_close_rel

STEPS = 5
CFG = OptimizerConfig(clip_grad=2.0, weight_decay=0.3)  # the toy's norm is 3 to 4 per token: every step is clipped
TOKENS = 10  # counted per sample


def rate(step):
    return 0.02 * (step + 1)


def toy_loss(step, sample):
    return float(7 * sample + step + 1)


# ---- ZeRO-1 against one process -------------------------------------------------------------------------------------


def train(mesh_args, toy_args, cfg=CFG, overlap=True, dtype=torch.float32, scale=1.0, poison=None):
    """Statistics of every step, this rank's parameters at the end, its whole state, and the count of updates.

    poison: (step, rank, value) added to a gradient of that rank.
    """
    mesh = Mesh.create(**mesh_args)
    toy = Toy(mesh, overlap=overlap, dtype=dtype, **toy_args)
    optimizer = Zero1Optimizer(toy.gradients, cfg, PLAIN)
    contributes = mesh.pp.rank == mesh.pp.size - 1 and mesh.tp.rank == 0
    stats = []
    for step in range(STEPS):
        poisoned = poison is not None and step == poison[0]
        if poisoned:
            toy.gradients.wait_parameters()
            before = [tensor.clone() for tensor in state(optimizer)]
        toy.accumulate(step, scale, poison[2] if poisoned and mesh.rank == poison[1] else 0.0)
        loss = sum(toy_loss(step, sample) for sample in toy.samples) * contributes
        toy.gradients.finish()
        count = len(toy.samples) * TOKENS * contributes
        # Half of the runs give the scale as a device tensor, as the loss scaler does.
        loss_grad = torch.tensor(scale) if overlap else scale
        stats.append(optimizer.step(rate(step), torch.tensor(loss), torch.tensor(count), loss_grad).read())
        if poisoned:
            toy.gradients.wait_parameters()
            assert all(torch.equal(a, b) for a, b in zip(before, state(optimizer), strict=True))
    toy.gradients.wait_parameters()
    masters = assemble(toy.gradients, optimizer.masters)
    params = {p.spec.name: p.detach().clone() for chunk in toy.chunks for p in chunk.parameters()}
    assert all(torch.equal(params[name], masters[name].to(dtype)) for name in params)
    moments = [assemble(toy.gradients, moment) for moment in (optimizer.exp_avg, optimizer.exp_avg_sq)]
    return stats, masters, moments, optimizer.steps


def state(optimizer):
    buckets = optimizer.gradients.buckets
    return [*optimizer.masters, *optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.steps, *(b.data for b in buckets)]


def twin_train(cfg=CFG, dtype=torch.float32, skip=()):
    """torch.optim.AdamW and clip_grad_norm_ on whole parameters, in float64; the model sees them in `dtype`."""
    masters = {name: torch.nn.Parameter(spec.initial().to(dtype).double()) for name, spec in SPECS.items()}
    groups = [
        {
            "params": [masters[name] for name, spec in SPECS.items() if spec.decay == decay],
            "weight_decay": cfg.weight_decay * decay,
        }
        for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=cfg.betas, eps=cfg.eps, foreach=False)
    stats = []
    for step in range(STEPS):
        seen = {name: master.detach().to(dtype).float() for name, master in masters.items()}
        for name, total in twin_gradients(seen, step).items():
            masters[name].grad = total.double() / (SAMPLES * TOKENS)
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), cfg.clip_grad or math.inf)
        stats.append(
            {
                "loss": sum(toy_loss(step, sample) for sample in range(SAMPLES)) / (SAMPLES * TOKENS),
                "grad_norm": float(norm),
                "skipped": 0.0,
                "nan": 0.0,
            }
        )
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if step not in skip:
            optimizer.step()
    states = [optimizer.state[master] for master in masters.values()]
    moments = [{name: s[key] for name, s in zip(masters, states)} for key in ("exp_avg", "exp_avg_sq")]
    return stats, masters, moments


def check_against_twin(results, twin, world, mesh_args, tol, skipped=()):
    stats, masters, moments = twin
    for rank, (own_stats, own_masters, own_moments, steps) in enumerate(results):
        tp = Mesh.offline(world, rank, **mesh_args).tp
        for actual, expected in zip([own_masters, *own_moments], [masters, *moments], strict=True):
            for name, value in actual.items():
                assert_close_rel(value, cut(name, expected[name], tp), tol, name)
        for step, (actual, expected) in enumerate(zip(own_stats, stats, strict=True)):
            if step not in skipped:
                assert actual == pytest.approx(expected, rel=tol)
        assert steps == STEPS - len(skipped)
        assert str(own_stats) == str(results[0][0])  # the same on every rank, to the last bit (nan differs from itself)


@pytest.mark.parametrize("world, mesh_args, toy_args", LAYOUTS)
def test_every_layout_equals_adamw_in_one_process(ranks, world, mesh_args, toy_args):
    overlapped = ranks(world, train, mesh_args, toy_args)
    # float32's rounding step is 6e-8; a sum of 16 terms and five updates leave a few of them
    check_against_twin(overlapped, twin_train(), world, mesh_args, 1e-6)
    plain = ranks(world, train, mesh_args, toy_args, overlap=False)
    for (stats, masters, *_), (other_stats, other_masters, *_) in zip(overlapped, plain):
        assert stats == other_stats
        assert all(torch.equal(masters[name], other_masters[name]) for name in masters)


@pytest.mark.parametrize("dtype, scale", [(torch.bfloat16, 1.0), (torch.float16, 1024.0)])
@pytest.mark.parametrize("world, mesh_args", [(1, {}), (2, {}), (4, {"tp": 2}), (2, {"pp": 2})])
def test_low_precision_parameters_with_float32_masters(ranks, world, mesh_args, dtype, scale):
    # Masters that differ by float32's rounding may round to neighbouring bf16 parameters, and then that element's
    # gradient differs by 2**-8: a handful of elements in thousands.
    results = ranks(world, train, mesh_args, {}, dtype=dtype, scale=scale)
    check_against_twin(results, twin_train(dtype=dtype), world, mesh_args, 1e-5)


@pytest.mark.parametrize(
    "cfg",
    [
        OptimizerConfig(clip_grad=0.0),
        OptimizerConfig(clip_grad=1e4),
        OptimizerConfig(weight_decay=0.0, betas=(0.8, 0.999), eps=1e-3),
    ],
)
def test_no_clipping_loose_clipping_and_other_settings(ranks, cfg):
    check_against_twin(ranks(2, train, {}, {}, cfg), twin_train(cfg), 2, {}, 1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("world, mesh_args, poisoned", [(4, {"tp": 2}, 2), (2, {"pp": 2}, 1)])
def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(ranks, world, mesh_args, poisoned, value):
    results = ranks(world, train, mesh_args, {}, poison=(2, poisoned, value))
    check_against_twin(results, twin_train(skip=[2]), world, mesh_args, 1e-6, skipped=[2])
    for stats, *_ in results:
        assert [step["skipped"] for step in stats] == [0, 0, 1, 0, 0]
        assert [step["nan"] for step in stats] == [0] * STEPS
        assert not math.isfinite(stats[2]["grad_norm"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_waits_for_the_copy_of_what_it_changes(dtype):
    """A save copies the state beside the next step: until the update waits for it, all is as the last one left it."""
    toy, seen = Toy(Mesh.offline(), dtype=dtype), []
    optimizer = Zero1Optimizer(toy.gradients, CFG, PLAIN)
    kept = [*optimizer.masters, *optimizer.exp_avg, *optimizer.exp_avg_sq]
    copy = lambda: [tensor.clone() for tensor in kept]
    optimizer.wait_before_update(SimpleNamespace(wait=lambda: seen.append(copy())))
    for step in range(2):
        before = copy()
        toy.accumulate(step)
        toy.gradients.finish()
        optimizer.step(rate(step), torch.tensor(1.0), torch.tensor(TOKENS))
        assert all(map(torch.equal, seen[step], before)) and not any(map(torch.equal, kept, before))


def step_with_loss(loss, count):
    toy = Toy(Mesh.create())
    optimizer = Zero1Optimizer(toy.gradients, CFG, PLAIN)
    toy.accumulate(0)
    toy.gradients.finish()
    return optimizer.step(0.1, torch.tensor(loss), torch.tensor(count)).read(), float(optimizer.steps)


def test_a_loss_that_is_not_finite_is_reported_and_no_tokens_at_all_skip_the_step(ranks):
    ((stats, steps),) = ranks(1, step_with_loss, math.inf, 3)
    assert (stats["loss"], stats["nan"], stats["skipped"], steps) == (math.inf, 1, 0, 1)
    ((stats, steps),) = ranks(1, step_with_loss, 0.0, 0)
    assert (stats["nan"], stats["skipped"], steps) == (1, 1, 0)


def state_slices(optimizer):
    """This rank's state by parameter: views into the state itself, as a checkpoint's pieces are."""
    state = State([], optimizer, LossScaler(PrecisionConfig(), torch.device("cpu"), 1))
    return [{kind: part.of(flat) for kind, flat in state.slices().items()} for part in optimizer.gradients.owned()]


def state_parts():
    toy = Toy(Mesh.create(), dtype=torch.bfloat16)
    optimizer = Zero1Optimizer(toy.gradients, CFG, PLAIN)
    for tensors in state_slices(optimizer):
        for i, tensor in enumerate(tensors.values()):
            tensor.fill_(i + 1)
    whole = [assemble(toy.gradients, s) for s in (optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq)]
    return [sorted(tensors) for tensors in state_slices(optimizer)], whole


def test_state_can_be_written_by_name_and_every_element_is_reached(ranks):
    for keys, whole in ranks(2, state_parts):
        assert all(k == ["exp_avg", "exp_avg_sq", "master"] for k in keys)
        for i, tensors in enumerate(whole):
            assert tensors.keys() == SPECS.keys()
            assert all(torch.equal(t, torch.full_like(t, i + 1)) for t in tensors.values())


# ---- learning rate --------------------------------------------------------------------------------------------------


def test_the_rates_of_the_jube_job():
    # (consumed samples, rate) of its published Megatron-LM log: peak 1e-4, 216,320 samples of warm-up, batch 96
    published = [(960, "4.438E-07"), (1920, "8.876E-07"), (2880, "1.331E-06"), (3840, "1.775E-06"), (4800, "2.219E-06")]
    cfg = OptimizerConfig(lr=1e-4, warmup_samples=216_320)
    for consumed, text in published:
        assert f"{learning_rate(cfg, TrainConfig(global_batch_size=96, steps=3_125_000), consumed):.3E}" == text


def test_the_rate_of_the_gke_job():
    # Its published DLLogger record: step 47, warm-up 115 steps to 9e-5, a float32
    cfg = OptimizerConfig(lr=9e-5, min_lr=9e-6, warmup_steps=115, constant_steps=12_500)
    actual = learning_rate(cfg, TrainConfig(global_batch_size=2048, steps=600_000), 47 * 2048)
    assert actual == pytest.approx(0.000036782606912311167, rel=2**-24)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_the_schedule_equals_torchs(schedule, warmup):
    cfg = OptimizerConfig(lr=2e-3, min_lr=1e-4, lr_schedule=schedule, warmup_steps=warmup, constant_steps=6)
    decay = 30 - 6
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=cfg.lr)
    twin = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(sgd, decay - warmup, cfg.min_lr),
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(sgd, 1.0, cfg.min_lr / cfg.lr, decay - warmup),
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(sgd, 1.0),
    }[schedule]()
    for step in range(1, 31):
        if step <= warmup:
            expected = cfg.lr * step / warmup
        elif step <= decay or schedule == "constant":
            sgd.step()
            twin.step()
            expected = twin.get_last_lr()[0]
        else:
            expected = cfg.min_lr
        actual = learning_rate(cfg, TrainConfig(global_batch_size=8, steps=30), step * 8)
        assert actual == pytest.approx(expected, rel=1e-9), step  # torch multiplies up its cosine step by step


@pytest.mark.parametrize("end", [{}, {"constant_steps": 3}, {"decay_steps": 12}], ids=str)
@pytest.mark.parametrize("warmup, decay", [(3, 4), (1, 10)])
def test_limits_in_steps_are_those_of_a_ramp(warmup, decay, end):
    """2 steps of 2 samples, one of 4, one of 6, then steps of 8: only the first of them warm up, or decay as well.

    The last steps of 12 decay, and 3 more may follow.
    """
    t = TrainConfig(global_batch_size=8, batch_ramp=(2, 2, 12), steps=15 if end else 12)
    common = dict(lr=1.0, min_lr=0.1, lr_schedule="wsd", wsd_decay_steps=decay)
    in_steps = OptimizerConfig(warmup_steps=warmup, **common, **end)
    ends = [2, 4, 8, 14, *range(22, 22 + 11 * 8, 8)]
    for step, trained in enumerate(ends[: t.steps], 1):
        expected = min(1.0, trained / ends[warmup - 1])
        if step > 12 - decay:
            start = ends[11 - decay]
            done = min(1.0, (trained - start) / (ends[11] - start))
            expected = 0.1 + 0.9 * (1 - math.sqrt(done))
        assert learning_rate(in_steps, t, trained) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_a_run_that_ends_within_its_warm_up_never_decays(schedule):
    cfg = OptimizerConfig(lr=1.0, min_lr=0.1, lr_schedule=schedule, warmup_steps=20)
    rates = [learning_rate(cfg, TrainConfig(global_batch_size=8, steps=10), step * 8) for step in range(1, 11)]
    assert rates == pytest.approx([step / 20 for step in range(1, 11)])


@pytest.mark.parametrize("decay", [{"wsd_decay_steps": 5}, {"wsd_decay_share": 0.5}], ids=str)
def test_a_decay_that_would_begin_within_the_warm_up_begins_at_its_end(decay):
    cfg = OptimizerConfig(lr=1.0, min_lr=0.1, lr_schedule="wsd", warmup_steps=8, **decay)
    rates = [learning_rate(cfg, TrainConfig(global_batch_size=8, steps=10), step * 8) for step in range(7, 11)]
    assert rates == pytest.approx([7 / 8, 1.0, 0.1 + 0.9 * (1 - math.sqrt(0.5)), 0.1])


@settings(deadline=None)  # other work on the machine is no failure
@given(st.integers(0, 400), st.integers(0, 100), st.integers(1, 300), st.sampled_from(["cosine", "linear"]))
def test_limits_in_samples_equal_limits_in_steps_and_the_decay_never_rises(step, warmup, length, schedule):
    common = dict(lr_schedule=schedule, lr=1.0, min_lr=0.1)
    in_steps = OptimizerConfig(warmup_steps=warmup, decay_steps=warmup + length, **common)
    in_samples = OptimizerConfig(warmup_samples=warmup * 16, decay_samples=(warmup + length) * 16, **common)
    rates = [learning_rate(cfg, TrainConfig(), n * 16) for n in (step, step + 1) for cfg in (in_steps, in_samples)]
    assert rates[0] == rates[1] and rates[2] == rates[3]
    assert 0 <= rates[0] <= 1 and (step < warmup) == (rates[2] > rates[0])
    assert learning_rate(in_steps, TrainConfig(), (warmup + length) * 16) == 0.1


# ---- loss scale -----------------------------------------------------------------------------------------------------


def twin_scales(scale, window, hysteresis, overflows):
    """Megatron-LM's rule on Python numbers: the scale after each step."""
    clean, tolerance, scales = 0, hysteresis, []
    for overflow in overflows:
        if overflow:
            clean, tolerance = 0, tolerance - 1
            if tolerance <= 0:
                scale = max(scale / 2, 1.0)
        else:
            clean += 1
            if clean == window:
                scale, clean, tolerance = scale * 2, 0, hysteresis
        scales.append(scale)
    return scales


def scales(scale, window, hysteresis, overflows):
    scaler = LossScaler(
        PrecisionConfig("fp16", loss_scale=scale, loss_scale_window=window, loss_scale_hysteresis=hysteresis),
        torch.device("cpu"),
        1,
    )
    result, held = [], scaler.scale
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow), dtype=torch.float64))
        result.append(float(scaler.scale))
    assert held is scaler.scale
    return result


@settings(deadline=None)  # other work on the machine is no failure
@given(
    st.integers(0, 16).map(lambda n: 2.0**n), st.integers(1, 6), st.integers(1, 4), st.lists(st.booleans(), max_size=40)
)
def test_the_loss_scale_equals_its_plain_twin(scale, window, hysteresis, overflows):
    assert scales(scale, window, hysteresis, overflows) == twin_scales(scale, window, hysteresis, overflows)


def test_the_loss_scale_drawn_in_the_module():
    assert scales(8.0, 3, 2, [c == "x" for c in "-x-xx----"]) == [8, 8, 8, 4, 2, 2, 2, 4, 4]


def test_a_run_resumed_with_a_shorter_window_than_its_clean_steps_doubles_its_loss_scale():
    scaler = LossScaler(PrecisionConfig("fp16", loss_scale=8.0, loss_scale_window=3), torch.device("cpu"), 1)
    scaler.clean.fill_(5)
    scaler.update(torch.tensor(0.0))
    assert float(scaler.scale) == 16 and int(scaler.clean) == 0
