"""LoRA: trained low-rank adapters beside frozen weights (Hu et al. 2021).

Problem: to train all weights takes 16 bytes each, 14 of them for gradient and optimizer. The idea: freeze W and learn a
difference of low rank r, B A. B starts at zero, so training starts from the model itself.

    y = x W^T + alpha/r (dropout(x) A^T) B^T           x [m, k], W [n, k], A [r, k], B [n, r]

W needs no weight gradient. This saves a third of the work, and the memory of the activation that this product reads.
The products with A and B are r wide: they cost passes over x, y and their gradients, but little arithmetic.

An adapter adds to a linear layer's product, in any number format, and is split over tp as the layer is. Ranks exchange
u = x A^T, r numbers a token, by the layer's own f and g (comm/collectives.py), so x is not gathered a second time:

    column-parallel   A whole, B by rows:     u of this rank's tokens -> f -> u B^T    backward: g
    row-parallel      A by columns, B whole:  partial sums of u -> g -> u B^T          backward: f

A whole factor's gradient is summed over tp, like a norm's (optim/buckets.py). A fused weight has one adapter for all
its outputs (`qkv`), or several for parts of them (`q`, `v`). These read x in one product, with their A stacked, and
each adds to its own columns of y.

    blocks.0.attention.qkv.adapter.a [2 r, h], .b.q [n d, r], .b.v [g d, r]     for targets q and v

Left out: adapters of the embedding and the head, and freeing the bf16 copy of weights that FP8 products read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitron.comm.collectives import gather_start
from minitron.comm.handle import Handle
from minitron.config.schema import Config
from minitron.config.sizes import AdaptedRows, adapted
from minitron.kernels.gemm import Payload
from minitron.kernels.param import Param, Shard, named_params_of
from minitron.kernels.rng import drop_by_name
from minitron.model.gpt import GPT
from minitron.parallel.layer_context import LayerContext
from minitron.parallel.linear import ParallelLinear, RecomputeInput, rows, unrows

FIRST_SITE = 3  # of dropout within a block; the residual stream has the sites before


def attach(model: GPT, cfg: Config) -> None:
    """Freeze the chunk's weights and give its layers the adapters that cfg.lora names."""
    model.requires_grad_(False)
    model.drops = model.drops or cfg.lora.dropout > 0
    for layer, block in model.blocks.items():
        for site, (name, spans) in enumerate(adapted(cfg.model, cfg.lora.targets).items(), FIRST_SITE):
            if spans:
                linear = block.get_submodule(name)
                assert isinstance(linear, ParallelLinear)
                linear.adapter = Adapter(linear, spans, cfg, model.context, (int(layer), site))
                for part, param in named_params_of(linear.adapter):
                    param.spec = replace(param.spec, name=f"blocks.{layer}.{name}.adapter.{part}")


class Adapter(nn.Module):
    """Replaces a linear layer's product: x -> x W^T + bias + the adapters' updates, communication included.

    a [targets * rank, k] and, by target, b [rows, rank]. place: (layer, site) of its dropout.
    """

    def __init__(
        self,
        linear: ParallelLinear,
        spans: dict[str, AdaptedRows],
        cfg: Config,
        context: LayerContext,
        place: tuple[int, int],
    ):
        super().__init__()
        axis, rank, by_rows = context.axis, cfg.lora.rank, linear.op.by_columns
        k = linear.weight.shape[1] * (1 if by_rows else axis.size)
        # The variance of PEFT's and Hu et al.'s uniform start, 1 / 3k.
        self.a = context.parameter(
            (len(spans) * rank, k), None if by_rows else Shard(1, axis, (k,)), std=(3 * k) ** -0.5
        )
        self.b = nn.ParameterDict()
        for target, span in spans.items():  # one by one: ParameterDict sorts the keys of a dict
            self.b[target] = context.parameter((span.size, rank), Shard(0, axis, span.chunks) if by_rows else None)
        split = axis.size if by_rows else 1
        # For each target's B on this rank: (the columns of y that it adds to, the columns of u that it reads)
        self.places = [
            (slice(span.start // split, (span.start + span.size) // split), slice(i * rank, (i + 1) * rank))
            for i, span in enumerate(spans.values())
        ]
        self.scale, self.dropout, self.place = cfg.lora.scale, cfg.lora.dropout, place
        self.op = linear.op
        self.ops, self.gemm = context.kernels.ops, context.kernels.gemm
        self.first_channel = 0 if by_rows else axis.rank * self.a.shape[1]

    def forward(self, x: Tensor, recompute_input: RecomputeInput | None, counters: Tensor | None) -> Tensor:
        """Map x [s', b, k]. recompute_input: as for `apply_linear`; counters [s', b]: dropout counters or None."""
        return _Adapted.apply(x, self, recompute_input, counters, torch.is_grad_enabled(), self.a, *self.b.values())

    def add_gradient(self, factor: Param, dy: Tensor, x: Tensor) -> Tensor | None:
        """Add dy^T x to the factor's main_grad, now or in a BackwardWeight; without a slot return it."""
        add, weight_queue = partial(self.gemm.weight_grad, factor, Payload(dy)), self.op.weight_queue
        if not weight_queue.deferring:
            return add(Payload(x))
        weight_queue.put(partial(Handle, Payload(x.detach())), add)
        return None

    def exchange(self, u: Tensor, *, forward: bool) -> Handle[Tensor]:
        """Begin f of u [m, r] in a column-parallel layer, g in a row-parallel one; vice versa in the backward pass."""
        comm = self.op.comm
        return gather_start(u, comm.gather_axis) if self.op.by_columns == forward else comm.start_scatter(u)

    def drop(self, x: Tensor, counters: Tensor | None) -> Tensor:
        """Apply the adapter's dropout to x, with one mask in forward and backward. It is its own adjoint."""
        if counters is None or not self.dropout:
            return x
        return drop_by_name(x, self.dropout, counters, self.place, self.ops.drop_elements, self.first_channel)

    def scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x with the weight and with alpha/r, in one product."""
        return x.new_empty(x.shape[0], weight.shape[1]).addmm_(x, weight, beta=0, alpha=self.scale)


class _Adapted(torch.autograd.Function):
    """Keeps u, and x unless it is recomputed. The layer's own product runs beside the exchange of u or its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        adapter: Adapter,
        recompute_input: RecomputeInput | None,
        counters: Tensor | None,
        training: bool,
        a: Param,
        *b: Param,
    ) -> Tensor:
        linear = adapter.op
        exchange = adapter.exchange(adapter.scaled(rows(adapter.drop(x, counters)), a.t()), forward=True)
        payload = linear.gemm.quantize(rows(x), linear.input_axis, columnwise=False, update_history=training)
        y = linear.forward(payload)
        u = exchange.wait()
        for (outputs, columns), factor in zip(adapter.places, b, strict=True):
            y[:, outputs].addmm_(u[:, columns], factor.t())
        ctx.save_for_backward(u, None if recompute_input is not None else x)
        ctx.adapter, ctx.recompute_input, ctx.counters = adapter, recompute_input, counters
        return unrows(y, x.shape[1:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        adapter, counters, (u, x) = ctx.adapter, ctx.counters, ctx.saved_tensors
        linear, batch, dy, factors = adapter.op, dy.shape[1:-1], rows(dy), list(adapter.b.values())
        du, dx = torch.empty_like(u), None
        for (outputs, columns), factor in zip(adapter.places, factors):
            du[:, columns].addmm_(dy[:, outputs], factor, beta=0, alpha=adapter.scale)
        exchange = adapter.exchange(du, forward=False)
        if ctx.needs_input_grad[0]:
            payload = linear.gemm.quantize_grad(dy, linear.grad_axis, columnwise=False)
            dx, _ = linear.backward(payload, None, need_dx=True)
        db = [
            adapter.add_gradient(factor, dy[:, outputs], u[:, columns])
            for (outputs, columns), factor in zip(adapter.places, factors)
        ]
        du = exchange.wait()
        x = x if ctx.recompute_input is None else ctx.recompute_input()
        da = adapter.add_gradient(adapter.a, du, rows(adapter.drop(x, counters)))
        if dx is not None:
            if counters is None or not adapter.dropout:
                dx.addmm_(du, adapter.a)  # no tensor of x's size beside dx
            else:
                dx += rows(adapter.drop(unrows(du @ adapter.a, batch), counters))
            dx = unrows(dx, batch)
        return dx, None, None, None, None, da, *db
