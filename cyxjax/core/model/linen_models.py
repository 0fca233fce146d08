"""flax.linen modules as `ModelFns`; imported only for such a model, because it loads half of Flax."""

import dataclasses
import inspect
import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import linen
from flax.errors import InvalidRngError

from cyxjax.core.model.batch_stats import (
    is_of_the_model,
    moments_of,
    moved,
    normalise,
    unweighed,
)
from cyxjax.core.model.first_values import draw
from cyxjax.core.model.model_fns import MODES, ModelFns, Sown, call_arguments, call_mode
from cyxjax.core.model.outputs import holds_losses, sum_of_sown
from cyxjax.core.trees import PyTree, is_traced
from cyxjax.errors import translated

_MISSING = re.compile(r'needs PRNG for "([^"]+)"')


@jax.jit
def _keys(key: jax.Array) -> dict[str, jax.Array]:
    return dict(zip(("params", "dropout"), jax.random.split(key), strict=True))


def from_linen(module: linen.Module) -> ModelFns:
    """A module as `ModelFns`; a module that is bound to variables starts with these.

    Values sown into a collection whose last word is `loss` or `losses` (`self.sow("losses", "a", value_B)`)
    are added to the loss of each sample in training (`core/model/outputs.py`); values sown elsewhere are
    ignored and are not part of the model's state.
    """
    bound = module.scope is not None
    module, held = module.unbind() if bound else (module, {})

    def values(key: jax.Array, keys: dict[str, jax.Array], inputs: PyTree) -> PyTree:
        called, (args, named) = _called(module, inputs, key, False)
        with translated():
            return called.init(keys, *args, **named)

    # Traced once for both shapes and values: with 2,000 leaves a trace takes seconds.
    values_of = jax.jit(values, inline=True)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        # Within a trace (`jax.eval_shape`) nothing is compiled, and jax refuses options there.
        draws = values_of if is_traced((key, inputs)) else partial(draw, values_of)
        drawn = draws(key, _keys(key), inputs)
        variables = {**drawn, **held}
        for name in _sown_collections(variables):
            del variables[name]
        return variables.pop("params", {}), variables

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        called, (args, named) = _called(module, inputs, key, train)

        def run(mutable: Any) -> tuple[Any, PyTree]:
            variables = {"params": params, **model_state}
            call = partial(called.apply, variables, *args, mutable=mutable, **named)
            with translated(), linen.intercept_methods(_batch_norm):
                return _with_streams(lambda rngs: call(rngs=rngs), key)

        if not train:
            return run([])[0], model_state
        output, after = run(linen.DenyList(["params", "intermediates"]))
        new = after.keys() - model_state.keys()
        losses = sorted(filter(holds_losses, new))
        if new - _sown_collections(after):  # state that `init` did not make: flax refuses it
            output, after = run([*model_state, *losses])
        if own := [(name, leaf) for name in losses for leaf in jax.tree.leaves(after[name])]:
            output = Sown(output, sum_of_sown(own, inputs))
        return output, {name: after.get(name, old) for name, old in model_state.items()}

    # Found by the name of the field: flax does not record what `nn.remat` wraps.
    return ModelFns(init, apply, recomputes=getattr(module, "remat", False) is True)


def _called(module: linen.Module, inputs: PyTree, key: jax.Array, train: bool) -> tuple[Any, tuple]:
    """(the module in its mode, its call's arguments). The mode is an argument or else a field."""
    arguments = call_arguments(module.__call__, inputs, key, train)
    if call_mode(module.__call__, train):
        return module, arguments
    return _in_mode(module, train), arguments


def _in_mode(module: linen.Module, train: bool) -> linen.Module:
    """`module` with the mode set in its field, or in one of its configuration; unchanged without one."""
    changed: dict[str, Any] = {}
    for one in dataclasses.fields(module):
        value = getattr(module, one.name, None)
        if one.name in MODES and (value is None or isinstance(value, bool)):
            changed[one.name] = MODES[one.name] is train
        elif dataclasses.is_dataclass(value) and not isinstance(value, linen.Module | type):
            inner = {f.name: MODES[f.name] is train for f in dataclasses.fields(value) if f.name in MODES}
            changed |= {one.name: dataclasses.replace(value, **inner)} if inner else {}
    return module.clone(**changed) if changed else module


def _sown_collections(variables: PyTree) -> set[str]:
    """Names of the collections that modules sow into: `intermediates`, losses, those that hold tuples."""

    def is_sown(leaf: Any) -> bool:
        return type(leaf) is tuple

    return {
        name
        for name, tree in variables.items()
        if name == "intermediates"
        or holds_losses(name)
        or any(map(is_sown, jax.tree.leaves(tree, is_leaf=is_sown)))
    }


def _with_streams(run: Callable[[dict[str, jax.Array]], Any], key: jax.Array) -> Any:
    """run(random streams by name): `dropout`, and the others that it uses.

    A stream's key depends only on its name. Flax names a stream only when it is missing. It would use
    `params` for any stream, but also in a `scan` that does not split it: one mask for all steps, unnoticed.
    """
    streams = {"dropout": key}
    while True:
        try:
            return run(streams)
        except InvalidRngError as err:
            found = _MISSING.search(str(err))
            if found is None or found[1] in streams:
                raise
            streams[found[1]] = jax.random.fold_in(key, zlib.crc32(found[1].encode()))


_FLAX_CALL = inspect.unwrap(linen.BatchNorm.__call__)


def _batch_norm(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    """A `linen.intercept_methods` interceptor that gives BatchNorm cyxjax's statistics in training.

    Everything else is the module's own: its momentum, epsilon, dtype and variables. A subclass that overrides
    `__call__` is intercepted where it calls the inherited one.
    """
    module = context.module
    if not isinstance(module, linen.BatchNorm) or context.orig_method.func is not _FLAX_CALL:
        return next_fun(*args, **kwargs)
    running = linen.merge_param(
        "use_running_average",
        module.use_running_average,
        kwargs.get("use_running_average", args[1] if len(args) > 1 else None),
    )
    if running or module.is_initializing():
        return next_fun(*args, **kwargs)
    if is_of_the_model(module.axis_name):
        return unweighed(next_fun(*args, **kwargs))
    x = args[0] if args else kwargs["x"]
    mean, var, count = moments_of(module, x, kwargs.get("mask"))
    for name, batch in (("mean", mean), ("var", var)):
        old: jax.Array = module.get_variable("batch_stats", name)
        module.put_variable("batch_stats", name, moved(old, batch, module.momentum, count))
    scale = module.get_variable("params", "scale") if module.use_scale else None
    bias = module.get_variable("params", "bias") if module.use_bias else None
    return normalise(module, x, mean, var, scale, bias)
