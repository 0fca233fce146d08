"""The loss of the step under way, for optimizers that ask for it (optax: `update(..., value=...)`).

No strategy passes it on: the step opens `step_value` around the update while that is traced, and a rule that
`with_value` wrapped asks here.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any
_value: ContextVar[jax.Array | None] = ContextVar("step_value", default=None)


@contextmanager
def step_value(row: jax.Array) -> Iterator[None]:
    """row: float32 (2,), of the global batch: the sum of the losses and what the samples weigh."""
    token = _value.set(jnp.where(row[1] > 0, row[0] / jnp.where(row[1] > 0, row[1], 1.0), 0.0))
    try:
        yield
    finally:
        _value.reset(token)


def with_value(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` that is given the step's loss, if it takes one: its mean over the global batch."""
    takes = inspect.signature(optimizer.update).parameters
    if "value" not in takes and not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        return optimizer

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        # Outside a step an update is only traced, for its shapes; a number of it must not pass for one.
        told = _value.get()
        value = jnp.float32(jnp.nan) if told is None else told
        return optimizer.update(grads, state, params, value=value)  # type: ignore[call-arg]

    return optax.GradientTransformation(optimizer.init, update)  # type: ignore[arg-type]  # any state
