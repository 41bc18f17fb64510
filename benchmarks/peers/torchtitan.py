"""Measure torchtitan 0.2.2: `torchrun --nproc-per-node N benchmarks/peers/torchtitan.py CONFIG ...`.

It reads minitron's configuration and trains torchtitan's own Llama 3, parallelized by torchtitan's functions and
stepped as its trainer does: blocks and loss compiled, FSDP with float32 weights and reduction where dp or cp is more
than 1, tensor, sequence and loss parallelism, 1F1B or interleaved pipelines, fused AdamW. With tp or pp alone its mixed
precision is off, so there weights and optimizer state are bf16, which is less work than ours. Prints figures by
minitron's counting. On CPUs it runs too, not compiled and without context parallelism. Under torch 2.13 compiled blocks
with tp end in an error of DTensor's backward pass.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in its own folder, this file would hide the package

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from benchmarks import measure
from minitron.config import cli, rules
from minitron.config.schema import Config
from minitron.config.sizes import stage_layers

try:
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import parallel_dims as titan_mesh
    from torchtitan.distributed import utils as titan
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.tools.utils import GarbageCollection, set_default_dtype
except ImportError as error:
    raise measure.skip(f"torchtitan 0.2.2 is not installed ({error}); pip install torchtitan==0.2.2") from None


def main(argv: list[str] | None = None) -> None:
    cfg, args = measure.arguments(__doc__, argv)
    world, (device, capability) = int(os.environ["WORLD_SIZE"]), measure.choose_device()
    with cli.user_errors():
        rules.check(cfg, world, capability)
        measure.check_translated(cfg, "torchtitan")
    _skip_what_it_has_not(cfg, device)
    dist.init_process_group("gloo" if capability is None else "nccl", device_id=None if capability is None else device)
    titan_mesh.device_type = device.type  # where there is no accelerator, torchtitan takes it for CUDA
    # No name for the step: its model has to be gone before its process group is.
    seconds = measure.median_seconds(make_step(cfg, world, device), args.steps, device)
    measure.report(measure.figures(cfg, seconds, world, device))
    dist.destroy_process_group()


def _skip_what_it_has_not(cfg: Config, device: torch.device) -> None:
    m = cfg.model
    if m.family != "llama" or m.positions != "rope" or m.tie_embeddings:
        raise measure.skip("torchtitan's Llama 3 has rotary positions and an untied head, and it has no GPT-3")
    if cfg.precision.fp8 != "none":
        raise measure.skip("torchtitan is measured in bf16 only, not in FP8")
    if cfg.parallel.tp > 1 and not cfg.parallel.sequence_parallel:
        raise measure.skip("torchtitan has no tensor parallelism without sequence parallelism")
    if cfg.parallel.cp > 1 and device.type == "cpu":
        raise measure.skip("torchtitan's context parallelism needs GPUs")


def job_config(cfg: Config, dims: ParallelDims, compiled: bool) -> JobConfig:
    """What torchtitan reads of a job. The batch of a pipeline is all its microbatches."""
    job, t, p, o = JobConfig(), cfg.train, cfg.parallel, cfg.optimizer
    job.training.seq_len, job.training.max_norm = t.seq_len, o.clip_grad
    job.training.local_batch_size = t.micro_batch_size
    job.training.dtype = "float32" if dims.fsdp_enabled or not (dims.tp_enabled or dims.pp_enabled) else "bfloat16"
    job.activation_checkpoint.mode = "none"
    job.parallelism.fsdp_reshard_after_forward = "never"
    job.compile.enable = compiled
    job.optimizer.lr, job.optimizer.eps, job.optimizer.weight_decay = o.lr, o.eps, o.weight_decay
    job.optimizer.beta1, job.optimizer.beta2 = o.betas
    job.parallelism.tensor_parallel_degree, job.parallelism.context_parallel_degree = p.tp, p.cp
    if dims.pp_enabled:
        job.training.local_batch_size *= cfg.num_microbatches(dims.dp_shard)
        job.parallelism.pipeline_parallel_degree = p.pp
        job.parallelism.pipeline_parallel_microbatch_size = t.micro_batch_size
        job.parallelism.pipeline_parallel_schedule = "Interleaved1F1B" if p.vp > 1 else "1F1B"
        job.parallelism.module_fqns_per_model_part = stage_modules(cfg)
    return job


def stage_modules(cfg: Config) -> list[list[str]]:
    """The names of the modules of each global stage."""
    p = cfg.parallel
    stages = [
        [f"layers.{i}" for i in layers] for layers in stage_layers(cfg.model.num_layers, p.pp, p.vp, p.layers_per_stage)
    ]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def model_args(cfg: Config) -> TransformerModelArgs:
    m, scaling = cfg.model, cfg.model.rope_scaling
    rope = (
        RoPEScalingArgs(scaling_factor=1.0)
        if scaling is None
        else RoPEScalingArgs(
            scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
        )
    )
    # torchtitan derives the MLP's width, rounded up to a multiple: of the width itself, that is the width.
    return TransformerModelArgs(
        dim=m.hidden_size,
        n_layers=m.num_layers,
        n_heads=m.num_heads,
        n_kv_heads=m.kv_heads,
        vocab_size=m.padded_vocab_size,
        multiple_of=m.ffn_hidden_size,
        ffn_dim_multiplier=3 * m.ffn_hidden_size / (8 * m.hidden_size),
        norm_eps=m.norm_eps,
        rope_theta=m.rope_theta,
        rope_scaling_args=rope,
        max_seq_len=cfg.train.seq_len,
    )


def make_model(cfg: Config, dtype: torch.dtype) -> Transformer:
    """The whole model without memory."""
    with torch.device("meta"), set_default_dtype(dtype):
        return Transformer(model_args(cfg))


def materialize(parts: list[nn.Module], device: torch.device) -> None:
    for part in parts:
        part.to_empty(device=device)
        with torch.no_grad():
            part.init_weights()
        for module in part.modules() if device.type == "cpu" else ():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide, not even by the 1 that is set


def make_step(cfg: Config, world: int, device: torch.device) -> Callable[[int], None]:
    """step(i): forward, backward and update on random tokens that stay on the device."""
    p, t = cfg.parallel, cfg.train
    dims = ParallelDims(
        dp_replicate=1, dp_shard=cfg.dp(world), cp=p.cp, tp=p.tp, pp=p.pp, ep=1, etp=1, world_size=world
    )
    dims.build_mesh()
    job = job_config(cfg, dims, compiled=device.type == "cuda")
    loss = build_cross_entropy_loss(job)
    model = make_model(cfg, TORCH_DTYPE_MAP[job.training.dtype])
    if dims.pp_enabled:
        schedule, parts, first, last = pipeline_llm(model, dims, job, device, model.model_args, parallelize_llama, loss)
        run = pipelined(schedule, first, last)
    else:
        parts = [parallelize_llama(model, dims, job)]
        autocast = titan.maybe_enable_amp(dims, job.training.mixed_precision_param, device.type)
        run = plain(parts[0], loss, autocast, t.global_batch_size * t.seq_len)
    materialize(parts, device)
    optimizers = build_optimizers(parts, job.optimizer, dims)
    batch = torch.randint(cfg.model.vocab_size, (2, job.training.local_batch_size, t.seq_len), device=device)
    tokens, labels, more = *batch, {}
    if dims.cp_enabled:
        tokens, labels, more = prepare_context_parallel_input(
            tokens, labels, more, dims.get_mesh("cp"), device, job.parallelism.context_parallel_load_balancer
        )
    context = titan.get_train_context(dims.tp_enabled)
    passes = 1 if dims.pp_enabled else cfg.num_microbatches(dims.dp_shard)
    collector = GarbageCollection(job.training.gc_freq)

    def step(i: int) -> None:
        collector.run(i)
        optimizers.zero_grad()
        for _ in range(passes):
            with context():
                run(tokens, labels, more)
        if job.training.max_norm:
            titan.clip_grad_norm_(
                [weight for part in parts for weight in part.parameters()],
                job.training.max_norm,
                foreach=True,
                pp_mesh=dims.get_optional_mesh("pp"),
            )
        optimizers.step()

    return step


def plain(model: nn.Module, loss: Callable, autocast: contextlib.AbstractContextManager, count: int) -> Callable:
    """One microbatch forward and backward; `count`: all tokens of the step, over which the loss is the mean."""

    def run(tokens: Tensor, labels: Tensor, more: dict) -> None:
        with autocast:
            mean = loss(model(tokens, **more), labels) / count
        mean.backward()

    return run


def pipelined(schedule, first: bool, last: bool) -> Callable:
    """All microbatches of a step; first, last: whether this rank has the first or the last stage."""

    def run(tokens: Tensor, labels: Tensor, more: dict) -> None:
        schedule.step(
            *([tokens] if first else []),
            **more,
            target=labels if last else None,
            losses=[] if last else None,
            return_outputs=False,
        )

    return run


if __name__ == "__main__":
    main()
