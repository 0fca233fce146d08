"""The hooks of one fit, in the order in which they are told of each moment."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.observe.console import Console
from cyxjax.observe.history import DistributedTrainingHistory, latest
from cyxjax.observe.records import Sink
from cyxjax.train import callbacks as called
from cyxjax.train import guards, rollback, vault
from cyxjax.train.build import Built, Recipe
from cyxjax.train.callbacks import EarlyStopping, RunParts
from cyxjax.train.hooks import CheckpointHook, HistoryHook, RecordHook, StopHook, TerminateOnNaN
from cyxjax.train.ledger_hook import LedgerHook
from cyxjax.train.loop import Hook, Moment
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
    describe: Callable[[Moment], dict[str, Any]]  # what a checkpoint says beside its arrays
    save_at: Callable[[str, Moment], None]  # (path, moment) -> a checkpoint there; called on all ranks
    signals: StopSignals
    spikes: list[Hook]  # made once: what it has seen outlives a rollback
    checkpointer: Checkpointer
    sink: Sink
    console: Console


def build_hooks(run: Run) -> list[Hook]:
    """New hooks, which begin with the state of `run`; the user's own among them begin anew."""
    config, history, rate = run.config, run.history, run.built.learning_rate
    hooks: list[Hook] = [
        HistoryHook(history, rate),
        RecordHook(run.console, run.sink, run.recipe.metrics, config.log_every_n_batches, rate),
        TerminateOnNaN(rollback.patience(config)),
        *run.spikes,
        StopHook(history, run.signals.stop, config.max_time),
        *run.recipe.callbacks,
    ]
    if config.early_stopping_patience:
        hooks.append(EarlyStopping(config.early_stopping_patience, config.monitor))
    called.begin(hooks, RunParts(history, run.save_at))
    # Last: what the others did with a moment is part of what is saved.
    hooks.append(_saving(run))
    folder = config.run_folder if run.is_master else None
    return guards.around(
        hooks,
        guards.Guards(run.ledger, folder, run.mesh, run.built, config, run.console, run.sink, history),
    )


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
        portable=lambda state: vault.to_stored(state, run.built.sync),
    )
