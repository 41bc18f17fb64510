"""Limit the memory of libraries that allocate as much as a file asks for: seven bytes may ask for gigabytes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


def limit_memory(more: int) -> None:
    """From here on an allocation raises MemoryError if this process would hold `more` bytes more than now.

    What libraries have reserved before does not count: some libraries reserve memory for each core. The limit holds for
    all threads. Without /proc (macOS) there is none.
    """
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (now + more if soft == resource.RLIM_INFINITY else min(soft, now + more), hard)
    )


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Inside, limit memory as `limit_memory` does."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(more)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
