"""The GPU's own clock, read by a kernel, so that a recorded step is timed, too. See runtime/stragglers.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit
def _add_now(total, sign):
    tl.store(total, tl.load(total) + sign * globaltimer())


def add_now(total: Tensor, sign: int) -> None:
    """Add the clock's nanoseconds, times `sign`, to total, 0-d int64, when the current stream comes to it."""
    _add_now[(1,)](total, sign, num_warps=1)
