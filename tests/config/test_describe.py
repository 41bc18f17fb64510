"""The JSON schema: the committed one is that of the keys, takes every recipe, and refuses what a run refuses."""

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from minitron.config import cli, rules, schema
from minitron.config.describe import json_schema

CONFIGS = Path(__file__).parents[2] / "configs"
SCHEMA = json.loads(json_schema())
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def test_the_committed_schema_is_that_of_the_keys(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.configure("Train.", ["--schema"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == (CONFIGS / "schema.json").read_text(), (
        "run python -m minitron.pretrain --schema > configs/schema.json"
    )
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_name_the_schema_and_keep_it(path):
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    VALIDATOR.validate(yaml.safe_load(text))
    VALIDATOR.validate(yaml.safe_load(cli.to_yaml(cli.load([str(path)]))))


def test_every_key_is_described():
    for key in schema.keys():
        place = SCHEMA
        for part in key.name.split("."):
            assert place["additionalProperties"] is False
            place = place["properties"][part]
        assert place["description"] == key.field.metadata["help"]
        assert place["default"] == json.loads(json.dumps(key.field.default))
    assert SCHEMA["properties"]["model"]["properties"]["family"]["enum"] == ["llama", "gpt"]
    assert SCHEMA["properties"]["optimizer"]["properties"]["betas"]["items"] == {
        "type": "number",
        "minimum": 0,
        "exclusiveMaximum": 1,
    }


VALUES = [None, True, -1, 0, 1, 5, 2.5, 4294967296, "x", [], [1], [0.5, 0.5], [0.5, 2], ["a", 0.5], [[1]], {}, {"x": 1}]


@pytest.mark.parametrize("key", list(schema.keys()), ids=lambda key: key.name)
def test_the_schema_refuses_what_a_run_refuses(key):
    for value in [*VALUES, key.field.default, *json.loads(json.dumps([key.field.default]))]:
        tree = json.loads(json.dumps(value))
        for part in reversed(key.name.split(".")):
            tree = {part: tree}
        try:
            rules._check_keys(cli.from_tree(tree, "json"))
            taken = True
        except ValueError as error:
            taken = "does not go with" in str(error)  # another key's value, which a schema of one key does not know
        assert VALIDATOR.is_valid(tree) == taken, (key.name, value)


def test_unknown_keys_are_refused():
    assert not VALIDATOR.is_valid({"trainer": {"max_steps": 1}}) and not VALIDATOR.is_valid({"train": {"max_steps": 1}})
    assert VALIDATOR.is_valid({}) and not VALIDATOR.is_valid({"model": None})
    assert {f.name for f in dataclasses.fields(schema.Config)} == SCHEMA["properties"].keys()


def test_help_of_a_section_is_its_part_of_the_whole(capsys):
    def printed(*argv):
        with pytest.raises(SystemExit):
            cli.configure("Train.", list(argv))
        return capsys.readouterr().out

    whole = printed("--help")
    for section in SCHEMA["properties"]:
        part = printed("--help", section)
        listed = {line.split("=")[0].strip() for line in part.splitlines()}
        assert part in whole and {key.name for key in schema.keys() if key.name.startswith(f"{section}.")} <= listed
    assert printed("--help", "lora", "log") == printed("--help", "lora") + "\n" + printed("--help", "log")
    assert printed("llama3_8b", "train.steps=5", "--help") == whole
    with pytest.raises(ValueError, match="trian.*use one of model, parallel, train"):
        cli.configure("Train.", ["--help", "trian"])


def test_recipes_are_listed(capsys):
    with pytest.raises(SystemExit):
        cli.configure("Train.", ["--recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    for line in lines:
        cli.load([line.split()[0]])
        assert len(line.split()) > 3 and len(line) <= 120
