"""Boxes: rectangular parts of a tensor, the one coordinate system that all layouts share.

Problem: what a rank holds is a *flat* range of a *tensor-parallel slice* of a parameter (ZeRO cuts buckets wherever a
rank's share ends), and no two layouts cut alike. The idea: translate such a range, once, into a few boxes of the whole
tensor. From then on saving and loading know nothing of layouts: a box that is wanted is put together from the
intersections with the boxes that were saved.

    local slice [4, 5], elements 3 to 14        whole tensor [8, 5], this rank has its rows 4 to 7

        . . . a a                               a: rows 4..4, columns 3..4
        b b b b b        one range,             b: rows 5..5, columns 0..4
        c c c c .        three boxes            c: rows 6..6, columns 0..3
        . . . . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from minitron.parallel.tensor import Shard


class Box(NamedTuple):
    """The elements from `start`, `shape` of them along each dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """What both hold, None if nothing."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(min(a + m, b + n) - s for a, m, b, n, s in zip(*self, *other, start, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds `outer`."""
        return tuple(slice(s - o, s - o + n) for s, o, n in zip(self.start, outer.start, self.shape, strict=True))


class Piece(NamedTuple):
    """A tensor in memory that is one box of a global tensor: `name`, of this `kind`, of shape `whole`."""

    name: str
    kind: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> Box:
        return Box(self.start, tuple(self.tensor.shape))


def boxes_of_range(shape: Sequence[int], first: int, last: int) -> list[Box]:
    """Elements [first, last) of a flattened tensor as boxes, in memory order: at most 2 * dims - 1 of them."""
    shape = tuple(shape)
    if first >= last:
        return []
    if len(shape) == 1:
        return [Box((first,), (last - first,))]
    row = prod(shape[1:])
    head, tail = -(-first // row), last // row  # rows [head, tail) are whole

    def part(i: int, begin: int, end: int) -> list[Box]:
        return [Box((i, *b.start), (1, *b.shape)) for b in boxes_of_range(shape[1:], begin, end)]

    if head > tail:
        return part(tail, first - tail * row, last - tail * row)
    rows = [Box((head, *[0] * (len(shape) - 1)), (tail - head, *shape[1:]))] if head < tail else []
    return part(head - 1, first - (head - 1) * row, row) + rows + part(tail, 0, last - tail * row)


def whole_shape(shape: Sequence[int], shard: Shard | None) -> tuple[int, ...]:
    """The shape of the parameter of which a rank holds `shape`."""
    return tuple(sum(shard.chunks) if shard is not None and dim == shard.dim else n for dim, n in enumerate(shape))


def to_global(local: Box, shard: Shard | None) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """A box of a rank's slice, cut at the slice's chunks: (the part, its start in the whole parameter)."""
    if shard is None:
        yield local, local.start
        return
    for begin, full, length in shard.slices():
        chunk = Box(*(tuple(new if dim == shard.dim else old for dim, old in enumerate(olds))
                      for new, olds in zip((begin, length), local)))
        part = local.meet(chunk)
        if part is not None:
            yield part, tuple(s + (full - begin if dim == shard.dim else 0) for dim, s in enumerate(part.start))


def covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether the boxes hold every element of a tensor of this shape exactly once."""
    whole = Box((0,) * len(shape), tuple(shape))
    if sum(box.volume for box in boxes) != whole.volume or any(box.meet(whole) != box for box in boxes):
        return False
    open_boxes: list[Box] = []  # that reach the row at which the sweep along dim 0 stands
    for box in sorted(boxes):
        open_boxes = [other for other in open_boxes if other.start[0] + other.shape[0] > box.start[0]]
        if any(box.meet(other) for other in open_boxes):
            return False
        open_boxes.append(box)
    return True
