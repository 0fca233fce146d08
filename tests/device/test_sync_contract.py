"""What every strategy promises; the options are those of its entry."""

import jax
import numpy as np
import optax
import pytest

from cyxjax.core.mesh import PER_REPLICA
from cyxjax.core.step import state_spec
from cyxjax.errors import ConfigError
from cyxjax.sync.registry import STRATEGIES
from tests.support.strategies import Alone, built, mean_of, params, random_grads, whole_grads

# Options under which a strategy loses nothing of `whole_grads` and reduces in every step; options as used.
EXACT = {name: dict(one.lossless) for name, one in STRATEGIES.items() if one.lossless is not None}
USUAL = {
    name: dict((one.lossless or {}) if one.usual is None else one.usual) for name, one in STRATEGIES.items()
}
AVERAGING = [name for name in EXACT if STRATEGIES[name].averages_every_step]
LR = 2.0**-7  # a power of two, so that steps on whole numbers are exact


def adaptive() -> optax.GradientTransformation:
    """Two moments and a counter, as Adam has. (optax's Adam breaks the strict dtype rule of these tests.)"""
    rate = optax.scale_by_schedule(lambda n: -LR / (1 + n.astype(np.float32)))
    return optax.chain(optax.scale_by_rms(), optax.trace(0.5), rate)


def sgd() -> optax.GradientTransformation:
    return optax.sgd(LR, momentum=0.5)


@pytest.mark.parametrize("name", EXACT)
def test_equals_the_mean_where_nothing_is_lost(name):
    replicas = 8
    grads = [whole_grads(replicas, t) for t in range(3)]
    # Momentum is linear, so that local steps on local gradients average to steps on the mean.
    got = Alone(built(name, optax.sgd(LR), EXACT[name]), replicas).step(*grads).copies()
    wanted = params()
    for rows in grads:
        wanted = jax.tree.map(lambda p, g: np.float32(p - LR * g), wanted, mean_of(rows))
    # exact but for power_sgd, whose two products of 6 x 4 matrices round: 10 * 127 * LR * 6e-8 = 6e-7
    for copy in got:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), copy, wanted)


@pytest.mark.parametrize("name", USUAL)
def test_state_keeps_shape_dtype_and_place(name):
    alone = Alone(built(name, adaptive(), USUAL[name]), 4)
    before = jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), alone.state)
    after = jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), alone.step(random_grads(4, 0)).state)
    assert before == after
    for spec, part in zip(state_spec(alone.sync), alone.state, strict=True):
        if spec == PER_REPLICA:
            assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(part))


@pytest.mark.parametrize("name", USUAL)
def test_a_reloaded_state_takes_the_same_steps(name):
    sync = built(name, adaptive(), USUAL[name])
    alone = Alone(sync, 4).step(*(random_grads(4, t) for t in range(2)))
    rest = [random_grads(4, t) for t in range(2, 5)]
    saved = alone.state
    unbroken = jax.device_get(alone.step(*rest).state)
    alone.state = saved
    reloaded = jax.device_get(alone.reload().step(*rest).state)
    jax.tree.map(np.testing.assert_array_equal, unbroken, reloaded)


@pytest.mark.parametrize("name", EXACT)
def test_a_world_of_one_is_the_optimizer_itself(name):
    # DiLoCo's outer step is part of the method also alone: with rate 1 and no momentum it is the identity.
    options = EXACT[name] if name == "diloco" else USUAL[name]
    grads = [whole_grads(1, t) for t in range(4)]
    got = Alone(built(name, sgd(), options), 1).step(*grads).copies()[0]
    wanted, state = params(), sgd().init(params())
    for rows in grads:
        updates, state = sgd().update(jax.tree.map(lambda a: a[0], rows), state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("name", USUAL)
def test_replicas_hold_the_same_bits_unless_declared_to_differ(name):
    alone = Alone(built(name, adaptive(), USUAL[name]), 8)
    alone.step(*(random_grads(8, t) for t in range(6)))  # 6 ends a round of 2 and of 3
    first, *others = alone.copies()
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


CODED = ("int8", "bf16", "power_sgd")  # where infinity and NaN go other ways
NOT_FINITE = [*((name, np.nan) for name in EXACT), *((name, np.inf) for name in CODED)]


@pytest.mark.parametrize(("name", "value"), NOT_FINITE)
def test_what_is_not_finite_on_one_replica_reaches_all(name, value):
    grads = random_grads(4, 0)
    grads["dense"]["kernel"][2, 5, 3] = value
    alone = Alone(built(name, optax.sgd(LR), EXACT[name]), 4).step(grads)
    for copy in alone.copies():
        assert not np.isfinite(copy["dense"]["kernel"]).all()


@pytest.mark.parametrize("name", AVERAGING)
def test_clipping_sees_the_norm_of_the_mean_gradient(name):
    # Replicas pull against each other: local norms are near 100 * sqrt(29), the mean's is 127 * sqrt(8).
    grads = whole_grads(2, 0)
    grads = jax.tree.map(lambda a: np.stack([a[0], np.where(a[0] == 127, a[0], -a[0])]), grads)
    got = Alone(built(name, optax.sgd(1.0), EXACT[name], max_grad_norm=1.0), 2).step(grads).copies()[0]
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(mean_of(grads))))
    assert norm == pytest.approx(127 * np.sqrt(8))
    wanted = jax.tree.map(lambda p, g: p - g / norm, params(), mean_of(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)


@pytest.mark.parametrize(
    ("name", "bound"), [*((name, 1.0) for name in EXACT), ("mean", None), ("zero1", None)]
)
def test_the_norm_of_the_mean_gradient_is_told_as_it_was_before_clipping(name, bound):
    # As above: in whole numbers, and sent without loss. Local steps have no mean gradient. Not in every step.
    grads = whole_grads(2, 0)
    grads = jax.tree.map(lambda a: np.stack([a[0], np.where(a[0] == 127, a[0], -a[0])]), grads)
    alone = Alone(built(name, optax.sgd(1.0), EXACT[name], max_grad_norm=bound), 2).step(grads, grads)
    told = pytest.approx([127 * np.sqrt(8), 1], rel=1e-5) if name in AVERAGING else [0, 0]
    assert alone.norms[0] == told
    assert alone.norms[1] == [0, 0]


def test_a_gradient_below_the_norm_is_not_clipped_by_zero1():
    # Its own arithmetic, where the others have optax's: what is small must not be scaled up to the bound.
    grads = whole_grads(2, 0)
    got = [
        Alone(built("zero1", optax.sgd(LR), max_grad_norm=bound), 2).step(grads).copies()[0]
        for bound in (None, 1e6)
    ]
    jax.tree.map(np.testing.assert_array_equal, *got)


@pytest.mark.parametrize("rank", [0, 4, 100])
def test_power_sgd_refuses_a_rank_that_compresses_nothing(rank):
    with pytest.raises(ConfigError, match=rf"power_sgd .*rank={rank} .*\(6, 4\)"):
        Alone(built("power_sgd", sgd(), {"rank": rank}), 2)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("maen", {}, "comm='maen'.* 'mean'"),
        ("mean", {"rank": 4}, "rank"),
        ("power_sgd", {"rank": 2.5}, r"rank=2\.5 .*power_sgd.* int\b"),
        ("fp16", {"error_feedback": "no"}, "error_feedback='no' .*fp16.* bool"),  # "no" is true in Python
        ("local_sgd", {"every": 0}, "every=0"),
    ],
)
def test_bad_names_and_options_are_refused(name, options, said):
    with pytest.raises(ConfigError, match=said):
        built(name, sgd(), options)


NO_NAN = optax.stateless(lambda grads, _: jax.tree.map(jax.numpy.nan_to_num, grads))
CLIP = optax.clip_by_global_norm(1.0)


@pytest.mark.parametrize(
    "optimizer", [optax.lars(0.1), optax.chain(CLIP, sgd()), optax.chain(NO_NAN, CLIP, sgd())]
)
def test_zero1_refuses_rules_that_look_at_whole_leaves(optimizer):
    with pytest.raises(ConfigError) as caught:
        built("zero1", optimizer)
    assert caught.value.key == "comm"
