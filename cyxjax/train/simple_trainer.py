"""`Trainer`: a short interface to `DistributedTrainer`: a model, an optimizer, two loaders, epochs."""

from collections.abc import Iterable
from typing import Any

import optax

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.trees import PyTree
from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.train.hooks.callbacks import BestCheckpoint
from cyxjax.train.hooks.hook import Hook
from cyxjax.train.trainer import DistributedTrainer


class Trainer:
    """Trains `model` on all devices of its group; the best epoch's checkpoint is kept at `best_model`.

    model: as in `DistributedTrainer`, also wrapped in DistributedDataParallel or DataParallel; the trainer
    then averages gradients as `config.comm` says. loss_fn: None for a model that returns {"loss": ...}.
    device: None, or the device that the caller expects: "cpu", "cuda", "cuda:1", a number; the group has
    already chosen the devices, so only the kind is checked.
    config: other settings, such as `max_grad_norm` or `precision`; a loader's batch size takes precedence.
    best_model: a path, or None for no checkpoint; best by `config.monitor`, so val_loss needs a val_loader.
    Raises: ConfigError for a kind of device this process does not train on.
    """

    def __init__(
        self,
        model: Any,
        optimizer: optax.GradientTransformation,
        device: Any = None,
        loss_fn: Any = None,
        *,
        config: DistributedTrainingConfig | None = None,
        callbacks: Iterable[Hook] = (),
        best_model: str | None = "best_model.pt",
    ):
        group = process_group.ensure()
        check_device(device, group)
        self._config = config or DistributedTrainingConfig(checkpoint_every_n_epochs=0)
        best = self._config.monitor, 0.0, self._config.monitor_mode
        kept = [BestCheckpoint(best_model, *best, if_measured=True)] if best_model else []
        inner = model.get_model() if hasattr(model, "get_model") else model
        self._trainer = DistributedTrainer(inner, loss_fn, optimizer, callbacks=[*callbacks, *kept])

    def train(
        self, train_loader: Any, val_loader: Any = None, epochs: int | None = None
    ) -> DistributedTrainingHistory:
        """Trains for `epochs` (default: as configured) and returns the history; a second call continues.

        Loaders: `cx.data.DataLoader`, torch's, any iterable of batches; datasets and (X, y) pairs work too.
        """
        config = self._config.model_copy()
        config.epochs = config.epochs if epochs is None else epochs
        return self._trainer.fit(train_loader, val_loader, config)

    def evaluate(self, X: Any, y: Any = None) -> tuple[float, float]:
        """(loss, accuracy) over arrays, a dataset or a loader, each sample counted once."""
        return self._trainer.evaluate(X, y)

    def predict(self, X: PyTree) -> PyTree:
        """The model's outputs for X, on every rank."""
        return self._trainer.predict(X)

    def save_checkpoint(self, path: str = "best_model.pt") -> None:
        """Saves everything that the next step depends on to the folder `path`.

        Rank 0 may call it alone, unless `config.comm` keeps a part of the state on each (zero1, fsdp, ...).
        """
        self._trainer.save_checkpoint(path)

    def load_checkpoint(self, path: str = "best_model.pt") -> None:
        """Restores the checkpoint in `path`. All ranks must call it."""
        self._trainer.load_checkpoint(path)

    def enable_gradient_checkpointing(self, policy: str = "full") -> None:
        """Recomputes activations in the backward pass from the next `train` on: less memory, more time."""
        self._trainer.enable_gradient_checkpointing(policy)

    def get_model(self) -> Any:
        """The model, without its wrapper."""
        return self._trainer.get_model()

    @property
    def params(self) -> PyTree:
        """The trained parameters as host arrays."""
        return self._trainer.params

    @property
    def history(self) -> DistributedTrainingHistory:
        """The history of the last `train`, or of the checkpoint that was loaded."""
        return self._trainer.history

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self._trainer.is_master()

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._trainer.get_world_size() > 1


def check_device(device: Any, group: process_group.ProcessGroup) -> None:
    """Checks that `device` ("cuda", "cuda:1", "cpu") is of the kind that this process trains on.

    The group has already chosen where model and data are put; a number, None and "auto" always match.
    Raises: ConfigError naming the devices of this process.
    """
    here = group.mesh.local_devices
    kind = {"cuda": "gpu", "gpu": "gpu", "cpu": "cpu"}.get(str(device).partition(":")[0])
    if kind not in (None, here[0].platform):
        raise ConfigError(
            f"device={device!r} does not match: rank {group.topology.rank} trains on "
            f"{', '.join(f'{d.platform}:{d.id}' for d in here)}, where model and data are put. HINT: leave "
            "device out; to choose, set DISTRIBUTED_BACKEND (cpu or nccl) or CUDA_VISIBLE_DEVICES."
        )
