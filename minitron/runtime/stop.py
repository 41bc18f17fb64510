"""End a run before its last step: on a signal, or when too many updates in a row were skipped.

**Signals.** A scheduler that wants its machines back sends SIGTERM (or SIGUSR1: Slurm's `--signal=USR1@120`) a minute
or so before it ends the run; a user presses Ctrl+C (SIGINT). Saving is a collective: all ranks must save after the same
step. The idea:

1. The number of the signal goes to a thread (`signals.Listener`).
2. After each step a rank passes a gate. The store in which the ranks met holds the number of the last gate that is
   passed, and the thread closes the next one. No rank waits for another, and the GPU takes no part: the result of a
   collective would be known only after the step.
3. At the closed gate all ranks save and exit 0, after Ctrl+C 130 (under torchrun 0).

    the store   "6"             "8"                                      "9 15"
    rank 0        1: passes 7, 8              3: at 8                               6: at 9, stops for 15
    rank 1                     2: at 7, reads "8"    4: SIGTERM closes 9    5: at 8                 7: at 9, stops

Short steps pass several gates at once, so that ten thousand ranks do not all use the store in each step. This delays a
stop by up to ADVANCE_SECONDS. The store alone decides, so the ranks' step times may differ.

The host runs ahead of its GPU. It comes to the gate when the GPU has done the step's last forward
(`Executor.wait_last_forward`). If a signal comes before that, the step on the GPU is the last one; else the next step
is.

The same signal a second time ends a rank at once. Within five seconds it is ignored as an echo, since Slurm signals
every process and torchrun forwards its signals. A SIGINT has exactly one echo, and only under torchrun: the terminal
sends it to all processes and torchrun forwards it. So Ctrl+C pressed twice ends at once.
torchrun also sends SIGTERM when a rank has died, and the GPUs of the others would wait for that rank forever. So would
gloo, if the connection broke under a send. So a rank that has got SIGTERM and does not move ends without saving.

**Skipped updates.** A step whose gradients are not finite changes nothing. In fp16 that is normal: such steps lower the
loss scale until it fits. At a scale of 1, which cannot fall and which other formats always have, something is broken:
train.max_skipped such steps in a row end the run.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from minitron.comm.mesh import Mesh
from minitron.runtime.log import Iteration, Log
from minitron.runtime.observer import Observer, StepDone
from minitron.runtime.rendezvous import SignedStore, Signer, connect
from minitron.runtime.signals import Listener
from minitron.runtime.status import RunError
from minitron.runtime.watch import OWN_PACE

REPEAT_SECONDS = 5.0
# After SIGTERM a rank may make no progress for this long, or for two steps if these take longer.
PATIENCE_SECONDS = 10.0
# A rank passes the gates of ADVANCE_SECONDS of steps at once, but at most MOST_GATES: later steps may be slower.
ADVANCE_SECONDS, MOST_GATES = 1.0, 100


class Diverged(RunError):
    """More updates in a row were skipped than a run recovers from (train.max_skipped)."""


class StopGate:
    """One gate after another, on all ranks. A key of `store`, which all share, holds the last gate that is passed.

    "7": all ranks pass the gates up to 7, though some have not come to them yet; 8 is open. "8 15": gate 8 is closed
    because of signal 15. One atomic operation turns "7" into either a higher number or "8 15", so all ranks read the
    same. Another program may replay an earlier signed value. Ranks overwrite it with the newer one.
    """

    KEY = "gate"

    def __init__(self, store: SignedStore):
        self.store, self.number = store, 0
        self.seen = self._swap("", "0")

    def next(self, gates: int = 1) -> int:
        """Come to the next gate; return 0 if it is open, else the number of the signal that closed it.

        gates: how many to pass at once if this rank is the first. The store is used only if no rank is known to have
        passed this gate.
        """
        self.number += 1
        if " " not in self.seen and int(self.seen) < self.number:
            self.seen = self._swap(self.seen, str(self.number - 1 + gates))
        gate, _, closed = self.seen.partition(" ")
        return int(closed) if closed and int(gate) <= self.number else 0

    def close(self, why: int) -> None:
        """Close the first gate that no rank has passed, unless one is closed. From any thread."""
        seen = self.seen
        while " " not in seen:
            seen = self._swap(seen, f"{int(seen) + 1} {why}")

    def _swap(self, old: str, new: str) -> str:
        """Replace the value by `new` if it is `old`; return the value as it is then."""
        now = self.store.compare_set(self.KEY, old, new)
        earlier = old and int(now.split()[0]) < int(old.split()[0])
        return self._swap(now, new) if earlier else now


class Stop(Observer):
    """Stops a run after a step: handles signals inside of `handling`, and counts skipped updates.

    local_signal: the number of the first signal that this rank got. agreed: the number of the signal for which all
    ranks stop. Both are 0 if there is none.
    """

    def __init__(self, mesh: Mesh, log: Log, max_skipped: int, listener: Listener, signer: Signer = Signer()):
        self.signer, self.mesh, self.log, self.max_skipped, self.listener = signer, mesh, log, max_skipped, listener
        self.local_signal = self.agreed = self.skips = 0
        self.step_seconds = 0.0
        self.first: dict[signal.Signals, float] = {}  # when each signal came first; `times`: how often
        self.times: Counter[signal.Signals] = Counter()

    def after(self, done: StepDone) -> None:
        """Come to the gate. The device has finished the last forward of the step."""
        self.should_stop()

    def should_stop(self) -> bool:
        """Tell whether the run stops here. All ranks call it in the same places, and get the same answer."""
        self.listener.install_handlers()
        self.mesh.activity.enter("agreement", self.mesh.world, 0)
        steps = int(ADVANCE_SECONDS / (self.step_seconds or ADVANCE_SECONDS))
        self.agreed = self.gate.next(min(max(steps, 1), MOST_GATES))
        self.mesh.activity.leave()
        return self.agreed > 0

    def on_figures(self, it: Iteration) -> None:
        """Count skipped updates by the figures of a step. Raises Diverged, on all ranks alike."""
        self.step_seconds = it.seconds
        if not it.skipped:
            self.skips = 0
        elif it.loss_scale <= 1 and not math.isfinite(it.grad_norm):  # else train.rerun has skipped a spike
            self.skips += 1
        if self.skips >= self.max_skipped:
            what = f"iteration {it.step}: the gradients of {self.skips} iterations in a row were not finite"
            limit = f"so nothing was learned (train.max_skipped={self.max_skipped})"
            fix = "lower optimizer.lr or lengthen its warm-up, and look at the loss and the gradient norm"
            raise Diverged(f"{what}, {limit}; {fix} before the first of them")

    def report(self, step: int, saved: bool) -> None:
        """Log the last line of a run that all ranks agreed to stop after `step`."""
        ending = "; nothing was saved: there is no checkpoint.dir to write in, or the save failed"
        ending = ", which was saved" if saved else ending
        self.log.info(f"{signal.Signals(self.agreed).name}: stopped after iteration {step}{ending}")

    # ---- signals --------------------------------------------------------------------------------------------------

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle signals inside. After an error they stay handled: torchrun's SIGTERM must not hide the reason."""
        self.gate = StopGate(connect(self.signer))
        self.listener.handle(self._on_signal)
        with self.listener.every_second(self._on_tick):
            if self.listener.kept:
                self._on_signal(signal.Signals(self.listener.kept))
            yield
        self.listener.finish()

    def _on_signal(self, number: signal.Signals) -> None:
        self.times[number] += 1
        passed = monotonic() - self.first.setdefault(number, monotonic())
        pressed_again = number == signal.SIGINT and self.times[number] > 1 + self.listener.torchrun
        if pressed_again or passed > REPEAT_SECONDS:
            self._exit(number, "a second time")
        self.local_signal = self.local_signal or number
        with suppress(RuntimeError):  # the store is gone: the main thread's next call fails, too, and reports it
            self.gate.close(self.local_signal)

    def _on_tick(self) -> None:
        activity, patience = self.mesh.activity, max(PATIENCE_SECONDS, 2 * self.step_seconds)
        if self.local_signal == signal.SIGTERM and activity.idle() > patience and activity.action not in OWN_PACE:
            self._exit(signal.SIGTERM, f"and has not moved for {activity.idle():.0f} s")

    def _exit(self, number: signal.Signals, why: str) -> None:
        text = f"{self.mesh.coordinates()} got {number.name} {why}: ends without saving in {self.mesh.activity}"
        self.listener.exit_now(text, 128 + number)
