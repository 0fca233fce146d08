"""Models from Flax's own examples: two devices equal one device with the whole batch."""

import jax
import numpy as np
import pytest
from flax import nnx

import cyxjax as cx
from cyxjax.core.model.adapter import adapt
from tests.support import flax_examples as ex
from tests.support.trainers import assert_near, config, trained, trainer

pytestmark = pytest.mark.usefixtures("as_users_promote")

SAMPLES = 19  # batches of 8, 8 and 3
rng = np.random.default_rng(5)
LABELS = rng.integers(0, ex.CLASSES, SAMPLES).astype(np.int32)
IMAGES = rng.normal(size=(SAMPLES, 8, 8, 1)).astype(np.float32)
TOKENS = rng.integers(1, ex.VOCAB, (SAMPLES, ex.LENGTH)).astype(np.int32)
LENGTHS = rng.integers(1, ex.LENGTH + 1, SAMPLES).astype(np.int32)
GRAPHS = ex.graphs(rng, SAMPLES)


@pytest.mark.parametrize(("make", "x"), [(ex.Sst2, (TOKENS, LENGTHS)), (ex.Ogbg, GRAPHS)])
def test_two_devices_equal_one_with_the_whole_batch(make, x):
    seen = []
    for replicas in (1, 2):
        train = trained(make(), cx.CrossEntropyLoss(), x, LABELS, replicas=replicas)
        seen.append((train.params, train.evaluate(x, LABELS)[0]))
    assert np.isfinite(train.history.train_losses[0])
    assert_near(*seen, 1e-4, 1e-5)  # rounding of sums in a different order, over three steps


def test_mnist_of_nnx_whose_dropout_asks_for_a_key_with_the_call():
    seen = []
    for seed in (0, 1):  # of the keys; the values and the order are the same
        model = ex.MnistNnx(rate=0.9, rngs=nnx.Rngs(0))
        train = trained(model, cx.CrossEntropyLoss(), IMAGES, LABELS, seed=seed)
        seen.append(train.history.train_losses[0])
    model.eval()
    np.testing.assert_allclose(
        train.predict(IMAGES), nnx.jit(ex.MnistNnx.__call__)(model, IMAGES), rtol=1e-5, atol=1e-5
    )
    assert seen[0] != seen[1]


def test_vae_gets_a_key_of_its_own_in_training_and_evaluation(two_devices):
    pixels = (IMAGES.reshape(SAMPLES, -1) > 0).astype(np.float32)
    train = trainer(ex.Vae(), cx.Task.vae(), lr=0.01)
    history = train.fit(pixels, pixels, config(epochs=5))
    assert history.train_losses[-1] < history.train_losses[0]
    assert history.metrics["train_divergence"][-1] > 0
    np.testing.assert_array_equal(train.predict(pixels)[0], train.predict(pixels)[0])
    outputs = jax.jit(lambda key: adapt(ex.Vae()).apply(train.params, {}, pixels, key, True)[0][0])
    first, again, other = (outputs(jax.random.key(k)) for k in (1, 1, 2))
    assert (first == again).all()
    assert not (first == other).all()


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: ex.Sst2(rate=0.5), (TOKENS, LENGTHS)),
        (lambda: ex.Lm1b(ex.TransformerConfig(rate=0.5)), TOKENS),
        (lambda: ex.Ogbg(rate=0.5), GRAPHS),
    ],
)
def test_dropout_is_on_in_training_alone_wherever_the_mode_stands(make, inputs):
    fns = adapt(make())
    params, state = fns.init(jax.random.key(0), jax.tree.map(lambda a: a[:1], inputs))

    def outputs(train):
        run = jax.jit(lambda key: fns.apply(params, state, inputs, key, train)[0])
        return [np.asarray(run(jax.random.key(k))) for k in (1, 2)]

    (one, other), (same, again) = outputs(True), outputs(False)
    assert not (one == other).all()
    assert (same == again).all()
