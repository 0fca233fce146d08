"""Command-line words as plain values: `--optimizer.lr 0.1 --no-shuffle --model.options.hidden [64,32]`."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from cyxjax.config.errors import field_at, section_of, where_it_belongs
from cyxjax.config.values import accepts_bool
from cyxjax.config.yaml_file import parse
from cyxjax.errors import ConfigError


@dataclass
class Overrides:
    """What a command line asked for."""

    config_files: list[str] = field(default_factory=list)
    help: bool = False
    print_config: bool = False
    values: dict[str, Any] = field(default_factory=dict)  # nested, as a YAML file would hold them


def names(given: Collection[str], key: str) -> bool:
    """Whether the dotted `key`, something above it or something below it is among the keys `given`."""
    return any(key == k or key.startswith(f"{k}.") or k.startswith(f"{key}.") for k in given)


def parse_overrides(argv: Sequence[str], model: type[BaseModel]) -> Overrides:
    """Reads `argv` against the fields of `model`; types and bounds are checked later.

    Raises: ConfigError for an unknown option, a missing value or a stray word.
    """
    found = Overrides()
    for name, words in _options(argv):
        if name in ("help", "h"):
            found.help = True
        elif name in ("print-config", "print_config"):
            found.print_config = True
        elif name == "config":
            found.config_files.append(_one(name, words))
        else:
            _add(found.values, name, words, model)
    return found


def _options(argv: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """(name, the words that follow it) for each option."""
    options: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") or word == "-h":
            name, equals, value = word.lstrip("-").partition("=")
            options.append((name, [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise ConfigError(
                f"command line: {word!r} comes before any option. HINT: give a file as --config {word}."
            )
    return options


def _add(place: dict[str, Any], name: str, words: list[str], model: type[BaseModel]) -> None:
    keys, negated = _resolve(_keys(name, model), words, model)
    if keys == ["init_from"]:  # a path alone is a section with that path
        keys = ["init_from", "path"]
    *path, last = keys
    for part in path:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ConfigError(f"command line: --{part} is a section. HINT: set its keys: --{name} VALUE.")
    place[last] = False if negated else _value(".".join(keys), words, field_at(model, keys))


def _keys(name: str, model: type[BaseModel]) -> list[str]:
    """The keys from the top to the one that `name` means, with underscores.

    The key of a dict of texts (`init_from.map`) is one name, whatever is in it.
    """
    keys: list[str] = []
    parts = name.split(".")
    for number, part in enumerate(parts):
        above = field_at(model, keys)
        if get_origin(above) is dict and get_args(above)[1] is not Any:
            return [*keys, ".".join(parts[number:])]
        keys.append(part.replace("-", "_"))
    return keys


def _resolve(keys: list[str], words: Sequence[str], model: type[BaseModel]) -> tuple[list[str], bool]:
    """(keys, whether the last was written as --no-key)."""
    *path, last = keys
    kind = field_at(model, keys)
    positive = [*path, last.removeprefix("no_")]
    is_negated = kind is None and not words and last.startswith("no_")
    if is_negated and _is_flag(field_at(model, positive)):
        return positive, True
    if kind is None:
        name, near = _dashed(".".join(keys)), _dashed(where_it_belongs(last, model, path))
        raise ConfigError(f"command line: unknown option --{name}. {near} HINT: --help lists all options.")
    return keys, False


def _is_flag(kind: Any) -> bool:
    return kind is not Any and accepts_bool(kind)


def _value(key: str, words: list[str], kind: Any) -> Any:
    """The words of one option as a value: a flag alone is true, `none` is None where that is allowed."""
    if _is_flag(kind) and not words:
        return True
    where = f"command line: --{_dashed(key)}"
    if get_origin(kind) in (tuple, list) and not (len(words) == 1 and words[0].startswith("[")):
        return [from_text(word, get_args(kind)[0], where) for word in words]
    return from_text(_one(key, words), kind, where)


def from_text(text: str, kind: Any, where: str) -> Any:
    """`text` as a value of a field of type `kind`: None for `none`, YAML where a field takes several values.

    A field that takes `{name: x, options: ...}` also takes it as YAML.

    Raises: ConfigError, naming `where`, for text that is not YAML.
    """
    is_open = kind is Any or get_origin(kind) in (dict, tuple, list)
    is_named = section_of(kind) is not None or any(get_origin(one) is dict for one in get_args(kind))
    if is_open or (is_named and text.startswith("{")):
        try:
            return parse(text)
        except (yaml.YAMLError, ValueError, RecursionError) as err:
            raise ConfigError(
                f"{where} {text!r} is not YAML: {getattr(err, 'problem', None) or err}. "
                "HINT: quote it, as in '[64, 32]', and a text twice: '\"010\"'."
            ) from None
    may_be_none = section_of(kind) is not None or type(None) in get_args(kind)
    if may_be_none and text.lower() in ("none", "null", "~"):
        return None
    return text


def _one(key: str, words: list[str]) -> str:
    if len(words) != 1 or not words[0]:
        got = f"got {' '.join(words)!r}" if words and words[0] else "got none"
        raise ConfigError(
            f"command line: --{_dashed(key)} takes one value, {got}. HINT: --help shows its form."
        )
    return words[0]


def _dashed(name: str) -> str:
    return name.replace("_", "-")
