"""Supervisors of several nodes on this machine: what they start again, without whom, and when they give up."""

import argparse
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from fault_run import PYTHONPATH
from minitron.runtime.status import why_it_ended
from minitron.supervise import agent, lead, supervisor
from minitron.supervise.lead import (
    BROKEN,
    HUNG,
    LOST,
    REQUEUE,
    ROUND,
    SETTLE_SECONDS,
    START,
    STUCK,
    TAKEN,
    Leader,
    matches,
    repeated,
    write_json_atomically,
)
from minitron.supervise.supervisor import Supervisor, parse

PATIENCE = 180.0  # seconds that a test waits for what must come, on a machine with other work, too

# A rank without torch: so many steps of 0.1 s, from the last "save" on, and what a file do-RANK asks for.
RANK = """
import json, os, sys, time
from pathlib import Path
folder, steps, rank = Path(sys.argv[1]), int(sys.argv[2]), os.environ["RANK"]
round_ = json.loads(os.environ["MINITRON_ROUND"])["round"]
stopped = folder / f"stopped-{round_}"
import signal
signal.signal(signal.SIGTERM, lambda *_: stopped.touch())
begin = len(list(folder.glob("step-*")))
(folder / f"started-{rank}-{round_}").write_text(repr(dict(os.environ)))
for step in range(begin, steps):
    time.sleep(0.1)
    if (order := folder / f"do-{rank}").exists():
        text = order.read_text()
        order.unlink()
        exec(text)
    if stopped.exists():
        break
    if rank == "0":
        (folder / f"step-{step}").touch()
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"kind": "step", "step": step + 1}) + "\\n")
"""


class Nodes:
    """Supervisors as processes; their hosts are called host0, host1, ..."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *options: str,
        spares: int = 0,
        ranks: int = 2,
        command=None,
        supervisor=None,
        environment=None,
    ):
        self.folder, self.stack, self.processes, self.environment = folder, ExitStack(), {}, environment or {}
        self.supervisor = supervisor or ["-m", "minitron.supervise"]
        (folder / "rank.py").write_text(RANK)
        command = command or ["rank.py", ".", "20"]
        self.options = ["--nodes", nodes, "--spares", spares, "--ranks", ranks, "--dir", folder, "--id", "job"]
        self.options += ["--beat-seconds", "0.1", "--dead-seconds", "3", "--backoff-seconds", "0.1", *options]
        self.options += ["--", *command]
        for node in range(nodes + spares):
            self.start(node)

    def start(self, node: int) -> None:
        own = ["--node", node, "--host", f"host{node}", "--address", "localhost", "--preload", ""]
        self.processes[node] = subprocess.Popen(
            [sys.executable, *self.supervisor, *map(str, [*own, *self.options])],
            cwd=self.folder,
            env=os.environ
            | {"PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "", "NODE": str(node)}
            | self.environment,
            stderr=open(self.folder / f"stderr-{node}", "a"),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()  # its agent kills the ranks
            process.wait()

    def until(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            ended = all(process.poll() is not None for process in self.processes.values())
            assert time.monotonic() < deadline and not ended or condition(), self.said()
            time.sleep(0.02)

    def steps(self, count: int) -> "Nodes":
        self.until(lambda: (self.folder / f"step-{count - 1}").exists())
        return self

    def do(self, rank: int, code: str) -> None:
        (self.folder / f"tmp-{rank}").write_text(code)
        (self.folder / f"tmp-{rank}").rename(self.folder / f"do-{rank}")

    def end(self) -> list[int]:
        """The statuses of all supervisors."""
        return [process.wait(PATIENCE) for process in self.processes.values()]

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("stderr-*")))

    def report(self) -> list[dict]:
        path = self.folder / "restarts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def causes(self) -> list[str]:
        return [record["cause"] for record in self.report()]


def killed(number: int) -> str:
    return f"os.kill(os.getpid(), {number})"


def test_a_run_without_a_fault_ends_with_0(tmp_path):
    with Nodes(tmp_path, 2) as nodes:
        assert nodes.end() == [0, 0] and not nodes.report(), nodes.said()
    assert len(list(tmp_path.glob("step-*"))) == 20 and not list(tmp_path.glob("rounds/job/node-*"))
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"
    found = [eval((tmp_path / f"started-{rank}-1").read_text()) for rank in range(4)]
    assert [tuple(env[name] for name in names) for env in found] == [
        (str(rank), str(rank % 2), "4", "2", "localhost") for rank in range(4)
    ]


@pytest.mark.parametrize("called", [False, True])
def test_ranks_are_new_pythons_where_an_import_has_called_cuda(tmp_path, called):
    """A fork of a process that has called CUDA gets no GPU."""
    (tmp_path / "loaded.py").write_text(f"import torch\ntorch.cuda._is_in_bad_fork = lambda: {called}\n")
    (tmp_path / "show.py").write_text(
        "import os, sys\nprint('loaded' in sys.modules, file=open(os.environ['RANK'], 'w'))\n"
    )
    with Nodes(tmp_path, 1, "--preload", "loaded", command=["show.py"]) as nodes:
        assert nodes.end() == [0], nodes.said()
    assert [(tmp_path / rank).read_text() for rank in "01"] == [f"{not called}\n"] * 2


@pytest.mark.parametrize(
    "code, cause",
    [
        (killed(9), "rank 3 on host1 was killed by SIGKILL"),
        ("sys.exit(7)", "rank 3 on host1 ended with status 7"),
        (f"sys.exit({BROKEN})", "rank 3 on host1 has a broken device"),
        ("os.kill(os.getppid(), 9)", "the agent on host1 was killed by SIGKILL"),
    ],
)
def test_all_nodes_start_again_and_the_cause_is_named(tmp_path, code, cause):
    with Nodes(tmp_path, 2, spares=1) as nodes:
        nodes.steps(3)
        other = (
            "order = folder / 'do-3'\nfor there in (False, True):\n  while order.exists() == there: time.sleep(0.01)\n"
        )
        nodes.do(0, f"{other}time.sleep(0.05); sys.exit({LOST})")  # a consequence, whichever is seen first
        nodes.until(lambda: not (tmp_path / "do-0").exists())
        nodes.do(3, code)
        assert nodes.end() == [0, 143 if "broken" in cause else 0, 0], nodes.said()  # 143: it goes on without this node
    (record,) = nodes.report()
    assert record["cause"] == cause and 3 <= record["step"] <= 5 and record["round"] == 1
    ports = [eval((tmp_path / f"started-0-{n}").read_text())["MASTER_PORT"] for n in (1, 2)]
    assert ports[0] != ports[1]  # a fresh store
    hosts = [node["host"] for node in json.loads((tmp_path / "rounds/job/round.json").read_text())["nodes"]]
    assert hosts == (["host0", "host2"] if "broken" in cause else ["host0", "host1"])
    assert (tmp_path / "excluded_nodes").exists() == ("broken" in cause)  # for a scheduler, at once


def test_the_rank_that_stands_still_is_named_not_those_that_waited_for_it(tmp_path):
    with Nodes(tmp_path, 2) as nodes:
        nodes.steps(3)
        for rank in (0, 1, 2):
            nodes.do(rank, f"sys.exit({HUNG})")
        nodes.do(3, killed(signal.SIGSTOP))
        assert nodes.end() == [0, 0], nodes.said()
    assert nodes.causes() == ["rank 3 on host1 made no progress"]


# nvidia-smi of a node: what the file gpus-NODE holds.
SMI = """#!/bin/sh
cat "$FOLDER/gpus-$NODE"
"""


@pytest.mark.parametrize("broken", [0, 2])
def test_a_node_whose_gpu_is_lost_is_left_out_of_the_next_round(tmp_path, broken):
    """The node that leads; and the spare, which must not take part later."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    for node in range(3):
        (tmp_path / f"gpus-{node}").write_text("00000000:3B:00.0, 0, None\n00000000:AF:00.0, 0, None\n")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FOLDER": str(tmp_path)}
    with Nodes(tmp_path, 2, spares=1, environment=environment) as nodes:
        nodes.steps(3)
        (tmp_path / f"gpus-{broken}").write_text("00000000:3B:00.0, 0, None\n")
        nodes.do(3, killed(9))
        assert nodes.end() == [143 if node == broken else 0 for node in range(3)], nodes.said()
    (cause,) = nodes.causes()
    assert cause.startswith("rank 3 on host1 was killed by SIGKILL") and "GPU 0000:af:00" in cause
    assert cause.count("is left out") == nodes.said().count("is left out") == 1
    hosts = [node["host"] for node in json.loads((tmp_path / "rounds/job/round.json").read_text())["nodes"]]
    assert hosts == [f"host{node}" for node in range(3) if node != broken]
    assert (tmp_path / "excluded_nodes").read_text() == f"host{broken}\n"
    assert len(list(tmp_path.glob("step-*"))) == 20


# A supervisor of which node 0 takes longer for the beats of all nodes than dead_seconds.
SLOW_READS = """
import time
from minitron.supervise import lead, supervisor
alive = lead.Leader.alive
def slow(self, node):
    if self.args.node == 0: time.sleep(0.4 * self.args.dead_seconds)
    return alive(self, node)
lead.Leader.alive = slow
supervisor.main()
"""


@pytest.mark.slow
def test_a_leader_that_reads_slowly_is_not_taken_for_dead(tmp_path):
    """It reads the beats of all nodes between two of its own."""
    (tmp_path / "slow.py").write_text(SLOW_READS)
    with Nodes(tmp_path, 2, spares=1, ranks=1, command=["rank.py", ".", "40"], supervisor=["slow.py"]) as nodes:
        assert nodes.end() == [0, 0, 0] and not nodes.report(), nodes.said()
    hosts = [node["host"] for node in json.loads((tmp_path / "rounds/job/round.json").read_text())["nodes"]]
    assert hosts == ["host0", "host1"]


GARBAGE = ["", "[]", "7", "null", '"a"', "{}", "[" * 100000, '{"number": Infinity}', '{"number": %s}' % ("9" * 400)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_takes_the_place_of_a_node_that_died(tmp_path, lost):
    """Node 0 leads, and its death hands the lead on."""
    with Nodes(tmp_path, 2, spares=1, ranks=1) as nodes:
        nodes.steps(3).processes.pop(lost).kill()
        assert nodes.end() == [0, 0], nodes.said()
    assert nodes.causes() == [f"node {lost} (host{lost}) is lost"]
    assert (tmp_path / "started-0-2").exists() and len(list(tmp_path.glob("step-*"))) == 20


def test_without_a_spare_the_job_goes_back_to_the_queue_without_the_node(tmp_path):
    with Nodes(tmp_path, 2, ranks=1) as nodes:
        nodes.steps(3).processes.pop(1).kill()
        assert nodes.end() == [REQUEUE], nodes.said()
    assert nodes.causes() == ["node 1 (host1) is lost; 1 nodes are left of 2"]
    assert (tmp_path / "excluded_nodes").read_text() == "host1\n"


def test_a_lost_node_may_come_back(tmp_path):
    with Nodes(tmp_path, 2, "--rejoin-seconds", "60", ranks=1) as nodes:
        nodes.steps(3).processes[1].kill()
        nodes.processes[1].wait()
        nodes.start(1)
        assert nodes.end() == [0, 0], nodes.said()
    assert nodes.causes() == ["node 1 (host1) is lost"]


def test_a_port_that_somebody_listens_at_is_left_out(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Nodes(tmp_path, 1, "--port", str(port), command=["rank.py", ".", "2"]) as nodes:
            assert nodes.end() == [0], nodes.said()
    assert port < int(eval((tmp_path / "started-0-1").read_text())["MASTER_PORT"]) < port + 100


def test_of_two_supervisors_of_a_node_the_older_one_leaves(tmp_path):
    """As when a machine comes back that was cut off, and its pod was made again elsewhere."""
    (tmp_path / "do-1").write_text("time.sleep(1e6)")  # so that the run does not end before the newer one comes
    with Nodes(tmp_path, 2, ranks=1) as nodes:
        older = nodes.steps(3).processes[1]
        nodes.start(1)
        assert older.wait(PATIENCE) == 143 and nodes.end() == [0, 0], nodes.said()
    assert nodes.causes() == ["node 1 (host1) is lost"] and "another supervisor has started as node 1" in nodes.said()
    assert len(list(tmp_path.glob("step-*"))) == 20


def test_the_newer_supervisor_stays_also_if_the_older_one_writes_between_its_look_and_its_end(tmp_path):
    older = Supervisor(arguments(tmp_path))
    older.write_heartbeat()
    newer = Supervisor(arguments(tmp_path))
    assert not older.replaced()
    newer.write_heartbeat()
    older.write_heartbeat()
    assert not newer.replaced()
    newer.write_heartbeat()
    assert older.replaced() and not newer.replaced()
    Supervisor(arguments(tmp_path)).write_heartbeat()
    assert newer.replaced()

    def away(*_):
        raise OSError(errno.EIO, "the disk is away")

    newer.leader.read = away
    assert not newer.replaced()


def test_of_two_rounds_with_one_number_the_later_one_counts(tmp_path):
    """As when a leader that stood still for a while writes one more round: here with the nodes the other way round."""
    with Nodes(tmp_path, 2, ranks=1) as nodes:
        nodes.steps(3)
        round_ = json.loads((tmp_path / "rounds/job/round.json").read_text())
        (tmp_path / "started-0-1").unlink()
        write_json_atomically(
            tmp_path / "rounds/job/round.json", round_ | {"key": "another", "nodes": round_["nodes"][::-1]}
        )
        assert nodes.end() == [0, 0] and not nodes.report(), nodes.said()
    assert (tmp_path / "started-0-1").exists() and len(list(tmp_path.glob("step-*"))) == 20


def test_a_start_that_has_ended_says_that_another_needs_another_id(tmp_path):
    with Nodes(tmp_path, 1, command=["rank.py", ".", "2"]) as nodes:
        assert nodes.end() == [0] and not nodes.said().count("--id")
        nodes.start(0)
        assert nodes.end() == [0] and "rounds/job ended before, with 0: start again with another --id" in nodes.said()


def arguments(folder: Path) -> argparse.Namespace:
    args = ["--node", "0", "--nodes", "2", "--ranks", "1", "--dir", folder, "--id", "a", "--dead-seconds", "2", "x"]
    return parse([str(arg) for arg in args])


def test_a_node_whose_ranks_cannot_be_killed_leaves(tmp_path, monkeypatch):
    """They hang in a driver; the others wait for this node to say that its ranks have ended."""
    node, now, signals = Supervisor(arguments(tmp_path)), [0.0], []
    monkeypatch.setattr(supervisor, "monotonic", lambda: now[0])
    monkeypatch.setattr(node, "agent", SimpleNamespace(listen=lambda: None, signal=signals.append, running=True))
    node.agent.ended, node.agent.said = {}, {}
    node.heartbeat |= {"state": "running", "round": "key"}
    for now[0] in range(1, 130):
        assert node.follow(START | {"state": "stop"}) == (143 if node.heartbeat["leaving"] else None)
        node.watch()
    assert (
        node.heartbeat["state"] == "ended"
        and node.heartbeat["leaving"] == "has ranks that SIGKILL does not end in 120 s"
    )
    assert set(signals) == {signal.SIGKILL}


@pytest.fixture
def node(tmp_path):
    """The supervisor of node 0, with an agent that keeps what it is given."""
    node = Supervisor(arguments(tmp_path))
    assert (node.health.folder, node.health.write_seconds) == (tmp_path, 1.0)  # half of --dead-seconds
    node.agent = SimpleNamespace(started=[], signals=[], ended={}, said={}, running=False, listen=lambda: None)
    node.agent.start, node.agent.signal = node.agent.started.extend, node.agent.signals.append
    node.health = SimpleNamespace(unfit=lambda: "unfit", poor=lambda: "poor")
    return node


@pytest.mark.parametrize("state", ["idle", "done", "ended", "running", "failed"])
def test_a_node_follows_the_table_of_rounds(node, state):
    beat, host = node.heartbeat, node.args.host
    mine, other = ({"node": n, "life": life, "address": "a", "port": 9} for n, life in ((0, beat["life"]), (1, "b")))
    has_ranks, run = state in ("running", "failed"), START | {"key": "new", "number": 3, "state": "run"}
    with_it, without, stop = run | {"nodes": [other, mine]}, run | {"nodes": [other]}, run | {"state": "stop"}

    def follows(round_, **values):
        """The status, whether ranks were started, and whether they were killed."""
        beat.update({"state": state, "round": "old", "looked": "", "unfit": "", "leaving": ""} | values)
        node.agent.started.clear(), node.agent.signals.clear()
        node.ending, node.written = 0.0, 1.0
        status = node.follow(round_)
        assert bool(node.ending) == bool(node.agent.signals) and {*node.agent.signals} <= {signal.SIGKILL}
        return status, bool(node.agent.started), bool(node.agent.signals)

    assert follows(with_it, round="new") == (None, False, False)
    assert follows(with_it) == (None, not has_ranks, has_ranks)
    if not has_ranks:
        assert (beat["state"], beat["round"], beat["ended"], beat["said"]) == ("running", "new", {}, {})
        (rank,) = node.agent.started
        places = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
        assert rank.items() >= (places | {"MASTER_ADDR": "a", "MASTER_PORT": "9"}).items()
        assert json.loads(rank["MINITRON_ROUND"])["round"] == 3
    another_life = with_it | {"nodes": [mine | {"life": "before"}, other]}
    leave = [
        (without, {"leaving": "got SIGTERM"}, True),
        (without, {"unfit": "no GPU"}, False),  # the leader has not read it yet
        (without | {"excluded": [host]}, {"unfit": "no GPU"}, True),
        (without | {"excluded": [host]}, {}, False),
        (stop | {"nodes": [mine]}, {"leaving": "got SIGTERM"}, False),  # the leader reads the reason first
        (stop | {"nodes": [mine], "left": "why"}, {"leaving": "got SIGTERM"}, True),
        (stop | {"nodes": [mine], "left": "why"}, {"looked": "new"}, False),
        (stop | {"nodes": [other]}, {"leaving": "got SIGTERM"}, True),
        (without, {}, False),
        (another_life, {}, False),
    ]
    for round_, values, leaves in leave:
        assert follows(round_, **values) == (143 if leaves and not has_ranks else None, False, has_ranks), values
    assert follows(run | {"state": "end", "status": REQUEUE}) == (None if has_ranks else REQUEUE, False, has_ranks)
    for looked in "", "new":
        follows(stop | {"nodes": [mine]}, looked=looked)
        looks = not (looked or has_ranks)
        assert (beat["unfit"] == "unfit", node.written < 0) == (looks, looks)
        assert not looks or (beat["poor"], beat["looked"]) == ("poor", "new")


@pytest.mark.parametrize(
    "before, ended, running, after",
    [
        ("running", {}, True, "running"),
        ("running", {"0": 0}, True, "running"),
        ("running", {"0": 0}, False, "done"),
        ("running", {"0": 7}, True, "failed"),
        ("running", {"0": 7, "1": 0}, False, "failed"),
        ("running", {"agent": -9}, False, "failed"),
        ("idle", {}, False, "idle"),
        ("done", {"0": 0}, False, "done"),
        ("failed", {"0": 7}, True, "failed"),
        ("ended", {"0": -9}, False, "ended"),
    ],
)
def test_a_heartbeat_has_the_state_of_the_ranks(node, before, ended, running, after):
    node.heartbeat["state"], node.written = before, 1.0
    node.agent.ended, node.agent.said, node.agent.running = ended, {"0": "why"}, running
    node.watch()
    assert node.heartbeat["state"] == after and (node.written < 0) == (before != after)  # a change is written at once
    killed = before == "ended"  # these statuses are those of SIGKILL
    assert (node.heartbeat["ended"], node.heartbeat["said"]) == (({}, {}) if killed else (ended, {"0": "why"}))
    assert not node.heartbeat["leaving"]
    node.agent.ended = {"0": BROKEN}
    node.watch()
    assert bool(node.heartbeat["leaving"]) != killed


def test_no_node_is_dead_while_the_disk_of_the_beats_is_full(tmp_path, monkeypatch):
    """Nodes that cannot write would take the lead from one another. Afterwards silence counts again."""
    args, now = arguments(tmp_path), [0.0]
    args.node, disk = 1, {"full": True}
    node = Supervisor(args)
    write_json_atomically(node.folder / "node-0.json", beat_of(0))

    def write(*arguments):
        if disk["full"]:
            raise OSError(errno.ENOSPC, "no space left on device")
        write_json_atomically(*arguments)

    for module in supervisor, lead:
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(supervisor, "write_json_atomically", write)

    def leads():
        now[0] += 0.5
        node.write_heartbeat()
        assert node.written == now[0]  # also the one that failed: the next one waits for its time
        return node.leader.leads(1)

    assert not any([leads() for _ in range(4 * int(args.dead_seconds))])
    disk["full"] = False
    after = [leads() for _ in range(4 * int(args.dead_seconds))]
    assert not after[0] and after[-1]


@pytest.fixture
def leader(tmp_path):
    return Leader(arguments(tmp_path), tmp_path)


def beat_of(node: int, **values) -> dict:
    """The beat of a node whose ranks have ended in round b, and which has looked at itself."""
    here = {"node": node, "life": "a", "host": f"host{node}", "address": "localhost", "port": 1, "count": 1}
    state = {"round": "b", "looked": "b", "state": "ended", "ended": {}, "said": {}, "time": time.time()}
    return here | state | {"leaving": "", "stopping": False, "unfit": "", "poor": ""} | values


def stopped(*beats: dict) -> dict:
    """Round b of these nodes, which has stopped."""
    return START | {"number": 1, "key": "b", "state": "stop", "stopped": time.time(), "nodes": list(beats)}


def test_a_beat_that_is_not_whole_is_none(leader, tmp_path, monkeypatch):
    """A machine that loses its power may leave an empty file, which must not end the others."""
    now = [0.0]
    monkeypatch.setattr(lead, "monotonic", lambda: now[0])
    (tmp_path / "node-0.json").write_text("")
    assert leader.alive(0) is None
    beat = beat_of(1)
    write_json_atomically(tmp_path / "node-1.json", beat)
    assert leader.alive(1) == beat
    (tmp_path / "node-1.json").write_text('{"count": ')
    assert leader.alive(1) == beat  # until it is too old
    for now[0] in 0.9, 1.8:
        assert leader.alive(1) == beat  # this node did not stand still
    now[0] = 2.2
    assert leader.alive(1) is None


def test_time_in_which_nobody_looked_does_not_count(leader, tmp_path, monkeypatch):
    """As when this node was suspended: the others' heartbeats are as old as its own."""
    now = [0.0]
    monkeypatch.setattr(lead, "monotonic", lambda: now[0])
    write_json_atomically(tmp_path / "node-1.json", beat := beat_of(1))
    assert leader.alive(1) == beat
    for now[0] in 1.5, 2.4, 3.3:
        assert leader.alive(1) == beat
    now[0] = 3.6
    assert leader.alive(1) is None


@pytest.mark.parametrize("durable", [False, True])
def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, durable):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda _: synced.extend((path.name, path.read_text()) for path in tmp_path.iterdir())
    )
    write_json_atomically(tmp_path / "round.json", {"a": 1}, durable)
    assert [path.name for path in tmp_path.iterdir()] == ["round.json"]
    assert json.loads((tmp_path / "round.json").read_text()) == {"a": 1}
    assert [text for name, text in synced if name != "round.json"] == ['{"a": 1}'] * durable


@pytest.mark.parametrize(
    "beats, usable, rejoin, expected",
    [
        ([{"state": "running"}] * 2, 2, 0, None),
        ([{"state": "done"}, {"state": "running"}], 2, 0, None),
        ([{"state": "done"}, {"state": "done", "round": "before"}], 2, 0, None),  # it has not begun
        ([{"state": "done"}] * 2, 2, 0, ("end", "")),
        ([{"state": "done"}, {"state": "done", "leaving": "got SIGTERM"}], 1, 0, ("end", "")),
        ([{"state": "done"}, {"state": "done", "leaving": "got SIGTERM"}], 2, 0, ("stop", "host1 got SIGTERM")),
        ([{"state": "done"}, {"state": "done", "leaving": "got SIGTERM"}], 1, 9, ("stop", "host1 got SIGTERM")),
        ([{"state": "done", "stopping": True}, {"state": "done", "leaving": "got SIGTERM"}], 2, 9, ("end", "")),
        ([{"state": "failed", "ended": {"0": 1}}, {"state": "running"}], 2, 0, ("stop", "")),
        ([{"state": "running"}, None], 2, 0, ("stop", "")),  # lost
        ([{"state": "done"}, {"state": "done", "life": "b"}], 2, 0, ("stop", "")),  # started again
    ],
)
def test_what_ends_a_round(leader, tmp_path, beats, usable, rejoin, expected):
    leader.args.rejoin_seconds = rejoin
    alive = {n: beat_of(n, **beat) for n, beat in enumerate(beats) if beat is not None}
    round_ = stopped(beat_of(0), beat_of(1)) | {"state": "run", "parts": {"before": 1.0}}
    after = leader.during_run(round_, alive, [None] * usable)
    assert (after and (after["state"], after["left"])) == expected
    if after and after["state"] == "end":
        assert after["status"] == 0 and len(leader_causes(tmp_path)) == any(beat.get("leaving") for beat in beats)
    elif after:
        assert after["parts"] == ({} if after["left"] else {"detect_seconds": 0.0})


def leader_causes(folder: Path) -> list[str]:
    path = folder / "restarts.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def led(leader, monkeypatch):
    """led(seconds, *beats): let time pass, set heartbeats, lead once; return the state and the nodes or the status."""
    now = [1000.0]
    leader.args.spares, leader.args.gather_seconds = 1, 50.0
    monkeypatch.setattr(lead, "monotonic", lambda: now[0])

    def led(seconds, *beats):
        now[0] += seconds
        monkeypatch.setattr(leader, "alive", {beat["node"]: beat for beat in beats}.get)
        round_ = leader.lead()
        return round_["state"], [node["node"] for node in round_["nodes"]] or round_["status"]

    led.leader = leader
    return led


def test_the_first_round_waits_for_enough_nodes_and_a_while_for_spares(led):
    first, second, third = map(beat_of, range(3))
    leaves, other = beat_of(1, leaving="got SIGTERM"), beat_of(3)  # which is not one of the job's nodes
    assert led(0, first) == led(40, first, leaves, other) == ("none", 0)
    assert led(40, first, second) == led(9, first, second) == ("none", 0)
    assert led(2, first, second) == ("run", [0, 1])


def test_the_first_round_begins_at_once_with_all_spares_and_is_on_the_disk(led, monkeypatch):
    """Another node leads if this machine dies now."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    assert led(0, *map(beat_of, range(3))) == ("run", [0, 1]) and synced


@pytest.mark.parametrize("beats", [[beat_of(0)], [beat_of(0), beat_of(1, leaving="got SIGTERM")]])
def test_too_few_nodes_in_time_go_back_to_the_queue(led, beats):
    assert led(0, *beats) == led(49, *beats) == ("none", 0)
    assert led(2, *beats) == ("end", REQUEUE) == led(0, *map(beat_of, range(3)))


def test_a_signal_before_the_first_round_ends_the_run(led):
    assert led(0, beat_of(0, stopping=True), beat_of(1), beat_of(2)) == ("end", REQUEUE)


def test_excluded_nodes_take_no_part_and_are_listed_once(led, tmp_path):
    write_json_atomically(tmp_path / "round.json", START | {"excluded": ["host1"]})
    assert led(0, *map(beat_of, range(3))) == ("none", 0)
    assert led(11, *map(beat_of, range(3))) == ("run", [0, 2])
    write_json_atomically(tmp_path / "round.json", led.leader.round() | {"state": "stop", "key": "b"})
    assert led(0, beat_of(0, looked="b"), beat_of(2, looked="b", unfit="no GPU"))[0] == "end"
    assert (tmp_path / "excluded_nodes").read_text() == "host2\n"


def test_starts_after_the_same_step_wait_longer_each_time(leader, monkeypatch):
    now, beats = [0.0], [beat_of(0, ended={"0": -9}), beat_of(1)]
    monkeypatch.setattr(lead, "monotonic", lambda: now[0])
    monkeypatch.setattr(lead, "SAME_STEP", 99)
    leader.args.backoff_seconds = 10.0
    for number, waits in enumerate((0.0, 10.0, 20.0, 30.0)):
        round_ = stopped(*beats) | {"number": number, "failures": [[None, f"host{i}"] for i in range(number)]}
        for passed in (0.0, waits - 0.5, 1.0) if waits else (0.0,):
            now[0] += passed
            after = leader.after_stop(round_, dict(enumerate(beats)), beats)
            assert (after is not None) == (passed == 1.0 or not waits)
    left = round_ | {"number": 9, "left": "host1 got SIGTERM"}  # no failure: it does not wait
    assert leader.after_stop(left, dict(enumerate(beats)), beats)["state"] == "run"


def test_detection_is_counted_from_the_last_row(leader, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    for age, seconds in (500.0, 500.0), (-500.0, 0.0):
        os.utime(tmp_path / "metrics.jsonl", times=(0, time.time() - age))
        beats = {0: beat_of(0, state="failed", ended={"0": 1}), 1: beat_of(1, state="running")}
        after = leader.during_run(stopped(*beats.values()) | {"state": "run"}, beats, [])
        assert after["parts"] == {"detect_seconds": pytest.approx(seconds, abs=100.0)}


def test_a_job_that_was_told_to_stop_is_not_started_again(leader):
    beats = [beat_of(0, ended={"0": -9}), beat_of(1), beat_of(2, stopping=True)]
    for usable in beats, beats[:2]:
        ended = leader.after_stop(stopped(*beats[:2]), dict(enumerate(beats)), usable)
        assert (ended["state"], ended["status"]) == ("end", REQUEUE)


def test_a_node_with_a_broken_device_is_excluded_the_first_time(leader):
    beats = [beat_of(n, ended={"0": BROKEN} if n == 1 else {}) for n in range(3)]
    after = leader.after_stop(stopped(*beats[:2]), dict(enumerate(beats)), beats)
    assert (after["excluded"], [node["node"] for node in after["nodes"]]) == (["host1"], [0, 2])
    beats = [beat_of(0), None]
    ended = leader.after_stop(stopped(beats[0], beat_of(1)), {0: beats[0]}, beats[:1])
    assert (ended["status"], ended["excluded"]) == (REQUEUE, ["host1"])  # lost, and no spare


def test_the_ranks_of_a_node_follow_those_of_the_nodes_before(node):
    """The second of three nodes with two ranks each; all meet at the first one."""
    node.args.ranks = 2
    nodes = [{"node": n, "life": f"life{n}", "address": f"address{n}", "port": 7 + n} for n in range(3)]
    node.start(START | {"key": "new", "nodes": nodes, "parts": {"detect_seconds": 2.0}, "number": 4}, 1)
    common = {
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "address0",
        "MASTER_PORT": "7",
    }
    assert len(node.agent.started) == 2
    for local, rank in enumerate(node.agent.started):
        assert rank.items() >= (common | {"RANK": str(2 + local), "LOCAL_RANK": str(local)}).items()
        round_ = json.loads(rank["MINITRON_ROUND"])
        assert round_ == {"round": 4, "detect_seconds": 2.0, "at": pytest.approx(time.time(), abs=100.0)}


def test_a_hang_is_judged_once_all_ranks_had_time_to_report_it(leader, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(lead, "monotonic", lambda: now[0])
    alive = {0: beat_of(0, state="failed", ended={"0": HUNG}), 1: beat_of(1, state="running")}
    round_ = stopped(*alive.values()) | {"state": "run"}
    assert leader.during_run(round_, alive, []) is None
    now[0] = SETTLE_SECONDS - 0.5
    assert leader.during_run(round_, alive, []) is None
    now[0] = SETTLE_SECONDS + 0.5
    assert leader.during_run(round_, alive, [])["state"] == "stop"


@pytest.mark.parametrize(
    "before, failed, nodes, excluded",
    [
        ("host1", 1, 3, ["host1"]),
        ("host1", 1, 2, []),  # no spare
        ("host0", 1, 3, []),
        ("", 1, 3, []),  # the first failure
        ("host1", None, 3, []),
        (None, 1, 3, []),
        (None, None, 3, []),  # a node was late, and nobody knows which one
    ],
)
def test_a_node_that_was_the_cause_twice_in_a_row_is_excluded_if_there_is_a_spare(
    leader, before, failed, nodes, excluded
):
    beats = [beat_of(n, ended={"0": 7} if n == failed else {}) for n in range(nodes)]
    round_ = stopped(*beats[:2]) | {"failures": [] if before == "" else [[5, before]]}
    after = leader.after_stop(round_, {beat["node"]: beat for beat in beats}, beats)
    assert (after["state"], after["excluded"]) == ("run", excluded) and matches(after, ROUND)


def test_a_next_round_has_nothing_of_the_last_one_but_its_count_its_failures_and_its_times(leader):
    beats = [beat_of(n, port=n) for n in range(2)]
    kept = {"failures": [[3, "host1"]], "excluded": ["host7"]}
    before = stopped(*beats) | kept | {"number": 6, "left": "host1 got SIGTERM", "parts": {"detect_seconds": 2.0}}
    after = leader.next(before | {"stopped": time.time() - 50.0}, beats)
    nodes = [{name: beat[name] for name in ("node", "life", "host", "address", "port")} for beat in beats]
    parts = {"detect_seconds": 2.0, "end_seconds": pytest.approx(50.0, abs=30.0)}
    expected = kept | {"number": 7, "state": "run", "nodes": nodes, "left": "", "parts": parts}
    assert after.items() >= expected.items() and after["key"] not in ("", "b") and matches(after, ROUND)


@pytest.mark.parametrize("leaving, excluded", [("got SIGTERM", []), (f"{STUCK} in 120 s", ["host1"])])
def test_a_node_that_is_of_no_use_is_excluded_and_one_that_was_told_to_end_is_not(leader, leaving, excluded):
    beats = [beat_of(0), beat_of(1, leaving=leaving)]
    ended = leader.after_stop(stopped(*beats), dict(enumerate(beats)), beats[:1])
    assert (ended["status"], ended["excluded"]) == (REQUEUE, excluded)


def test_a_round_waits_for_each_node_s_look_at_itself(leader):
    beats = [beat_of(0), beat_of(1, looked="the round before")]
    assert leader.after_stop(stopped(*beats), dict(enumerate(beats)), beats) is None
    beats[1]["looked"] = "b"
    assert leader.after_stop(stopped(*beats), dict(enumerate(beats)), beats)["state"] == "run"


def test_without_a_spare_the_job_goes_back_to_the_queue_without_the_unfit_node(leader):
    beats = [beat_of(0, ended={"0": -9}), beat_of(1, unfit="GPU 0000:3b:00 is no longer visible")]
    ended = leader.after_stop(stopped(*beats), dict(enumerate(beats)), beats)
    assert (ended["state"], ended["status"], ended["excluded"]) == ("end", REQUEUE, ["host1"])


def test_a_third_round_knows_the_failures_and_the_nodes_without_use_of_all_before(leader):
    beats = [beat_of(0, ended={"0": -9}), beat_of(1, unfit="GPU 0000:3b:00 is no longer visible"), beat_of(3)]
    before = stopped(*beats[:2]) | {"number": 2, "excluded": ["host2"], "failures": [[3, "host1"]]}
    third = leader.after_stop(before, {beat["node"]: beat for beat in beats}, beats)
    assert (third["state"], third["number"], [node["node"] for node in third["nodes"]]) == ("run", 3, [0, 3])
    assert third["excluded"] == ["host2", "host1"] and third["failures"] == [[3, "host1"], [None, "host0"]]


def test_an_unfit_node_goes_while_the_others_wait_for_one_in_its_place(leader):
    leader.args.rejoin_seconds = 60.0
    beats = [beat_of(0, ended={"0": -9}), beat_of(1, unfit="GPU 0000:3b:00 is no longer visible")]
    waits = leader.after_stop(stopped(*beats), dict(enumerate(beats)), beats)
    assert (waits["state"], waits["excluded"]) == ("stop", ["host1"]) and "GPU 0000:3b:00" in waits["left"]
    assert leader.after_stop(waits, dict(enumerate(beats)), beats[:1]) is None
    other = beat_of(2)
    assert leader.after_stop(waits, {0: beats[0], 2: other}, [beats[0], other])["state"] == "run"


def test_the_cause_of_a_round_is_the_first_of_its_ends(leader):
    """Two ranks a node: one end after another is added, each of which counts before those that are there."""
    leader.args.ranks = 2
    beats = [beat_of(n) for n in range(3)]
    for node, local, status, cause in [
        (0, "0", LOST, "rank 0 on host0 lost its partners"),
        (1, "1", HUNG, "rank 1 on host0, 2 on host1, 4 on host2, 5 on host2 made no progress"),
        (2, "1", 7, "rank 5 on host2 ended with status 7: why"),
        (1, "0", BROKEN, "rank 2 on host1 has a broken device"),
        (0, "1", -signal.SIGSEGV, "rank 1 on host0 was killed by SIGSEGV"),
        (0, "agent", 0, "rank 1 on host0 was killed by SIGSEGV"),
    ]:
        beats[node]["ended"][local] = status
        beats[node]["said"] = {"1": "why"} if status == 7 else {}
        host = "host0" if status == HUNG else f"host{node}"
        found = leader.cause(stopped(*beats), beats)
        assert found == (-signal.SIGSEGV if local == "agent" else status, host, cause)
    beats[1]["leaving"] = "has a broken device"  # which its rank is the cause of
    assert leader.cause(stopped(*beats), beats)[0] == -signal.SIGSEGV
    assert leader.cause(stopped(*beats), [*beats[:2], lead.GONE]) == (None, "host2", "node 2 (host2) is lost")
    beats[0]["leaving"] = "got SIGTERM"
    assert leader.cause(stopped(*beats), [*beats[:2], lead.GONE]) == (0, "host0", "host0 got SIGTERM")
    hung = [beat_of(n, ended={"0": HUNG, "1": HUNG}) for n in range(2)]
    assert leader.cause(stopped(*hung), hung)[:2] == (HUNG, "host0")
    late = [beat_of(0, ended={"0": 0, "1": 0}), beat_of(1)]
    assert leader.cause(stopped(*late), late)[:2] == (None, None)


@pytest.mark.parametrize(
    "status, steps, over",
    [
        (1, [None], True),  # a mistake of the user
        (-9, [None], False),
        (1, [3], False),
        (1, [None, None], False),
        (1, [None] * 3, True),
        (1, [5, 3, 5, 5], False),
        (1, [3, 5, 5, 5], True),
        (1, [1, 2, 3, 4], False),
        (1, [1, 2, 3, 4, 5], True),  # --max-restarts
        (lead.TAKEN, [3], True),
    ],
)
def test_a_run_is_over_where_another_start_would_not_help(leader, status, steps, over):
    leader.args.max_restarts = 4
    assert bool(leader.verdict(status, [[step, "host0"] for step in steps])) == over


def test_a_start_looks_for_another_port_than_the_one_before(node, monkeypatch):
    asked = []
    monkeypatch.setattr(supervisor, "free_port", lambda ports: asked.append(list(ports)) or ports[0])
    first, count = node.args.port, supervisor.PORTS
    for starts in 0, 1, count - 1, count:
        node.starts, node.heartbeat["state"] = starts, "idle"
        node.write_heartbeat()
        assert node.heartbeat["port"] == first + starts % count and sorted(asked.pop()) == [
            *range(first, first + count)
        ]
    for node.heartbeat["state"] in "running", "failed":  # the ranks meet there
        node.write_heartbeat()
    assert not asked


def test_a_node_that_left_is_no_failure(leader):
    """Neither one for which the round ended nor one that left while it stopped."""
    beats = [beat_of(0), beat_of(1, leaving="got SIGTERM"), beat_of(2)]
    for left in "host1 got SIGTERM", "":
        before = stopped(*beats[:2]) | {"failures": [[3, "host0"]], "left": left}
        after = leader.after_stop(before, dict(enumerate(beats)), beats[::2])
        assert (after["state"], after["failures"]) == ("run", [[3, "host0"]])


def test_each_round_waits_anew_for_a_node_in_the_place_of_one_that_left(leader, monkeypatch):
    now, leader.args.rejoin_seconds = [0.0], 60.0
    monkeypatch.setattr(lead, "monotonic", lambda: now[0])
    beats = [beat_of(0), beat_of(1, leaving="got SIGTERM")]
    for number in 1, 2:
        round_ = stopped(*beats) | {"number": number, "left": "host1 got SIGTERM"}
        for seconds, status in (0, None), (59, None), (2, REQUEUE):
            now[0] += seconds
            after = leader.after_stop(round_, dict(enumerate(beats)), beats[:1])
            assert (after and after["status"]) == status


@pytest.mark.parametrize("off", [-3600.0, 3600.0])
@pytest.mark.parametrize("nodes", [(1, 2), (0, 2)])
def test_a_node_with_another_clock_or_a_poor_disk_is_left_out_if_there_are_enough_others(leader, capsys, off, nodes):
    other = ({0, 1, 2} - set(nodes)).pop()
    for poor in {"time": time.time() + off}, {"poor": "log.dir has 5 MiB of free space"}:
        beats = [beat_of(n, **poor if n == other else {}) for n in range(3)]
        assert [node["node"] for node in leader.next(stopped(), beats)["nodes"]] == list(nodes)
        (line,) = capsys.readouterr().err.splitlines()
        assert f"host{other}" in line and ("3600" in line or "5 MiB" in line)
        both = [beats[other], beats[nodes[0]]]  # no other is there
        assert [node["node"] for node in leader.next(stopped(), both)["nodes"]] == [other, nodes[0]]
        (line,) = capsys.readouterr().err.splitlines()
        assert f"host{other}" in line


def test_clocks_that_differ_by_as_much_as_a_late_beat_are_fine(leader, capsys):
    beats = [beat_of(n, time=time.time() - 30.0 * n) for n in range(3)]
    assert [node["node"] for node in leader.next(stopped(), beats)["nodes"]] == [0, 1] and not capsys.readouterr().err


def test_what_ended_a_round_is_said_once_where_the_disk_is_full(leader, tmp_path, monkeypatch, capsys):
    """The step before a row that is torn counts: a first start that fails without one is not repeated."""
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 9}\n{"kind": "step", "st')
    round_ = {"number": 4, "failures": [], "excluded": [], "parts": {}, "left": ""}

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(leader, "round", lambda: round_ | {"state": "run", "nodes": []})
    monkeypatch.setattr(leader, "during_run", lambda *_: leader.end(round_ | {"excluded": ["host1"]}, 1, "why"))
    for _ in range(3):
        with monkeypatch.context() as full_disk, pytest.raises(OSError):
            full_disk.setattr(lead, "write_json_atomically", full)
            leader.lead()
    assert leader.lead()["state"] == "end"
    (line,) = (tmp_path / "restarts.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 9 and capsys.readouterr().err.count("round 4 ended after step 9: why") == 1
    assert set((tmp_path / "excluded_nodes").read_text().splitlines()) == {"host1"}


def test_the_last_step_is_found_behind_the_rows_of_many_ranks(leader, tmp_path, monkeypatch):
    """A row with the times of 16,384 ranks: behind it the first failure once counted as one before the first step."""
    step, ranks = {"kind": "step", "step": 10}, {"kind": "ranks", "step": 10, "own_seconds": [0.1234] * 16384}
    assert leader.step() is None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (ranks, step, ranks)))
    assert leader.step() == 10
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ranks))
    assert leader.step() is None
    monkeypatch.setattr(lead, "TAIL_BYTES", 100)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step | {"step": n}) + "\n" for n in range(21)))
    assert leader.step() == 20


def test_the_last_step_is_looked_for_in_a_regular_file_alone(leader, tmp_path):
    """To open a pipe waits for a writer."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert leader.step() is None


def test_what_a_rank_says_moves_no_cursor(leader, capsys):
    beats = [beat_of(0, ended={"0": 1}, said={"0": "\x1b[2J\r"}), beat_of(1)]
    leader.report(stopped(*beats), leader.cause(stopped(*beats), beats)[2])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable() and "x1b[2J" in line


def wrong_forms(value: dict) -> list[str]:
    """Texts of an object in which one field is missing, or has another type."""
    kinds = 7, "a", [7], [[]], {"a": [7]}, None
    texts = [json.dumps({k: v for k, v in value.items() if k != name}) for name in value]
    return texts + [
        json.dumps(value | {name: kind}) for name in value for kind in kinds if type(kind) is not type(value[name])
    ]


def test_garbage_in_beats_is_skipped_and_counted(leader, tmp_path, capsys):
    """The beat before counts, until it is too old."""
    leader.args.dead_seconds = 600.0  # however slow the machine is
    beat = beat_of(1, ended={"0": 1})
    wrong = [text for text in wrong_forms({k: v for k, v in beat.items() if k != "count"})]
    texts = [*GARBAGE, *wrong, json.dumps(beat | {"ended": {"0": "a"}}), json.dumps(beat | {"said": {"0": []}})]
    write_json_atomically(tmp_path / "node-1.json", beat)
    assert leader.alive(1) == beat
    for text in texts:
        (tmp_path / "node-1.json").write_text(text)
        assert leader.alive(1) == beat, text
    assert leader.skipped["node-1.json"] == len(texts)
    (line,) = capsys.readouterr().err.splitlines()
    assert "node-1.json" in line


def test_garbage_in_the_round_is_skipped_and_counted(leader, tmp_path, capsys):
    """The round before counts."""
    node = {key: beat_of(0)[key] for key in ("node", "life", "host", "address", "port")}
    round_ = stopped(node) | {"failures": [[None, None], [3, "host1"]], "excluded": ["host1"], "parts": {"a": 1.0}}
    texts = [
        *GARBAGE,
        *wrong_forms(round_),
        *(json.dumps(round_ | {"nodes": [text]}) for text in (1, {}, node | {"port": "a"})),
    ]
    texts += [json.dumps(round_ | {"failures": [[]]}), json.dumps(round_ | {"state": "another"})]
    texts += [json.dumps(round_ | {"state": "end", "status": status}) for status in (300, -1, 10**30)]
    (tmp_path / "round.json").write_text(texts[0])
    assert leader.round() == START
    write_json_atomically(tmp_path / "round.json", round_)
    assert leader.round() == round_
    for text in texts[1:]:
        (tmp_path / "round.json").write_text(text)
        assert leader.round() == round_, text
    assert leader.skipped["round.json"] == len(texts) and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "row", ['{"kind": "step"}', '{"kind": "step", "step": "a"}', '{"kind": "step", "step": Infinity}']
)
@pytest.mark.parametrize(
    "more", ["", '{"kind": "step", "step": 1e400}\n', '{"kind": "step", "a": ' + "[" * 100000 + "\n"]
)
def test_rows_of_others_are_no_steps(leader, tmp_path, row, more):
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "step", "step": 9}}\n{row}\n{more}{row}\n')
    assert leader.step() == 9


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["round.json", "node-0.json"])
def test_a_file_of_the_supervisor_s_that_is_none_is_refused(tmp_path, capsys, name, make):
    """It can be neither read nor replaced: the supervisor waited for it as for a disk that is away."""
    (tmp_path / "rounds" / "a").mkdir(parents=True)
    make(tmp_path / "rounds" / "a" / name)
    with pytest.raises(SystemExit):
        supervisor.main(["--node=0", "--nodes=1", "--ranks=1", f"--dir={tmp_path}", "--id=a", "x"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and name in line


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_heartbeat_that_is_no_file_is_skipped(leader, tmp_path, make):
    make(tmp_path / "node-1.json")
    assert leader.alive(1) is None and leader.skipped["node-1.json"] == 1


def test_reports_into_a_pipe_do_not_stop_the_leader(tmp_path):
    os.mkfifo(tmp_path / "restarts.jsonl")
    with Nodes(tmp_path, 1, "--preload", "no.such", command=["rank.py"]) as nodes:
        assert nodes.end() == [1]
    said = nodes.said()
    assert "--preload=no.such" in said and "Traceback" not in said, said


def test_garbage_in_all_files_does_not_end_a_run(tmp_path):
    wait = "while not (folder / 'garbage').exists(): time.sleep(0.01)\n"
    (tmp_path / "do-1").write_text(wait + killed(9))
    with Nodes(tmp_path, 2, ranks=1) as nodes:
        nodes.steps(3)
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"kind": "step"}\n')
        for text in GARBAGE:
            (tmp_path / "rounds/job/round.json").write_text(text)
            (tmp_path / "rounds/job/node-1.json").write_text(text)
            time.sleep(0.1)
        (tmp_path / "garbage").touch()
        nodes.until(lambda: nodes.report())
        assert nodes.end() == [0, 0], nodes.said()
    assert nodes.causes() == ["rank 1 on host1 was killed by SIGKILL"] and nodes.report()[0]["skipped"]["round.json"]


@pytest.mark.parametrize(
    "flag, value",
    [
        *((f"--{name}", value) for name in ("ranks", "nodes") for value in ("0", "-1")),
        *((f"--{name}", "abc") for name in ("node", "beat-seconds")),
        ("--nonsense", "x"),
        *((f"--{name}", "-1") for name in ("node", "spares", "port", "max-restarts", "backoff-seconds")),
        ("--node", "3"),  # of two and a spare
        *((f"--{name}", "1000000000") for name in ("nodes", "spares", "ranks")),
        ("--port", "0"),
        ("--port", "65536"),
        *((f"--{name}-seconds", "nan") for name in ("beat", "dead", "backoff", "gather", "rejoin")),
        *((f"--{name}-seconds", "inf") for name in ("beat", "dead", "backoff")),
        ("--beat-seconds", "0"),
        ("--dead-seconds", "0.5"),  # less than a beat
        ("--dir", "FILE"),
        ("--rounds", "FILE"),
        *(("--id", value) for value in ("", ".", "..", "/", "a/b", "../a")),
    ],
)
def test_a_value_with_which_no_run_starts_is_one_line(tmp_path, capsys, flag, value):
    (tmp_path / "FILE").touch()
    words = {"--node": "0", "--nodes": "2", "--spares": "1", "--ranks": "1", "--dir": str(tmp_path), "--id": "a"}
    words[flag] = str(tmp_path / value) if value == "FILE" else value
    with pytest.raises(SystemExit) as ended:
        supervisor.main([*(f"{name}={word}" for name, word in words.items()), "x"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and line.startswith("error: ") and flag in line and value in line


def test_to_wait_without_limit_is_allowed():
    args = ["--node", "0", "--nodes", "1", "--ranks", "1", "--dir", "a", "--id", "a"]
    assert parse([*args, "--gather-seconds", "inf", "--rejoin-seconds", "inf", "x"]).gather_seconds == float("inf")


@pytest.mark.parametrize("spares", [0, 1])
def test_sigterm_to_a_node_saves_on_all_and_a_spare_goes_on(tmp_path, spares):
    with Nodes(tmp_path, 2, spares=spares, ranks=1) as nodes:
        nodes.steps(3).processes[1].send_signal(signal.SIGTERM)
        assert nodes.end() == ([0, 143, 0] if spares else [0, 0]), nodes.said()
    assert nodes.causes() == ["host1 got SIGTERM"]
    assert (len(list(tmp_path.glob("step-*"))) == 20) == bool(spares)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_while_nodes_gather_ends_the_run(tmp_path, number):
    """It was forgotten: Ctrl+C did nothing for half an hour, and a job that was told to stop began to train."""
    with Nodes(tmp_path, 1, "--nodes", "2") as nodes:
        nodes.until((tmp_path / "rounds/job/node-0.json").exists)
        nodes.processes[0].send_signal(number)
        assert nodes.processes[0].wait(10) == REQUEUE, nodes.said()
    assert nodes.causes() == ["host0 got a signal to stop"]


# A rank that waits for SIGTERM.
TOLD = """
import signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: Path("told").touch())
Path("ready").touch()
while not Path("told").exists(): time.sleep(0.02)
"""
# A supervisor whose disk stands still for three seconds once there is a file "slow".
SLOW = """
import time
from pathlib import Path
from minitron.supervise import supervisor
write = supervisor.write_json_atomically
def slow(*args):
    if Path("slow").exists() and not Path("stalled").exists():
        Path("stalled").touch()
        time.sleep(3)
        Path("over").touch()
    write(*args)
supervisor.write_json_atomically = slow
supervisor.main()
"""


def test_a_slow_disk_does_not_keep_a_signal_from_the_ranks(tmp_path):
    """Slurm sends it to all processes. Handed on five seconds later it is the second one: they end without saving."""
    (tmp_path / "told.py").write_text(TOLD)
    (tmp_path / "slow.py").write_text(SLOW)
    with Nodes(tmp_path, 1, ranks=1, command=["told.py"], supervisor=["slow.py"]) as nodes:
        nodes.until((tmp_path / "ready").exists)
        (tmp_path / "slow").touch()
        nodes.until((tmp_path / "stalled").exists)
        nodes.processes[0].send_signal(signal.SIGTERM)
        nodes.until((tmp_path / "told").exists)
        assert not (tmp_path / "over").exists()
        assert nodes.end() == [0], nodes.said()


# A rank that saves for ever after the first SIGINT, and takes the next one for an echo.
BUSY = """
import signal, time
from pathlib import Path
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGINT, lambda *_: Path("told").touch())
Path("ready").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("before", [(), (signal.SIGUSR1,)])
def test_ctrl_c_pressed_twice_ends_the_run_at_once(tmp_path, before):
    """It took a third one: the agent has a session of its own, so ranks get no echo of a terminal's SIGINT."""
    (tmp_path / "busy.py").write_text(BUSY)
    with Nodes(tmp_path, 1, ranks=1, command=["busy.py"]) as nodes:
        nodes.until((tmp_path / "ready").exists)
        beat = tmp_path / "rounds/job/node-0.json"
        for number in before:  # alone, since of two pending signals SIGINT would be the first
            nodes.processes[0].send_signal(number)
            nodes.until(lambda: json.loads(beat.read_text())["stopping"])
        nodes.processes[0].send_signal(signal.SIGINT)
        nodes.until((tmp_path / "told").exists)
        assert nodes.processes[0].poll() is None  # the first one lets it save
        nodes.processes[0].send_signal(signal.SIGINT)
        assert nodes.processes[0].wait(20) == REQUEUE, nodes.said()
    assert nodes.causes() == ["host0 got SIGINT a second time"]


# A rank that listens after a while, as minitron's do, and for what it has heard then.
KEPT = """
import os, time
from pathlib import Path
from minitron.runtime.signals import Listener
time.sleep(0.5)
listener = Listener(os.environ).open()
while not listener.kept: time.sleep(0.02)
Path("kept").touch()
"""


@pytest.mark.parametrize("preload, before", [("", True), ("", False), ("minitron.runtime.signals", False)])
def test_a_signal_during_the_start_reaches_ranks_that_listen_later(tmp_path, monkeypatch, preload, before):
    """SIGUSR1 waits for the first step. While the agent imported, and between two starts, it was lost."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    (tmp_path / "kept.py").write_text(KEPT)
    node = agent.Agent(["kept.py"], preload)
    try:
        if before:
            node.signal(signal.SIGUSR1)
        node.start([{"RANK": "0"}])
        if not before:
            node.signal(signal.SIGUSR1)
        deadline = time.monotonic() + PATIENCE
        while node.running and time.monotonic() < deadline:
            node.listen()
            time.sleep(0.02)
        assert (tmp_path / "kept").exists() and node.ended == {"0": 0}
    finally:
        node.close()


def test_a_start_has_no_reason_of_the_one_before(tmp_path, monkeypatch):
    """A killed rank says nothing; the reason of its first end was reported once more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    (tmp_path / "twice.py").write_text(
        "import os\nif os.environ['ROUND'] == '2': os.kill(os.getpid(), 9)\nraise OSError(7)"
    )
    node, seen = agent.Agent(["twice.py"], "json"), []
    try:
        for round_ in "12":
            node.start([{"RANK": "0", "ROUND": round_}])
            deadline = time.monotonic() + PATIENCE
            while node.running and time.monotonic() < deadline:
                node.listen()
                time.sleep(0.02)
            seen.append((node.ended, node.said))
    finally:
        node.close()
    assert seen == [({"0": 1}, {"0": "OSError: 7"}), ({"0": -9}, {})]


def test_a_first_start_that_fails_by_itself_is_not_repeated(tmp_path):
    with Nodes(tmp_path, 2, command=["rank.py", "nowhere", "5"]) as nodes:
        assert nodes.end() == [1, 1]
    (cause,) = nodes.causes()
    assert re.fullmatch(r"rank \d on host\d ended with status 1; the first start failed before its first step", cause)
    assert f"error: round 1 ended before its first step: {cause}" in nodes.said()


def test_a_run_whose_directory_was_taken_over_is_not_started_again(tmp_path):
    """Two runs in one checkpoint.dir once took it from each other for ever, with a save aside each time."""
    with Nodes(tmp_path, 2) as nodes:
        nodes.steps(3).do(2, f"sys.exit({TAKEN})")
        assert nodes.end() == [1, 1], nodes.said()
    (cause,) = nodes.causes()
    assert cause == "rank 2 on host1 ended with status 18; to start again would take it back, and end the other run"


def test_the_same_step_failing_three_times_ends_the_run(tmp_path):
    """The rank dies of its tenth step; others do the steps before once more, as after a restart from a checkpoint."""
    script = RANK.replace("    time.sleep(0.1)", f"    if step == 9 and rank == '1': time.sleep(0.5); {killed(11)}")
    with Nodes(tmp_path, 1, command=["poor.py", ".", "20"]) as nodes:
        (tmp_path / "poor.py").write_text(script.replace("for step", "while rank == '0': time.sleep(1)\nfor step"))
        (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 9}\n{"kind": "eval", "step": 9}\n')
        assert nodes.end() == [1]
    once = "rank 1 on host0 was killed by SIGSEGV"
    assert nodes.causes() == [once, once, f"{once}; the run has failed 3 times after step 9"]


def test_restarts_are_limited(tmp_path):
    with Nodes(tmp_path, 1, "--max-restarts", "1", ranks=1) as nodes:
        for round_ in 1, 2:
            nodes.until((tmp_path / f"started-0-{round_}").exists)
            nodes.steps(3 * round_).do(0, killed(9))
        assert nodes.end() == [1]
    assert nodes.causes()[1].endswith("SIGKILL; that was restart 1 of 1 (--max-restarts)")


def test_too_few_nodes_go_back_to_the_queue(tmp_path):
    with Nodes(tmp_path, 1, "--nodes", "2", "--gather-seconds", "1") as nodes:
        assert nodes.end() == [REQUEUE] and nodes.causes() == ["only 1 of 2 nodes have come"]


def test_failures_in_a_row_are_counted_by_step():
    assert repeated([[7, "a"], [9, "a"], [9, "b"]]) == 2 and repeated([[9, "a"], [7, "a"]]) == 1
    assert repeated([[None, "a"]] * 3) == 3 and repeated([[9, "a"], [7, "a"], [9, "a"]]) == 1


def test_a_line_of_the_leader_moves_no_cursor(leader, capsys):
    nodes = [beat_of(n, host="a\x1b[2J\nb") for n in range(2)]
    for node, beat in enumerate(nodes):
        write_json_atomically(leader.folder / f"node-{node}.json", beat)
    assert leader.lead()["state"] == "run"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable() and "\\x1b" in line


def test_the_first_beat_waits_for_no_other(tmp_path):
    """A clock that begins with the machine may be younger than --beat-seconds."""
    (tmp_path / "job.py").write_text("")
    words = ["--node=0", "--nodes=1", "--ranks=1", f"--dir={tmp_path}", "--id=a", "--preload=json"]
    words += ["--beat-seconds=900000000", "--dead-seconds=900000000", str(tmp_path / "job.py")]
    done = subprocess.run(
        [sys.executable, "-m", "minitron.supervise", *words],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        timeout=PATIENCE,
    )
    assert done.returncode == 0


def test_a_reason_is_one_line():
    assert why_it_ended(RuntimeError("two\nlines")) == "RuntimeError: two lines"
    try:
        try:
            raise ValueError("train.steps=0")
        except ValueError:
            raise SystemExit(1) from None
    except SystemExit as error:
        assert why_it_ended(error) == "error: train.steps=0"
    assert why_it_ended(SystemExit(0)) == ""
