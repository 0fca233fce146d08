"""A fit that keeps a run folder: its lock and mirror while it trains, history and report at its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

from cyxjax.checkpoint.run_lock import RunLock
from cyxjax.config.experiment import TrainConfig
from cyxjax.observe.console import Console, build_console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.records import Sink, warn_if_unwritten
from cyxjax.observe.sinks import build_sinks, check_names
from cyxjax.train import reporting
from cyxjax.train.plan import Plan
from cyxjax.train.runs.mirrored import fetch, mirrored

OpenSink = Callable[[int], Sink]  # of the steps done before the fit


class Trains(Protocol):
    """What a recording needs of a trainer."""

    @property
    def history(self) -> DistributedTrainingHistory: ...
    @property
    def stopped_by_signal(self) -> bool: ...
    def is_master(self) -> bool: ...
    def fit_prepared(
        self, plan: Plan, *, console: Console | None, open_sink: OpenSink
    ) -> DistributedTrainingHistory: ...


def fit_into_folder(
    trainer: Trains, plan: Plan, config: TrainConfig, console: Console | None
) -> DistributedTrainingHistory:
    """`trainer.fit_prepared` with the sinks, history and report of `config` in its run folder.

    Model and data are the program's: config.yaml is not written, and `cx.load_run` cannot make them again.
    """
    check_names(config.sinks)
    is_master = trainer.is_master()
    console = console or build_console(is_master, config.verbose)
    plan = plan._replace(settings=plan.settings._replace(experiment=None))

    def open_sink(step: int) -> Sink:
        return build_sinks(config.sinks, config.run_dir, is_master, config.resolved(), resume_step=step)

    fetch(config.mirror, config.run_folder, plan.group, resumes=config.resume != "never")
    with recorded(trainer, config, console, open_sink) as opened:
        return trainer.fit_prepared(plan, console=console, open_sink=opened)


@contextmanager
def recorded(
    trainer: Trains, config: TrainConfig, console: Console, open_sink: OpenSink
) -> Iterator[OpenSink]:
    """Locks the run folder and copies it to its mirror; at the end, also after an error, history and report
    are written. `open_sink` for the fit: one that is refused before it opens its sinks has changed nothing.
    """
    folder, is_master = config.run_folder, trainer.is_master()
    begun = False

    def opened(step: int) -> Sink:
        nonlocal begun
        begun = True
        return open_sink(step)

    copying = mirrored(config.mirror, folder, is_master=is_master, stopped=lambda: trainer.stopped_by_signal)
    with RunLock(folder.root) if is_master else nullcontext(), copying:
        try:
            yield opened
        finally:
            if is_master and begun:
                with warn_if_unwritten(folder.history, console.note):
                    trainer.history.save(folder.history)
                if config.report:
                    reporting.draw(folder, config.resolved(), TrainConfig().resolved(), console.note)
