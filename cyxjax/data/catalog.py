"""Data sets by name: `load_dataset("digits")`."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyxjax.data import bundled
from cyxjax.data.splits import DatasetInfo, Splits
from cyxjax.errors import ConfigError, nearest

__all__ = ["DatasetInfo", "Splits", "load_dataset", "names"]

_BUNDLED: dict[str, Callable[..., Splits]] = {
    "digits": bundled.load_digits,
    "wine": bundled.load_wine,
    "breast_cancer": bundled.load_breast_cancer,
    "diabetes": bundled.load_diabetes,
    "text": bundled.load_text,
}


def names() -> list[str]:
    """Names that `load_dataset` knows."""
    return sorted(_BUNDLED)


def load_dataset(name: str, root: str | Path | None = None, **options: Any) -> Splits:
    """Train, validation and test splits of the data set `name`, the same in every run.

    Raises: ConfigError for an unknown name or option, naming the nearest; DataError for an unreadable file.
    """
    if name not in _BUNDLED:
        raise ConfigError(f"unknown data set {name!r}. HINT: {nearest(name, names())}")
    _check_options(name, _BUNDLED[name], options)
    return _BUNDLED[name](**options)


def _check_options(name: str, loader: Callable[..., Splits], options: dict[str, Any]) -> None:
    known = [
        key for key, item in inspect.signature(loader).parameters.items() if item.kind != item.VAR_KEYWORD
    ]
    known += ["val_fraction", "test_fraction", "split_seed"] if len(known) == 0 else []
    for option in options:
        if option not in known:
            raise ConfigError(f"data set {name!r} has no option {option!r}. HINT: {nearest(option, known)}")
