"""The options and the state of a wrapped model, and what it accumulated since its last update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from cyxjax.core import facade
from cyxjax.core import local_view as view
from cyxjax.core.mesh import PER_REPLICA, REPLICATED, put_replicated
from cyxjax.core.optimizer import LearningRateFactor, adapted, with_learning_rate_factor
from cyxjax.core.step import TrainState
from cyxjax.core.strategy import reduce_then
from cyxjax.core.trees import PyTree
from cyxjax.distributed.comm_hooks import CommHook
from cyxjax.errors import ConfigError, GroupError
from cyxjax.launch import heartbeat


@dataclass(slots=True)
class DDPConfig:
    """Options of `DistributedDataParallel`; each has torch's meaning unless its description differs."""

    broadcast_parameters: bool = True
    """All ranks start with rank 0's parameters. Shapes are compared in any case."""
    bucket_size_mb: float = 25
    """MiB per reduction on GPUs; on CPUs leaves up to 1 MiB are sent as one buffer, larger ones alone."""
    find_unused_parameters: bool = False
    """Has no effect: a leaf that the loss does not reach has a gradient of zeros; no rank waits."""
    gradient_as_bucket_view: bool = True
    """Has no effect: XLA reduces gradients without copying them into buckets."""
    comm_hook: Callable[[Any], Any] | tuple[Any, Callable[[Any], Any]] | None = None
    """A communication hook, (its state, the hook), or a reducer; see `register_comm_hook`."""


def compiler_options(platform: str, bucket_size_mb: float) -> dict[str, Any] | None:
    """Compiler options for the size of a reduction; None on CPUs."""
    if platform not in ("gpu", "cuda", "rocm"):
        return None
    return {"xla_gpu_all_reduce_combine_threshold_bytes": str(round(bucket_size_mb * 2**20))}


@dataclass
class Gathered:
    """What has happened since the last update."""

    pullback: Any = None
    output: PyTree = None
    """Of the last forward pass, until its `backward`."""
    carried: facade.Carried | None = None
    grads: PyTree = None
    """LOCAL, a row per replica of this process."""
    mean_grads: PyTree = None
    """After the reduction; replicated."""
    are_finite: bool | None = None
    """Of `mean_grads`, once they were unscaled."""
    num_rows: int = 0
    """Of a replica, in all forward passes."""


class HeldState:
    """The training state on the mesh, `here` its view on this process's devices, and how it is updated."""

    def __init__(
        self, mesh: Mesh, hook: CommHook, options: dict[str, Any] | None, keeps: bool = False
    ) -> None:
        """keeps: the values that a step starts from stay valid after it: the user's own model holds them."""
        self._mesh, self._hook, self._options, self._keeps = mesh, hook, options, keeps
        self._optimizer: Any = None  # the first one used
        self._state: TrainState | None = None  # sync: the reducer's and the optimizer's state (or None)
        self.here: Any = None  # TrainState of replicated values on this process's devices, without `sync`
        self._programs: dict[tuple[bool, ...], Callable] = {}  # for the current hook and optimizer

    def _program(self, *how: bool) -> Callable:
        """The reduction alone, or with `how` an update (`_build_update`); it runs on all processes."""
        if how not in self._programs:
            self._programs[how] = (
                self._build_update(*how)
                if how
                else facade.build_reduce(*self._hook, self._mesh, self._options)
            )
        return self._programs[how]

    def _build_update(self, is_reduced: bool, is_rated: bool) -> Callable:
        """The update by local gradients, with their reduction in the same program, or by mean gradients.

        is_reduced: by mean gradients. is_rated: the optimizer's state is (its own, a factor of its updates).
        """
        hook = CommHook(optax.identity()) if is_reduced else self._hook
        sync = reduce_then(hook.reducer, self._rule(is_rated), hook.spec)
        spec = REPLICATED if is_reduced else PER_REPLICA
        return facade.build_update(sync, self._mesh, spec, self._options, keeps=self._keeps)

    def _rule(self, is_rated: bool) -> optax.GradientTransformation:
        """The optimizer, whose state is of numbers."""
        used = (getattr(self._optimizer, "scaled", None) if is_rated else None) or self._optimizer
        rule = adapted(optax.GradientTransformation(used.init, used.update))
        return with_learning_rate_factor(rule) if is_rated else rule

    @property
    def whole(self) -> TrainState:
        """Global arrays. Raises: GroupError before there are parameters."""
        if self._state is None:
            raise GroupError(
                "this model has no parameters yet: their shapes depend on the inputs. HINT: call "
                "ddp.init(inputs) with one batch first; to create an optimizer, pass it the wrapper, "
                "cx.AdamOptimizer(ddp, lr=0.001)."
            )
        return self._state

    def place(self, host: TrainState) -> None:
        """Puts copies of host values, equal on all ranks, on the mesh; `sync`: the optimizer's or None."""
        placed = put_replicated(self._mesh, jax.tree.map(np.array, host))
        reduced = facade.init_on(self._mesh, *self._hook, placed.params)
        self._take(placed._replace(sync=(reduced, placed.sync)))

    def on_one_device(self) -> tuple[PyTree, PyTree]:
        """(params, model_state), whole, on this process's first device: views, no copies."""
        return jax.tree.map(lambda a: a.addressable_data(0), (self.whole.params, self.whole.model_state))

    def set_values(self, params: PyTree, model_state: PyTree) -> None:
        """Continues from copies of these values, equal on all ranks; keeps the optimizer's state."""
        values = jax.tree.map(np.array, (params, model_state))
        params, model_state = put_replicated(self._mesh, values)
        self._take(self.whole._replace(params=params, model_state=model_state))

    def use_hook(self, hook: CommHook) -> None:
        """Gradients are reduced by `hook` from now on."""
        self._hook = hook
        self._programs.clear()
        if self._state is not None:
            reduced = facade.init_on(self._mesh, *hook, self._state.params)
            self._take(self._state._replace(sync=(reduced, self._state.sync[1])))

    def use_optimizer(self, optimizer: optax.GradientTransformation) -> None:
        """Creates the optimizer's state at its first use. Raises: ConfigError for a second optimizer."""
        if self._optimizer is not None and self._optimizer is not optimizer:
            raise ConfigError(
                "update_parameters was given a second optimizer; the state of the first would be lost. "
                "HINT: create the optimizer once, before the loop; to use another one, wrap the model again, "
                'and pass {"params": ..., "model_state": ...} of the old state_dict to load_state_dict.'
            )
        self._optimizer = optimizer
        if self.whole.sync[1] is None:
            inner = facade.init_on(self._mesh, self._rule(False), REPLICATED, self.whole.params)
            self._state = self.whole._replace(sync=(self.whole.sync[0], inner))

    def reduce(self, grads: PyTree) -> PyTree:
        """Mean gradients, replicated, from this process's rows."""
        reduced, inner = self.whole.sync
        rows = self._rows(grads)
        mean_grads, reduced = self._together(self._program(), rows, reduced, self.whole.params)
        self._state = self.whole._replace(sync=(reduced, inner))
        return mean_grads

    def update(self, since: Gathered) -> None:
        """The next state from the mean gradients, or from this process's rows of gradients: then reduction
        and update are one program."""
        carried = view.to_global(self._mesh, since.carried, PER_REPLICA)
        if since.mean_grads is None:
            rows = self._rows(since.grads)
            self._take(self._together(self._stepped, False, self.whole, rows, carried))
            return
        reduced, inner = self.whole.sync
        alone = self.whole._replace(sync=(optax.EmptyState(), inner))  # these gradients are already reduced
        done = self._stepped(True, alone, since.mean_grads, carried)
        self._take(done._replace(sync=(reduced, done.sync[1])))

    def _stepped(self, is_reduced: bool, state: TrainState, *given: Any) -> Any:
        """The program's result for `state`, at the optimizer's current learning rate.

        A rate that was set is an argument of a separate program, which is compiled once for all values.
        """
        factors = self._optimizer.factors(state.params) if hasattr(self._optimizer, "factors") else 1.0
        is_rated = factors != 1.0 or getattr(self._optimizer, "scaled", None) is not None
        run = self._program(is_reduced, is_rated)
        if not is_rated:
            return run(state, *given)
        reduced, inner = state.sync
        rated = state._replace(sync=(reduced, (inner, LearningRateFactor(jax.tree.map(np.float32, factors)))))
        done = run(rated, *given)
        return done._replace(sync=(done.sync[0], done.sync[1][0]))

    def _together(self, run: Callable[..., Any], *given: Any) -> Any:
        """`run(*given)`, a program that waits for other processes.

        On CPUs this method waits for the result, so that the supervisor's watchdog knows of the wait, which
        would otherwise be wherever the user's code reads a number.
        """
        if self._mesh.devices.flat[0].platform != "cpu" or jax.process_count() == 1:
            return run(*given)
        with heartbeat.together(heartbeat.progress().step + 1):
            return jax.block_until_ready(run(*given))

    def _take(self, state: TrainState) -> None:
        self._state = state
        self.here = view.to_local(self._mesh, state._replace(sync=None), REPLICATED)

    def _rows(self, grads: PyTree) -> PyTree:
        if grads is None:
            raise GroupError(
                "there are no gradients: backward() of a loss of this model's output was not called. HINT: "
                "call it after forward; for a loss that passes through another model, "
                "ddp.loss(lambda out, y: criterion(other(out), y), output, targets).backward()."
            )
        if self._mesh.devices.flat[0].platform == "cpu":
            # CPU devices of a process share a pool of threads: programs queued behind one that waits in a
            # reduction would starve it. Waiting here keeps the queue at one.
            jax.block_until_ready(grads)
        return view.to_global(self._mesh, grads, PER_REPLICA)
