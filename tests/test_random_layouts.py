"""Random models, layouts, data and switches that the rules accept, each against one process.

hypothesis draws a case and prints one that fails as the keys of a command line; the slow run shrinks it first. Add such
a line to CASES: it is tried first from then on. Cases are built so that rules rarely refuse them: a size is drawn as a
multiple of what must divide it. `tests/exactly.py` says how a case is compared.

    python -m pytest tests/test_random_layouts.py                   20 cases, always the same
    python -m pytest -m slow tests/test_random_layouts.py           300 on up to eight ranks, other ones each time
"""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

import exactly
from minitron.config.cli import load
from minitron.config.schema import Config

# Of every case: steps that AdamW does not blow up where gradients nearly vanish, and weights large enough to matter.
COMMON = (
    "train.steps=3 optimizer.lr=1e-3 optimizer.min_lr=1e-4 optimizer.warmup_steps=0 optimizer.eps=1e-5 "
    "model.init_std=0.2 model.rope_theta=100 model.max_positions=512 data.source=mock train.cuda_graph=off "
    "precision.fp8_backend=torch"
)
CASES: list[str] = []  # that failed once

HYPOTHESIS = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def config_of(case: str) -> tuple[int, Config]:
    """ "world=4 parallel.tp=2 ..." -> the ranks and the configuration."""
    world, *keys = case.split()
    given = {key.split("=")[0] for key in keys}
    common = [key for key in COMMON.split() if key.split("=")[0] not in given]
    if not any(key.startswith("precision.fp8=") for key in keys):
        common.remove("precision.fp8_backend=torch")
    return int(world.removeprefix("world=")), load([*common, *keys])


@st.composite
def cases(draw, most_ranks: int) -> str:
    """A case on 1 to `most_ranks` ranks."""

    def pick(*values):
        return draw(st.sampled_from(values))

    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    keys: dict[str, object] = {}
    shapes = [s for s in product(range(1, 5), repeat=4) if math.prod(s) <= most_ranks]
    tp, pp, cp, dp = pick(*shapes)
    vp, fp8 = number(1, 3) if pp > 1 else 1, pick("none", "none", "none", "delayed", "current")
    unit = 1 if fp8 == "none" else 16  # what FP8's sizes are multiples of
    style, sequence_parallel = pick("ring", "allgather", "ulysses"), pick(True, False)

    family, layers = pick("llama", "gpt"), [number(1, 2) for _ in range(pp * vp)]
    kv_heads = number(1, 2) * tp * (cp if style == "ulysses" else 1)
    heads = kv_heads * number(1, 2)
    ids = number(20, 100)
    keys["model.family"], keys["model.num_layers"] = family, sum(layers)
    keys["model.num_heads"], keys["model.num_kv_heads"] = heads, kv_heads
    keys["model.hidden_size"] = heads * (16 if unit == 16 else pick(4, 6, 8))
    keys["model.head_dim"] = pick("null", 16 if unit == 16 else pick(4, 6, 10))
    keys["model.qkv_bias"], keys["model.qk_norm"] = family == "llama" and pick(True, False), pick(True, False)
    keys["model.ffn_hidden_size"] = unit * tp * (number(1, 3) if unit == 16 else number(4, 24))
    keys["model.vocab_size"], keys["model.vocab_multiple"] = ids, unit * tp * number(1, 4)
    keys["model.positions"], keys["model.tie_embeddings"] = pick("rope", "learned"), pick(True, False)
    keys["model.hidden_dropout"] = pick(0.0, 0.2)
    keys["model.attention_dropout"] = pick(0.0, 0.2) if cp == 1 else 0.0

    keys["parallel.tp"], keys["parallel.pp"], keys["parallel.vp"], keys["parallel.cp"] = tp, pp, vp, cp
    keys["parallel.cp_style"], keys["parallel.sequence_parallel"] = style, sequence_parallel
    keys["parallel.overlap_tp"], keys["parallel.overlap_grads"] = pick(True, False), pick(True, False)
    keys["parallel.schedule"] = pick("1f1b", "zb-h1") if pp > 1 and vp == 1 else "1f1b"
    if pick(True, False):
        keys["parallel.layers_per_stage"] = f"[{','.join(map(str, layers))}]"

    micro = number(1, 3)
    parts = math.lcm(cp if style == "ulysses" else 2 * cp, cp * tp, unit * cp)
    least = -(-16 // parts)  # so that some token counts: the first of a document, which is kept apart, does not
    keys["train.seq_len"] = parts * number(least, least + max(1, 24 // parts))
    keys["train.micro_batch_size"] = micro
    keys["train.global_batch_size"] = micro * dp * number(1, 4)
    keys["train.seed"] = number(0, 1000)
    keys["train.recompute"] = pick("none", "selective", "full")
    if pick(True, False):
        keys["model.head_piece"] = unit * tp * number(1, 3)
    keys["train.cuda_graph"] = pick("off", "off", "on")
    keys["data.separate_documents"] = pick(True, False)
    keys["optimizer.grad_dtype"] = pick("fp32", "fp32", "bf16")
    keys["optimizer.accumulate_dtype"], keys["optimizer.reduce_dtype"] = (pick("null", "fp32", "bf16") for _ in "12")
    if fp8 != "none":
        keys["precision.fp8"], keys["precision.fp8_head"] = fp8, pick(True, False)
    if pick(True, False, False):
        targets = ["qkv", "o", "up", "down"] if pick(True, False) else ["q", "v", "down"]
        keys |= {"finetune.kind": "lora", "lora.rank": number(1, 4), "lora.targets": f"[{','.join(targets)}]"}
        keys["lora.dropout"] = pick(0.0, 0.2)
    elif fp8 != "none":
        keys["precision.fp8_params"] = pick(True, False)
    shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in keys.items()}
    case = " ".join([f"world={tp * pp * cp * dp}", *(f"{key}={value}" for key, value in shown.items())])
    world, cfg = config_of(case)
    assume(exactly.refused(cfg, world) is None)
    return case


def examples(test):
    for case in CASES:
        test = example(case=case)(test)
    return test


@settings(max_examples=20, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate], **HYPOTHESIS)
@examples
@given(case=cases(3))
def test_a_random_layout_equals_one_process(ranks, case):
    exactly.assert_equals_one_process(ranks, *config_of(case))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))  # cores run parts side by side
@settings(max_examples=50, print_blob=True, **HYPOTHESIS)
@given(case=cases(8))
def test_many_random_layouts_equal_one_process(ranks, part, case):
    exactly.assert_equals_one_process(ranks, *config_of(case))
