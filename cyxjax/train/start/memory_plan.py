"""Memory of one replica by strategy, at any number of replicas, and the cheapest strategy that fits."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cyxjax.core.memory import is_moved
from cyxjax.core.mesh import PER_REPLICA, REPLICATED
from cyxjax.core.replica import by_spec
from cyxjax.core.step import BATCH_SPEC, Batch, TrainState, state_spec
from cyxjax.core.strategy import Sync
from cyxjax.core.trees import PyTree
from cyxjax.files import scaled
from cyxjax.observe.compiled_plan import memory_bytes
from cyxjax.sync import registry
from cyxjax.train.plan import Plan
from cyxjax.train.program import build_program

STRATEGIES = tuple(name for name, one in registry.STRATEGIES.items() if one.in_memory_plan)
COUNTS = (1, 4, 16, 64, 256, 1024, 4096)


class Held(NamedTuple):
    """Bytes on one replica under a strategy, as a function of the number of replicas.

    The state is counted leaf by leaf. Temporaries are measured for two compiled programs; at other numbers
    they are assumed to be constant + whole / replicas.
    """

    comm: str
    leaves: tuple[tuple[int, int, bool], ...]  # (elements, bytes of each, whether replicas share them out)
    compiled: tuple[tuple[int, int], tuple[int, int]]  # (replicas, bytes of temporaries), few and more

    def state_bytes(self, replicas: int) -> int:
        return sum((-(-n // replicas) if cut else n) * each for n, each, cut in self.leaves)

    def temporary_bytes(self, replicas: int) -> int:
        (few, more_there), (many, there) = self.compiled
        whole = max((more_there - there) / (1 / few - 1 / many), 0.0)
        return max(round(there + whole * (1 / max(replicas, few) - 1 / many)), 0)

    def whole_bytes(self, replicas: int) -> int:
        return self.state_bytes(replicas) + self.temporary_bytes(replicas)


def held_by(plan: Plan, devices: Any, batch: Batch) -> Iterator[Held]:
    """Memory of a replica by strategy; compiled on half of `devices` (at least four) and on all of them.

    batch: the batch of all devices. Nothing is put on the devices.
    """
    for comm in STRATEGIES:
        step_plan = plan.settings.step._replace(comm=comm, comm_options={})
        found: list[tuple[int, int]] = []
        for count in (len(devices) // 2, len(devices)):
            mesh = Mesh(np.array(devices[:count]), ("data",))
            shares = step_plan.batch._replace(num_shares=count)
            program = build_program(plan.recipe, step_plan._replace(batch=shares), mesh, inputs=plan.inputs)
            state = program.state_shapes(plan.inputs)
            step: Any = program.train_step
            args = (_shapes(mesh, state, state_spec(program.sync)), _batch_of(mesh, batch, len(devices)))
            found.append((count, memory_bytes(step.lower(*args).compile())["temporaries"]))
        leaves = tuple(_leaves(state, program.sync, step_plan.offload != "none"))  # on all of them
        yield Held(comm, leaves, (found[0], found[1]))


def table(held: list[Held], device_bytes: float | None) -> list[str]:
    """Lines of at most 80 columns: bytes by number of replicas and strategy, and the cheapest that fits if
    `device_bytes` is given."""
    compiled = f"{held[0].compiled[0][0]} and {held[0].compiled[1][0]} devices"
    lines = [
        "held on one replica: state, which is counted, + temporaries, which are",
        f"extrapolated from programs compiled on {compiled}:",
        f"  {'replicas':>8}" + "".join(f" {one.comm:>17}" for one in held),
    ]
    for count in COUNTS:
        cells = [
            f"{scaled(one.state_bytes(count), 'B')}+{scaled(one.temporary_bytes(count), 'B')}" for one in held
        ]
        fits = next((one.comm for one in held if one.whole_bytes(count) <= (device_bytes or 0)), "none fits")
        best = f"  -> {fits}" if device_bytes else ""
        lines.append(f"  {count:>8}" + "".join(f" {cell:>17}" for cell in cells) + best)
    return lines


def _leaves(state: TrainState, sync: Sync, offload: bool) -> Iterator[tuple[int, int, bool]]:
    """The leaves that stay on the devices, as in `Held`."""
    inner, params = sync.stored_as(state.sync, state.params)
    stored = state._replace(sync=inner, params=params)
    rows = by_spec(lambda leaf, spec: spec == PER_REPLICA, state, state_spec(sync))
    there = jax.tree.map(lambda leaf: True, state)
    if offload:
        there = there._replace(sync=by_spec(lambda a, s: not is_moved(a, s), state.sync, sync.state_spec))
    trees = (jax.tree.leaves(tree) for tree in (state, stored, rows, there))
    for leaf, whole, is_rows, stays in zip(*trees, strict=True):
        if not stays:
            continue
        own = math.prod(leaf.shape[1:] if is_rows else leaf.shape)  # a replica's own row, or what all hold
        is_cut = is_rows and leaf.shape != whole.shape
        yield math.prod(whole.shape) if is_cut else own, leaf.dtype.itemsize, is_cut


def _shapes(mesh: Mesh, tree: PyTree, spec: PyTree) -> PyTree:
    def shape(leaf: Any, s: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, s))

    return by_spec(shape, tree, spec)


def _batch_of(mesh: Mesh, batch: Batch, replicas: int) -> Batch:
    """Shapes of `batch`, made for `replicas`, on fewer."""

    def cut(leaf: Any, s: Any) -> jax.ShapeDtypeStruct:
        shape = leaf.shape if s == REPLICATED else (leaf.shape[0] * mesh.size // replicas, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return _shapes(mesh, by_spec(cut, batch, BATCH_SPEC), BATCH_SPEC)
