"""Measure Hugging Face transformers: `torchrun --nproc-per-node N benchmarks/peers/huggingface.py CONFIG.yaml ...`.

It reads minitron's configuration and trains the same Llama with what its users have at hand: bf16 parameters and
AdamW state, torch's scaled-dot-product attention, blocks compiled one by one on a GPU, data parallelism by torch.
That is less work than minitron's float32 masters, so its time is a lower bound for equal training. It has no other
parallel axis and no FP8: such cases are skipped.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import measure
from minitron.config import Config
from minitron.precision import DTYPES

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise measure.skip(f"Hugging Face transformers is not installed ({error}); pip install transformers") from None


def main(argv: list[str] | None = None) -> None:
    cfg, args = measure.arguments(__doc__, argv)
    m, p = cfg.model, cfg.parallel
    plain = m.family == "llama" and m.rope_scaling is None and cfg.train.recompute == "none"
    if not plain or p.tp * p.pp * p.cp > 1 or cfg.precision.fp8 != "none":
        raise measure.skip("the Hugging Face runner trains Llama without rope_scaling, data parallel, in bf16 or fp32")
    world, (device, capability) = int(os.environ.get("WORLD_SIZE", 1)), measure.choose_device()
    if world > 1:
        dist.init_process_group("gloo" if capability is None else "nccl", device_id=device if capability else None)
    step = make_step(cfg, device, world)
    measure.report(measure.figures(cfg, measure.median_seconds(step, args.steps, device), world, device))
    if dist.is_initialized():
        dist.destroy_process_group()


def make_step(cfg: Config, device: torch.device, world: int):
    """step(i): forward, backward and update on random tokens that stay on the device."""
    m, t, o = cfg.model, cfg.train, cfg.optimizer
    with device:
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=m.padded_vocab_size, hidden_size=m.hidden_size, intermediate_size=m.ffn_hidden_size,
            num_hidden_layers=m.num_layers, num_attention_heads=m.num_heads, num_key_value_heads=m.kv_heads,
            max_position_embeddings=m.max_positions, rms_norm_eps=m.norm_eps, tie_word_embeddings=m.tie_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta}, use_cache=False,
            attn_implementation="sdpa")).to(DTYPES[cfg.precision.dtype])
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile()
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay,
                                  fused=True)
    tokens = torch.randint(m.vocab_size, (t.micro_batch_size, t.seq_len), device=device)
    num_microbatches = cfg.num_microbatches(world)

    def step(_: int) -> None:
        for i in range(num_microbatches):
            reduce = world == 1 or i == num_microbatches - 1
            with nullcontext() if reduce else replica.no_sync():
                (replica(input_ids=tokens, labels=tokens).loss / num_microbatches).backward()
        if o.clip_grad:
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
