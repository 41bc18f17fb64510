"""The seam of the attention kernels: every softmax(q k^T) v of the model runs through a `Backend`.

Problem: which kernel is fastest depends on device and precision, and context parallelism needs more results of it than
a layer does. A rank that holds some of the queries attends to the keys block by block, as they arrive, and joins the
results:

    block A:  scores 1, 2   lse_A = log(e^1 + e^2)   out_A = (e^1 v1 + e^2 v2) / e^lse_A
    block B:  score  3      lse_B = log(e^3)         out_B = v3
    both:                   lse = log(e^lse_A + e^lse_B)
                            out = e^(lse_A - lse) out_A + e^(lse_B - lse) out_B

So a kernel must return `lse`, the log of the sum of the exponentials, beside `out`. In the backward pass the gradient
of a score is p (dp - dout . out) with p = e^(score - lse). If lse and out are those of the *whole* softmax, then so is
p, and a block's gradients are right without the other blocks. Hence the contract: a backend is a pair of functions
without autograd, and its backward takes out and lse as they are given, from this block alone or merged over many.

    forward (q, k, v, **options)                         -> out, lse, saved
    backward(dout, q, k, v, out, lse, saved, **options)  -> dq, dk, dv

    q, dout, out  [b, n, sq, d]    any strides with a unit last one: [s, b, n, d] tensors go in permuted, uncopied
    k, v          [b, g, sk, d]    n a multiple of g: query heads i n/g ... (i + 1) n/g - 1 share key head i
    lse           [b, n, sq]       natural logarithm, float32 (float64 for float64 inputs)
    saved         whatever the kernel's own backward wants back; opaque here
    options       `Options`, as keywords; a kernel without dropout or spans has no such parameter

No block may have a query without keys: for one, some kernels return lse 0 and some -inf, and a merge would be wrong.

Left out: kernels with a sliding window or a bias, and aten's memory-efficient attention (slower wherever these run).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor
from torch.backends import cuda as cuda_backends

from minitron.config.installed import pip_install
from minitron.kernels.rng import AttentionDropout

aten = torch.ops.aten
# What its kernels may need of a block, by the width of a head: sm_86, 89 and 120 have 99 KiB, sm_80, 90 and 100 more.
FUSED_SHARED_BYTES = {128: 99 * 2**10, 256: 160 * 2**10}
Forward = tuple[Tensor, Tensor, Any]  # out, lse, saved
Grads = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


class Options(TypedDict):
    """What a backend computes.

    causal: query i attends to keys 0 ... i; needs sq == sk. Without it, every query attends to every key. scale: of the
    scores. dropout: which probabilities are dropped (kernels/rng.py). spans: int32 [2, b, s], where each token's
    document begins and ends; under the causal mask a query attends to keys of its own document. Only `fused` and
    `reference` have the last two.
    """

    causal: bool
    scale: float
    dropout: NotRequired[AttentionDropout | None]
    spans: NotRequired[Tensor | None]


@dataclass(frozen=True)
class Backend:
    """A pair of kernels under the contract of this module.

    packs: all documents of a microbatch go into one call, by their spans; else each has calls of its own.
    """

    name: str
    forward: Callable[..., Forward]
    backward: Callable[..., Grads]
    packs: bool = False


def choose(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    dropout: float = 0.0,
    *,
    documents: bool = False,
    ring: bool = False,
) -> Backend:
    """Choose the backend for `model.attention`, once a run.

    `auto` takes the fastest that fits: on CUDA cuDNN, then flash, and `fused` with dropout or `documents`; on CPU
    flash; `reference` where none of them fits (float32 on CUDA, dropout on CPU). On a `ring` of ranks documents are
    tiles, whose lengths vary from batch to batch, and cuDNN would compile a plan for each new one: flash comes first.
    Raises ValueError if the backend asked for cannot run.
    """
    device = torch.device(device)
    if name == "auto":
        candidates = ["flash", "cudnn"] if documents else ["cudnn", "flash"]
        if (dropout > 0 or documents and not ring) and dtype != torch.float32:  # whose products no tensor core takes
            candidates.insert(0, "fused")
        fitting = [c for c in candidates if _obstacle(c, device, dtype, head_dim, dropout) is None]
        name = fitting[0] if fitting else "reference"
    elif obstacle := _obstacle(name, device, dtype, head_dim, dropout):
        raise ValueError(f"model.attention={name} {obstacle}")
    if device.type == "meta" and name != "reference":
        return Backend(name, _shapes_forward, _shapes_backward, name == "fused")
    if name == "flash":
        return FLASH_CPU if device.type == "cpu" else FLASH_CUDA
    if name == "flash-attn":
        return _import_flash_attn()
    if name == "fused":
        from minitron.kernels import fused_attention

        return Backend(name, fused_attention.forward, fused_attention.backward, packs=True)
    return {"cudnn": CUDNN, "reference": REFERENCE}[name]


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> str | None:
    """Say why this backend cannot be used and what to do about it; None if it can be used."""
    if name not in ("cudnn", "flash", "flash-attn", "fused", "reference"):
        return "is not an attention backend; use auto, cudnn, flash, flash-attn, fused or reference"
    if name == "reference":
        return None
    if dropout > 0 and name != "fused":
        return f"cannot apply model.attention_dropout={dropout}; use model.attention=reference or auto"
    if name == "flash" and device.type == "cpu":
        return None
    if device.type not in ("cuda", "meta"):  # a dry run takes a GPU's
        return f"does not run on the device type {device.type!r}; use model.attention=auto"
    if name == "fused":
        return _obstacle_to_fused(device, head_dim)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16 on CUDA, not {dtype}; use model.attention=auto or another precision.dtype"
    if head_dim % 8 or head_dim > 256:
        return f"needs a head dimension that is a multiple of 8 up to 256, not {head_dim}; use model.attention=auto"
    torch_can_use = {"cudnn": cuda_backends.can_use_cudnn_attention, "flash": cuda_backends.can_use_flash_attention}
    if name in torch_can_use and device.type == "cuda":
        # torch knows which GPU, library version and determinism setting takes which head dimension
        probe = torch.empty(1, 1, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
        if not torch_can_use[name](cuda_backends.SDPAParams(probe, probe, probe, None, 0.0, True, False)):
            return (
                f"is refused by torch for {dtype} and head dimension {head_dim} on this GPU "
                f"(or switched off in torch.backends.cuda); use model.attention=auto"
            )
    return None


def _obstacle_to_fused(device: torch.device, head_dim: int) -> str | None:
    if head_dim > 256:
        return f"needs a head dimension of up to 256, not {head_dim}; use model.attention=auto"
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)  # whose stub lacks the attribute
        available = properties.shared_memory_per_block_optin
        needed = FUSED_SHARED_BYTES[128 if head_dim <= 128 else 256]
        if available < needed:
            lacks = f"needs {needed} bytes of shared memory a block, and this GPU has {available}"
            return f"{lacks}; use model.attention=auto"
    return None


# ---- reference: the formulas ----------------------------------------------------------------------------------------


def _grouped(x: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """Group the query heads by key head: [b, n, ...] -> [b, g, n/g, ...]."""
    return x.to(dtype).unflatten(1, (num_groups, -1))


def _scores(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """Compute q [b, g, n/g, sq, d] times k [b, g, 1, sk, d] -> [b, g, n/g, sq, sk]; keys that are not seen at -inf."""
    scores = q @ k.transpose(-1, -2) * options["scale"]
    if options["causal"]:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        if (spans := options.get("spans")) is not None:
            begins = spans[0][:, None, None, :, None]  # [b, 1, 1, sq, 1]
            unseen = unseen | (torch.arange(k.shape[-2], device=q.device) < begins)
        scores.masked_fill_(unseen, float("-inf"))
    return scores


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> Forward:
    g, dtype = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    q32, k32, v32 = (_grouped(x, g, dtype) for x in (q, k, v))
    scores = _scores(q32, k32, options)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.unsqueeze(-1))
    if (dropout := options.get("dropout")) is not None:
        p = p * _grouped(dropout.mask(q.shape[1]), g, dtype)
    return (p @ v32).flatten(1, 2).to(q.dtype), lse.flatten(1, 2), None


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: None, **options: Unpack[Options]
) -> Grads:
    g, dtype = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    dout32, out32, q32, k32, v32 = (_grouped(x, g, dtype) for x in (dout, out, q, k, v))
    p = torch.exp(_scores(q32, k32, options) - _grouped(lse, g, dtype).unsqueeze(-1))
    dropped, dp = p, dout32 @ v32.transpose(-1, -2)
    if (dropout := options.get("dropout")) is not None:
        mask = _grouped(dropout.mask(q.shape[1]), g, dtype)
        dropped, dp = p * mask, dp * mask
    dv = (dropped.transpose(-1, -2) @ dout32).sum(2)  # over the query heads that share the key head
    ds = p * (dp - (dout32 * out32).sum(-1, keepdim=True)) * options["scale"]
    dk = (ds.transpose(-1, -2) @ q32).sum(2)
    return (ds @ k32).flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# ---- any kernel, in a dry run ---------------------------------------------------------------------------------------


def _shapes_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Forward:
    """Run the reference; results get the strides of q, as those of the GPUs' kernels have."""
    out, lse, saved = _reference_forward(q, k, v, **options)
    return torch.empty_like(q).copy_(out), lse, saved


def _shapes_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Any, **options: Any) -> Grads:
    dq, dk, dv = _reference_backward(dout, q, k, v, *saved, **options)
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


# ---- torch's own kernels --------------------------------------------------------------------------------------------
# They index lse as a dense [b, n, sq] tensor, so the slices that context parallelism passes are copied first.


def _flash_cpu_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Forward:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse, None


def _flash_cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any, *, causal: bool, scale: float
) -> Grads:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale
    )


def _flash_cuda_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Forward:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse, (seed, offset)


def _flash_cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any, *, causal: bool, scale: float
) -> Grads:
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, *saved, scale=scale
    )


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Forward:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.squeeze(-1), (seed, offset)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any, *, causal: bool, scale: float
) -> Grads:
    tensors, lengths = (dout, q, k, v, out, lse.contiguous().unsqueeze(-1)), (q.shape[2], k.shape[2])
    bias = cumulative_q = cumulative_k = None
    return aten._scaled_dot_product_cudnn_attention_backward(
        *tensors, *saved, bias, cumulative_q, cumulative_k, *lengths, 0.0, causal, scale=scale
    )


REFERENCE = Backend("reference", _reference_forward, _reference_backward)
FLASH_CPU = Backend("flash", _flash_cpu_forward, _flash_cpu_backward)
FLASH_CUDA = Backend("flash", _flash_cuda_forward, _flash_cuda_backward)
CUDNN = Backend("cudnn", _cudnn_forward, _cudnn_backward)


# ---- the flash-attn package -----------------------------------------------------------------------------------------


def _import_flash_attn() -> Backend:
    """Wrap FlashAttention-2 of the package flash-attn (Dao 2023), whose tensors are [b, s, n, d]."""
    try:
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
    except ImportError as error:
        raise ValueError(
            "model.attention=flash-attn needs the package flash-attn: "
            f"{pip_install('flash-attn', '--no-build-isolation')}, or use model.attention=auto"
        ) from error

    off = dict(dropout_p=0.0, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None)

    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Forward:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, _, rng_state = _flash_attn_forward(
            q, k, v, softmax_scale=scale, causal=causal, return_softmax=False, **off
        )
        return out.transpose(1, 2), lse, rng_state

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        saved: Any,
        *,
        causal: bool,
        scale: float,
    ) -> Grads:
        tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        dq, dk, dv = grads = [torch.empty_like(x) for x in tensors[1:4]]
        settings = off | dict(softmax_scale=scale, causal=causal, rng_state=saved)
        settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
        _flash_attn_backward(*tensors, lse.contiguous(), *grads, **settings)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return Backend("flash-attn", forward, backward)
