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
    class Cell(linen.RNNCellBase):
        @linen.compact
        def __call__(self, carry, x):
            y = linen.Dropout(0.5, rng_collection="own", deterministic=False)(x)
            return carry, y

        @linen.nowrap
        def initialize_carry(self, rng, input_shape):
            return jnp.zeros(input_shape)

        @property
        def num_feature_axes(self):
            return 1

    fns = from_linen(linen.RNN(Cell(), split_rngs={"params": False}))
    with pytest.raises(InvalidRngError):
        fns.apply({}, {}, jnp.ones((2, 3, 4)), jax.random.key(0), True)


@pytest.mark.parametrize(("name", "in_training"), [("is_train", True), ("inference", False), ("eval", False)])
def test_modes_by_other_names(name, in_training):
    space = {}
    exec(f"def call(self, x, {name}=None): return {name}", space)
    assert call_mode(space["call"], True) == {name: in_training}
    assert call_mode(space["call"], False) == {name: not in_training}


REFUSED = [
    "is_test=False",
    "Testing=True",
    "enable_dropout=True",
    "stochastic=False",
    "predict=True",
    "Train=False",
]
TAKEN = [
    "mode='bilinear'",
    "split=True",
    "phase=False",
    "test=None",
    "latest=True",
    "train=False, use_dropout=True",
]


@pytest.mark.parametrize("argument", REFUSED + TAKEN)
def test_a_switch_by_another_name_is_refused_and_an_option_is_not(argument):
    space = {}
    exec(f"def call(self, x, {argument}): pass", space)
    if argument in TAKEN:
        assert set(call_mode(space["call"], True)) <= {"train"}
        return
    with pytest.raises(ConfigError, match=f"takes {argument}"):
        call_mode(space["call"], True)
    name, value = argument.split("=")
    bound = partial(space["call"], **{name: value == "True"})  # somebody's own choice
    assert call_mode(bound, True) == {}


class Net(linen.Module):
    """A Dropout whose mode is what `is_off` makes of the keywords of the call."""

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

    with pytest.raises(ConfigError) as caught:
        jax.eval_shape(evaluated, jax.random.key(0))
    assert "\n" not in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("width", "inputs", "named"),
    [(4, (1, 4), "Dense_0"), (3, (1, 4), r"\(3, 2\).*\(4, 2\)")],
    ids=["missing", "shape"],
)
def test_values_of_another_module_are_refused_in_a_line(width, inputs, named):
    def kernels(width):
        return {"kernel": jnp.ones((width, 2)), "bias": jnp.ones(2)}

    class Two(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2)(linen.Dense(2)(x))  # Dense_1 is called first

    fns = from_linen(Two())
    with pytest.raises(ConfigError, match=named):
        fns.apply({"Dense_1": kernels(width)}, {}, jnp.ones(inputs), jax.random.key(0), False)


def test_a_spectral_norm_updates_its_estimate_in_training_only():
    fns, x, key = from_linen(linen.SpectralNorm(linen.Dense(2))), jnp.ones((3, 4)), jax.random.key(0)
    params, state = fns.init(key, x)
    updated = fns.apply(params, state, x, key, True)[1]
    kept = fns.apply(params, state, x, key, False)[1]

    def estimate(values):
        return [a.tolist() for a in jax.tree.leaves(values)]

    assert estimate(state) == estimate(kept) != estimate(updated)
