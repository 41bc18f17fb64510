"""Run Python programs in forks of a process that has imported torch. A new Python takes seconds to import it.

`start` and `run` take the words that would follow `python`: "-m", a module and its arguments; "-c", code and its
arguments; a file and its arguments. torchrun forks its ranks in the same way. Such a process has imported modules that
a new Python has not. A test of imports, of signals during them, or of memory starts a new Python instead.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOAD = (
    "pytest",
    "hypothesis",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",  # the first full recomputation of a process imports it
    "torch.distributed.run",
    "minitron.pretrain",
)


class Forked:
    """A started process with the part of subprocess.Popen that tests and torchrun use."""

    def __init__(self, process: BaseProcess):
        process.start()
        self.process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if (status := self.process.exitcode) is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def context() -> multiprocessing.context.BaseContext:
    """Return the context whose processes are forks of the server that has imported PRELOAD."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))  # ignored if the server runs already
    return context


def start(
    words: Sequence[object],
    stdout: Path,
    stderr: Path | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Forked:
    """Start a program in the background, in a session of its own. It writes to these files; stderr=None: to one."""
    arguments = (
        [str(word) for word in words],
        stdout,
        stderr,
        cwd or Path.cwd(),
        dict(os.environ if env is None else env),
    )
    return Forked(context().Process(target=_begin, args=arguments, daemon=True))  # it ends with the tests at the latest


def run(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 600.0
) -> subprocess.CompletedProcess:
    """Run a program to its end; return its status and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        process = start(words, stdout, stderr, cwd, env)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(words, status, stdout.read_text(), stderr.read_text())


def _begin(words: list[str], stdout: Path, stderr: Path | None, cwd: Path, env: dict[str, str]) -> None:
    """Be the new process of `start`."""
    gc.freeze()  # no collection writes to pages that it shares with the server
    os.setsid()
    with open(stdout, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if stderr is not None:
        with open(stderr, "w") as file:
            os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    multiprocessing.current_process().daemon = False  # it may have processes of its own
    _execute(words, env)


def _execute(words: list[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.set_start_method(None, force=True)  # the default one, in place of that of this process
    kind, *rest = words
    try:
        if kind == "-m":
            sys.argv = rest
            sys.modules.pop(rest[0], None)  # or runpy warns that it is there already
            if rest[0] == "torch.distributed.run":
                _fork_ranks()
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = words[:1] + rest[1:]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(kind).resolve().parent))
            runpy.run_path(kind, run_name="__main__")
    except Exception:  # as Python does: multiprocessing would print a line of its own
        traceback.print_exc()
        sys.exit(1)


def _fork_ranks() -> None:
    """Let torchrun, which this process is, start its ranks as forks."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def fork(handler: SubprocessHandler, words: Sequence[str], env: dict[str, str]) -> Forked:
        return Forked(multiprocessing.get_context("fork").Process(target=_rank, args=(list(words), env)))

    SubprocessHandler._popen = fork


def _rank(words: list[str], env: dict[str, str]) -> None:
    """Be a rank: without torchrun's handlers of signals, and without its sockets, which would outlive it here."""
    os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    python, unbuffered, *words = words
    assert (python, unbuffered) == (sys.executable, "-u")
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(write_through=True)
    _execute(words, env)
