"""Runs a schedule: point-to-point messages plus `for action in schedule`.

The schedule says what this rank computes, sends and receives, in which order, and what each action waits for (see
schedule.py); nothing is decided here, and nothing is asked of the device. Four small tables hold what is under way:

    received        values posted for receipt
    pending_sends   values made and not yet posted for sending
    in_flight       exchanges that were posted and not yet waited for, oldest first
    saved           of each microbatch between its forward and its backward: the input, and the *edge* of the output in
                    the autograd graph. The output itself is freed once it has been sent; its backward only needs the
                    edge.

With one pipeline stage there are no messages, and this is plain gradient accumulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minitron.comm.collectives import Pending, all_reduce_, exchange
from minitron.comm.mesh import Axis
from minitron.pipeline.schedule import Action, Backward, Exchange, Forward, Schedule, Transfer, forward_only, make


class Executor:
    """The pipeline of this rank's `chunks` (stage = chunk * pp + rank).

    shape, dtype: of every tensor that travels between stages, [s/cp/tp, b, h]. begin_backward(chunk, first, last):
    called before each backward; `first` and `last` of the chunk's backwards in this step.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        pp: Axis,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        begin_backward: Callable[[int, bool, bool], None],
    ):
        self.chunks, self.pp, self.shape, self.dtype, self.device = chunks, pp, shape, dtype, device
        self.begin_backward = begin_backward
        self.actions = lru_cache(4)(self._actions)

    def connect(self) -> None:
        """Set up the communicator of the pipeline's ranks, before the first message. Collective over pp.

        NCCL does it at a communicator's first operation, in which every rank must take part.
        """
        all_reduce_(torch.zeros(1, device=self.device), self.pp)

    def train(self, batches: Sequence, seed: Tensor | float) -> Tensor:
        """Run forward and backward of every microbatch; the backward of a loss sum begins with `seed`.

        Gradients end up in the parameters' main_grad. Returns the sum of the loss sums, 0 on ranks without the last
        stage.
        """
        seed = torch.ones((), device=self.device) * seed
        return self._run(self.actions(make, len(batches)), batches, seed)

    @torch.no_grad()
    def evaluate(self, batches: Sequence) -> Tensor:
        """Return the sum of the loss sums in evaluation mode (no dropout), 0 on ranks without the last stage."""
        for chunk in self.chunks:
            chunk.eval()
        total = self._run(self.actions(forward_only, len(batches)), batches, None)
        for chunk in self.chunks:
            chunk.train()
        return total

    def _actions(self, kind: Callable[[int, int, int], Schedule], num_microbatches: int) -> tuple[Action, ...]:
        return kind(self.pp.size, len(self.chunks), num_microbatches).ranks[self.pp.rank]

    def _run(self, actions: tuple[Action, ...], batches: Sequence, seed: Tensor | None) -> Tensor:
        run = _Run(self, batches, seed)
        activity = self.pp.activity
        for action in actions:
            activity.begin(action)
            if type(action) is Forward:
                run.forward(action)
            elif type(action) is Backward:
                run.backward(action)
            else:
                run.exchange(action)
            activity.ended(self.device)
        return run.finish()


class _Run:
    """What is under way in one pass through a schedule."""

    def __init__(self, executor: Executor, batches: Sequence, seed: Tensor | None):
        self.executor, self.batches, self.seed = executor, batches, seed
        self.loss = torch.zeros((), device=executor.device)
        self.received: dict[Transfer, Tensor] = {}
        self.pending_sends: dict[Transfer, Tensor] = {}
        self.saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        self.in_flight: deque[Pending] = deque()
        self.completed = 0  # exchanges that were waited for

    def forward(self, op: Forward) -> None:
        x = self._input(op)
        if x is not None and self.seed is not None:
            x.requires_grad_()
        y = self.executor.chunks[op.chunk](self.batches[op.mb], x)
        if self.seed is not None:
            self.saved[op.mb, op.chunk] = x, get_gradient_edge(y)
        if op.output is None:
            self.loss += y.detach()
        else:
            self.pending_sends[op.output] = y.detach()

    def backward(self, op: Backward) -> None:
        x, edge = self.saved.pop((op.mb, op.chunk))
        gradient = self._input(op)
        self.executor.begin_backward(op.chunk, op.first, op.last)
        torch.autograd.backward(edge, self.seed if gradient is None else gradient)
        if op.output is not None:
            self.pending_sends[op.output] = x.grad

    def exchange(self, action: Exchange) -> None:
        self._wait_for(action.after)
        executor = self.executor
        sends = [(t.peer, self.pending_sends.pop(t).contiguous()) for t in action.sends]
        recvs = [
            (t.peer, torch.empty(executor.shape, dtype=executor.dtype, device=executor.device)) for t in action.recvs
        ]
        self.in_flight.append(exchange(executor.pp, sends, recvs))
        for t, (_, value) in zip(action.recvs, recvs):
            self.received[t] = value

    def finish(self) -> Tensor:
        self._wait_for(self.completed + len(self.in_flight))
        assert not (self.received or self.pending_sends or self.saved), "the schedule left values unused"
        return self.loss

    def _input(self, op: Forward | Backward) -> Tensor | None:
        self._wait_for(op.after)
        return None if op.input is None else self.received.pop(op.input)

    def _wait_for(self, exchanges: int) -> None:
        """Wait, on a GPU by its stream, until the first so many exchanges are complete."""
        while self.completed < exchanges:
            self.in_flight.popleft().wait()
            self.completed += 1
