"""Seconds of one microbatch in one pipeline stage, forward and backward, by what they are spent on.

The idea: a stage is a list of products, attention calls, passes over memory and messages at this rank's *local* sizes,
and `minitron.planning.machine` knows the seconds of each. Per block and token (h hidden, f ffn, w = (n + 2 g) d the
width of q, k, v, all divided by tp; s_ = s / tp with sequence parallelism):

    products      4 forward: h -> w, n d -> h, h -> f (gated: 2 f), f -> h; each again for dx and for dW
    attention     2 products of the pairs under the mask forward, 5 backward
    passes        2 norms with their residual sums (read 2, write 2; backward 3 and 1) on s_, rotary positions, the
                  activation, FP8 casts
    tp messages   forward gather, scatter, gather, scatter; backward the same, and the two inputs gathered again
    cp messages   keys and values around the ring, twice, and their gradients

Hidden or exposed: a message beside a product hides up to that product's time, but for the share `tp_exposed` of it (the
first piece, barriers, a product cut into pieces). Between nodes the four messages of the forward and the gathers of dy
are exposed (parallel/overlap.py, ProcessGroupComm); without overlap all messages are. `full` recomputation repeats the
forward inside the backward, `selective` its norms and activations. A split backward gathers dy once more, for its
weight gradients, whose share of its seconds is `put_off`. LoRA leaves out the products for dW and what only they need,
and adds an adapter's passes: x and y forward (y read and written), x twice, dx, and dy twice backward.

The lengths of documents that are kept apart are known from the data alone; here they are those of random documents.
Left out: adapters' messages, r numbers a token.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from minitron.config.schema import Config
from minitron.config.sizes import (
    GRAD_BYTES,
    MOCK_DOCUMENT,
    ROUNDED_ONCE,
    fp8_layers,
    in_pieces,
    linear_sizes,
    stream_length,
)
from minitron.planning.machine import Machine
from minitron.planning.memory import COLUMN_PARALLEL, ITEM, adapters

Parts = Counter  # seconds by part: gemm, attention, pointwise, {tp,cp}_exposed, {tp,cp}_hidden
# Time of kernels/fused_attention.py with dropout over that of attention without: see benchmarks/ceilings.py
# at GPT-3 175B's shape. 7 products in place of 5 in the backward, and ten integer instructions a score in three passes.
FUSED_ATTENTION = 2.45
HIDDEN = ("tp_hidden", "cp_hidden", "dp_hidden", "put_off")  # beside or within other parts: no time of their own


def document_tokens(cfg: Config) -> float:
    """Average the length of a token's document over all tokens: the sum of squared lengths in a sample over s.

    Of random documents (data/mock.py): lengths uniform up to `data.document_length`, or geometric with a mean
    of a quarter sample, cut at the sample's end.
    """
    s, longest = cfg.train.seq_len, cfg.data.document_length
    if not cfg.data.separate_documents:
        return s
    if longest is None:
        return 2 * MOCK_DOCUMENT * (1 - MOCK_DOCUMENT) * s
    x = s / longest  # the renewal equation's solution: the tail for many documents, a series for few
    return longest * (2 / 3 - 1 / (9 * x)) if x > 1 else s * (1 - x / 3 - x**2 / 12 - x**3 / 60)


def total(parts: Parts) -> float:
    """Sum the seconds that pass: hidden ones are not counted."""
    return sum(seconds for part, seconds in parts.items() if part not in HIDDEN)


class Work:
    """The work of one microbatch on one rank of the layout `cfg.parallel`."""

    def __init__(self, cfg: Config, machine: Machine):
        m, p, t = cfg.model, cfg.parallel, cfg.train
        self.cfg, self.machine, self.model = cfg, machine, m
        self.frozen, self.adapters = cfg.finetune.kind == "lora", adapters(cfg)
        self.grad_bytes = GRAD_BYTES[cfg.optimizer.grad_dtype]
        self.tokens = t.seq_len * t.micro_batch_size // p.cp
        self.slice = stream_length(cfg) * t.micro_batch_size  # rows between the products
        self.in_pieces = machine.inside(p.tp, 1) and in_pieces(p.tp, p.sequence_parallel, p.overlap_tp)
        self.split = p.schedule == "zb-h1"
        self.block = lru_cache(4)(self._block)

    def stage(self, layers: range, first: bool, last: bool) -> tuple[Parts, Parts]:
        """Time (forward, backward) of the blocks `layers`, with the embedding if `first` and the head if `last`."""
        in_fp8 = fp8_layers(self.cfg.precision, self.model.num_layers)
        apart = self.split and not first
        works = [self.block(layer in in_fp8, apart) for layer in layers]
        works += [self.embedding()] if first else []
        works += [self.head(apart)] if last else []
        forward, backward = (sum(parts, Parts()) for parts in zip(*works))
        return forward, backward

    # ---- a block

    def _block(self, fp8: bool, apart: bool = False) -> tuple[Parts, Parts]:
        m, p = self.model, self.cfg.parallel
        h, f, nd = m.hidden_size, m.ffn_hidden_size // p.tp, m.num_heads * m.head_dim // p.tp
        w, inner = nd + 2 * m.kv_heads * m.head_dim // p.tp, f * (2 if m.family == "llama" else 1)
        forward, backward = Parts(), Parts()
        for layer, (k, n) in linear_sizes(m).items():
            n, k, message = (n // p.tp, k, "gather") if layer in COLUMN_PARALLEL else (n, k // p.tp, "scatter")
            self._linear(n, k, message, fp8, apart, forward, backward)
        for layer, adapter in self.adapters.items():
            x, y = (self.slice, self.tokens / p.tp) if layer in COLUMN_PARALLEL else (self.tokens / p.tp, self.slice)
            x, y, some = x * adapter.inputs * ITEM, y * adapter.outputs * ITEM, adapter.targets
            forward["pointwise"] += self.machine.moved(x + 2 * y, 1 + some)
            backward["pointwise"] += self.machine.moved(3 * x + 2 * y, 2 + 2 * some)
            if apart:
                backward["put_off"] += self.machine.moved(x + y, 1 + some)
        self._attention(forward, backward)
        passes = self._passes(fp8, nd, w, f, inner)
        for whole, (moved, kernels) in zip((forward, backward), passes):
            whole["pointwise"] += self.machine.moved(moved, kernels)
        recompute = self.cfg.train.recompute
        if recompute == "full":
            backward.update(forward)
        elif recompute == "selective":  # norms and the activation once more, where a product's input is needed again
            norm = 2 * self.slice * h
            remade = {"attention.qkv": norm, "mlp.up": norm, "mlp.down": self.tokens * (inner + f)}
            for layer, size in remade.items():
                if not self.frozen or layer in self.adapters:
                    backward["pointwise"] += self.machine.moved(size * ITEM)
        return forward, backward

    def _linear(self, n: int, k: int, message: str, fp8: bool, apart: bool, forward: Parts, backward: Parts) -> None:
        """Add three products, two of a frozen weight, and their messages, "gather" or "scatter" in the forward."""
        product, t, frozen = self.machine.product, self.tokens, self.frozen
        y, dx = product(t, n, k, fp8=fp8), product(t, k, n, fp8=fp8)
        dw = 0.0 if frozen else product(t, n, k, fp8=fp8, weight_grad=True, grad_bytes=self.grad_bytes)
        forward["gemm"] += y
        backward["gemm"] += dx
        weights = Parts(gemm=dw)
        apart = apart and not frozen
        width = k if message == "gather" else n  # h: what crosses ranks is hidden-sized
        cast = 1 if fp8 else ITEM
        split = self.cfg.parallel.sequence_parallel
        if message == "gather":
            if split:
                self._tp(forward, cast * width, y, pieces=True)
                if not frozen:
                    self._tp(weights, cast * width, dw if apart else dx)  # x is gathered again beside dx or another dW
            if apart:
                self._tp(backward, ITEM * width, dx, pieces=True)
            else:
                self._tp(backward, ITEM * width, dw)  # dx is scattered, or reduced, beside dW
        else:
            self._tp(forward, ITEM * width, y, pieces=True)
            if split:
                self._tp(backward, cast * width, dx, pieces=True)
                if apart:
                    self._tp(weights, cast * width, dw)
        backward.update(weights)
        if apart:
            backward["put_off"] += total(weights)

    def _tp(self, parts: Parts, bytes_per_token: int, product_seconds: float, *, pieces: bool = False) -> None:
        """Add a message over tp that runs beside a product. pieces: one needs the other, piece by piece."""
        p, exposed_share = self.cfg.parallel, self.machine.fabric.tp_exposed
        seconds = self.machine.collective(bytes_per_token * self.tokens, p.tp, 1)
        if not p.sequence_parallel:
            seconds *= 2  # an all-reduce
        can_hide = 0.0 if not p.overlap_tp or (pieces and not self.in_pieces) else product_seconds
        if pieces:
            can_hide /= 2  # the largest piece is half of the product
        hidden = min(seconds, can_hide) * (1 - exposed_share)
        parts["tp_hidden"] += hidden
        parts["tp_exposed"] += seconds - hidden

    def _attention(self, forward: Parts, backward: Parts) -> None:
        m, p, t = self.model, self.cfg.parallel, self.cfg.train
        keys = document_tokens(self.cfg)
        share = m.num_heads * m.head_dim // p.tp
        pairs = t.micro_batch_size * t.seq_len * keys / 2 / p.cp
        ring = p.cp > 1 and p.cp_style != "ulysses"
        length = keys / p.cp if ring else keys  # of a kernel's call
        one_way = 2 * share * pairs * 2
        attend, back = (self.machine.attention(x * one_way, length, m.head_dim) for x in (1, 2.5))
        if m.attention == "fused" or m.attention == "auto" and m.attention_dropout:
            attend, back = (x * FUSED_ATTENTION for x in (attend, back))
        elif m.attention_dropout:  # the reference backend writes every score, in float32, and passes over them
            scores = 4 * share // m.head_dim * t.micro_batch_size * t.seq_len**2
            attend += self.machine.moved(12 * scores, 6)
            back += self.machine.moved(20 * scores, 10)
        forward["attention"] += attend
        backward["attention"] += back
        if p.cp == 1:
            return
        kv = 2 * m.kv_heads * m.head_dim // p.tp
        if p.cp_style == "ulysses":
            moved = self.machine.collective(self.tokens * (2 * share + kv) * ITEM, p.cp, p.tp)
            forward["cp_exposed"] += moved
            backward["cp_exposed"] += moved
            return
        hops, hop = p.cp - 1, self.machine.message(self.tokens * kv * ITEM, p.cp, p.tp)
        sums = hop * (2 if p.cp > ROUNDED_ONCE else 1)  # in float32
        for parts, kernels, step in ((forward, attend, hop), (backward, back, hop + sums)):
            hidden = min(step, kernels / p.cp)
            parts["cp_hidden"] += hops * hidden
            parts["cp_exposed"] += hops * (step - hidden)
            parts["pointwise"] += self.machine.moved(hops * self.tokens * share * 3 * ITEM, hops)
        backward["cp_exposed"] += sums  # the last hop brings the gradients home

    def _passes(self, fp8: bool, nd: int, w: int, f: int, inner: int) -> tuple[tuple[float, int], tuple[float, int]]:
        """Count (bytes, kernels) of the forward and of the backward; kernels/fused.py says what each kernel moves."""
        m, p = self.model, self.cfg.parallel
        h, llama, t, rows = m.hidden_size, m.family == "llama", self.tokens, self.slice
        forward = backward = 2 * 4 * h * ITEM * rows
        if m.positions == "rope":
            forward += 2 * (w - (w - nd) // 2) * ITEM * t
        backward += 2 * w * ITEM * t  # gradients of q, k, v side by side
        if not (fp8 and llama):
            forward, backward = forward + (inner + f) * ITEM * t, backward + (f + 2 * inner) * ITEM * t
        if not llama and not self.frozen:
            backward += (w + f) * ITEM * t + 2 * h * ITEM * rows  # bias gradients
        if m.hidden_dropout:
            forward, backward = forward + 2 * 5 * h * ITEM * rows, backward + 2 * 2 * h * ITEM * rows
        if self.in_pieces:  # a scatter ends in a sum of tp pieces
            forward, backward = (x + 2 * h * ITEM * (t + rows) for x in (forward, backward))
        kernels = (4, 5) if llama else (3, 8)
        if not fp8:
            return (forward, kernels[0]), (backward, kernels[1])
        # Read, rows written, and columns for a weight gradient; what is gathered gets its columns afterwards.
        written = 1 if self.frozen else 2
        cast = ITEM + written
        forward += cast * (2 * h * rows + nd * t)
        backward += cast * (2 * h * rows + w * t) + (4 * 2 * h * t if p.tp > 1 and not self.frozen else 0)
        if llama:
            forward += (inner * ITEM + written * f) * t
            backward += ((f + inner) * ITEM + written * inner) * t
        else:
            forward, backward = forward + cast * f * t, backward + cast * inner * t
        return (forward, kernels[0] + 4), (backward, kernels[1] + 6)

    # ---- the ends

    def embedding(self) -> tuple[Parts, Parts]:
        rows = self.model.hidden_size * self.tokens
        moved = self.machine.collective(rows * ITEM, self.cfg.parallel.tp, 1)
        forward, backward = (
            Parts(pointwise=self.machine.moved(num_bytes, 3), tp_exposed=moved)
            for num_bytes in (3 * ITEM * rows, 5 * self.grad_bytes * rows)
        )
        return forward, Parts() if self.frozen else backward

    def head(self, apart: bool = False) -> tuple[Parts, Parts]:
        """Time the final norm, the product with the vocabulary and the loss; never in FP8."""
        h, v = self.model.hidden_size, self.model.padded_vocab_size // self.cfg.parallel.tp
        forward, backward = Parts(), Parts()
        self._linear(v, h, "gather", False, apart, forward, backward)
        forward["pointwise"] += self.machine.moved((4 * h * self.slice + v * self.tokens) * ITEM, 6)
        backward["pointwise"] += self.machine.moved((4 * h * self.slice + 2 * v * self.tokens) * ITEM, 4)
        return forward, backward
