"""The oracle: any number of replicas equals one device that sees the whole batch."""

from functools import cache

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

from cyxjax.core.evaluation import build_eval_step
from cyxjax.core.losses import CrossEntropyLoss, as_per_example
from cyxjax.core.mesh import AXIS, build_mesh
from cyxjax.core.model.adapter import adapt
from cyxjax.core.step import build_train_step, init_state
from cyxjax.core.strategy import Sync, reduce_then
from cyxjax.data.batches import BatchPlan, HostBatch, read_batch
from cyxjax.data.order import Order
from cyxjax.sync.mean import mean
from tests.support.models import FEATURES, Net, NnxNet, data, largest_gap, put, train

# float32 sums of up to 24 terms in another order, over 10 SGD steps: 24 * 6e-8 * |grad| <= 1e-5.
TOLERANCE = 1e-5


# 17 samples, 8 a step: the last step holds one, so most replicas have none. 24 divides; 3 never fills a step.
@pytest.mark.parametrize(("replicas", "num_samples"), [(1, 17), (2, 17), (4, 17), (8, 17), (4, 24), (4, 3)])
def test_replicas_equal_one_device_on_the_whole_batch(replicas, num_samples):
    alone, sums = whole_batch(num_samples)
    many, many_sums = train(Net(), data(num_samples), replicas=replicas, batch_size=8 // replicas)
    assert largest_gap(alone.params, many.params) < TOLERANCE
    np.testing.assert_allclose(sums, many_sums, rtol=1e-5)


@cache
def whole_batch(num_samples):
    return train(Net(), data(num_samples), replicas=1, batch_size=8)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_equals_the_big_batch_also_when_it_is_short(accumulation):
    # 19 samples, 8 a step: the last step holds 3, so its last micro-batches are all padding.
    dataset = data(19)
    whole, sums = train(Net(), dataset, replicas=1, batch_size=8)
    parts, part_sums = train(
        Net(), dataset, replicas=2, batch_size=4 // accumulation, accumulation=accumulation
    )
    assert largest_gap(whole.params, parts.params) < TOLERANCE
    np.testing.assert_allclose(sums, part_sums, rtol=1e-5)


@pytest.mark.parametrize("build", [lambda: Net(batch_norm=True), lambda: NnxNet(nnx.Rngs(0))])
def test_sync_batchnorm_is_exact_over_uneven_shards(build):
    # flax averages replica means without their counts: 17 samples over 8 replicas would differ by 1e-2.
    alone, _ = train(build(), data(17), replicas=1, batch_size=8, sync_batchnorm=True)
    many, _ = train(build(), data(17), replicas=8, batch_size=1, sync_batchnorm=True)
    assert largest_gap(alone.params, many.params) < TOLERANCE
    assert largest_gap(alone.model_state, many.model_state) < TOLERANCE


def test_running_statistics_are_averaged_by_samples_and_leave_padding_out():
    # Dense(1 -> 1) with weight 1 and bias 0 hands x to the norm. Replica 0 sees 0 and 2, replica 1 sees 6
    # and padding: means 1 and 6, weighted (2 * 1 + 1 * 6) / 3 = 8 / 3; momentum 0.9 leaves a tenth of it.
    class Norm(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            return linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)

    mesh, fns, sync = build_mesh(jax.devices()[:2]), adapt(Norm()), mean(optax.sgd(0.0))
    x = np.array([[0.0], [2.0], [6.0], [1e6]], np.float32)  # the last row is padding
    state = init_state(sync, mesh, *fns.init(jax.random.key(0), x[:1]), 0)
    step = build_train_step(fns, as_per_example(lambda o, t: (o - t).mean(-1)), sync, mesh)
    batch = HostBatch(x, np.zeros_like(x), np.array([1, 1, 1, 0], np.float32), 3, np.arange(4))
    state, _ = step(state, put(mesh, batch))
    running = jax.device_get(state.model_state["batch_stats"]["BatchNorm_0"]["mean"])
    np.testing.assert_allclose(running, [0.1 * 8 / 3], rtol=1e-6)


def test_dropout_draws_differ_between_replicas_and_steps_and_repeat():
    # The loss is the input's kept part: 16 ones a replica, each kept (as 2) or dropped.
    class Drop(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            return linen.Dropout(0.5, deterministic=not train)(x)

    mesh, fns, sync = build_mesh(jax.devices()[:4]), adapt(Drop()), mean(optax.sgd(0.1))

    def losses():
        x = np.ones((4, 16), np.float32)
        state = init_state(sync, mesh, *fns.init(jax.random.key(0), x[:1]), 0)
        # Each replica's loss weighs another power of 32, so that the sum shows all of them.
        step = build_train_step(fns, as_per_example(lambda o, t: o.sum(-1) * t), sync, mesh)
        batch = HostBatch(x, 64.0 ** np.arange(4, dtype=np.float32), np.ones(4, np.float32), 4, np.arange(4))
        found = []
        for _ in range(2):
            state, sums = step(state, put(mesh, batch))
            found.append(int(np.asarray(sums)[0, 0]))
        return found

    first, second = losses()
    kept = [first // 64**r % 64 for r in range(4)]
    assert len(set(kept)) > 1  # replicas do not share a mask
    assert first != second  # nor do steps
    assert losses() == [first, second]


def test_evaluation_is_the_same_at_every_world_size_and_counts_each_sample_once():
    dataset, results = data(13), []
    for replicas in (1, 2, 4, 8):
        mesh, fns, sync = build_mesh(jax.devices()[:replicas]), adapt(Net()), mean(optax.sgd(0.1))
        state = init_state(sync, mesh, *fns.init(jax.random.key(0), dataset.inputs[:1]), 0)
        evaluate = build_eval_step(fns, as_per_example(CrossEntropyLoss()), mesh)
        plan, order = BatchPlan(13, 4, replicas), Order(13, shuffle=False)
        sums = sum(
            np.asarray(evaluate(state, put(mesh, read_batch(dataset, order, plan, range(replicas), t))))
            for t in range(plan.num_steps)
        )
        assert sums[0, 1] == 13
        results.append(sums)
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-6)  # 13 terms in another order


def test_a_forgotten_reduction_is_refused_when_the_step_is_traced():
    tx = optax.sgd(0.1)

    def local_update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    one_leaf = optax.stateless(lambda g, _: {**jax.lax.pmean(g, AXIS), "Dense_1": g["Dense_1"]})
    for forgets in (Sync(tx.init, local_update), reduce_then(one_leaf, tx)):
        with pytest.raises(ValueError, match="out_specs|replicated"):
            lowered(Net(), 1, forgets)


def test_signals_of_one_replica_reach_all():
    mesh, fns, sync = build_mesh(jax.devices()[:4]), adapt(Net()), mean(optax.sgd(0.1))
    dataset = data(8)
    state = init_state(sync, mesh, *fns.init(jax.random.key(0), dataset.inputs[:1]), 0)
    step = build_train_step(fns, as_per_example(CrossEntropyLoss()), sync, mesh)
    batch = put(mesh, read_batch(dataset, Order(8), BatchPlan(8, 2, 4), range(4), 0))
    asked = np.zeros((4, 2), np.float32)
    asked[2, 0] = 1
    _, sums = step(state, batch._replace(signal=jax.device_put(asked, batch.signal.sharding)))
    np.testing.assert_array_equal(np.asarray(sums)[-1], [1, 0])


def lowered(model, accumulation, sync=None):
    mesh, fns, dataset = build_mesh(jax.devices()[:4]), adapt(model), data(16)
    sync = sync or mean(optax.sgd(0.1, momentum=0.9))
    params, model_state = fns.init(jax.random.key(0), np.zeros((1, FEATURES), np.float32))
    state = init_state(sync, mesh, params, model_state, 0)
    step = build_train_step(fns, as_per_example(CrossEntropyLoss()), sync, mesh, accumulation=accumulation)
    plan = BatchPlan(16, 4 // accumulation, 4, accumulation)
    return step.lower(state, put(mesh, read_batch(dataset, Order(16), plan, range(4), 0)))
