"""Keep a run going: one supervisor per node starts its ranks, and all nodes start again after a failure anywhere.

    python -m minitron.supervise --node 0 --nodes 2 --ranks 8 --dir RUN --id JOB -- -m minitron.pretrain ...

Problem: with thousands of GPUs something fails every few hours. torchrun restarts ranks only while the node lives that
holds its store, and a job that ends waits in the queue. The idea: the nodes agree through files in a folder that all
of them see, so that any node may die.

1. Each supervisor writes node-N.json, its beat: a counter, how far its ranks are, how they ended. A beat that does not
   change for a while belongs to a dead node. Only changes count, so clocks may differ.
2. The lowest node that lives leads. It writes round.json: who takes part in this start of the ranks, in which order,
   where they meet. All it knows is in these files, so the next node can take over at any time.
3. When ranks fail or a node dies, the leader writes "stop"; all nodes kill their ranks and say how these had ended.
   From that the leader tells the cause from its consequences. Each node also looks at its GPUs and log.dir
   (health.py); the leader writes the next round without a node that is unfit.

    round.json     run 1: nodes 0 1 2       stop 1                                     run 2: nodes 0 1 3
    node 1         running ..... (dies)
    node 2         running ..... rank 5: 125 (lost its partners) .. ended              running
    node 3         idle, a spare                                                       running

A round is not repeated for ever, see lead.py. restarts.jsonl says what ended each round; excluded_nodes names
the hosts that a scheduler should not give to this run again. Left out: a rank that stops while its agent is stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from minitron.config.cli import user_errors
from minitron.config.command import Parser
from minitron.config.files import errors_as
from minitron.runtime.signals import SIGNALS
from minitron.runtime.status import BROKEN
from minitron.supervise.agent import Agent
from minitron.supervise.health import Health
from minitron.supervise.lead import BEAT, STUCK, Leader, replace

POLL_SECONDS = 0.1
PORTS = 100
LEFT = 128 + signal.SIGTERM
# Ranks that survive SIGKILL this long hang in a driver. Their node leaves the run. A rank with 30 GB of locked
# memory takes three seconds to end. A supervisor that waits so long for a disk or a device counts as dead, too.
KILL_SECONDS = 120.0


class Supervisor:
    """One node's part: its beat, its ranks, and the lead if it is the lowest node that lives."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, (args.rounds or args.dir / "rounds") / args.id
        with errors_as(ValueError, lambda error: f"{error}; name another --dir or --rounds", OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.agent, self.health = Agent(args.command, args.preload), Health(args.dir, args.dead_seconds / 2)
        self.beat: dict = {
            "node": args.node,
            "life": uuid.uuid4().hex,  # another after a restart of this supervisor: its ranks are gone
            "host": args.host,
            "address": args.address,
            "port": args.port,  # that is free here, for the next round
            "count": 0,
            "round": "",  # the key of the last round that was begun here
            "state": "idle",  # running, done, failed, ended
            "ended": {},  # local rank: status
            "said": {},  # local rank: why
            "leaving": "",  # why this node will not take part in another round
            "stopping": False,  # the run is to end: SIGUSR1, Ctrl+C
            "time": 0.0,  # of this node's clock, when the beat was written
            "looked": "",  # the key of the last round after which health.py looked at this node
            "unfit": "",  # what it found wrong with the GPUs
            "poor": "",  # what it found wrong with log.dir
        }
        self.path, self.leader = self.folder / f"node-{args.node}.json", Leader(args, self.folder)
        self.ending = self.passed = 0.0
        self.beaten = -math.inf
        self.shown, self.starts, self.interrupted = False, 0, False
        self.writing = threading.Lock()

    def run(self) -> int:
        """Return the status of the run, the same on every node; LEFT if it goes on without this one."""
        numbers = [n for n in SIGNALS if n == signal.SIGUSR1 or signal.getsignal(n) != signal.SIG_IGN]
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # a thread waits for them
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # launch/node.sh had it ignored until here
        threading.Thread(target=self.listen, args=[numbers], name="signals", daemon=True).start()
        threading.Thread(target=self.keep, name="beats", daemon=True).start()
        self.agent.open()
        with suppress(OSError):
            if (over := self.leader.round())["state"] == "end":
                self.leader.say(f"{self.folder} ended before, with {over['status']}: start again with another --id")
        try:
            while True:
                self.passed = monotonic()
                self.watch()
                if monotonic() - self.beaten > self.args.beat_seconds:
                    if self.replaced():
                        self.leader.say(f"another supervisor has come as node {self.args.node}: this one leaves")
                        return LEFT
                    with self.writing:
                        self.show()
                    with suppress(OSError):  # a full disk: once more, a beat later
                        round_ = self.leader.lead() if self.leader.leads(self.args.node) else self.leader.round()
                        if (status := self.follow(round_)) is not None:
                            return status
                time.sleep(POLL_SECONDS)
        finally:
            self.agent.close()
            with self.writing:
                self.passed = -math.inf
                if not self.replaced():
                    self.path.unlink(missing_ok=True)

    def listen(self, numbers: Sequence[signal.Signals]) -> None:
        """Take signals at once, in a thread of its own, for the disk of the beats may stand still for a while.

        A scheduler sends a signal to every process, so that a rank gets it twice; and what is not an echo, some seconds
        later, ends a rank in the midst of its last save (runtime/stop.py).
        """
        while True:
            self.hear(signal.Signals(signal.sigwait(numbers)))

    def hear(self, number: signal.Signals) -> None:
        """Hand a signal on. After SIGTERM the node leaves: the ranks of all nodes save, and the others may go on.

        Ctrl+C again kills the ranks: they would take a second SIGINT for the echo of the first (runtime/stop.py).
        """
        if number == signal.SIGTERM:
            self.beat["leaving"] = "got SIGTERM"
        elif number == signal.SIGINT and self.interrupted:
            self.beat["leaving"] = "got SIGINT a second time"
            return self.agent.signal(signal.SIGKILL)
        else:
            self.beat["stopping"] = True
            self.interrupted |= number == signal.SIGINT
        self.agent.signal(number)

    def watch(self) -> None:
        """Bring the beat up to date."""
        self.agent.listen()
        state = self.beat["state"]
        if self.ending and (not self.agent.running or monotonic() - self.ending > KILL_SECONDS):
            if self.agent.running:
                self.beat["leaving"] = f"{STUCK} in {KILL_SECONDS:.0f} s"
            self.ending, self.beat["state"] = 0.0, "ended"  # the state last: another thread may write the beat
        elif not self.ending and state != "ended":  # how they ended by themselves
            self.beat |= {"ended": dict(self.agent.ended), "said": dict(self.agent.said)}
            if BROKEN in self.agent.ended.values():
                self.beat["leaving"] = "has a broken device"
            if state == "running" and any(self.agent.ended.values()):
                self.beat["state"] = "failed"
            elif state == "running" and not self.agent.running:
                self.beat["state"] = "done"
        if state != self.beat["state"]:
            self.beaten = -math.inf

    def replaced(self) -> bool:
        """Tell whether a younger supervisor writes this node's beats, as of a pod that was given up for lost."""
        with suppress(OSError):
            return self.shown and (self.leader.read(self.path.name, BEAT) or self.beat)["life"] != self.beat["life"]
        return False

    def keep(self) -> None:
        """Write beats while the main thread waits for a slow disk or device, for KILL_SECONDS at most.

        The leader reads the beats of all nodes in one pass. Its own must not be late because of that.
        """
        while True:
            time.sleep(self.args.beat_seconds)
            with self.writing:
                if self.args.beat_seconds < monotonic() - self.passed < KILL_SECONDS and not self.replaced():
                    self.show()

    def show(self) -> None:
        """Write the beat."""
        self.beat |= {"count": self.beat["count"] + 1, "time": time.time()}
        self.beaten = monotonic()
        if self.beat["state"] not in ("running", "failed"):
            self.beat["port"] = free_port([self.args.port + (self.starts + i) % PORTS for i in range(PORTS)])
        try:
            replace(self.path, self.beat)
            self.shown = True
        except OSError:  # the disk is full or away: beats that do not change say nothing of their nodes now
            self.leader.seen = {}

    def follow(self, round_: dict) -> int | None:
        """Do what the round asks of this node; return its status if there is no more to do for it."""
        members = [(node["node"], node["life"]) for node in round_["nodes"]]
        mine, beat = (self.args.node, self.beat["life"]), self.beat
        wanted, begun = round_["state"] == "run" and mine in members, beat["state"] in ("running", "failed")
        new = wanted and round_["key"] != beat["round"]  # also with an old number, after two have led for a moment
        if new and not begun:
            self.start(round_, members.index(mine))
        elif begun and (new or not wanted):
            self.ending = self.ending or monotonic()
            self.agent.signal(signal.SIGKILL)
        if self.ending or round_["state"] != "end" and beat["state"] in ("running", "failed"):
            return None
        if round_["state"] == "end":
            return round_["status"]
        if round_["state"] == "stop" and round_["key"] != beat["looked"] and not beat["leaving"]:
            beat |= {"unfit": self.health.unfit(), "poor": self.health.poor(), "looked": round_["key"]}
            self.beaten = -math.inf
        unfit = beat["unfit"] and self.args.host in round_["excluded"]  # the leader has read why
        return LEFT if unfit or beat["leaving"] and (mine not in members or round_["left"]) else None

    def start(self, round_: dict, node_rank: int) -> None:
        local, world = self.args.ranks, self.args.ranks * len(round_["nodes"])
        common = {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": node_rank,
            "MASTER_ADDR": round_["nodes"][0]["address"],
            "MASTER_PORT": round_["nodes"][0]["port"],
            "TORCHELASTIC_RUN_ID": self.args.id,  # the ranks end when their parent does (runtime/signals.py)
            "TORCHELASTIC_USE_AGENT_STORE": False,  # the store is rank 0's
            "MINITRON_ROUND": json.dumps({"round": round_["number"], **round_["parts"], "at": time.time()}),
        }
        own = [common | {"RANK": node_rank * local + i, "LOCAL_RANK": i} for i in range(local)]
        self.starts += 1  # the next one has another port, and with it another store
        self.agent.start([{name: str(value) for name, value in variables.items()} for variables in own])
        self.beat |= {"round": round_["key"], "state": "running", "ended": {}, "said": {}}


def free_port(ports: Sequence[int]) -> int:
    """Return the first of these ports at which nobody listens; the first one if there is none."""
    for port in ports:
        with socket.socket() as here, suppress(OSError, OverflowError):  # in use, or beyond 65535
            here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store
            here.bind(("", port))
            return port
    return ports[0]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="supervisor", description=__doc__.split("\n")[0])
    flag = parser.add_argument
    flag("--nodes", type=int, required=True, help="nodes that a round needs")
    flag("--spares", type=int, default=0, help="more nodes, which wait")
    flag("--node", type=int, required=True, help="number of this node, spares included")
    flag("--ranks", type=int, required=True, help="ranks of a node")
    flag("--dir", type=Path, required=True, help="the run's folder (log.dir), which all nodes see")
    flag("--rounds", type=Path, help="where the nodes agree (default: rounds/ in the run's folder)")
    flag("--id", required=True, help="another one for every start of the job")
    flag("--host", default=socket.gethostname(), help="the node's name, as its scheduler knows it")
    flag("--address", default=socket.gethostname(), help="where other nodes reach this one")
    flag("--port", type=int, default=29600, help=f"the first of {PORTS}: a round's ranks meet at a free one")
    flag("--max-restarts", type=int, default=100)
    flag("--backoff-seconds", type=float, default=5.0, help="after the second failure at one step; then more")
    flag("--beat-seconds", type=float, default=1.0)
    flag("--dead-seconds", type=float, default=20.0, help="a node without a beat for so long is dead")
    flag("--gather-seconds", type=float, default=1800.0, help="wait for nodes at the start")
    flag("--rejoin-seconds", type=float, default=0.0, help="wait for a lost node to come back, or its successor")
    flag("--preload", default="minitron.train", help="what agents import; '': nothing, each rank is a new Python")
    flag("command", nargs="+", help="after --: -m MODULE ARGUMENTS..., or FILE ARGUMENTS...")
    args = parser.parse_args(argv)
    least = {"nodes": 1, "ranks": 1, "port": 1, "beat_seconds": 0.001, "dead_seconds": args.beat_seconds}
    most = {"node": args.nodes + args.spares - 1, "port": 65535, "gather_seconds": math.inf, "rejoin_seconds": math.inf}
    # The leader reads a file of each node a second; the ranks of a node are one packet to its agent.
    most |= {"nodes": 100_000, "spares": 100_000, "ranks": 256}
    for name, value in vars(args).items():
        low, high = least.get(name, 0), most.get(name, 1_000_000_000)
        if isinstance(value, (int, float)) and not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')}={value} must be from {low} to {high}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    with user_errors():
        supervisor = Supervisor(parse(argv))
    sys.exit(supervisor.run())
