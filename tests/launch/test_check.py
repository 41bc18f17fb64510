"""launch/check.sh and tools/check_job.py: what would stop a job is said before the queue, a line for each part."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers

import warm
from minitron.config import cli
from minitron.data.indexed import IndexedWriter
from minitron.planner.failures import state_bytes
from slurm_cluster import Cluster
from tools import check_job

ROOT = Path(__file__).parents[2]
TINY = (
    "model.num_layers=4 model.hidden_size=32 model.ffn_hidden_size=64 model.num_heads=4 model.vocab_size=257 "
    "model.vocab_multiple=64 model.max_positions=64 train.seq_len=32 parallel.tp=1 parallel.pp=2 parallel.vp=1"
)
PARTS = ["variables", "layout", "memory", "data", "tokenizer", "base", "disk", "partition"]


@pytest.fixture
def stage(tmp_path):
    folder = tmp_path / "stage"
    folder.mkdir()
    return folder


def variables(stage, **more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    kept |= {"STAGE_PATH": str(stage), "VENV": sys.prefix, "DTYPE": "bf16", "PYTHON": sys.executable}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def check(*arguments, env, script="check.sh") -> tuple[int, dict[str, tuple[str, str]]]:
    """The status, and of each part its mark and its text; of variables the texts of all that are wrong."""
    done = subprocess.run(
        ["bash", f"launch/{script}", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    if script == "check.sh":
        assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if not line.startswith("submit it")]
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        mark, part, text = line.split()[0], line.split()[1], line[18:]
        assert part not in found or part == "variables" and found[part][0] == mark == "wrong", done.stdout
        found[part] = mark, "\n".join(filter(None, (found.get(part, ("", ""))[1], text)))
    assert (done.returncode == 0) == _fine(found), done.stdout
    assert ("submit it" in done.stdout) == (done.returncode == 0 and arguments[0] != "helm")
    return done.returncode, found


def _fine(found):
    return not any(mark == "wrong" for mark, _ in found.values())


def write_data(folder: Path, vocab_size: int = 257, fingerprint: str | None = None) -> None:
    from minitron.interop.tokenizers import ByteTokenizer

    folder.mkdir(exist_ok=True)
    sidecar = {"tokenizer": "bytes", "fingerprint": fingerprint or ByteTokenizer.fingerprint, "vocab_size": vocab_size}
    with IndexedWriter(folder / "my-gpt3_00_text_document", "uint16", sidecar) as writer:
        for _ in range(99):
            writer.add_document(np.array([5, 6, 7, 256]))


def test_a_job_that_would_run(stage):
    """The issue's command, on a login node without GPUs; each part has a line, and the last is what to type."""
    env = variables(stage, DTYPE="fp8", DATASET="mock", CHECKPOINT_DIR="none")
    done = subprocess.run(
        ["bash", "launch/check.sh", "175b", "-N", "16"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split()[1] for line in lines] == PARTS and {line.split()[0] for line in lines} <= {"ok", "?"}
    assert "same variables" in last and last.endswith(": sbatch -N 16 launch/175b.sbatch")
    assert "175b in fp8 on 16 x 8 GPUs" in lines[0] and "tp 4, pp 8, vp 12, cp 1, dp 4" in lines[1]
    assert not list(stage.iterdir())  # it only looked


@pytest.mark.parametrize(
    "more, expected",
    [
        (
            {"DTYPE": "", "SLURM_GPUS_PER_NODE": "8", "SPARE_NODES": "08", "MIN_NODES": "abc"}
            | {"RESTARTS": "9" * 20, "SLURM_RESTART_COUNT": "PATH[0]", "MASTER_PORT": "70000"},
            {
                "variables": [
                    "DTYPE= is neither fp8 nor bf16; submit with DTYPE=fp8 sbatch",
                    "Slurm gave the job 0 GPUs a node; submit with --gres=gpu:8",
                    "SPARE_NODES=08 is not a number",
                    "MIN_NODES=abc is not a number",
                    f"RESTARTS={'9' * 20} is not a number of starts",
                    "SLURM_RESTART_COUNT=PATH[0] is not a number of starts",
                    "MASTER_PORT=70000 is not a port",
                ]
            },
        ),
        ({"MIN_NODES": "1\n\x1b[2J2"}, {"variables": ["MIN_NODES=1  [2J2 is not a number"]}),
        ({"STAGE_PATH": ""}, {"variables": ["STAGE_PATH is not set; export STAGE_PATH="]}),
        ({"EXTRA_ARGS": "train.stepz=5"}, {"keys": ["unknown key train.stepz; did you mean train.steps?"]}),
        ({"EXTRA_ARGS": "train.steps=5\ntrain.stepz=5"}, {"keys": ["unknown key train.stepz"]}),
        ({"EXTRA_ARGS": "parallel.tp=5"}, {"layout": ["parallel.tp*pp*cp=5*8*1=40 does not divide the world of 128"]}),
        (
            {
                "EXTRA_ARGS": "train.micro_batch_size=8 parallel.vp=1 checkpoint.load=/nowhere data.tokenizer=gpt2:/no",
                "CHECKPOINT_DIR": "/dev/null/a",
            },
            {
                "memory": ["do not fit into the 74.1 GiB that H100"],
                "tokenizer": ["/no/encoder.json: no such tokenizer file"],
                "base": ["/nowhere"],
                "disk": ["checkpoint.dir=/dev/null/a cannot be made: /dev/null is no"],
            },
        ),
        (
            {"DATASET": "/nowhere", "TOKENIZER": "bytes", "EXTRA_ARGS": "checkpoint.every=9"},
            {
                "data": ["/nowhere has no *_text_document.idx; run launch/generate_dataset.sh gpt3"],
                "disk": ["2 checkpoints of 2,095.4 GB may be there at once; free some"],
            },
        ),
        (
            {"EXTRA_ARGS": "checkpoint.every=auto checkpoint.mtbf_hours=4"},
            {"disk": ["2 checkpoints of 2,095.4 GB may be there at once; free some"]},
        ),
    ],
    ids=["variables", "escapes", "stage", "key", "second line", "layout", "memory", "data", "auto"],
)
def test_mistakes_that_a_queue_would_tell_of_hours_later(stage, more, expected):
    status, found = check("175b", "-N16", env=variables(stage, **{"DATASET": "mock"} | more))
    assert status == 1 and {part for part, (mark, _) in found.items() if mark == "wrong"} == expected.keys(), found
    for part, messages in expected.items():
        assert all(message in found[part][1] for message in messages), found[part]
    if not expected.keys() & {"variables", "keys", "layout"}:  # all other parts are told all the same
        assert set(PARTS) - {"tokenizer"} <= found.keys()


def test_all_that_is_missing_is_said_at_once(stage, tmp_path):
    """On a cluster where nothing was prepared: variables, environment, data, tokenizer and weights."""
    env = variables(stage, DTYPE="", VENV="/nowhere", SPARE_NODES="x", MODEL_SIZE="70b", CHECKPOINT_DIR="none")
    status, found = check("finetune", env=env)
    wrong = ["FT_TYPE= is", "MODEL_SIZE=70b,", "DTYPE= is", "SPARE_NODES=x is", "there is no /nowhere/bin/python"]
    lines = found["variables"][1].splitlines()
    assert status == 1 and [line.startswith(start) for line, start in zip(lines, wrong, strict=True)] == [True] * 5
    assert [part for part, (mark, _) in found.items() if mark == "wrong"] == ["variables", "base", "data", "tokenizer"]
    assert found["layout"][0] == found["memory"][0] == "ok"  # by a Python that has the packages
    env |= {"STAGE_PATH": "", "PYTHON": "/nowhere"}
    status, found = check("175b", env=env)
    assert status == 1 and found.keys() == {"variables", "partition"}
    assert "STAGE_PATH is not set" in found["variables"][1] and "DTYPE= is" in found["variables"][1]
    status, found = check("175b", "-N16", env=variables(stage, VENV="/nowhere", PYTHON="/nowhere", DATASET="mock"))
    assert status == 1 and found["others"][0] == "?" and "PYTHON=..." in found["others"][1]


@pytest.mark.parametrize(
    "every, keep, count",
    [("0", 0, 1), ("50", 0, 3), ("100", 0, 2), ("150", 0, 1), ("999", 0, 1), ("50", 1, 2), ("100", 1, 2), ("10", 3, 4)],
)
def test_a_disk_has_room_for_the_saves_of_150_steps_that_are_kept(tmp_path, monkeypatch, every, keep, count):
    """And for a new one beside those that are kept. The last step is saved, too."""
    words = [f"checkpoint.dir={tmp_path}", f"checkpoint.every={every}", f"checkpoint.keep={keep}", "train.steps=150"]
    cfg = cli.load([*TINY.split(), *words])
    free, job = count * state_bytes(cfg), check_job.Job(cfg, 2, None, False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert check_job.disk(job).startswith(f"{count} checkpoint{'s' * (count > 1)} of ")
    free -= 1
    with pytest.raises(ValueError, match=f"and {count} checkpoints? of .* may be there at once"):
        check_job.disk(job)


@pytest.mark.parametrize(
    "arguments, part, message",
    [
        (["176b"], "job", "'176b' is not one of 13b 175b 70b 8b finetune, helm; name one"),
        (["175b", "--nodes=8"], "variables", "8 node(s) are too few for 175b; submit with -N 16 or more"),
        (["175b", "-N", "x"], "variables", "-N x is not a number of nodes"),
        (["175b", "train.steps=9"], "variables", "'train.steps=9' would not be read; give overrides as EXTRA_ARGS='tr"),
    ],
)
def test_mistakes_of_its_own_command(stage, arguments, part, message):
    status, found = check(*arguments, env=variables(stage, DATASET="mock"))
    assert status == 1 and found[part] == ("wrong", found[part][1]) and message in found[part][1]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda folder: None, None),
        (lambda folder: (folder / "my-gpt3_00_text_document.bin").unlink(), "copy the .bin beside its .idx"),
        (lambda folder: (folder / "my-gpt3_00_text_document.bin").write_bytes(b"1"), "1 bytes, but"),
        (lambda folder: write_data(folder, fingerprint="0" * 16), "did not make"),
        (lambda folder: write_data(folder, vocab_size=999), "model.vocab_size=257 is smaller than the 999 ids"),
        ("data.split=1,0,0", "leaves none of the 99 sequences of .* to validate on; set for example data.split=98,1,0"),
        ("data.split=1,0,0 train.eval_every=0", None),
        ("data.split=97,2,0", "sequences 97 to 99 hold 8 tokens, fewer than one sample of train.seq_len=32 "),
    ],
)
def test_data_files_are_opened(stage, spoil, message):
    """As the run would: also for its evaluation, which the recipe of 175B has after step 50."""
    write_data(stage / "gpt3-dataset")
    split = spoil if isinstance(spoil, str) else "data.split=8,1,1"
    if split is not spoil:
        spoil(stage / "gpt3-dataset")
    extra = f"{TINY} {split}"
    env = variables(stage, MIN_NODES="1", RUN_CONF_GPUS_PER_NODE="2", TOKENIZER="bytes", EXTRA_ARGS=extra)
    status, found = check("175b", "-N", "1", env=env)
    mark, text = found["data"]
    if message is None:
        assert (status, mark) == (
            0,
            "ok",
        ) and text == "1 pair of files, 396 tokens, and the run reads 25,600: each about 65 times"
        assert found["tokenizer"] == ("ok", "bytes, 257 ids")
    else:
        assert (status, mark) == (1, "wrong") and re.search(message, text), text


def test_fine_tuning_looks_for_weights_and_reads_all_lines(stage, tmp_path):
    env = variables(stage, FT_TYPE="lora", TOKENIZER="bytes", DATASET=str(tmp_path / "a.jsonl"))
    good = json.dumps({"prompt": "2 + 2 =", "completion": " 4"}) + "\n"
    (tmp_path / "a.jsonl").write_text(good * 20 + '{"prompt": "2 + 2 ="}\n')
    status, found = check("finetune", "-N", "2", env=env)
    assert (
        status == 1
        and found["base"][0] == "wrong"
        and "run FINETUNE=8b launch/setup.sh, or set BASE" in found["base"][1]
    )
    assert found["data"][0] == "wrong" and "a.jsonl: row 21 has prompt of the keys" in found["data"][1]
    (stage / "base").mkdir()
    (tmp_path / "a.jsonl").write_text(good * 99)
    status, found = check("finetune", "-N", "2", env=env | {"BASE": str(stage / "base")})
    assert found["data"][0] == "ok" and "all read" in found["data"][1] and "96 documents" in found["data"][1]
    assert found["base"][0] == "wrong" and "base" in found["base"][1] and status == 1


def test_slurm_is_asked_about_the_partition(stage):
    with Cluster() as cluster:
        env = cluster.environment | variables(stage, DATASET="mock", MIN_NODES="1", CHECKPOINT_DIR="none")
        env |= {"PATH": cluster.environment["PATH"], "SLURM_CONF": cluster.environment["SLURM_CONF"]}
        env |= {"RUN_CONF_GPUS_PER_NODE": "1", "EXTRA_ARGS": TINY}
        status, found = check("175b", "-p", "batch", "-N", "2", env=env)
        assert status == 0 and found["partition"][0] == "ok" and "in partition batch" in found["partition"][1], found
        for options, message in ((["-p", "bach"], "nvalid partition"), (["-N", "3"], "node configuration")):
            status, found = check("175b", "-N2", *options, env=env | {"MIN_NODES": "1"})
            assert status == 1 and found["partition"][0] == "wrong" and message in found["partition"][1], found
        assert cluster.run("squeue", "--noheader").stdout == ""  # nothing was submitted


def test_a_job_file_started_by_hand_says_whether_it_would_run(stage):
    env = variables(stage, DATASET="mock", CHECKPOINT_DIR="none")
    done = subprocess.run(["bash", "launch/175b.sbatch"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode != 0 and "submit this file: DTYPE=fp8 sbatch -N 16 launch/175b.sbatch" in done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == [*PARTS, "it,"]


SCRIPTS = sorted(path for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_answer_help(script, tmp_path):
    """From anywhere, without any variable: its own first lines, and nothing happens."""
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", str(script), "--help"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    first = next(line for line in script.read_text().splitlines() if line.startswith("# "))
    assert done.stdout.startswith(first[2:] + "\n") and "SBATCH" not in done.stdout and "set -" not in done.stdout
    assert not list(tmp_path.iterdir())


# ---- of Kubernetes ---------------------------------------------------------------------------------------------------

HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
HELMED = [
    "-f",
    "launch/helm/a3mega.yaml",
    "--set-file",
    "config=configs/gpt3_175b_gke.yaml",
    "--set",
    "workload.image=i",
]


@pytest.mark.skipif(HELM is None, reason="no helm; get one by: bash tests/get_helm.sh FOLDER_ON_PATH")
@pytest.mark.parametrize(
    "more, part, message",
    [
        ([], None, None),
        (["--set", "workload.gpus=12"], "values", "workload.gpus=12 is more than a node's"),
        (["--set", "workload.arguments={parallel.tp=5}"], "layout", "does not divide the world of 256 ranks"),
        (["--set", "workload.arguments={train.micro_batch_size=8}"], "memory", "do not fit"),
    ],
)
def test_helm_values(stage, more, part, message):
    env = variables(stage) | {"PATH": f"{Path(HELM).parent}{os.pathsep}{os.environ['PATH']}"}
    bucket = ["--set", "workload.gcsBucketForDataCataPath=b"]
    status, found = check("helm", *HELMED, *bucket, *more, "me", "launch/helm", env=env)
    if part is None:
        assert status == 0 and "tp 4, pp 8, vp 2, cp 1, dp 8" in found["layout"][1]
    else:
        assert status == 1 and found[part][0] == "wrong" and message in found[part][1], found


def manifests(config: str, *arguments: str) -> io.StringIO:
    """What `helm template` prints of a job on 8 GPUs, as far as it is read."""
    env = [{"name": "NNODES", "value": "1"}, {"name": "GPUS_PER_NODE", "value": "8"}]
    job = {"kind": "Job", "spec": {"template": {"spec": {"containers": [{"env": env, "args": list(arguments)}]}}}}
    return io.StringIO("\n---\n".join(map(json.dumps, ({"kind": "ConfigMap", "data": {"config.yaml": config}}, job))))


def test_what_pods_alone_see_is_not_called_missing(monkeypatch, capsys):
    config = "train: {global_batch_size: 32}\ndata: {source: indexed, paths: [/gcs/web]}\n"
    monkeypatch.setattr("sys.stdin", manifests(config))
    check_job.main(["--manifests"])
    assert "?      data       data.paths: pods alone see what lies there\n" in capsys.readouterr().out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder that describes a model of 3 layers. The default has 4."""
    folder = tmp_path_factory.mktemp("base")
    sizes = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6, vocab_size=99)
    transformers.LlamaConfig(**sizes, tie_word_embeddings=False).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("script", ["node.sh", "jube/build.sh", "helm/files/pod.sh", "quickstart.sh"])
def test_a_job_s_first_check_reads_the_sizes_of_its_base(base, script):
    code = re.search(r" -c '(import sys.*?)'", (ROOT / "launch" / script).read_text(), re.S)[1]
    words = ["finetune.kind=sft", f"finetune.base={base}", "data.source=mock"]
    done = warm.run("-c", code, 3, *words, "parallel.pp=3")
    assert done.returncode == 0, done.stderr
    done = warm.run("-c", code, 4, *words, "parallel.pp=4")
    assert done.returncode == 1 and "model.num_layers=3" in done.stderr and done.stderr.count("\n") == 1


def test_manifests_of_a_fine_tuning(base, monkeypatch, capsys, tmp_path):
    """A null of the arguments drops what config.yaml has set, and the base's counts."""
    config = f"{{finetune: {{kind: sft, base: {base}}}, data: {{source: mock}}, model: {{num_layers: 9}}}}"
    cfg, world = check_job.from_manifests(manifests(config, "model.num_layers=null", "train.steps=3").read())
    assert (world, cfg.model.num_heads, cfg.model.num_layers, cfg.train.steps) == (8, 6, 3, 3)
    monkeypatch.setattr("sys.stdin", manifests(config.replace(str(base), f"{tmp_path}/no"), "model=null"))
    check_job.main(["--manifests"])
    assert capsys.readouterr().out.startswith("?      keys       pods alone see")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["configs/llama3_8b.yaml"], "give CONFIG and --world, or --manifests without them"),
        (["--manifests", "configs/llama3_8b.yaml"], "give CONFIG and --world, or --manifests without them"),
        (["--world", "8", "--device", "h1000"], "--device h1000 is not in"),
    ],
)
def test_mistakes_of_the_tool(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_job.main(arguments)
