"""The bytes that a run writes: Megatron's lines, metrics.jsonl, config.yaml, the log of each rank."""

import errno
import io
import json
import math
import os
import re
import resource
import sys
import time
import warnings
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import pytest

from failing_disk import ERRNOS, FailingDisk
from minitron import pretrain
from minitron.config import cli, flops
from minitron.config.schema import changed
from minitron.runtime import log_formats as forms
from minitron.runtime import sinks
from minitron.runtime.log import Log
from minitron.runtime.log_formats import Iteration, Line
from minitron.runtime.sinks import File
from minitron.runtime.startup import Startup
from minitron.runtime.status import LOST, RanksLost, RunError

# A line of a 175B run on 96 nodes of 4 A100 (JUWELS Booster), as it was published.
PUBLISHED = (
    " iteration       10/ 3125000 | consumed samples:          960 | elapsed time per iteration (s): 7.2310 | "
    "learning rate: 4.438E-07 | global batch size:    96 | lm loss: 1.010967E+01 | loss scale: 4096.0 | "
    "grad norm: 178.553 | number of skipped iterations:   0 | number of nan iterations:   0 | "
    "samples per second: 13.276 | TFLOPs: 101.54 |"
)
GPT_175B = [
    "model.family=gpt",
    "model.num_layers=96",
    "model.hidden_size=12288",
    "model.ffn_hidden_size=49152",
    "model.num_heads=96",
    "model.num_kv_heads=null",
    "model.vocab_size=50257",
    "model.vocab_multiple=1024",
    "train.seq_len=2048",
    "train.global_batch_size=96",
    "train.steps=3125000",
    "train.recompute=full",
]
STEP = Iteration(
    step=10,
    consumed_samples=960,
    batch_size=96,
    loss=10.10967,
    grad_norm=178.553,
    lr=4.438e-7,
    loss_scale=4096.0,
    seconds=7.2310,
)


def lines(argv: list[str], iterations: list[Iteration], rank: int = 383, world: int = 384, **kwargs) -> list[str]:
    """What `rank` prints."""
    out = io.StringIO()
    with redirect_stdout(out), Log(cfg := cli.load(argv), rank, world, **kwargs) as log:
        for it in iterations:
            log.iteration(replace(it, batch_size=cfg.train.global_batch_size))
    return out.getvalue().splitlines()


def test_megatron_line_is_the_published_one():
    assert lines([*GPT_175B, "log.every=10"], [STEP]) == [PUBLISHED]


@pytest.mark.parametrize("form, rate", [("megatron", r"TFLOPs: (\S+)"), ("megatron-core", r"TFLOP/s/GPU\): (\S+)")])
def test_a_line_of_several_steps_has_their_mean_rate(form, rate):
    """Steps of 5 and 15 seconds compute as much together as two of 10 seconds."""
    argv = [*GPT_175B, "log.every=2", f"log.format={form}"]
    uneven, even = (
        lines(argv, [replace(STEP, step=9 + i, seconds=seconds) for i, seconds in enumerate(pair)])
        for pair in ((5.0, 15.0), (10.0, 10.0))
    )
    (one,) = lines([*argv, "log.every=1"], [replace(STEP, seconds=10.0)])
    assert len(uneven) == len(even) == 1
    assert len({re.search(rate, line)[1] for line in (uneven[0], even[0], one)}) == 1


def test_a_line_of_steps_of_several_sizes_has_their_samples_by_their_time():
    its = [replace(STEP, batch_size=size, seconds=seconds) for size, seconds in ((4, 1.0), (16, 2.0), (4, 3.0))]
    line = Line(tuple(its), 10, {"hardware": 1.0}, datetime.now(), 3, 6.0)
    assert (line.samples_per_second, line.seconds) == (24 / 6.0, 2.0)
    assert "(s): 2.0000 |" in forms.megatron(line) and "samples per second: 4.000 |" in forms.megatron(line)


def test_megatron_line_feeds_jube():
    """The three patterns of the JUBE job, as they are there with JUBE's $jube_pat_int and $jube_pat_fp."""
    integer, number = r"([+-]?\d+)", r"([+-]?\d*\.?\d+(?:[eE][-+]?\d+)?)"
    (line,) = lines(GPT_175B, [STEP])
    for pattern, values in (
        (rf"iteration\s+{integer}/\s*{integer}", ("10", "3125000")),
        (rf"TFLOPs:\s+{number}", ("101.54",)),
        (rf"elapsed time per iteration \(s\):\s+{number}", ("7.2310",)),
    ):
        assert re.search(pattern, line).groups() == values


def test_megatron_core_line():
    cfg = [*GPT_175B, "log.format=megatron-core"]
    (line,) = lines(cfg, [STEP])
    causal = flops.tflops_per_gpu(96 * flops.causal(cli.load(cfg).model, 2048), 7.2310, 384)
    stamp, rest = line[:29], line[29:]
    assert re.fullmatch(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\]", stamp)
    assert rest == (
        " iteration       10/ 3125000 | consumed samples:          960 | "
        f"elapsed time per iteration (ms): 7231.0 | throughput per GPU (TFLOP/s/GPU): {causal:.1f} | "
        "learning rate: 4.438000E-07 | global batch size:    96 | lm loss: 1.010967E+01 | "
        "loss scale: 4096.0 | grad norm: 178.553 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )


def test_megatron_core_line_feeds_its_readers():
    (line,) = lines([*GPT_175B, "log.format=megatron-core"], [STEP])
    causal = flops.tflops_per_gpu(96 * flops.causal(cli.load(GPT_175B).model, 2048), 7.2310, 384)
    for pattern, value in (
        (r"iteration\s+(\d+)/", 10),
        (r"throughput per GPU \(TFLOP/s/GPU\): (\d+\.\d)", causal),
        (r"elapsed time per iteration \(ms\): (\d+\.\d)", 7231.0),
        (r"lm loss: (\S+)", 10.10967),
    ):
        assert float(re.search(pattern, line)[1]) == pytest.approx(value, abs=0.05)


def test_a_short_line_has_the_figures_of_its_steps_in_100_columns():
    """Two steps of a long run, one of them skipped: progress, loss, speed, and the time of the steps that are left."""
    argv, step = [*GPT_175B, "train.global_batch_size=512", "log.every=2", "log.style=short"], 1_000_000
    figures = replace(STEP, seconds=40.0, memory_gib=139.94, loss=10.87431)
    its = [replace(figures, step=step - 1), replace(figures, step=step, skipped=1.0, loss=float("nan"))]
    for steps in (step + 1000, 10_000_000):
        (line,) = lines([*argv, f"train.steps={steps}"], its, device_name="NVIDIA H100")
        form = r"step +(\d+)/(\d+)  loss +(\S+)  skipped 1  (\S+)k tok/s  MFU (\S+)%  139.9 GiB  (\S+) left"
        *counts, loss, tokens, mfu, left = re.fullmatch(form, line).groups()
        assert len(line) <= 100 and [int(x) for x in counts] == [step, steps]
        assert float(loss) == pytest.approx(10.87431, rel=1e-4) and 0 < float(mfu) < 100
        assert float(tokens) * 1e3 == pytest.approx(512 * 2048 / 40, rel=1e-2)
        if left.endswith("d"):
            seconds = float(left[:-1]) * 86400
        else:
            seconds = sum(60**i * int(part) for i, part in enumerate(reversed(left.split(":"))))
        assert seconds == pytest.approx((steps - step) * 40, rel=1e-3)
    (line,) = lines([*argv, "log.every=1"], [STEP])  # on a CPU
    assert "MFU" not in line and "GiB" not in line and "skipped" not in line


def test_a_short_line_is_no_form_of_another_system():
    with pytest.raises(ValueError, match=r"log\.style=short .*log\.format"):
        pretrain.rules.check(cli.load(["log.style=short", "log.format=nemo"]), 1)


# The bar of NVIDIA's 70B recipe and a line of NeMo's fine-tuning, as they were published.
BAR = (
    "Epoch 0: : 100%|██████████| 100/100 [20:15<00:00, reduced_train_loss=6.370, global_step=99.00, "
    "consumed_samples=12800.0, train_step_timing in s=11.20]"
)
PIPE = (
    "Training epoch 0, iteration 49/49 | lr: 7.496e-06 | global_batch_size: 128 | global_step: 49 | "
    "peak_memory_usage: 70833405952 | memory_allocated: 44271689728 | reduced_train_loss: 11.96 | "
    "train_step_timing in s: 12.39 | consumed_samples: 6400"
)


def line_of(step: int, steps: int, seconds: float, elapsed: float, **known) -> Line:
    it = replace(STEP, step=step, consumed_samples=128 * step, batch_size=128, seconds=seconds, **known)
    return Line((it,), steps, {}, datetime.now(), done=step, elapsed=elapsed)


def test_nemo_s_lines_are_the_published_ones():
    last = line_of(100, 100, 11.2, 20 * 60 + 15, loss=6.37)
    assert forms.nemo_bar(last) == BAR
    gib = {"memory_gib": 70833405952 / 2**30, "allocated_gib": 44271689728 / 2**30}
    assert forms.nemo_pipe(line_of(50, 50, 12.394, 600, loss=11.9618, lr=7.4963e-6, **gib)) == PIPE
    assert forms.nemo_bar(replace(last, val_loss=6.25)) == BAR[:-1] + ", val_loss=6.250]"
    lost = replace(last, iterations=(replace(last.last, skipped=1.0, loss=math.nan),))
    assert "reduced_train_loss" not in forms.nemo_bar(lost) + forms.nemo_pipe(lost)
    assert forms.nemo_pipe(replace(last, val_loss=math.nan)).endswith(" | val_loss: nan")
    half = replace(line_of(60, 100, 2.0, 20.0), done=10)  # resumed after step 50: 40 to go, 2 s each
    assert forms.nemo_bar(half).startswith("Epoch 0: :  60%|██████    | 60/100 [00:20<01:20, ")


def test_nemo_s_lines_feed_their_readers():
    """The patterns that tools around NeMo look for, with what they make of our lines."""
    cfg = ["log.format=nemo", "train.steps=50"]
    it = replace(STEP, step=50, consumed_samples=6400, seconds=5.9)
    (bar,), (pipe,) = lines(cfg, [it], 0, 1), lines([*cfg, "finetune.kind=sft"], [it], 0, 1)
    assert re.search(r"train_step_timing in s=([\d\.]+)", bar)[1] == "5.900"
    found = re.match(
        r"Training epoch (\d+), iteration (\d+)/(\d+) \| lr: \S+ \| global_batch_size: (\d+) \| "
        r"global_step: (\d+) \| reduced_train_loss: [\d.]+ \| train_step_timing in s: ([\d.]+)",
        pipe,
    )
    assert found.groups() == ("0", "49", "49", "16", "49", "5.9")


def test_a_bar_on_a_terminal_without_its_blocks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    with Log(cli.load(["log.format=nemo"]), 0, 1) as log:
        log.iteration(STEP)
    assert re.search(rb"\?   *\| 10/300 \[.*train_step_timing in s=7.230\]", raw.getvalue())


def test_a_line_is_one_write_so_that_those_of_ranks_do_not_mix(monkeypatch):
    """torchrun starts ranks with `-u`: then each write reaches the terminal by itself."""
    writes = []
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True))
    monkeypatch.setattr(sys.stdout, "write", writes.append, raising=False)
    with Log(cli.load([]), 0, 1) as log:
        log.info("a line")
    assert writes == ["a line\n"]


def test_line_covers_the_iterations_since_the_last():
    inf = math.inf
    its = [
        replace(STEP, step=1, loss=4.0, seconds=1.0),
        replace(STEP, step=2, loss=inf, grad_norm=inf, seconds=3.0, skipped=1),
        replace(STEP, step=3, loss=math.nan, grad_norm=math.nan, seconds=2.0, skipped=1, nan=1),
        replace(STEP, step=4, loss=2.0, seconds=2.0, lr=1e-3),
        replace(STEP, step=5, loss=1.0, skipped=1),
        replace(STEP, step=6, loss=1.0, skipped=1),
        replace(STEP, step=7, loss=7.0),
    ]
    first, second = lines(["log.every=4"], its, 0, 1) + lines(["log.every=2"], its, 0, 1)[2:3]
    mean = (4.0 + 2.0) / 2
    assert f"| lm loss: {mean:.6E} |" in first and "elapsed time per iteration (s): 2.0000 |" in first
    assert "skipped iterations:   2 | number of nan iterations:   1 |" in first
    assert "learning rate: 1.000E-03 |" in first and "grad norm: 178.553 |" in first
    assert "lm loss" not in second and "grad norm" not in second  # Megatron leaves out what nobody has
    assert "skipped iterations:   2 | number of nan iterations:   0 |" in second


def test_skipped_steps_and_those_without_a_loss_are_counted_apart(tmp_path):
    """Two of four steps are skipped, then one has a loss of NaN."""
    its = [replace(STEP, step=i, loss=float(i), skipped=float(i < 3)) for i in range(1, 5)]
    its[2] = replace(its[2], loss=math.nan, nan=1.0)
    (line,) = lines(["log.every=4", f"log.dir={tmp_path}"], its, 0, 1)
    counts = r"lm loss: 4\.0\S*E\+00 .* skipped iterations: +2 \| number of nan iterations: +1 "
    assert re.search(counts, line)
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["skipped_total"], row["nan_total"]) for row in rows] == [(1, 0), (2, 0), (2, 1), (2, 1)]
    (line,) = lines(["log.every=4", "log.style=short"], its, 0, 1)
    assert "  skipped 3  " in line and float(line.split("loss")[1].split()[0]) == 4.0
    assert "grad norm" not in lines(["log.every=3"], its, 0, 1)[0]


def test_mfu_and_memory_follow_the_line():
    it = replace(STEP, memory_gib=70.04)
    shape = cli.load(GPT_175B).model
    for extra, peak in ([], 989.0), (["precision.fp8=current"], 1979.0), (["precision.fp8=delayed"], 1979.0):
        (line,) = lines(GPT_175B + extra, [it], device_name="NVIDIA H100 80GB HBM3")
        mfu = 100 * flops.tflops_per_gpu(96 * flops.full(shape, 2048), 7.2310, 384) / peak
        assert line == f"{PUBLISHED} MFU (full): {mfu:.2f}% | memory: 70.0 GiB |"
    assert lines([*GPT_175B, "precision.dtype=fp32"], [STEP], device_name="NVIDIA H100 80GB HBM3") == [PUBLISHED]


def test_mfu_of_packed_lora():
    """Two thirds of the operations of the documents, none of the padding; so in the mean of the last 20 steps."""
    out, argv = io.StringIO(), ["finetune.kind=lora", "train.seq_len=64"]
    cfg = cli.load(argv)
    its = [
        replace(
            STEP,
            step=i,
            batch_size=16,
            seconds=(9.0 if i < 4 else 0.5 + i / 100) / 1e4,  # so fast that two digits show the MFU of a toy
            squared_lengths=16 * 2 * 30**2,
            padding=64,
        )
        for i in range(24)
    ]
    with redirect_stdout(out), Log(cfg, 0, 1, device_name="NVIDIA H200") as log:
        for it in its:
            log.iteration(it)
        log.summary()
    *_, line, summary = out.getvalue().splitlines()
    operations = 2 / 3 * 16 * 2 * flops.full(cfg.model, 30)  # two documents of 30 tokens a sample of 64
    assert f"MFU (full): {100 * operations / its[-1].seconds / 989e12:.2f}%" in line
    mean = sum(it.seconds for it in its[-20:]) / 20
    assert summary == (
        f"mean of the last 20 steps: train_step_timing in s: {mean:.4f}, tokens per second: "
        f"{16 * 64 / mean:.0f}, MFU (full): {100 * operations / mean / 989e12:.2f}%"
    )


def test_a_summary_counts_the_samples_of_each_step(capsys):
    """As after a ramp."""
    with Log(cli.load(["train.seq_len=64", "train.global_batch_size=16"]), 0, 1) as log:
        for step, size in enumerate((4, 8, 16), start=1):
            log.iteration(replace(STEP, step=step, batch_size=size, seconds=2.0))
        log.summary()
    assert f"tokens per second: {(4 + 8 + 16) * 64 / 6:.0f}" in capsys.readouterr().out


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tuned", [[], ["finetune.kind=lora"]])
def test_rates_of_recomputation_and_of_frozen_weights(tmp_path, recompute, tuned):
    """Selective recomputation counts as a whole forward; of frozen weights two of three products are left."""
    cfg = cli.load([f"log.dir={tmp_path}", "train.seq_len=64", f"train.recompute={recompute}", *tuned])
    with Log(cfg, 0, 2) as log:
        log.iteration(replace(STEP, batch_size=16, seconds=0.5))
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    m, share = cfg.model, 2 / 3 if tuned else 1
    hardware = flops.hardware(m, 64, recompute=recompute != "none", frozen=bool(tuned))
    operations = {"full": share * flops.full(m, 64), "causal": share * flops.causal(m, 64), "hardware": hardware}
    assert row["tflops"] == pytest.approx({name: 16 * count / 0.5 / 2 / 1e12 for name, count in operations.items()})


def test_a_short_line_tells_the_time_left_by_all_steps_of_this_start():
    argv = ["train.steps=110", "log.style=short"]
    *_, line = lines(argv, [replace(STEP, step=9, seconds=30.0), replace(STEP, seconds=10.0)], 0, 1)
    assert line.endswith(" 33:20 left")  # 100 steps of 20 s


def test_a_loss_beyond_any_perplexity_is_printed(capsys):
    with Log(cli.load([]), 0, 1) as log:
        log.evaluation(10, 800.0)
    assert f"lm loss value: 8.000000E+02 | lm loss PPL: {math.exp(20.0):.6E} |" in capsys.readouterr().out


def test_who_prints_what():
    def run(rank: int) -> str:
        out = io.StringIO()
        with redirect_stdout(out), Log(cli.load([]), rank, 3) as log:
            log.info("hello")
            log.iteration(STEP)
            log.evaluation(10, 3.124512)
        return out.getvalue()

    assert run(0) == "hello\n" and run(1) == ""
    line, validation = run(2).splitlines()
    assert line.startswith(" iteration       10/     300 |")
    assert validation == (
        f" validation loss at iteration 10 | lm loss value: 3.124512E+00 | lm loss PPL: {math.exp(3.124512):.6E} |"
    )


def test_nemo_s_bar_ends_with_the_loss_of_the_evaluation():
    """Of the step before it, whose bar is there already, and of several that have none yet."""
    for every, bars in (1, 4), (2, 3):
        out = io.StringIO()
        cfg = cli.load(["log.format=nemo", "train.steps=3", f"log.every={every}"])
        with redirect_stdout(out), Log(cfg, 0, 1) as log:
            for step in (1, 2, 3):
                log.iteration(replace(STEP, step=step, seconds=float(step)))
            log.evaluation(3, 6.25)
        *before, last = out.getvalue().splitlines()
        assert len(before) + 1 == bars and not any("val_loss" in bar for bar in before)
        assert last.startswith("Epoch 0: : 100%") and last.endswith(", train_step_timing in s=3.000, val_loss=6.250]")
    assert lines(["log.format=nemo", "finetune.kind=sft"], [STEP], 0, 1)[0].endswith("consumed_samples: 960")


def test_nemo_s_line_carries_the_last_validation_loss():
    out = io.StringIO()
    with redirect_stdout(out), Log(cli.load(["log.format=nemo"]), 0, 1) as log:
        log.iteration(STEP)
        for step, loss in (10, 3.5), (11, 3.25):
            log.evaluation(step, loss)
        log.iteration(replace(STEP, step=11))
    before, *_, after = (line for line in out.getvalue().splitlines() if "reduced_train_loss" in line)
    assert "val_loss" not in before and after.endswith("val_loss=3.250]")


def test_files(tmp_path, capsys):
    folder = tmp_path / "run"
    cfg = cli.load([f"log.dir={folder}", "log.every=100", "precision.dtype=bf16", "train.seq_len=64"])
    its = [
        replace(STEP, step=1, loss=4.0, seconds=0.5, stall_seconds=0.125),
        replace(
            STEP,
            step=2,
            loss=math.nan,
            grad_norm=math.inf,
            skipped=1.0,
            nan=1.0,
            memory_gib=3.5,
            squared_lengths=16 * 2 * 32**2,
        ),
    ]
    before = time.time()
    for rank in (1, 0):
        with Log(cfg, rank, 2, device_name="NVIDIA H200") as log:
            log.record("run", world=log.world, unigram_entropy=6.5)
            for it in its:
                log.iteration(replace(it, batch_size=16))
            log.evaluation(2, 3.5, 0.25)
            log.info("100 % done")
    assert cli.load([str(folder / "config.yaml")]) == cfg
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [row.pop("time") for row in rows]
    assert times == sorted(times) and before <= times[0] and times[-1] <= time.time()
    run, first, second, evaluation = rows
    assert run == {"kind": "run", "world": 2, "unigram_entropy": 6.5}
    assert evaluation == {"kind": "eval", "step": 2, "loss": 3.5, "seconds": 0.25}

    shape, tokens = cfg.model, 16 * 64
    full, causal, hardware = (
        16 * count / 0.5 / 2 / 1e12
        for count in (flops.full(shape, 64), flops.causal(shape, 64), flops.hardware(shape, 64, recompute=False))
    )
    assert first == {
        "kind": "step",
        "step": 1,
        "consumed_samples": 960,
        "batch_size": 16,
        "loss": 4.0,
        "grad_norm": 178.553,
        "learning_rate": 4.438e-7,
        "loss_scale": 4096.0,
        "step_seconds": 0.5,
        "stall_seconds": 0.125,
        "samples_per_second": 16 / 0.5,
        "tokens_per_second": tokens / 0.5,
        "memory_gib": None,
        "skipped_total": 0,
        "nan_total": 0,
        "mfu": pytest.approx(full / 989.0),
        "tflops": pytest.approx({"full": full, "causal": causal, "hardware": hardware}),
    }
    assert (second["loss"], second["grad_norm"], second["skipped_total"], second["nan_total"]) == (None, None, 1, 1)
    packed = 16 * 2 * flops.full(shape, 32) / 7.2310 / 2 / 1e12  # every sample holds two documents of 32
    assert second["tflops"]["full"] == pytest.approx(packed) and second["memory_gib"] == 3.5

    messages, figures = (folder / "rank-0.log").read_text(), (folder / "rank-1.log").read_text()
    assert re.search(r"^\d{4}-\d\d-\d\d \S+ rank 0: 100 % done$", messages, re.M) and "validation loss" not in messages
    assert "100 % done" not in figures and "rank 1:  validation loss" in figures
    assert capsys.readouterr().out.count("100 % done") == 1


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_prints_nothing_has_a_log_only_of_its_own_alarms(tmp_path, capsys, rank):
    """Not even the folder is made by every rank: there are thousands, and all start at once."""
    folder = tmp_path / "run"
    with Log(cli.load([f"log.dir={folder}"]), rank, 4) as log:
        log.iteration(STEP)
        log.evaluation(10, 1.0)
        log.info("of all ranks")
        log.warn("of all ranks")
        assert not folder.exists() and not any(capsys.readouterr())
        log.alarm("of this rank", "its traceback")
        log.info("as well", rank)
    text = (folder / f"rank-{rank}.log").read_text()
    stamp = r"\d{4}-\d\d-\d\d \S+"
    assert re.fullmatch(rf"{stamp} rank {rank}: of this rank\nits traceback\n{stamp} rank {rank}: as well\n", text)
    assert "of this rank\nits traceback" in (folder / "errors.log").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["errors.log", f"rank-{rank}.log"]


def dllogger_records(path) -> list[dict]:
    """What a reader of DLLogger's files sees."""
    text = path.read_text().splitlines()
    assert all(line.startswith("DLLL ") for line in text)
    return [json.loads(line.removeprefix("DLLL "), parse_constant=pytest.fail) for line in text]


def test_dllogger(tmp_path):
    its = [replace(STEP, step=48, consumed_samples=98304, seconds=25.1), replace(STEP, step=49, loss=math.nan, nan=1.0)]
    lines([f"log.dir={tmp_path}", "parallel.layers_per_stage=[1,3]"], its, 0, 1)
    parameters, first, second = dllogger_records(tmp_path / "dllogger.json")
    assert parameters["step"] == "PARAMETER"
    cfg = cli.load([str(tmp_path / "config.yaml")])
    tree = {f"cfg/{section}/{key}": value for section, keys in asdict(cfg).items() for key, value in keys.items()}
    assert parameters["data"] == json.loads(json.dumps(tree))
    # The keys, in the order of the published record.
    assert list(first) == ["timestamp", "datetime", "elapsedtime", "type", "step", "data"]
    assert first["type"] == "LOG" and first["step"] == 47
    assert first["data"] == {
        "reduced_train_loss": 10.10967,
        "lr": 4.438e-7,
        "global_step": 47,
        "consumed_samples": 98304,
        "train_backward_timing in s": 0.0,
        "grad_norm": 178.553,
        "train_step_timing in s": 25.1,
        "epoch": 0,
    }
    assert second["data"]["reduced_train_loss"] is None
    moment = datetime.strptime(first["datetime"], "%Y-%m-%d %H:%M:%S.%f")
    assert float(first["timestamp"]) == pytest.approx(moment.timestamp(), abs=1e-6)
    assert 0 <= float(first["elapsedtime"]) <= float(second["elapsedtime"]) < 60


def test_a_log_follows_a_run_whose_steps_are_known_late(tmp_path, capsys):
    cfg = cli.load([f"log.dir={tmp_path}", "log.every=100", "train.steps=50"])
    with Log(cfg, 0, 1) as log:
        log.follow(longer := changed(cfg, train=dict(steps=70)))
        for step in 50, 70:
            log.iteration(replace(STEP, step=step))
    assert cli.load([str(tmp_path / "config.yaml")]) == longer
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(" iteration       70/      70 |")
    assert [r["data"]["cfg/train/steps"] for r in dllogger_records(tmp_path / "dllogger.json")[:2]] == [50, 70]


def test_flattened_goes_as_deep_as_the_configuration():
    cfg = cli.load(["model.rope_scaling.factor=32"])
    assert forms.flattened(asdict(cfg), "cfg")["cfg/model/rope_scaling/factor"] == 32


@pytest.mark.parametrize("where, folder", [("true", "run/tensorboard"), ("{}/elsewhere", "elsewhere")])
def test_tensorboard(tmp_path, where, folder):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    cfg = cli.load([f"log.dir={tmp_path / 'run'}", f"log.tensorboard={where.format(tmp_path)}"])
    with Log(cfg, 0, 1) as log:
        log.record("run", world=log.world, unigram_entropy=6.5)
        log.iteration(replace(STEP, step=3, loss=4.0))
        log.iteration(replace(STEP, step=4, loss=math.nan))
        log.evaluation(4, 3.5)
    board = events.EventAccumulator(str(tmp_path / folder)).Reload()
    assert [(e.step, e.value) for e in board.Scalars("step/loss")] == [(3, 4.0)]
    assert [(e.step, e.value) for e in board.Scalars("eval/loss")] == [(4, 3.5)]
    assert {"step/tflops/causal", "step/tokens_per_second", "step/grad_norm"} <= set(board.Tags()["scalars"])
    assert cli.load([str(tmp_path / "run" / "config.yaml")]) == cfg
    (event,) = (
        board.Tensors("config/text_summary")
        if "config/text_summary" in board.Tags()["tensors"]
        else board.Tensors("config")
    )
    text = "".join(line.removeprefix("    ") + "\n" for line in event.tensor_proto.string_val[0].decode().splitlines())
    assert text == cli.to_yaml(cfg)


def test_tensorboard_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    pytest.importorskip("tensorboard")
    with pytest.raises(ValueError, match=r"log\.tensorboard=\S+ cannot be written: Not a directory; name another"):
        Log(cli.load([f"log.tensorboard={tmp_path / 'file' / 'board'}"]), 0, 1)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    Log(cli.load([]), 0, 1)
    Log(cli.load(["log.tensorboard=x"]), 1, 2)  # rank 0 writes
    with pytest.raises(
        ValueError, match=r"needs TensorBoard, which is not installed; \S+ -m pip install .*\[tensorboard\]"
    ):
        Log(cli.load([f"log.tensorboard={tmp_path}"]), 0, 1)


def test_a_second_run_appends(tmp_path):
    for _ in range(2):
        lines([f"log.dir={tmp_path}"], [STEP], rank=0)
    kinds = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds == [10, 10]


def test_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"log\.dir=\S+ cannot be written: .*; name another directory"):
        Log(cli.load([f"log.dir={tmp_path / 'file' / 'run'}"]), 0, 1)


def test_warnings_and_errors_of_all_ranks_are_in_one_file(tmp_path, capsys, recwarn):
    cfg, shown = cli.load([f"log.dir={tmp_path}"]), warnings.showwarning
    first_line = Path(__file__).read_text().splitlines()[0]
    with Log(cfg, 0, 2) as log:
        log.info("all is well")
    assert not (tmp_path / "errors.log").exists()
    for rank in (0, 1):
        with pytest.raises(ZeroDivisionError), Log(cfg, rank, 2) as log:
            log.alarm(f"{rank} has not moved", "Traceback of it")
            log.warn("the save failed")
            warnings.warn_explicit("deprecated", UserWarning, __file__, 1)
            1 / 0
        with pytest.raises(SystemExit), Log(cfg, rank, 2), cli.user_errors():
            raise ValueError(f"a mistake,\nof rank {rank}")
    assert warnings.showwarning == shown
    text = (tmp_path / "errors.log").read_text()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    for rank in (0, 1):
        for pattern in (
            rf"{rank} has not moved\nTraceback of it\n",
            rf"{re.escape(__file__)}:1: UserWarning: deprecated\n  {re.escape(first_line)}\n",
            r"Traceback [^\0]*\nZeroDivisionError: division by zero\n",
            rf"error: a mistake, of rank {rank}\n",
        ):
            assert len(re.findall(rf"^{stamp} rank {rank}: {pattern}", text, re.M)) == 1, pattern
    assert len(re.findall(rf"^{stamp} rank 0: warning: the save failed$", text, re.M)) == 1  # which all ranks say
    assert text.count("the save failed") == 1 and "all is well" not in text
    said = capsys.readouterr()
    assert [str(w.message) for w in recwarn] == ["deprecated"] * 2 and said.out.count("the save failed") == 1


def test_an_error_of_one_rank_is_in_its_log_too(tmp_path, capsys):
    cfg = cli.load([f"log.dir={tmp_path}"])
    with pytest.raises(SystemExit, match=str(LOST)), Log(cfg, 1, 2), cli.user_errors(RunError, quiet=True):
        raise RanksLost("no answer")
    assert capsys.readouterr().err == "error: no answer\n"
    for name in "rank-1.log", "errors.log":
        assert (tmp_path / name).read_text().count("rank 1: error: no answer\n") == 1


@pytest.mark.parametrize("where", ["null", "{}"])
def test_a_traceback_is_in_the_rank_s_log_or_on_stderr(tmp_path, capsys, where):
    with Log(cli.load([f"log.dir={where.format(tmp_path)}"]), 1, 2) as log:
        try:
            raise ZeroDivisionError("by a test")
        except ZeroDivisionError:
            log.current_traceback()
    logged = "".join(path.read_text() for path in tmp_path.glob("rank-1.log"))
    for text, has in (capsys.readouterr().err, where == "null"), (logged, where != "null"):
        assert ("ZeroDivisionError: by a test" in text and "Traceback" in text) == has == bool(text)


def test_a_file_of_errors_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    (tmp_path / "errors.log").mkdir()
    with Log(cli.load([f"log.dir={tmp_path}"]), 0, 1) as log:
        log.alarm("has not moved")
    assert capsys.readouterr().err == "has not moved\n"


# ---- a disk without room --------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int):
    """As on a disk that is full: what would make a file longer is not written, but for its first bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("broken", [False, True])
def test_a_full_disk_costs_records_and_one_warning(tmp_path, capsys, monkeypatch, broken):
    """Half of a record never stands in a file when it goes on, even if it could not be cut off at once."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Log(cli.load([f"log.dir={tmp_path}", "log.tensorboard=true"]), 0, 1) as log:
        files = {name: tmp_path / name for name in ("metrics.jsonl", "dllogger.json", "rank-0.log")}
        (files["board"],) = (tmp_path / "tensorboard").iterdir()
        for step in range(1, 10):
            if step in (4, 5, 6):
                (sink,) = log._sinks
                for file in (log.metrics, log._dllogger, log._rank_log, sink):
                    with files_of_at_most(file.path.stat().st_size + 20), monkeypatch.context() as patch:
                        if broken and step == 4:
                            patch.setattr(File, "_cut", lambda own, _: own._torn is None or os.ftruncate(-1, 0))
                        with monkeypatch.context() as others:
                            for other in ("metrics", "_dllogger", "_rank_log"):
                                if getattr(log, other) is not file:
                                    others.setattr(log, other, None)
                            others.setattr(log, "_sinks", [sink] if file is sink else [])
                            log.iteration(replace(STEP, step=step, loss=float(step)))
            else:
                log.iteration(replace(STEP, step=step, loss=float(step)))
            log.info(f"after step {step}")
    written = [1, 2, 3, 7, 8, 9]
    metrics = [json.loads(line) for line in files["metrics.jsonl"].read_text().splitlines()]
    assert [record["step"] for record in metrics] == written
    assert [record["step"] + 1 for record in dllogger_records(files["dllogger.json"])[1:]] == written
    board = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("step/loss")] == [(step, step) for step in written]
    text = files["rank-0.log"].read_text()
    assert all(re.match(r"\d{4}-\d\d-\d\d \S+ rank 0: ", line) for line in text.splitlines())
    output = capsys.readouterr()
    assert output.err == (
        f"warning: {files['metrics.jsonl']} cannot be written: file too large; training goes on, and "
        "records are missing in the logs until the disk has space\n"
    )
    assert all(f"after step {step}\n" in output.out for step in range(1, 10))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_a_run_that_starts_again_on_a_full_disk_trains_without_its_logs(tmp_path, capsys, monkeypatch, number):
    """Three restarts failed at their start, and the run ended. What only the user can mend is an error at the start."""
    pytest.importorskip("tensorboard")
    cfg = cli.load([f"log.dir={tmp_path}", "log.tensorboard=true"])
    with Log(cfg, 0, 1) as log:
        log.iteration(STEP)
    files = {name: (tmp_path / name).read_text() for name in ("config.yaml", "metrics.jsonl", "dllogger.json")}
    capsys.readouterr()

    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as full:
        full.setattr(sinks, "open", fails, raising=False)
        full.setattr(Path, "write_text", fails)
        if number == errno.EACCES:
            with pytest.raises(ValueError, match="log.dir"):
                Log(cfg, 0, 1)
            return
        log = Log(cfg, 0, 1)
        log.iteration(replace(STEP, step=2))
        assert {name: (tmp_path / name).read_text() for name in files} == files
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("warning: ") and os.strerror(number).lower() in line
    log.iteration(replace(STEP, step=3))  # there is room again
    log.close()
    added = (tmp_path / "metrics.jsonl").read_text().removeprefix(files["metrics.jsonl"])
    assert [json.loads(row)["step"] for row in added.splitlines()] == [3]


def test_messages_that_a_rank_s_log_has_lost_are_counted_there(tmp_path, capsys):
    """Rank 0 alone warns: the others mostly write to the same disk."""
    with Log(cli.load([f"log.dir={tmp_path}"]), 1, 2) as log:
        log.alarm("first")
        with files_of_at_most((tmp_path / "rank-1.log").stat().st_size + 5):
            log.alarm("second", "its traceback")
            log.alarm("third")
        log.alarm("fourth", "another traceback")
    lines = (tmp_path / "rank-1.log").read_text().splitlines()
    assert [line.split("rank 1: ")[-1] for line in lines] == [
        "first",
        "2 messages before this one are lost: the disk was full or failed",
        "fourth",
        "another traceback",
    ]
    assert capsys.readouterr().err.splitlines() == ["first", "second", "its traceback", "third", "fourth"]


class Flaky(io.FileIO):
    """A file on a disk with room for some bytes, three of them at once. It cannot be cut the next `stuck` times."""

    room = stuck = 0

    def write(self, data):
        if not Flaky.room:
            raise OSError(errno.ENOSPC, "full")
        Flaky.room -= (written := super().write(data[: min(3, Flaky.room)]))
        return written

    def truncate(self, size=None):
        if Flaky.stuck:
            Flaky.stuck -= 1
            raise OSError(errno.EIO, "stuck")
        return super().truncate(size)


def test_a_file_has_whole_records_however_writes_and_cuts_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "append_to", lambda path: Flaky(path, "ab"))
    file, written, lost = File(path := tmp_path / "file"), [], 0
    for room in (100, 0, 1, 3, 4, 9):
        for stuck in range(4):
            Flaky.room, Flaky.stuck = room, stuck
            for record in f"{room} {stuck} first\n", "second\n", "third\n", "fourth\n", "fifth\n":
                try:
                    file.write(record)
                    written, lost = [*written, record], 0
                except OSError:
                    lost += 1
                    Flaky.room = 100
                assert file.lost == lost
    file.close()
    assert path.read_text() == "".join(written) and {"fifth\n", "100 0 first\n"} <= {*written}


def test_a_file_that_became_shorter_meanwhile_is_not_filled_up(tmp_path):
    """As by somebody who makes room."""
    file = File(tmp_path / "file")
    file.write("whole\n")
    file._torn = 1000
    file.write("next\n")
    file.close()
    assert (tmp_path / "file").read_text() == "whole\nnext\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_under_stdout(capsys, monkeypatch):
    with open("/dev/full", "w") as full, Log(cli.load([]), 0, 1) as log:
        monkeypatch.setattr(sys, "stdout", full)
        log.info("first")
        log.info("second")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()
    assert capsys.readouterr().err.count("warning: stdout cannot be written: no space left on device") == 1


def test_a_reader_that_has_gone_ends_the_run(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    pipe = open(write, "w")
    monkeypatch.setattr(sys, "stdout", pipe)
    with Log(cli.load([]), 0, 1) as log, pytest.raises(BrokenPipeError):
        log.info("hello")
    with suppress(BrokenPipeError):
        pipe.close()


def test_a_log_that_fails_at_any_operation_costs_records(tmp_path, capsys):
    """Also at the start. Nothing is raised, what is there is whole records, and later ones are written."""

    def run(folder: Path, number: int = 0, first: int = 0, times: int = 1) -> FailingDisk:
        with FailingDisk(folder, number, first, times) as disk:
            with suppress(SystemExit), Log(cli.load([f"log.dir={folder}", "log.every=1"]), 0, 1) as log:
                startup = Startup({}, log, 0.0, 1.0)
                log.record("places", places=["host"])
                for step in 1, 2:
                    log.iteration(it := replace(STEP, step=step))
                    startup.on_figures(it)
                    log.record("save", step=step, seconds=0.5, local=False)
                log.evaluation(2, 1.5)
                log.warn("a save failed")
                log.alarm("a rank died", "traceback")
                pretrain.end_of_run(log, 0.0)
                log.summary()
                raise SystemExit(1)
        return disk

    done = run(tmp_path / "whole").done
    for first in range(1, len(done) + 1):
        for number, times in zip([getattr(errno, name) for name in ERRNOS], (1, 3, 10, 10**9)):
            run(folder := tmp_path / f"{first}-{times}", number, first, times)
            run(folder)
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            assert [row["step"] for row in rows if row["kind"] == "step"][-2:] == [1, 2]
            assert "a save failed" in (folder / "errors.log").read_text()
    assert len(done) > 30
