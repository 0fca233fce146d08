"""One rule determines a sample's position and its random draws, the same for every caller."""

import jax
import numpy as np
import pytest

from cyxjax.core.draws import micro_batch_key, place_in_step, step_key
from cyxjax.data.batches import BatchPlan

KEY = jax.random.key_data(jax.random.key(7))


def test_every_place_of_a_step_belongs_to_one_row():
    # 2 micro-batches x 3 replicas x 4 rows: 24 positions. Replica 1, micro-batch 1 starts after 12 positions,
    # at 13, and continues in strides of 3.
    micro, replica, row = np.ogrid[:2, :3, :4]
    places = place_in_step(row, micro, replica, rows=4, num_replicas=3)
    assert sorted(places.reshape(-1)) == list(range(24))
    assert places[1, 1].tolist() == [13, 16, 19, 22]


def test_the_batch_plan_deals_out_by_the_same_rule():
    plan = BatchPlan(100, batch_size=4, num_replicas=3, accumulation=2)
    want = [place_in_step(row, 1, 2, rows=4, num_replicas=3) for row in range(4)]
    assert plan.places(0, [2])[0, 1].tolist() == want
    assert plan.places(2, [2])[0, 1].tolist() == [2 * 24 + place for place in want]


@pytest.mark.parametrize(("rows", "num_replicas", "micro", "replica"), [(4, 3, 1, 1), (1, 8, 0, 5)])
def test_draws_are_named_by_the_place_of_the_first_sample(rows, num_replicas, micro, replica):
    key = micro_batch_key(step_key(KEY, 11), micro, replica, rows=rows, num_replicas=num_replicas)
    first = micro * rows * num_replicas + replica
    want = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 11), first)
    assert (jax.random.key_data(key) == jax.random.key_data(want)).all()
