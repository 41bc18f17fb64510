"""Some steps under a profiler: which steps, what is left behind, and by whom."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.runtime import profiling
from minitron.runtime.profiling import profiled

WINDOW = ["profile.start_step=3", "profile.end_step=5"]


class Messages(list):
    def info(self, text: str, rank: int = 0) -> None:
        self.append(text)


def steps_of(cfg, mesh, log, steps, until=None):
    """The steps that the loop saw; it ends before `until`."""
    seen = []
    for step in profiled(steps, cfg, mesh, log):
        if step == until:
            break
        torch.ones(4) @ torch.ones(4)
        seen.append(step)
    return seen


@pytest.mark.parametrize(
    "first, last, until, inside",
    [
        (1, 8, None, [3, 4, 5]),
        (4, 8, None, [4, 5]),
        (1, 4, None, [3, 4]),
        (6, 8, None, []),
        (1, 8, 5, [3, 4, 5]),
        (1, 2, None, []),
    ],
)
def test_torch_traces_the_steps_of_the_window(tmp_path, first, last, until, inside):
    """Also if the run is resumed inside of it, ends in it or is stopped in it."""
    cfg, log = cli.load([f"log.dir={tmp_path}", "profile.kind=torch", *WINDOW]), Messages()
    seen = steps_of(cfg, Mesh.offline(), log, range(first, last + 1), until)
    assert seen == list(range(first, until or last + 1))
    path = tmp_path / "profile-rank-0.json"
    if not inside:
        assert not log and not path.exists()
        return
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event]
    assert [name for name in names if name.startswith("step ")] == [f"step {step}" for step in inside]
    assert names.count("aten::dot") == len([step for step in inside if step in seen])
    assert "aten::dot" in (tmp_path / "profile-rank-0.txt").read_text()
    assert log == [
        f"profiled iterations {inside[0]} to {inside[-1]}: {path} for ui.perfetto.dev, {path.with_suffix('.txt')}"
    ]


def test_only_the_ranks_that_are_named(tmp_path):
    cfg = cli.load([f"log.dir={tmp_path}", "profile.kind=torch", "profile.ranks=[1]", *WINDOW])
    for rank in range(2):
        mesh = SimpleNamespace(rank=rank, device=torch.device("cpu"), activity=Mesh.offline().activity)
        assert steps_of(cfg, mesh, Messages(), range(1, 7)) == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in tmp_path.iterdir()} == {"profile-rank-1.json", "profile-rank-1.txt"}


def test_an_error_in_the_window_leaves_what_there_is(tmp_path):
    cfg = cli.load([f"log.dir={tmp_path}", "profile.kind=torch", *WINDOW])
    with pytest.raises(MemoryError):
        for step in profiled(range(1, 9), cfg, Mesh.offline(), Messages()):
            if step == 4:
                raise MemoryError
    assert "step 3" in (tmp_path / "profile-rank-0.json").read_text()


@pytest.fixture
def gpu(monkeypatch):
    """Notes, in the place of a GPU, what it is told."""
    notes = []

    @contextmanager
    def marked(name):
        notes.append(name)
        yield

    runtime = SimpleNamespace(
        cudaProfilerStart=lambda: notes.append("start"), cudaProfilerStop=lambda: notes.append("stop")
    )
    for name, double in {
        "synchronize": lambda _: notes.append("wait"),
        "cudart": lambda: runtime,
        "check_error": lambda _: 0,
        "nvtx.range": marked,
        "memory._record_memory_history": lambda **how: notes.append(how),
        "memory._dump_snapshot": lambda path: notes.append(path),
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", double)
    return notes


def on_gpu():
    return SimpleNamespace(rank=0, device=torch.device("cuda"), activity=Mesh.offline().activity)


def test_nsys_captures_whole_steps(gpu):
    log = Messages()
    assert steps_of(cli.load(["profile.kind=nsys", *WINDOW]), on_gpu(), log, range(1, 8)) == [1, 2, 3, 4, 5, 6, 7]
    assert gpu == ["wait", "start", "step 3", "step 4", "step 5", "wait", "stop"]
    assert log == ["profiled iterations 3 to 5: in the report of nsys, if that started this run"]


def test_memory_snapshot(gpu, tmp_path):
    log, path = Messages(), tmp_path / "profile-rank-0.pickle"
    steps_of(cli.load(["profile.kind=memory", f"log.dir={tmp_path}", *WINDOW]), on_gpu(), log, range(1, 8))
    assert gpu == ["wait", {"max_entries": profiling.MEMORY_EVENTS}, "wait", str(path), {"enabled": None}]
    assert log == [f"profiled iterations 3 to 5: {path} for pytorch.org/memory_viz"]


@pytest.mark.parametrize("kind", ["nsys", "memory"])
def test_what_needs_a_gpu_says_so(kind):
    profile = cli.load([f"profile.kind={kind}"]).profile
    with pytest.raises(ValueError, match=f"profile.kind={kind} watches a GPU, and there is none; use"):
        profiling.check(profile, torch.device("cpu"))
    profiling.check(profile, torch.device("cuda"))
    profiling.check(cli.load(["profile.kind=torch"]).profile, torch.device("cpu"))
