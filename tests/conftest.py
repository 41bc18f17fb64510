"""Fixtures and settings that every test shares."""

import os
import signal
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork of a process whose OpenMP has threads hangs in its first loop

import hypothesis
import pytest
import torch

from minitron.testing import RankPool

# How long an example takes says more about the machine's other work than about the code.
hypothesis.settings.register_profile("minitron", deadline=None)
hypothesis.settings.load_profile("minitron")

# In the background of a script SIGINT is ignored, which every process would inherit that a test interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Eight ranks keep both cores of a small machine busy, and some of these files bound the time that a run takes.
ONE_AFTER_ANOTHER = {f"test_{name}" for name in ("faults", "invariance", "kill", "lora", "optim", "overlap", "testing")}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Of `-n auto`: one worker for those files, and one for the others. None on GPUs: each test has them for itself."""
    return 0 if torch.cuda.is_available() else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker takes a whole file, for its fixtures; first of all, one takes those files as if they were one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "one after another" if Path(file).stem in ONE_AFTER_ANOTHER else file

    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave to the slow run all but each n-th case of a test marked `sampled(n, *kept)`, and those with a kept id."""
    seen = Counter()
    for item in items:
        if sampled := item.get_closest_marker("sampled"):
            test = item.nodeid.partition("[")[0]
            n, *kept = sampled.args
            if seen[test] % n and not any(f"[{name}]" in item.nodeid for name in kept):
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


@pytest.fixture(scope="session")
def ranks():
    """ranks(world_size, fn, *args, timeout=300, **kwargs): what each of `world_size` gloo ranks returned."""
    with RankPool(preload=("pytest", "hypothesis", "minitron.train")) as pool:
        yield pool.run
