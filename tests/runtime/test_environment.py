"""What entry points set before torch is loaded: limits on open files, a folder of the node for compiled kernels."""

import json
import os
import resource
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from minitron.runtime import environment, startup
from minitron.runtime.log_formats import Iteration
from minitron.runtime.startup import Startup

ROOT = Path(__file__).parents[2]
FILES = resource.RLIMIT_NOFILE
LOW = 64
# In the place of torch: it shows what it finds, and ends the process.
TORCH = """import json, os, resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(json.dumps({"soft": soft, "hard": hard, "cache": os.environ.get("TRITON_CACHE_DIR")}))
raise SystemExit(0)
"""
# In the place of torchrun or the supervisor: it starts a process under a low limit, and shows its own one afterwards.
PARENT = f"""import resource, socket, subprocess, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, ({LOW}, hard))
ours, theirs = socket.socketpair()
words = [str(theirs.fileno()) if word == "FD" else word for word in sys.argv[1:]]
subprocess.run([sys.executable, "-m", *words], pass_fds=[theirs.fileno()], check=True)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def started(tmp_path, *words, **variables) -> tuple[dict, int]:
    """What a process finds when it loads torch, and the soft limit of its parent afterwards."""
    (tmp_path / "stubs").mkdir(exist_ok=True)
    (tmp_path / "stubs" / "torch.py").write_text(TORCH)
    unset = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCHELASTIC_RUN_ID", "RANK")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"PYTHONPATH": f"{tmp_path / 'stubs'}{os.pathsep}{ROOT}", "TMPDIR": str(tmp_path), **variables}
    output = subprocess.run([sys.executable, "-c", PARENT, *words], env=env, capture_output=True, text=True, check=True)
    found, parent = map(json.loads, output.stdout.splitlines())
    return found, parent


@pytest.mark.skipif(sys.platform != "linux", reason="limits are raised on Linux")
@pytest.mark.parametrize(
    "words", [("minitron.pretrain",), ("minitron.finetune",), ("minitron.supervise.agent", "FD", "minitron.train")]
)
def test_entry_points_raise_the_limit_and_cache_on_the_node_before_torch_loads(tmp_path, words):
    found, parent = started(tmp_path, *words)
    assert found["soft"] == found["hard"] > LOW == parent
    assert Path(found["cache"]).parent == tmp_path / f"minitron-{os.getuid()}"
    assert started(tmp_path, *words, TRITON_CACHE_DIR="mine")[0]["cache"] == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="limits are raised on Linux")
@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_raises_the_limit_of_the_torchrun_that_serves_the_store(tmp_path, rank):
    found, parent = started(tmp_path, "minitron.pretrain", TORCHELASTIC_RUN_ID="1", RANK=rank)
    assert parent == (found["hard"] if rank == "0" else LOW)


@pytest.mark.skipif(sys.platform != "linux", reason="limits are raised on Linux")
def test_a_hard_limit_that_is_too_low_for_the_world_is_a_warning():
    _, hard = resource.getrlimit(FILES)
    enough = (hard - environment.OWN_FILES) // environment.STORE_FILES
    if enough < 1:
        pytest.skip(f"a hard limit of {hard} open files is too low for one rank")
    assert environment.raise_file_limits({}, enough) is None
    warning = environment.raise_file_limits({}, enough + 1)
    assert str(hard) in warning and f"{enough + 1} ranks" in warning and "\n" not in warning
    assert resource.getrlimit(FILES) == (hard, hard)


def private(folder: str) -> bool:
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700


def test_the_node_s_folder_is_one_for_all_processes_of_a_user(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = environment.node_folder()
    assert private(folder) and environment.node_folder() == folder and os.listdir(tmp_path) == [Path(folder).name]


@pytest.mark.parametrize("planted", ["link", "open to all", "open to the group", "file", "another user's"])
def test_a_folder_that_another_user_could_have_made_is_not_used(tmp_path, monkeypatch, planted):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / f"minitron-{os.getuid()}"
    if planted == "link":
        (tmp_path / "theirs").mkdir(0o700)
        path.symlink_to(tmp_path / "theirs")
    elif planted == "file":
        path.touch(0o700)
    else:
        path.mkdir(0o700)
        if planted.startswith("open"):
            path.chmod(0o777 if planted == "open to all" else 0o750)
        elif os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        else:
            os.chown(path, 12345, -1)
    folder = environment.node_folder()
    assert private(folder) and Path(folder).parent == tmp_path and folder != str(path)


def test_without_a_folder_for_caches_libraries_keep_their_own(monkeypatch):
    def nowhere():
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    environ = {}
    environment.set_defaults(environ)
    assert environ == environment.DEFAULTS | {"GOMP_SPINCOUNT": environ["GOMP_SPINCOUNT"]}


BAD_ROUNDS = [
    "abc",
    "",
    "[]",
    "3",
    '{"at": null}',
    '{"start_seconds": "x"}',
    '{"at": NaN}',
    '{"at": ' + "9" * 400 + "}",
    "[" * 9999,
]


@pytest.mark.parametrize("text", BAD_ROUNDS, ids=lambda text: text[:9])
def test_a_round_that_no_supervisor_wrote_is_named(text):
    with pytest.raises(ValueError, match="MINITRON_ROUND=.*unset it"):
        Startup({"MINITRON_ROUND": text}, None, 0.0, 1.0)


def test_a_rank_without_a_supervisor_and_of_one_begins():
    """Its start begins when the supervisor's part ends; without one there is none before its first line."""
    assert Startup({}, None, 10.0, 12.0).parts == {"start_seconds": 0.0, "import_seconds": 2.0}
    round_ = {"MINITRON_ROUND": '{"round": 2, "gather_seconds": 1.5, "at": 9.0}'}
    parts = {"round": 2, "gather_seconds": 1.5, "start_seconds": 1.0, "import_seconds": 2.0}
    assert Startup(round_, None, 10.0, 12.0).parts == parts


def test_a_start_is_divided_into_parts_without_gaps(monkeypatch):
    rows, lines, now = [], [], [110.0]
    log = SimpleNamespace(record=lambda kind, **values: rows.append((kind, values)), info=lines.append)
    monkeypatch.setattr(startup, "time", lambda: now[0])
    start = Startup({"MINITRON_ROUND": '{"round": 2, "detect_seconds": 1.5, "at": 90.0}'}, log, 100.0, 103.0)
    for part, now[0] in ("build", 110.0), ("load", 114.0), ("prepare", 115.0):
        start.mark(part)
    now[0] = 200.0
    for step, seconds in (6, 2.5), (7, 1.0):
        start.on_figures(Iteration(step, 1, 1.0, 1.0, 1.0, 1.0, seconds, batch_size=1))
    seconds = {
        "detect": 1.5,
        "start": 10.0,
        "import": 3.0,
        "build": 7.0,
        "load": 4.0,
        "prepare": 1.0,
        "first_step": 2.5,
    }
    assert rows == [("start", {"step": 6, "round": 2} | {f"{part}_seconds": s for part, s in seconds.items()})]
    (line,) = lines
    assert line.startswith("29.0 s ") and all(f"{part} {s:.1f}" in line for part, s in seconds.items())


def test_threads_that_wait_sleep_soon_unless_the_user_has_said_how_they_wait(monkeypatch):
    monkeypatch.setattr(environment, "raise_file_limits", lambda environ: None)

    def spins(environ):
        environment.set_defaults(environ := {"TRITON_CACHE_DIR": "", "TORCHINDUCTOR_CACHE_DIR": "", **environ})
        return environ.get("GOMP_SPINCOUNT")

    assert 0 < int(spins({})) == int(spins({"OMP_NUM_THREADS": "4"})) < 100_000
    assert spins({"GOMP_SPINCOUNT": "7"}) == "7" and spins({"OMP_WAIT_POLICY": "active"}) is None


@pytest.mark.parametrize("mine", [(), ("TRITON_CACHE_DIR",), (*environment.CACHES, *environment.DEFAULTS)])
def test_what_the_user_has_set_stays_and_the_rest_is_set(tmp_path, monkeypatch, mine):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(environment, "raise_file_limits", lambda environ: None)
    environment.set_defaults(environ := dict.fromkeys(mine, "mine") | {"OMP_WAIT_POLICY": "active"})
    caches = {name: f"{tmp_path}/minitron-{os.getuid()}/{below}" for name, below in environment.CACHES.items()}
    assert environ == environment.DEFAULTS | caches | dict.fromkeys(mine, "mine") | {"OMP_WAIT_POLICY": "active"}
    assert len({*caches.values()}) == 2 and environment.DEFAULTS["NCCL_GRAPH_REGISTER"] == "0"
