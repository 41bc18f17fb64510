"""The blend against the greedy loop it stands for."""

import time
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitron.checkpoint.load import ResumePoint
from minitron.config import cli
from minitron.config.schema import DataConfig
from minitron.data import blend
from minitron.data.blend import BlendedDataset, greedy_order, normalize, part_samples
from minitron.data.build import build_datasets
from minitron.data.cache import Cache
from minitron.data.gpt import GPTDataset
from minitron.data.indexed import IndexedDataset, IndexedWriter
from minitron.interop.rows import READERS
from minitron.pretrain import build_data


def plain_order(shares, num_samples):
    """At every step the dataset furthest behind its share, the first of equals."""
    shares = (shares / np.sum(shares)).tolist()
    counts, order = [0] * len(shares), []
    for k in range(num_samples):
        behind = [share * float(max(k, 1)) - count for share, count in zip(shares, counts)]
        draw = behind.index(max(behind))
        order.append((draw, counts[draw]))
        counts[draw] += 1
    return order


weights_of_every_kind = st.one_of(
    st.lists(st.floats(1e-3, 1), min_size=1, max_size=8),
    st.lists(st.integers(1, 5).map(float), min_size=1, max_size=8),  # many ties
    st.lists(st.floats(-6, 0).map(lambda x: 10.0**x), min_size=1, max_size=8),
)


@settings(max_examples=150, deadline=None)
@given(weights=weights_of_every_kind, num_samples=st.integers(1, 1500), chunks=st.sampled_from([1, 7, 4096]))
def test_order_equals_the_loop(weights, num_samples, chunks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "MAX_CHUNKS", chunks)
        part, sample = greedy_order(normalize(weights), num_samples)
    assert list(zip(part.tolist(), sample.tolist())) == plain_order(normalize(weights), num_samples)
    assert part.dtype == np.int16 and sample.dtype == np.int64


def test_a_wrong_guess_of_the_counts_is_repaired(monkeypatch):
    """The joints between chunks are checked: with absurd guesses the order is the same, only later."""
    monkeypatch.setattr(
        blend, "_rounded_shares", lambda shares, step: np.where(step, 1.0, 0.0) * np.arange(len(shares))[:, None]
    )
    part, sample = greedy_order(normalize([0.2, 0.5, 0.3]), 900)
    assert list(zip(part.tolist(), sample.tolist())) == plain_order(normalize([0.2, 0.5, 0.3]), 900)


def test_ten_million_samples_in_seconds():
    begin = time.process_time()
    part, _ = greedy_order(normalize([0.5, 0.3, 0.15, 0.05]), 10_000_000)
    assert time.process_time() - begin < 10  # about one second; the loop takes minutes
    assert np.abs(np.bincount(part) / len(part) - [0.5, 0.3, 0.15, 0.05]).max() < 1e-6


def test_samples_of_a_blend(tmp_path):
    parts, weights = [], [3.0, 1.0]
    for i, share in enumerate(normalize(weights)):
        with IndexedWriter(tmp_path / f"d{i}", np.uint16) as writer:
            for document in range(30):
                writer.add_document(np.arange(5, dtype=np.uint16) + 1000 * i + 10 * document)
        parts.append(
            GPTDataset(
                IndexedDataset(tmp_path / f"d{i}"), range(30), part_samples(50, share), 4, 1, Cache(tmp_path), 9999
            )
        )
    mixed = BlendedDataset(parts, weights, 50, Cache(tmp_path))
    order = plain_order(normalize(weights), 50)
    assert len(mixed) == len(order)
    for i, (part, sample) in enumerate(order):
        assert mixed[i].tokens.tolist() == parts[part][sample].tokens.tolist()
    assert BlendedDataset(parts, [1.0, 1.0], 20, Cache(tmp_path)).fingerprint != mixed.fingerprint
    with pytest.raises(IndexError):
        mixed[50]


def test_a_blend_draws_the_samples_of_parts_of_megatrons_size(tmp_path):
    """Megatron rounds up before it adds the surplus, and after it: 10 samples by thirds are 4 and 7, then 5 and 8.

    The number decides how many epochs a part shuffles, and so which samples come.
    """
    prefixes = [str(tmp_path / name) for name in "ab"]
    for i, prefix in enumerate(prefixes):
        with IndexedWriter(prefix, np.uint16) as writer:
            for document in range(4):  # an epoch has 4 samples
                writer.add_document(np.arange(5, dtype=np.uint16) + 100 * i + 10 * document)
    paths = ("1", prefixes[0], "2", prefixes[1])
    data = DataConfig(source="indexed", paths=paths, split="1", tokenizer="bytes", cache_dir=str(tmp_path / "run"))
    run = dict(vocab_size=300, seq_len=4, seed=1, train_samples=10, valid_samples=0)
    mixed = build_datasets(data, readers=READERS, **run).train

    def drawn(sizes):
        parts = [
            GPTDataset(IndexedDataset(prefix), range(4), size, 4, 1, Cache(tmp_path), 300)
            for prefix, size in zip(prefixes, sizes)
        ]
        return [parts[part][sample].tokens.tolist() for part, sample in plain_order(normalize([1.0, 2.0]), 10)]

    assert [mixed[i].tokens.tolist() for i in range(10)] == drawn([5, 8]) != drawn([4, 7])


def test_a_blend_has_samples_for_those_that_a_resumed_run_leaves_out(tmp_path):
    """The order is that of the run before, which was laid out for fewer samples. What is not left over is refused."""
    prefixes = [str(tmp_path / name) for name in "ab"]
    for i, prefix in enumerate(prefixes):
        with IndexedWriter(prefix, np.uint16) as writer:
            for document in range(400):
                writer.add_document(np.arange(5, dtype=np.uint16) + 10 * i + document // 4)
    paths = f"data.paths=[0.3,{prefixes[0]},0.7,{prefixes[1]}]"
    words = ["data.source=indexed", paths, "data.split=1", "model.vocab_size=300", "train.seq_len=4"]
    words += ["train.global_batch_size=4", "train.steps=300", f"data.cache_dir={tmp_path / 'cache'}"]
    begun = build_data(cli.load(words))
    start = ResumePoint(step=100, consumed_samples=400, resume=True, data=begun.info)
    resumed = build_data(cli.load([*words, "data.skip_samples=[[400,404]]"]), start)
    assert resumed.info == begun.info and len(resumed.train) >= 1204
    longer = plain_order(normalize([0.3, 0.7]), len(resumed.train))
    for i in (0, 1199, 1203, len(resumed.train) - 1):
        part, sample = longer[i]
        assert resumed.train[i].tokens.tolist() == begun.train.parts[part][sample].tokens.tolist()
    with pytest.raises(ValueError, match="train.steps=300 needs 1500 samples.*use at most"):
        build_data(cli.load([*words, "data.skip_samples=[[400,700]]"]), start)


@settings(max_examples=60, deadline=None)
@given(weights=weights_of_every_kind, num_samples=st.integers(1, 1500), more=st.integers(0, 9))
def test_a_longer_blend_stays_within_its_parts(weights, num_samples, more):
    shares = normalize(weights)
    sizes = [part_samples(num_samples, share) + more for share in shares]
    parts = [mock.MagicMock(spec=GPTDataset, fingerprint="", **{"__len__.return_value": size}) for size in sizes]
    with TemporaryDirectory() as folder:
        mixed = BlendedDataset(parts, weights, num_samples, Cache(folder))
        assert len(mixed) >= num_samples
        for part, size in enumerate(sizes):
            assert mixed._sample[mixed._part == part].max(initial=-1) < size


def test_a_blend_is_as_long_as_its_parts_allow(tmp_path):
    """And no longer than the surplus. Of 4010 samples the rule may have drawn 402 from a part with a tenth of them."""
    cache, most = Cache(tmp_path), int(4000 * blend.SURPLUS)
    for size, length in ((402, 4010), (404, most), (999, most), (402, 4010)):
        sizes = size, 5000
        parts = [mock.MagicMock(spec=GPTDataset, fingerprint="", **{"__len__.return_value": n}) for n in sizes]
        assert len(BlendedDataset(parts, [1.0, 9.0], 4000, cache)) == length


@settings(max_examples=100, deadline=None)
@given(weights=weights_of_every_kind, num_samples=st.integers(1, 1500))
def test_the_surplus_is_enough(weights, num_samples):
    shares = normalize(weights)
    drawn = np.bincount(greedy_order(shares, num_samples)[0], minlength=len(shares))
    assert all(count <= part_samples(num_samples, share) for count, share in zip(drawn, shares))


@pytest.mark.parametrize("weight", [0.0, -0.5, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_an_error(weight):
    with pytest.raises(
        ValueError, match=r"data\.paths: blend weight .* is not a positive number; leave that dataset out"
    ):
        normalize([0.5, weight])


def test_too_many_parts_are_an_error():
    with pytest.raises(ValueError, match="40000 datasets, at most 32767"):
        normalize([1.0] * 40000)
