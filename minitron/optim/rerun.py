"""Recompute a suspicious step, to tell bad data from a faulty GPU.

Problem: a GPU that computes wrong now and then raises no error. One NaN, or one gradient that is ten thousand times too
large, and the step is lost, or worse, it is not: the loss jumps, and days later somebody blames the data. The idea
(train.rerun=on): before the update, look at the loss and the gradients' norm, and if they are suspicious compute the
same microbatches with the same weights once more.

    the same result again      data or model: the update is skipped, the samples are named, the run goes on
    another result             hardware: the ranks whose figures differ are named and end with status BROKEN, the others
                               with LOST, so that the run can go on from its last save without their node. Where
                               they are of several nodes they end with 1: one is to blame, so all go on with all

Both runs read the same batches, weights, scales and dropout counters; a recorded step is replayed. Suspicious is what
is not finite, and a spike: more than SPREADS spreads above the median of the last WINDOW steps. The spread is 1.4826
times the median distance from the median (Hampel's identifier, for which outliers among those steps do not matter),
and at least a share of the median, FLOORS: so a loss has to be a tenth above it, and a norm eleven times as large, near
the factor of 10 at which Megatron-LM runs a step again. Losses that stay high are no spike: after IN_A_ROW skipped
spikes the history begins anew. Checkpoints hold it, so a restart forgets nothing.

Each rank compares figures that other ranks' gradients do not reach: its part of the loss sum, and the norm of the
gradients that it computed, as far as they were not yet added up (of P data ranks the reduce-scatter overwrites one
P-th, its own slice). Only if all of those are equal does a difference in own slices count. They are equal within
TOLERANCE: kernels that add in another order each time change a norm by some 1e-3 of it, and a fault worth asking for
is larger than that.

Left out: which rank of a tensor- or pipeline-parallel group it was, if a wrong value has reached the others before the
backward's end: then all of these are named. A GPU that is wrong in the same way each time is taken for data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from minitron.comm.activity import listed
from minitron.comm.collectives import all_gather_into, all_reduce_
from minitron.optim.buckets import Gradients
from minitron.runtime.log import Log
from minitron.runtime.status import BROKEN, LOST
from minitron.runtime.stragglers import gather_places

WINDOW, AT_LEAST = 100, 20  # steps that a spike is measured by
SPREADS, FLOORS = 10.0, {"loss": 0.01, "gradient norm": 1.0}
IN_A_ROW = 3
TOLERANCE = 0.02


class WrongResult(ValueError):
    """A rank has computed something else from the same data and weights.

    mine: it may have been this one. of_one_node: those that it may have been are of one node. status: of the process.
    quiet: this rank prints nothing and exits after a faulty rank.
    """

    def __init__(self, text: str, mine: bool, of_one_node: bool = True):
        super().__init__(text)
        self.status, self.quiet = (BROKEN if of_one_node else 1, False) if mine else (LOST, True)


class Samples(Protocol):
    """A microbatch. samples: [b] of the run's order."""

    samples: Tensor


class Rerun:
    """Checks each step before its update. Its methods are collective over the world; `check` waits for the device.

    log: where verdicts go; None: nowhere.
    """

    def __init__(self, gradients: Gradients, log: Log | None = None):
        self.gradients, self.mesh, self.log = gradients, gradients.mesh, log
        self.history: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in FLOORS}
        self.in_a_row = 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: a run that goes on skips the spikes that it would have skipped anyway."""
        return {"in_a_row": self.in_a_row, "history": {name: list(values) for name, values in self.history.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the `state()` of a checkpoint; {} of one without leaves a new history."""
        self.in_a_row = state.get("in_a_row", 0)
        for name, values in self.history.items():
            values.extend(state.get("history", {}).get(name, ()))

    def check(
        self,
        batches: Sequence[Samples],
        again: Callable[[], Tensor],
        loss_sum: Tensor,
        count: Tensor,
        scale: Tensor | float,
    ) -> tuple[Tensor, bool]:
        """Return the loss sum, and whether a finite result is not to be used, since the data make no sense.

        again(): computes the step once more, if it is suspicious, and returns its loss sum. loss_sum, count, scale: as
        the optimizer takes them. Raises WrongResult, on all ranks.
        """
        totals = torch.stack([loss_sum.double(), count.double(), self.gradients.square_sum()])
        all_reduce_(totals, self.mesh.world)
        loss, norm = totals[0] / totals[1], totals[2].sqrt() / (totals[1] * scale)
        figures = dict(zip(FLOORS, torch.stack([loss, norm]).tolist(), strict=True))
        why = self._suspicion(figures)
        if why is None:
            for name, value in figures.items():
                self.history[name].append(value)
            self.in_a_row = 0
            return loss_sum, False
        first, finite = self._own_figures(loss_sum), all(map(math.isfinite, figures.values()))
        loss_sum = again()
        if wrong := self._differing(first, second := self._own_figures(loss_sum)):
            raise self._blame(why, wrong)
        if isinstance(scale, Tensor) and math.isfinite(figures["loss"]) and not finite:
            return loss_sum, False  # fp16: the loss scale was too large, as it is now and then
        skip = finite and self.in_a_row < IN_A_ROW
        self.in_a_row = self.in_a_row + 1 if skip else 0
        if finite and not skip:
            for values in self.history.values():
                values.clear()
        samples = self._samples(batches, second, worst="norm" if "norm" in why else "loss")
        ending = (
            "the update is skipped" if skip or not finite else "spikes in a row are a new level: the update is made"
        )
        verdict = (
            f"iteration {self.mesh.activity.step}: {why}. Computed again it is the same on all ranks, so the reason "
            f"is the data or the model, and no GPU; {ending}. Look at {samples} of the run's order"
        )
        if self.log is not None:
            self.log.warn(verdict)
        return loss_sum, skip

    def _suspicion(self, figures: dict[str, float]) -> str | None:
        """Say what is wrong with a step's figures; None if nothing is."""
        for name, value in figures.items():
            if not math.isfinite(value):
                return f"the {name} is {value}"
        for name, value in figures.items():
            past = self.history[name]
            if len(past) >= AT_LEAST:
                usual = median(past)
                spread = max(1.4826 * median(abs(x - usual) for x in past), FLOORS[name] * usual)
                if value > usual + SPREADS * spread:
                    return (
                        f"the {name} is {value:.4g}, and was {usual:.4g} +- {spread:.2g} in the last {len(past)} steps"
                    )
        return None

    def _own_figures(self, loss_sum: Tensor) -> Tensor:
        """Return [loss sum, norm of what this rank computed, norm of its slice of the sums], float64 on the device."""
        axis, own = self.mesh.dp_cp, loss_sum.new_zeros((), dtype=torch.float64)
        summed = own.clone()
        for bucket in self.gradients.buckets:
            parts = list(bucket.grad.chunk(axis.size))
            mine = parts.pop(axis.rank)
            for part in parts:
                own += bucket.square_sum(part)
            if not (bucket.key.sum_over_tp or bucket.key.tied):  # those are sums over other axes, too
                total = summed if axis.size > 1 else own
                total += bucket.square_sum(mine)
        return torch.stack([loss_sum.double(), own.sqrt(), summed.sqrt()])

    def _differing(self, first: Tensor, second: Tensor) -> list[int]:
        """List the ranks whose figures are not those of their first run. Collective over the world."""
        everyone = self._gathered(torch.stack([first, second]))
        both_nan = everyone.isnan().all(1)
        same = both_nan | torch.isclose(everyone[:, 0], everyone[:, 1], rtol=TOLERANCE, atol=0.0)
        alone = ~same[:, :2].all(1)
        return torch.nonzero(alone if alone.any() else ~same[:, 2]).flatten().tolist()

    def _blame(self, why: str, wrong: Sequence[int]) -> WrongResult:
        """Make the error of this rank. Collective over the world."""
        places = gather_places(self.mesh)
        named = "; ".join(f"rank {rank} on {places[rank]}" for rank in wrong)
        of_one_node = len({places[rank].partition(" GPU ")[0] for rank in wrong}) == 1
        text = (
            f"iteration {self.mesh.activity.step}: {why}. Computed again from the same data and weights the result of "
            f"{listed(wrong)} is another one: {named}. Suspect the hardware{' of one of them' * (len(wrong) > 1)}, and "
            f"go on from the newest checkpoint{' without that node' * of_one_node}; this step has changed nothing"
        )
        return WrongResult(text, self.mesh.rank in wrong, of_one_node)

    def _samples(self, batches: Iterable[Samples], figures: Tensor, worst: str) -> str:
        """Name the samples of the ranks with figures that are not finite; if all are, of that with the largest one."""
        ours = torch.cat([batch.samples for batch in batches])
        samples, everyone = self._gathered(ours), self._gathered(figures)
        bad = ~everyone[:, :2].isfinite().all(1)
        if not bad.any():
            bad[everyone[:, 1 if worst == "norm" else 0].argmax()] = True
        numbers = sorted(set(samples[bad].flatten().tolist()))
        more = f", ... ({len(numbers)} in all)" if len(numbers) > 16 else ""
        return f"samples {', '.join(map(str, numbers[:16]))}{more}"

    def _gathered(self, x: Tensor) -> Tensor:
        """Return x of all ranks [world, ...], on the host."""
        everyone = x.new_empty(self.mesh.world.size * x.numel())
        all_gather_into(everyone, x.flatten().contiguous(), self.mesh.world)
        return everyone.view(-1, *x.shape).cpu()
