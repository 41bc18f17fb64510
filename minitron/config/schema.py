"""Configuration: frozen dataclasses, one per section: each key with its type, default, meaning and range.

Problem: a run has ninety settings, and most combinations are wrong. A wrong one must be found at once, not ten minutes
later by a thousand GPUs. The idea: a key is a typed field, with its meaning, its range and the keys that it needs
beside it. A rule about several keys is in `minitron.config.rules`. Its `check` runs all rules, from the number of ranks
and the kind of GPU, without torch or a process group. The error of a broken rule is one line: value, rule and fix:

    parallel.tp=3 does not divide model.num_kv_heads=8; use 1, 2, 4 or 8

Values that follow from others are properties, so no value is stored twice or rewritten.
`minitron.config.cli` makes a Config from YAML files and the command line; there null stands for None. Errors, `--help`
and the JSON schema of `--schema` read the keys from here, so their meanings are written once.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, NewType, Union, get_args, get_origin, get_type_hints

Shares = NewType("Shares", str)  # 90,8,2 or [90, 8, 2]; kept as the text 90,8,2


def key(default, meaning: str, within: str | None = None, needs: dict[str, tuple] | None = None):
    """Declare a key.

    meaning: what `--help` and `--schema` print. within: the interval of its numbers.
    needs: other keys, and the values that they must have unless this key has its default; () is any value but null.
    """
    metadata = {"help": meaning, "within": within, "needs": needs or {}}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


MAX_STEPS = 10**12
COUNT, NOT_NEGATIVE, POSITIVE, FRACTION = "[1, 1e12]", "[0, 1e12]", "(0, 1e12]", "[0, 1)"
BF16 = {"precision.dtype": ("bf16",)}
FP16 = {"precision.dtype": ("fp16",)}
FP8 = {"precision.fp8": ("delayed", "current", "block")}
# Gathered casts have one scale a weight, not one a block; LoRA freezes the weights of FP8 products.
FP8_PARAMS = {"precision.fp8": ("delayed", "current"), "finetune.kind": (None, "sft")}
ROTARY = {"model.positions": ("rope",)}
LLAMA = {"model.family": ("llama",)}
RAMP = {"train.batch_schedule": ((),)}
ATTENTION_DROPOUT = {"parallel.cp": (1,), "model.attention": ("auto", "fused", "reference")}
DECAYING = {"optimizer.lr_schedule": ("cosine", "linear", "wsd")}
DECAY_STEPS = {"optimizer.decay_steps": (None,)}
WSD_SHARE = {"optimizer.lr_schedule": ("wsd",), "optimizer.wsd_decay_steps": (None,)}
WSD_STEPS = {"optimizer.lr_schedule": ("wsd",), "optimizer.decay_samples": (None,)}
CONSTANT_END = {"optimizer.decay_samples": (None,), **DECAY_STEPS, **DECAYING}
FILES = {"data.source": ("indexed", "sft")}
SFT = {"data.source": ("sft",)}
SAVING = {"checkpoint.dir": ()}
RESUMING = {"checkpoint.dir": (), "checkpoint.resume": (True,)}
BASE = {"finetune.kind": ("sft", "lora"), "checkpoint.load": (None,)}
LORA = {"finetune.kind": ("lora",)}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies (rope_type `llama3`)."""

    factor: float = key(8.0, "how far low frequencies are stretched", POSITIVE)
    low_freq_factor: float = key(1.0, "wavelengths above original_max_positions / this are stretched in full", POSITIVE)
    high_freq_factor: float = key(4.0, "wavelengths below original_max_positions / this are left alone", POSITIVE)
    original_max_positions: int = key(8192, "sequence length that the unscaled model was trained with", COUNT)


@dataclass(frozen=True)
class ModelConfig:
    family: Literal["llama", "gpt"] = key("llama", "llama: RMSNorm, SwiGLU, no biases; gpt: LayerNorm, GELU, biases")
    num_layers: int = key(4, "transformer blocks", "[1, 10000]")
    hidden_size: int = key(128, "width h of the residual stream", COUNT)
    ffn_hidden_size: int = key(384, "inner width f of the MLP", COUNT)
    num_heads: int = key(8, "query heads", COUNT)
    num_kv_heads: int | None = key(4, "key and value heads (grouped queries); null: as many as num_heads", COUNT)
    head_dim: int | None = key(None, "width d of a head; null: hidden_size / num_heads", COUNT)
    qkv_bias: bool = key(False, "the q, k, v projection has a bias, as in Qwen 2.5; gpt: it always has", needs=LLAMA)
    qk_norm: bool = key(False, "RMS norms of every head's q and k, before the positions, as in Qwen 3")
    vocab_size: int = key(4096, "token ids; the corpus tokenizer is trained to this size", COUNT)
    vocab_multiple: int = key(128, "the embedding is padded to a multiple of this; the loss ignores the padding", COUNT)
    positions: Literal["rope", "learned"] = key("rope", "rotary or learned absolute positions")
    max_positions: int = key(4096, "rows of the learned position table; the longest sequence allowed", COUNT)
    rope_theta: float = key(10000.0, "base of the rotary wavelengths", POSITIVE)
    rope_scaling: RopeScaling | None = key(None, "Llama 3.1's scaling of rotary frequencies; null: none", needs=ROTARY)
    tie_embeddings: bool = key(False, "the head shares the embedding's weight")
    norm_eps: float = key(1e-5, "added to the variance in norms", POSITIVE)
    init_std: float = key(0.02, "standard deviation of weights at the start", POSITIVE)
    hidden_dropout: float = key(0.0, "dropout after the embedding, attention and MLP", FRACTION)
    attention_dropout: float = key(0.0, "dropout of attention probabilities", FRACTION, ATTENTION_DROPOUT)
    attention: Literal["auto", "cudnn", "flash", "flash-attn", "fused", "reference"] = key("auto", "attention kernels")
    head_piece: int | None = key(None, "tokens of a microbatch whose logits a rank holds at a time; null: all", COUNT)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def biased_qkv(self) -> bool:
        return self.family == "gpt" or self.qkv_bias

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = key(1, "tensor-parallel ranks", COUNT)
    pp: int = key(1, "pipeline-parallel ranks", COUNT)
    vp: int = key(1, "model chunks per pipeline rank (interleaved 1F1B)", COUNT)
    schedule: Literal["1f1b", "zb-h1"] = key(
        "1f1b", "the pipeline's; zb-h1 fills 2/3 of the bubble with weight gradients", needs={"parallel.vp": (1,)}
    )
    cp: int = key(1, "context-parallel ranks", COUNT)
    cp_style: Literal["ring", "allgather", "ulysses"] = key("ring", "how attention crosses context ranks")
    sequence_parallel: bool = key(True, "norms and residuals on 1/tp of the sequence (no effect at tp=1)")
    layers_per_stage: tuple[int, ...] | None = key(None, "uneven pipeline: layers of each global stage, pp*vp counts")
    overlap_tp: bool = key(True, "hide tensor-parallel communication behind GEMMs")
    overlap_grads: bool = key(True, "reduce gradients in the last backward, gather parameters in the next forward")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = key(300, "optimizer steps", COUNT)
    epochs: float | None = key(None, "sft: passes over the samples, from which the steps follow", "(0, 1e6]", SFT)
    seq_len: int = key(256, "tokens per sample", COUNT)
    micro_batch_size: int = key(4, "samples per forward pass", COUNT)
    global_batch_size: int = key(16, "samples per optimizer step, over all data-parallel ranks", COUNT)
    batch_ramp: tuple[int, int, int] | None = key(None, "[start, increment, samples]: smaller first steps", COUNT, RAMP)
    batch_schedule: tuple[tuple[int, int], ...] = key((), "[[samples trained, samples per step], ...]", NOT_NEGATIVE)
    recompute: Literal["none", "selective", "full"] = key(
        "none", "what the backward pass computes again: nothing, norms and activations, or whole blocks"
    )
    eval_every: int = key(0, "steps between evaluations, 0: never", NOT_NEGATIVE)
    eval_steps: int = key(4, "global batches per evaluation", COUNT)
    check_replicas_every: int = key(
        200, "steps between checks of replicas, and before saves; a difference ends the run; 0: never", NOT_NEGATIVE
    )
    check_speed_every: int = key(
        10, "steps between comparisons of ranks' compute time; a slow rank is named; 0: never", NOT_NEGATIVE
    )
    rerun: Literal["off", "on"] = key(
        "off",
        "repeat a step whose loss or gradients spike or are not finite. With an equal result the update is skipped; a "
        "different one ends the run and names the GPU. The host waits for the device once a step",
    )
    seed: int = key(1234, "seed of weights, data order and dropout", "[0, 4294967295]")  # as numpy's RandomState
    kernels: Literal["auto", "apex"] = key("auto", "weight gradients and AdamW: own kernels, or NVIDIA's apex (CUDA)")
    cuda_graph: Literal["auto", "on", "off"] = key("auto", "auto, on: replay steps as CUDA graphs where possible")
    deterministic: bool = key(False, "only kernels whose result does not vary from run to run")
    hang_seconds: int = key(600, "a rank without progress for longer reports where, and ends the run", "[1, 31536000]")
    max_skipped: int = key(
        10, "updates skipped in a row that end the run; with fp16 only those at the smallest loss scale count", COUNT
    )


@dataclass(frozen=True)
class PrecisionConfig:
    dtype: Literal["bf16", "fp16", "fp32"] = key("bf16", "parameters and activations; optimizer state is always fp32")
    fp8: Literal["none", "delayed", "current", "block"] = key(
        "none", "GEMMs of blocks; delayed: past steps' scales; current: per tensor; block: per 128 values", needs=BF16
    )
    fp8_backend: Literal["te", "torch"] = key("te", "FP8 kernels: Transformer Engine's or torch's own", needs=FP8)
    fp8_bf16_layers: int = key(0, "FP8: this many first and as many last blocks stay in bf16", NOT_NEGATIVE, FP8)
    fp8_head: bool = key(False, "FP8: the product with the vocabulary, too", needs=FP8)
    fp8_params: bool = key(
        False, "FP8: weights are kept and gathered as their casts, without a bf16 copy", needs=FP8_PARAMS
    )
    loss_scale: float = key(65536.0, "fp16: initial dynamic loss scale, which never falls below 1", "[1, 1e38]", FP16)
    loss_scale_window: int = key(1000, "fp16: clean steps after which the scale doubles", COUNT, FP16)
    loss_scale_hysteresis: int = key(2, "fp16: overflows tolerated before the scale halves", COUNT, FP16)


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = key(3e-3, "peak learning rate", NOT_NEGATIVE)
    min_lr: float = key(3e-4, "learning rate after the decay", NOT_NEGATIVE)
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = key("cosine", "shape; wsd: a short decay at the end")
    warmup_steps: int = key(20, "steps of linear warm-up from 0", NOT_NEGATIVE)
    constant_steps: int = key(0, "steps at min_lr before the end", NOT_NEGATIVE, CONSTANT_END)
    decay_steps: int | None = key(None, "steps to min_lr, with warm-up; null: steps - constant_steps", COUNT, DECAYING)
    wsd_decay_share: float = key(0.1, "wsd: the decay's share of the samples until its end", "(0, 1]", WSD_SHARE)
    wsd_decay_steps: int | None = key(None, "wsd: the decay in steps; null: by wsd_decay_share", COUNT, WSD_STEPS)
    warmup_samples: int | None = key(None, "the warm-up in samples", NOT_NEGATIVE, {"optimizer.warmup_steps": (0,)})
    decay_samples: int | None = key(None, "the decay in samples, with warm-up", COUNT, DECAY_STEPS | DECAYING)
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW's running-average factors", FRACTION)
    eps: float = key(1e-8, "AdamW's epsilon", POSITIVE)
    weight_decay: float = key(0.1, "decoupled weight decay of matrices (norms and biases have none)", NOT_NEGATIVE)
    clip_grad: float = key(1.0, "global gradient norm to clip to, 0: no clipping", NOT_NEGATIVE)
    grad_dtype: Literal["fp32", "bf16"] = key(
        "fp32", "format of gradients: the default of accumulate_dtype and reduce_dtype", needs=BF16
    )
    accumulate_dtype: Literal["fp32", "bf16"] | None = key(
        None, "format in which gradients are added over microbatches; null: grad_dtype"
    )
    reduce_dtype: Literal["fp32", "bf16"] | None = key(
        None, "format of gradients that nodes send; sums within a node are float32; null: grad_dtype"
    )

    @property
    def accumulates_in(self) -> Literal["fp32", "bf16"]:
        """The format of gradients while microbatches are added to them."""
        return self.accumulate_dtype or self.grad_dtype

    @property
    def reduces_in(self) -> Literal["fp32", "bf16"]:
        """The format of gradients between nodes."""
        return self.reduce_dtype or self.grad_dtype


@dataclass(frozen=True)
class DataConfig:
    source: Literal["corpus", "mock", "indexed", "sft"] = key(
        "corpus", "corpus: Python's library; mock: random tokens; indexed: Megatron's .bin/.idx; sft: JSONL"
    )
    paths: tuple[str, ...] = key((), "[PREFIX] or [0.7,PREFIX,0.3,PREFIX]; sft: files or [docstrings]", needs=FILES)
    valid_paths: tuple[str, ...] = key((), "sft: files to validate on; none: a share of paths", needs=SFT)
    split: Shares = key("969,30,1", "shares of documents to train, validate, test on; sft with valid_paths: not read")
    tokenizer: str = key("corpus", "corpus, bytes, gpt2:DIR, llama3:FILE, llama2:FILE or hf:DIR")
    too_long: Literal["error", "skip", "truncate"] = key("truncate", "sft: if a document exceeds a sample", needs=SFT)
    bad_lines: Literal["error", "skip"] = key("error", "sft: what happens to rows that cannot be used", needs=SFT)
    special_tokens_in_text: bool = key(False, "sft: text that spells a special token becomes that token", needs=SFT)
    separate_documents: bool = key(False, "no attention across documents, positions restart in each; sft: always")
    skip_samples: tuple[tuple[int, int], ...] = key((), "[[first, end], ...]: samples to leave out", NOT_NEGATIVE)
    document_length: int | None = key(
        None, "mock: most tokens of a document; null: 1/4 sample on average", COUNT, {"data.source": ("mock",)}
    )
    cache_dir: str = key("~/.cache/minitron", "where the corpus and the sample indices are kept")

    @property
    def separates(self) -> bool:
        """Whether documents are kept apart."""
        return self.separate_documents or self.source == "sft"


@dataclass(frozen=True)
class CheckpointConfig:
    dir: str | None = key(None, "where checkpoints are saved, and resumed from if there are; null: nowhere")
    every: int | Literal["auto"] | None = key(
        100,
        "steps between saves; auto: what costs least; 0: only at the end; null: only if a signal ends the run",
        NOT_NEGATIVE,
    )
    mtbf_hours: float | None = key(None, "auto: mean time between failures of the whole job", POSITIVE)
    local_dir: str | None = key(
        None, "on each node's own disk: additional saves; a start prefers newer and complete ones", needs=SAVING
    )
    local_every: int | Literal["auto"] = key(
        20, "steps between saves in local_dir; auto: what costs least", COUNT, {"checkpoint.local_dir": ()}
    )
    keep: int = key(
        2, "checkpoints to keep, 0: all; those after resume_step are deleted when the run passes them", NOT_NEGATIVE
    )
    resume: bool = key(True, "continue from the newest checkpoint in dir")
    resume_step: int | None = key(None, "the checkpoint's step; null: the newest", NOT_NEGATIVE, RESUMING)
    async_save: bool = key(True, "write while training goes on, from a copy in host memory")
    load: str | None = key(None, "start from the weights of this checkpoint, if none in dir is resumed")
    export: Literal["none", "hf"] = key(
        "none", "hf: another process writes each save for transformers too, as a folder step_...-hf", needs=SAVING
    )
    export_every: int = key(1, "export every n-th save, and the last", COUNT, {"checkpoint.export": ("hf",)})

    @property
    def saves(self) -> bool:
        """Whether a run with `dir` saves even if no signal ends it."""
        return self.every is not None or self.local_dir is not None


@dataclass(frozen=True)
class FinetuneConfig:
    kind: Literal["sft", "lora"] | None = key(None, "sft: all weights are trained; lora: adapters; null: pretraining")
    base: str | None = key(None, "a Hugging Face folder or a minitron checkpoint to start from", needs=BASE)


@dataclass(frozen=True)
class LoraConfig:
    rank: int = key(8, "inner width of an adapter", COUNT, LORA)
    alpha: float = key(16.0, "what adapters add is multiplied by alpha / rank", POSITIVE, LORA)
    dropout: float = key(0.0, "dropout of what adapters read", FRACTION, LORA)
    targets: tuple[str, ...] = key(
        ("qkv",), "layers with an adapter: qkv (one for all three) or any of q, k, v; o, gate, up, down", needs=LORA
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class LogConfig:
    format: Literal["megatron", "megatron-core", "nemo"] = key("megatron", "form of the iteration line")
    style: Literal["full", "short"] = key("full", "short: a line for people", None, {"log.format": ("megatron",)})
    every: int = key(1, "steps between iteration lines", COUNT)
    dir: str | None = key(None, "where config.yaml, metrics.jsonl, dllogger.json and a log per rank go; null: nowhere")
    tensorboard: str | bool = key(False, "event files; true: in log.dir/tensorboard, a text: in that directory")
    wandb: str | None = key(None, "Weights & Biases: the project in which the run appears; null: nowhere")
    numerics_every: int = key(
        0, "steps between records of norms, zeros and FP8's losses by layer; 0: never", NOT_NEGATIVE, {"log.dir": ()}
    )
    prometheus: str | None = key(None, "PORT or ADDRESS:PORT of rank 0's node for Prometheus; null: none")


@dataclass(frozen=True)
class ProfileConfig:
    kind: Literal["none", "nsys", "torch", "memory"] = key(
        "none", "nsys: a range (--capture-range=cudaProfilerApi); torch: Chrome trace and table; memory: allocations"
    )
    start_step: int = key(10, "first step that is profiled", COUNT)
    end_step: int = key(12, "last step that is profiled", COUNT)
    ranks: tuple[int, ...] = key((0,), "ranks that are profiled", NOT_NEGATIVE)


@dataclass(frozen=True)
class Config:
    model: ModelConfig = key(ModelConfig, "the network")
    parallel: ParallelConfig = key(ParallelConfig, "how it is spread over GPUs; the remaining factor is data parallel")
    train: TrainConfig = key(TrainConfig, "the run")
    precision: PrecisionConfig = key(PrecisionConfig, "number formats")
    optimizer: OptimizerConfig = key(OptimizerConfig, "AdamW and its schedule")
    data: DataConfig = key(DataConfig, "what is read")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "what is saved and started from")
    finetune: FinetuneConfig = key(FinetuneConfig, "training of weights that exist (minitron.finetune)")
    lora: LoraConfig = key(LoraConfig, "low-rank adapters (finetune.kind=lora)")
    log: LogConfig = key(LogConfig, "what is written")
    profile: ProfileConfig = key(ProfileConfig, "some steps under a profiler")

    def dp(self, world: int) -> int:
        """Count the data-parallel ranks: the world divided by tp, pp and cp."""
        return world // (self.parallel.tp * self.parallel.pp * self.parallel.cp)

    def num_microbatches(self, dp: int) -> int:
        """Count the forward passes per step of each of `dp` data-parallel ranks."""
        return self.train.global_batch_size // (self.train.micro_batch_size * dp)


def changed(cfg: Config, **sections: dict[str, Any]) -> Config:
    """Return a copy of cfg with other values of some keys: changed(cfg, train=dict(steps=3), parallel=dict(tp=2))."""
    return replace(cfg, **{name: replace(getattr(cfg, name), **keys) for name, keys in sections.items()})


# ---- the keys as a list ---------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """A key that holds a value. name: `section.key`. accepted_types: begins with the type of most values."""

    name: str
    accepted_types: tuple
    field: Field


def keys(cls: type = Config, prefix: str = "") -> Iterator[Key]:
    """List the keys of a section in order, each followed by the keys of the section that it may hold."""
    for f in fields(cls):
        section = (accepted := accepted_types(cls)[f.name])[0]
        if not is_dataclass(section) or f.default is None:
            yield Key(f"{prefix}{f.name}", accepted, f)
        if is_dataclass(section):
            yield from keys(section, f"{prefix}{f.name}.")


@functools.cache
def accepted_types(cls: type) -> dict[str, tuple]:
    """Return the types that each field of a section takes: (int, NoneType) for `int | None`, (int,) for `int`."""
    return {
        name: get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        for name, hint in get_type_hints(cls).items()
    }
