"""The contract of every strategy, with the options of its entry."""

import jax
import numpy as np
import optax
import pytest

from cyxjax.core.mesh import PER_REPLICA
from cyxjax.core.step import state_spec
from cyxjax.errors import ConfigError
from cyxjax.sync.registry import STRATEGIES
from tests.support.strategies import (
    ADAPTIVE,
    EXACT,
    LR,
    MOMENTUM,
    SGD,
    USUAL,
    Alone,
    built,
    mean_of,
    params,
    random_grads,
    whole_grads,
)

UNSCALED = optax.sgd(1.0)


@pytest.mark.parametrize("name", EXACT)
def test_equals_the_mean_where_nothing_is_lost_and_what_is_not_finite_reaches_all(name):
    grads = [whole_grads(4, t) for t in range(3)]
    # Momentum is linear, so local steps on local gradients average to steps on the mean.
    alone = Alone(built(name, SGD, EXACT[name]), 4).step(*grads)
    wanted = params()
    for rows in grads:
        wanted = jax.tree.map(lambda p, g: np.float32(p - LR * g), wanted, mean_of(rows))
    # exact except power_sgd, whose two products of 6 x 4 matrices round: 10 * 127 * LR * 6e-8 = 6e-7
    for copy in alone.copies():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), copy, wanted)
    finite = alone.state
    for value in (np.nan, np.inf):  # on one replica
        alone.state = finite
        grads[0]["dense"]["kernel"][2, 5, 3] = value
        for copy in alone.step(grads[0]).copies():
            assert not np.isfinite(copy["dense"]["kernel"]).all()


@pytest.mark.parametrize("name", USUAL)
def test_state_keeps_its_form_when_reloaded_too_and_replicas_the_same_bits(name):
    alone = Alone(built(name, ADAPTIVE, USUAL[name]), 4)
    form = lambda: jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), alone.state)  # noqa: E731
    before = form()
    alone.step(*(random_grads(4, t) for t in range(2)))
    assert form() == before
    for spec, part in zip(state_spec(alone.sync), alone.state, strict=True):
        if spec == PER_REPLICA:
            assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(part))
    saved, rest = alone.state, [random_grads(4, t) for t in range(2, 6)]  # 6 ends a round of 2 and of 3
    unbroken = jax.device_get(alone.step(*rest).state)
    first, *others = alone.copies()
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
    alone.state = saved
    reloaded = jax.device_get(alone.reload().step(*rest).state)
    jax.tree.map(np.testing.assert_array_equal, unbroken, reloaded)


@pytest.mark.parametrize("name", EXACT)
def test_a_world_of_one_is_the_optimizer_itself(name):
    # DiLoCo's outer step also runs with one replica: with rate 1 and no momentum it is the identity.
    options = EXACT[name] if name == "diloco" else USUAL[name]
    grads = [whole_grads(1, t) for t in range(4)]
    got = Alone(built(name, MOMENTUM, options), 1).step(*grads).copies()[0]
    wanted, state = params(), MOMENTUM.init(params())
    for rows in grads:
        updates, state = MOMENTUM.update(jax.tree.map(lambda a: a[0], rows), state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


# Without a bound, and with one that is not reached, which must not scale up.
@pytest.mark.parametrize(
    ("name", "bound"),
    [*((name, 1.0) for name in EXACT), ("mean", None), ("zero1", None), ("zero1", 1e6)],
)
def test_clipping_sees_the_norm_of_the_mean_gradient_and_the_norm_is_told_as_it_was(name, bound):
    # Replicas pull against each other: local norms are near 100 * sqrt(29), the mean's is 127 * sqrt(8).
    grads = whole_grads(2, 0)
    grads = jax.tree.map(lambda a: np.stack([a[0], np.where(a[0] == 127, a[0], -a[0])]), grads)
    alone = Alone(built(name, UNSCALED, EXACT[name], max_grad_norm=bound), 2).step(grads)
    norm, averages = 127 * np.sqrt(8), STRATEGIES[name].averages_every_step
    if averages:
        by = min(1.0, (bound or np.inf) / norm)
        wanted = jax.tree.map(lambda p, g: p - by * g, params(), mean_of(grads))
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # noqa: E731
        jax.tree.map(close, alone.copies()[0], wanted)
    # Local steps do not have a mean gradient in every step.
    assert alone.step(grads).norms[0] == (pytest.approx([norm, 1], rel=1e-5) if averages else [0, 0])
    assert alone.norms[1] == [0, 0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("maen", {}, "comm='maen'.* 'mean'"),
        ("mean", {"rank": 4}, "rank"),
        ("power_sgd", {"rank": 2.5}, r"rank=2\.5 .*power_sgd.* int\b"),
        ("power_sgd", {"rank": 0}, r"power_sgd .*rank=0 .*\(6, 4\)"),
        ("power_sgd", {"rank": 4}, r"power_sgd .*rank=4 .*\(6, 4\)"),  # compresses nothing
        ("fp16", {"error_feedback": "no"}, "error_feedback='no' .*fp16.* bool"),  # "no" is true in Python
        ("local_sgd", {"every": 0}, "every=0"),
    ],
)
def test_bad_names_and_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        Alone(built(name, MOMENTUM, options), 2).step(random_grads(2, 0))
