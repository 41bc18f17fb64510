"""Fine-tuning through checkpoints: from Hugging Face weights into any layout, on again, and out, merged or for PEFT.

Logits agree to 1e-5: both compute in float32, and sums run in another order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from layouts import LLAMA, config
from minitron import finetune, pretrain
from minitron.checkpoint import load
from minitron.checkpoint.format import CheckpointError
from minitron.config import cli, rules
from minitron.config.schema import Config, changed
from minitron.interop import base, hf
from minitron.interop.base import load as filled
from minitron.interop.hf_tokenizer import spec_of
from minitron.interop.weights import MergedAdapter, fingerprint, open_weights
from minitron.testing import assert_close_rel
from test_checkpoint import assert_same, contents, leg, saving, start_trainer, whole
from test_checkpoint_format import reindex
from test_convert_hf import batch_of, convert, error_of, loaded, model_of
from test_lora import ALL

TRAIN = dict(seq_len=32, micro_batch_size=1, global_batch_size=4, steps=30)
RUN = dict(
    train=TRAIN,
    precision=dict(dtype="fp32"),
    optimizer=dict(lr=5e-2, min_lr=1e-3, warmup_steps=0, eps=1e-5),
    data=dict(source="mock"),
)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Hugging Face folders by the name of their model, made when first asked for."""
    root = tmp_path_factory.mktemp("bases")

    def get(name: str) -> Path:
        if not (root / name).exists():
            model_of(name).save_pretrained(root / name)
        return root / name

    return get


def tuning(base: Path, kind: str = "lora", start: Path | None = None, **keys) -> Config:
    """A run of the model in a Hugging Face folder, from its weights or those of `start`; keys: of lora."""
    model = dataclasses.asdict(hf.FolderReader(base).model)
    lora = {"lora": {"rank": 4, "alpha": 8.0, "targets": ("qkv",)} | keys} if kind == "lora" else {}
    cfg = config(RUN, {"model": model, "finetune": {"kind": kind, "base": str(start or base)}} | lora)
    scaling = cfg.model.rope_scaling
    if isinstance(scaling, dict):
        scaled = cli.from_tree({"model": {"rope_scaling": scaling}}, "test").model.rope_scaling
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, rope_scaling=scaled))
    return cfg


def in_layout(cfg: Config, **parallel) -> Config:
    return dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, **parallel))


def logits_of(trainer, batch) -> torch.Tensor:
    """[b, s, v] without the padding of the vocabulary, in evaluation mode."""
    (chunk,), vocabulary = trainer.chunks, trainer.cfg.model.vocab_size
    with torch.no_grad():
        return chunk.eval().logits(batch)[..., :vocabulary].transpose(0, 1)


# ---- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, targets",
    [
        ("llama3.1", ("qkv",)),
        ("llama", ALL),
        ("llama-tied", ("v", "q", "down")),
        pytest.param("mistral", ("k", "o"), marks=pytest.mark.slow),
        pytest.param("qwen2", ("qkv", "up"), marks=pytest.mark.slow),
        ("qwen3", ALL),
        ("gpt2", ("qkv", "o", "up", "down")),
    ],
)
def test_merged_and_peft_equal_the_trained_adapter(bases, tmp_path, name, targets):
    """Trained, saved, exported twice: what transformers and PEFT compute from the exports is what we compute."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    cfg = saving(tuning(bases(name), targets=targets, dropout=0.1), tmp_path / "run")
    leg(cfg, 3)
    trainer, _ = start_trainer(cfg)
    batch = batch_of(cfg.model.vocab_size)
    tokens, ours = batch.tokens.t(), logits_of(trainer, batch)
    convert("export", tmp_path / "run", tmp_path / "merged")
    convert("export", tmp_path / "run", tmp_path / "adapter", "--adapter")
    with torch.no_grad():
        merged, start = (loaded(folder)(tokens).logits for folder in (tmp_path / "merged", bases(name)))
        tuned = peft.PeftModel.from_pretrained(loaded(bases(name)), tmp_path / "adapter").eval()
        adapted = tuned(tokens).logits
        unloaded = tuned.merge_and_unload()(tokens).logits
    assert (ours - start).norm() > 0.02 * start.norm(), "the comparison would prove nothing"
    for theirs in merged, adapted, unloaded:
        assert_close_rel(ours, theirs, 1e-5)
    # A run that starts from an adapter's checkpoint starts from the merged weights.
    again, _ = start_trainer(tuning(bases(name), "sft", start=tmp_path / "run"))
    assert_close_rel(logits_of(again, batch), ours, 1e-5)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 8.0, 0.1)


def test_peft_opens_the_base_of_an_imported_checkpoint(bases, tmp_path):
    """The folder is asked for, or is the checkpoint's own export; one with other weights is refused."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    convert("import", bases("llama"), tmp_path / "base")
    cfg = saving(tuning(bases("llama"), start=tmp_path / "base"), tmp_path / "run")
    leg(cfg, 2)
    trainer, _ = start_trainer(cfg)
    batch = batch_of(cfg.model.vocab_size)
    with pytest.raises(ValueError, match="--hf-base HF_FOLDER"):
        convert("export", tmp_path / "run", tmp_path / "adapter", "--adapter")
    shutil.copytree(bases("llama"), tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights["model.layers.1.mlp.gate_proj.weight"] = weights["model.layers.1.mlp.gate_proj.weight"] * 1.1
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="blocks.1.mlp.up.weight"):
        convert("export", tmp_path / "run", tmp_path / "adapter", "--adapter", "--hf-base", tmp_path / "other")
    convert("export", tmp_path / "run", tmp_path / "named", "--adapter", "--hf-base", bases("llama"))
    convert("export", tmp_path / "base", tmp_path / "base" / "step_00000000-hf", "--dtype", "bf16")
    convert("export", tmp_path / "run", tmp_path / "beside", "--adapter")
    assert "step_00000000-hf" in (tmp_path / "beside" / "adapter_config.json").read_text()
    with torch.no_grad():
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "named").eval()(batch.tokens.t()).logits
    assert_close_rel(logits_of(trainer, batch), theirs, 1e-5)


def test_what_belongs_to_the_run_of_a_base_is_not_copied(monkeypatch, tmp_path):
    """A base that was trained with dropout, its own standard deviation, kernel and pieces of the head."""
    own = {"init_std": 0.5, "hidden_dropout": 0.2, "attention_dropout": 0.3, "attention": "reference", "head_piece": 64}
    model = changed(Config(), model=dict(num_layers=3, tie_embeddings=True)).model
    trained = changed(Config(model=model), model=own)
    described = base.Described(tmp_path, tmp_path / "index.json", dataclasses.asdict(trained), {})
    monkeypatch.setattr(base, "describe", lambda path: described)
    for kind in ("lora", "sft"):
        assert filled([f"finetune.kind={kind}", "finetune.base=b"]).model == model
        given = filled([f"finetune.kind={kind}", "finetune.base=b", *(f"model.{key}={x}" for key, x in own.items())])
        assert given.model == trained.model


@pytest.mark.parametrize("imported", [False, True])
def test_a_base_brings_its_model_and_tokenizer(bases, tmp_path, imported):
    """As its files describe it; every key that contradicts it is one error, and what belongs to a run is the run's."""
    base, own = tmp_path / "own", hf.FolderReader(bases("llama3.1")).model
    shutil.copytree(bases("llama3.1"), base)
    (base / "tokenizer.json").write_text("{}")
    kept = base
    if imported:
        convert("import", base, tmp_path / "imported")
        base, kept = tmp_path / "imported", tmp_path / "imported" / "tokenizer"
    argv = ["finetune.kind=lora", f"finetune.base={base}", "model.attention_dropout=0.25"]
    found = filled(argv)
    assert found.model == dataclasses.replace(own, attention_dropout=0.25)
    assert found.data.tokenizer == "corpus"  # of other data
    argv.append("data.source=sft")
    assert filled(argv).data.tokenizer == f"hf:{kept}"
    assert filled([*argv, "data.tokenizer=bytes"]).data.tokenizer == "bytes"
    for file in kept.glob("tokenizer.json"):
        file.unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        filled(argv)
    assert filled([*argv, "data.tokenizer=corpus"]).data.tokenizer == "corpus"  # as is said
    argv.append("data.tokenizer=bytes")
    recipe = tmp_path / "recipe.yaml"
    wrong = dict(num_layers=9, hidden_size=2, ffn_hidden_size=3, num_heads=1, vocab_size=9, norm_eps=0.5)
    recipe.write_text(json.dumps({"model": wrong, "train": {"steps": 7}}))
    with pytest.raises(ValueError, match="model=null") as caught:
        filled([str(recipe), *argv])
    for key, value in wrong.items():
        assert f"model.{key} was {getattr(own, key)} and is {value}" in str(caught.value)
    again = filled([str(recipe), "model=null", *argv])
    assert again.model == found.model and again.train.steps == 7
    assert filled([str(recipe), *(f"model.{key}=null" for key in wrong), *argv]).model == found.model


@pytest.mark.parametrize(
    "source, tokenizer", [("corpus", "corpus"), ("sft", "corpus"), ("indexed", None), ("mock", None)]
)
def test_the_corpus_s_tokenizer_is_that_of_a_base_that_was_trained_with_it(tmp_path, source, tokenizer):
    """data.tokenizer=corpus is also the default of data that need none."""
    weights = SimpleNamespace(path=tmp_path, index=tmp_path / "index.json", config=dataclasses.asdict(Config()))
    assert spec_of(weights, {"source": source}) == tokenizer
    weights.config["data"]["tokenizer"] = "bytes"
    assert spec_of(weights, {"source": source}) == "bytes"


def test_a_base_that_is_not_here_needs_the_sizes_of_its_model(tmp_path):
    argv = ["finetune.kind=sft", f"finetune.base={tmp_path}"]
    with pytest.raises(ValueError, match="holds no weights here"):
        filled(argv)
    assert filled([*argv, "model.num_layers=4"]) == cli.load([*argv, "model.num_layers=4"])


def test_peft_finds_no_more_modules_than_were_trained(bases, tmp_path, recwarn):
    """GPT-2 calls two layers of a block c_proj."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    leg(saving(tuning(bases("gpt2"), targets=("o",)), tmp_path / "run"), 1)
    convert("export", tmp_path / "run", tmp_path / "adapter", "--adapter")
    tuned = peft.PeftModel.from_pretrained(loaded(bases("gpt2")), tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"] == ["attn.c_proj"]
    assert (
        len({path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}) == 1
    )  # who may read one may read both
    assert sum(".lora_" in name for name, _ in tuned.named_parameters()) == len(saved)
    assert not [w for w in recwarn if "missing adapter keys" in str(w.message)]


def test_all_weights_from_hugging_face_and_back(ranks, bases, tmp_path):
    """SFT in two layouts, one going on where the other ended, starts from the folder's logits and moves them."""
    cfg = saving(tuning(bases("llama"), "sft"), tmp_path / "run")
    trainer, start = start_trainer(cfg)
    batch = batch_of(cfg.model.vocab_size)
    with torch.no_grad():
        theirs = loaded(bases("llama"))(batch.tokens.t()).logits
    assert_close_rel(logits_of(trainer, batch), theirs, 1e-5)
    figures = ranks(2, leg, in_layout(cfg, tp=2), 2)[0] + ranks(2, leg, in_layout(cfg, pp=2), 4)[0]
    expected = whole(dataclasses.replace(cfg, checkpoint=Config().checkpoint), 4)
    assert [f["loss"] for f in figures] == pytest.approx([f["loss"] for f in expected], rel=1e-5)
    with pytest.raises(CheckpointError, match=f"add finetune.base={bases('llama')}"):
        start_trainer(changed(cfg, finetune={"base": None}, model={"num_layers": 9}))
    convert("export", tmp_path / "run", tmp_path / "out")
    trainer, _ = start_trainer(cfg)
    with torch.no_grad():
        assert_close_rel(logits_of(trainer, batch), loaded(tmp_path / "out")(batch.tokens.t()).logits, 1e-5)


def test_the_fingerprint_is_of_values(bases, tmp_path):
    folder = bases("llama")
    convert("import", folder, tmp_path / "imported")
    mark, content = fingerprint(hf.FolderReader(folder)), hashlib.sha256()
    stored = {key[0]: value for key, value in contents(tmp_path / "imported").items() if isinstance(key, tuple)}
    for name in sorted(stored):
        shape, rows = tuple(stored[name].shape), stored[name][: 1 if stored[name].dim() > 1 else None]
        content.update(f"{name} {shape}".encode() + rows.float().numpy().tobytes())
    assert mark == content.hexdigest()[:16]  # adapters name their base by it
    assert mark == fingerprint(open_weights(str(tmp_path / "imported")))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 7] += 1e-3
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert fingerprint(hf.FolderReader(tmp_path)) != mark


def test_the_fingerprint_of_merged_weights_is_of_both_parts(bases, tmp_path, monkeypatch):
    """Their sum is not bit-equal on every machine."""
    marks = []
    for steps in (1, 2):
        leg(saving(tuning(bases("llama")), tmp_path / "run"), steps)
        marks.append(fingerprint(open_weights(str(tmp_path / "run"))))
    monkeypatch.setattr(MergedAdapter, "read", lambda *_: pytest.fail("a sum was read"))
    assert fingerprint(open_weights(str(tmp_path / "run"))) == marks[1]
    assert len({*marks, fingerprint(hf.FolderReader(bases("llama")))}) == 3
    merged = open_weights(str(tmp_path / "run"))
    merged.base_fingerprint = marks[0]  # the same adapter beside another base
    assert fingerprint(merged) not in marks


def test_any_box_of_merged_weights_is_a_part_of_the_whole(bases, tmp_path):
    """A rank of another layout reads rows or columns that begin anywhere."""
    leg(saving(tuning(bases("llama"), targets=ALL), tmp_path / "run"), 2)
    merged = open_weights(str(tmp_path / "run"))
    for name in ("blocks.0.attention.qkv.weight", "blocks.1.attention.out.weight", "blocks.1.mlp.down.weight"):
        rows, columns = merged.shape(name)
        whole = merged.read(name, "param", (0, 0), (rows, columns))
        for row, column in (0, columns // 2), (rows // 2, 0), (rows // 4 + 1, 3):
            for end in range(row + 5, rows + 1, 5):
                part = merged.read(name, "param", (row, column), (end - row, columns - column))
                assert_close_rel(part, whole[row:end, column:], 1e-6)


def test_sums_of_an_adapter_and_a_base_in_bf16_are_not_rounded(bases, tmp_path):
    """The base is padded as the run's was."""
    model_of("llama", torch.bfloat16).save_pretrained(tmp_path / "base")
    cfg = config(saving(tuning(tmp_path / "base", targets=ALL), tmp_path / "run"), {"model": {"vocab_multiple": 16}})
    leg(cfg, 2)
    merged, base = open_weights(str(tmp_path / "run")), hf.FolderReader(tmp_path / "base", 16)
    assert merged.shape("embedding.words.weight") == base.shape("embedding.words.weight") == (96, 32)
    name = "blocks.0.mlp.down.weight"
    box, (part,) = (name, "param", (0, 0), merged.shape(name)), merged.parts_of(name)
    a, b = merged.factors(name, part, slice(None))
    assert (b @ a).any()
    assert_close_rel(merged.read(*box), base.read(*box).float() + b @ a, 1e-6)


# ---- going on -------------------------------------------------------------------------------------------------------


def test_adapters_go_on_in_any_layout(ranks, bases, tmp_path):
    """Every two steps another layout takes over: what it reads and saves again is bit-equal, and the run is one run.

    The checkpoint holds adapters alone. 1e-6: summation order.
    """
    cfg = saving(tuning(bases("llama"), targets=ALL), tmp_path)
    before, figures = None, []
    for until, (world, layout) in zip(
        itertools.count(2, 2), [(2, dict(tp=2)), (2, dict(pp=2)), (1, {}), (4, dict(tp=2, cp=2)), (2, {})]
    ):
        results = ranks(world, leg, in_layout(cfg, **layout), until)
        figures += results[0]
        if before is not None:
            assert_same(contents(tmp_path / "again"), before)
        before = contents(tmp_path)
    names = {key[0] for key in before if isinstance(key, tuple)}
    assert len(names) == 2 * (4 + 7) and all(".adapter." in name for name in names)
    expected = whole(dataclasses.replace(cfg, checkpoint=Config().checkpoint), 10)
    assert [f["loss"] for f in figures] == pytest.approx([f["loss"] for f in expected], rel=1e-5)


def test_every_chunk_of_a_rank_reads_its_frozen_weights(ranks, tmp_path):
    """From a checkpoint with other values than a fresh start gives."""
    pretrained = saving(config(LLAMA, RUN, {"model": {"num_layers": 4}}), tmp_path / "base")
    leg(pretrained, 1)
    adapters = {"finetune": {"kind": "lora", "base": str(tmp_path / "base")}, "lora": {"rank": 4, "alpha": 8.0}}
    cfg = config(changed(pretrained, checkpoint={"dir": None}), adapters)
    expected = [f["loss"] for f in whole(cfg, 2)]
    for figures in ranks(2, whole, in_layout(cfg, pp=2, vp=2), 2):
        assert [f["loss"] for f in figures] == pytest.approx(expected, rel=1e-5)


FP8 = dict(dtype="bf16", fp8="delayed", fp8_backend="torch")


@pytest.mark.parametrize("world, parallel, precision", [(1, {}, {}), (2, dict(tp=2), {}), (1, {}, FP8)], ids=str)
def test_the_same_layout_goes_on_bit_for_bit(ranks, bases, tmp_path, world, parallel, precision):
    cfg = in_layout(tuning(bases("llama"), targets=("q", "v", "o"), dropout=0.2), **parallel)
    cfg = dataclasses.replace(cfg, precision=dataclasses.replace(cfg.precision, **precision))
    rules.check(cfg, world)
    first = ranks(world, leg, saving(cfg, tmp_path), 2)
    then = ranks(world, leg, saving(cfg, tmp_path), 4)
    assert [a + b for a, b in zip(first, then)] == ranks(world, whole, cfg, 4)


# ---- what cannot be -------------------------------------------------------------------------------------------------


def start_error(cfg: Config) -> str:
    with pytest.raises(CheckpointError) as caught:
        start_trainer(cfg)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_adapter_belongs_to_its_base(bases, tmp_path):
    cfg = saving(tuning(bases("llama")), tmp_path / "run")
    leg(cfg, 1)
    other = tmp_path / "other"
    with torch.no_grad():
        model = model_of("llama")
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(other)
    moved = dataclasses.replace(cfg, finetune=dataclasses.replace(cfg.finetune, base=str(other)))
    wanted = "step_00000001 holds an adapter of another model: its weights had the fingerprint "
    assert wanted in start_error(moved)
    assert wanted in error_of(convert, "export", tmp_path / "run", tmp_path / "out", "--base", other)
    assert f"the base of the adapter in {tmp_path / 'run' / 'step_00000001'}: {tmp_path / 'gone'} holds no weights" in (
        error_of(convert, "export", tmp_path / "run", tmp_path / "out", "--base", tmp_path / "gone")
    )
    assert not (tmp_path / "out").exists()
    for keys, line in (
        ({"rank": 2}, "lora.rank was 4 and is 2"),
        ({"alpha": 1.0}, "lora.alpha was 8.0 and is 1.0"),
        ({"targets": ("q",)}, "lora.targets was ['qkv'] and is ['q']"),
    ):
        assert line in start_error(dataclasses.replace(cfg, lora=dataclasses.replace(cfg.lora, **keys)))
    full = saving(tuning(bases("llama"), "sft"), tmp_path / "run")
    error = start_error(full)
    assert "finetune.kind was lora and is sft" in error and "another checkpoint.dir" in error


def test_adapters_are_the_same_in_any_order_of_their_targets(bases):
    one, other, fewer = (
        load._trained(tuning(bases("llama"), targets=targets)) for targets in (("qkv", "o"), ("o", "qkv"), ("qkv",))
    )
    assert one == other != fewer


@pytest.mark.parametrize("keys", [{"rank": 2}, {"rank": 5}, {"targets": ["q"]}, {"targets": ["qkv", "up"]}, {}])
def test_an_adapter_that_is_not_what_its_index_says_is_refused(bases, tmp_path, keys):
    """A part of its factors would have been merged alone, or none of them."""
    leg(saving(tuning(bases("llama")), tmp_path / "run"), 1)
    step = tmp_path / "run" / "step_00000001"
    config = json.loads((step / "index.json").read_text())["config"]
    reindex(step.parent, step.name, config=config | {"lora": keys and config["lora"] | keys})
    for options in (), ("--adapter",):
        assert "of another model: blocks.0." in error_of(convert, "export", step, tmp_path / "out", *options)


def test_both_parts_of_merged_weights_are_verified():
    merged, verified = object.__new__(MergedAdapter), []
    merged.adapter, merged.base = (SimpleNamespace(verify=lambda part=part: verified.append(part)) for part in "ab")
    merged.verify()
    assert verified == ["a", "b"]


def test_a_base_of_another_shape(bases, tmp_path):
    cfg = tuning(bases("llama"))
    for key, value in (("num_layers", 4), ("norm_eps", 1e-6), ("vocab_size", 91)):
        changed = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **{key: value}))
        error = start_error(changed)
        assert f"config.json is of another model: model.{key} was" in error and f"and is {value}" in error
    with pytest.raises(CheckpointError, match="file name too long|holds no weights"):  # as this Python has it
        open_weights("x" * 300)
    none = dataclasses.replace(cfg, finetune=dataclasses.replace(cfg.finetune, base=None))
    assert "finetune.kind=lora has no weights to start from; set finetune.base to" in start_error(none)
    for folder in (tmp_path / "nowhere", tmp_path):
        nowhere = dataclasses.replace(cfg, finetune=dataclasses.replace(cfg.finetune, base=str(folder)))
        line = f"finetune.base={folder} holds no weights; name a Hugging Face folder or a minitron checkpoint"
        assert start_error(nowhere) == line


def test_exports_that_cannot_be(bases, tmp_path):
    cfg = saving(tuning(bases("gpt2"), targets=("q",)), tmp_path / "run")
    leg(cfg, 1)
    assert "an adapter of q alone, which is a part of transformer.h.0.attn.c_attn" in error_of(
        convert, "export", tmp_path / "run", tmp_path / "out", "--adapter"
    )
    convert("import", bases("llama"), tmp_path / "plain")
    assert "plain holds no adapter; leave --adapter out" in error_of(
        convert, "export", tmp_path / "plain", tmp_path / "out", "--adapter"
    )
    assert "plain holds a whole model; leave it out" in error_of(
        convert, "export", tmp_path / "plain", tmp_path / "out", "--base", bases("llama")
    )
    assert "is a Hugging Face folder already" in error_of(convert, "export", bases("llama"), tmp_path / "out")


@pytest.mark.parametrize(
    "change, error",
    [
        (
            {"finetune": {"base": "x"}},
            "finetune.base=x does not go with finetune.kind=null; drop it, or set finetune.kind=sft or lora",
        ),
        (
            {"finetune": {"kind": "sft", "base": "x"}, "checkpoint": {"load": "y"}},
            "finetune.base=x does not go with checkpoint.load=y; drop it",
        ),
        ({"finetune": {"kind": "sft"}, "lora": {"rank": 4}}, "lora.rank=4 does not go with finetune.kind=sft; drop it"),
        (
            {"finetune": {"kind": "lora"}, "lora": {"targets": ("q", "query")}},
            "lora.targets=[q,query]: a llama model has no query; use some of qkv, q, k, v, o, gate, up, down",
        ),
        (
            {
                "finetune": {"kind": "lora"},
                "lora": {"targets": ("gate",)},
                "model": {"family": "gpt", "positions": "learned"},
            },
            "a gpt model has no gate; use some of qkv, q, k, v, o, up",
        ),
        (
            {"finetune": {"kind": "lora"}, "lora": {"targets": ("qkv", "v")}},
            "lora.targets=[qkv,v] must name each layer",
        ),
        (
            {"finetune": {"kind": "lora"}, "lora": {"targets": ("o", "o")}},
            "lora.targets=[o,o] must name each layer once",
        ),
        ({"finetune": {"kind": "lora"}, "lora": {"targets": ()}}, "lora.targets=[] must name each layer once"),
        ({"data": {"document_length": 5}}, "data.document_length=5 does not go with data.source=corpus"),
    ],
)
def test_rules(change, error):
    with pytest.raises(ValueError) as caught:
        rules.check(config({}, change), 1)
    assert error in str(caught.value) and "\n" not in str(caught.value)


# ---- the program ----------------------------------------------------------------------------------------------------


def test_the_program(bases, tmp_path, capsys):
    """Its lines are NeMo's, its last one the mean of the last 20 steps; it and pretrain send each other's runs away."""
    model = dataclasses.asdict(hf.FolderReader(bases("llama")).model)
    keys = [f"model.{key}={'null' if value is None else str(value).lower()}" for key, value in model.items()]
    keys += [
        "train.seq_len=32",
        "train.steps=22",
        "train.global_batch_size=4",
        "data.source=mock",
        "log.format=nemo",
        "data.separate_documents=true",
        "data.document_length=7",
        "precision.dtype=fp32",
        f"log.dir={tmp_path / 'log'}",
        f"finetune.base={bases('llama')}",
        "finetune.kind=lora",
    ]
    finetune.main(keys)
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("Training epoch 0, iteration ")]
    assert len(steps) == 22 and " | reduced_train_loss: " in steps[0]
    records = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    seconds = [record["step_seconds"] for record in records if record["kind"] == "step"]
    mean = sum(seconds[-20:]) / 20
    assert lines[-1].startswith("goodput ")
    assert lines[-2] == (
        f"mean of the last 20 steps: train_step_timing in s: {mean:.4f}, tokens per second: {4 * 32 / mean:.0f}"
    )
    for program, kind, line in (
        (pretrain.main, "lora", "finetune.kind=lora is for python -m minitron.finetune"),
        (finetune.main, "null", "finetune.kind=null is for python -m minitron.pretrain"),
    ):
        with pytest.raises(SystemExit) as status:
            program([f"finetune.kind={kind}"])
        assert status.value.code == 1 and line in capsys.readouterr().err


def test_a_base_that_cannot_be_read_leaves_the_given_model(tmp_path, monkeypatch):
    """As for a checker on a machine without torch."""

    def no_torch(path):
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(base, "describe", no_torch)
    words = ["finetune.kind=sft", f"finetune.base={tmp_path}"]
    assert base.load([*words, "model.num_layers=3"]).model.num_layers == 3
    with pytest.raises(ValueError, match="cannot be read here .No module named 'torch'.*model"):
        base.load(words)


@pytest.mark.parametrize("least", [1 << 20, 100], ids=["the head", "the whole index"])
def test_a_checkpoint_as_a_base_gives_the_model_that_it_was_trained_with(bases, tmp_path, monkeypatch, least):
    """From the beginning of its index, or from all of it if its tensors begin later."""
    convert("import", bases("llama"), tmp_path / "base")
    monkeypatch.setattr(base, "HEAD_BYTES", least)
    cfg = filled(["finetune.kind=sft", f"finetune.base={tmp_path / 'base'}"])
    assert cfg.model.num_layers == hf.FolderReader(bases("llama")).model.num_layers
    index = next((tmp_path / "base").rglob("index.json"))
    index.write_bytes(b"{" + index.read_bytes()[2:])
    with pytest.raises(CheckpointError, match="is damaged"):
        filled(["finetune.kind=sft", f"finetune.base={tmp_path / 'base'}"])
