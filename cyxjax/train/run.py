"""One fit: what its parts need to know, and its hooks in the order in which they are told of each moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.config.run import DistributedTrainingConfig, TrainConfig
from cyxjax.core.mesh import num_replicas
from cyxjax.observe.console import Console
from cyxjax.observe.history import DistributedTrainingHistory, latest
from cyxjax.observe.records import Sink
from cyxjax.train import resume, rollback
from cyxjax.train.build import Built, Recipe
from cyxjax.train.hooks import callbacks
from cyxjax.train.hooks.black_box import BlackBoxHook
from cyxjax.train.hooks.callbacks import EarlyStopping, RunParts
from cyxjax.train.hooks.goodput import GoodputHook
from cyxjax.train.hooks.ledger import FILE, LedgerHook
from cyxjax.train.hooks.nonfinite import TerminateOnNaN
from cyxjax.train.hooks.progress import HistoryHook, RecordHook
from cyxjax.train.hooks.saving import CheckpointHook, StopHook
from cyxjax.train.hooks.sentinel import SentinelHook
from cyxjax.train.loop import Hook, RunState
from cyxjax.train.signals import StopSignals


class Run(NamedTuple):
    """What the hooks of one fit need to know."""

    recipe: Recipe
    built: Built
    config: DistributedTrainingConfig
    mesh: Mesh
    history: DistributedTrainingHistory
    ledger: LedgerHook
    is_master: bool
    describe: Callable[[RunState], dict[str, Any]]  # what a checkpoint says beside its arrays
    save_at: Callable[[str, RunState], None]  # (path, moment) -> a checkpoint there; called on all ranks
    signals: StopSignals
    spikes: list[Hook]  # made once: what it has seen outlives a rollback
    checkpointer: Checkpointer
    sink: Sink
    console: Console

    @property
    def folder(self) -> Path | None:
        """Where this rank records the run; None where it records nothing."""
        return self.config.run_folder if self.is_master else None


def build_hooks(run: Run) -> list[Hook]:
    """New hooks, which begin with the state of `run`; the user's own among them begin anew."""
    config, history, rate = run.config, run.history, run.built.learning_rate
    saves = _saving(run)
    hooks: list[Hook] = [
        *_black_box(run),  # first: it writes before another hook ends the run
        HistoryHook(history, rate),  # before all that read the history
        RecordHook(run.console, run.sink, run.recipe.metrics, config.log_every_n_batches, rate),
        TerminateOnNaN(rollback.patience(config)),  # before what would take a NaN for a value
        *run.spikes,
        StopHook(history, run.signals.stop, config.max_time),
        *run.recipe.callbacks,  # the user's see what ours have seen
        *_early_stopping(config),
        *_sentinel(run, saves),  # before saving: what is saved has been compared
        run.ledger.begin(saves.wants_state, run.folder / FILE if run.folder else None),  # is part of a save
        saves,  # after all whose word is part of what is saved
        *_goodput(run),  # last: saves are part of where the time went
    ]
    callbacks.begin(hooks, RunParts(history, run.save_at))
    return hooks


def _black_box(run: Run) -> list[Hook]:
    """Only an experiment can be run again."""
    if run.folder is None or not isinstance(run.config, TrainConfig):
        return []
    replicas, left_out_too = num_replicas(run.mesh), not rollback.uses_float16(run.config)
    return [BlackBoxHook(run.config, run.ledger.tape, replicas, left_out_too)]


def _early_stopping(config: DistributedTrainingConfig) -> list[Hook]:
    patience = config.early_stopping_patience
    return [EarlyStopping(patience, config.monitor)] if patience else []


def _sentinel(run: Run, saves: Hook) -> list[Hook]:
    """None on one replica, which agrees with itself."""
    config = run.config
    if num_replicas(run.mesh) == 1 or not config.sentinel_every_n_steps:
        return []
    return [
        SentinelHook(
            run.built.sentinel,
            [device.process_index for device in run.mesh.devices.flat],
            every=config.sentinel_every_n_steps,
            policy=config.on_desync,
            saving=saves.wants_state,
            warn=run.console.note,
        )
    ]


def _saving(run: Run) -> CheckpointHook:
    config = run.config
    return CheckpointHook(
        run.checkpointer,
        run.describe,
        every_epochs=config.checkpoint_every_n_epochs,
        every_steps=config.checkpoint_every_n_steps,
        # Clocks differ between ranks: rank 0's alone asks, and all save.
        every_minutes=config.checkpoint_every_n_minutes if run.is_master else 0.0,
        metric=lambda: latest(run.history, config.monitor),
        requested=run.signals.take_save,
        portable=lambda state: resume.to_stored(state, run.built.sync),
    )


def _goodput(run: Run) -> list[Hook]:
    if run.folder is None:
        return []
    return [GoodputHook(run.folder, run.history, run.sink, run.console.note)]
