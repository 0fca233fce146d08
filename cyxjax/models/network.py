"""What the networks of `get_model` share beside Flax's own."""

from typing import Any, Never, TypeVar

from flax import linen as nn

from cyxjax.errors import ConfigError

_Self = TypeVar("_Self", bound="Network")


class Network(nn.Module):
    """A linen module that torch's spelling leaves alone."""

    def to(self: _Self, device: Any) -> _Self:
        """The model itself: devices are the group's, and a wrapper or trainer refuses another one."""
        del device
        return self

    def parameters(self) -> Never:
        """A linen network holds no values. Raises: ConfigError that names what does."""
        raise ConfigError(
            f"{type(self).__name__} holds no parameters: a wrapper or a trainer does. "
            "HINT: ddp = cx.distributed.DistributedDataParallel(model), cx.AdamOptimizer(ddp, lr=0.001).",
            key="model",
        )
