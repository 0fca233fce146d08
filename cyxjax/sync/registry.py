"""Strategies by name. A new one is a file beside this and a row here and in the contract test."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from cyxjax.core.strategy import Sync
from cyxjax.errors import ConfigError, nearest
from cyxjax.sync.mean import mean

STRATEGIES: dict[str, Callable[..., Sync]] = {
    "mean": mean,
}


def build_sync(
    name: str, optimizer: optax.GradientTransformation, options: Mapping[str, Any] | None = None
) -> Sync:
    """The strategy `name` around `optimizer`.

    Raises: ConfigError for an unknown name or an option it does not take.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"comm={name!r} is not a strategy. HINT: {nearest(name, STRATEGIES)}")
    try:
        return STRATEGIES[name](optimizer, **(options or {}))
    except TypeError as err:
        raise ConfigError(
            f"comm_options={dict(options or {})} do not suit comm={name!r}: {err}. "
            f"HINT: see `help(cyxjax.sync.{name})`."
        ) from err
