"""The plain twin of every attention path: one masked softmax in float64, on one process."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from minitron.kernels.attention import FLASH_CPU, REFERENCE, Options
from minitron.kernels.rng import AttentionDropout


def allowed_pairs(seq_len: int, boundaries=None) -> np.ndarray:
    """bool [s, s]: query (row) may see key (column): causal, and within one document if there are boundaries."""
    pairs = np.tri(seq_len, dtype=bool)
    if boundaries is not None:
        document = np.searchsorted(boundaries, np.arange(seq_len), side="right")
        pairs &= document[:, None] == document[None, :]
    return pairs


def attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, dropout_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q [b, n, sq, d]; k, v [b, g, sk, d]; allowed [(b, 1,) sq, sk] -> out, lse, in the dtype of q."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
    p = scores.softmax(-1)
    if dropout_mask is not None:
        p = p * dropout_mask
    return p @ v, scores.logsumexp(-1)


def attend_with_grads(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, dropout_mask: Tensor | None = None
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv in float64, by autograd; dropout_mask as in `attend`."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = attend(q, k, v, allowed, None if dropout_mask is None else dropout_mask.double())
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.double())
    return dict(out=out.detach(), lse=lse.detach(), dq=dq, dk=dk, dv=dv)


def _flash_that_masks_documents(way: str):
    flash, plain = getattr(FLASH_CPU, way), getattr(REFERENCE, way)
    return lambda *args: (flash if args[-1].document_bounds is None else plain)(*args)


# Backends of a CPU that take all documents in one call, like `fused` on a GPU.
_WAYS = {way: _flash_that_masks_documents(way) for way in ("forward", "backward")}
PACKS = dataclasses.replace(FLASH_CPU, **_WAYS, masks_documents=True)
PLAIN_PACKS = dataclasses.replace(REFERENCE, masks_documents=True)


def random_block(
    sq: int, sk: int, *, b=2, n=4, g=2, d=16, dtype=torch.float32, device="cpu", permuted=True
) -> list[Tensor]:
    """dout, q [b, n, sq, d] and k, v [b, g, sk, d]; if `permuted`, views of [s, b, n, d] tensors as the model has."""
    generator = torch.Generator().manual_seed(sq * 1000 + sk)

    def draw(s: int, heads: int) -> Tensor:
        shape = (s, b, heads, d) if permuted else (b, heads, s, d)
        x = torch.randn(shape, generator=generator).to(device, dtype)
        return x.permute(1, 2, 0, 3) if permuted else x

    return [draw(sq, n), draw(sq, n), draw(sk, g), draw(sk, g)]


def run_backend(backend, dout, q, k, v, causal: bool, **more) -> dict[str, Tensor]:
    options = Options(causal, q.shape[-1] ** -0.5, **more)
    out, lse, saved = backend.forward(q, k, v, options)
    dq, dk, dv = backend.backward(dout, q, k, v, out, lse, saved, options)
    return dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)


def run_backend_in_two_blocks(backend, dout, q, k, v) -> dict[str, Tensor]:
    """Causal attention as a ring rank does it: the second half of the queries sees the first half of the keys apart.

    Returns what `run_backend(..., causal=True)` does, from three blocks: two triangles and a square whose
    slices are views into the whole, with the merged out and lse going into each backward.
    """
    scale, half = q.shape[-1] ** -0.5, q.shape[2] // 2
    lo, hi = slice(0, half), slice(half, None)
    blocks = [(lo, lo, True), (hi, hi, True), (hi, lo, False)]
    forward = [backend.forward(q[:, :, i], k[:, :, j], v[:, :, j], Options(causal, scale)) for i, j, causal in blocks]
    (out_lo, lse_lo, _), (out_hi, lse_hi, _), (out_off, lse_off, _) = forward
    lse_all = torch.cat([lse_lo, torch.logaddexp(lse_hi, lse_off)], -1)
    out_all = torch.cat(
        [
            out_lo,
            out_hi * torch.exp(lse_hi - lse_all[:, :, hi]).unsqueeze(-1)
            + out_off * torch.exp(lse_off - lse_all[:, :, hi]).unsqueeze(-1),
        ],
        2,
    )
    out_all = torch.empty_like(q).copy_(out_all)
    sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)]
    for (i, j, causal), (_, _, saved) in zip(blocks, forward):
        parts = backend.backward(
            dout[:, :, i],
            q[:, :, i],
            k[:, :, j],
            v[:, :, j],
            out_all[:, :, i],
            lse_all[:, :, i],
            saved,
            Options(causal, scale),
        )
        for total, rows, part in zip(sums, (i, j, j), parts):
            total[:, :, rows] += part
    return dict(out=out_all, lse=lse_all, dq=sums[0], dk=sums[1], dv=sums[2])


def random_dropout(s: int, p: float, *, b=2, seed=0, device="cpu") -> AttentionDropout:
    counters = torch.randint(2**32, (s, b), generator=torch.Generator().manual_seed(s + seed)).to(device)
    return AttentionDropout(p, counters, layer=3, first_head=5)


def kept_in_each_product(backend, s: int, d: int, dropout, *, n=2, dtype=torch.float32, device="cpu"):
    """What a backend's products keep, without a rounding: bool [b, n, s, s] of out, dv, dq and dk.

    All scores are 0. d keys (for dk: queries) at a time are unit vectors, so that each element of a result comes from
    a single probability.
    """
    b, options = dropout.counters.shape[1], Options(causal=False, scale=1.0, dropout=dropout)
    kept = {name: torch.zeros(b, n, s, s, dtype=torch.bool, device=device) for name in ("out", "dv", "dq", "dk")}
    zeros, ones = (make(b, n, s, d, dtype=dtype, device=device) for make in (torch.zeros, torch.ones))
    for first in range(0, s, d):
        window = slice(first, min(first + d, s))
        units = torch.eye(s, device=device, dtype=dtype)[:, window]
        units = torch.nn.functional.pad(units, (0, d - units.shape[1])).expand(b, n, s, d)
        width = window.stop - first
        out, lse, saved = backend.forward(zeros, zeros, units, options)
        kept["out"][..., window] = out[..., :width] != 0
        _, _, dv = backend.backward(units, zeros, zeros, zeros, zeros, lse, saved, options)
        kept["dv"][:, :, window] = dv.transpose(-1, -2)[:, :, :width] != 0
        dq, _, _ = backend.backward(ones, zeros, units, ones, zeros, lse, saved, options)
        kept["dq"][..., window] = dq[..., :width] != 0
        _, dk, _ = backend.backward(ones, units, zeros, ones, zeros, lse, saved, options)
        kept["dk"][:, :, window] = dk.transpose(-1, -2)[:, :, :width] != 0
    return kept
