"""Where the ranks of one start meet: in a part of the key-value store that no earlier start has used.

Problem: when `torchrun --max-restarts` starts ranks again it keeps its store, and so the keys of the ranks that died.
torch writes the same keys once more, but a rank that reads too early gets an old value (the address of a dead rank, an
old NCCL id) and waits for that until the timeout (pytorch/pytorch#135712). torchrun's count of restarts does not help:
each node has its own. The idea: ranks start only after all ranks of the start before have ended. So rank 0 numbers the
starts, and answers whoever asks with the number of the new one.

    rank 2   I ask question 7                  reads answer 7: this is start 3    counts itself into start 3
    rank 0   this is start 3, answers 1 to 7                                      until all are counted

A reply to a rank that has died is harmless: every question has its own number.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic, sleep

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return (store of this start, rank, world), from torchrun's environment. All ranks call it, once each.

    Raises TimeoutError on rank 0, and torch's DistStoreError on the others, unless all ranks come in time.
    """
    whole, rank, world = next(rendezvous("env://", timeout=timeout))
    whole.set_timeout(timeout)
    store = dist.PrefixStore("minitron", whole)
    start = _answer(store, world, timeout) if rank == 0 else _ask(store)
    return dist.PrefixStore(f"start-{start}", whole), rank, world


def connect() -> dist.Store:
    """Open another connection to the store of this start, since threads may wait in theirs; one rank: in memory."""
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
