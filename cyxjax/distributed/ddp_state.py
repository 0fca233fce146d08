"""The state of a wrapped model, what it accumulated since its last update, and its compiled programs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from cyxjax.core import facade
from cyxjax.core import local_view as view
from cyxjax.core.mesh import PER_REPLICA, REPLICATED, put_replicated
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.optimizer import LearningRateFactor, with_learning_rate_factor
from cyxjax.core.precision import autocast_dtype, cast_to
from cyxjax.core.step import TrainState
from cyxjax.core.strategy import reduce_then
from cyxjax.core.trees import PyTree
from cyxjax.distributed.comm_hooks import CommHook
from cyxjax.errors import ConfigError, GroupError
from cyxjax.launch import heartbeat


class ModelPrograms:
    """Forward and backward, on one process's devices; one set for each dtype of `autocast`."""

    def __init__(self, fns: ModelFns, local_mesh: Mesh, num_replicas: int) -> None:
        self._forward = cache(
            lambda dtype, is_first: facade.build_forward(
                cast_to(fns, dtype), local_mesh, num_replicas, is_first
            )
        )
        self._infer = cache(lambda dtype: facade.build_infer(cast_to(fns, dtype), local_mesh))
        self._backward = cache(lambda: facade.build_backward(local_mesh))

    def forward(self, is_first: bool) -> Callable:
        """`facade.build_forward`; is_first: the first pass since an update."""
        return self._forward(autocast_dtype(), is_first)

    def infer(self) -> Callable:
        """`facade.build_infer`."""
        return self._infer(autocast_dtype())

    @property
    def backward(self) -> Callable:
        """`facade.build_backward`."""
        return self._backward()


class UpdatePrograms:
    """Reduction and update, programs of all processes together, for one hook and one optimizer."""

    def __init__(
        self, mesh: Mesh, hook: CommHook, optimizer: Any, options: dict[str, Any] | None, keeps: bool = False
    ) -> None:
        """keeps: the values a step begins with outlive it, for the user's own model holds them."""
        self._mesh, self._hook, self.optimizer, self._options = mesh, hook, optimizer, options
        self._keeps = keeps

    @cached_property
    def update(self) -> Callable:
        """Reduction and update in one: local gradients in."""
        sync = reduce_then(self._hook.reducer, self.optimizer, self._hook.spec)
        return facade.build_update(sync, self._mesh, PER_REPLICA, self._options, keeps=self._keeps)

    @cached_property
    def apply(self) -> Callable:
        """The update alone: mean gradients in."""
        sync = reduce_then(optax.identity(), self.optimizer)
        return facade.build_update(sync, self._mesh, REPLICATED, keeps=self._keeps)

    @cached_property
    def at_rate(self) -> "UpdatePrograms":
        """The same, whose optimizer's state is (its own, a factor of its updates): if the rate changes."""
        rated = with_learning_rate_factor(self.optimizer)
        return UpdatePrograms(self._mesh, self._hook, rated, self._options, self._keeps)

    @cached_property
    def reduce(self) -> Callable:
        """The reduction alone: mean gradients out."""
        return facade.build_reduce(*self._hook, self._mesh, self._options)


@dataclass
class Gathered:
    """What has happened since the last update."""

    pullback: Any = None
    output: PyTree = None
    """Of the last forward pass, until it is pulled back."""
    carried: facade.Carried | None = None
    grads: PyTree = None
    """LOCAL, a row per replica of this process."""
    mean_grads: PyTree = None
    """After the reduction; replicated."""
    num_forwards: int = 0
    is_zeroed: bool = False
    """Whether gradients were zeroed since the last forward pass; a later evaluation drops that pass."""


class HeldState:
    """The training state on the mesh, `here` its view on this process's devices, and how it is updated."""

    def __init__(
        self, mesh: Mesh, hook: CommHook, options: dict[str, Any] | None, keeps: bool = False
    ) -> None:
        """keeps: as `UpdatePrograms` take it."""
        self._mesh, self._hook, self._options, self._keeps = mesh, hook, options, keeps
        self._programs = self._built(None)
        self._state: TrainState | None = None  # sync: the reducer's and the optimizer's state (or None)
        self._here: TrainState | None = None

    @property
    def exists(self) -> bool:
        return self._state is not None

    @property
    def is_trained(self) -> bool:
        """True once an optimizer has been used."""
        return self._programs.optimizer is not None

    @property
    def whole(self) -> TrainState:
        """Global arrays. Raises: GroupError before there are any."""
        if self._state is None:
            raise GroupError(
                "this model has no parameters yet: it needs inputs to know their shapes. HINT: for an "
                "optimizer pass the wrapper, cx.AdamOptimizer(ddp, lr=0.001); else call ddp.init(inputs)."
            )
        return self._state

    @property
    def here(self) -> TrainState:
        """Replicated values on this process's devices, without `sync`."""
        assert self._here is not None
        return self._here

    def place(self, host: TrainState) -> None:
        """Puts host values on the mesh, equal on all ranks; `sync` is the optimizer's state or None."""
        placed = put_replicated(self._mesh, jax.tree.map(np.asarray, host))
        reduced = facade.init_on(self._mesh, *self._hook, placed.params)
        self._take(placed._replace(sync=(reduced, placed.sync)))

    def on_one_device(self) -> tuple[PyTree, PyTree]:
        """(params, model_state), whole, on this process's first device: views, no copies."""
        return jax.tree.map(lambda a: a.addressable_data(0), (self.whole.params, self.whole.model_state))

    def set_values(self, params: PyTree, model_state: PyTree) -> None:
        """Goes on from these, equal on all ranks; the optimizer's state stays."""
        values = jax.tree.map(np.asarray, (params, model_state))
        params, model_state = put_replicated(self._mesh, values)
        self._take(self.whole._replace(params=params, model_state=model_state))

    def use_hook(self, hook: CommHook) -> None:
        """Gradients travel by `hook` from now on; before the first update."""
        self._hook = hook
        self._programs = self._built(None)
        if self._state is not None:
            reduced = facade.init_on(self._mesh, *hook, self._state.params)
            self._take(self._state._replace(sync=(reduced, self._state.sync[1])))

    def use_optimizer(self, optimizer: optax.GradientTransformation) -> None:
        """Makes the optimizer's state at its first use. Raises: ConfigError for another one than before."""
        if self._programs.optimizer is optimizer:
            return
        if self._programs.optimizer is not None:
            raise ConfigError(
                "update_parameters was given another optimizer than before, whose state starts from nothing. "
                "HINT: make the optimizer once, before the loop."
            )
        self._programs = self._built(optimizer)
        if self.whole.sync[1] is None:
            inner = facade.init_on(self._mesh, optimizer, REPLICATED, self.whole.params)
            self._state = self.whole._replace(sync=(self.whole.sync[0], inner))

    def reduce(self, grads: PyTree) -> PyTree:
        """Mean gradients, replicated, from this process's rows."""
        reduced, inner = self.whole.sync
        rows = self._rows(grads)
        with self._waiting():
            mean_grads, reduced = self._programs.reduce(rows, reduced, self.whole.params)
        self._state = self.whole._replace(sync=(reduced, inner))
        return mean_grads

    def update(self, grads: PyTree, carried: PyTree) -> None:
        """The next state from this process's rows of gradients: reduction and update in one program."""
        rows = self._rows(grads)
        carried = view.to_global(self._mesh, carried, PER_REPLICA)
        with self._waiting():
            self._take(self._stepped(lambda programs: programs.update, self.whole, rows, carried))

    def apply(self, mean_grads: PyTree, carried: PyTree) -> None:
        """The next state from mean gradients."""
        reduced, inner = self.whole.sync
        alone = self.whole._replace(sync=(optax.EmptyState(), inner))  # the reducer has had its turn
        carried = view.to_global(self._mesh, carried, PER_REPLICA)
        done = self._stepped(lambda programs: programs.apply, alone, mean_grads, carried)
        self._take(done._replace(sync=(reduced, done.sync[1])))

    def _stepped(self, chosen: Callable[[UpdatePrograms], Callable], state: TrainState, *given: Any) -> Any:
        """What the chosen program makes of `state`, at the optimizer's present rate.

        A rate that was set is an argument of a program of its own: compiled once, whatever it is set to.
        """
        factor = getattr(self._programs.optimizer, "rate_factor", 1.0)
        if factor == 1.0:
            return chosen(self._programs)(state, *given)
        reduced, inner = state.sync
        rated = state._replace(sync=(reduced, (inner, LearningRateFactor(np.float32(factor)))))
        done = chosen(self._programs.at_rate)(rated, *given)
        return done._replace(sync=(done.sync[0], done.sync[1][0]))

    def _built(self, optimizer: Any) -> UpdatePrograms:
        return UpdatePrograms(self._mesh, self._hook, optimizer, self._options, self._keeps)

    def _waiting(self) -> AbstractContextManager[None]:
        """Reports to the supervisor a step that waits for other processes; on CPUs dispatch itself waits."""
        waits = self._mesh.devices.flat[0].platform == "cpu" and jax.process_count() > 1
        return heartbeat.together(heartbeat.progress().step + 1) if waits else nullcontext()

    def _take(self, state: TrainState) -> None:
        self._state = state
        self._here = view.to_local(self._mesh, state._replace(sync=None), REPLICATED)

    def _rows(self, grads: PyTree) -> PyTree:
        if grads is None:
            raise GroupError("there are no gradients: backward was not called. HINT: call it after forward.")
        if self._mesh.devices.flat[0].platform == "cpu":
            # CPU devices of a process share a pool of threads: programs queued behind one that waits in a
            # reduction would starve it. Waiting here keeps the queue at one.
            jax.block_until_ready(grads)
        return view.to_global(self._mesh, grads, PER_REPLICA)
