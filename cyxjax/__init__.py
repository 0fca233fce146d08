"""Data-parallel training on JAX: torch DDP's words, JAX's speed. `import cyxjax as cx`.

Names are loaded on first use (PEP 562), so that importing the package, its launcher or its command
line touches neither jax nor a device.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LOSSES = ("BCEWithLogitsLoss", "CrossEntropyLoss", "HuberLoss", "L1Loss", "MSELoss", "NLLLoss")
_OPTIMIZERS = (
    "AdaGradOptimizer",
    "AdamOptimizer",
    "AdamWOptimizer",
    "MomentumOptimizer",
    "RMSPropOptimizer",
    "SGDOptimizer",
)
_HOME = {  # public name -> the module it lives in
    "Config": "cyxjax.models.registry",
    "get_model": "cyxjax.models.registry",
    **dict.fromkeys(_LOSSES, "cyxjax.core.losses"),
    **dict.fromkeys(_OPTIMIZERS, "cyxjax.train.optimizers"),
}
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
