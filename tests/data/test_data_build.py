"""The one door to the data: what it builds from each source, and every refusal."""

import json
import math
import re

import numpy as np
import pytest

from minitron.config.schema import DataConfig
from minitron.data import build as build_module
from minitron.data.build import TRAIN, VALID, build_datasets, parse_paths, split_part, split_ranges
from minitron.data.cache import Cache
from minitron.data.gpt import GPTDataset, scan_ids
from minitron.data.indexed import DataError, IndexedDataset, IndexedWriter
from minitron.data.mock import MockDataset
from minitron.interop.rows import READERS
from minitron.interop.tokenizers import ByteTokenizer

BYTES = {"tokenizer": "bytes", "fingerprint": ByteTokenizer.fingerprint, "vocab_size": ByteTokenizer.vocab_size}


def write(prefix, sequences=40, largest=256, sidecar=None, dtype=np.uint16):
    with IndexedWriter(prefix, dtype, sidecar) as writer:
        for i in range(sequences):
            writer.add_document(np.arange(20, dtype=dtype) + i)
        writer.add_document(np.array([largest] * 20, dtype))
    return str(prefix)


def build(tmp_path, **changes):
    data = dict(
        source="indexed",
        paths=[str(tmp_path / "d")],
        split="8,2",
        tokenizer="corpus",
        cache_dir=str(tmp_path / "cache"),
    )
    run = dict(vocab_size=300, seq_len=8, seed=3, train_samples=100, valid_samples=10)
    data |= {key: value for key, value in changes.items() if key in data}
    run |= {key: changes[key] for key in changes.keys() - data.keys()}
    return build_datasets(DataConfig(**data), readers=READERS, **run)


def tokens_of(dataset, count):
    return [dataset[i].tokens.tolist() for i in range(count)]


def test_one_file_is_split_and_indexed(tmp_path):
    write(tmp_path / "d")
    built = build(tmp_path)
    file, cache = IndexedDataset(tmp_path / "d"), Cache(tmp_path / "other_cache")
    assert tokens_of(built.train, 100) == tokens_of(GPTDataset(file, range(33), 100, 8, 3, cache, 300), 100)
    assert tokens_of(built.valid, 10) == tokens_of(GPTDataset(file, range(33, 41), 10, 8, 3, cache, 300), 10)
    assert built.tokenizer is None and json.loads(json.dumps(built.info)) == built.info
    assert built.info["train"] == built.train.fingerprint and built.info["data"] == [file.fingerprint]
    assert build(tmp_path, valid_samples=0, split="1,0,0").valid is None


def test_a_blend_asks_every_part_for_its_share(tmp_path):
    paths = ["0.25", write(tmp_path / "a"), "0.75", write(tmp_path / "b", sequences=60)]
    built = build(tmp_path, paths=paths)
    assert len(built.train) == 100 and len(built.valid) == 10 and built.info["weights"] == [0.25, 0.75]
    parts = [
        GPTDataset(IndexedDataset(path), split_ranges("8,2", n)[0], asked, 8, 3, Cache(tmp_path), 300)
        for path, n, asked in ((paths[1], 41, math.ceil(25 * 1.005)), (paths[3], 61, math.ceil(75 * 1.005)))
    ]  # of 100, with Megatron's surplus
    assert [part.fingerprint for part in parts] == [part.fingerprint for part in built.train.parts]


@pytest.mark.parametrize("split", ["7,3,1", "969,30,1", "1", "0,1,0", "0.98,0.02", "1,1,1"])
@pytest.mark.parametrize("n", [0, 1, 7, 790, 100_003])
def test_split_rounds_the_cumulative_shares(split, n):
    shares = [float(part) for part in split.split(",")]
    shares += [0.0] * (3 - len(shares))
    total = np.sum(shares)
    ends = [0, round(shares[0] / total * n), round((shares[0] / total + shares[1] / total) * n)]
    ranges = split_ranges(split, n)
    assert [part.start for part in ranges] == ends and ranges[-1].stop == n


def test_the_split_of_790_documents():
    assert [(part.start, part.stop) for part in split_ranges("7,3,1", 790)] == [(0, 503), (503, 718), (718, 790)]


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan", "inf,1"])
def test_a_malformed_split_is_an_error(split):
    with pytest.raises(ValueError, match=r"data\.split=.* is not up to three shares"):
        split_ranges(split, 100)


@pytest.mark.parametrize("sequences", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("split", ["1,0,0", "969,30,1", "0,1,1", "1,0,1", "0,0,1", "1e9,1,1"])
@pytest.mark.parametrize("part", [TRAIN, VALID])
def test_the_split_that_an_error_offers_serves_both_parts(sequences, split, part):
    """In one step from an error about validation; from one about training, where validation is not asked for."""
    file = type("File", (), {"__len__": lambda self: sequences, "prefix": "d"})()
    if len(split_ranges(split, sequences)[part]):
        assert split_part(file, split, part) == split_ranges(split, sequences)[part]
        return
    with pytest.raises(ValueError, match="leaves none of the") as error:
        split_part(file, split, part)
    offered = re.search(r"data\.split=(\S+)$", str(error.value))
    if offered is None:
        assert "train.eval_every=0" in str(error.value) and not (sequences > 1 and part == TRAIN)
    else:
        assert len(split_part(file, offered[1], part)) and len(split_ranges(offered[1], sequences)[TRAIN])


@pytest.mark.parametrize(
    "paths, message",
    [
        ([], "has 0 entries"),
        (["1", "a", "2"], "has 3 entries"),
        (["a", "b"], "a is not a weight"),
        (["1", "a", "b", "c"], "b is not a weight"),
        (["0", "a", "1", "b"], "weight 0.0"),
    ],
)
def test_malformed_paths_are_an_error(paths, message):
    with pytest.raises(ValueError, match=rf"data\.paths.*{message}"):
        parse_paths(paths)
    assert parse_paths([".3", "a", 0.7, "b"]) == (["a", "b"], [0.3, 0.7]) and parse_paths(["a"]) == (["a"], None)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(split="0,1,0"),
            r"data\.split=0,1,0 leaves none of the 41 sequences of .*d to train on; set for example data\.split=1,40,0",
        ),
        (dict(split="1,0,1"), r"data\.split=1,0,1 leaves none .* to validate on; set for example data\.split="),
        (dict(seq_len=2000), r"hold 660 tokens, fewer than one sample of train\.seq_len=2000 \+ 1"),
        (dict(train_samples=0), "0 training samples were asked for; set train.steps"),
        (dict(source="mock", train_samples=(1 << 32) + 1), "4294967297 samples are more than"),
        (dict(source="mock", valid_samples=(1 << 32) + 1), "4294967297 samples are more than"),
        (dict(source="corpus", tokenizer="bytes"), r"data\.tokenizer=bytes cannot read data\.source=corpus"),
        (
            dict(vocab_size=256),
            r"d\.bin: position 800 holds token id 256, but model\.vocab_size=256 allows 0 to 255; set it to",
        ),
        (dict(tokenizer="bytes", vocab_size=256), "model.vocab_size=256 is smaller than the 257 ids of the tokenizer"),
        (dict(paths=["absent"]), r"absent\.idx: no such file"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path, changes, message):
    write(tmp_path / "d")
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **changes)


def test_the_tokenizer_must_be_the_one_that_made_the_data(tmp_path):
    write(tmp_path / "d", sidecar=BYTES)
    assert build(tmp_path, tokenizer="bytes", vocab_size=257).tokenizer.vocab_size == 257
    with pytest.raises(
        ValueError, match=r"data\.tokenizer=corpus did not make .*json names bytes with fingerprint .*; set"
    ):
        build(tmp_path)
    write(tmp_path / "d", sidecar=BYTES | {"tokenizer": "gpt2:somewhere", "fingerprint": "0" * 16})
    with pytest.raises(ValueError, match=r"data\.tokenizer=bytes did not make .*gpt2:somewhere with fingerprint 0000"):
        build(tmp_path, tokenizer="bytes")
    write(tmp_path / "d", sidecar=BYTES | {"vocab_size": 400})
    with pytest.raises(ValueError, match="model.vocab_size=300 is smaller than the 400 ids"):
        build(tmp_path, tokenizer="bytes")
    write(tmp_path / "d", sidecar=BYTES | {"tokenizer": "corpus", "fingerprint": "0" * 16})
    assert build(tmp_path).tokenizer is None  # each Python's corpus has its own tokenizer
    write(tmp_path / "d")  # a foreign dataset says nothing, so any tokenizer is taken at its word
    assert build(tmp_path, tokenizer="bytes").tokenizer.vocab_size == 257


def test_a_negative_id_is_found_before_training(tmp_path):
    write(tmp_path / "d", largest=-7, dtype=np.int32)
    with pytest.raises(DataError, match=r"d\.bin: position 800 holds token id -7, but model\.vocab_size=300 allows"):
        build(tmp_path)


def test_what_a_checkpoint_records_of_the_data(tmp_path):
    """The whole record is compared. Tests of the corpus and of sft look at their own."""
    path = write(tmp_path / "d")
    common = {"source": "indexed", "split": "8,2", "seq_len": 8, "seed": 3, "train_samples": 100, "valid_samples": 10}
    file, ids = IndexedDataset(path).fingerprint, ByteTokenizer.fingerprint
    for changes, info in [
        ({}, common | {"weights": None, "data": [file], "tokens": [820], "tokenizer": None}),
        (
            {"paths": ["1", path, "3", path], "tokenizer": "bytes"},
            common
            | {"source": "indexed", "weights": [1, 3], "data": [file] * 2, "tokens": [820] * 2, "tokenizer": ids},
        ),
        ({"source": "mock"}, {"source": "mock", "tokenizer": None}),
    ]:
        built = build(tmp_path, **changes)
        assert built.info == info | {"train": built.train.fingerprint, "valid": built.valid.fingerprint}
        assert built.info["train"] != built.info["valid"] and built.note == ""
    assert build(tmp_path, valid_samples=0).info["valid"] is None


def test_a_file_of_floats_is_no_dataset_of_tokens(tmp_path):
    write(tmp_path / "d", dtype=np.float32)
    with pytest.raises(ValueError, match=r"d\.idx: float32 values are not token ids"):
        build(tmp_path)


@pytest.mark.parametrize("documents", [[], [[], []]])
def test_a_dataset_without_tokens_says_so(tmp_path, documents):
    """Its split used to be blamed."""
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        for document in documents:
            writer.add_document(np.array(document, np.uint16))
    with pytest.raises(DataError, match=rf"d\.bin: no tokens in {len(documents)} documents; leave this dataset out"):
        build(tmp_path)


@pytest.mark.parametrize("at", [0, 1500, 2047])
def test_an_id_anywhere_in_a_file_is_found_before_training_and_a_clean_file_read_once(tmp_path, monkeypatch, at):
    """Only the beginning was read: an id beyond it ended the run when its sample was drawn."""
    tokens = np.arange(2048, dtype=np.uint16) % 300
    tokens[at] = 300
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document(tokens)
    monkeypatch.setattr(build_module, "PEEK_TOKENS", 1000)
    monkeypatch.setattr("minitron.data.gpt.BLOCK_TOKENS", 512)
    whole = dict(split="1", valid_samples=0)
    with pytest.raises(DataError, match=rf"d\.bin: position {at} holds token id 300, but model\.vocab_size=300 allows"):
        build(tmp_path, **whole)
    build(tmp_path, **whole, vocab_size=301)
    assert scan_ids(IndexedDataset(tmp_path / "d"), 301) == 300, "the largest of all blocks"
    scans = []
    monkeypatch.setattr(build_module, "scan_ids", lambda *arguments, **count: scans.append(count))
    build(tmp_path, **whole, vocab_size=301)
    assert not scans, "what was read for this vocabulary is not read again"
    monkeypatch.setattr(build_module, "SCAN_BYTES", 4095)
    build(tmp_path, **whole)
    assert scans == [{"count": 1000}], "of a larger file only the beginning is read"


def test_a_damaged_index_is_found_at_every_start(tmp_path):
    write(tmp_path / "d")
    build(tmp_path)
    data = bytearray((tmp_path / "d.idx").read_bytes())
    data[34 + 41 * 4 + 7 * 8] += 2  # the pointer of sequence 7, behind the header and 41 lengths
    (tmp_path / "d.idx").write_bytes(data)
    with pytest.raises(
        DataError,
        match=r"d\.idx: sequence 7 has 20 tokens from byte 282 on, where byte 280 is next; "
        r"the index is damaged: .*tools/check_data\.py",
    ):
        build(tmp_path)


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "d")
    built = build(tmp_path, paths=["0.5", "~/d", "0.5", "~/d"], cache_dir="~/here")
    assert built.info["data"] == [IndexedDataset(tmp_path / "d").fingerprint] * 2 and (tmp_path / "here").is_dir()
    with pytest.raises(ValueError, match="~nobody_has_this_name/d.idx: no such file"):
        build(tmp_path, paths=["~nobody_has_this_name/d"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
    ],
)
def test_a_damaged_cache_names_the_folder_to_delete(tmp_path, damage):
    paths = ["0.5", write(tmp_path / "a"), "0.5", write(tmp_path / "b")]
    build(tmp_path, paths=paths)
    for pattern in ("gpt-*/shuffle.npy", "blend-*/sample.npy"):
        for file in (tmp_path / "cache").glob(pattern):
            damage(file)
            message = rf"^{file.parent}: this folder .* is damaged \(.*\); delete it"
            with pytest.raises(ValueError, match=message) as error:
                build(tmp_path, paths=paths)
            assert "\n" not in str(error.value)
            for other in file.parent.iterdir():
                other.unlink()
            file.parent.rmdir()
            build(tmp_path, paths=paths)


def test_mock_items_depend_on_seed_and_index_alone(tmp_path):
    built = build(tmp_path, source="mock", paths=[])
    again = MockDataset(300, 8, 5, 3, 2)
    assert tokens_of(built.train, 5) == tokens_of(again, 5) != tokens_of(MockDataset(300, 8, 5, 4), 5)
    assert tokens_of(built.train, 5) != tokens_of(built.valid, 5) and len(built.valid) == 10 and built.tokenizer is None
    samples = [MockDataset(50, 1000, 20, 0, 10)[i] for i in range(20)]
    assert all(
        sample.tokens.shape == (1001,) and 0 <= sample.tokens.min() <= sample.tokens.max() < 50 for sample in samples
    )
    assert all(
        (np.diff(sample.starts) > 0).all() and 1 <= sample.starts[0] and sample.starts[-1] <= 1000 for sample in samples
    )
    # 20,000 coins of 1/10: the mean is within 4 standard deviations, sqrt(.09 / 20000), of it
    assert abs(np.mean([len(sample.starts) / 1000 for sample in samples]) - 0.1) < 4 * np.sqrt(0.09 / 20000)
    assert all(len(MockDataset(50, 9, 3, 0)[i].starts) == 0 for i in range(3))
    with pytest.raises(IndexError, match="sample 3 of 3"):
        MockDataset(50, 9, 3, 0)[3]


def test_random_data_follow_from_the_keys():
    run = dict(vocab_size=300, seq_len=8, seed=3, train_samples=9, valid_samples=5)
    for length, mean in (None, 2.0), (6, None):
        built = build_datasets(DataConfig(source="mock", document_length=length), **run)
        assert built.train == MockDataset(300, 8, 9, 3, mean, length)
        assert built.valid == MockDataset(300, 8, 5, 4, mean, length)


def test_mock_documents_of_at_most_so_many_tokens():
    lengths = []
    for sample in map(MockDataset(50, 1000, 20, 0, longest=4).__getitem__, range(20)):
        lengths += np.diff([0, *sample.starts]).tolist()
        assert 1000 - sample.starts[-1] < 4
    counts = np.bincount(lengths, minlength=5)
    # uniform: each of the four within 4 standard deviations of a quarter
    assert len(counts) == 5 and counts[0] == 0
    assert (abs(counts[1:] / len(lengths) - 1 / 4) < 4 * np.sqrt(3 / 16 / len(lengths))).all()
