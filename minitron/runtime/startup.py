"""Where the time goes from a fault to the first new step: one row "start" in metrics.jsonl, one line in the log.

    detect    from the last step that was recorded until the leader stopped the round (supervise/lead.py)
    end       until no rank was left, and until the leader had waited as long as it should
    start     until this rank's first line ran
    import    until its modules were imported: 0 if an agent had imported them before (supervise/agent.py)
    build     data, the meeting of the ranks, model, optimizer
    load      the checkpoint
    prepare   the loader, and the host's memory for saves
    first_step

A graph of the step is recorded some steps later. Its own line has its seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import time

from minitron.config.files import errors_as, parse_json
from minitron.runtime.log import Log
from minitron.runtime.log_formats import Iteration
from minitron.runtime.observer import Observer


class Startup(Observer):
    """Times the parts of a start. parts: seconds of each so far.

    begun, imported: the times at the rank's first line and after its imports. Raises ValueError if MINITRON_ROUND is
    not what a supervisor writes.
    """

    def __init__(self, environ: Mapping[str, str], log: Log, begun: float, imported: float):
        text = environ.get("MINITRON_ROUND", "{}")  # from the supervisor, if there is one
        line = lambda error: f"MINITRON_ROUND={text[:40]} is not what a supervisor writes ({error}); unset it"
        with errors_as(ValueError, line, ValueError, TypeError, AttributeError, OverflowError):
            self.parts = parse_json(text)
            sum(self.parts.values(), 0.0)  # they are numbers
        self.log, self.begun, self.last = log, begun, self.parts.pop("at", begun)
        self.mark("start", begun)
        self.mark("import", imported)

    def mark(self, part: str, now: float | None = None) -> None:
        """End a part now."""
        now = time() if now is None else now
        self.parts[f"{part}_seconds"], self.last = round(now - self.last, 3), now

    def on_figures(self, it: Iteration) -> None:
        """After the first step, write its row and its line."""
        if "first_step_seconds" in self.parts:
            return
        self.parts["first_step_seconds"] = round(it.seconds, 3)
        self.log.record("start", step=it.step, **self.parts)
        seconds = {name.removesuffix("_seconds"): s for name, s in self.parts.items() if name.endswith("_seconds")}
        parts = ", ".join(f"{name} {s:.1f}" for name, s in seconds.items())
        self.log.info(f"{sum(seconds.values()):.1f} s to the first step: {parts}")
