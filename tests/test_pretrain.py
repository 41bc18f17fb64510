"""The entry point as users run it: what a run leaves behind, and that mistakes are one line and exit status 1."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

import warm
from layouts import config
from minitron import pretrain as entry
from minitron.checkpoint.load import ResumePoint
from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.config.schema import Config
from minitron.data.indexed import IndexedWriter
from minitron.pretrain import build_data, run
from minitron.runtime.signals import Listener

ROOT = Path(__file__).parents[1]
TINY = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.vocab_size=300",
    "train.seq_len=32",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "data.source=mock",
    "precision.dtype=fp32",
]


def pretrain(*argv, ranks=None, **variables):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return warm.run(*launcher, "-m", "minitron.pretrain", *TINY, *argv, env=environment)


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_a_cpu_run_takes_the_plain_kernels_where_triton_is_installed():
    """Triton, and torch's compiler, which looks for it, are not even imported: they take seconds."""
    pytest.importorskip("triton")
    code = f"""
import sys
from minitron.pretrain import main
sys.argv = ["pretrain", *{[*TINY, "train.steps=1", "train.deterministic=true"]!r}]
main()
print("loaded:", sorted({{"triton", "torch._inductor"}} & sys.modules.keys()))
import torch
print("mode:", torch.get_deterministic_debug_mode(), torch.are_deterministic_algorithms_enabled())
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "kernels: plain" in done.stdout + done.stderr and "loaded: []" in done.stdout
    assert "mode: 2 True" in done.stdout  # an operation that is not deterministic raises an error


def test_a_run_of_ranks_leaves_no_thread_of_gloo(tmp_path):
    """Such a thread lets go of a tensor at some time after a collective. While Python ends, that aborts the process."""
    program = tmp_path / "program.py"
    program.write_text("""
import sys
from pathlib import Path
from minitron.pretrain import main
main(sys.argv[1:])
names = [thread.read_text() for thread in Path("/proc/self/task").glob("*/comm")]
print("threads of gloo:", sum("gloo" in name for name in names), "of", len(names))
""")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = warm.run(*launcher, str(program), *TINY, "parallel.pp=2", "train.steps=2", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("^threads of gloo: 0 of [1-9]", done.stdout, re.M)) == 2, done.stdout


def test_what_a_run_leaves_and_that_its_own_config_repeats_it(tmp_path):
    options = [
        "train.steps=4",
        "train.eval_every=2",
        "train.eval_steps=1",
        "data.separate_documents=true",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    done = pretrain(*options, f"log.dir={tmp_path / 'a'}", "parallel.tp=2", ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| consumed samples:") == 4 and done.stdout.count("validation loss at iteration") == 2
    assert {p.name for p in (tmp_path / "a").iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "dllogger.json",
        "rank-0.log",
        "rank-1.log",
    }
    steps = records(tmp_path / "a", "step")
    assert [r["step"] for r in steps] == [1, 2, 3, 4] and [r["step"] for r in records(tmp_path / "a", "eval")] == [2, 4]
    again = pretrain(str(tmp_path / "a" / "config.yaml"), f"log.dir={tmp_path / 'b'}", "parallel.tp=1")
    assert again.returncode == 0, again.stderr
    for mine, other in zip(steps, records(tmp_path / "b", "step"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        # kept apart, documents have fewer attention scores than whole samples: both counts are the world's
        assert mine["tflops"]["full"] * mine["step_seconds"] * 2 == pytest.approx(
            other["tflops"]["full"] * other["step_seconds"]
        )


@pytest.mark.parametrize(
    "argv,message",
    [
        (["train.stepz=3"], "did you mean"),
        (["data.separate_documents=3"], "data.separate_documents=3"),
        (["parallel.tp=2"], "needs 2 ranks, but there are 1"),
        (["train.seq_len=8192"], "max_positions"),
        (["model.attention=cudnn"], "model.attention=cudnn"),
        (["data.source=indexed", "data.paths=[/no/such/file]"], "/no/such/file"),
        (["log.dir=/proc/nowhere"], "log.dir=/proc/nowhere"),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_mistakes_are_one_line(argv, message):
    done = pretrain(*argv)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_world_without_torchrun_is_one_line():
    """As schedulers set WORLD_SIZE for jobs that then start python by itself."""
    done = pretrain(WORLD_SIZE="2", RANK="0")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "error: WORLD_SIZE=2 is set, but MASTER_ADDR, MASTER_PORT are not; start ranks with "
        "torchrun, or unset WORLD_SIZE\n"
    )


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"RANK": "abc"}, "RANK='abc' is not a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' is not a number"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not one of WORLD_SIZE=2 ranks"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"},
            "MASTER_PORT='abc' is not a port",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
            "MASTER_PORT='0' is not a port",
        ),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is not one of WORLD_SIZE=1 ranks"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=2 is not one of LOCAL_WORLD_SIZE=2 ranks",
        ),
    ],
)
def test_a_place_in_no_world_is_one_line(monkeypatch, capsys, environ, message):
    """It was a traceback, of int and of torch's rendezvous."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="1"):
        run([], "", False, Listener({}))
    line = capsys.readouterr().err
    assert line.startswith(f"error: {message}") and line.count("\n") == 1


def test_mistakes_under_torchrun_are_said_once_and_at_the_end_of_its_page():
    done = pretrain("parallel.tp=3", ranks=3)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: parallel.tp=3 does not divide")]
    assert done.stderr.count(line) == 2 and f"traceback : {line}\n" in done.stderr.rpartition("Root Cause")[2]


def test_printed_config_loads_back(tmp_path):
    done = pretrain("model.rope_scaling.factor=4", "--print-config")
    (tmp_path / "printed.yaml").write_text(done.stdout)
    assert cli.load([str(tmp_path / "printed.yaml")]) == cli.load([*TINY, "model.rope_scaling.factor=4"])


def test_an_id_that_only_training_meets_is_one_line(tmp_path, monkeypatch):
    """A dataset too large to be scanned at the start: its bad id is found when its sample is drawn."""
    prefix = str(tmp_path / "late")
    with IndexedWriter(prefix, np.dtype("<i4")) as writer:
        for _ in range(40):
            writer.add_document([np.arange(200, dtype=np.int32)])
        writer.add_document([np.full(9000, 299, np.int32)])
    scanned = (
        "import minitron.data.build as b; b.SCAN_BYTES = 0; b.PEEK_TOKENS = 100; "
        "import minitron.pretrain as p; p.main()"
    )
    argv = [
        "data.source=indexed",
        f"data.paths=[{prefix}]",
        "data.split=1",
        "model.vocab_size=250",
        "train.steps=200",
        f"data.cache_dir={tmp_path}",
    ]
    done = warm.run("-c", scanned, *TINY, *argv)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "299" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_finished_run_that_is_started_again_says_so_and_what_to_change(tmp_path):
    """Raising the steps trains on."""
    words, saved = ["train.steps=2", f"checkpoint.dir={tmp_path / 'a'}"], tmp_path / "a" / "step_00000002"
    first, again, longer = pretrain(*words), pretrain(*words), pretrain(*words, "train.steps=3")
    assert first.returncode == again.returncode == longer.returncode == 0
    assert [done.stdout.count("| consumed samples:") for done in (first, again, longer)] == [2, 0, 1]
    assert [done.stdout.count("the run is finished") for done in (first, again, longer)] == [0, 1, 0]
    (line,) = [line for line in again.stdout.splitlines() if "the run is finished" in line]
    assert "train.steps" in line and f"checkpoint.load={saved}" in line and saved.exists()


# ---- a model without room -------------------------------------------------------------------------------------------


def test_a_model_larger_than_the_machine_is_refused_before_it_is_built():
    done = pretrain("model.hidden_size=1048576")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.match(
        r"error: a rank's part of the model needs [\d,.]+ GiB \(parameters [\d,.]+, gradients [\d,.]+, optimizer "
        r"[\d,.]+\), and this cpu has [\d.]+; use more ranks .*tools/plan.py",
        done.stderr,
    )


@pytest.mark.parametrize(
    "options, part",
    [
        (["model.vocab_size=4000000"], "the embedding"),
        (["model.ffn_hidden_size=4000000"], r"block 0 of 2"),
        (
            ["model.num_layers=60", "model.ffn_hidden_size=20000"],
            r"block \d+ of 60|the first values of blocks\.\d+\..*",
        ),
    ],
)
def test_out_of_memory_names_the_part(options, part):
    """Under a limit of address space, as the kernel has none for memory that is touched later."""
    code = (
        "import resource, sys\nfrom minitron import pretrain\n"
        "import minitron.train\nfrom minitron.train import build as build_\n"
        "def build(*args, **keys):\n"
        "    here = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (here + (200 << 20),) * 2)\n"
        "    return build_(*args, **keys)\n"
        "pretrain.build = build\npretrain.main(sys.argv[1:])\n"
    )
    done = warm.run("-c", code, *TINY, *options)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert re.match(rf"error: out of memory at ({part}); use more ranks .*tools/plan.py", done.stderr), done.stderr


@pytest.mark.parametrize("batch", [2, 8])
def test_a_run_that_goes_on_with_another_batch_has_samples_to_its_end(batch):
    """Six steps of four samples are done, four of another batch are left: 24 samples before them, not 6 batches."""
    cfg = cli.load(["data.source=mock", "train.steps=10", "train.eval_every=0", f"train.global_batch_size={batch}"])
    data = build_data(cfg, ResumePoint(resume=True, step=6, consumed_samples=24))
    assert len(data.train) == 24 + 4 * batch


@pytest.mark.parametrize("ranges", [(), ((5, 9),), ((0, 3), (8, 12)), ((30, 31),)], ids=str)
@pytest.mark.parametrize("step, consumed", [(0, 0), (2, 4)])
def test_a_run_has_read_up_to_its_last_sample_and_not_what_is_left_out_behind_it(ranges, step, consumed):
    cfg = config(Config(), {"train": {"global_batch_size": 5}, "data": {"skip_samples": ranges}})
    start = ResumePoint(step=step, consumed_samples=consumed)
    kept = [i for i in range(consumed, 100) if not any(first <= i < end for first, end in ranges)]
    ends = {step + n: kept[5 * n - 1] + 1 for n in range(1, 10)}
    assert ends == {later: entry.consumed_after(cfg, start, later) for later in ends}
    for samples in range(ends[step + 1], ends[step + 9] + 1):
        assert entry.step_after(cfg, start, samples) == next(s for s, end in ends.items() if end >= samples)


def open_on_a_node(folder, source):
    """Open the data as a rank of a node with its own disk: two ranks a node. Return its identity, or the error."""
    node = dist.get_rank() // 2
    keys = [f"data.source={source}", f"data.paths=[{folder}/{node}/rows]", "data.tokenizer=bytes", "data.split=1"]
    cfg = cli.load([*TINY, *keys, f"data.cache_dir={folder}/{node}/cache", "train.steps=2", "train.eval_every=0"])
    with patch.object(entry, "gethostname", lambda: f"node{node}"):
        try:
            return entry.open_data(cfg, ResumePoint(), Mesh.create(), dist.get_rank() % 2 == 0).info["train"]
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("source", ["sft", "indexed"])
def test_nodes_that_read_different_data_are_named(tmp_path, ranks, source):
    """Each node has a folder of its own for data and caches, as on local disks."""
    rows = [json.dumps({"prompt": "a", "completion": "b" * length}) + "\n" for length in range(1, 20)]
    for node, changed in enumerate(["b", "b", "c"]):
        (tmp_path / f"{node}").mkdir()
        (tmp_path / f"{node}/rows").write_text("".join(rows).replace('b"', f'{changed}"'))
        with IndexedWriter(tmp_path / f"{node}/rows", np.uint16) as writer:
            writer.add_document(np.frombuffer("".join(rows).encode() + changed.encode(), np.uint8).astype(np.uint16))
    alike = ranks(4, open_on_a_node, tmp_path, source)
    assert len(set(alike)) == 1 and "node" not in alike[0]
    for message in ranks(6, open_on_a_node, tmp_path, source):
        assert (
            message.startswith("nodes read different data: ") and "on node0 and" in message and "on node2;" in message
        )
        assert "node1" not in message and "\n" not in message


@pytest.mark.parametrize("key", ["finetune.base", "checkpoint.load"])
def test_a_base_that_is_missing_is_named_also_if_its_model_is_too_large_for_this_machine(tmp_path, capsys, key):
    keys = [f"{key}={tmp_path}/none", "finetune.kind=sft" if key == "finetune.base" else "finetune.kind=null"]
    keys += ["model.num_layers=4000", "model.hidden_size=8192", "model.ffn_hidden_size=32768", "data.source=mock"]
    with pytest.raises(SystemExit):
        run([*TINY, *keys], "", key == "finetune.base", Listener({}))
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}={tmp_path}/none holds no weights") and error.count("\n") == 1
