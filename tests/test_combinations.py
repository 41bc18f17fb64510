"""Every two switches that change a step, together: rows of a covering array, each against one process.

A test of one switch does not see that another one breaks it. All combinations are too many, but all pairs fit into
some thirty runs. `covering_array` makes them: of the pairs that no row has yet it takes the first, and of random rows
with it the one with the most new pairs. The rules decide which rows there are, so a pair in no row is refused by one.

A row trains three steps on two to four gloo ranks, as exactly as `tests/exactly.py` does.
"""

from __future__ import annotations

import itertools
import random

import pytest

import exactly
from layouts import GPT3, LLAMA, config
from minitron.config.schema import Config

Settings = dict[str, dict[str, object]]
Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def merged(*layers: Settings) -> Settings:
    result: Settings = {}
    for layer in layers:
        for section, values in layer.items():
            result[section] = result.get(section, {}) | values
    return result


def parallel(**keys) -> Settings:
    return {"parallel": keys}


SMALL = {"model": {"num_layers": 2}, "train": {"global_batch_size": 4}}
FP8 = {
    "precision": {"fp8_backend": "torch"},
    "model": {"hidden_size": 64, "ffn_hidden_size": 64, "max_positions": 64, "vocab_multiple": 32, "init_std": 0.1},
    "train": {"seq_len": 64},
}
BLOCKS = {  # of 128 values, on each of two ranks
    "model": {"hidden_size": 256, "ffn_hidden_size": 256, "max_positions": 512, "vocab_multiple": 256, "init_std": 0.05}
}
ADAPTERS = {"finetune": {"kind": "lora"}, "lora": {"rank": 4, "alpha": 4.0, "targets": ("q", "v", "o", "up", "down")}}

HEADS = {"model": {"head_dim": 32, "qkv_bias": True, "qk_norm": True}}  # of all that FP8 asks of sizes a multiple

# The values of each switch. The first is what the plain row has.
SWITCHES: dict[str, dict[str, Settings]] = {
    "tp": {"1": {}, "2": parallel(tp=2), "2-without-sp": parallel(tp=2, sequence_parallel=False)},
    "pp": {
        "1": {},
        "1f1b": parallel(pp=2),
        "interleaved": parallel(pp=2, vp=2) | {"model": {"num_layers": 4}},
        "zb-h1": parallel(pp=2, schedule="zb-h1"),
    },
    "cp": {"1": {}} | {style: parallel(cp=2, cp_style=style) for style in ("ring", "allgather", "ulysses")},
    "dp": {"1": {}, "2": {}},
    "fp8": {
        "delayed": merged(FP8, {"precision": {"fp8": "delayed"}}),
        "current": merged(FP8, {"precision": {"fp8": "current"}}),
        "block": merged(FP8, {"precision": {"fp8": "block"}}, BLOCKS),
        "kept": merged(FP8, {"precision": {"fp8": "delayed", "fp8_params": True}}),
        "none": {},
    },
    "head": {"bf16": {}, "fp8": {"precision": {"fp8_head": True}}},
    "logits": {"whole": {}, "pieces": {"model": {"head_piece": 16}}},
    "grads": {
        "fp32": {},
        "bf16": {"optimizer": {"grad_dtype": "bf16"}},
        "bf16-on-the-wire": {"optimizer": {"reduce_dtype": "bf16"}},
        "bf16-in-memory": {"optimizer": {"accumulate_dtype": "bf16"}},
    },
    "recompute": {kind: {"train": {"recompute": kind}} for kind in ("none", "selective", "full")},
    "lora": {"none": {}, "adapters": ADAPTERS, "dropout": merged(ADAPTERS, {"lora": {"dropout": 0.2}})},
    "hidden-dropout": {"0": {}, "0.2": {"model": {"hidden_dropout": 0.2}}},
    "attention-dropout": {"0": {}, "0.2": {"model": {"attention_dropout": 0.2}}},
    "documents": {"joined": {}, "apart": {"data": {"separate_documents": True}}},
    "model": {"llama": {}, "tied-llama": {"model": {"tie_embeddings": True}}, "tied-gpt": {}, "qwen": HEADS},
    "graph": {"eager": {}, "replayed": {"train": {"cuda_graph": "on"}}},
    "deterministic": {"off": {}, "on": {"train": {"deterministic": True}}},
}
PLAIN = {switch: next(iter(values)) for switch, values in SWITCHES.items()}
# More than two that read one another's results; each has a row. FP8's casts are gathered, recomputed and put off.
TOGETHER = [
    {"tp": "2", "fp8": "current", "recompute": "selective", "lora": "none"},
    {"tp": "2", "pp": "zb-h1", "fp8": "delayed", "grads": "fp32", "recompute": "selective", "lora": "none"},
    {"tp": "2", "cp": "ring", "documents": "apart", "recompute": "full", "hidden-dropout": "0.2"},
]


# ---- the array -------------------------------------------------------------------------------------------------------


def world_of(row: Row) -> int:
    return 2 ** sum(row[axis] != "1" for axis in ("tp", "pp", "cp", "dp"))


def config_of(row: Row) -> Config:
    chosen = merged(SMALL, *(SWITCHES[switch][value] for switch, value in row.items()))
    if row["fp8"] == "block":  # also of a rank's part of the sequence
        chosen["train"]["seq_len"] = 128 << (row["tp"] == "2") + (row["cp"] != "1")
    return config(GPT3 if row["model"] == "tied-gpt" else LLAMA, chosen)


def refused(row: Row) -> str | None:
    return exactly.refused(config_of(row), world_of(row))


def pairs_of(row: Row) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))


def covering_array(worlds: range, tries: int = 200) -> tuple[list[Row], list[Pair]]:
    """Rows that hold TOGETHER and every pair of values, on so many ranks, and the pairs that rules refuse."""
    items = [(switch, value) for switch, values in SWITCHES.items() for value in values]
    missing = {(a, b): None for a, b in itertools.combinations(items, 2) if a[0] != b[0]}
    rows, without, rng, first = [], [], random.Random(0), list(TOGETHER)
    while missing:
        wanted = first.pop(0) if first else dict(pair := next(iter(missing)))
        if refused(PLAIN | wanted) is not None:
            without.append(pair)
            del missing[pair]
            continue
        drawn = [{s: rng.choice(list(values)) for s, values in SWITCHES.items()} | wanted for _ in range(tries)]
        drawn = [row for row in drawn if world_of(row) in worlds]
        drawn.sort(key=lambda row: -len(pairs_of(row) & missing.keys()))
        rows.append(next(row for row in drawn if refused(row) is None))
        for done in pairs_of(rows[-1]):
            missing.pop(done, None)
    return rows, without


ROWS, WITHOUT = covering_array(range(2, 5))


def test_every_pair_is_in_a_row_or_refused_by_a_rule():
    """Neither of the two values is refused by itself. The rules are printed."""
    found = {pair for row in ROWS for pair in pairs_of(row)}
    for pair in WITHOUT:
        why = refused(PLAIN | dict(pair))
        print(" and ".join(f"{switch}={value}" for switch, value in pair), "--", why)
        assert why is not None and all(refused(PLAIN | {switch: value}) is None for switch, value in pair)
    for (a, values), (b, others) in itertools.combinations(SWITCHES.items(), 2):
        assert {((a, x), (b, y)) for x in values for y in others} <= found | set(WITHOUT)
    assert not found & set(WITHOUT) and len(ROWS) <= 40


# ---- the rows --------------------------------------------------------------------------------------------------------


def name(row: Row) -> str:
    return "_".join(f"{switch}={value}" for switch, value in row.items() if value != PLAIN[switch])


# The first rows have most new pairs. Those in blocks of 128 values take longer than all others.
ORDINARY = [row for row in ROWS if row["fp8"] != "block"][:6]
CASES = [pytest.param(row, id=name(row), marks=() if row in ORDINARY else pytest.mark.slow) for row in ROWS]


@pytest.mark.parametrize("row", CASES)
def test_a_row_equals_one_process(ranks, row):
    exactly.assert_equals_one_process(ranks, world_of(row), config_of(row))


@pytest.mark.parametrize("switch", ["lora", "hidden-dropout", "attention-dropout", "documents", "model"])
def test_a_switch_that_says_what_is_computed_changes_it(switch):
    """Else its rows would prove nothing: what both sides leave out is equal."""
    rows = [PLAIN | {"fp8": "none", switch: value} for value in SWITCHES[switch]]
    losses = [exactly.train(exactly.alone(config_of(row)))[0][0]["loss"] for row in rows]
    assert len(set(losses)) == len(losses)
