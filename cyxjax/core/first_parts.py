"""The first state where replicas keep parts: drawn on the devices, a leaf whole until its part is taken."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cyxjax.core.memory.remat import memory_options
from cyxjax.core.mesh import REPLICATED
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.replica import from_replica, model_map
from cyxjax.core.step import TrainState, state_spec
from cyxjax.core.strategy import Sync

PyTree = Any


def holds_values(fns: ModelFns, inputs: PyTree) -> bool:
    """Whether the model was given its parameters (nnx, SequentialModel): they are whole already."""
    made = jax.make_jaxpr(fns.init)(jax.random.key(0), inputs)
    return any(np.ndim(value) for value in made.consts)


def build_draw(fns: ModelFns, sync: Sync, mesh: Mesh) -> Callable[[int, PyTree], TrainState]:
    """A function (seed, one sample's inputs) -> the state before the first step, on the mesh.

    The numbers are those of `fns.init` with the seed's key, up to the last bit (the compiler fuses). Each
    replica draws every leaf and takes its part of it: the drawing costs no communication.
    """
    run = compile_draw(fns, sync, mesh)
    key_of = lambda seed: np.asarray(jax.random.key_data(jax.random.key(seed)))  # noqa: E731
    return lambda seed, inputs: run(key_of(seed), inputs)


def compile_draw(fns: ModelFns, sync: Sync, mesh: Mesh) -> Any:
    """The jitted program (key data, inputs) -> state."""
    spec = state_spec(sync)

    def local(key: jax.Array, inputs: PyTree) -> TrainState:
        params, model_state = fns.init(jax.random.wrap_key_data(key), inputs)
        kept = sync.hold(params)
        return from_replica(
            TrainState(jnp.zeros((), jnp.int32), kept, model_state, sync.init(params), key), spec
        )

    mapped = model_map(local, mesh, (REPLICATED, REPLICATED), spec)
    # A leaf drawn in 16 bits and kept in 32 would else keep digits that the same leaf drawn alone has not.
    draw = lambda key, inputs: sync.stow(mapped(key, inputs))  # noqa: E731
    return jax.jit(draw, compiler_options=memory_options(mesh) | {"xla_allow_excess_precision": False})
