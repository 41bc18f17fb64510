"""Keep a run going: one supervisor per node starts its ranks, and all nodes start again after a failure anywhere.

    python -m minitron.supervise --node 0 --nodes 2 --ranks 8 --dir RUN --id JOB -- -m minitron.pretrain ...

Problem: with thousands of GPUs something fails every few hours. torchrun restarts ranks only while the node that holds
its store is up, and a job that ends waits in the queue. The idea: the nodes agree through files in a shared folder, so
that any node may die.

1. Each supervisor writes node-N.json, its heartbeat. A heartbeat that does not change for a while belongs to a dead
   node. Only changes count, so clocks may differ.
2. The lowest live node leads. It writes round.json: the nodes of this start of the ranks, their order, and the address
   of rank 0. The leader keeps no other state, so the next node can take over at any time.
3. When ranks fail or a node dies, the leader writes "stop". All nodes kill their ranks and write each rank's exit
   status. The leader picks the first cause. Each node also checks its GPUs and log.dir (health.py); the leader writes
   the next round without a node that is unfit.

    round.json     run 1: nodes 0 1 2       stop 1                                     run 2: nodes 0 1 3
    node 1         running ..... (dies)
    node 2         running ..... rank 5: 125 (lost its partners) .. ended              running
    node 3         idle, a spare                                                       running

lead.py limits the rounds. restarts.jsonl has what ended each round; excluded_nodes names the hosts that a scheduler
should not give to this run again. Left out: a rank that is suspended together with its agent.

Fields of a heartbeat, beside node, host, address and port (one that is free, for the next round):
    life       an id of this supervisor: after a restart it has another, because its ranks are gone
    count      changes with every heartbeat; time: when it was written, by this node's clock
    round      the key of the last round that was begun here; state: idle, running, done, failed or ended
    ended      local rank -> status; said: local rank -> why it ended
    leaving    why this node will not take part in another round; stopping: it got a signal that ends the run
    looked     the key of the last round after which health.py ran; unfit: its reason to exclude the node
    poor       its reason to prefer other nodes
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
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
from minitron.config.files import errors_as, size_of
from minitron.runtime.signals import SIGNALS
from minitron.runtime.status import BROKEN
from minitron.supervise.agent import Agent
from minitron.supervise.health import Health
from minitron.supervise.lead import HEARTBEAT, IDLE, STUCK, Leader, write_json_atomically

POLL_SECONDS = 0.1
PORTS = 100
LEFT = 128 + signal.SIGTERM
# Ranks that survive SIGKILL this long hang in a driver, and their node leaves the run. Ranks with much locked memory
# need some seconds to end. A supervisor that waits this long for a disk or a device counts as dead, too.
KILL_SECONDS = 120.0


class Supervisor:
    """One node's heartbeat and ranks; it also leads if it is the lowest live node."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, (args.rounds or args.dir / "rounds") / args.id
        self.path, self.leader = self.folder / f"node-{args.node}.json", Leader(args, self.folder)
        with errors_as(ValueError, lambda error: f"{error}; name another --dir or --rounds", OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in ("round.json", f"node-{args.node}.json"):
                with suppress(FileNotFoundError):
                    size_of(self.folder / name)  # a pipe or a device could not be read or replaced
            older = self.leader.read(self.path.name, HEARTBEAT)
        self.agent, self.health = Agent(args.command, args.preload), Health(args.dir, args.dead_seconds / 2)
        here = {"node": args.node, "life": uuid.uuid4().hex, "host": args.host, "address": args.address}
        self.heartbeat: dict = here | {"port": args.port, "count": 0} | IDLE
        self.lives = {here["life"]} | ({older["life"]} if older else set())  # its own, and that of the one before it
        self.ending = 0.0  # when the ranks were killed, until they have ended
        self.last_pass = 0.0  # when the main thread's loop began its last pass
        self.written = -math.inf  # the time of the last heartbeat
        self.has_written, self.starts, self.interrupted = False, 0, False
        self.writing = threading.Lock()

    def run(self) -> int:
        """Return the status of the run, the same on every node; LEFT if the run continues without this node."""
        numbers = [n for n in SIGNALS if n == signal.SIGUSR1 or signal.getsignal(n) != signal.SIG_IGN]
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # a thread waits for them
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # launch/node.sh had it ignored until here
        threading.Thread(target=self.listen, args=[numbers], name="signals", daemon=True).start()
        threading.Thread(target=self.heartbeat_loop, name="beats", daemon=True).start()
        self.agent.open()
        with suppress(OSError):
            if (over := self.leader.round())["state"] == "end":
                self.leader.say(f"{self.folder} ended before, with {over['status']}: start again with another --id")
        try:
            while True:
                self.last_pass = monotonic()
                self.watch()
                if monotonic() - self.written > self.args.beat_seconds:
                    if self.replaced():
                        self.leader.say(f"another supervisor has started as node {self.args.node}: this one leaves")
                        return LEFT
                    with self.writing:
                        self.write_heartbeat()
                    with suppress(OSError):  # a full disk: tried again with the next heartbeat
                        round_ = self.leader.lead() if self.leader.leads(self.args.node) else self.leader.round()
                        if (status := self.follow(round_)) is not None:
                            return status
                time.sleep(POLL_SECONDS)
        finally:
            self.agent.close()
            with self.writing:
                self.last_pass = -math.inf
                if not self.replaced():
                    self.path.unlink(missing_ok=True)

    def listen(self, numbers: Sequence[signal.Signals]) -> None:
        """Pass signals to the ranks. This runs in a thread, because the main thread may wait for a disk.

        A scheduler sends a signal to every process, so a rank gets it twice. A rank ignores a second one only within
        some seconds; a later one ends it during its last save (runtime/stop.py). So a second Ctrl+C kills the ranks
        here. After SIGTERM this node leaves: the ranks of all nodes save, and the others may go on.
        """
        while True:
            number = signal.Signals(signal.sigwait(numbers))
            if number == signal.SIGTERM:
                self.heartbeat["leaving"] = "got SIGTERM"
            elif number == signal.SIGINT and self.interrupted:
                self.heartbeat["leaving"] = "got SIGINT a second time"
                number = signal.SIGKILL
            else:
                self.heartbeat["stopping"] = True
                self.interrupted |= number == signal.SIGINT
            self.agent.signal(number)

    def watch(self) -> None:
        """Update the heartbeat from the state of the ranks."""
        self.agent.listen()
        state = self.heartbeat["state"]
        if self.ending and (not self.agent.running or monotonic() - self.ending > KILL_SECONDS):
            if self.agent.running:
                self.heartbeat["leaving"] = f"{STUCK} in {KILL_SECONDS:.0f} s"
            self.ending = 0.0
            self.heartbeat["state"] = "ended"  # last, since another thread may write the heartbeat
        elif not self.ending and state != "ended":  # not killed: the statuses are the ranks' own
            self.heartbeat |= {"ended": dict(self.agent.ended), "said": dict(self.agent.said)}
            if BROKEN in self.agent.ended.values():
                self.heartbeat["leaving"] = "has a broken device"
            if state == "running" and any(self.agent.ended.values()):
                self.heartbeat["state"] = "failed"
            elif state == "running" and not self.agent.running:
                self.heartbeat["state"] = "done"
        if state != self.heartbeat["state"]:
            self.written = -math.inf

    def replaced(self) -> bool:
        """Return whether a newer supervisor writes this node's heartbeat, as when a lost pod comes back."""
        with suppress(OSError):
            found = self.leader.read(self.path.name, HEARTBEAT) or self.heartbeat
            return self.has_written and found["life"] not in self.lives  # the one before may have written once more
        return False

    def heartbeat_loop(self) -> None:
        """Write heartbeats while the main thread waits for a slow disk or device, for KILL_SECONDS at most.

        A pass of the leader reads the heartbeats of all nodes, which may take long. Its own must not be late then.
        """
        while True:
            time.sleep(self.args.beat_seconds)
            with self.writing:
                if self.args.beat_seconds < monotonic() - self.last_pass < KILL_SECONDS and not self.replaced():
                    self.write_heartbeat()

    def write_heartbeat(self) -> None:
        """Write this node's heartbeat, with a free port if no ranks run."""
        self.heartbeat |= {"count": self.heartbeat["count"] + 1, "time": time.time()}
        self.written = monotonic()
        if self.heartbeat["state"] not in ("running", "failed"):
            self.heartbeat["port"] = free_port([self.args.port + (self.starts + i) % PORTS for i in range(PORTS)])
        try:
            write_json_atomically(self.path, self.heartbeat)
            self.has_written = True
        except OSError:  # the disk is full or away: now an old heartbeat does not mean that its node is dead
            self.leader.seen = {}

    def follow(self, round_: dict) -> int | None:
        """Do what the round requires of this node. Return its status if the run is over for this node.

        round                           ranks run here                  no ranks run here
        run, with this node             nothing, or kill older ranks    start them
        run without it                  kill them                       wait; LEFT if it is unfit or leaves
        stop                            kill them                       check the node; LEFT if it is unfit or leaves
        end                             kill them                       the status of the run
        """
        members = [(node["node"], node["life"]) for node in round_["nodes"]]
        mine, beat = (self.args.node, self.heartbeat["life"]), self.heartbeat
        wanted = round_["state"] == "run" and mine in members
        new = wanted and round_["key"] != beat["round"]  # two leaders at once can write one number twice
        if beat["state"] in ("running", "failed"):
            if new or not wanted:
                self.ending = self.ending or monotonic()
                self.agent.signal(signal.SIGKILL)
            return None
        if new:
            self.start(round_, members.index(mine))
            return None
        if round_["state"] == "end":
            return round_["status"]
        if round_["state"] == "stop" and round_["key"] != beat["looked"] and not beat["leaving"]:
            beat |= {"unfit": self.health.unfit(), "poor": self.health.poor(), "looked": round_["key"]}
            self.written = -math.inf
        unfit = beat["unfit"] and self.args.host in round_["excluded"]  # the leader has read the reason
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
        self.starts += 1  # the next start gets another port, and so another store
        self.agent.start([{name: str(value) for name, value in variables.items()} for variables in own])
        self.heartbeat |= {"round": round_["key"], "state": "running", "ended": {}, "said": {}}


def free_port(ports: Sequence[int]) -> int:
    """Return the first of these ports that is free; the first one if none is."""
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
    flag("--dir", type=Path, required=True, help="the run's folder (log.dir), which all nodes share")
    flag("--rounds", type=Path, help="where the nodes agree (default: rounds/ in the run's folder)")
    flag("--id", required=True, help="must be different for each start of the job")
    flag("--host", default=socket.gethostname(), help="the node's name in its scheduler")
    flag("--address", default=socket.gethostname(), help="where other nodes reach this one")
    flag("--port", type=int, default=29600, help=f"the first of {PORTS}: a round's ranks meet at a free one")
    flag("--max-restarts", type=int, default=100)
    flag("--backoff-seconds", type=float, default=5.0, help="after the second failure at one step; then more")
    flag("--beat-seconds", type=float, default=1.0)
    flag("--dead-seconds", type=float, default=20.0, help="a node without a heartbeat for this long is dead")
    flag("--gather-seconds", type=float, default=1800.0, help="wait for nodes at the start")
    flag("--rejoin-seconds", type=float, default=0.0, help="wait for a lost node to come back, or its successor")
    flag("--preload", default="minitron.train", help="module that agents import; '': none, each rank is a new Python")
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
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", args.id):
        raise ValueError(f"--id={args.id} is not the name of a folder; use letters, digits, '-', '_' and '.'")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    with user_errors():
        supervisor = Supervisor(parse(argv))
    sys.exit(supervisor.run())
