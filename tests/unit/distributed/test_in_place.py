"""Collectives in torch's form: a numpy array is filled; a value that would be lost is a one-line error."""

import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax.distributed as dist
from cyxjax.errors import DataError


@pytest.fixture(autouse=True)
def of_one(group):
    dist.init_process_group()


def test_a_statement_fills_and_a_used_value_leaves_the_array():
    # In a group of one the mean of integers is a float, which shows whether something was written.
    t = np.array([1.0, 2.0], np.float32)
    dist.all_reduce(t)
    dist.broadcast(t, 0)
    dist.reduce(t, 0)
    dist.all_reduce({"a": t, "b": [t]}, op=dist.ReduceOp.MAX)
    whole = np.array([3, 4], np.int32)
    assert dist.reduce_tensor(whole).dtype == jnp.float32  # a mean
    several = bool(whole.size)
    with pytest.raises(TypeError):
        dist.reduce_tensor(whole)
    with pytest.raises(TypeError):
        dist.reduce_tensor(whole) if several else None
    with pytest.raises(TypeError):
        several and dist.reduce_tensor(whole)
    assert (t.tolist(), whole.tolist()) == ([1, 2], [3, 4])


@pytest.mark.parametrize("value", [jnp.ones(2), 1.0, {"a": jnp.ones(2)}, [], np.broadcast_to(1.0, (2,))])
def test_a_value_that_would_be_lost_is_one_line(value):
    with pytest.raises(DataError, match=r"x = all_reduce\(x\)"):
        dist.all_reduce(value)
    with pytest.raises(DataError, match=r"HINT: write x = broadcast\(x, 0\)"):
        dist.broadcast(value, 0)


def test_lists_are_filled_as_torch_fills_them():
    t, out = np.array([5.0, 6.0], np.float32), [np.zeros(2, np.float32)]
    kept = out[0]
    dist.all_gather(out, t)
    assert (kept.tolist(), out[0] is kept) == ([5, 6], True)
    nothing = [None]
    dist.all_gather(nothing, jnp.ones(1))
    assert float(nothing[0][0]) == 1
    # nothing is broadcast or reshaped
    for other in ([None] * 3, [np.zeros((3, 2), np.float32)], [np.zeros((1, 2), np.float32)]):
        with pytest.raises(ValueError, match="."):
            dist.all_gather(other, t)
    into = np.zeros(2, np.float32)
    dist.scatter(into, [t], 0)
    assert into.tolist() == [5, 6]
    dist.scatter(into, scatter_list=[t + 1], src=0)
    assert into.tolist() == [6, 7]
    with pytest.raises(DataError, match=r"x = scatter\(list, src\)"):
        dist.scatter(jnp.zeros(2), [t], 0)
    assert dist.scatter([t]).tolist() == dist.scatter([t], 0).tolist() == [5, 6]
    for other in ([], [t, t]):  # one item per rank
        with pytest.raises(ValueError, match="."):
            dist.scatter(other)


def test_nothing_is_in_place_where_the_result_is_used():
    t = np.zeros(2, np.float32)
    seen = [dist.all_reduce(t), *map(dist.all_reduce, [t]), (lambda: dist.all_reduce(t))()]
    assert len(seen) == 3
    u = v = dist.all_reduce(jnp.ones(2))
    assert u is v
    if dist.all_reduce(1.0):
        u = dist.all_reduce(u)
    assert u.tolist() == [1, 1]
