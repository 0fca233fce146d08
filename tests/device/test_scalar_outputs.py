"""Outputs that are no row a sample: a scale made of parameters alone, as CLIP's, in every kind of loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.errors import DataError
from tests.support.trainers import own_group as own_group
from tests.support.trainers import two_devices as two_devices

pytestmark = pytest.mark.usefixtures("two_devices")
rng = np.random.default_rng(0)
X = rng.normal(size=(24, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32) + (X[:, 1] > 0.5).astype(np.int32)
RATE = 0.1


class Scaled(linen.Module):
    """Logits, and what they are to be multiplied by: of a parameter, or of the batch."""

    of_batch: bool = False

    @linen.compact
    def __call__(self, x):
        logits = linen.Dense(3)(x)
        scale = jnp.exp(self.param("logit_scale", linen.initializers.constant(0.7), ()))
        return {"logits": logits, "scale": jnp.square(logits).mean() if self.of_batch else scale}


def each(output, target):
    return optax.softmax_cross_entropy_with_integer_labels(output["logits"] * output["scale"], target)


def of_whole(output, target):
    z = output["logits"]
    similar = output["scale"] * z @ z.T
    return optax.softmax_cross_entropy_with_integer_labels(similar, jnp.arange(len(z))).mean()


def fitted(model, loss, **options):
    values = model.init(jax.random.key(7), X)
    trainer = cx.distributed.DistributedTrainer(model.bind(values), loss, optax.sgd(RATE))
    quiet = {"epochs": 2, "shuffle": False, "verbose": False, "checkpoint_every_n_epochs": 0}
    trainer.fit(X, Y, cx.distributed.DistributedTrainingConfig(**(quiet | {"batch_size": 12} | options)))
    return trainer, values["params"]


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (lambda o, t: each(o, t).mean(), {"batch_size": 4, "gradient_accumulation_steps": 3}),
        pytest.param(each, {"comm": "fsdp"}, marks=pytest.mark.slow),
        (cx.GlobalLoss(of_whole), {}),
    ],
    ids=["mean, accumulated", "each, fsdp", "global"],
)
def test_a_scale_is_trained_as_on_one_device_and_predicted_once(loss, options):
    model = Scaled()
    trainer, params = fitted(model, loss, **options)
    whole = of_whole if isinstance(loss, cx.GlobalLoss) else lambda o, t: each(o, t).mean()
    for _ in range(2):
        grads = jax.grad(lambda p: whole(model.apply({"params": p}, X), Y))(params)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    # Sums of 24 samples in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), trainer.params, params)
    made = trainer.predict(X[:23])
    assert jax.tree.map(np.shape, made) == {"logits": (23, 3), "scale": ()}
    np.testing.assert_allclose(made["scale"], np.exp(params["logit_scale"]), rtol=1e-5)


def test_a_number_of_the_batch_is_refused():
    with pytest.raises(DataError, match="'scale'"):
        fitted(Scaled(of_batch=True), each)
    with pytest.raises(DataError, match=r'output .*"loss"'):
        fitted(linen.Sequential([linen.Dense(3), jnp.mean]), each)
