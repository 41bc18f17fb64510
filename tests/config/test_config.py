"""Every way in (YAML, overrides, the command line) and every rule: what is accepted, and the one line for the rest."""

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
import types
import typing
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitron.config import cli, command, rules, schema
from minitron.config.schema import Config, ModelConfig, OptimizerConfig, PrecisionConfig, RopeScaling, Shares
from minitron.data.indexed import DataError
from minitron.runtime.status import RunError

PACKAGE = Path(cli.__file__).parents[1]


def error_of(argv: list[str], world: int | None = None, capability: tuple[int, int] | None = None) -> str:
    """The message that these arguments end with; checked too if a world is given. One line."""
    with pytest.raises(ValueError) as caught:
        cfg = cli.load(argv)
        if world is not None:
            rules.check(cfg, world, capability)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_the_dataclasses():
    assert cli.load([]) == Config()
    rules.check(Config(), 1)


def test_order_files_then_overrides(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yml"
    first.write_text("train: {steps: 7, seq_len: 128}\nmodel:\n  num_layers: 2\n")
    second.write_text("train:\n  seq_len: 64\n")
    cfg = cli.load(["train.steps=9", str(first), str(second), "optimizer.lr=1e-3", "train.steps=8"])
    assert (cfg.train.steps, cfg.train.seq_len, cfg.model.num_layers, cfg.optimizer.lr) == (8, 64, 2, 1e-3)


def test_values_become_what_the_field_says():
    cfg = cli.load(
        [
            "optimizer.betas=[0.8, 1e-1]",
            "parallel.layers_per_stage=[3,1]",
            "data.paths=[0.3,a,0.7,b]",
            "model.num_kv_heads=null",
            "log.dir=runs/x=1",
            "train.deterministic=true",
            "optimizer.lr=1",
            "data.split=[90, 8,2]",
        ]
    )
    assert cfg.optimizer.betas == (0.8, 0.1) and cfg.parallel.layers_per_stage == (3, 1)
    assert cfg.data.paths == ("0.3", "a", "0.7", "b")
    assert cfg.model.num_kv_heads is None and cfg.model.kv_heads == cfg.model.num_heads
    assert cfg.log.dir == "runs/x=1" and cfg.train.deterministic is True
    assert isinstance(cfg.optimizer.lr, float) and cfg.data.split == "90,8,2"
    hash(cfg)  # frozen through and through: no list inside
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.model.num_layers = 1


def test_rope_scaling_comes_and_goes(tmp_path):
    assert cli.load(["model.rope_scaling.factor=32"]).model.rope_scaling == RopeScaling(factor=32.0)
    assert cli.load(["model.rope_scaling={low_freq_factor: 2}"]).model.rope_scaling == RopeScaling(low_freq_factor=2.0)
    assert cli.load(["model.rope_scaling={}"]).model.rope_scaling == RopeScaling()
    assert cli.load(["model.rope_scaling.factor=32", "model.rope_scaling={}"]).model.rope_scaling == RopeScaling(32.0)
    assert cli.load(["model.rope_scaling=null", "model={}", "model.rope_scaling={}"]) == cli.load(
        ["model.rope_scaling={}"]
    )
    path = tmp_path / "scaled.yaml"
    path.write_text("model: {rope_scaling: {}}\ntrain: {}")
    assert cli.load(["train.steps=3", str(path)]).model.rope_scaling == RopeScaling()
    path.write_text("model: {rope_scaling: {factor: 32}}")
    assert cli.load([str(path), "model.rope_scaling=null"]).model.rope_scaling is None


def test_print_config_feeds_back(tmp_path, capsys):
    argv = [
        "model.rope_scaling.factor=32",
        "optimizer.eps=1e-12",
        "data.source=indexed",
        "data.paths=['1', a]",
        "parallel.layers_per_stage=[1,3]",
        "log.dir='null'",
        "data.split='yes'",
    ]
    with pytest.raises(SystemExit) as ended:
        cli.configure("Train.", [*argv, "--print-config"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    path = tmp_path / "resolved.yaml"
    path.write_text(printed)
    assert cli.load([str(path)]) == cli.load(argv)
    assert cli.to_yaml(cli.load([str(path)])) == printed


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.configure("Train a model.\n\nMore.", ["quickstart", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.startswith("Train a model.\n\nusage:") and "More." not in text
    assert max(map(len, text.splitlines())) <= 120

    def check(section, prefix: str) -> None:
        for f in dataclasses.fields(section):
            value = getattr(section, f.name)
            if dataclasses.is_dataclass(value):
                check(value, f"{prefix}{f.name}.")
            else:
                key, meaning = re.escape(prefix + f.name), re.escape(f.metadata["help"][:40])
                assert re.search(rf"^  {key}=.+\(.+\)\n +{meaning}", text, re.M)
            if f.name == "rope_scaling":
                check(RopeScaling(), f"{prefix}{f.name}.")

    check(Config(), "")
    assert "(one of ring, allgather, ulysses)" in text and "(an integer in [1, 1e12], or null)" in text


@pytest.mark.parametrize(
    "argument, parts",
    [
        ("paralel.tp=2", ["unknown key paralel.tp", "did you mean parallel.tp?"]),
        ("paralel.tpp=2", ["unknown key paralel.tpp", "did you mean parallel?"]),
        ("trainer.num_nodes=2", ["unknown key trainer.num_nodes", "--nnodes"]),
        ("parallel.tpp=2", ["unknown key parallel.tpp", "did you mean parallel.tp?"]),
        ("train.lr=1", ["unknown key train.lr", "did you mean optimizer.lr?"]),
        ("model.rope_scaling.factr=8", ["did you mean model.rope_scaling.factor?"]),
        ("log.qqq=2", ["unknown key log.qqq", "use one of log.format, log.style, log.every, log.dir, log.tensorboard"]),
        ("model.num_layers=many", ["model.num_layers=many is not an integer", "model.num_layers=4"]),
        ("model.num_layers=2.5", ["model.num_layers=2.5 is not an integer"]),
        ("model.num_layers=true", ["model.num_layers=true is not an integer"]),
        ("model.num_layers=", ["model.num_layers= is empty, as a shell variable that is not set; give a value"]),
        ("model.num_layers.x=3", ["model.num_layers={x: 3} is not an integer"]),
        ("optimizer.lr=inf", ["optimizer.lr=inf is not a finite number; write for example optimizer.lr=0.003"]),
        ("optimizer.lr=-NaN", ["optimizer.lr=-NaN is not a finite number"]),
        ("optimizer.lr=.inf", ["optimizer.lr=.inf is not a finite number; write for example optimizer.lr=0.003"]),
        ("optimizer.lr=.nan", ["optimizer.lr=.nan is not a finite number"]),
        ("data.paths={}", ["data.paths={} is not a list of texts"]),
        ("optimizer.lr=fast", ["optimizer.lr=fast is not a finite number", "optimizer.lr=0.003"]),
        ("train.deterministic=3", ["train.deterministic=3 is not true or false", "train.deterministic=false"]),
        ("train.deterministic='true'", ["train.deterministic='true' is not true or false"]),
        ("log.dir=false", ["log.dir=false is not text, or null", "log.dir=NAME"]),
        (
            "log.tensorboard=[a]",
            ["log.tensorboard=[a] is not text, or true or false", "for example log.tensorboard=false"],
        ),
        ("log.tensorboard=3", ["log.tensorboard=3 is not text, or true or false"]),
        ("log.dir=???", ["log.dir=??? is not text, or null"]),
        ("log.dir=[9,1]", ["log.dir=[9, 1] is not text"]),
        ("data.split=[9,a]", ["data.split=[9, a] is not a list of numbers", "data.split=969,30,1"]),
        ("data.split=[]", ["data.split=[] is not a list of numbers"]),
        ("model.family=bert", ["model.family=bert is not one of llama, gpt", "model.family=llama"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas=[0.9] is not a list of 2 numbers", "optimizer.betas=[0.9, 0.95]"]),
        ("data.paths=a", ["data.paths=a is not a list of texts", "data.paths=[NAME]"]),
        ("data.paths=[[a]]", ["data.paths=[[a]] is not a list of texts"]),
        ("parallel.layers_per_stage=[1,a]", ["is not a list of integers, or null", "parallel.layers_per_stage=[8, 8]"]),
        ("model=3", ["model=3 is not a section", "model.family=llama"]),
        ("model.rope_scaling=3", ["model.rope_scaling=3 is not a section, or null", "model.rope_scaling.factor=8.0"]),
        ("", ["an empty argument is neither a YAML file nor an override"]),
        ("parallel.tp", ["parallel.tp is neither a YAML file nor an override", "section.key=value"]),
        ("model..tp=1", ["empty part before '='", "section.key=value"]),
        ("data.paths=[a", ["data.paths: [a is not valid YAML", "close its brackets"]),
        ("log.dir=${oc.env:HOME}", ["interpolation", "write the value itself"]),
        ("log.dir=${", ["interpolation"]),
        ("data.paths=[a, '${x}']", ["interpolation"]),
        ("--verbose", ["unknown option --verbose", "--print-config"]),
        ("no/such.yaml", ["no/such.yaml cannot be read: no such file or directory", "name an existing"]),
    ],
)
def test_bad_argument(argument, parts):
    message = error_of([argument])
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "text, parts",
    [
        ("- a\n", ["holds no mapping", "`section:`"]),
        ("3\n", ["holds no mapping"]),
        ("model: [1\n", ["is not valid YAML", "line 2"]),
        ("train: {steps: 1, steps: 2}\n", ["duplicate key steps"]),
        ("model: !!python/object/apply:os.getcwd []\n", ["is not valid YAML"]),
        ("model: {famly: gpt}\n", ["unknown key model.famly; did you mean model.family?"]),
        ("train: {steps: soon}\n", ["train.steps=soon is not an integer"]),
        ("model: 3\n", ["model=3 is not a section"]),
        ("log:\n  dir: ${oc.env:HOME}\n", ["interpolation"]),
        ("log:\n  dir: x/${\n", ["interpolation"]),
        (b"\xff\xfe\x00", ["cannot be read: it is not UTF-8"]),
    ],
)
def test_bad_file_is_named(tmp_path, text, parts):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = error_of([str(path)])
    assert message.startswith(str(path))
    for part in parts:
        assert part in message


@pytest.mark.parametrize("key", [key.name for key in schema.keys()])
def test_every_key_has_a_fix(key):
    """What the error suggests for a value of the wrong type is itself of the right one."""
    suggested = re.fullmatch(r".*; (?:write|set its keys,) for example (.*)", error_of([f"{key}=[[]]"]))[1]
    assert suggested.startswith(key)
    cli.load([suggested])


def test_a_directory_is_no_file(tmp_path):
    (tmp_path / "d.yaml").mkdir()
    assert "d.yaml cannot be read: is a directory" in error_of([str(tmp_path / "d.yaml")])


def test_empty_file_is_all_defaults(tmp_path):
    (tmp_path / "e.yaml").write_text("# nothing\n")
    assert cli.load([str(tmp_path / "e.yaml")]) == Config()


def test_mistakes_are_one_line_and_status_1():
    code = (
        "from minitron.config import cli, rules\n"
        "with cli.user_errors():\n"
        "    cfg = cli.configure('Train.')\n"
        "    rules.check(cfg, world=2)\n"
        "    raise ValueError('two\\nlines')\n"
    )
    for argument, message in (
        ("train.steps=x", "train.steps=x is not an integer"),
        ("parallel.tp=4", "needs 4 ranks, but there are 2"),
        ("train.steps=2", "two lines"),
    ):
        command = [sys.executable, "-c", code, argument]
        done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_a_program_s_own_command_line_is_read(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["minitron-pretrain", "train.steps=7"])
    assert cli.configure("Train.") == cli.configure("Train.", ["train.steps=7"]) != cli.configure("Train.", [])
    seen = []
    command.run(seen.append)
    assert seen == [["train.steps=7"]]


@pytest.mark.parametrize(
    "error, status",
    [
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
        (MemoryError(), "error: out of memory"),
    ],
)
def test_a_tool_ends_with_a_shell_s_status_of_what_ended_it(monkeypatch, error, status):
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # of a closed pipe: stdout belongs to pytest

    def main(_):
        raise error

    with pytest.raises(SystemExit) as caught:
        command.run(main)
    code = caught.value.code
    assert code.startswith(status) if isinstance(code, str) else code == status


@pytest.mark.parametrize("kind, lines", [(ValueError, 0), (RunError, 1)])
def test_a_mistake_that_all_ranks_find_is_one_line_of_all_together(monkeypatch, capsys, kind, lines):
    """A damaged file, for example: all ranks find it at the start, and one of them during the run."""
    monkeypatch.setattr(cli, "QUIET_SECONDS", 0.0)
    with pytest.raises(SystemExit), cli.user_errors(kind, quiet=True):
        raise DataError("damaged")
    assert capsys.readouterr().err.count("damaged") == lines


# ---- values arrive as typed ---------------------------------------------------------------------------------------

TYPED = [
    "2026_11_22",
    "8e12345",
    "010",
    "12:30",
    "/a #b",
    "1_000",
    "0x10",
    "2026-11-22",
    "1e400",
    "a: b",
    "- a",
    "*a",
    "&a",
    "!b",
    "%c",
    "@d",
    "`e",
    "| f",
    "a, b",
    "#",
    "?",
    "a=b",
    "Ünïcode 中",
    "~/x",
    "inf",
    ".nan",
    "1.",
    "nUll",
    "a'b",
]


@pytest.mark.parametrize("text", TYPED)
def test_text_arrives_as_typed(tmp_path, text):
    for key in ("log.dir", "checkpoint.dir", "data.cache_dir"):
        section, name = key.split(".")
        assert getattr(getattr(cli.load([f"{key}={text}"]), section), name) == text
    cfg = cli.load([f"log.dir={text}"])
    (tmp_path / "printed.yaml").write_text(cli.to_yaml(cfg))
    assert cli.load([str(tmp_path / "printed.yaml")]) == cfg
    (tmp_path / "quoted.yaml").write_text(f"log: {{dir: {json.dumps(text)}}}")
    assert cli.load([str(tmp_path / "quoted.yaml")]) == cfg


@pytest.mark.parametrize("text", ["2026_11_22", "8e12345", "010", "12:30", "2026-11-22", "0x10", "1_000"])
def test_text_in_files_needs_no_quotes(tmp_path, text):
    (tmp_path / "a.yaml").write_text(f"log: {{dir: {text}}}\ndata: {{paths: [0.70, {text}]}}\n")
    cfg = cli.load([str(tmp_path / "a.yaml")])
    assert cfg.log.dir == text and cfg.data.paths == ("0.70", text)
    assert cli.load([f"data.paths=[0.70,{text}]"]).data.paths == ("0.70", text)


@pytest.mark.parametrize(
    "argument, message",
    [
        ("model.num_layers=1:30", "model.num_layers=1:30 is not an integer"),
        ("model.num_layers=010", "model.num_layers=010 is not an integer"),
        ("checkpoint.dir=", "checkpoint.dir= is empty, as a shell variable that is not set; give a value, or null"),
        ("checkpoint.load=", "checkpoint.load= is empty"),
        ("data.split=''", "data.split='' is empty, as a shell variable that is not set; give a value, or drop the key"),
        ("data.paths=['']", "data.paths=[''] is empty"),
        ("log.dir= ", "is empty, as a shell variable that is not set; give a value, or null"),
        ("checkpoint.dir=' '", "checkpoint.dir=' ' is empty"),
        ("checkpoint.load=\t", "is empty"),
        ("finetune.base=' '", "is empty"),
        ("log.tensorboard=  ", "is empty"),
        ("data.cache_dir=\u00a0", "is empty, as a shell variable that is not set; give a value, or drop the key"),
        ("data.paths=['  ']", "is empty"),
        ("log.dir=a\x1b", "holds a character that cannot be printed; rename it"),
        ("optimizer.lr=1e400", "optimizer.lr=1e400 is not a finite number; use a smaller one"),
        ("train.steps=" + "9" * 20, "has more than 18 digits; use a smaller number"),
        ("model" + ".x" * 3000 + "=1", "unknown key model.x.x"),
        ("data.paths=" + "[" * 3000, "is not valid YAML"),
    ],
)
def test_what_a_value_is_not(argument, message):
    told = error_of([argument])
    assert message in told and len(told) < 1000


def test_a_null_drops_what_a_file_has_set(tmp_path):
    (tmp_path / "a.yaml").write_text("train: {steps: 7, seed: 8}\nmodel: {num_layers: 9, num_kv_heads: 2}")
    argv, below = [str(tmp_path / "a.yaml")], ({"train": {"steps": 5}, "model": {"num_layers": 6}}, "base")
    assert cli.load([*argv, "train.steps=3", "train.steps=null"]).train == dataclasses.replace(Config().train, seed=8)
    assert cli.load([*argv, "train=null", "model=null"]) == Config()
    assert cli.load([*argv, "train.steps=null"], below).train.steps == 5
    assert cli.load([*argv, "model=null"], below).model.num_layers == 6
    assert cli.load([*argv, "model.num_kv_heads=null"]).model.num_kv_heads is None  # a value of this key
    (tmp_path / "a.yaml").write_text("train: {steps: }")
    with pytest.raises(ValueError, match="train.steps=null is not an integer"):
        cli.load(argv)


def test_nothing_is_said_by_null(tmp_path):
    (tmp_path / "a.yaml").write_text("checkpoint: {dir: ~, load: }\nmodel: {num_kv_heads: Null}\n")
    cfg = cli.load(
        ["log.dir=x", "checkpoint.every=3", str(tmp_path / "a.yaml"), "log.dir=null", "checkpoint.every=null"]
    )
    assert (cfg.checkpoint.dir, cfg.checkpoint.load, cfg.model.num_kv_heads, cfg.log.dir, cfg.checkpoint.every) == (
        None,
    ) * 5


@pytest.mark.parametrize(
    "text, parts",
    [
        ("train: &a {steps: 1}\n", ["anchors, aliases and tags are not read"]),
        ("train: {steps: !!int 3}\n", ["anchors, aliases and tags are not read"]),
        ("train: " + "[" * 2000, ["it is nested too deeply"]),
        ("train: {steps: 1}\n---\ntrain: {steps: 2}\n", ["more than one document"]),
        ("? [a]\n: b\n", ["a key is not text"]),
        ("#" * (2 << 20), ["cannot be read: its 2097152 bytes are more than 1048576"]),
        ("train: {steps: 2026-11-22}\n", ["train.steps=2026-11-22 is not an integer"]),
    ],
)
def test_what_a_file_may_not_hold(tmp_path, text, parts):
    (tmp_path / "a.yaml").write_text(text)
    message = error_of([str(tmp_path / "a.yaml")])
    assert all(part in message for part in parts) and len(message) < 1000


def values_of(hint) -> st.SearchStrategy:
    """What a key of this type may hold."""
    args = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return st.one_of(*map(values_of, args))
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(args)
    if typing.get_origin(hint) is tuple:
        if Ellipsis in args:
            return st.lists(values_of(args[0]), max_size=4).map(tuple)
        return st.tuples(*map(values_of, args))
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(hint)})
    texts = st.one_of(
        st.sampled_from([*TYPED, "null", "true", "~", "no", "3", "[a]", "'", "???"]),
        st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1).filter(
            lambda text: "${" not in text and text.strip()
        ),
    )
    return {
        int: st.integers(-(10**17), 10**17),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: texts,
        Shares: texts,
        type(None): st.none(),
    }[hint]


@settings(max_examples=60, deadline=None)
@given(values_of(Config))
def test_every_printed_config_loads_again(tmp_path_factory, cfg):
    path = tmp_path_factory.getbasetemp() / "every.yaml"
    path.write_text(cli.to_yaml(cfg), encoding="utf-8")
    assert cli.load([str(path)]) == cfg
    assert cli.from_tree(json.loads(json.dumps(dataclasses.asdict(cfg))), "index.json") == cfg


def test_an_override_of_the_format_drops_the_loss_scale_of_a_file(tmp_path):
    (tmp_path / "a.yaml").write_text("precision: {dtype: fp16, loss_scale: 4096.0, loss_scale_window: 500}")
    path = str(tmp_path / "a.yaml")
    assert cli.load([path]).precision.loss_scale == 4096.0
    assert cli.load([path, "precision.dtype=bf16"]) == Config()
    assert "precision.loss_scale=8.0 does not go with" in error_of(
        [path, "precision.loss_scale=8", "precision.dtype=bf16"], 1
    )


# ---- the rules ----------------------------------------------------------------------------------------------------

FP8 = ["precision.fp8=current"]
WIDE_BLOCKS = ["precision.fp8=block", "precision.fp8_head=true", "model.vocab_multiple=256", "model.num_kv_heads=8"]
WIDE_BLOCKS += ["model.hidden_size=512", "model.ffn_hidden_size=512", "train.micro_batch_size=2"]
EXPORTED_GPT = ["model.family=gpt", "model.positions=learned", "model.num_kv_heads=null"]
EXPORTED_GPT += ["checkpoint.export=hf", "checkpoint.dir=x"]
WSD, LORA = ["optimizer.lr_schedule=wsd"], ["finetune.kind=lora"]
RAMP = ["train.batch_ramp=[4,4,1200]"]  # steps of 4 samples until 400 are trained


@pytest.mark.parametrize(
    "argv, world, parts",
    [
        (["model.num_layers=0"], 1, ["model.num_layers=0 is outside [1, 10000]; use at least 1"]),
        (
            ["model.hidden_dropout=1.0"],
            1,
            ["model.hidden_dropout=1.0 is outside [0, 1); use at least 0 and less than 1"],
        ),
        (["optimizer.betas=[0.9,1.5]"], 1, ["optimizer.betas=[0.9, 1.5]: 1.5 is outside [0, 1); use at least 0"]),
        (
            ["precision.loss_scale=0"],
            1,
            ["precision.loss_scale=0.0 is outside [1, 1e38]; use at least 1 and at most 1e38"],
        ),
        (
            ["precision.loss_scale=0.5", "precision.dtype=fp16"],
            1,
            ["precision.loss_scale=0.5 is outside [1, 1e38]; use at least 1"],
        ),
        (
            ["precision.loss_scale=4096"],
            1,
            ["precision.loss_scale=4096.0 does not go with precision.dtype=bf16; drop it, or set precision.dtype=fp16"],
        ),
        (["precision.loss_scale_window=7"], 1, ["precision.loss_scale_window=7 does not go with precision.dtype=bf16"]),
        (["precision.loss_scale_hysteresis=7"], 1, ["precision.loss_scale_hysteresis=7 does not go with"]),
        (["lora.alpha=1e300"], 1, ["lora.alpha=1e+300 is outside (0, 1e12]; use more than 0 and at most 1e12"]),
        (["train.max_skipped=1000000000001"], 1, ["is outside [1, 1e12]", "at most 1e12"]),
        (
            ["model.num_layers=2000000"],
            1,
            ["model.num_layers=2000000 is outside [1, 10000]; use at least 1 and at most 10000"],
        ),
        (
            ["model.hidden_size=10000000001"],
            1,
            ["model.num_heads=8 does not divide model.hidden_size=10000000001; use 1, 101, 3541"],
        ),
        (
            ["log.dir=~nobody-here/x"],
            1,
            ["log.dir=~nobody-here/x: no user has the home directory ~nobody-here; write the whole path"],
        ),
        (["data.tokenizer=llama3:~nobody-here/x"], 1, ["no user has the home directory ~nobody-here"]),
        (["profile.kind=nsys", "profile.ranks=[0,0]"], 1, ["profile.ranks=[0, 0] must name ranks", "each once"]),
        (["train.seed=-1"], 1, ["train.seed=-1 is outside [0, 4294967295]"]),
        (["model.rope_scaling.factor=0"], 1, ["model.rope_scaling.factor=0.0 is outside (0, 1e12]"]),
        (
            ["model.hidden_size=130"],
            1,
            ["model.num_heads=8 does not divide model.hidden_size=130; use 1, 2, 5, 10, 13 or 26"],
        ),
        (["model.num_kv_heads=3"], 1, ["model.num_kv_heads=3 does not divide model.num_heads=8; use 1, 2, 4 or 8"]),
        (["model.hidden_size=24"], 1, ["model.head_dim=3 (null: hidden_size/num_heads) is odd", "make it even"]),
        (["model.head_dim=5"], 1, ["model.head_dim=5 ", "make it even"]),
        (["model.family=gpt", "model.qkv_bias=true"], 1, ["model.qkv_bias=true does not go with model.family=gpt"]),
        ([*FP8, "model.head_dim=4", "parallel.tp=4"], 4, ["the width of all heads / tp=8 is not a multiple of 16"]),
        (
            ["checkpoint.export=hf", "checkpoint.dir=x", "model.qk_norm=true", "model.qkv_bias=true"],
            1,
            ["model.qk_norm=true cannot be exported: transformers' llama with qkv_bias has false"],
        ),
        (
            [*EXPORTED_GPT, "model.head_dim=8"],
            1,
            ["model.head_dim=8 cannot be exported: transformers' gpt has 16", "checkpoint.export=none"],
        ),
        ([*EXPORTED_GPT, "model.qk_norm=true"], 1, ["model.qk_norm=true cannot be exported: transformers' gpt has"]),
        (["model.positions=learned", "model.rope_scaling.factor=8"], 1, ["does not go with model.positions=learned"]),
        (["model.rope_scaling.low_freq_factor=4"], 1, ["low_freq_factor=4.0 must be below high_freq_factor=4.0"]),
        (["parallel.tp=2", "parallel.pp=2", "parallel.cp=2"], 4, ["tp*pp*cp=2*2*2=8 needs 8 ranks, but there are 4"]),
        (
            ["parallel.tp=2", "parallel.pp=2"],
            6,
            ["tp*pp*cp=2*2*1=4 does not divide the world of 6 ranks; start 4 or 8"],
        ),
        (["parallel.tp=3"], 3, ["parallel.tp=3 does not divide model.num_kv_heads=4; use 1, 2 or 4"]),
        (
            ["parallel.tp=3", "model.num_kv_heads=8"],
            3,
            ["parallel.tp=3 does not divide model.num_kv_heads=8; use 1, 2, 4 or 8"],
        ),
        (["parallel.tp=3", "model.num_kv_heads=null"], 3, ["parallel.tp=3 does not divide model.num_heads=8"]),
        (
            ["parallel.tp=4", "model.ffn_hidden_size=390"],
            4,
            ["parallel.tp=4 does not divide model.ffn_hidden_size=390; use 1 or 2"],
        ),
        (
            ["parallel.tp=4", "model.vocab_size=9", "model.vocab_multiple=2"],
            4,
            [
                "parallel.tp=4 does not divide the padded vocabulary (model.vocab_size=9, vocab_multiple=2)=10; use 1 or 2"
            ],
        ),
        (
            ["parallel.tp=2", "parallel.cp=4", "parallel.cp_style=ulysses"],
            8,
            ["parallel.tp*cp (ulysses)=8 does not divide model.num_kv_heads=4; use 1, 2 or 4"],
        ),
        (["parallel.vp=2"], 1, ["parallel.vp=2", "parallel.pp=1", "use parallel.vp=1"]),
        (["parallel.schedule=zb-h1"], 1, ["parallel.schedule=zb-h1", "parallel.pp=1", "use parallel.pp=2"]),
        (
            ["parallel.schedule=zb-h1", "parallel.pp=2", "parallel.vp=2"],
            2,
            ["parallel.schedule=zb-h1 does not go with parallel.vp=2; drop it, or set parallel.vp=1"],
        ),
        (["parallel.pp=8"], 8, ["model.num_layers=4 leaves stages empty: parallel.pp=8"]),
        (["parallel.pp=2", "parallel.layers_per_stage=[1,2]"], 2, ["layers_per_stage=[1, 2] sums to 3"]),
        (["parallel.pp=2", "parallel.layers_per_stage=[4]"], 2, ["layers_per_stage=[4] has 1 entries"]),
        ([], 3, ["train.global_batch_size=16 is not a multiple of train.micro_batch_size*dp=4*3=12; use 12 or 24"]),
        ([], 8, ["train.global_batch_size=16 is not a multiple of train.micro_batch_size*dp=4*8=32; use 32"]),
        (["train.seq_len=8192"], 1, ["train.seq_len=8192 exceeds model.max_positions=4096"]),
        (
            ["train.micro_batch_size=32769", "train.global_batch_size=32769"],  # 256 positions, 16 heads of 16
            1,
            ["train.micro_batch_size=32769 gives attention more than 2147483647 elements", "use at most 32767"],
        ),
        (
            ["train.seq_len=250", "parallel.cp=2"],
            2,
            ["train.seq_len=250 is not a multiple of 2*parallel.cp (zigzag)=4; use 248 or 252"],
        ),
        (
            ["train.seq_len=251", "parallel.cp=2", "parallel.cp_style=ulysses"],
            2,
            ["multiple of parallel.cp (ulysses)=2"],
        ),
        (
            ["train.seq_len=250", "parallel.tp=4"],
            4,
            ["multiple of parallel.cp*tp (sequence parallel)=4; use 248 or 252"],
        ),
        (
            ["train.seq_len=252", "parallel.cp=2", "parallel.tp=4"],
            8,
            ["parallel.cp*tp (sequence parallel)=8; use 248 or 256"],
        ),
        (
            ["model.attention_dropout=0.1", "parallel.cp=2"],
            2,
            ["model.attention_dropout=0.1 does not go with parallel.cp=2", "parallel.cp=1"],
        ),
        (
            ["model.attention_dropout=0.1", "model.attention=flash"],
            1,
            ["model.attention_dropout=0.1 does not go with model.attention=flash", "auto, fused or reference"],
        ),
        (
            [*FP8, "precision.dtype=fp32"],
            1,
            ["precision.fp8=current does not go with precision.dtype=fp32", "precision.dtype=bf16"],
        ),
        (
            ["optimizer.grad_dtype=bf16", "precision.dtype=fp16"],
            1,
            ["optimizer.grad_dtype=bf16 does not go with precision.dtype=fp16", "set precision.dtype=bf16"],
        ),
        (
            ["optimizer.reduce_dtype=bf16", "precision.dtype=fp16"],
            1,
            ["optimizer.reduce_dtype=bf16 does not go with precision.dtype=fp16", "set precision.dtype=bf16"],
        ),
        (
            ["optimizer.accumulate_dtype=bf16", "precision.dtype=fp32"],
            1,
            ["optimizer.accumulate_dtype=bf16 does not go with precision.dtype=fp32", "set precision.dtype=bf16"],
        ),
        (
            [*FP8, "model.ffn_hidden_size=104"],
            1,
            ["model.ffn_hidden_size/tp=104 is not a multiple of 16", "precision.fp8=none"],
        ),
        (
            [*FP8, "train.micro_batch_size=1", "train.seq_len=40"],
            1,
            ["train.seq_len*micro_batch_size/cp=40 is not a multiple of 16"],
        ),
        (
            ["precision.fp8=block", "model.ffn_hidden_size=400"],
            1,
            ["model.ffn_hidden_size/tp=400 is not a multiple of 128, which blocks of FP8 values need"],
        ),
        (
            [
                "precision.fp8=block",
                "model.num_kv_heads=8",
                "model.hidden_size=512",
                "model.ffn_hidden_size=512",
                "train.micro_batch_size=1",
                "parallel.tp=4",
            ],
            4,
            ["train.seq_len*micro_batch_size/cp/tp=64 is not a multiple of 128"],
        ),
        (
            [*FP8, "precision.fp8_bf16_layers=2"],
            1,
            ["precision.fp8_bf16_layers=2 at both ends leave none of model.num_layers=4 in FP8; use at most 1"],
        ),
        (["log.numerics_every=10"], 1, ["log.numerics_every=10 does not go with log.dir=null"]),
        (
            ["parallel.tp=2", "model.head_piece=65"],
            2,
            ["model.head_piece=65 is not a multiple of parallel.tp", "64 or 66"],
        ),
        ([*FP8, "precision.fp8_head=true", "model.head_piece=40"], 1, ["model.head_piece=40 is not a multiple of 16"]),
        (
            [*WIDE_BLOCKS, "model.head_piece=128", "parallel.tp=2"],  # a rank casts its part of a piece
            2,
            ["model.head_piece/tp=64 is not a multiple of 128"],
        ),
        (["precision.fp8_head=true"], 1, ["precision.fp8_head=true does not go with precision.fp8=none"]),
        (
            [*FP8, "precision.fp8_head=true", "parallel.tp=2", "model.vocab_size=1010", "model.vocab_multiple=2"],
            2,
            [
                "model.vocab_size, padded, /tp=505 is not a multiple of 16, which FP8 GEMMs need; set "
                "model.vocab_multiple=32, or precision.fp8_head=false"
            ],
        ),
        (["precision.fp8_params=true"], 1, ["precision.fp8_params=true does not go with precision.fp8=none"]),
        (
            ["precision.fp8=block", "precision.fp8_params=true"],
            1,
            ["precision.fp8_params=true does not go with precision.fp8=block", "precision.fp8=delayed or current"],
        ),
        (
            [*FP8, "precision.fp8_params=true", "finetune.kind=lora"],
            1,
            ["precision.fp8_params=true does not go with finetune.kind=lora; drop it"],
        ),
        (["precision.fp8_bf16_layers=1"], 1, ["precision.fp8_bf16_layers=1 does not go with precision.fp8=none"]),
        (["precision.fp8_backend=torch"], 1, ["precision.fp8_backend=torch does not go with precision.fp8=none"]),
        (
            ["optimizer.warmup_samples=10"],
            1,
            ["warmup_samples=10 does not go with optimizer.warmup_steps=20", "set optimizer.warmup_steps=0"],
        ),
        (
            ["optimizer.decay_steps=50", "optimizer.decay_samples=999"],
            1,
            ["optimizer.decay_steps=50; drop it, or set optimizer.decay_steps=null"],
        ),
        (
            ["optimizer.decay_steps=50", "optimizer.constant_steps=9"],
            1,
            ["constant_steps=9 does not go with optimizer.decay_steps=50"],
        ),
        (
            ["optimizer.constant_steps=300"],
            1,
            ["optimizer.constant_steps=300 must be below train.steps=300; use at most 299"],
        ),
        (
            ["optimizer.lr_schedule=constant", "optimizer.decay_steps=50"],
            1,
            ["decay_steps=50 does not go with optimizer.lr_sch"],
        ),
        (["optimizer.min_lr=1"], 1, ["optimizer.min_lr=1.0 exceeds optimizer.lr=0.003; use at most 0.003"]),
        (
            ["optimizer.decay_steps=20"],
            1,
            ["optimizer.decay_steps=20 ends the decay after 320 samples, within the warm-up of 320"],
        ),
        (["optimizer.decay_samples=319"], 1, ["optimizer.decay_samples=319 ends the decay after 319 samples"]),
        (["data.source=indexed"], 1, ["data.source=indexed has nothing to read; set data.paths=[PREFIX]"]),
        (["data.paths=[a]"], 1, ["data.paths=[a] does not go with data.source=corpus"]),
        (
            ["data.source=sft"],
            1,
            ["data.source=sft has nothing to read; set data.paths=[FILE.jsonl,...], or [docstrings]"],
        ),
        (["data.too_long=skip"], 1, ["data.too_long=skip does not go with data.source=corpus", "data.too_long=null"]),
        (
            ["data.source=sft", "data.paths=[a]", "train.epochs=2", "train.steps=9"],
            1,
            ["train.epochs=2 contradicts train.steps=9", "train.steps=null"],
        ),
        (["data.valid_paths=[a]"], 1, ["data.valid_paths=[a] does not go with data.source=corpus; drop it"]),
        (
            ["data.document_length=7"],
            1,
            ["data.document_length=7 does not go with data.source=corpus; drop it, or set data.source=mock"],
        ),
        (
            ["checkpoint.resume_step=3"],
            1,
            ["checkpoint.resume_step=3 does not go with checkpoint.dir=null; drop it, or set checkpoint.dir"],
        ),
        (
            ["checkpoint.resume_step=3", "checkpoint.dir=a", "checkpoint.resume=false"],
            1,
            [
                "checkpoint.resume_step=3 does not go with checkpoint.resume=false; drop it, or set checkpoint.resume=true"
            ],
        ),
        (
            ["optimizer.decay_samples=999", "optimizer.constant_steps=9"],
            1,
            ["does not go with optimizer.decay_samples=999; drop it, or set optimizer.decay_samples=null"],
        ),
        (
            ["optimizer.lr_schedule=constant", "optimizer.constant_steps=9"],
            1,
            [
                "optimizer.constant_steps=9 does not go with optimizer.lr_schedule=constant",
                "set",
                "cosine, linear or wsd",
            ],
        ),
        (["lora.targets=[q,v]"], 1, ["lora.targets=[q, v] does not go with finetune.kind=null", "finetune.kind=lora"]),
        (["finetune.base=x"], 1, ["does not go with finetune.kind=null; drop it, or set finetune.kind=sft or lora"]),
        (
            ["log.tensorboard=true"],
            1,
            ["log.tensorboard=true writes into log.dir, which is null; set log.dir, or drop"],
        ),
        (["profile.kind=torch"], 1, ["profile.kind=torch writes into log.dir, which is null; set log.dir"]),
        (
            ["profile.kind=nsys", "train.steps=11"],
            1,
            ["profile.start_step=10 and profile.end_step=12 are not steps, in order, of train.steps=11; use 1 to 11"],
        ),
        (
            ["profile.kind=nsys", "profile.start_step=13"],
            1,
            ["profile.start_step=13 and profile.end_step=12 are not steps"],
        ),
        (
            ["profile.kind=nsys", "profile.ranks=[0,2]"],
            2,
            ["profile.ranks=[0, 2] must name ranks of the world of 2", "use 0 to 1"],
        ),
        (["profile.kind=nsys", "profile.ranks=[]"], 1, ["profile.ranks=[] must name ranks"]),
        (["train.batch_ramp=[4,5,100]"], 1, ["train.batch_ramp=[4, 5, 100]", "=16", "an increment that divides 12"]),
        (["train.batch_ramp=[16,4,100]"], 1, ["train.batch_ramp=[16, 4, 100]", "start below 16"]),
        (["train.batch_ramp=[4,4,0]"], 1, ["train.batch_ramp=[4, 4, 0]: 0 is outside"]),
        (
            ["train.batch_ramp=[4,4,9]", "train.batch_schedule=[[0,16]]"],
            1,
            ["train.batch_ramp=[4, 4, 9] does not go with train.batch_schedule=[[0, 16]]; drop it"],
        ),
        (["train.batch_schedule=[[1,16]]"], 1, ["train.batch_schedule=[[1, 16]] must begin at 0"]),
        (["train.batch_schedule=[[0,8],[9,4],[9,16]]"], 1, ["train.batch_schedule=", "rise"]),
        (["train.batch_schedule=[[0,8],[9,12]]"], 1, ["must begin at 0", "train.global_batch_size=16"]),
        (["train.batch_schedule=[[0,0],[9,16]]"], 1, ["must begin at 0"]),
        (["optimizer.wsd_decay_share=0.2"], 1, ["does not go with optimizer.lr_schedule=cosine", "=wsd"]),
        (
            ["optimizer.lr_schedule=wsd", "optimizer.wsd_decay_steps=9", "optimizer.wsd_decay_share=0.2"],
            1,
            ["optimizer.wsd_decay_share=0.2 does not go with optimizer.wsd_decay_steps=9"],
        ),
        (
            ["optimizer.lr_schedule=wsd", "optimizer.wsd_decay_steps=301"],
            1,
            ["optimizer.wsd_decay_steps=301 is longer than the 300 steps", "use at most 300"],
        ),
        (["data.skip_samples=[[5,5]]"], 1, ["data.skip_samples=[[5, 5]] must be ranges"]),
        (["data.skip_samples=[[5,9],[7,12]]"], 1, ["data.skip_samples=[[5, 9], [7, 12]] must be ranges"]),
        (["data.skip_samples=[[-1,9]]"], 1, ["data.skip_samples=[[-1, 9]]: -1 is outside"]),
        ([*FP8, "parallel.tp=2", "model.hidden_size=48", "model.head_dim=16"], 2, ["model.hidden_size/tp=24 "]),
        ([*FP8, "parallel.tp=2", "model.ffn_hidden_size=48"], 2, ["model.ffn_hidden_size/tp=24 "]),
        ([*FP8, "parallel.tp=2", "model.head_dim=4", "model.num_kv_heads=2"], 2, ["the q, k, v matrix / tp=24 "]),
        ([*FP8, "parallel.cp=2", "train.seq_len=24", "train.micro_batch_size=2"], 2, ["micro_batch_size/cp=24 "]),
        (
            ["train.batch_ramp=[1,1,9]", "train.global_batch_size=10002", "train.micro_batch_size=1"],
            1,
            ["train.batch_ramp=[1, 1, 9] does not reach train.global_batch_size=10002"],
        ),
        ([*WSD, "optimizer.constant_steps=99", "optimizer.wsd_decay_steps=202"], 1, ["use at most 201"]),
        ([*WSD, "optimizer.decay_steps=200", "optimizer.wsd_decay_steps=201"], 1, ["use at most 200"]),
        ([*RAMP, "optimizer.decay_samples=80"], 1, ["after 80 samples, within the warm-up of 80"]),
        (
            [*RAMP, "optimizer.decay_steps=20", "optimizer.warmup_steps=0", "optimizer.warmup_samples=80"],
            1,
            ["optimizer.decay_steps=20 ends the decay after 80 samples, within the warm-up of 80"],
        ),
        (
            ["data.source=sft", "data.paths=[a]", "train.epochs=2", "train.steps=999"],
            1,
            ["contradicts train.steps=999"],
        ),
        ([*LORA, "lora.targets=[gate]", "model.family=gpt"], 1, ["a gpt model has no gate", "q, k, v, o, up, down"]),
        ([*LORA, "lora.targets=[qkv,k]"], 1, ["lora.targets=[qkv,k] must name each layer once"]),
        ([*LORA, "lora.targets=[o,o]"], 1, ["lora.targets=[o,o] must name each layer once"]),
        ([*LORA, "lora.targets=[]"], 1, ["lora.targets=[] must name"]),
        (["data.source=indexed", "data.paths=[a,~nobody-here/x]"], 1, ["no user has the home directory ~nobody-here"]),
        (["profile.kind=memory"], 1, ["profile.kind=memory writes into log.dir, which is null"]),
        (
            ["checkpoint.dir=a", "checkpoint.local_dir=b", "checkpoint.local_every=auto"],
            1,
            ["checkpoint.local_every=auto needs checkpoint.mtbf_hours"],
        ),
        (
            [*WSD, "optimizer.decay_samples=99999", "optimizer.wsd_decay_steps=9"],
            1,
            ["optimizer.wsd_decay_steps=9 does not go with optimizer.decay_samples=99999"],
        ),
        (
            [*LORA, "finetune.base=x", "checkpoint.load=y"],
            1,
            ["finetune.base=x does not go with checkpoint.load=y; drop it, or set checkpoint.load=null"],
        ),
        (["train.epochs=2"], 1, ["train.epochs=2.0 does not go with data.source=corpus"]),
        (
            ["data.source=indexed", "data.paths=[a]", "data.valid_paths=[a]"],
            1,
            ["data.valid_paths=[a] does not go with data.source=indexed"],
        ),
    ],
)
def test_broken_rule(argv, world, parts):
    message = error_of(argv, world)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("key", [key for key in schema.keys() if key.field.metadata["needs"]], ids=lambda key: key.name)
def test_what_a_key_needs_are_keys_and_their_values(key):
    names = [key.name for key in schema.keys()]
    for other, values in key.field.metadata["needs"].items():
        assert other in names and other != key.name
        for value in values:
            section, name = other.split(".")
            assert getattr(getattr(cli.from_tree({section: {name: value}}, "row"), section), name) == value


@pytest.mark.parametrize(
    "argv, capability, parts",
    [
        (FP8, (8, 0), ["precision.fp8=current needs a GPU of sm_89", "this one is sm_80", "use precision.fp8=none"]),
        (["precision.fp8=block"], (8, 9), ["fp8=block needs a GPU of sm_90 (Hopper", "use precision.fp8=current"]),
        (["precision.fp8=block"], (8, 0), ["fp8=block needs a GPU of sm_90 (Hopper", "use precision.fp8=none"]),
        ([], (7, 5), ["precision.dtype=bf16 needs a GPU of sm_80", "this one is sm_75", "fp16"]),
    ],
)
def test_gpu_too_old(argv, capability, parts):
    message = error_of(argv, 1, capability)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("tp, cp, seq_len, positions", [(2, 1, 256, 256), (1, 2, 512, 256), (4, 4, 128, 128)])
def test_attention_s_offsets_are_those_of_a_rank_s_heads_and_positions(tp, cp, seq_len, positions):
    """The model has 8 + 2 * 4 heads with 16 channels. A kernel takes at least 128 positions."""
    most = ((1 << 31) - 1) // (256 // tp * positions)
    for batch in most, most + 1:
        train = dict(seq_len=seq_len, micro_batch_size=batch)
        cfg = schema.changed(Config(), parallel=dict(tp=tp, cp=cp), train=train)
        with pytest.raises(ValueError, match=f"use at most {most}$") if batch > most else nullcontext():
            rules._check_attention(cfg)


EPOCHS = ["data.source=sft", "data.paths=[docstrings]", "train.epochs=2"]  # how many steps these are is known later


@pytest.mark.parametrize(
    "argv, world, capability",
    [
        (FP8, 1, (8, 9)),
        (FP8, 1, (9, 0)),
        (FP8, 1, (10, 0)),
        (FP8, 1, None),
        (["precision.fp8=block"], 1, (9, 0)),
        (["precision.fp8=delayed", "precision.fp8_backend=torch", "precision.fp8_bf16_layers=1"], 1, None),
        (
            [
                "precision.fp8=block",
                "model.hidden_size=512",
                "model.num_kv_heads=8",
                "model.ffn_hidden_size=512",
                "parallel.tp=4",
                "parallel.sequence_parallel=false",
                "train.micro_batch_size=1",
            ],
            4,
            None,
        ),
        ([*WIDE_BLOCKS, "model.head_piece=256", "parallel.tp=2"], 2, None),
        ([*WIDE_BLOCKS, "model.head_piece=128", "parallel.tp=2", "parallel.sequence_parallel=false"], 2, None),
        (["precision.dtype=fp16"], 1, (7, 0)),
        (["train.steps=5"], 2, None),  # shorter than its warm-up: never leaves it
        (["optimizer.warmup_steps=0", "optimizer.warmup_samples=216320"], 1, None),
        (["optimizer.constant_steps=100", "train.steps=115"], 1, None),
        (["parallel.tp=2", "parallel.pp=2", "parallel.vp=2", "parallel.cp=2"], 8, None),
        (["parallel.tp=2", "parallel.sequence_parallel=false", "train.seq_len=255"], 2, None),
        (["parallel.pp=2", "parallel.layers_per_stage=[1,3]", "parallel.schedule=zb-h1"], 2, None),
        (["parallel.cp=2", "parallel.cp_style=ulysses", "train.seq_len=254"], 2, None),
        (["model.family=gpt", "model.positions=learned", "model.hidden_size=24", "model.num_kv_heads=null"], 1, None),
        (["model.hidden_size=130", "model.head_dim=16"], 1, None),
        ([*EXPORTED_GPT, "model.head_dim=16"], 1, None),
        (["model.attention_dropout=0.1", "model.hidden_dropout=0.1"], 1, None),
        (["data.source=indexed", "data.paths=[3,a]"], 1, None),
        (["train.micro_batch_size=32767", "train.global_batch_size=32767"], 1, None),
        (["optimizer.lr_schedule=constant", "optimizer.min_lr=1"], 1, None),
        (["profile.kind=nsys", "profile.start_step=1", "profile.end_step=300"], 1, None),
        ([*EPOCHS, "profile.kind=nsys", "profile.start_step=400", "profile.end_step=500"], 1, None),
        ([*EPOCHS, "optimizer.constant_steps=400"], 1, None),
        ([*FP8, "model.head_piece=40"], 1, None),  # the head is in bf16
        ([*FP8, "precision.fp8_head=true", "model.vocab_size=1010", "model.vocab_multiple=16"], 1, None),
        ([*FP8, "parallel.tp=2", "train.seq_len=16", "train.micro_batch_size=1"], 2, None),  # cast after the gather
        (["train.batch_ramp=[1,2,9]", "train.global_batch_size=20001", "train.micro_batch_size=1"], 1, None),
        ([*WSD, "optimizer.constant_steps=99", "optimizer.wsd_decay_steps=201"], 1, None),
        ([*WSD, "optimizer.decay_steps=200", "optimizer.wsd_decay_steps=200"], 1, None),
        ([*RAMP, "optimizer.decay_samples=81"], 1, None),
        ([*LORA, "lora.targets=[q,k,v,o,up,down]", "model.family=gpt"], 1, None),
        ([*LORA, "lora.targets=[gate]"], 1, None),
        ([*FP8, "precision.fp8_params=true", "finetune.kind=sft"], 1, None),
        (["checkpoint.every=auto"], 1, None),  # nothing is saved
        (["log.prometheus='[::1]:65535'"], 1, None),
        (["log.tensorboard=runs/events"], 1, None),
    ],
)
def test_kept_rules(argv, world, capability):
    rules.check(cli.load(argv), world, capability)


@pytest.mark.parametrize("both", ["fp32", "bf16"])
@pytest.mark.parametrize("added", ["fp32", "bf16", None])
@pytest.mark.parametrize("sent", ["fp32", "bf16", None])
def test_grad_dtype_stands_for_each_format_of_gradients_that_is_not_set(both, added, sent):
    o = OptimizerConfig(grad_dtype=both, accumulate_dtype=added, reduce_dtype=sent)
    assert (o.accumulates_in, o.reduces_in) == (added or both, sent or both)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_following_the_fix_leads_on(data):
    """Every value that an error offers is accepted in its place: no chain of errors about the same key."""
    draw = data.draw
    pick = {
        "model.num_heads": draw(st.sampled_from([6, 8, 12, 24])),
        "model.hidden_size": 48 * draw(st.integers(1, 4)),
        "model.num_kv_heads": draw(st.sampled_from([2, 6])),
        "model.ffn_hidden_size": draw(st.integers(1, 60)),
        "model.vocab_multiple": draw(st.integers(1, 60)),
        "parallel.tp": draw(st.integers(1, 6)),
        "parallel.cp": draw(st.integers(1, 3)),
        "train.seq_len": draw(st.integers(1, 200)),
        "train.global_batch_size": draw(st.integers(1, 50)),
        "model.positions": "learned",
        "parallel.cp_style": draw(st.sampled_from(["ring", "ulysses"])),
    }
    dp = draw(st.integers(1, 3))

    def broken(values: dict) -> str | None:
        cfg = Config()
        for key, value in values.items():
            section, name = key.split(".")
            cfg = dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **{name: value})})
        try:
            rules.check(cfg, dp * cfg.parallel.tp * cfg.parallel.cp)
        except ValueError as error:
            return str(error)
        return None

    message = broken(pick)
    if message is None:
        return
    key = message.split("=")[0]
    if key not in pick:
        assert key == "parallel.tp*cp (ulysses)"
        return
    for offered in re.findall(r"\d+", message.rsplit("; use ", 1)[1]):
        again = broken(pick | {key: int(offered)})
        assert again is None or again.split("=")[0] != key, f"{message} -> {again}"


# ---- no key is unread ---------------------------------------------------------------------------------------------

SECTIONS = {f.name: type(getattr(Config(), f.name)) for f in dataclasses.fields(Config)} | {"rope_scaling": RopeScaling}
CLASSES = {cls.__name__: cls for cls in (Config, *SECTIONS.values())}


class Reads(ast.NodeVisitor):
    """Collects (class, attribute) of configuration objects, followed through annotations and plain assignments."""

    def __init__(self):
        self.found: set[tuple[str, str]] = set()
        self.known: dict[str, str] = {}  # source of an expression -> configuration class

    def kind(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute) and node.attr in SECTIONS:
            if self.kind(node.value) in ("Config", "ModelConfig"):
                return SECTIONS[node.attr].__name__
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("cli.configure", "configure", "cli.load", "load"):
            return "Config"
        return self.known.get(ast.unparse(node))

    def visit_FunctionDef(self, node):
        outer, self.known = self.known, {k: v for k, v in self.known.items() if "." in k}
        for arg in (*node.args.args, *node.args.kwonlyargs):
            names = [cls for cls in CLASSES if arg.annotation and re.search(rf"\b{cls}\b", ast.unparse(arg.annotation))]
            self.known |= {arg.arg: cls for cls in names[:1]}
        self.generic_visit(node)
        self.known = outer | {k: v for k, v in self.known.items() if "." in k}

    def visit_ClassDef(self, node):
        fields = [s for s in node.body if isinstance(s, ast.AnnAssign) and ast.unparse(s.annotation) in CLASSES]
        self.known = {f"self.{s.target.id}": ast.unparse(s.annotation) for s in fields}
        self.generic_visit(node)
        self.known = {}

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts)
            for name, value in pairs:
                if cls := self.kind(value):
                    self.known[ast.unparse(name)] = cls

    def visit_Attribute(self, node):
        if cls := self.kind(node.value):
            self.found.add((cls, node.attr))
        self.generic_visit(node)


def reads_of(source: str) -> set[tuple[str, str]]:
    visitor = Reads()
    visitor.visit(ast.parse(source))
    return visitor.found


def derived() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """(class, property) of config.py -> what it reads. `check` is not use."""
    result = {}
    for cls in ast.parse((PACKAGE / "config" / "schema.py").read_text()).body:
        if isinstance(cls, ast.ClassDef) and cls.name in CLASSES:
            for fn in cls.body:
                if isinstance(fn, ast.FunctionDef) and fn.name != "check":
                    visitor = Reads()
                    fn.args.args[0].annotation = ast.Name(cls.name)
                    visitor.visit(fn)
                    result[cls.name, fn.name] = visitor.found
    return result


def unread(sources: list[str]) -> set[tuple[str, str]]:
    read = set().union(*map(reads_of, sources))
    while more := {key for prop, keys in derived().items() if prop in read for key in keys} - read:
        read |= more
    return {(name, f.name) for name, cls in CLASSES.items() for f in dataclasses.fields(cls)} - read


def test_no_key_is_unread():
    others = [p for p in PACKAGE.rglob("*.py") if p.name not in ("schema.py", "rules.py", "cli.py")]
    assert not unread([p.read_text() for p in others]), "keys that change nothing"


def test_unread_keys_are_found():
    everything = unread([])
    source = """
class A:
    cfg: Config
    def __init__(self, cfg: Config, other):
        m, p = cfg.model, other.parallel
        self.log = cfg.log
        m.num_layers, p.tp, m.kv_heads, "{}".format(1)
        def inner():
            return self.log.dir
    def f(self, o: OptimizerConfig):
        return self.cfg.train.seq_len, o.lr, m.hidden_size
"""
    read = everything - unread([source])
    keys = {("ModelConfig", k) for k in ("num_layers", "num_heads", "num_kv_heads")}
    keys |= {("LogConfig", "dir"), ("TrainConfig", "seq_len"), ("OptimizerConfig", "lr")}
    assert read == keys | {("Config", "model"), ("Config", "log"), ("Config", "train")}


def test_defaults_that_recipes_leave_as_they_are():
    """GPT-3's (Brown et al. 2020, appendix B), the norms' and the start of GPT-2, Megatron-LM's rule of the scale."""
    from transformers import GPT2Config

    o, m, p, gpt2 = OptimizerConfig(), ModelConfig(), PrecisionConfig(), GPT2Config()
    assert (o.betas, o.eps, o.weight_decay, o.clip_grad) == ((0.9, 0.95), 1e-8, 0.1, 1.0)
    assert (m.norm_eps, m.init_std) == (gpt2.layer_norm_epsilon, gpt2.initializer_range)
    assert (p.loss_scale_window, p.loss_scale_hysteresis) == (1000, 2)
