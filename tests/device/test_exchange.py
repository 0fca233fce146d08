"""Joined sums: the numbers of separate sums, in as few exchanges as possible."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cyxjax.core import exchange, replica
from cyxjax.core.collectives import reduce_leaf
from cyxjax.core.mesh import AXIS, PER_REPLICA, REPLICATED, build_mesh
from cyxjax.core.precision import with_loss_scale
from cyxjax.core.replica import sync_map
from cyxjax.observe.compiled_plan import collectives
from cyxjax.sync.mean import mean
from cyxjax.sync.registry import build_sync
from tests.device.test_step import lowered
from tests.support.models import Net
from tests.support.strategies import EXACT, USUAL, Alone, adaptive, built, random_grads


@pytest.fixture
def joining(monkeypatch):
    """Makes eight devices of this process sum like those of several processes."""
    monkeypatch.setattr(replica, "sends_one_by_one", lambda mesh: mesh.size > 1)


def sums(replicas, f, *rows):
    """The results of `f` on each replica's row, with and without joining, and the collectives with it."""
    mesh = build_mesh(jax.devices()[:replicas])
    view = lambda *rows: f(*(row[0] for row in rows))  # noqa: E731
    apart, together = (
        jax.jit(sync_map(g, mesh, PER_REPLICA, REPLICATED)) for g in (view, exchange.with_joint_sums(view))
    )
    return together(*rows), apart(*rows), collectives(together.lower(*rows).compile().as_text())


# Four replicas, whose sum depends on the order; a sum of two does not. bf16 behaves like fp16.
@pytest.mark.parametrize("name", sorted(set(USUAL) - {"bf16"}))
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_strategies_take_the_same_steps(name, replicas, monkeypatch):
    grads = [random_grads(replicas, t) for t in range(4)]
    sync = built(name, adaptive(), USUAL[name])
    apart = Alone(sync, replicas).step(*grads).copies()[0]
    monkeypatch.setattr(replica, "sends_one_by_one", lambda mesh: True)
    together = Alone(sync, replicas).step(*grads).copies()[0]
    # Sums of four in a different order, and different fusion: roundings of 6e-8 over 4 steps.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), together, apart)


@pytest.mark.parametrize("name", ["mean", "bucketed", "zero1", "fsdp"])
def test_16_bit_gradients_of_processes_are_summed_in_float32(name, monkeypatch):
    """In bfloat16 256 + 1 is 256: zero1 left out the gradients of seven of these eight replicas."""
    for module in (exchange, replica):
        monkeypatch.setattr(module, "sends_one_by_one", lambda mesh: True)
    start = jnp.zeros(16, jnp.bfloat16)
    grads = jnp.ones((8, 16), jnp.bfloat16).at[0].set(256)
    alone = Alone(build_sync(name, optax.sgd(1.0), params=lambda: start), 8, start)
    assert (alone.step(grads).copies()[0] == -33).all()  # 263 / 8, rounded


@pytest.mark.parametrize("name", ["mean", "bucketed", "zero1", "fsdp", "local_sgd", "power_sgd"])
def test_the_mean_of_float16_is_finite_where_a_sum_would_not_be(name):
    start = jnp.zeros((4, 4), jnp.float16)
    options = (USUAL if name == "power_sgd" else EXACT)[name]  # whose first step is a plain mean
    sync = build_sync(name, optax.sgd(1.0), options, params=lambda: start)
    alone = Alone(sync, 2, start).step(jnp.full((2, 4, 4), 40_000, jnp.float16))
    assert (alone.copies()[0] == -40_000).all()


def test_all_reduce_adds_float16_in_float32():
    mesh, rows = build_mesh(jax.devices()[:3]), jnp.array([[2048], [1], [1]], jnp.float16)
    added = sync_map(lambda row: reduce_leaf(row[0], "sum"), mesh, PER_REPLICA, REPLICATED)
    assert jax.jit(added)(rows).tolist() == [2050.0]  # 2048 + 1 is 2048 in float16


def test_gradients_metrics_signals_statistics_and_flags_are_one_array(joining):
    sync = with_loss_scale(mean(optax.sgd(0.1, momentum=0.9)))
    hlo = lowered(Net(batch_norm=True), sync).compile().as_text()
    found = re.findall(r"= (.+) (all-\w+|reduce-scatter)\(", hlo)
    assert [(kind, shapes.count("[")) for shapes, kind in found] == [("all-gather", 1)]


def test_rounds_follow_what_needs_what():
    # b needs the sum of a: two rounds; c is sent with a.
    a, b, c = np.arange(2.0, dtype=np.float32), np.float32([[1, 2], [3, 4]]), np.float32([[5], [6]])

    def f(a, b, c):
        first = jax.lax.psum(a, AXIS)
        return jax.lax.psum(b * first, AXIS), jax.lax.psum(c, AXIS), first

    together, apart, found = sums(2, f, a, b, c)
    assert [(s.kind, s.payload_bytes, s.num_arrays) for s in found] == [("all-gather", 16, 1)] * 2
    jax.tree.map(np.testing.assert_array_equal, together, apart)
    np.testing.assert_array_equal(together[0], [4, 6])  # a sums to 1


@pytest.mark.parametrize("replicas", [2, 4])
def test_every_dtype_arrives_as_alone(replicas):
    rng = np.random.default_rng(0)
    names = ("float32", "bfloat16", "float16", "int32", "uint8", "complex64")
    # Whole numbers, exact in all dtypes: 16-bit sums of four would depend on where they are rounded.
    rows = [rng.integers(0, 9, (replicas, 3, 2)).astype(jnp.dtype(name)) for name in names]
    rows += [np.zeros((replicas, 0), np.float32), np.float32([[1.0, np.nan, np.inf, -0.0]] * replicas)]
    together, apart, _ = sums(replicas, lambda *r: [jax.lax.psum(a, AXIS) for a in r], *rows)
    for mine, alone in zip(together, apart, strict=True):
        assert (mine.dtype, mine.shape) == (alone.dtype, alone.shape)
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(alone))


def test_large_arrays_go_alone(monkeypatch):
    monkeypatch.setattr(exchange, "_ALONE_BYTES", 16)
    monkeypatch.setattr(exchange, "_GATHERED_BYTES", 0)
    rows = [np.ones((2, n), np.float32) for n in (4, 5, 2)]  # 16 bytes may be joined, 20 may not
    _, _, found = sums(2, lambda *r: [jax.lax.psum(a, AXIS) for a in r], *rows)
    # XLA merges both into one instruction: the joined one and the large one.
    assert [(s.payload_bytes, s.num_arrays) for s in found] == [(4 * (4 + 5 + 2), 2)]


def test_an_average_now_and_then_is_one_array_too(joining):
    alone = Alone(built("local_sgd", optax.sgd(0.1), {"every": 2}), 2)
    hlo = alone.update.lower(alone.state, random_grads(2, 0)).compile().as_text()
    assert [(s.in_branch, s.num_arrays) for s in collectives(hlo)] == [(True, 1)]


@pytest.mark.parametrize(
    ("platform", "processes", "joins"),
    [("cpu", [0, 0], False), ("cpu", [0, 1], True), ("gpu", [0, 1], False), ("tpu", [0, 1], False)],
)
def test_only_cpus_of_several_processes_join(platform, processes, joins):
    devices = np.array([SimpleNamespace(platform=platform, process_index=p) for p in processes])
    assert exchange.sends_one_by_one(SimpleNamespace(devices=devices)) is joins


@pytest.mark.parametrize(
    ("strategy", "fused_bytes", "is_fused"),
    [
        *((strategy, 0, False) for strategy in ("mean", "bucketed", "bf16", "power_sgd", "zero1")),
        ("mean", 1 << 62, True),  # the control: without the copies there is one to find
    ],
)
def test_xla_fuses_no_concatenation_of_parameters(strategy, fused_bytes, is_fused, joining, monkeypatch):
    monkeypatch.setattr(exchange, "_FUSED_BYTES", fused_bytes)
    # A fused concatenation is computed element by element if XLA's pool has several threads.
    options = USUAL | {"bucketed": {}}  # one bucket of all: there is nothing to fuse in the usual ones
    alone = Alone(built(strategy, optax.sgd(0.1), options[strategy]), 2)
    hlo = alone.update.lower(alone.state, random_grads(2, 0)).compile().as_text()
    fused = [body for body in hlo.split("\n\n") if body.startswith("%fused") and " concatenate(" in body]
    found = [body for body in fused if body.count("parameter(") > 2 and "f32" in body.splitlines()[0]]
    assert bool(found) == is_fused


@pytest.mark.parametrize("fused_bytes", [0, 1 << 16])
def test_a_raveled_tree_comes_back(fused_bytes, monkeypatch):
    monkeypatch.setattr(exchange, "_FUSED_BYTES", fused_bytes)
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2, jnp.bfloat16), "c": jnp.zeros((0, 2))}
    with jax.numpy_dtype_promotion("standard"):
        flat, unravel = exchange.raveled(tree)
    back = unravel(flat * 2)
    jax.tree.map(np.testing.assert_array_equal, back, jax.tree.map(lambda a: a * 2, tree))
    assert [a.dtype for a in jax.tree.leaves(back)] == [a.dtype for a in jax.tree.leaves(tree)]
