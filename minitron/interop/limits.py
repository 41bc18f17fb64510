"""Limit the memory of libraries that allocate as much as a file asks for: seven bytes may ask for gigabytes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Inside, an allocation raises MemoryError if this process would hold `more` bytes more than now.

    The limit holds for all threads. Without /proc (macOS) there is none.
    """
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = now + more if soft == resource.RLIM_INFINITY else min(soft, now + more)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
