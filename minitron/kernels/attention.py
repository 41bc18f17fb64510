"""Attention kernels: the model computes every softmax(q k^T) v through a `Backend`.

Problem: the fastest kernel depends on device and precision, and context parallelism needs more from it than its output.
A rank that holds some of the queries attends to blocks of keys as they arrive, and merges the results:

    block A:  scores 1, 2   lse_A = log(e^1 + e^2)   out_A = (e^1 v1 + e^2 v2) / e^lse_A
    block B:  score  3      lse_B = log(e^3)         out_B = v3
    both:                   lse = log(e^lse_A + e^lse_B)
                            out = e^(lse_A - lse) out_A + e^(lse_B - lse) out_B

So a kernel must also return `lse`, the log of the sum of the exponentials. In the backward pass the gradient of a score
is p (dp - dout . out) with p = e^(score - lse). If lse and out are those of the *whole* softmax, so is p, and the
gradients of a block are right without the other blocks. Hence the contract: a backend is a pair of functions without
autograd. Its backward gets out and lse as arguments, those of this block or those merged over many blocks.

    forward (q, k, v, options)                         -> out, lse, saved
    backward(dout, q, k, v, out, lse, saved, options)  -> dq, dk, dv

    q, dout, out  [b, n, sq, d]    any strides with a unit last one: [s, b, n, d] tensors are permuted, not copied
    k, v          [b, g, sk, d]    n a multiple of g: query heads i n/g ... (i + 1) n/g - 1 share key head i
    lse           [b, n, sq]       natural logarithm, float32 (float64 for float64 inputs)
    saved         what the kernel's own backward needs; opaque here

Every query of a block must have a key: without keys some kernels return lse 0 and some -inf, and a merge would be
wrong. Left out: kernels with a sliding window or a bias, and aten's memory-efficient attention, which is slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda as cuda_backends

from minitron.config.installed import pip_install
from minitron.kernels.rng import AttentionDropout

aten = torch.ops.aten
# Shared memory per thread block that `fused` needs, by head dim. sm_86, 89 and 120 have 99 KiB; sm_80, 90 and 100 more.
FUSED_SHARED_BYTES = {128: 99 * 2**10, 256: 160 * 2**10}
ForwardResult = tuple[Tensor, Tensor, Any]  # out, lse, saved
Grads = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


class Options(NamedTuple):
    """What a backend computes.

    causal: query i attends to keys 0 ... i, which needs sq == sk. Otherwise every query attends to every key.
    scale: the factor of the scores. dropout: which probabilities are dropped (kernels/rng.py); needs sq == sk.
    document_bounds: int32 [2, b, s], the begin and the end of each token's document. Queries attend to keys of their
    own document; needs causal. Only backends with has_dropout or masks_documents apply these two options.
    """

    causal: bool
    scale: float
    dropout: AttentionDropout | None = None
    document_bounds: Tensor | None = None


@dataclass(frozen=True)
class Backend:
    """A pair of kernels under the contract of this module.

    has_dropout: whether it applies options.dropout. masks_documents: whether one call takes all documents of a
    microbatch, by options.document_bounds. Otherwise each document needs a separate call.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Options], ForwardResult]
    backward: Callable[..., Grads]
    has_dropout: bool = False
    masks_documents: bool = False


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

    `auto` chooses the fastest backend that can run: on CUDA cuDNN, then flash, and `fused` with dropout or `documents`;
    on CPU flash. It chooses `reference` if none of them can (float32 on CUDA, dropout on CPU). On a `ring` of ranks
    each document is a tile. cuDNN would compile a plan for each new length, so flash comes first. On the meta device,
    for dry runs, the formulas replace the backend's kernels.
    Raises ValueError if the backend that `name` asks for cannot run.
    """
    device = torch.device(device)
    if name == "auto":
        without_dropout = ["flash", "cudnn"] if documents else ["cudnn", "flash"]
        candidates = [] if dropout else without_dropout
        if (dropout or documents and not ring) and dtype != torch.float32:  # tensor cores do not multiply float32
            candidates.insert(0, "fused")
        fitting = (c for c in candidates if _obstacle(c, device, dtype, head_dim) is None)
        name = next(fitting, "reference")
    elif obstacle := _obstacle(name, device, dtype, head_dim):
        raise ValueError(f"model.attention={name} {obstacle}")
    if device.type == "meta" and name != "reference":
        return replace(REFERENCE, name=name, has_dropout=name == "fused", masks_documents=name == "fused")
    if name == "flash":
        return FLASH_CPU if device.type == "cpu" else FLASH_CUDA
    if name == "flash-attn":
        return _import_flash_attn()
    if name == "fused":
        from minitron.kernels import fused_attention

        return Backend(name, fused_attention.forward, fused_attention.backward, has_dropout=True, masks_documents=True)
    return {"cudnn": CUDNN, "reference": REFERENCE}[name]


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why this backend cannot run, with the fix; None if it can. config/rules.py checks dropout."""
    if name == "reference" or name == "flash" and device.type == "cpu":
        return None
    if device.type not in ("cuda", "meta"):  # a dry run takes the backends of a GPU
        return f"does not run on the device type {device.type!r}; use model.attention=auto"
    if name == "fused":
        return _obstacle_to_fused(device, head_dim)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16 on CUDA, not {dtype}; use model.attention=auto or another precision.dtype"
    if head_dim % 8 or head_dim > 256:
        return f"needs a head dimension that is a multiple of 8 up to 256, not {head_dim}; use model.attention=auto"
    torch_can_use = {"cudnn": cuda_backends.can_use_cudnn_attention, "flash": cuda_backends.can_use_flash_attention}
    if name in torch_can_use and device.type == "cuda":
        # torch checks the GPU, the library version and the determinism setting
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
        properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks the attribute
        available = properties.shared_memory_per_block_optin
        needed = FUSED_SHARED_BYTES[128 if head_dim <= 128 else 256]
        if available < needed:
            why = f"needs {needed} bytes of shared memory a block, and this GPU has {available}"
            return f"{why}; use model.attention=auto"
    return None


# ---- reference: the formulas ----------------------------------------------------------------------------------------


def _grouped(x: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """Group the query heads by key head: [b, n, ...] -> [b, g, n/g, ...]."""
    return x.to(dtype).unflatten(1, (num_groups, -1))


def _scores(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """Compute q [b, g, n/g, sq, d] times k [b, g, 1, sk, d] -> [b, g, n/g, sq, sk]; -inf at masked keys."""
    scores = q @ k.transpose(-1, -2) * options.scale
    if options.causal:
        masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        if options.document_bounds is not None:
            begins = options.document_bounds[0][:, None, None, :, None]  # [b, 1, 1, sq, 1]
            masked = masked | (torch.arange(k.shape[-2], device=q.device) < begins)
        scores.masked_fill_(masked, float("-inf"))
    return scores


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> ForwardResult:
    g, dtype = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    q32, k32, v32 = (_grouped(x, g, dtype) for x in (q, k, v))
    scores = _scores(q32, k32, options)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.unsqueeze(-1))
    if options.dropout is not None:
        p = p * _grouped(options.dropout.mask(q.shape[1]), g, dtype)
    return (p @ v32).flatten(1, 2).to(q.dtype), lse.flatten(1, 2), None


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: None, options: Options
) -> Grads:
    g, dtype = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    dout32, out32, q32, k32, v32 = (_grouped(x, g, dtype) for x in (dout, out, q, k, v))
    p = torch.exp(_scores(q32, k32, options) - _grouped(lse, g, dtype).unsqueeze(-1))
    dropped, dp = p, dout32 @ v32.transpose(-1, -2)
    if options.dropout is not None:
        mask = _grouped(options.dropout.mask(q.shape[1]), g, dtype)
        dropped, dp = p * mask, dp * mask
    dv = (dropped.transpose(-1, -2) @ dout32).sum(2)  # over the query heads that share a key head
    ds = p * (dp - (dout32 * out32).sum(-1, keepdim=True)) * options.scale
    dk = (ds.transpose(-1, -2) @ q32).sum(2)
    return (ds @ k32).flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# ---- torch's own kernels --------------------------------------------------------------------------------------------
# They index lse as a dense [b, n, sq] tensor. Context parallelism passes slices, so these are copied first.


def _flash_cpu_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> ForwardResult:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, options.causal, scale=options.scale)
    return out, lse, None


def _flash_cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any, options: Options
) -> Grads:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.contiguous(), 0.0, options.causal, scale=options.scale
    )


def _flash_cuda_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> ForwardResult:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, options.causal, False, scale=options.scale
    )
    return out, lse, (seed, offset)


def _flash_cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any, options: Options
) -> Grads:
    tensors, lengths = (dout, q, k, v, out, lse.contiguous()), (q.shape[2], k.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(
        *tensors, None, None, *lengths, 0.0, options.causal, *saved, scale=options.scale
    )


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> ForwardResult:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, options.causal, False, scale=options.scale
    )
    return out, lse.squeeze(-1), (seed, offset)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any, options: Options
) -> Grads:
    tensors, lengths = (dout, q, k, v, out, lse.contiguous().unsqueeze(-1)), (q.shape[2], k.shape[2])
    bias = cumulative_q = cumulative_k = None
    return aten._scaled_dot_product_cudnn_attention_backward(
        *tensors, *saved, bias, cumulative_q, cumulative_k, *lengths, 0.0, options.causal, scale=options.scale
    )


REFERENCE = Backend("reference", _reference_forward, _reference_backward, has_dropout=True)
FLASH_CPU = Backend("flash", _flash_cpu_forward, _flash_cpu_backward)
FLASH_CUDA = Backend("flash", _flash_cuda_forward, _flash_cuda_backward)
CUDNN = Backend("cudnn", _cudnn_forward, _cudnn_backward)


# ---- the flash-attn package -----------------------------------------------------------------------------------------


def _import_flash_attn() -> Backend:
    """Wrap FlashAttention-2 of the package flash-attn (Dao 2023). Its tensors are [b, s, n, d]."""
    try:
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
    except ImportError as error:
        raise ValueError(
            "model.attention=flash-attn needs the package flash-attn: "
            f"{pip_install('flash-attn', '--no-build-isolation')}, or use model.attention=auto"
        ) from error

    off = dict(dropout_p=0.0, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None)

    def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> ForwardResult:
        tensors = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, _, rng_state = _flash_attn_forward(
            *tensors, softmax_scale=options.scale, causal=options.causal, return_softmax=False, **off
        )
        return out.transpose(1, 2), lse, rng_state

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any, options: Options
    ) -> Grads:
        tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        dq, dk, dv = grads = [torch.empty_like(x) for x in tensors[1:4]]
        settings = off | dict(softmax_scale=options.scale, causal=options.causal, rng_state=saved)
        settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
        _flash_attn_backward(*tensors, lse.contiguous(), *grads, **settings)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return Backend("flash-attn", forward, backward)
