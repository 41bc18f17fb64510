"""What a step's samples amount to."""

from types import SimpleNamespace

import pytest
import torch

from minitron.comm.mesh import Mesh
from minitron.data.loader import squared_lengths
from minitron.runtime.meter import Meter
from minitron.runtime.observer import StepDone


def test_padding_is_no_document():
    """The last document of a sample is what fills it, where it has padding."""
    documents = [(0, 5, 12, 16), (0, 16), (0, 3, 16)]
    squares = sum(map(squared_lengths, documents, (4, 0, 0)))
    assert squares == 5**2 + 7**2 + 16**2 + 3**2 + 13**2
    assert sum(map(squared_lengths, documents, (0, 0, 0))) == squares + 4**2
    assert squared_lengths(None, 0) == 0


def step_of_a_rank(**shape):
    """What each of 4 ranks, of which 2 read the same samples, logs of a step."""
    mesh, logged = Mesh.create(**shape), []
    log, received = SimpleNamespace(iteration=logged.append), []
    meter = Meter(log, mesh, lambda: (0, 0), list, received.append)
    squares, padding = [(4**2 + 12**2, 0), (7**2 + 3**2, 6)][mesh.dp.rank]
    batch = SimpleNamespace(documents=(), squared_lengths=squares, padding=padding)
    meter.after(StepDone(5, 10, 0.25, [batch], torch.tensor([3.0, 2.0, 0.0, 1.0, 8.0], dtype=torch.float64)))
    assert received == logged
    return logged


@pytest.mark.parametrize("shape", [{"tp": 2}, {"cp": 2}], ids=str)
def test_a_step_s_figures_are_the_worlds(ranks, shape):
    """Sums over data ranks, of which each counts once however many ranks read its samples; the others as they came."""
    for (it,) in ranks(4, step_of_a_rank, **shape):
        assert (it.loss, it.grad_norm, it.skipped, it.nan, it.loss_scale) == (3.0, 2.0, 0.0, 1.0, 8.0)
        assert (it.step, it.consumed_samples, it.lr) == (5, 10, 0.25) and it.seconds >= 0
        assert it.squared_lengths == 4**2 + 12**2 + 7**2 + 3**2 and it.padding == 6
