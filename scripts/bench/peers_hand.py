"""One process of peers.py for a JAX loop written by hand, as an expert writes it for this one model.

Shuffled numpy batches, one compiled step, donated state, metrics read every ten steps; one all-reduce of a
flat buffer averages gradients, batch statistics and metrics over the processes.
"""

import os
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from peers_flax import model
from peers_work import WORKS, data, say, steps_of, task


def build_step(net, tx, replicas: int, mesh: Mesh, dtype: str):
    def computed_in(leaf):
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def loss_fn(params, stats, x, y):
        params, x = jax.tree.map(computed_in, (params, x))
        logits, stats = net.apply({"params": params, **stats}, x, train=True, mutable=list(stats))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y).mean()
        return loss, (stats, (jnp.argmax(logits, -1) == y).mean())

    def step(params, stats, opt, x, y):
        (loss, (stats, accuracy)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, x, y)
        if replicas > 1:
            flat, unravel = ravel_pytree((grads, stats, loss, accuracy))
            grads, stats, loss, accuracy = unravel(lax.psum(flat, "data") / replicas)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), stats, opt, loss, accuracy

    if replicas > 1:
        specs = dict(in_specs=(P(), P(), P(), P("data"), P("data")), out_specs=P())
        step = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    return jax.jit(step, donate_argnums=(0, 1, 2))


def main() -> None:
    args = task()
    if args.replicas > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        where = f"127.0.0.1:{os.environ['PEERS_PORT']}"
        jax.distributed.initialize(where, args.replicas, int(os.environ["RANK"]))
    mesh, batch = Mesh(np.array(jax.devices()), ("data",)), WORKS[args.work].batch
    x, y = data(args.work)
    net, tx = model(args.work), optax.adam(1e-3)
    stats = net.init(jax.random.key(0), x[:1])
    params = stats.pop("params")
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    if args.replicas > 1:
        place = partial(jax.make_array_from_process_local_data, cut)
        everywhere = lambda a: jax.make_array_from_process_local_data(whole, np.asarray(a))  # noqa: E731
        params, stats = jax.tree.map(everywhere, (params, stats))
    else:
        place = lambda a: a  # noqa: E731
    state, step = (
        (params, stats, tx.init(params)),
        build_step(net, tx, args.replicas, mesh, WORKS[args.work].dtype),
    )

    def run(steps: int) -> float:
        nonlocal state
        start, per_epoch, waiting = time.perf_counter(), len(x) // (batch * args.replicas), []
        for i in range(steps):
            if i % per_epoch == 0:
                order = np.random.default_rng(i).permutation(len(x))
            at = (i % per_epoch * args.replicas + jax.process_index()) * batch
            rows = order[at : at + batch]
            *state, loss, accuracy = step(*state, place(x[rows]), place(y[rows]))
            waiting.append((loss, accuracy))
            if i % 10 == 9:  # as a loop prints it: the mean since the last line
                np.mean([float(a) for a, _ in waiting]), np.mean([float(b) for _, b in waiting])
                waiting.clear()
        jax.block_until_ready(state)
        return time.perf_counter() - start

    run(3)  # compiles
    seconds = run(steps_of(args))
    if jax.process_index() == 0:
        say(args, seconds)


if __name__ == "__main__":
    main()
