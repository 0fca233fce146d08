"""The configuration of a run: one typed value, for the library (`DistributedTrainingConfig`) and for an
experiment file (`TrainConfig`). Imports no jax, so that `--help` and errors in keys appear immediately.
"""

import re
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from cyxjax.config.effects import Arrays, Course, Length, Numbers, Speed, View, not_exact
from cyxjax.config.errors import Source, explain
from cyxjax.config.sections import InitFrom, InitFromConfig, LoraConfig, Patterns
from cyxjax.config.values import Amount, Count, Here, Options, Seconds, Strict
from cyxjax.errors import ConfigError
from cyxjax.run_folder import RunFolder

_DTYPES = ("float32", "bfloat16", "float16")
_LIGHTNING = {"bf16-mixed": "bfloat16", "16-mixed": "float16", "32-true": "float32"}
_POLICY = re.compile(r"(params|compute|output)=(float32|bfloat16|float16)")


def _named_switch(value: Any, info: ValidationInfo) -> Any:
    """`value`, with true and false replaced by their words: YAML reads on and off as true and false."""
    off, on = ("none", "full") if info.field_name == "remat" else ("off", "auto")
    return (on if value else off) if isinstance(value, bool) else value


class DistributedTrainingConfig(Strict):
    """How to train: the configuration of `DistributedTrainer.fit`. Fields are set by keyword.

    Raises: ConfigError for an unknown field or an invalid value, on construction and on assignment.
    """

    epochs: Length[Count] = Field(default=10, ge=1)
    """Passes over the data."""
    steps_per_epoch: Numbers[Count | None] = Field(default=None, ge=1)
    """Number of steps in an epoch of a loader or stream; none: one pass over the data."""
    batch_size: Numbers[Count] = Field(default=64, ge=1)
    """Samples per replica per micro-step."""
    global_batch_size: Numbers[Count | None] = Field(default=None, ge=1)
    """Samples per optimizer step over all replicas and micro-steps. Not together with batch_size."""
    gradient_accumulation_steps: Numbers[int] = Field(default=1, ge=1, le=10**6)
    """Micro-steps whose gradients are accumulated for one optimizer step."""
    shuffle: Numbers[bool] = True
    """Use a new order of samples in each epoch, a pure function of seed and epoch."""
    seed: Numbers[int] = Field(default=42, ge=0, lt=2**32)
    """Determines the initial parameters, the order of samples, dropout and augmentation."""
    drop_last: Numbers[bool] = False
    """Skip the last batch if it is not full (loaders: batches with fewer samples than the first); otherwise
    it is padded, and the padding has zero weight."""
    validation_split: Numbers[float] = Field(default=0.0, ge=0, lt=1)
    """Fraction of the training data to validate on if none is given; loaders of others are not split."""
    num_workers: Speed[int] = Field(default=0, ge=0, le=1024)
    """Number of threads that read samples from datasets with `__getitem__`."""
    prefetch: Speed[int] = Field(default=2, ge=0, le=10_000)
    """Number of batches prepared in advance. A loader is read at least one batch ahead, so that its last step
    is known."""

    precision: Arrays[str] = "float32"
    """float32, bfloat16, float16, or a policy such as params=float32,compute=bfloat16,output=float32."""
    remat: Numbers[bool | Literal["none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable"]] = (
        "none"
    )
    """Activations that the backward pass recomputes: none, all (or true), or all except matrix products."""
    offload: Numbers[Literal["none", "optimizer"]] = "none"
    """optimizer: keep the optimizer state in host memory between steps."""
    max_grad_norm: Numbers[Amount | None] = Field(default=None, gt=0)
    """Clip the mean gradient to this global norm; none: no clipping."""
    on_nonfinite: Numbers[Literal["abort", "skip", "rollback"]] = "abort"
    """What all ranks do if a loss or gradient is not finite: stop, skip the step, or restore a checkpoint."""
    on_loss_spike: Numbers[Literal["ignore", "rollback"]] = "ignore"
    """rollback: after a loss spike, return to the checkpoint before it and continue with later samples."""
    loss_spike_factor: Numbers[Amount] = Field(default=2.0, gt=1)
    """A loss is high if it is at least this many times the median loss of the previous steps."""
    loss_spike_window: Numbers[int] = Field(default=100, ge=2, le=10**6)
    """Number of steps in that median; with fewer previous steps, no loss is high."""
    loss_spike_steps: Numbers[Count] = Field(default=3, ge=1)
    """Number of consecutive high losses that count as a spike."""
    max_rollbacks: Course[Count] = Field(default=3, ge=1)
    """Maximum number of rollbacks in one process; one more is an error."""
    sentinel_every_n_steps: Course[Count] = Field(default=500, ge=0)
    """Optimizer steps between comparisons of the replicas' parameters; saves compare them too. 0: never."""
    on_desync: Course[Literal["abort", "warn", "heal"]] = "abort"
    """What to do if replicas differ: stop with an error, warn, or copy the values of the majority to all."""
    sync_batchnorm: Numbers[bool] = False
    """Compute batch statistics over all replicas instead of for each replica."""

    init_from: Numbers[InitFrom] = InitFromConfig()
    trainable: Arrays[Patterns] = ()
    """Name patterns of the parameters to train, such as "head/*"; the others are frozen. Empty: all."""
    lora: Arrays[LoraConfig] = LoraConfig()

    lr_scaling: Numbers[Literal["none", "linear", "sqrt"]] = "none"
    """Scale the learning rate by global batch size / base_batch_size, or by its square root."""
    base_batch_size: Numbers[Count | None] = Field(default=None, ge=1)
    """The global batch size that the learning rate was chosen for; required by lr_scaling."""
    warmup_steps: Arrays[Count] = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly to its peak."""
    early_stopping_patience: Course[Count | None] = Field(default=None, ge=1)
    """Stop after this many evaluations without a better `monitor`; none: never."""
    monitor: Course[str] = "val_loss"
    """The metric for early stopping and the best checkpoint: its name with the prefix train_ or val_."""
    monitor_mode: Course[Literal["min", "max"] | None] = None
    """Which values of `monitor` are better; none: the metric's own mode (loss: min, accuracy: max)."""
    max_steps: Length[Count | None] = Field(default=None, ge=1)
    """Stop after this many optimizer steps, or after `epochs` if that is less; a second fit counts anew."""
    max_time: Course[Seconds | None] = Field(default=None, gt=0)
    """Save and stop after this time: a number of seconds, or a text such as 90s, 30m or 1h30m."""
    evaluate_every_n_epochs: Course[Count] = Field(default=1, ge=0)
    """Epochs between evaluations on the validation data; 0: no evaluations by epochs."""
    evaluate_every_n_steps: Course[Count] = Field(default=0, ge=0)
    """Optimizer steps between evaluations, in addition to those by epochs; 0: no evaluations by steps."""
    max_eval_batches: Course[Count | None] = Field(default=None, ge=1)
    """Maximum number of batches in an evaluation; none: all data. Loaders are evaluated in their own batches,
    streams in batches of 256 samples per process."""
    comm: Arrays[str] = "mean"
    """How gradients are reduced and parameters are updated: a strategy (mean, bucketed, fp16, bf16, int8,
    power_sgd, zero1, fsdp, local_sgd, diloco), or module:function."""
    comm_options: Arrays[Options] = {}
    """Options of the strategy, for example `bucket_size_mb: 25`."""
    reproducibility: Numbers[Literal["none", "exact"]] = "none"
    """exact: the same bits with any number of processes and devices of one kind; needs global_batch_size."""
    virtual_replicas: Numbers[int] = Field(default=8, ge=1, le=2**16)
    """Number of equal parts of the global batch in an exact run; at least the number of devices."""
    exact_threads: Numbers[int | None] = Field(default=None, ge=1, le=1024)
    """CPU threads per process of an exact run; they affect its bits. none: virtual_replicas."""
    exact: Course[Literal["refuse", "warn"]] = "refuse"
    """What to do if an exact run would resume with different bits (another machine, version or code)."""
    exact_digest_every_n_steps: Course[Count] = Field(default=100, ge=0)
    """Optimizer steps between digests of an exact run's state, for `cyxjax hash`; 0: none."""
    steps_in_flight: Course[int] = Field(default=8, ge=1, le=10_000)
    """Steps queued on the device before the host waits for the older half; at least two dispatches."""
    steps_per_dispatch: Numbers[Annotated[int, Field(ge=1, le=256)] | Literal["auto"]] = "auto"
    """Maximum steps per dispatch. auto: up to 16 and 2 * steps_in_flight for short steps on CPUs."""
    compile_cache: Speed[bool | str] = "auto"
    """Where compiled programs are cached for the next start: a folder, off, or auto (the user's ~/.cache)."""
    memory_pages: Speed[Literal["auto", "kept", "off"]] = "auto"
    """Memory pages on CPUs: kept between steps, off (this also undoes the launcher's setting), or auto."""

    checkpoint_dir: View[Here[str]] = "./checkpoints"
    """Folder of the checkpoints; in an experiment, a folder inside run_dir or an absolute path."""
    checkpoint_every_n_epochs: Course[Count] = Field(default=5, ge=0)
    """Epochs between checkpoints; 0: none by epochs. The end of the run is saved unless all three are 0."""
    checkpoint_every_n_steps: Course[Count] = Field(default=0, ge=0)
    """Optimizer steps between checkpoints; 0: none by steps."""
    checkpoint_every_n_minutes: Course[Amount] = Field(default=0.0, ge=0)
    """Minutes between checkpoints; 0: none by time."""
    checkpoint_async: Course[bool] = True
    """Write in the background from a copy in host memory; false: training waits until the file is written."""
    keep_last: View[Count] = Field(default=3, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: View[Count] = Field(default=1, ge=0)
    """Number of best checkpoints by `monitor` to keep in addition."""
    save_on_master_only: View[bool] = True
    """Rank 0 writes the checkpoints; other ranks write only their parts of the state. false is refused."""
    resume: Course[Literal["auto", "never", "must"]] = "never"
    """never: start over; auto: resume from the newest good checkpoint; must: fail if there is none."""

    verbose: View[bool] = True
    """Rank 0 prints progress."""
    log_every_n_batches: View[Count] = Field(default=10, ge=1)
    """Optimizer steps between metric records; a log prints the newest record every ten seconds."""

    if not TYPE_CHECKING:  # an editor and a type checker see the fields as keywords

        def __init__(self, **values: Any) -> None:
            self._fill(values, type(self).__name__)

    @classmethod
    def from_values(cls, values: dict[str, Any], source: Source) -> Self:
        """The configuration from plain `values`; errors name `source` (a text, or a function of the key)."""
        config = cls.__new__(cls)
        config._fill(values, source)
        return config

    def _fill(self, values: dict[str, Any], source: Source) -> None:
        values = {key: fspath(one) if isinstance(one, PathLike) else one for key, one in values.items()}
        try:
            Strict.__init__(self, **values)
        except ValidationError as err:
            raise ConfigError(explain(err, type(self), source)) from None
        # Not a field, like a cached property: two configurations from different sources can be equal.
        object.__setattr__(self, "_source", source)

    @field_validator("save_on_master_only")
    @classmethod
    def _only_rank_0_writes(cls, value: bool) -> bool:
        if not value:
            raise ValueError("rank 0 writes every checkpoint; expected true (or leave the key out)")
        return value

    @field_validator("precision")
    @classmethod
    def _known_precision(cls, text: str) -> str:
        text = _LIGHTNING.get(text, text)
        parts = text.split(",")
        if text not in _DTYPES and not all(_POLICY.fullmatch(part.strip()) for part in parts):
            raise ValueError(f"expected {', '.join(_DTYPES)}, or params=...,compute=...,output=... with them")
        return text

    _words = field_validator("remat", "compile_cache")(_named_switch)
    _pages = field_validator("memory_pages", mode="before")(_named_switch)

    @model_validator(mode="after")
    def _as_a_whole(self) -> "DistributedTrainingConfig":
        if self.global_batch_size is not None and "batch_size" in self.model_fields_set:
            raise ValueError(
                f"batch_size = {self.batch_size} and global_batch_size = {self.global_batch_size} are both "
                "given; set only one, the other follows from the number of replicas"
            )
        if self.lr_scaling != "none" and self.base_batch_size is None:
            raise ValueError(f"lr_scaling = {self.lr_scaling!r} needs base_batch_size")
        if self.reproducibility == "exact":
            wrong = next((text for off, text in not_exact(self) if off), None)
            if wrong is not None:
                raise ValueError(f"reproducibility = 'exact' {wrong}")
        return self

    @property
    def pool_threads(self) -> int | None:
        """CPU threads that each process must have; None: no fixed number."""
        if self.reproducibility == "none":
            return None
        return self.exact_threads or self.virtual_replicas

    @property
    def checkpoint_path(self) -> Path:
        """Folder of the checkpoints."""
        return self.run_folder.checkpoints if self.run_folder else Path(self.checkpoint_dir)

    @property
    def run_folder(self) -> RunFolder | None:
        """The folder of what a run records besides checkpoints; None: nothing else is recorded."""
        return None

    def resolved(self) -> dict[str, Any]:
        """Plain values for YAML or JSON that load again: of the two batch sizes, only the chosen one."""
        values = self.model_dump(mode="json")
        values.pop("batch_size" if self.global_batch_size is not None else "global_batch_size")
        return values


TrainingConfig = DistributedTrainingConfig
