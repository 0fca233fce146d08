"""The sum over all parts of a step in the order of one fixed tree: additions and copies only.

The sum of two floats has one value, however it is compiled; a product plus a number can have two, because a
compiler may round once or twice. So nothing is multiplied here, and only the tree determines the order of
additions:

    fold       one device: sums of the largest subtrees whose parts are all on this device
    exchange   all devices: each gets a slice of every such sum, adds up the rest of the tree, and sends its
               slice to all. It sends as much as an all-reduce if the parts of a device are one subtree
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from cyxjax.core.exact.calls import Made, tree_of_each_part
from cyxjax.core.exact.step import Layout, by_device
from cyxjax.core.exchange import concatenated, cut
from cyxjax.core.mesh import AXIS, PER_REPLICA, REPLICATED
from cyxjax.core.replica import model_map
from cyxjax.core.trees import PyTree, widened


class Node(NamedTuple):
    """The sum of the parts first ... first + width - 1 that exist; width is a power of two."""

    first: int
    width: int

    @property
    def halves(self) -> tuple["Node", "Node"]:
        half = self.width // 2
        return Node(self.first, half), Node(self.first + half, half)


def root(num_parts: int) -> Node:
    return Node(0, 1 << (num_parts - 1).bit_length())


def cover(parts: range, node: Node, num_parts: int) -> list[Node]:
    """The largest nodes below `node` that are sums of `parts` alone, in order."""
    first, stop = node.first, min(node.first + node.width, num_parts)
    if stop <= parts.start or parts.stop <= first or first >= stop:
        return []
    if parts.start <= first and stop <= parts.stop:
        return [node]
    return [found for half in node.halves for found in cover(parts, half, num_parts)]


def climb(node: Node, known: Mapping[Node, Any], num_parts: int, add: Callable) -> Any:
    """The value of `node` from the `known` values below it."""
    if node in known:
        return known[node]
    left, right = node.halves
    value = climb(left, known, num_parts, add)
    return value if right.first >= num_parts else add(value, climb(right, known, num_parts, add))


class TreeSum:
    """Adds trees of arrays, one for each part, over all devices; for trees of one structure."""

    def __init__(self, layout: Layout):
        self._layout, self._alone = layout, layout.mesh.size == 1
        self._nodes = [
            cover(layout.parts_of(replica), root(layout.num_parts), layout.num_parts)
            for replica in range(layout.mesh.size)
        ]
        self._fold = jax.jit(self._folded, static_argnums=0)
        self._rows = NamedSharding(layout.mesh, PER_REPLICA)
        self._exchange: Callable | None = None

    def __call__(self, made: Sequence[Made], signal: np.ndarray) -> list[tuple[PyTree, Any]]:
        """(the sum, the summed signal) on each device of this process. made: by device, as `Layout.parts`."""
        folded = [self._fold(parts, mine) for parts, mine in zip(self._layout.parts, made, strict=True)]
        if self._alone:
            return [(folded[0], signal)]
        if self._exchange is None:
            self._exchange = self._build_exchange(self._layout.parts[0], made[0])
        signals = [jax.device_put(signal[None], device) for device in self._layout.mesh.local_devices]
        out = self._exchange(*jax.tree.map(self._global, *zip(folded, signals, strict=True)))
        return by_device(out, self._layout.mesh.local_devices)

    def _folded(self, parts: range, made: Made) -> PyTree:
        """On one device: the sum. Otherwise rows (1, nodes, numbers) per dtype, as many on each device."""
        known = {
            Node(number, 1): jax.tree.map(widened, tree)
            for number, tree in zip(parts, tree_of_each_part(made, parts), strict=True)
        }
        up = lambda node: climb(node, known, self._layout.num_parts, _add)  # noqa: E731
        if self._alone:
            return up(root(self._layout.num_parts))
        count = self._layout.num_parts
        done = [_pack(up(node)) for node in cover(parts, root(count), count)]
        # All devices send equally many rows: the rows added here are never read.
        done += [jax.tree.map(jnp.zeros_like, done[0])] * (max(map(len, self._nodes)) - len(done))
        return jax.tree.map(lambda *rows: jnp.stack(rows)[None], *done)

    def _build_exchange(self, parts: range, made: Made) -> Callable:
        shapes = jax.eval_shape(lambda made: jax.tree.map(widened, tree_of_each_part(made, parts)[0]), made)

        def exchanged(rows: PyTree, signal: jax.Array) -> tuple[PyTree, jax.Array]:
            packed = jax.tree.map(lambda mine: self._summed(mine[0]), rows)
            return _unpack(packed, shapes), lax.psum(signal[0], AXIS)  # small integers: any order will do

        return jax.jit(model_map(exchanged, self._layout.mesh, (PER_REPLICA, PER_REPLICA), REPLICATED))

    def _summed(self, mine: jax.Array) -> jax.Array:
        """(numbers,) from this device's (nodes, numbers): a reduce-scatter in the order of the tree."""
        replicas, (count, numbers) = self._layout.mesh.size, mine.shape
        share = -(-numbers // replicas)
        mine = jnp.pad(mine, ((0, 0), (0, share * replicas - numbers))).reshape(count, replicas, share)
        every = lax.all_to_all(mine, AXIS, 1, 0, tiled=True).reshape(replicas, count, share)
        known = {node: every[r, i] for r, nodes in enumerate(self._nodes) for i, node in enumerate(nodes)}
        total = climb(root(self._layout.num_parts), known, self._layout.num_parts, _join)
        return lax.all_gather(total, AXIS, tiled=True)[:numbers]

    def _global(self, *shards: jax.Array) -> jax.Array:
        shape = (self._layout.mesh.size, *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._rows, list(shards))


def _add(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(_join, a, b)


def _join(a: jax.Array, b: jax.Array) -> jax.Array:
    """Counters take the largest value, as in `phases.mean_model_state`."""
    return a + b if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.maximum(a, b)


def _pack(tree: PyTree) -> dict[str, jax.Array]:
    """All leaves of each dtype as one flat array, with the copies of `concatenated` at its end."""
    groups: dict[str, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        groups.setdefault(str(leaf.dtype), []).append(leaf.reshape(-1))
    return {name: concatenated(leaves) for name, leaves in groups.items()}


def _unpack(packed: dict[str, jax.Array], shapes: PyTree) -> PyTree:
    """Inverse of `_pack`."""
    leaves, structure = jax.tree.flatten(shapes)
    sizes = {name: [leaf.size for leaf in leaves if str(leaf.dtype) == name] for name in packed}
    pieces = {name: iter(cut(flat, sizes[name])) for name, flat in packed.items()}
    return jax.tree.unflatten(
        structure, [next(pieces[str(leaf.dtype)]).reshape(leaf.shape) for leaf in leaves]
    )
