"""A model as four plain functions: what every kind of model is adapted to."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

PyTree = Any


class ModelFns(NamedTuple):
    """A model as values. `model_state` changes without a gradient (running statistics); {} if none."""

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    """(key, inputs (B, ...)) -> (params, model_state)"""
    apply: Callable[[PyTree, PyTree, PyTree, jax.Array, bool], tuple[PyTree, PyTree]]
    """(params, model_state, inputs, key, train) -> (output, model_state)"""


_TRAIN_ARGS = {"train": True, "training": True, "is_training": True, "deterministic": False}


def call_mode(call: Callable, train: bool) -> dict[str, bool]:
    """The keywords that tell `call`, a model's own, whether it trains; {} if it takes none."""
    known = inspect.signature(call).parameters
    return {name: is_train is train for name, is_train in _TRAIN_ARGS.items() if name in known}
