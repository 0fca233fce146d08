"""Every public optimizer of optax with every strategy: it makes the same steps as on one device, or is
refused with our one-line error."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cyxjax.core.optimizer import adapted
from cyxjax.errors import ConfigError
from tests.support.refusals import refused
from tests.support.resuming import bits
from tests.support.strategies import USUAL, Alone, built, mean_of, params, random_grads
from tests.support.trainers import X, Y, after_fit, config, trainer

# optax warns about deprecated names, which this version still has.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("as_users_promote"),
]
RATE = 0.01
LABELS = {"dense": "a", "gain": "b"}
MATRICES = lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)  # noqa: E731
BY_SHAPE = lambda tree: jax.tree.map(lambda p: p.shape[-1:] == (4,), tree)  # noqa: E731
BY_PATH = {"dense": {"bias": False, "kernel": True}, "gain": False}


def adam():
    return optax.adam(RATE)


def by_place():
    """Steps that depend on the position in a leaf, through an array in the rule."""

    def update(grads, state, params=None):
        places = lambda g: np.arange(g.size, dtype=np.float32).reshape(g.shape)  # noqa: E731
        return jax.tree.map(lambda g: -RATE * g * places(g), grads), state

    return optax.GradientTransformation(lambda params: (), update)


def drawn():
    """A random initial state for a whole leaf: drawn for its parts, it would differ."""

    def init(params):
        return jax.tree.map(lambda p: jax.random.normal(jax.random.key(0), p.shape), params)

    return optax.GradientTransformation(
        init, lambda grads, state, params=None: (jax.tree.map(jnp.multiply, grads, state), state)
    )


def rate_in_a_vector():
    """One number that belongs to no leaf; split into rows, all but the first would be zero after a resume."""
    return optax.GradientTransformation(
        lambda params: jnp.full((1,), RATE),
        lambda grads, rate, params=None: (jax.tree.map(lambda g: -g * jnp.squeeze(rate), grads), rate),
    )


WRAPPED = {
    "rate in a vector": rate_in_a_vector,
    "by place": by_place,
    "drawn": drawn,
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 3),
    "chain": lambda: optax.chain(optax.clip(1.0), adam()),
    "chain with a clip by norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), adam()),
    "clip by norm behind a repair": lambda: optax.chain(
        optax.stateless(lambda grads, _: jax.tree.map(jnp.nan_to_num, grads)),
        optax.clip_by_global_norm(1.0),
        optax.sgd(RATE),
    ),
    "conditionally_mask": lambda: optax.conditionally_mask(adam(), lambda *a, **k: True),
    "conditionally_transform": lambda: optax.conditionally_transform(adam(), lambda *a, **k: True),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, 0),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=0),
    "differentially_private_aggregate": lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, 0),
    "dpsgd": lambda: optax.contrib.dpsgd(RATE, 1.0, 0.1, 0),
    "flatten": lambda: optax.flatten(adam()),
    "freeze": lambda: optax.freeze(BY_PATH),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(RATE),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(RATE),
    "lookahead": lambda: optax.lookahead(adam(), 5, 0.5),
    "masked": lambda: optax.masked(adam(), BY_PATH),
    "masked by dimensions": lambda: optax.masked(adam(), MATRICES),
    "masked by shape": lambda: optax.masked(adam(), BY_SHAPE),
    "decay of matrices": lambda: optax.adamw(RATE, weight_decay=0.5, mask=MATRICES),
    "decay by shape": lambda: optax.adamw(RATE, weight_decay=0.5, mask=BY_SHAPE),
    "measure_with_ema": lambda: optax.measure_with_ema(lambda **_: 0.0, 0.9),
    "multi_transform": lambda: optax.multi_transform({"a": adam(), "b": optax.sgd(RATE)}, LABELS),
    "labels of another tree": lambda: optax.multi_transform({"a": adam()}, {"denses": "a"}),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", adam())),
    "partition": lambda: optax.partition({"a": adam(), "b": optax.sgd(RATE)}, LABELS),
    "scale_by_backtracking_linesearch": lambda: optax.scale_by_backtracking_linesearch(5),
    "scale_by_zoom_linesearch": lambda: optax.scale_by_zoom_linesearch(5),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda n: -RATE / (1.0 + n)),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(RATE, 10)),
    "selective_transform": lambda: optax.selective_transform(adam(), freeze_mask=BY_PATH),
    "snapshot": lambda: optax.snapshot("norm", lambda **_: 0.0),
    "stateless": lambda: optax.stateless(lambda g, p: g),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: -RATE * g),
    "with_extra_args_support": lambda: optax.with_extra_args_support(adam()),
    "multi_steps": lambda: optax.MultiSteps(adam(), 2).gradient_transformation(),
    "mechanize": lambda: optax.contrib.mechanize(adam()),
    "sam": lambda: optax.contrib.sam(adam(), optax.sgd(0.05)),
    "schedule_free": lambda: optax.contrib.schedule_free(adam(), RATE),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(adam()),
    "muon with adam": lambda: optax.contrib.muon(RATE),
}
_PLAIN = """
    adam adamw adamax adamaxw adabelief adadelta adagrad adan amsgrad lion nadam nadamw radam rmsprop rprop
    sgd sign_sgd yogi ademamix adopt schedule_free masked multi_transform partition inject_hyperparams
    schedule multi_steps chain named_chain
"""
CUT = {*_PLAIN.split(), "masked by dimensions", "decay of matrices"}  # what zero1 must at least accept
WHOLE = {
    "lamb",
    "lars",
    "muon with adam",
    "prodigy",
    "novograd",
    "adafactor",
    "masked by shape",
    "decay by shape",
    "by place",
    "drawn",
    "noisy_sgd",
    "rate in a vector",
    "chain with a clip by norm",
    "clip by norm behind a repair",
}
NEVER = {"lbfgs", "polyak_sgd", "momo", "lookahead", "labels of another tree", "scale_by_zoom_linesearch"}


def public():
    """name -> maker of everything in optax and optax.contrib that returns a transformation."""
    makers = {}
    for room in (optax, optax.contrib):
        for name in dir(room):
            made = [args for args in ((RATE,), ()) if _is_rule(getattr(room, name), args)]
            if made and not name.startswith("_"):
                makers[name] = partial(getattr(room, name), *made[0])
    return makers | WRAPPED


def _is_rule(f, args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # Not what returns an array: a call would compile it.
            return "Array" not in str(getattr(f, "__annotations__", {}).get("return")) and isinstance(
                f(*args), optax.GradientTransformation
            )
        except Exception:  # not a rule, or one with other arguments, which WRAPPED covers
            return False


TABLE = public()


def alone_with(comm, make):
    """The strategy with a rule, traced as in a step. Raises: ConfigError."""
    alone = Alone(built(comm, adapted(make()), USUAL[comm]), 2, params(0.1))
    jax.eval_shape(alone.update, jax.eval_shape(alone.first_state), random_grads(2, 0))
    return alone


def is_refused(comm, make):
    message = ""
    try:
        alone_with(comm, make)
    except ConfigError as err:
        message = str(err)
    assert not message or ("HINT: " in message and "\n" not in message)
    return bool(message)


def on_one_device(make, grads):
    rule, values = make(), jax.tree.map(jnp.asarray, params(0.1))
    state = rule.init(values)
    for rows in grads:
        updates, state = rule.update(jax.tree.map(jnp.asarray, mean_of(rows)), state, values)
        values = optax.apply_updates(values, updates)
    return values


def check_steps(comm, name):
    grads = [random_grads(2, t) for t in range(3)]
    got = alone_with(comm, TABLE[name]).step(*grads).copies()
    wanted = on_one_device(TABLE[name], grads)
    # Rounding of sums as large as the leaf's largest number; scale_by_stddev divides by the root of a
    # difference of nearly equal squares, where one rounding of the mean gradient shows 2e-4.
    relative = 1e-3 if name == "scale_by_stddev" else 2e-6
    for copy in got:
        for a, b in zip(jax.tree.leaves(copy), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=relative, atol=relative * max(1, np.abs(b).max()))


@pytest.mark.parametrize("name", ["adamw", "multi_transform", "masked by dimensions", "decay of matrices"])
def test_a_rule_on_parts_makes_the_steps_it_makes_on_whole_leaves(name):
    check_steps("zero1", name)


# With `mean` (the row of a typed key, below) and refused by a fit (the last test): lamb, muon, noisy_sgd.
SOME = (
    {"multi_steps"},
    {"masked by shape", "noisy_sgd", "rate in a vector", "clip by norm behind a repair"},
    {"masked by shape"},
)


@pytest.mark.parametrize(
    ("cut", "whole", "run"),
    [SOME, pytest.param(CUT, WHOLE, WHOLE, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_rules_that_need_leaves_whole_are_refused_parts_and_no_others(cut, whole, run):
    assert {name for name in cut if is_refused("zero1", TABLE[name])} == set()
    assert {name for name in whole if is_refused("zero1", TABLE[name])} == whole
    assert {name for name in run if is_refused("mean", TABLE[name])} == set()


@pytest.mark.parametrize("comm", ["mean", "zero1", "local_sgd"])
def test_rules_that_need_more_than_a_step_gives_are_refused_everywhere(comm):
    assert {name for name in NEVER if is_refused(comm, TABLE[name])} == NEVER


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("comm", ["mean", "bucketed", "zero1", "fsdp"])
@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_rule_steps_as_on_one_device(comm, name):
    if is_refused(comm, TABLE[name]):
        assert name not in CUT
        return
    check_steps(comm, name)


def test_a_rule_with_a_typed_key_trains_is_compared_and_goes_on_to_the_bit(tmp_path, two_devices):
    rule = optax.noisy_sgd(RATE, key=3)  # optax stores a typed key for any argument

    def trained(epochs, folder):
        saved = {"checkpoint_dir": str(tmp_path / folder), "checkpoint_every_n_epochs": 1}
        return bits(after_fit(X[:8], Y[:8], config(epochs=epochs, **saved), optimizer=rule))

    first = trained(1, "cut")  # the sentinel compares replicas at its save
    assert trained(2, "cut") == trained(2, "whole") != first


@pytest.mark.parametrize(
    ("comm", "make", "key"),
    [
        ("mean", optax.lbfgs, "optimizer"),
        ("mean", lambda: optax.lookahead(adam(), 5, 0.5), "optimizer"),
        ("mean", lambda: optax.multi_transform({"a": adam()}, {"x": "a"}), "optimizer"),
        ("zero1", lambda: optax.lamb(RATE), "comm"),
        ("zero1", lambda: optax.contrib.muon(RATE), "comm"),
        ("fsdp", lambda: optax.chain(optax.scale_by_trust_ratio(), optax.scale(-0.1)), "comm"),
    ],
)
def test_fit_names_the_key_of_an_optimizer_that_cannot_make_a_step(comm, make, key, two_devices):
    with refused(key):
        trainer(optimizer=make()).fit(X[:8], Y[:8], config(comm=comm))
