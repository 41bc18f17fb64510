"""What a step's samples amount to."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from layouts import LLAMA, config
from minitron.comm.mesh import Mesh
from minitron.data.gpt import Sample
from minitron.data.loader import Loader
from minitron.runtime import meter as meters
from minitron.runtime.meter import Meter
from minitron.runtime.observer import StepDone


def test_padding_is_no_document():
    """The last document of a sample is what fills it, where it has padding."""
    train = {"seq_len": 16, "micro_batch_size": 3, "global_batch_size": 3}
    together, apart = (config(LLAMA, {"train": train, "data": {"separate_documents": on}}) for on in (False, True))

    def squares(cfg, *padding):
        starts = [5, 12], [], [3]
        samples = [Sample(np.arange(17), np.array(x, np.int32), padding=n) for x, n in zip(starts, padding)]
        (batch,) = Loader(samples, cfg, Mesh.offline()).step(0, 1)
        assert batch.padding == sum(padding)
        return batch.squared_lengths

    assert squares(apart, 4, 0, 0) == 5**2 + 7**2 + 16**2 + 3**2 + 13**2
    assert squares(apart, 0, 0, 0) == squares(apart, 4, 0, 0) + 4**2 == squares(apart, 0, 2, 3) + 2**2 + 3**2
    assert squares(together, 0, 0, 0) == 0


def step_of_a_rank(**shape):
    """What each of 4 ranks, of which 2 read the same samples, logs of a step."""
    mesh, logged = Mesh.create(**shape), []
    log, received = SimpleNamespace(iteration=logged.append), []
    meter = Meter(log, mesh, lambda: (0, 0), list, [SimpleNamespace(on_figures=received.append)])
    microbatches = [[(4**2, 0), (12**2, 0)], [(7**2, 2), (3**2, 4)]][mesh.dp.rank]
    batches = [
        SimpleNamespace(samples=range(size), documents=(), squared_lengths=squares, padding=padding)
        for size, (squares, padding) in zip((2, 1), microbatches)
    ]
    meter.after(StepDone(5, 10, 0.25, batches, torch.tensor([3.0, 2.0, 0.0, 1.0, 8.0], dtype=torch.float64)))
    assert received == logged
    return logged


@pytest.mark.parametrize("shape", [{"tp": 2}, {"cp": 2}], ids=str)
def test_a_step_s_figures_are_the_worlds(ranks, shape):
    """Sums over data ranks, of which each counts once however many ranks read its samples; the others as they came."""
    for (it,) in ranks(4, step_of_a_rank, **shape):
        assert it.batch_size == 2 * 3
        assert (it.loss, it.grad_norm, it.skipped, it.nan, it.loss_scale) == (3.0, 2.0, 0.0, 1.0, 8.0)
        assert (it.step, it.consumed_samples, it.lr) == (5, 10, 0.25) and it.seconds >= 0
        assert it.squared_lengths == 4**2 + 12**2 + 7**2 + 3**2 and it.padding == 6


def test_a_step_s_seconds_and_its_waits(monkeypatch):
    """From the step before, or from the end of what came between. Waits count up to the whole step, none below 0."""
    now, logged, stalls = [10.0], [], []

    class Moment:
        def __init__(self, _):
            self.at = now[0]

        def seconds_since(self, earlier):
            return self.at - earlier.at

    def wait(seconds):
        now[0] -= seconds
        stalls.append((Moment(None), Moment(now.__setitem__(0, now[0] + seconds))))

    monkeypatch.setattr(meters, "DeviceTime", Moment)
    log, taken = SimpleNamespace(iteration=logged.append), lambda: [stalls.pop() for _ in stalls[:]]
    meter = Meter(log, Mesh.offline(), lambda: (0, 0), taken, [])
    batch = SimpleNamespace(samples=range(3), documents=None, squared_lengths=99, padding=99)
    for step, (until, waits, again) in enumerate([(13, (0.5, -1.0, 1.0), 0), (14, (0.75, 0.75), 19), (22, (), 0)], 1):
        now[0] = until
        for seconds in waits:
            wait(seconds)
        meter.after(StepDone(step, 6 * step, 0.25, [batch] * 2, torch.zeros(5, dtype=torch.float64)))
        if again:
            now[0] = again
            meter.restart()
    assert [(it.step, it.seconds, it.stall_seconds) for it in logged] == [(1, 3.0, 1.5), (2, 1.0, 1.0), (3, 3.0, 0.0)]
    assert {(it.batch_size, it.squared_lengths, it.padding) for it in logged} == {(6, None, 0.0)}
    meter.close()
    assert len(logged) == 3
