"""Low-rank adapters (two thin matrices beside each chosen kernel), and frozen parameters.

    kernel' = kernel + (alpha / rank) * a @ b,   a (in, rank) drawn, b (rank, out) zero at first

In the tree of parameters they are next to their kernel, `Dense_0/kernel_lora_a` and `..._lora_b`, so they
work with a model of any kind (linen, nnx, a pair), and the base parameters keep their names.
Source: Hu et al. 2021, arXiv:2106.09685.
"""

import zlib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.trees import PyTree, leaf_names, path_name
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
        params, model_state = fns.init(key, inputs)
        found: list[str] = []

        def beside(name: str, leaf: Any) -> dict[str, Any]:
            if getattr(leaf, "ndim", 0) < 2 or not any(fnmatchcase(name, p) for p in plan.patterns):
                return {}
            found.append(name)
            rows, columns = int(np.prod(leaf.shape[:-1])), leaf.shape[-1]
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            drawn = jax.random.normal(own, (rows, plan.rank), jnp.float32) / np.float32(np.sqrt(rows))
            return {A: drawn.astype(leaf.dtype), B: jnp.zeros((plan.rank, columns), leaf.dtype)}

        adapted = _grown(params, "", beside)
        if not found:
            raise ConfigError(
                f"lora.pattern {' '.join(plan.patterns)} matches no parameter of two dimensions or more. "
                f"HINT: use names such as {', '.join(leaf_names(params)[:4])}.",
                key="lora.pattern",
            )
        return adapted, model_state

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        return fns.apply(merged(params, plan), model_state, inputs, key, train)

    # Adapters are used in the dtype they are kept in: do not gather their parts in the model's 16 bits.
    return fns._replace(init=init, apply=apply, computes=None)


def merged(params: PyTree, plan: LoraPlan) -> PyTree:
    """`params` with adapters merged into their kernels and removed; host arrays stay on the host."""
    if not isinstance(params, Mapping):
        return params
    out = {}
    for name, value in params.items():
        if isinstance(name, str) and is_adapter(name):
            continue
        a, b = params.get(f"{name}{A}"), params.get(f"{name}{B}")
        if a is not None:
            value = value + ((a @ b) * np.asarray(plan.scale, a.dtype)).reshape(value.shape)
        out[name] = merged(value, plan)
    return out


def _grown(tree: PyTree, above: str, beside: Callable[[str, Any], dict[str, Any]]) -> PyTree:
    """`tree` with the leaves that `beside` returns added next to each leaf; only in dicts."""
    if not isinstance(tree, Mapping):
        return tree
    out = {}
    for name, value in tree.items():
        out[name] = _grown(value, f"{above}{name}/", beside)
        if not isinstance(value, Mapping):
            out |= {f"{name}{end}": leaf for end, leaf in beside(f"{above}{name}", value).items()}
    return out


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
