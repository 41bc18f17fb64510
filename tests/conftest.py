"""Fixtures that every test may use."""

import pytest

from minitron.testing import RankPool


@pytest.fixture(scope="session")
def ranks():
    """ranks(world_size, fn, *args, timeout=60, **kwargs): what each of `world_size` gloo ranks returned."""
    with RankPool(preload=("pytest", "hypothesis")) as pool:
        yield pool.run
