"""The two ways to compute a step, fused over all devices or in parts, and what a run needs for each."""

from collections.abc import Callable
from functools import partial

from jax.sharding import Mesh

from cyxjax.core.evaluation import build_eval_step
from cyxjax.core.exact.step import Layout, PartsStep, build_parts_eval
from cyxjax.core.exact.tree_sum import TreeSum
from cyxjax.core.losses import PerExample
from cyxjax.core.mesh import num_replicas
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.step import build_train_step
from cyxjax.core.strategy import Sync
from cyxjax.errors import ConfigError
from cyxjax.train.feeding.placing import PartPlacer, Placer, RowPlacer
from cyxjax.train.settings import StepPlan


def placer_for(plan: StepPlan, mesh: Mesh, *, unpadded: bool = False) -> Placer:
    """The placer that puts batches where the steps of `plan` expect them. unpadded: see `RowPlacer`.

    Raises: ConfigError for more devices than virtual replicas.
    """
    return PartPlacer(_layout(plan, mesh)) if plan.is_exact else RowPlacer(mesh, unpadded=unpadded)


def steps_for(
    plan: StepPlan, mesh: Mesh, fns: ModelFns, loss: PerExample, sync: Sync, metrics: Metrics
) -> tuple[Callable, Callable | None, Callable]:
    """(train step, several train steps, evaluation step), as `Program` holds them.

    Raises: ConfigError for more devices than virtual replicas.
    """
    if plan.is_exact:
        layout = _layout(plan, mesh)  # each sum knows the shapes it adds
        train = PartsStep(fns, loss, sync, layout, TreeSum(layout), metrics, plan.threads)
        return train, None, build_parts_eval(fns, loss, layout, TreeSum(layout), metrics, plan.threads)
    build = partial(
        build_train_step,
        *(fns, loss, sync, mesh),
        accumulation=plan.batch.accumulation,
        metrics=metrics,
        sync_batchnorm=plan.sync_batchnorm,
    )
    parts = sync if sync.keeps_parts else None
    return build(), build(several=True), build_eval_step(fns, loss, mesh, metrics=metrics, parts=parts)


def _layout(plan: StepPlan, mesh: Mesh) -> Layout:
    num_parts = plan.batch.num_shares
    if num_replicas(mesh) > num_parts:
        raise ConfigError(
            f"{num_replicas(mesh)} devices for virtual_replicas={num_parts}: each needs a part. "
            f"HINT: use at most {num_parts} devices; a different virtual_replicas gives different bits."
        )
    return Layout(mesh, num_parts)


def has_whole_batch(plan: StepPlan, mesh: Mesh) -> bool:
    """Whether a step gets the global batch in one piece: one replica, no micro-batches, not in parts."""
    return not plan.is_exact and num_replicas(mesh) * plan.batch.accumulation == 1
