"""The two ways to compute a step, and what a run must know of each: fused over all devices, or in parts."""

from collections.abc import Callable
from typing import Protocol

import jax
from jax.sharding import Mesh

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import PerExample
from cyxjax.core.mesh import num_replicas
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.parts import Layout, PartsStep, build_parts_eval
from cyxjax.core.step import build_eval_step, build_train_step
from cyxjax.core.strategy import Sync
from cyxjax.errors import ConfigError
from cyxjax.sync.exact import TreeSum
from cyxjax.train.feeding.fit_data import FitData, is_loader
from cyxjax.train.feeding.placing import PartPlacer, Placer, RowPlacer


class Dispatch(Protocol):
    """How a configuration's steps are computed on a mesh."""

    num_shares: int  # what each step's samples are dealt out to

    def placer(self) -> Placer:
        """What puts batches where the steps expect them."""

    def steps(
        self, fns: ModelFns, loss: PerExample, sync: Sync, metrics: Metrics
    ) -> tuple[Callable, Callable]:
        """(train step, evaluation step), as `loop.Program` holds them."""


class Fused:
    """One program over all devices; the order of its sums depends on their number."""

    def __init__(self, config: DistributedTrainingConfig, mesh: Mesh):
        self._config, self._mesh = config, mesh
        self.num_shares = num_replicas(mesh)

    def placer(self) -> Placer:
        return RowPlacer(self._mesh)

    def steps(
        self, fns: ModelFns, loss: PerExample, sync: Sync, metrics: Metrics
    ) -> tuple[Callable, Callable]:
        train_step = build_train_step(
            fns,
            loss,
            sync,
            self._mesh,
            accumulation=self._config.gradient_accumulation_steps,
            metrics=metrics,
            sync_batchnorm=self._config.sync_batchnorm,
        )
        parts = sync if sync.keeps_parts else None
        return train_step, build_eval_step(fns, loss, self._mesh, metrics=metrics, parts=parts)


class InParts:
    """`reproducibility: exact`. Raises: ConfigError for more devices than virtual replicas."""

    def __init__(self, config: DistributedTrainingConfig, mesh: Mesh):
        self.num_shares = config.virtual_replicas
        if num_replicas(mesh) > self.num_shares:
            raise ConfigError(
                f"{num_replicas(mesh)} devices for virtual_replicas={self.num_shares}: each needs a part. "
                f"HINT: use at most {self.num_shares} devices; another virtual_replicas gives other bits."
            )
        self.layout = Layout(mesh, self.num_shares)

    def placer(self) -> Placer:
        return PartPlacer(self.layout)

    def steps(
        self, fns: ModelFns, loss: PerExample, sync: Sync, metrics: Metrics
    ) -> tuple[Callable, Callable]:
        layout = self.layout
        return (
            PartsStep(fns, loss, sync, layout, TreeSum(layout), metrics),
            build_parts_eval(fns, loss, layout, TreeSum(layout), metrics),
        )


_KINDS: dict[str, Callable[[DistributedTrainingConfig, Mesh], Dispatch]] = {"none": Fused, "exact": InParts}


def dispatch_for(config: DistributedTrainingConfig, mesh: Mesh) -> Dispatch:
    """How `config` wants its steps computed. Raises: ConfigError where `mesh` does not suit it."""
    return _KINDS[config.reproducibility](config, mesh)


def check_data(config: DistributedTrainingConfig, data: FitData) -> None:
    """An exact run reads samples by number. Raises: ConfigError where it cannot.

    config: as `fit_data.parse` left it, with a loader's batch size in place of the global one.
    """
    if config.reproducibility != "exact":
        return
    if not data.indexed or config.global_batch_size is None or is_loader(data.val):
        raise ConfigError(
            "reproducibility='exact' reads samples by number, and the data come from a loader, whose batches "
            "depend on the processes. HINT: pass arrays or the dataset itself, and set global_batch_size."
        )


def check_threads(config: DistributedTrainingConfig, threads: int) -> None:
    """An exact run has its own number of CPU threads; `threads`: of this process's pool, 0 if not known.

    Raises: ConfigError where they differ.
    """
    wanted = config.pool_threads
    if jax.default_backend() == "cpu" and wanted is not None and threads != wanted:
        raise ConfigError(
            f"this process computes with {threads} CPU threads, reproducibility='exact' with {wanted} "
            f"(exact_threads, or virtual_replicas): other threads, other bits. HINT: call "
            f"cx.distributed.init(threads={wanted}) first, or set exact_threads."
        )
