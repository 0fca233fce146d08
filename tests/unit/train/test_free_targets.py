"""With a user's loss, integer targets have the meaning that the loss gives them, and inputs may be NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.errors import DataError
from tests.support.trainers import CLASSES, X, Y, after_fit, batches, ce, config, trainer

pytestmark = pytest.mark.usefixtures("two_devices")


def ignoring(output, target):
    counts = target != -100
    return ce(output, jnp.where(counts, target, 0)), counts.astype(jnp.float32)


def ordinal(output, target):
    """Ordinal regression: the target is the number of passed thresholds of K, here from -3 to 40."""
    passed = (target[:, None].astype(jnp.float32) > jnp.linspace(-3, 40, CLASSES)[None]).astype(jnp.float32)
    return optax.sigmoid_binary_cross_entropy(output, passed).mean(-1)


rng = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("loss", "target"),
    [(ignoring, np.where(np.arange(len(Y)) % 3, Y, -100)), (ordinal, rng.integers(-3, 40, len(Y)))],
    ids=["-100 in the pair", "ordinal regression"],
)
def test_integers_are_what_the_users_loss_makes_of_them(loss, target):
    target = target.astype(np.int32)
    settings = config(batch_size=8, shuffle=False, steps_per_dispatch=1)  # the program of a loader
    options = {"model": linen.Dense(CLASSES), "loss": loss}
    by_arrays = after_fit(X, target, settings, **options)
    by_loader = after_fit(batches(X, target, 16), settings, **options)
    assert np.isfinite(by_arrays.history.train_losses).all()
    # Two replicas of 8 samples: the same batches, dealt out in the same order.
    jax.tree.map(np.testing.assert_array_equal, by_arrays.params, by_loader.params)
    assert np.isfinite(by_arrays.evaluate(X, target)[0])


def test_labels_of_our_own_losses_name_a_class():
    wrong = np.where(np.arange(len(Y)) == 5, 7, Y)
    task = cx.Task({"class": cx.CrossEntropyLoss(), "size": (lambda o, t: jnp.square(o).mean(-1), 0.1)})
    for loss in (cx.CrossEntropyLoss(), cx.NLLLoss(), task, cx.Task(cx.CrossEntropyLoss(), output=None)):
        with pytest.raises(DataError, match="7"):
            trainer(linen.Dense(CLASSES), loss=loss).fit(X, wrong, config())


class Imputing(linen.Module):
    """Replaces missing numbers by 0 and adds columns that mark them."""

    @linen.compact
    def __call__(self, x):
        finite = jnp.isfinite(x)
        return linen.Dense(CLASSES)(jnp.concatenate([jnp.where(finite, x, 0.0), finite.astype(x.dtype)], -1))


@pytest.mark.parametrize(("missing", "loss"), [(np.nan, cx.CrossEntropyLoss()), (-np.inf, ce)])
def test_numbers_that_the_model_imputes_may_be_missing(missing, loss):
    holes = np.where(rng.random(X.shape) < 0.2, np.float32(missing), X)
    filled = trainer(Imputing(), loss=loss)
    history = filled.fit(holes, Y, holes, Y, config(steps_per_dispatch=1))
    assert history.train_losses[-1] < history.train_losses[0]
    assert np.isfinite(filled.evaluate(holes, Y)[0])
    assert filled.predict(holes).shape == (len(X), CLASSES)


def test_targets_that_the_loss_masks_may_be_missing():
    target = np.where(rng.random((len(X), CLASSES)) < 0.3, np.nan, 1.0).astype(np.float32)

    def masked(output, wanted):
        finite = jnp.isfinite(wanted)
        return jnp.square(output - jnp.where(finite, wanted, 0.0)), finite.astype(jnp.float32)

    history = trainer(linen.Dense(CLASSES), loss=masked).fit(X, target, config(steps_per_dispatch=1))
    assert history.train_losses[-1] < history.train_losses[0]
