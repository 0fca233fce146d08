"""Values set in a model after its fit, settings of a sampler, and a configuration during a fit."""

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
    else:
        model.kernel[...] = model.kernel[...] * 0
    for use in (
        lambda: trainer.predict(X),
        lambda: trainer.evaluate(*VAL),
        lambda: trainer.fit(X, Y, config()),
    ):
        with pytest.raises(ConfigError) as refused:
            use()
        assert refused.value.key == ("0_linear/bias" if kind == "sequential" else "kernel")


def test_a_layer_added_after_a_fit_is_trained_by_a_new_trainer():
    model = mlp()
    fitted(model)
    kernel = model.parameters()["0_linear"]["kernel"]
    model.add(cx.ReLUModule())
    np.testing.assert_array_equal(model.parameters()["0_linear"]["kernel"], kernel)
    assert np.all(fitted(model).predict(X) >= 0)


def test_what_a_trainer_was_made_with_is_read_and_not_set():
    adam = cx.AdamOptimizer(0.1)
    trainer = DistributedTrainer(mlp(), cx.CrossEntropyLoss(), adam)
    assert trainer.optimizer is adam
    for name in ("callbacks", "optimizer", "metrics", "augment", "model", "loss_fn"):
        with pytest.raises(AttributeError, match=name):
            setattr(trainer, name, None)


def test_what_is_set_on_a_sampler_holds_from_the_next_pass_on():
    sampler = cx.distributed.DistributedSampler(8, seed=0)
    sampler.shuffle = False
    assert list(sampler) == list(range(8))
    sampler.shuffle, sampler.seed, sampler.epoch = True, 3, 2
    again = cx.distributed.DistributedSampler(8, seed=3)
    again.set_epoch(2)
    assert list(sampler) == list(again) != list(range(8))


def test_a_configuration_is_fixed_while_its_fit_runs():
    seen = []

    class Longer(cx.Callback):
        def on_epoch(self, info):
            settings.model_copy().epochs = 9  # a copy is nobody's
            with pytest.raises(ConfigError, match="epochs=9"):
                settings.epochs = 9
            seen.append(info)

    settings = config(epochs=1)
    trainer = DistributedTrainer(mlp(), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1), callbacks=[Longer()])
    trainer.fit(X, Y, settings)
    settings.epochs = 2
    assert len(seen) == 1
