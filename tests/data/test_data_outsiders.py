"""Samples, packing and schedules beside those of other projects.

Megatron-core's GPT dataset, its ramp of the batch size and its rates, TRL's packing, transformers' rates. In one file,
since these packages take seconds to import.
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minitron.config.batch import batch_size
from minitron.config.schema import OptimizerConfig, TrainConfig
from minitron.data.cache import Cache
from minitron.data.gpt import GPTDataset
from minitron.data.indexed import IndexedDataset, IndexedWriter
from minitron.data.packing import pack
from minitron.optim.lr import learning_rate


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


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 30), st.integers(1, 5000))
def test_a_ramp_of_the_batch_size_is_megatron_core_s(start, increment, increments, samples):
    calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")
    size = start + increment * increments
    t = TrainConfig(global_batch_size=size, batch_ramp=(start, increment, samples))
    theirs = calculators.RampupBatchsizeNumMicroBatchesCalculator(size, 1, 1, False, 1, start, increment, samples)
    trained = 0
    for _ in range(60):
        theirs.update(trained, consistency_check=True)
        # Theirs divides in floating point, which may round down where an increment begins.
        if trained > samples or trained * increments % samples:
            assert batch_size(t, trained) == theirs.get_current_global_batch_size()
        trained += batch_size(t, trained)
    assert batch_size(t, samples) == size and batch_size(t, samples - 1) < size


@pytest.mark.parametrize("decay", [{"wsd_decay_steps": 9}, {"wsd_decay_share": 0.25}], ids=str)
@pytest.mark.parametrize("warmup", [0, 7])
def test_wsd_is_that_of_megatron_core_and_of_transformers(warmup, decay):
    """36 steps and 4 more. Megatron-core counts samples, as we do. transformers' warm-up begins at min_lr."""
    cfg = OptimizerConfig(lr=2e-3, min_lr=1e-4, lr_schedule="wsd", warmup_steps=warmup, constant_steps=4, **decay)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=cfg.lr)
    of_transformers = pytest.importorskip("transformers").get_wsd_schedule(
        sgd, warmup, 9, 36, decay_type="1-sqrt", min_lr_ratio=cfg.min_lr / cfg.lr
    )
    of_megatron = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=cfg.min_lr,
        lr_warmup_steps=warmup * 8,
        lr_decay_steps=36 * 8,
        lr_decay_style="WSD",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=9 * 8,
        lr_wsd_decay_style="minus_sqrt",
    )
    for step in range(1, 41):
        sgd.step()
        of_transformers.step()
        of_megatron.num_steps = step * 8
        actual = learning_rate(cfg, TrainConfig(global_batch_size=8, steps=40), step * 8)
        assert actual == pytest.approx(of_megatron.get_lr({}), rel=1e-9), step
        if step >= warmup:
            assert actual == pytest.approx(of_transformers.get_last_lr()[0], rel=1e-9), step
