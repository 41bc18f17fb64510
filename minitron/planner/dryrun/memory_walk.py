"""Follows the allocations of a run from birth to death: the memory of a step on any device, without a device.

Problem: a formula for the memory of a layout can forget a tensor. The idea: run the real code and observe every
operation. A storage is born when an operation first returns it. It is dead when its last reference is dropped, which a
weak reference reports. On the meta device it has a size and costs nothing. So the log has what autograd saved, what the
schedule holds for other ranks, and the life of each temporary:

    operation           log                    total
    y = x @ w           +y                     y
    z = gelu(y)         +z                     y + z     the peak
    del y, z            -y, -z                 0         if autograd needs y for its backward, -y comes there

The log is read when the run is over: how much was allocated at the peak, its parts, and the most bytes in each action
of the schedule. Views and results in place are storages that are known already. Sizes are rounded as torch's CUDA
allocator rounds them, so that peaks compare with torch.cuda.max_memory_allocated. Left out: what libraries take for
themselves (workspaces, NCCL's buffers, the context) and the allocator's fragmentation.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache, partial
from itertools import accumulate

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minitron.planner.dryrun.kernels import cached_by_shape

GRANULARITY = 512  # bytes, to a multiple of which torch's CUDA allocator rounds up
UNLABELLED = "activations"
_once = lru_cache(None)(cached_by_shape)


class MemoryWalk(TorchDispatchMode):
    """Records the allocations of every operation inside of `with`. casts: the schedule leaves FP8 casts of weights."""

    def __init__(self, casts: bool = False):
        super().__init__()
        self.casts = casts
        self.parts: list[str] = []  # the part of each storage, by its number in order of birth
        self.alive: dict[int, tuple[int, weakref.ref]] = {}  # address -> number
        self.log: list[tuple[int, int]] = []  # (number, bytes), negative at a death
        self.actions: list[tuple[object, int]] = [("build", 0)]  # (what began, length of the log then)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        run = _once(func) if func.namespace == "aten" else func  # collectives happen each time
        result = run(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self._see(x)
        return result

    def begin(self, action: object) -> None:
        """Note that `action` begins here."""
        if action == "update":  # the schedule's activations are gone
            self.label("fp8 weights" if self.casts else "other")
        self.actions.append((action, len(self.log)))

    def label(self, part: str, tensors: Iterable[Tensor] | None = None) -> None:
        """Assign tensors that have no part yet to this part of the memory; None: all tensors that are alive."""
        addresses = self.alive if tensors is None else (x.untyped_storage()._cdata for x in tensors)
        for address in addresses:
            number, _ = self.alive[address]
            if self.parts[number] == UNLABELLED:
                self.parts[number] = part

    def peak(self) -> tuple[dict[str, int], object]:
        """Return the bytes by part at the peak, and the action that first reached it."""
        totals = self._totals()
        end = totals.index(max(totals))
        memory: Counter[str] = Counter()
        for number, size in self.log[:end]:
            memory[self.parts[number]] += size
        return memory, [action for action, begin in self.actions if begin < end][-1]

    def timeline(self) -> list[tuple[object, int]]:
        """List (action, most bytes allocated in it), in order."""
        totals, ends = self._totals(), [begin for _, begin in self.actions[1:]] + [len(self.log)]
        return [(action, max(totals[begin : end + 1])) for (action, begin), end in zip(self.actions, ends)]

    def _totals(self) -> list[int]:
        """List the bytes allocated after each entry of the log; 0 before the first."""
        return list(accumulate((size for _, size in self.log), initial=0))

    def _see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address = storage._cdata
        if address in self.alive:
            return
        number, size = len(self.parts), -(-storage.nbytes() // GRANULARITY) * GRANULARITY
        self.parts.append(UNLABELLED)
        self.alive[address] = number, weakref.ref(storage, partial(self._died, address, number, size))
        self.log.append((number, size))

    def _died(self, address: int, number: int, size: int, _) -> None:
        del self.alive[address]
        self.log.append((number, -size))
