"""Fixtures and settings that every test shares."""

import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork of a process whose OpenMP has threads hangs in its first loop

import hypothesis
import pytest
import torch

from minitron.testing import RankPool
from warm import PRELOAD

# How long an example takes says more about the machine's other work than about the code.
hypothesis.settings.register_profile("minitron", deadline=None)
hypothesis.settings.load_profile("minitron")

# In the background of a script SIGINT is ignored, which every process would inherit that a test interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

WORKERS = 3  # many tests wait; each worker may start eight ranks, which need half a GiB each
# Eight ranks keep both cores of a small machine busy. Two such files at once would mostly switch between processes.
ONE_AFTER_ANOTHER = {
    f"test_{name}" for name in "faults invariance kill lora optim overlap testing replay fp8_weights replicas".split()
}
# Files that take minutes begin first, the longest one at once: else the last of them would run alone.
LONGEST = [
    f"test_{name}"
    for name in "faults slurm invariance supervisor jube replay planner checkpoint local fp8 kill helm dryrun rerun "
    "fp8_weights random_layouts fuzz tokenizers_hostile scale replicas install lora vocabulary weight_queue".split()
]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Of `-n auto`: more workers than cores, since many tests wait. None on GPUs: each test has them for itself."""
    return 0 if torch.cuda.is_available() else WORKERS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker takes a whole file, for its fixtures. One takes ONE_AFTER_ANOTHER; LONGEST come before all others."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "one after another" if Path(file).stem in ONE_AFTER_ANOTHER else file

    config.option.loadscopereorder = False  # by the number of tests
    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Sort files as LONGEST has them. Leave to the slow run all but each n-th case of a test marked
    `sampled(n, *kept)`, and those with a kept id."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
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
    """ranks(world_size, fn, *args, timeout=600, **kwargs): what each of `world_size` gloo ranks returned."""
    with RankPool(preload=PRELOAD) as pool:
        yield partial(pool.run, timeout=600.0)
