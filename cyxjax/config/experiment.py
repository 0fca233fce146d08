"""The configuration in an experiment file: how to train, and what. Imports no jax, like `run`."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, field_validator

from cyxjax.config.effects import Arrays, Content, Course, Numbers, Speed, View
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.config.sections import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SinkName,
    WandbConfig,
)
from cyxjax.config.values import Count, Here, Named, NameOrNamed
from cyxjax.run_folder import RunFolder


class TrainConfig(DistributedTrainingConfig):
    """One experiment: how to train, and what."""

    run_dir: View[Here[str]] = "runs/train"
    """Folder of all results; a run with the same folder resumes. With a configuration file: `runs/` and its
    name; of several, the name of the last one."""
    checkpoint_dir: View[Here[str]] = "checkpoints"
    """Folder of the checkpoints: inside run_dir, or an absolute path."""
    mirror: View[str | None] = Field(default=None, pattern=r"^[a-z][a-z0-9+]*://\S(.*\S)?$")
    """s3://..., gs://..., file:///...: a copy of the run folder; a new machine can resume from it."""
    resume: Course[Literal["auto", "never", "must"]] = "auto"
    """auto: resume from the run folder's newest good checkpoint; must: fail if there is none."""
    cpu_devices: Speed[int | None] = Field(default=None, ge=1, le=1024)
    """Virtual devices on a machine without accelerators, divided among the processes; none: one for each."""
    model: Arrays[ModelConfig] = ModelConfig()
    data: Content[DataConfig] = DataConfig()
    loss: Arrays[NameOrNamed] = "auto"
    """cross_entropy, mse, l1, huber, ..., model (its own), module:function, or {name: x, options: ...}."""
    optimizer: Arrays[OptimizerConfig] = OptimizerConfig()
    schedule: Arrays[ScheduleConfig] = ScheduleConfig()
    metrics: Numbers[tuple[Named, ...]] = ()
    """Additional metrics: f1, auc, r2, perplexity, confusion_matrix, top_k, ..., or `module:attribute`."""
    callbacks: Arrays[tuple[Named, ...]] = ()
    """EMA, EarlyStopping, ReduceLROnPlateau, BestCheckpoint, module:attribute; or {name: x, options: ...}."""
    sinks: View[tuple[SinkName, ...]] = ("jsonl",)
    """Where metrics are written: jsonl, csv, tensorboard, wandb, trackio, mlflow, or module:attribute."""
    wandb: View[WandbConfig] = WandbConfig()
    report: Course[bool] = True
    """Write events.jsonl during the run and report.html at its end."""
    report_samples: Course[Count] = Field(default=1000, ge=0)
    """Number of test samples whose predicted classes the report shows; 0: none."""
    profile: View[str | None] = Field(default=None, pattern=r"^\d{1,12}:\d{1,12}$")
    """FIRST:STOP: trace steps FIRST to STOP - 1 of each rank into run_dir/profile, with a summary."""
    fast_dev_run: Course[bool] = False
    """Run two steps and two evaluation batches, to check that everything works; no checkpoint is kept."""

    @field_validator("checkpoint_dir")
    @classmethod
    def _inside(cls, folder: str) -> str:
        if ".." in Path(folder).parts:
            raise ValueError("expected a folder inside run_dir, or an absolute path; `..` is not allowed")
        return folder

    @field_validator("profile")
    @classmethod
    def _of_some_steps(cls, steps: str | None) -> str | None:
        if steps and not _steps(steps):
            raise ValueError("expected FIRST:STOP, with STOP after FIRST")
        return steps

    @property
    def profiled_steps(self) -> range:
        """The steps that are traced."""
        return _steps(self.profile or "0:0")

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(Path(self.run_dir), self.checkpoint_dir)

    def to_yaml(self) -> str:
        """The resolved configuration; `load_config(["--config", FILE])` of it gives the same value."""
        return yaml.safe_dump(self.resolved(), sort_keys=False, default_flow_style=None, width=110)


def _steps(text: str) -> range:
    """The steps of `FIRST:STOP`."""
    return range(*map(int, text.split(":")))
