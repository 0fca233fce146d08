"""Norms leave padding out where the batch is the first dimension of what they take; else they give NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from cyxjax.core import phases
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.batch_stats import needs_full_batches

KEY = jax.random.key(0)
B, T, F = 3, 3, 2  # as many steps as samples: no size tells them apart
X = np.random.default_rng(0).normal(size=(B, T, F)).astype(np.float32) + np.arange(B)[:, None, None]
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
# Shapes with 3 samples and 3 steps hide these in the step; `needs_full_batches` is asked before it.
SAME_SHAPE = ("time first", "of pairs", "in groups")


class Net(linen.Module):
    form: str

    @linen.compact
    def __call__(self, x, train=False):
        return FORMS[self.form](linen.BatchNorm(use_running_average=not train), x)


def of(form):
    fns = adapt(Net(form))
    return fns, *fns.init(KEY, X)


def run(form, x, weight):
    fns, params, state = of(form)
    output, _, after = phases.forward(fns, params, state, x, weight, KEY)
    return np.asarray(output), jax.tree.map(np.asarray, after)


@pytest.mark.parametrize("form", FORMS)
def test_which_norms_need_full_batches(form):
    fns, params, state = of(form)
    assert bool(needs_full_batches(fns, params, state, X, KEY)) is (form in OTHER)


@pytest.mark.parametrize("form", FORMS)
def test_padding_counts_nowhere_or_gives_no_numbers(form):
    if form in OTHER:
        if form not in SAME_SHAPE:
            assert np.isnan(run(form, X, jnp.asarray(PADDED))[0]).all()
        # Without padding nothing need be known.
        (output, state), (expected, after) = run(form, X, jnp.ones(B)), run(form, X, None)
    else:
        (output, state), (expected, after) = run(form, X, jnp.asarray(PADDED)), run(form, X[:2], None)
    np.testing.assert_allclose(output[: len(expected)], expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, after)
