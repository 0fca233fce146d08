"""The compiled programs of one wrapped model, each built when it is first needed."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import optax
from jax.sharding import Mesh

from cyxjax.core import facade
from cyxjax.core.mesh import PER_REPLICA, REPLICATED
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.optimizer import with_learning_rate_factor
from cyxjax.core.precision import autocast_dtype, cast_to
from cyxjax.core.strategy import reduce_then
from cyxjax.distributed.comm_hooks import CommHook


class ModelPrograms:
    """Forward and backward, on one process's devices; one set for each dtype of `autocast`."""

    def __init__(self, fns: ModelFns, local_mesh: Mesh, num_replicas: int) -> None:
        self._fns, self._mesh, self._num_replicas = fns, local_mesh, num_replicas
        self._built: dict[tuple, Callable] = {}

    def forward(self, is_first: bool, padded: bool) -> Callable:
        """`facade.build_forward`; is_first: the first pass since an update; padded: of rows."""
        dtype = autocast_dtype()

        def build() -> Callable:
            fns = cast_to(self._fns, dtype)
            return facade.build_forward(fns, self._mesh, self._num_replicas, is_first, padded)

        return self._once(("forward", dtype, is_first, padded), build)

    def infer(self) -> Callable:
        """`facade.build_infer`."""
        dtype = autocast_dtype()
        return self._once(("infer", dtype), lambda: facade.build_infer(cast_to(self._fns, dtype), self._mesh))

    @cached_property
    def backward(self) -> Callable:
        """`facade.build_backward`."""
        return facade.build_backward(self._mesh)

    def _once(self, name: tuple, build: Callable[[], Callable]) -> Callable:
        if name not in self._built:
            self._built[name] = build()
        return self._built[name]


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
        """The same, whose optimizer's state is (its own, a factor of its updates): for a rate that moves."""
        rated = with_learning_rate_factor(self.optimizer)
        return UpdatePrograms(self._mesh, self._hook, rated, self._options, self._keeps)

    @cached_property
    def reduce(self) -> Callable:
        """The reduction alone: mean gradients out."""
        return facade.build_reduce(*self._hook, self._mesh, self._options)
