"""Moments of a run on disk and back: what the trainer and its hooks ask of checkpoints, in one place."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core import portable
from cyxjax.core.step import TrainState
from cyxjax.core.strategy import Sync
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.train import moments
from cyxjax.train.loop import Moment

PyTree = Any


def checkpointer_for(config: DistributedTrainingConfig, is_writer: bool) -> Checkpointer:
    """The checkpoints of a run, kept as `config` says."""
    best: Any = "max" if config.monitor.endswith("accuracy") else "min"
    return open_checkpoints(
        config.checkpoint_path,
        is_writer,
        keep_last=config.keep_last,
        keep_best=config.keep_best,
        best=best,
    )


def open_checkpoints(folder: str | Path, is_writer: bool, **options: Any) -> Checkpointer:
    """The checkpoints in `folder`; every rank opens them, one writes."""
    return Checkpointer(folder, is_writer=is_writer, to_host=_gather_rows, **options)


def save_at(path: str | Path, is_writer: bool, moment: Moment, sync: Sync, meta: dict[str, Any]) -> None:
    """Puts `moment` on disk as the only step of the folder `path`. Raises: CheckpointError if it cannot."""
    with open_checkpoints(path, is_writer, keep_last=1, async_save=False, max_failures=1) as checkpointer:
        checkpointer.rewind(moment.position.step)  # an older run's later steps are not the newest now
        checkpointer.save(moment.position.step, to_stored(moment.state, sync), meta)


def to_stored(state: TrainState, sync: Sync) -> TrainState:
    """`state` in the form that fits any world size."""
    return portable.to_portable(state, sync, _gather_rows)


def load(
    checkpointer: Checkpointer, like: TrainState, sync: Sync, mesh: Mesh, step: int | None = None
) -> tuple[Moment, DistributedTrainingHistory, dict[str, Any]] | None:
    """(moment, history, meta) of the newest good step, or of `step`, shaped like `like`; None without one.

    Raises: CheckpointError for damage, and for the state of another model.
    """
    target, fit_rows = portable.stored_shapes(like, sync)
    restored = checkpointer.restore(target, step, adapt=fit_rows)
    if restored is None:
        return None
    state = portable.from_portable(restored.state, sync, mesh)
    return *moments.from_meta(restored.meta, state), restored.meta


def _gather_rows(leaf: jax.Array) -> np.ndarray:
    """All rows of a leaf spread over several processes; every process calls it."""
    return multihost_utils.process_allgather(leaf, tiled=True)
