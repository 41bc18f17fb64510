"""Checksums of parts put together are those of the whole."""

import threading
import zlib
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitron.checkpoint import checksum


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_parts_are_the_whole(a, b):
    assert checksum.joined(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_zeros_by_the_terabyte_count():
    """The sum of n zeros behind a byte repeats with the period of x in the field, 2^32 - 1 bits."""
    one = zlib.crc32(b"a")
    after = [checksum.joined(one, 0, zeros) for zeros in (1, (1 << 32) - 1, 1 << 32)]
    assert after == [zlib.crc32(b"a\0") ^ zlib.crc32(b"\0"), one, after[0]]


@pytest.mark.parametrize("sizes", [[], [0], [5], [7] * 100, [1000, 3, 1000, 0, 20]])
def test_blocks_are_summed_in_order_by_several_threads(sizes):
    data = [bytes((i + j) % 251 for j in range(size)) for i, size in enumerate(sizes)]
    names = set()

    def block(i):
        names.add(threading.current_thread().name)
        return data[i]

    assert checksum.crc32(partial(block, i) for i in range(len(data))) == zlib.crc32(b"".join(data))
    assert all(name.startswith("checksum") for name in names) and bool(names) == bool(sizes)
