"""Fixtures and settings that every test shares."""

import hypothesis
import pytest

from minitron.testing import RankPool

# How long an example takes says more about the machine's other work than about the code.
hypothesis.settings.register_profile("minitron", deadline=None)
hypothesis.settings.load_profile("minitron")


@pytest.fixture(scope="session")
def ranks():
    """ranks(world_size, fn, *args, timeout=60, **kwargs): what each of `world_size` gloo ranks returned."""
    with RankPool(preload=("pytest", "hypothesis", "minitron.train")) as pool:
        yield pool.run
