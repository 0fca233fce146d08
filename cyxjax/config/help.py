"""The help page of a command that takes an experiment: every key, its kind, its default, a sentence."""

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from cyxjax.config.errors import section_of

_KINDS = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false", NoneType: "none", Any: "VALUE"}
_INDENT = 30  # columns of an option's name and kind, before its sentence


@dataclass(frozen=True)
class Command:
    """A command whose words are `--config FILE` and overrides."""

    prog: str
    text: str  # what it does
    example: str  # one line that works in a clone of the repository


def help_page(command: Command, values: BaseModel) -> str:
    """The page of `command`; defaults are those of `values` (a file's, if one was given)."""
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 110))
    lines = [
        f"usage: {command.prog} [--config FILE] [--KEY VALUE ...]",
        "",
        *textwrap.wrap(command.text, width),
        "",
        f"  {command.example}",
        "",
        *_entry("--config FILE", "The experiment file; keys after it on the command line win.", width),
        *_entry("--print-config", "Show the resolved configuration and stop.", width),
        *_entry("-h, --help", "Show this page and stop; after --config FILE with the file's values.", width),
    ]
    return "\n".join([*lines, *_options(values, "", width)]) + "\n"


def _options(values: BaseModel, prefix: str, width: int) -> Iterator[str]:
    """The plain keys of a section first, then the sections in it, each under its name."""
    fields = type(values).model_fields
    plain = {name: field for name, field in fields.items() if section_of(field.annotation) is None}
    yield ""
    if prefix:
        yield f"{prefix.removesuffix('.')}: {type(values).__doc__}"
    for name, field in plain.items():
        default = "" if field.is_required() else f" (default: {_shown(getattr(values, name))})"
        yield from _entry(_form(prefix + name, field.annotation), f"{field.description}{default}", width)
    for name in fields:
        if name not in plain:
            yield from _options(getattr(values, name), f"{prefix}{name}.", width)


def _form(key: str, annotation: Any) -> str:
    """How the option is written: `--epochs INT`, `--no-shuffle`, `--model.options.KEY VALUE`."""
    name = f"--{key.replace('_', '-')}"
    if annotation is bool:
        *path, last = name.removeprefix("--").split(".")
        return f"{name}, --{'.'.join([*path, f'no-{last}'])}"
    return f"{name}.KEY VALUE" if get_origin(_bare(annotation)) is dict else f"{name} {_kind(annotation)}"


def _kind(annotation: Any) -> str:
    annotation = _bare(annotation)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin in (Union, UnionType):
        return "|".join(map(_kind, parts))
    if origin in (tuple, list):
        return f"{_kind(parts[0])} ..." if parts[-1] is Ellipsis else " ".join(map(_kind, parts))
    return "NAME" if origin is dict else _KINDS[annotation]


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "[]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _entry(form: str, text: str, width: int) -> list[str]:
    """`form` in a column of its own, `text` wrapped beside it, or below if the form is long."""
    lines = textwrap.wrap(" ".join(text.split()), width - _INDENT)
    head = f"  {form}"
    if len(head) > _INDENT - 2:
        return [head, *(" " * _INDENT + line for line in lines)]
    return [head.ljust(_INDENT) + lines[0], *(" " * _INDENT + line for line in lines[1:])]
