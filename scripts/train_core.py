"""Data-parallel training without a trainer: everything from samples to a test score, on one page.

    python scripts/train_core.py                          one device
    JAX_NUM_CPU_DEVICES=2 python scripts/train_core.py    two replicas, half the batch each: the same losses

Only cyxjax.core (one step) and cyxjax.data (the order of samples) are used. The losses equal the trainer's
(tests/device/test_train_core.py). The trainer adds checkpoints and resuming, several processes, mixed
precision, other strategies for gradients, guards and monitored metrics.
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from cyxjax.core import phases
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.core.mesh import (  # put values on the mesh
    PER_REPLICA,
    REPLICATED,
    build_mesh,
    local_replicas,
    num_replicas,
    put_replicated,
    put_rows,
)
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.adapter import adapt
from cyxjax.core.replica import model_map, pmean, psum, sync_map
from cyxjax.data import BatchPlan, Order, iterate, load_dataset

SEED, GLOBAL_BATCH_SIZE, LEARNING_RATE = 42, 64, 0.002
CUT = (PER_REPLICA, PER_REPLICA, PER_REPLICA)  # inputs, targets, weights: each replica has its rows


class Net(linen.Module):
    """(B, 8, 8, 1) images -> (B, 10) logits. Any model works: an nnx module, a pair of functions."""

    @linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        hidden = linen.relu(linen.Dense(128)(images.reshape(images.shape[0], -1)))
        return linen.Dense(10)(hidden)


class State(NamedTuple):
    """What a step changes; every replica holds a full copy."""

    params: dict
    optimizer: optax.OptState


fns, loss = adapt(Net()), CrossEntropyLoss().per_example
metrics, optimizer = Metrics(), optax.adam(LEARNING_RATE)


def build_steps(mesh):
    """(train step, evaluation step): the four phases of one replica, mapped over all of them."""
    replicas = num_replicas(mesh)

    def forward_and_backward(state, images, labels, weight, total):
        """The LOCAL gradients and metric sums of one replica, as one row of the arrays of all replicas."""
        key = jax.random.key(0)  # nothing in this model is random
        output, pullback, _ = phases.forward(fns, state.params, {}, images, weight, key)
        # The mean over R replicas of (R / total) x (a replica's sum) is the sum over all samples / total:
        # exact, also where replicas hold different numbers of real samples.
        losses, pulled = phases.pull_back(loss, output, pullback, labels, weight, replicas / total)
        grads = phases.means_of(pulled, total)  # one tree, also where a loss has weights of its own
        return jax.tree.map(lambda a: a[None], (grads, metrics.sums(losses, output, labels, weight)))

    def reduce_and_update(state, rows):
        """The only communication in a train step; jax checks that all replicas have the same results."""
        grads, sums = jax.tree.map(lambda a: a[0], rows)
        updates, rule = optimizer.update(pmean(grads), state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), rule), psum(sums)

    def measure(state, images, labels, weight):
        output, _ = fns.apply(state.params, {}, images, jax.random.key(0), False)
        return metrics.sums(loss(output, labels), output, labels, weight)[None]

    local = model_map(forward_and_backward, mesh, (REPLICATED, *CUT, REPLICATED), PER_REPLICA)
    meet = sync_map(reduce_and_update, mesh, (REPLICATED, PER_REPLICA), REPLICATED)
    seen = model_map(measure, mesh, (REPLICATED, *CUT), PER_REPLICA)
    add = sync_map(lambda rows: psum(rows[0]), mesh, PER_REPLICA, REPLICATED)
    step = jax.jit(lambda state, *batch: meet(state, local(state, *batch)), donate_argnums=0)
    return step, jax.jit(lambda state, *batch: add(seen(state, *batch)))


def train(mesh, epochs):
    """(losses of the epochs, (loss, accuracy) on the test samples)."""
    digits, mine = load_dataset("digits"), local_replicas(mesh)
    batch_size = GLOBAL_BATCH_SIZE // num_replicas(mesh)
    step, measure = build_steps(mesh)
    params, _ = fns.init(jax.random.key(SEED), digits.train.take(np.arange(1))[0])
    state = put_replicated(mesh, State(params, optimizer.init(params)))

    history = []
    for epoch in range(epochs):
        plan, sums = BatchPlan(len(digits.train), batch_size, num_replicas(mesh)), []
        for host in iterate(digits.train, Order(len(digits.train), SEED, epoch), plan, mine):
            state, step_sums = step(state, *put_rows(mesh, host[:3]), jnp.float32(host.total))
            sums.append(step_sums)  # not read yet: the device computes while the host prepares the next batch
        history.append(metrics.means(np.sum(np.array(sums, np.float64), axis=0)))
        print(f"Epoch {epoch}, Loss: {history[-1]['loss']:.4f}, Accuracy: {history[-1]['accuracy']:.4f}")

    plan = BatchPlan(len(digits.test), batch_size, num_replicas(mesh))
    batches = iterate(digits.test, Order(len(digits.test), shuffle=False), plan, mine)
    test = metrics.means(sum(np.array(measure(state, *put_rows(mesh, h[:3])), np.float64) for h in batches))
    print(f"Test: loss {test['loss']:.4f}, accuracy {test['accuracy']:.4f}")
    return [means["loss"] for means in history], test


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    train(build_mesh(), parser.parse_args().epochs)
