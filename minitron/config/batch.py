"""How many samples a step has: always the same number, a linear ramp, or steps of a schedule.

Early in training gradients of few samples agree already, so small batches learn more from the same tokens. The size of
a step is a function of the samples trained before it, so a run resumes in any phase without any state:

    train.batch_ramp=[2,2,12], global_batch_size=8     sizes 2, 4, 6, 8, from 0, 4, 8 and 12 samples on

    step            1  2  3  4   5   6               batch_schedule=[[0,2],[4,4],[8,6],[12,8]] is the same
    samples         2  2  4  6   8   8
    trained after   2  4  8  14  22  30

Both count as Megatron-LM does: --rampup-batch-size START INCREMENT SAMPLES, and --step-batch-size-schedule, whose
thresholds are tokens there, so divide them by train.seq_len. A ramp comes from GPT-3 (Brown et al. 2020).

`data.skip_samples` leaves ranges of the data out, as after a spike of the loss. `consumed_samples`, in logs and
checkpoints, includes skipped samples: it is the index of the next sample in the data. Trained samples exclude them.
Batch sizes and learning rates depend on trained samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from minitron.config.schema import Config, TrainConfig, changed

Ranges = Sequence[tuple[int, int]]  # samples [first, end), in order
NEVER = 1 << 62  # samples


def batch_stages(t: TrainConfig) -> Sequence[tuple[int, int]]:
    """Return (samples trained, samples of each step from then on), in order; the first stage begins at 0."""
    if t.batch_ramp is None:
        return t.batch_schedule or [(0, t.global_batch_size)]
    start, increment, samples = t.batch_ramp
    count = (t.global_batch_size - start) // increment
    return [(-(-samples * i // count), start + i * increment) for i in range(count + 1)]


def batch_size(t: TrainConfig, trained: int) -> int:
    """Return how many samples the step has that begins after `trained` samples."""
    return [size for first, size in batch_stages(t) if first <= trained][-1]


def trained_after(t: TrainConfig, steps: int, trained: int = 0) -> int:
    """Return the samples that are trained after `steps` more steps."""
    for (_, size), (until, _) in pairwise([*batch_stages(t), (NEVER, 0)]):
        here = min(steps, max(0, -((trained - until) // size)))
        trained, steps = trained + here * size, steps - here
    return trained


def trained_of(skipped: Ranges, consumed: int) -> int:
    """Return how many of the first `consumed` samples of the data are trained."""
    return consumed - sum(max(0, min(consumed, end) - first) for first, end in skipped)


def consumed_of(skipped: Ranges, trained: int) -> int:
    """Return the index in the data of the sample that comes after `trained` samples."""
    for first, end in skipped:
        if trained >= first:
            trained += end - first
    return trained


def final(cfg: Config) -> Config:
    """Return a configuration in which every step has the last batch size, and no sample is left out."""
    return changed(cfg, train=dict(batch_ramp=None, batch_schedule=()), data=dict(skip_samples=()))
