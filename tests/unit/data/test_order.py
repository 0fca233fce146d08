"""The order of an epoch: a bijection, pure, pointwise, even."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cyxjax.data.order import Order

STORED_10 = [5, 0, 2, 7, 4, 9, 3, 6, 8, 1]
STORED_BIG = [9245904354, 7932138414, 8342040133]


@given(num_samples=st.integers(1, 5000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
@example(num_samples=2**10 - 1, seed=3, epoch=0)
@example(num_samples=2**10, seed=3, epoch=0)
@example(num_samples=2**10 + 1, seed=3, epoch=0)
@example(num_samples=2**11 + 1, seed=3, epoch=0)
@example(num_samples=100_003, seed=3, epoch=0)
def test_every_sample_once(num_samples, seed, epoch):
    assert np.array_equal(np.sort(Order(num_samples, seed, epoch)[:]), np.arange(num_samples))


def test_stored_values_hold_on_every_machine():
    # A changed order would silently change which samples a resumed run sees.
    assert Order(10, 0, 0)[:].tolist() == STORED_10
    assert Order(10**10, 42, 7)[[0, 1, 10**10 - 1]].tolist() == STORED_BIG


@pytest.mark.parametrize("num_samples", [2, 70, 1437, 12_800, 2**14])
def test_the_table_of_a_small_set_holds_what_the_network_gives(num_samples):
    order = Order(num_samples, 5, 2)
    walked = order._walk(np.arange(num_samples, dtype=np.uint64))
    assert np.array_equal(order[:], walked)


def test_any_slice_is_the_same_slice_of_the_whole():
    order = Order(1000, 5, 2)
    whole = order[:]
    assert np.array_equal(order[100:200], whole[100:200])
    assert np.array_equal(order[np.array([[7, 3], [7, 999]])], whole[np.array([[7, 3], [7, 999]])])
    assert int(order[17]) == whole[17]
    assert list(order) == whole.tolist()


def test_seed_and_epoch_both_change_the_order():
    orders = [Order(500, seed, epoch)[:] for seed in (0, 1, -1, 2**64 - 2) for epoch in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # Two random permutations agree at one place on average.
            assert np.count_nonzero(one == other) < 12


@pytest.mark.parametrize("num_samples", [4, 16, 100])
def test_each_place_gets_each_sample_equally_often(num_samples):
    draws = 1500
    table = np.stack([Order(num_samples, seed, 0)[:] for seed in range(draws)])
    for place in (0, num_samples // 2, num_samples - 1):
        assert chi_square_z(table[:, place], num_samples) < 6


def chi_square_z(values, num_bins):
    """The chi-square statistic for equal frequencies, in standard deviations above its mean."""
    counts = np.bincount(values, minlength=num_bins)
    expected = len(values) / num_bins
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return (chi_square - (num_bins - 1)) / np.sqrt(2 * (num_bins - 1))


def test_numpy_integers_are_integers():
    wanted = Order(50, -3, 4)[:]
    assert np.array_equal(Order(50, np.int64(-3), np.int32(4))[:], wanted)
