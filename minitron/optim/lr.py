"""The learning rate as a function of the samples consumed: linear warm-up, then cosine, linear or constant.

        lr  |      /`-.
            |    /     `.                      warm-up from 0 to lr, decay to min_lr, then min_lr for ever;
     min_lr |  /         `-.________           `constant_steps` says how many steps before its end a run gets there
            |/______________________ samples
             0   warmup   decay   end

Everything is counted in samples, as in Megatron-LM: a limit given in steps is worth `global_batch_size` samples a step.
So limits in steps and in samples can be combined, and a function of one number resumes without any state. With a
warm-up of 216,320 samples to 1e-4, the rate at 960 samples is 960 / 216320 * 1e-4 = 4.438e-7.

Which samples count for a step? The rate of step n is that of the samples consumed *including* step n, and this is what
the log line shows beside them. Megatron-LM prints the same number but uses it one step later (its first step has rate
0). A step that was skipped for a gradient that is not finite advances the schedule like any other: only the device
knows that it was skipped, and nothing is read back.

Left out: a decay of the weight decay, inverse-square-root and warm-up-stable-decay schedules.
"""

from __future__ import annotations

import math

from minitron.config.schema import OptimizerConfig


def learning_rate(cfg: OptimizerConfig, consumed_samples: int, *, global_batch_size: int, total_steps: int) -> float:
    """Return the rate of the step after which `consumed_samples` are consumed.

    total_steps: of the run; the decay's length follows from it where cfg gives none.
    """
    warmup = cfg.warmup_samples if cfg.warmup_samples is not None else cfg.warmup_steps * global_batch_size
    if cfg.decay_samples is not None:
        decay = cfg.decay_samples
    elif cfg.decay_steps is not None:
        decay = cfg.decay_steps * global_batch_size
    else:
        decay = (total_steps - cfg.constant_steps) * global_batch_size

    if consumed_samples <= warmup:
        return cfg.lr * consumed_samples / warmup if warmup else cfg.lr
    if cfg.lr_schedule == "constant":
        return cfg.lr
    if consumed_samples >= decay:
        return cfg.min_lr
    done = (consumed_samples - warmup) / (decay - warmup)
    share = 1 - done if cfg.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return cfg.min_lr + share * (cfg.lr - cfg.min_lr)
