"""The configuration resolved for the devices and data of this run, as frozen parts.

Only `resolve` sees the whole configuration; other modules receive the parts that they depend on.
"""

import copy
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.config.sections import InitFromConfig, ScheduleConfig
from cyxjax.core.model.lora import LoraPlan
from cyxjax.core.precision import parse_policy
from cyxjax.data.batches import BatchPlan, batch_size_from_global
from cyxjax.errors import ConfigError
from cyxjax.run_folder import RunFolder
from cyxjax.train.schedules import RatePlan, Resumed, rate_plan


class Evaluations(NamedTuple):
    """How often the state is evaluated, in epochs and in steps; 0 turns that interval off."""

    every_epochs: int
    every_steps: int

    def after(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        return bool(self.every_steps) and step % self.every_steps == 0

    def at_end_of(self, epoch: int, epochs: int) -> bool:
        """Whether an evaluation follows this epoch, counted from 1; the last one always has one."""
        return bool(self.every_epochs) and (epoch % self.every_epochs == 0 or epoch == epochs)


class BatchShape(NamedTuple):
    """How the samples of one step are divided."""

    batch_size: int  # samples per share and micro-batch
    num_shares: int  # replicas; for an exact step, virtual replicas
    accumulation: int  # micro-batches

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all shares and micro-batches."""
        return self.batch_size * self.num_shares * self.accumulation


class StepPlan(NamedTuple):
    """All that the compiled functions depend on: fits with equal plans share these functions."""

    batch: BatchShape
    rate: RatePlan
    is_exact: bool  # whether the bits do not depend on the devices: `reproducibility: exact`
    precision: str
    remat: str
    offload: str
    sync_batchnorm: bool
    max_grad_norm: float | None
    on_nonfinite: Literal["abort", "skip", "rollback"]
    comm: str
    comm_options: dict[str, Any]
    trainable: tuple[str, ...]  # patterns of parameter names; (): all
    lora: LoraPlan
    threads: int | None  # CPU threads per process, if the numbers must not depend on them; None: any

    @property
    def uses_float16(self) -> bool:
        """Whether the model computes in float16, with which some steps are skipped to find the loss scale."""
        return parse_policy(self.precision).needs_loss_scale


class Reading(NamedTuple):
    """How samples are read."""

    epoch: BatchPlan | None  # None: a loader, which divides the samples itself
    steps_per_epoch: int | None  # of a loader that is read continuously; None: an epoch is one pass over it
    seed: int
    shuffle: bool
    drop_last: bool
    prefetch: int
    max_eval_batches: int | None


class Course(NamedTuple):
    """How long a run trains, and how often it evaluates and logs."""

    epochs: int
    max_steps: int | None
    max_time_s: float | None
    evaluations: Evaluations
    in_flight: int
    steps_per_dispatch: int | Literal["auto"]
    log_every: int  # steps


class Watch(NamedTuple):
    """The metric to monitor, and the patience of early stopping."""

    monitor: str
    mode: Literal["min", "max"] | None
    patience: int | None


class SavePolicy(NamedTuple):
    """When checkpoints are written, which are kept, and whether a run resumes from them."""

    folder: Path
    every_epochs: int
    every_steps: int
    every_minutes: float
    keep_last: int
    keep_best: int
    in_background: bool
    resume: Literal["auto", "never", "must"]

    @property
    def saves(self) -> bool:
        """Whether a run keeps checkpoints at all."""
        return any((self.every_epochs, self.every_steps, self.every_minutes))


class GuardPolicy(NamedTuple):
    """What stops a run, or rolls it back, at a loss spike, a desync or other bits; for gradients that are not
    finite see `StepPlan.on_nonfinite`.
    """

    on_loss_spike: Literal["ignore", "rollback"]
    spike_factor: float
    spike_window: int
    spike_steps: int
    max_rollbacks: int
    sentinel_every: int  # steps; 0: never
    on_desync: Literal["abort", "warn", "heal"]
    on_other_bits: Literal["refuse", "warn"]  # of an exact run that would continue with them
    digest_every: int  # steps between the digests of an exact run; 0: never


class Settings(NamedTuple):
    """A configuration, resolved."""

    step: StepPlan
    reading: Reading
    course: Course
    watch: Watch
    saving: SavePolicy
    guard: GuardPolicy
    seed: int
    init_from: InitFromConfig  # where initial parameters are read from, if they are not drawn from the seed
    verbose: bool
    run_folder: RunFolder | None  # None: only checkpoints are written
    report: bool  # whether events are kept in the run folder
    profile: range  # the steps to trace into it
    experiment: str | None  # the text of its configuration file; None: data and model came from a program


def resolve(
    config: DistributedTrainingConfig,
    num_replicas: int,
    num_samples: int | None = None,
    *,
    schedule: Any = None,
    remat: str = "none",
    named: bool = False,
    resumed: Resumed | None = None,
) -> Settings:
    """Resolves `config` for `num_replicas`. num_samples: samples of an epoch; None if a loader decides.

    schedule: a callable (steps -> factor on the rate); None: that of `config`, or a constant rate.
    remat: unless "none", overrides the value of `config`. named: whether `config` names model, data and
    optimizer; if not, they came from a program, and these sections of a `TrainConfig` are not recorded.
    resumed: where the run goes on, if it is resumed.
    Raises: ConfigError and DataError if the batch does not divide, or leaves no step.
    """
    schedule = getattr(config, "schedule", ScheduleConfig()) if schedule is None else schedule
    batch = batch_shape(config, num_replicas)
    epoch = None if num_samples is None else _epoch(config, num_samples, batch)
    return Settings(
        step=StepPlan(
            batch=batch,
            rate=rate_plan(config, schedule, batch.global_batch_size, epoch, resumed),
            is_exact=config.reproducibility == "exact",
            precision=config.precision,
            remat=str(config.remat) if remat == "none" else remat,
            offload=config.offload,
            sync_batchnorm=config.sync_batchnorm,
            max_grad_norm=config.max_grad_norm,
            on_nonfinite=config.on_nonfinite,
            comm=config.comm,
            comm_options=copy.deepcopy(config.comm_options),  # the caller's may change before the next fit
            trainable=config.trainable,
            lora=LoraPlan(config.lora.rank, config.lora.alpha, config.lora.pattern),
            threads=config.pool_threads,
        ),
        reading=Reading(
            epoch=epoch,
            steps_per_epoch=config.steps_per_epoch,
            seed=config.seed,
            shuffle=config.shuffle,
            drop_last=config.drop_last,
            prefetch=config.prefetch,
            max_eval_batches=config.max_eval_batches,
        ),
        course=Course(
            epochs=config.epochs,
            max_steps=config.max_steps,
            max_time_s=config.max_time,
            evaluations=Evaluations(config.evaluate_every_n_epochs, config.evaluate_every_n_steps),
            in_flight=config.steps_in_flight,
            steps_per_dispatch=config.steps_per_dispatch,
            log_every=config.log_every_n_batches,
        ),
        watch=Watch(config.monitor, config.monitor_mode, config.early_stopping_patience),
        saving=SavePolicy(
            folder=config.checkpoint_path,
            every_epochs=config.checkpoint_every_n_epochs,
            every_steps=config.checkpoint_every_n_steps,
            every_minutes=config.checkpoint_every_n_minutes,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            in_background=config.checkpoint_async,
            resume=config.resume,
        ),
        guard=GuardPolicy(
            on_loss_spike=config.on_loss_spike,
            spike_factor=config.loss_spike_factor,
            spike_window=config.loss_spike_window,
            spike_steps=config.loss_spike_steps,
            max_rollbacks=config.max_rollbacks,
            sentinel_every=config.sentinel_every_n_steps,
            on_desync=config.on_desync,
            on_other_bits=config.exact,
            digest_every=config.exact_digest_every_n_steps,
        ),
        seed=config.seed,
        init_from=config.init_from,
        verbose=config.verbose,
        run_folder=config.run_folder,
        report=isinstance(config, TrainConfig) and config.report,
        profile=config.profiled_steps if isinstance(config, TrainConfig) else range(0),
        experiment=config.to_yaml() if isinstance(config, TrainConfig) and named else None,
    )


def _epoch(config: DistributedTrainingConfig, num_samples: int, batch: BatchShape) -> BatchPlan:
    """The plan of an epoch over samples read by number. Raises: ConfigError for `steps_per_epoch`."""
    if config.steps_per_epoch:
        raise ConfigError(
            f"steps_per_epoch={config.steps_per_epoch} is for loaders and streams; an epoch of samples read "
            "by number is one pass over them. HINT: leave it out; to count in steps, use "
            "evaluate_every_n_steps, checkpoint_every_n_steps or max_steps.",
            key="steps_per_epoch",
        )
    return BatchPlan(num_samples, *batch, config.drop_last)


def batch_shape(config: DistributedTrainingConfig, num_replicas: int) -> BatchShape:
    """How a step of `config` is divided. Raises: ConfigError if its global batch cannot be."""
    shares = config.virtual_replicas if config.reproducibility == "exact" else num_replicas
    accumulation = config.gradient_accumulation_steps
    if config.global_batch_size is None:
        return BatchShape(config.batch_size, shares, accumulation)
    return BatchShape(
        batch_size_from_global(config.global_batch_size, shares, accumulation), shares, accumulation
    )
