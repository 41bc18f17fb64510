"""Results that are under way, and moments in the device's work.

Problem: a collective or a copy is faster beside a product than before it, so its caller gets no result yet. The idea:
all of them return a `Handle`. Its `wait()` makes later work wait for the operation, and returns the result:

    handle = all_gather_into(out, x, axis, wait=False)     launched
    y = a @ b                                              runs beside it
    use(handle.wait())                                     out, complete

On a GPU the current stream waits and the host continues. Without a GPU the host waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
U = TypeVar("U")


@dataclass(slots=True, eq=False)
class Handle(Generic[T]):
    """A result under way, or one that is there already: `Handle(x)`.

    waits: called in order by wait(). finish: then makes the result from `result`. held: tensors that the operation
    reads; they stay alive until wait().
    """

    result: Any = None
    waits: Sequence[Callable[[], object]] = ()
    finish: Callable[[Any], T] | None = None
    held: object = None

    @property
    def done(self) -> bool:
        """Tell whether the result can be read without a wait."""
        return not self.waits and self.finish is None

    def wait(self) -> T:
        """Wait for the result and return it. A second call returns it at once, on every stream.

        It waits only once: a second wait for the same gloo request would consume the next message.
        """
        for wait in self.waits:
            wait()
        if self.finish is not None:
            self.result = self.finish(self.result)
        self.waits, self.finish, self.held = (), None, None
        return self.result

    def then(self, finish: Callable[[T], U]) -> Handle[U]:
        """Return a handle of finish(result), which its wait() calls."""
        return Handle(self, finish=lambda handle: finish(handle.wait()))


class DeviceTime:
    """A moment in the device's work: an event of the current stream; on a CPU the host's time.

    event: one that was recorded already, with timing.
    """

    def __init__(self, device: torch.device, event: torch.cuda.Event | None = None):
        self.event, self.host = event, time.perf_counter()
        if event is None and device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def seconds_since(self, earlier: DeviceTime) -> float:
        """Wait on the host for this moment; return the seconds since `earlier`, which has come by then."""
        if self.event is None or earlier.event is None:
            return self.host - earlier.host
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000
