"""A step in parts: an alternative to the fused step, whose bits do not depend on the number of devices.

The global batch has V parts, fixed by the configuration. Each is computed by a program for one device, with
the part's number as data (`core/exact/calls.py`): every device runs the same code on the same numbers. The
number of a device's parts must not occur in a program, nor the number of devices: for a different number XLA
compiles different code, with or without barriers (measured with a CNN and a GPT on 1 and 2 devices; with an
MLP it does not show).

    part     one device, one part: forward, loss, backward     (`sum_gradients`)
    add      the sums over all parts, in one fixed order        (`core/exact/tree_sum.py`)
    write    one device, as if it were the only one             (`next_state`, on a mesh of one device)
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from cyxjax.core import phases
from cyxjax.core.draws import micro_batch_key, step_key
from cyxjax.core.evaluation import EvalState, infer, score
from cyxjax.core.exact.calls import OPTIONS, Made, Part, PartProgram, Parts, compile_together, named
from cyxjax.core.losses import PerExample
from cyxjax.core.mesh import AXIS, REPLICATED, local_replicas
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.batch_stats import StatsAxes
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.split_check import split_check
from cyxjax.core.replica import sync_map
from cyxjax.core.step import TrainState, next_state, sum_gradients, with_checks
from cyxjax.core.strategy import Sync, loss_factors
from cyxjax.core.trees import PyTree

_NONE_ASKS = StatsAxes(refused="reproducibility='exact' computes batch statistics for each part")
Add: TypeAlias = Callable[[Sequence[Made], np.ndarray], list[tuple[PyTree, Any]]]
"""(results of parts by device of this process; signal (2,)) -> (sum of all, summed signal) by device."""


class Layout(NamedTuple):
    """Which device computes which parts: consecutive ones, and numbers of parts differ by at most one."""

    mesh: Mesh
    num_parts: int  # V, at least one for each device

    def parts_of(self, replica: int) -> range:
        first, stop = (r * self.num_parts // self.mesh.size for r in (replica, replica + 1))
        return range(first, stop)

    @property
    def parts(self) -> list[range]:
        """The parts of each device of this process."""
        return [self.parts_of(replica) for replica in local_replicas(self.mesh)]


class PartsBatch(NamedTuple):
    """This process's share of one optimizer step's global batch."""

    parts: Sequence[Parts]  # by device
    total: Any  # float32 (): sum of all weights, of all processes
    signal: np.ndarray  # float32 (2,): requests of this rank


class PartsStep:
    """(state, batch) -> (next state, sums), as `build_train_step` makes it; `state` is donated.

    sync: a strategy without state that differs between replicas.
    """

    def __init__(
        self,
        fns: ModelFns,
        loss: PerExample,
        sync: Sync,
        layout: Layout,
        add: Add,
        metrics: Metrics,
        threads: int | None,
    ) -> None:
        self.layout, self._add, self._view = layout, add, DeviceViews(layout)
        self.part = build_part(fns, loss, sync, layout.num_parts, metrics, threads)
        self.writes = [build_write(sync, device, metrics, threads) for device in layout.mesh.local_devices]
        self._compiled = False

    def __call__(self, state: TrainState, batch: PartsBatch) -> tuple[TrainState, jax.Array]:
        here = self._view.split(state)
        summed = self._add(self.part(here, batch.parts, batch.total), batch.signal)
        args = [(mine, one, batch.total, signal) for mine, (one, signal) in zip(here, summed, strict=True)]
        if not self._compiled:
            compile_together(write.lower(*one) for write, one in zip(self.writes, args, strict=True))
            self._compiled = True
        out = [write(*one) for write, one in zip(self.writes, args, strict=True)]
        return self._view.join([state for state, _ in out]), out[0][1]


def build_part(
    fns: ModelFns, loss: PerExample, sync: Sync, num_parts: int, metrics: Metrics, threads: int | None
) -> PartProgram:
    """The program (state, Part, total) -> (Summed, share of the model state), of one device."""
    check = split_check(loss, metrics)

    def part(state: TrainState, one: Part, total: Any) -> PyTree:
        key = micro_batch_key(step_key(state.key, state.step), 0, one.number, rows=1, num_replicas=num_parts)
        # `write` sees one replica, whose mean is the sum: a part gives its share of the mean over samples.
        factors = loss_factors(sync, state.sync, 1, num_parts * len(one.weight), total)
        old = state.model_state
        model_state, summed = sum_gradients(
            fns, loss, metrics, state.params, old, one[1:], factors, key, _NONE_ASKS, check
        )
        return summed, phases.weighted_state(model_state, old, one.weight.sum())

    return PartProgram(part, threads, num_parts)


def build_write(sync: Sync, device: jax.Device, metrics: Metrics, threads: int | None) -> Any:
    """The program (state, sum of all results of `part`, total, signal) -> (next state, sums), on `device`."""

    def write(state: TrainState, summed: PyTree, total: Any, signal: Any) -> tuple[TrainState, jax.Array]:
        (pulled, sums, checks), model_state = summed
        grads = phases.means_of(pulled, total)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)  # `add` widens
        model_state = phases.divided_state(model_state, total, state.model_state)
        sums = jnp.concatenate([metrics.settled(sums), signal[None]])
        state, sums = next_state(sync, state, grads, model_state, sums)
        return state, with_checks(sums, checks)

    alone = Mesh(np.array([device]), (AXIS,))
    mapped = named(sync_map(write, alone, (REPLICATED,) * 4, REPLICATED), threads)
    alone_there = SingleDeviceSharding(device)
    return jax.jit(mapped, donate_argnums=0, out_shardings=alone_there, compiler_options=OPTIONS)


def build_parts_eval(
    fns: ModelFns, loss: PerExample, layout: Layout, add: Add, metrics: Metrics, threads: int | None
) -> Callable[[EvalState, PartsBatch], jax.Array]:
    """A function (state, batch) -> metric sums float32 (number of metrics, 2), in evaluation mode."""
    view, check = DeviceViews(layout), split_check(loss, metrics)

    def evaluate(state: EvalState, one: Part, total: Any) -> jax.Array:
        output = infer(fns, state, one.inputs)
        return score(loss, metrics, check, output, one.targets, one.weight)

    program = PartProgram(evaluate, threads, layout.num_parts)

    def step(state: EvalState, batch: PartsBatch) -> jax.Array:
        return add(program(view.split(state), batch.parts, batch.total), batch.signal)[0][0]

    return step


class DeviceViews:
    """Converts a replicated state to one state per device of this process, and back, without copies."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._sharding = NamedSharding(layout.mesh, REPLICATED)
        self._last: tuple[Any, list[Any]] = (None, [])  # usually the input of the next step

    def split(self, state: PyTree) -> list[Any]:
        if state is not self._last[0]:
            self._last = (state, by_device(state, self._layout.mesh.local_devices))
        return self._last[1]

    def join(self, states: list[TrainState]) -> TrainState:
        whole = states[0] if self._layout.mesh.size == 1 else jax.tree.map(self._whole, *states)
        self._last = (whole, states)
        return whole

    def _whole(self, *shards: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(shards[0].shape, self._sharding, list(shards))


def by_device(tree: PyTree, devices: Sequence[jax.Device]) -> list[PyTree]:
    """Replicated arrays as arrays of each device: no copies, and no mesh, which programs would show."""
    leaves, form = jax.tree.flatten(tree)
    copies = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]

    def on(device: jax.Device, leaf: jax.Array, found: dict[jax.Device, jax.Array]) -> jax.Array:
        alone = SingleDeviceSharding(device)
        if device not in found:  # a hook may have set a value that is not on all devices yet
            return jax.device_put(leaf, device)
        if found[device].sharding == alone:
            return found[device]
        # of a mesh of one device
        return jax.make_array_from_single_device_arrays(leaf.shape, alone, [found[device]])

    return [jax.tree.unflatten(form, map(partial(on, device), leaves, copies)) for device in devices]
