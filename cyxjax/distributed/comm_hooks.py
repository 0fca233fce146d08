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
    """What a hook returns: a reducer, and how its state lies on the mesh."""

    reducer: Reducer
    spec: Any = REPLICATED


def allreduce_hook(state: Any = None) -> CommHook:
    """Gradients in their own dtype: what happens without a hook."""
    del state
    return CommHook(mean_reducer())


def fp16_compress_hook(state: Any = None) -> CommHook:
    """Gradients sent as float16, half the bytes; as under torch, what rounding loses is lost."""
    del state
    return CommHook(cast_reducer(jnp.float16, error_feedback=False), RESIDUAL_SPEC)


def bf16_compress_hook(state: Any = None) -> CommHook:
    """Gradients sent as bfloat16: half the bytes, with float32's range."""
    del state
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


class _PowerSgdHook:
    """The hook, which also goes by torch's module spelling."""

    @property
    def PowerSGDState(self) -> type:
        return PowerSGDState

    @property
    def powerSGD_hook(self) -> "_PowerSgdHook":
        return self

    def __call__(self, state: Any) -> CommHook:
        """Matrices of gradients sent as two thin ones (Vogels et al. 2019, arXiv:1905.13727)."""
        if not isinstance(state, PowerSGDState):
            raise ConfigError(
                f"powerSGD_hook was registered with state {state!r}. "
                "HINT: register_comm_hook(PowerSGDState(matrix_approximation_rank=1), powerSGD_hook)."
            )
        reducer = power_sgd_reducer(
            rank=state.matrix_approximation_rank,
            start_iter=state.start_powerSGD_iter,
            error_feedback=state.use_error_feedback,
            warm_start=state.warm_start,
            min_compression=state.min_compression_rate,
        )
        return CommHook(reducer, POWER_SGD_SPEC)


powerSGD_hook = _PowerSgdHook()


def from_config(comm_hook: Any) -> CommHook:
    """The hook of a `DDPConfig`: None, a hook, or (its state, the hook)."""
    if comm_hook is None:
        return allreduce_hook()
    return resolve(*(comm_hook if isinstance(comm_hook, tuple) else (None, comm_hook)))


def resolve(state: Any, hook: Any) -> CommHook:
    """What `hook(state)` stands for; a bare optax transformation is a reducer without state per replica.

    Raises: ConfigError if it is neither, or a whole strategy: those update the parameters themselves, so
    that there are no mean gradients for `sync_gradients` to show.
    """
    made = hook(state) if callable(hook) else hook
    if isinstance(made, Sync):
        raise ConfigError(
            "a strategy such as zero1, local_sgd or diloco was given as a communication hook. It updates the "
            "parameters itself, and a hook only averages gradients. HINT: use the trainer with comm='zero1' "
            "(or another name), or a hook such as bf16_compress_hook or powerSGD_hook."
        )
    if isinstance(made, CommHook):
        return made
    if hasattr(made, "init") and hasattr(made, "update"):
        return CommHook(made)
    raise ConfigError(
        f"the communication hook {hook!r} gave {type(made).__name__}, expected a CommHook or an optax "
        "transformation from local to mean gradients. HINT: pass one of cyxjax.distributed.comm_hooks "
        "(bf16_compress_hook); a strategy by its name is the trainer's: comm='fsdp'."
    )
