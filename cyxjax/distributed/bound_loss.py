"""A loss with the gradient of the output it was computed from, so that `loss.backward()` works."""

from dataclasses import dataclass, replace
from typing import Any

import jax


@dataclass(frozen=True)
class BoundLoss:
    """The mean loss of this process's batch with `.backward()`; made by `ddp.loss(...)`.

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
        """An array without `backward`."""
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
