"""Runs that are stopped, starved, poisoned and killed, for real: through torchrun, on gloo ranks."""

import ctypes
import dataclasses
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import fault_run
import warm
from fault_run import PATIENCE, PYTHONPATH, ROOT, TINY, Run
from minitron import pretrain
from minitron.checkpoint.directory import checkpoints
from minitron.comm.activity import Activity, PeerLost, Progress
from minitron.comm.mesh import Axis, Mesh
from minitron.config.schema import Config, PrecisionConfig
from minitron.data.indexed import IndexedWriter
from minitron.optim.scaler import LossScaler
from minitron.pipeline.schedule import Backward, Forward
from minitron.runtime import signals, watch
from minitron.runtime import stop as stop_module
from minitron.runtime.log import Iteration, Log
from minitron.runtime.rendezvous import SignedStore, Signer
from minitron.runtime.signals import Listener
from minitron.runtime.status import LOST, RanksLost
from minitron.runtime.stop import Diverged, Stop
from ports import free_port


def root_cause(output: str) -> str:
    """What torchrun's page has of the rank that it takes for the cause, at its end."""
    return output.rpartition("Root Cause (first observed failure):")[2]


# ---- hangs --------------------------------------------------------------------------------------------------------


def test_a_hang_is_reported_with_rank_coordinates_action_and_collective(tmp_path):
    layout = ("parallel.tp=2", "parallel.pp=2", "log.every=1000000")
    with Run(tmp_path, "sleep@2", *layout, "train.hang_seconds=20", ranks=4) as run:
        run.wait_for('"step": 2', run.folder / "metrics.jsonl")
        status, _, output = run.end()
    assert status == 1 and re.search(r"exitcode *: 124", output)  # of the watch; gloo's timeout comes a minute later
    assert re.search(r"traceback : rank \d \(.*\) has not moved for \d+ s in step 3, ", root_cause(output)), output
    blocks = {int(rank): text for rank, text in re.findall(r"^rank (\d) (.*?)(?=^\S)", output, re.M | re.S)}
    for rank, cell in enumerate(
        ("pp 0, dp 0, cp 0, tp 0", "pp 0, dp 0, cp 0, tp 1", "pp 1, dp 0, cp 0, tp 0", "pp 1, dp 0, cp 0, tp 1")
    ):
        stood = re.match(rf"{re.escape(f'({cell})')} has not moved for (\d+) s\n", blocks[rank])
        assert stood and int(stood[1]) >= 20, output
        for name in (f"rank-{rank}.log", "errors.log"):
            assert f" rank {rank}: rank {rank} ({cell}) has not moved" in (run.folder / name).read_text()
    assert "host: step 3, Forward(mb=1, chunk=0)\n" in blocks[2] and "time.sleep(1000)" in blocks[2]
    forward = r"host: step 3, Forward\(mb=1, chunk=0\), all-gather over tp \([\d,]+ bytes\), together ranks 2, 3"
    assert re.search(forward, blocks[3])
    assert re.search(r"host: step 3, Backward\(.*\), exchange over pp \([\d,]+ bytes\), together ranks 0, 2", blocks[0])
    everyone = output.split("activity of all ranks:\n")[1]
    assert re.match(
        r"  ranks 0, 1: step 3, Backward.*\n  rank 2: step 3, Forward\(mb=1, chunk=0\)\n  rank 3: ", everyone
    ), everyone


def test_each_action_and_each_collective_is_progress(monkeypatch):
    """Of a rank without collectives, actions alone show that it moves."""
    now = [0.0]
    monkeypatch.setattr("minitron.comm.activity.monotonic", lambda: now[0])
    activity, axis = Activity(), Axis.single()
    for change in (
        lambda: activity.begin(Forward(0, 0)),
        lambda: activity.enter("all-reduce", axis, 8),
        activity.leave,
        lambda: activity.replay([]),
    ):
        now[0] += 5
        assert activity.idle() == 5
        change()
        assert activity.idle() == 0


def test_the_device_s_place_is_the_first_action_it_has_not_finished():
    words, device = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    activity = Activity()
    activity.progress = Progress(words, device)  # as on a GPU
    assert activity.progress.unfinished() == "through with all actions"
    for step in (6, 7):
        activity.begin_step(step)
        words.copy_(device)  # the device does nothing in step 7
        for action in (Forward(0, 0), Backward(0, 0, True)):
            activity.begin(action)
            activity.ended()
            if step == 6 and type(action) is Forward:
                halfway = device.clone()
    assert activity.progress.unfinished() == "not through with step 7, Forward(mb=0, chunk=0)"
    words.copy_(halfway)
    assert activity.progress.unfinished() == "not through with step 6, Backward(mb=0, chunk=0, last=True)"
    words[1] += 1
    assert activity.progress.unfinished() == "not through with step 7, Forward(mb=0, chunk=0)"
    words.copy_(device)
    assert activity.progress.unfinished() == "through with all actions"
    activity.begin_step(8)
    assert device.tolist() == [8, 0]
    activity.begin("gather")
    activity.ended()
    with activity.recording():
        activity.ended()
    activity.replay([Forward(0, 0), "update"])
    words.copy_(torch.tensor([8, 0]))
    assert activity.progress.unfinished() == "not through with step 8, gather"
    words[1] += 1
    assert activity.progress.unfinished() == "not through with step 8, Forward(mb=0, chunk=0)"


def test_nccl_operations_that_did_not_end_are_named(monkeypatch):
    entry = {
        "profiling_name": "nccl:all_reduce",
        "process_group": ["2", "tp"],
        "input_sizes": [[8, 4]],
        "state": "scheduled",
        "retired": False,
    }
    entries = [{**entry, "state": "completed"}, {**entry, "retired": True}, entry, *[entry] * 9]
    monkeypatch.setattr(
        torch._C._distributed_c10d,
        "_dump_nccl_trace_json",
        lambda: json.dumps({"entries": entries}).encode(),
        raising=False,
    )
    assert watch.unfinished_nccl(at_most=2) == ["  not finished: nccl:all_reduce of group tp, sizes [[8, 4]]"] * 2


def test_many_ranks_are_cut_short():
    assert watch.listed([3]) == "rank 3" and watch.listed(range(3)) == "ranks 0, 1, 2"
    assert watch.listed(range(100), at_most=2) == "ranks 0, 1, ... (100 in all)"
    assert watch.listed(range(2), at_most=2) == "ranks 0, 1"


@pytest.mark.parametrize(
    "seconds, action, limit",
    [(100.0, "data", 100.0), (100.0, "datasets", 21600.0), (100.0, "load", 21600.0), (3e4, "checkpoint", 3e4)],
)
def test_a_hang_is_reported_once_and_ends_a_rank_in_time_for_the_others(monkeypatch, seconds, action, limit):
    idle, said, ends = [limit], [], []
    mesh, log = Mesh.offline(), SimpleNamespace(alarm=said.append)
    listener = SimpleNamespace(exit_within=lambda *end: ends.append(end), tell_torchrun=lambda *why: said.append(why))
    monkeypatch.setattr(Activity, "idle", lambda _: idle[0])
    mesh.activity.begin(action)
    seen = watch._Watch(mesh, log, seconds, listener, Signer())
    seen.check()
    assert not said and not ends and not seen.hangs
    idle[0] = limit + 0.5
    seen.check()
    seen.check()
    assert seen.hangs and ends == [(seen.grace, watch.HUNG)]
    (line, status), text = said
    assert status == watch.HUNG and "has not moved" in line and action in text and "test_faults.py" in text


def test_the_first_rank_that_hangs_lists_all_ranks(monkeypatch):
    """Rank 3 of four writes nothing."""
    shared, said = dist.HashStore(), {rank: [] for rank in range(3)}
    shared.set_timeout(timedelta(seconds=5))
    watches = [
        watch._Watch(Mesh.offline(4, rank), SimpleNamespace(alarm=said[rank].append), 1.0, Listener({}), Signer())
        for rank in range(3)
    ]
    for one, action in zip(watches, ("data", "data", "update")):
        one.mesh.activity.begin(action)
    monkeypatch.setattr(watch, "connect", lambda signer: SignedStore(shared, signer))
    monkeypatch.setattr(watch, "sleep", lambda _: [watches[rank]._report_all() for rank in (0, 1)])
    watches[2]._report_all()
    (text,) = said[2]
    places = dict(line.strip().split(": ", 1) for line in text.splitlines()[1:])
    assert places == {"ranks 0, 1": "step 0, data", "rank 2": "step 0, update", "rank 3": "no report"}
    assert not said[0] and not said[1]


@pytest.mark.parametrize("seconds, grace", [(0.2, 2.0), (20.0, 2.0), (100.0, 10.0), (600.0, 30.0)])
def test_reports_of_others_get_a_tenth_of_the_time_of_a_hang_within_limits(seconds, grace):
    assert watch._Watch(Mesh.offline(), None, seconds, Listener({}), Signer()).grace == grace


@pytest.mark.parametrize("action, hangs", [("checkpoint", False), ("load", False), ("datasets", False), ("data", True)])
def test_a_slow_disk_is_no_hang(action, hangs, monkeypatch, capsys):
    ends = []
    monkeypatch.setattr(watch.os, "_exit", ends.append)
    mesh = Mesh.offline()
    with Log(Config(), 0, 1) as log, Listener({}) as listener, watch.watched(mesh, log, 0.2, listener):
        mesh.activity.begin(action)
        if hangs:
            eventually(lambda: ends)
        else:
            time.sleep(3.0)
    assert ends == [watch.HUNG] * hangs
    assert ("has not moved for" in capsys.readouterr().err) == hangs


# ---- signals ------------------------------------------------------------------------------------------------------


def test_sigusr1_to_one_worker_saves_on_all_and_exits_0(tmp_path):
    with Run(tmp_path, "none", "parallel.pp=2", f"checkpoint.dir={tmp_path / 'saved'}", ranks=2) as run:
        os.kill(run.training().workers()[1], signal.SIGUSR1)
        status, _, output = run.end()
    step = run.last_step()
    assert status == 0 and f"SIGUSR1: stopped after iteration {step}, which was saved\n" in output
    assert list(checkpoints(tmp_path / "saved")) == [step]


def test_sigterm_to_torchrun_stops_all_ranks(tmp_path):
    with Run(tmp_path, "none", "parallel.tp=2", ranks=2) as run:
        run.training().process.send_signal(signal.SIGTERM)
        status, _, output = run.end()
    assert status == 1 and "forcefully" not in output  # torchrun's own, whatever its ranks' are; after 30 s it kills
    assert f"SIGTERM: stopped after iteration {run.last_step()}; nothing was saved" in output
    assert "exitcode" not in output and "error: " not in output


def test_ctrl_c_saves_and_is_one_line(tmp_path):
    saved = tmp_path / "saved"
    with Run(tmp_path, "none", f"checkpoint.dir={saved}", ranks=None) as run:
        run.training().process.send_signal(signal.SIGINT)
        status, _, output = run.end()
    step = run.last_step()
    last, goodput = output.splitlines()[-2:]
    assert status == 130 and last == f"SIGINT: stopped after iteration {step}, which was saved", output
    assert goodput.startswith("goodput ")
    assert list(checkpoints(saved)) == [step] and "Traceback" not in output


def test_ctrl_c_in_the_terminal_of_torchrun_saves(tmp_path):
    """The terminal signals all processes of the group, and torchrun hands it on: no rank counts that as a second."""
    saved = tmp_path / "saved"
    with Run(tmp_path, "none", "parallel.tp=2", f"checkpoint.dir={saved}", ranks=2) as run:
        os.killpg(run.training().process.pid, signal.SIGINT)
        _, _, output = run.end()
    step = run.last_step()
    assert f"SIGINT: stopped after iteration {step}, which was saved\n" in output
    assert list(checkpoints(saved)) == [step] and "ends without saving" not in output and "forcefully" not in output


def counted(store):
    """A store, with a list of the operations that change it."""
    count = []
    compare_set = store.compare_set
    return SimpleNamespace(
        add=store.add, compare_set=lambda *words: count.append(words) or compare_set(*words), swaps=count
    )


def test_a_gate_passes_so_many_steps_and_closes_once():
    """This comes first: if the store does not change, the others wait for long."""
    store = counted(dist.HashStore())
    gate = stop_module.StopGate(SignedStore(store, Signer()))
    assert [gate.next(2) for _ in range(3)] == [0] * 3 and gate.seen == "4" and len(store.swaps) == 3
    gate.close(15)
    assert len(store.swaps) == 4 and [gate.next() for _ in range(3)] == [0, 15, 15] and gate.seen == "5 15"
    gate.close(10)
    assert gate.next() == 15 and len(store.swaps) == 5


@pytest.mark.parametrize("most", [1, 7])  # steps that a rank takes in a second: at most
def test_all_ranks_stop_at_the_first_gate_that_nobody_had_passed(most):
    """Threads as ranks, at most two gates apart as a pipeline's may be; one of them closes at a random moment.

    The ranks measure different step times, which change.
    """
    whole = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for seed in range(4):
        store, rng, passed, closed = dist.PrefixStore(str(seed), whole), random.Random(seed), [0] * 4, []
        signer = Signer("secret" * (seed % 2), str(seed))

        def rank(index, at):
            gate, pace = stop_module.StopGate(SignedStore(store.clone(), signer)), random.Random(index)
            while passed[index] < 1000:
                while passed[index] > min(passed) + 1:
                    time.sleep(1e-4)
                if index == 3 and passed[index] == at:
                    before = max(passed)
                    gate.close(signal.SIGTERM)
                    closed.append((before, max(passed)))
                if number := gate.next(pace.randint(1, most)):
                    return number
                passed[index] += 1
                time.sleep(pace.random() * 1e-4)

        with ThreadPoolExecutor(4) as pool:
            numbers = list(pool.map(rank, range(4), [rng.randrange(20)] * 4))
        ((before, after),) = closed
        assert numbers == [signal.SIGTERM] * 4 and len(set(passed)) == 1
        assert before <= passed[0] <= after + most  # a thread may stand between the gate and its note of it


@pytest.mark.parametrize("steps", range(1, 8))  # of the whole run
@pytest.mark.parametrize("closes_after", range(4))  # so many steps of the rank that gets the signal
def test_a_gate_closed_behind_the_last_step_ends_all_ranks_alike(steps, closes_after):
    """The first rank passes three gates at once, here beyond the last step: then no rank stops before it."""
    store, stopped = SignedStore(dist.HashStore(), Signer()), []
    first, second = stop_module.StopGate(store), stop_module.StopGate(store)
    assert first.next(3) == 0 and [second.next(5) for _ in range(closes_after)] == [0] * closes_after
    second.close(signal.SIGUSR1)
    for gate in first, second:
        at = next((gate.number for _ in range(gate.number, steps) if gate.next()), None)
        stopped.append(at)
    assert stopped == [4 if steps >= 4 else None] * 2


@pytest.mark.parametrize("old", [False, True])
def test_a_stranger_s_word_at_the_gate_stops_nobody(old):
    """What it writes is replaced, also a value of the ranks that it has kept; the next signal closes the gate."""
    plain = dist.HashStore()
    first, second = (stop_module.StopGate(SignedStore(plain, Signer("secret"))) for _ in range(2))
    kept = plain.get("gate")
    for _ in range(5):
        assert first.next() == 0 == second.next()
        plain.set("gate", kept if old else f"{first.number + 1} 15".encode())
    assert first.next() == 0 == second.next()
    plain.set("gate", kept if old else b"\xff")
    second.close(signal.SIGTERM)
    assert first.next() == signal.SIGTERM == second.next() and first.number == second.number


@pytest.mark.parametrize("secret", ["", "secret"])
@pytest.mark.parametrize("store", ["memory", "tcp"])
def test_a_gate_whose_key_somebody_deletes_is_closed_all_the_same(secret, store):
    """Each rank puts it back as it knows it; none takes what is missing for an answer, or waits for it for ever."""
    serve = {"memory": dist.HashStore, "tcp": lambda: dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)}
    plain = serve[store]()
    first, second = (stop_module.StopGate(SignedStore(plain, Signer(secret))) for _ in range(2))
    for _ in range(3):
        assert first.next() == 0 == second.next()
        assert plain.delete_key("gate")
    second.close(signal.SIGTERM)
    assert first.next() == signal.SIGTERM == second.next() and first.number == second.number


def test_a_stranger_at_the_store_of_a_run_does_not_stop_it(tmp_path, monkeypatch):
    """It writes the key of the gate to torchrun's store. The run names the key and goes on until it gets a signal."""
    monkeypatch.setenv("MINITRON_SECRET", secret := "b7c1e0")
    saved = f"checkpoint.dir={tmp_path / 'saved'}"
    with Run(tmp_path, "says_port", "parallel.tp=2", saved, ranks=2) as run:
        worker = run.training().workers()[0]
        port = int(re.search(r"port (\d+)", run.output.read_text())[1])
        stranger = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        keys = [f"{prefix}start-1/{middle}gate" for prefix in ("", "/") for middle in ("", "0//", "default_pg/0//")]
        for key in keys:
            stranger.set(key, "1 15")
        run.wait_for("is ignored")
        at = run.last_step()
        eventually(lambda: run.rows("step")[-1]["step"] > at + 20)
        os.kill(worker, signal.SIGUSR1)
        status, _, output = run.end()
    assert status == 0 and "SIGUSR1: stopped after iteration" in output and "SIGTERM" not in output, output
    assert secret not in output


@pytest.mark.parametrize("seconds, gates", [(0.0, 1), (3.0, 1), (0.6, 1), (0.25, 4), (1e-9, stop_module.MOST_GATES)])
def test_a_rank_uses_the_store_once_for_the_steps_of_a_second(stop, seconds, gates):
    store = counted(dist.HashStore())
    stop.gate, stop.step_seconds = stop_module.StopGate(SignedStore(store, Signer("secret"))), seconds
    store.swaps.clear()
    for _ in range(3 * gates):
        assert not stop.should_stop()
    assert len(store.swaps) == 3
    stop._on_signal(signal.SIGUSR1)
    assert stop.should_stop() and stop.agreed == signal.SIGUSR1


def test_a_rank_that_serves_the_store_waits_for_those_who_ask_there(tmp_path):
    with Run(tmp_path, f"late@{free_port()}", "train.steps=3", ranks=2) as run:
        status, _, output = run.end()
    assert status == 0, output


def test_a_signal_during_an_evaluation_ends_it(tmp_path):
    with Run(
        tmp_path,
        "none",
        "train.eval_every=4",
        "train.eval_steps=1000000",
        f"checkpoint.dir={tmp_path / 'saved'}",
        ranks=2,
    ) as run:
        run.wait_for('"step": 4', run.folder / "metrics.jsonl")
        time.sleep(1.0)
        os.kill(run.workers()[0], signal.SIGTERM)
        status, _, output = run.end()
    assert status == 0 and "SIGTERM: stopped after iteration 4, which was saved\n" in output
    assert list(checkpoints(tmp_path / "saved")) == [4] and "validation loss" not in output


def test_a_save_after_a_signal_takes_the_time_that_it_takes(tmp_path):
    with Run(tmp_path, "disk@3+impatient", f"checkpoint.dir={tmp_path / 'saved'}", ranks=2) as run:
        os.kill(run.training().workers()[0], signal.SIGTERM)
        status, seconds, output = run.end()
    assert status == 0 and seconds > 3 and ", which was saved\n" in output and "has not moved" not in output
    assert max(checkpoints(tmp_path / "saved")) == run.last_step()


def test_a_save_under_way_becomes_whole_when_the_run_ends_with_an_error(tmp_path):
    """Whose line says to go on from it. Python is ending then, and no thread begins anything any more."""
    keys = "checkpoint.every=2", f"checkpoint.dir={tmp_path / 'saved'}", "train.max_skipped=2"
    with Run(tmp_path, "disk@4+nan", *keys, ranks=None) as run:
        status, _, output = run.end()
    assert status == 1 and "the gradients of 2 iterations in a row were not finite" in output
    assert list(checkpoints(tmp_path / "saved")) == [2]


@pytest.fixture
def stop(monkeypatch, tmp_path):
    """A Stop whose ends are noted in `.ends`, in place of the end of pytest."""
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    cfg = Config()
    with Log(cfg, 0, 1) as log, Listener({}) as listener:
        listener.report_to(log.alarm)
        stop = Stop(Mesh.offline(), log, 3, listener)
        with stop.handling():
            stop.ends = ends
            yield stop


def eventually(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_the_same_signal_again_ends_at_once_unless_it_is_an_echo(stop, capsys, monkeypatch):
    # Each waits for the one before: of two pending ones the later is handled first, and two equal ones are one.
    os.kill(os.getpid(), signal.SIGUSR1)
    eventually(lambda: stop.local_signal == signal.SIGUSR1)
    for time_ in 1, 2:  # another wish, or the scheduler's last word: the save goes on; torchrun's echo
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: stop.times[signal.SIGTERM] == time_)
    assert stop.local_signal == signal.SIGUSR1
    time.sleep(0.2)
    assert not stop.ends
    monkeypatch.setattr(stop_module, "REPEAT_SECONDS", 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    eventually(lambda: stop.ends == [128 + signal.SIGTERM])
    assert "got SIGTERM a second time: ends without saving in step 0, start" in capsys.readouterr().err


def test_seconds_count_from_the_first_signal_of_the_same_kind(stop, monkeypatch):
    now = 0.0
    monkeypatch.setattr(stop_module, "monotonic", lambda: now)
    echo = stop_module.REPEAT_SECONDS
    for number, now in ("USR1", 0.0), ("USR1", echo), ("TERM", 9.0), ("TERM", 9.0 + echo), ("TERM", 9.1 + echo):
        assert not stop.ends, now
        stop._on_signal(signal.Signals[f"SIG{number}"])
    assert stop.ends == [128 + signal.SIGTERM]


@pytest.mark.parametrize("torchrun, times", [(False, 2), (True, 3)])
def test_ctrl_c_twice_ends_at_once(stop, capsys, torchrun, times):
    """Under torchrun the second comes from there."""
    stop.listener.torchrun = torchrun
    for time_ in range(1, times + 1):
        assert not stop.ends
        os.kill(os.getpid(), signal.SIGINT)
        eventually(lambda: stop.times[signal.SIGINT] == time_)
    eventually(lambda: stop.ends == [130])
    assert (
        stop.local_signal == signal.SIGINT
        and "got SIGINT a second time: ends without saving" in capsys.readouterr().err
    )


@pytest.mark.parametrize("action", [Forward(1, 0), "start"])  # in the start ranks meet, and there is nothing to save
def test_whoever_was_told_to_end_and_waits_for_the_dead_gives_up(stop, capsys, monkeypatch, action):
    monkeypatch.setattr(stop_module, "PATIENCE_SECONDS", 0.0)
    stop.mesh.activity.begin("data")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.5)
    assert not stop.ends  # still at its own work
    monkeypatch.setattr(stop_module, "PATIENCE_SECONDS", 1e6)
    stop.mesh.activity.begin(action)
    stop._on_tick()
    assert not stop.ends  # it may still move
    stop.step_seconds = 1e6
    monkeypatch.setattr(stop_module, "PATIENCE_SECONDS", 0.0)
    stop._on_tick()
    assert not stop.ends  # its steps take long
    stop.step_seconds = 0.0
    eventually(lambda: stop.ends)
    assert "got SIGTERM and has not moved for" in capsys.readouterr().err
    stop.mesh.activity.begin("checkpoint")


def test_after_sigterm_only_what_others_may_keep_waiting_ends_a_rank(monkeypatch):
    monkeypatch.setattr(stop_module, "PATIENCE_SECONDS", -1.0)
    statuses: list[int] = []
    stop = Stop(Mesh.offline(), None, 3, SimpleNamespace(exit_now=lambda _, status: statuses.append(status)))
    for local, action, ends in [
        (signal.SIGTERM, "data", False),
        (signal.SIGTERM, "datasets", False),
        (signal.SIGTERM, "checkpoint", False),
        (signal.SIGTERM, "load", False),
        (signal.SIGTERM, "profile", False),
        (signal.SIGTERM, "recording", False),
        (signal.SIGTERM, "update", True),
        (signal.SIGTERM, Backward(0, 0, True), True),
        (signal.SIGUSR1, "update", False),
        (signal.SIGINT, "update", False),
    ]:
        statuses.clear()
        stop.local_signal = local
        stop.mesh.activity.begin(action)
        stop._on_tick()
        assert statuses == [143] * ends, action


def test_a_signal_that_a_compiler_has_taken_is_taken_back_at_the_next_gate(stop):
    taken = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGUSR1, taken)
    stop.should_stop()
    assert signal.getsignal(signal.SIGUSR1) is not taken


def test_sigusr1_is_heard_after_triton_has_compiled(stop):
    """Its LLVM replaces the handler in C, of which Python knows nothing."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from minitron.kernels.fused import _square_sums

    source = triton.compiler.ASTSource(
        _square_sums, {"x": "*fp32", "sums": "*fp64", "n": "i32", "BLOCK": "constexpr"}, {(3,): 128}
    )
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "num_stages": 1})
    stop.should_stop()
    os.kill(os.getpid(), signal.SIGUSR1)
    eventually(lambda: stop.local_signal == signal.SIGUSR1)


def test_signals_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with Listener({}):
        assert [signal.getsignal(number) for number in signals.SIGNALS] != before
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    with Listener({}) as listener:  # a library, loaded before Python, had set a handler
        listener.before[signal.SIGUSR1] = None
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_stop_is_agreed_on_where_the_store_is_gone_and_ends_with_its_training(stop, monkeypatch):
    """A signal afterwards ends the process without a line; SIGUSR1 asks for a save, of which there is none."""
    monkeypatch.setattr(stop, "gate", SimpleNamespace(close=mock.Mock(side_effect=RuntimeError("closed"))))
    stop._on_signal(signal.SIGUSR1)
    assert stop.local_signal == signal.SIGUSR1 and stop.gate.close.call_count == 1
    after = Stop(Mesh.offline(), stop.log, 3, listener := Listener({}))
    with suppress(OSError), after.handling():
        raise OSError("disk")
    assert listener.on_signal == after._on_signal
    with after.handling():
        assert len(listener.checks) == 1
    assert not listener.checks
    for number, ends in (signal.SIGUSR1, []), (signal.SIGINT, [130]), (signal.SIGTERM, [130, 143]):
        listener.on_signal(number)
        assert stop.ends == ends


def test_signals_masks_and_handlers_are_as_before():
    def now():
        action = ctypes.create_string_buffer(152)
        ctypes.CDLL(None).sigaction(signal.SIGBUS, None, action)
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        return action.raw[:8], signal.pthread_sigmask(signal.SIG_BLOCK, []), wakeup

    before = now()
    with Listener({}):
        assert all(a != b for a, b in zip(now(), before))
    assert now() == before


# ---- before the first step, and without torchrun --------------------------------------------------------------------


def start(*argv, **variables):
    """A process that begins to train, and what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *argv],
        env=environment | variables,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(process, number):
    process.send_signal(number)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 128 + number
    assert output.endswith(f"{number.name} during the start: ended before the first step\n"), output
    assert "Traceback" not in output and "Interrupted system call" not in output  # nor a page of torch's store


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("module, number", [("pretrain", signal.SIGINT), ("finetune", signal.SIGTERM)])
def test_a_signal_while_torch_is_loaded_is_one_line(module, number):
    process = start("-m", f"minitron.{module}")
    eventually(lambda: "torch" in Path(f"/proc/{process.pid}/maps").read_text())
    ended(process, number)


@pytest.mark.parametrize("rank, number", [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_signal_while_ranks_meet_is_one_line(tmp_path, rank, number):
    """Rank 0 serves the store and waits for the other one; rank 1 stands in C while that does not answer."""
    mute = socket.socket()
    mute.bind(("127.0.0.1", port := free_port()))
    if rank == 0:
        mute.close()
    else:
        mute.listen()
        mute.settimeout(PATIENCE)
    process = start(
        "-m",
        "minitron.pretrain",
        *TINY,
        f"log.dir={tmp_path}",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE="2",
        RANK=str(rank),
    )
    if rank == 0:
        eventually((tmp_path / "rank-0.log").exists)
    else:
        mute.accept()
    time.sleep(0.5)
    ended(process, number)
    mute.close()
    assert "during the start" in (tmp_path / f"rank-{rank}.log").read_text()


def test_the_others_of_a_node_leave_the_line_to_the_first(monkeypatch, capfd):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    with Listener({"LOCAL_RANK": "1"}):
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: ends == [143])
    assert capfd.readouterr().err == ""


def test_sigusr1_before_the_training_waits_for_it(monkeypatch):
    with Log(Config(), 0, 1) as log, Listener({}) as listener:
        os.kill(os.getpid(), signal.SIGUSR1)
        eventually(lambda: listener.kept)
        stop = Stop(Mesh.offline(), log, 3, listener)
        with stop.handling():
            assert stop.should_stop() and stop.agreed == signal.SIGUSR1


def test_what_is_ignored_in_the_background_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Listener({}) as listener:
            listener.install_handlers()
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("environ, ends", [({}, False), ({"TORCHELASTIC_RUN_ID": "none"}, True)])
def test_only_torchrun_s_orphans_end(monkeypatch, capfd, environ, ends):
    """nohup and setsid leave orphans on purpose."""
    statuses, looks = [], []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(signals, "TICK_SECONDS", 0.01)
    with Listener(environ) as listener:
        listener.parent = -1
        with listener.every_second(lambda: looks.append(0)):
            eventually(lambda: len(looks) > 2)
        assert not listener.checks  # which may have ended the process for what is over
    eventually(lambda: all(thread.name != "signals" for thread in threading.enumerate()))  # while _exit is patched
    assert (statuses[:1] == [LOST]) == ends
    assert ("torchrun, which started this rank, has died" in capfd.readouterr().err) == ends


def test_a_rank_ends_whose_last_line_nobody_takes(monkeypatch):
    """A full pipe that nobody reads, or a disk that stands still: it stayed for ever, and kept its GPU."""
    statuses, full = [], threading.Event()
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(signals, "LINE_SECONDS", 0.1, raising=False)
    with Listener({}) as listener:
        listener.report_to(lambda text: full.wait(PATIENCE))
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: statuses == [143])
        full.set()
        eventually(lambda: len(statuses) == 2)  # while _exit is patched


def lives(pid):
    """Whether a process runs; one that has died waits for a parent that asks for its status."""
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(status) and not status.startswith("Z")


@pytest.fixture
def adopts():
    """Make this process the parent of its orphaned descendants, whose exit statuses it can then read."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(set_child_subreaper, 1)
    yield
    prctl(set_child_subreaper, 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl")
@pytest.mark.parametrize(
    "fault, argv, ranks, number", [("none", [], 1, signal.SIGUSR1), ("sleep@1", ["parallel.tp=2"], 2, signal.SIGKILL)]
)
def test_ranks_do_not_outlive_a_killed_torchrun(tmp_path, adopts, fault, argv, ranks, number):
    """One that trains by itself; one that sleeps and one that waits for it, in gloo, for eleven minutes."""
    with Run(tmp_path, fault, *argv, ranks=ranks) as run:
        run.wait_for('"step": 2', run.folder / "metrics.jsonl")
        time.sleep(1.0)
        workers = run.workers()
        run.process.send_signal(number)
        assert run.process.wait(PATIENCE) == -number
        try:
            eventually(lambda: not any(map(lives, workers)))
        finally:
            for pid in filter(lives, workers):
                os.kill(pid, signal.SIGKILL)
            statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers]
    assert statuses == [LOST] * ranks
    texts = [(run.folder / f"rank-{rank}.log").read_text() for rank in range(ranks)]
    said = [text.count("torchrun, which started this rank, has died: the rank ends without saving\n") for text in texts]
    assert max(said) == 1
    assert all("has died" in text for text in texts)  # the second to look may hear first that the other rank is gone


# ---- a mapped file that becomes shorter ------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_a_token_file_that_is_truncated_during_the_run_is_named(tmp_path):
    """The kernel ends the rank with SIGBUS, as before, but its log names the signal, the file and the reader."""
    with IndexedWriter(tmp_path / "the data", np.uint16) as writer:
        for i in range(4):
            writer.add_document(np.full(1 << 20, i, np.uint16))
    argv = ["data.source=indexed", f"data.paths=[{tmp_path / 'the data'}]", "data.split=1", "train.steps=30000"]
    with Run(tmp_path, "none", *argv, ranks=None) as run:
        run.training()
        os.truncate(tmp_path / "the data.bin", 4096)
        status, _, output = run.end()
    assert status == -signal.SIGBUS, output
    for name in ("rank-0.log", "errors.log"):
        text = (run.folder / name).read_text()
        assert "SIGBUS" in text and f"{tmp_path / 'the data.bin'} is mapped" in text and "loader.py" in text


# ---- ranks that cannot join each other ------------------------------------------------------------------------------


@contextmanager
def served(answer):
    """Serve a port of this machine; what connects there gets this answer, None: nothing, as from a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        kept = []

        def serve():
            with suppress(OSError):  # closed
                while True:
                    kept.append(server.accept()[0])
                    if answer is not None:
                        kept[-1].sendall(answer)
                        kept.pop().close()

        pool.submit(serve)
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def join(tmp_path, fault="none", ranks=(0, 1), address="127.0.0.1", port=None, agent=False):
    """Start these ranks of two without torchrun; return {rank: (exit status, what it printed)}.

    torch's own time limits are a day, so ranks that wait for others end by hang_seconds or not at all.
    """
    environ = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port or free_port()),
        "TORCHELASTIC_USE_AGENT_STORE": str(agent),
        "CUDA_VISIBLE_DEVICES": "",
    }
    keys = f"data.cache_dir={tmp_path / 'cache'}", f"log.dir={tmp_path / 'log'}", "train.hang_seconds=2"
    started = {}
    for rank in ranks:
        words = fault_run.__file__, f"patient+{fault}", *TINY, *keys
        env = os.environ | environ | {"RANK": str(rank)}
        started[rank] = warm.start(words, tmp_path / f"output-{rank}", cwd=ROOT, env=env)
    try:
        statuses = {rank: process.wait(PATIENCE) for rank, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    return {rank: (status, (tmp_path / f"output-{rank}").read_text()) for rank, status in statuses.items()}


def is_lost(end, rank, address="127.0.0.1", pages=False):
    """Assert that a rank ended as one that lost the others, with one line. pages: torch may print its own before it."""
    status, output = end
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == LOST and len(lines) == 1 and "Traceback" not in output, (status, output)
    assert f"rank {rank} " in lines[0] and socket.gethostname() in lines[0] and address in lines[0], output
    assert pages or output.splitlines() == lines, output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve_is_one_line(tmp_path, rank):
    is_lost(join(tmp_path, ranks=[rank], address="nosuch.invalid")[rank], rank, "nosuch.invalid")


@pytest.mark.parametrize("rank, agent", [(1, False), (0, True)])
def test_an_address_that_nobody_serves_is_one_line(tmp_path, rank, agent):
    port = free_port()
    is_lost(join(tmp_path, ranks=[rank], port=port, agent=agent)[rank], rank, f"127.0.0.1:{port}")


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_program_at_the_address_is_one_line(tmp_path, answer):
    with served(answer) as port:
        is_lost(join(tmp_path, ranks=[1], port=port)[1], 1, f"127.0.0.1:{port}")
        is_lost(join(tmp_path, ranks=[0], port=port)[0], 0, f"127.0.0.1:{port}")  # which cannot serve there


def test_a_rank_that_does_not_come_is_named(tmp_path):
    end = join(tmp_path, ranks=[0])[0]
    is_lost(end, 0)
    assert re.search(r"\brank 1\b", end[1])


@pytest.mark.parametrize("dead, place", [(1, "groups"), (0, "groups"), (1, "mesh"), (1, "start"), (0, "start")])
def test_a_rank_killed_before_the_first_collective_ends_the_other_with_one_line(tmp_path, dead, place):
    """Rank 0 has the store. A rank that is much later than the other meets none, which it says as well."""
    ends = join(tmp_path, f"dies@{dead}@{place}")
    is_lost(
        ends[1 - dead], 1 - dead, pages=dead == 0 or place == "mesh"
    )  # of Gloo, if a connection breaks as it is made


# ---- skipped updates ----------------------------------------------------------------------------------------------


def iteration(step, skipped, loss_scale=1.0):
    norm = math.nan if skipped else 1.0
    figures = dict(loss=1.0, grad_norm=norm, lr=0.1, loss_scale=loss_scale, seconds=1.0, skipped=skipped)
    return Iteration(step, step, batch_size=1, **figures)


def test_only_skips_in_a_row_end_a_run():
    stop = Stop(Mesh.offline(), SimpleNamespace(), 3, Listener({}))
    for step, skipped in enumerate([1, 1, 0, 1, 1, 0, 1, 1], start=1):
        stop.on_figures(iteration(step, skipped))
    with pytest.raises(Diverged, match=r"iteration 9: the gradients of 3 iterations in a row.*train.max_skipped=3"):
        stop.on_figures(iteration(9, 1))


def test_spikes_that_train_rerun_skips_do_not_end_a_run():
    stop = Stop(Mesh.offline(), SimpleNamespace(), 3, Listener({}))
    for step in range(1, 9):  # its gradients were finite
        stop.on_figures(dataclasses.replace(iteration(step, 1), grad_norm=1e4))


def test_the_search_for_a_loss_scale_does_not_end_a_run():
    scaler = LossScaler(PrecisionConfig(dtype="fp16", loss_scale=2.0**24), torch.device("cpu"), 1)
    stop = Stop(Mesh.offline(), SimpleNamespace(), 3, Listener({}))
    steps_at_one = step = 0
    with pytest.raises(Diverged):
        while True:
            step += 1
            scale = float(scaler.scale)
            steps_at_one += scale == 1.0
            scaler.update(torch.ones(()))
            stop.on_figures(iteration(step, 1, scale))
    assert steps_at_one == 3 and step > 24


def test_updates_that_were_left_out_for_a_finite_spike_do_not_end_a_run():
    """train.rerun skips them: the next ones learn. They do not begin the count anew either."""
    stop = Stop(Mesh.offline(), SimpleNamespace(), 3, Listener({}))
    for step in range(1, 11):
        stop.on_figures(dataclasses.replace(iteration(step, 1), grad_norm=1e6))
    for step in 11, 12:
        stop.on_figures(iteration(step, 1))
    with pytest.raises(Diverged):
        stop.on_figures(iteration(13, 1))


def test_a_poisoned_run_ends_with_one_line(tmp_path):
    with Run(tmp_path, "nan", "train.max_skipped=4", ranks=2) as run:
        status, _, output = run.end()
    assert status == 1 and run.last_step() == 6  # poisoned before step 3
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "iteration 6: the gradients of 4 iterations in a row" in errors[0], output
    assert f"traceback : {errors[0]}\n" in root_cause(output), output


# ---- torchrun's page ----------------------------------------------------------------------------------------------


def test_torch_reads_the_line_of_a_rank_and_takes_a_consequence_for_later(tmp_path):
    def read(why, status):
        file = tmp_path / f"{status}.json"
        Listener({"TORCHELASTIC_ERROR_FILE": str(file)}).tell_torchrun(why, status)
        return ProcessFailure(local_rank=0, pid=1, exitcode=status, error_file=str(file))

    without_file = read("", 2)
    cause, lost, stopped = (read("error: no room", status) for status in (1, LOST, 128 + signal.SIGTERM))
    assert "error: no room" in ChildFailedError("a run", {0: cause}).format_msg()
    assert cause.timestamp <= without_file.timestamp + 1 < min(lost.timestamp, stopped.timestamp)
    assert ChildFailedError("a run", {0: lost, 1: without_file}).get_first_failure()[0] == 1


# ---- a dead rank --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["sleep@1", "sleep@1+speaks@2"]
)  # the second: torchrun's SIGTERM comes before the line
def test_a_killed_rank_ends_the_one_that_waits_for_it_within_seconds(fault, tmp_path):
    with Run(tmp_path, fault, "parallel.tp=2", ranks=2) as run:
        run.wait_for("rank 1 sleeps")
        time.sleep(0.5)  # until rank 0 waits
        os.kill(run.workers()[1], signal.SIGKILL)
        status, _, output = run.end()
    assert status == 1 and "forcefully" not in output and re.search(r"exitcode *: -9", output)
    ours = output.split("Traceback (most recent call last)")[0]  # the one that follows is torchrun's
    lines = [line for line in ours.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, output
    assert re.match(
        r"error: rank 0 \(pp 0, dp 0, cp 0, tp 0\) failed in step 3, .*, \S+ over \w+ \([\d,]+ bytes\); "
        "most likely another rank has died: .*out of memory",
        lines[0],
    )
    assert f"traceback : {lines[0]}\n" in output and "Signal 9 (SIGKILL)" in root_cause(output), output
    assert "minitron/comm/collectives.py" in (run.folder / "rank-0.log").read_text()


def test_a_rank_killed_at_any_moment_ends_the_others_with_one_line(tmp_path):
    """One in a hundred kills breaks gloo's connection under a send, which gloo then never ends: SIGTERM does it."""
    with Run(tmp_path, "none", "parallel.tp=2", ranks=2) as run:
        os.kill(run.training().workers()[1], signal.SIGKILL)
        status, _, output = run.end()
    assert status == 1 and "forcefully" not in output  # torchrun had to kill nobody
    ours = output.split("Traceback (most recent call last)")[0]  # the one that follows is torchrun's
    lines = [line for line in ours.splitlines() if "rank 0 (pp 0, dp 0, cp 0, tp 0) " in line]
    assert len(lines) == 1, output
    assert re.search(r"most likely another rank has died|got SIGTERM and has not moved for \d+ s: ends", lines[0])


def test_a_rank_that_dies_in_the_last_save_ends_the_others_with_one_line(tmp_path):
    with Run(tmp_path, "disk@2", "train.steps=2", f"checkpoint.dir={tmp_path / 'saved'}", ranks=2) as run:
        eventually(lambda: list((tmp_path / "saved").glob("step_*.tmp-*")))
        time.sleep(0.5)
        os.kill(run.workers()[1], signal.SIGKILL)
        status, _, output = run.end()
    ours = output.split("Traceback (most recent call last)")[0]  # the one that follows is torchrun's
    lines = [line for line in ours.splitlines() if line.startswith("error: ")]
    assert status == 1 and len(lines) == 1 and "most likely another rank has died" in lines[0], output


@pytest.mark.parametrize("error", [SystemExit(1), OSError("disk"), KeyboardInterrupt()])
def test_a_signal_ends_what_an_error_has_ended(monkeypatch, error):
    """A save under way may keep the process for minutes; after an OSError it once took no signal."""

    def fails(*_):
        listener.handle(lambda _: None)  # as while it trains
        raise error

    listener = Listener({})
    monkeypatch.setattr(pretrain, "run", fails)
    with pytest.raises(type(error)):
        pretrain.main([], listener=listener)
    assert listener.on_signal == listener._end_quietly


def test_an_error_of_this_rank_s_own_is_not_blamed_on_others():
    mesh = Mesh.offline()
    with pytest.raises(RuntimeError, match="mine"), watch.watched(mesh, SimpleNamespace(), 100.0, Listener({})):
        raise RuntimeError("mine")


@pytest.mark.parametrize("in_collective", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("kind", [RuntimeError, PeerLost, dist.DistError, ValueError])
def test_an_error_that_others_have_caused_ends_a_rank_after_its_report(monkeypatch, in_collective, hangs, kind):
    waits, tracebacks, error = [], [], kind("x")

    @contextmanager
    def every_second(check):
        check.__self__.hangs = hangs
        yield

    monkeypatch.setattr(watch, "sleep", waits.append)
    mesh, log = Mesh.offline(), SimpleNamespace(current_traceback=lambda: tracebacks.append(error))
    lost = isinstance(error, PeerLost | dist.DistError) or in_collective and not isinstance(error, ValueError)
    with pytest.raises(RanksLost if lost else type(error)) as caught:
        with watch.watched(mesh, log, 100.0, SimpleNamespace(every_second=every_second)):
            if in_collective:
                mesh.activity.enter("all-reduce", mesh.world, 8)
            raise error
    assert (waits, tracebacks) == ([10.0] * (lost and hangs), [error] * lost)
    assert lost or caught.value is error
