"""Ends a run before its last step: when it is told to, and when it learns nothing any more.

**Signals.** A scheduler that wants its machines back sends SIGTERM (SIGUSR1: Slurm's `--signal=USR1@120`), and then a
minute is left. Saving is a collective: all ranks must do it, after the same step. The idea:

1. The number of the signal goes to a thread: the main one may stand in C and would not see it.
2. It travels with the step's figures (`Meter`), so that all ranks agree. They are read a step late, without a wait.
3. After that step all ranks save and exit 0.

    step      7           8           9
    rank 0    figures     figures     reads 8's: a SIGTERM somewhere -> save, exit
    rank 1       SIGTERM  figures+15  the same

The same signal again ends a rank at once, but not within five seconds: there it is an echo, since Slurm signals every
process and torchrun hands on what it gets. And torchrun sends SIGTERM when a rank has died, for which a GPU would wait
forever: whoever has been told to end and does not move gives up.

**Skipped updates.** A step whose gradients are not finite changes nothing. In fp16 this is how the loss scale finds its
height: each such step halves it. Only at a scale of 1, where it cannot fall and where other formats always are, does
it say that something is broken; train.max_skipped of these in a row end the run.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from time import monotonic

from minitron.log import Iteration, Log
from minitron.mesh import Mesh
from minitron.watch import OWN_PACE

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REPEAT_SECONDS = 5.0
# After SIGTERM a rank may stand still for this long, or for two steps if these take longer.
PATIENCE_SECONDS = 10.0


class Diverged(ValueError):
    """So many updates in a row were skipped that the run cannot be expected to recover."""


class Stop:
    """Listens to signals while it is used as a context manager, and counts skipped updates.

    asked: the number of the first signal that this rank got, 0: none. agreed: of one that some rank got, equal on all.
    """

    def __init__(self, mesh: Mesh, log: Log, max_skipped: int):
        self.mesh, self.log, self.max_skipped = mesh, log, max_skipped
        self.asked = self.agreed = self.skips = 0
        self.step_seconds = 0.0

    def saw(self, it: Iteration, agreed: int) -> None:
        """Figures of a step have been read. Raises Diverged on all ranks alike."""
        self.agreed, self.step_seconds = self.agreed or agreed, it.seconds
        if not it.skipped:
            self.skips = 0
        elif it.loss_scale <= 1:
            self.skips += 1
        if self.skips >= self.max_skipped:
            raise Diverged(
                f"iteration {it.step}: the gradients of {self.skips} iterations in a row were not finite, so nothing "
                f"was learned (train.max_skipped={self.max_skipped}); lower optimizer.lr or lengthen its warm-up, and "
                "look at the loss and the gradient norm before the first of them")

    def report(self, step: int, saved: bool) -> None:
        """The last line of a run that all ranks agreed to stop after `step`."""
        name = signal.Signals(self.agreed).name
        self.log.info(f"{name}: stopped after iteration {step}" + (
            ", which was saved" if saved else "; nothing was saved: there is no checkpoint.dir, or the save failed"))

    # ---- signals --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Stop:
        heard, self.wire = socket.socketpair()
        self.wire.setblocking(False)
        self.before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        signal.set_wakeup_fd(self.wire.fileno())
        threading.Thread(target=self._listen, args=[heard], name="signals", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.wire.close()

    def _listen(self, heard: socket.socket) -> None:
        """Reads the numbers of signals from the wire until it is closed."""
        heard.settimeout(1.0)
        first = {}
        while True:
            try:
                number = heard.recv(1)
            except TimeoutError:
                self._give_up()
                continue
            if not number:
                return heard.close()
            number = signal.Signals(number[0])
            if number in SIGNALS:
                if monotonic() - first.setdefault(number, monotonic()) > REPEAT_SECONDS:
                    self._end(number, "a second time")
                self.asked = self.asked or number

    def _give_up(self) -> None:
        activity, patience = self.mesh.activity, max(PATIENCE_SECONDS, 2 * self.step_seconds)
        if self.asked == signal.SIGTERM and activity.idle() > patience and activity.action not in OWN_PACE:
            self._end(self.asked, f"and has not moved for {activity.idle():.0f} s")

    def _end(self, number: int, why: str) -> None:
        name = signal.Signals(number).name
        self.log.alarm(f"{self.mesh.cell()} got {name} {why}: ends without saving in {self.mesh.activity}")
        os._exit(128 + number)
