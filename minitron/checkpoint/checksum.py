"""CRC-32 of a large file by several threads.

Problem: zlib sums one stream at some GB/s on one core, and a rank saves and resumes tens of gigabytes while the other
cores have nothing to do. The idea: threads sum blocks, each by itself, and the sums are joined in order. A CRC is a
polynomial over bits: the data, read as a polynomial, modulo a fixed polynomial P. So for two blocks A and B

    crc(AB) = crc(A) * x^(8 * len(B)) mod P  +  crc(B)

and x^(8 * len(B)) is the same for all blocks of a length. Polynomials over bits add by exclusive or. As in zlib, the
highest bit is the coefficient of x^0.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TypeVar

T = TypeVar("T")
P = 0xEDB88320  # without its x^32
ONE, X = 1 << 31, 1 << 30
THREADS = 8


def crc32(blocks: Iterable[Callable[[], bytes | memoryview]]) -> int:
    """Return the CRC-32 of all blocks, one after another. blocks: return their bytes, in any thread, at any time."""
    total = 0
    for crc, length in in_order((partial(_sum, block) for block in blocks), THREADS, "checksum"):
        total = joined(total, crc, length)
    return total


def in_order(calls: Iterable[Callable[[], T]], threads: int, name: str) -> Iterator[T]:
    """Yield what the calls return, in their order. Threads of this name make them ahead, at most two per thread."""
    with ThreadPoolExecutor(threads, name) as pool:
        waiting: deque[Future[T]] = deque()
        for call in calls:
            waiting.append(_begin(pool, call))
            if len(waiting) == 2 * threads:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def _begin(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    try:
        return pool.submit(call)
    except RuntimeError:  # Python ends, and its threads take no more calls; but a save under way must become whole
        future: Future[T] = Future()
        future.set_result(call())
        return future


def _sum(block: Callable[[], bytes | memoryview]) -> tuple[int, int]:
    data = block()
    return zlib.crc32(data), len(data)


def joined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A and B together. first, second: those of A and B; length: bytes of B."""
    return _product(first, _shift(length)) ^ second


@lru_cache(maxsize=256)
def _shift(length: int) -> int:
    """Return x^(8 * length) mod P."""
    result, power = ONE, X
    for _ in range(3):
        power = _product(power, power)  # x^8
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            result = _product(result, power)
        power = _product(power, power)
    return result


def _product(a: int, b: int) -> int:
    """Return a * b mod P."""
    result = 0
    for degree in range(32):  # b is multiplied by x each time
        if a & ONE >> degree:
            result ^= b
        b = b >> 1 ^ P if b & 1 else b >> 1
    return result
