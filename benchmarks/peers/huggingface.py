"""Measure Hugging Face transformers: `torchrun --nproc-per-node N benchmarks/peers/huggingface.py CONFIG ...`.

It reads minitron's configuration and trains the same Llama or GPT-2 with random weights, set up the way its own users
run it fast: bf16 over float32 weights sharded by torch's FSDP, in the units that Accelerate makes, gathered once and
reduced once a step; blocks and loss compiled; torch's scaled-dot-product attention and fused AdamW. Prints figures by
minitron's counting. Without tensor, pipeline and context parallelism and without FP8, such cases are skipped.

Fine-tuning reads minitron's samples. Packed documents are kept apart as transformers does it, by positions that begin
anew: with flash-attn, where that is installed, by its kernel for such sequences, else by a mask. LoRA is PEFT's, on
weights and adapters in bf16: PEFT's default, adapters in float32, casts what they read and is slower. The loop is the
one below and not the Trainer's, which does the same and more: so the ratio does not gain from it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in its own folder, this file would hide the package

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks import measure
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.schema import Config
from minitron.data.batch import Batch
from minitron.data.loader import Loader
from minitron.pretrain import build_data

try:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
except ImportError as error:
    raise measure.skip(f"Hugging Face transformers is not installed ({error}); pip install transformers") from None


def main(argv: list[str] | None = None) -> None:
    cfg, args = measure.arguments(__doc__, argv)
    world, (device, capability) = int(os.environ["WORLD_SIZE"]), measure.choose_device()
    with cli.user_errors():
        rules.check(cfg, world, capability)
        measure.check_translated(cfg, "Hugging Face", tunes=True)
    _skip_what_it_has_not(cfg, on_gpu=capability is not None)
    dist.init_process_group("gloo" if capability is None else "nccl", device_id=None if capability is None else device)
    # No name for the step: its model has to be gone before its process group is.
    seconds = measure.median_seconds(make_step(cfg, world, device), args.steps, device)
    squares = measure.squared_lengths(cfg, build_data(cfg).train)
    measure.report(measure.figures(cfg, seconds, world, device, squares))
    dist.destroy_process_group()


def _skip_what_it_has_not(cfg: Config, on_gpu: bool) -> None:
    m, p = cfg.model, cfg.parallel
    if p.tp * p.pp * p.cp > 1:
        raise measure.skip("Hugging Face is measured data parallel only, not with tp, pp or cp")
    if cfg.precision.fp8 != "none":
        raise measure.skip("Hugging Face is measured in bf16 only, not in FP8")
    if m.positions != {"llama": "rope", "gpt": "learned"}[m.family]:
        raise measure.skip(f"Hugging Face has no {m.family} model with {m.positions} positions")
    if cfg.finetune.kind == "lora":
        if find_spec("peft") is None:
            raise measure.skip("Hugging Face's LoRA needs PEFT, which is not installed; pip install peft")
        if m.family == "gpt" or cfg.lora.dropout:
            raise measure.skip("Hugging Face's LoRA is measured on Llama and without dropout")
    if on_gpu and cfg.data.separates and not varlen(cfg):  # its masks of whole samples take twice as long
        raise measure.skip(
            "Hugging Face keeps documents apart by flash-attn, which is not installed; pip install flash-attn"
        )
    if m.family == "gpt" and m.kv_heads != m.num_heads:
        raise measure.skip("Hugging Face's GPT-2 has no grouped queries")


def make_model(cfg: Config) -> PreTrainedModel:
    """The model in float32 on torch's default device."""
    m = cfg.model
    if m.family == "gpt":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=m.padded_vocab_size,
                n_embd=m.hidden_size,
                n_inner=m.ffn_hidden_size,
                n_layer=m.num_layers,
                n_head=m.num_heads,
                n_positions=m.max_positions,
                layer_norm_epsilon=m.norm_eps,
                initializer_range=m.init_std,
                tie_word_embeddings=m.tie_embeddings,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
    attention = "flash_attention_2" if varlen(cfg) else "sdpa"
    rope = {"rope_type": "default", "rope_theta": m.rope_theta}
    if m.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": m.rope_scaling.factor,
            "low_freq_factor": m.rope_scaling.low_freq_factor,
            "high_freq_factor": m.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": m.rope_scaling.original_max_positions,
        }
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=m.padded_vocab_size,
            hidden_size=m.hidden_size,
            intermediate_size=m.ffn_hidden_size,
            num_hidden_layers=m.num_layers,
            num_attention_heads=m.num_heads,
            num_key_value_heads=m.kv_heads,
            max_position_embeddings=m.max_positions,
            rms_norm_eps=m.norm_eps,
            initializer_range=m.init_std,
            tie_word_embeddings=m.tie_embeddings,
            rope_parameters=rope,
            use_cache=False,
            attn_implementation=attention,
        )
    )


def varlen(cfg: Config) -> bool:
    """Whether flash-attn keeps documents apart."""
    return cfg.data.separates and find_spec("flash_attn") is not None


def add_adapters(model: PreTrainedModel, cfg: Config) -> None:
    """Freeze the weights and put PEFT's adapters beside them, in place; a fused one becomes three."""
    from peft import LoraConfig, get_peft_model

    names = {"qkv": ("q", "k", "v")}
    targets = [f"{part}_proj" for target in cfg.lora.targets for part in names.get(target, (target,))]
    get_peft_model(
        model,
        LoraConfig(r=cfg.lora.rank, lora_alpha=cfg.lora.alpha, target_modules=targets, task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )


def parts(model: PreTrainedModel) -> tuple[nn.ModuleList, nn.Module, nn.Module]:
    """The blocks, the token embedding and the last norm."""
    if isinstance(model, GPT2LMHeadModel):
        return model.transformer.h, model.transformer.wte, model.transformer.ln_f
    return model.model.layers, model.model.embed_tokens, model.model.norm


def shard(model: PreTrainedModel) -> None:
    """Shard weights, gradients and optimizer state over all ranks; the forward pass computes in bf16."""
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": False,
    }
    blocks, embedding, norm = parts(model)
    for block in blocks:
        fully_shard(block, **options)
    tied = model.lm_head.weight is embedding.weight  # one weight has to lie in one unit
    if not tied:
        fully_shard(embedding, **options)
    fully_shard([norm, embedding, model.lm_head] if tied else [norm, model.lm_head], **options)
    fully_shard(model, **options)


def make_batches(cfg: Config, world: int, device: torch.device) -> Callable[[int], list[dict]]:
    """batches(i): what the model is called with for each microbatch of step i.

    In pretraining random tokens that stay on the device, else the samples that minitron trains on.
    """
    t = cfg.train
    if cfg.finetune.kind is None:
        tokens = torch.randint(cfg.model.vocab_size, (t.micro_batch_size, t.seq_len), device=device)
        return lambda i: [{"input_ids": tokens, "labels": tokens}] * cfg.num_microbatches(world)
    mesh = Mesh.offline(world, dist.get_rank(), device=device)
    loader = Loader(build_data(cfg).train, cfg, mesh)
    return lambda i: [_inputs(batch, cfg) for batch in loader.step(i % t.steps * t.global_batch_size, i)]


def _inputs(batch: Batch, cfg: Config) -> dict:
    """The model shifts labels itself, so it gets each token's own; -100 does not count."""
    tokens, labels = batch.tokens.t().contiguous(), batch.labels.masked_fill(batch.mask == 0, -100).t()
    inputs = {"input_ids": tokens, "labels": torch.cat([torch.full_like(tokens[:, :1], -100), labels[:, :-1]], 1)}
    if batch.documents is None:
        return inputs
    inputs["position_ids"] = batch.positions.t().contiguous()
    if varlen(cfg):
        ends, longest = packed_bounds(batch)
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return inputs


def packed_bounds(batch: Batch) -> tuple[torch.Tensor, int]:
    """Where documents begin and end if samples lie in a row, int32 [documents + 1], and how long the longest is."""
    samples, s = batch.documents.cu_seqlens, batch.documents.spans.shape[-1]
    bounds = torch.tensor(
        [i * s + begin for i, sample in enumerate(samples) for begin in sample[:-1]] + [len(samples) * s]
    )
    on_host = bounds.int().pin_memory() if batch.tokens.is_cuda else bounds.int()
    return on_host.to(batch.tokens.device, non_blocking=True), int(bounds.diff().max())


def make_step(cfg: Config, world: int, device: torch.device) -> Callable[[int], None]:
    """step(i): forward, backward and update."""
    o, lora = cfg.optimizer, cfg.finetune.kind == "lora"
    with device:
        model = make_model(cfg)
    if lora:
        model.bfloat16()
        add_adapters(model, cfg)
    if device.type == "cuda":
        for block in parts(model)[0]:
            block.forward = torch.compile(block.forward)  # FSDP's hooks stay outside
        model.loss_function = torch.compile(model.loss_function)
    sharded = not lora or world > 1
    if sharded:
        shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True)
    batches = make_batches(cfg, world, device)

    def step(i: int) -> None:
        inputs = batches(i)
        for number, batch in enumerate(inputs, 1):
            if sharded:
                model.set_requires_gradient_sync(number == len(inputs))
                model.set_reshard_after_backward(number == len(inputs))
            (model(**batch).loss / len(inputs)).backward()
        if o.clip_grad:
            nn.utils.clip_grad_norm_(trained, o.clip_grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
