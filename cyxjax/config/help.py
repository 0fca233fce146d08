"""The help page of a command that takes an experiment: the type, default and description of every key."""

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
    """A command whose arguments are `--config FILE` and overrides."""

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
        *_entry(
            "--config FILE",
            "The experiment file, or several; later files win, and the command line wins over all.",
            width,
        ),
        *_entry("--print-config", "Print the resolved configuration and exit.", width),
        *_entry("-h, --help", "Print this page and exit; after --config FILE with the file's values.", width),
    ]
    return "\n".join([*lines, *_options(values, width)]) + "\n"


@dataclass(frozen=True)
class Key:
    """A key of the configuration, as help pages describe it."""

    key: str  # dotted: optimizer.lr
    annotation: Any  # its type
    default: str  # as it would be typed; "" for a key that must be given
    text: str  # its description

    @property
    def kind(self) -> str:
        """The kind of its value: `INT`, `true|false`, `none|FLOAT`; for options `KEY VALUE`."""
        return "KEY VALUE" if get_origin(_bare(self.annotation)) is dict else _kind(self.annotation)

    @property
    def option(self) -> str:
        """How it is written: `--epochs INT`, `--shuffle, --no-shuffle`, `--model.options.KEY VALUE`."""
        name = f"--{self.key.replace('_', '-')}"
        if self.annotation is bool:
            *path, last = name.removeprefix("--").split(".")
            return f"{name}, --{'.'.join([*path, f'no-{last}'])}"
        return f"{name}{'.' if self.kind == 'KEY VALUE' else ' '}{self.kind}"


def sections(values: BaseModel, name: str = "") -> Iterator[tuple[str, str, list[Key]]]:
    """(dotted name, sentence, plain keys) of a section with `values`, then of each section in it."""
    fields = type(values).model_fields
    plain = {key: field for key, field in fields.items() if section_of(field.annotation) is None}
    prefix = f"{name}." if name else ""
    yield (
        name,
        type(values).__doc__ or "",
        [
            Key(
                prefix + key,
                field.annotation,
                "" if field.is_required() else _shown(getattr(values, key)),
                field.description or "",
            )
            for key, field in plain.items()
        ],
    )
    for key in fields:
        if key not in plain:
            yield from sections(getattr(values, key), prefix + key)


def _options(values: BaseModel, width: int) -> Iterator[str]:
    """The plain keys of a section first, then the sections in it, each under its name."""
    for name, sentence, keys in sections(values):
        yield ""
        if name:
            yield f"{name}: {sentence}"
        for key in keys:
            default = f" (default: {key.default})" if key.default else ""
            yield from _entry(key.option, f"{key.text}{default}", width)


def _kind(annotation: Any) -> str:
    annotation = _bare(annotation)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin in (Union, UnionType):
        return "|".join(map(_kind, parts))
    if origin in (tuple, list):
        return f"{_kind(parts[0])} ..." if parts[-1] is Ellipsis else " ".join(map(_kind, parts))
    return _KINDS.get(annotation, "NAME")


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
