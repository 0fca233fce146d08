"""The dtype that models compute in, for the block it is entered for; the facade asks here."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.precision import Policy, with_policy
from cyxjax.errors import ConfigError

_ALLOWED = ("bfloat16", "float16", "float32")
_dtype: ContextVar[str] = ContextVar("autocast_dtype", default="float32")


@contextmanager
def autocast(dtype: Any = jnp.bfloat16, enabled: bool = True) -> Iterator[None]:
    """Forward passes of wrapped models inside the block compute in `dtype`.

    Parameters, gradients and outputs stay float32, so losses are computed in float32. bfloat16 needs no
    GradScaler; float16 does. Raises: ConfigError for a dtype that is not one of these.
    """
    name = jnp.dtype(dtype).name if enabled else "float32"
    if name not in _ALLOWED:
        raise ConfigError(f"autocast(dtype={name}): expected one of {', '.join(_ALLOWED)}. HINT: bfloat16.")
    token = _dtype.set(name)
    try:
        yield
    finally:
        _dtype.reset(token)


def autocast_dtype() -> str:
    """The dtype of the innermost block; float32 outside."""
    return _dtype.get()


def cast_to(fns: ModelFns, dtype: str) -> ModelFns:
    """`fns` that computes in `dtype`, a value of `autocast_dtype`."""
    return fns if dtype == "float32" else with_policy(fns, Policy(compute=jnp.dtype(dtype)))
