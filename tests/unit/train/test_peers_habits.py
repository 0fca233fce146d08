"""Calls in the style of Keras, Lightning and plain optax, and their meaning here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, struct

import cyxjax as cx
from cyxjax.core.model.adapter import adapt
from cyxjax.errors import ConfigError
from tests.support import trainers
from tests.support.refusals import refused
from tests.support.trainers import CLASSES, QUIET, X, Y, after_fit, config

pytestmark = pytest.mark.usefixtures("two_devices")


def trainer(model=None, **options):
    return trainers.trainer(linen.Dense(CLASSES) if model is None else model, **options)


def kernel(fitted):
    return fitted.params["kernel"]


@pytest.mark.parametrize(
    ("word", "way"),
    [("callbacks", "DistributedTrainer"), ("class_weight", "CrossEntropyLoss"), ("sample_weight", "loss")],
)
def test_a_keyword_that_is_not_of_fit_names_where_it_goes(word, way):
    with refused(word, match=way) as caught:
        trainer().fit(X, Y, **QUIET, **{word: np.ones(len(X))})
    assert "array(" not in str(caught.value)


def test_keys_of_the_configuration_are_keywords_of_fit():
    history = trainer().fit(X, Y, X[:8], Y[:8], config())
    same = trainer().fit(X, Y, validation_data=(X[:8], Y[:8]), **QUIET)
    given = config(epochs=5)
    again = trainer().fit(X, Y, given, validation_data=(X[:8], Y[:8]), epochs=2)
    assert history.val_losses == same.val_losses == again.val_losses
    assert len(history.val_losses) == 2
    assert given.epochs == 5  # the user's object is unchanged


def test_names_stand_for_losses_optimizers_and_precisions():
    named = cx.DistributedTrainer(
        linen.Dense(CLASSES),
        "cross_entropy",
        "sgd",
        metrics={"off": lambda o, t: (o.argmax(-1) != t).astype(jnp.float32)},
    )
    named.fit(X, Y, **QUIET, steps_per_dispatch=1, precision="bf16-mixed")
    settings = cx.TrainingConfig(**QUIET, steps_per_dispatch=1, precision="bfloat16")
    given = after_fit(X, Y, settings, model=linen.Dense(CLASSES), optimizer=cx.SGDOptimizer(0.001))
    np.testing.assert_array_equal(kernel(named), kernel(given))
    seen = named.test(X, Y)
    assert seen["off"] == pytest.approx(1 - seen["accuracy"])
    assert seen == named.validate(X, Y)
    for names, key in ((("crossentropy", "sgd"), "loss"), (("mse", "adamm"), "optimizer")):
        with pytest.raises(ConfigError, match=key):
            cx.DistributedTrainer(linen.Dense(CLASSES), *names)


def test_a_checkpoint_is_saved_and_gone_on_from_by_keyword(tmp_path):
    first, second = trainer(), trainer()
    first.fit(X, Y, **QUIET)
    first.save(str(tmp_path / "m.ckpt"))
    second.fit(X, Y, **QUIET | {"epochs": 4}, ckpt_path=str(tmp_path / "m.ckpt"))
    assert len(second.history.train_losses) == 4
    *lines, last = second.summary().splitlines()
    assert [line.split()[0] for line in lines] == ["bias", "kernel"]
    assert last.startswith(str(kernel(first).size + CLASSES))


RATES = optax.cosine_decay_schedule(0.1, 20)


@pytest.mark.usefixtures("as_users_promote")
@pytest.mark.parametrize(
    ("optimizer", "words", "key"),
    [
        (cx.AdamOptimizer(1e-3), {"schedule": optax.cosine_decay_schedule(1e-3, 100)}, "schedule"),
        (cx.SGDOptimizer(0.5), {"schedule": optax.cosine_decay_schedule(0.5, 100)}, "schedule"),
        ("adam", {"schedule": optax.cosine_decay_schedule(3e-3, 100)}, "schedule"),
        (optax.sgd(0.1), {"schedule": lambda step: 0.05}, "schedule"),
        (optax.sgd(0.1), {"schedule": lambda step: 1.5 - step}, "schedule"),
        (optax.sgd(0.1), {"schedule": lambda step: np.float32("nan") * step}, "schedule"),
        (cx.SGDOptimizer(0.1), {"schedule": RATES, "lr_schedule": RATES}, "lr_schedule"),
        (optax.sgd(0.1), {"lr_schedule": RATES}, "lr_schedule"),
    ],
)
def test_a_schedule_that_is_no_factor_or_no_rate_is_refused(optimizer, words, key):
    with refused(key):
        trainer(optimizer=optimizer).fit(X, Y, **QUIET, **words)


@pytest.mark.parametrize(
    "give", [lambda m: (m[0], m[1].apply), lambda m: (m[1], m[0]), lambda m: (m[0], m[1])]
)
def test_variables_of_linen_keep_their_model_state(give):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train: bool):
            return linen.Dense(CLASSES)(linen.BatchNorm(use_running_average=not train)(x))

    variables = Net().init(jax.random.key(3), X[:1], train=False)
    fns = adapt(give((variables, Net())))
    params, state = fns.init(jax.random.key(0), X[:1])
    assert set(state) == {"batch_stats"}
    np.testing.assert_array_equal(params["Dense_0"]["kernel"], variables["params"]["Dense_0"]["kernel"])
    with pytest.raises(ConfigError, match="batch_stats"):
        adapt((variables, lambda v, x: Net().apply(v, x, train=False)))


def test_what_has_array_leaves_is_the_parameters_also_if_it_can_be_called():
    @struct.dataclass
    class Linear:  # a partitioned module of Equinox
        weight: jax.Array

        def __call__(self, x):
            return self.weight @ x

    params = Linear(jnp.ones((CLASSES, X.shape[1])))
    fitted = after_fit(X, Y, config(steps_per_dispatch=1), model=(params, lambda p, x: jax.vmap(p)(x)))
    assert isinstance(fitted.params, Linear)
    assert not np.allclose(fitted.params.weight, 1.0)


def test_predicting_with_random_parameters_prints_a_line(capfd):
    fresh = trainer()
    fresh.predict(X)
    fresh.evaluate(X, Y)
    assert capfd.readouterr().err.count("random") == 2
    fresh.fit(X, Y, **QUIET)
    fresh.predict(X)
    given = trainer(({"kernel": jnp.ones((X.shape[1], CLASSES))}, lambda p, x: x @ p["kernel"]))
    given.predict(X)  # begins with values
    assert "random" not in capfd.readouterr().err
