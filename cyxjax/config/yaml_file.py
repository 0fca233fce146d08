"""Reads YAML files: a mapping, without what YAML would take for something else than it shows."""

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from cyxjax.errors import ConfigError, nearest
from cyxjax.files import read_plain, readable

_MOST_LEVELS = 100
_MAX_BYTES = 1 << 20  # an experiment file is a page; more is a mistake (a data file, a model)


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping that a YAML file holds; {} for an empty file.

    Raises: ConfigError for a file that is missing, unreadable, not YAML, not a mapping, or repeats a key.
    """
    text = _read_text(path)
    try:
        values = _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError) as err:  # ValueError: a date that is none
        raise ConfigError(_yaml_problem(path, err)) from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds a {type(values).__name__}, expected lines such as `epochs: 10`. "
            "HINT: see configs/digits.yaml."
        )
    return values or {}


def _read_text(path: str) -> str:
    file = Path(path)
    if not file.exists():
        folder = file.parent if file.parent.is_dir() else Path(".")
        near = nearest(file.name, [p.name for p in folder.glob("*.y*ml")] or ["no YAML file there"])
        raise ConfigError(f"{path}: no such file. {near} HINT: give --config the path of an experiment file.")
    with readable(path, ConfigError, "give --config a YAML file"):
        return read_plain(file, _MAX_BYTES).decode("utf-8")


def _yaml_problem(path: str, err: Exception) -> str:
    mark = getattr(err, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark is not None else path
    problem = getattr(err, "problem", None) or err
    return f"{where}: YAML: {problem}. HINT: indent with spaces, one `name: value` a line."


class _Loader(yaml.SafeLoader):
    """Without aliases, and keys that are repeated or are no strings."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise ComposerError(None, None, "an alias (*name); write the value out there", mark)
        self._depth += 1
        if self._depth > _MOST_LEVELS:  # the values are walked by recursion later, here and in pydantic
            raise ComposerError(None, None, f"more than {_MOST_LEVELS} levels; an experiment needs three")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            is_text = isinstance(key, yaml.ScalarNode) and key.tag == "tag:yaml.org,2002:str"
            if not is_text or key.value in seen:
                problem = (
                    f"{key.value!r} is given twice" if is_text else "a key that is not a string; quote it"
                )
                raise ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Refuses a whole number that YAML 1.1 does not read as the digits say: 010 is 8."""
        found = super().construct_yaml_int(node)
        if re.match(r"[-+]?0[0-9_]", node.value) or ":" in node.value:
            problem = f"{node.value} would be {found}; write it without a leading zero or colon, or quote it"
            raise ConstructorError(None, None, problem, node.start_mark)
        return found


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
