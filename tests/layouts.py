"""One toy model trained in any layout: what the invariance tests run on every rank, and how they put the parts together."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from minitron.config import Config
from minitron.data.loader import Loader
from minitron.data.mock import MockDataset
from minitron.mesh import Mesh
from minitron.parallel.tensor import Shard
from minitron.train import Trainer, build

LLAMA = dict(model=dict(num_layers=8, hidden_size=32, ffn_hidden_size=48, num_heads=8, num_kv_heads=4, vocab_size=90,
                        vocab_multiple=16, max_positions=32, rope_theta=100.0, init_std=0.2),
             train=dict(seq_len=32, micro_batch_size=1, global_batch_size=8, steps=3),
             optimizer=dict(lr=1e-2, min_lr=1e-3, warmup_steps=0, clip_grad=0.0),
             precision=dict(dtype="fp32"))
GPT3 = dict(LLAMA, model=dict(LLAMA["model"], family="gpt", positions="learned", tie_embeddings=True, num_kv_heads=None))


def config(base: dict, *changes: dict) -> Config:
    """The default configuration with `base` and then each of `changes` laid over it: {section: {key: value}}."""
    cfg = Config()
    for layer in (base, *changes):
        for section, values in layer.items():
            cfg = dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **values)})
    return cfg


def mesh_of(cfg: Config) -> Mesh:
    p = cfg.parallel
    return Mesh.create(tp=p.tp, pp=p.pp, cp=p.cp) if dist.is_initialized() else Mesh.offline(1)


def dataset_of(cfg: Config) -> MockDataset:
    t = cfg.train
    return MockDataset(cfg.model.vocab_size, t.seq_len, t.global_batch_size * (t.steps + 1), t.seed, document_length=10.0)


def train_steps(cfg: Config) -> tuple[list[dict], dict]:
    """Train cfg.train.steps steps on this rank: the figures of each step, and the gradients of the first by parameter name.

    A gradient comes with how to put it back: (local tensor, None or (dim, [(local, full, length)...], full size)).
    """
    torch.set_num_threads(1)
    trainer, figures, gradients = build(cfg, mesh_of(cfg)), [], None
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    for step in range(cfg.train.steps):
        batches = loader.step(step * cfg.train.global_batch_size, step)
        figures.append(trainer.step(batches, cfg.optimizer.lr).read())
        gradients = gradients or local_gradients(trainer)
    loss, count = trainer.evaluate(loader.step(cfg.train.steps * cfg.train.global_batch_size, 0)).tolist()
    figures.append({"loss": loss / count})
    loader.close()
    return figures, gradients


def local_gradients(trainer: Trainer) -> dict:
    params = {p.global_name: p for chunk in trainer.chunks for p in chunk.parameters()}
    return {name: (grad.clone(), _how(params[name].shard)) for name, grad in trainer.gradients.full_gradients().items()}


def _how(shard: Shard | None):
    return None if shard is None else (shard.dim, shard.slices(), sum(shard.chunks))


def join_gradients(parts: list[dict]) -> dict[str, torch.Tensor]:
    """Whole gradients by name from all ranks' parts. Where several ranks have the same part the last one counts."""
    whole: dict[str, torch.Tensor] = {}
    for rank in parts:
        for name, (grad, how) in rank.items():
            if how is None:
                whole[name] = grad
                continue
            dim, slices, size = how
            shape = [*grad.shape[:dim], size, *grad.shape[dim + 1:]]
            full = whole.setdefault(name, torch.full(shape, float("nan")))
            for local, start, length in slices:
                full.narrow(dim, start, length).copy_(grad.narrow(dim, local, length))
    return whole
