"""The floor of a step: its matrix products and attention alone, each as fast as this device runs it by itself.

Problem: MFU compares with a data-sheet peak that no kernel reaches, so it does not tell how much a trainer could
still gain. The idea: list the products and attention calls of this rank's step at their local shapes, time each
alone, add up. What is left of the measured step is all else: pointwise work, optimizer, exposed communication,
bubbles, gaps.

    Llama-3 8B, one block, s 8192: qkv [8192, 6144, 4096], out [.., 4096, 4096], up [.., 28672, 4096], down
    [.., 4096, 14336], each as y = x W^T, dx = dy W and dW += dy^T x, and causal attention forward and backward

The products are the library's plain ones, whatever the model runs instead: `mm`, `addmm` into float32, and
`_scaled_mm` with tensor-wise scales for FP8 (data already in FP8: a cast is no part of the floor; the weight gradient
is written, not accumulated, which `_scaled_mm` cannot do). Attention is the run's own backend. Left out: recomputed
forwards, since a floor repeats nothing.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minitron.config.schema import Config
from minitron.kernels.attention import Backend, Options
from minitron.kernels.gemm import DTYPES, Gemm
from minitron.kernels.kernels import choose
from minitron.kernels.rng import AttentionDropout
from minitron.model.gpt import Head
from minitron.parallel.linear import ParallelLinear
from minitron.parallel.tiles import gathered_tiles, ring_tiles
from minitron.train import Trainer


@dataclass(frozen=True)
class Product:
    """One matrix product of a linear layer with m rows, n outputs and k inputs."""

    kind: str  # "forward", "input_grad", "weight_grad" (added to float32) or "first_weight_grad" (written to float32)
    m: int
    n: int
    k: int
    fp8: bool = False
    head: bool = False  # with the vocabulary

    @property
    def operations(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def prepare(self, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
        """The product on random operands, ready to be timed."""
        rows, inner, columns = {"forward": (self.m, self.k, self.n), "input_grad": (self.m, self.n, self.k)}.get(
            self.kind, (self.n, self.m, self.k)
        )
        if self.fp8:
            return self._prepare_fp8(rows, inner, columns, dtype, device)
        if self.kind == "forward":
            x, w = _random((rows, inner), dtype, device), _random((columns, inner), dtype, device)
            return lambda: x @ w.t()
        if self.kind == "input_grad":
            dy, w = _random((rows, inner), dtype, device), _random((inner, columns), dtype, device)
            return lambda: dy @ w
        dy, x = _random((inner, rows), dtype, device).t(), _random((inner, columns), dtype, device)
        total = torch.zeros(rows, columns, device=device)
        if device.type != "cuda":
            return lambda: total.addmm_(dy.float(), x.float())
        if self.kind == "weight_grad":
            return lambda: torch.ops.aten.addmm.dtype_out(total, dy, x, torch.float32, out=total)
        return lambda: torch.ops.aten.mm.dtype_out(dy, x, torch.float32, out=total)

    def _prepare_fp8(self, rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device):
        forward, scale = self.kind == "forward", torch.ones((), device=device)
        a = _random((rows, inner), dtype, device).to(torch.float8_e4m3fn if forward else torch.float8_e5m2)
        b = _random((columns, inner), dtype, device).to(torch.float8_e4m3fn)
        out_dtype = torch.float32 if "weight" in self.kind else dtype
        # Gradients are summed in full float32 registers: what Transformer Engine does as well.
        return lambda: torch._scaled_mm(a, b.t(), scale, scale, out_dtype=out_dtype, use_fast_accum=forward)


@dataclass(frozen=True)
class AttentionCall:
    """One forward and backward of a backend: `queries` by `keys` positions, `heads` query and `kv_heads` key heads."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    causal: bool
    dropout: float = 0.0

    @property
    def operations(self) -> float:
        """Two products forward, five backward, of the pairs that the mask leaves."""
        pairs = self.queries * self.keys / (2 if self.causal else 1)
        return 14.0 * self.batch * self.heads * self.head_dim * pairs

    def prepare(self, backend: Backend, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
        def heads_of(length: int, count: int) -> Tensor:  # as the model has them: sequence first, permuted
            return _random((length, self.batch, count, self.head_dim), dtype, device).permute(1, 2, 0, 3)

        q, k, v = heads_of(self.queries, self.heads), *(heads_of(self.keys, self.kv_heads) for _ in range(2))
        dout, options = heads_of(self.queries, self.heads), Options(self.causal, self.head_dim**-0.5)
        if self.dropout:
            counters = torch.randint(2**32, (self.queries, self.batch), device=device)
            options = options._replace(dropout=AttentionDropout(self.dropout, counters, layer=0, first_head=0))

        def call():
            out, lse, saved = backend.forward(q, k, v, options)
            return backend.backward(dout, q, k, v, out, lse, saved, options)

        return call


Work = tuple[Counter[Product], Counter[AttentionCall]]  # how often a step does each


def step_work(trainer: Trainer) -> Work:
    """How often this rank's step does each product and each attention call. Samples are taken as one document each."""
    cfg, mesh = trainer.cfg, trainer.mesh
    num_mb, batch = cfg.num_microbatches(mesh.dp.size), cfg.train.micro_batch_size
    rows = cfg.train.seq_len // mesh.cp.size * batch
    products, calls = Counter(), Counter()
    for chunk in trainer.chunks:
        for layer in (m for m in chunk.modules() if isinstance(m, (ParallelLinear, Head))):
            shape = (rows, *layer.weight.shape, type(layer.op.gemm) is not Gemm, isinstance(layer, Head))
            products.update({Product("forward", *shape): num_mb, Product("input_grad", *shape): num_mb})
            if layer.weight.requires_grad:
                products.update({Product("first_weight_grad", *shape): 1, Product("weight_grad", *shape): num_mb - 1})
        for block in chunk.blocks.values():
            a, share = block.attention, mesh.cp.size if cfg.parallel.cp_style == "ulysses" else 1
            for queries, keys, causal in _attention_tiles(trainer):
                heads, kv_heads = a.heads // share, a.kv_heads // share
                calls[AttentionCall(batch, heads, kv_heads, a.head_dim, queries, keys, causal, a.dropout)] += num_mb
    return +products, +calls


def _attention_tiles(trainer: Trainer) -> list[tuple[int, int, bool]]:
    """(queries, keys, causal) of every kernel call of one layer on one microbatch."""
    s, cp, style = trainer.cfg.train.seq_len, trainer.mesh.cp, trainer.cfg.parallel.cp_style
    if cp.size == 1 or style == "ulysses":
        return [(s, s, True)]
    if style == "ring":
        tiles = [tile for source in range(cp.size) for tile in ring_tiles(s, cp.size, cp.rank, source, None)]
    else:
        tiles = ring_tiles(s, cp.size, cp.rank, cp.rank, None) + gathered_tiles(s, cp.size, cp.rank, None)
    return [(t.queries.stop - t.queries.start, t.keys.stop - t.keys.start, t.causal) for t in tiles]


def floor_seconds(work: Work, cfg: Config, device: torch.device) -> dict:
    """Seconds of all products, of the head's among them and of all attention calls of a step, each timed alone.

    Needs the device's memory: drop the trainer first.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    (products, calls), dtype, backend = work, DTYPES[cfg.precision.dtype], choose(cfg, device).attention
    timed = {p: count * seconds(p.prepare(dtype, device), device) for p, count in products.items()}
    return {
        "gemm": sum(timed.values()),
        "head": sum(time for p, time in timed.items() if p.head),
        "attention": sum(count * seconds(c.prepare(backend, dtype, device), device) for c, count in calls.items()),
    }


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Of one call: the mean of `repeats` in a row, after three that do not count. On a GPU by its own clock."""
    repeats = repeats if device.type == "cuda" else 2
    for _ in range(3):
        call()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers: a GPU draws less power, and so runs faster, on zeros."""
    return torch.randn(shape, dtype=dtype, device=device)
