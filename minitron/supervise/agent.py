"""The agent of a node: a process that has imported what a rank needs, and forks the ranks of every start from itself.

Problem: a rank needs seconds to import torch, and minutes if a thousand ranks read it from one shared disk. The idea:
one process per node imports it once and forks the ranks. It never uses a GPU, so its forks can. A start then takes
milliseconds, and all ranks share the memory of the code. If an import initialized CUDA, each rank starts a new Python
process.

    supervisor -> agent        {"ranks": [{"RANK": "6", ...}, {"RANK": "7", ...}]}      start these
    agent -> supervisor        {"group": 4711}                                 their process group, to signal or kill
    a rank -> supervisor       {"rank": 1, "said": "RuntimeError: ..."}        why it ends, if Python raised an error
    agent -> supervisor        {"rank": "agent", "said": "..."}                why it ends itself
    agent -> supervisor        {"rank": 1, "status": 1}                        how it ended; -9: killed by signal 9

The messages are packets of a socket pair; the agent kills its ranks when the supervisor's end closes.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from minitron.runtime.environment import set_defaults
from minitron.runtime.signals import SIGNALS
from minitron.runtime.status import why_it_ended

POLL_SECONDS = 0.05
SAID = 500  # characters of the reason that a rank sends


class Agent:
    """The supervisor's side: the process and the state of its ranks. Any thread may call `signal`."""

    def __init__(self, command: Sequence[str], preload: str):
        self.command, self.preload = command, preload
        self.process: subprocess.Popen | None = None
        self.group, self.wanted = 0, 0  # the ranks' process group; how many were started
        self.pending: list[int] = []  # signals that came before there was a group, or between two starts
        self.lock = threading.RLock()
        self.ended: dict[str, int] = {}  # this round's: status by local rank, or "agent"
        self.said: dict[str, str] = {}

    def open(self) -> None:
        """Start the process, which imports while the nodes gather."""
        if self.process is None or self.process.poll() is not None:
            self.wire, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.wire.setblocking(False)
            argv = [sys.executable, "-m", "minitron.supervise.agent", str(theirs.fileno()), self.preload, *self.command]
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], start_new_session=True)
            theirs.close()

    def start(self, ranks: list[dict[str, str]]) -> None:
        with self.lock:
            self.open()
            self.group, self.wanted, self.ended, self.said = 0, len(ranks), {}, {}
            self.wire.send(json.dumps({"ranks": ranks}).encode())

    def listen(self) -> None:
        """Receive what the agent and its ranks have sent."""
        if self.process is None:
            return
        with self.lock:
            status = self.process.poll()
            with suppress(BlockingIOError, ConnectionError):
                while packet := self.wire.recv(1 << 16):
                    message = json.loads(packet)
                    if "group" in message:
                        self.group = message["group"]
                        pending, self.pending = self.pending, []
                        for number in pending:
                            self.signal(number)
                    elif "said" in message:
                        self.said[str(message["rank"])] = message["said"]
                    elif "status" in message:
                        self.ended[str(message["rank"])] = message["status"]
            if status is not None and self.wanted > len(self.ended):
                self.ended.setdefault("agent", status)

    def signal(self, number: int) -> None:
        """Send a signal to the ranks; one that is not SIGKILL waits until they have started."""
        with self.lock:
            if self.group and (self.running or "agent" in self.ended):
                with suppress(ProcessLookupError):
                    os.killpg(self.group, number)
            elif number != signal.SIGKILL:
                self.pending.append(number)
            elif self.running:
                self.process.kill()

    @property
    def running(self) -> bool:
        return self.wanted > len(self.ended) and "agent" not in self.ended

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Serve the supervisor until it closes its end of the socket pair: FD PRELOAD COMMAND...

    PRELOAD is the module to import; if it is empty, every rank is a new Python.
    """
    wire, preload, command = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3:]
    # The supervisor passes signals on as soon as it has the ranks' process group. In a rank SIGUSR1 stays blocked, and
    # so pending, until the rank handles it (runtime/signals.py), which its imports may delay.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    del handlers[signal.SIGUSR1]  # ignoring it again would drop a pending one
    set_defaults(os.environ)
    missing = ""
    if preload:
        try:
            for module in preload, "torch.fx.experimental.symbolic_shapes":  # the first backward imports it, with sympy
                import_module(module)
        except ModuleNotFoundError as error:
            if not f"{preload}.".startswith(f"{error.name}."):
                raise
            missing = f"--preload={preload} is not a module here; correct it"
        gc.freeze()  # no collection writes to pages that the ranks share
    while message := wire.recv(1 << 20):
        if missing:
            send(wire, rank="agent", said=missing)
            sys.exit(1)
        local: dict[int, int] = {}
        group = 0
        for rank, variables in enumerate(json.loads(message)["ranks"]):
            pid = os.fork()
            with suppress(OSError):  # parent and child both do this, since either may run first
                os.setpgid(pid, group)
            if pid == 0:
                os.environ.update(variables)
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
                return become(rank, wire, command, fresh=not preload or no_gpu_for_forks())
            group, local[pid] = group or pid, rank
        send(wire, group=group)
        while local:
            if select.select([wire], [], [], POLL_SECONDS)[0]:  # the wire is closed: the supervisor has died
                return os.killpg(group, signal.SIGKILL)
            for pid in list(local):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    send(wire, rank=local.pop(pid), status=os.waitstatus_to_exitcode(status))


def no_gpu_for_forks() -> bool:
    """Return whether the parent of this fork has initialized CUDA, which then fails here."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def become(rank: int, wire: socket.socket, command: list[str], fresh: bool) -> None:
    """Run the command of a rank in this fork: "-m", a module and its arguments, or a file and its arguments."""
    if fresh:
        os.execv(sys.executable, [sys.executable, *command])
    module = command[0] == "-m"
    sys.argv = command[module:]
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException as error:
        if said := why_it_ended(error)[:SAID]:
            send(wire, rank=rank, said=said)
        raise


def send(wire: socket.socket, **message) -> None:
    with suppress(OSError):  # the supervisor has died: this process ends soon
        wire.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
