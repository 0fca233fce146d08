"""A model as four plain functions: what every kind of model is adapted to."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from cyxjax.errors import ConfigError

PyTree = Any


class ModelFns(NamedTuple):
    """A model as values. `model_state` changes without a gradient (running statistics); {} if none."""

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    """(key, inputs (B, ...)) -> (params, model_state)"""
    apply: Callable[[PyTree, PyTree, PyTree, jax.Array, bool], tuple[PyTree, PyTree]]
    """(params, model_state, inputs, key, train) -> (output, model_state)"""
    recomputes: bool = False
    """Whether backward computes activations again, which the compiler may have to be told to leave so"""
    computes: Any = None
    """The dtype `apply` casts floating parameters to before it uses them; None: it uses them as they are"""


class Sown(NamedTuple):
    """A model's output in training, and losses of its own that are added to the trainer's."""

    output: PyTree
    losses: jax.Array  # float32 (B,)


MODES = {
    **dict.fromkeys(("train", "training", "is_train", "is_training", "train_mode"), True),
    **dict.fromkeys(("deterministic", "is_deterministic", "use_running_average"), False),
    **dict.fromkeys(("eval", "is_eval", "eval_mode", "inference", "is_inference"), False),
}
"""Keywords by which models are told whether they train, and the value that says so."""
_LIKE_A_MODE = re.compile(r"train|eval|infer|determin|running_average")


def call_mode(call: Callable, train: bool) -> dict[str, bool]:
    """The keywords that tell `call`, a model's own, whether it trains; {} if it takes none.

    Raises: ConfigError for a switch that looks like one of them and is none: left at its default, dropout
        and batch statistics would never know of training.
    """
    known = inspect.signature(call).parameters
    mode = {name: is_train is train for name, is_train in MODES.items() if name in known}
    switches = [name for name, one in known.items() if isinstance(one.default, bool) and name not in mode]
    odd = next((name for name in switches if _LIKE_A_MODE.search(name)), None)
    if odd is not None and not mode:
        raise ConfigError(
            f"the model's __call__ takes {odd}={known[odd].default}, which looks like the switch for "
            f"training and is not known as one. HINT: rename it to `train`; known: {', '.join(MODES)}."
        )
    return mode
