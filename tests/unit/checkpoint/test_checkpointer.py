"""Save and restore on a healthy disk: the same bits and meta, the right steps kept; stored formats."""

import json
import os
import shutil
import stat
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cyxjax.checkpoint import restoring, tree
from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import _DTYPES, MANIFEST, _sealed, decode
from cyxjax.checkpoint.tree import HostShare
from cyxjax.errors import CheckpointError
from cyxjax.train.resume import placing
from tests.data.make_checkpoint import META, fixture_state

STORED = Path(__file__).parents[2] / "data" / "checkpoint_v2"


def make_state():
    """Every kind of leaf: optax, bf16, integers, scalar, empty, NaN and -0.0; sharded and replicated."""
    params = {"Dense_0": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.ones(4, jnp.bfloat16)}}
    special = {"empty": jnp.zeros((0, 3)), "nan": jnp.array([np.nan, -0.0]), "flag": jnp.array([True, False])}
    mesh, rows = Mesh(np.array(jax.devices()[:4]), ("data",)), jnp.arange(8, dtype=jnp.uint32)
    spread = [jax.device_put(rows, NamedSharding(mesh, PartitionSpec(axis))) for axis in ("data", None)]
    return (jnp.int32(7), params, special, optax.adam(1e-3).init(params), spread)


def assert_same_bits(left, right):
    left_leaves, right_leaves = jax.tree.leaves(left), jax.tree.leaves(right)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(left_leaves, right_leaves, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def test_a_step_comes_back_in_its_bits_tree_and_meta_and_is_private(tmp_path):
    Checkpointer(tmp_path / "c", is_writer=False).save(1, {"a": jnp.ones(2)})
    assert not (tmp_path / "c").exists()  # only the writer touches the disk
    assert Checkpointer(tmp_path / "c").restore({"a": jnp.ones(2)}) is None  # nothing was saved
    state = make_state()
    meta = {"epoch": 3, "losses": [0.1, float("inf")], "data": {"consumed": 10**12}}
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(7, {"a": jnp.ones(2)})  # replaced by the next save of this step
        checkpointer.save(7, state, meta, metric=0.25)
    moved = (tmp_path / "c").rename(tmp_path / "moved")
    restored = Checkpointer(moved).restore(jax.eval_shape(lambda: state))
    assert_same_bits(restored.state, state)
    assert (restored.step, restored.meta) == (7, meta)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored.state))
    assert os.listdir(moved) == ["step_00000007"]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (moved, *moved.rglob("*"))}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_a_step_that_was_verified_is_compared_again_only_if_it_was_replaced(tmp_path, monkeypatch):
    compared, compare = [], restoring.find_problems
    monkeypatch.setattr(restoring, "find_problems", lambda *of: compared.append(of) or compare(*of))

    def save(value):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"a": np.full(3, value)})
        return checkpointer

    def restored():
        return Checkpointer(tmp_path, known=known).restore({"a": np.ones(3, int)}).state["a"][0]

    known = save(1).newest_manifest()
    assert (restored(), len(compared)) == (1, 1)
    save(2)
    assert (restored(), len(compared)) == (2, 2)


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
        # best: step 1 (1.0) and 3 (2.0); newest: 5 and 6. NaN is never best, however it compares.
        ([5.0, 1.0, float("nan"), 2.0, 3.0, None, 4.0], {"keep_last": 2, "keep_best": 2}, [1, 3, 5, 6]),
        ([2.0, 1.0, 1.0, float("-inf")], {"keep_last": 1, "keep_best": 1}, [2, 3]),  # equal: the newer one
        ([0.1, 0.9, 0.5], {"keep_last": 1, "best": "max"}, [1, 2]),
        # not the one with loss 2.1, the best if it were an accuracy
        ([("val_loss", 2.1), 0.9, 0.8, 0.7], {"keep_last": 1, "best": "max"}, [1, 3]),
    ],
    ids=["best", "equal", "highest", "another"],
)
def test_keeps_the_newest_and_the_best_of_the_newest_ones_monitor(tmp_path, metrics, keep, kept):
    with Checkpointer(tmp_path, async_save=False, **keep) as checkpointer:
        for step, metric in enumerate(metrics):
            monitor, value = metric if isinstance(metric, tuple) else ("val_accuracy", metric)
            checkpointer.save(step, {"a": jnp.ones(1)}, {"config": {"monitor": monitor}}, value)
        assert checkpointer.steps() == kept


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
    # A different model is not a damaged file: nothing is set aside.
    assert os.listdir(tmp_path) == ["step_00000001"]


@pytest.mark.parametrize("scale", [{}, {"scale": jnp.float32(2.0)}])
def test_a_state_that_counted_the_steps_left_out_is_read_without_the_count(tmp_path, scale):
    """As version 0.2.0 stored it, where a part of a strategy's own state may be named `inner` too."""
    inner = {"inner": jnp.arange(3.0), "mu": jnp.ones(2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"sync": {"skipped": jnp.int32(4), "inner": inner, **scale}})
    now = {"sync": {"inner": inner, **scale} if scale else inner}
    assert_same_bits(Checkpointer(tmp_path).restore(jax.eval_shape(lambda: now)).state, now)


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


@pytest.mark.parametrize(
    ("leaf", "named"),
    [
        (3, "a int"),
        ("text", "a str"),
        (jax.random.key(0), r"key<fry>.*jax\.random\.key_data"),
        (np.array(["x"]), "dtype <U1"),
        (np.array([object()]), "object"),
        (np.array([1.0], ">f4"), "dtype >f4"),  # would be read back with swapped bytes
    ],
)
def test_what_is_no_array_of_numbers_is_refused_in_the_callers_line(tmp_path, leaf, named):
    with pytest.raises(CheckpointError, match=f"'a' .*{named}"):
        Checkpointer(tmp_path).save(1, {"a": leaf})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("in_background", "others"), [(False, [0, 0, 0]), (True, [0, 1, 2])])
def test_a_save_that_is_waited_for_holds_one_leaf_on_the_host_at_a_time(tmp_path, in_background, others):
    held, rows = [], np.arange(8, dtype=np.float32).reshape(4, 2)

    class Counted(HostShare):
        def values(self):
            copy = self.elements.flatten()
            held.append((weakref.ref(copy), sum(ref() is not None for ref, _ in held)))
            return copy

    with Checkpointer(tmp_path, async_save=in_background) as checkpointer:
        checkpointer.save(1, {name: Counted(rows.shape, rows.dtype, 0, 8, rows, True) for name in "abc"})
    assert [count for _, count in held] == others
    whole = dict.fromkeys("abc", rows)
    assert_same_bits(Checkpointer(tmp_path).restore(whole).state, whole)


@pytest.mark.parametrize(("memory", "is_view"), [("pinned_host", False), ("device", True)])
def test_what_a_gpu_keeps_in_the_host_s_memory_is_copied_too(memory, is_view):
    buffer = np.zeros(2)
    leaf = SimpleNamespace(
        sharding=SimpleNamespace(memory_kind=memory),
        devices=lambda: [SimpleNamespace(platform="gpu")],
        __array__=lambda dtype=None, copy=None: buffer,
    )
    assert np.shares_memory(tree.host_copy({"mu": leaf})["mu"], buffer) == is_view


def test_a_restore_in_place_gives_up_a_leaf_before_it_reads_another(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    Checkpointer(tmp_path, async_save=False).save(1, {"a": jnp.ones(3), "b": jnp.zeros(2)})
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


def test_a_step_of_0_2_0_and_one_of_a_later_minor_version_load(tmp_path):
    stored, wanted = Path(shutil.copytree(STORED, tmp_path / "stored")), fixture_state()
    path = step_folder(stored, 12) / MANIFEST
    text = path.read_bytes()
    assert decode(text).encode() == text

    def restored(**changes):
        path.write_bytes(_sealed(json.loads(text)["manifest"] | changes))
        return Checkpointer(stored).restore(wanted)

    for found in (restored(), restored(format_version=[2, 7], something_new={"a": 1})):
        assert found.step == 12
        # As text, since NaN is not equal to itself.
        assert json.dumps(found.meta, sort_keys=True) == json.dumps(META, sort_keys=True)
        assert_same_bits(found.state, wanted)
    for major in (1, 4):
        with pytest.raises(CheckpointError, match=rf"\[{major}, 0\]"):
            restored(format_version=[major, 0])


@pytest.mark.parametrize("dtype", sorted(_DTYPES))
def test_every_dtype_comes_back_in_its_bits(dtype, tmp_path):
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    bits = np.random.default_rng(0).integers(0, 2, (2, 3, kind.itemsize), np.uint8)  # 0 and 1 are bools too
    state = {"scalar": np.ones((), kind), "empty": np.zeros((0, 4), kind), "values": bits.view(kind)[..., 0]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        back = checkpointer.restore(state).state
    assert_same_bits(back, state)
    assert all(leaf.flags.writeable for leaf in back.values())
