"""Where the time goes from a fault to the first new step: one row "start" in metrics.jsonl, one line in the log.

    detect    from the last step that was recorded until the leader stopped the round (supervise/lead.py)
    end       until no rank was left, and until the leader had waited as long as it should
    start     until this rank's first line ran
    import    until its modules were there: nothing, if an agent had imported them (supervise/agent.py)
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


class Startup:
    """parts: seconds of each part so far. begun: the time at the rank's first line."""

    def __init__(self, environ: Mapping[str, str], begun: float):
        text = environ.get("MINITRON_ROUND", "{}")  # from the supervisor, if there is one
        line = lambda error: f"MINITRON_ROUND={text[:40]} is not what a supervisor writes ({error}); unset it"
        with errors_as(ValueError, line, ValueError, TypeError, AttributeError, OverflowError):
            round_ = parse_json(text)
            sum(round_.values(), 0.0)  # they are numbers
        self.begun, self.parts, self.last = begun, round_, round_.pop("at", begun)
        self.mark("start", begun)
        self.mark("import")

    def mark(self, part: str, now: float | None = None) -> None:
        """End a part now."""
        now = time() if now is None else now
        self.parts[f"{part}_seconds"], self.last = round(now - self.last, 3), now

    def on_figures(self, log: Log, it: Iteration) -> None:
        """After the first step, write its row and its line."""
        if "first_step_seconds" in self.parts:
            return
        self.parts["first_step_seconds"] = round(it.seconds, 3)
        log.record("start", step=it.step, **self.parts)
        seconds = {name.removesuffix("_seconds"): s for name, s in self.parts.items() if name.endswith("_seconds")}
        parts = ", ".join(f"{name} {s:.1f}" for name, s in seconds.items())
        log.info(f"{sum(seconds.values()):.1f} s to the first step: {parts}")
