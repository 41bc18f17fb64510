"""The benchmarks measure what they say: operations, shares, records. Their speed needs GPUs, their arithmetic does
not."""

import importlib.util
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from benchmarks import (
    calibration,
    ceilings,
    checkpoint,
    compare,
    floor,
    formats,
    fp8_curves,
    host,
    measure,
    programs,
    record,
    shares,
    step,
    table,
    workers,
)
from benchmarks.cases import CASES, FP8_RECIPES
from benchmarks.peers import modes
from layouts import whole_model
from minitron.comm.mesh import Mesh
from minitron.config import cli, flops, rules
from minitron.config.sizes import stage_layers
from minitron.data.loader import Loader
from minitron.kernels import kernels
from minitron.model.gpt import GPT
from minitron.parallel.layer_context import make_layer_context
from minitron.parallel.tiles import as_documents
from minitron.planner.machine import choose_machine
from minitron.planner.plan import plan
from minitron.planner.work import StageTime, total
from minitron.pretrain import build_data

TINY = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.vocab_size=200",
    "train.seq_len=64",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "data.source=mock",
    "precision.dtype=fp32",
]
CPU = torch.device("cpu")


# ---- the floor ------------------------------------------------------------------------------------------------------


def offline_trainer(cfg, world, rank):
    """The parts of a Trainer that the floor reads, at their real shapes and without memory."""
    p = cfg.parallel
    mesh = Mesh.offline(world, rank, tp=p.tp, pp=p.pp, cp=p.cp, device="meta")
    stages = stage_layers(cfg.model.num_layers, p.pp, p.vp, p.layers_per_stage)
    layout = make_layer_context(cfg, mesh, kernels.choose(cfg, mesh.device))
    mine = range(mesh.pp.rank, len(stages), p.pp)
    chunks = [GPT(cfg, mesh, layout, stages[i], first=i == 0, last=i == len(stages) - 1) for i in mine]
    return SimpleNamespace(cfg=cfg, mesh=mesh, chunks=chunks)


@pytest.mark.parametrize(
    "world, layout",
    [
        (1, []),
        (2, ["parallel.tp=2"]),
        (4, ["parallel.pp=2"]),
        (4, ["parallel.cp=2", "parallel.tp=2"]),
        (4, ["parallel.cp=4"]),
        (2, ["parallel.cp=2", "parallel.cp_style=allgather"]),
        (2, ["parallel.cp=2", "parallel.cp_style=ulysses"]),
        (1, ["model.family=gpt", "model.tie_embeddings=true"]),
    ],
)
def test_the_floor_of_all_ranks_has_the_operations_of_the_step(world, layout):
    cfg = cli.load([*TINY, *layout])
    rules.check(cfg, world)
    work = [floor.step_work(offline_trainer(cfg, world, rank)) for rank in range(world)]
    products = sum(p.operations * count for part, _ in work for p, count in part.items())
    # `flops` counts four products of the backward; a kernel that keeps no scores computes them again, a fifth.
    scores = sum(c.operations * count for _, part in work for c, count in part.items()) * 12 / 14
    heads = {p.n for part, _ in work for p in part if p.head}
    assert heads == {cfg.model.padded_vocab_size // cfg.parallel.tp}
    shape, t = cfg.model, cfg.train
    assert scores == pytest.approx(
        t.global_batch_size * (flops.full(shape, t.seq_len) - flops.causal(shape, t.seq_len))
    )
    assert products + scores == pytest.approx(t.global_batch_size * flops.causal(shape, t.seq_len))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "kind, shape",
    [("forward", (32, 48)), ("input_grad", (32, 16)), ("weight_grad", (48, 16)), ("first_weight_grad", (48, 16))],
)
def test_products_have_the_shape_and_format_of_their_kind(kind, shape, fp8):
    result = floor.Product(kind, 32, 48, 16, fp8).prepare(torch.bfloat16, CPU)()
    assert result.shape == shape
    assert result.dtype == (torch.float32 if "weight" in kind else torch.bfloat16)


# ---- shares of a profile --------------------------------------------------------------------------------------------

NAMES = {
    "nccl": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "gemm": "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
    "attention": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_kernel0_0",
    "optimizer": "_adamw",
    "copy": "Memcpy DtoD (Device -> Device)",
    "pointwise": "_cast",
}


def test_kernel_names_have_their_kind():
    assert {kind: shares.kind_of(name) for kind, name in NAMES.items()} == {kind: kind for kind in NAMES}
    assert shares.kind_of("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>") == "attention"


@given(
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=8)
)
def test_shares_equal_those_counted_tick_by_tick(drawn):
    kernels = [(NAMES[kind], float(start), float(start + length)) for kind, start, length in drawn]
    ticks = {
        kind: [t for k, start, length in drawn if k == kind for t in range(start, start + length)] for kind in NAMES
    }
    busy = {t for times in ticks.values() for t in times}
    compute = {t for kind, times in ticks.items() if kind != "nccl" for t in times}
    window = max(busy) + 1 - min(busy)
    expected = {kind: len(times) / window for kind, times in ticks.items()}
    expected |= {"nccl exposed": len(busy - compute) / window, "idle": 1 - len(busy) / window}
    assert shares.shares(kernels) == pytest.approx(expected)


def test_the_profile_table_has_times_per_step():
    kernels = [(NAMES["gemm"], 0.0, 3000.0), (NAMES["gemm"], 3000.0, 4000.0), (NAMES["copy"], 6000.0, 8000.0)]
    text = shares.table(kernels, steps=2)
    rows = [line.split()[:3] for line in text.splitlines()]
    assert rows[1:3] == [["2.000", "1", "gemm"], ["1.000", "0", "copy"]]
    assert "gemm 50.0 %" in text and "idle 25.0 %" in text


# ---- measured programs ----------------------------------------------------------------------------------------------


def test_a_measured_step_reports_consistent_figures(capsys):
    result = step.main([*TINY, "--steps", "6"])
    cfg = cli.load(TINY)
    operations = flops.full(cfg.model, 64) * 8
    assert result["tflops"] * 1e12 * result["step_seconds"] == pytest.approx(operations)
    assert result["tokens_per_second_per_gpu"] * result["step_seconds"] == pytest.approx(8 * 64)
    alone = result["floor_gemm_seconds"] + result["floor_attention_seconds"]
    assert result["floor_share"] == pytest.approx(alone / result["step_seconds"]) and alone > 0
    assert json.loads(re.search("^RESULT (.*)$", capsys.readouterr().out, re.MULTILINE)[1]) == result


def test_mfu_is_tflops_over_the_peak_of_the_format(monkeypatch):
    monkeypatch.setattr(flops, "peak_tflops", lambda name, fp8: 1e-6 * (2 if fp8 else 1))
    for fp8, peak in (("none", 1e-6), ("current", 2e-6)):
        cfg = cli.load([*TINY, f"precision.fp8={fp8}"])
        result = measure.figures(cfg, 0.5, 2, CPU)
        assert result["mfu_full"] == pytest.approx(100 * result["tflops"] / peak)
        assert result["mfu_causal"] < result["mfu_full"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--steps", "3"], "--steps 3 are all warm-up; use 4 or more"),
        (["model.num_layer=4"], "unknown key model.num_layer; did you mean model.num_layers?"),
        (["--profile"], "--profile lists a GPU's kernels, and there is no GPU; leave it out"),
    ],
)
def test_mistakes_of_the_command_line_are_one_line(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        step.main(argv)
    assert exit.value.code == 1 and capsys.readouterr().err.strip() == f"error: {message}"


def test_a_results_file_that_cannot_be_is_known_before_the_measurement(tmp_path, capsys):
    with pytest.raises(SystemExit):
        step.main([*TINY, "--results", str(tmp_path)])
    assert f"argument --results: {tmp_path} is a folder; name a file in it" in capsys.readouterr().err


def test_curves_of_fp8_lie_beside_one_of_bf16_whatever_the_configuration_has(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fp8_curves, "losses", lambda cfg, device: [2.0 + (cfg.precision.fp8 != "none")] * 10)
    given = ["precision.fp8=delayed", "precision.fp8_bf16_layers=1", "model.num_layers=3"]
    path = tmp_path / "results.jsonl"
    plot = ["--plot", str(tmp_path / "curves.png")]
    result = fp8_curves.main([*TINY[:-1], *given, "--recipes", "current", "--results", str(path), *plot])
    assert result["curves"] == {"bf16": [2.0] * 10, "current": [3.0] * 10}
    assert json.loads(path.read_text())["last"] == {"current": 0.5}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    losses, distances = table.draw_curves(result | {"steps": 100, "gpu": "NVIDIA H200"}).axes
    assert "on NVIDIA H200" in losses.get_title(loc="left")
    assert {line.get_label(): list(line.get_ydata()) for line in losses.lines} == {
        "bf16": [2.0] * 10,
        "FP8, current": [3.0] * 10,
    }
    assert list(losses.lines[0].get_xdata()) == list(range(5, 100, 10))  # the middle of each tenth
    assert [list(line.get_ydata()) for line in distances.lines] == [[0.0] * 10, [50.0] * 10]


# ---- cases and comparisons ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", ["none", *FP8_RECIPES])
@pytest.mark.parametrize("name", CASES)
def test_every_case_fits_the_gpus_that_it_needs(name, fp8):
    case = CASES[name]
    if case.needs_fp8 and fp8 == "none":
        assert CASES[case.peer].overrides == tuple(key for key in case.overrides if "fp8_head" not in key)
        return
    cfg = cli.load([str(record.ROOT / case.config), *case.arguments(fp8)[1:]])
    rules.check(cfg, case.gpus, capability=(9, 0))
    assert cfg.train.recompute == "none"
    assert name.startswith("2gpu-") == (case.gpus == 2)
    dp, p = cfg.dp(case.gpus), cfg.parallel
    for axis, size in {"dp": dp, "tp": p.tp, "pp": p.pp, "cp": p.cp}.items():
        assert (f"{axis}{size}" in name or case.tunes and axis == "dp" and size > 1) == (size > 1)
    assert case.tunes == (cfg.finetune.kind is not None) == name.removeprefix("2gpu-").startswith(("lora-", "sft-"))


def test_a_deeper_case_fits_and_has_a_smaller_head():
    """With bf16 gradients on two H100, and with 2 GiB to spare, since a peer needs more than a plan of ours."""
    machine, shares = choose_machine("h100", None), {}
    for name in ("2gpu-175b-2layers-tp2", "2gpu-175b-4layers-tp2"):
        for fp8 in ("none", "delayed"):
            arguments = CASES[name].arguments(fp8)[1:]
            cfg = cli.load([str(record.ROOT / CASES[name].config), *arguments, "optimizer.grad_dtype=bf16"])
            planned, head = plan(cfg, 2, machine), StageTime(cfg, machine).head()
            assert planned.memory_gib + 2 < planned.room_gib
            shares[name, fp8] = cfg.num_microbatches(1) * sum(map(total, head)) / planned.step_seconds
    assert shares["2gpu-175b-4layers-tp2", "none"] < 0.1 < shares["2gpu-175b-2layers-tp2", "none"]
    assert shares["2gpu-175b-4layers-tp2", "delayed"] < 0.6 * shares["2gpu-175b-2layers-tp2", "delayed"]


def test_formats_are_asked_of_a_ranks_own_shapes():
    """What 70B on two GPUs, tp 2, has of everything: half of the heads. There are cases for all that are asked."""
    cfg = formats.load("2gpu-70b-4layers-tp2")
    assert formats.attention_call(cfg) == floor.AttentionCall(1, 32, 4, 128, 8192, 8192, True, 0.0)
    assert formats.microbatches(cfg, 2) == 4 and all(formats.load(name).parallel.cp == 1 for name in formats.NAMES)


def test_formats_need_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="FP8 is a GPU's, and there is none"):
        formats.main(["--results", str(tmp_path / "results.jsonl")])


def test_the_line_of_a_format():
    result = {
        "case": "8b-1gpu-fp8",
        "before_seconds": 0.002,
        "after_seconds": 0.001,
        "saved_seconds": 0.004,
        "share": 0.05,
    }
    line = formats.line("fp8_head", result | {"errors": {"y": 0.0376, "dx": 0.03}})
    assert line.endswith("2.000 ms, so 1.000: saves 4.00 ms, 5.0 % of the step; off by y 3.8 %, dx 3.0 %")
    assert formats.line("bf16_moments", result | {"errors": {}, "share": None}).endswith("4.00 ms, no measured step")
    assert formats.off(torch.tensor([1.1, 1.1]), torch.tensor([1.0, 1.0])) == pytest.approx(0.1)


class FakeWorkers:
    """benchmarks.workers.Workers that run nothing: run(program, arguments, gpus, environment) gives the figures."""

    def __init__(self, run, gpus):
        self.run, self.free = run, [str(i) for i in range(gpus)]

    def start(self, task, program, arguments, gpus, seconds, environment):
        self.result = self.run(program, arguments, gpus, environment)

    def next(self):
        return None, self.result

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def fake(text, status=0):
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({status})"]


def test_a_program_reports_skips_or_fails():
    assert programs.launch(fake('noise\nRESULT {"tflops": 1.5}'), 60, {}) == {"tflops": 1.5}
    with pytest.raises(programs.Skipped, match="^not installed$"):
        programs.launch(fake("SKIP not installed"), 60, {})
    with pytest.raises(programs.Failed, match="(?s)exit status 3: .*out of memory"):
        programs.launch(fake("out of memory", 3), 60, {})
    with pytest.raises(programs.Failed, match="took longer than 0.2 s"):
        programs.launch([sys.executable, "-c", "import time; time.sleep(60)"], 0.2, {})


@pytest.mark.parametrize("option, name", [([], "megatron"), *((["--peer", peer], peer) for peer in compare.PEERS)])
def test_comparisons_are_printed_and_recorded(option, name, monkeypatch, tmp_path, capsys):
    ours = {"mfu_full": 66.0, "tflops": 660.0, "peak_gib": 100.0, "step_seconds": 1.0, "world": 1}
    peer = {"mfu_full": 60.0, "tflops": 600.0, "peak_gib": 110.0, "step_seconds": 1.1, "world": 1}
    slower = {"mfu_full": 63.0, "tflops": 630.0, "peak_gib": 101.0, "step_seconds": 1.05, "world": 1}  # as it gets warm
    turns = [("ours", ours), ("peer", peer), ("peer", peer), ("ours", slower)]
    turns = [("peer", peer)] * (2 if name == "megatron" else 0) + turns  # first each of its modes
    launched = []

    def run(program, arguments, gpus, environment):
        launched.append(program)
        if "precision.fp8=delayed" in arguments:
            return programs.Failed("it broke")
        is_peer = program == f"benchmarks/peers/{name}.py"
        assert ("CUDA_DEVICE_MAX_CONNECTIONS" in environment) == (is_peer and name == "megatron") and gpus == 1
        side, figures = turns[len(launched) - 1]
        assert is_peer == (side == "peer") and ("--no-floor" in arguments) == (len(launched) == len(turns))
        return figures

    monkeypatch.setattr(compare, "Workers", lambda: FakeWorkers(run, gpus=1))
    path = tmp_path / "results.jsonl"
    argv = ["8b-1gpu", "70b-tp4", *option, "--precision", "bf16", "fp8", "--results", str(path), "--commit", "abc"]
    assert compare.main(argv) == 1 and len(launched) == len(turns) + (3 if name == "megatron" else 1)
    mode = " mode=eager" if name == "megatron" else ""
    figures = "ours_mfu=64.50 peer_mfu=60.00 ratio=1.075 spread=0.025 ours_gib=101.00 peer_gib=110.00"
    assert capsys.readouterr().out.splitlines() == [
        f"case=8b-1gpu-bf16 {figures}{mode}",
        "case=8b-1gpu-fp8 failed: it broke",
        "case=70b-tp4-bf16 skipped: needs 4 GPUs, there are 1",
        "case=70b-tp4-fp8 skipped: needs 4 GPUs, there are 1",
    ]
    (entry,) = map(json.loads, path.read_text().splitlines())
    figures = {
        "ours_mfu": 64.5,
        "peer_mfu": 60.0,
        "ratio": 1.075,
        "ours_gib": 101.0,
        "peer_gib": 110.0,
        "spread": 0.025,
    }
    assert entry["step_seconds"] == {"ours": [1.0, 1.05], "peer": [1.1, 1.1]} and entry["ours"]["world"] == 1
    assert entry["case"] == "8b-1gpu-bf16" and {k: entry[k] for k in figures} == pytest.approx(figures)
    assert entry["kind"] == "compare" and entry["commit"] == "abc" and entry["peer"] == name
    assert {"gpu", "power_limit_watts", "command"} <= entry.keys()
    assert entry["versions"]["torch"] == metadata.version("torch")
    assert {"cuda", "triton", "transformer_engine", "megatron-core", "torchtitan"} <= entry["versions"].keys()


SIDE = {"mfu_full": 60.0, "tflops": 600.0, "peak_gib": 70.0, "step_seconds": 1.0, "world": 1}
NO_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.00 MiB is free. Of the allocated memory 75.50 GiB is allocated by PyTorch, and 1 GiB is reserved"
)


def compared_in_modes(case, seconds, monkeypatch, tmp_path):
    """The record of a case whose peer takes so long in each mode, or raises; and (side, mode, steps) of each run."""
    launched = []

    def run(program, arguments, gpus, environment):
        mode = arguments[arguments.index("--mode") + 1] if "--mode" in arguments else "eager"
        side = "ours" if program == compare.OURS else "peer"
        launched.append((side, mode, int(arguments[-1])))
        found = 1.0 if side == "ours" else seconds[mode]
        floors = {"floor_head_seconds": 0.25, "graph": True} if side == "ours" else {}
        return found if isinstance(found, Exception) else SIDE | floors | {"step_seconds": found}

    monkeypatch.setattr(compare, "Workers", lambda: FakeWorkers(run, gpus=2))
    path = tmp_path / "results.jsonl"
    assert compare.main([case, "--steps", "8", "--results", str(path)]) == 0
    return json.loads(path.read_text()), launched


def test_a_peer_runs_in_the_fastest_of_its_modes(monkeypatch, tmp_path):
    """Each mode of the layout once, errors on record; two runs replay a graph 50 times, and so our step."""
    seconds = {
        "eager": 1.5,
        "graph": 1.25,
        "tp-overlap": programs.Failed("it hung\nno multicast"),
        "graph+tp-overlap": 2.0,
    }
    row, launched = compared_in_modes("2gpu-70b-4layers-tp2", seconds, monkeypatch, tmp_path)
    assert launched[:4] == [("peer", mode, 8) for mode in seconds]
    assert [(side, mode) for side, mode, _ in launched[4:] if side == "peer"] == [("peer", "graph")] * 2
    assert {steps - measure.WARMUP for _, _, steps in launched[4:]} == {25} and len(launched) == 8  # 50 in both runs
    assert row["mode"] == "graph" and row["modes"] == seconds | {"tp-overlap": "no multicast"}
    assert row["ratio_without_head"] == pytest.approx((1.25 - 0.25) / (1.0 - 0.25)) and row["ours"]["graph"]


def test_a_mode_without_memory_is_tried_with_the_other_loss(monkeypatch, tmp_path):
    full = programs.OutOfMemory("it is full", 76.0)
    seconds = {"eager": full, "eager+native-loss": 1.5, "graph": full, "graph+native-loss": full}
    row, launched = compared_in_modes("8b-1gpu", seconds, monkeypatch, tmp_path)
    assert [mode for side, mode, _ in launched if side == "peer"] == [*seconds, *["eager+native-loss"] * 2]
    assert row["ratio"] == pytest.approx(1.0) and row["modes"]["graph"] == "out of memory"


def test_a_peer_without_memory_has_a_row_with_both_figures(monkeypatch, tmp_path, capsys):
    with pytest.raises(programs.OutOfMemory) as full:
        programs.reported(NO_MEMORY, "peer", 1)
    assert full.value.gib == 76.0
    seconds = dict.fromkeys(("eager", "eager+native-loss", "graph", "graph+native-loss"), full.value)
    row, _ = compared_in_modes("8b-1gpu", seconds, monkeypatch, tmp_path)
    assert (row["ours_gib"], row["peer_gib"], row["ratio"], row["peer_figures"]) == (70.0, 76.0, None, None)
    assert re.search("ours_gib=70.00 peer_gib=76.00 .*out of memory", capsys.readouterr().out)
    other = compared("8b-1gpu-bf16", "huggingface", "none", 500.0, 480.0) | {"gpu": row["gpu"]}
    assert [e for _, found in table.groups([row, other]) for e in found] == [other]
    assert re.search(r"out of memory \|  \|  \| 70.0 \| 76.0 \| Megatron-core", table.markdown([row]))
    assert calibration.own_rows(tmp_path / "results.jsonl") == []  # of a CPU
    row["gpu"] = "NVIDIA H100 80GB HBM3"
    (tmp_path / "results.jsonl").write_text(json.dumps(row))
    assert [own.software for own in calibration.own_rows(tmp_path / "results.jsonl")] == ["minitron"]


def test_modes_are_sums_of_parts():
    assert modes.settings("graph+native-loss") == modes.PARTS["graph"] | modes.PARTS["native-loss"]
    assert modes.settings("eager") == {} and len(modes.modes_of(2, 2)) == len({*modes.modes_of(2, 2)})
    assert all(modes.settings(mode) is not None for mode in modes.modes_of(2, 2))
    with pytest.raises(ValueError, match="graphs"):
        modes.settings("eager+graphs")


@pytest.mark.parametrize("taken, ports", [(1, 2), (9, workers.TRIES)])
def test_a_port_that_was_taken_is_chosen_again(taken, ports, monkeypatch):
    """Between choice and use another program took it; but not for ever."""
    chosen = iter(range(1, 99))
    monkeypatch.setattr(workers, "free_port", lambda: next(chosen))

    def main(arguments):
        if int(os.environ["MASTER_PORT"]) <= taken:
            raise SystemExit(f"RuntimeError: code: -98, name: EADDRINUSE, port {os.environ['MASTER_PORT']}")
        print('RESULT {"port": ' + os.environ["MASTER_PORT"] + "}")

    monkeypatch.setattr(step, "main", main)
    with workers.Workers(1) as one:
        one.start("task", compare.OURS, [], 1, 60.0)
        child, result = one.next()
        assert child.task == "task" and one.free == [None] and not one.children
    assert next(chosen) == ports + 1
    assert result == {"port": 2} if taken == 1 else isinstance(result, programs.Failed)


def test_a_measurement_does_not_outlive_what_started_it(monkeypatch):
    """It would go on using the GPU, beside whatever is measured next."""
    monkeypatch.setattr(step, "main", lambda arguments: time.sleep(60))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped, workers.Workers(1) as one:
        one.start("asleep", compare.OURS, [], 1, 60.0)
        (process,) = one.children[0].processes
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)  # cut short by the signal
    assert stopped.value.code == 128 + signal.SIGTERM and process.exitcode == -signal.SIGKILL
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_peer_without_the_schedule_runs_its_fastest_layout(monkeypatch, tmp_path):
    launched = []

    def run(program, arguments, gpus, environment):
        launched.append(arguments)
        return {"mfu_full": 60.0, "tflops": 600.0, "peak_gib": 100.0, "step_seconds": 1.0}

    monkeypatch.setattr(compare, "Workers", lambda: FakeWorkers(run, gpus=2))
    assert compare.main(["2gpu-8b-16layers-pp2-zb-h1", "--results", str(tmp_path / "results.jsonl")]) == 0
    launched = launched[2:]  # after its modes
    assert [("parallel.schedule=zb-h1" in command, "parallel.vp=2" in command) for command in launched] == [
        (True, False),
        (False, True),
        (False, True),
        (True, False),
    ]
    assert "parallel.layers_per_stage=[4, 5, 5, 2]" in launched[1]
    with pytest.raises(ValueError, match="parallel.schedule is not what the Megatron-core runner knows"):
        measure.check_translated(cli.load(launched[0][:-2]), "Megatron-core")


def test_a_peer_without_the_number_format_runs_the_fastest_that_it_has(monkeypatch, tmp_path, capsys):
    launched = []

    def run(program, arguments, gpus, environment):
        launched.append((program, "precision.fp8_head=true" in arguments, "precision.fp8=delayed" in arguments))
        return {"mfu_full": 60.0, "tflops": 600.0, "peak_gib": 100.0, "step_seconds": 1.0}

    monkeypatch.setattr(compare, "Workers", lambda: FakeWorkers(run, gpus=1))
    options = ["--precision", "bf16", "fp8", "--results", str(tmp_path / "results.jsonl")]
    assert compare.main(["8b-1gpu-fp8head", *options]) == 0
    assert launched[2:4] == [(compare.OURS, True, True), ("benchmarks/peers/megatron.py", False, True)]
    skipped, compared = capsys.readouterr().out.splitlines()
    assert skipped == "case=8b-1gpu-fp8head-bf16 skipped: its head is in FP8; use --precision fp8"
    assert compared.startswith("case=8b-1gpu-fp8head-fp8 ours_mfu=60.00")


def test_an_unknown_case_is_an_error(capsys):
    with pytest.raises(SystemExit):
        compare.main(["8b"])
    assert "unknown case 8b; use one of 8b-s8192-dp4" in capsys.readouterr().err


def test_two_ranks_of_our_side_really_run():
    """As compare.py runs them; the second time without the floor, which is none of a step's time."""
    arguments = ["configs/quickstart.yaml", *TINY, "train.eval_every=0", "--steps", "5"]
    with workers.Workers(2) as two:
        both = []
        for more in [], ["--no-floor"]:
            two.start("ours", compare.OURS, arguments + more, 2, 240.0, {"OMP_NUM_THREADS": "1"})
            both.append(two.next()[1])
            assert isinstance(both[-1], dict), both[-1]
    assert "floor_share" in both[0] and not [key for key in both[1] if key.startswith("floor")]
    averaged = compare.mean_of(both)
    assert averaged["floor_share"] == both[0]["floor_share"]
    assert averaged["step_seconds"] == (both[0]["step_seconds"] + both[1]["step_seconds"]) / 2
    figures = both[0]
    assert figures["world"] == 2 and figures["step_seconds"] > 0
    assert both[0]["floor_gemm_seconds"] > both[0]["floor_head_seconds"] > 0
    both = {
        "ours": figures,
        "peer_figures": figures,
        "ratio": 1.0,
        "spread": 0.0,
        "ours_mfu": float("nan"),
        "peer_mfu": float("nan"),
        "ours_gib": 0.0,
        "peer_gib": 0.0,
    }
    assert "ours_mfu=nan" in compare.line({"case": "tiny", **both})


def test_the_table_shows_the_newest_record_of_each_case(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    args = Namespace(results=tmp_path / "results.jsonl", commit=None)
    assert table.main(["--results", str(args.results)]) == 1
    assert "has no record of kind compare; run benchmarks/compare.py first" in capsys.readouterr().err
    figures = {
        "ours_mfu": 66.0,
        "peer_mfu": 60.0,
        "ratio": 1.1,
        "ours_gib": 100.0,
        "peer_gib": 110.0,
        "peer": "megatron",
        "fp8": "none",
        "ours": {"world": 1, "tflops": 650.0, "step_seconds": 1.0},
        "peer_figures": {"tflops": 590.0, "step_seconds": 1.1},
    }
    record.append(args, "host", {"what": "x"})
    for case, ours in (("a", 61.0), ("b", None), ("a", 66.0)):
        record.append(
            args, "compare", figures | {"case": case, "ours_mfu": ours} | ({"spread": 0.004} if ours == 66.0 else {})
        )
    tuned = {"case": "c", "peer": "huggingface", "fp8": "delayed", "ours_mfu_weights": 65.0, "peer_mfu_weights": 59.0}
    record.append(args, "compare", figures | tuned)
    assert table.main(["--results", str(args.results)]) == 0
    text = (tmp_path / "compare.md").read_text()
    assert (
        re.search(
            r"\| a \| \w+ \| 66.0 % \| 60.0 % \| 1.100 ± 0.004 \|  \| 100.0 \| 110.0 \| Megatron-core.*\n\| b \|", text
        )
        and "61.0" not in text
    )
    assert re.search(
        r"\| c \| \w+ \| 66.0 % \(65.0\) \| 60.0 % \(59.0\) \| 1.100 \|.*\| Hugging Face .*, in bf16 \|", text
    )
    assert f"torch {metadata.version('torch')}" in text
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "case, figures",
    [
        ("8b-s8192-dp4-fp8", [3, 8, 8192, 4]),
        ("8b-tp2cp2-bf16", [3, 8, 2, 2]),
        ("175b-tp4-fp8", [3, 175, 4, 4]),  # 4 layers of 96, which are not in the name of the case
        ("8b-1gpu-fp8head-fp8", [3, 8, 8, 8]),  # Llama 3 8B, the head in FP8, 8 layers
        ("2gpu-8b-16layers-pp2-uneven-bf16", [3, 8, 16, 2]),
        ("tiny", []),
    ],
)
def test_a_case_is_drawn_with_its_sizes(case, figures):
    assert [int(figure) for figure in re.findall(r"\d+", table.in_words(case))] == figures


def test_rows_are_of_a_case_a_peer_and_a_gpu_and_h100_comes_first(tmp_path):
    entries = [
        compared(case, "megatron", "none", 500.0, 400.0) | {"kind": "compare", "gpu": gpu, "n": n}
        for n, (case, gpu) in enumerate([("a", "NVIDIA H200"), ("a", "NVIDIA H100 80GB HBM3"), ("a", "NVIDIA H200")])
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, entries)))
    found = table.newest(tmp_path / "results.jsonl")
    assert [e["n"] for e in found] == [1, 2]
    headings = [heading for heading, _ in table.groups(found)]
    assert [heading.split(":")[0] for heading in headings] == ["H100", "H200"]
    whole = entries[0] | dict.fromkeys(("ours_gib", "peer_gib", "commit"), None) | {"versions": {}, "time": "2026"}
    in_bf16 = whole | {"ours": whole["ours"] | {"gradients": "bf16"}}
    assert "| a |" in table.markdown([whole]) and "| a, gradients in bf16 |" in table.markdown([in_bf16])


def test_cases_that_differ_are_drawn_in_other_words():
    cases = (
        "lora-8b-1gpu-full-bf16",
        "lora-8b-1gpu-bf16",
        *(f"2gpu-8b-16layers-pp2{x}-bf16" for x in ("", "-uneven", "-zb-h1")),
    )
    assert len({table.in_words(case) for case in cases}) == len(cases)


def compared(case, peer, fp8, ours, theirs, gpus=1, seconds=(1.0, 1.25), floors=(0.6, 0.2)):
    """A record of a comparison at `ours` and `theirs` TFLOP/s."""
    return {
        "case": case, "peer": peer, "fp8": fp8, "ratio": ours / theirs, "ours_mfu": ours / 10, "peer_mfu": theirs / 10,
        "ours": {
            "world": gpus, "tflops": ours, "step_seconds": seconds[0], "floor_gemm_seconds": floors[0],
            "floor_attention_seconds": floors[1],
        },
        "peer_figures": {"tflops": theirs, "step_seconds": seconds[1]}, "gpu": "NVIDIA H200", "power_limit_watts": 700,
    }  # fmt: skip


def test_the_picture_of_comparisons_has_the_figures_of_the_records():
    pytest.importorskip("matplotlib")
    entries = [
        compared("8b-pp4-bf16", "megatron", "none", 500.0, 480.0, 4),
        compared("175b-tp4-bf16", "megatron", "none", 550.0, 500.0, 4),
        compared("8b-pp4-fp8", "megatron", "delayed", 700.0, 600.0, 4),
        compared("lora-8b-1gpu-fp8", "huggingface", "delayed", 900.0, 450.0, floors=(0.3, 0.9)),
        compared("lora-8b-1gpu-bf16", "huggingface", "none", 600.0, 450.0, seconds=(1.0, 1.2)),
        compared("sft-8b-4gpu-fp8", "huggingface", "delayed", 800.0, 500.0),
        compared("lora-8b-1gpu-fp8head-fp8", "huggingface", "delayed", 1000.0, 450.0, floors=(0.2, 0.9)),
    ]
    figure = table.draw(entries)
    pretrained, _, tuned, in_fp8 = figure.axes
    assert "H200 at 700 W" in figure.get_suptitle()
    # The largest lead comes first.
    for axes, cases in (
        (pretrained, ["175b-tp4-bf16", "8b-pp4-bf16"]),
        (in_fp8, ["lora-8b-1gpu-fp8head-fp8", "lora-8b-1gpu-fp8", "sft-8b-4gpu-fp8"]),
    ):
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert len(labels) == len(cases)
        assert all(label.startswith(table.in_words(case)) for label, case in zip(labels, cases)), labels
    assert [bar.get_width() for bar in pretrained.patches] == [550.0, 500.0, 500.0, 480.0]
    # A bar's floor is where the bar would end if products and attention were all of the step.
    marks = [line.get_xdata()[0] for line in pretrained.lines]
    assert marks == pytest.approx([550 / 0.8, 500 / 0.64, 500 / 0.8, 480 / 0.64])
    texts = [text.get_text() for text in pretrained.texts]
    shares = ["55.0 %", "80 %", "50.0 %", "64 %", "50.0 %", "80 %", "48.0 %", "64 %"]
    assert [text for text in texts if text.endswith("%")] == shares
    assert [text for text in texts if re.fullmatch(r"[\d.]+", text)] == ["1.100", "1.042"]
    # Packed documents: products alone. A peer in bf16 has the floor of the bf16 record of what it ran, none without.
    assert [line.get_xdata()[0] for line in tuned.lines] == pytest.approx([600 / 0.6, 450 / 0.5])
    marks = [1000 / 0.2, 450 / 0.48, 900 / 0.3, 450 / 0.48, 800 / 0.6]
    assert [line.get_xdata()[0] for line in in_fp8.lines] == pytest.approx(marks)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def in_this_process(arguments, environment):
    cfg, args = measure.arguments("", [*arguments, "--started", str(time.time())], checkpoint.add_options)
    return checkpoint.leg(cfg, args)


def test_saving_and_resuming_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "launch", in_this_process)
    (tmp_path / "disk").mkdir()
    entry = checkpoint.main(
        [
            *TINY,
            "--steps",
            "4",
            "--dir",
            str(tmp_path / "disk"),
            "--results",
            str(tmp_path / "results.jsonl"),
            "--commit",
            "abc",
        ]
    )
    assert json.loads((tmp_path / "results.jsonl").read_text()) == entry and entry["kind"] == "checkpoint"
    assert not list((tmp_path / "disk").iterdir())
    cfg = cli.load(TINY)
    numbers = sum(p.numel() for p in whole_model(cfg, Mesh.offline(1)).parameters())
    assert entry["state_gb"] * 1e9 == pytest.approx(12 * numbers, rel=0.01)  # and headers
    assert all(
        entry[key] > 0
        for key in (
            "step_seconds",
            "blocked_seconds",
            "save_gb_per_second",
            "host_gib_fresh",
            "load_gb_per_second_from_cache",
            "start_seconds_resumed",
            "host_gib_resumed",
        )
    )
    assert entry["gpu_gib_fresh"] is entry["gpu_gib_more_by_saving"] is None
    assert "save " + f"{entry['save_gb_per_second']:.3f} GB/s" in capsys.readouterr().out


def test_a_file_is_read_from_the_disk_once_it_was_dropped(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(16 << 20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    assert checkpoint.cached_share(path) > 0.99
    if checkpoint.drop_from_page_cache(tmp_path):  # not on a file system that is memory itself
        assert checkpoint.cached_share(path) < 0.01
    path.read_bytes()
    assert checkpoint.cached_share(path) > 0.99


def test_a_leg_reports_or_ends_the_measurement(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "__file__", str(tmp_path / "leg.py"))
    (tmp_path / "leg.py").write_text("print('noise')\nprint('RESULT 7')\nimport sys; sys.exit(int(sys.argv[1]))")
    assert checkpoint.launch(["0"], {}) == 7
    with pytest.raises(SystemExit) as exit:
        checkpoint.launch(["3"], {})
    assert exit.value.code == 3
    assert "noise" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        checkpoint.main([*TINY, "--dir", str(tmp_path / "none")])
    assert f"--dir {tmp_path}/none is no directory; name one on the disk" in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoints_are_measured_under_torchrun(tmp_path):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "benchmarks/checkpoint.py",
            *TINY,
            "--steps",
            "4",
            "--dir",
            str(tmp_path),
            "--results",
            str(tmp_path / "results.jsonl"),
        ],
        cwd=record.ROOT,
        check=True,
        timeout=600,
    )
    assert json.loads((tmp_path / "results.jsonl").read_text())["world"] == 2


# ---- peers ----------------------------------------------------------------------------------------------------------

# bf16, which is what peers are measured in
PEER_TINY = [*TINY[:-1], "model.num_layers=4", "model.num_heads=4", "model.num_kv_heads=2"]
GPT_KEYS = ["model.family=gpt", "model.positions=learned", "model.num_kv_heads=null"]
FP8_KEYS = ["precision.fp8=current", "precision.fp8_backend=torch"]


def peer_module(name):
    """The peer's runner, where what it runs is installed."""
    package = {"huggingface": "transformers", "torchtitan": "torchtitan"}[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return importlib.import_module(f"benchmarks.peers.{name}")


@pytest.mark.parametrize(
    "peer, package, line",
    [
        ("megatron", "transformer_engine.pytorch", "pip install megatron-core 'transformer-engine[pytorch]'"),
        ("torchtitan", "torchtitan.components.loss", "pip install torchtitan==0.2.2"),
        ("huggingface", "transformers", "pip install transformers"),
    ],
)
def test_a_peer_that_is_not_installed_is_skipped_with_a_reason(peer, package, line, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(record.ROOT / "benchmarks" / "peers" / f"{peer}.py"))
    assert exit.value.code == 0
    assert re.fullmatch(f"SKIP .* is not installed .*; {re.escape(line)}\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "peer, world, argv, reason",
    [
        ("huggingface", 2, ["parallel.tp=2"], "Hugging Face is measured data parallel only, not with tp, pp or cp"),
        ("huggingface", 1, FP8_KEYS, "Hugging Face is measured in bf16 only, not in FP8"),
        ("huggingface", 1, ["model.family=gpt"], "Hugging Face has no gpt model with rope positions"),
        ("huggingface", 1, [*GPT_KEYS, "model.num_kv_heads=2"], "Hugging Face's GPT-2 has no grouped queries"),
        (
            "torchtitan",
            1,
            GPT_KEYS,
            "torchtitan's Llama 3 has rotary positions and an untied head, and it has no GPT-3",
        ),
        ("torchtitan", 1, FP8_KEYS, "torchtitan is measured in bf16 only, not in FP8"),
        (
            "torchtitan",
            2,
            ["parallel.tp=2", "parallel.sequence_parallel=false"],
            "torchtitan has no tensor parallelism without sequence parallelism",
        ),
        ("torchtitan", 2, ["parallel.cp=2"], "torchtitan's context parallelism needs GPUs"),
    ],
)
def test_what_a_peer_has_not_is_skipped_with_a_reason(peer, world, argv, reason, monkeypatch, capsys):
    module = peer_module(peer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit) as exit:
        module.main([*PEER_TINY, *argv])
    assert exit.value.code == 0 and capsys.readouterr().out.strip() == f"SKIP {reason}"


@pytest.mark.parametrize("peer, shown", [("huggingface", "Hugging Face"), ("torchtitan", "torchtitan")])
def test_keys_that_no_peer_knows_are_named(peer, shown, monkeypatch, capsys):
    module = peer_module(peer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit) as exit:
        module.main([*PEER_TINY, "train.recompute=full", "model.hidden_dropout=0.1"])
    message = f"train.recompute, model.hidden_dropout is not what the {shown} runner knows; leave it at its default"
    assert exit.value.code == 1 and capsys.readouterr().err.strip() == f"error: {message}"


PACKED = ["data.separate_documents=true", "data.document_length=20"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, world, argv", [pytest.param("lora", 1, PACKED, marks=pytest.mark.slow), ("sft", 2, PACKED)]
)
def test_fine_tuning_and_its_peer_really_run(case, world, argv):
    """On the same samples, by the same counting. Of packed LoRA two thirds of the documents' own operations count."""
    peer_module("huggingface")
    if case == "lora":
        pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    argv = [*PEER_TINY, *argv, "train.micro_batch_size=1", f"finetune.kind={case}", "--steps", "4"]
    both = [
        programs.launch(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(world),
                program,
                *argv,
            ],
            240.0,
            {"OMP_NUM_THREADS": "1"},
        )
        for program in (compare.OURS, "benchmarks/peers/huggingface.py")
    ]
    cfg = cli.load(argv[:-2])
    shape, data = cfg.model, build_data(cfg).train
    squares = measure.squared_lengths(cfg, data)
    counted = flops.full(shape, 64, squares) * (2 / 3 if case == "lora" else 1)
    assert counted <= flops.full(shape, 64)
    for figures in both:
        assert figures["world"] == world
        assert figures["tflops"] * figures["step_seconds"] * world * 1e12 == pytest.approx(8 * counted)


def test_a_peer_without_its_kernel_for_documents_is_not_measured(monkeypatch, capsys):
    """Its masks are right but slow: a ratio to them would flatter."""
    module = peer_module("huggingface")
    cfg = cli.load([*PEER_TINY, *PACKED])
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    module._skip_what_it_has_not(cfg, on_gpu=False)
    with pytest.raises(SystemExit) as exit:
        module._skip_what_it_has_not(cfg, on_gpu=True)
    assert exit.value.code == 0 and "documents apart by flash-attn, which is not installed" in capsys.readouterr().out
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    module._skip_what_it_has_not(cfg, on_gpu=True)


def test_peers_know_the_samples():
    """What Hugging Face's model is given: it shifts labels itself, and documents show in positions alone."""
    module, cfg = peer_module("huggingface"), cli.load([*PEER_TINY, *PACKED, "train.micro_batch_size=1"])
    loader = Loader(build_data(cfg).train, cfg, Mesh.offline(1))
    batch = loader.step(0, 0)[0]
    loader.close()
    inputs = module._inputs(batch, cfg)
    bounds, longest = module.packed_bounds(replace(batch, documents=as_documents([(0, 3, 8), (0, 1, 8)])))
    assert bounds.tolist() == [0, 3, 8, 9, 16] and longest == 7
    tokens, labels = inputs["input_ids"][0], inputs["labels"][0]
    starts = set(batch.documents.cu_seqlens[0][:-1])
    assert tokens.tolist() == batch.tokens[:, 0].tolist() and len(starts) > 2
    for i, (token, label) in enumerate(zip(tokens.tolist(), labels.tolist())):
        assert label == (-100 if i in starts else token)
        assert (inputs["position_ids"][0, i] == 0) == (i in starts)


@pytest.mark.parametrize(
    "peer, argv",
    [
        ("huggingface", []),
        ("huggingface", ["model.tie_embeddings=true"]),
        ("huggingface", GPT_KEYS),
        ("huggingface", ["model.rope_scaling.factor=4"]),
        ("torchtitan", []),
        ("torchtitan", ["model.num_kv_heads=null", "model.ffn_hidden_size=100"]),
    ],
)
def test_a_peer_builds_our_model(peer, argv):
    module, cfg = peer_module(peer), cli.load([*PEER_TINY, *argv])
    with torch.device("meta"):
        model = module.make_model(cfg, *([torch.float32] if peer == "torchtitan" else []))
    (chunk,) = offline_trainer(cfg, 1, 0).chunks
    count, ours = (sum(weight.numel() for weight in part.parameters()) for part in (model, chunk))
    assert count == ours


def test_a_stage_of_torchtitan_has_our_layers():
    module = peer_module("torchtitan")
    stages = module.stage_modules(cli.load([*PEER_TINY, "parallel.pp=2", "parallel.layers_per_stage=[3,1]"]))
    layers = [f"layers.{i}" for i in range(4)]
    assert stages == [["tok_embeddings", *layers[:3]], [layers[3], "norm", "output"]]


def test_a_tied_weight_lies_in_one_unit():
    """FSDP refuses a weight that lies in two."""
    module, cfg = peer_module("huggingface"), cli.load([*PEER_TINY, *GPT_KEYS, "model.tie_embeddings=true"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert measure.median_seconds(module.make_step(cfg, 1, CPU), 5, CPU) > 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "peer, world, argv",
    [
        pytest.param("huggingface", 2, [], marks=pytest.mark.slow),  # fine-tuning's, above, is the same program
        ("torchtitan", 1, []),
        ("torchtitan", 2, []),
        ("torchtitan", 4, ["parallel.tp=2"]),
        ("torchtitan", 4, ["parallel.pp=2", "parallel.vp=2"]),
    ],
)
def test_peers_really_run(peer, world, argv):
    """As programs of their own: one that ends only now and then is a bug that a function would not show."""
    peer_module(peer)
    figures = programs.launch(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(world),
            f"benchmarks/peers/{peer}.py",
            *PEER_TINY,
            *argv,
            "--steps",
            "4",
        ],
        240.0,
        {"OMP_NUM_THREADS": "1"},
    )
    assert figures["world"] == world and figures["step_seconds"] > 0


# ---- the machine and the host ---------------------------------------------------------------------------------------


@mock.patch.dict(ceilings.THEIRS, toy=SDPBackend.MATH)
def local_ceilings():
    calls = [floor.AttentionCall(1, 2, 2, 16, 32, 32, True, dropout) for dropout in (0.0, 0.1)]
    return [
        *ceilings.gemm_rows([(32, 48, 16)], "toy", CPU, (False, True)),
        *ceilings.attention_rows(calls, "toy", CPU),
        *ceilings.their_attention_rows("toy", (16, 32), 64, (2, 16), CPU),
        *ceilings.copy_rows(2**16, CPU),
    ]


def collective_ceilings():
    axis = Mesh.create().world
    return [*ceilings.collective_rows(2**12, axis, CPU), *ceilings.spread_rows((32, 48, 16), 2, CPU)]


def test_ceilings_are_rates(ranks, tmp_path, capsys):
    rows = [*local_ceilings(), *ranks(2, collective_ceilings)[0]]
    assert len(rows) == 2 * 3 + 2 + 8 + 1 + 2 + 1 and all(figure > 0 for _, _, figure, _ in rows)
    ceilings.show(rows, Namespace(json=True, results=tmp_path / "results.jsonl", commit=None))
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    written = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [{k: entry[k] for k in row} for entry, row in zip(written, printed, strict=True)] == printed


def spread_of(speeds):
    """The spread that two ranks find whose products take what is given."""
    Mesh.create()
    with mock.patch.object(ceilings, "seconds", lambda call, device, repeats: 1 / speeds[dist.get_rank()]):
        return next(ceilings.spread_rows((32, 48, 16), 2, CPU))


def test_the_spread_is_the_standard_deviation_of_all_ranks_speeds(ranks):
    for what, _, percent, unit in ranks(2, spread_of, (9.0, 11.0)):
        assert (what, unit) == ("spread of speeds, 2 ranks", "%") and percent == pytest.approx(100 * 2**0.5 / 10)


def test_ceilings_need_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="error: the ceilings are those of GPUs, and there is none"):
        ceilings.main([])


def test_host_costs_are_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "MICROBATCHES", 20)
    host.main(["--results", str(tmp_path / "results.jsonl")])
    entries = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [e["kind"] for e in entries] == ["host"] * 4
    assert all(e["seconds"] > 0 and e["peak_mib"] > 0 for e in entries)


def test_building_a_rank_of_175b_and_reading_at_2048_ranks_stay_cheap(tmp_path):
    """Against work that would grow with the model or the world: by four orders of magnitude, and 64 times."""
    small = tmp_path / "small.yaml"
    small.write_text(
        cli.to_yaml(
            cli.load([host.RECIPE, "model.hidden_size=384", "model.ffn_hidden_size=384", "model.vocab_size=1024"])
        )
    )
    host.build_rank(str(small))  # the first one loads modules
    build, toy, loader, few = (
        min((host.cost(work) for _ in range(5)), key=lambda cost: cost["seconds"])
        for work in (
            lambda: host.build_rank(host.RECIPE),
            lambda: host.build_rank(str(small)),
            host.loader_step(host.RECIPE, host.RANKS),
            host.loader_step(host.RECIPE, host.RANKS // 64),
        )
    )
    assert build["seconds"] < 10 * toy["seconds"] and build["peak_mib"] < 50
    assert loader["seconds"] < 20 * few["seconds"] and loader["peak_mib"] < 50
