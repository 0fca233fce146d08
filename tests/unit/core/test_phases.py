"""The phases of one replica by hand: what padding weighs, and what a mean over replicas is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cyxjax.core.model.model_fns import Sown
from cyxjax.core.phases import divided_state, loss_and_seed, weighted_state
from cyxjax.errors import DataError

WEIGHT = jnp.array([1, 1, 0], jnp.float32)


def squares(output: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.square(output - target)


def test_padding_gives_no_gradient_and_its_loss_is_told():
    # d(0.5 * w * (y - t)^2) / dy = w * (y - t): 1, 3, and nothing of the row that fills up.
    output, target = jnp.array([1.0, 3.0, 9.0]), jnp.zeros(3)
    losses, seed = loss_and_seed(squares, output, target, WEIGHT, jnp.float32(0.5))
    assert losses.values.tolist() == [1, 9, 81]
    assert seed.tolist() == [1, 3, 0]


def test_what_a_model_adds_to_its_loss_counts_as_the_loss_does():
    # d(0.5 * w * ((y - t)^2 + own)) / d own = 0.5 for each sample, and nothing for padding.
    made = Sown(jnp.array([1.0, 3.0, 9.0]), jnp.array([10.0, 20.0, jnp.nan]))
    losses, seed = loss_and_seed(squares, made, jnp.zeros(3), WEIGHT, jnp.float32(0.5))
    assert losses.values.tolist()[:2] == [11, 29]
    assert (seed.output.tolist(), seed.losses.tolist()) == ([1, 3, 0], [0.5, 0.5, 0])
    weighing = lambda o, t: (squares(o, t), jnp.ones(3))  # noqa: E731
    with pytest.raises(DataError, match=r"losses.*cx\.Task"):
        loss_and_seed(weighing, made, jnp.zeros(3), WEIGHT, jnp.float32(1))


def test_running_statistics_count_by_samples_and_counters_do_not():
    # Two replicas: 2 samples with mean 1, 1 sample with mean 4: (2 * 1 + 1 * 4) / 3 = 2. One without samples
    # holds whatever it likes.
    states = [{"mean": jnp.array([m]), "count": jnp.int32(7)} for m in (1.0, 4.0, jnp.nan)]
    shares = [weighted_state(s, jnp.float32(w)) for s, w in zip(states, (2, 1, 0), strict=True)]
    assert [int(share["count"]) for share in shares] == [7, 7, 7]
    summed = {"mean": sum(share["mean"] for share in shares), "count": jnp.int32(7)}
    done = divided_state(summed, jnp.float32(3), states[0])
    assert (np.asarray(done["mean"]).tolist(), int(done["count"])) == ([2.0], 7)
