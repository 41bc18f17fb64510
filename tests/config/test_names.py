"""Names of NeMo and Megatron-LM: each is answered with a key that there is, as a key, as an option and in a file."""

from pathlib import Path

import pytest

from minitron.config import cli, names, schema
from minitron.config.text import read_file

KEYS = {key.name for key in schema.keys()}
ROWS = read_file(str(Path(names.__file__).with_name("names.yaml")))
THEIRS = [(name, key) for key, row in ROWS.items() for name in row.split()]


def error_of(*argv: str) -> str:
    with pytest.raises(ValueError) as caught:
        cli.load(list(argv))
    return str(caught.value)


def test_every_answer_is_a_key():
    assert ROWS.keys() <= KEYS
    assert len(THEIRS) == len(dict(THEIRS)) > 100, "no name has two answers"
    assert not KEYS & dict(THEIRS).keys()


@pytest.mark.parametrize("theirs, ours", THEIRS)
def test_every_name_is_answered(tmp_path, theirs, ours):
    if theirs != "profile":  # a section of ours; of Megatron's an option
        assert error_of(f"{theirs}=1") == f"unknown key {theirs}; use {ours}"
    assert error_of(f"training.model.{theirs}=1") == f"unknown key training.model.{theirs}; use {ours}"
    option = f"--{theirs.replace('_', '-')}"
    assert error_of(option, "1") == error_of(f"{option}=1") == f"unknown option {option}; use {ours}=VALUE"
    (tmp_path / "theirs.yaml").write_text(f"model: {{{theirs.replace('.', ': {')}: 1{'}' * theirs.count('.')}}}")
    assert error_of(str(tmp_path / "theirs.yaml")).endswith(f"theirs.yaml: unknown key model.{theirs}; use {ours}")


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
        # What has no counterpart.
        ("trainer.devices=8", "unknown key trainer.devices; did you mean train?"),
        ("--use-distributed-optimizer", "unknown option --use-distributed-optimizer; use [CONFIG.yaml"),
    ],
)
def test_what_users_type(argument, message):
    assert message in error_of(argument)


def test_the_first_name_of_a_file_that_has_an_answer(tmp_path):
    (tmp_path / "nemo.yaml").write_text("trainer:\n  devices: 8\n  num_nodes: 32\n  max_steps: 50\n")
    assert error_of(str(tmp_path / "nemo.yaml")).endswith("nemo.yaml: unknown key trainer.max_steps; use train.steps")
