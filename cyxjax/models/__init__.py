"""Ready-made networks, layers to build others from, and models as files.

Names are loaded on first use (PEP 562): asking for a network's name or a Config must not start jax.
"""

from importlib import import_module
from typing import Any

_FILES = {  # file -> the public names it holds
    "activations": "ELUModule GELUModule LeakyReLUModule LogSoftmaxModule ReLUModule SiLUModule "
    "SigmoidModule SoftmaxModule TanhModule",
    "config": "Config",
    "convolution": "AvgPool2DModule Conv2DModule GlobalAvgPoolModule MaxPool2DModule",
    "files": "SavedModel load_model save_model",
    "layers": "DropoutModule EmbeddingModule FlattenModule Layer LinearModule ReshapeModule layer",
    "norms": "BatchNormModule GroupNormModule LayerNormModule",
    "registry": "Builder build_model get_model model_names register",
    "summary": "count_params",
    "sequential": "SequentialModel",
}
_HOME = {name: file for file, names in _FILES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"cyxjax.models.{_HOME[name]}"), name)
    raise AttributeError(f"module 'cyxjax.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
