"""Save and restore on a healthy disk: the same bits, the same meta, the right steps kept."""

import os
import stat
import weakref
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cyxjax.checkpoint import tree
from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.errors import CheckpointError
from cyxjax.train.resume import placing


def make_state():
    """Every kind of leaf: optax state, bf16, integers, scalar, empty, NaN and -0.0."""
    params = {"Dense_0": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.ones(4, jnp.bfloat16)}}
    odd = {"empty": jnp.zeros((0, 3)), "nan": jnp.array([np.nan, -0.0]), "flag": jnp.array([True, False])}
    return (jnp.int32(7), params, odd, optax.adam(1e-3).init(params), jnp.arange(2, dtype=jnp.uint32))


def assert_same_bits(left, right):
    left_leaves, right_leaves = jax.tree.leaves(left), jax.tree.leaves(right)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(left_leaves, right_leaves, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def test_restores_the_same_bits_tree_and_meta(tmp_path):
    assert Checkpointer(tmp_path / "c").restore({"a": jnp.ones(2)}) is None  # nothing was saved
    state = make_state()
    meta = {"epoch": 3, "losses": [0.1, float("inf")], "data": {"consumed": 10**12}}
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(7, state, meta, metric=0.25)
    (tmp_path / "c").rename(tmp_path / "moved")
    restored = Checkpointer(tmp_path / "moved").restore(jax.eval_shape(lambda: state))
    assert_same_bits(restored.state, state)
    assert (restored.step, restored.meta) == (7, meta)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored.state))


def test_saved_values_are_those_of_the_call(tmp_path):
    array, meta, given_up = np.ones(3), {"epoch": 1}, jnp.zeros(1000)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": array, "b": given_up}, meta)
        array += 1
        meta["epoch"] = 2
        jax.jit(lambda x: x + 1, donate_argnums=0)(given_up)
    restored = Checkpointer(tmp_path).restore({"a": array, "b": np.ones(1000, np.float32)})
    assert restored.state["a"].tolist() == [1, 1, 1]
    assert restored.state["b"].tolist() == [0] * 1000
    assert restored.meta == {"epoch": 1}


@pytest.mark.parametrize(
    ("metrics", "keep", "kept"),
    [
        # best: step 1 (1.0) and 3 (2.0); newest: 5 and 6. A NaN is never best, whatever it compares like.
        ([5.0, 1.0, float("nan"), 2.0, 3.0, None, 4.0], {"keep_last": 2, "keep_best": 2}, [1, 3, 5, 6]),
        ([2.0, 1.0, 1.0, float("-inf")], {"keep_last": 1, "keep_best": 1}, [2, 3]),  # the newer of equals
        ([0.1, 0.9, 0.5], {"keep_last": 1, "best": "max"}, [1, 2]),
    ],
)
def test_keeps_the_newest_and_the_best(tmp_path, metrics, keep, kept):
    with Checkpointer(tmp_path, async_save=False, **keep) as checkpointer:
        for step, metric in enumerate(metrics):
            checkpointer.save(step, {"a": jnp.ones(1)}, metric=metric)
        assert checkpointer.steps() == kept
        assert checkpointer.saved_step == len(metrics) - 1


def test_the_best_step_is_found_among_those_of_the_newest_ones_monitor(tmp_path):
    watched = [("val_loss", 2.1), ("val_accuracy", 0.9), ("val_accuracy", 0.8), ("val_accuracy", 0.7)]
    with Checkpointer(tmp_path, keep_last=1, best="max", async_save=False) as checkpointer:
        for step, (monitor, metric) in enumerate(watched):
            checkpointer.save(step, {"a": jnp.ones(1)}, {"config": {"monitor": monitor}}, metric)
        assert checkpointer.steps() == [1, 3]  # not the loss of 2.1, which as an accuracy would be the best


def test_saving_a_step_again_replaces_it(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, {"a": jnp.zeros(2)})
        checkpointer.save(5, {"a": jnp.ones(2)})
    assert checkpointer.restore({"a": jnp.zeros(2)}).state["a"].tolist() == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["step_00000005"]


def test_rewind_sets_the_later_steps_aside(tmp_path):
    with Checkpointer(tmp_path, async_save=False) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"a": jnp.full(1, step)})
        assert checkpointer.rewind(1) == [2, 3]
        assert checkpointer.restore({"a": jnp.ones(1, jnp.int32)}).step == 1
    assert sum("abandoned" in name for name in os.listdir(tmp_path)) == 2


def test_everything_is_private(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, make_state())
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "c").rglob("*")}
    assert modes == {True: 0o700, False: 0o600}
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700


def test_sharded_and_replicated_arrays_of_one_process(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("data")))
    same = jax.device_put(jnp.arange(3.0), NamedSharding(mesh, PartitionSpec()))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"rows": rows, "same": same})
    restored = checkpointer.restore({"rows": rows, "same": same})
    assert restored.state["rows"].tolist() == list(range(8))
    assert restored.state["same"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ({"w": jnp.ones(3), "b": jnp.ones(2)}, r"w .*float32\[2\].* float32\[3\]"),
        ({"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}, "w .*float32.* bfloat16"),
        ({"w": jnp.ones(2)}, r"state\W+b\b"),
        ({"w": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(1)}, r"state\W+c\b"),
    ],
)
def test_another_state_is_refused_by_leaf_name(tmp_path, target, named):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(2), "b": jnp.ones(2)})
    with pytest.raises(CheckpointError, match=named):
        checkpointer.restore(target)
    # Another model is not a damaged file: nothing is set aside.
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_differences_are_allowed_when_asked(tmp_path):
    cast = lambda name, stored, want: stored.astype(want.dtype) if stored.shape == want.shape else None  # noqa: E731
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(2), "rows": jnp.ones((2, 3))})
    half = {"w": jnp.ones(2, jnp.bfloat16), "rows": jnp.ones((2, 3))}
    assert checkpointer.restore(half, adapt=cast).state["w"].dtype == jnp.bfloat16
    more_rows = {"w": jnp.ones(2), "rows": jnp.ones((4, 3))}
    with pytest.raises(CheckpointError, match=r"rows .*float32\[2, 3\].* float32\[4, 3\]"):
        checkpointer.restore(more_rows, adapt=cast)
    refit = checkpointer.restore(more_rows, adapt=lambda name, stored, want: np.resize(stored, want.shape))
    assert refit.state["rows"].shape == (4, 3)
    assert checkpointer.restore({"w": jnp.ones(2)}, part=True).state["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("leaf", "named"),
    [
        (3, "a int"),
        ("text", "a str"),
        (jax.random.key(0), r"key<fry>.*jax\.random\.key_data"),
        (np.array(["x"]), "dtype <U1"),
        (np.array([object()]), "object"),
        (np.array([1.0], ">f4"), "dtype >f4"),  # would be read back with its bytes the wrong way round
    ],
)
def test_what_is_no_array_of_numbers_is_refused_in_the_callers_line(tmp_path, leaf, named):
    with pytest.raises(CheckpointError, match=f"'a' .*{named}"):
        Checkpointer(tmp_path).save(1, {"a": leaf})
    assert os.listdir(tmp_path) == []


def test_only_the_writer_touches_the_disk(tmp_path):
    Checkpointer(tmp_path / "none", is_writer=False).save(1, {"a": jnp.ones(1)})
    assert not (tmp_path / "none").exists()


@dataclass(frozen=True, eq=False)
class Counted:
    """All of a leaf, cut over several devices of one process; held: which host copies were given out."""

    held: list
    shape: tuple[int, ...] = (4, 2)
    dtype: np.dtype = np.dtype(np.float32)
    start: int = 0
    stop: int = 8
    is_whole: bool = True

    def values(self):
        copy = np.arange(8, dtype=np.float32)
        self.held.append((weakref.ref(copy), sum(ref() is not None for ref, _ in self.held)))
        return copy


@pytest.mark.parametrize(("in_background", "others"), [(False, [0, 0, 0]), (True, [0, 1, 2])])
def test_a_save_that_is_waited_for_holds_one_leaf_on_the_host_at_a_time(tmp_path, in_background, others):
    held = []
    with Checkpointer(tmp_path, async_save=in_background) as checkpointer:
        checkpointer.save(1, {name: Counted(held) for name in "abc"})
    assert [count for _, count in held] == others
    found = Checkpointer(tmp_path).restore({"a": np.zeros((4, 2), np.float32)}, part=True).state
    np.testing.assert_array_equal(found["a"], np.arange(8, dtype=np.float32).reshape(4, 2))


def test_a_restore_in_place_gives_up_a_leaf_before_it_reads_another(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.ones(3), "b": jnp.zeros(2)})
    state, put, seen = {"a": jnp.zeros(3), "b": jnp.ones(2)}, placing(mesh, in_place=True), []

    def watched(want, read):
        return put(want, lambda: seen.append([leaf.is_deleted() for leaf in state.values()]) or read())

    found = Checkpointer(tmp_path).restore(state, put=watched).state
    assert seen == [[True, False], [True, True]]
    assert [leaf.tolist() for leaf in found.values()] == [[1, 1, 1], [0, 0]]


@pytest.mark.parametrize(
    "name", ["", "..", "../../evil", "/etc/passwd", "naïve 模型", "a" * 500, "x\n", "CON"]
)
def test_leaves_may_have_any_name(tmp_path, name):
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, {name: np.arange(3)})
    assert checkpointer.restore({name: np.arange(3)}).state[name].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_names_are_paths_and_two_leaves_of_one_name_are_refused():
    found = tree.named_leaves({"Dense_0": {"kernel": 1}, "blocks": [2, (3, 4)]})
    assert list(found) == ["Dense_0/kernel", "blocks/0", "blocks/1/0", "blocks/1/1"]
    assert list(tree.named_leaves(1)) == ["value"]
    with pytest.raises(CheckpointError, match="'/'"):
        tree.named_leaves({"a/b": 1, "a": {"b": 2}})
