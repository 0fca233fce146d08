"""Kinds of values of configuration fields, and the base class of sections (no jax here)."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from cyxjax.config.errors import explain, section_of
from cyxjax.errors import ConfigError
from cyxjax.files import scientific
from cyxjax.plugins import is_known, known_or

_SHELL = re.compile(r"\$\{|^\$\w+(/|$)|^~(/|$)")
_NAMED = {"name", "options"}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_UNITS = {"d": 86400, "h": 3600, "m(?:in)?": 60, "s": 1, "ms": 1e-3, "us": 1e-6}
_SPAN = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in _UNITS))


def seconds(value: Any) -> Any:
    """Seconds from a number or a text such as "90s", "30m", "1h30m", "2d", "5us"; anything else unchanged.

    Raises: ValueError for a text that is neither.
    """
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        found = _SPAN.fullmatch(value.strip())
    if not value.strip() or found is None:
        raise ValueError("expected seconds or a text such as 90s, 30m, 1h30m")
    return sum(float(n) * unit for n, unit in zip(found.groups(), _UNITS.values(), strict=True) if n)


Options = Annotated[dict[str, Any], BeforeValidator(scientific)]
# More than any run needs, and too small to overflow in conversions: steps are counted in int32.
Count = Annotated[int, Field(le=10**9)]
Amount = Annotated[float, Field(le=1e12)]
Seconds = Annotated[Amount, BeforeValidator(seconds, json_schema_input_type=float | str)]


def _named(value: Any) -> Any:
    """A name, or {name, options}, as {name, options}. Raises: ValueError for anything else."""
    one = {"name": value} if isinstance(value, str) else value
    options = isinstance(one, dict) and (one.get("options") or {})
    if not isinstance(options, dict) or not isinstance(one.get("name"), str) or one.keys() - _NAMED:
        raise ValueError("expected a name, or `{name: ..., options: {...}}`")
    return {"name": one["name"], "options": scientific(options)}


def _name_or_named(value: Any) -> Any:
    """A name unchanged; {name, options} as from `_named`, or only the name if there are no options."""
    found = value if isinstance(value, str) else _named(value)
    return found["name"] if isinstance(found, dict) and not found["options"] else found


Named = Annotated[dict[str, Any], BeforeValidator(_named, json_schema_input_type=str | dict[str, Any])]
NameOrNamed = Annotated[str | dict[str, Any], BeforeValidator(_name_or_named)]


def one_of(kind: str, names: Iterable[str]) -> AfterValidator:
    """A check that a text is one of `names`, or names a `kind` of your own or of an installed package."""
    known = dict.fromkeys(names)

    def check(name: str) -> str:
        if not is_known(kind, name, known):
            raise ValueError(f"no {kind} has this name. {known_or(kind, name, known)}")
        return name

    return AfterValidator(check)


def _on_this_machine(path: str | None) -> str | None:
    """Returns `path`. Raises: ValueError for a URL, which would be taken for a local folder, and for an
    empty text, which would be taken for the current folder.
    """
    if path is not None and (not path.strip() or _SCHEME.match(path)):
        raise ValueError(
            "expected a path on this machine; a URL is neither read nor written here (mount it or "
            "copy it; `mirror` is the URL that a run folder is copied to)"
        )
    return path


T = TypeVar("T")
Here = Annotated[T, AfterValidator(_on_this_machine)]
"""A path on this machine. One that may be missing is `Here[str | None]`: `Here[str] | None` would have a text
"none" mean that it is missing."""


def accepts_bool(annotation: Any) -> bool:
    """Whether a field of this type may hold true/false."""
    if get_origin(annotation) is not None:
        return any(accepts_bool(part) for part in get_args(annotation))
    return annotation in (bool, Any)


def _refuse_shell(value: Any) -> None:
    """Raises: ValueError for what only a shell expands, at any depth: it would be taken literally."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _refuse_shell(part)
    elif isinstance(value, str) and _SHELL.search(value):
        raise ValueError(
            "only a shell expands `~` and variables; write the full path, or ${env:NAME} or "
            "${env:NAME:default} in a file, or give the value on the command line"
        )


class Strict(BaseModel):
    """A section: unknown keys, infinities and true/false for a number are errors, also on assignment."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,  # the text below a field is its description, in help and schema
        defer_build=True,  # most sections are built as part of another one
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        if value == "none" and type(None) in (kinds := get_args(field.annotation)) and str not in kinds:
            return None  # as on the command line, and as the tables of keys show it
        if isinstance(value, bool) and not accepts_bool(field.annotation):
            raise ValueError("expected a value that is not true/false")
        if section_of(field.annotation) is None:
            _refuse_shell(value)  # a section checks its own values
        return value

    if not TYPE_CHECKING:  # a type checker then knows which fields there are

        def __setattr__(self, name: str, value: Any) -> None:
            before, given = dict(self.__dict__), set(self.__pydantic_fields_set__)
            try:
                super().__setattr__(name, value)
            except ValidationError as err:
                # pydantic stores the value before a check over several fields refuses it
                object.__setattr__(self, "__dict__", before)
                object.__setattr__(self, "__pydantic_fields_set__", given)
                raise ConfigError(explain(err, type(self), type(self).__name__, name)) from None
