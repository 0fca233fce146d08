"""What is set on an object after it was made holds, or is refused where it is set or next used."""

import jax
import numpy as np
import pytest
from flax import nnx

import cyxjax as cx
from cyxjax.distributed import DistributedTrainer
from cyxjax.errors import ConfigError
from tests.support.trainers import VAL, X, Y, config, mlp


def fitted(model):
    trainer = DistributedTrainer(model, cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    trainer.fit(X, Y, config(epochs=1))
    return trainer


def zeros(model):
    return jax.tree.map(np.zeros_like, model.parameters()), {}


@pytest.mark.parametrize("kind", ["sequential", "nnx"])
def test_values_set_in_a_model_after_its_fit_are_refused_by_the_trainer(kind):
    model = mlp() if kind == "sequential" else nnx.Linear(X.shape[1], 3, rngs=nnx.Rngs(0))
    trainer = fitted(model)
    trainer.predict(X)
    if kind == "sequential":
        model.set_values(*zeros(model))
        named = "the model's values was set"
    else:
        model.kernel[...] = model.kernel[...] * 0
        named = "the model's parameter 'kernel' was set"
    for use in (
        lambda: trainer.predict(X),
        lambda: trainer.evaluate(*VAL),
        lambda: trainer.fit(X, Y, config()),
    ):
        with pytest.raises(ConfigError, match=f"{named} after .* HINT: make a new trainer of the model"):
            use()


def test_a_layer_added_after_a_fit_is_refused_by_the_trainer_and_trained_by_a_new_one():
    model = mlp()
    trainer = fitted(model)
    model.add(cx.ReLUModule())
    with pytest.raises(ConfigError, match="has 4 layers and had 3 when it was wrapped"):
        trainer.predict(X)
    assert np.all(fitted(model).predict(X) >= 0)
