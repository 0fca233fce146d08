"""Strategies by name. To add one: a file beside this one that ends with its entry, and a name in `_FILES`."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cyxjax.core.optimizer import refuse_unless_elementwise
from cyxjax.core.strategy import Sync, norm, shortened
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError
from cyxjax.plugins import checked_options, named
from cyxjax.sync import compressed, fsdp, local_sgd, mean, power_sgd, zero1
from cyxjax.sync.entry import Strategy

_FILES: tuple[Any, ...] = (mean, compressed, power_sgd, zero1, fsdp, local_sgd)
STRATEGIES: dict[str, Strategy] = {name: entry for file in _FILES for name, entry in file.ENTRIES.items()}
NOT_OPTIONS = ("optimizer", "params")  # parameters of `Strategy.make`


def build_sync(
    name: str,
    optimizer: optax.GradientTransformation,
    options: Mapping[str, Any] | None = None,
    max_grad_norm: float | None = None,
    params: Callable[[], PyTree] | None = None,
) -> Sync:
    """The strategy `name` around `optimizer`, which sees the mean gradient clipped to `max_grad_norm`.

    params: gives the shapes of the parameters, for strategies that must know them beforehand.
    Raises: ConfigError for an unknown name, for an option that is unknown or of the wrong type, and for an
        optimizer that looks at whole leaves, or at their norm, where it would see parts of them.
    """
    found = named("strategy", name, STRATEGIES, unknown=f"comm={name!r} is not a strategy.", key="comm")
    entry = found if isinstance(found, Strategy) else Strategy(found, ("", "", ""), learns=None)
    given = checked_options(f"comm={name!r}", entry.make, options or {}, "comm_options", own=NOT_OPTIONS)
    if entry.cuts_leaves:
        shapes = jax.ShapeDtypeStruct((4, 2), jnp.float32) if params is None else params()
        refuse_unless_elementwise(optimizer, shapes, zero1.part_shape, name)
        given["params"] = shapes
    if max_grad_norm is not None:
        measure = zero1.norm_of_parts if entry.cuts_leaves else norm
        optimizer = _clipping(optimizer, max_grad_norm, measure)
    try:
        signature(entry.make).bind(optimizer, **given)
    except TypeError as err:
        raise ConfigError(
            f"comm_options={dict(options or {})} do not suit comm={name!r}: {err}. HINT: it is called with "
            f"the optimizer and comm_options, and takes {', '.join(signature(entry.make).parameters)}.",
            key="comm_options",
        ) from err
    return entry.make(optimizer, **given)


def _clipping(
    optimizer: optax.GradientTransformation, max_norm: float, norm: Callable[[PyTree], Any]
) -> optax.GradientTransformation:
    """`optimizer` on gradients clipped to `max_norm`, measured by `norm`; its state is unchanged."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return optimizer.update(shortened(updates, norm(updates), max_norm), state, params)

    return optax.GradientTransformation(optimizer.init, update)
