"""A trained model from a run folder: built from its configuration, with the values of a checkpoint."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cyxjax.checkpoint import exporting
from cyxjax.checkpoint.arrays import Entry
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.yaml_file import read_yaml
from cyxjax.core.trees import PyTree, named_leaves
from cyxjax.data.splits import DatasetInfo, Splits
from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError
from cyxjax.files import read_plain, write_whole
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.comparison import changed_data
from cyxjax.train.experiment import data_of, stored_info, trainer_of
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.fingerprints import data_of as data_of_fit
from cyxjax.train.runs.exported import write_program
from cyxjax.train.trainer import DistributedTrainer
from cyxjax.weights.match import exported


@dataclass(frozen=True)
class StoredRun:
    """A stored run, ready to predict, evaluate and continue training."""

    config: TrainConfig
    info: DatasetInfo  # facts of the data that the model was made with
    trainer: DistributedTrainer
    """In the state of the loaded step; `trainer.fit` continues from that step."""
    meta: Mapping[str, Any]  # of the loaded checkpoint, on rank 0

    @property
    def step(self) -> int:
        """Optimizer steps that the parameters have seen."""
        return self.trainer.run_state.position.step

    @property
    def model(self) -> Any:
        """The model that the configuration names; linen modules are called with `params`."""
        return self.trainer.get_model()

    @property
    def params(self) -> PyTree:
        """The trained parameters, host arrays."""
        return self.trainer.params

    @property
    def forward(self) -> Callable[[PyTree], PyTree]:
        """The trained model in evaluation mode as a pure function, inputs -> outputs."""
        params, model_state = self.trainer.values
        apply, key = self.trainer.program.fns.apply, jax.random.key(0)  # evaluation draws nothing
        return lambda inputs: apply(params, model_state, inputs, key, False)[0]

    @cached_property
    def data(self) -> Splits:
        """The run's own samples, read again; a warning names those that differ from the training run's.

        Raises: ConfigError, DataError if they no longer exist.
        """
        found = data_of(self.config)
        if self.trainer.is_master():
            now = data_of_fit(FitData(found.train, found.val, True))
            for line in changed_data(self.meta, now):
                warn_on_stderr(f"WARNING: {line}.")
        return found

    def predict(self, X: Any, *, batch_size: int | None = None) -> PyTree:
        """The model's outputs in evaluation mode; for X, see `DistributedTrainer.predict`."""
        return self.trainer.predict(X, batch_size=batch_size)

    def evaluate(
        self, X: Any = None, y: Any = None, *, part: str = "test", batch_size: int | None = None
    ) -> dict[str, Any]:
        """All metrics by name over (X, y), a dataset or a loader; over the run's own `part` if X is None."""
        X = getattr(self.data, part) if X is None else X
        return self.trainer.evaluate_metrics(X, y, batch_size=batch_size)


def load_run(path: str | Path, step: int | None = None) -> StoredRun:
    """The run in the folder `path` at its newest good checkpoint, or at `step`.

    Only the folder is needed, wherever it is now: the data are read only when they are used. Joins the
    process group of the environment, as every trainer does; all ranks must call it.
    Raises: ConfigError for a folder that is not a run folder; CheckpointError if no checkpoint is good.
    """
    config = stored_config(Path(path))
    process_group.ensure()
    info = stored_info(config)
    trainer = trainer_of(config, info)
    trainer.load_checkpoint(str(config.checkpoint_path), step)
    loaded = step_folder(config.checkpoint_path, trainer.run_state.position.step)
    return StoredRun(config, info, trainer, read_manifest(loaded).meta if trainer.is_master() else {})


def stored_config(root: Path) -> TrainConfig:
    """The configuration stored in a run folder, with the folder's current path. Raises: ConfigError."""
    file = root / TrainConfig().run_folder.config.name
    if not file.is_file():
        what = "no config.yaml in it" if root.is_dir() else "no such folder"
        raise ConfigError(
            f"{root}: {what}. HINT: name the run folder of `cyxjax train`; for what fit saved without "
            "one, call trainer.load_checkpoint(path)."
        )
    return TrainConfig.from_values(read_yaml(str(file)) | {"run_dir": str(root)}, str(file))


def to_safetensors(run: StoredRun, path: Path) -> str:
    """Writes parameters and model state, as evaluation sees them, with configuration and data in the header.

    Rank 0 writes. Returns a short description. Raises: CheckpointError if it cannot be written.
    """
    arrays = _arrays(run)
    about = {"cyxjax_step": str(run.step), "cyxjax_config": run.config.to_yaml()}
    about |= {"cyxjax_data": run.info.to_json()}
    if run.trainer.is_master():
        exporting.to_safetensors(path, {name: Entry.of(array) for name, array in arrays.items()}, about)
    return _size(arrays)


def to_hf(run: StoredRun, folder: Path) -> str:
    """Writes model.safetensors and config.json into the new `folder`, in Hugging Face's layout.

    Names and layouts are those that `init_from` with the run's own map reads: its rules reversed, or torch's.
    Rank 0 writes. Returns a short description. Raises: ConfigError, CheckpointError.
    """
    arrays = exported(_arrays(run), run.config.init_from.map)
    if run.trainer.is_master():
        folder.mkdir()
        entries = {name: Entry.of(array) for name, array in arrays.items()}
        exporting.to_safetensors(folder / "model.safetensors", entries, {"format": "pt"})
        write_whole(folder / "config.json", json.dumps(_hf_config(run), indent=2) + "\n")
    return _size(arrays)


def _hf_config(run: StoredRun) -> dict[str, Any]:
    """The config.json that `init_from.path` came with, or a new one; with the model's name and options."""
    names, init_from = run.info.class_names, run.config.init_from
    found: dict[str, Any] = {"architectures": [type(run.model).__name__], "model_type": "cyxjax"}
    if names:
        found["id2label"] = dict(enumerate(names))
    before = Path(init_from.path or "", "config.json")
    if init_from.path and before.is_file():
        found |= json.loads(read_plain(before))
    model = {"name": run.config.model.name, "options": run.config.model.options}
    return found | {"cyxjax": {"step": run.step, "model": model, "init_from_map": init_from.map}}


def _arrays(run: StoredRun) -> dict[str, np.ndarray]:
    """Parameters and model state by name, as evaluation sees them."""
    params, model_state = run.trainer.values
    trees = {"params": params, "model_state": model_state}
    return {name: np.asarray(leaf) for name, leaf in named_leaves(trees)}


def _size(arrays: Mapping[str, np.ndarray]) -> str:
    return f"{len(arrays)} arrays, {sum(a.nbytes for a in arrays.values()) / 1e6:.2f} MB"


def to_program(
    run: StoredRun, path: Path, form: str, batch_size: int | None, platforms: Sequence[str]
) -> str:
    """Writes the forward pass with its parameters as "stablehlo" or "onnx"; see `write_program`."""
    few = jax.tree.map(_two_of, run.trainer.plan.inputs)
    return write_program(path, form, run.forward, few, batch_size=batch_size, platforms=platforms)


def _two_of(like: np.ndarray) -> np.ndarray:
    """Two made-up rows: random numbers, because zeros would hide half of a program; or token 0."""
    shape = (2, *like.shape[1:])
    drawn = np.random.default_rng(0).normal(size=shape) if like.dtype.kind == "f" else np.zeros(shape)
    return drawn.astype(like.dtype)
