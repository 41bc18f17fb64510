"""The loader: every sample of a step once, whatever the data-parallel size, the sequence shared out over cp."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from layouts import LLAMA, config
from minitron.comm.mesh import Mesh
from minitron.data.batch import Batch
from minitron.data.gpt import Sample
from minitron.data.loader import Loader
from minitron.data.mock import MockDataset

S, TOTAL = 32, 8


def loaders(world, change=None, samples=4 * TOTAL, **axes):
    cfg = config(LLAMA, {"parallel": axes}, change or {})
    data = MockDataset(90, S, samples, 0, document_length=6.0)
    return [
        Loader(data, cfg, Mesh.offline(world, rank, **{k: v for k, v in axes.items() if k != "cp_style"}))
        for rank in range(world)
    ], data


@pytest.mark.parametrize("world,micro", [(1, 1), (2, 2), (4, 2), (8, 1), (1, 8)])
def test_a_step_reads_each_of_its_samples_once_in_megatrons_order(world, micro):
    ranks, _ = loaders(world, {"train": {"micro_batch_size": micro}})
    for consumed in (0, TOTAL, 0):  # also back again, past what was read ahead
        drawn = [[b.samples.tolist() for b in loader.step(consumed, step=3)] for loader in ranks]
        for i in range(TOTAL // (micro * world)):
            first = consumed + i * micro * world
            expected = np.arange(first, first + micro * world).reshape(world, micro).tolist()
            assert [rank[i] for rank in drawn] == expected


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("samples", [25, 26, 33, 34])
def test_the_samples_of_the_next_step_are_read_ahead(micro, samples):
    """Of steps of 2, 2, 4, 6 and 8 samples, without the samples 5 to 8; none if the data end before."""
    train = {"batch_ramp": (2, 2, 12), "micro_batch_size": micro}
    change = {"train": train, "data": {"skip_samples": ((5, 9),)}}
    (loader,), data = loaders(1, change, samples)
    ends = [2, 4, 8, 14, 22, 30]
    for begin, end in pairwise([0, *(end for end in ends if end + 4 <= samples)]):
        drawn = [int(i) for batch in loader.step(begin, 0) for i in batch.samples]
        assert drawn == [i if i < 5 else i + 4 for i in range(begin, end)]
        after = next((later for later in ends if later > end), end + TOTAL)
        assert list(loader.ahead) == ([end] if after + (4 if after > 5 else 0) <= samples else [])
    loader.close()


@pytest.mark.parametrize("style", ["ring", "allgather", "ulysses"])
def test_context_ranks_share_out_the_sequence(style):
    ranks, data = loaders(4, {"data": {"separate_documents": True}}, cp=4, cp_style=style)
    parts = [loader.step(0, 0)[0] for loader in ranks]
    order = torch.cat([b.order for b in parts])
    assert sorted(order.tolist()) == list(range(S))
    sample = data[0]
    whole = {
        name: torch.cat([getattr(b, name) for b in parts])[order.argsort(), 0]
        for name in ("tokens", "labels", "mask", "positions")
    }
    assert whole["tokens"].tolist() == sample.tokens[:-1].tolist()
    assert whole["labels"].tolist() == sample.tokens[1:].tolist()
    assert sum(b.count for b in parts) == float(whole["mask"].sum()) == S - len(sample.starts)
    (bounds,) = parts[0].documents.cu_seqlens
    assert all(b.documents.cu_seqlens == (bounds,) for b in parts)
    for start, end in pairwise(bounds):
        assert whole["positions"][start:end].tolist() == list(range(end - start))
        assert whole["mask"][start : end - 1].all()  # the last label of a document is the next one's first token
    assert not whole["mask"][sample.starts - 1].any()


def test_a_samples_own_mask_is_kept_and_whole_samples_count_in_full():
    class Masked(MockDataset):
        def __getitem__(self, i):
            mask = np.zeros(S, np.float32)
            mask[: 3 + i] = 1.0
            return Sample(super().__getitem__(i).tokens, np.array([2], np.int32), mask)

    cfg = config(LLAMA)
    batches = Loader(Masked(90, S, TOTAL, 0), cfg, Mesh.offline()).step(0, 0)
    assert [b.count for b in batches] == [3.0 + i for i in range(TOTAL)]
    separate = config(LLAMA, {"data": {"separate_documents": True}})
    apart = Loader(Masked(90, S, TOTAL, 0), separate, Mesh.offline()).step(0, 0)
    assert [b.count for b in apart] == [2.0 + i for i in range(TOTAL)]


def test_what_is_counted_of_a_microbatch_is_that_of_all_its_samples():
    """Squares of documents and padding, which is no document, for the rate of work that is logged."""

    class Padded(MockDataset):
        def __getitem__(self, i):
            begin = S - 2 - 3 * (i % TOTAL)
            return Sample(super().__getitem__(i).tokens, np.array([4, begin], np.int32), None, padding=S - begin)

    keys = {"train": {"micro_batch_size": 2}, "data": {"separate_documents": True}}
    batches = Loader(Padded(90, S, TOTAL, 0), config(LLAMA, keys), Mesh.offline()).step(0, 0)
    paddings = [2 + 3 * i for i in range(TOTAL)]
    assert [b.padding for b in batches] == [sum(paddings[i : i + 2]) for i in range(0, TOTAL, 2)]
    squares = [4**2 + (S - padding - 4) ** 2 for padding in paddings]
    assert [b.squared_lengths for b in batches] == [sum(squares[i : i + 2]) for i in range(0, TOTAL, 2)]


@pytest.mark.parametrize("s, b", [(1, 1), (7, 1), (7, 3), (8, 2)])
def test_a_packed_batch_arrives_as_it_was(s, b):
    """Also where an odd number of float32s leaves half a word of the buffer unused."""
    generator = np.random.default_rng(0)
    arrays = {name: generator.integers(0, 100, (s, b)) for name in ("tokens", "labels")}
    arrays |= {"mask": generator.random((s, b), np.float32), "positions": np.arange(s)[:, None], "order": np.arange(s)}
    arrays |= {"samples": np.arange(b), "step": np.full((), 5)}
    batch = Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()}, count=0.0).pack(pinned=False)
    moved = batch.to(torch.device("cpu"))
    for name, array in arrays.items():
        for tensor in (getattr(batch, name), getattr(moved, name)):
            assert tensor.untyped_storage().data_ptr() == batch.packed.data_ptr()
            assert tensor.shape == array.shape and np.array_equal(tensor.numpy(), array)
