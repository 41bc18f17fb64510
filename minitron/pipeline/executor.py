"""Runs a schedule: point-to-point messages plus `for action in schedule`.

The schedule says what this rank computes, sends and receives, in which order, and what each action waits for (see
schedule.py); nothing is decided here, and nothing is asked of the device. Five small tables hold what is under way:

    received        values posted for receipt
    pending_sends   values made and not yet posted for sending
    in_flight       exchanges that were posted and not yet waited for, oldest first
    saved           of each microbatch between its forward and its backward: the input, and the *edge* of the output in
                    the autograd graph. The output itself is freed once it has been sent; its backward only needs the
                    edge.
    put_off         of each microbatch between a BackwardInput and its BackwardWeight: products (deferred.py)

With one pipeline stage there are no messages, and this is plain gradient accumulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minitron.comm.activity import Stopwatch
from minitron.comm.collectives import all_reduce_, exchange
from minitron.comm.handle import Handle
from minitron.comm.mesh import Axis
from minitron.pipeline import deferred
from minitron.pipeline.deferred import Deferred
from minitron.pipeline.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Schedule,
    Transfer,
    forward_only,
)

MakeSchedule = Callable[[int, int, int], Schedule]  # pp, vp, microbatches


class Executor:
    """The pipeline of this rank's `chunks` (stage = chunk * pp + rank).

    shape, dtype: of every tensor that travels between stages, [s/cp/tp, b, h]. begin_backward(chunk, first, last):
    called before each backward and each BackwardWeight; `first` and `last` of the chunk's in this step. begin_pass():
    called before the first of some actions. put_off: where layers hand in the weight gradients of a split backward.
    make: the schedule of a training step. forwards_done: on a GPU, the end of a step's last forward.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        pp: Axis,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        begin_backward: Callable[[int, bool, bool], None],
        begin_pass: Callable[[], None],
        put_off: Deferred,
        make: MakeSchedule,
    ):
        self.chunks, self.pp, self.shape, self.dtype, self.device = chunks, pp, shape, dtype, device
        self.begin_backward, self.begin_pass, self.put_off = begin_backward, begin_pass, put_off
        self.make = make
        self.actions = lru_cache(4)(self._actions)
        self.forwards_done = torch.cuda.Event(external=True) if device.type == "cuda" else None
        # NCCL sets up a communicator in its first operation, in which every rank must take part.
        all_reduce_(torch.zeros(1, device=device), pp)

    def wait_last_forward(self) -> None:
        """Wait until the device is through with the last forward of the step.

        Its backward and the update are time enough to queue the next step, so the device does not see the wait. The
        host has not started the next step, which a signal may cancel.
        """
        if self.forwards_done is not None:
            self.forwards_done.synchronize()

    def train(self, batches: Sequence[object], seed: Tensor | float) -> Tensor:
        """Run forward and backward of every microbatch; the backward of a loss sum begins with `seed`.

        Gradients end up in the parameters' main_grad. Returns the sum of the loss sums, 0 on ranks without the last
        stage.
        """
        run = self.begin(batches, seed)
        run.do(self.training(len(batches)))
        return run.finish()

    def begin(self, batches: Sequence[object], seed: Tensor | float) -> Run:
        """Start a pass. The caller runs its actions in segments."""
        return Run(self, batches, torch.ones((), device=self.device) * seed)

    def training(self, num_microbatches: int) -> tuple[Action, ...]:
        """Return this rank's actions in a step of `train`."""
        return self.actions(self.make, num_microbatches)

    def evaluate(self, batches: Sequence[object]) -> Tensor:
        """Return the sum of the loss sums in evaluation mode (no dropout), 0 on ranks without the last stage."""
        run = Run(self, batches, None)
        run.do(self.evaluation(len(batches)))
        return run.finish()

    def evaluation(self, num_microbatches: int) -> tuple[Action, ...]:
        """Return this rank's actions in `evaluate`."""
        return self.actions(forward_only, num_microbatches)

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Run the chunks in training mode, which they always are in, or in evaluation mode."""
        if training:
            yield
            return
        for chunk in self.chunks:
            chunk.eval()
        try:
            with torch.no_grad():
                yield
        finally:  # a recording may fail, and training go on
            for chunk in self.chunks:
                chunk.train()

    def _actions(self, kind: MakeSchedule, num_microbatches: int) -> tuple[Action, ...]:
        return kind(self.pp.size, len(self.chunks), num_microbatches).ranks[self.pp.rank]


class Run:
    """One pass through a schedule, and what is under way in it. seed: None in an evaluation."""

    def __init__(self, executor: Executor, batches: Sequence[object], seed: Tensor | None):
        self.executor, self.batches, self.seed = executor, batches, seed
        self.loss = torch.zeros((), device=executor.device)
        self.received: dict[Transfer, Tensor] = {}
        self.pending_sends: dict[Transfer, Tensor] = {}
        self.saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        self.put_off: dict[tuple[int, int], deque[deferred.Product]] = {}
        self.in_flight: deque[Handle[list[Tensor]]] = deque()
        self.completed = 0  # exchanges that were waited for

    def do(self, actions: Sequence[Action]) -> None:
        """Run these actions, which follow on those that were run before."""
        executor, activity = self.executor, self.executor.pp.activity
        forwards = sum(isinstance(action, Forward) for action in actions)
        executor.begin_pass()
        with executor.mode(training=self.seed is not None):
            for action in actions:
                activity.begin(action)
                stopwatch = self._stopwatch(action)
                if stopwatch is not None:
                    stopwatch.begin()
                if isinstance(action, Forward):
                    self.forward(action)
                    forwards -= 1
                    if forwards == 0 and executor.forwards_done is not None:
                        executor.forwards_done.record()
                elif isinstance(action, Backward):
                    self.backward(action)
                elif isinstance(action, BackwardWeight):
                    self.weight_gradients(action)
                else:
                    self.exchange(action)  # the device is through with it when it begins what waits for it
                    continue
                if stopwatch is not None:
                    stopwatch.end()
                activity.ended()

    def _stopwatch(self, action: Action) -> Stopwatch | None:
        """Return what times this action: in training, the rank's own work and no messages.

        A stopwatch of one microbatch takes the last forward, which waits for no gathered parameters, and the first
        backward, beside which no gradients are reduced.
        """
        stopwatch = self.executor.pp.activity.stopwatch
        if stopwatch is None or self.seed is None or isinstance(action, Exchange):
            return None
        timed = len(self.batches) - 1 if isinstance(action, Forward) else 0
        return stopwatch if not stopwatch.one_microbatch or action.mb == timed else None

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
        gradient = self.seed if gradient is None else gradient
        if isinstance(op, BackwardInput):
            with self.executor.put_off.collect() as self.put_off[op.mb, op.chunk]:
                torch.autograd.backward(edge, gradient)
        else:
            torch.autograd.backward(edge, gradient)
        if op.output is not None:
            assert x is not None and x.grad is not None
            self.pending_sends[op.output] = x.grad

    @torch.no_grad()
    def weight_gradients(self, op: BackwardWeight) -> None:
        self.executor.begin_backward(op.chunk, False, op.last)
        deferred.run(self.put_off.pop((op.mb, op.chunk)))

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

    def join(self) -> None:
        """Wait, on a GPU by its stream, for all messages under way: their other ends are posted by now, too."""
        self._wait_for(self.completed + len(self.in_flight))

    def finish(self) -> Tensor:
        """End the pass; return the sum of its loss sums, 0 on ranks without the last stage."""
        self.join()
        tables = self.received, self.pending_sends, self.saved, self.put_off
        assert not any(tables), "the schedule left values unused"
        return self.loss

    def _input(self, op: Forward | Backward) -> Tensor | None:
        self._wait_for(op.after)
        return None if op.input is None else self.received.pop(op.input)

    def _wait_for(self, exchanges: int) -> None:
        """Wait, on a GPU by its stream, until the first so many exchanges are complete."""
        while self.completed < exchanges:
            self.in_flight.popleft().wait()
            self.completed += 1
