"""Sizes that the trainer allocates by and the planner counts by.

They stand here because nothing in this room imports torch, so a plan takes a second, and because a second copy could
become wrong. A size that only one of the two needs stands where it is used.
"""

from __future__ import annotations

from typing import NamedTuple

from minitron.config.schema import Config, ModelConfig, PrecisionConfig

# Bytes of gradients, in their own format, at which a bucket is closed. Large enough for NCCL's full bandwidth, small
# enough that the one bucket whose reduction nothing hides (the last of the backward) takes about a millisecond over
# NVLink.
BUCKET_BYTES = 256 << 20
SLICE_BYTES = 4 << 20  # of a bucket, on each data rank: smaller messages are bound by latency, so buckets are larger
GRAD_BYTES = {"fp32": 4, "bf16": 2}  # of one gradient, by optimizer.grad_dtype
# GPUs that read each other's memory fetch gradients in pieces of at most so many bytes: a staging buffer has room for
# one piece of every other rank.
PIECE_BYTES = 64 << 20
FP8_WORKSPACE_BYTES = 33 << 20  # more than the 32 MiB that cuBLAS advises for Hopper
NODES_PER_LAYER = 150  # kernels and copies of a block's forward and backward, the most that was counted: FP8, tp 4
MOCK_DOCUMENT = 1 / 4  # mean length of the documents of mock data, in samples
ROUNDED_ONCE = 2  # attention blocks; a sum of more is kept in float32, since each addition in bf16 rounds once more


def bucket_limit(data_ranks: int) -> int:
    """Return the bytes of gradients at which a bucket is closed that `data_ranks` ranks sum."""
    return max(BUCKET_BYTES, SLICE_BYTES * data_ranks)


def stream_length(cfg: Config) -> int:
    """Return how many positions of a sample a rank holds between its linear layers: s/cp/tp, or s/cp."""
    p = cfg.parallel
    return cfg.train.seq_len // p.cp // (p.tp if p.sequence_parallel else 1)


def in_pieces(tp: int, sequence_parallel: bool, overlap: bool) -> bool:
    """Tell whether products of tp ranks that see each other's memory run in pieces, beside the copies of others."""
    return overlap and sequence_parallel and tp > 1 and tp & (tp - 1) == 0


def fp8_layers(precision: PrecisionConfig, num_layers: int) -> range:
    """Return the blocks, of `num_layers` in the model, whose products are in FP8."""
    kept = precision.fp8_bf16_layers
    return range(0) if precision.fp8 == "none" else range(kept, num_layers - kept)


class AdaptedRows(NamedTuple):
    """Rows of a weight that an adapter adds to: from `start` on, `chunks` that are split over tp one by one."""

    start: int
    chunks: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.chunks)


def adapted(m: ModelConfig, targets: tuple[str, ...]) -> dict[str, dict[str, AdaptedRows]]:
    """Map each linear layer of a block to target -> its rows, in the order in which A stacks them."""
    q, kv, f, h = m.num_heads * m.head_dim, m.kv_heads * m.head_dim, m.ffn_hidden_size, m.hidden_size
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
    h, f, q = m.hidden_size, m.ffn_hidden_size, m.num_heads * m.head_dim
    return {
        "attention.qkv": (h, q + 2 * m.kv_heads * m.head_dim),
        "attention.out": (q, h),
        "mlp.up": (h, f * (2 if m.family == "llama" else 1)),
        "mlp.down": (f, h),
    }
