"""Precision: dtypes of parameters, arithmetic and outputs as a wrapper around a model, and `autocast`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError, nearest

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
_SHORT = {
    "float32": "params=float32,compute=float32,output=float32",
    "bfloat16": "params=float32,compute=bfloat16,output=float32",
    "float16": "params=float32,compute=float16,output=float32",
}


@dataclass(frozen=True)
class Policy:
    """dtypes of stored parameters, of the model's arithmetic, and of what the loss sees."""

    params: Any = jnp.float32
    compute: Any = jnp.float32
    output: Any = jnp.float32

    @property
    def needs_loss_scale(self) -> bool:
        """float16 has 5 bits of exponent: gradients below 6e-8 vanish unless the loss is scaled up."""
        return self.compute == jnp.float16


def parse_policy(text: str) -> Policy:
    """A policy from `bfloat16` (computes so, stores and returns float32) or `params=..,compute=..,output=..`.

    Raises: ConfigError naming the part that is not known.
    """
    fields = {}
    for part in _SHORT.get(text, text).split(","):
        name, _, dtype = part.strip().partition("=")
        if name not in ("params", "compute", "output") or dtype not in _DTYPES:
            raise ConfigError(
                f"precision={text!r}: {part.strip()!r} is not known; expected one of {', '.join(_SHORT)} or "
                f"'params=DTYPE,compute=DTYPE,output=DTYPE'. HINT: {nearest(dtype or name, _DTYPES)}"
            )
        fields[name] = _DTYPES[dtype]
    return Policy(**fields)


def cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    """`tree` with floating-point leaves in `dtype`; integers, booleans and keys as they are."""

    def cast(a: Any) -> Any:
        a = jnp.asarray(a)
        return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a

    return jax.tree.map(cast, tree)


def with_policy(fns: ModelFns, policy: Policy) -> ModelFns:
    """`fns` that computes as `policy` says. Model state keeps its own dtype (statistics need float32)."""

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        params, model_state = fns.init(key, inputs)
        return cast_floats(params, policy.params), model_state

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        params, inputs = cast_floats((params, inputs), policy.compute)
        output, new_state = fns.apply(params, model_state, inputs, key, train)
        same_dtype = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, model_state)
        return cast_floats(output, policy.output), same_dtype

    return fns._replace(init=init, apply=apply, computes=policy.compute)


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
