"""`cyxjax config --schema`: editors accept every experiment of the repository, and mark a wrong key."""

import json
from pathlib import Path

import pytest
import yaml

from cyxjax.cli import main

jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
CONFIGS = sorted((Path(__file__).parents[3] / "configs").rglob("*.yaml"))


@pytest.fixture
def schema(capsys):
    assert main.main(["config", "--schema"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_experiments_of_the_repository_are_valid(schema, path):
    jsonschema.validate(yaml.safe_load(path.read_text()), schema)


@pytest.mark.parametrize(
    "values",
    [
        {"metrics": ["f1"], "trainable": "head/*", "max_time": "1h30m", "init_from": "a.safetensors"},
        {"base": "a.yaml", "epochs": "${env:E:3}", "optimizer": {"lr": "${env:LR}"}, "shuffle": "${env:S}"},
        {},
    ],
)
def test_short_forms_are_valid(schema, values):
    jsonschema.validate(values, schema)


@pytest.mark.parametrize(
    "values", [{"epoch": 3}, {"epochs": 0}, {"model": {"names": "mlp"}}, {"epochs": "$E"}]
)
def test_what_would_be_refused_is_not(schema, values):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema)
