"""A loss that knows what it was computed from, so that `loss.backward()` can be written."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from cyxjax.errors import GroupError


class NoWayBackError(GroupError, AttributeError):
    """`.backward()` of an array: it has none, as `hasattr` says, and the message says what has."""


class _NoBackward:
    """Stands for the attribute that jax's arrays lack, to say more than its name."""

    def __get__(self, array: Any, kind: Any = None) -> Any:
        raise NoWayBackError(
            "an array has no way back: the loss is of another output than the last forward pass gave (an "
            "earlier pass, out / T), a sum with something else, or of a pass after eval(). HINT: put it all "
            "into one function of one pass in train() mode, ddp.loss(lambda out, y: ..., outputs, targets)"
            ".backward()."
        )


def explain_backward(array: jax.Array) -> None:
    """From now on arrays of this kind say what to write in place of `.backward()`; nothing else changes."""
    kind: Any = type(array)
    if "backward" not in vars(kind):
        kind.backward = _NoBackward()


@dataclass(frozen=True)
class BoundLoss:
    """The mean loss of this process's batch and the way back from it; made by `ddp.loss(...)`.

    It can be scaled (`loss / accumulation_steps`), read (`loss.item()`, `float(loss)`) and pulled back once.
    """

    value: jax.Array
    """float32 (), before scaling."""
    output_grad: Any
    """Gradient of `value` with respect to the model's output."""
    ddp: Any
    output: Any = None
    """What `value` was computed from."""
    scale: float = 1.0

    def backward(self) -> None:
        """Adds the gradients of this loss to what `ddp` has gathered since its last update."""
        self.ddp.backward(self.output_grad, self.scale, self.output)

    def item(self) -> float:
        """The number; waits for it to be computed."""
        return float(self.value) * self.scale

    __float__ = item

    def __mul__(self, factor: float) -> "BoundLoss":
        return replace(self, scale=self.scale * float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "BoundLoss":
        return replace(self, scale=self.scale / float(divisor))

    def __jax_array__(self) -> jax.Array:
        return self.value * self.scale

    def __add__(self, other: Any) -> jax.Array:
        """A number, which has no way back."""
        return self.__jax_array__() + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> jax.Array:
        return self.__jax_array__() - other

    def __rsub__(self, other: Any) -> jax.Array:
        return other - self.__jax_array__()

    def __lt__(self, other: Any) -> bool:
        return self.item() < float(other)

    def __gt__(self, other: Any) -> bool:
        return self.item() > float(other)

    def __le__(self, other: Any) -> bool:
        return self.item() <= float(other)

    def __ge__(self, other: Any) -> bool:
        return self.item() >= float(other)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __str__(self) -> str:
        return str(self.item())
