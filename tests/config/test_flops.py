"""The three ways to count operations, against every published figure that was computed with one of them."""

import math
from dataclasses import replace

import pytest

from minitron.config import flops
from minitron.config.schema import ModelConfig

GPT_13B = ModelConfig("gpt", 40, 5120, 4 * 5120, 32, 32, vocab_size=51200)
GPT_175B = ModelConfig("gpt", 96, 12288, 4 * 12288, 96, 96, vocab_size=51200)
LLAMA_8B = ModelConfig("llama", 32, 4096, 14336, 32, 8, vocab_size=128256)
LLAMA_70B = ModelConfig("llama", 80, 8192, 28672, 64, 8, vocab_size=128256)

# Published with five digits: half of the last one is 0.5e-4 of the leading.
PER_SEQUENCE = [
    (GPT_175B, 2048, 2.2046e15, 2.1749e15),
    (LLAMA_70B, 8192, 3.9439e15, 3.6800e15),
    (LLAMA_8B, 8192, 4.7442e14, 4.2165e14),
]

# Seconds per iteration, samples per second, TFLOPs: five lines logged on 96 nodes of 4 A100 (JUWELS Booster) by GPT-3
# 175B, global batch 96, activations recomputed.
LOGGED = [
    (7.2310, 13.276, 101.54),
    (5.3551, 17.927, 137.10),
    (5.6192, 17.084, 130.66),
    (5.3291, 18.014, 137.77),
    (5.3247, 18.029, 137.89),
]

# Seconds per step and MFU in percent, two sequences per H100: NVIDIA's 175B recipe.
MFU_175B = {
    False: [(8.91, 49.93), (8.95, 49.71), (9.09, 48.94), (9.01, 49.38), (9.02, 49.32)],
    True: [(5.92, 37.56), (5.96, 37.30), (6.44, 34.52), (6.72, 33.09), (6.24, 35.63)],
}


@pytest.mark.parametrize("shape, seq_len, full, causal", PER_SEQUENCE)
def test_per_sequence_figures(shape, seq_len, full, causal):
    for published, ours in ((full, flops.full(shape, seq_len)), (causal, flops.causal(shape, seq_len))):
        assert abs(ours - published) <= 0.5e-4 * 10 ** math.floor(math.log10(published))


def test_formulas_as_the_recipes_write_them():
    s, (L, h, a, g, f, V) = 8192, (80, 8192, 64, 8, 28672, 128256)
    assert flops.full(LLAMA_70B, s) == pytest.approx(
        s * (12 * L * h**2 * (1 + g / a + s / h) + 18 * L * f * h + 6 * V * h), rel=1e-12
    )
    s, (L, h, V) = 2048, (96, 12288, 51200)
    assert flops.full(GPT_175B, s) == pytest.approx(
        s * ((24 * L * h**2 + 12 * L * h * s) + 48 * L * h**2 + 6 * V * h), rel=1e-12
    )


@pytest.mark.parametrize("seconds, samples_per_second, tflops", LOGGED)
def test_logged_tflops(seconds, samples_per_second, tflops):
    operations = 96 * flops.hardware(GPT_175B, 2048, recompute=True)
    assert abs(flops.tflops_per_gpu(operations, seconds, 384) - tflops) <= 0.01
    assert f"{96 / seconds:.3f}" == f"{samples_per_second:.3f}"


def test_hardware_counts_passes_and_matrices():
    """Four passes with recomputation, three without; 32 for a gated MLP's three matrices, 24 for two."""
    with_recompute = flops.hardware(GPT_13B, 2048, recompute=True)
    assert flops.hardware(GPT_13B, 2048, recompute=False) == pytest.approx(3 / 4 * with_recompute)
    gated = ModelConfig("llama", 40, 5120, 4 * 5120, 32, 32, vocab_size=51200)
    assert flops.hardware(gated, 2048, recompute=True) == pytest.approx(32 / 24 * with_recompute)
    # BigScience's formula and `full` agree on a GPT without recomputation up to the head, counted as 4.5 instead of 6
    # operations per weight: c f V / 16 = 24 x 3 / 16.
    head = 6 * 51200 * 5120 * 2048
    assert flops.hardware(GPT_13B, 2048, recompute=False) == pytest.approx(flops.full(GPT_13B, 2048) - head / 4)


@pytest.mark.parametrize("fp8", [False, True])
def test_published_mfu(fp8):
    peak = flops.peak_tflops("NVIDIA H100 80GB HBM3", fp8)
    for seconds, percent in MFU_175B[fp8]:
        rounded = 100 * flops.tflops_per_gpu(2 * 2.2e15, seconds, 1) / peak  # the recipe rounds to 2.2e15
        assert abs(rounded - percent) <= 0.0101  # its last digit, cut or rounded
        ours = 100 * flops.tflops_per_gpu(2 * flops.full(GPT_175B, 2048), seconds, 1) / peak
        assert ours == pytest.approx(percent, rel=2.5e-3)  # 2.2e15 for 2.2046e15


def test_packed_documents_count_their_own_squares():
    lengths = [5, 1, 10]
    for count, share in ((flops.full, 1), (flops.causal, 0.5)):
        packed = count(LLAMA_8B, sum(lengths), sum(n**2 for n in lengths))
        assert packed == pytest.approx(sum(count(LLAMA_8B, n) for n in lengths), rel=1e-12)
        between = 16**2 - sum(n**2 for n in lengths)
        assert count(LLAMA_8B, 16) - packed == pytest.approx(share * 12 * 32 * 4096 * between, rel=1e-6)


def test_six_operations_per_weight():
    """Without attention scores `full` is 6 per token and matrix element, counted here from the matrices themselves."""
    h, f, head = 4096, 14336, 4096 // 32
    matrices = [(h, h), (h, 8 * head), (h, 8 * head), (h, h), (h, f), (h, f), (f, h)]
    weights = 32 * sum(rows * columns for rows, columns in matrices) + 128256 * h
    assert flops.full(LLAMA_8B, 1, squared_lengths=0) == pytest.approx(6 * weights, rel=1e-12)


def test_wider_heads_have_larger_projections_and_scores():
    """Qwen 3 0.6B has heads of 128 channels, twice hidden_size / num_heads."""
    plain = replace(LLAMA_8B, hidden_size=1024, num_heads=16)
    wide = replace(plain, head_dim=128)
    more = plain.num_layers * 1024 * (2 * 16 + 2 * 8) * (128 - 64)  # elements of q, k, v and out
    assert flops.full(wide, 1, 0) - flops.full(plain, 1, 0) == pytest.approx(6 * more, rel=1e-12)
    scores = [flops.full(m, 1, 1e9) - flops.full(m, 1, 0) for m in (plain, wide)]
    assert scores[1] == pytest.approx(2 * scores[0], rel=1e-9)


@pytest.mark.parametrize(
    "name, bf16, fp8",
    [
        ("NVIDIA H100 80GB HBM3", 989, 1979),
        ("NVIDIA H200", 989, 1979),
        ("NVIDIA A100-SXM4-40GB", 312, None),
        ("NVIDIA B200", 2250, 4500),
        ("NVIDIA H100 PCIe", None, None),
        ("NVIDIA H200 NVL", None, None),
        ("NVIDIA GB200", None, None),
        ("NVIDIA GeForce RTX 4090", None, None),
        ("cpu", None, None),
    ],
)
def test_peaks(name, bf16, fp8):
    assert (flops.peak_tflops(name, fp8=False), flops.peak_tflops(name, fp8=True)) == (bf16, fp8)


def test_padding_counts_and_no_number_of_kv_heads_means_all():
    """As in the published figures: the head's product has the padded columns, too."""
    gpt = replace(GPT_175B, num_kv_heads=None, vocab_size=50257, vocab_multiple=1024)
    assert flops.full(gpt, 2048) == flops.full(GPT_175B, 2048)


# NVIDIA's fine-tuning recipe of Llama 3 8B: (seconds, MFU in percent, FP8, LoRA), four sequences of 4096 per H100.
FINETUNED = [
    (1.32, 56.38, False, False),
    (1.33, 55.95, False, False),
    (0.95, 39.16, True, False),
    (0.92, 53.9, False, True),
    (0.68, 36.4, True, True),
    (0.69, 35.9, True, True),
]


@pytest.mark.parametrize("seconds, percent, fp8, lora", FINETUNED)
def test_fine_tuning_s_published_mfu(seconds, percent, fp8, lora):
    """Its 1.84e14 operations a sequence are those of the weights, without scores, and LoRA's are two thirds."""
    operations = flops.full(LLAMA_8B, 4096, squared_lengths=0)
    assert operations == pytest.approx(1.84e14, rel=5e-3)
    operations = 4 * 1.84e14 * (flops.FROZEN if lora else 1)
    mfu = 100 * flops.tflops_per_gpu(operations, seconds, 1) / flops.peak_tflops("NVIDIA H100 80GB HBM3", fp8)
    assert abs(mfu - percent) <= (0.1 if lora else 1e-3 * percent)  # of LoRA the recipe cuts off after a digit


def test_frozen_weights_save_a_pass():
    """Of three, or of four with recomputation, where the others of `hardware` are as they were."""
    for recompute, share in ((False, 2 / 3), (True, 3 / 4)):
        ours, whole = (flops.hardware(LLAMA_8B, 4096, recompute=recompute, frozen=frozen) for frozen in (True, False))
        assert ours == pytest.approx(share * whole)
