"""Pack documents of any length into sequences of one length, with little padding.

A question with its answer is short (200 tokens in SQuAD, paragraph included) and a sequence long (4096): with one
document each, 95 % of the work would be padding. Best fit decreasing closes the gap: take documents from the longest
to the shortest, put each where it leaves the least room, open another sequence if it fits nowhere.

Only lengths matter for that, so the input is their histogram, and the output is patterns of lengths. Capacity 10:

    2 documents of 6 tokens, 1 of 4, 5 of 2     1 x (6, 4)   1 x (6, 2, 2)   1 x (2, 2, 2)

All sequences with equal room left are filled at once, so the loop is short. Each epoch draws the places of documents of
equal length, and the order of the sequences, from (seed, epoch) alone. So sample i is sequence i mod n of epoch
i div n. That holds in every layout, for any number of steps, and after a resume.

The last sequence of an epoch is mostly padding. Left out: balancing the attention work of sequences, which differs
with the square of the documents' lengths.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from functools import lru_cache

import numpy as np


def pack(counts: np.ndarray, capacity: int) -> list[tuple[int, tuple[int, ...]]]:
    """Pack by best fit decreasing.

    counts [capacity + 1]: documents of each length -> (how many sequences, the lengths in each of them).
    """
    assert len(counts) <= capacity + 1 and not counts[0]
    groups: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # room left -> patterns with it
    rooms: list[int] = []  # the keys of groups, ascending

    def put(room: int, count: int, pattern: tuple[int, ...]) -> None:
        if room not in groups:
            insort(rooms, room)
        groups[room].append((count, pattern))

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                put(capacity, -(-left // (capacity // length)), ())
                continue
            room = rooms[at]
            count, pattern = groups[room].pop()
            if not groups[room]:
                del groups[room], rooms[at]
            each = min(room // length, left)  # one that took a document is still the best fit for the next
            filled = min(count, left // each)
            if count > filled:
                put(room, count - filled, pattern)
            put(room - each * length, filled, pattern + (length,) * each)
            left -= each * filled
    return [group for patterns in groups.values() for group in patterns]


class Packing:
    """Chooses the documents that share a sequence, in every epoch. lengths: theirs, int [n], 1 ... capacity each."""

    def __init__(self, lengths: np.ndarray, capacity: int, seed: int):
        self.lengths, self.seed = lengths, seed
        patterns = pack(np.bincount(lengths), capacity)
        places = np.concatenate([np.tile(pattern, count) for count, pattern in patterns])
        sizes = np.repeat([len(pattern) for _, pattern in patterns], [count for count, _ in patterns])
        self._bounds = np.concatenate([[0], np.cumsum(sizes)])
        self._by_length = np.argsort(places, kind="stable")
        self.num_sequences = len(sizes)
        self._epoch = lru_cache(2)(self._draw)

    def documents(self, i: int) -> np.ndarray:
        """Return the documents of sample i of the endless order."""
        epoch, place = divmod(i, self.num_sequences)
        members, order = self._epoch(epoch)
        sequence = order[place]
        return members[self._bounds[sequence] : self._bounds[sequence + 1]]

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw an epoch: return the document in every place, and the order of sequences."""
        rng = np.random.RandomState([self.seed, epoch])  # gives the same numbers in every version of NumPy
        shuffled = rng.permutation(len(self.lengths))
        members = np.empty_like(shuffled)
        members[self._by_length] = shuffled[np.argsort(self.lengths[shuffled], kind="stable")]
        return members, rng.permutation(self.num_sequences)
