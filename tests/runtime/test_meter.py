"""What a step's samples amount to."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from layouts import LLAMA, config
from minitron.comm.mesh import Mesh
from minitron.data.gpt import Sample
from minitron.data.loader import Loader
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
    squares, padding = [(4**2 + 12**2, 0), (7**2 + 3**2, 6)][mesh.dp.rank]
    batch = SimpleNamespace(samples=range(3), documents=(), squared_lengths=squares, padding=padding)
    meter.after(StepDone(5, 10, 0.25, [batch], torch.tensor([3.0, 2.0, 0.0, 1.0, 8.0], dtype=torch.float64)))
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
