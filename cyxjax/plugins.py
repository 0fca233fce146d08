"""A thing by its name: one of ours, one that an installed package offers, or `module:attribute` of one's own.

A package offers a thing as an entry point of the group of its kind, for example in its pyproject.toml
    [project.entry-points."cyxjax.models"]
    tiny = "tiny_package.nets:Tiny"
"""

import re
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType
from typing import Any

from cyxjax.errors import ConfigError, nearest

GROUPS = {
    "model": "cyxjax.models",
    "data set": "cyxjax.datasets",
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
_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def named(kind: str, name: str, ours: Mapping[str, Any], *, unknown: str = "", key: str = "name") -> Any:
    """What `name` stands for among things of `kind`; ours come first. Imports what is not ours.

    unknown: what to say of a name that nobody knows. key: of the configuration, as in ConfigError.
    Raises: ConfigError for a name that nobody knows, and for a module or attribute that cannot be had.
    """
    if name in ours:
        return ours[name]
    path = name if ":" in name else offered(kind).get(name)
    if path is None:
        raise ConfigError(
            f"{unknown or f'No {kind} named {name!r}.'} HINT: {known_or(kind, name, ours)}", key=key
        )
    return _attribute(kind, path, key)


def is_known(kind: str, name: str, ours: Mapping[str, Any]) -> bool:
    """Whether `named` would look for `name` rather than refuse it; imports nothing."""
    return name in ours or ":" in name or name in offered(kind)


def known_or(kind: str, name: str, ours: Mapping[str, Any]) -> str:
    """The name nearest to `name`, or all there are, and the form of one's own."""
    near = nearest(name, [*ours, *offered(kind)])
    return near if near.startswith("Did you mean") else f"{near} Your own is named module:attribute."


def offered(kind: str) -> dict[str, str]:
    """name -> `module:attribute` of what installed packages offer. Raises: ConfigError for a name of two."""
    found: dict[str, str] = {}
    for point in entry_points(group=GROUPS[kind]):
        if found.setdefault(point.name, point.value) != point.value:
            raise ConfigError(
                f"two installed packages offer a {kind} named {point.name!r}: {found[point.name]} and "
                f"{point.value}. HINT: name the one you mean by its module:attribute."
            )
    return found


def checked_options(
    what: str,
    function: Callable,
    options: Mapping[str, Any],
    key: str,
    *,
    hands_on: Callable | None = None,
    own: Collection[str] = (),
) -> dict[str, Any]:
    """`options`, each of its default's kind, or its annotation's where it has none; 1e3 is a whole number.

    Else half a rank, or "no" for false, would be taken, or end in the library's own words.
    hands_on: its keywords are what `function` takes as **keywords. own: parameters that are no options.
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
            given = parameter.default is not Parameter.empty
            way = f"leave it out for {parameter.default!r}" if given else f"write {option}: NUMBER"
            raise ConfigError(
                f"{key}: {option}={value!r} does not suit {what}, expected {kind.__name__}. HINT: {way}.",
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
    """`function` called with `given` and `options`, which come first; see `checked_options`.

    Raises: ConfigError whose key is `key`, or below it, for options that it does not take.
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


def _attribute(kind: str, path: str, key: str) -> Any:
    if not _FORM.fullmatch(path):
        raise ConfigError(
            f"{kind} {path!r}: expected module:attribute, names with dots. HINT: such as my_code.parts:make.",
            key=key,
        )
    module_name, _, attribute = path.partition(":")
    found: Any = _module(kind, module_name, key)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")] or ["nothing"]
            raise ConfigError(
                f"{kind} {path!r}: {module_name} has no {part!r}. HINT: {nearest(part, public)}", key=key
            )
        found = getattr(found, part)
    if isinstance(found, str | int | float | list | dict | ModuleType | None):
        raise ConfigError(
            f"{kind} {path!r} is a {type(found).__name__}. HINT: name a function or a class.", key=key
        )
    return found


def _module(kind: str, name: str, key: str) -> Any:
    """The module `name`, also of the working directory, as under `python -m`."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as err:
        if err.name and (name == err.name or name.startswith(f"{err.name}.")):
            raise ConfigError(
                f"{kind}: there is no module {err.name!r} in {here} or among the installed packages. "
                "HINT: run from the folder that holds it, or install it.",
                key=key,
            ) from None
        raise _broken(kind, name, err, key) from err
    except (Exception, SystemExit) as err:  # a stranger's module raises anything
        raise _broken(kind, name, err, key) from err


def _broken(kind: str, name: str, err: BaseException, key: str) -> ConfigError:
    last = traceback.extract_tb(err.__traceback__)[-1]
    return ConfigError(
        f"{kind}: module {name} ends in {type(err).__name__}: {' '.join(str(err).split())[:200]} "
        f"({Path(last.filename).name}:{last.lineno}). HINT: see python -c 'import {name}'.",
        key=key,
    )


def extra(module: str, install: str) -> Any:
    """A module of a library that cyxjax does not depend on. install: what pip is to install.

    Raises: ConfigError with the command.
    """
    try:
        return import_module(module)
    except ImportError as err:
        library = module.partition(".")[0]
        raise ConfigError(
            f"{library} is not installed ({err}). HINT: pip install {shlex.quote(install)}"
        ) from err
