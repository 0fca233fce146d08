"""Experiment trackers, as extras: TensorBoard event files and Weights & Biases."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyxjax.observe.records import Record, write_atomic


def _scalars(record: Record) -> dict[str, float]:
    return {key: value for key, value in record.items() if not isinstance(value, str) and key != "step"}


class TensorBoardSink:
    """Scalars as event files in `folder`, by step.

    Raises: ImportError, with what to install, when tensorboardX is missing.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ImportError(
                "tensorboardX is not installed. HINT: pip install 'cyxjax[tensorboard]'"
            ) from None
        # purge_step hides what an interrupted run logged after the checkpoint this one starts from
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def log(self, record: Record) -> None:
        for key, value in _scalars(record).items():
            self._writer.add_scalar(key, value, int(record.get("step", 0)))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run in `folder`; offline unless `config["wandb"]["mode"]` says otherwise.

    The run's id is kept in `folder`/wandb_id.json, so that a resumed training goes on in the same run.
    Raises: ImportError, with what to install, when wandb is missing.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any], resume_step: int | None = None) -> None:
        try:
            import wandb
        except ImportError:
            raise ImportError("wandb is not installed. HINT: pip install 'cyxjax[wandb]'") from None
        folder, options = Path(folder), dict(config.get("wandb") or {})
        folder.mkdir(parents=True, exist_ok=True)
        run_id = _run_id(folder / "wandb_id.json", go_on=resume_step is not None)
        self._run = wandb.init(
            project=options.get("project") or "cyxjax",
            name=options.get("run_name") or folder.name,
            mode=options.get("mode") or "offline",
            dir=str(folder),
            id=run_id,
            resume=None if resume_step is None else "allow",
            config=dict(config),
            settings=wandb.Settings(
                init_timeout=options.get("init_timeout") or 120.0,
                console="off",
                silent=True,
                disable_git=True,
            ),
        )

    def log(self, record: Record) -> None:
        self._run.log(_scalars(record), step=int(record.get("step", 0)))

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path, *, go_on: bool) -> str:
    if go_on and path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    run_id = secrets.token_hex(4)
    write_atomic(path, json.dumps({"id": run_id}) + "\n")
    return run_id
