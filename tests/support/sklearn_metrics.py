"""scikit-learn's metrics, imported on the first call: each worker imports every test file."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # pytest looks up its own attributes on everything that a test file imports
        raise AttributeError(name)
    return getattr(import_module("sklearn.metrics"), name)
