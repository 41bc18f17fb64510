"""A cached folder is complete or absent: builders at once, builders killed, damage, and caches of older versions."""

import errno
import functools
import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minitron.config.schema import DataConfig
from minitron.data import build as build_module
from minitron.data import cache as cache_module
from minitron.data.build import build_datasets
from minitron.data.cache import CONTENTS, Cache
from minitron.data.gpt import MAX_SEQUENCES, GPTDataset
from minitron.data.indexed import DataError, IndexedDataset, IndexedWriter

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["first", "second", "third"]


def fill(folder, text="text"):
    for name in NAMES:
        (folder / name).write_text(text)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def partial_folders(directory):
    return list(directory.rglob("*.partial"))


# ---- builders at once -----------------------------------------------------------------------------------------------


def test_builders_that_do_not_wait_for_each_other_use_one_build(tmp_path, monkeypatch):
    """Nodes whose file system keeps none of them from building."""
    monkeypatch.setattr(cache_module, "PATIENCE_SECONDS", -1.0)
    everyone, found = threading.Barrier(3), {}

    def node(name):
        def build(folder):
            fill(folder, name)
            everyone.wait(60)  # nobody renames before all have built

        found[name] = contents(Cache(tmp_path).build_once("folder", build))

    nodes = [threading.Thread(target=node, args=(name,)) for name in ("a", "b", "c")]
    for thread in nodes:
        thread.start()
    for thread in nodes:
        thread.join()
    assert len(found) == 3 and found["a"] == found["b"] == found["c"]
    assert len({found["a"][name] for name in NAMES}) == 1, "all files are of one builder"
    assert not partial_folders(tmp_path)


AT_ONCE = """
import os, sys, time
from minitron.data import cache
directory, rank = sys.argv[1:]
cache.PATIENCE_SECONDS, cache.FIRST_PAUSE = -1.0, 0.0
def build(folder):
    for name in ("first", "second", "third"):
        (folder / name).write_text(rank * 50000)
print("ready", flush=True)
sys.stdin.readline()
for i in range(20):
    folder = cache.Cache(directory).build_once(f"folder-{i}", build)
    texts = [(folder / name).read_text() for name in ("first", "second", "third")]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 50000, [text[:9] for text in texts]
"""


def test_processes_that_build_at_once_never_read_half_a_folder(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", AT_ONCE, str(tmp_path), str(rank)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(4)
    ]
    assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 4
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"folder-{i}" for i in range(20))


def test_a_second_build_that_fails_uses_the_first(tmp_path, monkeypatch):
    """The first to finish deletes the folders of all others, which then cannot go on."""
    monkeypatch.setattr(cache_module, "PATIENCE_SECONDS", -1.0)

    def slow(folder):
        Cache(tmp_path).build_once("folder", functools.partial(fill, text="fast"))
        fill(folder, "slow")

    folder = Cache(tmp_path).build_once("folder", slow)
    assert (folder / "first").read_text() == "fast" and not partial_folders(tmp_path)


def test_who_waits_looks_with_growing_pauses(tmp_path, monkeypatch):
    pauses = []
    other = tmp_path / "folder.0.partial"
    other.mkdir()

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 20:
            fill(other)
            other.rename(tmp_path / "folder")

    monkeypatch.setattr(cache_module.time, "sleep", sleep)
    folder = Cache(tmp_path).build_once("folder", lambda folder: fill(folder, "not this"))
    assert (folder / "first").read_text() == "text"
    assert pauses == sorted(pauses) and pauses[0] == cache_module.FIRST_PAUSE
    assert pauses[-1] == cache_module.LONGEST_PAUSE and len(set(pauses)) > 5


@pytest.mark.parametrize(
    "ages, expected", [([], 0), ([0.9], None), ([1.1], 1), ([9, 1.9], None), ([9, 2.1], 2), ([9, 9, 3.9], None)]
)
def test_each_further_builder_begins_after_twice_the_time(tmp_path, monkeypatch, ages, expected):
    """Ages of the folders of earlier builders, in units of PATIENCE_SECONDS, and the number of the next one's."""

    def sleep(seconds):
        if seconds == cache_module.LONGEST_PAUSE:
            raise TimeoutError("it waits")

    for number, age in enumerate(ages):
        folder = tmp_path / f"folder.{number}.partial"
        folder.mkdir()
        begun = time.time() - age * cache_module.PATIENCE_SECONDS
        os.utime(folder, (begun, begun))
    monkeypatch.setattr(cache_module.time, "sleep", sleep)
    used = []
    if expected is None:
        with pytest.raises(ValueError, match="it waits"):
            Cache(tmp_path).build_once("folder", fill)
    else:
        Cache(tmp_path).build_once("folder", lambda folder: (used.append(folder.parent.name), fill(folder)))
        assert used == [f"folder.{expected}.partial"]


# ---- builders that are killed ---------------------------------------------------------------------------------------

KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from minitron.data import cache

def build(folder):
    for name in ("first", "second"):
        (folder / name).write_text("text")

def killed_before(moment, directory):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"):
            if any(str(directory) in str(argument) for argument in arguments):
                seen += 1
                if seen > moment:
                    os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    cache.Cache(directory).build_once("folder", build)
    os._exit(0)

for moment in itertools.count():
    directory = Path(sys.argv[1]) / str(moment)
    directory.mkdir()
    pid = os.fork()
    if not pid:
        killed_before(moment, directory)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if (directory / "folder").exists():
        names = {path.name for path in (directory / "folder").iterdir()}
        assert names == {"first", "second", cache.CONTENTS}, (moment, names)
    cache.PATIENCE_SECONDS = -1.0
    again = cache.Cache(directory).build_once("folder", build)
    cache.PATIENCE_SECONDS = 1e9
    assert [(again / name).read_text() for name in ("first", "second")] == ["text"] * 2, moment
    if not ended:
        break
    assert ended == -signal.SIGKILL, ended
print(moment)
"""


def test_a_builder_killed_at_any_moment_leaves_a_whole_folder_or_none(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 8, "it was killed before each of its operations on files"


def test_the_folder_of_a_killed_builder_is_replaced_once_it_is_old_and_deleted(tmp_path):
    left = tmp_path / "folder.0.partial"
    (left / "half").mkdir(parents=True)
    fill(left / "half", "half")
    os.utime(left, (0, 0))
    folder = Cache(tmp_path).build_once("folder", fill)
    assert {name: (folder / name).read_text() for name in NAMES} == dict.fromkeys(NAMES, "text")
    assert not partial_folders(tmp_path)


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_on_node", [True, False])
@pytest.mark.parametrize("damage", ["shorter", "longer", "missing"])
def test_every_process_finds_a_file_of_another_length(tmp_path, damage, first_on_node):
    path = Cache(tmp_path).build_once("folder", fill) / "second"
    path.write_text({"shorter": "tex", "longer": "texts"}.get(damage, ""))
    if damage == "missing":
        path.unlink()
    with pytest.raises(ValueError, match=rf"{tmp_path}/folder.*second.*; delete it") as caught:
        Cache(tmp_path, first_on_node).build_once("folder", fill)
    assert "\n" not in str(caught.value)


def test_the_first_of_a_node_finds_a_changed_byte(tmp_path):
    path = Cache(tmp_path).build_once("folder", fill) / "second"
    path.write_text("tExt")
    assert Cache(tmp_path, first_on_node=False).build_once("folder", fill) == path.parent
    with pytest.raises(ValueError, match=rf"{tmp_path}/folder.*second.*; delete it"):
        Cache(tmp_path).build_once("folder", fill)


def test_any_changed_byte_of_the_list_is_found_or_harmless(tmp_path):
    folder = Cache(tmp_path).build_once("folder", fill)
    written, found = (folder / CONTENTS).read_bytes(), 0
    for place in range(len(written)):
        for bit in 1, 128:
            (folder / CONTENTS).write_bytes(written[:place] + bytes([written[place] ^ bit]) + written[place + 1 :])
            try:
                Cache(tmp_path).build_once("folder", fill)
            except ValueError as error:
                assert str(folder) in str(error)
                found += 1
    assert found > len(written), "nearly all of two changes a byte"
    for length in range(len(written)):
        (folder / CONTENTS).write_bytes(written[:length])
        with pytest.raises(ValueError, match="delete it"):
            Cache(tmp_path, first_on_node=False).build_once("folder", fill)


def test_files_are_read_for_checksums_once_by_the_first_of_a_node(tmp_path, monkeypatch):
    read, digest = [], hashlib.file_digest

    def counted(file, algorithm):
        read.append(Path(file.name).name)
        return digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    Cache(tmp_path).build_once("folder", fill)
    assert sorted(read) == NAMES, "the process that builds reads them for the list, and does not check them"
    Cache(tmp_path, first_on_node=False).build_once("folder", fill)
    assert sorted(read) == NAMES
    Cache(tmp_path).build_once("folder", fill)
    assert sorted(read) == sorted(2 * NAMES)


# ---- caches of older versions ---------------------------------------------------------------------------------------


def make_read_only(monkeypatch):
    """Let nothing be made any more (permissions do not bind root)."""

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "somewhere")

    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(cache_module, "open", lambda path, mode: refuse() if "x" in mode else open(path, mode), False)


def test_a_folder_without_the_list_gets_it_from_the_first_of_a_node(tmp_path, monkeypatch):
    folder = Cache(tmp_path).build_once("folder", fill)
    (folder / CONTENTS).unlink()
    Cache(tmp_path, first_on_node=False).build_once("folder", fill)
    assert not (folder / CONTENTS).exists()
    with monkeypatch.context() as patch:
        make_read_only(patch)
        assert Cache(tmp_path).build_once("folder", fill) == folder
    assert sorted(contents(folder)) == NAMES
    Cache(tmp_path).build_once("folder", fill)
    assert sorted(contents(folder)) == sorted([*NAMES, CONTENTS])
    (folder / "third").write_text("tExt")
    with pytest.raises(ValueError, match="third"):
        Cache(tmp_path).build_once("folder", fill)


def write(prefix, documents=41):
    with IndexedWriter(prefix, np.uint16) as writer:
        for i in range(documents):
            writer.add_document(np.arange(20, dtype=np.uint16) + i)
    return str(prefix)


def datasets(tmp_path, **changes):
    paths = ["0.4", str(tmp_path / "a"), "0.6", str(tmp_path / "b")]
    data = DataConfig(source="indexed", paths=paths, split="8,2", cache_dir=str(tmp_path / "cache"))
    run = dict(vocab_size=300, seq_len=8, seed=3, train_samples=100, valid_samples=10)
    built = build_datasets(data, **run | changes)
    return built.info, [built.train[i].tokens.tolist() for i in range(100)]


def test_the_state_of_a_file_is_of_its_whole_path(tmp_path, monkeypatch):
    """Two names of one file, which nothing else tells apart."""
    write(tmp_path / "a")
    for kind in "idx", "bin":
        os.link(tmp_path / f"a.{kind}", tmp_path / f"b.{kind}")
    monkeypatch.chdir(tmp_path)
    states = [cache_module.state_of(*paths) for paths in (["a.bin"], ["b.bin"], ["a.bin", "b.bin"], ["b.bin", "a.bin"])]
    assert len({*states}) == 4 and cache_module.state_of(str(tmp_path / "a.bin")) == states[0]
    a, b, here = (IndexedDataset(name).state for name in ("a", "b", tmp_path / "a"))
    assert a == here != b


def test_an_old_cache_works_also_where_it_cannot_be_written(tmp_path, monkeypatch):
    write(tmp_path / "a"), write(tmp_path / "b", 60)
    expected = datasets(tmp_path)
    for path in (tmp_path / "cache").rglob(CONTENTS):
        path.unlink()
    for folder in (tmp_path / "cache").glob("tokens-*"):  # older versions did not make these
        for path in [*folder.iterdir()]:
            path.unlink()
        folder.rmdir()
    before = sorted((tmp_path / "cache").rglob("*"))
    with monkeypatch.context() as patch:
        make_read_only(patch)
        assert datasets(tmp_path) == datasets(tmp_path, first_on_node=False) == expected
    assert sorted((tmp_path / "cache").rglob("*")) == before
    assert datasets(tmp_path) == datasets(tmp_path, first_on_node=False) == expected
    assert len([*(tmp_path / "cache").rglob(CONTENTS)]) == len([*(tmp_path / "cache").iterdir()]) > 4


# ---- large data -----------------------------------------------------------------------------------------------------


class Unread:
    """In the place of an attribute that takes a reading of the whole index."""

    def __get__(self, *arguments):
        raise AssertionError("the whole index is read")


def test_an_index_is_read_whole_by_one_process_until_it_changes(tmp_path, monkeypatch):
    write(tmp_path / "a"), write(tmp_path / "b", 60)
    expected, calls = datasets(tmp_path), []
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "check_index", lambda file: calls.append(file))
        patch.setattr(IndexedDataset, "fingerprint", Unread())
        assert datasets(tmp_path, first_on_node=False) == datasets(tmp_path) == expected and not calls
    times = os.stat(tmp_path / "b.bin")
    write(tmp_path / "b", 60)
    os.utime(tmp_path / "b.bin", ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copy that keeps times leaves it
    monkeypatch.setattr(build_module, "check_index", lambda file: calls.append(file.prefix))
    assert datasets(tmp_path) == expected and calls == [str(tmp_path / "b")]


@pytest.mark.parametrize("stop", [MAX_SEQUENCES + 1, 3 * MAX_SEQUENCES], ids=["one more", "far more"])
def test_more_sequences_than_an_int32_can_number_are_refused(tmp_path, stop):
    """They were given negative numbers, which name other sequences."""
    file = SimpleNamespace(prefix="large", fingerprint="large")
    with pytest.raises(DataError, match=rf"^large: .*{stop - 1}.*{np.iinfo(np.int32).max}.*data\.paths") as caught:
        GPTDataset(file, range(5, stop), 10, 8, 1, Cache(tmp_path), 100)
    assert "\n" not in str(caught.value) and not [*tmp_path.iterdir()]


def test_the_last_sequences_that_an_int32_can_number_are_drawn(tmp_path):
    """The lengths of all others are never made."""

    class Lengths:
        def __getitem__(self, which):
            return np.full(10, 20, np.int32) if isinstance(which, slice) else np.full(len(which), 20, np.int32)

    def get(sequence, offset, length):
        drawn.append(sequence)
        return np.arange(20)[offset:][:length]

    drawn, sequences = [], range(MAX_SEQUENCES - 10, MAX_SEQUENCES)
    file = SimpleNamespace(prefix="large", fingerprint="large", lengths=Lengths(), get=get)
    dataset = GPTDataset(file, sequences, 20, 8, 1, Cache(tmp_path), 100)
    assert all(len(dataset[i].tokens) == 9 for i in range(len(dataset)))
    assert set(drawn) == set(sequences)


@pytest.mark.parametrize(
    "text", ['["../x"]', '{"../x": [0, ""]}', '{"/etc/passwd": [0, ""]}', '{"first": 1}', '{"first": [1]}']
)
def test_a_list_of_files_from_elsewhere_is_refused(tmp_path, text):
    """No name leads out of the folder, and what is no list of files is one error."""
    folder = Cache(tmp_path).build_once("name", fill)
    (folder / CONTENTS).write_text(text)
    with pytest.raises(ValueError, match="this folder of data.cache_dir is damaged"):
        Cache(tmp_path).build_once("name", fill)


def test_a_remembered_text_that_somebody_has_deleted_is_named(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    assert cache.recall("a", lambda: "text") == cache.recall("a", lambda: "another") == "text"
    with monkeypatch.context() as patch:  # where nothing can be written, it is read, or else computed
        make_read_only(patch)
        assert [cache.recall(name, lambda: "another") for name in "ab"] == ["text", "another"]
    for path in (tmp_path / "a").iterdir():
        path.unlink()  # as what cleans a scratch disk of old files, but leaves folders
    with pytest.raises(ValueError, match=f"{tmp_path / 'a'}.*delete it"):
        cache.recall("a", lambda: "text")
