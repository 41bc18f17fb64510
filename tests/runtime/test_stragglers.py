"""Who is slow is named, and on a busy machine nobody else is."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from fault_run import Run
from layouts import LLAMA, config, dataset_of
from minitron.comm.activity import Activity, Stopwatch
from minitron.comm.collectives import exchange
from minitron.comm.mesh import Mesh
from minitron.config.schema import TrainConfig
from minitron.data.loader import Loader
from minitron.pipeline import executor
from minitron.pipeline.replay import WARM_UP
from minitron.pipeline.schedule import Backward, BackwardWeight, Forward
from minitron.planner.dryrun.dryrun import recorded
from minitron.runtime import stragglers
from minitron.runtime.observer import LateCopy
from minitron.runtime.stragglers import STEPS, Stragglers, median_of_others, slower
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


def test_where_ranks_wait_often_a_gpu_times_one_microbatch():
    device, host = Stopwatch(CPU, lambda total, sign: None, waits_often=True), Stopwatch(CPU, None, True)
    actions = [Forward(0, 0), Forward(3, 1), Backward(0, 0, False), Backward(3, 0, True), BackwardWeight(0, 0, False)]

    def timed(watch, action):
        axis = SimpleNamespace(activity=SimpleNamespace(stopwatch=watch))
        run = SimpleNamespace(executor=SimpleNamespace(pp=axis), loss_grad=1.0, batches=range(4))
        return executor.Pass._stopwatch(run, action) is watch

    assert [timed(device, action) for action in actions] == [False, True, True, False, True]
    assert timed(host, None) and not timed(device, None) and not any(timed(host, action) for action in actions)


def own_work(layout: dict, recorded_steps: bool) -> tuple[list[int], list[int]]:
    """Time steps by a clock that work and waits advance. Return what was timed and what was worked in the last ones.

    The twin of graphs repeats a collective as a whole, so in recorded steps waits take no time.
    """
    cfg = config(LLAMA, {"model": {"num_layers": 2}, "train": {"steps": 9, "global_batch_size": 8}, "parallel": layout})
    clock, worked, waited = (torch.zeros((), dtype=torch.int64) for _ in range(3))
    add_now = lambda total, sign: total.add_(clock, alpha=sign)
    mesh = Mesh.create(**layout, stopwatch=(watch := Stopwatch(CPU, add_now, "tp" in layout)))
    trainer, readings = build(cfg, mesh), []
    trainer, steps = (replayed(trainer), WARM_UP + 4) if recorded_steps else (trainer, 3)

    def works(act, nanoseconds):
        def timed(run, op):
            clock.add_(nanoseconds)
            worked.add_(nanoseconds)
            return act(run, op)

        return timed

    def waits(activity, kind, axis, num_bytes, waits=True):
        enter(activity, kind, axis, num_bytes, waits)
        waited.add_(waits)
        clock.add_(10**6 * (waits and not recorded_steps))

    acts, enter = (executor.Pass.forward, executor.Pass.backward), Activity.enter
    loader = Loader(dataset_of(cfg), cfg, mesh)
    patched = mock.patch.multiple(executor.Pass, forward=works(acts[0], 1000), backward=works(acts[1], 2000))
    with patched, mock.patch.object(Activity, "enter", waits):
        for step in range(steps):
            trainer.step(loader.step(step * 8, step), 1e-3)
            readings.append([int(watch.total), int(worked)])
    loader.close()
    assert trainer.runner.replaying == recorded_steps and waited > 0
    return tuple(np.diff(readings[-3:], axis=0).T.tolist())


@pytest.mark.parametrize("recorded_steps", [False, True])
@pytest.mark.parametrize("layout, share", [({}, 1), ({"pp": 2}, 1), ({"tp": 2}, 1 / 8)])
def test_all_own_work_is_timed_and_no_wait(ranks, layout, share, recorded_steps):
    """Of 8 microbatches one, with tp."""
    for timed, worked in ranks(2, own_work, layout, recorded_steps):
        assert timed == [share * work for work in worked] and min(worked) > 0


def test_pauses_do_not_count():
    now = iter([10, 13, 20, 27, 100, 101, 200, 204, 300, 310, 400, 405])
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
    watch.begin()
    watch.pause()  # for a collective that fails; another pass begins
    watch.begin()
    watch.pause()
    watch.resume()
    watch.end()
    watch.read_into(reading := torch.zeros((), dtype=torch.int64))
    assert reading == (13 - 10) + (27 - 20) + (101 - 100) + (204 - 200) + (310 - 300) + (405 - 400)


def test_the_host_s_clock_is_read_to_the_nanosecond(monkeypatch):
    """Less the time in which the thread was ready and did not run."""
    watch, reading = Stopwatch(CPU, None), torch.full((), 7)
    watch.read_into(reading)
    assert reading == 0
    clock, delays = iter([100, 130, 150, 165]), iter([0, 4, 4, 5])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    monkeypatch.setattr(watch, "_delayed", lambda: next(delays))
    watch.begin()
    watch.pause()
    watch.resume()
    watch.end()
    watch.read_into(reading)
    assert reading == (130 - 100 - 4) + (165 - 150 - 1)


def waits_of_a_rank():
    """What each of 2 ranks times of messages and a sum for which rank 0 comes late, in seconds."""
    from minitron.comm.collectives import all_reduce_

    mesh = Mesh.create(tp=2, stopwatch=(watch := Stopwatch(CPU, None)))
    all_reduce_(torch.ones(1), mesh.tp)  # so that both begin together
    watch.begin()
    if mesh.rank == 0:
        time.sleep(0.5)
    all_reduce_(torch.ones(1), mesh.tp)
    if mesh.rank == 0:
        time.sleep(0.5)
    exchange(mesh.tp, [(1 - mesh.rank, torch.ones(1))], [(1 - mesh.rank, torch.zeros(1))]).wait()
    watch.end()
    return watch.on_host / 1e9


def test_waiting_for_others_is_not_own_time(ranks):
    late, waits = ranks(2, waits_of_a_rank)
    assert late > 1.0 and waits < late / 4


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux counts these times")
def test_time_in_which_other_programs_run_is_not_own_time():
    """Two programs that never rest share this thread's core until they have taken 0.2 s of its time."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]  # on the same core
    watch, wall, own = Stopwatch(CPU, None), -time.perf_counter(), -time.thread_time()
    try:
        watch.begin()
        while time.perf_counter() + wall < time.thread_time() + own + 0.2:
            pass
        watch.end()
        wall, own = wall + time.perf_counter(), own + time.thread_time()
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()
    assert own * 0.9 < watch.on_host / 1e9 < own + (wall - own) / 2


def test_evaluations_are_not_own_time():
    """A rank that evaluates more would be named as slow."""
    cfg = config(LLAMA, {"model": {"num_layers": 2}, "train": {"global_batch_size": 2}})
    watch = Stopwatch(CPU, lambda total, sign: total.add_(1))
    trainer = build(cfg, recorded(Mesh.offline(), Activity(stopwatch=watch)))
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    batches, counts = loader.step(0, 0), []
    for work in trainer.evaluate, lambda _: trainer.step(batches, 1e-3), trainer.evaluate, trainer.evaluate:
        work(batches)
        watch.read_into(reading := torch.zeros((), dtype=torch.int64))
        counts.append(int(reading))
    loader.close()
    assert counts[0] == 0 < counts[1] == counts[2] == counts[3]


@pytest.mark.parametrize("every", [1, 3])
def test_every_comparison_has_the_times_of_its_own_steps(monkeypatch, every):
    """A second one, too: its first step does not include the steps before it."""
    monkeypatch.setattr(stragglers, "gather_along", lambda x, axis: x.clone())  # as of several ranks
    watch, records = Stopwatch(CPU, lambda total, sign: None), []
    log = SimpleNamespace(record=lambda kind, **values: records.append(values), info=print, alarm=print)
    mesh = recorded(Mesh.offline(), Activity(stopwatch=watch))
    compared = Stragglers(mesh, log, TrainConfig(check_speed_every=every))
    for step in range(1, 3 * every + 1):
        watch.total.add_(10**9 * step)
        compared.after(SimpleNamespace(step=step))
    middles = [1.0 + every // 2 + i * every for i in range(3)]
    found = [(values["step"], values["own_seconds"]) for values in records if "own_seconds" in values]
    assert found == [((i + 1) * every, [middles[i]]) for i in range(3)]
    assert np.concatenate(compared.times).tolist() == list(range(1, 3 * every + 1))


# ---- a slow rank in a run -------------------------------------------------------------------------------------------


def replayed_steps(slow_rank: int) -> tuple[list, set[int]]:
    """Train with recorded steps as on a GPU. The device's clock is a tensor that forwards and backwards advance.

    Advancing and reading it are operations that are recorded with the step. After step 10 a forward of the slow rank
    takes 10 % longer.
    """
    cfg = config(LLAMA, {"model": {"num_layers": 2}, "train": {"steps": 30, "global_batch_size": 8}})
    clock, delay = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    stopwatch = Stopwatch(CPU, lambda total, sign: total.add_(clock, alpha=sign))
    trainer, alarms = replayed(build(cfg, Mesh.create(stopwatch=stopwatch))), []
    forward, backward = executor.Pass.forward, executor.Pass.backward

    def timed_forward(run, op):
        clock.add_(1000).add_(delay)
        return forward(run, op)

    def timed_backward(run, op):
        clock.add_(2000)
        return backward(run, op)

    log = SimpleNamespace(record=lambda *_, **__: None, alarm=alarms.append)
    compared = Stragglers(trainer.mesh, log, cfg.train)
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    executor.Pass.forward, executor.Pass.backward = timed_forward, timed_backward
    try:
        for step in range(1, cfg.train.steps + 1):
            if step == 11:
                assert trainer.runner.replaying
                delay.fill_(300 if trainer.mesh.rank == slow_rank else 0)
            trainer.step(loader.step((step - 1) * 8, step), 1e-3)
            compared.after(SimpleNamespace(step=step))
    finally:
        executor.Pass.forward, executor.Pass.backward = forward, backward
        loader.close()
    return alarms, compared.slow


def test_a_step_that_is_replayed_is_timed_too(ranks):
    """A forward and a backward are timed: 3,000 units of time, and 3,300 on the slow rank."""
    fast, slow = ranks(2, replayed_steps, 1)
    assert fast == ([], {1})
    assert len(slow[0]) == 1 and slow[1] == {1}
    assert re.match(r"warning: iterations 11 to 30: rank 1 \(pp 0, dp 1, cp 0, tp 0\) on \S+ is slow: ", slow[0][0])
    assert "10% more" in slow[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, slow, argv",
    [
        (2, 0, ["parallel.cp=2", "train.global_batch_size=4"]),
        (2, 1, ["parallel.tp=2"]),
        (2, 1, []),
        (4, 2, ["parallel.pp=2"]),
        (4, 2, ["parallel.tp=2", "parallel.pp=2"]),
        (4, 1, []),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, argv, steps",
    [
        (2, ["parallel.tp=2"], 60),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, [], 100),
                (4, ["parallel.tp=2", "parallel.pp=2"], 100),
                (8, ["train.micro_batch_size=1"], 100),
            )
        ),
    ],
)
def test_no_rank_is_named_for_nothing(tmp_path, ranks, argv, steps):
    """The clock is that of a busy machine: work varies by half, some ranks are interrupted, others wait longer."""
    with Run(tmp_path, "busy", *argv, f"train.steps={steps}", "log.every=100", ranks=ranks) as run:
        status, _, output = run.end()
    rows = run.rows("ranks")
    assert status == 0 and "slow" not in output
    assert [row["step"] for row in rows] == list(range(10, steps + 1, 10))
    assert all(seconds > 0 for row in rows for seconds in row["own_seconds"])


def cost_of_comparing() -> tuple[float, float]:
    """Processor seconds of a training step, and of what its comparison takes: asking the clock, gathering the times."""
    sizes = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 704, "num_heads": 4, "num_kv_heads": 4}
    steps = {"seq_len": 256, "global_batch_size": 4, "micro_batch_size": 1}
    cfg = config(LLAMA, {"model": sizes | {"max_positions": 256}, "train": steps, "parallel": {"tp": 2}})
    trainer = build(cfg, Mesh.create(tp=2, stopwatch=Stopwatch(CPU, None)))
    log = SimpleNamespace(record=lambda *_, **__: None, alarm=print, info=print)
    compared, loader = Stragglers(trainer.mesh, log, cfg.train), Loader(dataset_of(cfg), cfg, trainer.mesh)
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
    watch._add, compare = add, lambda: (watch.begin(), compared.after(SimpleNamespace(step=0)))
    mean_of(20, compare)  # which connects the ranks
    return step, len(asked) / 12 * mean_of(10_000, add, 1) + mean_of(100, compare)


@pytest.mark.slow
def test_the_comparison_costs_under_half_a_percent_of_a_step(ranks):
    """Of one of 0.1 s; in processor time, for the machine has other work."""
    for step, more in ranks(2, cost_of_comparing):
        print(f"{1e6 * more:.0f} us of {1e3 * step:.1f} ms")
        assert more < 0.005 * step, (step, more)


def test_a_rank_that_recovers_is_said_once():
    said = SimpleNamespace(alarms=[], infos=[])
    log = SimpleNamespace(alarm=said.alarms.append, info=said.infos.append)
    compared = Stragglers(Mesh.offline(), log, TrainConfig())  # of one rank
    compared.after(SimpleNamespace(step=1))
    compared.places, compared.mesh = ["another host", "a host"], Mesh.offline(2, 1)
    times = own_times(2)
    times[:, 1] *= 2
    doubtful = own_times(2)
    doubtful[5:, 1] *= 2  # slower in the median, but not surely: it stays named, and is not named anew
    for step, of_step in (20, times), (25, doubtful), (30, times), (40, own_times(2)):
        compared._judge(step, of_step)
    assert len(said.alarms) == 1 and "rank 1 (pp 0, dp 1, cp 0, tp 0) on a host is slow" in said.alarms[0]
    assert said.infos == ["iteration 40: rank 1: no longer slower than others"]


def test_ranks_are_compared_within_their_pipeline_stage(capsys):
    """The second of two stages has three times as much work, and rank 3 a fifth more, but for one step."""
    times = np.ones((STEPS, 4)) * [1.0, 1.0, 3.0, 3.6]
    times[7, 3] = 1.8
    log = SimpleNamespace(alarm=print)
    for rank in range(4):
        compared = Stragglers(Mesh.offline(), log, TrainConfig())
        compared.places, compared.mesh = ["a host"] * 4, Mesh.offline(4, rank, pp=2)
        compared._judge(40, times)
        assert compared.slow == {3}
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"warning: iterations 21 to 40: rank 3 .* 3.6 s, .* 20% more than the 3 s ", line)


def test_ranks_are_judged_once_enough_steps_are_measured():
    compared = Stragglers(Mesh.offline(), SimpleNamespace(record=lambda *_, **__: None, alarm=print), TrainConfig())
    compared.places, compared.mesh = ["a host"] * 2, Mesh.offline(2, 1)
    for step in range(4, STEPS + 1, 4):
        compared.waiting = step, LateCopy(torch.arange(5) * 10**9 * torch.tensor([[1], [2]]))
        compared.close()
        assert compared.slow == ({1} if step == STEPS else set())


@pytest.mark.parametrize("device, gpu", [("cpu", ""), ("cuda:3", " GPU 3")])
def test_a_place_is_a_host_and_a_gpu(monkeypatch, device, gpu):
    monkeypatch.setattr(stragglers, "gather_json", lambda place, *_: [place])
    mesh = SimpleNamespace(device=torch.device(device), world=None, rank=11)
    assert stragglers.gather_rank_locations(mesh) == [f"{socket.gethostname()}{gpu}"]


@pytest.mark.parametrize("times_as_long, named", [(1.5, False), (3.0, True)])
def test_on_a_cpu_only_what_no_other_program_does_is_slow(times_as_long, named):
    """A program on the other thread of a core takes a third of its speed. The advice is not that for GPUs."""
    said = []
    log = SimpleNamespace(alarm=said.append, record=lambda *_, **__: None)
    mesh = Mesh.offline(2, 1)
    mesh.activity.stopwatch = Stopwatch(CPU, None)
    try:
        with mock.patch.object(stragglers, "gather_rank_locations", lambda mesh: ["a host", "a host"]):
            compared = Stragglers(mesh, log, TrainConfig())
    finally:
        mesh.activity.stopwatch = None
    times = own_times(2)
    times[:, 1] *= times_as_long
    compared._judge(20, times)
    assert len(said) == named and "nvidia" not in "".join(said)


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
