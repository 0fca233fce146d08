"""The help page and the parser know the same options."""

import re

from cyxjax.config.command_line import parse_overrides
from cyxjax.config.errors import section_of
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.help import Command, help_page, sections
from cyxjax.errors import ConfigError

COMMAND = Command("cyxjax x", "Does x.", "cyxjax x --config a.yaml")


def keys_of(model, prefix=""):
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        yield from [f"{prefix}{name}"] if section is None else keys_of(section, f"{prefix}{name}.")


def unknown(name):
    try:
        parse_overrides([f"--{name}"], TrainConfig)
    except ConfigError as err:  # most take a value
        return "unknown option" in str(err)
    return False


def test_every_key_is_shown_once_and_every_option_shown_is_known():
    page = help_page(COMMAND, TrainConfig())
    shown = re.findall(r"^  (?:-h, )?--([\w.-]+)", page, re.MULTILINE)
    keys = [name.removesuffix(".KEY").replace("-", "_") for name in shown]
    assert sorted(keys) == sorted([*keys_of(TrainConfig), "config", "print_config", "help"])
    refused = [name for name in re.findall(r"--([\w.-]*\w)", page.split("\n\n", 3)[3]) if unknown(name)]
    assert refused == []


def test_the_forms_of_all_kinds():
    page = " ".join(help_page(COMMAND, TrainConfig(max_time="1h", sinks=("csv", "jsonl"))).split())
    for form in (
        "--epochs INT ",
        "--max-time FLOAT|none ",
        "--shuffle, --no-shuffle ",
        "--optimizer.nesterov, --optimizer.no-nesterov ",
        "--optimizer.betas FLOAT FLOAT ",
        "--on-desync abort|warn|heal ",
        "--sinks TEXT ... ",
        "--callbacks NAME ... ",
        "--model.options.KEY VALUE ",
        " optimizer: ",
    ):
        assert form in page


def test_each_key_has_its_sentence_and_the_default_of_the_values():
    values = TrainConfig(max_time="1h", sinks=("csv", "jsonl"))
    found = {key.key: key for _, _, keys in sections(values) for key in keys}
    assert (found["max_time"].default, found["sinks"].default) == ("3600.0", "csv jsonl")
    assert (found["epochs"].default, found["model.options"].kind) == ("10", "KEY VALUE")
    assert [key for key, one in found.items() if not one.text.endswith(".")] == []


def test_no_line_is_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_page(COMMAND, TrainConfig()).splitlines()
    assert max(len(line) for line in lines if not line.startswith("  --") and ":" not in line[:12]) <= 80
