"""Precision: dtypes of parameters, arithmetic and outputs as a wrapper around a model, `autocast`, and
strategies that skip steps whose gradients are not finite, and scale the loss for float16.

These wrap a strategy; the step does not change. All replicas check all gradients, so they skip together.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cyxjax.core.mesh import AXIS, REPLICATED
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.scopes import holding
from cyxjax.core.strategy import Stepped, Sync, loss_is_finite, stepped_if, stored_inside
from cyxjax.core.trees import PyTree, are_finite, times


@dataclass(frozen=True)
class Policy:
    """dtypes of stored parameters, of the model's arithmetic, and of what the loss sees."""

    params: Any = jnp.dtype("float32")
    compute: Any = jnp.dtype("float32")
    output: Any = jnp.dtype("float32")

    @property
    def needs_loss_scale(self) -> bool:
        """float16 has 5 bits of exponent: gradients below 6e-8 vanish unless the loss is scaled up."""
        return self.compute == jnp.float16


def parse_policy(text: str) -> Policy:
    """A policy from `bfloat16` (computes in it, stores and returns float32) or `params=..,compute=..,...`."""
    parts = (part.strip().partition("=") for part in text.split(","))
    return Policy(**{name if dtype else "compute": jnp.dtype(dtype or name) for name, _, dtype in parts})


def cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    """`tree` with floating-point leaves in `dtype`; integers, booleans and keys as they are."""

    def cast(a: Any) -> Any:
        a = jnp.asarray(a)
        return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a

    return jax.tree.map(cast, tree)


def with_policy(fns: ModelFns, policy: Policy) -> ModelFns:
    """`fns` with the dtypes of `policy`. Model state keeps its own dtype (statistics need float32)."""

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        params, model_state = fns.init(key, inputs)
        return cast_floats(params, policy.params), model_state

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        params, inputs = cast_floats((params, inputs), policy.compute)
        output, new_state = fns.apply(params, model_state, inputs, key, train)
        same_dtype = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, model_state)
        return cast_floats(output, policy.output), same_dtype

    return fns._replace(init=init, apply=apply, computes=policy.compute)


_dtype: ContextVar[str] = ContextVar("autocast_dtype", default="float32")


def autocast(dtype: Any = jnp.bfloat16, enabled: bool = True) -> AbstractContextManager[None]:
    """Forward passes of wrapped models inside the block compute in `dtype`.

    Parameters, gradients and outputs stay float32, so losses are computed in float32. bfloat16 needs no
    GradScaler; float16 does.
    """
    return holding(_dtype, jnp.dtype(dtype).name if enabled else "float32")


def autocast_dtype() -> str:
    """The dtype of the innermost block; float32 outside."""
    return _dtype.get()


def cast_to(fns: ModelFns, dtype: str) -> ModelFns:
    """`fns` that computes in `dtype`, a value of `autocast_dtype`."""
    return fns if dtype == "float32" else with_policy(fns, Policy(compute=jnp.dtype(dtype)))


class LossScaleState(NamedTuple):
    scale: Any  # float32 (): multiplies the loss
    good_steps: Any  # int32 (): finite steps since the scale last changed
    inner: PyTree  # the wrapped strategy's state


def skip_nonfinite(sync: Sync) -> Sync:
    """`sync` that keeps params and state unchanged in a step whose loss, or any replica's gradient, is not
    finite."""

    def update(grads: PyTree, state: PyTree, params: PyTree) -> Stepped:
        finite = all_finite(grads) & loss_is_finite()
        return stepped_if(finite, sync, grads, state, params)._replace(counts=finite)

    return sync._replace(update=update)


def with_loss_scale(
    sync: Sync,
    initial: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> Sync:
    """`sync` with loss scaling for float16: the loss is multiplied by a scale, gradients are divided by it.

    The scale is multiplied by `backoff_factor` after a step with a gradient that is not finite (skipped), and
    by `growth_factor` after `growth_interval` finite steps in a row. It stays between 2^-14, where a
    gradient that is not finite has a different cause, and 2^24.
    Source: Micikevicius et al. 2018, arXiv:1710.03740; defaults as torch.amp.GradScaler.
    """

    def init(params: PyTree) -> LossScaleState:
        return LossScaleState(jnp.float32(initial), jnp.int32(0), sync.init(params))

    def update(grads: PyTree, state: LossScaleState, params: PyTree) -> Stepped:
        grads = times(1 / state.scale, grads)
        finite = all_finite(grads)
        new = stepped_if(finite, sync, grads, state.inner, params)
        good = jnp.where(finite, state.good_steps + 1, 0)
        grow = good >= growth_interval
        factor = jnp.where(finite, jnp.where(grow, growth_factor, 1.0), backoff_factor)
        scale = jnp.clip(state.scale * factor, _LEAST, _MOST)
        return new._replace(state=LossScaleState(scale, jnp.where(grow, 0, good), new.state), counts=finite)

    return sync._replace(
        init=init,
        update=update,
        state_spec=LossScaleState(REPLICATED, REPLICATED, sync.state_spec),
        loss_scale=lambda state: state.scale * sync.loss_scale(state.inner),
        stored_as=stored_inside(sync),
    )


_LEAST, _MOST = 2.0**-14, 2.0**24


def all_finite(grads: PyTree) -> jax.Array:
    """bool (), equal on all replicas: no replica holds an infinity or a NaN. Inside `sync_map`."""
    return lax.psum((~are_finite(grads)).astype(jnp.float32), AXIS) == 0
