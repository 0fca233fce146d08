"""Norms over a batch that the model has moved: beside the same norm by hand, on the real rows alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from cyxjax.core import phases
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.batch_layout import Rows
from cyxjax.core.model.batch_stats import layouts_in

KEY = jax.random.key(0)
B, T, F = 3, 3, 2  # as many steps as samples: no size tells them apart
X = np.random.default_rng(0).normal(size=(B, T, F)).astype(np.float32) + np.arange(B)[:, None, None]
PADDED = np.float32([1, 1, 0])


def views(norm, x):
    first, _ = jnp.split(norm(jnp.concatenate([x, x + 1])), 2)
    return first


FORMS = {  # what a model does around its norm, and where the samples are in what the norm takes
    "as it is": (lambda norm, x: norm(x), Rows(0, 1, 1)),
    "time first": (lambda norm, x: norm(x.swapaxes(0, 1)).swapaxes(0, 1), Rows(1, 1, 1)),
    "joined": (lambda norm, x: norm(x.reshape(-1, F)).reshape(x.shape), Rows(0, 1, T)),
    "joined as time first": (
        lambda norm, x: norm(x.swapaxes(0, 1).reshape(-1, F)).reshape(T, -1, F).swapaxes(0, 1),
        Rows(0, T, 1),
    ),
    "joined and mapped": (
        lambda norm, x: norm(jax.nn.relu(x.reshape(-1, F) @ jnp.eye(F))).reshape(x.shape),
        Rows(0, 1, T),
    ),
    "two views": (views, Rows(0, 2, 1)),
    "within jit": (
        lambda norm, x: norm(jax.jit(lambda x: x.reshape(-1, F))(x)).reshape(x.shape),
        Rows(0, 1, T),
    ),
    "last": (
        lambda norm, x: norm(x.reshape(-1, T * F).T[..., None])[..., 0].T.reshape(x.shape),
        Rows(1, 1, 1),
    ),
    "no sample": (lambda norm, x: x + norm(jnp.arange(6.0).reshape(1, 3, 2)), None),
    "mixed up": (lambda norm, x: norm(x.reshape(-1, F).reshape(T, -1, F)).reshape(x.shape), "unknown"),
    "sorted": (lambda norm, x: norm(jnp.sort(x.reshape(-1, F), axis=0)).reshape(x.shape), "unknown"),
    "of pairs": (lambda norm, x: x + norm(x[:, None] - x[None])[0], "unknown"),
    "in groups": (lambda norm, x: norm(x.reshape(3, -1, T * F)).reshape(x.shape), "unknown"),
}


class Net(linen.Module):
    form: str

    @linen.compact
    def __call__(self, x, train=False):
        axis = 0 if self.form == "last" else -1
        return FORMS[self.form][0](linen.BatchNorm(use_running_average=not train, axis=axis), x)


def of(form):
    fns = adapt(Net(form))
    return fns, *fns.init(KEY, X)


def run(form, x, weight):
    fns, params, state = of(form)
    output, _, after = phases.forward(fns, params, state, x, weight, KEY)
    return np.asarray(output), jax.tree.map(np.asarray, after)


@pytest.mark.parametrize("form", FORMS)
def test_where_the_samples_are(form):
    fns, params, state = of(form)
    found = layouts_in(fns, params, state, X, KEY)
    assert list(found.values()) == [FORMS[form][1]]


@pytest.mark.parametrize("form", FORMS)
def test_padding_counts_nowhere_or_gives_no_numbers(form):
    output, state = run(form, X, jnp.asarray(PADDED))
    if FORMS[form][1] == "unknown":
        assert np.isnan(output).all()
        # Without padding nothing need be known.
        output, state = run(form, X, jnp.ones(B))
        expected, after = run(form, X, None)
    else:
        expected, after = run(form, X[:2], None)
    rows = len(expected)
    np.testing.assert_allclose(output[:rows], expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, after)
