"""How fast a run was: mean step time, TFLOP/s and MFU from the log of a run, be it minitron's, Megatron's or NeMo's.

    python tools/training_metrics.py --file dllogger.json --batch_size 2048 --num_accelerators 256 \\
        --model_type gpt3-175b --accelerator_type h100 --precision fp8
    python tools/training_metrics.py --file job.out --batch_size 96 --num_accelerators 384 \\
        --config configs/gpt3_175b.yaml --accelerator_type a100 --start_step 20 --end_step 50

It reads dllogger.json, the lines of Megatron-LM (seconds or milliseconds) and of NeMo (bars of pretraining, fields
between bars of fine-tuning), says on stderr which it found, and averages the steps from --start_step to --end_step,
both included, as the log numbers them: Megatron from 1, NeMo and DLLogger from 0. --seq_len adds tokens/s and the time
to train on --train_tokens; --config, a configuration of minitron, the MFU in every counting of
minitron/config/flops.py.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.config import cli, flops
from minitron.config.command import Parser, positive, run
from minitron.config.files import parse_json, size_of
from minitron.config.text import printable

# Per sample, forward and backward, as the recipes that name these models count them.
MODEL_FLOPS = {
    "gpt3-5b": 6.69e13,
    "gpt3-175b": 2.2e15,
    "llama2-7b": 1.89e14,
    "llama2-70b": 1.82e15,
    "llama3-70b": 3.94e15,
    "llama3.1-8b": 4.74e14,
    "llama3.1-70b": 3.9129e15,
    "llama3.1-405b": 2.16533e16,
    "mixtral-7b": 3.4e14,
}
# Dense TFLOP/s: (bf16, FP8), as the recipe on GKE has them; OTHERS has what NVIDIA's documents for Slurm take.
MAX_TFLOPS = {
    "h100": (989, 1978),
    "h200": (989, 1978),
    "b200": (2250, 4500),
    "a100": (312, None),
    "v5e": (197, None),
    "v5p": (459, None),
}
OTHERS = {"bf16": "989, and 989.5 for the tables of 70B", "fp8": "1979"}  # of an H100
REPORT_TOKENS = 20_000_000  # of the JUBE benchmark: its metric is the time for so many
LORA_SHARE = 2 / 3  # forward and the gradients of activations; frozen weights have none of their own

PEAKS = f"""\
An MFU is a share of a peak, and the published documents do not agree on that of an H100 or H200, in TFLOP/s:
  bf16         989, as in NVIDIA's recipe on GKE; NVIDIA's documents for Slurm take {OTHERS["bf16"]}
  FP8          1978, as in NVIDIA's recipe on GKE; NVIDIA's documents for Slurm take {OTHERS["fp8"]} in all tables
--accelerator_type takes those of the recipe on GKE; --max_flops gives another.
"""
NOTES = """\
Where the published documents do not agree with their own figures (this tool computes what their formulas say):
  GPT-3 175B   The example with 5.80 s (90,394 tokens/s, 128.04 days) is meant for 5.90 s: 88,862 and 130.25. Its log
               line has 76,800 samples, those of 300 steps, at step 50.
  70B          "8129 x" is 8192. MFU is over 989.5. The 2048-GPU column in bf16 belongs to 14.92 s; 14.98 s are
               2,239,949 tokens/s, 53.19 %, 5.17 days. FP8 has no MFU: 36.17 36.43 35.68 35.62 35.30 34.96 %.
  8B tuning    1.84e14 leaves the attention scores out; with them it is 2.108e14, and 56.38 % reads 64.6 %. The example
               8192 x 128 / 0.9181 should be 4096 x 64. DP is 8, 16, 32. SFT bf16: 116 days are 116.6 (8 GPUs), 397,184
               tokens/s (32) belong to 1.32 s, 1.33 s are 394,202. LoRA bf16 at .924 s: 283,706 tokens/s, 40.8 days.
               LoRA FP8: 36.4 % are 36.46, 771,011 tokens/s belong to .68 s, .69 s are 759,838. The log line's 3,168
               samples are 99 steps of 32, the batch of 8 GPUs, not of the 16 that it is named after.
  GKE          The command takes the bf16 peak for an FP8 run (MFU 0.70); with --precision fp8 it is 0.35.
  JUBE         The TFLOPs it prints are hardware FLOPs: recomputation counts, also the selective one of its jobs, as a
               whole forward pass. Its loss scale of 4096 means fp16, though its JUBE file passes --bf16.
"""

# ---- the logs -------------------------------------------------------------------------------------------------------

NUMBER = r"([+-]?\d*\.?\d+(?:[eE][+-]?\d+)?)"
MEGATRON = re.compile(rf"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \((m?s)\):\s+{NUMBER}")
NEMO_STEP = re.compile(rf"global_step(?:=|: ){NUMBER}")
NEMO_COUNT = re.compile(r"(?:\| |iteration )(\d+)/\d+")
NEMO_SECONDS = re.compile(rf"train_step_timing in s(?:=|: ){NUMBER}")

Step = tuple[int, float]


def dllogger_step(line: str) -> Step | None:
    """(step, seconds) of a record that has both; the parameters have another step, validation no time."""
    _, found, text = line.partition("DLLL ")
    if not found:
        return None
    record = parse_json(text)
    step, data = record.get("step"), record.get("data")
    if not isinstance(step, int) or not isinstance(data, dict) or "train_step_timing in s" not in data:
        return None
    return step, float(data["train_step_timing in s"])


def megatron_step(line: str) -> Step | None:
    if found := MEGATRON.search(line):
        return int(found[1]), float(found[3]) / (1000 if found[2] == "ms" else 1)


def nemo_step(line: str) -> Step | None:
    """Of a bar or of the fields between bars; by its global_step, else by its own count."""
    seconds, step = NEMO_SECONDS.search(line), NEMO_STEP.search(line) or NEMO_COUNT.search(line)
    if seconds and step:
        return int(float(step[1])), float(seconds[1])


READERS: dict[str, Callable[[str], Step | None]] = {
    "DLLogger records": dllogger_step,
    "Megatron lines": megatron_step,
    "NeMo lines": nemo_step,
}


def read_steps(path: Path) -> tuple[str, dict[int, float]]:
    """What kind of lines a log has, and the seconds of each of its steps; of a repeated step, the last.

    Raises ValueError if it cannot be read or has no step.
    """
    try:
        size_of(path)  # a device or a pipe might never end
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()  # a bar ends in a carriage return
    except OSError as error:
        raise ValueError(f"--file {path} cannot be read: {error.strerror}") from None
    for kind, reader in READERS.items():
        steps = {}
        for number, line in enumerate(lines, start=1):
            try:
                found = reader(line)
            except (ValueError, TypeError, AttributeError, OverflowError):
                if number == len(lines):  # which a live run may still be writing
                    continue
                raise ValueError(f"{path}:{number} is a broken record: {line[:60]!r}") from None
            if found is not None:
                steps[found[0]] = found[1]
        if steps:
            return kind, steps
    raise ValueError(
        f"--file {path} holds no step times; it has to be a dllogger.json, or a log with lines of Megatron or NeMo"
    )


def average_step_time(path: Path, start: int, end: int) -> float:
    """Mean seconds of the steps from `start` to `end`. Says on stderr what was found. Raises ValueError."""
    kind, steps = read_steps(path)
    window = [seconds for step, seconds in steps.items() if start <= step <= end]
    if not window:
        raise ValueError(
            f"no step from --start_step {start} to --end_step {end} in {path}, whose {kind} have steps "
            f"{min(steps)} to {max(steps)}"
        )
    if not 0 < sum(window) < math.inf:
        raise ValueError(f"the steps from {start} to {end} in {path} take {sum(window)} s in all: no log of a run")
    note = f"{path}: {kind}, {len(window)} of them from step {start} to {end}"
    first, *rest = sorted(steps)
    gap = rest[0] - first if rest else first
    if kind == "Megatron lines" and gap > 1 and start <= first:
        note += f"; each is a mean over {gap} steps, the first up to {first}: --start_step {first + 1} leaves it out"
    print(printable(note), file=sys.stderr)
    return sum(window) / len(window)


# ---- the arithmetic -------------------------------------------------------------------------------------------------


def tflops(batch_size: int, model_flops: float, step_seconds: float, accelerators: int) -> float:
    """TFLOP/s per accelerator; `model_flops` of one sample."""
    return flops.tflops_per_gpu(batch_size * model_flops, step_seconds, accelerators)


def mfu(batch_size: int, model_flops: float, step_seconds: float, accelerators: int, max_tflops: float) -> float:
    """A fraction."""
    return tflops(batch_size, model_flops, step_seconds, accelerators) / max_tflops


def tokens_per_second(seq_len: int, batch_size: int, step_seconds: float) -> float:
    return seq_len * batch_size / step_seconds


def days_to_train(tokens: float, rate: float) -> float:
    """`rate` in tokens/s."""
    return tokens / rate / 86400


def report_seconds(rate: float) -> float:
    """The metric of the JUBE benchmark."""
    return REPORT_TOKENS / rate


def main(argv: list[str]) -> None:
    o = parse(argv)
    seconds = average_step_time(o.file, o.start_step, o.end_step)

    def utilization(count: float) -> tuple[float, float]:
        return (
            tflops(o.batch_size, count, seconds, o.num_accelerators),
            mfu(o.batch_size, count, seconds, o.num_accelerators, o.max_flops),
        )

    rate, fraction = utilization(o.model_flops)
    if fraction > 1:  # no device does that: an option is another job's
        given = (
            f"--batch_size={o.batch_size}, --num_accelerators={o.num_accelerators}, --accelerator_type and --precision"
        )
        print(f"warning: an MFU of {fraction:.2f} is above 1; check {given}, and --model_type", file=sys.stderr)
    print(o.peak, file=sys.stderr)
    print(f"Average step time: {seconds:.8f}\nTFLOPS/Accelerator: {rate:.8f}\nMFU: {fraction:.8f}")
    for name, count in o.countings.items():
        rate, fraction = utilization(count)
        print(f"MFU ({name}): {fraction:.8f}, {rate:.2f} TFLOPS/Accelerator")
    if o.seq_len is not None:
        rate = tokens_per_second(o.seq_len, o.batch_size, seconds)
        print(f"Tokens/sec: {rate:.2f}\nTokens/sec/Accelerator: {rate / o.num_accelerators:.2f}")
        print(f"Days to train {o.train_tokens:g} tokens: {days_to_train(o.train_tokens, rate):.2f}")
        print(f"Report time ({REPORT_TOKENS:,} tokens): {report_seconds(rate):.2f}")


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; model_flops, max_flops and countings settled. Raises ValueError."""
    parser = Parser(
        description=__doc__,
        epilog=f"{PEAKS}\n{NOTES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--file", type=Path, required=True, help="the log")
    add("--batch_size", type=positive(int), required=True, help="samples per step, of all accelerators")
    add("--num_accelerators", type=positive(int), required=True)
    add("--model_flops", type=positive(float), help="per sample; wins over --model_type, and both over --config")
    add("--model_type", choices=MODEL_FLOPS)
    add("--max_flops", type=positive(float), help="peak of an accelerator, in TFLOP/s; wins over --accelerator_type")
    add("--accelerator_type", choices=MAX_TFLOPS)
    add("--precision", choices=("bf16", "fp8"), default="bf16", help="whose peak counts (default: bf16)")
    add("--start_step", type=int, default=10, help="first step that counts (default: 10)")
    add("--end_step", type=int, default=30, help="last step that counts (default: 30)")
    add("--seq_len", type=positive(int), help="tokens per sample")
    add("--train_tokens", type=positive(float), default=1e12, help="tokens of a whole training (default: 1e12)")
    add("--config", type=Path, help="YAML of minitron: model and sequence length")
    add("--lora", action="store_true", help="LoRA: 2/3 of the operations, for frozen weights have no gradient")
    o = parser.parse_args(argv)
    o.countings, share = {}, LORA_SHARE if o.lora else 1
    if o.config is not None:
        cfg = cli.load([str(o.config)])
        shape, recompute = cfg.model, cfg.train.recompute != "none"
        o.seq_len = o.seq_len or cfg.train.seq_len
        o.countings = {
            "full": share * flops.full(shape, o.seq_len),
            "causal": share * flops.causal(shape, o.seq_len),
            "hardware": flops.hardware(shape, o.seq_len, recompute=recompute, frozen=o.lora),
        }
    given = o.model_flops or MODEL_FLOPS.get(o.model_type)
    o.model_flops = given * share if given else o.countings.get("full")
    if o.model_flops is None:
        raise ValueError("what a sample costs is missing; give --model_type, --model_flops or --config")
    of = "of --max_flops"
    if o.max_flops is None:
        of = f"the {o.precision} peak of {o.accelerator_type} in NVIDIA's recipe on GKE"
        if o.accelerator_type in ("h100", "h200"):
            of += f"; NVIDIA's documents for Slurm take {OTHERS[o.precision]} (--max_flops)"
    o.max_flops = o.max_flops or MAX_TFLOPS.get(o.accelerator_type, (None, None))[o.precision == "fp8"]
    if o.max_flops is None:
        raise ValueError(
            f"the {o.precision} peak of {o.accelerator_type or 'the accelerator'} is not known; give "
            "--accelerator_type or --max_flops"
        )
    o.peak = f"MFU is over {o.max_flops:g} TFLOP/s, {of}"
    return o


if __name__ == "__main__":
    run(main)
