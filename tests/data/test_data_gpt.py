"""The order of samples against a plain-Python twin of Megatron's rule, the cache, and the size it has to bear."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitron.data import gpt
from minitron.data.cache import Cache
from minitron.data.gpt import GPTDataset
from minitron.data.indexed import DataError, IndexedDataset, IndexedWriter

ROOT = Path(__file__).resolve().parents[2]


def plain_samples(documents, sequences, num_samples, s, seed):
    """All samples by the rule, with loops and lists: (tokens, starts) in the order of the index."""
    per_epoch = sum(len(documents[i]) for i in sequences)
    epochs, tokens = 1, per_epoch
    while tokens < num_samples * s + 1:
        epochs, tokens = epochs + 1, tokens + per_epoch
    before_last = ((epochs - 1) * per_epoch - 1) // s
    apart = epochs > 1 and num_samples - before_last < int(0.80 * ((per_epoch - 1) // s))
    total = (epochs * per_epoch - 1) // s
    rng = np.random.RandomState(seed)

    def shuffled(items):
        items = np.array(items)
        rng.shuffle(items)
        return items.tolist()

    if apart:
        order = shuffled(list(sequences) * (epochs - 1)) + shuffled(sequences)
        index = shuffled(range(before_last)) + shuffled(range(before_last, total))
    else:
        order = shuffled(list(sequences) * epochs)
        index = shuffled(range(total))
    stream = [(token, place == 0) for i in order for place, token in enumerate(documents[i])]
    cuts = [stream[k * s : (k + 1) * s + 1] for k in index]
    return [([token for token, _ in cut], [i for i, (_, begins) in enumerate(cut) if begins and i]) for cut in cuts]


def write(prefix, documents):
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(np.array(document, np.uint16))
    return IndexedDataset(prefix)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=14),
    ends=st.tuples(st.integers(0, 14), st.integers(0, 14)),
    num_samples=st.integers(1, 60),
    s=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_equal_the_plain_rule(tmp_path_factory, lengths, ends, num_samples, s, seed):
    folder = tmp_path_factory.mktemp("samples")
    tokens = iter(range(10**6))
    documents = [[next(tokens) for _ in range(length)] for length in lengths]
    sequences = range(*sorted(min(end, len(lengths)) for end in ends))
    indexed = write(folder / "d", documents)
    arguments = (indexed, sequences, num_samples, s, seed, Cache(folder / "cache"), 10**6)
    if sum(lengths[i] for i in sequences) < s + 1:
        with pytest.raises(ValueError, match=r"fewer than one sample of train\.seq_len.*change data\.split"):
            GPTDataset(*arguments)
        return
    dataset = GPTDataset(*arguments)
    expected = plain_samples(documents, sequences, num_samples, s, seed)
    assert len(dataset) == len(expected) >= num_samples
    for i, (tokens, starts) in enumerate(expected):
        sample = dataset[i]
        assert sample.tokens.tolist() == tokens and sample.starts.tolist() == starts and sample.mask is None
        assert sample.tokens.dtype == np.int64 and sample.starts.dtype == np.int32


def test_both_kinds_of_last_epoch_are_met():
    """The property test above would prove little if one branch were never drawn."""
    plans = [gpt.plan_epochs(100, n, 10) for n in range(1, 40)]
    kinds = {plan.first_samples != plan.samples for plan in plans}
    assert kinds == {True, False}


def test_rows_of_the_example_in_the_docstring():
    rows = gpt.build_sample_index(np.array([5, 3, 6]), np.array([1, 2, 0]), 3, 4)
    assert rows.tolist() == [[0, 0], [1, 1], [1, 5], [2, 3]] and rows.dtype == np.int32


def test_an_id_beyond_the_vocabulary_is_named(tmp_path):
    indexed = write(tmp_path / "d", [[1, 2, 3, 99, 5]])
    dataset = GPTDataset(indexed, range(1), 1, 4, 0, Cache(tmp_path), 99)
    with pytest.raises(
        DataError, match=r"d\.bin: sample 0 holds token id 99, but model\.vocab_size=99 allows 0 to 98; set it to the"
    ):
        dataset[0]
    assert GPTDataset(indexed, range(1), 1, 4, 0, Cache(tmp_path), 100)[0].tokens.max() == 99
    with pytest.raises(DataError, match="here holds token id -3.*; copy or preprocess the data again"):
        gpt.check_ids(np.array([5, -3]), 9, "here")


def test_a_killed_build_is_built_again(tmp_path):
    indexed = write(tmp_path / "d", [[1, 2, 3, 4]] * 5)
    first = GPTDataset(indexed, range(5), 7, 3, 1, Cache(tmp_path / "cache"), 9)
    samples = [first[i].tokens.tolist() for i in range(7)]
    folder = tmp_path / "cache" / f"gpt-{first.fingerprint}"
    (left := folder.with_name(f"{folder.name}.0.partial")).mkdir()
    folder.rename(left / "random")  # as a SIGKILL before the rename leaves it
    (left / "random" / "sample.npy").write_bytes(b"half")
    os.utime(left, (0, 0))
    again = GPTDataset(indexed, range(5), 7, 3, 1, Cache(tmp_path / "cache"), 9)
    assert [again[i].tokens.tolist() for i in range(7)] == samples


@pytest.mark.parametrize("name", ["cache", "x" * 300])
def test_a_cache_directory_that_cannot_be_made_is_an_error(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"data\.cache_dir=.*file/{name}.*choose a directory"):
        GPTDataset(write(tmp_path / "d", [[1, 2, 3]]), range(1), 1, 2, 0, Cache(tmp_path / "file" / name), 9)


def test_a_full_disk_while_building_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gpt, "_save_index", full)
    with pytest.raises(ValueError, match=r"data\.cache_dir=.*No space left on device; choose .* with room in it"):
        GPTDataset(write(tmp_path / "d", [[1, 2, 3]]), range(1), 1, 2, 0, Cache(tmp_path / "cache"), 9)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


RACE = """
import os, sys, time
from minitron.data import gpt
from minitron.data.cache import Cache
from minitron.data.indexed import IndexedDataset
folder, go = sys.argv[1:]
save = gpt._save_index
def slow_save(*arguments):
    with open(f"{folder}/builds", "a") as log:
        log.write("built\\n")
    time.sleep(0.3)
    save(*arguments)
gpt._save_index = slow_save
print("ready", flush=True)
sys.stdin.readline()
dataset = gpt.GPTDataset(IndexedDataset(f"{folder}/d"), range(50), 40, 8, 3, Cache(f"{folder}/cache"), 1000)
print([dataset[i].tokens.tolist() for i in range(40)])
"""


def test_processes_at_once_build_once_and_agree(tmp_path):
    write(tmp_path / "d", [[i, i + 1, i + 2, i + 3, i + 4] for i in range(50)])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), "go"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 4
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    outputs = {rank.communicate(timeout=600)[0] for rank in ranks}
    assert len(outputs) == 1 and outputs != {""} and all(rank.returncode == 0 for rank in ranks)
    assert (tmp_path / "builds").read_text() == "built\n"


MANY = """
import json, resource, sys, time, types
import numpy as np
from minitron.data.cache import Cache
from minitron.data.gpt import GPTDataset
n, folder = int(sys.argv[1]), sys.argv[2]
lengths = np.random.default_rng(0).integers(1, 1500, n, dtype=np.int32)
data = types.SimpleNamespace(lengths=lengths, prefix="synthetic", fingerprint="synthetic")
begin = time.process_time()
dataset = GPTDataset(data, range(n), int(lengths.sum(dtype=np.int64)) // 2048 - 1, 2048, 1234, Cache(folder), 1)
print(json.dumps({"seconds": time.process_time() - begin, "samples": len(dataset),
                  "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}))
"""


@pytest.mark.parametrize("documents", [1_000_000, pytest.param(100_000_000, marks=pytest.mark.slow)])
def test_many_documents_take_under_a_minute_and_8_gib(tmp_path, documents):
    """The limits are those promised for 100 million documents, on one core."""
    run = subprocess.run(
        [sys.executable, "-c", MANY, str(documents), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    measured = json.loads(run.stdout)
    assert measured["seconds"] < 60 and measured["gib"] < 8 and measured["samples"] > documents / 4, measured
