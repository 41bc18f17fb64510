"""The Slurm jobs as they are shipped, on a real Slurm of two nodes, with small models on CPU ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minitron import pretrain
from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.runtime.log import Iteration, Log
from minitron.runtime.signals import Listener
from minitron.runtime.stop import Stop
from slurm_cluster import Cluster, until

ROOT = Path(__file__).parents[2]
TINY = (
    "model.num_layers=8 model.hidden_size=32 model.ffn_hidden_size=64 model.num_heads=4 model.vocab_size=257 "
    "model.vocab_multiple=64 model.max_positions=64 train.seq_len=32 train.micro_batch_size=4 "
    "parallel.tp=1 parallel.pp=2 parallel.vp=2"
)


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as cluster:
        yield cluster


class Stage:
    """A staging area, and what its users type."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        # One rank a node stands for eight GPUs; both nodes are this machine.
        self.variables = dict(
            STAGE_PATH=str(folder),
            VENV=sys.prefix,
            DTYPE="bf16",
            DATASET="mock",
            MIN_NODES="1",
            SLURM_GPUS_PER_NODE="null",
            RUN_CONF_GPUS_PER_NODE="1",
            MASTER_ADDR="localhost",
            CUDA_VISIBLE_DEVICES="",
            EXTRA_ARGS=TINY,
            TOKENIZER="bytes",
        )

    def submit(self, cluster: Cluster, *arguments: str, size: str = "175b", **variables: str) -> int:
        options = [f"--output={self.folder}/%j.out", *(arguments or ["-N2"])]
        return cluster.submit(*options, str(ROOT / "launch" / f"{size}.sbatch"), **self.variables | variables)

    def output(self, job: int) -> str:
        """Of the batch script."""
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def metrics(self, job: int, kind: str = "step") -> list[dict]:
        lines = [
            line
            for path in self.folder.glob(f"results/*/*/*/*/{job}/metrics.jsonl")
            for line in path.read_text().splitlines()
        ]
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def script(self, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", str(ROOT / "launch" / name), *arguments],
            capture_output=True,
            text=True,
            env=os.environ | self.variables | variables,
            cwd=self.folder,
            timeout=600,
        )


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path / "stage")


def write_shards(folder: Path, count: int) -> list[Path]:
    """JSONL of real text, the source of Python's `os`, in The Pile's form."""
    folder.mkdir(parents=True)
    words = Path(os.__file__).read_text().split()
    shards = [folder / f"{i:02d}.jsonl" for i in range(count)]
    for i, shard in enumerate(shards):
        texts = [" ".join(words[k : k + 60]) for k in range(i, 3000, 60)]
        shard.write_text("".join(json.dumps({"text": text, "meta": {"set": "Github"}}) + "\n" for text in texts))
    return shards


# ---- the dataset --------------------------------------------------------------------------------------------------


def test_dataset_from_the_layout_of_the_pile(stage, tmp_path):
    write_shards(tmp_path / "pile" / "train", 5)
    done = stage.script("generate_dataset.sh", "gpt3", "../pile", WORKERS="1")
    assert done.returncode == 0, done.stderr
    assert "Taking the first 4 of 5 shards; FILES=5 would take all\n" in done.stdout
    folder = stage.folder / "gpt3-dataset"
    documented = {f"my-gpt3_0{i}_text_document.{ending}" for i in range(4) for ending in ("bin", "idx")}
    assert documented == {path.name for path in folder.iterdir() if path.suffix != ".json"}
    checked = stage.script("check_dataset.sh")
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.splitlines()[-1] == f"Dataset generation completed successfully at: {folder}"

    again = stage.script("generate_dataset.sh", "gpt3", "../pile", WORKERS="1")
    assert again.returncode == 0 and again.stdout.count("is there already") == 4
    with open(folder / "my-gpt3_02_text_document.bin", "r+b") as file:
        file.truncate(100)
    damaged = stage.script("check_dataset.sh")
    assert damaged.returncode == 1 and "completed" not in damaged.stdout
    assert "my-gpt3_02_text_document" in damaged.stderr and "generate it again" in damaged.stderr
    (folder / "my-gpt3_03_text_document.idx").unlink()
    missing = stage.script("check_dataset.sh")
    assert missing.returncode == 1 and missing.stdout == ""
    assert re.fullmatch(r"error: .*/my-gpt3_03_text_document.idx is missing; see .*, then run .*\n", missing.stderr)


@pytest.mark.parametrize(
    "arguments, variables, message",
    [
        (["gpt3"], {}, "give a dataset and its text"),
        (["bert", "x.jsonl"], {}, "'bert' is not a dataset; use gpt3 or llama3.1"),
        (["gpt3", "."], {}, "holds no *.jsonl, *.jsonl.gz, *.jsonl.xz or *.jsonl.zst"),
        (["gpt3", "x.jsonl"], {}, "1 shard(s) make no 4 pairs of files; give more, or set FILES=1"),
        (["gpt3", "x.jsonl"], {"FILES": "1"}, "x.jsonl: no such shard"),
        (["gpt3", "x.jsonl"], {"FILES": "none"}, "FILES=none is not a number of files; use 1 to 99"),
        (["gpt3", "x.jsonl"], {"STAGE_PATH": ""}, "STAGE_PATH is not set"),
        (["gpt3", "x.jsonl"], {"STAGE_PATH": "/nowhere"}, "STAGE_PATH=/nowhere is no folder"),
        (["gpt3", "x.jsonl"], {"VENV": "/nowhere"}, "there is no /nowhere/bin/python; run launch/setup.sh"),
        (
            ["gpt3", "x.jsonl"],
            {"CONTAINER": "/nowhere.sqsh"},
            "there is no CONTAINER=/nowhere.sqsh; run IMAGE=docker://",
        ),
        (["gpt3", "x.jsonl"], {"TOKENIZER": ""}, "/gpt3-dataset/bpe/encoder.json; run launch/setup.sh"),
        (["gpt3", "x.jsonl"], {"TOKENIZER": "gpt2:~/no"}, f"there is no {os.environ['HOME']}/no/encoder.json"),
        (
            ["llama3.1", "x.jsonl"],
            {"TOKENIZER": "", "CONTAINER": "i"},
            "llama3.1-dataset/llama/tokenizer.model; run launch",
        ),
        (
            ["gpt3", "x.jsonl"],
            {"TOKENIZER": "bert:x"},
            "TOKENIZER=bert:x is not one of bytes, gpt2:DIR, llama3:FILE, llama2:FILE and hf:DIR",
        ),
        (["gpt3", "x.jsonl"], {"WORKERS": "0"}, "WORKERS=0 is not a number of processes; use 1 or more"),
    ],
)
def test_dataset_mistakes_are_one_line(stage, arguments, variables, message):
    done = stage.script("generate_dataset.sh", *arguments, **variables)
    assert done.returncode == 1 and message in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "text, variables, message",
    [
        ('{"title": "no text"}\n', {}, "01.jsonl: line 1 has no text under the key 'text'"),
        ("", {}, "01.jsonl: no such shard, or an empty one"),
        ('{"text": "a"}\n', {"TOKENIZER": "llama3:{0}/01.jsonl"}, "01.jsonl: line 1 is not 'base64 rank'"),
        ('{"text": "a"}\n', {"SLURM_PARTITION": "nowhere"}, "correct SLURM_PARTITION=nowhere or SLURM_ACCOUNT"),
    ],
)
def test_no_dataset_job_is_submitted_that_would_fail(cluster, stage, tmp_path, text, variables, message):
    """The first of two shards is good; still its job does not begin."""
    shards = write_shards(tmp_path / "shards", 2)
    shards[1].write_text(text)
    variables = {name: value.format(shards[0].parent) for name, value in variables.items()}
    done = stage.script(
        "generate_dataset.sh",
        "gpt3",
        *map(str, shards),
        **cluster.environment | stage.variables | {"FILES": "2", "SLURM_PARTITION": "batch", **variables},
    )
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1], done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and ": job " not in done.stdout
    assert cluster.run("squeue", "--noheader").stdout == ""


CONTAINER = """#!/usr/bin/env python3
import os, sys
with open({record!r}, "a") as record:
    print(*sys.argv[1:], file=record)
outside = [a for a in sys.argv[1:] if not a.startswith(("--container-", "--no-container-"))]
os.environ["PATH"] = os.pathsep.join([{python!r}, {path!r}])
os.execvp("srun", ["srun", *outside])
"""


def test_dataset_by_slurm_jobs_then_training_on_it(cluster, stage, tmp_path):
    """The training in a container: here its srun is one that takes pyxis' options, and this Python is the image's."""
    shards = map(str, write_shards(tmp_path / "shards", 2))
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "generate_dataset.sh"), "llama3.1", *shards],
        text=True,
        env=cluster.environment | stage.variables | {"SLURM_PARTITION": "batch", "WORKERS": "1"},
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    for job in re.findall(r": job (\d+), ", done.stdout):
        assert cluster.wait(int(job))["JobState"] == "COMPLETED", next(
            stage.folder.glob("results.data_preparation/*")
        ).read_text()
    assert stage.script("check_dataset.sh", "llama3.1").returncode == 0

    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        CONTAINER.format(record=str(tmp_path / "srun"), python=f"{sys.prefix}/bin", path=cluster.environment["PATH"])
    )
    srun.chmod(0o755)
    tiny = TINY.replace("parallel.pp=2 parallel.vp=2", "parallel.pp=1 parallel.vp=1 parallel.cp=2")
    job = stage.submit(
        cluster,
        "-N2",
        size="70b",
        DATASET="",
        MODEL_SIZE="70b",
        DTYPE="fp8",
        VENV="/nowhere",
        CONTAINER="image.sqsh",
        PATH=f"{srun.parent}:{cluster.environment['PATH']}",
        EXTRA_ARGS=f"{tiny} model.num_kv_heads=2 train.steps=4 precision.fp8_backend=torch",
    )
    assert cluster.wait(job)["JobState"] == "COMPLETED", stage.output(job)
    assert "--container-image=image.sqsh" in (tmp_path / "srun").read_text()
    assert f"--container-mounts={ROOT}:{ROOT},{stage.folder}:{stage.folder} " in (tmp_path / "srun").read_text()
    [out] = stage.folder.glob("results/*/fp8/70b/2/*.out")
    timings = re.findall(r"global_step=(\d)\.0+, consumed_samples=([\d.]+), train_step_timing in s=", out.read_text())
    assert [int(step) for step, _ in timings] == list(range(4)) and float(timings[-1][1]) == 4 * 2 * 16
    metrics = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tools" / "training_metrics.py"),
            f"--file={out}",
            "--batch_size=32",
            "--num_accelerators=2",
            "--model_type=llama3.1-70b",
            "--accelerator_type=h100",
            "--start_step=1",
            "--end_step=3",
        ],
        capture_output=True,
        text=True,
    )
    assert metrics.returncode == 0 and "Average step time: " in metrics.stdout, metrics.stderr
    config = (out.with_suffix("") / "config.yaml").read_text()
    assert all(f"my-llama_0{i}_text_document" in config for i in range(2)) and "fp8: delayed" in config


# ---- setup --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path):
    """A PATH with a curl that notes its arguments and serves what `served` holds, and an enroot."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (
        (
            "curl",
            'cat >{0}/header; echo "$@" >>{0}/arguments; while [ "$1" != --output ]; do shift; done; '
            'cp {0}/served "$2"',
        ),
        ("enroot", 'echo "$@" >>{0}/arguments; touch "$3"'),
    ):
        (folder / name).write_text("#!/bin/bash\n" + text.format(folder) + "\n")
        (folder / name).chmod(0o755)
    return folder


def test_setup_fetches_what_is_missing_and_nothing_else(stage, tools):
    variables = {"PATH": f"{tools}:{os.environ['PATH']}"}
    failed = stage.script("setup.sh", **variables)
    assert failed.returncode == 1 and "files are missing, see above" in failed.stderr
    (tools / "served").write_text("not the published file")
    forged = stage.script("setup.sh", **variables)
    assert forged.returncode == 1 and "encoder.json did not arrive, or not as it was published" in forged.stderr
    bpe = stage.folder / "gpt3-dataset" / "bpe"
    assert list(bpe.iterdir()) == []

    for name in ("encoder.json", "vocab.bpe"):  # copied by hand
        (bpe / name).write_text("")
    (tools / "arguments").unlink()
    done = stage.script("setup.sh", **variables, HF_TOKEN="hf_secret", IMAGE="docker://registry#image:1")
    assert done.returncode == 0 and done.stdout.endswith(f"Ready: {stage.folder}\n"), done.stderr
    assert f"export CONTAINER={stage.folder}/minitron.sqsh\n" in done.stdout
    arguments = (tools / "arguments").read_text()
    assert f"import --output {stage.folder}/minitron.sqsh docker://registry#image:1\n" in arguments
    assert arguments.count("huggingface.co/meta-llama") == 1 and "hf_secret" not in arguments
    assert (tools / "header").read_text() == "Authorization: Bearer hf_secret\n"
    assert (stage.folder / "llama3.1-dataset" / "llama" / "tokenizer.model").read_text() == "not the published file"


def test_dataset_jobs_in_a_container_see_the_shards(stage, tools, tmp_path):
    (tools / "sbatch").write_text(f'#!/bin/bash\necho "$@" >>{tools}/submitted; echo 7\n')
    (tools / "sbatch").chmod(0o755)
    (shard,) = write_shards(tmp_path / "elsewhere", 1)
    done = stage.script(
        "generate_dataset.sh",
        "gpt3",
        str(shard),
        FILES="1",
        SLURM_PARTITION="batch",
        CONTAINER="image",
        CONTAINER_MOUNTS="/a:/b",
        PATH=f"{tools}:{os.environ['PATH']}",
    )
    assert done.returncode == 0 and ": job 7, " in done.stdout, done.stderr
    wrapped = (tools / "submitted").read_text().replace("\\", "")
    folders = f"{stage.folder}:{stage.folder},/a:/b,{shard.parent}:{shard.parent}"
    assert f"--container-mounts={ROOT}:{ROOT},{folders} " in wrapped


def test_setup_as_a_job(cluster, stage, tools):
    """The document of fine-tuning submits it: Slurm runs a copy, whose folder holds nothing else."""
    bpe = stage.folder / "gpt3-dataset" / "bpe"
    bpe.mkdir(parents=True)
    for name in ("encoder.json", "vocab.bpe"):
        (bpe / name).touch()
    variables = {
        "PATH": f"{tools}:{cluster.environment['PATH']}",
        "SLURM_PARTITION": "batch",
        "IMAGE": "docker://registry#image:1",
    }
    job = cluster.submit(
        "-N1",
        f"--output={stage.folder}/%j.out",
        "--chdir=/",
        str(ROOT / "launch" / "setup.sh"),
        **stage.variables | variables,
    )
    assert cluster.wait(job)["JobState"] == "COMPLETED", stage.output(job)
    assert stage.output(job).endswith(f"Ready: {stage.folder}\n")
    assert "import --output" in (tools / "arguments").read_text()


def test_the_other_scripts_as_jobs(cluster, stage, tmp_path):
    """With arguments, which Slurm writes behind the file's name."""
    shard = write_shards(tmp_path / "my shards", 1)[0]
    variables = stage.variables | {"FILES": "1", "WORKERS": "1"}
    for script, *more in ("generate_dataset.sh", "gpt3", f"../my shards/{shard.name}"), ("check_dataset.sh", "gpt3"):
        job = cluster.submit(
            "-N1",
            f"--output={stage.folder}/%j.out",
            f"--chdir={stage.folder}",
            str(ROOT / "launch" / script),
            *more,
            **variables,
        )
        assert cluster.wait(job)["JobState"] == "COMPLETED", stage.output(job)
    assert stage.output(job).endswith(f"Dataset generation completed successfully at: {stage.folder}/gpt3-dataset\n")
    wrong = cluster.submit(
        "-N1", f"--output={stage.folder}/%j.out", str(ROOT / "launch" / "quickstart.sh"), "a/wrong", **stage.variables
    )
    assert cluster.wait(wrong)["JobState"] == "FAILED"
    assert "'a/wrong' is not an override; use section.key=value" in stage.output(wrong)


def test_setup_fetches_what_fine_tuning_reads(stage, tools):
    answers = [{"text": "Paris", "answer_start": 0}, {"text": "Paris, France", "answer_start": 0}]
    question = {"question": "Capital of France?", "id": "1", "answers": answers}
    paragraph = {"context": "Par\u00eds.", "qas": [question]}
    (tools / "served").write_text(json.dumps({"data": [{"title": "Paris", "paragraphs": [paragraph]}]}))
    (stage.folder / "gpt3-dataset" / "bpe").mkdir(parents=True)
    for name in ("encoder.json", "vocab.bpe"):
        (stage.folder / "gpt3-dataset" / "bpe" / name).touch()
    variables = {"PATH": f"{tools}:{os.environ['PATH']}", "FINETUNE": "8b", "HF_TOKEN": "hf_secret"}
    done = stage.script("setup.sh", **variables)
    assert done.returncode == 0 and "hf_secret" not in done.stdout + done.stderr, done.stderr
    weights = {path.name for path in (stage.folder / "HF_ckpt/models/meta-llama/Meta-Llama-3-8B").iterdir()}
    shards = {f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)}
    assert weights == {"config.json", "model.safetensors.index.json"} | shards
    [row] = (stage.folder / "squad" / "train.jsonl").read_text().splitlines()
    assert json.loads(row) == {
        "prompt": "Context: Par\u00eds. Question: Capital of France? Answer:",
        "completion": " Paris",
    }
    assert "hf_secret" not in (tools / "arguments").read_text()
    wrong = stage.script("setup.sh", **variables | {"FINETUNE": "70b"})
    assert wrong.returncode == 1 and "FINETUNE=70b is no model that can be fetched; use 8b" in wrong.stderr


# ---- the run ------------------------------------------------------------------------------------------------------


def run_preempted(cluster, stage, preempt, **variables):
    """A job of 50 steps that `preempt(job)` stops in between; once it has gone on by itself, the job and both logs."""
    job = stage.submit(cluster, **variables)
    until(lambda: stage.metrics(job) or cluster.job(job)["JobState"] == "FAILED", 600, lambda: stage.output(job))
    preempt(job)
    cluster.wait(job, "PENDING")
    reached = len(stage.metrics(job))
    assert 0 < reached < 50
    facts = cluster.wait(job)
    [out] = stage.folder.glob(f"results/*/bf16/175b/2/{job}.out")
    assert facts["JobState"] == "COMPLETED" and facts["Restarts"] == "1", stage.output(job) + out.read_text()
    starts = stage.metrics(job, "run")
    assert [start["first_step"] for start in starts] == [1, reached + 1]
    assert [step["step"] for step in stage.metrics(job)] == list(range(1, 51))
    assert stage.metrics(job)[-1]["consumed_samples"] == 50 * 2 * 16
    assert "start number 2; output: " in stage.output(job)
    bars = [line for line in out.read_text().splitlines() if "train_step_timing" in line]
    assert re.search(r" 50/50 \[.*, global_step=49\.00, .*, val_loss=\d\.\d+\]$", bars[-1])  # as the document's
    assert [path.name for path in (out.with_suffix("") / "checkpoint").glob("step_*")] == [f"step_{reached:08d}"]
    return stage.output(job), out.read_text()


def test_a_job_that_is_told_to_stop_saves_requeues_and_goes_on(cluster, stage):
    """What --signal=B:USR1 sends before the time is up, sent early."""
    batch, run = run_preempted(cluster, stage, lambda job: cluster.run("scancel", "--batch", "--signal=USR1", str(job)))
    assert re.search(r"SIGUSR1: stopped after iteration \d+, which was saved; back to the queue\n", batch)
    assert "resumed from" in run and "Traceback" not in run and "exitcode" not in run


@pytest.mark.slow
def test_a_job_whose_ranks_are_told_to_stop_goes_on_as_well(cluster, stage):
    """`scancel --signal=USR1 JOB` reaches every process of the nodes, torchrun too, and not the batch script."""
    batch, run = run_preempted(cluster, stage, lambda job: cluster.run("scancel", "--signal=USR1", str(job)))
    assert "which was saved; back to the queue\n" in batch and "Traceback" not in run


@pytest.mark.slow
def test_a_job_that_slurm_requeues_saves_and_goes_on(cluster, stage):
    _, run = run_preempted(cluster, stage, lambda job: cluster.run("scontrol", "requeue", str(job)))
    assert re.search(r"SIGTERM: stopped after iteration \d+, which was saved", run)


@pytest.mark.slow
def test_a_job_with_a_log_dir_of_its_own_goes_on_as_well(cluster, stage):
    """Its script once looked for the last line in its own folder, found none, and ended as if all steps were done."""
    logs, extra = stage.folder / "logs", f"{TINY} log.dir=~/logs"
    job = stage.submit(cluster, EXTRA_ARGS=extra, HOME=str(stage.folder))
    until(lambda: (logs / "metrics.jsonl").exists(), 600, lambda: stage.output(job))
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    cluster.wait(job, "PENDING")
    facts = cluster.wait(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), stage.output(job)
    assert re.search(r"SIGUSR1: stopped after iteration \d+, which was saved; back to the queue\n", stage.output(job))
    assert json.loads((logs / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 50


@pytest.mark.slow
def test_a_stopped_job_without_checkpoints_fails(cluster, stage):
    job = stage.submit(cluster, CHECKPOINT_DIR="none")
    until(lambda: stage.metrics(job), 600, lambda: stage.output(job))
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    assert cluster.wait(job)["JobState"] == "FAILED"
    assert "SIGUSR1: stopped after iteration" in stage.output(job) and "; nothing was saved" in stage.output(job)


# ---- what nothing stops ---------------------------------------------------------------------------------------------


def processes(job: int, module: str, text: str = "") -> list[int]:
    """Process ids of the job's supervisors or agents, and of ranks, which look like their agents."""
    listed = subprocess.run(["ps", "-ewwo", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
    wanted = [line for line in listed if f"minitron.{module} " in line and f"/{job} " in line and text in line]
    return [int(line.split()[0]) for line in wanted]


def parent(pid: int) -> int:
    return int(subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True).stdout)


def healed(stage: Stage, job: int) -> dict:
    """The one record of what ended a round of the job."""
    [path] = stage.folder.glob(f"results/*/*/*/*/{job}/restarts.jsonl")
    [line] = path.read_text().splitlines()
    return json.loads(line)


SAVES = f"{TINY} checkpoint.every=5"


@pytest.mark.slow
def test_a_killed_rank_does_not_cost_the_place_in_the_queue(cluster, stage):
    job = stage.submit(cluster, EXTRA_ARGS=SAVES)
    until(lambda: len(stage.metrics(job)) > 6, 600, lambda: stage.output(job))
    agents = processes(job, "supervise.agent")
    os.kill(max(pid for pid in agents if parent(pid) in agents), signal.SIGKILL)
    facts = cluster.wait(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "0"), stage.output(job)
    assert re.fullmatch(r"rank [01] on node[12] was killed by SIGKILL", healed(stage, job)["cause"])
    first = [start["first_step"] for start in stage.metrics(job, "run")]
    assert first[0] == 1 and first[1] % 5 == 1 and first[1] > 5 and stage.metrics(job)[-1]["step"] == 50


@pytest.mark.slow
def test_a_lost_node_sends_the_job_back_to_the_queue_without_it(cluster, stage):
    job = stage.submit(cluster, EXTRA_ARGS=SAVES)
    until(lambda: len(stage.metrics(job)) > 6, 600, lambda: stage.output(job))
    [pid] = processes(job, "supervise", "--node 1 ")
    os.kill(pid, signal.SIGKILL)
    facts = cluster.wait(job, "PENDING")
    until(lambda: cluster.job(job)["ExcNodeList"] == "node2", 600, lambda: stage.output(job))
    assert healed(stage, job)["cause"] == "node 1 (node2) is lost; 1 nodes are left of 2", facts
    assert "; back to the queue without node2\n" in stage.output(job)
    cluster.run("scontrol", "update", f"JobId={job}", "ExcNodeList=")  # the test has no third node
    facts = cluster.wait(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), stage.output(job)
    assert stage.metrics(job, "run")[-1]["first_step"] > 5


@pytest.mark.slow
def test_a_spare_node_takes_the_place_of_a_lost_one(cluster, stage):
    job = stage.submit(cluster, EXTRA_ARGS=SAVES, SPARE_NODES="1", RUN_CONF_GPUS_PER_NODE="2")
    until(lambda: len(stage.metrics(job)) > 6, 600, lambda: stage.output(job))
    [pid] = processes(job, "supervise", "--node 0 ")
    os.kill(pid, signal.SIGKILL)
    facts = cluster.wait(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "0"), stage.output(job)
    assert healed(stage, job)["cause"] == "node 0 (node1) is lost" and stage.metrics(job)[-1]["step"] == 50


@pytest.mark.slow
def test_a_job_that_was_told_to_stop_does_not_come_back_to_a_node_that_it_excludes(cluster, stage):
    """As after a device that computed wrongly: a spare took the node's place, and later the job's time was up."""
    job = stage.submit(cluster, "-N1", EXTRA_ARGS=SAVES, RUN_CONF_GPUS_PER_NODE="2")
    until(lambda: len(stage.metrics(job)) > 6, 600, lambda: stage.output(job))
    node = cluster.job(job)["NodeList"]
    [run] = stage.folder.glob(f"results/*/*/*/*/{job}")
    (run / "excluded_nodes").write_text(f"{node}\n")
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    until(lambda: cluster.job(job)["Restarts"] == "1" and cluster.job(job)["ExcNodeList"] == node, 600)
    facts = cluster.wait(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), stage.output(job)
    assert facts["NodeList"] != node and f"which was saved; back to the queue without {node}\n" in stage.output(job)


@pytest.mark.slow
def test_the_job_of_a_drained_node_goes_on_elsewhere(cluster, stage):
    job = stage.submit(cluster, "-N1", EXTRA_ARGS=SAVES, RUN_CONF_GPUS_PER_NODE="2")
    until(lambda: len(stage.metrics(job)) > 6, 600, lambda: stage.output(job))
    node = cluster.job(job)["NodeList"]
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    cluster.run("scontrol", "requeue", str(job))
    facts = cluster.wait(job)
    cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), stage.output(job)
    assert facts["NodeList"] != node and stage.metrics(job, "run")[-1]["first_step"] > 5


@pytest.mark.parametrize(
    "size, nodes, dtype", [("175b", 16, "fp8"), ("70b", 8, "bf16"), ("8b", 1, "fp8"), ("13b", 1, "bf16")]
)
def test_the_documented_commands_at_their_documented_sizes(stage, tmp_path, size, nodes, dtype):
    """With stand-ins for Slurm and torchrun: before it starts that, the job checks its configuration for all GPUs."""
    folder = stage.folder / ("llama3.1-dataset" if size in ("70b", "8b") else "gpt3-dataset")
    folder.mkdir()
    (folder / "my-text_00_text_document.idx").touch()
    programs = {
        "bin/scontrol": f'[ "$2" = hostnames ] && echo node1 || echo " Command={ROOT}/launch/{size}.sbatch"',
        "bin/srun": 'while [[ $1 == --* ]]; do [[ $1 == --output=* ]] && out=$1; shift; done; "$@" >"${out#*=}"',
        "venv/bin/python": f'[ "$1" != -c ] || exec {sys.executable} "$@"\nprintf "%s\\n" "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "STAGE_PATH": str(stage.folder),
        "VENV": str(tmp_path / "venv"),
        "DTYPE": dtype,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "node[1-9]",
        "SLURM_PROCID": "0",
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(["bash", str(ROOT / "launch" / f"{size}.sbatch")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [out] = stage.folder.glob(f"results/minitron-*/{dtype}/{size}/{8 * nodes}/7.out")
    words = out.read_text().split()
    command = words.index("--")
    options = dict(zip(words[2:command:2], words[3:command:2]))
    own = {"--host": options["--host"], "--dir": str(out.with_suffix(""))}
    assert options == own | {
        "--node": "0",
        "--nodes": str(nodes),
        "--spares": "0",
        "--ranks": "8",
        "--id": "7-0",
        "--max-restarts": "20",
        "--address": "node1",
        "--port": "10007",
    }
    assert words[:2] == ["-m", "minitron.supervise"]
    assert words[command + 1 : command + 3] == ["-m", "minitron.pretrain"]
    cfg = cli.load([str(ROOT / words[command + 3]), *words[command + 4 :]])
    assert cfg.train.global_batch_size == 16 * nodes and cfg.train.steps == 50 and cfg.log.format == "nemo"
    assert (cfg.precision.fp8, cfg.precision.dtype) == ("delayed" if dtype == "fp8" else "none", "bf16")
    assert cfg.data.paths == ("1", str(folder / "my-text_00_text_document"))


@pytest.mark.parametrize(
    "arguments, profiled",
    [(["profile.kind=nsys", "log.dir=/r"], True), (["profile.kind=nsys", "log.dir=/r", "profile.kind=none"], False)],
)
def test_nsys_starts_the_ranks_that_it_profiles(tmp_path, arguments, profiled):
    for name in ("nsys", "python"):
        (tmp_path / name).write_text(f'#!/usr/bin/env bash\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_PROCID": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "6000",
    }
    words = subprocess.run(
        ["bash", str(ROOT / "launch" / "node.sh"), "python", "8", "-m", "minitron.pretrain", *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    nsys = (
        "nsys profile -s none -t nvtx,cuda --capture-range=cudaProfilerApi --capture-range-end=stop -o /r/noderank-1 "
    ) * profiled
    assert words.startswith(f"{nsys}python -m torch.distributed.run --nproc_per_node 8 --nnodes 2 ")
    assert words.endswith(" -m minitron.pretrain " + " ".join(arguments) + "\n")


@pytest.mark.parametrize(
    "said, last", [("error: a rank's mistake", "error: a rank's mistake"), ("Traceback", "a page of torchrun")]
)
def test_a_node_says_the_error_last(tmp_path, said, last):
    (tmp_path / "python").write_text(f'''#!/usr/bin/env bash
mkdir "$PET_LOG_DIR/0"
echo "{said}" | tee "$PET_LOG_DIR/0/stderr.log" >&2
echo "a page of torchrun" >&2
exit 3
''')
    (tmp_path / "python").chmod(0o755)
    env = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_PROCID": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "6000",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "node.sh"), "python", "8"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 3 and done.stderr.splitlines()[-1] == last
    assert [path.name for path in tmp_path.iterdir()] == ["python"]  # the ranks' logs went


class Stubs:
    """The shell of a job with stubs in place of Slurm's commands: `srun` runs the text of ranks in log.dir."""

    def __init__(self, folder: Path, ranks: str, scancel: str = "", restarts: int = 0, extra: str = "", output="out"):
        self.folder, self.run, self.output = folder, folder / "run", folder / "said"
        texts = {"srun": f"cd {self.run}\n{ranks}", "scancel": scancel, "scontrol": 'echo "scontrol $*"'}
        for name, text in texts.items():
            (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (folder / name).chmod(0o755)
        job = (
            "set -euo pipefail; source launch/stage.sh; source launch/job.sh; precision=() nodes=1 gpus=1\n"
            f"SPARE_NODES=0 RESTARTS={restarts} checkpoint_every=0\n"
            'run_job name minitron.finetune "$STAGE_PATH/run" "$STAGE_PATH/$OUTPUT"\n'
        )
        slurm = {"JOB_ID": "7", "JOB_NUM_NODES": "1", "JOB_NODELIST": "node1"}
        env = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
        env |= {
            "STAGE_PATH": str(folder),
            "DTYPE": "bf16",
            "EXTRA_ARGS": extra,
            "OUTPUT": output,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        }
        with open(self.output, "w") as said:
            self.process = subprocess.Popen(["bash", "-c", job], cwd=ROOT, env=env, stdout=said, stderr=said)

    def end(self) -> tuple[int, str]:
        return self.process.wait(600), self.output.read_text()


REPORT = "SIGUSR1: stopped after iteration 5, which was saved"


def test_a_job_of_fine_tuning_that_was_stopped_goes_back_to_the_queue(tmp_path):
    """Behind the line that says why it ended come its summary and its goodput: once the job counted as completed.

    The line of an earlier start does not count: a job that then finds nothing to do is completed.
    """
    cfg = cli.load([f"log.dir={tmp_path / 'run'}"])
    stop = Stop(Mesh.offline(), Log(cfg, 0, 1), 3, Listener({}))
    stop.agreed = signal.SIGUSR1
    with stop.log as log:
        log.record("run", first_step=1, started=time.time())
        for step in range(1, 6):
            log.iteration(Iteration(step, step, 1.0, 1.0, lr=0.1, loss_scale=1.0, seconds=0.1, batch_size=1))
        stop.report(5, saved=True)
        log.summary()
        pretrain.end_of_run(log, 0.0)
    (tmp_path / "run" / "rank-0.log").rename(tmp_path / "lines")
    status, said = Stubs(tmp_path, "cat ../lines >>rank-0.log").end()
    assert status == 0 and f"{REPORT}; back to the queue\nscontrol requeue 7\n" in said, said
    status, said = Stubs(tmp_path, "echo resumed >>rank-0.log").end()
    assert status == 0 and "queue" not in said


def test_a_job_that_was_requeued_reads_how_the_round_of_this_start_has_ended(tmp_path, monkeypatch):
    """The first start lost a node, so did the third. A start without a round ends as its ranks do."""
    for start, (ended, queued) in enumerate([("75", True), ("0", False), ("75", True), ("1", False), ("", False)]):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(start))
        folder = f"rounds/7-{start}"
        record = f"mkdir -p {folder}; echo '{{\"status\": {ended}}}' >{folder}/round.json" if ended else ""
        status, said = Stubs(tmp_path, record).end()
        assert (status, "scontrol requeue 7" in said) == (int(ended == "1"), queued), said


def test_a_job_without_a_log_is_refused(tmp_path):
    """Told to stop it would end as if all steps were done, for it reads in log.dir how its ranks have ended."""
    status, said = Stubs(tmp_path, "", extra="log.dir=a log.dir=null").end()
    assert status == 1 and said.startswith("error: log.dir=null in EXTRA_ARGS, and a job reads there how"), said


def test_a_folder_whose_name_spans_two_lines_is_refused(tmp_path):
    (tmp_path / "n\nl").mkdir()
    status, said = Stubs(tmp_path / "n\nl", "").end()
    assert status == 1 and said.startswith("error: STAGE_PATH=") and said.count("\n") == 1, said
    status, said = Stubs(tmp_path, "", output="a\nb").end()
    assert status == 1 and said.startswith("error: ") and "GSW_VERSION" in said and said.count("\n") == 1, said


UNREAD = ["log.dir='/a'", 'log.dir="/a"', 'log={"dir":"/a"}', "log.dir=~", "log.dir=~root/a", 'profile={"kind":"nsys"}']


@pytest.mark.parametrize("override", UNREAD)
def test_a_key_that_a_job_would_read_otherwise_than_its_ranks_is_refused(tmp_path, override):
    """It looked for the log of its ranks in another folder, and took a run that was stopped for one that was done."""
    status, said = Stubs(tmp_path, "", extra=f"{override} train.steps=5").end()
    assert status == 1 and said.startswith(f"error: {override} in EXTRA_ARGS") and said.count("\n") == 1, said
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "quickstart.sh"), override], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1 and override in done.stderr and done.stderr.count("\n") == 1, done.stderr
    words = ["true", "8", "-m", "minitron.pretrain", override]
    env = os.environ | {"SLURM_PROCID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7", "MASTER_PORT": "6000"}
    done = subprocess.run(["bash", "launch/node.sh", *words], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {override} is not read"), done.stderr


def test_a_signal_as_the_ranks_end_does_not_hide_how_they_ended(tmp_path):
    """scancel, to hand the signal on, may take seconds; the status of the wait that it ended was taken for theirs."""
    ranks = f"touch running; until [ -e told ]; do sleep 0.05; done; echo '{REPORT}' >>rank-0.log"
    job = Stubs(tmp_path, ranks, scancel=f"touch {tmp_path}/run/told; sleep 1")
    until((tmp_path / "run" / "running").exists, 600, job.output.read_text)
    job.process.send_signal(signal.SIGUSR1)
    status, said = job.end()
    assert status == 0 and f"{REPORT}; back to the queue\n" in said, said


TINY_TUNED = TINY.replace("pp=2 parallel.vp=2", "pp=1").replace("micro_batch_size=4", "micro_batch_size=2") + (
    " model.num_kv_heads=2 model.rope_theta=1e4"
)


def test_fine_tuning_as_its_users_start_it(cluster, stage, tmp_path):
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    base = [
        sys.executable,
        "-m",
        "minitron.pretrain",
        *TINY_TUNED.split(),
        "train.steps=1",
        "data.source=mock",
        "train.global_batch_size=2",
        f"checkpoint.dir={tmp_path / 'base'}",
    ]
    done = subprocess.run(base, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [{"prompt": f"{i}?", "completion": f" {i * i}!"} for i in range(99)]
    (tmp_path / "squares.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = stage.submit(
        cluster,
        "-N2",
        size="finetune",
        FT_TYPE="lora",
        MODEL_SIZE="8b",
        JOB_TOTAL_GPUS="2",
        HF_TOKEN="hf_secret",
        BASE=str(tmp_path / "base"),
        DATASET=str(tmp_path / "squares.jsonl"),
        EXTRA_ARGS=f"{TINY_TUNED} train.steps=4 optimizer.warmup_steps=1",
    )
    assert cluster.wait(job)["JobState"] == "COMPLETED", stage.output(job)
    name = "lora_nemo_llama3_8b_bf16_2"
    [out] = stage.folder.glob(f"logs/experiments/{name}/{name}_{job}/{name}/log-*.{name}_{job}_0.out")
    text = out.read_text()
    assert len(re.findall(r"reduced_train_loss: [\d.]+ \| train_step_timing in s: [\d.]+ \|", text)) == 4
    assert "consumed_samples: 32" in text and "mean of the last 4 steps" in text
    assert re.search(r"of which [\d.]+ M are trained", text) and "sft: an epoch is 96 documents" in text
    assert {path.name for path in out.parent.iterdir()} >= {"config.yaml", "metrics.jsonl", "rank-1.log", "checkpoint"}
    secret = subprocess.run(["grep", "-rl", "hf_secret", str(stage.folder)], capture_output=True, text=True)
    assert secret.stdout == ""


@pytest.mark.parametrize(
    "variables, message",
    [
        (dict(FT_TYPE=""), "FT_TYPE= is neither sft nor lora; submit with FT_TYPE=lora sbatch"),
        (dict(MODEL_SIZE="70b"), "MODEL_SIZE=70b, but this is the job of 8b; leave it unset"),
        (dict(JOB_TOTAL_GPUS="16"), "JOB_TOTAL_GPUS=16, but 1 node(s) of 1 GPUs are 1; submit with another -N"),
        (dict(), "/HF_ckpt/models/meta-llama/Meta-Llama-3-8B; run FINETUNE=8b launch/setup.sh, or set BASE"),
        (dict(), "/Meta-Llama-3-8B is not complete, it lacks config.json model.safetensors.index.json model-00001-of-"),
        (dict(BASE="/", DATASET=""), "/squad/train.jsonl; run FINETUNE=8b launch/setup.sh, or set DATASET to a .jsonl"),
    ],
)
def test_mistakes_of_fine_tuning_are_one_line_and_a_failed_job(cluster, stage, variables, message):
    if "is not complete" in message:  # what a fetch without a network leaves
        (stage.folder / "HF_ckpt/models/meta-llama/Meta-Llama-3-8B").mkdir(parents=True)
    job = stage.submit(cluster, "-N1", size="finetune", **{"FT_TYPE": "lora"} | variables)
    assert cluster.wait(job)["JobState"] == "FAILED"
    [line] = stage.output(job).splitlines()
    assert line.startswith("error: ") and message in line


# ---- a trial of one node of CPUs ------------------------------------------------------------------------------------


def trial(cluster, folder: Path, *more: str, size: str = "8b") -> tuple[str, list[str]]:
    """Type the manual's commands in `folder`, with more overrides; the job's state, and what Slurm's own file holds."""
    section = (ROOT / "launch/README.md").read_text().split("### A trial without GPUs")[1]
    first, second = section.split("```")[1:4:2]
    commands = first if size == "8b" else first[: first.index("EXTRA_ARGS")] + second
    for old, new in ("$PWD/.venv", sys.prefix), ("sbatch -N 1 ", f"sbatch --parsable -N 1 {ROOT}/"):
        commands = commands.replace(old, new)
    commands = commands.replace("train.steps=20", " ".join(["train.steps=3", *more]))
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=folder, env=cluster.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    state = cluster.wait(int(done.stdout))["JobState"]
    return state, (folder / f"slurm-{int(done.stdout)}.out").read_text().splitlines()


def test_the_reason_of_a_failed_job_is_the_last_line_of_slurms_file(cluster, tmp_path):
    state, lines = trial(cluster, tmp_path, "train.stepz=3")
    assert state == "FAILED" and lines[-1] == "error: unknown key train.stepz; did you mean train.steps?"
    [output] = (tmp_path / "stage").glob("results/*/bf16/8b/2/*.out")
    assert str(output) in lines[-2]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["8b", "175b"])
def test_the_trial_of_the_manual_trains_on_cpus(cluster, tmp_path, size):
    state, lines = trial(cluster, tmp_path, size=size)
    assert state == "COMPLETED", lines
    [output] = (tmp_path / "stage").glob(f"results/*/bf16/{size}/2/*.out")
    assert "| 3/3 [" in output.read_text()


# ---- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables, message",
    [
        (dict(DTYPE="fp16"), "DTYPE=fp16 is neither fp8 nor bf16; submit with DTYPE=fp8 sbatch"),
        (dict(DTYPE=""), "DTYPE= is neither fp8 nor bf16"),
        (dict(STAGE_PATH=""), "STAGE_PATH is not set; export STAGE_PATH="),
        (dict(STAGE_PATH="relative"), "STAGE_PATH=relative is no folder with an absolute path"),
        (dict(MIN_NODES=""), "1 node(s) are too few for 175b; submit with -N 16 or more"),
        (dict(MODEL_SIZE="70b"), "MODEL_SIZE=70b, but this is the job of 175b; leave it unset, or"),
        (dict(SLURM_GPUS_PER_NODE="8"), "Slurm gave the job 1 GPUs a node; submit with --gres=gpu:8"),
        (dict(SLURM_GPUS_PER_NODE="all"), "all is not a number of GPUs"),
        (dict(RUN_CONF_GPUS_PER_NODE="0"), "0 is not a number of GPUs"),
        (dict(DATASET=""), "/gpt3-dataset has no *_text_document.idx; run launch/generate_dataset.sh gpt3"),
        (dict(SPARE_NODES="one"), "SPARE_NODES=one is not a number of nodes; set SPARE_NODES=1, or 0"),
        (dict(SPARE_NODES="1"), "0 node(s) are too few for 175b"),
        (dict(VENV="/nowhere"), "there is no /nowhere/bin/python; run launch/setup.sh, or set VENV or CONTAINER"),
        (dict(EXTRA_ARGS="train.stepz=5"), "unknown key train.stepz; did you mean train.steps?"),
        (dict(EXTRA_ARGS=""), "parallel.tp*pp*cp=4*8*1=32 needs 32 ranks, but there are 1"),
    ],
)
def test_mistakes_are_one_line_and_a_failed_job(cluster, stage, variables, message):
    job = stage.submit(cluster, "-N1", **variables)
    assert cluster.wait(job)["JobState"] == "FAILED"
    lines = [line for line in stage.output(job).splitlines() if message in line]
    assert len(lines) == 1 and lines[0].startswith("error: "), stage.output(job)
    assert "Traceback" not in stage.output(job)


@pytest.mark.parametrize("size", ["175b", "finetune"])
def test_arguments_of_a_job_are_an_error_not_ignored(cluster, stage, size):
    job = cluster.submit(
        "-N1",
        f"--output={stage.folder}/%j.out",
        str(ROOT / "launch" / f"{size}.sbatch"),
        "log.dir=/a/b",
        **stage.variables,
    )
    assert cluster.wait(job)["JobState"] == "FAILED"
    assert stage.output(job) == (
        "error: 'log.dir=/a/b' would not be read; give overrides as EXTRA_ARGS='train.steps=500' sbatch ...\n"
    )


def test_a_job_script_started_without_sbatch_says_so():
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "175b.sbatch")],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"},
    )
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert "SLURM_JOB_ID: is not set; submit this file: DTYPE=fp8 sbatch -N 16 launch/175b.sbatch" in done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.s*")), ids=lambda path: path.name)
def test_scripts_parse(path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).stderr == b""
