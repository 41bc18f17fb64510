"""Recompute a suspicious step, to tell bad data from a faulty GPU.

Problem: a GPU that sometimes computes wrong raises no error. One NaN, or one gradient that is ten thousand times too
large, costs the step. Or it does not, and the loss jumps days later for no visible reason. The idea (train.rerun=on):
if the loss or the gradients' norm is suspicious, compute the same microbatches again before the update.

    the same result again      data or model: the update is skipped, the samples are named, the run goes on
    another result             hardware: the ranks whose figures differ are named and end with status BROKEN, the others
                               with LOST. The run can then resume without their node. If the named ranks are on several
                               nodes they end with 1, and the run resumes with all nodes

Both runs read the same batches, weights, scales and dropout counters. A recorded step is replayed. A figure is
suspicious if it is not finite, or more than SPREADS spreads above the median of the last WINDOW steps. The spread is
1.4826 times the median distance from the median (Hampel's identifier, which outliers do not change), and at least a
share of the median, FLOORS. With the smallest spread a loss is suspicious above 1 + 10 * 0.01 times the median, and a
norm above 1 + 10 * 1 times. After IN_A_ROW skipped spikes the losses are a new level: the history is cleared.
Checkpoints hold the history.

A rank compares what it computed alone: its part of the loss sum, and its gradients outside of its own slice, which the
reduce-scatter leaves as they were. Its slice holds the sum over ranks, with the wrong values of others. So a
difference in this slice counts only if no rank differs in what it computed alone. Between the two are sums of the ranks
of its node, if gradients are summed in two levels (slices.py). Equal means within TOLERANCE: kernels that add in
another order each time change a norm by less, and the faults that matter change it by more.

Left out: which rank of a tensor- or pipeline-parallel group is faulty, if a wrong value reaches the others before the
end of the backward. Then all of them are named. A GPU that is wrong in the same way each time is taken for data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from minitron.comm.activity import listed
from minitron.comm.collectives import all_reduce_, gather_along
from minitron.kernels.fp8 import Fp8States
from minitron.optim.buckets import Gradients
from minitron.optim.scaler import LossScaler
from minitron.pipeline.executor import local_totals
from minitron.pipeline.replay import Eager, Replay, StaticBatch
from minitron.runtime.log import Log
from minitron.runtime.status import BROKEN, LOST, RunError
from minitron.runtime.stragglers import gather_rank_locations

WINDOW, MIN_HISTORY = 100, 20  # most and fewest steps whose median a spike is compared with
SPREADS, FLOORS = 10.0, {"loss": 0.01, "gradient norm": 1.0}
IN_A_ROW = 3
TOLERANCE = 0.02


class WrongResult(RunError):
    """A rank computes another result from the same data and weights.

    mine: it may be this rank. of_one_node: all suspected ranks are on one node.
    quiet: this rank prints nothing and exits after a faulty rank.
    """

    def __init__(self, text: str, mine: bool, of_one_node: bool = True):
        super().__init__(text)
        self.status, self.quiet = (BROKEN if of_one_node else 1, False) if mine else (LOST, True)


class CountedBatch(StaticBatch, Protocol):
    """samples: [b] positions in the run's order. count: the number of tokens that have a loss."""

    samples: Tensor
    count: float


class Rerun:
    """Wraps a runner: checks each step, and computes a suspicious one again. Collective over the world.

    log: where verdicts are written; None: nowhere.
    """

    def __init__(
        self, runner: Eager | Replay, gradients: Gradients, fp8: Fp8States, scaler: LossScaler, log: Log | None
    ):
        self.runner, self.gradients, self.fp8, self.scaler, self.log = runner, gradients, fp8, scaler, log
        self.mesh = gradients.mesh
        self.history: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in FLOORS}
        self.in_a_row = 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a resumed run skips the same spikes."""
        return {"in_a_row": self.in_a_row, "history": {name: list(values) for name, values in self.history.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the `state()` of a checkpoint. {} starts a new history."""
        self.in_a_row = state.get("in_a_row", 0)
        for name, values in self.history.items():
            values.extend(state.get("history", {}).get(name, ()))

    def forward_backward(self, batches: Sequence[CountedBatch]) -> tuple[Tensor, bool]:
        """Compute the gradients of a step; return its loss sum, and whether the update must be skipped.

        Waits for the device. Raises WrongResult, on all ranks.
        """
        loss_sum, _ = self.runner.forward_backward(batches)
        figures = self._figures(loss_sum, batches)
        why = self._suspicion(figures)
        if why is None:
            for name, value in figures.items():
                self.history[name].append(value)
            self.in_a_row = 0
            return loss_sum, False
        first = self._own_figures(loss_sum, batches)
        finite_norm = math.isfinite(figures["gradient norm"])
        finite = finite_norm and math.isfinite(figures["loss"])
        self.fp8.drop_casts()
        loss_sum, _ = self.runner.forward_backward(batches)
        if wrong := self._differing(first, second := self._own_figures(loss_sum, batches)):
            raise self._blame(why, wrong)
        if self.scaler.dynamic and math.isfinite(figures["loss"]) and not finite:
            return loss_sum, False  # the loss scale is too large, as it is now and then
        skip = finite_norm and (not finite or self.in_a_row < IN_A_ROW)  # else the optimizer skips
        self.in_a_row = self.in_a_row + 1 if skip else 0
        if finite and not skip:
            for values in self.history.values():
                values.clear()
        samples = self._samples(batches, second, worst="norm" if "norm" in why else "loss")
        ending = (
            "the update is skipped" if skip or not finite else "spikes in a row are a new level: the update is made"
        )
        verdict = (
            f"iteration {self.mesh.activity.step}: {why}. The step was computed again with the same result on all "
            f"ranks, so the reason is the data or the model, not a GPU; {ending}. Look at {samples} of the run's order"
        )
        if self.log is not None:
            self.log.warn(verdict)
        return loss_sum, skip

    def _figures(self, loss_sum: Tensor, batches: Sequence[CountedBatch]) -> dict[str, float]:
        """Return the mean loss and the gradients' norm of the step, over the world."""
        totals = torch.stack([*local_totals(self.mesh, loss_sum.double(), batches), self.gradients.square_sum()])
        all_reduce_(totals, self.mesh.world)
        scale = self.scaler.loss_grad(len(batches))
        loss, norm = totals[0] / totals[1], totals[2].sqrt() / (totals[1] * scale)
        figures = torch.stack([loss, norm])
        return dict(zip(FLOORS, [0.0, 0.0] if figures.is_meta else figures.tolist(), strict=True))  # meta: a dry run

    def _suspicion(self, figures: dict[str, float]) -> str | None:
        """Describe the suspicious figure of a step; None if there is none."""
        for name, value in figures.items():
            if not math.isfinite(value):
                return f"the {name} is {value}"
        for name, value in figures.items():
            past = self.history[name]
            if len(past) >= MIN_HISTORY:
                usual = median(past)
                spread = max(1.4826 * median(abs(x - usual) for x in past), FLOORS[name] * usual)
                if value > usual + SPREADS * spread:
                    return (
                        f"the {name} is {value:.4g}, and was {usual:.4g} +- {spread:.2g} in the last {len(past)} steps"
                    )
        return None

    def _own_figures(self, loss_sum: Tensor, batches: Sequence[CountedBatch]) -> Tensor:
        """Return [loss sum, norms of unsummed gradients, of sums of the node, of the slice of all sums], float64."""
        loss_sum, _ = local_totals(self.mesh, loss_sum.double(), batches)
        own, of_node, summed = torch.zeros(3, dtype=torch.float64, device=loss_sum.device)
        for bucket in self.gradients.buckets:
            for part in bucket.slice_comm.unsummed(bucket.grad):
                own += bucket.square_sum(part)
            for part in bucket.slice_comm.of_other_nodes(bucket.grad):
                of_node += bucket.square_sum(part)
            if not (bucket.key.sum_over_tp or bucket.key.tied):  # those are sums over other axes, too
                total = summed if self.mesh.dp_cp.size > 1 else own
                total += bucket.square_sum(bucket.grad_slice)
        return torch.stack([loss_sum, own.sqrt(), of_node.sqrt(), summed.sqrt()])

    def _differing(self, first: Tensor, second: Tensor) -> list[int]:
        """List the ranks whose figures differ from those of their first run. Collective over the world."""
        everyone = self._gathered(torch.stack([first, second]))
        both_nan = everyone.isnan().all(1)
        same = both_nan | torch.isclose(everyone[:, 0], everyone[:, 1], rtol=TOLERANCE, atol=0.0)
        wrong = ~same[:, :2].all(1), ~same[:, 2], ~same[:, 3]  # figures that fewer ranks have computed come first
        return torch.nonzero(next((ranks for ranks in wrong if ranks.any()), wrong[-1])).flatten().tolist()

    def _blame(self, why: str, wrong: Sequence[int]) -> WrongResult:
        """Return the error that this rank raises. Collective over the world."""
        places = gather_rank_locations(self.mesh)
        named = "; ".join(f"rank {rank} on {places[rank]}" for rank in wrong)
        of_one_node = len({places[rank].partition(" GPU ")[0] for rank in wrong}) == 1
        text = (
            f"iteration {self.mesh.activity.step}: {why}. The step was computed again from the same data and weights, "
            f"and {listed(wrong)} got a different result: {named}. Suspect the hardware"
            f"{' of one of them' * (len(wrong) > 1)}, and continue from the newest checkpoint"
            f"{' without that node' * of_one_node}; this step has changed nothing"
        )
        return WrongResult(text, self.mesh.rank in wrong, of_one_node)

    def _samples(self, batches: Iterable[CountedBatch], figures: Tensor, worst: str) -> str:
        """List the samples of the ranks whose figures are not finite; if there are none, of the largest figure."""
        ours = torch.cat([batch.samples for batch in batches])
        samples, everyone = self._gathered(ours), self._gathered(figures)
        bad = ~everyone[:, :2].isfinite().all(1)
        if not bad.any():
            bad[everyone[:, 1 if worst == "norm" else 0].argmax()] = True
        numbers = sorted(set(samples[bad].flatten().tolist()))
        return listed(numbers, 16, "sample")

    def _gathered(self, x: Tensor) -> Tensor:
        """Return x of all ranks [world, ...], on the host."""
        return gather_along(x.unsqueeze(0), self.mesh.world).cpu()
