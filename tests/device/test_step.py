"""The reference: any number of replicas equals one device with the whole batch."""

from functools import cache

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

from cyxjax.core.evaluation import EvalState, build_eval_step
from cyxjax.core.losses import CrossEntropyLoss, as_per_example
from cyxjax.core.mesh import AXIS
from cyxjax.core.strategy import Sync, reduce_then
from cyxjax.data.batches import HostBatch
from cyxjax.data.sources import ArrayDataset
from tests.support.models import Net, NnxNet, batches_of, data, largest_gap, put, stepping, train

# float32 sums of up to 24 terms in a different order, over 20 SGD steps: 24 * 6e-8 * |grad| <= 1e-5.
TOLERANCE = 1e-5


@pytest.mark.parametrize(("replicas", "accumulation"), [(2, 1), (8, 1), (2, 4)])
def test_replicas_and_micro_batches_equal_one_device_on_the_whole_batch(replicas, accumulation):
    alone, sums = in_steps_of_8(1, 1)
    many, many_sums = in_steps_of_8(replicas, accumulation)
    assert largest_gap(alone.params, many.params) < TOLERANCE
    np.testing.assert_allclose(sums, many_sums, rtol=1e-5)


@cache
def in_steps_of_8(replicas, accumulation):
    """(host state, metric sums of each step) after two epochs over data of each size in turn.

    Of 17 samples the last step has one, so most replicas have none. 24 divides; 3 never fills a step. With 19
    the last step has 3, so its last micro-batches are all padding.
    """
    step, state, _, _, mesh = stepping(Net(), data(8), replicas=replicas, accumulation=accumulation)
    shape, sums = {"accumulation": accumulation, "epochs": 2}, []
    for num_samples in (17, 24, 3, 19):
        for batch in batches_of(data(num_samples), mesh, 8 // replicas // accumulation, **shape):
            state, measured = step(state, batch)
            sums.append(np.asarray(measured))
    return jax.device_get(state), sums


@pytest.mark.parametrize("build", [lambda: Net(batch_norm=True), lambda: NnxNet(nnx.Rngs(0))])
def test_sync_batchnorm_is_exact_over_uneven_shards(build):
    # flax averages replica means without their counts: 17 samples over 8 replicas would differ by 1e-2.
    alone, _ = train(build(), data(17), replicas=1, batch_size=8, sync_batchnorm=True)
    many, _ = train(build(), data(17), replicas=8, batch_size=1, sync_batchnorm=True)
    assert largest_gap(alone.params, many.params) < TOLERANCE
    assert largest_gap(alone.model_state, many.model_state) < TOLERANCE


@pytest.mark.parametrize(
    ("replicas", "accumulation", "weight", "mean"),
    [(2, 1, [1, 1, 1, 0], 8 / 3), (1, 2, [1, 1, 0, 0], 1.0)],
)
def test_running_statistics_are_averaged_by_samples_and_leave_padding_out(
    replicas, accumulation, weight, mean
):
    # Replica 0 sees 0 and 2, replica 1 sees 6 and padding: means 1 and 6, weighted (2 * 1 + 1 * 6) / 3 =
    # 8 / 3; momentum 0.9 leaves a tenth of it. A micro-batch of padding alone changes nothing.
    class Norm(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            return linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)

    x = np.array([[0.0], [2.0], [6.0], [1e6]], np.float32)  # the last row is padding
    samples = ArrayDataset(x, np.zeros_like(x))
    loss = lambda o, t: (o - t).mean(-1)  # noqa: E731
    one = stepping(Norm(), samples, replicas=replicas, accumulation=accumulation, loss=loss)
    batch = HostBatch(x, samples.targets, np.float32(weight), sum(weight), np.arange(4))
    state, _ = one.step(one.state, put(one.mesh, batch))
    running = jax.device_get(state.model_state["batch_stats"]["BatchNorm_0"]["mean"])
    np.testing.assert_allclose(running, [0.1 * mean], rtol=1e-6)


def test_dropout_draws_differ_between_replicas_and_steps_and_repeat():
    # The loss sums the input after dropout: 16 ones per replica, each kept (as 2) or dropped.
    class Drop(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            return linen.Dropout(0.5, deterministic=not train)(x)

    # Each replica's loss is weighted by a different power of 64, so that the sum shows all of them.
    samples = ArrayDataset(np.ones((4, 16), np.float32), 64.0 ** np.arange(4, dtype=np.float32))
    host = HostBatch(samples.inputs, samples.targets, np.ones(4, np.float32), 4, np.arange(4))

    def losses():
        step, state, _, _, mesh = stepping(Drop(), samples, replicas=4, loss=lambda o, t: o.sum(-1) * t)
        found = []
        for _ in range(2):
            state, sums = step(state, put(mesh, host))
            found.append(int(np.asarray(sums)[0, 0]))
        return found

    first, second = losses()
    kept = [first // 64**r % 64 for r in range(4)]
    assert len(set(kept)) > 1  # replicas do not share a mask
    assert first != second  # nor do steps
    assert losses() == [first, second]


def test_evaluation_is_the_same_at_every_world_size_and_counts_each_sample_once():
    dataset, results = data(13), []
    for replicas in (1, 2, 8):
        _, state, fns, _, mesh = stepping(Net(), dataset, replicas=replicas)
        evaluate = build_eval_step(fns, as_per_example(CrossEntropyLoss()), mesh)
        sums = sum(np.asarray(evaluate(EvalState.of(state), batch)) for batch in batches_of(dataset, mesh, 4))
        assert sums[0, 1] == 13
        results.append(sums)
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-6)  # 13 terms in a different order


def test_a_forgotten_reduction_is_refused_when_the_step_is_traced():
    tx = optax.sgd(0.1)

    def local_update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    one_leaf = optax.stateless(lambda g, _: {**jax.lax.pmean(g, AXIS), "Dense_1": g["Dense_1"]})
    for forgets in (Sync(tx.init, local_update), reduce_then(one_leaf, tx)):
        with pytest.raises(ValueError, match="out_specs|replicated"):
            lowered(Net(), forgets)


def test_signals_of_one_replica_reach_all():
    one, signals = stepping(Net(), data(8), replicas=4), np.zeros((4, 2), np.float32)
    (batch,) = batches_of(data(8), one.mesh, 2)
    signals[2, 0] = 1
    _, sums = one.step(one.state, batch._replace(signal=jax.device_put(signals, batch.signal.sharding)))
    np.testing.assert_array_equal(np.asarray(sums)[-1], [1, 0])


def lowered(model, sync):
    one = stepping(model, data(16), replicas=4, comm=sync)
    return one.step.lower(one.state, next(batches_of(data(16), one.mesh, 4)))
