"""Saves on the nodes' own disks: used where all of them is there, named and skipped where it is not.

Nodes are folders: rank r of these jobs has its local_dir in node r // 2, or all ranks in one.
"""

import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from fault_run import Run
from kill_run import MODEL, losses, run
from layouts import LLAMA, config
from minitron.checkpoint import destination
from minitron.checkpoint.directory import checkpoints, claim
from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.interval import FIRST_STEPS
from minitron.checkpoint.load import agree_on_start, newest_local_save, restore
from minitron.checkpoint.reader import Reader
from minitron.checkpoint.save import Checkpointer
from minitron.pretrain import open_weights
from minitron.runtime.log import Log
from minitron.train import build
from test_checkpoint import FP8, LONG, mesh_of, saving, train, whole
from test_checkpoint_format import reindex

WORLD = 4
SHORT = config(LLAMA, LONG, {"model": {"num_layers": 3}, "train": {"global_batch_size": 2}})
TENSOR_AND_DATA = config(SHORT, {"parallel": {"tp": 2}})
FIRST = 7  # steps before the fault: shared saves of 1 and 4, local ones of 6 and 7


def leg(cfg, folder: Path, nodes: int, until: int, **keys) -> dict:
    """Go on from what is there, save a step in four in `shared` and every other on the node, end as if killed."""
    mesh = mesh_of(cfg)
    node, rank_there = divmod(mesh.rank, mesh.world.size // nodes)
    keys = {"every": 4, "local_every": 1, "local_dir": str(folder / f"node{node}"), "async_save": False} | keys
    cfg, lines = saving(cfg, folder / "shared", **keys), []
    with Log(cfg, mesh.rank, mesh.world.size) as log:
        log.info = lines.append
        trainer, start = build(cfg, mesh), agree_on_start(cfg, mesh, open_weights, rank_there == 0)
        start = newest_local_save(cfg, start, {}, trainer.state, log)
        restore(start, trainer.state)
        saves = Checkpointer(cfg, trainer.state, {}, log, start.step, start.parent_checkpoint)
        figures = []
        for step in range(start.step + 1, until + 1):
            figures += train(trainer, step - 1, step)
            if (shared := saves.due(step)) or saves.local_due(step):
                saves.save(step, step * cfg.train.global_batch_size, local=not shared)
        path = None if start.reader is None else str(start.reader.path.relative_to(folder))
        return {"from": path, "figures": figures, "lines": lines, "losses": [f["loss"] for f in figures]}


def steps_in(folder: Path) -> list[int]:
    return list(checkpoints(folder))


@pytest.fixture(scope="module")
def first_leg(ranks, tmp_path_factory):
    """A job of two nodes that ended after step FIRST."""
    folder = tmp_path_factory.mktemp("first_leg")
    ranks(WORLD, leg, TENSOR_AND_DATA, folder, 2, FIRST)
    assert steps_in(folder / "shared") == [1, 4]
    assert steps_in(folder / "node0") == steps_in(folder / "node1") == [6, 7]
    return folder


@pytest.fixture
def begun(first_leg, tmp_path):
    """What that job left, to go on from or to spoil."""
    return shutil.copytree(first_leg, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def uninterrupted(ranks):
    """The figures of the steps of a job that nobody ended."""
    return ranks(WORLD, whole, TENSOR_AND_DATA, 10)[0]


def goes_on(ranks, folder: Path, cfg=TENSOR_AND_DATA, nodes: int = 2, **keys) -> list[dict]:
    results = ranks(WORLD, leg, cfg, folder, nodes, 10, **keys)
    assert all(result["losses"] == results[0]["losses"] for result in results)
    return results


def warnings(results: list[dict]) -> list[str]:
    """What rank 0 says; the others say the same."""
    said = [[line for line in result["lines"] if "this local save is not used" in line] for result in results]
    assert all(lines == said[0] for lines in said)
    return said[0]


def test_each_node_has_its_part_and_an_index_of_it(begun):
    folders = [begun / f"node{i}" / "step_00000007" for i in (0, 1)]
    readers = [Reader(folder) for folder in folders]
    for i, (folder, reader) in enumerate(zip(folders, readers)):
        files = [f"rank_{rank:05d}.safetensors" for rank in (2 * i, 2 * i + 1)]
        assert sorted(path.name for path in folder.iterdir()) == ["index.json", *files] and list(reader.files) == files
        assert reader.state["root"] == [4, Reader(begun / "shared").index_checksum]
        reader.verify()
        with pytest.raises(CheckpointError, match="lacks parts of"):  # the other node has the rest
            for name in reader.names():
                reader.read(name, "master", (0,) * len(reader.shape(name)), reader.shape(name))
    assert readers[0].state["local_save"] == readers[1].state["local_save"]
    assert readers[0].layout == {"world": 4, "tp": 2, "pp": 1, "cp": 1, "dp": 2, "vp": 1}


def test_a_start_prefers_the_newest_local_save(ranks, begun, uninterrupted):
    """Bit for bit as if nobody had stopped it; and the next start does it again, from the same shared save."""
    results = goes_on(ranks, begun)
    assert [result["from"] for result in results] == [f"node{i}/step_00000007" for i in (0, 0, 1, 1)]
    assert repr(results[0]["figures"]) == repr(uninterrupted[7:]) and not warnings(results)
    assert steps_in(begun / "shared")[-1] == 8 and steps_in(begun / "node1") == [9, 10]


def test_each_node_has_the_histories_of_its_stages(ranks, tmp_path):
    """The data ranks of a stage are on both nodes, and have the same FP8 histories."""
    cfg = config(SHORT, FP8, {"model": {"num_layers": 2}, "parallel": {"tp": 2}})
    expected = ranks(WORLD, whole, cfg, 10)[0]
    ranks(WORLD, leg, cfg, tmp_path, 2, FIRST)
    results = goes_on(ranks, tmp_path, cfg)
    assert results[0]["from"] == "node0/step_00000007" and not warnings(results)
    assert repr(results[0]["figures"]) == repr(expected[7:])


def test_what_a_start_came_from_stays_until_there_are_two_newer_ones(ranks, begun):
    """Another node may be lost while the next one is written."""
    ranks(WORLD, leg, TENSOR_AND_DATA, begun, 2, 9)
    assert steps_in(begun / "node0") == steps_in(begun / "node1") == [7, 9]


def test_a_shared_save_begins_the_measured_interval_of_local_ones_anew(tmp_path):
    keys = {"every": FIRST_STEPS, "local_every": "auto", "mtbf_hours": 1.0, "local_dir": str(tmp_path / "node")}
    cfg = saving(SHORT, tmp_path / "shared", **keys)
    trainer = build(cfg, mesh_of(cfg))
    with Log(cfg, 0, 1) as log:
        saves = Checkpointer(cfg, trainer.state, {}, log)
        saves.save(FIRST_STEPS, 4 * FIRST_STEPS)
        saves.wait()
    assert not saves.local_due(2 * FIRST_STEPS - 1) and saves.local_due(2 * FIRST_STEPS)


def test_what_a_shared_save_costs_is_no_cost_of_local_ones(tmp_path):
    """Steps of 2 s. The one after a local save takes 0.5 s more, the one after a shared save a minute."""
    keys = {"every": 20, "local_every": "auto", "mtbf_hours": 1.0, "local_dir": str(tmp_path / "node")}
    cfg = saving(SHORT, tmp_path / "shared", **keys)
    trainer = build(cfg, mesh_of(cfg))
    with Log(cfg, 0, 1) as log:
        saves = Checkpointer(cfg, trainer.state, {}, log)
        for step in range(1, 50):
            seconds = {21: 62.0, 31: 2.5, 41: 62.0, 46: 2.5}.get(step, 2.0)
            saves.on_figures(mock.Mock(step=step, seconds=seconds))
            if step + 1 in (21, 31, 41, 46):
                saves.save(step, 4 * step, local=step not in (20, 40))
                saves.wait()
                assert not (saves.interval.running or saves.local_interval.running)
        with mock.patch.object(destination, "write_shard", side_effect=CheckpointError("no space left")):
            for step, local in (50, False), (51, True):
                saves.save(step, 4 * step, local=local)
                saves.wait()
                assert not (saves.interval.running or saves.local_interval.running)
    assert list(saves.local_interval.stall_seconds) == [0.5, 0.5]


def test_another_run_in_a_nodes_directory_costs_only_the_local_saves(tmp_path):
    """Each save is recorded and measured as what it is."""
    cfg = saving(SHORT, tmp_path / "shared", local_dir=str(tmp_path / "node"), async_save=False)
    trainer, lines = build(cfg, mesh_of(cfg)), []
    with Log(cfg, 0, 1) as log, mock.patch.object(log, "record") as record:
        log.warn = lines.append
        saves = Checkpointer(cfg, trainer.state, {}, log)
        for step, local in (1, False), (2, True), (3, True), (4, False):
            if step == 3:
                claim(tmp_path / "node")
            saves.save(step, 4 * step, local=local)
            assert saves.running is None  # without checkpoint.async_save it has ended
    assert steps_in(tmp_path / "shared") == [1, 4] and steps_in(tmp_path / "node") == [2]
    (line,) = lines
    assert line.startswith("local save of step 3 failed, training goes on: ") and "was taken over by" in line
    recorded = [(call.kwargs["step"], call.kwargs["local"]) for call in record.call_args_list]
    assert recorded == [(1, False), (2, True), (4, False)]
    assert [len(interval.save_seconds) for interval in (saves.interval, saves.local_interval)] == [2, 1]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name, said",
    [
        ("rank_00002.safetensors", "rank_00002.safetensors is damaged: its checksum is"),
        ("index.json", "index.json is damaged, or not an index of minitron"),
    ],
)
def test_a_damaged_local_save_is_named_and_skipped(ranks, begun, uninterrupted, name, said):
    """For the one before it; with that damaged, too, for the shared one, whose steps are made again."""
    expected = [f["loss"] for f in uninterrupted]
    flip(begun / "node1" / "step_00000007" / name)
    results = goes_on(ranks, begun)
    assert results[0]["from"] == "node0/step_00000006" and results[0]["losses"] == expected[6:]
    assert any(said in line and "node1/step_00000007" in line for line in warnings(results)), warnings(results)


def test_without_a_whole_local_save_the_shared_one_is_used(ranks, begun, uninterrupted):
    expected = [f["loss"] for f in uninterrupted]
    for step in 6, 7:
        os.truncate(begun / "node0" / f"step_{step:08d}" / "rank_00001.safetensors", 100)
    results = goes_on(ranks, begun)
    assert results[3]["from"] == "shared/step_00000004" and results[3]["losses"] == expected[4:]
    assert [line.split(":")[0].split("/", 1)[-1].endswith("is damaged") for line in warnings(results)] == [True, True]


@pytest.mark.parametrize("lost", ["all", "newest", "of another save", "of the first node"])
def test_a_node_whose_part_is_missing(ranks, begun, lost):
    """As after a spare node took another's place, or a node died while it wrote, perhaps for the second time."""
    if lost == "of another save":
        state = Reader(begun / "node1").state | {"local_save": "01234567"}
        reindex(begun / "node1", "step_00000007", state=state)
    else:
        folders = {"all": "node1", "newest": "node1/step_00000007", "of the first node": "node0"}
        shutil.rmtree(begun / folders[lost])
    results = goes_on(ranks, begun)
    start = "node0/step_00000006" if lost in ("newest", "of another save") else "shared/step_00000004"
    assert results[0]["from"] == start
    others = "0, 1" if lost == "of the first node" else "2, 3"
    assert f"step_00000007 is not the same on all nodes: see ranks {others}: this local save is not used" in "".join(
        warnings(results)
    )


@pytest.mark.parametrize("nodes, start", [(1, "node0/step_00000007"), (2, "shared/step_00000004")])
def test_another_layout(ranks, tmp_path, nodes, start):
    """On one node all files are there for any layout; on two, those of other ranks are missing, which is said."""
    ranks(WORLD, leg, TENSOR_AND_DATA, tmp_path, nodes, FIRST)
    results = goes_on(ranks, tmp_path, config(SHORT, {"parallel": {"pp": 2}}), nodes)
    assert results[0]["from"] == start and len(results[0]["losses"]) == 10 - int(start[-1])
    expected = [f["loss"] for f in ranks(1, whole, SHORT, 10)[0]]
    assert results[0]["losses"] == pytest.approx(expected[int(start[-1]) :], rel=1e-6)
    assert len(warnings(results)) == (0 if nodes == 1 else 2)
    assert all("index.json lacks parts of" in line for line in warnings(results))


def test_what_a_killed_save_left(ranks, begun):
    """A temporary folder is as if it were not there; a folder of files without an index is named."""
    temporary = begun / "node0" / "step_00000008.tmp-01234567"
    shutil.copytree(begun / "node0" / "step_00000007", temporary)
    (begun / "node1" / "step_00000008").mkdir()
    (begun / "node1" / "step_00000008" / "rank_00002.safetensors").write_bytes(b"half")
    results = goes_on(ranks, begun)
    assert results[0]["from"] == "node0/step_00000007" and not temporary.exists()
    (line,) = warnings(results)
    assert "node1/step_00000008/index.json: no such file" in line


def test_local_saves_of_another_run_do_not_count(ranks, begun):
    """Of the same model and data, and newer: what it descends from is not there any more."""
    shutil.move(begun / "shared", begun / "old")
    results = goes_on(ranks, begun)
    assert results[0]["from"] is None and len(results[0]["losses"]) == 10
    assert steps_in(begun / "shared") == [4, 8]  # of 1, 4 and 8 the newest two
    shutil.rmtree(begun / "shared")
    shutil.move(begun / "old", begun / "shared")
    results = goes_on(ranks, begun)
    assert results[0]["from"] == "shared/step_00000004"  # its own ones have been replaced


def test_who_goes_back_goes_back(ranks, begun):
    """Not to a local save that was made after that step, before; but to those made since, also the next time."""
    results = goes_on(ranks, begun, resume_step=4)
    assert results[0]["from"] == "shared/step_00000004"
    assert steps_in(begun / "shared")[-1] == 8
    assert goes_on(ranks, begun, resume_step=4)[0]["from"] == "node0/step_00000010"


def test_resume_false_reads_no_local_save(ranks, begun):
    assert goes_on(ranks, begun, resume=False)[0]["from"] is None


def failing(cfg, folder: Path) -> dict:
    """On node 1 a disk fails in the midst of each local save."""
    original = destination.write_shard

    def full(path, pieces):
        if "node1" in str(path):
            raise CheckpointError(f"{path}: no space left on device")
        return original(path, pieces)

    destination.write_shard = full
    try:
        return leg(cfg, folder, 2, FIRST)
    finally:
        destination.write_shard = original


def test_a_failing_disk_of_a_node_costs_a_line(ranks, tmp_path):
    results = ranks(WORLD, failing, TENSOR_AND_DATA, tmp_path)
    assert steps_in(tmp_path / "shared") == [1, 4] and not steps_in(tmp_path / "node0")
    assert not list(tmp_path.glob("node*/step_*"))
    lines = [line for line in results[0]["lines"] if "no space left" in line]
    assert len(lines) == 5 and lines[0].startswith("local save of step 2 failed, training goes on: ")


def one_directory(cfg, folder: Path) -> str:
    """Two nodes to which a network shows the same folder."""
    rank = mesh_of(cfg).rank
    original, destination.identity = destination.identity, lambda path: (original(path), rank // 2)
    try:
        leg(cfg, folder, 1, 2)
    except CheckpointError as error:
        return str(error)
    finally:
        destination.identity = original
    return ""


def test_a_directory_that_several_nodes_see(ranks, tmp_path):
    for error in ranks(WORLD, one_directory, TENSOR_AND_DATA, tmp_path):
        assert error == (
            f"checkpoint.local_dir={tmp_path}/node0 is one directory that several nodes share; name a folder on "
            "each node's own disk, or drop it"
        )


def test_a_directory_is_another_one_on_another_machine(tmp_path):
    """Disks of two machines may have the same numbers. Containers have names of their own, and share a kernel."""
    here = destination.identity(tmp_path)
    assert here == destination.identity(tmp_path / "new" / "..") != destination.identity(tmp_path / "new")

    def identity(kernel: str, host: str):
        read = mock.Mock(return_value=kernel, side_effect=None if kernel else FileNotFoundError)
        with (
            mock.patch.object(destination.socket, "gethostname", lambda: host),
            mock.patch.object(Path, "read_text", read),
        ):
            return destination.identity(tmp_path)

    assert identity("kernel 1", "a") == identity("kernel 1", "b") != identity("kernel 2", "a")
    assert identity("", "a") == identity("", "a") != identity("", "b")


@pytest.fixture
def memory():
    """A folder in the machine's memory."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="minitron-test-") as folder:
        yield Path(folder) / "run"


IN_MEMORY = [pytest.param(place, marks=pytest.mark.slow) for place in ("memory", "memory that is lost")]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", *IN_MEMORY])
def test_a_killed_run_goes_on_from_its_node(tmp_path, memory, place):
    """The whole program under torchrun: the first local save is a shared one, and nothing of the log is lost."""
    local_dir = tmp_path / "disk" if place == "disk" else memory
    words = ["parallel.pp=2", "train.steps=40", "optimizer.decay_steps=40"]
    run(tmp_path / "whole", 2, *words)
    words += [f"checkpoint.dir={tmp_path / 'saves'}", "checkpoint.every=0"]
    words += [f"checkpoint.local_dir={local_dir}", "checkpoint.local_every=3"]
    with Run(tmp_path, "none", *MODEL, *words, ranks=2) as torchrun:
        torchrun.wait_for("step 12 saved on the nodes' own disks")
    if place == "memory that is lost":  # as with a machine that starts again
        shutil.rmtree(memory)
    with Run(tmp_path, "none", *MODEL, *words, ranks=2) as torchrun:
        status, _, output = torchrun.end()
    first, second = torchrun.rows("run")
    if place == "memory that is lost":
        assert f"resumed from {tmp_path}/saves/step_00000003" in output and second["first_step"] == 4
    else:
        assert f"resumed from {local_dir}/step_000000" in output, output
        assert second["first_step"] >= 13 and second["first_step"] % 3 == 1
    assert status == 0 and {row["local"] for row in torchrun.rows("save")} == {True, False}
    assert dict(losses(torchrun.folder)) == dict(losses(tmp_path / "whole"))
    assert steps_in(tmp_path / "saves") == [3, 40]


def test_a_run_that_ends_where_its_local_save_is_saves_for_all(tmp_path):
    """Started again with as many steps as are done it once said that the save had failed, which it had never begun."""
    words = [f"checkpoint.dir={tmp_path / 'saves'}", "checkpoint.every=0"]
    words += [f"checkpoint.local_dir={tmp_path / 'disk'}", "checkpoint.local_every=3"]
    with Run(tmp_path, "none", *words, ranks=None) as first:
        first.wait_for("step 6 saved on the nodes' own disks")
    last = steps_in(tmp_path / "disk")[-1]
    with Run(tmp_path, "none", *words, f"train.steps={last}", ranks=None) as second:
        status, _, output = second.end()
    assert status == 0 and f"resumed from {tmp_path}/disk/step_{last:08d}" in output, output
    assert steps_in(tmp_path / "saves") == [3, last]
    assert Reader(tmp_path / "saves").consumed_samples == Reader(tmp_path / "disk").consumed_samples > 0
