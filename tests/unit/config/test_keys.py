"""Every configuration key has bounds, an effect, a sentence and a form in the help, and a schema."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import get_args

import pytest
import yaml
from annotated_types import Le, Lt
from pydantic import BaseModel

from cyxjax.cli import main
from cyxjax.cli.config import schema
from cyxjax.config.command_line import parse_overrides
from cyxjax.config.compared import effect_of
from cyxjax.config.effects import NO_NUMBERS, PER_RANK, effects_of
from cyxjax.config.errors import section_of
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.help import Command, help_page, sections
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.config.sections import GroupConfig
from cyxjax.errors import ConfigError
from cyxjax.sync.registry import STRATEGIES
from cyxjax.train.comparison import changed_keys
from cyxjax.train.fingerprints import equal_on_ranks

CONFIGS = sorted((Path(__file__).parents[3] / "configs").rglob("*.yaml"))
COMMAND = Command("cyxjax x", "Does x.", "cyxjax x --config a.yaml")


def fields(model: type[BaseModel], above: str = ""):
    """(dotted name, field) of each key of all sections."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        yield from [(above + name, field)] if section is None else fields(section, f"{above}{name}.")


def holds_number(annotation) -> bool:
    return annotation in (int, float) or any(holds_number(part) for part in get_args(annotation))


def is_bounded(field) -> bool:
    inner = [extra for part in get_args(field.annotation) for extra in getattr(part, "__metadata__", ())]
    every = [*field.metadata, *(x for extra in inner for x in getattr(extra, "metadata", [extra]))]
    return any(isinstance(x, Le | Lt) for x in every)


def test_every_number_has_an_upper_bound():  # refuse what would overflow later
    every = [*fields(TrainConfig), *fields(GroupConfig)]
    numbers = {name: field for name, field in every if holds_number(field.annotation)}
    assert [name for name, field in numbers.items() if not is_bounded(field)] == []
    assert len(numbers) > 40


@pytest.mark.parametrize("name", ["epochs", "max_steps", "seed", "optimizer.lr", "lora.rank", "max_time"])
@pytest.mark.parametrize("digits", [14, 4000, 5000])
def test_a_number_beyond_them_is_one_line_and_code_2(name, digits, cwd, capsys):
    assert main.main(["train", f"--{name.replace('_', '-')}", "9" * digits]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (name in line, len(line) < 400) == (True, True)
    assert not list(cwd.iterdir())


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ("optimizer.lr", "arrays"),
        ("data.root", "content"),
        ("max_steps", "length"),
        ("keep_last", "view"),
        ("prefetch", "speed"),
        ("monitor", "course"),
        ("seed", "numbers"),
        ("of a program", "numbers"),
    ],
)
def test_a_key_says_what_it_affects(key, effect):
    assert effect_of(key) == effect


def test_a_program_and_an_experiment_say_the_same_and_no_key_goes_without():
    experiment, library = effects_of(TrainConfig), effects_of(DistributedTrainingConfig)
    assert library == {name: experiment[name] for name in library}

    class Forgotten(TrainConfig):
        patience: int = 3

    with pytest.raises(KeyError, match="patience"):
        effects_of(Forgotten)


@pytest.mark.parametrize("key", TrainConfig.model_fields)
def test_the_effect_decides_what_is_compared_with_a_checkpoint_and_between_ranks(key):
    then, now = {key: "then"}, {key: "now"}
    silent = effect_of(key) in NO_NUMBERS | {"length"}
    assert bool(changed_keys(then, now)) is not silent
    assert (key in equal_on_ranks(now)) is (effect_of(key) not in PER_RANK)


def is_known(option) -> bool:
    try:
        parse_overrides([f"--{option}"], TrainConfig)
    except ConfigError as err:  # most take a value
        return "unknown option" not in str(err)
    return True


def test_the_help_shows_every_key_once_and_every_option_shown_is_known(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = help_page(COMMAND, TrainConfig())
    shown = re.findall(r"^  (?:-h, )?--([\w.-]+)", page, re.MULTILINE)
    keys = [name.removesuffix(".KEY").replace("-", "_") for name in shown]
    assert sorted(keys) == sorted([*dict(fields(TrainConfig)), "config", "print_config", "help"])
    options = re.findall(r"--([\w.-]*\w)", page.split("\n\n", 3)[3])
    assert [option for option in options if not is_known(option)] == []
    lines = [line for line in page.splitlines() if not line.startswith("  --") and ":" not in line[:12]]
    assert max(map(len, lines)) <= 80


def test_each_key_has_its_form_its_sentence_and_the_default_of_the_values():
    values = TrainConfig(max_time="1h", sinks=("csv", "jsonl"))
    found = {key.key: key for _, _, keys in sections(values) for key in keys}
    assert (found["max_time"].default, found["sinks"].default) == ("3600.0", "csv jsonl")
    assert found["epochs"].default == "10"
    assert schema()["properties"]["epochs"]["description"] == found["epochs"].text == "Passes over the data."
    assert [key for key, one in found.items() if not one.text.endswith(".")] == []
    assert f"({', '.join(STRATEGIES)})" in found["comm"].text.replace("\n", " ")
    assert {
        "--epochs INT",
        "--max-time FLOAT|none",
        "--shuffle, --no-shuffle",
        "--optimizer.nesterov, --optimizer.no-nesterov",
        "--optimizer.betas FLOAT FLOAT",
        "--on-desync abort|warn|heal",
        "--sinks TEXT ...",
        "--callbacks NAME ...",
        "--model.options.KEY VALUE",
    } <= {key.option for key in found.values()}


@pytest.fixture(scope="module")
def in_the_editor():
    """The validator that the printed schema asks for."""
    validators = pytest.importorskip("jsonschema.validators", reason="pip install jsonschema")
    page = io.StringIO()
    with redirect_stdout(page):
        assert main.main(["config", "--schema"]) == 0
    schema = json.loads(page.getvalue())
    validator = validators.validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


@pytest.mark.parametrize(
    ("values", "is_valid"),
    [
        *((yaml.safe_load(path.read_text()), True) for path in CONFIGS),
        ({"metrics": ["f1"], "trainable": "head/*", "max_time": "1h30m", "init_from": "a.bin"}, True),
        ({"base": "a.yaml", "epochs": "${env:E:3}", "optimizer": {"lr": "${env:LR}"}}, True),
        ({}, True),
        ({"epoch": 3}, False),
        ({"epochs": 0}, False),
        ({"model": {"names": "mlp"}}, False),
        ({"epochs": "$E"}, False),
    ],
)
def test_editors_accept_every_experiment_and_mark_a_wrong_key(values, is_valid, in_the_editor):
    assert in_the_editor.is_valid(values) == is_valid
