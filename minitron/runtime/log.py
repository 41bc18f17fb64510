"""What a run writes: an iteration line for people and parsers, files for tools, logs of ranks.

    stdout           the iteration line in the form of log.format or log.style, from the last rank; after an evaluation
                     Megatron's validation line, or NeMo's bar with val_loss; messages, from rank 0
    log.dir/
      config.yaml    every key of the run, resolved; `python -m minitron.pretrain config.yaml` repeats it
      metrics.jsonl  one JSON object a line, appended by rank 0, with the time and its kind: "run" at each start, then
                     "step", "eval" and "save"; after the first step "start" (startup.py); "numerics", norms and FP8's
                     losses by layer (optim/numerics.py); "places" and "ranks", how long each rank computes
                     (stragglers.py); "end", the shares of the time (supervise/goodput.py)
      dllogger.json  the steps as NVIDIA's DLLogger writes them, for tools/training_metrics.py and others
      tensorboard/   the numbers of metrics.jsonl, as step/loss and eval/loss, if log.tensorboard is set (sinks.py)
      rank-3.log     the messages of rank 3 alone, with the time: its alarms, the report of a hang, the lines that it
                     prints. A rank without messages has no log
      errors.log     alarms, errors that ended a rank, and Python's warnings, of all ranks. Without any there is no file

If a disk is full or fails, records are lost, one warning is written, and training continues. Each file takes whole
records only: a part of a record that did not fit is cut off, and records continue once the disk has space. Each record
of errors.log is one append, since ranks of other nodes write there, too (on an object store only the last writer's
records remain).

Every number arrives here reduced over the ranks, as a host float: any rank can print it, and none communicates or waits
here. The name of a rate tells which FLOPs it counts, see `minitron.config.flops`: the line of `megatron` prints
hardware TFLOPs, that of `megatron-core` causal ones, MFU counts the full ones, and metrics.jsonl has all three.

A line covers the iterations since the line before, as Megatron's does. It has the mean loss of those that were not
skipped, the mean time of all, and how many were skipped or had a NaN loss. The other fields are those of the last
iteration. If it was skipped, the line has no gradient norm. If all were skipped, it has no loss.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from minitron.config import flops
from minitron.config.files import errors_as
from minitron.config.schema import Config
from minitron.config.text import to_yaml
from minitron.runtime import log_formats
from minitron.runtime.log_formats import Iteration, Line
from minitron.runtime.sinks import FULL, SINKS, File, Sink, append_to
from minitron.runtime.status import RunError, why_it_ended

RECENT = 20  # how many steps the summary covers


class Log(AbstractContextManager):
    """The log of one rank of `world`. `close` it at the end, or use it as a context manager.

    device_name: the GPU's; the MFU is a share of its peak. Unknown GPUs, CPUs and fp32 runs have no MFU.
    metrics: on rank 0, metrics.jsonl. last_step: the last iteration of this process, if there is one.
    Raises ValueError if log.dir or a sink cannot be written, or its package is not installed. A full or failing disk
    gives one warning: a run that restarts after a fault continues without these records.
    """

    def __init__(self, cfg: Config, rank: int, world: int, device_name: str = "cpu"):
        self.cfg, self.rank, self.world = cfg, rank, world
        name = "nemo pipe" if cfg.log.format == "nemo" and cfg.finetune.kind is not None else cfg.log.format
        self._format = log_formats.short if cfg.log.style == "short" else log_formats.FORMATS[name]
        fp8 = cfg.precision.fp8 != "none"
        self.peak = None if cfg.precision.dtype == "fp32" else flops.peak_tflops(device_name, fp8)
        self._since_line: list[Iteration] = []
        self._recent: deque[Iteration] = deque(maxlen=RECENT)
        self.last_step: int | None = None
        self._skipped_total = self._nan_total = self._steps = 0
        self._seconds, self._val_loss, self._begun = 0.0, None, datetime.now()
        self._rank_log: File | None = None
        self.metrics: File | None = None
        self._dllogger: File | None = None
        self._errors: Path | None = None
        self._sinks: list[Sink] = []
        self._warned = False
        self._show_warning = warnings.showwarning
        if cfg.log.dir is not None:
            with self._opening("dir"):
                self._open_files(Path(cfg.log.dir).expanduser())
        for name, make in SINKS.items() if rank == 0 else ():
            if getattr(cfg.log, name):
                with self._opening(name):
                    self._sinks.append(make(cfg))

    def follow(self, cfg: Config) -> None:
        """Continue with the configuration of the run, once its number of steps is known."""
        self.cfg = cfg
        if self.metrics is not None:
            self._write(self.metrics, self._write_config, self.metrics.path.parent)

    def iteration(self, it: Iteration) -> None:
        """Record a step. Every log.every steps, and after the last one, also print the line. All ranks call it."""
        self._skipped_total += int(it.skipped)
        self._nan_total += int(it.nan)
        self._steps, self._seconds = self._steps + 1, self._seconds + it.seconds
        self._since_line.append(it)
        self._recent.append(it)
        self.last_step = it.step
        self._record_step(it)
        if it.step % self.cfg.log.every == 0 or it.step == self.cfg.train.steps:
            self.info(self._format(self._line()), self.world - 1)
            self._since_line = []

    def evaluation(self, step: int, loss: float, seconds: float = 0.0) -> None:
        """Record and print the mean loss on the validation data after `step`. seconds: how long the evaluation took.

        NeMo's line is a bar of steps. Without one, in an evaluation alone, the line is Megatron's.
        """
        self._val_loss = loss
        self.record("eval", step=step, loss=loss, seconds=seconds)
        perplexity = math.exp(min(20.0, loss))  # as Megatron bounds it
        line = f" validation loss at iteration {step} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
        in_bar = self.cfg.log.format == "nemo" and self._recent
        self.info(self._format(self._line()) if in_bar else line, self.world - 1)

    def record(self, kind: str, **values) -> None:
        """Write a row to metrics.jsonl, whole or not at all; those of steps, evaluations and numerics also to sinks.

        Any thread may call it.
        """
        values = _finite(values)
        if self.metrics is not None:
            row = {"kind": kind, "time": time.time(), **values}
            self._write(self.metrics, self.metrics.write, json.dumps(row, allow_nan=False) + "\n")
        if self._sinks and kind in ("step", "eval", "numerics"):
            step = values.pop("step")
            scalars = {k: v for k, v in log_formats.flattened(values, kind).items() if v is not None}
            for sink in self._sinks:
                self._write(sink, sink.record, step, scalars)

    def summary(self) -> None:
        """Print the mean of the last steps, as NVIDIA's fine-tuning recipes do: the first steps are slower."""
        iterations, t = list(self._recent), self.cfg.train
        if iterations:
            seconds, (_, mfu) = sum(it.seconds for it in iterations), self._rates(iterations)
            tokens = f"{sum(it.batch_size for it in iterations) * t.seq_len / seconds:.0f}"
            mean = f"mean of the last {len(iterations)} steps: train_step_timing in s: {seconds / len(iterations):.4f}"
            share = "" if mfu is None else f", MFU (full): {100 * mfu:.2f}%"
            self.info(f"{mean}, tokens per second: {tokens}{share}")

    def info(self, text: str, rank: int = 0) -> None:
        """Write to stdout and to the log of one rank. The other ranks, which have the same text, write nothing."""
        if self.rank != rank:
            return
        self._note(text)
        encoding = sys.stdout.encoding or "utf-8"  # some cannot encode the blocks of a progress bar
        try:
            sys.stdout.write((text + "\n").encode(encoding, "replace").decode(encoding))  # at once: print writes twice
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has gone: this ends the run, as it ends other programs
            raise
        except OSError as error:
            self._warn("stdout", error)

    def warn(self, text: str) -> None:
        """Write as `info` does, and from rank 0 to errors.log, since all ranks have the same warning."""
        self.info(text)
        if self.rank == 0:
            self._error(f"warning: {text}")

    def alarm(self, text: str, traceback: str = "") -> None:
        """Write to this rank's log, to errors.log and to stderr. stderr has no traceback if the log has it."""
        logged = "\n".join(filter(None, (text, traceback)))
        self._note(logged)
        self._error(logged)
        self._stderr(text if self._rank_log and not self._rank_log.lost else logged)

    def current_traceback(self) -> None:
        """Write the traceback of the error that is handled to this rank's log, or to stderr if there is no log."""
        write = self._stderr if self._rank_log is None else self._note
        write(traceback.format_exc())

    def close(self) -> None:
        for file in filter(None, (self._rank_log, self.metrics, self._dllogger, *self._sinks)):
            file.close()
        if warnings.showwarning == self._python_warning:
            warnings.showwarning = self._show_warning
        self._rank_log = self.metrics = self._dllogger = self._errors = None
        self._sinks = []

    def __exit__(self, _, error: BaseException | None, __) -> None:
        """Write the error that ends the rank to errors.log: as one line if stderr has one, else with its traceback.

        The line of an error that this rank alone has is in this rank's log, too.
        """
        if isinstance(error, SystemExit) and (why := why_it_ended(error)):
            self._error(why)
            if isinstance(known := error.__context__, RunError) and known.quiet is False:
                self._note(why)
        elif isinstance(error, Exception):
            self._error("".join(traceback.format_exception(error)))
        self.close()

    # ---- figures ------------------------------------------------------------------------------------------------

    def _line(self) -> Line:
        iterations = tuple(self._since_line) or (self._recent[-1],)  # an evaluation comes after the line of its step
        t, (rates, mfu), done = self.cfg.train, self._rates(iterations), (datetime.now(), self._steps, self._seconds)
        return Line(iterations, t.steps, rates, *done, mfu, self._val_loss, t.seq_len)

    def _rates(self, iterations: Sequence[Iteration]) -> tuple[dict[str, float], float | None]:
        """Compute the mean TFLOP/s per GPU of some steps, by each of the three ways to count, and the MFU."""
        t, m, frozen = self.cfg.train, self.cfg.model, self.cfg.finetune.kind == "lora"
        sizes = []
        for it in iterations:
            tokens = it.batch_size * t.seq_len
            squares = tokens * t.seq_len if it.squared_lengths is None else it.squared_lengths
            sizes.append((tokens - it.padding, squares))
        sequence = flops.hardware(m, t.seq_len, recompute=t.recompute != "none", frozen=frozen)
        share = flops.FROZEN if frozen else 1.0
        operations = {
            "full": share * sum(flops.full(m, *size) for size in sizes),
            "causal": share * sum(flops.causal(m, *size) for size in sizes),
            "hardware": sum(it.batch_size for it in iterations) * sequence,
        }
        seconds = sum(it.seconds for it in iterations)
        rates = {name: flops.tflops_per_gpu(count, seconds, self.world) for name, count in operations.items()}
        return rates, None if self.peak is None else rates["full"] / self.peak

    def _record_step(self, it: Iteration) -> None:
        if self.metrics is None and not self._sinks:
            return
        self._dllog(it.step - 1, log_formats.dllogger_step(it))
        t, (rates, mfu) = self.cfg.train, self._rates([it])
        self.record(
            "step",
            step=it.step,
            consumed_samples=it.consumed_samples,
            batch_size=it.batch_size,
            loss=it.loss,
            grad_norm=it.grad_norm,
            learning_rate=it.lr,
            loss_scale=it.loss_scale,
            step_seconds=it.seconds,
            stall_seconds=it.stall_seconds,
            samples_per_second=it.batch_size / it.seconds,
            tokens_per_second=it.batch_size * t.seq_len / it.seconds,
            tflops=rates,
            mfu=mfu,
            memory_gib=it.memory_gib,
            skipped_total=self._skipped_total,
            nan_total=self._nan_total,
        )

    def _dllog(self, step: int | str, data: dict) -> None:
        if self._dllogger is not None:
            record = log_formats.dllogger(step, _finite(data), datetime.now(), self._begun)
            self._write(self._dllogger, self._dllogger.write, record + "\n")

    # ---- the files ----------------------------------------------------------------------------------------------

    @contextmanager
    def _opening(self, key: str) -> Iterator[None]:
        """Open the file or service of `log.<key>` inside. A failing disk gives a warning; a mistake closes the log."""
        try:
            yield
        except ValueError as error:
            if not (isinstance(cause := error.__cause__, OSError) and cause.errno in FULL):
                self.close()
                raise
            self._warn(f"log.{key}", cause)

    def _open_files(self, folder: Path) -> None:
        fix = "name another directory, or null for none"
        line = lambda error: f"log.dir={self.cfg.log.dir} cannot be written: {error.strerror}; {fix}"
        with errors_as(ValueError, line, OSError):
            self._rank_log = File(folder / f"rank-{self.rank}.log", now=self.rank == 0)
            self._errors, warnings.showwarning = folder / "errors.log", self._python_warning
            if self.rank == 0:
                self.metrics = File(folder / "metrics.jsonl")
                self._dllogger = File(folder / "dllogger.json")
                self._write_config(folder)

    def _write_config(self, folder: Path) -> None:
        self._dllog("PARAMETER", log_formats.flattened(asdict(self.cfg), "cfg"))
        (folder / "config.yaml.new").write_text(to_yaml(self.cfg), encoding="utf-8")
        (folder / "config.yaml.new").replace(folder / "config.yaml")

    def _error(self, text: str) -> None:
        """Append a record to errors.log, in one write. If that fails, this rank's log and stderr still have it."""
        if self._errors is not None:
            record = f"{datetime.now():%Y-%m-%d %H:%M:%S} rank {self.rank}: {text.rstrip()}\n".encode(errors="replace")
            with suppress(OSError), append_to(self._errors) as file:
                file.write(record)

    def _python_warning(self, message, category, filename, lineno, file=None, line=None) -> None:
        self._error(warnings.formatwarning(message, category, filename, lineno, line))
        self._show_warning(message, category, filename, lineno, file, line)

    def _stderr(self, text: str) -> None:
        """Write to stderr at once, since other ranks write there, too. It may be closed, if torchrun has died."""
        with suppress(OSError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def _note(self, text: str) -> None:
        """Write to this rank's log."""
        if self._rank_log is not None:
            now, lost = f"{datetime.now():%Y-%m-%d %H:%M:%S.%f}"[:-3], self._rank_log.lost
            missing = f"{now} rank {self.rank}: {lost} messages before this one are lost: the disk was full or failed\n"
            record = f"{missing if lost else ''}{now} rank {self.rank}: {text}\n"
            self._write(self._rank_log, self._rank_log.write, record)

    def _write(self, sink: File | Sink, write: Callable[..., object], *record: object) -> None:
        """Call write(*record) of a file or another sink. A full or failing disk gives a warning."""
        try:
            write(*record)
        except OSError as error:
            self._warn(sink.path, error)

    def _warn(self, where: Path | str, error: OSError) -> None:
        """Warn once, from rank 0. Other ranks write to the same disk, or count lost messages in their logs."""
        if not self._warned and self.rank == 0:
            self._warned = True
            reason = (error.strerror or str(error)).lower()
            rest = "training goes on, and records are missing in the logs until the disk has space"
            self._stderr(f"warning: {where} cannot be written: {reason}; {rest}")


def _finite(values: dict) -> dict:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
