"""Count the floating-point operations of a training step, and compare a run with the peak of its GPUs.

Problem: "TFLOP/s" and "MFU" are quotients whose numerator is a convention, and published figures use three.
The idea: a matrix product of [m, k] by [k, n] takes 2 m k n operations, and the backward pass takes twice the
forward. So a weight costs 6 operations per token. Attention scores add 12 h s per layer and token, of which a causal
mask needs half. The three conventions count different parts of that:

    full      every score, masked or not; nothing for recomputation     NVIDIA's published MFU figures
    causal    half of the scores                                        Megatron-LM today
    hardware  every score; what recomputation repeats counts twice      BigScience, and the `TFLOPs:` of Megatron logs

Example, GPT-3 175B (96 layers, h 12288, vocabulary 51200), one sequence of 2048 tokens: 6 x 175e9 x 2048 = 2.15e15 for
the weights and 12 x 96 x 12288 x 2048² = 5.9e13 for attention make `full` 2.20e15. At two sequences per GPU every
8.91 s that is 494.9 TFLOP/s per GPU: half of an H100's 989.

A frozen weight (LoRA) has no gradient, so two of its three products are left: NVIDIA's recipes take 2/3 of the whole
count, and `hardware` counts a pass less. Padding of packed sequences is no work: callers leave it out of `tokens`.

`V` is the padded vocabulary. Norms, activations, softmax and the optimizer are not counted in any convention.
"""

from __future__ import annotations

import re

from minitron.config.schema import ModelConfig
from minitron.config.sizes import linear_sizes

# Dense TFLOP/s of the data sheets: (16 bit, FP8).
_PEAKS = {"H100": (989.0, 1979.0), "H200": (989.0, 1979.0), "A100": (312.0, None), "B200": (2250.0, 4500.0)}
FROZEN = 2 / 3  # share of the operations that is left where weights have no gradient


def full(m: ModelConfig, tokens: float, squared_lengths: float | None = None) -> float:
    """Count the operations, forward and backward, of one sequence of `tokens`, with all attention scores.

    For sequences packed of documents: `tokens` of all, and squared_lengths, the sum of the documents' squared lengths.
    Source: the formulas of NVIDIA's DGXC benchmarking recipes. Per token, Llama: 12 L h² (1 + g/a + s/h) + 18 L f h
    + 6 V h; GPT-3, where g = a, f = 4 h and the MLP's 18 is 12: 24 L h² + 12 L h s + 48 L h² + 6 V h.
    """
    return _weights(m) * tokens + _scores(m, tokens, squared_lengths)


def causal(m: ModelConfig, tokens: float, squared_lengths: float | None = None) -> float:
    """Count as `full` does, but only the half of the scores that a causal mask leaves.

    Source: `num_floating_point_operations` of Megatron-LM today, printed as `throughput per GPU (TFLOP/s/GPU)`.
    """
    return _weights(m) * tokens + _scores(m, tokens, squared_lengths) / 2


def hardware(m: ModelConfig, seq_len: int, *, recompute: bool, frozen: bool = False) -> float:
    """Count the operations of one sequence that the GPU runs: with `recompute` the blocks' forward pass counts twice.

    c f s L h² (1 + s / 6h + V / 16 L h), f = 4 passes with recomputation, else 3, one less where weights are frozen;
    c = 24, or 32 for a gated MLP. It takes the MLP to be 4 h wide, ignores grouped queries, and selective recomputation
    counts as a whole forward pass.
    Source: Narayanan et al. 2021, equation 3; with f and c as BigScience's Megatron-DeepSpeed logs it.
    """
    h, layers = m.hidden_size, m.num_layers
    passes, width = 3 + recompute - frozen, 32 if m.family == "llama" else 24
    other = seq_len / (6 * h) + m.padded_vocab_size / (16 * layers * h)
    return width * passes * seq_len * layers * h**2 * (1 + other)


def tflops_per_gpu(operations: float, seconds: float, gpus: int) -> float:
    """Return the TFLOP/s of each GPU when `gpus` of them do `operations` in `seconds`; divided by the peak: the MFU."""
    return operations / seconds / gpus / 1e12


def peak_tflops(device_name: str, fp8: bool) -> float | None:
    """Return the dense peak in TFLOP/s of a GPU that CUDA names so ("NVIDIA H100 80GB HBM3"), None if it is not known.

    fp8: the peak of FP8 instead of bf16 and fp16 matrix products (an A100 has none). PCIe and NVL cards of the H100 and
    H200 are slower than the figures here, so they are unknown too.
    """
    name = re.search(r"\b(H100|H200|A100|B200)\b", device_name)
    if name is None or (name[0].startswith("H") and re.search(r"\b(PCIe|NVL)\b", device_name)):
        return None
    return _PEAKS[name[0]][fp8]


def _weights(m: ModelConfig) -> float:
    """Count 6 operations per token and weight: attention projections, MLP, head."""
    block = sum(inputs * outputs for inputs, outputs in linear_sizes(m).values())
    return 6 * (m.num_layers * block + m.padded_vocab_size * m.hidden_size)


def _scores(m: ModelConfig, tokens: float, squared_lengths: float | None) -> float:
    """Count q k^T and probabilities times v: 12 n d operations per layer and pair of positions; n d is mostly h."""
    pairs = tokens**2 if squared_lengths is None else squared_lengths
    return 12 * m.num_layers * m.num_heads * m.head_width * pairs
