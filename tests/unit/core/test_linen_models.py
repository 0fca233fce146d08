"""flax.linen modules as functions."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from flax.errors import InvalidRngError

from cyxjax.core.model.linen_models import from_linen
from cyxjax.core.model.model_fns import call_mode
from cyxjax.errors import ConfigError
from tests.support.refusals import refused_in_a_line


def test_a_module_is_traced_once_for_its_shapes_and_its_values():
    traced = []

    class Told(linen.Module):
        @linen.compact
        def __call__(self, x):
            traced.append(x.shape)
            return linen.Dense(3)(x)

    fns, inputs = from_linen(Told()), jnp.ones((2, 5))
    assert jax.eval_shape(fns.init, jax.random.key(0), inputs)[0]["Dense_0"]["kernel"].shape == (5, 3)
    one, other = (fns.init(jax.random.key(seed), inputs)[0]["Dense_0"]["kernel"] for seed in (0, 1))
    assert traced == [(2, 5)]
    assert (one != other).all()
    assert fns.init(jax.random.key(0), jnp.ones((2, 4)))[0]["Dense_0"]["kernel"].shape == (4, 3)
    assert traced == [(2, 5), (2, 4)]


class NoisyCell(linen.Module):
    @linen.compact
    def __call__(self, x, is_train=False):
        noise = jax.random.normal(self.make_rng("noise"), x.shape) if is_train else 0.0
        x = linen.Dropout(0.5, rng_collection="own")(x + noise, deterministic=not is_train)
        return x, linen.Dropout(0.5)(jnp.ones_like(x), deterministic=not is_train)


def test_a_module_names_its_random_streams_as_it_likes():
    fns, inputs = from_linen(NoisyCell()), jnp.ones((4, 8))
    run = jax.jit(lambda key: fns.apply({}, {}, inputs, key, True)[0])
    first, again, other = (run(jax.random.key(seed))[0] for seed in (0, 0, 1))
    assert (first == again).all()
    assert not (first == other).all()
    assert not ((first == 0) == (run(jax.random.key(0))[1] == 0)).all()  # two streams, not one twice
    assert (fns.apply({}, {}, inputs, jax.random.key(0), False)[0][0] == inputs).all()


def test_a_stream_that_a_scan_does_not_split_is_not_made_up():
    class Cell(linen.SimpleCell):
        @linen.compact
        def __call__(self, carry, x):
            return carry, linen.Dropout(0.5, rng_collection="own", deterministic=False)(x)

    fns = from_linen(linen.RNN(Cell(4), split_rngs={"params": False}))
    with pytest.raises(InvalidRngError):
        fns.apply({}, {}, jnp.ones((2, 3, 4)), jax.random.key(0), True)


@pytest.mark.parametrize(
    ("call", "mode"),
    [
        (lambda x, is_train=None: 0, {"is_train": True}),
        (lambda x, update_stats: 0, {"update_stats": True}),
        (lambda x, inference=None: 0, {"inference": False}),
        (lambda x, eval=None: 0, {"eval": False}),
        (lambda x, train=False, use_dropout=True: 0, {"train": True}),
        (lambda x, mode="bilinear": 0, {}),
        (lambda x, split=True, latest=True: 0, {}),
        (lambda x, phase=False: 0, {}),
        (lambda x, test=None: 0, {}),
        (partial(lambda x, is_test=False: 0, is_test=True), {}),  # a user's own choice
    ],
)
def test_the_mode_goes_by_the_name_that_the_call_has_for_it(call, mode):
    assert call_mode(call, True) == mode
    assert call_mode(call, False) == {name: not value for name, value in mode.items()}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x, is_test=False: 0, "is_test=False"),
        (lambda x, Testing=True: 0, "Testing=True"),
        (lambda x, enable_dropout=True: 0, "enable_dropout=True"),
        (lambda x, stochastic=False: 0, "stochastic=False"),
        (lambda x, predict=True: 0, "predict=True"),
        (lambda x, Train=False: 0, "Train=False"),
    ],
)
def test_a_switch_by_another_name_is_refused(call, named):
    with pytest.raises(ConfigError, match=f"takes {named}"):
        call_mode(call, True)


class Net(linen.Module):
    """A Dropout whose mode is `is_off` of the keywords of the call."""

    is_off: Callable
    norm: dict | None = None

    @linen.compact
    def __call__(self, x, **switches):
        x = linen.Dropout(0.5)(x, deterministic=self.is_off(switches))
        return x if self.norm is None else linen.BatchNorm(**self.norm)(x)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Net(lambda switches: True, {}), "use_running_average"),
        (Net(lambda switches: None), "deterministic"),
        (Net(lambda switches: True, {"use_running_average": False}), "BatchNorm_0"),
        (linen.Sequential([linen.SpectralNorm(linen.Dense(2))]), "update_stats"),
    ],
    ids=["norm without the flag", "dropout without the flag", "norm in training", "spectral norm"],
)
def test_a_layer_without_the_flag_is_refused_in_a_line(model, named):
    fns, inputs = from_linen(model), jnp.ones((1, 4))

    def evaluated(key):
        return fns.apply(*fns.init(key, inputs), inputs, key, False)[0]

    with refused_in_a_line(match=named):
        jax.eval_shape(evaluated, jax.random.key(0))


def test_values_of_another_module_are_refused_in_a_line():
    fns, narrow = from_linen(linen.Dense(2)), {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    for params, named in (({"bias": jnp.ones(2)}, "'kernel'"), (narrow, r"\(3, 2\).*\(4, 2\)")):
        with pytest.raises(ConfigError, match=named):
            fns.apply(params, {}, jnp.ones((1, 4)), jax.random.key(0), False)
