"""A model some of whose parameters take no gradient."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.trees import path_name

PyTree = Any


def with_frozen(fns: ModelFns, is_frozen: Callable[[str], bool] | None) -> ModelFns:
    """`fns` whose gradient is 0 for the parameters so named: nothing is computed for it, or clipped by it."""
    if is_frozen is None:
        return fns

    def apply(params: PyTree, *rest: Any) -> tuple[PyTree, PyTree]:
        held = jax.tree_util.tree_map_with_path(
            lambda path, leaf: lax.stop_gradient(leaf) if is_frozen(path_name(path)) else leaf, params
        )
        return fns.apply(held, *rest)

    return fns._replace(apply=apply)
