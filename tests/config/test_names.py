"""Names of other trainers: each is answered, as a key, as an option and in a file, with a key of ours or the reason."""

import ast
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from minitron.config import cli, names, schema
from minitron.config.text import read_file

KEYS = {key.name for key in schema.keys()}
SECTIONS = {field.name for field in fields(schema.Config)}
ROWS = read_file(str(Path(names.__file__).with_name("names.yaml")))
# A name may be that of several trainers.
THEIRS = sorted({(name, row) for row, trainers in ROWS.items() for some in trainers.values() for name in some.split()})


def error_of(*argv: str) -> str:
    with pytest.raises(ValueError) as caught:
        cli.load(list(argv))
    return str(caught.value)


def test_every_row_is_a_key_or_a_reason():
    assert all(row in KEYS or len(row.split()) > 3 for row in ROWS)
    assert {trainer for trainers in ROWS.values() for trainer in trainers} == {"nemo", "trl", "torchtitan"}
    assert len(THEIRS) == len(dict(THEIRS)) > 300, "no name has two answers"
    assert not KEYS & dict(THEIRS).keys()


@pytest.mark.parametrize("theirs, row", THEIRS)
def test_every_name_is_answered(tmp_path, theirs, row):
    key, option = (f"use {row}", f"use {row}=VALUE") if row in KEYS else (row, row)
    if theirs not in SECTIONS:  # of Megatron's an option
        assert error_of(f"{theirs}=1") == f"unknown key {theirs}; {key}"
    assert error_of(f"training.model.{theirs}=1") == f"unknown key training.model.{theirs}; {key}"
    dashed = f"--{theirs.replace('_', '-')}"
    assert error_of(dashed, "1") == error_of(f"{dashed}=1") == f"unknown option {dashed}; {option}"
    (tmp_path / "theirs.yaml").write_text(f"model: {{{theirs.replace('.', ': {')}: 1{'}' * theirs.count('.')}}}")
    assert error_of(str(tmp_path / "theirs.yaml")).endswith(f"theirs.yaml: unknown key model.{theirs}; {key}")


def fields_of(package: str, path: str, name: str) -> set[str]:
    """Names of a dataclass's fields, read without importing the package."""
    found = find_spec(package)
    if found is None:
        pytest.skip(f"no {package} here")
    tree = ast.parse((Path(found.origin).parent / path).read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


def test_names_of_trl_are_its_own():
    """A misspelt one would answer no user. Some are of older versions or of its scripts."""
    theirs = {name for trainers in ROWS.values() for name in trainers.get("trl", "").split()}
    known = fields_of("transformers", "training_args.py", "TrainingArguments") | fields_of(
        "peft", "tuners/lora/config.py", "LoraConfig"
    )
    known |= fields_of("trl", "trainer/sft_config.py", "SFTConfig") | fields_of(
        "trl", "trainer/model_config.py", "ModelConfig"
    )
    known |= {
        "max_seq_length",
        "torch_dtype",
        "warmup_ratio",
        "logging_dir",
        "train_file",
        "validation_file",
        "dataset_name",
    }
    assert len(theirs) > 50 and not theirs - known


@pytest.mark.parametrize(
    "argument, message",
    [
        # What the documents tell their users to type.
        ("trainer.max_steps=100", "unknown key trainer.max_steps; use train.steps"),
        ("model.nsys_profile.enabled=true", "unknown key model.nsys_profile.enabled; use profile.kind"),
        ("model.nsys_profile.start_step=41", "unknown key model.nsys_profile.start_step; use profile.start_step"),
        ("model.nsys_profile.end_step=43", "unknown key model.nsys_profile.end_step; use profile.end_step"),
        (
            "training.model.virtual_pipeline_model_parallel_size=12",
            "unknown key training.model.virtual_pipeline_model_parallel_size; use parallel.vp",
        ),
        (
            "training.model.global_batch_size=256",
            "unknown key training.model.global_batch_size; use train.global_batch_size",
        ),
        ("training.model.num_layers=2", "unknown key training.model.num_layers; use model.num_layers"),
        ("model.micro_batch_size=1", "unknown key model.micro_batch_size; use train.micro_batch_size"),
        ("model.deterministic=1", "unknown key model.deterministic; did you mean train.deterministic?"),
        ("model.data.splits_string=1", "unknown key model.data.splits_string; use data.split"),
        ("model.optim.sched.min_lr=1", "unknown key model.optim.sched.min_lr; use optimizer.min_lr"),
        # As Hydra and argparse take them.
        ("+trainer.max_steps=100", "unknown key +trainer.max_steps; use train.steps=VALUE"),
        ("TP_SIZE=8", "unknown key TP_SIZE; use parallel.tp"),
        ("seq-length=4096", "unknown key seq-length; use train.seq_len=VALUE"),
        ("--micro-batch-size", "unknown option --micro-batch-size; use train.micro_batch_size=VALUE"),
        ("--lr=1", "unknown option --lr; use optimizer.lr=VALUE"),
        ("--train.steps=5", "unknown option --train.steps; use train.steps=VALUE"),
        ("--sequence-parallel", "unknown option --sequence-parallel; use parallel.sequence_parallel=VALUE"),
        # As torchtitan and TRL have them.
        ("per_device_train_batch_size=1", "unknown key per_device_train_batch_size; use train.micro_batch_size"),
        ("--learning_rate=1e-5", "unknown option --learning_rate; use optimizer.lr=VALUE"),
        ("--parallelism.tensor_parallel_degree=8", "use parallel.tp=VALUE"),
        ("activation_checkpoint.mode=full", "unknown key activation_checkpoint.mode; use train.recompute"),
        # What has no counterpart.
        ("trainer.devices=8", "unknown key trainer.devices; torchrun's --nproc-per-node"),
        ("--use-distributed-optimizer", "unknown option --use-distributed-optimizer; it is always on"),
        ("model.num_experts=8", "unknown key model.num_experts; mixtures of experts are not supported"),
        ("--no-such-option", "unknown option --no-such-option; use [CONFIG.yaml"),
    ],
)
def test_what_users_type(argument, message):
    assert message in error_of(argument)


def test_the_first_name_of_a_file_that_has_an_answer(tmp_path):
    (tmp_path / "nemo.yaml").write_text("trainer:\n  benchmark: false\n  max_steps: 50\n  devices: 8\n")
    assert error_of(str(tmp_path / "nemo.yaml")).endswith("nemo.yaml: unknown key trainer.max_steps; use train.steps")
