"""flax.nnx modules as `ModelFns`; imported only for such a model, because it loads half of Flax."""

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cyxjax.core.model.batch_stats import (
    is_of_the_model,
    moments_of,
    moved,
    normalise,
    unweighed,
)
from cyxjax.core.model.model_fns import ModelFns, Sown, call_arguments
from cyxjax.core.model.outputs import holds_losses, sum_of_sown
from cyxjax.core.trees import PyTree

_CAPITAL = re.compile(r"(?=[A-Z][a-z])")  # where a word of a class name begins
_PARTS: Any = (nnx.Param, nnx.RngKey, nnx.RngCount, ...)


def from_nnx(module: nnx.Module) -> ModelFns:
    """A module as `ModelFns`. nnx models have values: `init` returns copies of them and ignores its key.

    Values that a call sows into a variable type whose last word is `Loss` or `Losses` are added to the loss
    (`core/model/outputs.py`).
    """
    draw_missing_values(module)
    model = nnx.clone(module)
    nnx.pop(model, is_sown)  # by calls before training
    for _, part in nnx.iter_modules(model):
        if isinstance(part, nnx.BatchNorm):
            part.__class__ = _weighted(type(part))
    graphs: dict[bool, Any] = {}
    for train in (False, True):  # the mode is static structure in nnx: one graph each
        (model.train if train else model.eval)()
        graphs[train], *states = nnx.split(model, *_PARTS)
    params, keys, counts, rest = states
    known = {path for path, _ in nnx.to_flat_state(rest)}

    def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        return jax.tree.map(jnp.array, (nnx.to_pure_dict(params), nnx.to_pure_dict(rest)))

    def apply(p: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        states = [_filled(params, p), _rekeyed(keys, key), counts, _filled(rest, model_state)]
        whole = nnx.merge(graphs[train], *states, copy=True)
        as_rngs = lambda name, key: nnx.Rngs(key) if name == "rngs" else key  # noqa: E731
        args, named = call_arguments(whole.__call__, inputs, key, train, as_rngs)
        output = whole(*args, **named)
        *_, after = nnx.state(whole, *_PARTS)  # not the random streams: each step has new keys
        found = nnx.to_flat_state(after)
        losses = [v for path, v in found if path not in known and _is_loss(v)]
        own = [(type(v).__name__, leaf) for v in losses for leaf in jax.tree.leaves(v.get_value())]
        if train and own:
            output = Sown(output, sum_of_sown(own, inputs))
        kept = nnx.from_flat_state([(path, v) for path, v in found if path in known])  # a call may sow more
        return output, nnx.to_pure_dict(kept)

    return ModelFns(init, apply)


def draw_missing_values(module: nnx.Module) -> None:
    """Draws the values of parts of `module` that draw them on first use (`SequentialModel`)."""
    for _, part in nnx.iter_modules(module):
        if hasattr(part, "ensure_values"):
            part.ensure_values()


def is_sown(path: Any, leaf: Any) -> bool:
    """Whether a call sowed this leaf of a module: an intermediate value, or a tuple of losses."""
    return isinstance(leaf, nnx.Intermediate) or (_is_loss(leaf) and isinstance(leaf.get_value(), tuple))


def _is_loss(leaf: Any) -> bool:
    """Whether the type of this leaf of a module is named for losses (`AuxLoss`)."""
    return holds_losses(_CAPITAL.sub("_", type(leaf).__name__).lower())


def _filled(template: nnx.State, values: PyTree) -> nnx.State:
    """`template` holding `values` (a pure dict), without touching `template`."""
    state = jax.tree.map(lambda x: x, template)
    nnx.replace_by_pure_dict(state, values)
    return state


def _rekeyed(keys: nnx.State, key: jax.Array) -> nnx.State:
    """The model's random streams with keys from this step's key: draws depend on nothing else."""
    leaves, tree = jax.tree.flatten(keys)

    def own(i: int, old: jax.Array) -> jax.Array:
        new = jax.random.fold_in(key, i)
        # Layers stacked by `nnx.split_rngs` and `nnx.vmap` hold a key for each layer.
        return jax.random.split(new, old.shape) if old.shape else new

    return jax.tree.unflatten(tree, [own(i, old) for i, old in enumerate(leaves)])


class WeightedBatchNorm(nnx.BatchNorm):
    """`nnx.BatchNorm` with cyxjax's training statistics; the adapter gives its copy of a model this class."""

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        running = self.use_running_average if use_running_average is None else use_running_average
        if running is not False:
            return super().__call__(x, use_running_average, mask=mask)
        if is_of_the_model(self.axis_name):
            return unweighed(super().__call__(x, use_running_average, mask=mask))
        mean, var, count = moments_of(self, x, mask)
        self.mean[...] = moved(self.mean[...], mean, self.momentum, count)
        self.var[...] = moved(self.var[...], var, self.momentum, count)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        return normalise(self, x, mean, var, scale, bias)


@cache
def _weighted(norm: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """`norm` with `WeightedBatchNorm` in place of `nnx.BatchNorm`; its own methods are kept."""
    if norm in (nnx.BatchNorm, WeightedBatchNorm):
        return WeightedBatchNorm
    return type(norm.__name__, (norm, WeightedBatchNorm), {})
