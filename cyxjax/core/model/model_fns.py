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
    """Whether backward recomputes activations; the compiler may need an option to leave that in place"""
    computes: Any = None
    """The dtype `apply` casts floating parameters to before it uses them; None: it uses them as they are"""


class Sown(NamedTuple):
    """A model's output in training, and losses of its own that are added to the trainer's."""

    output: PyTree
    losses: jax.Array  # float32 (B,)


MODES = {
    **dict.fromkeys(("train", "training", "is_train", "is_training", "train_mode", "update_stats"), True),
    **dict.fromkeys(("deterministic", "is_deterministic", "use_running_average"), False),
    **dict.fromkeys(("eval", "is_eval", "eval_mode", "inference", "is_inference"), False),
}
"""Names of the train/eval flag in the signatures of models, and its value in training."""
_LIKE_A_MODE = re.compile(
    r"train|eval|infer|determin|running_average"
    r"|^((is_)?test(ing)?|(enable|use)_dropout|stochastic|predict|validation)$",
    re.IGNORECASE,
)
_NAMES_A_MODE = re.compile(r"^(mode|phase|split)$", re.IGNORECASE)  # by a word, and much else
_WORDS_OF_A_MODE = re.compile(
    r"^(train|training|eval|evaluation|test|valid|val|predict|infer|inference)$", re.IGNORECASE
)


def call_mode(call: Callable, train: bool) -> dict[str, bool]:
    """The train/eval flag under the keywords that `call`, a model's `__call__`, accepts; {} for none.

    Raises: ConfigError for a switch that looks like one of them and is none: left at its default, dropout
        and batch statistics would never know of training.
    """
    known = inspect.signature(call).parameters
    mode = {name: is_train is train for name, is_train in MODES.items() if name in known}
    bound = getattr(call, "keywords", {})  # of a partial: a value that was chosen
    unknown = next(
        (name for name, one in known.items() if name not in bound and _is_a_switch(name, one)), None
    )
    if unknown is not None and not mode:
        raise ConfigError(
            f"the model's __call__ takes {unknown}={known[unknown].default!r}, which looks like a train/eval "
            f"flag and is not a known one. HINT: rename it to `train`; known: {', '.join(MODES)}."
        )
    return mode


def _is_a_switch(name: str, parameter: inspect.Parameter) -> bool:
    """Whether it reads as one for training: by its name, or as `mode="train"` by name and default."""
    if isinstance(parameter.default, str):
        return bool(_NAMES_A_MODE.search(name) and _WORDS_OF_A_MODE.search(parameter.default))
    return isinstance(parameter.default, bool) and bool(_LIKE_A_MODE.search(name))
