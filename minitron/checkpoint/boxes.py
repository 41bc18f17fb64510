"""Boxes: rectangular parts of a tensor, the one coordinate system that all layouts share.

Problem: ZeRO cuts the flat buffers into equal slices, so a rank owns a flat range of a tensor-parallel shard. Every
layout cuts differently. The idea: translate each range, once, into a few boxes of the global tensor. No other code
depends on layouts: a box is read from the saved boxes that overlap it.

    local slice [4, 5], elements 3 to 14        of a tensor [8, 5] this rank has rows 4 to 7, so
        . . . a a                               a: row 4, columns 3 and 4
        b b b b b        one range,             b: row 5
        c c c c .        three boxes            c: row 6, columns 0 to 3
        . . . . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

from minitron.kernels.param import Shard


class Box(NamedTuple):
    """The elements from `start`, `shape` of them along each dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def meet(self, other: Box) -> Box | None:
        """Return the box of the elements that are in both boxes; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(min(a + m, b + n) - s for a, m, b, n, s in zip(*self, *other, start, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds `outer`."""
        return tuple(slice(s - o, s - o + n) for s, o, n in zip(self.start, outer.start, self.shape, strict=True))


class TensorShard(NamedTuple):
    """A tensor in memory that is the box at `start` of a global tensor. kind: as in format.py."""

    name: str
    kind: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> Box:
        return Box(self.start, tuple(self.tensor.shape))


def boxes_of_range(shape: tuple[int, ...], first: int, last: int) -> list[Box]:
    """Cut elements [first, last) of a flattened tensor into boxes, in memory order: at most 2 * dims - 1 of them."""
    boxes = []
    while first < last:
        # A slab of dim d is one index of d and all of the inner dims. Take the largest that begins here and fits.
        slabs = enumerate(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        dim, slab = next((dim, slab) for dim, slab in slabs if first % slab == 0 and first + slab <= last)
        start = tuple(map(int, np.unravel_index(first, shape)))
        count = min((last - first) // slab, shape[dim] - start[dim])
        boxes.append(Box(start, (*[1] * dim, count, *shape[dim + 1 :])))
        first += count * slab
    return boxes


def row_blocks(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Cut a tensor of this shape into boxes of whole rows, with at most `most` elements each, or of one row."""
    rows = max(1, most // max(1, prod(shape[1:])))
    for row in range(0, shape[0], rows):
        yield Box((row, *(0 for _ in shape[1:])), (min(rows, shape[0] - row), *shape[1:]))


def to_global(local: Box, shard: Shard | None) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Cut a box of a tensor-parallel shard where its chunks end: yield (each part, its start in the whole tensor)."""
    if shard is None:
        yield local, local.start
        return
    before, after = slice(shard.dim), slice(shard.dim + 1, None)
    for begin, full, length in shard.slices():
        chunk = Box(*((*old[before], new, *old[after]) for old, new in zip(local, (begin, length))))
        if part := local.meet(chunk):
            yield part, (*part.start[before], part.start[shard.dim] - begin + full, *part.start[after])


def whole_shape(local: tuple[int, ...], shard: Shard | None) -> tuple[int, ...]:
    """Return the shape of the parameter of which a rank holds a slice."""
    return tuple(local) if shard is None else (*local[: shard.dim], sum(shard.chunks), *local[shard.dim + 1 :])


def covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Tell whether the boxes hold every element of a tensor of this shape exactly once.

    A box adds +1 or -1 at each of its corners: -1 if the corner is an end in an odd number of dims. In one dim, [0, 2)
    and [2, 5) give +1 at 0, -1 at 2, +1 at 2, -1 at 5: together those of [0, 5). So the sums at all corners must equal
    those of the whole tensor, and no pair of boxes is compared.
    """
    if not shape:
        return len(boxes) == 1
    starts, sizes = (np.array(numbers, np.int64) for numbers in zip(((0,) * len(shape), shape), *boxes, strict=True))
    signs = np.array([-1] + [1] * len(boxes))
    ends = list(product((0, 1), repeat=len(shape)))
    corners = np.concatenate([starts + sizes * end for end in ends])
    held = np.concatenate([signs * (-1) ** sum(end) for end in ends])
    order = np.lexsort(corners.T)
    new = np.diff(corners[order], axis=0, prepend=-1).any(axis=1)
    return not np.add.reduceat(held[order], np.flatnonzero(new)).any()
