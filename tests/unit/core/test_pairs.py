"""Pairs of functions are models: each function gets only the arguments that it names."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from cyxjax.core.model.adapter import adapt
from tests.support.models import Net, NnxNet
from tests.support.refusals import refused

X = np.arange(6, dtype=np.float32).reshape(2, 3)
KEY = jax.random.key(3)
W = np.ones((3, 2), np.float32)


def ones(key):
    return {"w": jnp.ones((3, 2))}


def product(params, x):
    return x @ params["w"]


def run(model, inputs=X, train=True):
    """(output, new state) with the pair's initial values."""
    fns = adapt(model)
    return fns.apply(*fns.init(KEY, inputs), inputs, KEY, train)


@pytest.mark.parametrize(
    "model",
    [
        (ones, product),
        [ones, product],
        (lambda key, x: {"w": jnp.ones((x.shape[-1], 2))}, product),
        (jax.jit(ones), jax.jit(product)),
        ({"w": W}, product),
        (product, {"w": W}),
    ],
)
def test_parameters_are_drawn_or_given(model):
    output, state = run(model)
    assert output.tolist() == [[3.0, 3.0], [12.0, 12.0]]
    assert state == {}


def test_values_to_begin_with_are_copied():
    held = {"w": np.ones((3, 2), np.float32)}
    first = adapt((held, product)).init(KEY, X)[0]
    held["w"][:] = 5
    assert float(first["w"].sum()) == 6


def test_a_key_and_the_mode_are_given_by_name_wherever_they_stand():
    seen = []

    def apply(params, rng, x, *, is_training):
        seen.append((jax.random.key_data(rng).shape, is_training))
        return x @ params["w"]

    for train in (True, False):
        assert run((ones, apply), train=train)[0].shape == (2, 2)
    assert seen == [((2,), True), ((2,), False)]


def test_several_inputs_are_arguments_or_one_tree():
    def init(key, a, b):
        return ones(key)

    def apply(params, a, b):
        return (a - b) @ params["w"]

    assert run((init, apply), (X, X))[0].tolist() == [[0, 0], [0, 0]]
    assert run((ones, apply), {"b": X, "a": X + 1})[0].tolist() == [[3, 3], [3, 3]]
    assert run((ones, lambda params, batch: batch["a"] @ params["w"]), {"a": X, "b": X})[0].shape == (2, 2)


# As from Haiku: other arguments of the function are hidden by *args.
Transformed = namedtuple("Transformed", ["init", "apply"])


def test_transformed_functions_of_haiku():
    def init(rng, *args, **kwargs):
        return {"w": jnp.ones((args[0].shape[-1], 2))}

    def apply(params, rng, *args, **kwargs):
        assert jax.random.key_data(rng).shape == (2,)
        (x,) = args
        return x @ params["w"]

    assert run(Transformed(init, apply))[0].shape == (2, 2)
    assert run(Transformed(init, lambda params, *args: args[0] @ params["w"]))[0].shape == (2, 2)

    def with_state(params, state, rng, *args):
        return args[0] @ params["w"], {"n": state["n"] + 1}

    first = Transformed(lambda rng, *args: (init(rng, *args), {"n": jnp.zeros(())}), with_state)
    assert run(first)[1] == {"n": 1.0}


def test_the_methods_of_a_module_are_the_module():
    module = Net(batch_norm=True)
    params, state = adapt((module.init, module.apply)).init(KEY, X)
    assert set(params) == {"BatchNorm_0", "Dense_0", "Dense_1"}  # as functions they used to train batch_stats
    assert set(state) == {"batch_stats"}


class Estimator:
    """As in another library."""


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Net, "Net"),
        (NnxNet, "NnxNet"),
        (product, "function"),
        ("mlp", "str"),
        (None, "NoneType"),
        (optax.sgd(0.1), "GradientTransformation"),
        (Estimator(), "Estimator"),
        (Estimator, "Estimator"),
        ((W, W), "tuple"),
        ((Net, {"w": W}), "tuple"),  # the class, with values of its objects
        (TrainState.create(apply_fn=product, params={"w": W}, tx=optax.sgd(0.1)), "TrainState"),
        (nnx.split(NnxNet(nnx.Rngs(0))), "tuple"),
    ],
)
def test_what_is_no_model_is_named(model, named):
    with refused("model", match=f"^{named}.*flax") as caught:
        adapt(model)
    assert "\n" not in str(caught.value)
