"""Objects by name: cyxjax's own, those that installed packages offer, and your own as `module:attribute`.

A package offers an object as an entry point of the group of its kind, for example in its pyproject.toml
    [project.entry-points."cyxjax.models"]
    tiny = "tiny_package.nets:Tiny"
"""

import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from cyxjax.errors import ConfigError, nearest

GROUPS = {
    "model": "cyxjax.models",
    "dataset": "cyxjax.datasets",
    "augmentation": "cyxjax.augmentations",
    "loss": "cyxjax.losses",
    "optimizer": "cyxjax.optimizers",
    "schedule": "cyxjax.schedules",
    "metric": "cyxjax.metrics",
    "callback": "cyxjax.callbacks",
    "sink": "cyxjax.sinks",
    "strategy": "cyxjax.strategies",
}
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_KINDS: dict[type, type] = {bool: bool, int: Integral, float: Real}  # of a default -> what may be given


def named(kind: str, name: str, ours: Mapping[str, Any], *, unknown: str = "", key: str = "name") -> Any:
    """The object of `kind` that `name` stands for; cyxjax's own come first, others are imported.

    unknown: the message for an unknown name. key: of the configuration, as in ConfigError.
    Raises: ConfigError for an unknown name, and for a module or attribute that cannot be imported.
    """
    if name in ours:
        return ours[name]
    path = name if ":" in name else _offered_once(kind, name)
    if path is None:
        raise ConfigError(
            f"{unknown or f'No {kind} named {name!r}.'} HINT: {known_or(kind, name, ours)}", key=key
        )
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # as under `python -m`
    try:
        return EntryPoint(name, path, GROUPS.get(kind, kind)).load()
    except (ImportError, AttributeError, ValueError) as err:  # what else a module raises is its own error
        problem = " ".join(str(err).split()) if EntryPoint.pattern.match(path) else "not a name"
        raise ConfigError(
            f"{kind} {path!r}: {problem}. HINT: write module:attribute, for a module in "
            f"{here} or an installed package; see python -c 'import {path.partition(':')[0]}'.",
            key=key,
        ) from err


def _offered_once(kind: str, name: str) -> str | None:
    """`module:attribute` of what an installed package offers as `name`. Raises: ConfigError where two do."""
    found = {one.value: one for one in entry_points(group=GROUPS[kind], name=name)}
    if len(found) > 1:
        both = " and ".join(sorted(str(one.dist and one.dist.name) for one in found.values()))
        raise ConfigError(f"{both} each offer a {kind} named {name!r}. HINT: uninstall one.")
    return next(iter(found), None)


def is_known(kind: str, name: str, ours: Mapping[str, Any]) -> bool:
    """Whether `named` would look for `name` rather than refuse it; imports nothing."""
    return name in ours or ":" in name or name in offered(kind)


def known_or(kind: str, name: str, ours: Mapping[str, Any]) -> str:
    """The known name nearest to `name`, or all of them and how to name your own."""
    near = nearest(name, [*ours, *offered(kind)])
    return near if near.startswith("Did you mean") else f"{near} Your own is named module:attribute."


def offered(kind: str) -> dict[str, str]:
    """name -> `module:attribute` of what installed packages offer."""
    return {point.name: point.value for point in entry_points(group=GROUPS[kind])}


def checked_options(
    what: str,
    function: Callable,
    options: Mapping[str, Any],
    key: str,
    *,
    hands_on: Callable | None = None,
    own: Collection[str] = (),
) -> dict[str, Any]:
    """`options`, each checked for the type of its default, else of its annotation; 1e3 is a whole number.

    Without the check rank=0.5, or "no" for False, would be accepted, or fail with the library's message.
    hands_on: the function to which `function` passes its **keywords. own: parameters that are no options.
    Raises: ConfigError whose key is below `key`.
    """
    known, checked = dict(signature(function).parameters), dict(options)
    is_open = any(one.kind is Parameter.VAR_KEYWORD for one in known.values())
    if hands_on is not None and is_open:
        further = signature(hands_on).parameters
        is_open, known = False, known | {k: v for k, v in further.items() if v.kind is v.KEYWORD_ONLY}
    names = [name for name, one in known.items() if one.kind in _BY_NAME and name not in own]
    for option, value in options.items():
        if option not in names:
            if is_open:
                continue
            raise ConfigError(
                f"{what} has no option {option!r}. HINT: {nearest(option, names)}",
                key=f"{key}.{option}",
            )
        parameter, kind = known[option], _kind_of(known[option])
        if kind is int and isinstance(value, float) and value.is_integer():
            checked[option] = int(value)
        elif kind is not None and not _fits(value, kind, parameter):
            raise ConfigError(
                f"{key}: {option}={value!r} does not suit {what}, expected {kind.__name__}. "
                "HINT: leave it out for the default.",
                key=f"{key}.{option}",
            )
    return checked


def called(
    what: str,
    function: Callable,
    options: Mapping[str, Any],
    key: str,
    *,
    own: Collection[str] = (),
    **given: Any,
) -> Any:
    """Calls `function` with `given` and `options`, which take precedence; see `checked_options`.

    Raises: ConfigError whose key is `key`, or below it, for options that `function` does not accept.
    """
    given |= checked_options(what, function, options, key, own=own)
    try:
        return function(**given)
    except (TypeError, ValueError) as err:
        hint = "" if isinstance(err, ConfigError) else " HINT: see its own help."
        raise ConfigError(f"{what} with {given}: {type(err).__name__}: {err}{hint}", key=key) from err


def _fits(value: Any, kind: type, parameter: Parameter) -> bool:
    if value is None:
        return bool(re.search("None|Optional", str(parameter.annotation)))
    # True is an Integral, and would be rank 1.
    return isinstance(value, bool) == (kind is bool) and isinstance(value, _KINDS[kind])


def _kind_of(parameter: Parameter) -> type | None:
    if parameter.default is not Parameter.empty:
        return type(parameter.default) if type(parameter.default) in _KINDS else None
    return next((kind for kind in _KINDS if parameter.annotation in (kind, kind.__name__)), None)


def extra(module: str, install: str) -> Any:
    """A module of a library that cyxjax does not depend on. install: the package for pip.

    Raises: ConfigError with the pip command.
    """
    try:
        return import_module(module)
    except ImportError as err:
        library = module.partition(".")[0]
        raise ConfigError(
            f"{library} is not installed ({err}). HINT: pip install {shlex.quote(install)}"
        ) from err
