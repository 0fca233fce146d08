"""Trading time for memory: a model that recomputes its activations in the backward pass.

On GPU and TPU. XLA on CPU (jax 0.10.2) recognises that it has the values already and keeps them after all:
measured, a step there holds the same bytes with and without.
"""

from typing import Any

import jax

from cyxjax.core.model_fns import ModelFns
from cyxjax.errors import ConfigError, nearest

PyTree = Any
_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
}
REMAT = ("none", *_POLICIES)


def with_remat(fns: ModelFns, policy: str = "full") -> ModelFns:
    """`fns` that keeps only what `policy` names between forward and backward; same numbers, less memory.

    policy: none, full (keeps nothing), dots_saveable (keeps matrix products), ... as in
    jax.checkpoint_policies. Raises: ConfigError for another.
    """
    if policy == "none":
        return fns
    if policy not in _POLICIES:
        raise ConfigError(f"remat={policy!r} is not a policy. HINT: {nearest(policy, REMAT)}")

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        run = jax.checkpoint(lambda p, s, x, k: fns.apply(p, s, x, k, train), policy=_POLICIES[policy])
        return run(params, model_state, inputs, key)

    return ModelFns(fns.init, apply)
