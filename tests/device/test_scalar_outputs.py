"""Outputs without a row per sample: a scale that depends only on parameters, as in CLIP, in every loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.errors import DataError
from tests.support.by_hand import assert_as_by_hand
from tests.support.models import Dense
from tests.support.trainers import trained

rng = np.random.default_rng(0)
X = rng.normal(size=(24, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32) + (X[:, 1] > 0.5).astype(np.int32)


class Scaled(linen.Module):
    """Logits and their scale, which depends on a parameter or on the batch."""

    of_batch: bool = False

    @linen.compact
    def __call__(self, x):
        logits = Dense(3)(x)
        scale = jnp.exp(self.param("logit_scale", linen.initializers.constant(0.7), ()))
        return {"logits": logits, "scale": jnp.square(logits).mean() if self.of_batch else scale}


def each(output, target):
    return optax.softmax_cross_entropy_with_integer_labels(output["logits"] * output["scale"], target)


def of_whole(output, target):
    z = output["logits"]
    similar = output["scale"] * z @ z.T
    return optax.softmax_cross_entropy_with_integer_labels(similar, jnp.arange(len(z))).mean()


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (lambda o, t: each(o, t).mean(), {"gradient_accumulation_steps": 3}),
        pytest.param(each, {"comm": "fsdp"}, marks=pytest.mark.slow),
        (cx.GlobalLoss(of_whole), {"remat": "full"}),
    ],
    ids=["mean, accumulated", "each, fsdp", "global"],
)
def test_a_scale_is_trained_as_on_one_device_and_predicted_once(loss, options):
    whole = of_whole if isinstance(loss, cx.GlobalLoss) else lambda o, t: each(o, t).mean()
    trainer, _ = assert_as_by_hand(Scaled(), loss, X, Y, written=whole, size=24, epochs=2, **options)
    made = trainer.predict(X[:23])
    assert jax.tree.map(np.shape, made) == {"logits": (23, 3), "scale": ()}
    np.testing.assert_allclose(made["scale"], np.exp(trainer.params["logit_scale"]), rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "remat", "message"),
    [
        (Scaled(of_batch=True), "none", "'scale'"),
        (Scaled(of_batch=True), "full", "'scale'"),
        (linen.Sequential([Dense(3), jnp.mean]), "none", r'output .*"loss"'),
    ],
    ids=["one of two", "recomputed", "all"],
)
def test_a_number_of_the_batch_is_refused(model, remat, message):
    with pytest.raises(DataError, match=message):
        trained(model, each, X, Y, remat=remat)
