"""The examples of minitron/README.md and tests/README.md, as they stand: they run, and train the same everywhere."""

import os
import shlex
import sys
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from unittest import mock

import pytest
import torch
import transformers

import test_invariance
import warm
from layouts import LLAMA, config, dataset_of, mesh_of, train_steps
from minitron.data.loader import Loader
from minitron.interop import hf_write as hf_export
from minitron.model import gpt
from minitron.optim.replicas import Replicas
from minitron.testing import assert_close_rel, assert_layouts_agree
from minitron.train import build
from readmes import ROOT, blocks, program
from test_invariance import TINY, assert_equals_one_process, axes
from test_model import TOLERANCE, batch_of, model_of
from tools import generate as generate_tool

CODE, TESTS = ROOT / "minitron" / "README.md", ROOT / "tests" / "README.md"
# module -> what it replaces, by what; transformers' model of the same, with its settings
EXAMPLES = {
    "qk_norm": ("Attention", "NormedAttention", "qwen3", dict(attention_bias=False)),
    "positions": ("Embedding", "PositionedEmbedding", None, {}),
    "geglu": ("MLP", "GegluMLP", "llama", dict(hidden_act="gelu_pytorch_tanh")),
}


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """A folder with the examples as files, which the ranks import from there, too."""
    for name in EXAMPLES:
        (tmp_path / f"{name}.py").write_text(program(CODE, f"{name}.py"))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in EXAMPLES:
        sys.modules.pop(name, None)


def with_example(name, run, cfg):
    """run(cfg), the model built with the example's class; on ranks that live on, only for this call."""
    sys.modules.pop(name, None)  # of another test's folder
    old, new, *_ = EXAMPLES[name]
    with mock.patch.object(gpt, old, getattr(import_module(name), new)):
        return run(cfg)


def train_qk_norm(cfg):
    return with_example("qk_norm", train_steps, cfg)


def train_geglu(cfg):
    return with_example("geglu", train_steps, cfg)


def train_positions(cfg):
    return with_example("positions", train_steps, cfg)


def compare_positions(cfg):
    """Train one step that is not skipped; return its error, or that of the comparison of replicas."""

    def run(cfg):
        trainer = build(cfg, mesh_of(cfg))
        loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
        try:
            while trainer.step(loader.step(0, 0), cfg.optimizer.lr).skipped:  # fp16's first scale may be too large
                trainer.scaler.scale.fill_(1.0)
            Replicas(trainer.chunks, trainer.gradients, cfg.train).require_equal(1)
        except ValueError as error:
            return type(error).__name__, str(error)
        finally:
            loader.close()
        return None

    return with_example("positions", run, cfg)


@pytest.fixture
def assert_layout(ranks, examples, monkeypatch):
    def check(name, world, layout, change):
        run = {"qk_norm": train_qk_norm, "geglu": train_geglu, "positions": train_positions}[name]
        monkeypatch.setattr(test_invariance, "_twins", {})
        monkeypatch.setattr(test_invariance, "train_steps", run)  # of the one process
        assert_equals_one_process(ranks, world, LLAMA, change, axes(layout), run=run)
        size = test_invariance.size_for(world, config(LLAMA, axes(layout)).parallel)
        return test_invariance.twin(LLAMA, size, change)

    return check


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world, layout", [(1, "tp=1"), (2, "tp=2"), (2, "tp=2 sequence_parallel=off")])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_as_one_process_does(assert_layout, name, recompute, world, layout):
    figures, gradients = assert_layout(name, world, layout, {"train": {"recompute": recompute}})
    plain, _ = train_steps(config(LLAMA, TINY))
    assert abs(figures[0]["loss"] / plain[0]["loss"] - 1) > 1e-4, "the example changes nothing"
    assert all(grad.norm() > 0 for grad in gradients.values())


def test_a_norm_of_heads_trains_as_the_built_in_one(examples):
    cfg = config(LLAMA, TINY)
    mine, _ = train_qk_norm(cfg)
    theirs, _ = train_steps(config(cfg, {"model": {"qk_norm": True}}))
    for step, twin in zip(mine, theirs, strict=True):
        assert all(step[key] == pytest.approx(value, rel=TOLERANCE) for key, value in twin.items())


def test_a_norm_that_does_not_say_per_head_is_found(assert_layout, examples):
    path = examples / "qk_norm.py"
    assert path.read_text().count(", per_head=True") == 2
    path.write_text(path.read_text().replace(", per_head=True", ""))
    with pytest.raises(AssertionError, match="gradient of blocks.*attention.norm_[qk]"):
        assert_layout("qk_norm", 2, "tp=2 sequence_parallel=off", {})


@pytest.mark.parametrize(
    "world, layout, change",
    [
        (2, "tp=2", {}),
        (4, "tp=2 pp=2", {}),
        (4, "tp=2", {"optimizer": {"grad_dtype": "bf16"}}),
        (2, "tp=2", {"precision": {"dtype": "fp16", "loss_scale": 1.0}}),
        (2, "tp=2", {"precision": {"dtype": "fp16", "loss_scale": 2.0**100}}),
    ],
)
def test_a_table_that_does_not_say_whole_sequence_is_refused_in_the_first_step(ranks, examples, world, layout, change):
    cfg = config(LLAMA, TINY, change, axes(layout))
    assert ranks(world, compare_positions, cfg) == [None] * world
    path = examples / "positions.py"
    assert path.read_text().count(", whole_sequence=True") == 1
    path.write_text(path.read_text().replace(", whole_sequence=True", ""))
    for kind, text in ranks(world, compare_positions, cfg):
        assert kind == "ValueError" and "embedding.table" in text and "norm" not in text


def train_on_one_token(cfg):
    """Train one step on samples of a single token, or of a vocabulary of one: then all gradients are zero."""
    trainer = build(cfg, mesh_of(cfg))
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    batches = loader.step(0, 0)
    for batch in batches:
        batch.tokens.fill_(0)
        batch.labels.fill_(0)
    trainer.step(batches, cfg.optimizer.lr)
    loader.close()
    return trainer.gradients.copies_compared


@pytest.mark.parametrize("layout", ["tp=2", "tp=2 pp=2"])
@pytest.mark.parametrize("vocab_size", [1, 90])
def test_the_same_token_everywhere_is_no_mistake(ranks, vocab_size, layout):
    world = 2 if layout == "tp=2" else 4
    cfg = config(LLAMA, TINY, {"model": {"vocab_size": vocab_size}, "precision": {"dtype": "bf16"}}, axes(layout))
    assert ranks(world, train_on_one_token, cfg) == [True] * world


def test_a_shard_that_says_whole_sequence_is_found_by_the_comparison_of_replicas(ranks, examples):
    path = examples / "positions.py"
    path.write_text(path.read_text().replace("split(rows, self.context.axis)", "rows.chunk(2)[self.context.axis.rank]"))
    errors = ranks(2, compare_positions, config(LLAMA, TINY, axes("tp=2")))
    assert all(kind == "ReplicasDiffer" and "embedding.table" in text for kind, text in errors)


@pytest.mark.parametrize("name", [name for name, (*_, kind, _) in EXAMPLES.items() if kind])
def test_an_example_has_the_logits_of_transformers(examples, name):
    cfg = config(LLAMA, {"model": {"vocab_multiple": 1}})  # padding is minitron's alone
    model, batch = with_example(name, model_of, cfg), batch_of(cfg)
    *_, kind, change = EXAMPLES[name]
    settings = (
        hf_export.settings_of(cfg.model, "fp32") | {"model_type": kind, "head_dim": cfg.model.head_width} | change
    )
    twin = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**settings), attn_implementation="eager"
    ).eval()
    params = {p.spec.name: p.detach() for p in model.parameters()}
    weights = dict(
        hf_export.export(
            cfg.model, lambda start, at, shape: params[start][tuple(map(lambda a, n: slice(a, a + n), at, shape))]
        )
    )
    for i in range(cfg.model.num_layers if name == "qk_norm" else 0):
        for x in "qk":
            weights[f"model.layers.{i}.self_attn.{x}_norm.weight"] = params[f"blocks.{i}.attention.norm_{x}"]
    twin.load_state_dict(weights)
    with torch.no_grad():
        expected = twin(batch.tokens.T).logits.transpose(0, 1)
        assert_close_rel(model.logits(batch), expected, TOLERANCE, "logits")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_program(examples, name):
    """It takes minitron.pretrain's keys, and says so of a wrong one."""
    command = [f"{name}.py", "data.source=mock", "precision.dtype=fp32", "train.steps=1"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = partial(warm.run, *command, cwd=examples, env=env)
    done = run()
    assert done.returncode == 0 and "iteration        1/       1" in done.stdout, done.stderr
    wrong = run("parallel.tp=3")
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: parallel.tp"), wrong.stderr


@pytest.fixture
def geglu_files(examples):
    """The page's programs that import geglu.py, beside it."""
    for name in ("test_geglu", "finetune_geglu", "generate_geglu"):
        (examples / f"{name}.py").write_text(program(CODE, f"{name}.py"))
    for folder in ("configs", "tools"):
        (examples / folder).symlink_to(ROOT / folder)
    yield examples
    sys.modules.pop("test_geglu", None)


def test_the_page_s_test_of_every_layout_passes(ranks, geglu_files):
    import_module("test_geglu").test_geglu_in_every_layout(ranks)


def test_the_harness_finds_a_class_that_is_wrong_in_one_layout(ranks, geglu_files):
    """Its gate and its value are every other column of what a rank has: with tp these are other columns."""
    halves, source = "gate, up = inner.chunk(2, -1)", (geglu_files / "geglu.py").read_text()
    assert halves in source
    wrong = source.replace(halves, "gate, up = inner[..., ::2], inner[..., 1::2]")
    (geglu_files / "wrong_geglu.py").write_text(wrong)
    classes = {"MLP": import_module("wrong_geglu").GegluMLP}
    with pytest.raises(AssertionError, match=r" on rank \d of 2 with tp=2"):
        assert_layouts_agree(ranks, classes, layouts=[(2, "pp=2"), (2, "tp=2")])


def test_the_page_s_commands_train_fine_tune_and_generate(geglu_files, monkeypatch, capsys):
    """In one process each, with a smaller model. The text is what the class generates, and no other."""
    (block,) = [block for block in blocks(CODE) if "finetune_geglu.py" in block]
    train, tune, (*generate, prompt) = map(shlex.split, block.splitlines())
    small = "model.num_layers=1 model.hidden_size=32 model.num_heads=2 model.num_kv_heads=2".split()
    small += "train.steps=2 train.global_batch_size=2 train.micro_batch_size=2 train.eval_every=0".split()
    for words in train, tune:
        done = warm.run(*words[3:], "parallel.tp=1", *small, cwd=geglu_files)
        assert done.returncode == 0, done.stderr
    words = [*generate[1:], prompt, "--temperature", "1", "--max-tokens", "20"]
    done = warm.run(*words, cwd=geglu_files)
    assert done.returncode == 0 and done.stdout.startswith(prompt), done.stderr
    monkeypatch.chdir(geglu_files)
    generated = []
    for replaced in (True, False):
        with mock.patch.object(gpt, "MLP", import_module("geglu").GegluMLP) if replaced else nullcontext():
            generate_tool.main(words[1:])
        generated.append(capsys.readouterr().out)
    assert generated[0] == done.stdout != generated[1]


def test_a_layer_of_ones_own(ranks, tmp_path, monkeypatch):
    """The test that tests/README.md shows, as a file of its own."""
    (tmp_path / "own_layer.py").write_text(program(TESTS, "def test_mlp_equals_one_process"))
    monkeypatch.syspath_prepend(tmp_path)
    own = import_module("own_layer")
    own.test_mlp_equals_one_process(ranks)
    source = (tmp_path / "own_layer.py").read_text()
    (tmp_path / "wrong_layer.py").write_text(source.replace("    x = collectives.copy(x, axis)\n", ""))
    with pytest.raises(AssertionError, match="norm of the difference"):
        import_module("wrong_layer").test_mlp_equals_one_process(ranks)
