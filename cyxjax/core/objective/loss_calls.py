"""Whether a loss of the user's is called as a step calls it: with the model's output and the target."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cyxjax.core.losses import UserLoss
from cyxjax.core.objective.host import on_host
from cyxjax.errors import ConfigError

_RUNS_THE_MODEL = ("model", "params", "variables", "state", "apply_fn")
# Words that mean one thing alone; `y` is a target only beside a word for outputs.
_TARGETS = frozenset(("y_true", "true", "truth", "target", "targets", "label", "labels", "y"))
_OUTPUTS = frozenset(
    ("y_pred", "y_hat", "yhat", "output", "outputs", "logit", "logits")
    + ("pred", "preds", "predicted", "prediction", "predictions")
)


PyTree = Any


def refuse_other_arguments(loss: Any, output: PyTree = None) -> None:
    """Returns for a loss, or terms, of (output, target); one whose arguments cannot be known is left alone.

    output: the model's, as shapes (n, ...): a loss that is the same whichever comes first may name them so.
    Raises: ConfigError for one that runs the model, as the `loss_fn` of Flax's tutorials, takes more, or
    whose names say that it takes the target first, as Keras's do: it would train, and to wrong numbers.
    """
    for term in getattr(loss, "terms", ()):
        refuse_other_arguments(term.loss, output)
    if not isinstance(loss, UserLoss):
        return
    try:
        takes = inspect.signature(loss.fn)
    except (TypeError, ValueError):
        return
    names = list(takes.parameters)
    try:
        takes.bind(None, None)
        fits = not names or names[0] not in _RUNS_THE_MODEL
    except TypeError:
        fits = False
    if not fits:
        runs = names and names[0] in _RUNS_THE_MODEL
        raise ConfigError(
            f"the loss takes ({', '.join(names)}), a step calls it with (output, target). HINT: "
            + ("leave the model's call out, the trainer makes it: " if runs else "")
            + "lambda output, target: optax.softmax_cross_entropy_with_integer_labels(output, target)."
        )
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first, second = ([n for n in names if takes.parameters[n].kind in by_place] + ["", ""])[:2]
    if first.lower() in _TARGETS and second.lower() in _OUTPUTS and not _is_symmetric(loss.fn, output):
        raise ConfigError(
            f"the loss takes ({first}, {second}), a step calls it with (output, target). HINT: "
            "lambda output, target: loss(target, output)."
        )


def _is_symmetric(fn: Callable, output: PyTree) -> bool:
    """Whether `fn` and its gradient stay the same when its arguments, arrays like `output`, change places."""
    if getattr(output, "shape", None) is None or not jax.numpy.issubdtype(output.dtype, np.inexact):
        return False
    rng = np.random.default_rng(0)
    shape = (4, *output.shape[1:])
    pairs = [rng.standard_normal((2, *shape)), rng.uniform(0.05, 0.95, (2, *shape))]
    mean = lambda one, other: fn(one, other).mean()  # noqa: E731
    with on_host():
        try:
            first, second = (jax.jit(jax.value_and_grad(mean, argnums=place)) for place in (0, 1))
            return all(
                all(map(_alike, first(*drawn.astype(np.float32)), second(*drawn[::-1].astype(np.float32))))
                for drawn in pairs
            )
        except Exception:  # whatever a user's function raises
            return False


def _alike(one: Any, other: Any) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return bool(np.isfinite(a).all() and np.allclose(a, b, rtol=1e-4, atol=1e-6))
