"""Who is slow is named, and on a busy machine nobody else is."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fault_run import Run
from layouts import LLAMA, config, dataset_of, mesh_of
from minitron.comm.collectives import exchange
from minitron.comm.mesh import Mesh
from minitron.config.schema import TrainConfig
from minitron.data.loader import Loader
from minitron.pipeline import executor
from minitron.pipeline.schedule import Backward, BackwardWeight, Exchange, Forward
from minitron.runtime import stragglers
from minitron.runtime.stragglers import STEPS, Stopwatch, Stragglers, median_of_others, slower
from minitron.train import build
from replay import replayed

CPU = torch.device("cpu")

# ---- who is slower --------------------------------------------------------------------------------------------------


def own_times(ranks: int, spread: float = 0.01, seed: int = 0) -> np.ndarray:
    return 1 + spread * np.random.default_rng(seed).random((STEPS, ranks))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_is_always_slower_is_found(ranks):
    times = own_times(ranks)
    assert not slower(times)[1].any()
    times[:, 1] *= 1.08
    times[3] *= 40  # a step in which all ranks wait for a compiler
    ratio, surely = slower(times)
    assert surely.tolist() == [rank == 1 for rank in range(ranks)] and abs(ratio[1] - 1.08) < 0.01


def test_half_a_node_s_ranks_are_found_together():
    times = own_times(16)
    times[:, 8:15] *= 1.2
    assert slower(times)[1].tolist() == [8 <= rank < 15 for rank in range(16)]


def test_what_varies_more_than_it_differs_is_not_found():
    """A rank that is slower in three steps of four, and one among others that vary by as much as it is slower."""
    times = own_times(4)
    times[: STEPS * 3 // 4, 1] *= 1.5
    assert slower(times)[0][1] > 1.4 and not slower(times)[1].any()
    times = own_times(4, spread=0.5)
    times[:, 1] *= 1.1
    assert not slower(times)[1].any()


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_the_median_of_the_others(n):
    x = np.random.default_rng(n).integers(0, 4, n).astype(float)  # some of them equal
    expected = [np.median(np.delete(x, i)) for i in range(n)]
    assert median_of_others(x).tolist() == expected


# ---- own time -------------------------------------------------------------------------------------------------------


def test_on_a_gpu_one_microbatch_is_timed_and_on_a_cpu_all_are():
    device, host = Stopwatch(CPU, lambda total, sign: None), Stopwatch(CPU, None)
    actions = [Forward(0, 0), Forward(3, 1), Backward(0, 0, False), Backward(3, 0, True), BackwardWeight(0, 0, False)]
    assert [device.takes(action, 4) for action in actions] == [False, True, True, False, True]
    assert all(host.takes(action, 4) for action in actions)
    assert not any(watch.takes(Exchange((), (), 0), 4) for watch in (device, host))


def test_pauses_do_not_count():
    now = iter([10, 13, 20, 27, 100, 101])
    watch = Stopwatch(CPU, lambda total, sign: total.add_(sign * next(now)))
    watch.pause()  # outside of an action: an evaluation's collectives
    watch.resume()
    watch.begin()
    watch.pause()
    watch.pause()
    watch.resume()
    watch.end()
    watch.begin()
    watch.end()
    watch.read_into(reading := torch.zeros((), dtype=torch.int64))
    assert reading == (13 - 10) + (27 - 20) + (101 - 100)


def waits_of_a_rank():
    """What each of 2 ranks times of messages and a sum for which rank 0 comes late, in seconds."""
    from minitron.comm.collectives import all_reduce_

    mesh = Mesh.create(tp=2)
    watch = mesh.activity.stopwatch = Stopwatch(CPU, None)
    watch.begin()
    if mesh.rank == 0:
        time.sleep(0.5)
    all_reduce_(torch.ones(1), mesh.tp)
    pending = exchange(mesh.tp, [(1 - mesh.rank, torch.ones(1))], [(1 - mesh.rank, torch.zeros(1))])
    if mesh.rank == 0:
        time.sleep(0.5)
    pending.wait()
    watch.end()
    return watch.on_host / 1e9


def test_waiting_for_others_is_not_own_time(ranks):
    late, waits = ranks(2, waits_of_a_rank)
    assert late > 1.0 and waits < 0.5


# ---- a slow rank in a run -------------------------------------------------------------------------------------------


@torch.library.custom_op("minitron_test::add_now", mutates_args={"total"})
def add_now(total: torch.Tensor, sign: int) -> None:
    total.add_(sign * time.perf_counter_ns())


@torch.library.custom_op("minitron_test::dawdle", mutates_args={"total"})
def dawdle(total: torch.Tensor) -> None:
    time.sleep(0.1)


def replayed_steps(slow_rank: int) -> tuple[list, set[int]]:
    """Train as on a GPU, by an operation that reads the clock and is recorded with the step, on a slow rank, too."""
    cfg = config(LLAMA, {"model": {"num_layers": 2}, "train": {"steps": 30, "global_batch_size": 8}})
    trainer, alarms = build(cfg, mesh_of(cfg)), []
    replayed(trainer)
    forward = executor.Run.forward

    def slow(run, op):
        if trainer.mesh.rank == slow_rank:
            dawdle(trainer.executor.dawdled)
        return forward(run, op)

    trainer.executor.dawdled = torch.zeros(1)
    log = SimpleNamespace(places=lambda _: None, own_times=lambda *_: None, alarm=alarms.append)
    compared = Stragglers(trainer.mesh, log, cfg.train, add_now)
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    executor.Run.forward = slow
    try:
        for step in range(1, cfg.train.steps + 1):
            trainer.step(loader.step((step - 1) * 8, step), 1e-3)
            compared.step(step)
    finally:
        executor.Run.forward = forward
        loader.close()
    assert trainer.graph.replaying
    return alarms, compared.slow


def test_a_step_that_is_replayed_is_timed_too(ranks):
    fast, slow = ranks(2, replayed_steps, 1)
    assert fast == ([], {1})
    assert len(slow[0]) == 1 and slow[1] == {1}
    assert re.match(r"warning: iterations \d+ to [23]0: rank 1 \(pp 0, dp 1, cp 0, tp 0\) on \S+ is slow: ", slow[0][0])


@pytest.mark.parametrize(
    "ranks, slow, argv",
    [
        (2, 0, ["parallel.cp=2", "train.global_batch_size=4"]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((4, 2, ["parallel.tp=2", "parallel.pp=2"]), (4, 1, []))
        ),
    ],
)
def test_a_slow_rank_is_named_within_30_steps(tmp_path, ranks, slow, argv):
    with Run(tmp_path, f"slow@{slow}", *argv, "train.steps=40", ranks=ranks) as run:
        status, _, output = run.end()
    rows = run.rows("ranks")
    assert status == 0 and [row["slow"] for row in rows if row["step"] >= 30] == [[slow], [slow]], (rows, output)
    assert all(row["slow"] in ([], [slow]) for row in rows) and {len(row["own_seconds"]) for row in rows} == {ranks}
    (said,) = re.findall(r"warning: .* is slow: .*", output)
    assert re.match(rf"warning: iterations \d+ to [23]0: rank {slow} \(pp ", said), said
    places = run.rows("places")[0]["places"]
    assert f" on {places[slow]} is slow" in said and len(places) == ranks
    assert said in (run.folder / "errors.log").read_text()


@pytest.mark.parametrize(
    "ranks, argv, steps",
    [
        (2, [], 150),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, [], 300), (2, ["parallel.tp=2"], 300), (8, ["train.micro_batch_size=1"], 300))
        ),
    ],
)
def test_no_rank_is_named_for_nothing(tmp_path, ranks, argv, steps):
    """Most steps take 30 ms, on a machine with other work."""
    with Run(tmp_path, "none", *argv, f"train.steps={steps}", "log.every=100", ranks=ranks) as run:
        status, _, output = run.end()
    assert status == 0 and "slow" not in output
    assert [row["step"] for row in run.rows("ranks")] == list(range(10, steps + 1, 10))


def cost_of_comparing() -> tuple[float, float]:
    """Processor seconds of a training step, and of what its comparison takes: asking the clock, gathering the times."""
    sizes = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 704, "num_heads": 4, "num_kv_heads": 4}
    steps = {"seq_len": 256, "global_batch_size": 4, "micro_batch_size": 1}
    cfg = config(LLAMA, {"model": sizes | {"max_positions": 256}, "train": steps, "parallel": {"tp": 2}})
    trainer = build(cfg, mesh_of(cfg))
    log = SimpleNamespace(places=lambda _: None, own_times=lambda *_: None, alarm=print, info=print)
    compared, loader = Stragglers(trainer.mesh, log, cfg.train, None), Loader(dataset_of(cfg), cfg, trainer.mesh)
    batches, watch, asked = loader.step(0, 1), compared.stopwatch, []
    loader.close()

    def mean_of(calls: int, call, *arguments) -> float:
        began = time.thread_time()
        for _ in range(calls):
            call(*arguments)
        return (time.thread_time() - began) / calls

    add, watch._add = watch._add, asked.append
    mean_of(2, trainer.step, batches, 1e-3)
    step = mean_of(10, trainer.step, batches, 1e-3)
    watch._add, compare = add, lambda: (watch.begin(), compared.step(0))
    mean_of(20, compare)  # which connects the ranks
    return step, len(asked) / 12 * mean_of(10_000, add, 1) + mean_of(100, compare)


def test_the_comparison_costs_under_half_a_percent_of_a_step(ranks):
    """Of one of 0.1 s; in processor time, for the machine has other work."""
    for step, more in ranks(2, cost_of_comparing):
        print(f"{1e6 * more:.0f} us of {1e3 * step:.1f} ms")
        assert more < 0.005 * step, (step, more)


def test_a_rank_that_recovers_is_said_once():
    said = SimpleNamespace(alarms=[], infos=[])
    log = SimpleNamespace(alarm=said.alarms.append, info=said.infos.append)
    compared = Stragglers(Mesh.offline(), log, TrainConfig(), None)
    assert compared.every == 0  # of one rank
    compared.step(1)
    compared.places, compared.mesh = ["another host", "a host"], Mesh.offline(2, 1)
    times = own_times(2)
    times[:, 1] *= 2
    for step, of_step in (20, times), (30, times), (40, own_times(2)):
        compared._judge(step, of_step)
    assert len(said.alarms) == 1 and "rank 1 (pp 0, dp 1, cp 0, tp 0) on a host is slow" in said.alarms[0]
    assert said.infos == ["iteration 40: rank 1: no longer slower than others"]


def test_what_the_driver_tells_is_said_and_what_not_is_left_out(monkeypatch):
    def no_driver(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    properties = SimpleNamespace(name="NVIDIA H200", uuid="8f2c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 81)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1155)
    assert stragglers.driver_facts(torch.device("cuda", 0)) == "NVIDIA H200 8f2c, 81 C, 1,155 MHz; "
    monkeypatch.setattr(torch.cuda, "temperature", no_driver)
    monkeypatch.setattr(torch.cuda, "clock_rate", no_driver)
    assert stragglers.driver_facts(torch.device("cuda", 0)) == "NVIDIA H200 8f2c; "
    assert stragglers.driver_facts(CPU) == ""
