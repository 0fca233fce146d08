"""Communication hooks with torch's names, for `ddp.register_comm_hook(state, hook)`.

A hook is a function of its state that says which reducer to use. torch's module spelling works too:
`from cyxjax.distributed.comm_hooks import powerSGD_hook`, then `powerSGD_hook.PowerSGDState(...)` and
`powerSGD_hook.powerSGD_hook`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from cyxjax.core.mesh import REPLICATED
from cyxjax.core.strategy import Reducer, Sync
from cyxjax.errors import ConfigError
from cyxjax.sync.compressed import RESIDUAL_SPEC, cast_reducer
from cyxjax.sync.mean import mean_reducer
from cyxjax.sync.power_sgd import POWER_SGD_SPEC, power_sgd_reducer


class CommHook(NamedTuple):
    """What a hook returns: a reducer, and how its state is placed on the mesh."""

    reducer: Reducer
    spec: Any = REPLICATED


def allreduce_hook(state: Any = None) -> CommHook:
    """Gradients in their own dtype: the default, without a hook."""
    return CommHook(mean_reducer())


def fp16_compress_hook(state: Any = None) -> CommHook:
    """Gradients sent as float16, half the bytes; as in torch, rounding errors are not carried over."""
    return CommHook(cast_reducer(jnp.float16, error_feedback=False), RESIDUAL_SPEC)


def bf16_compress_hook(state: Any = None) -> CommHook:
    """Gradients sent as bfloat16: half the bytes, with float32's range."""
    return CommHook(cast_reducer(jnp.bfloat16, error_feedback=False), RESIDUAL_SPEC)


@dataclass(frozen=True)
class PowerSGDState:
    """Settings of `powerSGD_hook`, torch's names and defaults; the running state is kept by the wrapper."""

    process_group: Any = None
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1_000
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    random_seed: int = 0
    """Accepted; Q's first values are keyed by the names of the parameters, so they are equal on all ranks."""


def powerSGD_hook(state: PowerSGDState) -> CommHook:
    """Matrices of gradients sent as two thin ones (Vogels et al. 2019, arXiv:1905.13727)."""
    reducer = power_sgd_reducer(
        rank=state.matrix_approximation_rank,
        start_iter=state.start_powerSGD_iter,
        error_feedback=state.use_error_feedback,
        warm_start=state.warm_start,
        min_compression=state.min_compression_rate,
    )
    return CommHook(reducer, POWER_SGD_SPEC)


# torch's module of this name holds both.
powerSGD_hook.PowerSGDState = PowerSGDState  # type: ignore[attr-defined]
powerSGD_hook.powerSGD_hook = powerSGD_hook  # type: ignore[attr-defined]


def from_config(comm_hook: Any) -> CommHook:
    """The hook of a `DDPConfig`: None, a hook, (its state, the hook), or a reducer."""
    return resolve(*(comm_hook if type(comm_hook) is tuple else (None, comm_hook or allreduce_hook)))


def resolve(state: Any, hook: Any) -> CommHook:
    """The CommHook of `hook(state)`; a bare optax transformation is a reducer without state per replica.

    Raises: ConfigError for a whole strategy: those update the parameters themselves, so that there are no
    mean gradients for `sync_gradients` to return.
    """
    made = hook(state) if callable(hook) else hook
    if isinstance(made, Sync | str):
        raise ConfigError(
            f"{made!r:.80} is a strategy of the trainer, not a communication hook. HINT: use the trainer "
            "with comm=..., or a hook such as bf16_compress_hook."
        )
    return made if isinstance(made, CommHook) else CommHook(made)
