"""Where the ranks of one start meet: in a part of the key-value store that no earlier start has used.

Problem: `torchrun --max-restarts` keeps its store when it starts ranks again, and so the keys of those that died. torch
writes the same names once more, but who reads early reads an old value, the address of a dead rank or an old NCCL id,
and waits for it until the timeout (pytorch/pytorch#135712). torchrun's count of restarts is no help: each node has its
own. The idea: all ranks of a start begin after all of the one before have ended, so rank 0 numbers the starts, and
tells its number to whoever asks now.

    rank 2   I ask question 7                  reads answer 7: this is start 3    counts itself into start 3
    rank 0   this is start 3, answers 1 to 7                                      until all are counted

Answers to the dead do no harm: a question has a number of its own.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic, sleep

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """(store of this start, rank, world) as torchrun's environment has them. All ranks call it, once each.

    Raises TimeoutError on rank 0, and torch's DistStoreError on the others, unless all ranks come in time.
    """
    whole, rank, world = next(rendezvous("env://", timeout=timeout))
    whole.set_timeout(timeout)
    store = dist.PrefixStore("minitron", whole)
    start = _answer(store, world, timeout) if rank == 0 else _ask(store)
    return dist.PrefixStore(f"start-{start}", whole), rank, world


def connect() -> dist.Store:
    """The store of this start, by a connection of its own, for others may wait in theirs; of one rank, in memory."""
    return dist.distributed_c10d._get_default_store().clone() if dist.is_initialized() else dist.HashStore()


def _ask(store: dist.Store) -> int:
    start = int(store.get(f"answer-{store.add('questions', 1)}"))
    store.add(f"arrived-{start}", 1)
    return start


def _answer(store: dist.Store, world: int, timeout: timedelta) -> int:
    start, answered, deadline = store.add("starts", 1), 0, monotonic() + timeout.total_seconds()
    while (arrived := 1 + store.add(f"arrived-{start}", 0)) < world:
        if monotonic() > deadline:
            raise TimeoutError(f"{arrived} of {world} ranks have come within {timeout.total_seconds():.0f} s")
        asked = store.add("questions", 0)
        for question in range(answered + 1, asked + 1):
            store.set(f"answer-{question}", str(start))
        answered = asked
        sleep(0.01)
    return start
