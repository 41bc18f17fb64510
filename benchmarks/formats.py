"""Would another number format pay? `python benchmarks/formats.py`, on a GPU with Transformer Engine.

For a rank of each case, at its shapes, and against the newest measured step of that case:

    attention in FP8   causal attention of one layer, forward and backward, in bf16 as minitron runs it, and by
                       Transformer Engine's fused attention in FP8 (fp8_dpa: q, k, v and gradients are cast inside,
                       scores and softmax too), with the casts that it needs. Row "fp8_attention".
    the head in FP8    the three products with the vocabulary, which precision.fp8_head casts: forward, both gradients,
                       the casts of a microbatch, and that of the weight, once a step. Row "fp8_head".
    moments in bf16    AdamW's two, read and written at half the size. Row "bf16_moments".

Prints and appends the seconds of both, how far results and gradients are from bf16's in root mean square, and what
share of the step the difference is. What saves less than 5 % is not worth a second number format in a model's core.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder
    from minitron.runtime.environment import set_defaults

    set_defaults(os.environ)

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.cases import CASES
from benchmarks.floor import AttentionCall, seconds
from minitron.comm.mesh import Axis
from minitron.config import cli
from minitron.config.schema import Config
from minitron.kernels import attention, fp8
from minitron.kernels.fp8_scales import ROLES, DelayedScaling, roll_histories
from minitron.kernels.gemm import Gemm
from minitron.kernels.param import GradSlot
from minitron.kernels.plain import AdamHyper, AdamState
from minitron.planner.memory import Memory

NAMES = "8b-1gpu", "2gpu-8b-16layers-s8192-dp2", "2gpu-70b-4layers-tp2", "2gpu-175b-2layers-tp2"
ATTENDED, MULTIPLIED = ("out", "dq", "dk", "dv"), ("y", "dx", "dw")
MOMENTS = 2**28  # elements of which AdamW is timed


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    record.add_options(parser)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("error: FP8 is a GPU's, and there is none")
    import transformer_engine.pytorch  # noqa: F401, before torch loads its cuDNN: see kernels/fp8.py

    steps = {row["case"]: row for row in record.rows(args.results) if row["kind"] == "compare"}
    found = []
    for name in NAMES:
        cfg, step = load(name), steps.get(f"{name}-fp8")
        for kind, measure in KINDS.items():
            result = {"case": f"{name}-fp8", **measure(cfg, CASES[name].gpus)}
            result["share"] = result["saved_seconds"] / step["ours"]["step_seconds"] if step else None
            found.append(record.append(args, kind, result))
            print(line(kind, result), flush=True)
            torch.cuda.empty_cache()
    return found


def load(name: str) -> Config:
    config, *keys = CASES[name].arguments("delayed")
    return cli.load([str(record.ROOT / config), *keys])


def line(kind: str, result: dict) -> str:
    share = "no measured step" if result["share"] is None else f"{100 * result['share']:.1f} % of the step"
    errors = ", ".join(f"{tensor} {100 * error:.1f} %" for tensor, error in result["errors"].items())
    before, after, saved = (1e3 * result[f"{which}_seconds"] for which in ("before", "after", "saved"))
    text = f"{kind:14s} {result['case']:32s} {before:.3f} ms, so {after:.3f}: saves {saved:.2f} ms, {share}"
    return f"{text}; off by {errors}" if errors else text


def microbatches(cfg: Config, gpus: int) -> int:
    return cfg.num_microbatches(cfg.dp(gpus))


def off(one: Tensor, other: Tensor) -> float:
    """How far `one` is from `other`, in root mean square."""
    return ((one.float() - other.float()).square().mean() / other.float().square().mean()).sqrt().item()


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_call(cfg: Config) -> AttentionCall:
    """A rank's call for one layer and microbatch; without cp."""
    m, t, tp = cfg.model, cfg.train, cfg.parallel.tp
    heads, kv_heads = m.num_heads // tp, m.kv_heads // tp
    return AttentionCall(t.micro_batch_size, heads, kv_heads, m.head_width, t.seq_len, t.seq_len, True, 0.0)


def attention_in_fp8(cfg: Config, gpus: int) -> dict:
    call, count = attention_call(cfg), cfg.model.num_layers // cfg.parallel.pp * microbatches(cfg, gpus)
    device, shape = torch.device("cuda"), (call.queries, call.batch)
    draw = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(*shape, heads, call.head_dim, device=device, generator=draw).bfloat16()

    q, k, v, dout = random(call.heads), random(call.kv_heads), random(call.kv_heads), random(call.heads)
    backend = attention.choose("auto", device, torch.bfloat16, call.head_dim, 0.0)
    options = attention.Options(True, call.head_dim**-0.5)

    def in_bf16() -> list[Tensor]:
        ours = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
        out, lse, saved = backend.forward(*ours, options)
        grads = backend.backward(dout.permute(1, 2, 0, 3), *ours, out, lse, saved, options)
        return [x.permute(2, 0, 1, 3) for x in (out, *grads)]

    in_fp8 = transformer_engine(call, q, k, v, dout)
    for _ in range(3):  # scales follow what has been seen
        in_fp8()
    pairs = zip(ATTENDED, in_bf16(), in_fp8(), strict=True)
    errors = {tensor: off(theirs.reshape(ours.shape), ours) for tensor, ours, theirs in pairs}
    before, after = seconds(in_bf16, device), seconds(in_fp8, device)
    result = {"count": count, "backend": backend.name, "errors": errors, "saved_seconds": count * (before - after)}
    return result | {"before_seconds": before, "after_seconds": after}


def transformer_engine(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Callable[[], list[Tensor]]:
    """A function that runs its fused FP8 attention, forward and backward, and returns the result and the gradients."""
    os.environ.update(NVTE_FLASH_ATTN="0", NVTE_UNFUSED_ATTN="0", NVTE_FUSED_ATTN="1")  # or fail, not fall back
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling as Recipe
    from transformer_engine.common.recipe import Format

    layer = te.DotProductAttention(call.heads, call.head_dim, call.kv_heads, attn_mask_type="causal")
    recipe = Recipe(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max", fp8_dpa=True)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    dout = dout.flatten(-2)

    def run() -> list[Tensor]:
        with te.autocast(enabled=True, recipe=recipe):
            out = layer(*leaves, qkv_format="sbhd")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return run


# ---- the head --------------------------------------------------------------------------------------------------------


def head_in_fp8(cfg: Config, gpus: int) -> dict:
    """Its gradient is that of a cross-entropy: softmax minus one at the label."""
    from minitron.kernels import fp8_te, fused

    m, device, count = cfg.model, torch.device("cuda"), microbatches(cfg, gpus)
    tokens, columns = cfg.train.seq_len * cfg.train.micro_batch_size, m.padded_vocab_size // cfg.parallel.tp
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, m.hidden_size, device=device, generator=draw).bfloat16()
    weight = torch.nn.Parameter(
        (m.init_std * torch.randn(columns, m.hidden_size, device=device, generator=draw)).bfloat16()
    )
    weight.slot = GradSlot(torch.zeros(weight.shape, device=device), lambda: None)
    dy = (x @ weight.t()).softmax(-1)
    dy[torch.arange(tokens, device=device), torch.randint(columns, (tokens,), device=device, generator=draw)] -= 1
    scaling = DelayedScaling(ROLES, (Axis.single(),), device)
    cast = fp8.Fp8Gemm(fp8_te.TeFp8(), torch.bfloat16, scaling)

    def products(gemm: Gemm) -> tuple[Tensor, Tensor]:
        payload = gemm.quantize(x, columnwise=True, update_history=True)
        y = gemm.forward(weight)(payload.for_product())
        gradient = gemm.quantize_grad(dy, columnwise=True)
        dx = gemm.input_grad(weight)(gradient)
        gemm.weight_grad(weight, gradient, payload.for_weight_grad())
        return y, dx

    def cast_weight() -> None:
        cast.drop_casts()
        cast.forward(weight)

    found = []
    for gemm in (Gemm(fused.add_product), cast):
        products(gemm)  # which fills the history of a scale
        roll_histories([scaling])
        cast.drop_casts()
        weight.slot.main_grad.zero_()
        found.append((*products(gemm), weight.slot.main_grad.clone()))
    errors = {name: off(theirs, ours) for name, ours, theirs in zip(MULTIPLIED, *found, strict=True)}
    del found
    before, after = (seconds(lambda: products(gemm), device) for gemm in (Gemm(fused.add_product), cast))
    once = seconds(cast_weight, device)
    result = {"count": count, "errors": errors, "saved_seconds": count * (before - after) - once}
    return result | {"before_seconds": before, "after_seconds": after, "weight_cast_seconds": once}


# ---- moments ---------------------------------------------------------------------------------------------------------


def moments_in_bf16(cfg: Config, gpus: int) -> dict:
    """Of all elements that the rank updates, by the time of MOMENTS of them."""
    from minitron.kernels import fused

    device, memory = torch.device("cuda"), Memory(cfg, gpus, gpus_per_node=8)
    elements = sum(map(memory.trained, memory.stages(0))) / memory.shards
    master, grad = torch.zeros(2, MOMENTS, device=device)
    param, (one, zero) = torch.zeros_like(master, dtype=torch.bfloat16), torch.tensor([1.0, 0.0], device=device)
    o, times = cfg.optimizer, []
    for dtype in (torch.float32, torch.bfloat16):
        state = AdamState(master, grad, *torch.zeros(2, MOMENTS, dtype=dtype, device=device), param, o.weight_decay)
        hyper = AdamHyper(o.lr, o.betas, o.eps)
        call = lambda: fused.adamw_([state], one, one, zero, hyper, lambda i: None)  # noqa: B023, called here
        times.append(seconds(call, device) * elements / MOMENTS)
    result = {"count": 1, "elements": elements, "errors": {}, "saved_seconds": times[0] - times[1]}
    return result | {"before_seconds": times[0], "after_seconds": times[1]}


KINDS = {"fp8_attention": attention_in_fp8, "fp8_head": head_in_fp8, "bf16_moments": moments_in_bf16}


if __name__ == "__main__":
    main()
