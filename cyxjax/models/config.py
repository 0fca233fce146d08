"""Nested settings from a YAML file, read with dots or brackets: `config.model.latent_size`."""

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from cyxjax.errors import ConfigError, nearest
from cyxjax.files import read_plain, readable, scientific

Count = Annotated[int, Field(gt=0)]  # number of classes, layers, units
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]  # probability of dropping; 1 would drop everything
Positive = Annotated[float, Field(gt=0.0)]
Activation = Literal["relu", "gelu", "tanh", "silu"]


class MissingSettingError(ConfigError, AttributeError, KeyError):
    """A setting that is not there: AttributeError for dots, KeyError for brackets, ConfigError for us."""

    __str__ = Exception.__str__  # KeyError's own would print the message in quotes, newlines escaped


class Config(Mapping[str, Any]):
    """A read-only mapping whose nested mappings are Configs too.

    A key that is also a method of Mapping (`items`, `keys`, `values`, `get`) is reached with brackets only.
    Every error names `source`, so that a typing mistake is found in the right file.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, *, source: str = "Config(...)") -> None:
        """Wraps a copy of `values`."""
        self._settings = {key: _wrap(value, f"{source}: {key}") for key, value in (values or {}).items()}
        self._source = source

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> "Config":
        """The settings in a YAML file (safe loader: no Python objects); an empty file gives no settings.

        Raises: ConfigError if the file is missing, unreadable, not YAML, or not a mapping at its top.
        """
        with readable(path, ConfigError, f"check path and line (relative paths start at {Path.cwd()})"):
            values = yaml.safe_load(read_plain(path, 1 << 20).decode("utf-8"))
        if values is not None and not isinstance(values, dict):
            raise ConfigError(
                f"{path} holds a {type(values).__name__} at its top, expected `name: value` lines. "
                "HINT: give each value a name."
            )
        return cls(values, source=str(path))

    @property
    def source(self) -> str:
        """Where the settings came from, for messages."""
        return self._source

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain nested dicts and lists; changing them does not change the Config."""
        return {key: _unwrap(value) for key, value in self._settings.items()}

    def __getitem__(self, key: str) -> Any:
        try:
            return self._settings[key]
        except KeyError:
            raise MissingSettingError(
                f"No setting {key!r} in {self._source}. HINT: {nearest(str(key), self._settings)}"
            ) from None

    def __getattr__(self, name: str) -> Any:
        # Python itself asks for private names (copying, pickling, notebooks), before _settings exists.
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def __repr__(self) -> str:
        return f"Config({self.to_dict()!r})"


def _wrap(value: Any, source: str) -> Any:
    if isinstance(value, Mapping):
        return Config(value, source=source)
    if isinstance(value, list):
        return [_wrap(item, source) for item in value]
    return scientific(value)


def _unwrap(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, list):
        return [_unwrap(item) for item in value]
    return value
