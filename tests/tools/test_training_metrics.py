"""tools/training_metrics.py: the documented command and output, every published cell, every log that it reads."""

import json
import os
import re
import subprocess
import sys
from datetime import datetime

import pytest

from minitron.config import flops
from minitron.config.schema import ModelConfig
from minitron.planner.published import PUBLISHED
from minitron.runtime import log_formats
from tools import training_metrics as tool

# ---- the published tables: every cell is what the tool's functions make of the step time --------------------------

# planner/published.json; in a cell * marks an error of the document, which the tool's --help names.
DATA = json.loads(PUBLISHED.read_text())
PUBLISHED = {table["name"]: table for table in DATA["tables"]}
BY_NAME = {entry["name"]: entry for entry in DATA["reports"] + DATA["single"]}


def columns(table):
    """(GPUs, seconds per step, tokens per second, MFU in percent, days for 1T tokens) of each scale, as printed."""
    return zip(*table["cells"].values(), strict=True)


def reproduces(published: str, computed: float) -> bool:
    """To 0.1 % or half of the last printed digit."""
    decimals = len(published.partition(".")[2])
    return abs(float(published) - computed) <= max(0.5 * 10**-decimals, 1e-3 * abs(computed))


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_cell(name):
    table = PUBLISHED[name]
    count = table["model_flops"] * (tool.LORA_SHARE if table.get("lora") else 1)
    for gpus, seconds, *cells in columns(table):
        batch, seconds = table["samples_per_gpu"] * int(gpus), float(seconds)
        rate = tool.tokens_per_second(table["seq_len"], batch, seconds)
        computed = (
            rate,
            100 * tool.mfu(batch, count, seconds, int(gpus), table["peak_tflops"]),
            tool.days_to_train(1e12, rate),
        )
        for cell, value in zip(cells, computed, strict=True):
            assert reproduces(cell.rstrip("*"), value) != cell.endswith("*"), (gpus, cell, value)


def test_other_published_figures():
    later = BY_NAME["GPT-3 175B bf16, 25.02"]  # the only one with both
    seconds, gpus = float(later["step_seconds"]), later["gpus"]
    assert reproduces(later["mfu_percent"], 100 * tool.mfu(later["global_batch_size"], 2.2e15, seconds, gpus, 989))
    for report in DATA["reports"]:
        assert reproduces(report["report_seconds"], tool.report_seconds(float(report["tokens_per_second"])))
    assert reproduces("92712", tool.tokens_per_second(8192, 128, 11.31))  # the examples between the tables
    assert reproduces("124.84", tool.days_to_train(1e12, tool.tokens_per_second(8192, 128, 11.31)))
    assert reproduces("35.21", 100 * tool.mfu(128, 3.94e15, 11.31, 64, 1979))
    assert reproduces("37.68", 100 * tool.mfu(256, 2.2e15, 5.90, 128, 1979))


def test_the_documents_errors_are_explained_by_what_help_says():
    """Each number that --help puts in the place of a published one, from the tool's functions."""
    notes = " ".join(tool.NOTES.split())

    def says(text, computed):
        assert text in notes and reproduces(text.replace(",", ""), computed), (text, computed)

    rate = tool.tokens_per_second
    assert reproduces("90394", rate(2048, 256, 5.80)) and reproduces("128.04", tool.days_to_train(1e12, 90394.48))
    says("88,862", rate(2048, 256, 5.90))
    says("130.25", tool.days_to_train(1e12, rate(2048, 256, 5.90)))
    assert 76800 == 300 * 256
    assert reproduces("2248957", rate(8192, 4096, 14.92))
    says("2,239,949", rate(8192, 4096, 14.98))
    says("53.19", 100 * tool.mfu(4096, 3.94e15, 14.98, 2048, 989))
    says("5.17", tool.days_to_train(1e12, rate(8192, 4096, 14.98)))
    fp8 = [percent for *_, percent, _ in columns(PUBLISHED["Llama 3.1 70B FP8"])]
    assert f"FP8 has no MFU: {' '.join(fp8)} %" in notes
    shape = ModelConfig(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_heads=32, num_kv_heads=8, vocab_size=128256
    )
    with_scores = flops.full(shape, 4096)
    says("2.108", with_scores / 1e14)
    assert reproduces("1.84", flops.full(shape, 4096, squared_lengths=0) / 1e14)
    says("64.6", 100 * tool.mfu(32, with_scores, 1.32, 8, 989))
    says("116.6", tool.days_to_train(1e12, rate(4096, 32, 1.32)))
    assert reproduces("397184", rate(4096, 128, 1.32)) and reproduces("771011", rate(4096, 128, 0.68))
    says("394,202", rate(4096, 128, 1.33))
    says("283,706", rate(4096, 64, 0.924))
    says("40.8", tool.days_to_train(1e12, rate(4096, 64, 0.924)))
    says("36.46", 100 * tool.mfu(32, tool.LORA_SHARE * 1.84e14, 0.68, 8, 1979))
    says("759,838", rate(4096, 128, 0.69))
    assert 3168 == 99 * 32 and 3168 % 64
    says("0.70", tool.mfu(2048, 2.2e15, 25.39738855, 256, 989))
    says("0.35", tool.mfu(2048, 2.2e15, 25.39738855, 256, 1978))


# ---- the command ----------------------------------------------------------------------------------------------------

GKE = ["--batch_size", "2048", "--num_accelerators", "256", "--model_type", "gpt3-175b", "--accelerator_type", "h100"]


def dllogger_file(path, seconds, first=0):
    """As NeMo writes it, with records that have no time."""
    now = datetime(2024, 9, 27, 18, 57, 6, 984522)
    records = [log_formats.dllogger("PARAMETER", {"cfg/trainer/devices": 8}, now, now)]
    for step, x in enumerate(seconds, start=first):
        data = {"train_step_timing in s": x, "global_step": step}
        records += [log_formats.dllogger(step, data, now, now), log_formats.dllogger(step, {"val_loss": 1.0}, now, now)]
    path.write_text("\n".join(records) + "\n")
    return path


def command(*argv):
    return subprocess.run([sys.executable, tool.__file__, *map(str, argv)], capture_output=True, text=True, timeout=600)


def test_the_documented_command_prints_what_is_documented(tmp_path):
    """Its example, byte for byte, from step times whose mean has more digits than it prints."""
    seconds = 2048 * 2.2e15 / 256 / 692.98463368e12
    path = dllogger_file(tmp_path / "dllogger.json", [99.0] * 10 + [seconds] * 21 + [99.0] * 3)
    done = command("--file", path, *GKE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Average step time: 25.39738855\nTFLOPS/Accelerator: 692.98463368\nMFU: 0.70069225\n"
    found, peak = done.stderr.splitlines()
    assert found == f"{path}: DLLogger records, 21 of them from step 10 to 30"
    assert "989 TFLOP/s" in peak and "GKE" in peak and "989.5" in peak


@pytest.mark.parametrize(
    "options, used, others",
    [
        (["--precision", "fp8"], 1978, ["GKE", "Slurm", "1979"]),
        (["--precision", "fp8", "--max_flops", "1979"], 1979, ["--max_flops"]),
        (["--max_flops", "989.5"], 989.5, ["--max_flops"]),
        (["--accelerator_type", "b200"], 2250, ["b200"]),
    ],
)
def test_the_peak_that_is_used_is_named_with_those_of_other_documents(tmp_path, capsys, options, used, others):
    path = dllogger_file(tmp_path / "log", [20.0] * 40)
    figures, said = printed(capsys, "--file", path, *GKE, *options)
    assert figures["MFU"] == pytest.approx(figures["TFLOPS/Accelerator"] / used, rel=1e-6)
    assert f"{used:g} TFLOP/s" in said and all(word in said for word in others)
    assert "Slurm" not in said or "GKE" in others


def printed(capsys, *argv):
    tool.main(list(map(str, argv)))
    out, err = capsys.readouterr()
    pairs = (line.split(": ") for line in out.splitlines())
    return {name: float(value.split(",")[0]) for name, value in pairs}, err


def test_precision_window_and_overrides(tmp_path, capsys):
    path = dllogger_file(tmp_path / "log", [float(x) for x in range(1, 50)])
    window = ["--start_step", "3", "--end_step", "5"]
    figures, _ = printed(capsys, "--file", path, *GKE, *window, "--precision", "fp8")
    seconds = (4.0 + 5.0 + 6.0) / 3
    assert figures == pytest.approx(
        {
            "Average step time": seconds,
            "TFLOPS/Accelerator": 2048 * 2.2e15 / seconds / 256 / 1e12,
            "MFU": 2048 * 2.2e15 / seconds / 256 / 1978e12,
        },
        rel=1e-8,
    )
    own, _ = printed(capsys, "--file", path, *GKE, *window, "--model_flops", 1e15, "--max_flops", 500, "--lora")
    assert own["MFU"] == pytest.approx(2048 * 1e15 * 2 / 3 / seconds / 256 / 500e12)


def test_an_impossible_mfu_is_warned_of(tmp_path, capsys):
    """The document's command for a job of 256 GPUs, typed with 8: the figures are printed, and the cause is named."""
    path = dllogger_file(tmp_path / "log", [20.0] * 40)
    figures, said = printed(capsys, "--file", path, *GKE, "--num_accelerators", 8)
    assert figures["MFU"] > 1 and "above 1; check --batch_size=2048, --num_accelerators=8" in said
    assert "warning" not in printed(capsys, "--file", path, *GKE)[1]


def test_every_counting_tokens_and_times_with_a_configuration(tmp_path, capsys):
    """JUWELS' 175B: the hardware count is the line's own TFLOPs."""
    log, config = tmp_path / "job.out", tmp_path / "config.yaml"
    config.write_text(
        "model: {family: gpt, num_layers: 96, hidden_size: 12288, ffn_hidden_size: 49152,\n"
        "  num_heads: 96, num_kv_heads: null, vocab_size: 51200}\n"
        "train: {seq_len: 2048, recompute: full}\n"
    )
    log.write_text(
        "[default3]: iteration       50/ 3125000 | consumed samples:         4800 | elapsed time per "
        "iteration (s): 5.3247 | learning rate: 2.219E-06 | samples per second: 18.029 | TFLOPs: 137.89 |\n"
    )
    argv = [
        "--file",
        log,
        "--batch_size",
        96,
        "--num_accelerators",
        384,
        "--config",
        config,
        "--accelerator_type",
        "a100",
        "--end_step",
        50,
    ]
    tool.main(list(map(str, argv)))
    assert re.search(r"^MFU \(hardware\): 0\.\d{8}, 137\.89 TFLOPS/Accelerator$", capsys.readouterr().out, re.M)
    figures, _ = printed(capsys, *argv, "--train_tokens", 5e11)
    rate = 2048 * 96 / 5.3247
    assert figures["MFU (full)"] == figures["MFU"] and figures["MFU (causal)"] < figures["MFU"]
    frozen, _ = printed(capsys, *argv, "--lora")  # recomputation stays: of four passes one falls away
    for name, share in ("", 2 / 3), (" (full)", 2 / 3), (" (causal)", 2 / 3), (" (hardware)", 3 / 4):
        assert frozen[f"MFU{name}"] == pytest.approx(share * figures[f"MFU{name}"], rel=1e-6)
    assert figures["Tokens/sec"] == pytest.approx(rate, abs=0.005)
    assert figures["Days to train 5e+11 tokens"] == pytest.approx(5e11 / rate / 86400, abs=0.005)
    assert figures["Report time (20,000,000 tokens)"] == pytest.approx(20e6 / rate, abs=0.005)
    plain, _ = printed(capsys, "--file", log, *GKE, "--end_step", 50, "--seq_len", 128)
    assert plain["Tokens/sec"] == pytest.approx(128 * 2048 / 5.3247, abs=0.005)


DOCUMENTS = {
    "megatron": (
        "[default3]: iteration       10/ 3125000 | consumed samples:          960 | elapsed time per "
        "iteration (s): 7.2310 | learning rate: 4.438E-07 |",
        "Megatron lines",
        {10: 7.2310},
    ),
    "bar": (
        "Epoch 0: :  98%|█████████▊| 49/50 [31:51<00:00, global_step=49.0, train_step_timing in s=6.1]\r"
        "Epoch 0: : 100%|██████████| 50/50 [31:51<00:00, reduced_train_loss=6.130, global_step=50.0, "
        "consumed_samples=76800.0, train_step_timing in s=5.900, val_loss=6.250]",
        "NeMo lines",
        {49: 6.1, 50: 5.9},
    ),
    "bar without global_step": (
        "Epoch 0: : 100%|██████████| 50/50 [31:51<00:00, train_step_timing in s=5.900]",
        "NeMo lines",
        {50: 5.9},
    ),
    "pipe": (
        "Training epoch 0, iteration 49/49 | lr: 7.496e-06 | global_batch_size: 128 | global_step: 49 | "
        "reduced_train_loss: 11.96 | train_step_timing in s: 12.39 | consumed_samples: 6400",
        "NeMo lines",
        {49: 12.39},
    ),
    "dllogger, in a job's output": (
        '[0]: DLLL {"type": "LOG", "step": 47, "data": {"train_step_timing in s": 25.1}}',
        "DLLogger records",
        {47: 25.1},
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_others_write_is_read(tmp_path, name):
    text, kind, steps = DOCUMENTS[name]
    (tmp_path / "log").write_text(f"starting\n{text}\ndone\n")
    assert tool.read_steps(tmp_path / "log") == (kind, steps)


@pytest.mark.parametrize(
    "form, kind, counts_from",
    [
        (log_formats.megatron, "Megatron lines", 1),
        (log_formats.megatron_core, "Megatron lines", 1),
        (log_formats.nemo_bar, "NeMo lines", 0),
        (log_formats.nemo_pipe, "NeMo lines", 0),
    ],
)
def test_what_we_print_is_read(tmp_path, form, kind, counts_from):
    text = ""
    for step in range(1, 21):
        it = log_formats.Iteration(step, 8 * step, 5.0, 1.0, 1e-4, 1.0, seconds=step / 8, memory_gib=70.0, batch_size=8)
        text += form(log_formats.Line((it,), 20, {"hardware": 1.0, "causal": 1.0}, datetime.now(), step, 2.0)) + "\n"
    (tmp_path / "log").write_text(text)
    found, steps = tool.read_steps(tmp_path / "log")
    assert found == kind and list(steps) == list(range(counts_from, 20 + counts_from))
    for step, seconds in steps.items():  # a bar shows three digits, the others four or tenths of a millisecond
        assert seconds == pytest.approx(
            (step + 1 - counts_from) / 8, rel=5e-3 if form is log_formats.nemo_bar else 5e-4
        )


def test_a_warm_up_inside_of_a_mean_is_said(tmp_path, capsys):
    line = " iteration {:8d}/ 100 | consumed samples: 1 | elapsed time per iteration (s): {:.4f} |\n"
    (tmp_path / "log").write_text("".join(line.format(step, 90.0 if step == 10 else 2.0) for step in range(10, 40, 10)))
    figures, err = printed(capsys, "--file", tmp_path / "log", *GKE)
    assert "each is a mean over 10 steps, the first up to 10: --start_step 11 leaves it out" in err
    assert figures["Average step time"] == pytest.approx((90.0 + 2 + 2) / 3)
    figures, err = printed(capsys, "--file", tmp_path / "log", *GKE, "--start_step", 11)
    assert figures["Average step time"] == 2.0 and "mean over" not in err


def test_of_a_repeated_step_the_last_counts_and_an_unfinished_line_is_no_mistake(tmp_path):
    path = dllogger_file(tmp_path / "log", [1.0, 2.0])
    again = dllogger_file(tmp_path / "again", [3.0], first=1)
    path.write_text(path.read_text() + again.read_text() + 'DLLL {"step": 2')
    assert tool.read_steps(path) == ("DLLogger records", {0: 1.0, 1: 3.0})


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"--file": "nowhere"}, r"--file nowhere cannot be read: No such file or directory"),
        ({"--file": "."}, r"--file \. cannot be read: Is a directory"),
        ({"--file": "{empty}"}, r"--file \S+ holds no step times; it has to be a dllogger.json, or a log"),
        ({"--file": "{binary}"}, r"--file \S+ holds no step times"),
        ({"--file": "{broken}"}, r"broken:1 is a broken record: 'DLLL \{"),
        (
            {"--start_step": "60", "--end_step": "70"},
            r"no step from --start_step 60 to --end_step 70 in \S+, whose DLLogger records have steps 0 to 49",
        ),
        ({"--file": "{zero}"}, r"the steps from 10 to 30 in \S+ take 0.0 s in all: no log of a run"),
        ({"--file": "{deep}"}, "deep:1 is a broken record"),
        ({"--file": "{infinite}"}, "infinite:1 is a broken record"),
        ({"--file": "{pipe}"}, "pipe cannot be read"),
        ({"--file": None}, "the following arguments are required: --file"),
        ({"--batch_size": None}, "the following arguments are required: --batch_size"),
        ({"--num_accelerators": None}, "the following arguments are required: --num_accelerators"),
        ({"--batch_size": "0"}, "argument --batch_size: 0 is not a whole number"),
        ({"--model_type": None}, "what a sample costs is missing; give --model_type, --model_flops or --config"),
        ({"--model_type": "gpt4"}, "argument --model_type: invalid choice: 'gpt4'"),
        (
            {"--accelerator_type": None},
            "the bf16 peak of the accelerator is not known; give --accelerator_type or --max_flops",
        ),
        ({"--accelerator_type": "a100", "--precision": "fp8"}, "the fp8 peak of a100 is not known"),
        ({"--config": "nowhere.yaml"}, "nowhere.yaml cannot be read"),
    ],
)
def test_mistakes_are_one_line(tmp_path, change, message):
    files = {name: tmp_path / name for name in ("empty", "binary", "broken", "deep", "infinite", "pipe")}
    files["empty"].write_text("")
    files["binary"].write_bytes(bytes(range(256)))
    files["broken"].write_text('DLLL {"step": }\nDLLL {"step": 1}\n')
    files["deep"].write_text(f"DLLL {'[' * 100_000}\n\n")
    files["infinite"].write_text("global_step=1e999, train_step_timing in s=1.5\n\n")
    os.mkfifo(files["pipe"])
    files["zero"] = dllogger_file(tmp_path / "zero", [0.0] * 50)
    options = {"--file": str(dllogger_file(tmp_path / "log", [1.0] * 50)), **dict(zip(GKE[::2], GKE[1::2])), **change}
    argv = [part.format(**files) for pair in options.items() if pair[1] is not None for part in pair]
    with pytest.raises(ValueError, match=message) as error:
        tool.main(argv)
    assert "\n" not in str(error.value)


def test_a_mistake_ends_the_command_with_status_1(tmp_path):
    done = command("--file", tmp_path / "nowhere", *GKE)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: --file")


def test_help_names_the_documents_errors(capsys):
    with pytest.raises(SystemExit):
        tool.main(["--help"])
    said = capsys.readouterr().out
    assert tool.NOTES.strip() in said and all(peak in said for peak in ("1978", "1979", "989.5"))
