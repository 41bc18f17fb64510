"""Sizes that trainer and planner share: the trainer allocates by them, the planner counts by them.

config does not import torch, so a plan takes a second. The trainer's own sizes and the planner's are defined in their
own files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from minitron.config.schema import Config, ModelConfig, PrecisionConfig

# Bytes of gradients, in their own format, at which a bucket is closed. Large enough for NCCL's full bandwidth, small
# enough that the one bucket whose reduction nothing hides (the last of the backward) takes about a millisecond over
# NVLink.
BUCKET_BYTES = 256 << 20
SLICE_BYTES = 4 << 20  # the least slice of a bucket on a data rank: smaller messages are bound by latency
GRAD_BYTES = {"fp32": 4, "bf16": 2}  # per element
# GPUs that read each other's memory fetch gradients in pieces of at most this size: a staging buffer has room for one
# piece of every other rank.
PIECE_BYTES = 64 << 20
FP8_WORKSPACE_BYTES = 33 << 20  # more than the 32 MiB that cuBLAS advises for Hopper
NODES_PER_LAYER = 150  # kernels and copies of a block's forward and backward, the most that was counted: FP8, tp 4
NODES_OF_COUNTS = 400  # in addition, in a step that counts what FP8's casts lose: 20 to 60 for each of 12 tensors
COUNTED_AT_ONCE = 1 << 25  # elements
MOCK_DOCUMENT = 1 / 4  # mean length of the documents of mock data, in samples
ITEM = 2  # bytes of bf16 and fp16; in float32 nothing is planned
COLUMN_PARALLEL = ("attention.qkv", "mlp.up")
PERSISTENT = ("parameters", "gradients", "optimizer", "fp8 weights")
MAX_BF16_TERMS = 2  # attention blocks whose sum is kept in bf16; more would round at each addition, so in float32


def bucket_limit(data_ranks: int) -> int:
    """Return the bucket size in bytes for `data_ranks` data ranks."""
    return max(BUCKET_BYTES, SLICE_BYTES * data_ranks)


def stream_length(cfg: Config) -> int:
    """Return how many positions of a sample a rank holds between its linear layers: s/cp/tp, or s/cp."""
    p = cfg.parallel
    return cfg.train.seq_len // p.cp // (p.tp if p.sequence_parallel else 1)


def in_pieces(tp: int, sequence_parallel: bool, overlap: bool) -> bool:
    """Tell whether products run in pieces that overlap with copies, if the tp ranks can read each other's memory."""
    return overlap and sequence_parallel and tp > 1 and tp & (tp - 1) == 0


def fp8_layers(precision: PrecisionConfig, num_layers: int) -> range:
    """Return the blocks, of `num_layers` in the model, whose products are in FP8."""
    kept = precision.fp8_bf16_layers
    return range(0) if precision.fp8 == "none" else range(kept, num_layers - kept)


def fp8_names(cfg: Config, blocks: Sequence[int], head: bool) -> list[str]:
    """Name the linear layers of these blocks that are in FP8, in the order of a block, and the head."""
    in_fp8 = fp8_layers(cfg.precision, cfg.model.num_layers)
    names = [f"blocks.{i}.{name}" for i in blocks if i in in_fp8 for name in linear_sizes(cfg.model)]
    return names + ["head"] * (head and cfg.precision.fp8_head)


class AdaptedRows(NamedTuple):
    """Rows of a weight that an adapter adds to: from `start` on, `chunks` that are split over tp one by one."""

    start: int
    chunks: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.chunks)


def adapted(m: ModelConfig, targets: tuple[str, ...]) -> dict[str, dict[str, AdaptedRows]]:
    """Map each linear layer of a block to target -> its rows, in the order in which A stacks them."""
    q, kv, f, h = m.num_heads * m.head_width, m.kv_heads * m.head_width, m.ffn_hidden_size, m.hidden_size
    gated = m.family == "llama"
    layers = {
        "attention.qkv": {
            "qkv": AdaptedRows(0, (q, kv, kv)),
            "q": AdaptedRows(0, (q,)),
            "k": AdaptedRows(q, (kv,)),
            "v": AdaptedRows(q + kv, (kv,)),
        },
        "attention.out": {"o": AdaptedRows(0, (h,))},
        "mlp.up": {"gate": AdaptedRows(0, (f,)), "up": AdaptedRows(f, (f,))} if gated else {"up": AdaptedRows(0, (f,))},
        "mlp.down": {"down": AdaptedRows(0, (h,))},
    }
    return {layer: {t: span for t, span in spans.items() if t in targets} for layer, spans in layers.items()}


def linear_sizes(m: ModelConfig) -> dict[str, tuple[int, int]]:
    """Map each linear layer of a block to the (inputs, outputs) of its whole weight."""
    h, f, q = m.hidden_size, m.ffn_hidden_size, m.num_heads * m.head_width
    return {
        "attention.qkv": (h, q + 2 * m.kv_heads * m.head_width),
        "attention.out": (q, h),
        "mlp.up": (h, f * (2 if m.family == "llama" else 1)),
        "mlp.down": (f, h),
    }


def stage_layers(num_layers: int, pp: int, vp: int, layers_per_stage: Sequence[int] | None = None) -> tuple[range, ...]:
    """Divide the layers among the global stages: pp * vp ranges that follow each other.

    Layers that do not divide evenly go one each to the stages just before the last: the last stage also computes the
    head and the loss, and of two ranks the later one holds fewer activations. `layers_per_stage` gives the counts.
    Raises ValueError, in terms of the configuration's keys, when a stage would be empty or explicit counts do not fit.
    """
    if pp == 1 and vp > 1:
        why = "interleaves the chunks of several pipeline ranks, but parallel.pp=1"
        raise ValueError(f"parallel.vp={vp} {why}; use parallel.vp=1 or parallel.pp=2 or more")
    stages = pp * vp
    if layers_per_stage is None:
        if num_layers < stages:
            raise ValueError(
                f"model.num_layers={num_layers} leaves stages empty: parallel.pp={pp} x parallel.vp={vp} are {stages} "
                f"stages of at least one layer; use {stages} layers or more, or a smaller parallel.pp or parallel.vp"
            )
        share, extra = divmod(num_layers, stages)
        counts = [share + (stages - 1 - extra <= stage < stages - 1) for stage in range(stages)]
    else:
        counts = list(layers_per_stage)
        given = f"parallel.layers_per_stage={counts}"
        if len(counts) != stages:
            raise ValueError(
                f"{given} has {len(counts)} entries; give one for each of the parallel.pp={pp} x parallel.vp={vp} = "
                f"{stages} stages"
            )
        if min(counts) < 1:
            raise ValueError(f"{given} leaves a stage empty; give every stage at least one layer")
        if sum(counts) != num_layers:
            raise ValueError(f"{given} sums to {sum(counts)}, but model.num_layers={num_layers}; make them equal")
    ends = list(accumulate(counts))
    return tuple(range(end - count, end) for count, end in zip(counts, ends))


class AdapterSize(NamedTuple):
    """An adapter of one layer: its number of targets, the inputs it reads and the outputs it adds to, whole sizes."""

    layer: str
    rank: int
    targets: int
    inputs: int
    outputs: int

    def elements(self, tp: int) -> int:
        """Count the elements of A and B on a rank; the side that the layer itself splits is split."""
        split = (1, tp) if self.layer in COLUMN_PARALLEL else (tp, 1)
        return self.rank * (self.targets * self.inputs // split[0] + self.outputs // split[1])


def adapters(cfg: Config) -> dict[str, AdapterSize]:
    """Return the adapters of a block by layer; {} without LoRA."""
    if cfg.finetune.kind != "lora":
        return {}
    inputs = {layer: size for layer, (size, _) in linear_sizes(cfg.model).items()}
    return {
        layer: AdapterSize(layer, cfg.lora.rank, len(spans), inputs[layer], sum(span.size for span in spans.values()))
        for layer, spans in adapted(cfg.model, cfg.lora.targets).items()
        if spans
    }


class StateBytes:
    """Bytes that a rank of a layout over `world` ranks holds between steps."""

    def __init__(self, cfg: Config, world: int):
        m, p = cfg.model, cfg.parallel
        self.cfg, self.frozen, self.adapters = cfg, cfg.finetune.kind == "lora", adapters(cfg)
        self.llama, self.tp, self.grad_bytes = m.family == "llama", p.tp, GRAD_BYTES[cfg.optimizer.accumulates_in]
        self.shards = cfg.dp(world) * p.cp
        self.slice_bytes = self.grad_bytes if self.shards == 1 else 4  # per gradient that the update reads
        self.layers = stage_layers(m.num_layers, p.pp, p.vp, p.layers_per_stage)
        in_fp8 = fp8_layers(cfg.precision, m.num_layers)
        self.fp8_blocks = [sum(i in in_fp8 for i in layers) for layers in self.layers]
        self.fp8_head = cfg.precision.fp8_head

    def lasting(self) -> tuple[int, int, int, int]:
        """Count the bytes of PERSISTENT on the rank that has most of them: a lower bound of its peak."""
        return max(map(self.lasting_parts, range(self.cfg.parallel.pp)), key=sum)

    def lasting_parts(self, rank: int) -> tuple[int, int, int, int]:
        """Count the bytes of parameters, gradients, optimizer and FP8 weights."""
        count, trained, kept = (sum(map(of, self.stages(rank))) for of in (self.parameters, self.trained, self.kept))
        casts, pp = 2 * self.cast(rank) - kept, self.cfg.parallel.pp
        tied = self.cfg.model.tie_embeddings and not self.frozen and pp > 1 and rank in (0, pp - 1)
        gradients = self.grad_bytes * trained
        if self.slice_bytes > self.grad_bytes:  # the reduced slice is not in the bucket
            gradients += self.slice_bytes * trained // self.shards
        elif self.grad_bytes < 4 and tied:
            gradients += 4 * self.table  # the sum of the tied weight's two copies
        return ITEM * count - kept, gradients, 12 * trained // self.shards, casts

    def stages(self, rank: int) -> range:
        """Return the stages of a pipeline rank, by chunk."""
        return range(rank, len(self.layers), self.cfg.parallel.pp)

    def cast(self, rank: int) -> int:
        """Count the elements of the rank's weights that are cast to FP8."""
        head = self.table if self.fp8_head and len(self.layers) - 1 in self.stages(rank) else 0
        return self.block_matrices * sum(self.fp8_blocks[rank :: self.cfg.parallel.pp]) + head

    def kept(self, stage: int) -> int:
        """Count the elements on a rank of this stage that are kept as FP8 bytes: a byte less than bf16 has."""
        return self.block_matrices * self.fp8_blocks[stage] if self.cfg.precision.fp8_params else 0

    def gathered_bytes(self, stage: int) -> int:
        """Count the bytes of the parameters that data ranks gather on this stage."""
        return ITEM * self.trained(stage) - self.kept(stage)

    def trained(self, stage: int) -> int:
        """Count the elements on a rank of this stage that have gradients: all, or those of adapters."""
        if not self.frozen:
            return self.parameters(stage)
        return len(self.layers[stage]) * sum(adapter.elements(self.tp) for adapter in self.adapters.values())

    @property
    def block_matrices(self) -> int:
        """Elements of a block's four matrices on this rank."""
        return sum(inputs * outputs for inputs, outputs in linear_sizes(self.cfg.model).values()) // self.tp

    def parameters(self, stage: int) -> int:
        """Count the parameters, in elements, on a rank of this stage."""
        m, h = self.cfg.model, self.cfg.model.hidden_size
        vectors = 2 * h
        if not self.llama:  # biases of norms, of rows, of the MLP's columns
            vectors += 4 * h + m.ffn_hidden_size // self.tp
        if m.biased_qkv:
            vectors += m.head_width * (m.num_heads + 2 * m.kv_heads) // self.tp
        if m.qk_norm:
            vectors += 2 * m.head_width
        count = len(self.layers[stage]) * (self.block_matrices + vectors)
        if stage == 0:
            count += self.table + (m.max_positions * h if m.positions == "learned" else 0)
        if stage == len(self.layers) - 1:
            count += (1 if self.llama else 2) * h + (0 if m.tie_embeddings and stage == 0 else self.table)
        return count + (self.trained(stage) if self.frozen else 0)

    @property
    def table(self) -> int:
        """Elements of the embedding or the head on this rank."""
        return self.cfg.model.padded_vocab_size * self.cfg.model.hidden_size // self.tp
