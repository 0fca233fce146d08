"""Reads YAML files that hold a mapping; refuses what YAML would read differently from what it looks like."""

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from cyxjax.errors import ConfigError, nearest
from cyxjax.files import read_plain, readable

_TEXT = "tag:yaml.org,2002:str"
_MAX_BYTES = 1 << 20  # an experiment file is a page; a larger file is a mistake (data, a model)


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping that a YAML file holds; {} for an empty file.

    Raises: ConfigError for a file that is missing, unreadable, not YAML, not a mapping, or repeats a key.
    """
    file = Path(path)
    if not file.exists():
        near = nearest(file.name, [p.name for p in file.parent.glob("*.y*ml")])
        raise ConfigError(f"{path}: no such file. {near} HINT: give --config the path of an experiment file.")
    with readable(path, ConfigError, "indent with spaces, one `name: value` per line"):
        # as a stream: for a text, errors of YAML would quote lines, which may hold a secret
        values = _Loader(BytesIO(read_plain(file, _MAX_BYTES))).get_single_data()
    if values is not None and not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds a {type(values).__name__}, expected lines such as `epochs: 10`. "
            "HINT: see configs/digits.yaml."
        )
    return values or {}


def parse(text: str) -> Any:
    """The value that `text` has in a file. Raises: yaml.YAMLError, ValueError, RecursionError.

    Text that is in no quotes or brackets is kept whole where a file would begin a comment (`price #2`).
    """
    if re.search(r"(^|\s)#", text) and not text.startswith(("[", "{", "'", '"')):
        return text
    return _Loader(text).get_single_data()


class _Loader(yaml.SafeLoader):
    """Refuses aliases, repeated keys, and keys that are not strings; a whole number is a key as its text."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise ComposerError(None, None, "an alias (*name); write out the value instead", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and re.fullmatch(r"0|[1-9]\d*", key.value):
                key.tag = _TEXT  # such as the steps of optax's piecewise_constant_schedule
            is_text = isinstance(key, yaml.ScalarNode) and key.tag == _TEXT
            if not is_text or key.value in seen:
                problem = (
                    f"{key.value!r} is given twice" if is_text else "a key that is not a string; quote it"
                )
                raise ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Refuses an integer that YAML 1.1 does not read as a decimal number: 010 is 8."""
        found = super().construct_yaml_int(node)
        if re.match(r"[-+]?0[0-9_]", node.value) or ":" in node.value:
            problem = f"{node.value} would be {found}; write it without a leading zero or colon, or quote it"
            raise ConstructorError(None, None, problem, node.start_mark)
        return found


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
