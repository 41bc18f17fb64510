"""The learning rate as a function of the samples trained: linear warm-up, then cosine, linear, constant or WSD.

        lr  |      /`-.
            |    /     `.                      warm-up from 0 to lr, decay to min_lr, then min_lr for ever;
     min_lr |  /         `-.________           `constant_steps`: how many steps before the end lr reaches min_lr
            |/______________________ samples
             0   warmup   decay   end

        lr  |      /---------.                 WSD, warm-up, stable, decay: in the decay lr falls as 1 - sqrt(fraction
     min_lr |    /            `-.____          done), the best shape in Haegele et al. 2024.
            |  /                               A run that stops while lr is stable can be resumed with more steps:
            |/______________________ samples   its rates were those of the longer run

Everything is counted in samples, as in Megatron-LM: a limit given in steps is worth the samples of these steps
(config/batch.py). So limits in steps and in samples can be combined, and a function of one number resumes without any
state. With a warm-up of 216,320 samples to 1e-4, the rate at 960 samples is 960 / 216320 * 1e-4 = 4.438e-7.

Which samples count for a step? The rate of step n is that of the samples trained *including* step n, and this is what
the log line shows beside them. Megatron-LM prints the same number but uses it one step later (its first step has rate
0). A step that was skipped for a gradient that is not finite advances the schedule like any other: the device decides
whether it is skipped, and the host does not wait for that.

Left out: a decay of the weight decay, inverse-square-root schedules, other shapes of the decay of WSD.
"""

from __future__ import annotations

import math

from minitron.config.batch import trained_after
from minitron.config.schema import OptimizerConfig, TrainConfig


def learning_rate(o: OptimizerConfig, t: TrainConfig, trained: int) -> float:
    """Return the rate of the step after which `trained` samples are trained."""
    last = t.steps - o.constant_steps if o.decay_steps is None else o.decay_steps
    end = trained_after(t, last) if o.decay_samples is None else o.decay_samples
    warmup = trained_after(t, o.warmup_steps) if o.warmup_samples is None else o.warmup_samples
    start: float = warmup
    if o.lr_schedule == "wsd":
        decay = (1 - o.wsd_decay_share) * end
        start = max(warmup, decay if o.wsd_decay_steps is None else trained_after(t, last - o.wsd_decay_steps))

    if trained <= warmup:
        return o.lr * trained / warmup if warmup else o.lr
    if o.lr_schedule == "constant" or (trained <= start and trained < end):
        return o.lr
    if trained >= end:
        return o.min_lr
    done = (trained - start) / (end - start)
    share = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "wsd": 1 - math.sqrt(done)}
    return o.min_lr + share[o.lr_schedule] * (o.lr - o.min_lr)
