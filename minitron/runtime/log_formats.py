"""The iteration line and the step record, in the forms that other systems' users, dashboards and parsers read.

    megatron        Megatron-LM with BigScience's TFLOPs; what the JUBE benchmark reads
    megatron-core   Megatron-LM today: a date, milliseconds, causal TFLOPs
    nemo            NeMo: a progress bar when pretraining, fields between bars when fine-tuning
    short           for people (log.style): at most 100 columns, and columns that stay in place
    dllogger.json   NVIDIA DLLogger: "DLLL " and one JSON object a step

Every function is pure: a `Line` holds the figures of a line, and tests/runtime/test_log.py parses each form with the
patterns of the system that it imitates. NeMo and DLLogger count steps from 0 (`global_step` 49 is iteration 50, and
`consumed_samples` are those of 50 steps), Megatron from 1; so do we in their forms.

Figures that a step does not have are left out, as in those systems: a skipped step has no gradient norm.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime

from tqdm import tqdm

NEMO_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


@dataclass(frozen=True)
class Iteration:
    """The figures of one optimizer step, of the whole world.

    step: 1 for the first; consumed_samples: this step's included. batch_size: samples of this step. loss: mean over the
    counted tokens; grad_norm: before clipping; skipped: nothing was updated; nan: the loss is not finite.
    squared_lengths: sum over the documents of the global batch without padding, if they are kept apart (None: every
    sample is one document). padding: positions that only fill a sample. memory_gib: the GPU's peak. allocated_gib: what
    stays allocated between steps. stall_seconds: the part of the step's time in which it waited for a save.
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
    padding: float = 0
    memory_gib: float | None = None
    allocated_gib: float | None = None
    stall_seconds: float = 0.0
    batch_size: int = field(kw_only=True)

    @property
    def advanced(self) -> bool:
        return not (self.skipped or self.nan)


@dataclass(frozen=True)
class Line:
    """The figures of an iteration line. iterations: the steps since the line before.

    steps: those of the whole run; this process has done `done` in `elapsed` seconds. tflops: per GPU, for each way to
    count (full, causal, hardware). mfu: a fraction. val_loss: the last evaluation's. seq_len: tokens per sample.
    """

    iterations: tuple[Iteration, ...]
    steps: int
    tflops: dict[str, float]
    now: datetime
    done: int
    elapsed: float
    mfu: float | None = None
    val_loss: float | None = None
    seq_len: int = 0

    @property
    def last(self) -> Iteration:
        return self.iterations[-1]

    @property
    def samples_per_second(self) -> float:
        return sum(it.batch_size for it in self.iterations) / sum(it.seconds for it in self.iterations)

    @property
    def seconds(self) -> float:
        return sum(it.seconds for it in self.iterations) / len(self.iterations)

    @property
    def loss(self) -> float | None:
        """Mean over the steps that were not skipped and had a finite loss; None without any."""
        losses = [it.loss for it in self.iterations if it.advanced]
        return sum(losses) / len(losses) if losses else None


def megatron(line: Line) -> str:
    """Format with seconds and hardware TFLOPs; MFU and memory follow after Megatron's fields."""
    return _fields(
        _progress(line),
        f"elapsed time per iteration (s): {line.seconds:.4f}",
        f"learning rate: {line.last.lr:.3E}",
        *_common(line),
        f"samples per second: {line.samples_per_second:.3f}",
        f"TFLOPs: {line.tflops['hardware']:.2f}",
        *_added(line),
    )


def megatron_core(line: Line) -> str:
    """Format with the date, milliseconds and causal TFLOPs; MFU and memory follow after Megatron's fields."""
    return _fields(
        f"[{line.now:%Y-%m-%d %H:%M:%S.%f}] {_progress(line)}",
        f"elapsed time per iteration (ms): {line.seconds * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {line.tflops['causal']:.1f}",
        f"learning rate: {line.last.lr:.6E}",
        *_common(line),
        *_added(line),
    )


def nemo_bar(line: Line) -> str:
    """Draw NeMo's bar after the step. NeMo redraws one line; here each step has a line."""
    figures = {
        "reduced_train_loss": line.loss,
        "global_step": line.last.step - 1.0,
        "consumed_samples": float(line.last.consumed_samples),
        "train_step_timing in s": line.seconds,
        "val_loss": line.val_loss,
    }
    postfix = ", ".join(f"{name}={_padded(x)}" for name, x in figures.items() if x is not None)
    step, style = line.last.step, dict(prefix="Epoch 0: ", postfix=postfix, bar_format=NEMO_BAR)
    return tqdm.format_meter(step, line.steps, line.elapsed, initial=step - line.done, **style)


def nemo_pipe(line: Line) -> str:
    """Format NeMo's line of fine-tuning: values with four digits, whole ones as integers, memory in bytes."""
    last = line.last
    figures = {
        "lr": last.lr,
        "global_batch_size": last.batch_size,
        "global_step": last.step - 1,
        "peak_memory_usage": _bytes(last.memory_gib),
        "memory_allocated": _bytes(last.allocated_gib),
        "reduced_train_loss": line.loss,
        "train_step_timing in s": line.seconds,
        "consumed_samples": last.consumed_samples,
        "val_loss": line.val_loss,
    }
    shown = {name: int(x) if float(x).is_integer() else format(x, ".4") for name, x in figures.items() if x is not None}
    start = f"Training epoch 0, iteration {last.step - 1}/{line.steps - 1}"
    return " | ".join([start, *(f"{name}: {x}" for name, x in shown.items())])


def short(line: Line) -> str:
    """Format for people: the progress, the loss, the speed, and when the last step will be done."""
    step, skipped = line.last.step, sum(not it.advanced for it in line.iterations)
    left = (line.steps - step) * line.elapsed / line.done
    fields = (
        f"step {step:{len(str(line.steps))}d}/{line.steps}",
        None if line.loss is None else f"loss {line.loss:#7.5g}",
        f"skipped {skipped}" if skipped else None,
        f"{tqdm.format_sizeof(line.samples_per_second * line.seq_len):>5} tok/s",
        None if line.mfu is None else f"MFU {100 * line.mfu:.1f}%",
        None if line.last.memory_gib is None else f"{line.last.memory_gib:.1f} GiB",
        f"{left / 86400:.1f}d left" if left > 86400 else f"{tqdm.format_interval(left)} left",
    )
    return "  ".join(filter(None, fields))


FORMATS = {"megatron": megatron, "megatron-core": megatron_core, "nemo": nemo_bar, "nemo pipe": nemo_pipe}


def dllogger(step: int | str, data: dict, now: datetime, begun: datetime) -> str:
    """Write a record of dllogger.json. data: without NaN. step: "PARAMETER" for the keys of the run."""
    record = {
        "timestamp": f"{now.timestamp():.6f}",
        "datetime": f"{now:%Y-%m-%d %H:%M:%S.%f}",
        "elapsedtime": f"{(now - begun).total_seconds():.6f}",
    }
    return "DLLL " + json.dumps(record | {"type": "LOG", "step": step, "data": data}, allow_nan=False)


def dllogger_step(it: Iteration) -> dict:
    """Return the data of a step under NeMo's names. NeMo's backward timer is always 0: the step's time includes it."""
    return {
        "reduced_train_loss": it.loss,
        "lr": it.lr,
        "global_step": it.step - 1,
        "consumed_samples": it.consumed_samples,
        "train_backward_timing in s": 0.0,
        "grad_norm": it.grad_norm,
        "train_step_timing in s": it.seconds,
        "epoch": 0,
    }


def flattened(tree: dict, prefix: str) -> dict:
    """Give nested names one level: {"a": {"b": 1}} -> {"prefix/a/b": 1}."""
    flat = {}
    for name, value in tree.items():
        flat |= flattened(value, f"{prefix}/{name}") if isinstance(value, dict) else {f"{prefix}/{name}": value}
    return flat


# ---- the parts --------------------------------------------------------------------------------------------------


def _fields(*fields: str | None) -> str:
    return " " + " | ".join(field for field in fields if field is not None) + " |"


def _progress(line: Line) -> str:
    return f"iteration {line.last.step:8d}/{line.steps:8d} | consumed samples: {line.last.consumed_samples:12d}"


def _common(line: Line) -> list[str | None]:
    return [
        f"global batch size: {line.last.batch_size:5d}",
        None if line.loss is None else f"lm loss: {line.loss:.6E}",
        f"loss scale: {line.last.loss_scale:.1f}",
        f"grad norm: {line.last.grad_norm:.3f}" if line.last.advanced else None,
        f"number of skipped iterations: {sum(int(it.skipped) for it in line.iterations):3d}",
        f"number of nan iterations: {sum(int(it.nan) for it in line.iterations):3d}",
    ]


def _added(line: Line) -> list[str | None]:
    return [
        None if line.mfu is None else f"MFU (full): {100 * line.mfu:.2f}%",
        None if line.last.memory_gib is None else f"memory: {line.last.memory_gib:.1f} GiB",
    ]


def _padded(x: float) -> str:
    """Write a number as Lightning does in its bar: tqdm's short form, filled up with zeros to five characters."""
    text = tqdm.format_num(x)
    if not text.lstrip("-").replace(".", "", 1).isdigit():  # 1.23e+6, nan
        return text
    return (text if "." in text else text + ".").ljust(5, "0")


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else round(gib * 2**30)
