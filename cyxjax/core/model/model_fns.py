"""A model as plain functions, and the arguments with which a model's own function is called.

One array is passed as it is. A tuple is passed as several positional inputs and a dict as inputs by name,
where the model's signature takes them so; a named tuple (jraph's graphs) is one input."""

import inspect
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError


class ModelFns(NamedTuple):
    """A model as pure functions. `model_state` changes without gradients (running statistics); {} if none."""

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    """(key, inputs (B, ...)) -> (params, model_state)"""
    apply: Callable[[PyTree, PyTree, PyTree, jax.Array, bool], tuple[PyTree, PyTree]]
    """(params, model_state, inputs, key, train) -> (output, model_state)"""
    recomputes: bool = False
    """Whether backward recomputes activations; the compiler may need an option to keep this"""
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


def call_mode(call: Callable, train: bool) -> dict[str, bool]:
    """The train/eval flag by keyword, for those that `call`, a model's `__call__`, accepts; {} for none.

    Raises: ConfigError for a flag that looks like a train/eval flag but is not a known one: it would keep
        its default, and dropout and batch statistics would never be in training mode.
    """
    known = inspect.signature(call).parameters
    mode = {name: is_train is train for name, is_train in MODES.items() if name in known}
    bound = getattr(call, "keywords", {})  # arguments that a partial has set
    switches = [name for name, one in known.items() if isinstance(one.default, bool) and name not in bound]
    unknown = [name for name in switches if _LIKE_A_MODE.search(name)]
    if unknown and not mode:
        raise ConfigError(
            f"the model's __call__ takes {unknown[0]}={known[unknown[0]].default}, which looks like a "
            f"train/eval flag but is not a known one. HINT: rename it to `train`; known: {', '.join(MODES)}."
        )
    return mode


_A_KEY = re.compile(r"^(p?rng|key|rngs)$|_(p?rng|key)$")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call_arguments(
    call: Callable,
    inputs: PyTree,
    key: jax.Array,
    train: bool,
    make_key: Callable = lambda name, key: key,
    known: Mapping[str, inspect.Parameter] | None = None,
) -> tuple[tuple, dict[str, Any]]:
    """(positional, named) arguments with which `call`, a model's own, takes `inputs`.

    An argument called rng, key, ..._rng or ..._key without an input gets `make_key(name, its own key)`. If
    the inputs do not match the signature, the model's own call raises. known: the arguments to consider,
    if not all.
    """
    known = inspect.signature(call).parameters if known is None else known
    mode: dict[str, Any] = dict(call_mode(call, train))
    open_ = [one for name, one in known.items() if name not in MODES and one.kind in POSITIONAL]
    given = len(inputs) if type(inputs) is tuple else set(inputs) if isinstance(inputs, Mapping) else 1
    keys = _keys(open_, known, given)
    free = [one for one in open_ if one.name not in keys]
    named = {name: make_key(name, jax.random.fold_in(key, zlib.crc32(name.encode()))) for name in keys}
    if type(inputs) is tuple and _takes_many(free, known, len(inputs)):
        first = [one for one in known.values() if one.kind in POSITIONAL][: len(inputs)]
        in_order = not keys and first == free[: len(inputs)]  # the mode may stand between them
        if in_order or len(inputs) > len(free):
            return inputs, {**named, **mode}
        return (), {**{one.name: a for one, a in zip(free, inputs, strict=False)}, **named, **mode}
    if isinstance(inputs, Mapping) and _takes_names(free, known, inputs):
        return (), {**inputs, **named, **mode}
    return (inputs,), {**named, **mode}


def _keys(open_: list[inspect.Parameter], known: Mapping[str, Any], given: Any) -> list[str]:
    """Names of arguments that get a random key; attention's `key` gets an input if there is one for it."""
    like = [name for name, one in known.items() if _A_KEY.search(name) and one.default in (one.empty, None)]
    if isinstance(given, set):
        return [name for name in like if name not in given]
    required = set(_required(open_))
    # With one required argument beside a key, `model(batch, key)`, several inputs may be one batch.
    takes_several = len(required.difference(like)) > 1
    has_all = given >= len(required) if takes_several else given == len(required) > 1
    return [name for name in like if name not in required] if has_all else like


def _required(free: list[inspect.Parameter]) -> list[str]:
    return [one.name for one in free if one.default is one.empty]


def _takes_many(free: list[inspect.Parameter], known: Mapping[str, Any], count: int) -> bool:
    if any(one.kind is one.VAR_POSITIONAL for one in known.values()):
        return True
    # An argument with default None is an optional input; one with another default is a setting.
    room = [one for one in free if one.default is one.empty or one.default is None]
    return len(_required(free)) > 1 or 1 < count <= len(room)


def _takes_names(free: list[inspect.Parameter], known: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
    """Whether a dict is passed as arguments by name; otherwise a single argument takes the whole dict."""
    required, more = _required(free), any(one.kind is one.VAR_KEYWORD for one in known.values())
    if len(required) > 1:
        return True
    if len(free) == 1 and len(inputs) > 1 and not more:  # f(x) takes {"x": ..., "m": ...} whole
        return all(name in known for name in inputs)  # the others may be keyword-only
    return any(name in known for name in inputs) or (more and not required)
