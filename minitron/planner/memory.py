"""Bytes that a rank holds at the peak of a step, by what they are for.

Four things last: parameters (2 bytes each in bf16), their gradients (4; in bf16 2, and 4 over dp x cp for the reduced
slice, which is float32), masters and moments (12, over dp x cp) and FP8 casts of weights (2). With precision.fp8_params
the blocks' parameters are FP8 bytes: one each, and one for their transposes. Activations come and go with the schedule:
a chunk's forward leaves what its backward needs and frees, so their peak is found by walking over a rank's real
operations. A block leaves, per token, in bf16:

    2 h / tp   the sums before both norms                               x 2
    2 h / tp   both norms' results, inputs of products                  x 2       FP8: casts, 1 byte    selective: none
    2 w / tp   q, k, v (w wide), 2 n d / tp the attention's output                FP8: and a cast of that
    2 (n + g) d / tp   q and k before their norms, with model.qk_norm
    2 f / tp   the MLP's inner values (gated: 4 f), 2 f / tp its activation       FP8: casts, 1 byte    selective: none

For Llama-3 8B these are 139 KB a token, and at s 8192 1.1 GiB a block and microbatch. With `full` each block keeps one
of the sums, and the block whose backward runs keeps all of this. The last stage's logits are overwritten by their
gradient. With model.head_piece a forward leaves the gradient of the residual stream in their place, and needs the
logits of one piece. `working` is what an operation needs in addition: gradients inside of a block, gathered inputs.

A BackwardInput frees these, and keeps both matrices of each weight gradient until the BackwardWeight. They are the
inputs of the four products and the gradients of their outputs:

    w / tp, 2 h / tp, f / tp (gated: 2 f)   2 bytes each                FP8: casts, 1 byte

With LoRA only adapters have gradients and states. A product with a frozen weight keeps no input, unless an adapter
reads it; then it is in bf16.

A step that is recorded as CUDA graphs (pipeline/replay.py) needs more: 4 to 8 KiB in the driver for a kernel or copy.
The pool of its activations also has more fragments than eager steps have. Evaluation reuses the buffers of a step's FP8
casts. None of this is part of the peak: if there is no room for a recording, the steps stay eager.

NCCL takes memory beside torch's allocator (`communicators`): for its code, for each process group when it is made and
when it first runs a collective, and for each rank that it sends messages to.

Steps that count what casts lose (log.numerics_every) have a second recording. The comparison with the cast needs
temporaries.

Sizes that the trainer has a name for come from config/sizes.py. What autograd keeps has none: these formulas follow
kernels/, parallel/ and model/gpt.py, and tests compare them with what the trainer allocates. Left out: the padding of
buckets, fragments, and the start of a run, when one whole weight exists in float32: with LoRA on few tokens that can be
the peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache

from minitron.comm.layout import axes_of_groups
from minitron.config import sizes
from minitron.config.schema import Config
from minitron.config.sizes import COLUMN_PARALLEL, ITEM, PERSISTENT, StateBytes
from minitron.pipeline.schedule import Backward, BackwardInput, BackwardWeight, Forward, Operation, operations

WORKSPACE_BYTES = 32 << 20  # cuBLAS's on Hopper, as torch sets it
RECEIVED = 6  # received tensors held at once, both directions
NODE_BYTES = 8 << 10  # a kernel or copy in a CUDA graph
GRAPHS_OF_ONE_STAGE = 3  # with one pipeline stage: for the first microbatch, one in the middle, the last
GRAPH_BYTES = 350 << 20  # unused memory in the pool of recorded steps
# NCCL 2.28.9, by benchmarks/nccl_memory.py on two GPUs of a node
NCCL_BYTES = 416 << 20  # its code, loaded by the first group, collective and message
GROUP_BYTES = 198 << 20  # a group, when it is made
COLLECTIVE_BYTES = 288 << 20  # its first collective
PEER_BYTES = 384 << 20  # its first message to another rank
PARTS = (*PERSISTENT, "activations", "working", "messages")
_operations = lru_cache(256)(operations)


def data_levels(cfg: Config, shards: int, gpus_per_node: int) -> tuple[int, int]:
    """Return how many of `shards` data ranks sum gradients at each level: (in a node, of such nodes)."""
    local = max(1, gpus_per_node // cfg.parallel.tp)
    if cfg.optimizer.reduces_in == "bf16" and local < shards and shards % local == 0:
        return local, shards // local
    return shards, 1


class Memory(StateBytes):
    """Bytes on the ranks of a layout over `world` ranks. The GPUs of a node read each other's memory."""

    def __init__(self, cfg: Config, world: int, *, gpus_per_node: int):
        super().__init__(cfg, world)
        self.gpus_per_node, self.microbatches = gpus_per_node, cfg.num_microbatches(cfg.dp(world))
        t, self.piece = cfg.train, cfg.model.head_piece
        self.tokens = t.seq_len * t.micro_batch_size // cfg.parallel.cp
        self.rows = sizes.stream_length(cfg) * t.micro_batch_size  # between the products
        self.counts = cfg.log.numerics_every > 0 and cfg.precision.fp8 != "none"

    def peak(self) -> tuple[int, Counter]:
        """Return the pipeline rank that needs most, and its bytes by part."""
        ranks = [(rank, self.bytes_by_part(rank)) for rank in range(self.cfg.parallel.pp)]
        return max(ranks, key=lambda pair: pair[1].total())

    def bytes_by_part(self, rank: int) -> Counter:
        """Count the bytes of a pipeline rank by part."""
        return Counter(dict(zip(PARTS, (*self.lasting_parts(rank), *self._at_peak(rank), self._messages(rank)))))

    def graph(self, rank: int) -> int:
        """Estimate the bytes that a pipeline rank needs in addition if its steps are recorded."""
        t, pp = self.cfg.train, self.cfg.parallel.pp
        if t.cuda_graph == "off":
            return 0
        microbatches = self.microbatches if pp > 1 else min(self.microbatches, GRAPHS_OF_ONE_STAGE)
        nodes = sizes.NODES_PER_LAYER * microbatches * sum(len(self.layers[stage]) for stage in self.stages(rank))
        more = nodes // 3 if t.eval_every else 0  # only forwards
        if self.counts:
            more += nodes * (sizes.NODES_PER_LAYER + sizes.NODES_OF_COUNTS) // sizes.NODES_PER_LAYER
        nodes += more
        return NODE_BYTES * nodes + GRAPH_BYTES

    def communicators(self) -> int:
        """Estimate the bytes that NCCL takes on a rank: those of all groups of the job, as if they were in one node.

        A rank sends to two neighbours of its pipeline, and to two of a ring or all of Ulysses' exchange. Left out:
        messages of gradients' sums between nodes, and NVLink's multicast. By sockets groups take less. By InfiniBand
        they are not measured.
        """
        p = self.cfg.parallel
        local, nodes = data_levels(self.cfg, self.shards, self.gpus_per_node)
        groups = axes_of_groups((p.pp, self.shards // p.cp, p.cp, p.tp), local if nodes > 1 else None)
        if not groups:
            return 0
        made = len(groups) + (1 if p.pp > 2 and self.cfg.model.tie_embeddings else 0)
        silent = [["dp"]] if p.cp_style == "allgather" else [["dp"], ["cp"]]  # these run no collective
        running = made - sum(names in silent for names in groups.values())
        around = {"ring": min(2, p.cp - 1), "ulysses": p.cp - 1, "allgather": 0}[p.cp_style]
        peers = min(2, p.pp - 1) + around
        return NCCL_BYTES + GROUP_BYTES * made + COLLECTIVE_BYTES * running + PEER_BYTES * peers

    # ---- what a microbatch leaves

    def saved(self, stage: int) -> int:
        """Count the bytes that a forward of the stage leaves for its backward."""
        fp8, recompute = self.fp8_blocks[stage], self.cfg.train.recompute
        saved = fp8 * self._block(recompute, True) + (len(self.layers[stage]) - fp8) * self._block(recompute, False)
        return saved + (self._head() if stage == len(self.layers) - 1 else 0)

    def _head(self) -> int:
        """Count the bytes that the head leaves: the final norm's sum; its result and the logits, or its gradient."""
        row = self.cfg.model.hidden_size * self.rows
        if self.piece is not None:
            return 2 * ITEM * row
        return self.logits + (ITEM + (0 if self.frozen else 1 if self.fp8_head else ITEM)) * row

    def _block(self, recompute: str, fp8: bool) -> int:
        m, p = self.cfg.model, self.cfg.parallel
        h, f, item = m.hidden_size, m.ffn_hidden_size // self.tp, 1 if fp8 and not self.frozen else ITEM
        nd, kv = m.num_heads * m.head_width // self.tp, m.kv_heads * m.head_width // self.tp
        if recompute == "full":
            return h * ITEM * self.rows
        rows = 2 * (h * ITEM + (4 if self.llama else 8))
        whole = 2 * (nd + kv) * ITEM + 4 * m.num_heads // self.tp + (2 if self.llama else 1) * f * ITEM
        if m.qk_norm:  # q and k as they were, and a number for each head
            whole += (nd + kv) * ITEM + 4 * (m.num_heads + m.kv_heads) // self.tp
        for layer in self.adapters if self.frozen else sizes.linear_sizes(m):
            if layer == "attention.out":  # attention keeps it as well, in bf16 and before Ulysses' exchange
                whole += nd * item if item < ITEM or (p.cp > 1 and p.cp_style == "ulysses") else 0
            elif recompute == "none":
                rows, whole = (rows, whole + f * item) if layer == "mlp.down" else (rows + h * item, whole)
        return rows * self.rows + whole * self.tokens

    def deferred(self, stage: int) -> int:
        """Count the bytes that a BackwardInput of the stage leaves for its BackwardWeight."""
        m, fp8 = self.cfg.model, self.fp8_blocks[stage]
        left = 0
        for blocks, item in ((fp8, 1), (len(self.layers[stage]) - fp8, ITEM)):
            item = ITEM if self.frozen else item
            for layer, (k, n) in sizes.linear_sizes(m).items():
                if layer in self.adapters or not self.frozen:
                    columns = layer in COLUMN_PARALLEL
                    whole, part = (n, k) if columns else (k, n)  # h: a rank's rows of it
                    left += blocks * item * (whole // self.tp * self.tokens + part * self.rows)
        if stage == len(self.layers) - 1 and not self.frozen and self.piece is None:
            share = 2 if self.fp8_head else 1
            left += (self.logits + m.hidden_size * ITEM * self.rows) // share
        return left

    @property
    def logits(self) -> int:
        """The bytes of the logits that exist at a time."""
        tokens = self.tokens if self.piece is None else min(self.piece, self.tokens)
        return tokens * self.cfg.model.padded_vocab_size // self.tp * ITEM

    def _forward_extra(self, stage: int) -> int:
        """Count the most bytes that a forward of this stage needs beyond what it leaves: a piece of the head."""
        if self.piece is None or stage < len(self.layers) - 1:
            return 0
        row = self.cfg.model.hidden_size * ITEM
        casts = self.logits // (2 if self.frozen else 1) if self.fp8_head else 0
        whole = row * min(self.piece, self.tokens)  # dx of a piece; x of this piece and the next, gathered
        return self.logits + casts + row * self.rows + (3 if self.tp > 1 else 1) * whole + WORKSPACE_BYTES

    def _backward_extra(self, stage: int) -> int:
        """Count the most bytes that a backward of this stage needs beyond what was saved."""
        m, p, t = self.cfg.model, self.cfg.parallel, self.cfg.train
        h, f = m.hidden_size, m.ffn_hidden_size // self.tp
        gathered = h * ITEM * self.tokens if self.tp > 1 else 0
        # The gradient of the MLP's activation. Beside it the casts of the inner gradient in FP8, a new tensor where an
        # adapter reads the activation, or the recomputed activation. Otherwise the inner gradient needs no memory.
        inner, adapted = (2 if self.llama else 1), not self.adapters.keys().isdisjoint(("mlp.up", "mlp.down"))
        beside = inner if self.fp8_blocks[stage] or adapted else int(t.recompute == "selective" and not self.frozen)
        block = 2 * h * ITEM * self.rows + 2 * gathered + (1 + beside) * f * ITEM * self.tokens
        if self.fp8_blocks[stage] and self.counts:
            block += 4 * min(inner * f * self.tokens, sizes.COUNTED_AT_ONCE)
        if t.recompute == "full":
            block += self._block("none", self.fp8_blocks[stage] > 0)
        if m.attention == "reference":  # whole matrices of scores
            side = t.seq_len // (p.cp if p.cp_style != "ulysses" else 1)
            block += (7 if m.attention_dropout else 4) * 4 * m.num_heads // self.tp * self.tokens * side
        if stage == len(self.layers) - 1:  # the head's own, or the block's once the logits are gone
            casts = self.logits // (2 if self.frozen else 1) if self.fp8_head else 0  # casts of the logits' gradient
            if self.piece is not None:
                gathered = casts = 0
            block = max(h * ITEM * (2 * self.rows) + gathered + casts, block - self._head())
        return block + WORKSPACE_BYTES + (sizes.FP8_WORKSPACE_BYTES if self.cfg.precision.fp8 != "none" else 0)

    def _messages(self, rank: int) -> int:
        """Count the bytes of received tensors, of a node's shared buffers, and of gradients that are being reduced."""
        p, row = self.cfg.parallel, self.cfg.model.hidden_size * ITEM
        held = RECEIVED * row * self.rows if p.pp > 1 else 0
        if sizes.in_pieces(self.tp, p.sequence_parallel, p.overlap_tp) and self.tp <= self.gpus_per_node:
            held += 2 * row * (self.rows + self.tokens)
        local, nodes = data_levels(self.cfg, self.shards, self.gpus_per_node)
        copied = p.overlap_grads and 1 < local <= self.gpus_per_node // self.tp
        if copied:
            shared = sum(self.grad_bytes * self.trained(i) + self.gathered_bytes(i) for i in self.stages(rank))
            held += 2 * (local - 1) * min(sizes.PIECE_BYTES, shared // local)
        largest, in_float32 = max(map(self._largest_bucket, self.stages(rank))), self.grad_bytes == 4
        if nodes > 1:
            held += largest // local * ITEM * (2 if in_float32 else 1)
        if local > 1 and not (copied or in_float32):
            held += 4 * largest
        return held

    def _largest_bucket(self, stage: int) -> int:
        """Count the elements of the largest gradient bucket, as the trainer fills buckets with matrices."""
        m, limit, filled = self.cfg.model, sizes.bucket_limit(self.shards) // self.grad_bytes, 0
        learned = stage == 0 and m.positions == "learned" and not self.frozen
        largest = m.max_positions * m.hidden_size if learned else 0  # alone, since every tp rank has all of them
        for numel in self._matrices(stage):
            filled += numel
            largest, filled = max(largest, filled), filled if filled < limit else 0
        return largest

    def _matrices(self, stage: int) -> Iterator[int]:
        """Yield the elements of the trained matrices, in the order in which a backward completes their gradients."""
        m, last = self.cfg.model, len(self.layers) - 1
        if self.frozen:
            yield self.trained(stage)
            return
        if stage == last and not (m.tie_embeddings and stage == 0):
            yield self.table
        for _ in self.layers[stage]:
            for layer in reversed(sizes.linear_sizes(m).values()):
                yield layer[0] * layer[1] // self.tp
        if stage == 0:
            yield self.table

    def _at_peak(self, rank: int) -> tuple[int, int]:
        """Return the bytes (saved, working) at the peak of the rank's operations."""
        p, peak, some = self.cfg.parallel, (0, 0), self.microbatches
        forward, backward = ([of(i) for i in self.stages(rank)] for of in (self._forward_extra, self._backward_extra))
        if some % p.pp == 0:
            some = min(some, 2 * p.pp)  # the peak is in the first two groups: all later ones repeat them
        for op, before, after in self.activations(rank, _operations(p.pp, p.vp, some, rank, p.schedule)):
            if type(op) is Forward:
                peak = max(peak, (after, forward[op.chunk]), key=sum)
            elif type(op) is not BackwardWeight:
                peak = max(peak, (max(before, after), backward[op.chunk]), key=sum)
        return peak

    def activations(self, rank: int, order: Iterable[Operation]) -> Iterator[tuple[Operation, int, int]]:
        """Yield each of a rank's operations with the bytes that backwards still need before and after it."""
        saved, deferred = ([of(stage) for stage in self.stages(rank)] for of in (self.saved, self.deferred))
        live = 0
        for op in order:
            kept, left = saved[op.chunk], deferred[op.chunk]
            before, change = live, {Forward: kept, Backward: -kept, BackwardInput: left - kept, BackwardWeight: -left}
            live += change[type(op)]
            yield op, before, live
