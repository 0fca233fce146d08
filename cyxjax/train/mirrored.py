"""A run whose folder is copied to an object store while it trains, and taken from there where it starts."""

from collections.abc import Iterator
from contextlib import contextmanager

from cyxjax.checkpoint.mirror import Mirror
from cyxjax.config.experiment import TrainConfig
from cyxjax.launch.heartbeat import report_progress
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train import resume
from cyxjax.train.trainer import DistributedTrainer


def fetch(config: TrainConfig, is_master: bool) -> None:
    """Brings the newest good step of the mirror, if it is newer than those here, for all ranks to see.

    Raises: ConfigError for a mirror that cannot be used; CheckpointError for one that cannot be read where
        nothing is here to go on from.
    """
    if config.mirror is None:
        return
    if is_master:
        mirror = Mirror(config.mirror, config.run_folder, warn_on_stderr)
        report_progress(-1, "checkpoint")
        if config.resume != "never":
            mirror.fetch()
    resume.meet("the mirror")


@contextmanager
def mirrored(config: TrainConfig, trainer: DistributedTrainer) -> Iterator[None]:
    """Copies the run folder in the background while the block runs, and what is left at its end."""
    if config.mirror is None or not trainer.is_master():
        yield
        return
    mirror, is_whole = Mirror(config.mirror, config.run_folder, warn_on_stderr), False
    mirror.start()
    try:
        yield
        is_whole = not trainer.stopped_by_signal
    finally:
        mirror.end(not is_whole, lambda: report_progress(trainer.history.num_steps, "checkpoint"))
