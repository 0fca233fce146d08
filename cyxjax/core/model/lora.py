"""Low-rank adapters (two thin matrices beside each chosen kernel), and frozen parameters.

    kernel' = kernel + (alpha / rank) * a @ b,   a (in, rank) drawn, b (rank, out) zero at first

In the tree of parameters they are next to their kernel, `Dense_0/kernel_lora_a` and `..._lora_b`, so they
work with a model of any kind (linen, nnx, a pair), and the base parameters keep their names.
Source: Hu et al. 2021, arXiv:2106.09685.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.trees import PyTree, leaf_names, matches, path_name
from cyxjax.errors import ConfigError

A, B = "_lora_a", "_lora_b"
ADAPTERS = (f"*{A}", f"*{B}")  # patterns of their names


class LoraPlan(NamedTuple):
    """Which kernels get adapters; rank 0: none."""

    rank: int = 0
    alpha: float = 16.0
    patterns: tuple[str, ...] = ("*kernel",)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def with_lora(fns: ModelFns, plan: LoraPlan) -> ModelFns:
    """`fns` with adapters, equal to `fns` at the start. Parameters without adapters are used as they are.

    A kernel of more than two dimensions is used as a matrix (all dimensions but the last, the last).
    Raises: ConfigError, from `init`, if no leaf of two dimensions or more matches.
    """
    if not plan.rank:
        return fns

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        from flax.traverse_util import unflatten_dict

        params, model_state = fns.init(key, inputs)
        leaves, adapters = _by_path(params), {}
        for path, leaf in leaves.items():
            name = "/".join(map(str, path))
            if getattr(leaf, "ndim", 0) < 2 or not matches(name, plan.patterns):
                continue
            rows, columns = int(np.prod(leaf.shape[:-1])), leaf.shape[-1]
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            drawn = jax.random.normal(own, (rows, plan.rank), jnp.float32) / np.float32(np.sqrt(rows))
            adapters[_beside(path, A)] = drawn.astype(leaf.dtype)
            adapters[_beside(path, B)] = jnp.zeros((plan.rank, columns), leaf.dtype)
        if not adapters:
            raise ConfigError(
                f"lora.pattern {' '.join(plan.patterns)} matches no parameter of two dimensions or more. "
                f"HINT: use names such as {', '.join(leaf_names(params)[:4])}.",
                key="lora.pattern",
            )
        return unflatten_dict(leaves | adapters), model_state

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        return fns.apply(merged(params, plan), model_state, inputs, key, train)

    # Adapters are used in the dtype they are kept in: do not gather their parts in the model's 16 bits.
    return fns._replace(init=init, apply=apply, computes=None)


def merged(params: PyTree, plan: LoraPlan) -> PyTree:
    """`params` with adapters merged into their kernels and removed; host arrays stay on the host."""
    from flax.traverse_util import unflatten_dict

    leaves = _by_path(params)
    out = {path: leaf for path, leaf in leaves.items() if not is_adapter(str(path[-1]))}
    for path, leaf in out.items():
        a, b = leaves.get(_beside(path, A)), leaves.get(_beside(path, B))
        if a is not None:
            out[path] = leaf + ((a @ b) * np.asarray(plan.scale, a.dtype)).reshape(leaf.shape)
    return unflatten_dict(out) if leaves else params


def _by_path(params: PyTree) -> dict[tuple, Any]:
    """{keys from the root: leaf}; empty for a tree that is not made of dicts."""
    from flax.traverse_util import flatten_dict

    return flatten_dict(params, keep_empty_nodes=True) if isinstance(params, Mapping) else {}


def _beside(path: tuple, end: str) -> tuple:
    return (*path[:-1], f"{path[-1]}{end}")


def with_frozen(fns: ModelFns, is_frozen: Callable[[str], bool] | None) -> ModelFns:
    """`fns` with gradient 0 for frozen parameters: it is not computed, and does not count in clipping."""
    if is_frozen is None:
        return fns

    def apply(params: PyTree, *rest: Any) -> tuple[PyTree, PyTree]:
        held = jax.tree_util.tree_map_with_path(
            lambda path, leaf: lax.stop_gradient(leaf) if is_frozen(path_name(path)) else leaf, params
        )
        return fns.apply(held, *rest)

    return fns._replace(apply=apply)
