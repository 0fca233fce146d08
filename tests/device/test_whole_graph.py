"""A whole graph as one sample: classifies nodes, with a mask for the training nodes (as in Cora)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from tests.support.by_hand import assert_as_by_hand
from tests.support.models import Dense
from tests.support.trainers import ce

NODES, EDGES, FEATURES, CLASSES, STEPS = 30, 120, 5, 3, 12


def graph():
    """Nodes whose neighbours also show their class; the first axis of each array is one sample."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, CLASSES, NODES).astype(np.int32)
    senders = rng.integers(0, NODES, EDGES).astype(np.int32)
    same = np.array([rng.choice(np.flatnonzero(label == label[s])) for s in senders], np.int32)
    nodes = rng.normal(size=(NODES, FEATURES)).astype(np.float32)
    nodes[np.arange(NODES), label] += 1
    mask = (np.arange(NODES) < 20).astype(np.float32)
    inputs = {"nodes": nodes, "senders": senders, "receivers": same}
    return jax.tree.map(lambda a: a[None], (inputs, {"label": label, "mask": mask}))


class GraphNet(linen.Module):
    """Two rounds of means over neighbours, for graphs (B, ...): a batch of one is the whole graph."""

    @linen.compact
    def __call__(self, graph):
        def mean_of_neighbours(nodes, senders, receivers):
            summed = jax.ops.segment_sum(nodes[senders], receivers, NODES)
            count = jax.ops.segment_sum(jnp.ones(len(senders)), receivers, NODES)
            return summed / jnp.maximum(count, 1)[:, None]

        x = graph["nodes"]
        for width in (8, CLASSES):
            gathered = jax.vmap(mean_of_neighbours)(x, graph["senders"], graph["receivers"])
            x = Dense(width)(jnp.concatenate([x, gathered], -1))
            x = jax.nn.relu(x) if width != CLASSES else x
        return x


def of_nodes(output, target):
    """(a value per node, its weight): (B, NODES) each."""
    return ce(output, target["label"]), target["mask"]


def test_a_graph_trains_as_by_hand():
    def mean(output, target):
        values, mask = of_nodes(output, target)
        return (values * mask).sum() / mask.sum()

    # one sample, two devices
    assert_as_by_hand(GraphNet(), of_nodes, *graph(), written=mean, size=2, epochs=STEPS)
