"""`max_pool` against flax's: the same bits in value and gradient, whatever the windows hold."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import cyxjax as cx
from cyxjax.models import convolution
from cyxjax.models.networks import CNN
from cyxjax.models.resnet import resnet18

VALUES = [-np.inf, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0]  # few: most windows hold ties


def bits(a):
    return np.asarray(a).view(np.dtype(f"uint{8 * a.dtype.itemsize}"))


def both(x, window, strides, padding, seed=0):
    """((value, gradient) of ours, of flax's) for one random cotangent."""
    results = []
    for pool in (cx.max_pool, nn.max_pool):
        results.append(_pulled(x, seed, lambda x, pool=pool: pool(x, window, strides, padding)))
    return results


@partial(jax.jit, static_argnums=(1, 2))  # op by op each of the views would be a program of its own
def _pulled(x, seed, run):
    y, pullback = jax.vjp(run, x)
    g = np.random.default_rng(seed).normal(size=y.shape).astype(x.dtype)
    return y, pullback(jnp.asarray(g))[0]


def assert_same(ours, flax):
    for mine, other in zip(ours, flax, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(other))  # a NaN's payload is nobody's
        kept = ~np.isnan(np.asarray(mine, np.float32))
        np.testing.assert_array_equal(bits(mine)[kept], bits(other)[kept])


@st.composite
def cases(draw):
    dims = draw(st.integers(1, 2))
    window, strides = (tuple(draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims))) for _ in "ws")
    sides = draw(st.lists(st.integers(3, 6), min_size=dims, max_size=dims))
    pad = st.tuples(st.integers(0, 2), st.integers(0, 2))
    padding = draw(st.sampled_from(["VALID", "SAME"]) | st.lists(pad, min_size=dims, max_size=dims))
    values = [*VALUES, np.nan] if draw(st.booleans()) else VALUES
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.choice(np.float32(values), (2, *sides, 2)), window, strides, padding


@pytest.mark.parametrize("examples", [12, pytest.param(40, marks=(pytest.mark.slow, pytest.mark.wide))])
def test_values_and_gradients_are_flaxs_to_the_bit(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(cases())
    def holds(case):
        x, window, strides, padding = case
        assert_same(*both(jnp.asarray(x), window, strides, padding))

    holds()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(("window", "strides"), [((2, 2), (2, 2)), ((3, 3), (2, 2))])
def test_16_bit_images(dtype, window, strides):
    x = jnp.asarray(np.random.default_rng(0).choice(np.float32(VALUES), (2, 7, 8, 3)), dtype)
    ours, flax = both(x, window, strides, "VALID")
    if window == strides:
        assert_same(ours, flax)
    else:  # up to four gradients of about 1 add up, in float32 here: a rounding of 2^-8 in bfloat16
        np.testing.assert_array_equal(ours[0], flax[0])
        np.testing.assert_allclose(np.float32(ours[1]), np.float32(flax[1]), atol=2**-6)


@pytest.mark.parametrize("shape", [(5, 2), (3, 5, 4, 5, 2), (2, 3, 6, 2)])
def test_any_number_of_samples_and_dimensions(shape):
    # windows over one dimension without samples, over three of 3 samples, over one of (2, 3) samples
    dims = {2: 1, 5: 3, 4: 1}[len(shape)]
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)
    assert_same(*both(x, (2,) * dims, (2,) * dims, "SAME"))


def test_forward_and_second_derivatives():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 4, 4, 2)), jnp.float32)
    t = jnp.ones_like(x)

    def found(pool):
        pooled = lambda x: (pool(x, (2, 2), (2, 2)) ** 3).sum()  # noqa: E731
        return *jax.jvp(pooled, (x,), (t,)), jax.grad(lambda x: (jax.grad(pooled)(x) * x).sum())(x)

    ours, flax = (jax.jit(found, static_argnums=0)(pool) for pool in (cx.max_pool, nn.max_pool))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, flax)


def uses_lax(x, *args):
    return "reduce_window" in str(jax.make_jaxpr(lambda x: cx.max_pool(x, *args))(x))


def test_flax_does_what_is_no_task_of_the_views(monkeypatch):
    image = jnp.zeros((1, 16, 16, 1))
    assert not uses_lax(image, (2, 2), (2, 2))
    assert uses_lax(image, (16, 16))  # 256 places
    assert uses_lax(jnp.zeros((1, 4, 1)), (5,))  # no window fits
    assert cx.max_pool(jnp.zeros((1, 4, 1)), (5,)).shape == nn.max_pool(jnp.zeros((1, 4, 1)), (5,)).shape
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert uses_lax(image, (2, 2), (2, 2))


def test_models_pool_by_views(monkeypatch):
    # All three homes: the layer, the CNN, ResNet's stem for photographs.
    calls = []
    monkeypatch.setattr(convolution, "_pool", lambda x, where: calls.append(where.window) or x[:, ::2, ::2])
    x = jnp.zeros((1, 8, 8, 1))
    cx.MaxPool2DModule(2).call(x)
    jax.eval_shape(CNN().init, jax.random.key(0), x)
    jax.eval_shape(resnet18(width=2).init, jax.random.key(0), x)
    assert calls == [(2, 2), (2, 2), (2, 2), (3, 3)]
