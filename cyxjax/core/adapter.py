"""One shape for every model: two pure functions, from linen, nnx, a pair or a SequentialModel."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from cyxjax.core.batch_stats import WeightedBatchNorm, linen_batch_norm
from cyxjax.errors import ConfigError

PyTree = Any


class ModelFns(NamedTuple):
    """A model as values. `model_state` changes without a gradient (running statistics); {} if none."""

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    """(key, inputs (B, ...)) -> (params, model_state)"""
    apply: Callable[[PyTree, PyTree, PyTree, jax.Array, bool], tuple[PyTree, PyTree]]
    """(params, model_state, inputs, key, train) -> (output, model_state)"""


def adapt(model: Any) -> ModelFns:
    """`model` as `ModelFns`.

    Raises: ConfigError for anything that is not a Flax module, an (init, apply) pair or a SequentialModel.
    """
    if isinstance(model, ModelFns):
        return model
    if hasattr(model, "to_model_fns"):
        return ModelFns(*model.to_model_fns())
    if isinstance(model, linen.Module):
        return _from_linen(model)
    if isinstance(model, nnx.Module):
        return _from_nnx(model)
    if isinstance(model, tuple) and len(model) == 2 and all(callable(f) for f in model):
        return _from_pair(*model)
    raise ConfigError(
        f"{type(model).__name__} is not a model cyxjax knows; expected a flax.linen or flax.nnx Module, "
        "a pair (init, apply) or a cx.SequentialModel. HINT: for other libraries pass (init, apply) with "
        "init(key, inputs) -> params and apply(params, inputs) -> output."
    )


_TRAIN_ARGS = {"train": True, "training": True, "is_training": True, "deterministic": False}
"""Call keywords by which Flax models are told they train, and the value that says so."""


def _mode(call: Callable, train: bool) -> dict[str, bool]:
    known = inspect.signature(call).parameters
    return {name: is_train is train for name, is_train in _TRAIN_ARGS.items() if name in known}


def _from_linen(module: linen.Module) -> ModelFns:
    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        variables = dict(
            jax.jit(lambda k, x: module.init(k, x, **_mode(module.__call__, False)))(keys, inputs)
        )
        return variables.pop("params", {}), variables

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        variables = {"params": params, **model_state}
        mode = _mode(module.__call__, train)
        if not train:
            return module.apply(variables, inputs, **mode), model_state
        with linen.intercept_methods(linen_batch_norm):
            output, new_state = module.apply(
                variables, inputs, mutable=list(model_state), rngs={"dropout": key}, **mode
            )
        return output, dict(new_state)

    return ModelFns(init, apply)


def _from_nnx(module: nnx.Module) -> ModelFns:
    """nnx models are born with values: `init` returns those and ignores its key."""
    model = nnx.clone(module)
    for _, part in nnx.iter_modules(model):
        if type(part) is nnx.BatchNorm:
            part.__class__ = WeightedBatchNorm
    graphs = {}
    for train in (False, True):  # the mode is static structure in nnx: one graph each
        (model.train if train else model.eval)()
        graphs[train], params, keys, counts, rest = nnx.split(model, nnx.Param, nnx.RngKey, nnx.RngCount, ...)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        del key, inputs
        return jax.tree.map(jnp.array, (nnx.to_pure_dict(params), nnx.to_pure_dict(rest)))

    def apply(p: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        states = [_filled(params, p), _rekeyed(keys, key), counts, _filled(rest, model_state)]
        whole = nnx.merge(graphs[train], *states, copy=True)
        output = whole(inputs, **_mode(type(whole).__call__, train))
        return output, nnx.to_pure_dict(nnx.state(whole, _is_rest)) if train else model_state

    return ModelFns(init, apply)


def _is_rest(path: Any, value: Any) -> bool:
    del path
    return isinstance(value, nnx.Variable) and not isinstance(value, nnx.Param | nnx.RngKey | nnx.RngCount)


def _filled(template: nnx.State, values: PyTree) -> nnx.State:
    """`template` holding `values` (a pure dict), without touching `template`."""
    state = jax.tree.map(lambda x: x, template)
    nnx.replace_by_pure_dict(state, values)
    return state


def _rekeyed(keys: nnx.State, key: jax.Array) -> nnx.State:
    """The model's random streams, keyed anew from this step's key: draws depend on nothing else."""
    leaves, tree = jax.tree.flatten(keys)
    return jax.tree.unflatten(tree, [jax.random.fold_in(key, i) for i in range(len(leaves))])


def _from_pair(init: Callable, apply: Callable) -> ModelFns:
    """Pairs may leave out what they do not use: apply(params, inputs), with `key` and `train` by name."""
    known = inspect.signature(apply).parameters
    full = "model_state" in known

    def init_fns(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        made = init(key, inputs)
        return made if full else (made, {})

    def apply_fns(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        extra = {n: v for n, v in (("key", key), ("train", train)) if n in known}
        if full:
            return apply(params, model_state, inputs, **extra)
        return apply(params, inputs, **extra), model_state

    return ModelFns(init_fns, apply_fns)
