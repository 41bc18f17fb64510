"""Would attention in FP8 pay? `python benchmarks/fp8_attention.py`, on a GPU with Transformer Engine.

Causal attention of one layer, forward and backward, at a rank's shapes: in bf16 as minitron runs it, and in FP8 by
Transformer Engine's fused attention (fp8_dpa: q, k, v and gradients are cast inside, scores and softmax too), with the
casts that it needs. Prints and appends (kind "fp8_attention") the seconds of both, how far FP8's result and gradients
are from bf16's in root mean square, and what share of the newest measured step of that case the difference is: layers
times microbatches of a rank. A share below 5 % is not worth a second number format in a model's core.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder
    from minitron.runtime.environment import set_defaults

    set_defaults(os.environ)

import torch

from benchmarks import record
from benchmarks.floor import AttentionCall, seconds
from minitron.kernels import attention

# case of results.jsonl: one rank's attention, and how often a step has it: layers x microbatches
CALLS = {
    "8b-1gpu-fp8": (AttentionCall(1, 32, 8, 128, 8192, 8192, True, 0.0), 8),
    "2gpu-8b-16layers-s8192-dp2-fp8": (AttentionCall(1, 32, 8, 128, 8192, 8192, True, 0.0), 16 * 4),
    "2gpu-70b-4layers-tp2-fp8": (AttentionCall(1, 32, 4, 128, 8192, 8192, True, 0.0), 4 * 4),
    "2gpu-175b-2layers-tp2-fp8": (AttentionCall(1, 48, 48, 128, 2048, 2048, True, 0.0), 2 * 16),
}
TENSORS = "out", "dq", "dk", "dv"


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    record.add_options(parser)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("error: FP8 attention is a GPU's, and there is none")
    import transformer_engine.pytorch  # noqa: F401, before torch loads its cuDNN: see kernels/fp8.py

    steps = {row["case"]: row for row in record.rows(args.results) if row["kind"] == "compare"}
    return [record.append(args, "fp8_attention", measured(name, steps.get(name))) for name in CALLS]


def measured(name: str, row: dict | None) -> dict:
    """The figures of one case; row: its newest comparison, if there is one."""
    call, count = CALLS[name]
    device, shape = torch.device("cuda"), (call.queries, call.batch)
    draw = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(*shape, heads, call.head_dim, device=device, generator=draw).bfloat16()

    q, k, v, dout = random(call.heads), random(call.kv_heads), random(call.kv_heads), random(call.heads)
    backend = attention.choose("auto", device, torch.bfloat16, call.head_dim, 0.0)
    options = dict(causal=True, scale=call.head_dim**-0.5)

    def in_bf16() -> list[torch.Tensor]:
        ours = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
        out, lse, saved = backend.forward(*ours, **options)
        grads = backend.backward(dout.permute(1, 2, 0, 3), *ours, out, lse, saved, **options)
        return [x.permute(2, 0, 1, 3) for x in (out, *grads)]

    in_fp8 = transformer_engine(call, q, k, v, dout)
    for _ in range(3):  # scales follow what has been seen
        in_fp8()
    errors = {
        tensor: (ours.float() - theirs.reshape(ours.shape).float()).square().mean().sqrt().item()
        / ours.float().square().mean().sqrt().item()
        for tensor, ours, theirs in zip(TENSORS, in_bf16(), in_fp8(), strict=True)
    }
    result = {"case": name, "count": count, "backend": backend.name, "errors": errors}
    result |= {"bf16_seconds": seconds(in_bf16, device), "fp8_seconds": seconds(in_fp8, device)}
    result["saved_seconds"] = count * (result["bf16_seconds"] - result["fp8_seconds"])
    result["share"] = result["saved_seconds"] / row["ours"]["step_seconds"] if row else None
    share = "no measured step" if result["share"] is None else f"{100 * result['share']:.1f} % of the step"
    print(
        f"{name:32s} bf16 {1e3 * result['bf16_seconds']:.3f} ms, FP8 {1e3 * result['fp8_seconds']:.3f} ms: "
        f"saves {1e3 * result['saved_seconds']:.2f} ms, {share}; off by "
        + ", ".join(f"{tensor} {100 * error:.1f} %" for tensor, error in errors.items()),
        flush=True,
    )
    return result


def transformer_engine(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor):
    """A function that runs its fused FP8 attention, forward and backward, and returns the result and the gradients."""
    os.environ.update(NVTE_FLASH_ATTN="0", NVTE_UNFUSED_ATTN="0", NVTE_FUSED_ATTN="1")  # or fail, not fall back
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    layer = te.DotProductAttention(call.heads, call.head_dim, call.kv_heads, attn_mask_type="causal")
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max", fp8_dpa=True)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    dout = dout.flatten(-2)

    def run() -> list[torch.Tensor]:
        with te.autocast(enabled=True, recipe=recipe):
            out = layer(*leaves, qkv_format="sbhd")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return run


if __name__ == "__main__":
    main()
