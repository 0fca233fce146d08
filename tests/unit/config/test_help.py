"""The help page and the parser know the same options."""

import re

from cyxjax.config.command_line import parse_overrides
from cyxjax.config.errors import section_of
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.help import Command, help_page
from cyxjax.errors import ConfigError

COMMAND = Command("cyxjax x", "Does x.", "cyxjax x --config a.yaml")


def keys_of(model, prefix=""):
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        yield from [f"{prefix}{name}"] if section is None else keys_of(section, f"{prefix}{name}.")


def unknown(name):
    try:
        parse_overrides([f"--{name}", "1"], TrainConfig)
    except ConfigError as err:  # a flag takes no value, a section of open keys needs one named
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
        "--epochs INT Passes over the data. (default: 10)",
        "--max-time FLOAT|none Stop and save after so many seconds (or 90s, 30m, 1h30m). (default: 3600.0)",
        "--shuffle, --no-shuffle A new order",
        "--optimizer.nesterov, --optimizer.no-nesterov Look",
        "--optimizer.betas FLOAT FLOAT Decay of the two moments",
        "--on-desync abort|warn|heal What",
        "--sinks TEXT ... Where metrics go besides the screen: jsonl, csv, tensorboard, wandb, mlflow, or "
        "module:attribute. (default: csv jsonl)",
        "--callbacks NAME ... EMA,",
        "--model.options.KEY VALUE What that network takes",
        "optimizer: How gradients move parameters.",
    ):
        assert form in page


def test_no_line_is_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_page(COMMAND, TrainConfig()).splitlines()
    assert max(len(line) for line in lines if not line.startswith("  --") and ":" not in line[:12]) <= 80
