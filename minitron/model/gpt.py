"""GPT-3 and Llama, top to bottom, on any mesh.

Both families are one network with four differences, each a line below: norm (LayerNorm or RMSNorm), activation
(GELU or SwiGLU), biases, positions (learned or rotary). Keys add what Qwen has: a bias of q, k and v, norms of q and k.
Parallelism shows in shapes only: a tensor-parallel rank has n/tp heads and f/tp of the MLP, a context-parallel rank
s/cp of the sequence, a pipeline stage some of the blocks. Activations are [s, b, h], sequence first, so that a slice
of the sequence is one piece of memory.

    tokens [s/cp, b] -> embedding [s/cp/tp, b, h] -> blocks -> final norm -> logits [s/cp, b, v/tp] -> loss sum

A pipeline chunk is a `GPT` that holds only its blocks: the first also the embedding, the last also the head. It is
called with a batch and the hidden states of the stage before, and returns hidden states or the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minitron.comm.collectives import slice_along
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config, ModelConfig
from minitron.data.batch import Batch
from minitron.kernels.fp8 import Fp8State
from minitron.kernels.gemm import Activation, Gemm, Quantized
from minitron.kernels.param import Param, Shard, named_params_of, with_main_grad
from minitron.kernels.rng import AttentionDropout, dropout, token_counters
from minitron.model.layers import Norm, Residual, norm_heads, rope_frequencies, rope_tables, split_heads
from minitron.parallel.context_parallel import ContextAttention
from minitron.parallel.head_loss import HeadLoss
from minitron.parallel.layer_context import LayerContext
from minitron.parallel.linear import ColumnOp, ColumnParallelLinear, RecomputeInput, RowParallelLinear, apply_linear
from minitron.parallel.mlp import activate, mlp
from minitron.parallel.tiles import Documents
from minitron.parallel.vocab import VocabParallelEmbedding, lookup
from minitron.runtime.room import room_for


@dataclass
class Microbatch:
    """What every block of a chunk reads, computed once per batch."""

    rope: tuple[Tensor, Tensor] | None  # cos, sin: [s/cp, b, 1, d/2]
    documents: Documents | None
    counters: Tensor | None  # dropout counters [s/cp, b]
    local_counters: Tensor | None  # counters of this rank's rows between blocks: [s/cp/tp, b]


class Attention(nn.Module):
    """Causal self-attention with grouped queries: x [s/cp/tp, b, h] -> [s/cp/tp, b, h]; n/tp heads on this rank."""

    def __init__(self, cfg: Config, mesh: Mesh, context: LayerContext, layer: int, gemm: Callable[[], Gemm]):
        super().__init__()
        m, tp = cfg.model, mesh.tp.size
        self.layer, self.ops = layer, context.kernels.ops
        self.attend = ContextAttention(mesh.cp, cfg.parallel.cp_style, context.kernels.attention, self.ops)
        self.heads, self.kv_heads, self.head_dim = m.num_heads // tp, m.kv_heads // tp, m.head_width
        self.first_head, self.dropout = mesh.tp.rank * self.heads, m.attention_dropout
        width, kv_width, bias = m.num_heads * m.head_width, m.kv_heads * m.head_width, m.family == "gpt"
        self.qkv = ColumnParallelLinear(
            m.hidden_size, (width, kv_width, kv_width), context, std=m.init_std, bias=m.biased_qkv, gemm=gemm()
        )
        self.out = RowParallelLinear(width, m.hidden_size, context, std=output_std(m), bias=bias, gemm=gemm())
        norm = partial(Norm, m.head_width, m.norm_eps, context, bias=False, per_head=True)
        self.q_norm: Norm | None = norm() if m.qk_norm else None
        self.k_norm: Norm | None = norm() if m.qk_norm else None

    def forward(self, x: Tensor | Quantized, mb: Microbatch, recompute_input: RecomputeInput | None = None) -> Tensor:
        qkv = self.qkv(x, recompute_input, mb.local_counters).unflatten(-1, (-1, self.head_dim))
        sizes = self.heads, self.kv_heads, self.kv_heads
        if self.q_norm is not None and self.k_norm is not None:
            qkv = norm_heads(qkv, sizes, self.q_norm, self.k_norm)
        q, k, v = split_heads(qkv, sizes, mb.rope, self.ops)  # q [s/cp, b, n/tp, d]; k, v [s/cp, b, g/tp, d]
        dropped = None
        if self.dropout and self.training:
            assert mb.counters is not None
            dropped = AttentionDropout(self.dropout, mb.counters, self.layer, self.first_head)
        y = self.attend(q, k, v, mb.documents, dropped)
        return self.out(y.flatten(2), counters=mb.counters)

    @property
    def input_format(self) -> Gemm | None:
        """The number format in which x is read: the norm may then pass only x's FP8 cast. None: pass x itself."""
        return self.qkv.format


class MLP(nn.Module):
    """Two linear layers around an activation: x [s/cp/tp, b, h] -> the same; f/tp inner channels on this rank."""

    def __init__(self, cfg: Config, context: LayerContext, gemm: Callable[[], Gemm]):
        super().__init__()
        m, bias = cfg.model, cfg.model.family == "gpt"
        gated, f = cfg.model.family == "llama", m.ffn_hidden_size
        ops = context.kernels.ops
        functions = (ops.swiglu_forward, ops.swiglu_backward) if gated else (ops.gelu_forward, ops.gelu_backward)
        self.activation = Activation(*functions)
        self.up = ColumnParallelLinear(
            m.hidden_size, (f, f) if gated else (f,), context, std=m.init_std, bias=bias, gemm=gemm()
        )
        self.down = RowParallelLinear(f, m.hidden_size, context, std=output_std(m), bias=bias, gemm=gemm())

    def forward(self, x: Tensor | Quantized, mb: Microbatch, recompute_input: RecomputeInput | None = None) -> Tensor:
        if self.up.adapter is self.down.adapter is None:
            return mlp(x, self.up.op, self.down.op, self.activation, recompute_input)
        inner = self.up(x, recompute_input, mb.local_counters)
        recompute = None if recompute_input is None else partial(self.activation.forward, inner.detach())
        return self.down(activate(inner, self.activation), recompute, mb.counters)

    @property
    def input_format(self) -> Gemm | None:
        """The number format in which x is read, as for attention."""
        return self.up.format


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the residual stream x is [s/cp/tp, b, h].

    The norm after each sum computes it inside its own kernel, with the bias that attention and MLP do not add
    (`Residual` in layers.py).
    """

    def __init__(self, cfg: Config, mesh: Mesh, context: LayerContext, layer: int, fp8_state: Fp8State):
        super().__init__()
        m = cfg.model
        gemm = partial(fp8_state.gemm, layer)
        norm = partial(Norm, m.hidden_size, m.norm_eps, context, bias=m.family == "gpt")
        self.norm1, self.attention = norm(), Attention(cfg, mesh, context, layer, gemm)
        self.norm2, self.mlp = norm(), MLP(cfg, context, gemm)
        self.layer, self.dropout, self.recompute = layer, m.hidden_dropout, cfg.train.recompute
        self.ops = context.kernels.ops

    def forward(self, stream: Residual, mb: Microbatch) -> Residual:
        if self.recompute == "full" and torch.is_grad_enabled():
            stream = Residual(stream.materialize())  # one tensor to keep
            return checkpoint(self._forward, stream, mb, use_reentrant=False, preserve_rng_state=False)
        return self._forward(stream, mb)

    def _forward(self, stream: Residual, mb: Microbatch) -> Residual:
        formats = self.attention.input_format, self.mlp.input_format
        x, y = self.norm1(stream, formats[0])
        y = self.attention(y, mb, self._recompute(self.norm1, x, formats[0]))
        x, y = self.norm2(self._add(x, y, self.attention.out.bias, mb, site=1), formats[1])
        y = self.mlp(y, mb, self._recompute(self.norm2, x, formats[1]))
        return self._add(x, y, self.mlp.down.bias, mb, site=2)

    def _recompute(self, norm: Norm, x: Tensor, input_format: Gemm | None) -> RecomputeInput | None:
        return partial(norm.recompute, x.detach(), input_format) if self.recompute == "selective" else None

    def _add(self, x: Tensor, delta: Tensor, bias: Param | None, mb: Microbatch, site: int) -> Residual:
        if not (self.dropout and self.training):
            return Residual(x, delta, bias)
        delta = delta if bias is None else delta + with_main_grad(bias)  # dropout drops the bias too
        return Residual(x, dropout(delta, self.dropout, mb.local_counters, self.layer, site, self.ops.drop_elements))


class Embedding(nn.Module):
    """Token (and learned position) embeddings: tokens [s/cp, b] -> [s/cp/tp, b, h]."""

    def __init__(self, cfg: Config, context: LayerContext):
        super().__init__()
        m = cfg.model
        self.context, self.dropout = context, m.hidden_dropout
        self.words = VocabParallelEmbedding(m.padded_vocab_size, m.hidden_size, context, std=m.init_std)
        self.positions = None
        if m.positions == "learned":
            self.positions = context.parameter((m.max_positions, m.hidden_size), std=m.init_std)

    def forward(self, batch: Batch, mb: Microbatch) -> Tensor:
        x = self.words(batch.tokens)
        if self.positions is not None:
            context, rows = self.context, batch.positions
            if context.sequence_parallel:
                rows = slice_along(rows, context.axis)
            # Without sequence parallelism all tp ranks compute this gradient. Equal results need one order of addition.
            same_on_all = context.axis.size > 1 and not context.sequence_parallel
            x = x + lookup(rows, self.positions, 0, context.kernels.ops, in_order=same_on_all)
        if not self.training:
            return x
        return dropout(x, self.dropout, mb.local_counters, layer=0, site=0, drop=self.context.kernels.ops.drop_elements)


class Head(nn.Module):
    """Final norm, vocabulary projection and loss: stream [s/cp/tp, b, h] -> logits [s/cp, b, v/tp] -> loss sum.

    The vocabulary is padded: only the first `num_ids` of this rank's columns are token ids. num_ids may be 0.
    """

    def __init__(self, cfg: Config, context: LayerContext, tied_weight: Param | None, gemm: Gemm):
        super().__init__()
        m = cfg.model
        self.norm = Norm(m.hidden_size, m.norm_eps, context, bias=m.family == "gpt")
        shape = m.padded_vocab_size, m.hidden_size
        if tied_weight is None:
            tied_weight = context.parameter(shape, Shard(0, context.axis, shape[:1]), std=m.init_std)
        self.weight, columns = tied_weight, len(tied_weight)
        num_ids = min(max(m.vocab_size - context.axis.rank * columns, 0), columns)
        self.op = ColumnOp(self.weight, None, gemm, context.comm, context.weight_queue)
        self.loss = HeadLoss(self.op, context.kernels.ops, num_ids, m.head_piece)

    def forward(self, stream: Residual, batch: Batch | None = None, loss_grad: Tensor | None = None) -> Tensor:
        """Return the loss sum of the batch, or the logits if there is no batch. loss_grad: see `HeadLoss`."""
        _, y = self.norm(stream, self.op.gemm if self.loss.piece is None else None)  # pieces are cast one by one
        return apply_linear(y, self.op) if batch is None else self.loss(y, batch.labels, batch.mask, loss_grad)


class GPT(nn.Module):
    """A pipeline chunk: blocks `layers` of the model, with the embedding if `first` and the head if `last`.

    A parameter's spec names it in the whole model: the tied weight on the last stage has the embedding's name. The
    chunks of a rank share a `context`.
    """

    def __init__(self, cfg: Config, mesh: Mesh, context: LayerContext, layers: range, *, first: bool, last: bool):
        super().__init__()
        m = cfg.model
        self.mesh, self.context = mesh, context
        with room_for("the embedding"):
            self.embedding = Embedding(cfg, context) if first else None
        self.fp8_state = Fp8State(cfg, layers, last, mesh, context.kernels)
        self.blocks = nn.ModuleDict()
        for i in layers:
            with room_for(f"block {i} of {m.num_layers}"):
                self.blocks[str(i)] = Block(cfg, mesh, context, i, self.fp8_state)
        tied_weight = self.embedding.words.weight if self.embedding is not None and m.tie_embeddings else None
        with room_for("the head"):
            self.head = Head(cfg, self.context, tied_weight, self.fp8_state.head_gemm()) if last else None
        self.seed, self.drops = cfg.train.seed, bool(m.hidden_dropout or m.attention_dropout)
        self.frequencies = None
        if m.positions == "rope":
            self.frequencies = rope_frequencies(m.head_width, m.rope_theta, m.rope_scaling).to(mesh.device)
        for name, param in named_params_of(self):
            param.spec = replace(param.spec, name=name)
        if tied_weight is None and self.head is not None and m.tie_embeddings:
            tied_weight = self.head.weight
        if tied_weight is not None:
            uses = 2 if first and last else 1
            tied_weight.spec = replace(tied_weight.spec, name="embedding.words.weight", tied=True, uses=uses)

    def units(self) -> Iterator[nn.Module]:
        """Yield the chunk's parts in the order in which a forward pass reaches them."""
        yield from filter(None, (self.embedding, *self.blocks.values(), self.head))

    def forward(self, batch: Batch, hidden: Tensor | None = None, loss_grad: Tensor | None = None) -> Tensor:
        """Map hidden [s/cp/tp, b, h] (None on the first stage) to the next stage's, on the last to the loss sum.

        loss_grad: see `HeadLoss`.
        """
        stream = self._run_blocks(batch, hidden)
        return stream.materialize() if self.head is None else self.head(stream, batch, loss_grad)

    def logits(self, batch: Batch) -> Tensor:
        """Compute [s/cp, b, v/tp] with a chunk that is the whole model."""
        assert self.head is not None
        return self.head(self._run_blocks(batch, None))

    def _run_blocks(self, batch: Batch, hidden: Tensor | None) -> Residual:
        mb = self._prepare(batch)
        if self.embedding is not None:
            stream = Residual(self.embedding(batch, mb))
        else:
            assert hidden is not None
            stream = Residual(hidden)
        for block in self.blocks.values():
            stream = block(stream, mb)
        return stream

    def _prepare(self, batch: Batch) -> Microbatch:
        rope = None if self.frequencies is None else rope_tables(batch.positions, self.frequencies)
        counters = local = None
        if self.drops and self.training:
            counters = token_counters(self.seed, batch.step, batch.samples, batch.order)
            local = slice_along(counters, self.mesh.tp) if self.context.sequence_parallel else counters
        return Microbatch(rope, batch.documents, counters, local)


def output_std(m: ModelConfig) -> float:
    """Return the standard deviation of weights that write into the residual stream: 2 matrices per layer (GPT-2)."""
    return m.init_std / (2 * m.num_layers) ** 0.5
