"""Networks by name: `get_model("vae")(config)` builds one and checks every option. `Config` holds nested
settings from a YAML file, read with dots or brackets: `config.model.latent_size`.

Importing this file imports neither jax nor flax; a network's own file is imported on first use.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError

from cyxjax.errors import ConfigError, nearest
from cyxjax.files import read_plain, readable, scientific
from cyxjax.plugins import named

Count = Annotated[int, Field(gt=0)]  # number of classes, layers, units
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]  # probability of dropping a number; 1 would drop everything
Positive = Annotated[float, Field(gt=0.0)]
Activation = Literal["relu", "gelu", "tanh", "silu"]

Factory = TypeVar("Factory", bound=Callable[..., Any])

_SHIPPED = {  # name -> the file that registers it
    "mlp": "cyxjax.models.networks",
    "cnn": "cyxjax.models.networks",
    "resnet18": "cyxjax.models.resnet",
    "resnet50": "cyxjax.models.resnet",
    "vae": "cyxjax.models.networks",
    "gpt": "cyxjax.models.gpt",
}
_builders: dict[str, "Builder"] = {}
_FLAX_FIELDS = ("parent", "name")  # every linen module has both; they are not options


class MissingSettingError(ConfigError, AttributeError, KeyError):
    """A missing setting: an AttributeError for dots, a KeyError for brackets, and a ConfigError."""

    __str__ = Exception.__str__  # KeyError's own puts the message in quotes and escapes newlines


class Config(Mapping[str, Any]):
    """A read-only mapping whose nested mappings are Configs too.

    A key that is also a method of Mapping (`items`, `keys`, `values`, `get`) can be read with brackets only.
    Every error names `source`, so that you can find a typing mistake in the right file.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, *, source: str = "Config(...)") -> None:
        """Wraps a copy of `values`."""
        self._settings: dict[str, Any] = scientific({**(values or {})})  # a TypeError if not a mapping
        self._source = source  # where the settings came from, for messages

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> "Config":
        """The settings in a YAML file (safe loader: no Python objects); an empty file gives no settings.

        Raises: ConfigError if the file is missing, unreadable, not YAML, or not a mapping at its top.
        """
        hint = f"expected `name: value` lines; check path and line (relative paths start at {Path.cwd()})"
        with readable(path, ConfigError, hint):
            return cls(yaml.safe_load(read_plain(path, 1 << 20).decode("utf-8")), source=str(path))

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain nested dicts and lists; changing them does not change the Config."""
        return scientific(self._settings)

    def __getitem__(self, key: str) -> Any:
        if key not in self._settings:
            raise MissingSettingError(
                f"No setting {key!r} in {self._source}. HINT: {nearest(str(key), self._settings)}"
            )
        return _as_read(self._settings[key], f"{self._source}: {key}")

    def __getattr__(self, name: str) -> Any:
        # Copying, pickling and notebooks look up private names, some before _settings exists.
        return self[name] if not name.startswith("_") else object.__getattribute__(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def __repr__(self) -> str:
        return f"Config({self.to_dict()!r})"


@dataclass(frozen=True)
class Builder:
    """Builds the network `name` from options: a Config, a mapping, keywords, or a mix (keywords win)."""

    name: str
    factory: Callable[..., Any]

    def __call__(self, config: Mapping[str, Any] | None = None, /, **options: Any) -> Any:
        """Builds the module from checked options.

        Options are read from the config's section `model` if it has one, and from `options` in it; a `name`
        must be this model's.
        Raises: ConfigError naming the option, its value and what was expected.
        """
        return self.factory(**self.checked(config, **options))

    def architecture(self, config: Mapping[str, Any] | None = None, /, **options: Any) -> dict[str, Any]:
        """The name and options as JSON values, for `save_model`.

        `build_model` builds from them; a `module:attribute` must then be registered under that name.
        """
        return {"type": "registry", "name": self.name, "options": self.checked(config, **options)}

    def checked(self, config: Mapping[str, Any] | None = None, /, **options: Any) -> dict[str, Any]:
        """The given options, each converted to its type; raises ConfigError as calling the builder does."""
        settings, source = _settings_of(self.name, config)
        settings |= options
        known = self.options()
        takes_any = any(value.kind is value.VAR_KEYWORD for value in _parameters(self.factory).values())
        unknown = [] if takes_any else [option for option in settings if option not in known]
        missing = [o for o, value in known.items() if value.default is value.empty and o not in settings]
        for option in (*unknown, *missing):
            what, hint = ("needs the", "add it.") if option in known else ("has no", nearest(option, known))
            raise ConfigError(
                f"Model {self.name!r} {what} option {option!r}{source}. HINT: {hint}",
                key=f"options.{option}",
            )
        return {key: self._checked(key, value, known.get(key), source) for key, value in settings.items()}

    def options(self) -> dict[str, inspect.Parameter]:
        """The options that can be set: name -> type (`.annotation`) and default (`.default`)."""
        parameters = _parameters(self.factory)
        flax = _FLAX_FIELDS if "parent" in parameters else ()
        return {
            key: value
            for key, value in parameters.items()
            if key not in flax and value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD)
        }

    def _checked(self, option: str, value: Any, known: inspect.Parameter | None, source: str) -> Any:
        adapter = None if known is None else _adapter(known.annotation)
        if adapter is None:
            return value
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            raise ConfigError(
                f"Option {option!r} of model {self.name!r} is {value!r}{source}: {_reason(error)}. "
                f"HINT: `get_model({self.name!r}).options()` lists the types and defaults.",
                key=f"options.{option}",
            ) from error


def register(name: str) -> Callable[[Factory], Factory]:
    """A decorator that registers a module class, or a function returning a module, as `name`.

    Its parameters become the model's options, checked against their annotations. Registering a name again
    replaces the earlier model. Raises: ConfigError for the name of a shipped network.
    """

    def decorate(factory: Factory) -> Factory:
        if factory.__module__ != _SHIPPED.get(name, factory.__module__):
            raise ConfigError(f"A model named {name!r} comes with cyxjax. HINT: choose another name.")
        _builders[name] = Builder(name, factory)
        return factory

    return decorate


def get_model(name: str) -> Builder:
    """The builder of the network `name`; raises ConfigError with the nearest name if there is none."""
    if name not in _builders and name in _SHIPPED:
        import_module(_SHIPPED[name])
    found = named("model", name, dict.fromkeys(model_names()) | _builders)
    return found if isinstance(found, Builder) else Builder(name, _as_factory(name, found))


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of `factory` by name."""
    # The metaclass of nnx modules accepts any argument and passes it on to __init__.
    call = factory.__init__ if hasattr(factory, "iter_modules") else factory
    try:
        parameters = inspect.signature(call, eval_str=True).parameters
    except NameError:  # annotations that only a type checker can read
        parameters = inspect.signature(call).parameters
    return {name: value for name, value in parameters.items() if call is factory or name != "self"}


def _as_factory(name: str, found: Any) -> Callable[..., Any]:
    """A class or function unchanged; for a module object, a function that returns it."""
    made = not isinstance(found, type) and not inspect.isroutine(found)
    if made and (hasattr(found, "apply") or hasattr(found, "iter_modules") or isinstance(found, tuple)):
        return lambda: found
    return found


def model_names() -> list[str]:
    """All names that `get_model` accepts, sorted: the shipped networks and those the program registered."""
    return sorted({*_SHIPPED, *_builders})


def _settings_of(name: str, config: Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    """(the options for model `name` in `config`, where they are from, for messages)."""
    places = [config._source] if isinstance(config, Config) else []
    settings = config.to_dict() if isinstance(config, Config) else dict(config or {})
    section = settings.get("model")
    if isinstance(section, Mapping):
        settings, places = dict(section), [*places, "model"]
    typed = settings.pop("type", name) if isinstance(settings.get("type"), str) else name
    wanted = settings.pop("name", typed)
    if isinstance(settings.get("options"), Mapping):  # the layout of a training file: name, then options
        settings |= settings.pop("options")
    source = f" (from {': '.join(places)})" if places else ""
    if wanted != name:
        raise ConfigError(
            f"The configuration is for model {wanted!r}{source}, but {name!r} is being built. "
            f"HINT: call get_model({wanted!r}), or correct the name."
        )
    return settings, source


def _adapter(expected: Any) -> TypeAdapter | None:
    """Checks and converts values of a type; None for a missing annotation and types that no file can hold."""
    if expected is inspect.Parameter.empty or isinstance(expected, str) or is_dataclass(expected):
        return None
    try:
        return TypeAdapter(expected, config={"arbitrary_types_allowed": True})
    except PydanticUserError:
        return None


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    where = "".join(f"[{place!r}]" for place in first["loc"])
    return f"{where + ': ' if where else ''}{first['msg'][:1].lower()}{first['msg'][1:]}"


def _as_read(value: Any, source: str) -> Any:
    """A setting as a Config gives it: a mapping, also in lists, as a Config."""
    if isinstance(value, list):
        return [_as_read(item, source) for item in value]
    return Config(value, source=source) if isinstance(value, dict) else value
