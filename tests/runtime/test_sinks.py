"""Figures for Weights & Biases, offline and read back from its own file, and for Prometheus, asked as it asks."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from minitron import pretrain
from minitron.config import cli
from minitron.runtime import sinks
from minitron.runtime.log import Log
from minitron.runtime.log_formats import Iteration
from ports import free_port

STEP = Iteration(
    step=1,
    consumed_samples=16,
    batch_size=16,
    loss=5.0,
    grad_norm=1.5,
    lr=1e-3,
    loss_scale=1.0,
    seconds=0.5,
    memory_gib=1.0,
)
TINY = (
    "model.num_layers=1 model.hidden_size=32 model.ffn_hidden_size=32 model.num_heads=2 model.num_kv_heads=2 "
    "model.vocab_size=64 train.seq_len=16 data.source=mock precision.dtype=fp32 optimizer.warmup_steps=1 "
    "train.eval_every=2 train.eval_steps=1"
).split()


def ask(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0].split("{")[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


# ---- Weights & Biases -----------------------------------------------------------------------------------------------


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """The package, offline: it talks to nobody and keeps its files here."""
    module = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name))
    return module


def records(path):
    """What W&B's file holds: blocks of 32 KiB of records, as LevelDB's log has them, behind seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def read(folder):
    """(id, project, configuration, history, exit code, steps of metrics) of each run in log.dir/wandb, oldest first."""
    return [whole(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def whole(path, patience=600.0):
    """Read what W&B's own process writes, and on a busy machine goes on writing after it has said that it has ended."""
    deadline, code = time.monotonic() + patience, None
    while code is None and time.monotonic() < deadline:
        config, history, steps, run = {}, [], {}, None
        for record in records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    run = run or record.run
                    for item in record.run.config.update:
                        config[item.key] = json.loads(item.value_json)
                case "history":
                    items = record.history.item
                    history.append({item.key or item.nested_key[-1]: json.loads(item.value_json) for item in items})
                case "metric":
                    steps[record.metric.name or record.metric.glob_name] = record.metric.step_metric
                case "exit":
                    code = record.exit.exit_code
        time.sleep(0.1 * (code is None))
    return run.run_id, run.project, config, history, code, steps


def test_wandb_has_the_record_and_the_configuration(wandb, tmp_path):
    cfg = cli.load([f"log.dir={tmp_path / 'run'}", "log.wandb=my-project"])
    with Log(cfg, 0, 1) as log:
        log.record("run", unigram_entropy=6.5)
        log.iteration(replace(STEP, step=3, loss=4.0))
        log.iteration(replace(STEP, step=4, loss=float("nan")))
        log.evaluation(4, 3.5)
    ((_, project, config, history, code, steps),) = read(tmp_path / "run")
    assert project == "my-project" and code == 0 and steps["*"] == "step"
    assert {key: config[key] for key in asdict(cfg)} == json.loads(json.dumps(asdict(cfg)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history] == [3, 4, 4]
    assert history[0]["step/loss"] == 4.0 and "step/loss" not in history[1] and history[2]["eval/loss"] == 3.5
    assert history[0]["step/tflops/full"] == lines[1]["tflops"]["full"]
    assert history[0]["step/tokens_per_second"] == lines[1]["tokens_per_second"]


def test_a_run_that_goes_on_goes_on_in_wandb(wandb, tmp_path):
    """By one id a log.dir, also where the command line says nothing else; a failed one is marked so."""
    words = [*TINY, f"log.dir={tmp_path / 'run'}", "log.wandb=p", f"checkpoint.dir={tmp_path / 'saves'}"]
    pretrain.main([*words, "train.steps=2"])
    pretrain.main([*words, "train.steps=4"])
    with pytest.raises(RuntimeError), Log(cli.load(words), 0, 1):
        raise RuntimeError("a cable")
    first, second, third = read(tmp_path / "run")
    assert first[0] == second[0] == third[0] == (tmp_path / "run" / "wandb.id").read_text()
    assert {row["step"] for row in first[3]} == {1, 2} and {row["step"] for row in second[3]} == {3, 4}
    assert any("eval/loss" in row for row in second[3]) and (first[4], third[4]) == (0, 1)


def test_wandb_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    Log(cli.load(["log.wandb=p"]), 1, 2).close()  # rank 0 writes
    with pytest.raises(
        ValueError,
        match="log.wandb=p needs the package wandb, .*; \\S+ -m pip install .*\\[wandb\\]'?, or set it to null",
    ):
        Log(cli.load(["log.wandb=p"]), 0, 1)


def test_wandb_without_a_key_is_one_line(wandb, tmp_path, monkeypatch):
    """It would ask for one on a terminal that a job does not have."""

    def refuse(resume, id, name, **options):
        assert (resume, name) == ("allow", "run") and len(id) > 6
        raise wandb.errors.UsageError("api_key not configured (no-tty).\nCall wandb.login(key=[your_api_key])")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"log\.wandb=p cannot be begun \(api_key .*run `wandb login`, set WANDB_MODE"):
        Log(cli.load(["log.wandb=p", f"log.dir={tmp_path / 'run'}"]), 0, 1)


# ---- Prometheus -----------------------------------------------------------------------------------------------------


def test_prometheus_has_the_last_figures(tmp_path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    with Log(cli.load([f"log.prometheus={port}"]), 0, 1) as log:
        assert ask(port) == {}
        log.iteration(replace(STEP, step=3, loss=4.0))
        log.iteration(replace(STEP, step=4, loss=float("nan"), lr=2e-3))
        log.evaluation(4, 3.5)
        log.record("numerics", step=2, **{"fp8/blocks.1.mlp.up/gradient/underflows%": 1.5, "grad_norm/head": None})
        found = ask(port)
    assert found["minitron_numerics_fp8_blocks_1_mlp_up_gradient_underflows_"] == 1.5
    assert found["minitron_numerics_step"] == 2 and "minitron_numerics_grad_norm_head" not in found
    assert found["minitron_step_step"] == found["minitron_eval_step"] == 4 and found["minitron_eval_loss"] == 3.5
    assert found["minitron_step_learning_rate"] == 2e-3 and found["minitron_step_loss"] == 4.0
    assert found["minitron_step_tflops_full"] > 0
    assert found["minitron_step_seconds"] == found["minitron_step_step_seconds"] == STEP.seconds
    with pytest.raises(OSError):
        ask(port)
    Log(cli.load([f"log.prometheus={port}"]), 0, 1).close()  # a restart serves there at once


def test_a_port_that_is_taken_is_said_at_the_start(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    with closing(socket.socket()) as sock:
        sock.bind(("0.0.0.0", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"log\.prometheus={port} cannot be served: Address already in use; use an"
        ):
            Log(cli.load([f"log.prometheus={port}", f"log.dir={tmp_path}"]), 0, 1)
    Log(cli.load([f"log.prometheus={port}"]), 1, 2).close()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=rf"log\.prometheus={port} needs the package prometheus-client"):
        Log(cli.load([f"log.prometheus={port}"]), 0, 1)
    for place in "70000", "0", "localhost", "localhost:", ":9400", "localhost:70000":
        with pytest.raises(ValueError, match=rf"log\.prometheus={place} "):
            pretrain.rules.check(cli.load([f"log.prometheus={place}"]), 1)


def test_each_figure_of_prometheus_names_its_run(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    port = free_port()
    (tmp_path / "run 7").mkdir()
    monkeypatch.chdir(tmp_path / "run 7")
    with Log(cli.load([f"log.prometheus={port}", "log.dir=."]), 0, 1) as log:
        log.iteration(replace(STEP, step=3))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    assert lines and all('{run="run 7"} ' in line for line in lines)


def test_prometheus_binds_the_address_that_is_named():
    pytest.importorskip("prometheus_client")
    with Log(cli.load([f"log.prometheus=127.0.0.1:{(port := free_port())}"]), 0, 1):
        assert ask(port) == {}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=30)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.0\r\n"])
def test_a_client_that_asks_for_nothing_does_not_keep_others_from_their_page(monkeypatch, sent):
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(sinks._Server, "ANSWER_SECONDS", 0.05)
    port = free_port()
    with Log(cli.load([f"log.prometheus={port}"]), 0, 1), socket.create_connection(("127.0.0.1", port), 60) as idle:
        idle.sendall(sent)
        assert idle.recv(1) == b""  # its time is over


@pytest.mark.parametrize(
    "parts, answered",
    [
        ([b"GET / HTTP/1.0\r\n\r\n"], True),
        ([b"GET /", b" HTTP/1.0\r\n", b"\r\n"], True),
        ([b"GET / HTTP/1.0\r\n\r", b"\n"], True),
        ([b"GET / HTTP/1.0\r", b"\n", b"\r", b"\n"], True),
        ([b"GET / HTTP/1.0\r\n", b"a: b\r\n"], False),
    ],
)
def test_a_request_may_come_in_parts(parts, answered):
    left, sent = [*parts, b""], []
    request = SimpleNamespace(settimeout=lambda _: None, recv=lambda _: left.pop(0), sendall=sent.append)
    sinks._Answer(request, None, SimpleNamespace(ANSWER_SECONDS=600.0, page=lambda: b"the page"))
    assert len(sent) == answered and all(answer.endswith(b"Content-Length: 8\r\n\r\nthe page") for answer in sent)


@pytest.mark.slow
def test_idle_and_slow_clients_of_prometheus_cost_one_descriptor(tmp_path):
    """210 connections at a hard limit of 256 files: the training ends as without them, and a scrape gets its page."""
    pytest.importorskip("prometheus_client")
    port, stop = free_port(), threading.Event()
    words = [*TINY, "train.steps=100000", f"log.prometheus={port}", f"log.dir={tmp_path}", "log.every=100000"]
    process = subprocess.Popen(
        ["bash", "-c", 'ulimit -n 256; exec "$@"', "-", sys.executable, "-m", "minitron.pretrain", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    clients = []
    try:
        while not (tmp_path / "metrics.jsonl").exists() or '"step"' not in (tmp_path / "metrics.jsonl").read_text():
            assert process.poll() is None and not stop.wait(0.1)
        for _ in range(210):
            clients.append(client := socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        slow = socket.create_connection(("127.0.0.1", port), timeout=600)
        clients.append(slow)
        with pytest.raises(OSError):  # each byte is early enough, the request is late
            while True:
                slow.sendall(b"G")
                stop.wait(0.1)
        assert ask(port)["minitron_step_step"] > 0
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 128
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM: stopped after iteration" in process.communicate(timeout=600)[0] and process.returncode == 0
    finally:
        process.kill()
        process.wait()
        for client in clients:
            client.close()
