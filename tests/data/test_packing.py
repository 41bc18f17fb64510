"""Packing against plain best fit decreasing; the order of documents: all of them in every epoch, from any point."""

from collections import Counter, defaultdict, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitron.data.packing import Packing, pack


def plain_best_fit(lengths, capacity):
    """What is left free in each bin, one document after the other."""
    free = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in free if room >= length]
        if fitting:
            free.remove(min(fitting))
            free.append(min(fitting) - length)
        else:
            free.append(capacity - length)
    return free


@given(
    st.integers(1, 30).flatmap(
        lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), min_size=1, max_size=80))
    )
)
def test_patterns_are_those_of_plain_best_fit_decreasing(case):
    capacity, lengths = case
    patterns = pack(np.bincount(lengths), capacity)
    packed = Counter()
    for count, pattern in patterns:
        assert count > 0
        packed.update({length: count * times for length, times in Counter(pattern).items()})
    assert packed == Counter(lengths)
    free = [capacity - sum(pattern) for count, pattern in patterns for _ in range(count)]
    assert sorted(free) == sorted(plain_best_fit(lengths, capacity))


def squad_like(documents):
    """Tokens of a paragraph (log-normal around 150), its question and its answer, as SQuAD has them."""
    rng = np.random.default_rng(0)
    paragraph = np.clip(rng.lognormal(np.log(150), 0.4, documents), 25, 850)
    return (paragraph + rng.normal(14, 4, documents).clip(4) + rng.geometric(0.25, documents) + 1).astype(int)


@pytest.mark.parametrize("documents", [3_000, 87_599])
def test_squad_like_documents_fill_98_percent(documents):
    lengths, seq_len = squad_like(documents), 4096
    packing = Packing(lengths, seq_len + 1, seed=1)
    assert lengths.sum() / (packing.num_sequences * (seq_len + 1)) > 0.98
    assert packing.num_sequences <= 1.02 * -(-lengths.sum() // (seq_len + 1))


def test_every_epoch_has_every_document_once_in_another_order():
    lengths, capacity = squad_like(500), 1025
    packing = Packing(lengths, capacity, seed=3)
    n, epochs = packing.num_sequences, []
    for epoch in range(3):
        sequences = [packing.documents(i) for i in range(epoch * n, (epoch + 1) * n)]
        assert sorted(np.concatenate(sequences)) == list(range(500))
        assert all(lengths[rows].sum() <= capacity for rows in sequences)
        epochs.append([frozenset(rows.tolist()) for rows in sequences])
    # not only shuffled: other documents of the same lengths meet
    assert len(set(epochs[0]) & set(epochs[1])) < n / 2
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("seed", [0, 7])
def test_an_epoch_shuffles_documents_of_a_length_over_its_places_and_then_sequences(seed):
    """By NumPy's generator of (seed, epoch), so the samples of a run stay what they are."""
    lengths, capacity = squad_like(200), 1025
    packing = Packing(lengths, capacity, seed)
    for epoch in 0, 1, 5:
        rng = np.random.RandomState([seed, epoch])
        waiting = defaultdict(deque)
        for document in rng.permutation(len(lengths)).tolist():
            waiting[lengths[document]].append(document)
        sequences = [
            [waiting[length].popleft() for length in pattern]
            for count, pattern in pack(np.bincount(lengths), capacity)
            for _ in range(count)
        ]
        n = packing.num_sequences
        drawn = [packing.documents(i).tolist() for i in range(epoch * n, (epoch + 1) * n)]
        assert drawn == [sequences[i] for i in rng.permutation(len(sequences))]


def test_sample_i_depends_on_seed_and_i_alone():
    lengths = squad_like(300)
    whole = Packing(lengths, 1025, seed=5)
    order = [whole.documents(i).tolist() for i in range(3 * whole.num_sequences)]
    fresh = Packing(lengths, 1025, seed=5)
    for i in reversed(range(len(order))):  # as a run that is resumed anywhere
        assert fresh.documents(i).tolist() == order[i]
    other = Packing(lengths, 1025, seed=6)
    assert [other.documents(i).tolist() for i in range(len(order))] != order
