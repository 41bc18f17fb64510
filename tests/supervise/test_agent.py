"""An agent of ranks by itself: its messages, its signals, and how a rank becomes its program."""

import json
import os
import signal
import socket
import sys
from types import SimpleNamespace

import pytest

from minitron.supervise import agent


class Wired(agent.Agent):
    """An agent whose process is this test, at the other end of the wire."""

    def open(self):
        if self.process is None:
            self.wire, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.wire.setblocking(False)
            self.status, self.done = None, []
            kill, wait = (lambda: self.done.append("kill")), (lambda: self.done.append("wait"))
            self.process = SimpleNamespace(poll=lambda: self.status, kill=kill, wait=wait)

    def hears(self, *messages: dict) -> None:
        for message in messages:
            agent.send(self.theirs, **message)
        self.listen()


@pytest.fixture
def wired(monkeypatch):
    """A Wired agent, and the signals to groups of processes."""
    sent = []
    monkeypatch.setattr(os, "killpg", lambda *to: sent.append(to))
    yield (node := Wired(["x"], "")), sent
    for end in node.wire, node.theirs:
        end.close()


def test_a_signal_waits_for_the_ranks_and_reaches_them_once(wired):
    node, sent = wired
    node.signal(signal.SIGUSR1)
    node.start([{"RANK": "0"}, {"RANK": "1"}])
    assert json.loads(node.theirs.recv(999)) == {"ranks": [{"RANK": "0"}, {"RANK": "1"}]}
    node.signal(signal.SIGTERM)
    assert not sent and node.running
    node.hears({"group": 7})
    assert sent == [(7, signal.SIGUSR1), (7, signal.SIGTERM)]
    node.hears({"rank": 0, "said": "why"}, {"rank": 0, "status": 1})
    node.signal(signal.SIGINT)
    assert sent[2:] == [(7, signal.SIGINT)] and node.running and (node.ended, node.said) == ({"0": 1}, {"0": "why"})
    node.hears({"rank": 1, "status": 0})
    assert not node.running
    for number in signal.SIGKILL, signal.SIGUSR1:  # between two starts: nothing to kill, and one for the next ranks
        node.signal(number)
    assert not sent[3:] and not node.done
    node.start([{"RANK": "0"}])
    assert node.running and (node.ended, node.said) == ({}, {})
    node.signal(signal.SIGTERM)
    assert not sent[3:]  # the group of the round before has ended
    node.hears({"group": 8})
    assert sent[3:] == [(8, signal.SIGUSR1), (8, signal.SIGTERM)]


def test_ranks_are_killed_with_their_agent_and_without_it(wired):
    node, sent = wired
    node.start([{}])
    node.signal(signal.SIGKILL)  # it has no ranks yet, so it is killed itself
    assert (sent, node.done) == ([], ["kill"])
    node.status = -9
    node.listen()
    assert node.ended == {"agent": -9} and not node.running
    node.status = None
    node.start([{}])
    node.hears({"group": 7})
    node.status = -9
    node.listen()
    node.signal(signal.SIGKILL)  # its ranks may outlive it
    assert sent == [(7, signal.SIGKILL)]
    node.status = None
    node.start([{}])
    node.hears({"group": 8})
    node.close()
    assert sent[1:] == [(8, signal.SIGKILL)] and node.done[1:] == ["kill", "wait"]


def test_what_an_agent_has_sent_before_its_end_counts(wired):
    """It sends how its ranks have ended, and ends, while the supervisor looks."""
    node, _ = wired
    node.start([{}, {}])

    def ends():
        agent.send(node.theirs, rank=0, status=3)
        agent.send(node.theirs, rank=1, status=0)
        return 0

    node.process.poll = ends
    node.listen()
    assert node.ended == {"0": 3, "1": 0}


def test_an_agent_that_has_ended_is_opened_again(monkeypatch):
    statuses: list[int | None] = []  # of each process that was started
    started = lambda *_, **__: statuses.append(None) or SimpleNamespace(poll=lambda: statuses[-1])
    monkeypatch.setattr(agent.subprocess, "Popen", started)
    node = agent.Agent(["x"], "")
    for status, processes in (1, 1), (None, 2), (0, 2), (None, 3):
        node.open()
        assert len(statuses) == processes
        statuses[-1] = status
    node.wire.close()


def test_a_rank_runs_a_module_or_a_file_and_says_why_it_ends(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("")
    for name in "module", "file":
        text = f"import sys, beside\nfrom pathlib import Path\nPath('{name}').write_text(__name__ + sys.argv[1])\n"
        (tmp_path / f"{name}_of_a_rank.py").write_text(text + "if sys.argv[1] == 'no': raise OSError('x' * 9000)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    here, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, theirs:
        for command in ["-m", "module_of_a_rank"], [str(tmp_path / "file_of_a_rank.py")]:
            monkeypatch.setattr(sys, "path", [str(tmp_path) if "-m" in command else "nowhere", *sys.path[1:]])
            monkeypatch.delitem(sys.modules, "beside", raising=False)
            agent.become(3, theirs, [*command, "yes"], fresh=False)
            with pytest.raises(OSError):
                agent.become(3, theirs, [*command, "no"], fresh=False)
            message = json.loads(here.recv(9999))
            assert message["rank"] == 3 and message["said"].startswith("OSError: xxx")
            assert len(message["said"]) == agent.SAID
        assert [(tmp_path / name).read_text() for name in ("module", "file")] == ["__main__no"] * 2
    done = []
    monkeypatch.setattr(os, "execv", lambda *argv: done.append(argv) or sys.exit(0))
    with pytest.raises(SystemExit):
        agent.become(3, theirs, ["-m", "module_of_a_rank", "yes"], fresh=True)
    assert done == [(sys.executable, [sys.executable, "-m", "module_of_a_rank", "yes"])]
