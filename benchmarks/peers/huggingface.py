"""Measure Hugging Face transformers: `torchrun --nproc-per-node N benchmarks/peers/huggingface.py CONFIG ...`.

It reads minitron's configuration and trains the same Llama or GPT-2 with random weights, set up the way its own users
run it fast: bf16 over float32 weights sharded by torch's FSDP, in the units that Accelerate makes, gathered once and
reduced once a step; blocks and loss compiled; torch's scaled-dot-product attention and fused AdamW. Prints figures by
minitron's counting. Without tensor, pipeline and context parallelism and without FP8, such cases are skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in its own folder, this file would hide the package

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks import measure
from minitron import cli
from minitron.config import Config

try:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
except ImportError as error:
    raise measure.skip(f"Hugging Face transformers is not installed ({error}); pip install transformers") from None


def main(argv: list[str] | None = None) -> None:
    cfg, args = measure.arguments(__doc__, argv)
    world, (device, capability) = int(os.environ["WORLD_SIZE"]), measure.choose_device()
    with cli.user_errors():
        cfg.check(world, capability)
        measure.check_translated(cfg, "Hugging Face")
    _skip_what_it_has_not(cfg)
    dist.init_process_group("gloo" if capability is None else "nccl", device_id=None if capability is None else device)
    # No name for the step: its model has to be gone before its process group is.
    seconds = measure.median_seconds(make_step(cfg, world, device), args.steps, device)
    measure.report(measure.figures(cfg, seconds, world, device))
    dist.destroy_process_group()


def _skip_what_it_has_not(cfg: Config) -> None:
    m, p = cfg.model, cfg.parallel
    if p.tp * p.pp * p.cp > 1:
        raise measure.skip("Hugging Face is measured data parallel only, not with tp, pp or cp")
    if cfg.precision.fp8 != "none":
        raise measure.skip("Hugging Face is measured in bf16 only, not in FP8")
    if m.positions != {"llama": "rope", "gpt": "learned"}[m.family]:
        raise measure.skip(f"Hugging Face has no {m.family} model with {m.positions} positions")
    if m.family == "gpt" and m.kv_heads != m.num_heads:
        raise measure.skip("Hugging Face's GPT-2 has no grouped queries")


def make_model(cfg: Config) -> PreTrainedModel:
    """The model in float32 on torch's default device."""
    m = cfg.model
    if m.family == "gpt":
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=m.padded_vocab_size, n_embd=m.hidden_size, n_inner=m.ffn_hidden_size, n_layer=m.num_layers,
            n_head=m.num_heads, n_positions=m.max_positions, layer_norm_epsilon=m.norm_eps,
            initializer_range=m.init_std, tie_word_embeddings=m.tie_embeddings, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False, attn_implementation="sdpa"))
    rope = {"rope_type": "default", "rope_theta": m.rope_theta}
    if m.rope_scaling is not None:
        rope |= {"rope_type": "llama3", "factor": m.rope_scaling.factor,
                 "low_freq_factor": m.rope_scaling.low_freq_factor,
                 "high_freq_factor": m.rope_scaling.high_freq_factor,
                 "original_max_position_embeddings": m.rope_scaling.original_max_positions}
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=m.padded_vocab_size, hidden_size=m.hidden_size, intermediate_size=m.ffn_hidden_size,
        num_hidden_layers=m.num_layers, num_attention_heads=m.num_heads, num_key_value_heads=m.kv_heads,
        max_position_embeddings=m.max_positions, rms_norm_eps=m.norm_eps, initializer_range=m.init_std,
        tie_word_embeddings=m.tie_embeddings, rope_parameters=rope, use_cache=False, attn_implementation="sdpa"))


def parts(model: PreTrainedModel) -> tuple[nn.ModuleList, nn.Module, nn.Module]:
    """The blocks, the token embedding and the last norm."""
    if isinstance(model, GPT2LMHeadModel):
        return model.transformer.h, model.transformer.wte, model.transformer.ln_f
    return model.model.layers, model.model.embed_tokens, model.model.norm


def shard(model: PreTrainedModel) -> None:
    """Shard weights, gradients and optimizer state over all ranks; the forward pass computes in bf16."""
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
               "reshard_after_forward": False}
    blocks, embedding, norm = parts(model)
    for block in blocks:
        fully_shard(block, **options)
    tied = model.lm_head.weight is embedding.weight  # one weight has to lie in one unit
    if not tied:
        fully_shard(embedding, **options)
    fully_shard([norm, embedding, model.lm_head] if tied else [norm, model.lm_head], **options)
    fully_shard(model, **options)


def make_step(cfg: Config, world: int, device: torch.device) -> Callable[[int], None]:
    """step(i): forward, backward and update on random tokens that stay on the device."""
    m, t, o = cfg.model, cfg.train, cfg.optimizer
    with device:
        model = make_model(cfg)
    if device.type == "cuda":
        for block in parts(model)[0]:
            block.forward = torch.compile(block.forward)  # FSDP's hooks stay outside
        model.loss_function = torch.compile(model.loss_function)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay,
                                  fused=True)
    tokens = torch.randint(m.vocab_size, (t.micro_batch_size, t.seq_len), device=device)
    num_microbatches = cfg.num_microbatches(world)

    def step(_: int) -> None:
        for i in range(num_microbatches):
            last = i == num_microbatches - 1
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            (model(input_ids=tokens, labels=tokens).loss / num_microbatches).backward()
        if o.clip_grad:
            nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
