"""Kernels that cast what they compute to FP8, beside the passes whose place they take.

    python benchmarks/casts.py [--tiles]

Each row is one tensor of a layer's step at its local shape: the time of the separate passes, of the kernel, and the
kernel's bytes per second, to be held against a copy's. Bytes are those that must move: every input once, every result
once. `--tiles` also times other tiles than kernels/fused.py has, and names the best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch
from torch import Tensor

from benchmarks import floor
from minitron.comm.mesh import Axis
from minitron.kernels import plain
from minitron.kernels.fp8_scales import FP8_DTYPES
from minitron.kernels.gemm import CastInto

# name: rows and width per rank: an MLP's inner values, the gradient of qkv, the residual stream between layers
SHAPES = {
    "GPT-3 175B, s 2048, tp 4": {"gelu": (2048, 12288), "cast": (2048, 9216), "layer norm": (512, 12288)},
    "GPT-3 175B, s 2048, tp 2": {"gelu": (2048, 24576), "cast": (2048, 18432), "layer norm": (1024, 12288)},
    "Llama-3 8B, s 8192": {"swiglu": (8192, 14336), "norm": (8192, 4096)},
    "Llama-3 8B, LoRA, s 4096": {"swiglu, rows alone": (4096, 14336)},
    "Llama-3 70B, s 8192, tp 2": {"swiglu": (8192, 14336), "norm": (4096, 8192)},
}
TILES = [(32, 64, 4), (64, 64, 4), (64, 64, 8), (64, 128, 8), (128, 64, 8), (32, 128, 4), (128, 128, 16), (32, 256, 8)]
TILES += [(8, 512, 8), (2, 2048, 8)]
REPEATS = 20
Call = Callable[[], object]


def cases(of: str, m: int, f: int) -> dict[str, tuple[int, Call, Call]]:
    """By operation: the bytes that must move, the passes as they were, the kernel."""
    from minitron.kernels import fp8_te, fused  # a GPU's; without one there is still --help

    of, *alone = of.split(", ")  # frozen weights have no gradient, which would read the values by columns
    device, te, scale = torch.device("cuda"), fp8_te.TeFp8(), torch.ones(1, device="cuda")
    amax, wide = torch.zeros(1, device=device), f * (2 if of == "swiglu" else 1)
    x = torch.randn(m, wide, dtype=torch.bfloat16, device=device)
    dy = torch.randn(m, f, dtype=torch.bfloat16, device=device)

    def cast(value: Tensor, role: str) -> object:
        return te.cast(value, role, Axis.single(), (scale, amax), not alone)

    def summed(value: Tensor) -> object:
        return value.sum(0, dtype=torch.float32), cast(value, "dy")

    if "norm" in of:
        weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0]) if of == "layer norm" else None
        inputs = (x, dy, bias), weight, bias, 1e-5

        def normed() -> object:
            cast = fused.add_norm(*inputs, CastInto(scale, amax, FP8_DTYPES["x"]))[1]
            return (
                te.transpose(cast.rowwise) if m == 8192 else cast
            )  # ranks of tp gather rows; one GPU transposes later

        passes = lambda: te.cast(fused.add_norm(*inputs)[1], "x", Axis.single(), (scale, amax), m == 8192)
        return {f"{of} and cast": ((9 if m == 8192 else 7) * m * f, passes, normed)}
    if of == "cast":
        mine = lambda: fused.cast(x, CastInto(scale, amax, FP8_DTYPES["dy"], True))
        return {"cast": (4 * m * f, lambda: cast(x, "dy"), mine)}
    (forward, backward), (mine, gradient) = (
        [getattr(module, f"{of}_{way}") for way in ("forward", "backward")]
        for module in (plain if of == "gelu" else fused, fused)
    )
    bias = of == "gelu"
    found: dict[str, tuple[int, Call, Call]] = {
        f"{of} and cast": (
            m * (2 * wide + (1 if alone else 2) * f),
            lambda: cast(forward(x), "x"),
            lambda: mine(x, CastInto(scale, amax, FP8_DTYPES["x"], not alone)),
        ),
        f"{of} backward and cast": (
            m * (2 * f + (3 if alone else 4) * wide),
            lambda: summed(backward(dy, x)[0]) if bias else cast(backward(dy, x)[0], "dy"),
            lambda: gradient(dy, x, bias, CastInto(scale, amax, FP8_DTYPES["dy"], not alone)),
        ),
    }
    if bias:
        found["gelu backward and sum, bf16"] = (
            m * 6 * f,
            lambda: plain.gelu_backward(dy, x, True),
            lambda: fused.gelu_backward(dy, x, True),
        )
    return found


def seconds(call: Call) -> float:
    """Seconds of one call, replayed as in a recorded step: no time of the host, and nothing of it in the L2 cache."""
    other = torch.empty(2**27, dtype=torch.uint8, device="cuda")  # more than fits into the cache

    def replayed(*calls: Call) -> float:
        for one in calls:
            one()  # compile
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPEATS):
                for one in calls:
                    one()
        return floor.seconds(graph.replay, other.device, 5) / REPEATS

    return replayed(other.zero_, call) - replayed(other.zero_)


def timed_with(tile: tuple[int, int, int], kernel: Call) -> float:
    """Seconds of the kernel with this tile."""
    from minitron.kernels import fused

    every = fused.BlockShape(*tile)
    with mock.patch.multiple(fused, BLOCK_SHAPES=dict.fromkeys(fused.BLOCK_SHAPES, every), ROWS_ALONE=every):
        return seconds(kernel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tiles", action="store_true", help="time other tiles too")
    tiles = parser.parse_args().tiles
    source = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    copy = 2 * source.nbytes / seconds(source.clone)
    print(f"a copy of {source.nbytes / 2**20:g} MiB: {copy / 1e9:.0f} GB/s")
    print(f"{'model':27} {'operation':30} {'passes us':>10} {'kernel us':>10} {'GB/s':>6}  of a copy")
    for model, shapes in SHAPES.items():
        for of, (m, f) in shapes.items():
            for name, (nbytes, passes, kernel) in cases(of, m, f).items():
                before, now, best = seconds(passes), seconds(kernel), ""
                rate = nbytes / now
                if tiles:
                    times = {tile: timed_with(tile, kernel) for tile in TILES}
                    tile = min(times, key=times.__getitem__)
                    best = f"  best tile {tile}: {1e6 * times[tile]:.1f} us"
                figures = f"{1e6 * before:10.1f} {1e6 * now:10.1f} {rate / 1e9:6.0f} {rate / copy:9.0%}"
                print(f"{model:27} {name:30} {figures}{best}")


if __name__ == "__main__":
    main()
