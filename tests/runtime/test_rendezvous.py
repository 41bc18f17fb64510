"""Starts of the same ranks that share one store: each has a number of its own, whoever died before."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from minitron.runtime import rendezvous

PATIENCE = timedelta(seconds=20)


def starts_of(store, world):
    """The number that each rank of one start learns."""
    with ThreadPoolExecutor(world) as threads:
        others = [threads.submit(rendezvous._ask, store) for _ in range(world - 1)]
        first = threads.submit(rendezvous._answer, store, world, PATIENCE)
        return [future.result() for future in (first, *others)]


def test_the_dead_of_earlier_starts_do_not_count():
    store = dist.HashStore()
    assert starts_of(store, 4) == [1] * 4
    for _ in range(3):
        store.add("questions", 1)  # ranks that asked and were killed before rank 0 answered
    assert starts_of(store, 2) == [2] * 2
    store.add("starts", 1)  # rank 0 was killed before the others asked
    assert starts_of(store, 5) == [4] * 5


def test_a_rank_that_does_not_come():
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(rendezvous._ask, store)
        with pytest.raises(TimeoutError, match="2 of 3 ranks have come within 1 s"):
            rendezvous._answer(store, 3, timedelta(seconds=1))


def test_the_store_of_a_start(monkeypatch):
    """A world of one, in torchrun's environment: keys of the start before are not seen."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": served.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    rendezvous.meet(PATIENCE)[0].set("key", "of the dead")
    store, rank, world = rendezvous.meet(PATIENCE)
    assert (rank, world, store.check(["key"])) == (0, 1, False)
