"""Data-parallel training on JAX with the names of torch DDP. `import cyxjax as cx`.

Names are loaded on first use (PEP 562), so that importing the package, its launcher or its command
line touches neither jax nor a device.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_FILES = {  # module of cyxjax -> the public names it holds
    "core.objective.global_loss": "ContrastiveLoss GlobalLoss",
    "core.losses": "BCEWithLogitsLoss CrossEntropyLoss HuberLoss L1Loss MSELoss NLLLoss",
    "core.metrics": "Metrics",
    "core.objective.scores": "AUC BitsPerCharacter ConfusionMatrix F1 Perplexity R2 per_class top_k",
    "core.objective.task": "Task",
    "core.objective.terms": "Term",
    "core.statistics": "Statistic",
    "data": "DataLoader load_dataset",
    "models": "AvgPool2DModule BatchNormModule Config Conv2DModule DropoutModule ELUModule EmbeddingModule "
    "FlattenModule GELUModule GlobalAvgPoolModule GroupNormModule LayerNormModule LeakyReLUModule "
    "LinearModule LogSoftmaxModule MaxPool2DModule ReLUModule ReshapeModule SequentialModel SiLUModule "
    "SigmoidModule SoftmaxModule TanhModule count_params get_model load_model max_pool model_names "
    "register save_model",
    "train.hooks.bad_steps": "TerminateOnNaN",
    "train.hooks.callbacks": "BestCheckpoint Callback EMA EarlyStopping ReduceLROnPlateau",
    "train.start.optimizers": "AdaGradOptimizer AdamOptimizer AdamWOptimizer MomentumOptimizer "
    "RMSPropOptimizer SGDOptimizer",
    "train.start.optimizer_groups": "with_groups",
    "train.simple_trainer": "Trainer",
    "train.runs.run": "load_run",
    "train.trainer": "DistributedTrainer",
    "config.run": "TrainingConfig",
}
_ROOMS = ("amp", "data", "distributed", "errors", "launch", "models", "observe", "sync", "testing", "train")


def _lazy(
    package: str, files: Mapping[str, str], rooms: Collection[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """(`__all__`, `__getattr__`, `__dir__`) of a package whose public names are imported on first use.

    files: module of cyxjax -> the names it holds. rooms: modules of `package` that are public themselves.
    """
    home = {name: f"cyxjax.{file}" for file, names in files.items() for name in names.split()}
    public = sorted([*home, *rooms])

    def get(name: str) -> Any:
        if name in home:
            return getattr(import_module(home[name]), name)
        if name in rooms:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return public, get, lambda: sorted([*vars(sys.modules[package]), *public])


if TYPE_CHECKING:  # for editors and type checkers; a test holds this equal to the table above
    from cyxjax import amp as amp
    from cyxjax import data as data
    from cyxjax import distributed as distributed
    from cyxjax import errors as errors
    from cyxjax import launch as launch
    from cyxjax import models as models
    from cyxjax import observe as observe
    from cyxjax import sync as sync
    from cyxjax import testing as testing
    from cyxjax import train as train
    from cyxjax.config.run import TrainingConfig as TrainingConfig
    from cyxjax.core.losses import BCEWithLogitsLoss as BCEWithLogitsLoss
    from cyxjax.core.losses import CrossEntropyLoss as CrossEntropyLoss
    from cyxjax.core.losses import HuberLoss as HuberLoss
    from cyxjax.core.losses import L1Loss as L1Loss
    from cyxjax.core.losses import MSELoss as MSELoss
    from cyxjax.core.losses import NLLLoss as NLLLoss
    from cyxjax.core.metrics import Metrics as Metrics
    from cyxjax.core.objective.global_loss import ContrastiveLoss as ContrastiveLoss
    from cyxjax.core.objective.global_loss import GlobalLoss as GlobalLoss
    from cyxjax.core.objective.scores import AUC as AUC
    from cyxjax.core.objective.scores import F1 as F1
    from cyxjax.core.objective.scores import R2 as R2
    from cyxjax.core.objective.scores import BitsPerCharacter as BitsPerCharacter
    from cyxjax.core.objective.scores import ConfusionMatrix as ConfusionMatrix
    from cyxjax.core.objective.scores import Perplexity as Perplexity
    from cyxjax.core.objective.scores import per_class as per_class
    from cyxjax.core.objective.scores import top_k as top_k
    from cyxjax.core.objective.task import Task as Task
    from cyxjax.core.objective.terms import Term as Term
    from cyxjax.core.statistics import Statistic as Statistic
    from cyxjax.data import DataLoader as DataLoader
    from cyxjax.data import load_dataset as load_dataset
    from cyxjax.models import AvgPool2DModule as AvgPool2DModule
    from cyxjax.models import BatchNormModule as BatchNormModule
    from cyxjax.models import Config as Config
    from cyxjax.models import Conv2DModule as Conv2DModule
    from cyxjax.models import DropoutModule as DropoutModule
    from cyxjax.models import ELUModule as ELUModule
    from cyxjax.models import EmbeddingModule as EmbeddingModule
    from cyxjax.models import FlattenModule as FlattenModule
    from cyxjax.models import GELUModule as GELUModule
    from cyxjax.models import GlobalAvgPoolModule as GlobalAvgPoolModule
    from cyxjax.models import GroupNormModule as GroupNormModule
    from cyxjax.models import LayerNormModule as LayerNormModule
    from cyxjax.models import LeakyReLUModule as LeakyReLUModule
    from cyxjax.models import LinearModule as LinearModule
    from cyxjax.models import LogSoftmaxModule as LogSoftmaxModule
    from cyxjax.models import MaxPool2DModule as MaxPool2DModule
    from cyxjax.models import ReLUModule as ReLUModule
    from cyxjax.models import ReshapeModule as ReshapeModule
    from cyxjax.models import SequentialModel as SequentialModel
    from cyxjax.models import SigmoidModule as SigmoidModule
    from cyxjax.models import SiLUModule as SiLUModule
    from cyxjax.models import SoftmaxModule as SoftmaxModule
    from cyxjax.models import TanhModule as TanhModule
    from cyxjax.models import count_params as count_params
    from cyxjax.models import get_model as get_model
    from cyxjax.models import load_model as load_model
    from cyxjax.models import max_pool as max_pool
    from cyxjax.models import model_names as model_names
    from cyxjax.models import register as register
    from cyxjax.models import save_model as save_model
    from cyxjax.train.hooks.bad_steps import TerminateOnNaN as TerminateOnNaN
    from cyxjax.train.hooks.callbacks import EMA as EMA
    from cyxjax.train.hooks.callbacks import BestCheckpoint as BestCheckpoint
    from cyxjax.train.hooks.callbacks import Callback as Callback
    from cyxjax.train.hooks.callbacks import EarlyStopping as EarlyStopping
    from cyxjax.train.hooks.callbacks import ReduceLROnPlateau as ReduceLROnPlateau
    from cyxjax.train.runs.run import load_run as load_run
    from cyxjax.train.simple_trainer import Trainer as Trainer
    from cyxjax.train.start.optimizer_groups import with_groups as with_groups
    from cyxjax.train.start.optimizers import AdaGradOptimizer as AdaGradOptimizer
    from cyxjax.train.start.optimizers import AdamOptimizer as AdamOptimizer
    from cyxjax.train.start.optimizers import AdamWOptimizer as AdamWOptimizer
    from cyxjax.train.start.optimizers import MomentumOptimizer as MomentumOptimizer
    from cyxjax.train.start.optimizers import RMSPropOptimizer as RMSPropOptimizer
    from cyxjax.train.start.optimizers import SGDOptimizer as SGDOptimizer
    from cyxjax.train.trainer import DistributedTrainer as DistributedTrainer
else:
    __all__, __getattr__, __dir__ = _lazy(__name__, _FILES, _ROOMS)
