"""Experiment trackers, as extras: TensorBoard event files, Weights & Biases, trackio, MLflow in a folder.

Each shows the numbers of a record as curves.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cyxjax.files import dotted, read_plain
from cyxjax.observe.records import Record, Sink, step_of, write_atomic
from cyxjax.plugins import extra
from cyxjax.redaction import redact

_MOST_PARAMS = 100  # per call
_LONGEST_PARAM = 500  # characters; accepted by MLflow servers of all versions


def _scalars(record: Record) -> dict[str, float]:
    return {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}


class TensorBoardSink(Sink):
    """Event files in `folder`, by step.

    Raises: ConfigError that says what to install if tensorboardX is missing.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        # purge_step hides what an interrupted run logged after the checkpoint this one starts from
        purge = None if resume_step is None else resume_step + 1
        # its file names have seconds: a part that starts within the same second would overwrite the file
        suffix = f".{time.time_ns()}"
        writer = extra("tensorboardX", "cyxjax[tensorboard]").SummaryWriter
        # a kill loses what is not flushed, by default two minutes
        self._writer = writer(str(folder), purge_step=purge, filename_suffix=suffix, flush_secs=1)

    def log(self, record: Record) -> None:
        for key, value in _scalars(record).items():
            self._writer.add_scalar(key, value, step_of(record))

    def close(self) -> None:
        self._writer.close()


class RunSink(Sink):
    """Feeds a run of trackio."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, record: Record) -> None:
        self._run.log(_scalars(record), step=step_of(record))

    def close(self) -> None:
        self._run.finish()


class WandbSink(RunSink):
    """Feeds a run of wandb. It drops what is logged at an earlier step than its newest, as after a rollback:
    such a record is logged at its next step, and "step" is a value of its own, for the x-axis of charts.
    """

    def log(self, record: Record) -> None:
        step, newest = step_of(record), self._run.step
        self._run.log(_scalars(record) | {"step": step}, step=step if step >= newest else newest + 1)


def wandb_sink(folder: Path, config: Mapping[str, Any], resume_step: int | None = None) -> WandbSink:
    """A Weights & Biases run in `folder`; offline unless `config["wandb"]["mode"]` says otherwise.

    The run's id is stored in `folder`/wandb_id.json, so that a resumed training continues the same run.
    Raises: ConfigError that says what to install if wandb is missing.
    """
    wandb = extra("wandb", "cyxjax[wandb]")
    options, path = dict(config.get("wandb") or {}), folder / "wandb_id.json"
    run = wandb.init(
        project=options.get("project") or "cyxjax",
        name=options.get("run_name") or folder.name,
        mode=options.get("mode") or "offline",
        dir=str(folder),
        id=_run_id(path, resume_step, lambda: secrets.token_hex(4)),
        resume="allow" if resume_step else None,
        config=dict(config),
        settings=wandb.Settings(
            init_timeout=options.get("init_timeout") or 120.0,
            console="off",
            silent=True,
            disable_git=True,
        ),
    )
    run.define_metric("*", step_metric="step")
    return WandbSink(run)


def trackio_sink(folder: Path, config: Mapping[str, Any], resume_step: int | None = None) -> RunSink:
    """A run of the project "cyxjax" in trackio's own folder (TRACKIO_DIR), where `trackio show` finds it.

    Its name, that of the run folder and four characters, is stored in `folder`/trackio_id.json: a resumed
    training continues the same run; repeated steps are logged twice, since trackio cannot remove any.
    Raises: ConfigError that says what to install if trackio is missing.
    """
    folder, trackio = folder.absolute(), extra("trackio", "cyxjax[trackio]")
    path = folder / "trackio_id.json"
    name = _run_id(path, resume_step, lambda: f"{folder.name}-{secrets.token_hex(2)}")
    shown = {key: redact(str(value)) for key, value in dotted(config)}
    run = trackio.init(project="cyxjax", name=name, config=shown, resume="allow", embed=False)
    return RunSink(run)


class MlflowSink(Sink):
    """A run in MLflow's local file store, `folder`/mlruns: needs neither a server nor a database.

    The run's id is stored in `folder`/mlflow_id.json, and a resumed training continues the same run; repeated
    steps keep their first values, since MLflow cannot remove any.
    Raises: ConfigError that says what to install if mlflow is missing.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any], resume_step: int | None = None) -> None:
        client = extra("mlflow.tracking", "cyxjax[mlflow]").MlflowClient
        with suppress(ImportError):  # older versions lack this variable; newer ones refuse files without it
            from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE

            MLFLOW_ALLOW_FILE_STORE.set(True)
        folder = Path(folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._client = client(tracking_uri=(folder / "mlruns").as_uri())
        self._id = _run_id(folder / "mlflow_id.json", resume_step, lambda: self._begun(folder, config))
        self._last = self._last_steps()
        self._client.update_run(self._id, status="RUNNING")

    def log(self, record: Record) -> None:
        from mlflow.entities import Metric

        step, at_ms = step_of(record), int(1000 * time.time())
        new = {k: v for k, v in _scalars(record).items() if step > self._last.get(k, -1)}
        self._client.log_batch(self._id, metrics=[Metric(k, float(v), at_ms, step) for k, v in new.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _begun(self, folder: Path, config: Mapping[str, Any]) -> str:
        """A new run, with the configuration as its parameters."""
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name("cyxjax")
        experiment = known.experiment_id if known else self._client.create_experiment("cyxjax")
        run_id = str(self._client.create_run(experiment, run_name=folder.name).info.run_id)
        params = [Param(key, redact(str(value))[:_LONGEST_PARAM]) for key, value in dotted(config)]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
        return run_id

    def _last_steps(self) -> dict[str, int]:
        """The newest step of each curve that the run already has."""
        names = self._client.get_run(self._id).data.metrics
        return {n: max(m.step for m in self._client.get_metric_history(self._id, n)) for n in names}


def _run_id(path: Path, resume_step: int | None, begin: Callable[[], str]) -> str:
    """The id in the file at `path` if training is resumed, else that of a new run, which is stored there."""
    if resume_step and path.exists():
        return str(json.loads(read_plain(path))["id"])
    run_id = begin()
    write_atomic(path, json.dumps({"id": run_id}) + "\n")
    return run_id
