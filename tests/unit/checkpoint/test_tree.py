"""Names of leaves, and what happens to leaves that are spread over processes or fit only after a change."""

from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from cyxjax.checkpoint import tree as state_tree
from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.store import kept_steps
from cyxjax.errors import CheckpointError


class State(NamedTuple):
    step: object
    params: object


def spread_leaf(shape=(4,)):
    """Looks like a jax.Array whose shards lie on several processes."""
    return SimpleNamespace(
        shape=shape, sharding="P('data')", is_fully_replicated=False, is_fully_addressable=False
    )


def test_names_are_paths_through_tuples_dicts_and_lists():
    tree = State(jnp.int32(0), {"Dense_0": {"kernel": jnp.ones(1)}, "blocks": [jnp.ones(1), jnp.ones(2)]})
    assert list(state_tree.named_leaves(tree)) == [
        "step",
        "params/Dense_0/kernel",
        "params/blocks/0",
        "params/blocks/1",
    ]
    assert list(state_tree.named_leaves(jnp.ones(1))) == ["value"]


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match="same name. HINT"):
        state_tree.named_leaves({"a/b": 1, "a": {"b": 2}})


@pytest.mark.parametrize(
    "name", ["", "..", "../../evil", "/etc/passwd", "naïve 模型", "a" * 500, "x\n", "CON"]
)
def test_leaves_may_have_any_name(tmp_path, name):
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, {name: np.arange(3)})
    assert checkpointer.restore({name: np.arange(3)}).state[name].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_leaf_of_several_processes_that_nobody_cut_is_refused():
    with pytest.raises(CheckpointError, match=r"'a' .*\(4,\) .*P\('data'\).*Share"):
        state_tree.refuse_spread("a", spread_leaf())


def test_an_adapt_that_gives_another_shape_is_an_error(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(2)})
    with pytest.raises(CheckpointError, match=r"w: .*float32\[2\] .*float32\[3\]"):
        checkpointer.restore({"w": jnp.ones(3)}, adapt=lambda name, stored, want: stored)


def test_many_differences_are_counted_not_all_listed(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {f"w{i:02}": jnp.ones(2) for i in range(30)})
    with pytest.raises(CheckpointError, match=r"w09 .* 20 "):
        checkpointer.restore({f"w{i:02}": jnp.ones(3) for i in range(30)})


def test_kept_steps_prefer_the_newer_of_equals_and_ignore_what_is_no_number():
    metrics = {1: 2.0, 2: 1.0, 3: 1.0, 4: None, 5: float("nan"), 6: float("-inf")}
    assert kept_steps(metrics, keep_last=1, keep_best=1) == {3, 6}
    assert kept_steps(metrics, keep_last=1, keep_best=2, best="max") == {1, 3, 6}
    assert kept_steps({}, keep_last=1, keep_best=1) == set()


@pytest.mark.parametrize("bad", [{"keep_last": 0}, {"keep_best": -1}, {"max_failures": 0}])
def test_bounds_are_checked(tmp_path, bad):
    with pytest.raises(CheckpointError, match="{}={}\\b".format(*next(iter(bad.items())))):
        Checkpointer(tmp_path, **bad)
