"""One process of `comm.py --cut`: a backward pass split by depth, to start an all-reduce before its end.

An MLP of nine layers in plain JAX. One program computes the forward pass and the backward pass of the layers
after the cut; a second averages their gradients while a third computes the rest of the backward pass. Rank 0
prints a JSON line [row, samples/s] for each kind of step; "no exchange" is a step without an all-reduce.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cyxjax.core.mesh import put_replicated, put_rows
from cyxjax.distributed import process_group

WIDTHS = (784, *[1024] * 8, 10)
RATE = 0.01
Layers = list[tuple[jax.Array, jax.Array]]


def hidden(layers: Layers, x: jax.Array) -> list[jax.Array]:
    """The input, and the output of each layer, after ReLU."""
    found = [x]
    for kernel, bias in layers:
        found.append(jax.nn.relu(found[-1] @ kernel + bias))
    return found


def loss(layers: Layers, x: jax.Array, y: jax.Array) -> jax.Array:
    kernel, bias = layers[-1]
    logits = hidden(layers[:-1], x)[-1] @ kernel + bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def updated(layers: Layers, grads: Layers) -> Layers:
    return jax.tree.map(lambda p, g: p - RATE * g, layers, grads)


def build_steps(mesh: Mesh) -> dict[str, Callable[..., Layers]]:
    """Steps (layers, x, y) -> layers by row: in one program, without an all-reduce, and cut after a layer."""
    rows, all_equal = P("data"), P()

    def program(f: Callable, given: Any, made: Any) -> Callable:
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=made, check_vma=False))

    def mean(grads: Layers) -> Layers:
        return lax.pmean(grads, "data")

    def whole(exchange: Callable[[Layers], Layers]) -> Callable[..., Layers]:
        return program(
            lambda layers, x, y: updated(layers, exchange(jax.grad(loss)(layers, x, y))),
            (all_equal, rows, rows),
            all_equal,
        )

    own = lambda grads: jax.tree.map(lambda g: g[None], grads)  # noqa: E731  # one row per replica
    reduced = program(lambda grads: mean(jax.tree.map(lambda g: g[0], grads)), (rows,), all_equal)
    write = program(updated, (all_equal, all_equal), all_equal)

    def begin(first: Layers, last: Layers, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
        values = hidden(first, x)
        grads, cotangent = jax.grad(loss, argnums=(0, 1))(last, values[-1], y)
        return own(grads), cotangent, values

    def end(first: Layers, cotangent: jax.Array, values: list[jax.Array]) -> Layers:
        grads = []
        for (kernel, _), before, after in reversed(list(zip(first, values, values[1:], strict=False))):
            cotangent = cotangent * (after > 0)
            grads.append((before.T @ cotangent, cotangent.sum(0)))
            cotangent = cotangent @ kernel.T
        return own(grads[::-1])

    begins = program(begin, (all_equal, all_equal, rows, rows), rows)
    ends = program(end, (all_equal, rows, rows), rows)

    def cut(depth: int, layers: Layers, x: jax.Array, y: jax.Array) -> Layers:
        first, last = layers[:depth], layers[depth:]
        grads, cotangent, values = begins(first, last, x, y)
        mean_last = reduced(grads)
        mean_first = reduced(ends(first, cotangent, values))
        return write(first, mean_first) + write(last, mean_last)

    return {
        "one program": whole(mean),
        "no exchange": whole(lambda grads: grads),
        **{f"cut after layer {n}": lambda *args, n=n: cut(n, *args) for n in (2, 4, 6)},
    }


def main() -> None:
    task, mesh = json.loads(sys.argv[1]), process_group.init().mesh
    rng, batch = np.random.default_rng(0), task["batch"]
    layers = [
        (rng.normal(0, n**-0.5, (n, m)).astype(np.float32), np.zeros(m, np.float32))
        for n, m in zip(WIDTHS, WIDTHS[1:], strict=False)
    ]
    layers = put_replicated(mesh, layers)
    x, y = put_rows(mesh, (rng.normal(size=(batch, WIDTHS[0])).astype(np.float32), np.arange(batch) % 10))
    for row, step in build_steps(mesh).items():

        def timed(count: int, step: Callable[..., Layers] = step) -> float:
            nonlocal layers
            started = time.perf_counter()
            for i in range(count):
                layers = step(layers, x, y)
                if i % 4 == 3:
                    jax.block_until_ready(layers)  # few steps in flight, as in training
            jax.block_until_ready(layers)
            return time.perf_counter() - started

        timed(2)  # compiles and opens connections
        count = np.int32(max(4, task["seconds"] / (timed(2) / 2)))
        steps = int(multihost_utils.broadcast_one_to_all(count))
        if process_group.is_master():
            print(json.dumps([row, steps * batch * mesh.size / timed(steps)]), flush=True)
        else:
            timed(steps)
    process_group.finalize()


if __name__ == "__main__":
    main()
