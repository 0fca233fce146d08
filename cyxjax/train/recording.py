"""A fit that keeps a run folder: its lock and mirror while it trains, history and report at its end."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any

from cyxjax.checkpoint.mirror import Mirror
from cyxjax.checkpoint.run_lock import RunLock
from cyxjax.config.experiment import TrainConfig
from cyxjax.distributed.agreement import on_any_rank
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.launch.heartbeat import report_progress
from cyxjax.observe.console import Console, build_console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.records import Sink, warn_if_unwritten
from cyxjax.observe.sinks import build_sinks, check_names, warn_on_stderr
from cyxjax.train import reporting
from cyxjax.train.plan import Plan

OpenSink = Callable[[int], Sink]  # of the steps done before the fit


def fit_into_folder(
    trainer: Any, plan: Plan, config: TrainConfig, console: Console | None
) -> DistributedTrainingHistory:
    """`trainer.fit_prepared` with the sinks, history and report of `config` in its run folder.

    Model and data are the program's: config.yaml is not written, and `cx.load_run` cannot make them again.
    """
    check_names(config.sinks)
    console = console or build_console(trainer.is_master(), config.verbose)
    plan = plan._replace(settings=plan.settings._replace(experiment=None))
    fetch(config, plan.group)
    with recorded(trainer, config, console, lambda step: sinks_of(config, trainer, step)) as open_sink:
        return trainer.fit_prepared(plan, console=console, open_sink=open_sink)


def sinks_of(config: TrainConfig, trainer: Any, step: int) -> Sink:
    """The sinks that `config` names, of a run that begins at `step`."""
    values = config.resolved()
    return build_sinks(config.sinks, config.run_dir, trainer.is_master(), values, resume_step=step)


def fetch(config: TrainConfig, group: ProcessGroup) -> None:
    """Copies the newest good step of the run's mirror into its folder, if it is newer than those there; all
    ranks call it.

    Raises: ConfigError for a mirror that cannot be used or found; CheckpointError for one that cannot be
        read where the folder holds nothing to go on from.
    """
    if config.mirror is None:
        return
    if group.topology.is_master:
        mirror = Mirror(config.mirror, config.run_folder, warn_on_stderr)
        report_progress(-1, "checkpoint")
        resumes = config.resume != "never"
        warn_on_stderr(f"Looking for {'a run in' if resumes else 'the bucket of'} {config.mirror}")
        if resumes:
            mirror.fetch()
        else:
            mirror.check_bucket()
    on_any_rank(group, "the mirror")


@contextmanager
def recorded(trainer: Any, config: TrainConfig, console: Console, open_sink: OpenSink) -> Iterator[OpenSink]:
    """Locks the run folder and copies it to its mirror; at the end, also after an error, the sink is closed
    and history and report are written.

    Gives `open_sink` for the fit: one that is refused before it opens its sinks has changed nothing.
    """
    folder, is_master = config.run_folder, trainer.is_master()
    opened: list[Sink] = []
    with RunLock(folder.root) if is_master else nullcontext(), _mirrored(config, trainer):
        try:
            with ExitStack() as at_end:

                def open_and_close(step: int) -> Sink:
                    opened.append(at_end.enter_context(closing(open_sink(step))))
                    return opened[-1]

                yield open_and_close
        finally:
            if is_master and opened:
                with warn_if_unwritten(folder.history, console.note):
                    trainer.history.save(folder.history)
                if config.report:
                    reporting.draw(folder, config.resolved(), TrainConfig().resolved(), console.note)


@contextmanager
def _mirrored(config: TrainConfig, trainer: Any) -> Iterator[None]:
    """Copies the run folder in the background, and the rest at the end, which waits less after a signal or an
    error."""
    if config.mirror is None or not trainer.is_master():
        yield
        return
    mirror, is_whole = Mirror(config.mirror, config.run_folder, warn_on_stderr), False
    mirror.start()
    try:
        yield
        is_whole = not trainer.stopped_by_signal
    finally:
        mirror.end(not is_whole, lambda: report_progress(-1, "checkpoint"))
