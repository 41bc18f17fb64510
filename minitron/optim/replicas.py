"""Compare copies of a parameter on several ranks, which must be equal.

Problem: every tensor-parallel rank has a copy of each norm's weight, and every data rank a copy of everything. No step
compares them. A wrong gradient on one rank, a gather that failed or a flipped bit raises no error. From then on ranks
train different models. The loss shows it much later or never. The idea:

  1. Each rank reads the bits of a parameter as integers and adds them up, once as they are and once multiplied by their
     position, which detects a swap. Such sums, modulo 2^64, are exact: equal bits give equal sums in any order.
  2. All sums of an axis are equal if the largest is the smallest. One all-reduce with MAX finds both, since
     max(~x) = ~min(x).
  3. One number for the world is not 0 if anything differs. It is copied to the host without waiting, and read a step
     later. If it is not 0, ranks exchange their sums, and find the name and the ranks from them.

    axis         parameters whose copies its ranks hold
    dp_cp        all: ZeRO-1 gathers what it has updated
    tp           those without a shard: norms, biases of row-parallel layers, positions, one half of each adapter
    tied_stages  the tied weight, on the first and the last stage

A comparison reads the parameters twice, every few hundred steps and before each save, so each checkpoint holds copies
that were equal. Copies over tp are equal under sequence parallelism because their gradients are summed over tp.
Without it they are equal if all ranks sum in one order: data groups have one shape, and kernels use no atomics.
Left out: masters and moments, which differ sooner than the bf16 parameters made of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.activity import listed
from minitron.comm.collectives import all_reduce_, gather_json
from minitron.config.schema import TrainConfig
from minitron.kernels.param import params_of
from minitron.optim.buckets import Gradients
from minitron.runtime.observer import LateCopy, Observer, StepDone
from minitron.runtime.status import RunError

PIECE_BYTES = 64 << 20


class ReplicasDiffer(RunError):
    """Ranks hold different copies of a parameter."""


class Replicas(Observer):
    """Compares this rank's parameters with other ranks' copies, unless cfg.check_replicas_every is 0.

    `after`, `close` and `require_equal` are collective over the world and raise ReplicasDiffer on all of its ranks.
    """

    def __init__(self, chunks: Sequence[nn.Module], gradients: Gradients, cfg: TrainConfig):
        self.gradients, self.mesh, self.every = gradients, gradients.mesh, cfg.check_replicas_every
        mesh, params = gradients.mesh, [param for chunk in chunks for param in params_of(chunk)]
        copies = (
            (mesh.dp_cp, params),
            (mesh.tp, [p for p in params if p.spec.shard is None]),
            (mesh.tied_stages, [p for p in params if p.spec.tied]),
        )
        self.copies = [(axis, params) for axis, params in copies if axis.size > 1 and params]
        self.params = {p.spec.name: p for _, params in self.copies for p in params}
        self.waiting: LateCopy | None = None  # the result of a comparison
        self.compared: int | None = None  # the last step that was compared
        self.equal: int | None = None  # the last step with equal copies

    def after(self, done: StepDone) -> None:
        """Read the result of the last comparison. Begin another if one is due after this step."""
        self.close()
        if self.every and done.step % self.every == 0:
            self._begin(done.step)

    def require_equal(self, step: int) -> None:
        """Compare the parameters after `step`, before they are saved, and wait for the result."""
        if self.every:
            self._begin(step)
            self.close()

    def close(self) -> None:
        """Read the result of a comparison under way."""
        if self.waiting is None:
            return
        total, self.waiting = self.waiting.read(), None
        if total.item():
            raise ReplicasDiffer(self._describe())
        self.equal = self.compared

    @torch.no_grad()
    def _begin(self, step: int) -> None:
        """Queue the comparison of the parameters after `step`, unless they have been compared."""
        world, device = self.mesh.world, self.mesh.device
        if world.size == 1 or step == self.compared:
            return
        self.mesh.activity.begin("replicas")
        self.gradients.wait_parameters()
        self.sums = {name: checksum(param) for name, param in self.params.items()}
        self.differing, total = [], torch.zeros(1, dtype=torch.int64, device=device)
        for axis, params in self.copies:
            own = torch.stack([self.sums[param.spec.name] for param in params])
            highest = torch.stack([own, ~own])
            all_reduce_(highest, axis, op=dist.ReduceOp.MAX)
            differing = (highest[0] != ~highest[1]).any(1)
            self.differing.append((params, differing))
            total += differing.sum()
        all_reduce_(total, world)
        self.compared, self.waiting = step, LateCopy(total)

    def _describe(self) -> str:
        """Name the first parameter that differs and its ranks, the same on all ranks. Collective over the world."""
        mesh, world = self.mesh, self.mesh.world
        different = [p for params, flags in self.differing for p, differs in zip(params, flags.tolist()) if differs]
        # All ranks that hold a copy have the same key: the tensor-parallel rank distinguishes shards.
        mine = [(p.spec.name, p.spec.shard and mesh.tp.rank, self.sums[p.spec.name].tolist()) for p in different]
        everyone = [
            {(name, part): tuple(sums) for name, part, sums in rows} for rows in gather_json(mine, world, mesh.device)
        ]
        keys = list(dict.fromkeys(key for theirs in everyone for key in theirs))
        name, part = keys[0]
        values = {rank: theirs[name, part] for rank, theirs in enumerate(everyone) if (name, part) in theirs}
        ((usual, _),) = Counter(values.values()).most_common(1)
        most, others = ([rank for rank in values if (values[rank] == usual) == same] for same in (True, False))
        return (
            f"iteration {self.compared}: {listed(others)} and {listed(most)} hold different copies of {name}"
            + (f", and of {len(keys) - 1} more" if len(keys) > 1 else "")
            + (f"; after iteration {self.equal} they were equal" if self.equal is not None else "")
            + ". A layer of your own must give all ranks that hold a parameter the same gradient; else suspect the "
            "memory of these ranks. Each save came after a comparison: start again from the newest checkpoint"
        )


def checksum(x: Tensor) -> Tensor:
    """Add up the bits of x [..., n] as integers: [plain sum, sum of each times its position], int64, modulo 2^64."""
    rows = x.detach().reshape(-1, x.shape[-1])
    # Words as wide as rows allow: a sum in int64 first converts narrower ones, in memory.
    widths = torch.int64, torch.int32, torch.int16, torch.uint8
    words = rows.view(next(word for word in widths if rows.shape[1] * rows.itemsize % word.itemsize == 0))
    height, width = words.shape
    # The position of a word is its row times the words per row, plus its column. So no sum needs a copy of x.
    place = torch.arange(max(words.shape), device=x.device)
    sums = torch.zeros(2, dtype=torch.int64, device=x.device)
    each = max(1, PIECE_BYTES // (width * words.itemsize))
    for first in range(0, height, each):  # in pieces, since a kernel may need a multiple of its input
        piece = words[first : first + each]
        by_row, by_column = piece.sum(1, dtype=torch.int64), piece.sum(0, dtype=torch.int64)
        weighted = (by_row * place[first : first + len(piece)]).sum() * width + (by_column * place[:width]).sum()
        sums += torch.stack([by_row.sum(), weighted])
    return sums
