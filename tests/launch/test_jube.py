"""JUBE's benchmark file: its patterns read our log and the benchmark's, and JUBE makes the documented table of them.

JUBE is no Python package; Debian has it (`apt install jube`). Where it is missing, the patterns are applied here.
"""

import json
import os
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from minitron.data.indexed import IndexedDataset
from ports import free_port
from slurm_cluster import Cluster, until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "launch" / "jube"
BENCHMARK = yaml.safe_load((FOLDER / "nlp_benchmark.yaml").read_text())
# JUBE's own, from its documentation: an integer, one that is not kept, a number.
JUBE_PATTERNS = {
    "jube_pat_int": r"([+-]?\d+)",
    "jube_pat_nint": r"(?:[+-]?\d+)",
    "jube_pat_fp": r"([+-]?(?:\d*\.?\d+(?:[eE][-+]?\d+)?|\d+\.))",
}
# The benchmark's published job.out of 175B on 96 nodes of 4 GPUs: seconds and TFLOPs of its lines.
PUBLISHED = [(7.2310, 101.54), (5.3551, 137.10), (5.6192, 130.66), (5.3291, 137.77), (5.3247, 137.89)]
LINE = (
    "[default3]: iteration {:8d}/ 3125000 | consumed samples: {:12d} | elapsed time per iteration (s): {:.4f} | "
    "learning rate: 4.438E-07 | global batch size:    96 | lm loss: 1.010967E+01 | loss scale: 4096.0 | grad norm: "
    "178.553 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: {:.3f} | "
    "TFLOPs: {:.2f} |"
)
COLUMNS = [
    "Model_Size (Billion Param)",
    "Nodes",
    "Batch_Size",
    "Pipeline_Parallel",
    "Tensor_Parallel",
    "Iterations",
    "Avg_TFLOPs/GPU",
    "Tokens/sec",
    "time_to_report_in_seconds",
    "baseline_in_seconds",
    "Verdict",
]


def published_log() -> str:
    lines = [LINE.format(10 * i, 960 * i, s, 96 / s, tflops) for i, (s, tflops) in enumerate(PUBLISHED, 1)]
    return "\n".join(["Submitted batch job 10011638", *lines, ""])


def analysed(log: str, **parameters: int | str) -> dict:
    """What the file's patterns say of a log: first, _avg and _max of each, then those that are formulas."""
    values: dict = dict(parameters)
    for pattern in BENCHMARK["patternset"]["pattern"]:
        name, convert = pattern["name"], {"int": int, "float": float, "string": str}[pattern.get("type", "string")]
        text = string.Template(pattern["_"]).substitute(JUBE_PATTERNS | values)
        if pattern.get("mode") == "python":
            values[name] = convert(eval(text, {"__builtins__": {}}))  # of our own file, as JUBE does
        elif found := [convert(match) for match in re.findall(text, log)]:
            values |= {name: found[0], f"{name}_avg": sum(found) / len(found), f"{name}_max": max(found)}
    return values


def seconds_of(log: str) -> list[float]:
    return [float(line.split("(s): ")[1].split()[0]) for line in log.splitlines() if "elapsed time" in line]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands: sbatch notes its arguments; its job is done at once, with the published log."""
    scripts = {
        "scontrol": "echo 127.0.0.1",
        "srun": f'printf %s "$MINITRON_SECRET" >"{tmp_path}/secret"\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"',
        "sbatch": f'printf "%s\\n" "$@" "$NCCL_SOCKET_IFNAME$MASTER_SUFFIX" >"{tmp_path}/sbatch.txt"\n'
        f'cp "{tmp_path}/published.out" job.out\ntouch ready',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    (tmp_path / "published.out").write_text(published_log())
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def job(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The job script as Slurm would run it on one node with two ranks."""
    env = os.environ | {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_PROCID": "0",
        "MASTER_PORT": f"{free_port()}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "RESTARTS": "20",  # as somebody may have exported who starts other jobs, too
        "SPARE_NODES": "1",
    }
    command = ["bash", str(FOLDER / "job.sbatch"), str(ROOT), sys.executable, "2", *arguments]
    with open(folder / "job.err", "w") as stderr:
        done = subprocess.run(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=600
        )
    done.stderr = (folder / "job.err").read_text()
    return done


def test_patterns_read_the_job_out_of_a_run(tmp_path, slurm):
    result = job(
        tmp_path,
        "configs/gpt3_13b.yaml",
        "model.num_layers=2",
        "model.hidden_size=32",
        "model.num_heads=2",
        "model.ffn_hidden_size=64",
        "model.vocab_size=64",
        "parallel.tp=1",
        "parallel.pp=2",
        "train.seq_len=32",
        "train.global_batch_size=8",
        "train.steps=6",
        "precision.dtype=fp32",
        "optimizer.grad_dtype=null",
        "log.every=2",
    )
    assert result.returncode == 0 and (tmp_path / "ready").exists(), result.stderr
    secret = (tmp_path / "secret").read_text()
    assert len(secret) == 64 and secret not in result.stdout + result.stderr
    assert "MINITRON_SECRET" not in result.stdout  # the ranks have it, so none says that it lacks
    values = analysed(result.stdout, global_batch_size=8, sequence_length=32, report_tokens=20_000_000, baseline=560)
    seconds = seconds_of(result.stdout)
    assert len(seconds) == 3 and "[default1]: iteration " in result.stdout
    assert values["iterations"] == 6 and values["jobid"] == 17 and values["tflops_pat_avg"] >= 0
    versions = dict(line.split(": ", 1) for line in result.stdout.split(" iteration ")[0].splitlines() if ": " in line)
    assert versions["PyTorch"] == f"{torch.__version__}, commit {torch.version.git_version}"
    assert versions["CUDA"] == (torch.version.cuda or "none")
    assert {"NCCL", "cuDNN", "Transformer Engine", "flash-attn", "Python"} <= versions.keys()
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    commit = f"commit {git.stdout.strip()}" if git.returncode == 0 else "no git checkout"
    assert re.search(rf", {commit}( and changes)?$", versions["minitron"])
    assert values["tokens_per_second"] == pytest.approx(8 * 32 / (sum(seconds) / 3))
    assert values["report_time"] == pytest.approx(20_000_000 * sum(seconds) / 3 / (8 * 32))


def test_a_job_that_fails_says_so_to_jube(tmp_path, slurm):
    result = job(tmp_path, "configs/gpt3_13b.yaml", "train.steps=0")
    secret = (tmp_path / "secret").read_text()
    assert result.returncode != 0 and (tmp_path / "error").exists() and not (tmp_path / "ready").exists()
    assert "error: train.steps=0" in result.stderr
    assert (tmp_path / "stderr").read_text().startswith("error: train.steps=0")  # where `jube info` looks
    job(tmp_path, "configs/gpt3_13b.yaml", "train.steps=0")
    assert (tmp_path / "secret").read_text() != secret  # each job has its own


def test_patterns_read_the_published_job_out():
    values = analysed(
        published_log(), global_batch_size=96, sequence_length=2048, report_tokens=20_000_000, baseline=560
    )
    mean = sum(s for s, _ in PUBLISHED) / len(PUBLISHED)
    assert values["iter_pat"] == 10 and values["iterations"] == 50 and values["jobid"] == 10011638
    assert values["tflops_pat_avg"] == pytest.approx(sum(t for _, t in PUBLISHED) / len(PUBLISHED))
    assert values["tokens_per_second"] == pytest.approx(96 * 2048 / mean)


@pytest.mark.parametrize("batch, tokens_per_second, report", [(1024, 60777.68, 329.07), (96, 36055.39, 554.70)])
def test_report_time_of_the_published_table(batch, tokens_per_second, report):
    seconds = batch * 2048 / tokens_per_second
    values = analysed(
        LINE.format(20, 0, seconds, batch / seconds, 0),
        global_batch_size=batch,
        sequence_length=2048,
        report_tokens=20_000_000,
        baseline=560,
    )
    # The log has four digits after the point, the table two.
    assert values["tokens_per_second"] == pytest.approx(tokens_per_second, rel=0.5e-4 / seconds + 1e-9)
    assert values["report_time"] == pytest.approx(report, abs=0.005 + report * 0.5e-4 / seconds)


@pytest.mark.parametrize(
    "seconds, baseline, verdict",
    [(554.70, 560, "pass"), (560, 560, "pass"), (560.01, 560, "fail"), (329.07, "none", "no baseline")],
)
def test_the_report_time_is_judged_by_the_baseline(seconds, baseline, verdict):
    """One iteration of all the tokens; the bound is one that may be reached."""
    values = analysed(
        LINE.format(20, 0, seconds, 1, 0),
        global_batch_size=1000,
        sequence_length=20_000,
        report_tokens=20_000_000,
        baseline=baseline,
    )
    assert values["report_time"] == pytest.approx(seconds) and values["verdict"] == verdict


def test_build_prepares_the_data_and_finds_a_layout_that_does_not_fit(tmp_path):
    documents = [f"document {i} of some length" for i in range(11)]
    (tmp_path / "oscar.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    env = os.environ | {
        "DATASET": str(tmp_path / "oscar.jsonl"),
        "PREFIX": str(tmp_path / "data/oscar"),
        "TOKENIZER": "bytes",
    }
    command = ["bash", str(FOLDER / "build.sh"), sys.executable, "24", "configs/gpt3_13b.yaml"]
    result = subprocess.run([*command, "parallel.tp=5"], env=env, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("error: parallel.tp")
    dataset = IndexedDataset(f"{env['PREFIX']}_text_document")
    assert len(dataset) == len(documents)
    assert bytes(dataset.get(3)[:-1].astype("uint8")).decode() == documents[3]
    other = subprocess.run(command, env=env | {"DATASET": "other.jsonl"}, capture_output=True, text=True)
    assert other.returncode == 1 and other.stderr.count("\n") == 1, other.stderr
    assert (
        env["DATASET"] in other.stderr
        and "other.jsonl" in other.stderr
        and "set another dataset_prefix" in other.stderr
    )
    again = subprocess.run([*command, "parallel.tp=5"], env=env, capture_output=True, text=True)
    assert again.stderr.splitlines()[-1].startswith("error: parallel.tp"), "the same one is used as it is"


# ---- JUBE itself --------------------------------------------------------------------------------------------------

needs_jube = pytest.mark.skipif(shutil.which("jube") is None, reason="no JUBE; apt install jube")


def write_benchmark(folder: Path, **parameters: str | int) -> None:
    """The shipped file in `folder`, with this environment instead of a new one and these parameters."""
    benchmark = yaml.safe_load((FOLDER / "nlp_benchmark.yaml").read_text())
    setup = next(step for step in benchmark["step"] if step["name"] == "setup")
    setup["do"] = "test -d $venv"
    here = {"venv": sys.prefix, "minitron": str(ROOT), **parameters}
    for parameter in benchmark["parameterset"][0]["parameter"] + benchmark["parameterset"][1]["parameter"]:
        if parameter["name"] in here:
            parameter["_"] = f"{here[parameter['name']]}".format(parameter["_"])
    (folder / "nlp_benchmark.yaml").write_text(yaml.safe_dump(benchmark, sort_keys=False))


def jube(folder: Path, *command: str, status: int = 0, **variables: str) -> str:
    result = subprocess.run(
        ["jube", *command], cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout


def result_of(folder: Path, **variables: str) -> dict[str, str]:
    """The last row of the table, by the columns' titles."""
    output = jube(folder, "result", "-a", "nlp_benchmark_run", **variables)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    assert [title for title in rows[0] if title in COLUMNS] == COLUMNS
    return dict(zip(rows[0], rows[-1], strict=True))


@needs_jube
@pytest.mark.parametrize("size, nodes, tp, pp, gas, text", [(13, 8, 2, 4, 256, True), (175, 96, 4, 16, 16, False)])
def test_jube_runs_the_steps_and_makes_the_table(tmp_path, slurm, size, nodes, tp, pp, gas, text):
    here = {}
    if text:
        (tmp_path / "oscar.jsonl").write_text(json.dumps({"text": "a document"}) + "\n")
        here = {"dataset": tmp_path / "oscar.jsonl", "dataset_prefix": tmp_path / "oscar", "tokenizer": "bytes"}
    write_benchmark(tmp_path, **here)
    jube(tmp_path, "run", "nlp_benchmark.yaml", "--tag", str(size), *([] if text else ["jwb"]))
    assert "ERROR" not in (log := "".join(p.read_text() for p in tmp_path.glob("nlp_benchmark_run/*/*/stderr"))), log
    table = result_of(tmp_path)
    batch = nodes * 4 // (tp * pp) * gas
    tokens_per_second = batch * 2048 / (sum(s for s, _ in PUBLISHED) / len(PUBLISHED))
    assert [int(table[title]) for title in COLUMNS[:6]] == [size, nodes, batch, pp, tp, 50]  # of the published log
    assert float(table["Tokens/sec"]) == pytest.approx(tokens_per_second, abs=0.005)
    assert float(table["time_to_report_in_seconds"]) == pytest.approx(20_000_000 / tokens_per_second, abs=0.005)
    baseline, verdict = table["baseline_in_seconds"], table["Verdict"]
    if size == 13:
        assert (baseline, verdict) == ("none", "no baseline")
    else:
        assert (baseline, verdict) == ("560", "pass" if 20_000_000 / tokens_per_second <= 560 else "fail")
    submitted = (tmp_path / "sbatch.txt").read_text().split()
    assert {f"--nodes={nodes}", "--gres=gpu:4", "--output=job.out"} <= set(submitted)
    assert {
        f"configs/gpt3_{size}b_jube.yaml",
        f"parallel.tp={tp}",
        f"parallel.pp={pp}",
        f"parallel.vp={6 if size == 175 else 1}",
        "train.seq_len=2048",
        f"train.global_batch_size={batch}",
        "train.micro_batch_size=1",
        "log.every=10",
        f"train.steps={20 if size == 13 else 50}",
    } <= set(submitted)
    path = f"data.paths=[{tmp_path}/oscar_text_document]"
    assert ({"data.source=indexed", "data.split=7,3,1", path} if text else {"data.source=mock"}) <= set(submitted)
    assert (tmp_path / "oscar_text_document.idx").exists() == text
    assert ({"--partition=booster", "ib0i"} <= set(submitted)) != text  # JUWELS Booster's partition and network


@needs_jube
def test_gpus_that_slurm_does_not_manage(tmp_path, slurm):
    write_benchmark(tmp_path, gres="")
    jube(tmp_path, "run", "nlp_benchmark.yaml", "--tag", "13")
    submitted = (tmp_path / "sbatch.txt").read_text()
    assert "--nodes=8" in submitted and "--gres" not in submitted


@needs_jube
@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong, reason",
    [
        (dict(tp_size=5), "parallel.tp*pp*cp=5*4*1=20 does not divide"),
        (dict(nodes=1, gpus_per_node=2), "parallel.tp*pp*cp=2*4*1=8 needs 8 ranks, but there are 2"),
    ],
)
def test_jube_prints_the_reason_of_a_failed_step(tmp_path, slurm, wrong, reason):
    """By the manual's command."""
    write_benchmark(tmp_path, **wrong)
    jube(tmp_path, "run", "nlp_benchmark.yaml", "--tag", "13")
    [command] = re.findall(r"`jube (info .*) -s STEP`", (ROOT / "launch/README.md").read_text())
    found = jube(tmp_path, *command.replace("launch/jube/", "").split(), "-s", "build").split("Errors found")[1]
    assert f"build/work/stderr:\nerror: {reason}" in found


@needs_jube
@pytest.mark.parametrize("tags", [[], ["--tag", "176"], ["--tag", "13", "175"]], ids=["none", "unknown", "both"])
def test_a_tag_that_names_no_model_is_one_line(tmp_path, tags):
    write_benchmark(tmp_path)
    assert jube(tmp_path, "run", "nlp_benchmark.yaml", *tags, status=1).split("\n") == [
        "",
        '"error: no model; give --tag 175 or --tag 13" cannot be represented as a "int"',
        "",
    ]


@needs_jube
def test_jube_on_slurm(tmp_path):
    """The benchmark as its users run it, with a small model on the two nodes of a cluster, until its time is up."""
    tiny = (
        "{} model.num_layers=4 model.hidden_size=32 model.num_heads=2 model.ffn_hidden_size=64 model.vocab_size=64 "
        "precision.dtype=fp32 optimizer.grad_dtype=null log.every=2"
    )
    with Cluster() as cluster:
        write_benchmark(
            tmp_path,
            nodes=2,
            gpus_per_node=1,
            tp_size=1,
            pp_size=2,
            gas=8,
            sequence_length=32,
            steps=10**6,
            environment="MASTER_ADDR=localhost OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=",
            arguments=tiny,
        )
        jube(tmp_path, "run", "nlp_benchmark.yaml", "--tag", "13", **cluster.environment)
        [work] = tmp_path.glob("nlp_benchmark_run/000000/*_run/work")
        out = work / "job.out"
        until(
            lambda: out.exists() and len(seconds_of(out.read_text())) > 2 or (work / "error").exists(),
            600,
            cluster.logs,
        )
        cluster.run("scancel", "--signal=USR1", "--name=nlp-all")  # what --signal=USR1@120 does
        until(lambda: {path.name for path in work.iterdir()} & {"ready", "error"}, 600, cluster.logs)
        assert (work / "ready").exists(), (work / "job.err").read_text()
        jube(tmp_path, "continue", "nlp_benchmark_run", "-i", "last", **cluster.environment)
        table = result_of(tmp_path, **cluster.environment)
    mean = sum(seconds := seconds_of(out.read_text())) / len(seconds)
    assert [int(table[title]) for title in COLUMNS[:6]] == [13, 2, 8, 2, 1, 2 * len(seconds)]
    assert float(table["Tokens/sec"]) == pytest.approx(8 * 32 / mean, rel=1e-4)
