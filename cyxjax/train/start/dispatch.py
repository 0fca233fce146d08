"""The two ways to compute a step, and what a run must know of each: fused over all devices, or in parts."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from cyxjax.core.losses import PerExample
from cyxjax.core.mesh import num_replicas
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.parts.step import Layout, PartsStep, build_parts_eval
from cyxjax.core.step import build_eval_step, build_train_step
from cyxjax.core.strategy import Sync
from cyxjax.data.content import drawn_anew, read_otherwise
from cyxjax.data.sources import Dataset
from cyxjax.errors import ConfigError
from cyxjax.sync.exact import TreeSum
from cyxjax.train.feeding.placing import PartPlacer, Placer, RowPlacer
from cyxjax.train.settings import Exactness, StepPlan


class Dispatch(Protocol):
    """How steps are computed on a mesh."""

    def placer(self) -> Placer:
        """What puts batches where the steps expect them."""

    def steps(
        self, fns: ModelFns, loss: PerExample, sync: Sync, metrics: Metrics
    ) -> tuple[Callable, Callable]:
        """(train step, evaluation step), as `loop.Program` holds them."""


class Fused:
    """One program over all devices; the order of its sums depends on their number."""

    def __init__(self, plan: StepPlan, mesh: Mesh):
        self._plan, self._mesh = plan, mesh

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
            accumulation=self._plan.batch.accumulation,
            metrics=metrics,
            sync_batchnorm=self._plan.sync_batchnorm,
        )
        parts = sync if sync.keeps_parts else None
        return train_step, build_eval_step(fns, loss, self._mesh, metrics=metrics, parts=parts)


class InParts:
    """`reproducibility: exact`. Raises: ConfigError for more devices than virtual replicas."""

    def __init__(self, plan: StepPlan, mesh: Mesh):
        num_parts = plan.batch.num_shares
        if num_replicas(mesh) > num_parts:
            raise ConfigError(
                f"{num_replicas(mesh)} devices for virtual_replicas={num_parts}: each needs a part. "
                f"HINT: use at most {num_parts} devices; another virtual_replicas gives other bits."
            )
        self._threads = plan.threads
        self.layout = Layout(mesh, num_parts)

    def placer(self) -> Placer:
        return PartPlacer(self.layout)

    def steps(
        self, fns: ModelFns, loss: PerExample, sync: Sync, metrics: Metrics
    ) -> tuple[Callable, Callable]:
        layout = self.layout
        return (
            PartsStep(fns, loss, sync, layout, TreeSum(layout), metrics, self._threads),
            build_parts_eval(fns, loss, layout, TreeSum(layout), metrics, self._threads),
        )


_KINDS: dict[str, Callable[[StepPlan, Mesh], Dispatch]] = {"none": Fused, "exact": InParts}


def dispatch_for(plan: StepPlan, mesh: Mesh) -> Dispatch:
    """How `plan` wants its steps computed. Raises: ConfigError where `mesh` does not suit it."""
    return _KINDS[plan.reproducibility](plan, mesh)


def check_repeats(exactness: Exactness, content: Mapping[str, Any]) -> None:
    """An exact run's samples are what their number says, whenever and by whom they are read.

    content: by the name of the data, as `content_of` gives it. Raises: ConfigError with a sample that is not.
    """
    for name, found in content.items():
        if exactness.mode == "exact" and (samples := drawn_anew(found)):
            raise ConfigError(
                f"sample {samples[0]} of the {name} was read twice and differed: its augmentation depends "
                "on what was read before, which reproducibility='exact' cannot repeat. HINT: draw with "
                "a generator made from the sample's index, np.random.default_rng((seed, index))."
            )


def check_apart(exactness: Exactness, data: Mapping[str, Dataset]) -> None:
    """Nor does what a sample is hang on those that are read with it: each process reads its own share.

    data: by name. Raises: ConfigError with a sample of which it does.
    """
    for name, dataset in data.items():
        if exactness.mode == "exact" and (sample := read_otherwise(dataset)) is not None:
            raise ConfigError(
                f"sample {sample} of the {name} is another one when it is read together with others, which "
                "reproducibility='exact' cannot have: each process reads its own share. HINT: let take make "
                "a row of its index alone, and pad all samples to one length."
            )


def check_flags(exactness: Exactness, env: Mapping[str, str]) -> None:
    """An exact run's sums have one order; a compiler that may choose it looks at what is compiled with them.

    Measured (jaxlib 0.10.2): with fast math an MLP has other bits on one device than on three.
    Raises: ConfigError where the flags of XLA in `env` allow it.
    """
    if exactness.mode == "exact" and lets_reorder(env.get("XLA_FLAGS", "")):
        raise ConfigError(
            "XLA_FLAGS has --xla_cpu_enable_fast_math, which lets the compiler choose the order of sums: "
            "reproducibility='exact' would hang on the devices. HINT: take it out of XLA_FLAGS."
        )


def lets_reorder(flags: str) -> bool:
    """Whether the last word on fast math in `flags` (XLA_FLAGS) is yes."""
    said = [flag.partition("=") for flag in flags.split()]
    values = [value for name, _, value in said if name.lstrip("-") == "xla_cpu_enable_fast_math"]
    return bool(values) and values[-1].lower() not in ("false", "0")


def check_threads(exactness: Exactness, threads: int) -> None:
    """An exact run has its own number of CPU threads; `threads`: of this process's pool, 0 if not known.

    Raises: ConfigError where they differ.
    """
    wanted = exactness.threads
    if jax.default_backend() == "cpu" and wanted is not None and threads != wanted:
        raise ConfigError(
            f"this process computes with {threads} CPU threads, reproducibility='exact' with {wanted} "
            f"(exact_threads, or virtual_replicas): other threads, other bits. HINT: call "
            f"cx.distributed.init(threads={wanted}) first, or set exact_threads."
        )
