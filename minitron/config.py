"""Configuration: frozen dataclasses, one per section; every key with its meaning and its default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


def key(default, meaning: str):
    """A configuration key: its default and the sentence that `--help` prints for it."""
    metadata = {"help": meaning}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies (rope_type `llama3`)."""

    factor: float = key(8.0, "how far low frequencies are stretched")
    low_freq_factor: float = key(1.0, "wavelengths above original_max_positions / this are stretched in full")
    high_freq_factor: float = key(4.0, "wavelengths below original_max_positions / this are left alone")
    original_max_positions: int = key(8192, "sequence length that the unscaled model was trained with")


@dataclass(frozen=True)
class ModelConfig:
    family: Literal["llama", "gpt"] = key("llama", "llama: RMSNorm, SwiGLU, no biases; gpt: LayerNorm, GELU, biases")
    num_layers: int = key(4, "transformer blocks")
    hidden_size: int = key(128, "width h of the residual stream")
    ffn_hidden_size: int = key(384, "inner width f of the MLP")
    num_heads: int = key(8, "query heads")
    num_kv_heads: int | None = key(4, "key and value heads (grouped queries); null: as many as num_heads")
    vocab_size: int = key(4096, "token ids; the corpus tokenizer is trained to this size")
    vocab_multiple: int = key(128, "the embedding is padded to a multiple of this, never dependent on tp")
    positions: Literal["rope", "learned"] = key("rope", "rotary or learned absolute positions")
    max_positions: int = key(4096, "rows of the learned position table; the longest sequence allowed")
    rope_theta: float = key(10000.0, "base of the rotary wavelengths")
    rope_scaling: RopeScaling | None = key(None, "Llama 3.1's scaling of the rotary frequencies, null: none")
    tie_embeddings: bool = key(False, "the head shares the embedding's weight")
    norm_eps: float = key(1e-5, "added to the variance in norms")
    init_std: float = key(0.02, "standard deviation of weights at the start")
    hidden_dropout: float = key(0.0, "dropout after the embedding, attention and MLP")
    attention_dropout: float = key(0.0, "dropout of attention probabilities (reference backend, cp=1)")
    attention: Literal["auto", "cudnn", "flash", "flash-attn", "reference"] = key("auto", "attention kernels")


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = key(1, "tensor-parallel ranks")
    pp: int = key(1, "pipeline-parallel ranks")
    vp: int = key(1, "model chunks per pipeline rank (interleaved 1F1B)")
    cp: int = key(1, "context-parallel ranks")
    cp_style: Literal["ring", "allgather", "ulysses"] = key("ring", "how attention crosses context ranks")
    sequence_parallel: bool = key(True, "norms and residuals on 1/tp of the sequence (no effect at tp=1)")
    layers_per_stage: list[int] | None = key(None, "uneven pipeline: one layer count per global stage, pp*vp of them")
    overlap_tp: bool = key(True, "hide tensor-parallel communication behind the backward GEMMs")
    overlap_grads: bool = key(True, "reduce gradients during the last backward, gather parameters during the next forward")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = key(300, "optimizer steps")
    seq_len: int = key(256, "tokens per sample")
    micro_batch_size: int = key(4, "samples per forward pass")
    global_batch_size: int = key(16, "samples per optimizer step, over all data-parallel ranks")
    recompute: Literal["none", "selective", "full"] = key(
        "none", "what the backward pass computes again: nothing, norms and activations, or whole blocks")
    eval_every: int = key(0, "steps between evaluations, 0: never")
    eval_steps: int = key(4, "global batches per evaluation")
    seed: int = key(1234, "of weights, data order and dropout")
    deterministic: bool = key(False, "only kernels whose result does not vary from run to run")
    hang_seconds: int = key(600, "a collective that takes longer ends the run")


@dataclass(frozen=True)
class PrecisionConfig:
    dtype: Literal["bf16", "fp16", "fp32"] = key("bf16", "parameters and activations; optimizer state is always fp32")
    fp8: Literal["none", "current"] = key("none", "GEMMs of the blocks in FP8 with current per-tensor scaling")
    loss_scale: float = key(65536.0, "fp16: initial dynamic loss scale")
    loss_scale_window: int = key(1000, "fp16: clean steps after which the scale doubles")
    loss_scale_hysteresis: int = key(2, "fp16: overflows tolerated before the scale halves")


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = key(3e-3, "peak learning rate")
    min_lr: float = key(3e-4, "learning rate after the decay")
    lr_schedule: Literal["cosine", "linear", "constant"] = key("cosine", "shape of the decay")
    warmup_steps: int = key(20, "steps of linear warm-up from 0")
    constant_steps: int = key(0, "steps at min_lr before the end (they count towards decay_steps' default)")
    decay_steps: int | None = key(None, "steps until min_lr, warm-up included; null: train.steps - constant_steps")
    warmup_samples: int | None = key(None, "warm-up counted in samples instead of steps")
    decay_samples: int | None = key(None, "decay counted in samples instead of steps")
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW's running-average factors")
    eps: float = key(1e-8, "AdamW's epsilon")
    weight_decay: float = key(0.1, "decoupled weight decay of matrices (norms and biases have none)")
    clip_grad: float = key(1.0, "global gradient norm to clip to, 0: no clipping")


@dataclass(frozen=True)
class DataConfig:
    source: Literal["corpus", "mock", "indexed"] = key(
        "corpus", "corpus: Python's standard library; mock: random tokens; indexed: Megatron .bin/.idx files")
    paths: list[str] = key([], "indexed: one prefix, or weight prefix pairs")
    split: str = key("969,30,1", "train, validation and test shares of the documents")
    tokenizer: str = key("corpus", "corpus, bytes, gpt2:DIR, llama3:FILE or llama2:FILE")
    separate_documents: bool = key(False, "no attention across documents, positions restart in each")
    cache_dir: str = key("~/.cache/minitron", "where the corpus and the sample indices are kept")


@dataclass(frozen=True)
class LogConfig:
    format: Literal["megatron", "megatron-core"] = key("megatron", "form of the iteration line")
    every: int = key(1, "steps between iteration lines")
    dir: str | None = key(None, "where config.yaml, metrics.jsonl and one log per rank go; null: nowhere")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = key(ModelConfig, "the network")
    parallel: ParallelConfig = key(ParallelConfig, "how it is spread over GPUs; data parallel is what is left")
    train: TrainConfig = key(TrainConfig, "the run")
    precision: PrecisionConfig = key(PrecisionConfig, "number formats")
    optimizer: OptimizerConfig = key(OptimizerConfig, "AdamW and its schedule")
    data: DataConfig = key(DataConfig, "what is read")
    log: LogConfig = key(LogConfig, "what is written")
