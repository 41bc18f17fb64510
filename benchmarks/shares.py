"""Where a step's time goes: kernels by name and by kind, exposed communication, idle time.

A profile is a list of (name, start, end). Kernels of one stream follow each other, so the times of a kind add up; but
communication runs beside compute on another stream, and what it costs is only the time in which nothing else runs:

    compute   ####  ######            busy   = union of both             idle    = window - busy
    nccl        ==      =====         exposed = busy - union of compute
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

Kernel = tuple[str, float, float]  # name, start, end, in one unit

# The first that matches; by the names that cuBLAS, cuDNN, CUTLASS, NCCL, Triton and torch give their kernels.
KINDS = {
    "nccl": r"nccl|symm|one_shot|two_shot|memcpy ptop",
    "attention": r"flash|fmha|sdpa|attention|cudnn::fusion",
    "gemm": r"gemm|nvjet|cutlass|cublas|splitk|xmma",
    "optimizer": r"adam|l2norm|multi_tensor",
    "copy": r"memcpy|memset",
    "pointwise": r"",
}


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def union(kernels: list[Kernel]) -> float:
    """Time in which at least one of them runs."""
    total, reached = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda k: k[1]):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def shares(kernels: list[Kernel]) -> dict[str, float]:
    """Fractions of the window from the first start to the last end: each kind, exposed nccl, idle."""
    window = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    busy = union(kernels)
    sums = Counter()
    for name, start, end in kernels:
        sums[kind_of(name)] += end - start
    exposed = busy - union([k for k in kernels if kind_of(k[0]) != "nccl"])
    of_kinds = {kind: sums[kind] / window for kind in KINDS}
    return of_kinds | {"nccl exposed": exposed / window, "idle": 1 - busy / window}


def table(kernels: list[Kernel], steps: int, rows: int = 30) -> str:
    """The kernels that take longest, in ms per step (times in us), and the shares."""
    spent, count = Counter(), Counter()
    for name, start, end in kernels:
        spent[name] += end - start
        count[name] += 1
    lines = [f"{'ms/step':>9} {'calls':>6}  {'kind':9}  kernel"]
    lines += [
        f"{us / 1e3 / steps:9.3f} {count[name] // steps:6d}  {kind_of(name):9}  {name[:110]}"
        for name, us in spent.most_common(rows)
    ]
    lines.append("  ".join(f"{kind} {100 * share:.1f} %" for kind, share in shares(kernels).items()))
    return "\n".join(lines)


def record(step: Callable[[int], object], steps: int, warm_up: int = 1) -> list[Kernel]:
    """The GPU's kernels and copies during `steps` calls of step(i), times in us.

    warm_up: calls that come before; ranks start their profilers up to a second apart, and would wait for each other in
    the first. The host's own events are left out, and torch's table of all events is not made: of a step of a hundred
    thousand kernels it takes longer than the step.
    """
    planned = schedule(wait=0, warmup=1, active=1) if warm_up else None
    with profile(activities=[ProfilerActivity.CUDA], schedule=planned) as profiler:
        for i in range(warm_up):
            step(i)
        torch.cuda.synchronize()
        if warm_up:
            profiler.step()
        for i in range(steps):
            step(warm_up + i)
        torch.cuda.synchronize()
    trace = profiler.profiler.kineto_results
    return [
        (e.name(), (e.start_ns() - trace.trace_start_ns()) / 1e3, (e.end_ns() - trace.trace_start_ns()) / 1e3)
        for e in trace.events()
        if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()
    ]


# ---- the option of the programs ------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", action="store_true", help="also print the kernels that take longest")


def check_profile(args: argparse.Namespace) -> None:
    """Raises ValueError for a profile without a GPU."""
    if args.profile and not torch.cuda.is_available():
        raise ValueError("--profile lists a GPU's kernels, and there is no GPU; leave it out")
