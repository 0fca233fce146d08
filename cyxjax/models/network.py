"""What the networks of `get_model` share beside Flax's own."""

from typing import Any, TypeVar

from flax import linen as nn

_Self = TypeVar("_Self", bound="Network")


class Network(nn.Module):
    """A linen module that torch's spelling leaves alone."""

    def to(self: _Self, device: Any) -> _Self:
        """The model itself: devices are the group's, and a wrapper or trainer refuses another one."""
        del device
        return self
