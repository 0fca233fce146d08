"""Data-parallel training on JAX: torch DDP's words, JAX's speed. `import cyxjax as cx`.

Names are loaded on first use (PEP 562), so that importing the package, its launcher or its command
line touches neither jax nor a device.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_FILES = {  # module -> the public names it holds
    "core.losses": "BCEWithLogitsLoss CrossEntropyLoss HuberLoss L1Loss MSELoss NLLLoss",
    "core.metrics": "Metrics",
    "data": "DataLoader load_dataset",
    "models": "AvgPool2DModule BatchNormModule Config Conv2DModule DropoutModule ELUModule EmbeddingModule "
    "FlattenModule GELUModule GlobalAvgPoolModule GroupNormModule LayerNormModule LeakyReLUModule "
    "LinearModule LogSoftmaxModule MaxPool2DModule ReLUModule ReshapeModule SequentialModel SiLUModule "
    "SigmoidModule SoftmaxModule TanhModule count_params get_model load_model model_names register "
    "save_model",
    "train.hooks.callbacks": "BestCheckpoint Callback EMA EarlyStopping ReduceLROnPlateau TerminateOnNaN",
    "train.optimizers": "AdaGradOptimizer AdamOptimizer AdamWOptimizer MomentumOptimizer RMSPropOptimizer "
    "SGDOptimizer",
    "train.simple_trainer": "Trainer",
}
_HOME = {name: f"cyxjax.{file}" for file, names in _FILES.items() for name in names.split()}
_ROOMS = ("amp", "data", "distributed", "errors", "launch", "models", "observe", "sync", "train")

__all__ = sorted([*_HOME, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _ROOMS:
        return import_module(f"cyxjax.{name}")
    raise AttributeError(f"module 'cyxjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
