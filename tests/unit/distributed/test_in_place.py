"""Collectives written as torch has them: a numpy array is filled; a value that would be lost is one line."""

import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax.distributed as dist
from cyxjax.distributed.in_place import fill, thrown_away
from cyxjax.errors import ConfigError, DataError, GroupError


@pytest.fixture(autouse=True)
def of_one(group):
    dist.init_process_group()


def test_a_statement_fills_and_a_used_value_leaves_the_array():
    # In a group of one the mean of whole numbers is a float: it shows whether something was written.
    t = np.array([1.0, 2.0], np.float32)
    dist.all_reduce(t)
    dist.broadcast(t, 0)
    dist.reduce(t, 0)
    dist.all_reduce({"a": t, "b": [t]}, op=dist.ReduceOp.MAX)
    whole = np.array([3, 4], np.int32)
    mean = dist.reduce_tensor(whole)
    assert mean.dtype == jnp.float32
    with pytest.raises(DataError, match=r"float32\[2\].* int32\[2\]"):
        dist.reduce_tensor(whole)
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
    with pytest.raises(DataError, match=r"^all_gather\(out_list, x\) .*3 .*1 ranks"):
        dist.all_gather([None] * 3, t)
    into = np.zeros(2, np.float32)
    dist.scatter(into, [t], 0)
    assert into.tolist() == [5, 6]
    dist.scatter(into, scatter_list=[t + 1], src=0)
    assert into.tolist() == [6, 7]
    with pytest.raises(DataError, match=r"x = scatter\(list, src\)"):
        dist.scatter(jnp.zeros(2), [t], 0)
    assert dist.scatter([t]).tolist() == [5, 6]


def test_scatter_fills_an_array_from_a_list_and_src_by_name():
    t = np.zeros(2, np.float32)
    dist.scatter(t, [np.array([3.0, 4.0], np.float32)], src=0)
    assert t.tolist() == [3, 4]


def test_nothing_is_in_place_where_the_result_is_used():
    t = np.zeros(2, np.float32)
    seen = [dist.all_reduce(t), *map(dist.all_reduce, [t]), (lambda: dist.all_reduce(t))()]
    assert len(seen) == 3
    u = v = dist.all_reduce(jnp.ones(2))
    assert u is v
    if dist.all_reduce(1.0):
        u = dist.all_reduce(u)
    assert u.tolist() == [1, 1]


def test_what_a_statement_is():
    def statement(f):
        f()

    def used(f):
        return f()

    calls = [
        next(
            i.offset
            for i in __import__("dis").get_instructions(c)
            if "CALL" in i.opname and i.opname != "PRECALL"
        )
        for c in (statement, used)
    ]
    assert [thrown_away(c.__code__, at) for c, at in zip((statement, used), calls, strict=True)] == [
        True,
        False,
    ]
    array = np.zeros(2)
    assert fill(array, jnp.ones(2)).tolist() == array.tolist() == [1, 1]


def test_without_a_group_that_is_what_is_said():
    dist.destroy_process_group()
    with pytest.raises((GroupError, ConfigError), match="init_process_group"):
        dist.all_reduce(1.0)
