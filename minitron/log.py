"""What a run writes: an iteration line for people and parsers, a metrics file for tools, one log per rank.

    stdout          the iteration and validation lines of Megatron-LM, from the last rank; messages, from rank 0
    log.dir/
      config.yaml   every key of the run, resolved; `python -m minitron.pretrain config.yaml` repeats it
      metrics.jsonl one JSON object a line, appended by rank 0: {"kind": "run"} at each start, then "step" and "eval"
      rank-3.log    all of that as rank 3 saw it, with the time: where a rank was when a run hung

Every number arrives reduced over the ranks, as a host float, so that all ranks could print it and none communicates or
waits here. Which FLOPs a rate counts is part of its name, see `minitron.flops`: the line of `megatron` prints hardware
TFLOPs, that of `megatron-core` causal ones, MFU is of the full ones, and metrics.jsonl has all three.

A line covers the iterations since the line before, as Megatron's does: the mean loss of those that were not skipped,
the mean time of all, how many were skipped or had a NaN loss. The rest is as it was in the last of them. If the last
was skipped it has no gradient norm, and if all were, no loss: these fields are then left out, again as in Megatron.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from minitron import cli, flops
from minitron.config import Config


@dataclass(frozen=True)
class Iteration:
    """The figures of one optimizer step, of the whole world.

    step: 1 for the first; consumed_samples: this step's included. loss: mean over the counted tokens; grad_norm: before
    clipping; skipped: nothing was updated; nan: the loss is not finite. squared_lengths: sum over the documents of the
    global batch, where they are kept apart (None: every sample is one document). memory_gib: peak of the GPU.
    """

    step: int
    consumed_samples: int
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    seconds: float
    skipped: float = 0
    nan: float = 0
    squared_lengths: float | None = None
    memory_gib: float | None = None

    @property
    def advanced(self) -> bool:
        return not (self.skipped or self.nan)


class Log:
    """The log of one rank of `world`. `close` it at the end, or use it as a context manager.

    device_name: of the GPU, whose peak the MFU is measured by; unknown GPUs, CPUs and fp32 runs have no MFU.
    Raises ValueError if log.dir cannot be written.
    """

    def __init__(self, cfg: Config, rank: int, world: int, device_name: str = "cpu"):
        self.cfg, self.rank, self.world = cfg, rank, world
        fp8 = cfg.precision.fp8 != "none"
        self.peak = None if cfg.precision.dtype == "fp32" else flops.peak_tflops(device_name, fp8)
        self._since_line: list[Iteration] = []
        self._skipped_total = self._nan_total = 0
        self._metrics = None
        self._rank_log = logging.Logger(f"rank {rank}")  # not of logging's global tree: it ends with this object
        if cfg.log.dir is not None:
            self._open(Path(cfg.log.dir).expanduser())

    def start(self, **facts: float | str | None) -> None:
        """The `run` record of metrics.jsonl: what is known before the first step, as the corpus' unigram entropy."""
        self._record("run", world=self.world, **facts)

    def iteration(self, it: Iteration) -> None:
        """Record a step; every log.every steps, and after the last, also print the line. On every rank."""
        self._skipped_total += int(it.skipped)
        self._nan_total += int(it.nan)
        self._since_line.append(it)
        self._record_step(it)
        if it.step % self.cfg.log.every == 0 or it.step == self.cfg.train.steps:
            self._print_from(self.world - 1, self._line())
            self._since_line = []

    def evaluation(self, step: int, loss: float) -> None:
        """Record and print the mean loss on the validation data after `step`."""
        self._record("eval", step=step, loss=loss)
        perplexity = math.exp(min(20.0, loss))  # as Megatron bounds it
        self._print_from(self.world - 1, f" validation loss at iteration {step} | lm loss value: {loss:.6E} | "
                                         f"lm loss PPL: {perplexity:.6E} |")

    def info(self, text: str) -> None:
        """To every rank's log, and to stdout from rank 0."""
        self._print_from(0, text)

    def alarm(self, text: str, traceback: str = "") -> None:
        """To this rank's log and to stderr, from any rank. The traceback goes to stderr only if there is no log."""
        logged = "\n".join(filter(None, (text, traceback)))
        self._rank_log.error(logged)
        sys.stderr.write((text if self._rank_log.handlers else logged) + "\n")  # at once: other ranks write there, too
        sys.stderr.flush()

    def close(self) -> None:
        for handler in list(self._rank_log.handlers):
            handler.close()
            self._rank_log.removeHandler(handler)
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- the line -----------------------------------------------------------------------------------------------

    def _line(self) -> str:
        """The iteration line over `_since_line`, byte for byte as Megatron-LM's but for what we add behind it."""
        its, batch = self._since_line, self.cfg.train.global_batch_size
        last, rates, seconds = its[-1], self._rates(its), sum(it.seconds for it in its) / len(its)
        count = f"iteration {last.step:8d}/{self.cfg.train.steps:8d}"
        samples = f"consumed samples: {last.consumed_samples:12d}"
        if self.cfg.log.format == "megatron":
            fields = [count, samples, f"elapsed time per iteration (s): {seconds:.4f}",
                      f"learning rate: {last.lr:.3E}", *self._common_fields(),
                      f"samples per second: {batch / seconds:.3f}", f"TFLOPs: {rates['hardware']:.2f}"]
        else:
            now = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
            fields = [f"[{now}] {count}", samples, f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
                      f"throughput per GPU (TFLOP/s/GPU): {rates['causal']:.1f}",
                      f"learning rate: {last.lr:.6E}", *self._common_fields()]
        if self.peak is not None:
            fields.append(f"MFU (full): {100 * rates['full'] / self.peak:.2f}%")
        if last.memory_gib is not None:
            fields.append(f"memory: {last.memory_gib:.1f} GiB")
        return " " + " | ".join(fields) + " |"

    def _common_fields(self) -> list[str]:
        its = self._since_line
        losses = [it.loss for it in its if it.advanced]
        fields = [f"global batch size: {self.cfg.train.global_batch_size:5d}"]
        if losses:
            fields.append(f"lm loss: {sum(losses) / len(losses):.6E}")
        fields.append(f"loss scale: {its[-1].loss_scale:.1f}")
        if its[-1].advanced:
            fields.append(f"grad norm: {its[-1].grad_norm:.3f}")
        return [*fields, f"number of skipped iterations: {sum(int(it.skipped) for it in its):3d}",
                f"number of nan iterations: {sum(int(it.nan) for it in its):3d}"]

    def _rates(self, its: list[Iteration]) -> dict[str, float]:
        """Mean TFLOP/s per GPU of some steps, by the three ways to count."""
        t, shape = self.cfg.train, self.cfg.model.shape
        tokens = t.global_batch_size * t.seq_len
        squares = [tokens * t.seq_len if it.squared_lengths is None else it.squared_lengths for it in its]
        sequence = flops.hardware(shape, t.seq_len, recompute=t.recompute == "full")
        operations = {"full": sum(flops.full(shape, tokens, squared) for squared in squares),
                      "causal": sum(flops.causal(shape, tokens, squared) for squared in squares),
                      "hardware": len(its) * t.global_batch_size * sequence}
        seconds = sum(it.seconds for it in its)
        return {name: flops.tflops_per_gpu(count, seconds, self.world) for name, count in operations.items()}

    # ---- the files ----------------------------------------------------------------------------------------------

    def _open(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(folder / f"rank-{self.rank}.log", encoding="utf-8")
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
            self._rank_log.addHandler(handler)
            if self.rank == 0:
                (folder / "config.yaml").write_text(cli.to_yaml(self.cfg), encoding="utf-8")
                self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)
        except OSError as error:
            self.close()
            raise ValueError(f"log.dir={self.cfg.log.dir} cannot be written: {error.strerror}; name another directory, "
                             "or null for none") from None

    def _print_from(self, rank: int, text: str) -> None:
        self._rank_log.info(text)
        if self.rank == rank:
            print(text, file=sys.stdout, flush=True)

    def _record_step(self, it: Iteration) -> None:
        if self._metrics is None:
            return
        t, rates = self.cfg.train, self._rates([it])
        self._record("step", step=it.step, consumed_samples=it.consumed_samples, loss=it.loss, grad_norm=it.grad_norm,
                     learning_rate=it.lr, loss_scale=it.loss_scale, step_seconds=it.seconds,
                     samples_per_second=t.global_batch_size / it.seconds,
                     tokens_per_second=t.global_batch_size * t.seq_len / it.seconds, tflops=rates,
                     mfu=None if self.peak is None else rates["full"] / self.peak, memory_gib=it.memory_gib,
                     skipped_total=self._skipped_total, nan_total=self._nan_total)

    def _record(self, kind: str, **values) -> None:
        """One line of metrics.jsonl, written whole. JSON has no NaN and no infinity: they become null."""
        if self._metrics is not None:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            self._metrics.write(json.dumps({"kind": kind, **finite}, allow_nan=False) + "\n")
