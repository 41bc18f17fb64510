"""Runs a schedule: point-to-point messages plus `for action in schedule`.

The schedule holds what this rank computes, sends and receives, in which order, and what each action waits for
(schedule.py). The executor makes no decisions, and reads nothing from the device. Five tables hold what is under way:

    received        values posted for receipt
    pending_sends   values that are ready and not yet posted for sending
    in_flight       exchanges that are posted and not yet waited for, oldest first
    saved           the input and the *edge* of the output in the autograd graph, from a microbatch's forward to its
                    backward. The backward only needs the edge, so the output is freed once it is sent.
    deferred        weight gradients of a microbatch, from its BackwardInput to its BackwardWeight (weight_queue.py)

With one pipeline stage there are no messages, and this is plain gradient accumulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minitron.comm.activity import Stopwatch
from minitron.comm.collectives import all_reduce_, exchange
from minitron.comm.handle import Handle
from minitron.comm.mesh import Mesh
from minitron.pipeline.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Operation,
    Schedule,
    Transfer,
    forward_only,
)
from minitron.pipeline.weight_queue import WeightGradient, WeightQueue, run_queue

MakeSchedule = Callable[[int, int, int], Schedule]  # pp, vp, microbatches


class Executor:
    """The pipeline of this rank's `chunks` (stage = chunk * pp + rank).

    A chunk is called with a batch, the hidden states of the stage before and the gradient of the loss (see `run`).
    shape, dtype: those of every tensor that travels between stages, [s/cp/tp, b, h]. begin_backward(chunk, last):
    called before each backward and each BackwardWeight; last: whether it is the chunk's last in this step.
    begin_pass(): called before the first action of a pass, and of each of its segments. weight_queue: layers add the
    weight gradients of a split backward to it. make: makes the schedule of a training step. last_forward_done: on a
    GPU, the event at the end of a step's last forward.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        begin_backward: Callable[[int, bool], None],
        begin_pass: Callable[[], None],
        weight_queue: WeightQueue,
        make: MakeSchedule,
    ):
        self.chunks, self.pp, self.device, self.shape, self.dtype = chunks, mesh.pp, mesh.device, shape, dtype
        self.begin_backward, self.begin_pass = begin_backward, begin_pass
        self.weight_queue, self.make = weight_queue, make
        self.actions = lru_cache(4)(self._actions)
        self.last_forward_done = torch.cuda.Event(external=True) if mesh.device.type == "cuda" else None
        # NCCL sets up a communicator in its first operation, in which every rank must take part.
        all_reduce_(torch.zeros(1, device=mesh.device), mesh.pp)

    def run(self, batches: Sequence[object], loss_grad: Tensor | float | None) -> Tensor:
        """Run all microbatches; return the sum of their loss sums, 0 on ranks without the last stage.

        loss_grad: the gradient with which the backward of a loss sum begins. Gradients are added to the parameters'
        main_grad. None: run the forwards alone, in evaluation mode (no dropout).
        """
        run = Pass(self, batches, loss_grad)
        run.run_actions(self.actions(len(batches), loss_grad is not None))
        return run.finish()

    def wait_last_forward(self) -> None:
        """Wait until the device has finished the last forward of the step.

        The backward and the update give the host enough time to queue the next step, so the device does not idle. A
        signal that comes before this wait ends can still cancel the next step.
        """
        if self.last_forward_done is not None:
            self.last_forward_done.synchronize()

    def _actions(self, num_microbatches: int, training: bool) -> tuple[Action, ...]:
        """Return this rank's actions of a pass."""
        make = self.make if training else forward_only
        return make(self.pp.size, len(self.chunks), num_microbatches).ranks[self.pp.rank]


class Pass:
    """One pass through a schedule, and what is under way in it. The caller may run its actions in segments.

    loss_grad: see Executor.run.
    """

    def __init__(self, executor: Executor, batches: Sequence[object], loss_grad: Tensor | float | None):
        self.executor, self.batches = executor, batches
        self.loss_grad = None if loss_grad is None else torch.ones((), device=executor.device) * loss_grad
        self.loss = torch.zeros((), device=executor.device)
        self.received: dict[Transfer, Tensor] = {}
        self.pending_sends: dict[Transfer, Tensor] = {}
        self.saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        self.deferred: dict[tuple[int, int], deque[WeightGradient]] = {}
        self.in_flight: deque[Handle[list[Tensor]]] = deque()
        self.completed = 0  # exchanges that this rank has waited for
        if (stopwatch := self._stopwatch(None)) is not None:
            stopwatch.begin()

    def run_actions(self, actions: Sequence[Action]) -> None:
        """Run these actions, which follow those that were run before."""
        executor, training = self.executor, self.loss_grad is not None
        executor.begin_pass()
        for chunk in executor.chunks:
            if chunk.training != training:
                chunk.train(training)
        with torch.set_grad_enabled(training):
            for action in actions:
                executor.pp.activity.begin(action)
                match action:
                    case Forward():
                        self._compute(self.forward, action)
                    case Backward():  # and BackwardInput, its subclass
                        self._compute(self.backward, action)
                    case BackwardWeight():
                        self._compute(self.weight_gradients, action)
                    case Exchange():
                        self.exchange(action)

    def _compute(self, work: Callable[[Any], None], op: Operation) -> None:
        """Run work(op), timed, and note its end. Exchanges are not noted: the operation that needs one waits for it."""
        stopwatch = self._stopwatch(op)
        if stopwatch is not None:
            stopwatch.begin()
        work(op)
        if stopwatch is not None:
            stopwatch.end()
        self.executor.pp.activity.ended()

    def _stopwatch(self, op: Operation | None) -> Stopwatch | None:
        """Return the stopwatch if it times this operation, or if it times the whole pass and op is None; else None.

        Evaluations are not timed. If one microbatch is timed instead of the pass, its times are those of the last
        forward, when no gather runs any more, and of the first backward, when no reduction runs yet.
        """
        stopwatch = self.executor.pp.activity.stopwatch
        if stopwatch is None or self.loss_grad is None or stopwatch.one_microbatch == (op is None):
            return None
        timed = len(self.batches) - 1 if isinstance(op, Forward) else 0
        return stopwatch if op is None or op.mb == timed else None

    def forward(self, op: Forward) -> None:
        x = self._input(op)
        if x is not None and self.loss_grad is not None:
            x.requires_grad_()
        y = self.executor.chunks[op.chunk](self.batches[op.mb], x, self.loss_grad)
        if self.loss_grad is not None:
            self.saved[op.mb, op.chunk] = x, get_gradient_edge(y)
        if op.output is None:
            self.loss += y.detach()
        else:
            self.pending_sends[op.output] = y.detach()
        if op.last and self.executor.last_forward_done is not None:
            self.executor.last_forward_done.record()

    def backward(self, op: Backward) -> None:
        x, edge = self.saved.pop((op.mb, op.chunk))
        gradient = self._input(op)
        self.executor.begin_backward(op.chunk, op.last)
        gradient = self.loss_grad if gradient is None else gradient
        if isinstance(op, BackwardInput):
            with self.executor.weight_queue.collect() as self.deferred[op.mb, op.chunk]:
                torch.autograd.backward(edge, gradient)
        else:
            torch.autograd.backward(edge, gradient)
        if op.output is not None:
            assert x is not None and x.grad is not None
            self.pending_sends[op.output] = x.grad

    @torch.no_grad()
    def weight_gradients(self, op: BackwardWeight) -> None:
        self.executor.begin_backward(op.chunk, op.last)
        run_queue(self.deferred.pop((op.mb, op.chunk)))

    def exchange(self, action: Exchange) -> None:
        self._wait_for(action.after)
        executor = self.executor
        sends = [(t.peer, self.pending_sends.pop(t).contiguous()) for t in action.sends]
        recvs = [
            (t.peer, torch.empty(executor.shape, dtype=executor.dtype, device=executor.device)) for t in action.recvs
        ]
        self.in_flight.append(exchange(executor.pp, sends, recvs))
        self.received |= {t: value for t, (_, value) in zip(action.recvs, recvs)}

    def join(self) -> None:
        """Wait for all messages under way; on a GPU the stream waits. All peers have posted their ends by now."""
        self._wait_for(self.completed + len(self.in_flight))

    def finish(self) -> Tensor:
        """End the pass; return the sum of its loss sums."""
        self.join()
        tables = self.received, self.pending_sends, self.saved, self.deferred
        assert not any(tables), "the schedule left values unused"
        if (stopwatch := self._stopwatch(None)) is not None:
            stopwatch.end()
        return self.loss

    def _input(self, op: Operation) -> Tensor | None:
        self._wait_for(op.after)
        return None if op.input is None else self.received.pop(op.input)

    def _wait_for(self, exchanges: int) -> None:
        """Wait for the first `exchanges` of this pass; on a GPU the stream waits."""
        while self.completed < exchanges:
            self.in_flight.popleft().wait()
            self.completed += 1


def local_totals(mesh: Mesh, loss_sum: Tensor, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the world's sums of losses and tokens: 0 except on tp rank 0 of the last stage.

    batches: the `count` of each is its number of tokens that have a loss.
    """
    counts = mesh.tp.rank == 0 and mesh.pp.rank == mesh.pp.size - 1
    count = torch.full((), sum(b.count for b in batches) * counts, dtype=torch.float64, device=mesh.device)
    return loss_sum * counts, count
