"""Seconds of one microbatch in one pipeline stage, forward and backward, by part.

The idea: a stage is a list of products, attention calls, passes over memory and messages at this rank's *local* sizes,
and `minitron.planner.machine` has a formula for the seconds of each. Per block and token (h hidden, f ffn,
w = (n + 2 g) d the width of q, k, v, all divided by tp; s_ = s / tp with sequence parallelism):

    products      4 forward: h -> w, n d -> h, h -> f (gated: 2 f), f -> h; each again for dx and for dW
    attention     2 products of the pairs under the mask forward, 5 backward
    passes        2 norms with their residual sums (read 2, write 2; backward 3 and 1) on s_, rotary positions, the
                  activation, FP8 casts
    tp messages   forward gather, scatter, gather, scatter; backward the same, and the two inputs gathered again
    cp messages   keys and values around the ring, twice, and their gradients

The cost of a tp message depends on its overlap with products (parallel/overlap.py):

    in pieces     copies between GPUs of a node, of pieces of the operand or of the result of one product. In a gather
                  the first copy overlaps nothing; in a scatter the last copy overlaps nothing. Other copies are hidden
                  as far as products last. Each piece reads the whole weight. The forward's four, and the gathers of dy
    beside        the whole message, beside a product that does not depend on it; the rest is exposed if it is longer
    alone         the forward's four, and the gathers of dy, between nodes; all messages without overlap

Overlapped communication slows concurrent kernels: NCCL takes SMs, and copies bring barriers and sums. Kernels beside
it take longer by a share of its time.

`full` recomputation repeats the forward inside the backward. `selective` repeats norms and activations; with --software
megatron it repeats the core of attention. A split backward gathers dy once more for its weight gradients. Their seconds
are `deferred`. LoRA leaves out the products for dW and what only they need, and adds an adapter's passes: x and y
forward (y read and written), x twice, dx, and dy twice backward.

Host: the launches of a block's kernels and copies; none in a recorded step. If they take longer than the kernels, the
GPU waits, and this time is `host`.

The lengths of documents that are kept apart are known from the data alone; here they are those of random documents.
Left out: adapters' messages, r numbers a token.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import ceil, log2

from minitron.config import sizes
from minitron.config.schema import Config
from minitron.config.sizes import COLUMN_PARALLEL, GRAD_BYTES, ITEM, MAX_BF16_TERMS, MOCK_DOCUMENT
from minitron.planner.machine import Machine

SecondsByPart = Counter  # seconds by part: gemm, attention, pointwise, host, {tp,cp}_exposed, {tp,cp}_hidden
# The constants below are measured: benchmarks/results/recipes.md and ceilings.py.
# Time of kernels/fused_attention.py with dropout over that of attention without. It makes 7 products in place of 5 in
# the backward, and draws the mask in three passes.
FUSED_ATTENTION = 2.45
# Documents in one call of it, without dropout, run at flash attention 2's rate for this multiple of their lengths.
PACKED_KEYS = 1.4
# The factor of dropout in other attention, (forward, backward), by whether it is flash attention 2: cuDNN's forward is
# so fast that drawing the mask takes as long.
DROPPED = {False: (2.1, 1.2), True: (1.15, 1.1)}
# Kernels and copies of a block, forward and backward together, and the shares of both in the host's time.
NODES, NODES_PER_DOUBLING, NODES_OF_MESSAGES, NODES_OF_FP8, NODES_OF_RING, NODES_OF_ADAPTER = 50, 44, 60, 14, 25, 8
NODES_OF_QK_NORM = 15
SHARES = 0.37, 0.63
UNFUSED_ATTENTION_BACK = 2.0  # its backward makes four products of whole matrices, its forward two
HIDDEN = ("tp_hidden", "cp_hidden", "dp_hidden", "deferred")  # concurrent with other parts, or within them


def document_tokens(cfg: Config) -> float:
    """Average the length of a token's document over all tokens: the sum of squared lengths in a sample over s.

    The documents are random (data/mock.py): lengths are uniform up to `data.document_length`, or geometric with a mean
    of a quarter sample, cut at the sample's end.
    """
    s, longest = cfg.train.seq_len, cfg.data.document_length
    if not cfg.data.separates:
        return s
    if longest is None:
        return 2 * MOCK_DOCUMENT * (1 - MOCK_DOCUMENT) * s
    x = s / longest  # the renewal equation's solution: the tail for many documents, a series for few
    return longest * (2 / 3 - 1 / (9 * x)) if x > 1 else s * (1 - x / 3 - x**2 / 12 - x**3 / 60)


def total(parts: SecondsByPart) -> float:
    """Sum the seconds that pass: hidden ones are not counted."""
    return sum(seconds for part, seconds in parts.items() if part not in HIDDEN)


class StageTime:
    """The seconds of one microbatch on one rank of the layout `cfg.parallel`."""

    def __init__(self, cfg: Config, machine: Machine):
        m, p, t = cfg.model, cfg.parallel, cfg.train
        self.cfg, self.machine, self.model = cfg, machine, m
        self.frozen, self.adapters = cfg.finetune.kind == "lora", sizes.adapters(cfg)
        self.grad_bytes = GRAD_BYTES[cfg.optimizer.accumulates_in]
        # Local widths: the MLP's and with its gate, the attention's output, and q, k, v side by side.
        self.f, self.nd = m.ffn_hidden_size // p.tp, m.num_heads * m.head_width // p.tp
        self.inner, self.w = self.f * (2 if m.family == "llama" else 1), self.nd + 2 * m.kv_heads * m.head_width // p.tp
        self.tokens = t.seq_len * t.micro_batch_size // p.cp
        self.slice = sizes.stream_length(cfg) * t.micro_batch_size  # rows between the products
        self.in_pieces = machine.inside(p.tp, 1) and sizes.in_pieces(p.tp, p.sequence_parallel, p.overlap_tp)
        self.pieces = self._pieces() if self.in_pieces else [1.0]
        fabric = machine.fabric  # user buffers' copies take no barrier between kernels
        self.overlap_slowdown = fabric.piece_felt if self.in_pieces and not machine.software.ring else fabric.felt
        self.fused, self.eager = machine.software.fused, machine.software.eager or t.cuda_graph == "off"
        self.zero_bubble = p.schedule == "zb-h1"
        self.block = lru_cache(4)(self._block)

    def _pieces(self) -> list[float]:
        """Return the shares of a product's rows that are computed together, the rank's own first."""
        tp = self.cfg.parallel.tp
        if self.machine.software.ring:
            return [1 / tp] * tp
        return [1 / tp, *(2**i / tp for i in range(tp.bit_length() - 1))]

    def stage(self, layers: range, first: bool, last: bool) -> tuple[SecondsByPart, SecondsByPart]:
        """Time (forward, backward) of the blocks `layers`, with the embedding if `first` and the head if `last`."""
        in_fp8 = sizes.fp8_layers(self.cfg.precision, self.model.num_layers)
        split_backward = self.zero_bubble and not first
        works = [self.block(layer in in_fp8, split_backward) for layer in layers]
        works += [self.embedding()] if first else []
        works += [self.head(split_backward)] if last else []
        forward, backward = (sum(parts, SecondsByPart()) for parts in zip(*works))
        return forward, backward

    # ---- a block

    def _block(self, fp8: bool, split_backward: bool = False) -> tuple[SecondsByPart, SecondsByPart]:
        m, p = self.model, self.cfg.parallel
        forward, backward = SecondsByPart(), SecondsByPart()
        for layer, (k, n) in sizes.linear_sizes(m).items():
            n, k, message = (n // p.tp, k, "gather") if layer in COLUMN_PARALLEL else (n, k // p.tp, "scatter")
            self._linear(n, k, message, fp8, split_backward, forward, backward)
        for layer, adapter in self.adapters.items():
            x, y = (self.slice, self.tokens / p.tp) if layer in COLUMN_PARALLEL else (self.tokens / p.tp, self.slice)
            x, y = x * adapter.inputs * ITEM, y * adapter.outputs * ITEM
            forward["pointwise"] += self.machine.moved(x + 2 * y)
            backward["pointwise"] += self.machine.moved(3 * x + 2 * y)
            if split_backward:
                backward["deferred"] += self.machine.moved(x + y)
        attend = self._attention(forward, backward)
        nodes = self._nodes(fp8)
        for whole, moved, share in zip((forward, backward), self._passes(fp8), SHARES):
            whole["pointwise"] += self.machine.moved(moved) + self.machine.device.gap_seconds * nodes * share
        recompute = self.cfg.train.recompute
        if recompute == "full":
            backward.update(forward)
        elif recompute == "selective" and not self.fused:  # as Megatron: attention's core
            backward["attention"] += attend
        elif recompute == "selective":  # norms and the activation once more, where a product's input is needed again
            norm = 2 * self.slice * m.hidden_size
            remade = {"attention.qkv": norm, "mlp.up": norm, "mlp.down": self.tokens * (self.inner + self.f)}
            for layer, size in remade.items():
                if not self.frozen or layer in self.adapters:
                    backward["pointwise"] += self.machine.moved(size * ITEM)
        if self.eager:
            self._add_host(nodes, forward, backward)
        return forward, backward

    def _nodes(self, fp8: bool) -> float:
        """Count a block's kernels and copies, forward and backward."""
        p = self.cfg.parallel
        nodes = NODES + NODES_OF_FP8 * fp8 + NODES_OF_RING * (p.cp > 1) + NODES_OF_QK_NORM * self.model.qk_norm
        in_python = self.in_pieces and self.fused  # user buffers launch their pieces in one call
        nodes += NODES_PER_DOUBLING * log2(p.tp) if in_python else NODES_OF_MESSAGES * (p.tp > 1)
        return nodes + NODES_OF_ADAPTER * sum(adapter.targets for adapter in self.adapters.values())

    def _add_host(self, nodes: float, forward: SecondsByPart, backward: SecondsByPart) -> None:
        """Add the time that the GPU waits for the host to launch a block's kernels; recomputation launches again."""
        again = SHARES[0] if self.cfg.train.recompute == "full" else 0.0
        for parts, share in ((forward, SHARES[0]), (backward, SHARES[1] + again)):
            host = self.machine.device.launch_seconds * nodes * share
            parts["host"] += max(0.0, host - total(parts))

    def _linear(
        self,
        n: int,
        k: int,
        message: str,
        fp8: bool,
        split_backward: bool,
        forward: SecondsByPart,
        backward: SecondsByPart,
        cut: int = 1,
    ) -> None:
        """Add three products, two of a frozen weight, and their messages, "gather" or "scatter" in the forward.

        cut: the pieces of the tokens in which all three are computed.
        """
        product, t, frozen, pieces = self.machine.product, self.tokens, self.frozen, max(cut, len(self.pieces))
        split_backward = split_backward and not frozen
        # The forward's products run in pieces, and the products for dx that need a message.
        y = product(t, n, k, fp8=fp8, pieces=pieces)
        dx = product(t, k, n, fp8=fp8, pieces=pieces if split_backward or message == "scatter" else cut)
        dw = 0.0 if frozen else product(t, n, k, fp8=fp8, weight_grad=True, grad_bytes=self.grad_bytes, pieces=cut)
        forward["gemm"] += y
        backward["gemm"] += dx
        weights = SecondsByPart(gemm=dw)
        width = k if message == "gather" else n  # h: messages have the hidden size
        cast = 1 if fp8 else ITEM
        split = self.cfg.parallel.sequence_parallel
        if message == "gather":
            if split:
                self._add_needed(forward, cast * width, y, gather=True)
                if not frozen:
                    # x is gathered again, beside dx or another dW.
                    self._add_overlapped(weights, cast * width, dw if split_backward else dx)
            if split_backward:
                self._add_needed(backward, ITEM * width, dx, gather=False)
            else:
                self._add_overlapped(backward, ITEM * width, dw)  # dx is scattered, or reduced, beside dW
        else:
            self._add_needed(forward, ITEM * width, y, gather=False)
            if split:
                self._add_needed(backward, cast * width, dx, gather=True)
                if split_backward:
                    self._add_overlapped(weights, cast * width, dw)
        backward.update(weights)
        if split_backward:
            backward["deferred"] += total(weights)

    def _add_needed(self, parts: SecondsByPart, bytes_per_token: int, product_seconds: float, *, gather: bool) -> None:
        """Add a message over tp that a product needs, or that needs the product: in pieces, or alone.

        A gather's pieces arrive one after another, the rank's own piece first and without a copy. Each is multiplied
        when it has arrived. A scatter's pieces are computed in the opposite order; each is sent when it is complete.
        """
        if not self.in_pieces:
            return self._add_overlapped(parts, bytes_per_token, 0.0)
        num_bytes = bytes_per_token * self.tokens
        shares = self.pieces if gather else self.pieces[::-1]
        own, copies, copied, done = 0 if gather else len(shares) - 1, 0.0, 0.0, 0.0
        for i, share in enumerate(shares):
            seconds = 0.0 if i == own else self.machine.copy(num_bytes * share)
            copies += seconds
            if gather:
                copied += seconds
                done = max(done, copied) + share * product_seconds
            else:
                done += share * product_seconds
                copied = max(copied, done) + seconds
        exposed = max(done, copied) - product_seconds
        hidden = max(0.0, copies - exposed) * (1 - self.overlap_slowdown)
        parts["tp_hidden"] += hidden
        parts["tp_exposed"] += copies - hidden

    def _add_overlapped(self, parts: SecondsByPart, bytes_per_token: int, product_seconds: float) -> None:
        """Add a message over tp beside a product that is independent of it; 0 seconds: there is none."""
        p = self.cfg.parallel
        num_bytes = bytes_per_token * self.tokens
        if self.in_pieces:
            seconds = self.machine.copy(num_bytes * (1 - 1 / p.tp))
        else:
            seconds = self.machine.collective(num_bytes, p.tp, 1) * (1 if p.sequence_parallel else 2)  # an all-reduce
        # Transformer Engine hides these without user buffers, too.
        hides = p.overlap_tp or not self.fused
        hidden = min(seconds, product_seconds) * (1 - self.overlap_slowdown) if hides else 0.0
        parts["tp_hidden"] += hidden
        parts["tp_exposed"] += seconds - hidden

    def _attention(self, forward: SecondsByPart, backward: SecondsByPart) -> float:
        """Add attention and its messages; return the seconds of its forward."""
        m, p, t = self.model, self.cfg.parallel, self.cfg.train
        keys = document_tokens(self.cfg)
        share, kv = self.nd, self.w - self.nd
        pairs = t.micro_batch_size * t.seq_len * keys / 2 / p.cp
        ring = p.cp > 1 and p.cp_style != "ulysses"
        length = keys / p.cp if ring else keys  # in one call of a kernel
        one_way = 2 * share * pairs * 2
        # kernels/attention.py chooses `fused` for documents and for dropout, and flash for documents on a ring.
        separate = self.fused and self.cfg.data.separates and not m.attention_dropout
        packed = separate and not ring and m.attention in ("auto", "fused")
        flash = m.attention in ("flash", "flash-attn") or packed or separate and m.attention == "auto"
        length *= PACKED_KEYS if packed else 1
        attend, back = (self.machine.attention(x * one_way, length, m.head_width, flash=flash) for x in (1, 2.5))
        if m.attention == "reference":
            attend, back = self._unfused()
        elif m.attention == "fused" and not packed or m.attention_dropout and self.fused:
            attend, back = (x * FUSED_ATTENTION for x in (attend, back))
        elif m.attention_dropout:
            attend, back = (x * factor for x, factor in zip((attend, back), DROPPED[flash]))
        forward["attention"] += attend
        backward["attention"] += back
        if p.cp == 1:
            return attend
        if p.cp_style == "ulysses":
            moved = self.machine.collective(self.tokens * (2 * share + kv) * ITEM, p.cp, p.tp)
            forward["cp_exposed"] += moved
            backward["cp_exposed"] += moved
            return attend
        hops, hop = p.cp - 1, self.machine.message(self.tokens * kv * ITEM, p.cp, p.tp)
        sums = hop * (2 if self.fused and p.cp > MAX_BF16_TERMS else 1)  # in float32; Transformer Engine's in bf16
        for parts, kernels, step in ((forward, attend, hop), (backward, back, hop + sums)):
            hidden = min(step, kernels / p.cp) * (1 - self.machine.fabric.felt)
            parts["cp_hidden"] += hops * hidden
            parts["cp_exposed"] += hops * (step - hidden)
            parts["pointwise"] += self.machine.moved(hops * self.tokens * share * 3 * ITEM)
        backward["cp_exposed"] += sums  # the last hop returns the gradients to their rank
        return attend

    def _unfused(self) -> tuple[float, float]:
        """Time attention that writes every score, (forward, backward): products of whole matrices, and passes.

        `reference` keeps scores in float32 and has passes for the mask and for the softmax. Megatron's unfused
        attention keeps them in bf16, with one kernel for scale, mask and softmax. Dropout reads and writes them again.
        """
        m, p, t = self.model, self.cfg.parallel, self.cfg.train
        side = t.seq_len // (p.cp if p.cp_style != "ulysses" else 1)
        matrices = m.num_heads // p.tp * t.micro_batch_size * t.seq_len**2 // (p.cp * side**2)
        scores = matrices * side**2 * (4 if self.fused else ITEM)
        product = self.machine.product(matrices * side, side, m.head_width, fp8=False)
        passes = (6, 10) if self.fused else (4, 6)  # written by the product, softmax's two, read by the next; dp, ds
        dropped = (2, 2) if m.attention_dropout else (0, 0)
        forward, backward = (self.machine.moved((a + b) * scores) for a, b in zip(passes, dropped))
        return 2 * product + forward, 2 * UNFUSED_ATTENTION_BACK * product + backward

    def _passes(self, fp8: bool) -> tuple[float, float]:
        """Count the bytes of the forward and of the backward; kernels/fused.py lists what each kernel moves."""
        m, p, nd, w, f, inner = self.model, self.cfg.parallel, self.nd, self.w, self.f, self.inner
        h, llama, t, rows = m.hidden_size, m.family == "llama", self.tokens, self.slice
        forward = backward = 2 * 4 * h * ITEM * rows
        turned = w - (w - nd) // 2  # q and k
        if m.positions == "rope":
            forward += 2 * turned * ITEM * t
        if m.qk_norm:  # q and k, or their gradients, are copied and normed; then q, k, v are joined
            forward += (4 * turned + 2 * w) * ITEM * t
            backward += (5 * turned + 2 * w) * ITEM * t
        backward += 2 * w * ITEM * t  # gradients of q, k, v side by side
        if not (fp8 and llama):
            forward, backward = forward + (inner + f) * ITEM * t, backward + (f + 2 * inner) * ITEM * t
        if not self.frozen:  # bias gradients
            backward += (w * m.biased_qkv + (0 if llama else f)) * ITEM * t + (0 if llama else 2 * h * ITEM * rows)
        if m.hidden_dropout:
            forward, backward = forward + 2 * 5 * h * ITEM * rows, backward + 2 * 2 * h * ITEM * rows
        if not self.fused:
            more = self._unfused_passes(fp8)
            forward, backward = forward + more[0], backward + more[1]
        if self.in_pieces:  # a scatter ends in a sum of tp pieces
            forward, backward = (x + 2 * h * ITEM * (t + rows) for x in (forward, backward))
        if not fp8:
            return forward, backward
        # A cast reads, writes rows, and writes columns for a weight gradient; gathered tensors get columns afterwards.
        written = 1 if self.frozen else 2
        cast = ITEM + written
        forward += cast * (2 * h * rows + nd * t)
        backward += cast * (2 * h * rows + w * t) + (4 * 2 * h * t if p.tp > 1 and not self.frozen else 0)
        if llama:
            forward += (inner * ITEM + written * f) * t
            backward += ((f + inner) * ITEM + written * inner) * t
        else:
            forward, backward = forward + cast * f * t, backward + cast * inner * t
        return forward, backward

    def _unfused_passes(self, fp8: bool) -> tuple[float, float]:
        """Count the bytes that Transformer Engine's and Megatron's kernels move beyond those of kernels/fused.py.

        Residual sums are not part of norms: a sum reads 2 and writes 1, a norm reads 1 and writes 1, backward 3 and 3.
        q, k, v are split and joined by copies. In FP8 the activation is written in bf16 and cast by a separate kernel,
        as are its gradients; an adapter's input and its result are written out, scaled and added.
        """
        h, t, rows = self.model.hidden_size, self.tokens, self.slice
        forward, backward = 2 * h * ITEM * rows, 4 * h * ITEM * rows
        if self.model.positions == "rope":
            backward += 2 * (self.w - (self.w - self.nd) // 2) * ITEM * t
        if fp8 and self.model.family == "llama":
            forward, backward = forward + 2 * self.f * ITEM * t, backward + 2 * self.inner * ITEM * t
        for layer, adapter in self.adapters.items():
            x, y = (rows, t / self.cfg.parallel.tp) if layer in COLUMN_PARALLEL else (t / self.cfg.parallel.tp, rows)
            extra = 2 * x * adapter.inputs + 3 * y * adapter.outputs
            forward, backward = forward + extra * ITEM, backward + extra * ITEM
        return forward, backward

    # ---- the ends

    def embedding(self) -> tuple[SecondsByPart, SecondsByPart]:
        """Time the lookup in the table. Megatron's gradient has all rows of it, in bf16, and is added to the sum."""
        m, tp = self.model, self.cfg.parallel.tp
        rows = m.hidden_size * self.tokens
        table = 0 if self.fused else m.padded_vocab_size // tp * m.hidden_size
        message = self.machine.collective(rows * ITEM, tp, 1)
        read, added = 3 * ITEM * rows, 5 * self.grad_bytes * rows + 2 * (ITEM + self.grad_bytes) * table
        forward = SecondsByPart(pointwise=self.machine.moved(read), tp_exposed=message)
        if self.frozen:
            return forward, SecondsByPart()
        return forward, SecondsByPart(pointwise=self.machine.moved(added), tp_exposed=message)

    def head(self, split_backward: bool = False) -> tuple[SecondsByPart, SecondsByPart]:
        """Time the final norm, the product with the vocabulary and the loss.

        Transformer Engine's loss keeps a copy of the logits, which the gradient overwrites. With model.head_piece the
        forward makes all gradients except the norm's.
        """
        piece = self.cfg.model.head_piece
        h, v = self.model.hidden_size, self.model.padded_vocab_size // self.cfg.parallel.tp
        forward, backward = SecondsByPart(), SecondsByPart()
        fp8 = self.cfg.precision.fp8_head
        cut = 1 if piece is None else ceil(self.tokens / piece)
        self._linear(v, h, "gather", fp8, split_backward and piece is None, forward, backward, cut)
        kept = 0 if self.fused else v * self.tokens
        forward["pointwise"] += self.machine.moved((4 * h * self.slice + v * self.tokens + kept) * ITEM)
        backward["pointwise"] += self.machine.moved(2 * v * self.tokens * ITEM)
        if fp8:
            cast = ITEM + (1 if self.frozen else 2)
            forward["pointwise"] += self.machine.moved(cast * h * self.slice)
            backward["pointwise"] += self.machine.moved(cast * v * self.tokens)
        norm = SecondsByPart(pointwise=self.machine.moved(4 * h * self.slice * ITEM))
        return (forward, backward + norm) if piece is None else (forward + backward, norm)
