"""A fit in a user's program that keeps a run folder: `fit(X, y, run_dir="runs/a", sinks=["csv"])`."""

from contextlib import nullcontext

from cyxjax.checkpoint.run_lock import RunLock
from cyxjax.config.experiment import TrainConfig
from cyxjax.observe.console import Console, build_console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.records import Sink, warn_if_unwritten
from cyxjax.observe.sinks import build_sinks, check_names
from cyxjax.train import reporting
from cyxjax.train.plan import Plan
from cyxjax.train.runs.mirrored import fetch, mirrored
from cyxjax.train.trainer import DistributedTrainer


def fit_into_folder(
    trainer: DistributedTrainer, plan: Plan, config: TrainConfig, console: Console | None
) -> DistributedTrainingHistory:
    """`trainer.fit_prepared` with the sinks, history and report of `config` in its run folder.

    Model and data are the program's: config.yaml is not written, and `cx.load_run` cannot make them again.
    """
    check_names(config.sinks)
    is_master, folder = trainer.is_master(), config.run_folder
    console = console or build_console(is_master, config.verbose)
    plan = plan._replace(settings=plan.settings._replace(experiment=None))

    def open_sink(step: int) -> Sink:
        return build_sinks(config.sinks, config.run_dir, is_master, config.resolved(), resume_step=step)

    fetch(config.mirror, folder, plan.group, resumes=config.resume != "never")
    copying = mirrored(config.mirror, folder, is_master=is_master, stopped=lambda: trainer.stopped_by_signal)
    with RunLock(folder.root) if is_master else nullcontext(), copying:
        try:
            return trainer.fit_prepared(plan, console=console, open_sink=open_sink)
        finally:
            if is_master:
                with warn_if_unwritten(folder.history, console.note):
                    trainer.history.save(folder.history)
                if config.report:
                    reporting.draw(folder, config.resolved(), TrainConfig().resolved(), console.note)
