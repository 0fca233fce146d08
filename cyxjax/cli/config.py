"""`cyxjax config`: the resolved configuration of an experiment, or the JSON schema of its files."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from cyxjax.command import show
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.help import Command
from cyxjax.config.load import load_config
from cyxjax.launch.environment import here

_COMMAND = Command(
    "cyxjax config",
    "Shows the resolved configuration of an experiment, all defaults included, and the source of each "
    "value: a file or the command line. --json: as JSON. --schema: the JSON schema of the file, for editors.",
    "cyxjax config --config configs/digits.yaml --epochs 10",
)
_COMMENT = textwrap.TextWrapper(79, subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False)


def main(argv: Sequence[str]) -> int:
    """`cyxjax config --config FILE ... [--json]`: prints the resolved configuration; exit code 0.

    `cyxjax config --schema` prints the JSON schema of an experiment file instead.
    """
    if list(argv) == ["--schema"]:
        show(json.dumps(schema(), indent=1) + "\n")
        return 0
    words = [word for word in argv if word != "--json"]
    config = load_config(words, _COMMAND, here())
    if len(words) < len(argv):
        show(json.dumps(config.resolved(), indent=1) + "\n")
        return 0
    sources = [f"# from {line}" for line in vars(config)["_source"].lines(config.resolved())]
    lines = [_COMMENT.fill(line) for line in [*sources, "# all other keys: defaults"]]
    show(config.to_yaml() + "\n".join([*lines, ""]))
    return 0


def schema() -> dict[str, Any]:
    """The JSON schema of an experiment file: the keys, `base`, and `${env:NAME}` for the value of any key."""
    found = TrainConfig.model_json_schema()
    variable = {"type": "string", "pattern": r"\$\{env:"}
    for section in (found, *found["$defs"].values()):
        for key, kind in section.get("properties", {}).items():
            section["properties"][key] = {
                "anyOf": [kind, variable],
                "description": kind.get("description", ""),
            }
    found["properties"]["base"] = {
        "type": "string",
        "description": "A file whose values this file overrides.",
    }
    return found
