"""The phases of one replica by hand: the weight of padding, the mean over replicas, its norm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cyxjax.core.model.model_fns import Sown
from cyxjax.core.phases import divided_state, pull_back, weighted_state
from cyxjax.core.strategy import Stepped, norm_row, written_after
from cyxjax.errors import DataError

WEIGHT = jnp.array([1, 1, 0], jnp.float32)


def squares(output: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.square(output - target)


def test_padding_gives_no_gradient_and_its_loss_is_told():
    # d(0.5 * w * (y - t)^2) / dy = w * (y - t): 1, 3, and 0 for the padding row.
    output, target = jnp.array([1.0, 3.0, 9.0]), jnp.zeros(3)
    (losses,), ((seed, _),) = pull_back(squares, output, lambda g: (g,), target, WEIGHT, jnp.float32(0.5))
    assert losses.values.tolist() == [1, 9, 81]
    assert seed.tolist() == [1, 3, 0]


def test_what_a_model_adds_to_its_loss_counts_as_the_loss_does():
    # d(0.5 * w * ((y - t)^2 + own)) / d own = 0.5 for each sample, and 0 for padding.
    made = Sown(jnp.array([1.0, 3.0, 9.0]), jnp.array([10.0, 20.0, jnp.nan]))
    (losses,), ((seed, _),) = pull_back(squares, made, lambda g: (g,), jnp.zeros(3), WEIGHT, jnp.float32(0.5))
    assert losses.values.tolist()[:2] == [11, 29]
    assert (seed.output.tolist(), seed.losses.tolist()) == ([1, 3, 0], [0.5, 0.5, 0])
    weighing = lambda o, t: (squares(o, t), jnp.ones(3))  # noqa: E731
    with pytest.raises(DataError, match=r"losses.*cx\.Task"):
        pull_back(weighing, made, lambda g: (g,), jnp.zeros(3), WEIGHT, jnp.float32(1))


def test_running_statistics_count_by_samples_and_counters_do_not():
    # Two replicas: 2 samples with mean 1, 1 sample with mean 4: (2 * 1 + 1 * 4) / 3 = 2. A replica without
    # samples may have any value. 16-bit sums are float32: 2 * 60000 would overflow, and the mean is 40001.
    old = {"mean": jnp.zeros(1), "large": jnp.zeros(1, jnp.float16), "count": jnp.int32(6)}
    values = ((1.0, 60000), (4.0, 3), (jnp.nan, jnp.nan))
    states = [{"mean": jnp.array([m]), "large": jnp.float16([n]), "count": jnp.int32(7)} for m, n in values]
    done = mean_of(states, old, (2, 1, 0))
    assert (np.asarray(done["mean"]).tolist(), int(done["count"])) == ([2.0], 7)
    assert done["large"] == jnp.float16(120003 / 3)


def test_a_leaf_that_no_replica_changed_keeps_its_bits():
    # Times 21 the first overflows, and 1 + 2**-22 is rounded: the mean would be 1 + 2**-23 or worse.
    old = {
        "mask": np.float32([np.finfo(np.float32).min, 1 + 2**-22, np.pi]),
        "half": np.float16([65504, 0.1]),
    }
    done = mean_of([old, old, jax.tree.map(lambda a: a * 0, old)], old, (21, 24, 0))
    assert jax.tree.map(lambda a: np.asarray(a).tobytes(), done) == jax.tree.map(np.ndarray.tobytes, old)


def mean_of(states, old, weights):
    """The mean of the states of replicas with these numbers of samples."""
    shares = [weighted_state(s, old, jnp.float32(w)) for s, w in zip(states, weights, strict=True)]
    add = lambda *parts: sum(parts) if jnp.issubdtype(parts[0].dtype, jnp.inexact) else max(parts)  # noqa: E731
    return divided_state(jax.tree.map(add, *shares), jnp.float32(sum(weights)), old)


def test_no_branch_adds_up_many_leaves_and_the_norm_keeps_its_bits():
    # 1 + 2**-24 is 1 in float32: small leaves count only if they are added up first.
    sizes = [1.0, *[2.0**-12] * 199]
    leaves = [np.full(1, size, np.float32) for size in sizes]
    row = lambda step, grads: norm_row(Stepped(None, None, grads), step)  # noqa: E731
    traced = jax.make_jaxpr(row)(np.int32(8), leaves)
    num_inputs = [len(eqn.invars) for eqn in traced.jaxpr.eqns if eqn.primitive.name == "cond"]
    assert len(num_inputs) == 4
    assert max(num_inputs) <= 66  # the condition, the sum so far, 64 leaves
    one_by_one = np.float32(optax.tree.norm(leaves))
    assert one_by_one == 1.0 != np.float32(np.sqrt(np.sum(np.square(sizes))))
    np.testing.assert_array_equal(jax.jit(row)(np.int32(8), leaves), [one_by_one, 1.0])
    np.testing.assert_array_equal(jax.jit(row)(np.int32(9), leaves), [0.0, 0.0])


@pytest.mark.parametrize("norm", [0.0, -0.0, 3.0, np.inf, np.nan])
def test_parameters_that_wait_for_the_norm_keep_their_bits(norm):
    params = {
        "a": np.float32([-0.0, np.nan, np.inf, 1e-30]),
        "b": np.int32([-7]),
        "c": np.complex64([-0.0 - 2j]),
    }
    wait = lambda row, new: written_after(row, Stepped(new, None, [np.ones(1)]))  # noqa: E731
    written = jax.jit(wait)(np.float32([norm, 1.0]), params)
    assert jax.tree.map(lambda a: (a.dtype, np.asarray(a).tobytes()), written) == jax.tree.map(
        lambda a: (a.dtype, a.tobytes()), params
    )


def test_parameters_wait_for_no_norm_that_nobody_takes_or_that_is_of_parts():
    params, row = {"a": np.ones(2)}, np.zeros(2, np.float32)
    assert written_after(row, Stepped(params, None)) is params
    assert written_after(row, Stepped(params, None, {"a": np.ones(1)}, in_parts=True)) is params


def test_a_gpu_is_given_no_branch_which_its_host_would_wait_for(monkeypatch):
    leaves = [np.full(3, 2.0, np.float32)] * 3
    row = lambda step, grads: norm_row(Stepped(None, None, grads), step)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(jax, "default_backend", lambda: "gpu")
        traced = jax.make_jaxpr(row)(np.int32(8), leaves)
        found = [jax.jit(lambda n, leaves: row(n, leaves))(np.int32(n), leaves) for n in (8, 9)]
    assert "cond" not in str(traced)
    np.testing.assert_array_equal(found, [[6.0, 1.0], [0.0, 0.0]])
