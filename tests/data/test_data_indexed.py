"""The .bin/.idx files: exact bytes, round trips, and every way in which a pair of files can be wrong."""

import errno
import io
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitron.data import gpt, indexed
from minitron.data.indexed import (
    DTYPES,
    DataError,
    IndexedDataset,
    IndexedWriter,
    best_dtype,
    check_index,
    read_sidecar,
)

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [[[7, 8, 9]], [[4, 5], [6]], [], [[1]]]  # documents of sequences of ids; the third has no sequence


def index_bytes(documents, code, itemsize, modes=None):
    """The .idx that the format prescribes, by struct, one number at a time."""
    sequences = [sequence for document in documents for sequence in document]
    indices = [0]
    for document in documents:
        indices.append(indices[-1] + len(document))
    out = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    out += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(indices))
    out += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    pointer = 0
    for sequence in sequences:
        out += struct.pack("<q", pointer)
        pointer += len(sequence) * itemsize
    out += b"".join(struct.pack("<q", index) for index in indices)
    return out + b"".join(struct.pack("<b", mode) for mode in modes or [])


def write(prefix, documents=DOCUMENTS, dtype=np.uint16, sidecar=None):
    with IndexedWriter(prefix, dtype, sidecar) as writer:
        for document in documents:
            writer.add_document([np.array(sequence, dtype) for sequence in document])
    return prefix


@pytest.mark.parametrize(
    "code, letter", [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (6, "d"), (7, "f"), (8, "H")]
)
def test_bytes_of_every_dtype(tmp_path, code, letter):
    write(tmp_path / "d", dtype=DTYPES[code])
    assert (tmp_path / "d.idx").read_bytes() == index_bytes(DOCUMENTS, code, struct.calcsize(letter))
    ids = [i for document in DOCUMENTS for sequence in document for i in sequence]
    assert (tmp_path / "d.bin").read_bytes() == struct.pack(f"<{len(ids)}{letter}", *ids)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), max_size=8), data=st.data()
)
def test_round_trip(tmp_path_factory, documents, data):
    folder = tmp_path_factory.mktemp("round_trip")
    dataset = IndexedDataset(write(folder / "d", documents))
    assert (folder / "d.idx").read_bytes() == index_bytes(documents, 8, 2)
    sequences = [sequence for document in documents for sequence in document]
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == sequences
    assert dataset.document_indices.tolist() == np.cumsum([0] + [len(document) for document in documents]).tolist()
    assert dataset.tokens(0, dataset.num_tokens).tolist() == sum(sequences, [])
    assert not any(x.flags.writeable for x in (dataset.lengths, dataset.tokens(0, dataset.num_tokens)) if len(x))
    if sequences:
        i = data.draw(st.integers(0, len(sequences) - 1))
        offset = data.draw(st.integers(0, len(sequences[i])))
        length = data.draw(st.integers(0, len(sequences[i]) - offset))
        assert dataset.get(i, offset, length).tolist() == sequences[i][offset : offset + length]
        with pytest.raises(AssertionError, match="stays within the sequence"):
            dataset.get(i, offset, len(sequences[i]) - offset + 1)


LENGTHS, POINTERS, INDICES = (34 + 4 * np.array([0, 4, 4 + 8])).tolist()  # where they begin, for four sequences


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    "offset, format, value, message",
    [
        (LENGTHS + 4, "<i", -5, "sequence 1 has -5 tokens from byte 6 on, where byte 6 is next"),
        (LENGTHS + 4, "<i", 3, "sequence 2 has 1 tokens from byte 10 on, where byte 12 is next"),
        (LENGTHS + 4, "<i", 40, "sequence 2 has 1 tokens from byte 10 on, where byte 86 is next"),
        (POINTERS + 16, "<q", 9, "sequence 2 has 1 tokens from byte 9 on, where byte 10 is next"),
        (POINTERS, "<q", -2, "sequence 0 has 3 tokens from byte -2 on, where byte 0 is next"),
        (POINTERS + 8, "<q", 1 << 40, f"sequence 1 has 2 tokens from byte {1 << 40} on"),
        (INDICES + 8, "<q", 7, r"document indices do not rise from 0 to 4: \[7, 3\] at 1"),
        (INDICES + 16, "<q", -1, r"document indices do not rise from 0 to 4: \[1, -1\] at 1"),
        (INDICES + 32, "<q", 5, r"document indices do not rise from 0 to 4: \[0, 5\] at both ends"),
    ],
)
def test_damage_inside_of_an_index_is_named(tmp_path, monkeypatch, block, offset, format, value, message):
    """It was read as it came, or ended in an error of NumPy's when a sample met it."""
    monkeypatch.setattr(indexed, "_BLOCK_SEQUENCES", block)
    write(tmp_path / "d")
    check_index(IndexedDataset(tmp_path / "d"))
    data = bytearray((tmp_path / "d.idx").read_bytes())
    struct.pack_into(format, data, offset, value)
    (tmp_path / "d.idx").write_bytes(data)
    dataset = IndexedDataset(tmp_path / "d")
    with pytest.raises(DataError, match=rf"d\.idx: .*{message}.*; the index is damaged: .*tools/check_data\.py"):
        check_index(dataset)
    for sequence in range(len(dataset)):  # reading is either refused or stays within the file
        try:
            assert len(dataset.get(sequence)) == dataset.lengths[sequence]
        except DataError as error:
            assert f"sequence {sequence} has" in str(error) and ".bin 14 bytes" in str(error)


def test_no_document_indices_at_all(tmp_path):
    write(tmp_path / "d")
    data = (tmp_path / "d.idx").read_bytes()
    (tmp_path / "d.idx").write_bytes(data[:26] + struct.pack("<Q", 0) + data[34:INDICES])
    with pytest.raises(DataError, match=r"document indices do not rise from 0 to 4: \[\] at both ends"):
        check_index(IndexedDataset(tmp_path / "d"))


def test_more_tokens_than_an_int32_can_count(tmp_path):
    """The .bin has six gigabytes and takes no space on the disk."""
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        for length in (1 << 30,) * 3:
            writer._lengths.append(length)
            writer._document_indices.append(len(writer._lengths))
    os.truncate(tmp_path / "d.bin", 6 << 30)
    dataset = IndexedDataset(tmp_path / "d")
    check_index(dataset)
    assert dataset.pointers.tolist() == [0, 2 << 30, 4 << 30] and dataset.num_tokens == 3 << 30
    assert len(dataset.get(2, (1 << 30) - 5)) == 5
    assert gpt.count_tokens(dataset, range(3), 1) == 3 << 30
    rows = gpt.build_sample_index(dataset.lengths, np.array([2, 0, 1], np.int32), (3 << 10) - 1, 1 << 20)
    assert rows.tolist() == [[*divmod(k << 20, 1 << 30)] for k in range(3 << 10)]
    del dataset
    (tmp_path / "d.bin").unlink()  # pytest keeps folders, and a copy of one would be large


def test_modes_are_passed_over(tmp_path):
    write(tmp_path / "d")
    (tmp_path / "d.idx").write_bytes(index_bytes(DOCUMENTS, 8, 2, modes=[0, 1, -1, 0]))
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.get(0).tolist() == DOCUMENTS[0][0] and dataset.document_indices.tolist() == [0, 1, 3, 3, 4]


def test_dtype_rule_of_the_vocabulary():
    assert [best_dtype(v) for v in (1, 65499, 65500, 200000)] == [np.uint16, np.uint16, np.int32, np.int32]


def test_fingerprint_follows_the_content_not_the_path(tmp_path):
    one, same, other = (
        IndexedDataset(write(tmp_path / name, documents)).fingerprint
        for name, documents in (("a", DOCUMENTS), ("b", DOCUMENTS), ("c", [[[7, 8, 9]], [[4, 5], [6]], [], [[2]]]))
    )
    assert one == same != other
    # the same bytes as other sequences, or as ids of another format of that size
    alike = ([[7, 8, 9]], np.uint16), ([[7, 8], [9]], np.uint16), ([[7, 8, 9]], np.int16)
    files = [write(tmp_path / f"alike {i}", [document], dtype) for i, (document, dtype) in enumerate(alike)]
    assert len({Path(f"{file}.bin").read_bytes() for file in files}) == 1
    assert len({IndexedDataset(file).fingerprint for file in files}) == 3
    tokens = np.arange(100_000, dtype=np.uint16)  # more than is read of each end
    prints = set()
    for place in None, 0, len(tokens) - 1:
        changed = tokens.copy()
        changed[[] if place is None else place] += 1
        prints.add(IndexedDataset(write(tmp_path / f"at {place}", [[changed]])).fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("idx", None, r"d\.idx: no such file; give the prefix"),
        ("bin", None, r"d\.bin: no such file, but .*d\.idx is there"),
        ("idx", lambda c: b"PK\x03\x04" + c[4:], r"d\.idx: begins with .*PK.* no Megatron index"),
        ("idx", lambda c: c[:20], r"d\.idx: 20 bytes, shorter than its header requires; it is truncated"),
        ("idx", lambda c: c[:-1], r"d\.idx: \d+ bytes, shorter than its header requires; it is truncated"),
        ("idx", lambda c: c + b"\0\0", r"d\.idx: 2 bytes more than its header requires"),
        ("idx", lambda c: c[:9] + struct.pack("<Q", 2) + c[17:], r"d\.idx: version 2, only version 1"),
        ("idx", lambda c: c[:17] + b"\x09" + c[18:], r"d\.idx: dtype code 9 is not one of 1 to 8"),
        ("bin", lambda c: c[:-1], r"d\.bin: 13 bytes, but .*d\.idx needs 14; the file is truncated"),
        ("bin", lambda c: b"", r"d\.bin: 0 bytes, but"),
        ("bin", lambda c: 2 * c, r"d\.bin: 28 bytes, but .*d\.idx needs 14; .* belongs to another index"),
    ],
)
def test_wrong_files_are_one_clear_error(tmp_path, file, change, message):
    write(tmp_path / "d")
    path = tmp_path / f"d.{file}"
    path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize("given", ["d", "d_text", "d_text_document.bin", "d_text_document.idx", "."])
def test_a_prefix_that_is_not_whole_is_answered_by_the_dataset_there(tmp_path, given):
    write(tmp_path / "d_text_document")
    with pytest.raises(DataError, match="did you mean .*/d_text_document[?]"):
        IndexedDataset(tmp_path / given)
    with pytest.raises(DataError, match="give the prefix"):
        IndexedDataset(tmp_path / "[d]*")  # its characters are no pattern


@pytest.mark.parametrize("kind", ["idx", "bin", "json"])
def test_a_file_that_may_not_be_read_is_one_clear_error(tmp_path, monkeypatch, kind):
    """For root no permission is missing, so the system's answer is played."""
    prefix = write(tmp_path / "d", sidecar={"tokenizer": "bytes", "fingerprint": "f", "vocab_size": 9})
    really = io.open

    def refuse(path, *args, **options):
        if str(path).endswith(f"d.{kind}"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, *args, **options)

    for name in "builtins.open", "io.open":
        monkeypatch.setattr(name, refuse)
    with pytest.raises(DataError, match=rf"d\.{kind}: cannot be read \(Permission denied\); correct its permissions"):
        IndexedDataset(prefix)
        read_sidecar(prefix)


def test_a_failed_write_leaves_nothing_and_a_rewrite_is_whole(tmp_path):
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document(np.array([1, 2]))
        assert not {"d.bin", "d.idx"} & {path.name for path in tmp_path.iterdir()}
        raise RuntimeError("the tokenizer failed")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "d", [[[1, 2, 3]]], sidecar={"tokenizer": "bytes", "fingerprint": "f", "vocab_size": 9})
    assert read_sidecar(tmp_path / "d")["vocab_size"] == 9
    write(tmp_path / "d", [[[4]]])
    assert IndexedDataset(tmp_path / "d").get(0).tolist() == [4]
    assert read_sidecar(tmp_path / "d") is None, "an older .json must not describe the new tokens"


@pytest.mark.parametrize("sidecar", [None, {"tokenizer": "bytes", "fingerprint": "f", "vocab_size": 9}])
def test_a_writer_that_is_killed_leaves_no_mixture_of_two_datasets(tmp_path, monkeypatch, sidecar):
    """The files are on the disk before they have their names; there is no .idx while .bin and .json change."""
    write(tmp_path / "d", sidecar={"tokenizer": "old", "fingerprint": "f", "vocab_size": 9})
    events = []

    def record(name):
        def call(*args, real=getattr(os, name), **options):
            path = Path(os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else args[-1])
            events.append((name, path.name.split(".")[1]))
            real(*args, **options)

        monkeypatch.setattr(os, name, call)

    for name in "fsync", "unlink", "replace":
        record(name)
    monkeypatch.setattr(indexed, "write_json", lambda *_: events.append(("write", "json")))
    write(tmp_path / "d", [[[1]]], sidecar=sidecar)
    begun = events.index(("unlink", "idx"))
    assert {("fsync", "idx"), ("fsync", "bin")} <= {*events[:begun]}
    ended = events.index(("replace", "idx"))
    assert [event for event in events[begun : ended + 1] if event[0] != "fsync"] == [
        ("unlink", "idx"),
        ("replace", "bin"),
        ("unlink", "json"),
        *([("write", "json")] if sidecar else []),
        ("replace", "idx"),
    ]


@pytest.mark.parametrize("prefix", ["file", "/proc/nope"])
def test_a_place_that_cannot_be_written_is_an_error(tmp_path, prefix):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"d: cannot be written \(.*\); choose a prefix in a folder that you may"):
        IndexedWriter(tmp_path / prefix / "x" / "d", np.uint16)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


FULL = """
import resource, sys
import numpy as np
from minitron.data.indexed import IndexedWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)  # as a full disk: writes beyond it fail
try:
    with IndexedWriter(sys.argv[1], np.uint16) as writer:
        for _ in range(100):
            writer.add_document(np.zeros(50, np.uint16))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [8192, 9999])  # in the middle of writing, and only when the buffer is flushed
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, limit):
    command = [sys.executable, "-c", FULL, tmp_path / "d", str(limit)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    message = r".*/d: cannot be written \(.*File too large.*\); choose a prefix .* with room in it\n"
    assert re.fullmatch(message, run.stdout)
    assert list(tmp_path.iterdir()) == [] and run.stderr == ""


def test_errors_of_the_writer(tmp_path):
    with pytest.raises(ValueError, match="dtype complex128 has no code"):
        IndexedWriter(tmp_path / "d", np.complex128)
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        with pytest.raises(ValueError, match=r"token ids 3 to 65536 do not fit uint16.*best_dtype"):
            writer.add_document(np.array([3, 65536]))
        with pytest.raises(ValueError, match="token ids -1 to 3 do not fit"):
            writer.add_document(np.array([3, -1]))
        with pytest.raises(ValueError, match="token ids -1 to 3 do not fit"):
            writer.add_document(np.array([3, -1], np.int16))
        with pytest.raises(ValueError, match="a document is a 1-D array"):
            writer.add_document([1, 2, 3])


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not JSON"),
        ("[]", "tokenizer=None is not text; delete it"),
        ('{"tokenizer": "bytes"}', "fingerprint=None is not text; delete it"),
        (
            '{"tokenizer": "bytes", "fingerprint": "f", "vocab_size": "x"}',
            "vocab_size='x' is not an integer; delete it",
        ),
        ('{"tokenizer": "bytes", "fingerprint": 3, "vocab_size": 9}', "fingerprint=3 is not text; delete it"),
        ('{"tokenizer": "bytes", "fingerprint": "f", "vocab_size": true}', "vocab_size=True is not an integer"),
    ],
)
def test_a_wrong_sidecar_is_an_error(tmp_path, text, message):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_sidecar(tmp_path / "d")
