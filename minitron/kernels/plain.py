"""What lies between the GEMMs, in a few lines of torch each, for any device: the contract of kernels/fused.py.

Each function is a whole forward or a whole backward, without autograd. The layers wrap a pair of them in an autograd
function, which chooses what to save. kernels/kernels.py chooses once per run between this module and fused.py (Triton),
which has the same functions. planner/dryrun/kernels.py has them for dry runs.

    add_norm                     the sum of the residual stream and its norm   Zhang & Sennrich 2019, Ba et al. 2016
    swiglu, gelu                 activations                                   Shazeer 2020, Hendrycks & Gimpel 2016
    split_heads                  rotary positions, and the split in q, k, v    Su et al. 2021
    merge_                       attention over two sets of keys               Milakov & Gimelshein 2018
    sum_parts                    partial sums of a product over ranks
    add_product                  a weight gradient, added to the earlier ones
    add_rows_                    the gradient of an embedding
    softmax_sums, _gradient_     the parts of a cross-entropy that one rank computes alone
    drop_elements                dropout, given its counters                   kernels/rng.py
    cast_master                  an FP8 weight, from the optimizer's state
    adamw_                       the update of flat optimizer states           Loshchilov & Hutter 2019

A function whose name ends in `_` changes its arguments in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minitron.kernels.gemm import CastInto, Payload
from minitron.kernels.rng import drop_elements as drop_elements  # one of this module's functions

Updated = Callable[[int], None]
Terms = tuple[Tensor, Tensor | None, Tensor | None]  # of a sum: x, delta and delta_bias
Normed = tuple[Tensor, Tensor | Payload, Tensor]  # the sum, its norm or the norm's cast, statistics
WithSum = tuple[Tensor | Payload, Tensor | None]  # a gradient or its cast; its sum over rows, if asked for
Rope = tuple[Tensor, Tensor]  # cos and sin, [s, b or 1, 1, d/2] float32


# ---- residual and norm -----------------------------------------------------------------------------------------------


def add_norm(terms: Terms, weight: Tensor, bias: Tensor | None, eps: float, into: CastInto | None = None) -> Normed:
    """Compute total = x + delta + delta_bias and its norm: LayerNorm with `bias`, else RMSNorm. No delta: total is x.

    terms: x, delta [..., h] and delta_bias [h]. weight, bias [h]. Returns total and y [..., h] in x's dtype, and
    float32 statistics for the backward. y is the norm of the rounded total. Statistics: [1, ...] 1 / (root mean
    square), or [2, ...] 1 / (standard deviation) and mean. into: return the cast of y instead of y.
    """
    x, delta, delta_bias = terms
    assert delta is not None or delta_bias is None
    total = x
    if delta is not None:
        total = x.float() + delta.float()
        total = (total if delta_bias is None else total + delta_bias.float()).to(x.dtype)
    centred, means = total.float(), []
    if bias is not None:
        means = [centred.mean(-1)]
        centred = centred - means[0].unsqueeze(-1)
    rstd = (centred.square().mean(-1) + eps).rsqrt()
    y = centred * rstd.unsqueeze(-1) * weight.float()
    y = y if bias is None else y + bias.float()
    y, statistics = y.to(x.dtype), torch.stack([rstd, *means])
    return total, _cast_if(y, into), statistics


def add_norm_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, statistics: Tensor, weight: Tensor, delta_bias: bool, frozen: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, which is also ddelta, in total's dtype; and float32 [h] dweight, dbias (LayerNorm), ddelta_bias.

    dtotal: the gradient of the sum, None if only the norm read it. delta_bias: compute ddelta_bias. frozen: compute dx
    only.
    """
    rstd, *means = statistics.unsqueeze(-1)
    normal = (total.float() - means[0] if means else total.float()) * rstd
    dy = dy.float()
    grad = dy * weight.float()
    dx = grad - normal * (grad * normal).mean(-1, keepdim=True)
    dx = (dx - grad.mean(-1, keepdim=True) if means else dx) * rstd
    dx = dx if dtotal is None else dx + dtotal.float()
    if frozen:
        return dx.to(total.dtype), None, None, None
    dweight, dbias, ddelta_bias = (x.flatten(0, -2).sum(0) for x in (dy * normal, dy, dx))
    return dx.to(total.dtype), dweight, dbias if means else None, ddelta_bias if delta_bias else None


# ---- activations -----------------------------------------------------------------------------------------------------
# A backward returns the gradient dx of the input. sums: also return the float32 sum of dx over all dims but the last,
# the gradient of a bias before the activation. into: return the cast of the result, a matrix, instead of the result.
# The result is rounded to x's dtype before the cast. over_x: x is not needed any more, so a dx that is not cast is
# written over it. Keep NaN and infinity in the result: they make the optimizer skip the step.


def swiglu_forward(x: Tensor, into: CastInto | None = None) -> Tensor | Payload:
    """Compute silu(gate) * up. x is gate and up side by side: [..., 2f] -> [..., f]."""
    gate, up = x.chunk(2, -1)
    return _cast_if(F.silu(gate) * up, into)


def swiglu_backward(
    dy: Tensor, x: Tensor, sums: bool = False, into: CastInto | None = None, over_x: bool = False
) -> WithSum:
    """Compute dx [..., 2f] from dy [..., f] and the input x."""
    gate, up = x.chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return _input_grad(torch.cat([dy * up * (sigmoid + silu * (1 - sigmoid)), dy * silu], -1), x, sums, into, over_x)


def gelu_forward(x: Tensor, into: CastInto | None = None) -> Tensor | Payload:
    """Compute GELU in the tanh form that GPT-2 and GPT-3 use."""
    return _cast_if(F.gelu(x, approximate="tanh"), into)


def gelu_backward(
    dy: Tensor, x: Tensor, sums: bool = False, into: CastInto | None = None, over_x: bool = False
) -> WithSum:
    """Compute dx from dy and the input x, all [..., f]."""
    return _input_grad(torch.ops.aten.gelu_backward(dy, x, approximate="tanh"), x, sums, into, over_x)


def _input_grad(dx: Tensor, x: Tensor, sums: bool, into: CastInto | None, over_x: bool) -> WithSum:
    total = sum_rows(dx) if sums else None
    return x.copy_(dx) if over_x and into is None else _cast_if(dx, into), total


# ---- FP8 casts -------------------------------------------------------------------------------------------------------


def cast(x: Tensor, into: CastInto) -> Payload:
    """Cast x [m, k] times a scale to FP8."""
    scale, amax, fp8_dtype, columnwise = into
    if amax is not None:
        torch.maximum(amax, largest(x), out=amax)
    limit = torch.finfo(fp8_dtype).max  # a conversion to float8 does not saturate
    rows, scale_inv = (x.float() * scale).clamp(-limit, limit).to(fp8_dtype), scale.reciprocal()
    return Payload(rows, scale_inv, transpose(rows), scale_inv) if columnwise else Payload(rows, scale_inv)


def _cast_if(x: Tensor, into: CastInto | None) -> Tensor | Payload:
    return x if into is None else cast(x.flatten(0, -2), into)


def sum_rows(x: Tensor) -> Tensor:
    """Sum x [..., k] over all dims but the last: [k] float32."""
    return x.flatten(0, -2).sum(0, dtype=torch.float32)


def largest(x: Tensor) -> Tensor:
    """Return the largest magnitude of x: [1] float32."""
    return x.abs().amax().float().view(1)


def transpose(x: Tensor) -> Tensor:
    """Return a contiguous transpose of an FP8 matrix. It copies bytes: some devices have no copy kernel for float8."""
    return x.view(torch.uint8).t().contiguous().view(x.dtype)


# ---- rotary positions ------------------------------------------------------------------------------------------------


def rotate(x: Tensor, rope: Rope, sign: int = 1) -> Tensor:
    """Rotate channels i and i + d/2 together (the convention of Hugging Face's Llama). x [s, b, n, d]."""
    (first, second), (cos, sin) = x.float().chunk(2, -1), rope
    sin = sin * sign
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def split_heads(qkv: Tensor, sizes: tuple[int, int, int], rope: Rope) -> tuple[Tensor, ...]:
    """Split qkv [s, b, n + 2g, d] into q, k, v, of sizes (n, g, g), and rotate q and k. May overwrite qkv."""
    q, k, v = qkv.split(sizes, 2)
    return rotate(q, rope), rotate(k, rope), v.contiguous()  # a copy, so that qkv can be freed


def split_heads_backward(grads: tuple[Tensor, Tensor, Tensor], rope: Rope) -> Tensor:
    """Rotate dq and dk back and concatenate: dq, dk, dv [s, b, n or g, d] -> dqkv [s, b, n + 2g, d]."""
    dq, dk, dv = grads
    return torch.cat([rotate(dq, rope, -1), rotate(dk, rope, -1), dv], 2)


# ---- attention, merged from two sets of keys -------------------------------------------------------------------------


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge attention over two sets of keys into out [b, n, s, d] and lse [b, n, s]; any strides.

    The weight of the block is e^(block_lse - merged lse), a sigmoid of the difference, which cannot overflow.
    """
    wide = torch.promote_types(out.dtype, torch.float32)
    out.copy_(torch.lerp(out.to(wide), block_out.to(wide), torch.sigmoid(block_lse - lse).unsqueeze(-1).to(wide)))
    torch.logaddexp(lse, block_lse, out=lse)


# ---- partial sums ----------------------------------------------------------------------------------------------------


def sum_parts(parts: Tensor, onto: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Sum [p, ...] over p, in float32 or better, and round once.

    onto [...]: add the sum to it in place, and return it. out [...]: write onto + the sum to `out` instead, and return
    `out`; `onto` does not change.
    """
    wide = torch.promote_types(parts.dtype, torch.float32)
    if onto is None:
        return parts.sum(0)
    return (onto if out is None else out).copy_(onto + parts.sum(0, dtype=wide))


def square_sum(x: Tensor) -> Tensor:
    """Sum the squares, 0-d float64: float32 sums of many squares are inexact on a CPU."""
    return torch._foreach_norm([x], 2, torch.float64)[0].square()


# ---- gradients of weights --------------------------------------------------------------------------------------------


def add_product(out: Tensor, dy: Tensor, x: Tensor, *, add: bool) -> None:
    """Write dy^T x to out [n, k], or `add` it; dy [m, n], x [m, k]. Without `add` the old out may even be NaN.

    out is float32 or wider; or it has the 16-bit dtype of dy and x, and the float32 sum is rounded once.
    """
    if out.itemsize >= 4:
        out.addmm_(dy.t().to(out.dtype), x.to(out.dtype), beta=int(add))
    else:
        product = dy.t().float() @ x.float()
        out.add_(product) if add else out.copy_(product)


# ---- embedding -------------------------------------------------------------------------------------------------------


def add_rows_(table: Tensor, ids: Tensor, first: int, rows: Tensor, in_order: bool = False) -> Tensor:
    """Add each row to table[id - first], if the id is within the table. table [v, h], ids [...], rows [..., h].

    in_order: add rows in a fixed order, so that sums on two ranks or in two runs are equal bit by bit. For a 16-bit
    table rows are summed in float32 and rounded once, as torch does on a CPU; bf16 sums would lose small terms.
    """
    local = ids.flatten() - first
    outside = (local < 0) | (local >= table.shape[0])
    local, rows = local.masked_fill(outside, 0), rows.flatten(0, -2).masked_fill(outside.unsqueeze(-1), 0)
    if in_order and table.is_cuda:  # on CUDA index_add_ adds in any order and index_put_ sorts
        return table.index_put_((local,), rows.to(table.dtype), accumulate=True)
    return table.index_add_(0, local, rows.to(table.dtype))


# ---- cross-entropy ---------------------------------------------------------------------------------------------------


def softmax_sums(logits: Tensor, labels: Tensor, first: int, num_ids: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reduce each row of logits [..., v] to its maximum, its sum of exp(x - maximum) and the label's logit.

    labels are global ids, and `first` is the id of column 0. The logit of a label in another rank's columns is 0.
    Columns from num_ids on are padding and do not count: a row of padding has maximum -inf and sum 0. Returns three
    float32 tensors [...].
    """
    x = logits[..., :num_ids].float()
    local, inside = _local(labels, first, x.shape[-1])
    top = x.amax(-1) if x.shape[-1] else x.new_full(labels.shape, float("-inf"))
    total = (x - top.unsqueeze(-1)).exp_().sum(-1)
    picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).float()
    return top, total, picked.masked_fill_(~inside, 0)


def softmax_gradient_(logits: Tensor, labels: Tensor, first: int, lse: Tensor, dloss: Tensor, num_ids: int) -> Tensor:
    """Replace the logits by their gradient, (softmax - onehot(label)) * dloss; exactly 0 in padding columns."""
    local, inside = _local(labels, first, num_ids)
    grad = (logits.float() - lse.unsqueeze(-1)).exp_()
    grad.scatter_add_(-1, local.unsqueeze(-1), -inside.unsqueeze(-1).float())
    grad.mul_(dloss.unsqueeze(-1))
    grad[..., num_ids:] = 0
    return logits.copy_(grad)


def _local(labels: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return each label's column on this rank, 0 if another rank has the label; and whether this rank has the label."""
    local = labels - first
    inside = (local >= 0) & (local < size)
    return local.masked_fill(~inside, 0), inside


# ---- weights that are kept as FP8 bytes ------------------------------------------------------------------------------


def cast_master(master: Tensor, scale: Tensor, out: Tensor | None, amax: Tensor | None) -> None:
    """Round masters [n] to bf16, as the model has them, and cast them times scale [1] to `out` [n], an FP8 dtype.

    amax [1] becomes the maximum of itself and their largest magnitude. out or amax may be None.
    """
    rounded = master.bfloat16().unsqueeze(0)
    if amax is not None:
        torch.maximum(amax, largest(rounded), out=amax)
    if out is not None:
        values = cast(rounded, CastInto(scale, None, out.dtype)).rowwise
        out.view(torch.uint8).copy_(values.view(-1).view(torch.uint8))


# ---- AdamW -----------------------------------------------------------------------------------------------------------


class AdamState(NamedTuple):
    """Flat float32 tensors [n]. `grad` may be bf16. `param` is the model's slice, which may be the master itself."""

    master: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    param: Tensor
    decay: float


class AdamHyper(NamedTuple):
    """Numbers of AdamW that all states share."""

    lr: float
    betas: tuple[float, float]
    eps: float


def adamw_(
    states: list[AdamState], steps: Tensor, divisor: Tensor, skipped: Tensor, hyper: AdamHyper, updated: Updated
) -> None:
    """Update every state with grad / divisor, unless skipped is 1, and cast the master to `param`.

    steps: updates including this one. steps, divisor and skipped are 0-d float32 on the device. Gradients are invalid
    after this call. It calls updated(i) as soon as state i has its new parameters.
    """
    for decay in {s.decay for s in states}:
        masters, grads, exp_avgs, exp_avg_sqs, _, _ = map(list, zip(*(s for s in states if s.decay == decay)))
        grads = [grad.float() for grad in grads]
        rates = dict(lr=hyper.lr, beta1=hyper.betas[0], beta2=hyper.betas[1], weight_decay=decay)
        options: dict[str, Any] = rates | dict(eps=hyper.eps, grad_scale=divisor, found_inf=skipped)
        options |= dict(amsgrad=False, maximize=False)
        torch._fused_adamw_(masters, grads, exp_avgs, exp_avg_sqs, [], [steps] * len(masters), **options)
    for i, s in enumerate(states):
        if s.param.dtype != torch.float32:
            s.param.copy_(s.master)
        updated(i)
