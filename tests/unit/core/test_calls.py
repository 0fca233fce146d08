"""Which of a model's arguments are inputs, a mode or a key, according to its signature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.model_fns import Sown, call_arguments
from cyxjax.core.model.nnx_models import _is_loss
from cyxjax.core.model.outputs import holds_losses
from cyxjax.errors import DataError
from tests.support.flax_examples import GraphsTuple

KEY = jax.random.key(0)
A, B, C, D = 1.0, 2.0, 3.0, 4.0
GRAPH = GraphsTuple(A, B, None)


def arguments(call, inputs):
    """The value of each argument: numbers as they are, a key as "key", without the mode."""
    args, named = call_arguments(call, inputs, KEY, True)
    named = {name: "key" if isinstance(a, jax.Array) else a for name, a in named.items()}
    return args, {name: a for name, a in named.items() if name not in ("train", "deterministic")}


@pytest.mark.parametrize(
    ("call", "inputs", "expected"),
    [
        (lambda x: 0, A, ((A,), {})),
        (lambda pair: 0, (A, B), (((A, B),), {})),
        (lambda pair, train: 0, (A, B), (((A, B),), {})),
        (lambda pair, temperature=1.0: 0, (A, B), (((A, B),), {})),
        (lambda x, mask=None: 0, (A, B), ((A, B), {})),
        (lambda x, mask=None: 0, A, ((A,), {})),
        (lambda a, b, deterministic: 0, (A, B), ((A, B), {})),
        (lambda a, train, b: 0, (A, B), ((), {"a": A, "b": B})),
        (lambda a, train=False, b=None: 0, (A, B), ((), {"a": A, "b": B})),
        (lambda a, b, c=None, *, train=False: 0, (A, B), ((A, B), {})),
        (lambda *xs: 0, (A, B, C), ((A, B, C), {})),
        (lambda query, key, value: 0, (A, B, C), ((A, B, C), {})),
        (lambda x, key: 0, A, ((A,), {"key": "key"})),
        (lambda x, z_rng: 0, A, ((A,), {"z_rng": "key"})),
        (lambda a, z_rng, b: 0, (A, B), ((), {"a": A, "b": B, "z_rng": "key"})),
        (lambda a, b, rng=None: 0, (A, B), ((), {"a": A, "b": B, "rng": "key"})),
        (lambda *xs, rng=None: 0, (A, B), ((A, B), {"rng": "key"})),
        (lambda query, key, value, mask=None: 0, (A, B, C, D), ((A, B, C, D), {})),
        (lambda batch, key: 0, (A, B, C), (((A, B, C),), {"key": "key"})),
        (lambda image, mask: 0, {"mask": B, "image": A}, ((), {"mask": B, "image": A})),
        (lambda batch: 0, {"mask": B, "image": A}, (({"mask": B, "image": A},), {})),
        (lambda image: 0, {"mask": B, "image": A}, (({"mask": B, "image": A},), {})),
        (lambda ids, *, mask=None: 0, {"ids": A, "mask": B}, ((), {"ids": A, "mask": B})),
        (lambda ids, **more: 0, {"ids": A, "mask": B}, ((), {"ids": A, "mask": B})),
        (lambda graphs, deterministic: 0, GRAPH, ((GRAPH,), {})),
        (lambda a, b=None: 0, GRAPH, ((GRAPH,), {})),
        # A mismatch: Python's own call names the missing or unknown argument.
        (lambda a, b: 0, A, ((A,), {})),
        (lambda a, b, c: 0, (A, B), ((A, B), {})),
        (lambda a, b, rng: 0, (A, B, C, D), ((A, B, C, D), {})),
        (lambda a, b, rng=None: 0, (A, B, C), ((A, B, C), {"rng": "key"})),
        (lambda image, mask=None: 0, {"image": A, "masks": B}, ((), {"image": A, "masks": B})),
    ],
)
def test_inputs_go_where_the_signature_says(call, inputs, expected):
    assert arguments(call, inputs) == expected


class Experts(linen.Module):
    """Sows a loss per sample, a running count, and a value to inspect."""

    shape: str = "rows"
    also_init: bool = True  # False: sows in training only

    @linen.compact
    def __call__(self, x, train=False):
        seen = self.variable("counters", "seen", lambda: jnp.int32(0))
        if not self.is_initializing() and self.is_mutable_collection("counters"):
            seen.value = seen.value + 1
        y = linen.Dense(3)(x)
        loss = 0.5 * jnp.square(y).sum(-1)
        if train or self.also_init:
            self.sow("losses", "balance", loss if self.shape == "rows" else loss.mean())
            self.sow("intermediates", "y", y)
            self.sow("seen", "y", y)
        if train:
            self.sow("largest", "y", y, init_fn=lambda: 0.0, reduce_fn=jnp.maximum)
        return y


@pytest.mark.parametrize("also_init", [True, False])
def test_what_is_sown_is_a_loss_or_nothing_and_counters_are_state(also_init):
    fns, x = adapt(Experts(also_init=also_init)), jnp.ones((4, 2))
    params, state = fns.init(KEY, x)
    assert set(state) == {"counters"}
    output, after = fns.apply(params, state, x, KEY, True)
    assert isinstance(output, Sown)
    np.testing.assert_allclose(output.losses, 0.5 * jnp.square(output.output).sum(-1), rtol=1e-6)
    assert (set(after), int(after["counters"]["seen"])) == ({"counters"}, 1)
    plain, same = fns.apply(params, state, x, KEY, False)
    assert plain.shape == (4, 3)
    assert int(same["counters"]["seen"]) == 0
    with pytest.raises(DataError, match="'losses'"):
        adapt(Experts("mean")).apply(params, state, x, KEY, True)


def test_a_collection_of_losses_is_told_by_its_last_word():
    for name in ("losses", "aux_loss", "loss_stats", "glossary", "glosses"):
        assert holds_losses(name) is (name in ("losses", "aux_loss")), name
    for name in ("Loss", "MoELoss", "AuxLosses", "aux_loss", "LossStats", "Glossary"):
        made = type(name, (nnx.Variable,), {})(jnp.ones(2))
        assert _is_loss(made) is (name not in ("LossStats", "Glossary")), name


class ExpertsNnx(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(2, 3, rngs=rngs)
        self.host, self.device, self.carry = (
            np.ones(2),
            jnp.ones(2),
            nnx.Variable((jnp.zeros(2), jnp.ones(2))),
        )

    def __call__(self, a, b):
        self.carry.set_value((self.carry.get_value()[0] + 1, self.carry.get_value()[1]))
        self.sow("losses", "own", a[:, 0] + b[:, 1])
        self.sow(nnx.Intermediate, "both", a + b)
        return self.out(a + b)


@pytest.mark.filterwarnings("ignore:.*Module.sow:DeprecationWarning")
def test_what_an_nnx_module_of_two_inputs_sows_is_a_loss_in_training_or_nothing():
    module, x = ExpertsNnx(nnx.Rngs(0)), jnp.arange(8.0).reshape(4, 2)
    module(x, x)  # what it sows before training is no state
    fns = adapt(module)
    params, state = fns.init(KEY, (x, x))
    output, after = fns.apply(params, state, (x, x), KEY, True)
    assert output.losses.tolist() == [1, 5, 9, 13]
    assert set(after) == set(state) == {"host", "device", "carry"}  # arrays and a tuple are no sown values
    assert [one.tolist() for one in after["carry"]] == [[2, 2], [1, 1]]
    assert fns.apply(params, state, (x, x), KEY, False)[0].shape == (4, 3)


class Stacked(nnx.Module):
    """Two layers of dropout in one module with a dimension over layers; returns the mask of each."""

    def __init__(self, rngs):
        layer = lambda rngs: nnx.Dropout(0.5, rngs=rngs)  # noqa: E731
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(layer))(rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: (x, layer(x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        return run(x, self.layers)[1].swapaxes(0, 1)


def test_layers_that_nnx_stacks_draw_from_their_own_keys():
    fns, x = adapt(Stacked(nnx.Rngs(0))), jnp.ones((4, 16))
    first, again, other = (fns.apply({}, {}, x, jax.random.key(seed), True)[0] for seed in (0, 0, 1))
    assert (first == again).all()
    for drawn in (other[:, 0], first[:, 1]):
        assert (first[:, 0] != drawn).any()


def test_a_bound_module_keeps_its_values():
    variables = linen.Dense(3).init(jax.random.key(9), jnp.ones((1, 2)))
    params, _ = adapt(linen.Dense(3).bind(variables)).init(KEY, jnp.ones((1, 2)))
    jax.tree.map(np.testing.assert_array_equal, params, variables["params"])
