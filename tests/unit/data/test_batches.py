"""Batch plans: every sample once per epoch, at any size, world, batch and accumulation."""

from unittest.mock import patch

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyxjax.data import batches
from cyxjax.data.batches import BatchPlan, batch_size_from_global, iterate, iterate_blocks, read_batch
from cyxjax.data.order import Order
from cyxjax.data.sources import ArrayDataset
from cyxjax.errors import ConfigError, DataError

PLANS = st.builds(
    BatchPlan,
    num_samples=st.integers(1, 300),
    batch_size=st.integers(1, 9),
    num_replicas=st.integers(1, 6),
    accumulation=st.integers(1, 4),
)


def index_dataset(num_samples):
    return ArrayDataset(np.arange(num_samples), np.arange(num_samples) * 10)


@given(plan=PLANS, seed=st.integers(0, 100), cut=st.integers(0, 6))
def test_every_sample_once_per_epoch(plan, seed, cut):
    # The replicas are divided between two processes at `cut`; each reads its own rows.
    cut = min(cut, plan.num_replicas)
    order = Order(plan.num_samples, seed)
    seen, totals = [], []
    for replicas in (range(cut), range(cut, plan.num_replicas)):
        for batch in iterate(index_dataset(plan.num_samples), order, plan, replicas):
            assert np.array_equal(batch.targets, batch.inputs * 10)
            seen.extend(batch.inputs[batch.weight == 1])
            totals.append(batch.weight.sum())
    assert sorted(seen) == list(range(plan.num_samples))
    assert sum(totals) == sum(len(range(*plan.span(t))) for t in range(plan.num_steps)) == plan.num_used


@given(plan=PLANS)
def test_replicas_differ_by_at_most_one_real_sample_per_micro_batch(plan):
    last = plan.places(plan.num_steps - 1, range(plan.num_replicas)) < plan.num_samples
    per_micro = last.sum(axis=2)
    assert (per_micro.max(axis=0) - per_micro.min(axis=0)).max() <= 1


def test_padding_repeats_a_real_sample_with_weight_zero():
    # 5 samples, B=4, R=2: places 5, 6, 7 are padding and read samples 0, 1, 2 of the step.
    plan = BatchPlan(5, 4, 2)
    (batch,) = iterate(index_dataset(5), Order(5, shuffle=False), plan, range(2))
    assert batch.inputs.tolist() == [0, 2, 4, 1, 1, 3, 0, 2]
    assert batch.weight.tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    assert batch.places.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert (batch.total, batch.weight.dtype) == (5, np.float32)
    (longer,) = iterate(index_dataset(2), Order(2, shuffle=False), BatchPlan(2, 7), range(1))
    assert (longer.inputs.tolist(), longer.total) == ([0, 1, 0, 1, 0, 1, 0], 2)
    # The second step has samples 4 and 5: no other is read there, also in the step that fills up the block.
    first, second = iterate(index_dataset(6), Order(6, shuffle=False), BatchPlan(6, 4), range(1))
    assert (first.inputs.tolist(), second.inputs.tolist()) == ([0, 1, 2, 3], [4, 5, 4, 5])
    (block,) = iterate_blocks(index_dataset(6), Order(6, shuffle=False), BatchPlan(6, 4), range(1), size=3)
    assert set(block.rows.inputs[4:].tolist()) == {4, 5}


@given(
    num_samples=st.integers(1, 300),
    sizes=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 3)), min_size=2, max_size=5
    ),
    cuts=st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_an_epoch_cut_anywhere_and_gone_on_with_at_any_size_has_every_sample_once(num_samples, sizes, cuts):
    order, data = Order(num_samples, 5), index_dataset(num_samples)
    first, seen = 0, []
    for (batch_size, replicas, accumulation), steps in zip(
        sizes, [*cuts[: len(sizes) - 1], 10**9], strict=False
    ):
        plan = BatchPlan(num_samples, batch_size, replicas, accumulation).rest(first)
        assert (plan.num_steps == 0) == (first == num_samples)
        for _, batch in zip(range(steps), iterate(data, order, plan, range(replicas)), strict=False):
            assert batch.stop - batch.total == first  # exactly there, also at an odd position
            assert sorted(batch.inputs[batch.weight == 1]) == sorted(order[first : batch.stop])
            seen.extend(batch.inputs[batch.weight == 1])
            first = batch.stop
    assert sorted(seen) == list(range(num_samples))


def test_the_rest_of_an_epoch_by_hand():
    plan = BatchPlan(20, 2, 3).rest(7)  # G=6: places 7 to 12, 13 to 18, 19
    assert plan.places(0, range(3)).tolist() == [[[7, 10]], [[8, 11]], [[9, 12]]]
    assert [plan.span(t) for t in range(3)] == [(7, 13), (13, 19), (19, 20)]
    assert (plan.num_steps, plan.num_used) == (3, 13)
    whole = BatchPlan(20, 2, 3, drop_last=True)
    assert [(whole.rest(s).num_steps, whole.rest(s).num_used) for s in (7, 14, 15, 20)] == [
        (2, 12),
        (1, 6),
        (0, 0),
        (0, 0),
    ]


@pytest.mark.parametrize("places", [1, 1 << 13])
def test_batches_do_not_depend_on_how_many_are_made_at_once(monkeypatch, places):
    plan, order = BatchPlan(5000, 3, 2), Order(5000, 1)
    pairs = {"a": np.arange(10_000).reshape(5000, 2), "b": np.arange(5000.0)}
    data = ArrayDataset(pairs, pairs)
    several = list(iterate(data, order, plan, range(1, 2)))
    monkeypatch.setattr(batches, "_BYTES_AT_ONCE", 1)
    monkeypatch.setattr(batches, "_PLACES_AT_ONCE", places)  # no fewer than those of one read
    single = list(iterate(data, order, plan, range(1, 2)))
    single[7] = read_batch(data, order, plan, range(1, 2), 7)
    assert len(several) == plan.num_steps == 834
    for one, other in zip(several, single, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one._asdict(), other._asdict())
        assert one.targets is one.inputs  # read once and sent once


@pytest.mark.parametrize(
    ("width", "calls"), [(2, [96]), (1024, [32, 32, 32])], ids=["24 bytes a row", "32 rows fill 256 KiB"]
)
def test_few_rows_are_gathered_together_and_large_ones_alone(width, calls):
    data = ArrayDataset(np.zeros((96, width)), np.zeros(96))
    with patch.object(ArrayDataset, "take", autospec=True, side_effect=ArrayDataset.take) as take:
        list(iterate(data, Order(96), BatchPlan(96, 32), range(1)))
    assert [len(one.args[1]) for one in take.mock_calls] == calls


def test_drop_last_takes_whole_global_batches():
    plan = BatchPlan(29, 2, 3, drop_last=True)
    assert (plan.num_steps, plan.num_used, plan.span(3)) == (4, 24, (18, 24))
    with pytest.raises(DataError, match="drop_last=True .*5 samples .*6"):
        BatchPlan(5, 2, 3, drop_last=True)


def test_global_batch_size_divides_or_names_the_nearest():
    assert batch_size_from_global(96, num_replicas=4, accumulation=2) == 12
    with pytest.raises(ConfigError, match="global_batch_size=100 .*4 replicas x 2 .* 8.* 96 .*104"):
        batch_size_from_global(100, num_replicas=4, accumulation=2)
    for size in (3, 0):
        with pytest.raises(ConfigError, match=f"global_batch_size={size} .*HINT: use 8\\."):
            batch_size_from_global(size, num_replicas=8)
