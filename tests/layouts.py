"""One toy model trained in any layout: what the invariance tests run on every rank, and how they compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from minitron.checkpoint import format, load, reader
from minitron.comm.collectives import gather_along, reduce_scatter_along
from minitron.comm.mesh import Mesh
from minitron.config import sizes
from minitron.config.schema import Config
from minitron.data.mock import MockDataset
from minitron.kernels import fp8_scales
from minitron.kernels.kernels import choose
from minitron.kernels.param import Shard
from minitron.model.gpt import GPT
from minitron.model.lora import Adapter
from minitron.optim import replicas
from minitron.optim.buckets import Gradients
from minitron.parallel.layer_context import make_layer_context
from minitron.parallel.overlap import ProcessGroupComm
from minitron.pipeline.schedule import Schedule, operations
from minitron.testing import assemble as assemble
from minitron.testing import first_gradients as first_gradients
from minitron.testing import train_toy

DATA_PARALLEL = [
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.vp=1",
    "parallel.cp=1",
    "parallel.layers_per_stage=null",
    "train.recompute=none",
]  # in the place of a recipe's layout
LLAMA = dict(
    model=dict(
        num_layers=8,
        hidden_size=32,
        ffn_hidden_size=48,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=90,
        vocab_multiple=16,
        max_positions=32,
        rope_theta=100.0,
        init_std=0.2,
    ),
    train=dict(seq_len=32, micro_batch_size=1, global_batch_size=8, steps=3),
    # eps above the noise in gradients that nearly vanish: AdamW would blow it up to whole steps
    optimizer=dict(lr=1e-3, min_lr=1e-4, warmup_steps=0, clip_grad=1.0, eps=1e-5),
    precision=dict(dtype="fp32"),
)
GPT3 = dict(
    LLAMA, model=dict(LLAMA["model"], family="gpt", positions="learned", tie_embeddings=True, num_kv_heads=None)
)
# What Qwen has and Llama has not: heads of a width of their own, a bias of q, k and v, norms of q and k.
QWEN = dict(LLAMA, model=dict(LLAMA["model"], head_dim=6, qkv_bias=True, qk_norm=True))


def config(base: dict | Config, *changes: dict) -> Config:
    """The default configuration with `base` and then each of `changes` laid over it: {section: {key: value}}."""
    cfg = base if isinstance(base, Config) else config(Config(), base)
    for layer in changes:
        for section, values in layer.items():
            cfg = dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **values)})
    return cfg


@contextmanager
def adapters_that_do_something():
    """Adapters made inside begin with a random B: one of zeros would leave A without a gradient."""
    original = Adapter.__init__

    def started(self, *args):
        original(self, *args)
        for factor in self.b.values():
            factor.spec = dataclasses.replace(factor.spec, std=0.1)

    Adapter.__init__ = started
    try:
        yield
    finally:
        Adapter.__init__ = original


def lowered(job: Callable, *args):
    """Run a job with constants so low that a toy reaches them.

    Gradients have many buckets, files many blocks and parameters many pieces, one thread reads ahead, and FP8's
    histories roll over after two steps.
    """
    with (
        mock.patch.multiple(sizes, BUCKET_BYTES=10_000, SLICE_BYTES=1),
        mock.patch.object(replicas, "PIECE_BYTES", 1000),
        mock.patch.object(format, "BLOCK_BYTES", 1000),
        mock.patch.object(reader, "BLOCK_BYTES", 1000),
        mock.patch.multiple(load, BLOCK_BYTES=1000, READERS=1),
        mock.patch.object(fp8_scales, "HISTORY", 2),
    ):
        return job(*args)


def mesh_of(cfg: Config) -> Mesh:
    p = cfg.parallel
    if not dist.is_initialized():
        return Mesh.offline(1)
    node = 2 if p.pp == 1 else 1  # so that small worlds have several nodes
    return Mesh.create(tp=p.tp, pp=p.pp, cp=p.cp, node_ranks=node if cfg.optimizer.reduces_in == "bf16" else None)


def dataset_of(cfg: Config) -> MockDataset:
    t = cfg.train
    return MockDataset(
        cfg.model.vocab_size, t.seq_len, t.global_batch_size * (t.steps + 1), t.seed, document_length=10.0
    )


def train_steps(cfg: Config) -> tuple[list[dict], dict]:
    """Train cfg.train.steps steps on this rank: each step's figures, and the first one's gradients by name."""
    torch.set_num_threads(1)
    return train_toy(cfg, mesh=mesh_of(cfg))


def full_gradients(gradients: Gradients) -> dict[str, torch.Tensor]:
    """{name: float32 gradient}, between finish() and the next step's first gradient. Collective over dp_cp."""
    return assemble(gradients, [bucket.grad_slice for bucket in gradients.buckets])


def part_of(whole: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """Return the part of a whole tensor that the rank of this shard holds."""
    return whole if shard is None else shard.cut(whole)


def split_backwards(pp: int, vp: int, m: int) -> Schedule:
    """A schedule of one stage that puts off weight gradients of a microbatch, as the last of two does in ZB-H1."""
    return Schedule(1, 1, m, (tuple(operations(2, 1, m, 1, "zb-h1")),))


class Pieces(ProcessGroupComm):
    """The process group's communication with the products in pieces: one for each rank's rows. Runs on CPUs."""

    def gather_matmul(self, x, product, n, keep=False):
        whole, m = [gather_along(part, self.axis) for part in x.parts()], x.rowwise.shape[0]
        pieces = [x.of(parts) for parts in zip(*(part.chunk(self.axis.size) for part in whole))]
        y = torch.empty_like(product(pieces[0])).repeat(self.axis.size, 1)
        for rank, piece in enumerate(pieces):
            product(piece, y[rank * m : (rank + 1) * m])
        return y, x.of(whole) if keep else None

    def matmul_scatter(self, x, product, n):
        m = x.rowwise.shape[0] // self.axis.size
        partial = torch.empty_like(product(x))
        for rank, out in enumerate(partial.chunk(self.axis.size)):
            product(x.cut(slice(rank * m, (rank + 1) * m)), out)
        return reduce_scatter_along(partial, self.axis)


def whole_model(cfg: Config, mesh: Mesh) -> GPT:
    """The model as one chunk, uninitialised. Collective over tp."""
    context = make_layer_context(cfg, mesh, choose(cfg, mesh.device))
    return GPT(cfg, mesh, context, range(cfg.model.num_layers), first=True, last=True)
