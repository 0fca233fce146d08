"""Flax's BatchNorm in the forms that users write, compared with the plain module on rows without padding.

Norms exclude padding if the batch is the first dimension of their input; otherwise they return NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from cyxjax.core import phases
from cyxjax.core.mesh import AXIS
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.batch_stats import StatsAxes, needs_full_batches
from cyxjax.errors import ConfigError
from cyxjax.models import BatchNormModule, SequentialModel

KEY = jax.random.key(0)
forward = jax.jit(phases.forward, static_argnums=(0, 6))  # the functions of the model, and the axes
X = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
MASK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]], bool)[..., None]
X[~MASK[..., 0]] = np.nan  # a masked value may be anything
ROWS = np.float32([1, 1, 1, 0])  # the last row is padding
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # Flax computes E[x^2] - E[x]^2, ours makes two passes


class Halved(linen.BatchNorm):
    def __call__(self, x, mask=None):
        return super().__call__(x, mask=mask) / 2


class Within(linen.Module):
    norm: type

    @linen.compact
    def __call__(self, x, train=False):
        return self.norm(use_running_average=not train, momentum=0.5)(x, mask=MASK[: len(x)])


class NnxHalved(nnx.BatchNorm):
    def __call__(self, x, **named):
        return super().__call__(x, **named) / 2


class NnxMasked(nnx.Module):
    def __init__(self, norm):
        self.norm = norm(2, momentum=0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x, mask=MASK[: len(x)])


def by_hand(module, x):
    """(output, running mean) of a training call in plain Flax."""
    if isinstance(module, nnx.Module):
        module = nnx.clone(module)
        module.train()
        return module(x), module.norm.mean[...]
    output, state = module.apply(module.init(KEY, x), x, train=True, mutable=["batch_stats"])
    return output, jax.tree.leaves(state["batch_stats"])[0]


MODELS = {
    "linen mask": Within(linen.BatchNorm),
    "linen own call": Within(Halved),
    "nnx mask": NnxMasked(nnx.BatchNorm),
    "nnx own call": NnxMasked(NnxHalved),
}


@pytest.mark.parametrize("module", MODELS.values(), ids=MODELS)
def test_a_mask_and_padding_count_together(module):
    # Flax's result for only the three real rows; the fourth has a value that would be noticed.
    fns = adapt(module)
    output, _, state = forward(fns, *fns.init(KEY, X), X, jnp.asarray(ROWS), KEY)
    real, mean = by_hand(module, X[:3])
    np.testing.assert_allclose(
        np.asarray(output)[:3][MASK[:3, :, 0]], np.asarray(real)[MASK[:3, :, 0]], **TOLERANCE
    )
    found = state["batch_stats"] if isinstance(module, linen.Module) else state
    np.testing.assert_allclose(jax.tree.leaves(found)[0], mean, **TOLERANCE)


@pytest.mark.parametrize(
    "module", [*MODELS.values(), SequentialModel([BatchNormModule(2)])], ids=[*MODELS, "sequential"]
)
def test_a_batch_without_samples_leaves_the_running_statistics_as_they_are(module):
    # Two replicas, the second without samples: statistics over both count the samples of the first.
    fns, x, rows = adapt(module), np.nan_to_num(X), jnp.asarray([ROWS, 0 * ROWS])
    params, state = fns.init(KEY, x)
    run = lambda state, weight, axes: forward(fns, params, state, x, weight, KEY, axes)[2]  # noqa: E731
    after = run(state, rows[0], StatsAxes())
    jax.tree.map(np.testing.assert_array_equal, run(after, rows[1], StatsAxes()), after)
    both = jax.vmap(lambda weight: run(state, weight, StatsAxes(AXIS)), axis_name=AXIS)(rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, **TOLERANCE), both, after)


def test_the_users_own_nnx_module_keeps_its_classes():
    module = NnxMasked(NnxHalved)
    adapt(module)
    assert type(module.norm) is NnxHalved


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int32])
def test_the_output_has_the_dtype_that_flax_gives(dtype):
    module, x = linen.BatchNorm(), jnp.ones((4, 2), dtype)
    fns = adapt(module)
    with jax.numpy_dtype_promotion("standard"):
        params, state = fns.init(KEY, x)
        output = forward(fns, params, state, x, None, KEY)[0]
        assert output.dtype == module.apply({"params": params, **state}, x, use_running_average=True).dtype


def asking(kind, **fields):
    return nnx.BatchNorm(2, rngs=nnx.Rngs(0), **fields) if kind == "nnx" else linen.BatchNorm(**fields)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("name", ["batch", AXIS])
def test_a_norm_that_asks_for_all_replicas_gets_them(kind, name):
    fns, x = adapt(asking(kind, axis_name=name)), X[:2, 0]  # two replicas of one row each
    params, state = fns.init(KEY, x)
    run = lambda row: forward(fns, params, state, row[None], None, KEY, StatsAxes(asked=AXIS))[0]  # noqa: E731
    outputs = jax.vmap(run, axis_name=AXIS)(x)[:, 0]
    np.testing.assert_allclose(outputs, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), **TOLERANCE)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("fields", "axes"),
    [
        ({"axis_name": "batch"}, StatsAxes(refused="each part has its own")),
        ({"axis_name": "batch", "axis_index_groups": [[0, 1]]}, StatsAxes(asked=AXIS)),
    ],
    ids=["parts", "groups"],
)
def test_a_norm_that_asks_where_replicas_are_apart_is_refused(kind, fields, axes):
    fns = adapt(asking(kind, **fields))
    with pytest.raises(ConfigError, match="BatchNorm .*axis_"):
        phases.forward(fns, *fns.init(KEY, X[:, 0]), X[:, 0], None, KEY, axes)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_complex_numbers_are_refused(kind):
    """They were normalised without their imaginary parts."""
    fns = adapt(asking(kind))
    state = fns.init(KEY, X[:, 0])
    with pytest.raises(ConfigError, match="BatchNorm .*complex"):
        phases.forward(fns, *state, X[:, 0] + 1j, None, KEY)


def test_statistics_of_float64_are_float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        x = np.random.default_rng(0).normal(size=(64, 3)) + 1e5  # in float32 its deviations have 3 digits
        fns = adapt(linen.BatchNorm(param_dtype=jnp.float64))
        output = phases.forward(fns, *fns.init(KEY, x), jnp.asarray(x), None, KEY)[0]
        np.testing.assert_allclose(output, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), rtol=1e-6)


def test_an_axis_that_the_model_maps_over_is_its_own():
    class Mapped(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            norm = linen.vmap(
                linen.BatchNorm,
                in_axes=1,
                out_axes=1,
                axis_name="heads",
                variable_axes={"params": None, "batch_stats": None},
                split_rngs={"params": False},
            )
            return norm(use_running_average=not train, axis_name="heads")(x)

    x, fns = np.nan_to_num(X), adapt(Mapped())
    output = forward(fns, *fns.init(KEY, x), x, None, KEY, StatsAxes(asked=AXIS))[0]
    np.testing.assert_allclose(output, (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-5), **TOLERANCE)


B, T, F = 3, 3, 2  # as many steps as samples: sizes do not distinguish them
CUBE = np.random.default_rng(0).normal(size=(B, T, F)).astype(np.float32) + np.arange(B)[:, None, None]
PADDED = np.float32([1, 1, 0])


def views(norm, x):
    first, _ = jnp.split(norm(jnp.concatenate([x, x + 1])), 2)
    return first


BATCH_FIRST = {
    "as it is": lambda norm, x: norm(x),
    "within jit": lambda norm, x: norm(jax.jit(jax.nn.relu)(x)),
    "flattened samples": lambda norm, x: norm(x.reshape(-1, T * F)).reshape(x.shape),
}
OTHER = {
    "time first": lambda norm, x: norm(x.swapaxes(0, 1)).swapaxes(0, 1),
    "joined": lambda norm, x: norm(x.reshape(-1, F)).reshape(x.shape),
    "two views": views,
    "no sample": lambda norm, x: x + norm(jnp.arange(6.0).reshape(1, 3, 2)),
    "of pairs": lambda norm, x: x + norm(x[:, None] - x[None])[0],
    "in groups": lambda norm, x: norm(x.reshape(3, -1, T * F)).reshape(x.shape),
}
FORMS = BATCH_FIRST | OTHER
# Shapes with 3 samples and 3 steps hide these in the step; `needs_full_batches` is called before it.
SAME_SHAPE = ("time first", "of pairs", "in groups")


class Net(linen.Module):
    form: str

    @linen.compact
    def __call__(self, x, train=False):
        return FORMS[self.form](linen.BatchNorm(use_running_average=not train), x)


def of(form):
    fns = adapt(Net(form))
    return fns, *fns.init(KEY, CUBE)


def run(form, x, weight):
    fns, params, state = of(form)
    output, _, after = forward(fns, params, state, x, weight, KEY)
    return np.asarray(output), jax.tree.map(np.asarray, after)


@pytest.mark.parametrize("form", FORMS)
def test_which_norms_need_full_batches(form):
    fns, params, state = of(form)
    assert bool(needs_full_batches(fns, params, state, CUBE, KEY)) is (form in OTHER)


@pytest.mark.parametrize("form", FORMS)
def test_padding_counts_nowhere_or_gives_no_numbers(form):
    if form in OTHER:
        if form not in SAME_SHAPE:
            assert np.isnan(run(form, CUBE, jnp.asarray(PADDED))[0]).all()
        # Without padding no information is needed.
        (output, state), (expected, after) = run(form, CUBE, jnp.ones(B)), run(form, CUBE, None)
    else:
        (output, state), (expected, after) = run(form, CUBE, jnp.asarray(PADDED)), run(form, CUBE[:2], None)
    np.testing.assert_allclose(output[: len(expected)], expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, after)
