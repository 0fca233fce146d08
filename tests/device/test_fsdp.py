"""fsdp: the numbers of `mean`, with parts of the parameters on each replica."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import cyxjax as cx
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.first_parts import build_draw, holds_values
from cyxjax.core.model.adapter import adapt
from cyxjax.core.step import init_state
from cyxjax.errors import ConfigError
from cyxjax.train.trainer import DistributedTrainer
from tests.support.sharded import (
    CLOSE,
    IMAGES,
    LABELS,
    MODELS,
    Convolutional,
    Perceptron,
    assert_same,
    drawn,
    trained,
)
from tests.support.trainers import use_devices

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "replicas"),
    [("cnn", 2), *(pytest.param(*row, marks=SLOW) for row in [("nnx", 2), ("gpt", 4), ("gpt", 8)])],
)
def test_it_trains_evaluates_and_predicts_as_mean_does(model, replicas):
    one, other = trained("fsdp", model, replicas), trained("mean", model, replicas)
    inputs = MODELS[model][1][0]
    np.testing.assert_allclose(one.history.train_losses, other.history.train_losses, **CLOSE)
    np.testing.assert_allclose(one.evaluate(*MODELS[model][1]), other.evaluate(*MODELS[model][1]), **CLOSE)
    np.testing.assert_allclose(one.predict(inputs), other.predict(inputs), **CLOSE)
    assert_same(one, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2},
        *(
            pytest.param(settings, marks=SLOW)
            for settings in (
                {"comm_options": {"regather": False}},
                {"on_nonfinite": "skip"},
                {"precision": "float16"},
                {"precision": "bfloat16"},
                {"remat": "full"},
            )
        ),
    ],
    ids=lambda settings: "-".join(settings),
)
def test_every_setting_is_that_of_mean(settings):
    plain = {name: value for name, value in settings.items() if name != "comm_options"}
    # float16 keeps 11 bits, bfloat16 8: gradients differ by as much of themselves where the compiler fuses
    # otherwise, and moments divide by their size
    close = {"rtol": 0, "atol": 3e-3} if "precision" in settings else CLOSE
    assert_same(trained("fsdp", "cnn", 4, **settings), trained("mean", "cnn", 4, **plain), close)


@SLOW
def test_the_average_of_parameters_is_kept_in_parts_too():
    found = []
    for comm in ("fsdp", "mean"):
        use_devices(4)
        trainer = DistributedTrainer(
            Convolutional(), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.05), callbacks=[cx.EMA(0.9)]
        )
        config = DistributedTrainingConfig(
            epochs=2, global_batch_size=16, comm=comm, verbose=False, checkpoint_every_n_epochs=0
        )
        trainer.fit(IMAGES, LABELS, config)
        found.append(trainer)
    assert_same(*found)
    np.testing.assert_allclose(*(one.evaluate(IMAGES, LABELS) for one in found), **CLOSE)


@pytest.mark.parametrize(
    ("first", "then"),
    [("fsdp", "mean"), *(pytest.param(*row, marks=SLOW) for row in [("mean", "fsdp"), ("fsdp", "zero1")])],
)
def test_a_checkpoint_goes_on_as_any_strategy(first, then, tmp_path):
    trained(first, "cnn", 4, tmp_path, epochs=1)
    assert_same(trained(then, "cnn", 4, tmp_path), trained("mean", "cnn", 4))


@SLOW
def test_a_checkpoint_goes_on_at_another_number_of_replicas(tmp_path):
    trained("fsdp", "gpt", 4, tmp_path, epochs=1)
    one, other = trained("fsdp", "gpt", 2, tmp_path), trained("fsdp", "gpt", 4)
    np.testing.assert_allclose(one.history.train_losses, other.history.train_losses, rtol=1e-4)


@SLOW
def test_a_second_fit_goes_on_from_the_parameters():
    trainer = trained("fsdp", "nnx", 4, epochs=1)
    before = jax.tree.leaves(trainer.params)
    config = DistributedTrainingConfig(
        epochs=1, global_batch_size=16, comm="fsdp", verbose=False, checkpoint_every_n_epochs=0
    )
    losses = [trainer.history.train_losses[-1], *trainer.fit(IMAGES, LABELS, config).train_losses]
    assert losses[1] < losses[0]
    assert any(not np.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(trainer.params), strict=True))


@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_the_first_parameters_are_drawn_in_parts_and_are_those_of_mean(model):
    make, (inputs, _) = MODELS[model]
    fns, sync, mesh = drawn(make(), inputs[:1])
    found = build_draw(fns, sync, mesh)(3, inputs[:1])
    whole = jax.tree.map(np.asarray, fns.init(jax.random.key(3), inputs[:1]))
    wanted = init_state(sync, mesh, *whole, 3)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.sharding == b.sharding
        # The same draws; what the compiler fuses rounds once less (measured 6e-8 of numbers up to 1).
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-7)


def test_a_model_born_with_values_keeps_them():
    x = np.ones((1, 36), np.float32)
    assert holds_values(adapt(Perceptron(nnx.Rngs(0))), x)
    assert not holds_values(adapt(Convolutional()), IMAGES[:1])


def test_rules_that_look_at_whole_leaves_are_refused_by_name():
    use_devices(2)
    trainer = DistributedTrainer(
        Convolutional(), cx.CrossEntropyLoss(), optax.chain(optax.scale_by_trust_ratio(), optax.scale(-0.1))
    )
    config = DistributedTrainingConfig(comm="fsdp", verbose=False, checkpoint_every_n_epochs=0)
    with pytest.raises(ConfigError, match="comm='fsdp' shows the optimizer a part of each leaf.*HINT"):
        trainer.fit(IMAGES, LABELS, config)
