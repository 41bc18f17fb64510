"""Curves beside Megatron-core: the same weights under its names, every missing run made once, and what is compared."""

import json

import pytest
import torch
from torch import nn

from benchmarks import curves, record, text
from benchmarks.peers.same_weights import copy_weights
from minitron.config import cli
from minitron.config.schema import ModelConfig
from minitron.interop import hf
from minitron.interop.convert_megatron import BLOCK, LAYERS, REST, arranged

TINY = [
    *("configs/quickstart.yaml", "model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64"),
    *("model.num_heads=2", "model.num_kv_heads=2", "model.vocab_size=64", "model.max_positions=16", "data.source=mock"),
    *("train.seq_len=16", "train.steps=5", "train.micro_batch_size=2", "train.global_batch_size=4", "train.seed=7"),
    "precision.dtype=bf16",
]


def of_megatron(m: ModelConfig) -> dict[str, torch.Size]:
    """Names and shapes as Megatron-core has them, with Transformer Engine's layers."""
    places = {}
    for name, shape in hf.global_shapes(m).items():
        if name in REST:
            places[name] = REST[name], shape
        else:
            _, layer, rest = name.split(".", 2)
            places[name] = f"{LAYERS}{layer}.{BLOCK[rest][0]}", shape
    return places


@pytest.mark.parametrize(
    "model",
    [
        dict(family="gpt", positions="learned", tie_embeddings=True, num_kv_heads=None),
        dict(family="llama", positions="rope", tie_embeddings=False, num_kv_heads=2),
    ],
)
def test_weights_are_copied_into_rows_group_by_group(model):
    m = ModelConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=64, num_heads=4, vocab_size=128, max_positions=16, **model
    )
    ours = {name: torch.randn(shape) for name, shape in hf.global_shapes(m).items()}
    theirs, places = nn.Module(), of_megatron(m)
    for place, shape in places.values():
        theirs.register_parameter(place.replace(".", "/"), nn.Parameter(torch.zeros(shape)))
    theirs.named_parameters = lambda: [(name.replace("/", "."), p) for name, p in theirs._parameters.items()]
    copy_weights(ours, theirs, m)
    copied = dict(theirs.named_parameters())
    for name, (place, shape) in places.items():
        assert torch.equal(arranged(copied[place].detach(), name, tuple(shape), m, place), ours[name]), name
    assert not torch.equal(copied[places["blocks.0.attention.qkv.weight"][0]], ours["blocks.0.attention.qkv.weight"])
    theirs.register_parameter("decoder/more", nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"has decoder\.more, which minitron's has not"):
        copy_weights(ours, theirs, m)
    del theirs._parameters[places["head.norm.weight"][0].replace(".", "/")]
    with pytest.raises(ValueError, match=r"has no decoder\.final_layernorm\.weight \[32\]"):
        copy_weights(ours, theirs, m)


def test_what_is_missing_is_run_and_compared(tmp_path, capsys):
    """Megatron-core needs GPUs: its runs are said to be missing, and the others are made once."""
    path = tmp_path / "rows.jsonl"
    found = curves.main([*TINY, "--results", str(path), "--page", "--each", "2"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows.sort(key=lambda row: (row["seed"], row["fp8"] != "none"))
    assert [row["seed"] for row in rows] == [7, 7, 8] and [row["fp8"] for row in rows] == ["none", "delayed", "none"]
    assert all(row["steps"] == len(row["curve"]) == 5 and row["last"] == row["curve"][-1] for row in rows)
    first, fp8, other = (row["curve"] for row in rows)
    assert abs(first[0] - fp8[0]) < 2e-2 and first != fp8 and abs(first[0] - other[0]) > 1e-4
    said = capsys.readouterr().out
    assert list(found) == ["minitron bf16 seed 7", "minitron FP8 delayed seed 7", "minitron bf16 seed 8"]
    line = f"| minitron FP8 delayed | 7 | {fp8[-1]:.4f} | {fp8[-1] - first[-1]:+.4f} | {fp8[-1] - first[-1]:+.4f} |"
    assert line in said and "Megatron-core bf16 seed 7: " in said
    text = (tmp_path / "curves.md").read_text()
    assert line in text and "![losses](curves_quickstart_2x32.png)" in text and "data.source=mock" in text
    assert (tmp_path / "curves_quickstart_2x32.png").stat().st_size
    before = path.read_text()
    curves.main([*TINY[1:], TINY[0], "--results", str(path), "--seconds", "0"])  # in any order
    assert path.read_text() == before


def test_a_format_passes_within_the_spread_of_seeds(tmp_path, capsys):
    """bf16 ends at 3.00 and 3.04: 0.03 above both passes, 0.05 does not. A format with a missing row has no line."""
    path, last = tmp_path / "rows.jsonl", {"none": 3.0, "delayed": 3.03, "current": 3.05}
    config = tuple(sorted(TINY, key=lambda argument: "=" in argument))
    for run in curves.of_formats(config, 7):
        if run.gradients == "fp32" or run.seed == 7:
            curve = [9.0] * 4 + [last[run.fp8] + 0.04 * (run.seed - 7)]
            with path.open("a") as file:
                file.write(json.dumps(run.identity | {"steps": 5, "curve": curve, "last": curve[-1]}) + "\n")
    curves.main([*TINY, "--formats", "--results", str(path), "--seconds", "0"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines[2:] == [
        "| FP8 delayed | +0.0300 | +0.0300 | +0.0300 | 0.0400 | yes |",
        "| FP8 current | +0.0500 | +0.0500 | +0.0500 | 0.0400 | no |",
    ]


def test_gradients_are_also_added_over_microbatches(tmp_path):
    """The same batch in eight parts. A row without the number of microbatches has those of the configuration."""
    config = ("configs/quickstart.yaml", "train.global_batch_size=32", "train.micro_batch_size=32")
    whole, parts = (run for run in curves.of_formats(config, 7) if run.gradients == "bf16" and run.seed == 7)
    assert (whole.format, parts.format) == ("bf16, gradients bf16", "bf16, gradients bf16 over 8 microbatches")
    assert cli.load(whole.keys).train.micro_batch_size == 32 and cli.load(parts.keys).train.micro_batch_size == 4
    row = {key: value for key, value in whole.identity.items() if key != "microbatches"}
    assert curves.newest(whole, [row]) is row and curves.newest(parts, [row]) is None


def test_changes_are_made_one_thing_at_a_time(tmp_path, capsys, monkeypatch):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(curves, "SHORT", tuple(sorted(TINY, key=lambda argument: "=" in argument)))
    monkeypatch.setattr(curves, "CHANGES", {
        "nothing": ((), (), "delayed", (7,)),
        "head": ((), ("precision.fp8_head=true",), "delayed", (7,)),
        "the rate": (("optimizer.lr=1e-2",), (), "current", (7,)),
    })  # fmt: skip
    curves.main(["--changes", "--results", str(path), "--page", "--each", "2"])
    rows = record.rows(path)
    assert len(rows) == 5  # the first two share their run in bf16
    last = {(row["config"][-1], row["fp8"]): row["last"] for row in rows}
    head, rate, plain = "precision.fp8_head=true", "optimizer.lr=1e-2", TINY[-1]
    table = [
        f"| {name} | 7 | {last[base, 'none']:.4f} | {last[key, fp8]:.4f} | {last[key, fp8] - last[base, 'none']:+.4f} |"
        for name, base, key, fp8 in (
            ("nothing", plain, plain, "delayed"),
            ("head", plain, head, "delayed"),
            ("the rate", rate, rate, "current"),
        )
    ]
    assert "\n".join(table) in capsys.readouterr().out
    text = path.with_name("curves.md").read_text()
    assert "\n".join(table) in text and "| minitron" not in text  # no other table has these runs


def test_the_page_is_what_the_records_say():
    text, pictured = curves.page(record.rows(record.RESULTS))
    assert record.RESULTS.with_name("curves.md").read_text(encoding="utf-8") == text
    assert pictured and all(record.RESULTS.with_name(name).exists() for name in pictured)


def test_a_part_of_a_corpus_holds_all_kinds_once(tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    for i in range(20):
        (source / f"{i}.py").write_text(f"x = {i}\n" * 100)
        (source / f"{i}.md").write_text(f"x = {i}\n" * 100 if i < 10 else f"page {i} " * 100)
    (source / "short.py").write_text("x")
    (source / "bytes.py").write_bytes(b"\xff" * 500)
    (source / "weights.bin").write_text("y" * 500)
    text.main([str(tmp_path / "all.jsonl"), "--under", str(source)])
    documents = [json.loads(line)["text"] for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(documents) == len(set(documents)) == 30
    text.main([str(tmp_path / "part.jsonl"), "--under", str(source), "--mb", "0.004"])
    part = [json.loads(line)["text"] for line in (tmp_path / "part.jsonl").read_text().splitlines()]
    assert part == documents[: len(part)] and 0 < sum(map(len, part)) <= 4000
    with pytest.raises(SystemExit, match="there is no text under"):
        text.main([str(tmp_path / "none.jsonl"), "--under", str(tmp_path / "nowhere")])
