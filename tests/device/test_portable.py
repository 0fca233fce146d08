"""A strategy's state with a different number of replicas, and with a different strategy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cyxjax.core.portable import Share, placed, stored_shapes, to_portable
from cyxjax.core.precision import with_loss_scale
from cyxjax.core.trees import named_leaves
from cyxjax.sync.registry import build_sync
from tests.support.strategies import ADAPTIVE, SGD, USUAL, Alone, built, random_grads, whole_grads


def moved(alone, sync, replicas):
    """The state of `alone` on a different mesh under `sync`, through the form that a checkpoint stores."""
    other = Alone(sync, replicas)
    stored = jax.tree.map(whole, to_portable(alone.state, alone.sync, alone.mesh))
    target, fit_rows = stored_shapes(other.state, sync, other.mesh)
    pairs = zip(named_leaves(stored), named_leaves(target), strict=True)
    leaves = [
        placed(want, own(name, found, want, fit_rows), other.mesh) for (name, found), (_, want) in pairs
    ]
    other.state = jax.tree.unflatten(jax.tree.structure(target), leaves)
    return other


def whole(leaf):
    return leaf.values().reshape(leaf.shape) if isinstance(leaf, Share) else np.array(leaf)


def own(name, found, want, fit_rows):
    """What this process reads of a stored leaf: a single process reads all."""
    found = found if found.shape == want.shape else fit_rows(name, found, want)
    return found.reshape(-1) if isinstance(want, Share) else found


def test_zero1_goes_on_at_any_number_of_replicas_and_as_mean():
    before = Alone(built("zero1", ADAPTIVE), 4).step(*(whole_grads(4, t) for t in range(3)))

    def two_steps(name, replicas):
        # Equal gradients on every replica: the mean is the same for any number of replicas.
        same = jax.tree.map(lambda g: np.repeat(g, replicas, 0), random_grads(1, 9))
        return moved(before, built(name, ADAPTIVE), replicas).step(same, same).copies()[0]

    wanted = two_steps("mean", 1)
    for name, replicas in (("zero1", 2), ("zero1", 8), ("mean", 2), ("mean", 4)):
        jax.tree.map(np.testing.assert_array_equal, two_steps(name, replicas), wanted)


def test_mean_goes_on_as_zero1_also_when_wrapped():
    before = Alone(with_loss_scale(build_sync("mean", ADAPTIVE)), 2).step(random_grads(2, 0))
    after = moved(before, with_loss_scale(build_sync("zero1", ADAPTIVE)), 4)
    back = moved(after, before.sync, 2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(before.state), jax.device_get(back.state))


@pytest.mark.parametrize("name", ["bf16", "int8", "power_sgd"])
def test_what_was_not_sent_is_still_owed_at_another_number_of_replicas(name):
    before = Alone(built(name, SGD, USUAL[name]), 2).step(*(random_grads(2, t) for t in range(3)))
    after = moved(before, built(name, SGD, USUAL[name]), 4)
    for alone in (before, after):
        assert alone.sync.state_spec[0] is not None
    unsent = [unsent_mean(alone.state.sync[0]) for alone in (before, after)]
    np.testing.assert_allclose(unsent[0], unsent[1], rtol=1e-6)
    assert np.abs(unsent[0]).max() > 0


def unsent_mean(state):
    return np.asarray(state.unsent if hasattr(state, "unsent") else state.error["dense.kernel"]).mean(0)


def test_local_replicas_start_again_from_their_mean():
    sync = built("local_sgd", ADAPTIVE, {"every": 5})
    before = Alone(sync, 4).step(*(random_grads(4, t) for t in range(3)))
    mean = jax.tree.map(lambda *p: np.mean(p, 0), *before.copies())
    for copy in moved(before, sync, 2).copies():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), copy, mean)


@pytest.mark.parametrize(("dtype", "one"), [("bfloat16", 1.5), ("float16", 1.5), ("int32", 2)])
def test_only_rows_of_replicas_are_fitted(dtype, one):
    alone = Alone(built("bf16", SGD), 4)
    target, fit_rows = stored_shapes(alone.state, alone.sync, alone.mesh)
    want = target.sync[0].unsent
    assert want.shape == (4, 29)
    assert fit_rows("sync/0/unsent", np.ones((2, 29), np.float32), want).shape == (4 * 29,)
    assert fit_rows("sync/0/unsent", np.ones((2, 30), np.float32), want) is None  # a different model
    rows = np.repeat(np.asarray([[1], [2]], jnp.dtype(dtype)), 29, 1)
    fitted = fit_rows("sync/0/unsent", rows, replace(want, dtype=rows.dtype))
    assert (fitted.dtype, {*fitted.tolist()}) == (rows.dtype, {one})
    equal = np.tile(np.linspace(0.1, 0.9, 29, dtype=np.float32), (3, 1))
    assert fit_rows("sync/0/unsent", equal, want).tolist() == equal[0].tolist() * 4
    assert fit_rows("params/dense/kernel", np.ones((2, 4), np.float32), np.zeros((6, 4))) is None
