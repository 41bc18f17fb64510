"""Runs a schedule: point-to-point messages plus `for action in schedule`.

The schedule says what this rank computes, sends and receives, and in which order (see schedule.py); nothing is
decided here. Four small tables hold what is under way:

    received   values posted for receipt, each waited for when the operation that needs it runs
    outbox     values made and not yet posted for sending
    flights    exchanges that were posted and whose messages may still be on their way
    saved      of each microbatch between its forward and its backward: the input, and the *edge* of the output in the
               autograd graph. The output itself is freed once it has been sent; its backward only needs the edge.

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
from minitron.pipeline.schedule import (
    Action,
    Backward,
    Exchange,
    Forward,
    Schedule,
    Transfer,
    forward_only,
    input_of,
    make,
    output_of,
)


class Executor:
    """The pipeline of this rank's `chunks` (stage = chunk * pp + rank).

    shape, dtype: of every tensor that travels between stages, [s/cp/tp, b, h]. on_last_backward(chunk): called before
    the chunk's last backward of a step, when gradients may be reduced as they come.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        pp: Axis,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        on_last_backward: Callable[[int], None],
    ):
        self.chunks, self.pp, self.shape, self.dtype, self.device = chunks, pp, shape, dtype, device
        self.on_last_backward = on_last_backward
        self.actions = lru_cache(4)(self._actions)
        # NCCL sets a communicator up at its first collective, in which every rank must take part.
        all_reduce_(torch.zeros(1, device=device), pp)

    def train(self, batches: Sequence, seed: Tensor | float) -> Tensor:
        """Forward and backward of every microbatch; the loss sums are multiplied by `seed` before the backward.

        Gradients end up in the parameters' main_grad. Returns the sum of the loss sums, 0 on ranks without the last
        stage.
        """
        seed = torch.ones((), device=self.device) * seed
        return self._run(self.actions(make, len(batches)), batches, seed)

    @torch.no_grad()
    def evaluate(self, batches: Sequence) -> Tensor:
        """The sum of the loss sums in evaluation mode (no dropout), 0 on ranks without the last stage."""
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
        self.received: dict[Transfer, tuple[Tensor, Pending]] = {}
        self.outbox: dict[Transfer, Tensor] = {}
        self.saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        self.flights: deque[Pending] = deque()  # whose sends may not have left

    def forward(self, op: Forward) -> None:
        x = self._take(input_of(op, *self._place()))
        if x is not None and self.seed is not None:
            x.requires_grad_()
        y = self.executor.chunks[op.chunk](self.batches[op.mb], x)
        if self.seed is not None:
            self.saved[op.mb, op.chunk] = x, get_gradient_edge(y)
        output = output_of(op, *self._place())
        if output is None:
            self.loss += y.detach()
        else:
            self.outbox[output] = y.detach()

    def backward(self, op: Backward) -> None:
        x, edge = self.saved.pop((op.mb, op.chunk))
        gradient = self._take(input_of(op, *self._place()))
        if op.last:
            self.executor.on_last_backward(op.chunk)
        torch.autograd.backward(edge, self.seed if gradient is None else gradient)
        output = output_of(op, *self._place())
        if output is not None:
            self.outbox[output] = x.grad

    def exchange(self, action: Exchange) -> None:
        while self.flights and self.flights[0].is_completed():
            self.flights.popleft()
        sends = [(t.peer, self.outbox.pop(t).contiguous()) for t in action.sends]
        recvs = [
            (t.peer, torch.empty(self.executor.shape, dtype=self.executor.dtype, device=self.executor.device))
            for t in action.recvs
        ]
        flight = exchange(self.executor.pp, sends, recvs)
        self.flights.append(flight)
        for t, (_, value) in zip(action.recvs, recvs):
            self.received[t] = value, flight

    def finish(self) -> Tensor:
        for flight in self.flights:
            flight.wait()
        assert not (self.received or self.outbox or self.saved), "the schedule left values unused"
        return self.loss

    def _take(self, t: Transfer | None) -> Tensor | None:
        if t is None:
            return None
        value, flight = self.received.pop(t)
        flight.wait()
        return value

    def _place(self) -> tuple[int, int, int]:
        return self.executor.pp.rank, self.executor.pp.size, len(self.executor.chunks)
