"""An executor does what its schedule says, on one rank whose neighbours are numbers: in its order, with its values."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from minitron.comm.activity import Activity
from minitron.comm.handle import Handle
from minitron.comm.mesh import Axis
from minitron.pipeline import executor
from minitron.pipeline.executor import Executor, Pass, local_totals
from minitron.pipeline.schedule import Backward, BackwardInput, Exchange, Forward, forward_only, make
from minitron.pipeline.weight_queue import WeightQueue

SCALE = 8.0  # of the loss


class Double(torch.autograd.Function):
    """y = 2 x, which notes its backward and queues a product."""

    @staticmethod
    def forward(ctx, x, note, queue):
        ctx.note, ctx.queue = note, queue
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        ctx.note("backward")
        if ctx.queue.deferring:
            ctx.queue.put(Handle, lambda _: ctx.note("weights"))
        return 2 * dy, None, None


class Chunk(nn.Module):
    """Doubles its input, or the number of its batch; the last stage adds up. It notes all that it is told."""

    def __init__(self, chunk, last_stage, said, queue):
        super().__init__()
        self.chunk, self.last_stage, self.said, self.queue = chunk, last_stage, said, queue

    def forward(self, batch, x, loss_grad):
        training = torch.is_grad_enabled()
        assert self.training == training and (loss_grad is None or loss_grad == SCALE)
        self.said.append(("forward", batch, self.chunk))
        x = torch.full((1,), 100.0 + batch, requires_grad=training) if x is None else x
        y = Double.apply(x, lambda what: self.said.append((what, batch, self.chunk)), self.queue)
        return y.sum() if self.last_stage else y


class Said(Activity):
    __slots__ = ("said",)

    def __init__(self, said):
        super().__init__()
        self.said = said

    def ended(self):
        self.said.append("ended")


def run(schedule, rank, cut):
    """Run a rank's actions in two segments. Return what happened, what was sent, and the loss."""
    said, sent, queue, values = [], [], WeightQueue(), iter(range(1, 10_000))
    axis = Axis("pp", rank, schedule.pp, tuple(range(schedule.pp)), activity=Said(said))
    mesh = SimpleNamespace(pp=axis, device=torch.device("cpu"))
    chunks = [
        Chunk(chunk, chunk * schedule.pp + rank + 1 == schedule.pp * schedule.vp, said, queue)
        for chunk in range(schedule.vp)
    ]

    def exchange(axis, sends, recvs):
        number = sum(event[0] == "post" for event in said)
        said.append(("post", [peer for peer, _ in sends], [peer for peer, _ in recvs]))
        sent.extend(float(x) for _, x in sends)
        for _, x in recvs:
            x.fill_(next(values))
        return Handle(None, [lambda: said.append(("wait", number))])

    with mock.patch.multiple(executor, exchange=exchange, all_reduce_=lambda x, axis: None):
        pipeline = Executor(
            chunks,
            mesh,
            (1,),
            torch.float32,
            begin_backward=lambda chunk, last: said.append(("begin backward", chunk, last)),
            begin_pass=lambda: said.append("begin pass"),
            weight_queue=queue,
            make=lambda *sizes: schedule,
        )
        pipeline.last_forward_done = SimpleNamespace(record=lambda: said.append("last forward"))  # as on a GPU
        grad = SCALE if schedule.training else None
        actions = pipeline.actions(schedule.num_microbatches, schedule.training)
        assert actions == schedule.ranks[rank]
        going = Pass(pipeline, range(schedule.num_microbatches), grad)
        going.run_actions(actions[:cut])
        going.run_actions(actions[cut:])
        return said, sent, float(going.finish())


def expected(schedule, rank, cut):
    """The same by the schedule alone."""
    said, sent, ready, arrived, loss, posted, waited = [], [], {}, {}, 0.0, 0, 0
    values, deferred = iter(range(1, 10_000)), []
    for i, action in enumerate(schedule.ranks[rank]):
        said += ["begin pass"] * (i in (0, cut))
        said += [("wait", number) for number in range(waited, action.after)]
        waited = max(waited, action.after)
        if isinstance(action, Exchange):
            said.append(("post", [t.peer for t in action.sends], [t.peer for t in action.recvs]))
            sent += [ready.pop(t) for t in action.sends]
            arrived |= {t: next(values) for t in action.recvs}
            posted += 1
            continue
        place = action.mb, action.chunk
        if isinstance(action, Forward):
            made = 2.0 * (100 + action.mb if action.input is None else arrived.pop(action.input))
            said += [("forward", *place), *["last forward"] * action.last]
            loss += made * (action.output is None)
        else:
            said.append(("begin backward", action.chunk, action.last))
            if isinstance(action, Backward):
                made = 2.0 * (SCALE if action.input is None else arrived.pop(action.input))
                said.append(("backward", *place))
            else:
                said.append(("weights", *place))
                deferred.remove(place)
            deferred += [place] * isinstance(action, BackwardInput)
        if action.output is not None:
            ready[action.output] = made
        said.append("ended")
    assert not ready and not arrived and not deferred
    return said + [("wait", number) for number in range(waited, posted)], sent, loss


@pytest.mark.parametrize(
    "schedule",
    [make(1, 1, 3), make(3, 1, 5), make(2, 3, 4), make(3, 2, 4), make(3, 1, 4, "zb-h1"), forward_only(2, 1, 12)],
    ids=lambda schedule: f"{schedule.pp}-{schedule.vp}-{schedule.num_microbatches}-{schedule.kind}",
)
def test_an_executor_does_what_its_schedule_says(schedule):
    for rank in range(schedule.pp):
        cut = len(schedule.ranks[rank]) // 2
        assert run(schedule, rank, cut) == expected(schedule, rank, cut), rank


@pytest.mark.parametrize("tp", [0, 1])
@pytest.mark.parametrize("pp", [0, 1])
def test_a_batch_counts_once_on_the_last_stage(pp, tp):
    mesh = SimpleNamespace(tp=SimpleNamespace(rank=tp), pp=SimpleNamespace(rank=pp, size=2), device="cpu")
    loss, count = local_totals(mesh, torch.tensor(3.0), [SimpleNamespace(count=2**24), SimpleNamespace(count=1)])
    once = pp == 1 and tp == 0
    assert count.dtype == torch.float64 and (float(loss), float(count)) == (3.0 * once, (2**24 + 1.0) * once)
