"""Samples and packing beside those of other projects: Megatron-core's GPT dataset and TRL's packing."""

from collections import Counter

import numpy as np
import pytest

from minitron.data.cache import Cache
from minitron.data.gpt import GPTDataset
from minitron.data.indexed import IndexedDataset, IndexedWriter
from minitron.data.packing import pack


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """60 documents of 1 to 39 tokens."""
    path, rng = tmp_path_factory.mktemp("indexed") / "documents", np.random.default_rng(0)
    with IndexedWriter(path, np.uint16) as writer:
        for length in rng.integers(1, 40, 60):
            writer.add_document(rng.integers(0, 1000, length).astype(np.uint16))
    return path


# Samples that end inside of the first epoch, early in the last one (shuffled apart), and late in it.
@pytest.mark.parametrize("num_samples", [1, 50, 100, 140, 500])
def test_samples_are_those_of_megatron_core(tmp_path, prefix, num_samples):
    megatron = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset").IndexedDataset
    train = pytest.importorskip("megatron.core.datasets.utils").Split.train

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = 1000, 999, 0, {"name": "test"}

    config = megatron.GPTDatasetConfig(
        random_seed=7,
        sequence_length=16,
        split="1,0,0",
        tokenizer=Tokenizer(),
        path_to_cache=str(tmp_path / "theirs"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mid_level_dataset_surplus=0.005,
    )
    documents = np.arange(60, dtype=np.int32)
    theirs = megatron.GPTDataset(indexed(str(prefix)), str(prefix), documents, num_samples, train, config)
    ours = GPTDataset(IndexedDataset(prefix), range(60), num_samples, 16, 7, Cache(tmp_path / "ours"), 1000)
    assert len(ours) == len(theirs) >= num_samples
    for i in range(num_samples):
        tokens, labels = (theirs[i][key].tolist() for key in ("tokens", "labels"))
        assert ours[i].tokens.tolist() == [*tokens, labels[-1]]


@pytest.mark.parametrize("capacity, documents", [(10, 30), (64, 500), (257, 1000)])
def test_packed_sequences_are_as_many_and_as_full_as_trl_s(capacity, documents):
    """Which document fills which of two equally good places is free. TRL packs a thousand documents at a time."""
    pack_dataset = pytest.importorskip("trl.data_utils").pack_dataset
    datasets = pytest.importorskip("datasets")
    lengths = np.random.default_rng(1).geometric(4 / capacity, documents).clip(1, capacity)
    rows = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    theirs = Counter(len(ids) for ids in pack_dataset(rows, capacity, "bfd")["input_ids"])
    ours: Counter[int] = Counter()
    for count, pattern in pack(np.bincount(lengths), capacity):
        ours[sum(pattern)] += count
    assert ours == theirs
