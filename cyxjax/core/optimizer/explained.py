"""Turns the errors of an optimizer that does not fit the training step into one line with a way out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optax

from cyxjax.errors import ConfigError, CyxjaxError

PyTree = Any
_HINTS = {  # part of optax's message -> what to use instead
    "linesearch": "the step has no loss to search along; use optax.lbfgs(lr, linesearch=None).",
    "reduce_on_plateau": "one of several optimizers gets no loss; use callbacks=[cx.ReduceLROnPlateau()].",
    "traced array": "a schedule gets a traced step: use jnp.where for `if`, jnp.cos for math.cos.",
    "scale_by_polyak": "one of several optimizers gets no loss; use optax.adam or another adaptive rule.",
    "fast": "lookahead needs its own pair of parameters; use optax.contrib.schedule_free or cx.EMA().",
}
_ANY = (
    "the step passes gradients, state and parameters; labels and masks must fit the parameters' tree; "
    "optax.adamw always fits."
)


def with_explained_errors(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer`, whose errors are ConfigErrors with one thing to do."""

    def init(params: PyTree) -> PyTree:
        with _explained():
            return optimizer.init(params)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> tuple:
        with _explained():
            return optimizer.update(grads, state, params, **extra)

    return type(optimizer)._make((init, update))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except CyxjaxError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as err:
        brief = " ".join(str(err).split())
        brief = brief if len(brief) < 200 else brief[:200] + "..."
        hint = next((hint for pattern, hint in _HINTS.items() if pattern in brief), _ANY)
        raise ConfigError(
            f"the optimizer cannot make a step: {type(err).__name__}: {brief} HINT: {hint}", key="optimizer"
        ) from err
