"""A deadline for searches that never end."""

import signal

import pytest

CPU_SECONDS = 120.0  # several times what the longest test of the ordinary run takes


@pytest.fixture(autouse=True)
def deadline(request):
    """Fail a test of the ordinary run if it takes too much time of the CPU, which other work does not lengthen."""
    if request.node.get_closest_marker("slow") is None:
        signal.signal(signal.SIGVTALRM, lambda *_: pytest.fail(f"it has not ended in {CPU_SECONDS} s of a CPU"))
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
