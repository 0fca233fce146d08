"""Networks by name: `get_model("vae")(config)` builds one and checks every option it is given.

Importing this file imports neither jax nor flax; a network's own file is imported on first use.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from typing import Any, TypeVar

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from cyxjax.errors import ConfigError, nearest
from cyxjax.models.config import Config
from cyxjax.plugins import named

__all__ = ["Builder", "Config", "get_model", "model_names", "register"]

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
_FLAX_FIELDS = ("parent", "name")  # every linen module has these; they are not options


@dataclass(frozen=True)
class Builder:
    """Builds the network `name` from options: a Config, a mapping, keywords, or a mix (keywords win)."""

    name: str
    factory: Callable[..., Any]

    def __call__(self, config: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """The flax module, its options checked.

        A config with a `model` section is read there, and one with `options` there; `name`, if any, must be
        this model's.
        Raises: ConfigError naming the option, its value and what was expected.
        """
        return self.factory(**self.checked(config, **options))

    def architecture(self, config: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """The same choice as JSON values, for `save_model`; `build_model` turns it back into the module."""
        return {"type": "registry", "name": self.name, "options": self.checked(config, **options)}

    def checked(self, config: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """The options given, each converted to its type; raises ConfigError as calling the builder does."""
        settings, source = _settings_of(self.name, config)
        settings |= options
        self._check_names(settings, source)
        return {key: self._checked(key, value, source) for key, value in settings.items()}

    def options(self) -> dict[str, inspect.Parameter]:
        """What may be set: name -> its type (`.annotation`) and default (`.default`)."""
        parameters = _parameters(self.factory)
        return {
            key: value
            for key, value in parameters.items()
            if key not in _FLAX_FIELDS and value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD)
        }

    def _check_names(self, settings: Mapping[str, Any], source: str) -> None:
        known = self.options()
        takes_any = any(value.kind is value.VAR_KEYWORD for value in _parameters(self.factory).values())
        for option, value in settings.items():
            if option not in known and not takes_any:
                raise ConfigError(
                    f"Model {self.name!r} has no option {option!r} (value {value!r}, from {source}). "
                    f"HINT: {nearest(option, known)}",
                    key=f"options.{option}",
                )
        for option, parameter in known.items():
            if parameter.default is parameter.empty and option not in settings:
                raise ConfigError(
                    f"Model {self.name!r} needs the option {option!r}, not given in {source}. HINT: add it.",
                    key=f"options.{option}",
                )

    def _checked(self, option: str, value: Any, source: str) -> Any:
        if option not in (known := self.options()):
            return value
        expected = known[option].annotation
        adapter = _adapter(expected)
        if adapter is None:
            return value
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            raise ConfigError(
                f"Option {option!r} of model {self.name!r} is {value!r} (from {source}): {_reason(error)}. "
                f"HINT: `get_model({self.name!r}).options()` has the types and defaults.",
                key=f"options.{option}",
            ) from error


def register(name: str) -> Callable[[Factory], Factory]:
    """A decorator that makes a module class, or a function returning a module, known as `name`.

    Its parameters become the model's options, checked against their annotations.
    Raises: ConfigError if the name is taken by another factory.
    """

    def decorate(factory: Factory) -> Factory:
        taken = _builders.get(name)
        shipped_elsewhere = name in _SHIPPED and factory.__module__ != _SHIPPED[name]
        # The same definition again is a reloaded module or a notebook cell run twice, not a clash.
        if shipped_elsewhere or (taken is not None and not same_definition(taken.factory, factory)):
            raise ConfigError(f"A model named {name!r} is registered already. HINT: choose another name.")
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
    """What `factory` takes, by name."""
    # The metaclass of nnx modules takes anything, and hands it on to __init__.
    call = factory.__init__ if hasattr(factory, "iter_modules") else factory
    try:
        parameters = inspect.signature(call, eval_str=True).parameters
    except NameError:  # annotations that only a type checker can read
        parameters = inspect.signature(call).parameters
    return {name: value for name, value in parameters.items() if call is factory or name != "self"}


def _as_factory(name: str, found: Any) -> Callable[..., Any]:
    """A class or function as it is; of a module that is made already, what gives it."""
    made = not isinstance(found, type) and not inspect.isroutine(found)
    if made and (hasattr(found, "apply") or hasattr(found, "iter_modules") or isinstance(found, tuple)):
        return lambda: found
    return found


def model_names() -> list[str]:
    """All names `get_model` takes, sorted: the shipped networks and what the program registered."""
    return sorted({*_SHIPPED, *_builders})


def _settings_of(name: str, config: Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    source = config.source if isinstance(config, Config) else "the call"
    settings = config.to_dict() if isinstance(config, Config) else dict(config or {})
    section = settings.get("model")
    if isinstance(section, Mapping):
        settings, source = dict(section), f"{source}: model"
    typed = settings.pop("type", name) if isinstance(settings.get("type"), str) else name
    wanted = settings.pop("name", typed)
    if isinstance(settings.get("options"), Mapping):  # the layout of a training file: name, then options
        settings |= settings.pop("options")
    if wanted != name:
        raise ConfigError(
            f"The configuration is for model {wanted!r} (from {source}), but {name!r} is being built. "
            f"HINT: call get_model({wanted!r}), or correct the name."
        )
    return settings, source


def _adapter(expected: Any) -> TypeAdapter | None:
    """What checks and converts values of a type; None for types no file can hold (none given, modules)."""
    if expected is inspect.Parameter.empty or isinstance(expected, str) or is_dataclass(expected):
        return None
    try:
        return TypeAdapter(expected, config={"arbitrary_types_allowed": True})
    except PydanticUserError:
        return None


def same_definition(a: Any, b: Any) -> bool:
    """Whether two classes or functions are one, perhaps run twice (a notebook cell)."""
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    where = "".join(f"[{place!r}]" for place in first["loc"])
    return f"{where + ': ' if where else ''}{first['msg'][:1].lower()}{first['msg'][1:]}"
