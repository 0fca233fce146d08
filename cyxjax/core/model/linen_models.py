"""flax.linen modules as `ModelFns`; only a model of theirs loads this file, and with it half of Flax."""

import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
from flax import linen
from flax.errors import InvalidRngError

from cyxjax.core.model.batch_stats import as_axes, normalise, weighted_moments
from cyxjax.core.model.model_fns import ModelFns, call_mode

PyTree = Any
# For the code that draws first values. An MLP's (CPU, jax 0.10.2) took 0.35 s to compile instead of 0.9 s,
# ran as fast and gave the same bits; level 0 made it five times slower.
_RUN_ONCE = {"xla_backend_optimization_level": 1}
_MISSING = re.compile(r'needs PRNG for "([^"]+)"')


def from_linen(module: linen.Module) -> ModelFns:
    def values(key: jax.Array, inputs: PyTree) -> PyTree:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        mode: Any = call_mode(module.__call__, False)
        return module.init(keys, inputs, **mode)

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        # Within a trace (`jax.eval_shape`) nothing is compiled, and jax refuses options there.
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((key, inputs)))
        draw = values if traced else jax.jit(values, compiler_options=_RUN_ONCE)
        variables = dict(draw(key, inputs))
        return variables.pop("params", {}), variables

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        variables = {"params": params, **model_state}
        mode: Any = call_mode(module.__call__, train)
        if not train:
            return module.apply(variables, inputs, **mode), model_state

        def run(rngs: dict[str, jax.Array]) -> Any:
            with linen.intercept_methods(_batch_norm):
                return module.apply(variables, inputs, mutable=list(model_state), rngs=rngs, **mode)

        output, new_state = _with_streams(run, key)
        return output, dict(new_state)

    return ModelFns(init, apply)


def _with_streams(run: Callable[[dict[str, jax.Array]], Any], key: jax.Array) -> Any:
    """run(random streams by name): `dropout`, and whatever else it turns out to ask for.

    A stream's key depends on its name alone. Flax tells a name only where it misses it; it would take
    `params` for any, but also inside a `scan` that does not split it: one mask for all steps, in silence.
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


def _batch_norm(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    """A `linen.intercept_methods` interceptor: BatchNorm in training with our statistics.

    Everything but the statistics is the module's own: its momentum, epsilon, dtype and variables.
    """
    module = context.module
    if not isinstance(module, linen.BatchNorm) or context.method_name != "__call__":
        return next_fun(*args, **kwargs)
    running = linen.merge_param(
        "use_running_average",
        module.use_running_average,
        kwargs.get("use_running_average", args[1] if len(args) > 1 else None),
    )
    if running or module.is_initializing():
        return next_fun(*args, **kwargs)
    x = args[0] if args else kwargs["x"]
    features = as_axes(module.axis, x.ndim)
    mean, var = weighted_moments(x, features)
    for name, batch in (("mean", mean), ("var", var)):
        old: jax.Array = module.get_variable("batch_stats", name)
        module.put_variable("batch_stats", name, module.momentum * old + (1 - module.momentum) * batch)
    scale = module.get_variable("params", "scale") if module.use_scale else None
    bias = module.get_variable("params", "bias") if module.use_bias else None
    return normalise(x, mean, var, scale, bias, features, module.epsilon, module.dtype)
