"""Measure Megatron-core and Transformer Engine: `torchrun --nproc-per-node N benchmarks/peers/megatron.py CONFIG ...`.

It reads minitron's configuration, so the model, the layout, the batch and the format of gradients are the same, and it
is set up the way its own users run it fast: Transformer Engine layers with fused weight-gradient accumulation, a
sharded optimizer with both of its collectives overlapped, interleaved pipeline messages overlapped, fused rotary
positions and loss. `--mode` chooses among the ways of modes.py. Prints figures by minitron's counting. NVIDIA's apex is
not assumed: only the head, which is Megatron's own layer and not Transformer Engine's, would use it, for its weight
gradient.

Its graph holds forward and backward of all microbatches and the reduction of gradients. Before it the gradients are
set to zero, after it comes the optimizer's step; minitron's graphs also leave the update out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in its own folder, this file would hide the package

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks.peers.modes import settings
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.schema import Config
from minitron.data.loader import Loader
from minitron.optim.lr import learning_rate
from minitron.pretrain import build_data
from minitron.train import build

try:
    import transformer_engine.pytorch as te  # Megatron-core imports without it, and then fails later
    from megatron.core import full_cuda_graph, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel import layers as tensor_parallel_layers
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
except ImportError as error:
    raise measure.skip(
        f"Megatron-core or Transformer Engine is not installed ({error}); "
        "pip install megatron-core 'transformer-engine[pytorch]'"
    ) from None

FP8 = {
    "none": {},
    "delayed": dict(fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=16, fp8_amax_compute_algo="max"),
    "current": dict(fp8="hybrid", fp8_recipe="tensorwise"),
    "block": dict(fp8="e4m3", fp8_recipe="blockwise"),
}
GRAPH_WARM_UP = 3  # eager steps before the recorded one


def main(argv: list[str] | None = None) -> None:
    cfg, args = measure.arguments(__doc__, argv, add_options)
    world, (device, capability) = int(os.environ["WORLD_SIZE"]), measure.choose_device()
    if capability is None:
        raise measure.skip("Megatron-core needs GPUs")
    with cli.user_errors():
        rules.check(cfg, world, capability)
        measure.check_translated(cfg, "Megatron-core")
        chosen = settings(args.mode)
    dist.init_process_group("nccl", device_id=device)
    config = start(cfg, chosen)
    step, graph = make_step(cfg, config), is_replayed(config)
    for i in range(GRAPH_WARM_UP + 1 if graph else 0):
        step(i)
    seconds = measure.median_seconds(step, args.steps, device)
    measure.report(measure.figures(cfg, seconds, world, device) | {"graph": graph})
    dist.destroy_process_group()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", default="eager", help="parts of peers/modes.py, joined by + (default eager)")


def losses(cfg: Config, device: torch.device) -> list[float]:
    """The training loss of every step of a run on this GPU, with minitron's weights, batches and learning rates."""
    from benchmarks.peers.same_weights import copy_weights

    o, t, mesh = cfg.optimizer, cfg.train, Mesh.offline(device=device)
    data = build_data(cfg)
    weights = {p.spec.name: p for p in build(cfg, mesh).chunks[0].parameters()}
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    config = start(cfg)
    chunks = make_chunks(cfg, config, lambda chunk: copy_weights(weights, chunk, cfg.model))
    optimizer = make_optimizer(cfg, config, chunks)
    loader, figures = Loader(data.train, cfg, mesh), []

    def forward(given, chunk):
        batch = next(given)
        tokens, labels = (x.t().contiguous() for x in (batch.tokens, batch.labels))
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        return chunk(tokens, positions, None, labels=labels), mean_loss

    for number in range(1, t.steps + 1):
        consumed = number * t.global_batch_size
        batches = loader.step(consumed - t.global_batch_size, number)
        lr = learning_rate(o, t, consumed)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, o.weight_decay * group["wd_mult"]
        made = run_step(cfg, chunks, optimizer, forward, iter(batches), get_forward_backward_func())
        figures.append(torch.stack([each["loss"] for each in made]).mean())
    loader.close()
    dist.destroy_process_group()
    return torch.stack(figures).tolist()


def start(cfg: Config, chosen: dict | None = None) -> TransformerConfig:
    """Make Megatron-core's process groups and its configuration, with a mode's settings. Collective over the world."""
    p = cfg.parallel
    parallel_state.initialize_model_parallel(p.tp, p.pp, virtual(cfg), context_parallel_size=p.cp)
    config = transformer_config(cfg, chosen or {})
    recorded = {"te_rng_tracker": True, "use_cudagraphable_rng": True} if is_replayed(config) else {}
    model_parallel_cuda_manual_seed(cfg.train.seed, **recorded)
    if config.tp_comm_overlap:
        modes = te.module.base.UserBufferQuantizationMode
        te.module.base.initialize_ub(
            [cfg.train.seq_len // p.cp * cfg.train.micro_batch_size, cfg.model.hidden_size],
            p.tp,
            quantization_modes=[modes.NONE if cfg.precision.fp8 == "none" else modes.FP8],
            bootstrap_backend="nccl",
        )
    # Off without apex, and then Transformer Engine, which needs none, would not accumulate inside its GEMMs either.
    tensor_parallel_layers._grad_accum_fusion_available = True
    return config


def is_replayed(config: TransformerConfig) -> bool:
    return config.cuda_graph_impl == "full_iteration"


def virtual(cfg: Config) -> int | None:
    return cfg.parallel.vp if cfg.parallel.vp > 1 else None


def mean_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mean = output.float().mean()
    return mean, {"loss": mean.detach()}


def transformer_config(cfg: Config, chosen: dict) -> TransformerConfig:
    m, p, llama = cfg.model, cfg.parallel, cfg.model.family == "llama"
    chosen = {"cross_entropy_fusion_impl": "te"} | FP8[cfg.precision.fp8] | chosen
    return TransformerConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_heads,
        num_query_groups=m.kv_heads,
        init_method_std=m.init_std,
        layernorm_epsilon=m.norm_eps,
        normalization="RMSNorm" if llama else "LayerNorm",
        gated_linear_unit=llama,
        add_bias_linear=not llama,
        activation_func=F.silu if llama else F.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        context_parallel_size=p.cp,
        virtual_pipeline_model_parallel_size=p.vp if p.vp > 1 else None,
        overlap_p2p_comm=p.vp > 1,
        batch_p2p_comm=p.vp == 1,
        deallocate_pipeline_outputs=True,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=True,
        persist_layer_norm=True,
        apply_rope_fusion=m.positions == "rope",
        cross_entropy_loss_fusion=True,
        gradient_accumulation_fusion=True,
        pipeline_model_parallel_layout=_stages(p.layers_per_stage),
        **chosen,
    )


def _stages(layers: tuple[int, ...] | None) -> list[list[str]] | None:
    """What each global stage holds, as Megatron-core is told it; None: as many blocks in each."""
    if layers is None:
        return None
    stages = [["decoder"] * count for count in layers]
    return [["embedding"] + stages[0], *stages[1:-1], stages[-1] + ["loss"]]


def make_chunks(
    cfg: Config, config: TransformerConfig, prepare: Callable[[GPTModel], None] | None = None
) -> list[DistributedDataParallel]:
    """This rank's model chunks, on the GPU, prepared and wrapped for gradient reduction."""
    m, chunks = cfg.model, []
    for i in range(cfg.parallel.vp):
        stage = {} if virtual(cfg) is None else {"vp_stage": i}
        if stage:
            parallel_state.set_virtual_pipeline_model_parallel_rank(i)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage)
        positions = {"rope": "rope", "learned": "learned_absolute"}[m.positions]
        chunk = GPTModel(
            config,
            get_gpt_layer_with_transformer_engine_spec(),
            m.padded_vocab_size,
            m.max_positions,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=m.tie_embeddings,
            position_embedding_type=positions,
            rotary_base=m.rope_theta,
            **stage,
        ).cuda()
        if m.positions == "learned":
            chunk.bfloat16()  # the position table is made in float32
        if last:
            chunk.output_layer.gradient_accumulation_fusion = False
        chunk.model_type = ModelType.encoder_or_decoder
        if prepare is not None:
            prepare(chunk)
        chunks.append(chunk)
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=cfg.optimizer.accumulates_in == "fp32",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        average_in_collective=True,
        check_for_nan_in_grad=False,
    )
    wrap = partial(DistributedDataParallel, config, options)
    torch.cuda.synchronize()
    with torch.cuda.stream(full_cuda_graph.get_shared_capture_stream()) if is_replayed(config) else nullcontext():
        # Hooks of gradients belong to the stream in which they are made.
        wrapped = [wrap(chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    torch.cuda.synchronize()
    return wrapped


def make_optimizer(cfg: Config, config: TransformerConfig, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """The sharded optimizer, and what the schedules have to know of it and of the chunks."""
    o = cfg.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=o.lr,
            min_lr=o.min_lr,
            weight_decay=o.weight_decay,
            adam_beta1=o.betas[0],
            adam_beta2=o.betas[1],
            adam_eps=o.eps,
            clip_grad=o.clip_grad,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        chunks,
    )
    interleaved = virtual(cfg) is not None
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    config.no_sync_func = [c.no_sync for c in chunks] if interleaved else chunks[0].no_sync
    config.param_sync_func = [c.start_param_sync for c in chunks] if interleaved else chunks[0].start_param_sync
    if interleaved:
        config.grad_sync_func = [c.start_grad_sync for c in chunks]
    return optimizer


def make_step(cfg: Config, config: TransformerConfig):
    """step(i): forward, backward and update on random tokens that stay on the GPU."""
    m, t = cfg.model, cfg.train
    chunks = make_chunks(cfg, config)
    optimizer = make_optimizer(cfg, config, chunks)
    shape = t.micro_batch_size, t.seq_len // cfg.parallel.cp
    tokens, labels = (torch.randint(m.vocab_size, shape, device="cuda") for _ in range(2))
    positions = torch.arange(shape[1], device="cuda").expand(shape)

    def forward(_, chunk):
        return chunk(tokens, positions, None, labels=labels), mean_loss

    schedule, given = get_forward_backward_func(), [repeat({}) for _ in chunks]  # the graph's wrapper reads dicts
    if is_replayed(config):
        schedule = full_cuda_graph.FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=GRAPH_WARM_UP)
    return lambda _: run_step(cfg, chunks, optimizer, forward, given, schedule)


def run_step(
    cfg: Config, chunks: list, optimizer: MegatronOptimizer, forward: Callable, given: Any, schedule: Callable
) -> list[dict[str, Tensor]]:
    """Forward and backward of all microbatches, and the update; returns what mean_loss said of each."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    made = schedule(
        forward_step_func=forward,
        data_iterator=given,
        model=chunks if virtual(cfg) else chunks[0],
        num_microbatches=cfg.num_microbatches(cfg.dp(dist.get_world_size())),
        seq_length=cfg.train.seq_len,
        micro_batch_size=cfg.train.micro_batch_size,
        forward_only=False,
    )
    optimizer.step()
    return made


if __name__ == "__main__":
    main()
