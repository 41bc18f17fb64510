"""Listen for signals, for the end of torchrun and for hangs, from a process's first moment to its last.

Problem: Python runs the handler of a signal in the main thread, between two steps of its interpreter, and that thread
may be in C for minutes: in a rendezvous, in a collective. A rank gets no signal when its torchrun is killed
(`kill -9`): it trains on or waits forever, and keeps its GPU. The idea: a thread.

1. The numbers of signals go to the thread through a socket (`signal.set_wakeup_fd`). They are blocked in all other
   threads, because torch's store prints a page of errors when a signal interrupts it in a wait.
2. Once a second the thread runs the checks of a rendezvous, of a stop and of the watch over hangs. If torchrun started
   the process, it also checks that the parent process is still the same. A process without torchrun may lose its parent
   on purpose (nohup, setsid).
3. The thread ends a rank whose main thread cannot end: a last line, then os._exit, even if the line cannot be written.

    imports, data, rendezvous, model    SIGINT and SIGTERM end the process with one line; SIGUSR1 waits for the training
    training                            `stop.Stop` handles all three
    afterwards                          SIGINT and SIGTERM end the process without a line
    always                              a rank ends when its torchrun has died; SIGBUS ends it, after a line

torchrun ends with a page about the ranks that failed. A rank's last line is on that page, too, if the rank writes it to
the file that torchrun has named (TORCHELASTIC_ERROR_FILE, in the format of torch's elastic ErrorHandler).

SIGBUS comes from an instruction that uses a mapped file which has become shorter, or whose disk fails. Python would run
its handler only after that instruction, which never completes. So the C library calls ours, which takes the
interpreter's lock.

A SIGINT that is ignored when the process starts, as in the background of a script, stays ignored.
Left out: C code that holds the interpreter's lock forever, which stops this thread, too. Collectives release it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from minitron.config.files import write_json
from minitron.runtime.status import LOST

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TICK_SECONDS = 1.0
LINE_SECONDS = 5.0  # a last line may take this long
# torchrun reports the failure with the earliest timestamp as the cause. So a rank that ends as a consequence writes a
# later one. A failure without an error file has the time of torchrun's report.
LATER_SECONDS = 60
SIGACTION, SA_SIGINFO, SI_ADDR = "P128xiP", 4, 16  # struct sigaction, a flag, the offset of si_addr: 64-bit Linux


class Listener:
    """Listens from `open` to the end of the process, or as a context manager. Needs no torch.

    kept: SIGUSR1 if it came before the training, else 0. torchrun: whether torchrun (or our supervisor) started this
    process, by `environ`. begun: the time when this listener was made.
    """

    def __init__(self, environ: Mapping[str, str]):
        self.begun = time.time()
        self.torchrun, self.parent = "TORCHELASTIC_RUN_ID" in environ, os.getppid()
        self.error_file = environ.get("TORCHELASTIC_ERROR_FILE")
        self.quiet = environ.get("LOCAL_RANK", "0") != "0"  # the node's first rank writes the line for all
        self.alarm: Callable[[str], object] = _to_stderr
        self.kept, self.on_signal = 0, self._end_start
        self.checks: list[Callable[[], None]] = []
        self.checking = threading.Lock()

    def report_to(self, alarm: Callable[[str], object]) -> None:
        """Write last lines by alarm(text) from now on, instead of to stderr."""
        self.alarm = alarm

    def handle(self, on_signal: Callable[[signal.Signals], None]) -> None:
        """Call on_signal, in the thread, for each signal from now on."""
        self.on_signal = on_signal

    @contextmanager
    def every_second(self, check: Callable[[], None]) -> Iterator[None]:
        """Call check(), in the thread, about once a second while inside. The end waits for a call under way."""
        self.checks.append(check)
        try:
            yield
        finally:
            with self.checking:
                self.checks.remove(check)

    def open(self) -> Listener:
        heard, self.wire = socket.socketpair()
        self.wire.setblocking(False)
        self.numbers = [n for n in SIGNALS if n != signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
        self.before = self.install_handlers()
        self.on_bus_error = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._bus_error)
        action = struct.pack(SIGACTION, ctypes.cast(self.on_bus_error, ctypes.c_void_p).value, SA_SIGINFO, 0)
        self.before_bus_error = ctypes.create_string_buffer(len(action))
        ctypes.CDLL(None).sigaction(signal.SIGBUS, action, self.before_bus_error)
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)  # also of threads that begin later
        signal.set_wakeup_fd(self.wire.fileno())
        threading.Thread(target=self._listen, args=[heard], name="signals", daemon=True).start()
        return self

    def install_handlers(self) -> dict:
        """Set our handlers, so that the numbers go to the wire; return the handlers before.

        Call it again later: LLVM, in Triton's compiler, replaces the handler of SIGUSR1 at its first kernel.
        """
        return {number: signal.signal(number, lambda *_: None) for number in self.numbers}

    def __enter__(self) -> Listener:
        return self.open()

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(-1)
        ctypes.CDLL(None).sigaction(signal.SIGBUS, self.before_bus_error, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: Python cannot put back what a library had set
        self.wire.close()

    def exit_now(self, text: str, status: int) -> None:
        """End this process, in any state of its main thread. `text` gives the reason, unless its write hangs."""
        self.exit_within(LINE_SECONDS, status)  # a disk hangs, or a pipe is full
        try:
            self.alarm(text)
            self.tell_torchrun(text, status)
        finally:
            os._exit(status)

    def tell_torchrun(self, why: str, status: int) -> None:
        """Write why this rank ends with `status`, for torchrun's page. "": nothing."""
        if why and self.error_file:
            consequence = status == LOST or status > 128  # another rank has ended, or torchrun sent SIGTERM
            when = str(int(time.time()) + LATER_SECONDS * consequence)
            with suppress(OSError):
                write_json(self.error_file, {"message": {"message": why, "extraInfo": {"timestamp": when}}})

    def exit_within(self, seconds: float, status: int) -> None:
        """End this process after `seconds`, in any state of its threads."""
        end = threading.Timer(seconds, os._exit, [status])
        end.daemon = True
        end.start()

    def _bus_error(self, number: int, info: int, _: int) -> None:
        """Write a line that names the file. Then the instruction runs again, and the signal ends the process."""
        ctypes.CDLL(None).sigaction(number, self.before_bus_error, None)
        address, found = ctypes.c_void_p.from_address(info + SI_ADDR).value, "a file"
        with open("/proc/self/maps") as maps:
            for span, *_, path in (line.rstrip("\n").split(maxsplit=5) for line in maps if "/" in line):
                begin, end = (int(part, 16) for part in span.split("-"))
                found = path if begin <= address < end else found
        why = f"{found} is mapped and cannot be read: it is shorter than it was, or its disk fails"
        self.exit_within(LINE_SECONDS, 128 + number)
        self.alarm(f"SIGBUS: {why}\n{''.join(traceback.format_stack())}")

    def _listen(self, heard: socket.socket) -> None:
        """Read the numbers of signals from the wire until it is closed."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)
        heard.settimeout(TICK_SECONDS)
        while True:
            try:
                number = heard.recv(1)
            except TimeoutError:
                number = b"\0"
            if not number:
                return heard.close()
            if self.torchrun and os.getppid() != self.parent:
                self.exit_now("torchrun, which started this rank, has died: the rank ends without saving", LOST)
            if number[0] in SIGNALS:
                self.on_signal(signal.Signals(number[0]))
                continue
            with self.checking:
                for check in self.checks:
                    check()

    def finish(self) -> None:
        """From now on end the process without a line at SIGINT or SIGTERM: the training is over."""
        self.on_signal = self._end_quietly

    def _end_start(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1:
            self.kept = number
        elif self.quiet:
            self._end_quietly(number)
        else:
            self.exit_now(f"{number.name} during the start: ended before the first step", 128 + number)

    def _end_quietly(self, number: signal.Signals) -> None:
        if number != signal.SIGUSR1:
            os._exit(128 + number)


def _to_stderr(text: str) -> None:
    """Write at once, without Python's buffer, whose lock the main thread may hold."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode())
