"""Each scheme against its published algorithm in numpy, and checks that it loses nothing permanently."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cyxjax.core.strategy import norm
from cyxjax.core.trees import times
from cyxjax.sync.registry import STRATEGIES, build_sync
from tests.support.strategies import USUAL, Alone, mean_of, params, random_grads

LR = 0.05


def tree_sum(trees):
    return jax.tree.map(lambda *leaves: np.sum(leaves, 0, dtype=np.float64), *trees)


def close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_leaves_that_share_a_bucket_come_back_in_their_places():
    grads = random_grads(2, 0)
    one, alone = (Alone(build_sync(name, optax.sgd(LR)), 2).step(grads) for name in ("bucketed", "mean"))
    jax.tree.map(np.testing.assert_array_equal, one.copies()[0], alone.copies()[0])


# ---- PowerSGD ----------------------------------------------------------------------------------


def power_sgd_in_numpy(grads, q, error):
    """One step of algorithm 1 for one matrix per replica: (mean gradient, next Q, errors)."""
    m = grads + error
    p = np.mean([m_r @ q for m_r in m], 0)
    for i in range(p.shape[1]):  # Gram-Schmidt, column by column
        for j in range(i):
            p[:, i] -= (p[:, j] @ p[:, i]) * p[:, j]
        p[:, i] /= np.linalg.norm(p[:, i])
    q = np.mean([m_r.T @ p for m_r in m], 0)
    sent = p @ q.T
    return sent, q, m - sent


@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd_equals_the_published_algorithm_step_for_step(rank):
    options = {"rank": rank, "min_compression": 0, "start_iter": 0}
    alone = Alone(build_sync("power_sgd", optax.sgd(LR), options), 4)
    q = np.asarray(alone.state.sync[0].q["dense.kernel"], np.float64)
    wanted, error = params()["dense"]["kernel"].astype(np.float64), np.zeros((4, 6, 4))
    for t in range(5):
        grads = random_grads(4, t)
        mean, q, error = power_sgd_in_numpy(grads["dense"]["kernel"].astype(np.float64), q, error)
        wanted = wanted - LR * mean
        alone.step(grads)
        state = alone.state.sync[0]
        # float32 against float64 over five steps of 6 x 4 products; the sign of columns of P cancels in P Q^T
        close(alone.copies()[0]["dense"]["kernel"], wanted, rtol=1e-4, atol=1e-5)
        close(np.asarray(state.error["dense.kernel"]), error, rtol=1e-3, atol=1e-5)
    biases = tree_sum([mean_of(random_grads(4, t)) for t in range(5)])["dense"]["bias"]
    close(alone.copies()[0]["dense"]["bias"], params()["dense"]["bias"] - LR * biases, rtol=1e-5)


def test_power_sgd_starts_with_plain_means():
    options = {"rank": 1, "min_compression": 0, "start_iter": 3}
    grads = [random_grads(4, t) for t in range(3)]
    alone = Alone(build_sync("power_sgd", optax.sgd(LR), options), 4).step(*grads)
    plain = Alone(build_sync("mean", optax.sgd(LR)), 4).step(*grads)
    close(alone.copies()[0], plain.copies()[0], rtol=1e-6)
    assert not np.any(alone.state.sync[0].error["dense.kernel"])
    alone.step(random_grads(4, 3))
    assert np.any(alone.state.sync[0].error["dense.kernel"])


def test_power_sgd_without_warm_start_draws_a_new_q_each_step():
    options = {"rank": 1, "min_compression": 0, "start_iter": 0, "error_feedback": False}
    same = [random_grads(4, 0)] * 2

    def moves(warm_start):
        alone = Alone(build_sync("power_sgd", optax.sgd(1.0), options | {"warm_start": warm_start}), 4)
        path = [alone.copies()[0]["dense"]["kernel"]]
        for rows in same:
            path.append(alone.step(rows).copies()[0]["dense"]["kernel"])
        error = mean_of(same[0])["dense"]["kernel"] + np.diff(path, axis=0)
        return np.linalg.norm(error, axis=(1, 2))

    warm, cold = moves(True), moves(False)
    assert warm[1] < warm[0] == cold[0]  # a second power iteration is closer to the best rank 1
    assert cold[1] not in (cold[0], warm[1])


def test_power_sgd_leaves_small_leaves_alone():
    options = {"rank": 1, "min_compression": 2.0, "start_iter": 0}
    state = Alone(build_sync("power_sgd", optax.sgd(LR), options), 2).state.sync[0]
    assert set(state.q) == {"dense.kernel"}  # 24 > 2 * 1 * (6 + 4); biases are vectors


# ---- the error of one step is corrected later --------------------------------------------------


def keeps_a_residual(name):
    if not STRATEGIES[name].averages_every_step or STRATEGIES[name].cuts_leaves:
        return False
    state, _ = jax.eval_shape(build_sync(name, optax.sgd(1.0), USUAL[name]).init, params())
    return hasattr(state, "unsent") or hasattr(state, "error")


@pytest.mark.parametrize(
    ("replicas", "name"), [*((4, name) for name in STRATEGIES if keeps_a_residual(name)), (2, "bf16")]
)
def test_residuals_add_up(name, replicas):
    # With plain SGD: applied plus unsent gradients are the sum of all mean gradients.
    grads = [random_grads(replicas, t) for t in range(20)]
    alone = Alone(build_sync(name, optax.sgd(1.0), USUAL[name]), replicas).step(*grads)
    applied = jax.tree.map(lambda p, new: p - new, params(), alone.copies()[0])
    unsent = owed_of(alone.state.sync[0])
    wanted = tree_sum([mean_of(rows) for rows in grads])
    close(jax.tree.map(np.add, applied, unsent), wanted, rtol=1e-4, atol=5e-5)  # 20 sums near 30 in float32
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(unsent)) > 1e-5


def owed_of(state):
    zeros = jax.tree.map(np.zeros_like, params())
    if hasattr(state, "error"):
        zeros["dense"]["kernel"] = np.asarray(state.error["dense.kernel"]).mean(0)
        return zeros
    _, unravel = jax.flatten_util.ravel_pytree(zeros)
    return jax.device_get(unravel(np.asarray(state.unsent).mean(0)))


@pytest.mark.parametrize(("name", "within"), [("fp16", 2.0**-10), ("bf16", 2.0**-7), ("int8", 1 / 100)])
def test_a_step_rounds_by_no_more_than_its_format(name, within):
    # two roundings of half a unit in the last place each; int8: of the block's largest value / 254 each
    options = {"block": 29} if name == "int8" else {}
    alone = Alone(build_sync(name, optax.sgd(1.0), {"error_feedback": False} | options), 4, params(0))
    grads = random_grads(4, 0)
    got = jax.tree.map(np.negative, alone.step(grads).copies()[0])
    largest = max(np.abs(g).max() for g in jax.tree.leaves(grads))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_less(np.abs(a - b), within * largest), got, mean_of(grads)
    )
    assert not np.any(alone.state.sync[0].unsent)


def test_what_float16_cannot_hold_is_sent_later():
    alone = Alone(build_sync("fp16", optax.sgd(1.0)), 2, params(0))
    rows = jax.tree.map(lambda p: np.zeros((2, *p.shape), np.float32), params())
    large = {**rows, "gain": np.array([70_000, 0], np.float32)}
    assert alone.step(large).copies()[0]["gain"] == -65_504 / 2
    assert alone.step(rows).copies()[0]["gain"] == -70_000 / 2
    large["gain"][0] = np.inf
    assert not np.isfinite(alone.step(large).copies()[0]["gain"])


def test_sums_are_taken_in_float32():
    # 256 + 8 x 1: in bfloat16 (8 bits of mantissa) each 1 would vanish beside 256.
    alone = Alone(build_sync("bf16", optax.sgd(1.0), {"error_feedback": False}), 8, params(0))
    rows = jax.tree.map(lambda p: np.ones((8, *p.shape), np.float32), params())
    rows["gain"][0] = 249.0
    assert alone.step(rows).copies()[0]["gain"] == -32.0  # (249 + 7) / 8; in bfloat16 31.0 or 31.25


# ---- local steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 5])
def test_local_sgd_is_local_steps_and_a_mean(every):
    alone = Alone(build_sync("local_sgd", optax.sgd(LR), {"every": every}), 4)
    wanted = [params() for _ in range(4)]
    for t in range(7):
        grads = random_grads(4, t)
        wanted = [jax.tree.map(lambda p, g, r=r: p - LR * g[r], own, grads) for r, own in enumerate(wanted)]
        if (t + 1) % every == 0:
            wanted = [jax.tree.map(lambda *p: np.mean(p, 0), *wanted)] * 4
        alone.step(grads)
        for copy, own in zip(alone.copies(), wanted, strict=True):
            close(copy, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("every", "rate", "momentum"), [(1, 1.0, 0.0), (3, 0.7, 0.9)])
def test_diloco_is_nesterov_on_how_far_replicas_went(every, rate, momentum):
    options = {"every": every, "outer_lr": rate, "outer_momentum": momentum}
    alone = Alone(build_sync("diloco", optax.sgd(LR), options), 4)
    anchor, velocity = params(), params(0)
    for start in range(0, 9, every):
        grads = [random_grads(4, t) for t in range(start, start + every)]
        alone.step(*grads)
        moved = jax.tree.map(lambda g: LR * g, tree_sum([mean_of(rows) for rows in grads]))
        velocity = jax.tree.map(lambda v, d: momentum * v + d, velocity, moved)
        step = jax.tree.map(lambda v, d: momentum * v + d, velocity, moved)
        anchor = jax.tree.map(lambda a, s: a - rate * s, anchor, step)
        for copy in alone.copies():
            close(copy, anchor, rtol=1e-4, atol=1e-5)


def test_what_does_not_move_keeps_its_bits_in_the_rounds_of_diloco():
    alone = Alone(build_sync("diloco", optax.set_to_zero(), {"every": 1}), 3, params(0.1))
    for copy in alone.step(*(random_grads(3, t) for t in range(8))).copies():
        jax.tree.map(np.testing.assert_array_equal, copy, params(0.1))


@pytest.mark.parametrize(("dtype", "number", "count"), [("bfloat16", 1, 600), ("float16", 300, 4)])
def test_16_bit_gradients_are_summed_and_scaled_in_float32(dtype, number, count):
    grads = [jnp.full((), number, dtype)] * count
    assert float(norm(grads)) == pytest.approx(number * count**0.5)
    assert [float(g) for g in times(np.float32(2.0**17), [jnp.full((), 2.0**-4, dtype)])] == [2.0**13]


def test_an_error_inside_a_strategy_is_not_blamed_on_its_options():
    with pytest.raises(TypeError):
        build_sync("operator:neg", optax.sgd(LR))


def test_int8_keeps_a_nan_among_many_blocks():
    """XLA's maximum of 16 blocks and more on CPUs loses a NaN that is not the last of its block."""
    alone = Alone(build_sync("int8", optax.sgd(1.0)), 2, jnp.zeros(30_000))
    grads = jnp.ones((2, 30_000)).at[1, 100].set(jnp.nan)
    assert np.isnan(alone.step(grads).copies()[0][100])


def test_power_sgd_goes_on_after_a_step_without_a_gradient():
    """Q was 0 then, and stayed 0 where the first rows are: those of pixels that are always black."""
    sync = build_sync("power_sgd", optax.sgd(1.0), {"rank": 2, "min_compression": 0, "start_iter": 0})
    grads = np.random.default_rng(0).normal(size=(2, 16, 8)).astype(np.float32)
    grads[:, :4] = 0
    alone = Alone(sync, 2, jnp.zeros((16, 8))).step(np.zeros_like(grads), *[grads] * 8)
    # eight times the mean, but for what is still to be sent
    np.testing.assert_allclose(alone.copies()[0][4:].sum(), -8 * grads.mean(0).sum(), rtol=0.3)
